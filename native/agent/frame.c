/* Decoding of frames and fields. Nothing here touches a descriptor, so that all of it can be fuzzed. */
#include "frame.h"

static uint32_t load32(const uint8_t *at) {
        return (uint32_t) at[0] | (uint32_t) at[1] << 8 | (uint32_t) at[2] << 16 | (uint32_t) at[3] << 24;
}

static void store32(uint8_t *at, uint32_t value) {
        for (int i = 0; i < 4; i++)
                at[i] = (uint8_t) (value >> 8 * i);
}

int header_decode(const uint8_t *at, struct header *ret) {
        uint32_t size = load32(at);

        if (size > FRAME_MAX || at[5] != 0 || at[6] != 0 || at[7] != 0)
                return -EBADMSG;
        *ret = (struct header) { .size = size, .type = at[4], .channel = load32(at + 8) };
        return 0;
}

void header_encode(uint8_t *at, uint8_t type, uint32_t channel, uint32_t size) {
        store32(at, size);
        store32(at + 4, type);
        store32(at + 8, channel);
}

int field_next(struct span *rest, uint8_t *ret_tag, struct span *ret_value) {
        if (rest->size == 0)
                return 0;
        if (rest->size < 5)
                return -EBADMSG;
        uint32_t size = load32(rest->data + 1);
        if (size > rest->size - 5)
                return -EBADMSG;
        *ret_tag = rest->data[0];
        *ret_value = (struct span) { rest->data + 5, size };
        rest->data += 5 + (size_t) size;
        rest->size -= 5 + (size_t) size;
        return 1;
}

static bool tag_is_bytes(uint8_t tag) {
        switch (tag) {
        case SECCOMP:
        case APPARMOR:
        case HOSTNAME:
        case ARG:
        case ENV:
        case CWD:
        case USER:
        case META:
        case CPUS:
        case DATA:
        case PATH:
        case PATH2:
        case ISSUE:
        case TEXT:
        case NAME:
        case SEED:
        case NET:
                return true;
        default:
                return false;
        }
}

static uint64_t load64(const uint8_t *at) {
        return (uint64_t) load32(at) | (uint64_t) load32(at + 4) << 32;
}

int args_decode(struct span payload, const uint8_t *allowed, struct args *ret) {
        struct span value;
        uint8_t tag;
        int r;

        memset(ret, 0, sizeof(*ret));
        while ((r = field_next(&payload, &tag, &value)) > 0) {
                if (tag == 0 || tag > TAG_MAX || !strchr((const char *) allowed, tag))
                        return -EBADMSG;
                if (ret->count[tag]++ > 0 && tag != ARG && tag != ENV && tag != NAME)
                        return -EBADMSG;
                if (tag_is_bytes(tag))
                        ret->bytes[tag] = value;
                else if (value.size == 8)
                        ret->number[tag] = load64(value.data);
                else
                        return -EBADMSG;
        }
        return r;
}

char *span_dup(struct span text, size_t max) {
        if (text.size > max || memchr(text.data, 0, text.size)) {
                errno = EINVAL;
                return NULL;
        }
        char *copy = malloc(text.size + 1);
        if (!copy)
                return NULL;
        memcpy(copy, text.data, text.size);
        copy[text.size] = 0;
        return copy;
}
