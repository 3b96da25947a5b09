#include "pack.h"

#include <stdio.h>
#include <sys/xattr.h>

enum {
        LINKS_MAX = 1 << 16, /* later ones come as files of their own */
        LINK_BUCKETS = 4096,
        XATTR_LIST = 4096,
        XATTR_VALUE = 64 << 10,
};

struct linked {
        struct linked *next;
        dev_t device;
        ino_t inode;
        char path[];
};

static struct linked **bucket_of(struct links *links, const struct stat *st) {
        if (!links->buckets)
                links->buckets = calloc(LINK_BUCKETS, sizeof(*links->buckets));
        return links->buckets ? &links->buckets[(st->st_ino ^ st->st_dev) % LINK_BUCKETS] : NULL;
}

const char *link_seen(struct links *links, const struct stat *st, const char *path) {
        struct linked **bucket = st->st_nlink > 1 ? bucket_of(links, st) : NULL;

        if (!bucket)
                return NULL;
        for (const struct linked *l = *bucket; l; l = l->next)
                if (l->inode == st->st_ino && l->device == st->st_dev)
                        return l->path;
        struct linked *l = links->count < LINKS_MAX ? malloc(sizeof(*l) + strlen(path) + 1) : NULL;
        if (!l)
                return NULL;
        *l = (struct linked) { .next = *bucket, .device = st->st_dev, .inode = st->st_ino };
        strcpy(l->path, path);
        *bucket = l;
        links->count++;
        return NULL;
}

void links_free(struct links *links) {
        for (unsigned i = 0; links->buckets && i < LINK_BUCKETS; i++)
                while (links->buckets[i]) {
                        struct linked *l = links->buckets[i];
                        links->buckets[i] = l->next;
                        free(l);
                }
        free(links->buckets);
}

/* --- the head of a member ------------------------------------------------------------------------------------------- */

static uint8_t *head_reserve(struct head *head, size_t size) {
        if (head->size + size > head->room) {
                size_t room = head->room ? head->room : KIB(4);
                while (room < head->size + size)
                        room *= 2;
                uint8_t *grown = realloc(head->data, room);
                if (!grown)
                        return NULL;
                head->data = grown;
                head->room = room;
        }
        uint8_t *at = head->data + head->size;
        head->size += size;
        return at;
}

static int head_bytes(struct head *head, const void *data, size_t size) {
        uint8_t *at = head_reserve(head, size);

        if (!at)
                return -ENOMEM;
        memcpy(at, data, size);
        return 0;
}

static int head_pad(struct head *head) {
        size_t size = -head->size % TAR_BLOCK;
        uint8_t *at = head_reserve(head, size);

        if (!at)
                return -ENOMEM;
        memset(at, 0, size);
        return 0;
}

/* The length counts its own digits. */
static int pax_record(struct head *head, const char *key, const void *value, size_t size) {
        size_t body = strlen(key) + size + 3, total = body + 1;
        char text[400];

        for (size_t limit = 10; total >= limit; limit *= 10)
                total++;
        /* A digit more may have carried the sum over the next power of ten. */
        int n = snprintf(text, sizeof(text), "%zu %s=", total, key);
        if ((size_t) n + size + 1 != total) {
                total = (size_t) n + size + 1;
                n = snprintf(text, sizeof(text), "%zu %s=", total, key);
        }
        int r = head_bytes(head, text, (size_t) n);
        if (r == 0)
                r = head_bytes(head, value, size);
        return r < 0 ? r : head_bytes(head, "\n", 1);
}

static int pax_text(struct head *head, const char *key, const char *value) {
        return pax_record(head, key, value, strlen(value));
}

static int pax_integer(struct head *head, const char *key, int64_t value) {
        char text[32];

        snprintf(text, sizeof(text), "%lld", (long long) value);
        return pax_text(head, key, text);
}

static bool xattr_of_layer(const char *name) {
        static const char *const names[] = {
                "system.posix_acl_access", "system.posix_acl_default", "trusted.overlay.opaque", "trusted.overlay.metacopy",
                "trusted.overlay.redirect",
        };

        for (size_t i = 0; i < ELEMENTS(names); i++)
                if (strcmp(name, names[i]) == 0)
                        return true;
        return false;
}

static bool xattr_wanted(const char *name, bool layer) {
        return strncmp(name, "user.", 5) == 0 || strcmp(name, "security.capability") == 0 || (layer && xattr_of_layer(name));
}

static int pax_xattrs(struct head *head, int fd, bool layer) {
        char names[XATTR_LIST], key[300];
        ssize_t size = fd >= 0 ? flistxattr(fd, names, sizeof(names)) : 0;
        int r = 0;

        for (const char *name = names; r == 0 && size > 0 && name < names + size; name += strlen(name) + 1) {
                if (!xattr_wanted(name, layer))
                        continue;
                ssize_t value_size = fgetxattr(fd, name, NULL, 0);
                if (value_size < 0 || value_size > XATTR_VALUE)
                        continue;
                cleanup_free uint8_t *value = malloc((size_t) value_size + 1);
                if (!value)
                        return -ENOMEM;
                value_size = fgetxattr(fd, name, value, (size_t) value_size);
                if (value_size < 0)
                        continue;
                snprintf(key, sizeof(key), "SCHILY.xattr.%.255s", name);
                r = pax_record(head, key, value, (size_t) value_size);
        }
        return r;
}

static int pax_layer(struct head *head, const struct tar_header *h, const struct layer_member *layer) {
        bool before = h->mtime < 0 && layer->mtime_ns > 0;
        char text[48];

        /* As one decimal number: a second before 1970 and a half is -0.5. */
        int64_t seconds = before ? h->mtime + 1 : h->mtime;
        uint32_t ns = before ? 1000000000u - layer->mtime_ns : layer->mtime_ns;
        snprintf(text, sizeof(text), "%s%lld.%09u", before && seconds == 0 ? "-" : "", (long long) seconds, ns);
        int r = pax_text(head, "mtime", text);
        if (r == 0 && layer->names > 1)
                r = pax_integer(head, "SCHILY.nlink", (int64_t) layer->names);
        if (r == 0 && layer->map)
                r = pax_text(head, "GNU.sparse.map", layer->map);
        return r < 0 || !layer->map ? r : pax_integer(head, "GNU.sparse.size", (int64_t) layer->whole);
}

/* Whatever the old fields cannot hold. */
static int pax_records(struct head *head, const struct tar_header *h, const char *path, const char *link, int fd,
                       const struct layer_member *layer) {
        int r = 0;

        if (strlen(path) > 100)
                r = pax_text(head, "path", path);
        if (r == 0 && strlen(link) > 100)
                r = pax_text(head, "linkpath", link);
        if (r == 0 && h->size >> 33)
                r = pax_integer(head, "size", (int64_t) h->size);
        if (r == 0 && h->uid >> 21)
                r = pax_integer(head, "uid", h->uid);
        if (r == 0 && h->gid >> 21)
                r = pax_integer(head, "gid", h->gid);
        if (r == 0 && layer)
                r = pax_layer(head, h, layer);
        else if (r == 0 && (h->mtime < 0 || h->mtime >> 33))
                r = pax_integer(head, "mtime", h->mtime);
        return r < 0 ? r : pax_xattrs(head, fd, layer != NULL);
}

static int head_block(struct head *head, const struct tar_header *h) {
        uint8_t *at = head_reserve(head, TAR_BLOCK);

        if (!at)
                return -ENOMEM;
        tar_encode(h, at);
        return 0;
}

int head_build(struct head *head, struct tar_header *h, const char *path, const char *link, int fd,
               const struct layer_member *layer) {
        struct tar_header pax = { .name = "pax", .type = 'x', .mode = 0644 };

        head->size = head->at = 0;
        /* Room for the header in front, which must know the size of what comes behind it. */
        int r = head_block(head, &pax);
        if (r == 0)
                r = pax_records(head, h, path, link, fd, layer);
        if (r < 0)
                return r;
        pax.size = head->size - TAR_BLOCK;
        if (pax.size > 0) {
                tar_encode(&pax, head->data);
                if ((r = head_pad(head)) < 0)
                        return r;
        } else
                head->size = 0;
        snprintf(h->name, sizeof(h->name), "%.256s", path);
        snprintf(h->link, sizeof(h->link), "%.100s", link);
        return head_block(head, h);
}
