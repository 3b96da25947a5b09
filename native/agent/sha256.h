/* SHA-256 (FIPS 180-4), a piece at a time: what a command wrote and nobody kept can still be recognised. */
#pragma once

#include "util.h"

enum { SHA256_SIZE = 32, SHA256_BLOCK = 64 };

struct sha256 {
        uint32_t state[8];
        uint8_t waiting[SHA256_BLOCK]; /* the beginning of a block */
        uint64_t size;                 /* bytes so far */
};

void sha256_start(struct sha256 *sum);
void sha256_add(struct sha256 *sum, const uint8_t *data, size_t size);
/* The digest of what was added; more may be added afterwards. */
void sha256_digest(const struct sha256 *sum, uint8_t ret[SHA256_SIZE]);
