/* TREE_PUT: a tar stream comes in frames of any size; here it is cut into members, which unpack.c makes. */
#include <fcntl.h>

#include "channel.h"
#include "file.h"
#include "path.h"
#include "tree.h"
#include "unpack.h"

enum {
        LONG_NAME_MAX = 64 << 10,
        PAX_MAX = 4 << 20, /* xattrs of one member: 64 of 64 KiB */
};

/* What the bytes that come next are. */
enum expect { HEADER, DATA_BODY, SKIPPED, COLLECTED, AFTER_END };

struct put {
        struct channel channel;
        struct unpack unpack;
        enum expect expect;
        uint64_t left;    /* of the body */
        unsigned padding; /* behind it */
        uint8_t block[TAR_BLOCK];
        size_t in_block;
        /* L, K and x describe the next member; their bodies are kept until it comes. */
        char collecting;
        uint8_t *pax, *name, *link;
        size_t pax_size, name_size, link_size, collected;
        bool sparse;
};

/* Where the body of the current L, K or x goes. */
static uint8_t **put_slot(struct put *p, size_t **ret_size) {
        switch (p->collecting) {
        case 'L':
                *ret_size = &p->name_size;
                return &p->name;
        case 'K':
                *ret_size = &p->link_size;
                return &p->link;
        default:
                *ret_size = &p->pax_size;
                return &p->pax;
        }
}

static void forget_description(struct put *p) {
        pages_unmap(p->pax, p->pax_size);
        pages_unmap(p->name, p->name_size);
        pages_unmap(p->link, p->link_size);
        p->pax = p->name = p->link = NULL;
        p->pax_size = p->name_size = p->link_size = 0;
        p->sparse = false;
        member_clear(&p->unpack.current);
}

static void put_close(struct channel *channel) {
        struct put *p = CONTAINER_OF(channel, struct put, channel);

        forget_description(p);
        unpack_free(&p->unpack);
}

static int start_collecting(struct put *p, const struct tar_header *h) {
        size_t *size;

        p->collecting = h->type;
        uint8_t **slot = put_slot(p, &size);
        if (*slot || h->size == 0 || h->size > (h->type == 'x' ? PAX_MAX : LONG_NAME_MAX))
                return -EBADMSG;
        *slot = pages_map((size_t) h->size);
        if (!*slot)
                return -ENOMEM;
        *size = (size_t) h->size;
        p->collected = 0;
        p->expect = COLLECTED;
        return 0;
}

static void add_xattr(struct member *m, const char *name, struct span value) {
        if (m->n_xattrs == XATTRS_MAX || !(m->xattr_names[m->n_xattrs] = strdup(name)))
                return;
        m->xattr_values[m->n_xattrs++] = value;
}

static bool set_id(struct span value, uint32_t *ret) {
        int64_t number;

        if (!pax_number(value, &number) || number < 0 || number >= UINT32_MAX)
                return false;
        *ret = (uint32_t) number;
        return true;
}

/* One record over what the header said. False: it makes no sense. */
static bool apply_record(struct put *p, const char *key, struct span value, struct span *name, struct span *link) {
        struct member *m = &p->unpack.current;
        int64_t number;

        if (strcmp(key, "path") == 0)
                *name = value;
        else if (strcmp(key, "linkpath") == 0)
                *link = value;
        else if (strcmp(key, "size") == 0) {
                if (!pax_number(value, &number) || number < 0)
                        return false;
                m->header.size = (uint64_t) number;
        } else if (strcmp(key, "mtime") == 0)
                return pax_number(value, &m->header.mtime);
        else if (strcmp(key, "uid") == 0)
                return set_id(value, &m->header.uid);
        else if (strcmp(key, "gid") == 0)
                return set_id(value, &m->header.gid);
        else if (strncmp(key, "SCHILY.xattr.", 13) == 0)
                add_xattr(m, key + 13, value);
        else if (strncmp(key, "GNU.sparse.", 11) == 0)
                p->sparse = true;
        return true;
}

static struct span text_span(const char *text) {
        return (struct span) { (const uint8_t *) text, strlen(text) };
}

static struct span collected_span(const uint8_t *text, size_t size) {
        return (struct span) { text, strnlen((const char *) text, size) };
}

/* All that was said about the member, together. -EBADMSG: the stream cannot be understood; -EINVAL: this name will not do. */
static int describe(struct put *p) {
        struct member *m = &p->unpack.current;
        struct span name = p->name ? collected_span(p->name, p->name_size) : text_span(m->header.name);
        struct span link = p->link ? collected_span(p->link, p->link_size) : text_span(m->header.link);
        struct span rest = { p->pax, p->pax_size }, value;
        char key[300];
        int r;

        while ((r = pax_next(&rest, key, &value)) > 0)
                if (!apply_record(p, key, value, &name, &link))
                        return -EBADMSG;
        if (r < 0)
                return r;
        /* before POSIX a directory was a file with a slash at the end */
        if (m->header.type == '0' && name.size > 0 && name.data[name.size - 1] == '/')
                m->header.type = '5';
        r = tar_path(name, m->path);
        if (r < 0) {
                size_t shown = min_size(name.size, sizeof(m->path) - 1);
                memcpy(m->path, name.data, shown);
                m->path[shown] = 0;
                return r;
        }
        if (link.size >= sizeof(m->link) || memchr(link.data, 0, link.size))
                return -EINVAL;
        memcpy(m->link, link.data, link.size);
        m->link[link.size] = 0;
        return 0;
}

static bool has_body(char type) {
        return type == '0' || type == '7' || type < '0' || type > '7';
}

static int start_member(struct put *p, const struct tar_header *h) {
        struct member *m = &p->unpack.current;

        m->header = *h;
        int r = describe(p);
        if (r == -EBADMSG)
                return r;
        /* Links and directories may state a size that nothing follows. */
        p->left = has_body(m->header.type) ? m->header.size : 0;
        p->padding = (unsigned) (-p->left % TAR_BLOCK);
        p->expect = DATA_BODY;
        p->unpack.fd = -1;
        if (r == 0 && p->sparse)
                r = -ENOTSUP;
        if (r < 0)
                issue_add(&p->unpack.issues, m->path, r == -EINVAL ? "refused: not a path below the directory" : strerror(-r));
        else
                unpack_begin(&p->unpack);
        return 0;
}

static int on_block(struct put *p) {
        struct tar_header h;
        int r = tar_decode(p->block, &h);

        if (r < 0)
                return r;
        if (r == 0) {
                p->expect = AFTER_END;
                unpack_finish(&p->unpack);
                return 0;
        }
        if (h.size > INT64_MAX - TAR_BLOCK)
                return -EBADMSG;
        p->left = h.size;
        p->padding = (unsigned) (-h.size % TAR_BLOCK);
        switch (h.type) {
        case 'L':
        case 'K':
        case 'x':
                return start_collecting(p, &h);
        case 'g': /* about the whole archive: git writes its commit there */
        case 'V': /* a volume's name */
                p->expect = SKIPPED;
                return 0;
        default:
                return start_member(p, &h);
        }
}

/* The body and what pads it are through. */
static void body_done(struct put *p) {
        if (p->expect == DATA_BODY) {
                unpack_end(&p->unpack);
                forget_description(p);
        }
        p->expect = HEADER;
}

static int take_body(struct put *p, struct span part) {
        size_t *size;

        if (p->expect == DATA_BODY)
                return unpack_data(&p->unpack, part);
        if (p->expect == COLLECTED) {
                memcpy(*put_slot(p, &size) + p->collected, part.data, part.size);
                p->collected += part.size;
        }
        return 0;
}

static struct span cut(struct span *from, uint64_t size) {
        struct span part = { from->data, (size_t) min_u64(from->size, size) };

        from->data += part.size;
        from->size -= part.size;
        return part;
}

static int put_bytes(struct put *p, struct span data) {
        int r = 0;

        while (data.size > 0 && r == 0 && p->expect != AFTER_END) {
                if (p->expect == HEADER) {
                        struct span part = cut(&data, TAR_BLOCK - p->in_block);
                        memcpy(p->block + p->in_block, part.data, part.size);
                        p->in_block += part.size;
                        if (p->in_block < TAR_BLOCK)
                                break;
                        p->in_block = 0;
                        r = on_block(p);
                } else if (p->left > 0) {
                        struct span part = cut(&data, p->left);
                        p->left -= part.size;
                        r = take_body(p, part);
                } else
                        p->padding -= (unsigned) cut(&data, p->padding).size;
                if (p->expect != HEADER && p->expect != AFTER_END && p->left == 0 && p->padding == 0)
                        body_done(p);
        }
        return r;
}

static int put_data(struct channel *channel, struct span data) {
        struct put *p = CONTAINER_OF(channel, struct put, channel);
        int r = put_bytes(p, data);

        if (r < 0)
                channel_fail(channel, r, r == -EBADMSG ? "this is not a tar stream" : strerror(-r));
        else
                channel_grant(channel);
        return 0;
}

static void put_eof(struct channel *channel) {
        struct put *p = CONTAINER_OF(channel, struct put, channel);

        if (p->expect != AFTER_END) {
                channel_fail(channel, EBADMSG, "the tar stream is cut short");
                return;
        }
        frame_begin(T_DONE, channel->id);
        frame_number(COUNT, p->unpack.count);
        issues_fields(&p->unpack.issues);
        frame_end();
        channel_close(channel);
}

static int put_prepare(struct put *p, const struct args *args) {
        struct unpack *u = &p->unpack;
        cleanup_free char *path = path_from(args->bytes[PATH]);
        uint64_t flags = number_or(args, FLAGS, 0);

        if (!path)
                return -errno;
        u->force_owner = flags & WRITE_OWNER;
        u->uid = u->where.uid = u->force_owner ? (uid_t) number_or(args, UID, 0) : (uid_t) -1;
        u->gid = u->where.gid = u->force_owner ? (gid_t) number_or(args, GID, 0) : (gid_t) -1;
        if (flags & WRITE_PARENTS) {
                int r = path_make_parents(path, u->uid, u->gid);
                if (r < 0)
                        return r;
        }
        u->top_is_ours = mkdir(path, 0755) == 0;
        if (!u->top_is_ours && (errno != EEXIST || (flags & WRITE_NEW)))
                return -errno;
        u->where.root = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (u->where.root < 0)
                return -errno;
        if (u->top_is_ours && u->force_owner && fchownat(u->where.root, "", u->uid, u->gid, AT_EMPTY_PATH) < 0)
                return -errno;
        struct stat here, top;
        u->where.is_real_root = fstat(u->where.root, &here) == 0 && stat("/", &top) == 0 && here.st_dev == top.st_dev &&
                                here.st_ino == top.st_ino;
        return 0;
}

void tree_put(uint32_t id, const struct args *args) {
        static const struct channel_class class = { .data = put_data, .eof = put_eof, .close = put_close };
        struct put *p = channel_open(id, sizeof(*p), &class, NULL);

        if (!p)
                return;
        p->unpack.fd = p->unpack.where.root = p->unpack.where.parent = -1;
        int r = put_prepare(p, args);
        if (r < 0)
                channel_fail(&p->channel, r, "open");
        else
                channel_grant(&p->channel);
}
