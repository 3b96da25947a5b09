/* The tar format: ustar, GNU long names, pax. Blocks and records to values and back; no descriptors here. */
#pragma once

#include "util.h"

enum { TAR_BLOCK = 512, TAR_PATH = 4096 };

struct tar_header {
        char name[257]; /* prefix and name joined */
        char link[101];
        char type;
        uint64_t size;
        mode_t mode;
        uint32_t uid, gid, dev_major, dev_minor;
        int64_t mtime;
};

/* 1 and a header, 0 for a block of zeros, -EBADMSG for anything else. */
int tar_decode(const uint8_t block[static TAR_BLOCK], struct tar_header *ret);
/* What does not fit its field is cut or 0; the caller says it in pax. */
void tar_encode(const struct tar_header *header, uint8_t ret_block[static TAR_BLOCK]);

/* One `length key=value\n` record. 1, 0 at the end, -EBADMSG. Keys are terminated in ret_key; too long ones are "". */
int pax_next(struct span *rest, char ret_key[static 300], struct span *ret_value);
/* A decimal number, whole or with a fraction that is cut off; false if it is none. */
bool pax_number(struct span text, int64_t *ret);

/* A relative path without empty, "." and ".." components; "" is the top. -EINVAL for "..", a NUL, or too long. */
int tar_path(struct span text, char ret_path[static TAR_PATH]);
