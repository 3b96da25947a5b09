#include "tar.h"

#include <stdio.h>

/* POSIX.1-1988 layout */
struct ustar {
        char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100], magic[6], version[2];
        char owner[32], group[32], major[8], minor[8], prefix[155], filler[12];
};
_Static_assert(sizeof(struct ustar) == TAR_BLOCK, "layout");

/* Octal with spaces or NULs around it; or, with the top bit set, big-endian binary (GNU, for what octal cannot hold). */
static bool number_decode(const char *field, size_t size, int64_t *ret) {
        const uint8_t *at = (const uint8_t *) field, *end = at + size;
        uint64_t value = 0;

        if (*at == 0x80 || *at == 0xff) {
                /* 0xff: a negative number in two's complement */
                value = *at == 0xff ? UINT64_MAX : 0;
                uint8_t sign = *at;
                for (at++; at < end; at++) {
                        if (end - at > 8 && *at != (sign == 0xff ? 0xff : 0))
                                return false;
                        value = value << 8 | *at;
                }
                *ret = (int64_t) value;
                return (*ret < 0) == (sign == 0xff);
        }
        while (at < end && *at == ' ')
                at++;
        for (; at < end && *at >= '0' && *at <= '7'; at++) {
                if (value >> 60)
                        return false;
                value = value << 3 | (uint64_t) (*at - '0');
        }
        *ret = (int64_t) value;
        return at == end || *at == ' ' || *at == 0;
}

static bool id_decode(const char *field, uint32_t *ret) {
        int64_t value;

        if (!number_decode(field, 8, &value) || value < 0 || value >= UINT32_MAX)
                return false;
        *ret = (uint32_t) value;
        return true;
}

static unsigned checksum(const uint8_t *block) {
        unsigned sum = 0;

        for (size_t i = 0; i < TAR_BLOCK; i++)
                sum += i >= offsetof(struct ustar, checksum) && i < offsetof(struct ustar, type) ? ' ' : block[i];
        return sum;
}

static bool is_zero(const uint8_t *block) {
        for (size_t i = 0; i < TAR_BLOCK; i++)
                if (block[i] != 0)
                        return false;
        return true;
}

int tar_decode(const uint8_t block[static TAR_BLOCK], struct tar_header *ret) {
        struct tar_header h = { 0 };
        struct ustar u;
        int64_t sum, mode, size;

        if (is_zero(block))
                return 0;
        memcpy(&u, block, sizeof(u));
        if (!number_decode(u.checksum, sizeof(u.checksum), &sum) || sum != checksum(block) ||
            !number_decode(u.mode, sizeof(u.mode), &mode) || !number_decode(u.size, sizeof(u.size), &size) || size < 0 ||
            !number_decode(u.mtime, sizeof(u.mtime), &h.mtime) || !id_decode(u.uid, &h.uid) || !id_decode(u.gid, &h.gid))
                return -EBADMSG;
        /* Old archives have garbage where ustar has these. */
        bool posix = memcmp(u.magic, "ustar", 6) == 0;
        if (posix && u.prefix[0])
                snprintf(h.name, sizeof(h.name), "%.155s/%.100s", u.prefix, u.name);
        else
                snprintf(h.name, sizeof(h.name), "%.100s", u.name);
        snprintf(h.link, sizeof(h.link), "%.100s", u.link);
        if ((u.type == '3' || u.type == '4') && (!id_decode(u.major, &h.dev_major) || !id_decode(u.minor, &h.dev_minor)))
                return -EBADMSG;
        h.type = u.type ? u.type : '0';
        h.size = (uint64_t) size;
        h.mode = (mode_t) mode & 07777;
        *ret = h;
        return 1;
}

static void number_encode(char *field, size_t size, uint64_t value) {
        if (value >> (3 * (size - 1)) == 0) {
                snprintf(field, size, "%0*llo", (int) size - 1, (unsigned long long) value);
                return;
        }
        for (size_t i = size - 1; i > 0; i--, value >>= 8)
                field[i] = (char) value;
        field[0] = (char) 0x80;
}

void tar_encode(const struct tar_header *h, uint8_t ret_block[static TAR_BLOCK]) {
        struct ustar u = { .type = h->type };
        char sum[8];

        memcpy(u.name, h->name, strnlen(h->name, sizeof(u.name)));
        memcpy(u.link, h->link, strnlen(h->link, sizeof(u.link)));
        number_encode(u.mode, sizeof(u.mode), h->mode & 07777);
        number_encode(u.uid, sizeof(u.uid), h->uid);
        number_encode(u.gid, sizeof(u.gid), h->gid);
        number_encode(u.size, sizeof(u.size), h->size);
        number_encode(u.mtime, sizeof(u.mtime), h->mtime > 0 ? (uint64_t) h->mtime : 0);
        memcpy(u.magic, "ustar", 6);
        memcpy(u.version, "00", 2);
        if (h->type == '3' || h->type == '4') {
                number_encode(u.major, sizeof(u.major), h->dev_major);
                number_encode(u.minor, sizeof(u.minor), h->dev_minor);
        }
        memcpy(ret_block, &u, sizeof(u));
        snprintf(sum, sizeof(sum), "%06o", checksum(ret_block));
        sum[7] = ' ';
        memcpy(ret_block + offsetof(struct ustar, checksum), sum, sizeof(sum));
}

int pax_next(struct span *rest, char ret_key[static 300], struct span *ret_value) {
        size_t size = 0, at = 0;

        if (rest->size == 0 || rest->data[0] == 0)
                return 0; /* some writers count the padding in */
        for (; at < rest->size && rest->data[at] >= '0' && rest->data[at] <= '9'; at++) {
                size = size * 10 + (size_t) (rest->data[at] - '0');
                if (size > rest->size)
                        return -EBADMSG;
        }
        if (at == 0 || at + 1 >= size || rest->data[at] != ' ' || rest->data[size - 1] != '\n')
                return -EBADMSG;
        const uint8_t *key = rest->data + at + 1;
        const uint8_t *equals = memchr(key, '=', size - at - 2);
        if (!equals)
                return -EBADMSG;
        size_t key_size = (size_t) (equals - key);
        ret_key[0] = 0;
        if (key_size < 300 && !memchr(key, 0, key_size)) {
                memcpy(ret_key, key, key_size);
                ret_key[key_size] = 0;
        }
        *ret_value = (struct span) { equals + 1, (size_t) (rest->data + size - 1 - (equals + 1)) };
        rest->data += size;
        rest->size -= size;
        return 1;
}

bool pax_number(struct span text, int64_t *ret) {
        bool negative = text.size > 0 && text.data[0] == '-';
        size_t i = negative ? 1 : 0, begin = i;
        int64_t value = 0;

        for (; i < text.size && text.data[i] >= '0' && text.data[i] <= '9'; i++) {
                if (value > INT64_MAX / 10 - 1)
                        return false;
                value = value * 10 + (text.data[i] - '0');
        }
        if (i == begin || (i < text.size && text.data[i] != '.'))
                return false;
        *ret = negative ? -value : value;
        return true;
}

int tar_path(struct span text, char ret_path[static TAR_PATH]) {
        size_t used = 0;

        if (text.size >= TAR_PATH || memchr(text.data, 0, text.size))
                return -EINVAL;
        for (size_t at = 0; at < text.size;) {
                const uint8_t *slash = memchr(text.data + at, '/', text.size - at);
                size_t end = slash ? (size_t) (slash - text.data) : text.size;
                const uint8_t *part = text.data + at;
                size_t size = end - at;

                at = end + 1;
                if (size == 0 || (size == 1 && part[0] == '.'))
                        continue;
                if (size == 2 && part[0] == '.' && part[1] == '.')
                        return -EINVAL;
                if (used > 0)
                        ret_path[used++] = '/';
                memcpy(ret_path + used, part, size);
                used += size;
        }
        ret_path[used] = 0;
        return 0;
}
