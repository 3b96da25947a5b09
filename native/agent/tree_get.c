/* TREE_GET: a tree as a tar stream, made as the host takes it. Nothing is read ahead of the credit. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/sysmacros.h>

#include "channel.h"
#include "dir.h"
#include "issue.h"
#include "pack.h"
#include "path.h"
#include "tree.h"

enum { SLICE = 128 /* members per turn of the loop */ };

struct get {
        struct channel channel;
        struct issues issues;
        struct walk walk;
        dev_t device;        /* directories on others (proc, sys, mounts) are not entered */
        char path[PATH_BYTES]; /* of the directory on top of the walk, without a slash at the end; "" is the top */
        struct links links;
        uint64_t count;
        /* What is being sent: the head, then the file, then zeros. */
        struct head head;
        int fd;
        uint64_t size, left, zeros;
        char member[PATH_BYTES]; /* its path, for issues */
        bool ended; /* the last zeros are the archive's end */
};

/* --- members -------------------------------------------------------------------------------------------------------- */

static char type_of(mode_t mode) {
        switch (mode & S_IFMT) {
        case S_IFREG:
                return '0';
        case S_IFLNK:
                return '2';
        case S_IFCHR:
                return '3';
        case S_IFBLK:
                return '4';
        case S_IFDIR:
                return '5';
        case S_IFIFO:
                return '6';
        default:
                return 0;
        }
}

/* Opens what has content or attributes; a file is looked at again, it may have been replaced since. */
static int open_member(int dir, const char *name, struct stat *st) {
        mode_t type = st->st_mode & S_IFMT;

        if (type != S_IFREG && type != S_IFDIR)
                return -1;
        cleanup_fd int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        if (fd < 0 || fstat(fd, st) < 0)
                return -errno;
        return (st->st_mode & S_IFMT) == type ? steal_fd(&fd) : -ESTALE;
}

static int send_member(struct get *g, int dir, const char *name, struct stat *st, const char *path) {
        char target[PATH_BYTES] = "", full[PATH_BYTES + 2];
        struct tar_header h = { .type = type_of(st->st_mode) };

        if (h.type == 0)
                return -EPROTONOSUPPORT; /* a socket */
        int opened = open_member(dir, name, st);
        if (opened < -1)
                return opened;
        cleanup_fd int fd = opened;
        const char *twin = S_ISDIR(st->st_mode) ? NULL : link_seen(&g->links, st, path);
        if (twin) {
                h.type = '1';
                strcpy(target, twin);
        } else if (h.type == '2') {
                ssize_t n = readlinkat(dir, name, target, sizeof(target) - 1);
                if (n < 0)
                        return -errno;
                target[n] = 0;
        }
        h.mode = st->st_mode & 07777;
        h.uid = st->st_uid;
        h.gid = st->st_gid;
        h.mtime = st->st_mtim.tv_sec;
        h.dev_major = major(st->st_rdev);
        h.dev_minor = minor(st->st_rdev);
        h.size = h.type == '0' ? (uint64_t) st->st_size : 0;
        snprintf(full, sizeof(full), "%s%s", *path ? path : ".", h.type == '5' ? "/" : "");
        int r = head_build(&g->head, &h, full, target, h.type == '1' ? -1 : fd);
        if (r < 0)
                return r;
        g->size = g->left = h.size;
        snprintf(g->member, sizeof(g->member), "%s", path);
        g->zeros = -h.size % TAR_BLOCK;
        if (h.type == '0')
                g->fd = steal_fd(&fd);
        g->count++;
        return 0;
}

static void complain(struct get *g, const char *path, int code) {
        issue_add(&g->issues, path, code == -EPROTONOSUPPORT ? "a socket" : strerror(-code));
}

static void leave_directory(struct get *g) {
        char *slash = strrchr(g->path, '/');

        walk_leave(&g->walk);
        if (slash)
                *slash = 0;
        else
                g->path[0] = 0;
}

/* name lies in the directory on top. */
static void visit(struct get *g, const char *name) {
        char path[PATH_BYTES], copy[NAME_BYTES];
        int dir = walk_top(&g->walk)->fd;
        struct stat st;

        int size = snprintf(path, sizeof(path), "%s%s%s", g->path, *g->path ? "/" : "", name);
        int r = size >= (int) sizeof(path) ? -ENAMETOOLONG : 0;
        if (r == 0 && fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
                r = -errno;
        if (r == 0)
                r = send_member(g, dir, name, &st, path);
        if (r == 0 && S_ISDIR(st.st_mode) && st.st_dev == g->device) {
                strcpy(copy, name);
                r = walk_enter(&g->walk, dir, copy);
                if (r == 0)
                        strcpy(g->path, path);
        }
        if (r < 0)
                complain(g, path, r);
}

/* Gets the next member's head ready, or the end. */
static void next_member(struct get *g) {
        struct level *level = walk_top(&g->walk);
        const char *name;

        if (!level) {
                g->ended = true;
                g->zeros = 2 * TAR_BLOCK;
                return;
        }
        int r = level_next(level, &name);
        if (r > 0) {
                visit(g, name);
                return;
        }
        if (r < 0)
                complain(g, g->path, r);
        leave_directory(g);
}

/* --- the stream ----------------------------------------------------------------------------------------------------- */

/* The header has announced so many bytes: a file that shrank is filled up, one that grew is cut. */
static size_t fill_from_file(struct get *g, uint8_t *to, size_t size) {
        ssize_t n = read(g->fd, to, (size_t) min_u64(size, g->left));
        struct stat st;

        if (n < 0 && errno == EINTR)
                return 0;
        if (n <= 0) {
                issue_add(&g->issues, g->member, n < 0 ? "could not be read to its end, zeros stand for the rest" :
                                                         "became shorter while it was read, zeros stand for the rest");
                g->zeros += g->left;
                g->left = 0;
        } else if ((g->left -= (uint64_t) n) == 0 && fstat(g->fd, &st) == 0 && (uint64_t) st.st_size > g->size)
                issue_add(&g->issues, g->member, "became longer while it was read, the new end is missing");
        if (g->left == 0)
                close_fd(steal_fd(&g->fd));
        return n > 0 ? (size_t) n : 0;
}

static size_t fill(struct get *g, uint8_t *to, size_t size) {
        if (g->head.at < g->head.size) {
                size_t part = min_size(size, g->head.size - g->head.at);
                memcpy(to, g->head.data + g->head.at, part);
                g->head.at += part;
                return part;
        }
        if (g->left > 0)
                return fill_from_file(g, to, size);
        size_t part = (size_t) min_u64(size, g->zeros);
        memset(to, 0, part);
        g->zeros -= part;
        return part;
}

static bool member_pending(const struct get *g) {
        return g->head.at < g->head.size || g->left > 0 || g->zeros > 0;
}

static void get_done(struct get *g) {
        frame_begin(T_DONE, g->channel.id);
        frame_number(COUNT, g->count);
        issues_fields(&g->issues);
        frame_end();
        channel_close(&g->channel);
}

static bool get_pump(struct source *source) {
        struct get *g = CONTAINER_OF(source, struct get, channel.source);
        size_t want = channel_credit(&g->channel, DATA_MAX), used = 0;

        if (want == 0 && !(g->ended && !member_pending(g)))
                return false; /* until CREDIT */
        uint8_t *to = frame_raw(want);
        if (!to)
                return false;
        for (int members = 0; used < want && members < SLICE;) {
                if (member_pending(g))
                        used += fill(g, to + used, want - used);
                else if (g->ended)
                        break;
                else {
                        close_fd(steal_fd(&g->fd)); /* of an empty file */
                        next_member(g);
                        members++;
                }
        }
        frame_raw_commit(T_DATA, g->channel.id, used);
        g->channel.sent += used;
        if (g->ended && !member_pending(g)) {
                get_done(g);
                return false;
        }
        return true;
}

static void get_close(struct channel *channel) {
        struct get *g = CONTAINER_OF(channel, struct get, channel);

        walk_close(&g->walk);
        close_fd(g->fd);
        free(g->head.data);
        links_free(&g->links);
        issues_free(&g->issues);
}

/* The path itself may lead through symlinks, to a directory (whose content becomes the tree) or to one file. */
static int get_prepare(struct get *g, const struct args *args) {
        cleanup_free char *path = path_from(args->bytes[PATH]);
        cleanup_fd int dir = -1;
        char name[NAME_BYTES];
        struct stat st;

        if (!path)
                return -errno;
        int r = path_parent(path, true, &dir, name);
        if (r < 0)
                return r;
        if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
                return -errno;
        if (!S_ISDIR(st.st_mode))
                return send_member(g, dir, name, &st, name);
        g->device = st.st_dev;
        r = send_member(g, dir, name, &st, "");
        return r < 0 ? r : walk_enter(&g->walk, dir, name);
}

void tree_get(uint32_t id, const struct args *args) {
        static const struct channel_class class = { .close = get_close };
        struct get *g = channel_open(id, sizeof(*g), &class, get_pump);

        if (!g)
                return;
        g->fd = -1;
        g->channel.limit = number_or(args, LIMIT, 0);
        int r = get_prepare(g, args);
        if (r < 0)
                channel_fail(&g->channel, r, "open");
        else
                source_wake(&g->channel.source);
}
