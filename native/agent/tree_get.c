/* TREE_GET: a tree as a tar stream, made as the host takes it. Nothing is read ahead of the credit.
 * UPPER: the same of the upper directory of the overlay, with all that makes it a layer. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/sysmacros.h>

#include "channel.h"
#include "dir.h"
#include "guest.h"
#include "issue.h"
#include "pack.h"
#include "path.h"
#include "tree.h"

enum {
        SLICE = 128,        /* members per turn of the loop */
        EXTENTS_MAX = 4096, /* of one file; the last one takes what follows, with its holes */
        EXTENT_TEXT = 42,   /* two numbers of 64 bits, two commas */
};

struct extent {
        uint64_t at, size;
};

struct get {
        struct channel channel;
        struct issues issues;
        struct walk walk;
        dev_t device;        /* directories on others (proc, sys, mounts) are not entered */
        char path[PATH_BYTES]; /* of the directory on top of the walk, without a slash at the end; "" is the top */
        struct links links;
        uint64_t count;
        bool layer; /* UPPER */
        /* What is being sent: the head, then the file, then zeros. */
        struct head head;
        int fd;
        uint64_t size, left, zeros;
        struct extent *extents; /* of a file with holes: what is still to be sent of it, after `left` */
        unsigned n_extents, next_extent;
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

/* Where the file has data; 0 if everywhere, and then `extents` stays empty. */
static int find_extents(struct get *g, int fd, uint64_t size) {
        off_t at = 0, end = (off_t) size;

        g->n_extents = g->next_extent = 0;
        while (at < end) {
                off_t data = lseek(fd, at, SEEK_DATA);
                if (data < 0 && errno != ENXIO)
                        return -errno;
                if (data < 0 || data >= end)
                        break;
                off_t hole = g->n_extents == EXTENTS_MAX - 1 ? end : lseek(fd, data, SEEK_HOLE);
                if (hole <= data)
                        return hole < 0 ? -errno : -EIO;
                if (data == 0 && hole >= end)
                        break; /* all of it */
                if (!g->extents && !(g->extents = calloc(EXTENTS_MAX, sizeof(*g->extents))))
                        return -ENOMEM;
                at = hole < end ? hole : end;
                g->extents[g->n_extents++] = (struct extent) { (uint64_t) data, (uint64_t) (at - data) };
        }
        if (lseek(fd, 0, SEEK_SET) < 0)
                return -errno;
        bool all_hole = g->n_extents == 0 && size > 0 && lseek(fd, 0, SEEK_DATA) < 0;
        return g->n_extents > 0 || all_hole;
}

/* `offset,size,...`, from malloc; a file that is one hole has one piece of nothing. */
static char *map_of(const struct get *g) {
        size_t room = (size_t) (g->n_extents + 1) * EXTENT_TEXT, used = 0;
        char *text = malloc(room);

        if (text && g->n_extents == 0)
                strcpy(text, "0,0");
        for (unsigned i = 0; text && i < g->n_extents; i++)
                used += (size_t) snprintf(text + used, room - used, "%s%llu,%llu", i ? "," : "",
                                          (unsigned long long) g->extents[i].at, (unsigned long long) g->extents[i].size);
        return text;
}

static uint64_t extents_size(const struct get *g) {
        uint64_t size = 0;

        for (unsigned i = 0; i < g->n_extents; i++)
                size += g->extents[i].size;
        return size;
}

/* Goes on with the next piece of a file with holes. */
static void next_extent(struct get *g) {
        if (g->left > 0 || g->next_extent == g->n_extents)
                return;
        const struct extent *extent = &g->extents[g->next_extent++];
        (void) lseek(g->fd, (off_t) extent->at, SEEK_SET);
        g->left = extent->size;
}

static int send_member(struct get *g, int dir, const char *name, struct stat *st, const char *path) {
        char target[PATH_BYTES] = "", full[PATH_BYTES + 2];
        struct tar_header h = { .type = type_of(st->st_mode) };

        struct layer_member layer = { .mtime_ns = (uint32_t) st->st_mtim.tv_nsec };
        cleanup_free char *map = NULL;

        g->n_extents = g->next_extent = 0;
        if (h.type == 0)
                return g->layer ? 0 : -EPROTONOSUPPORT; /* a socket */
        int opened = open_member(dir, name, st);
        if (opened < -1)
                return opened;
        cleanup_fd int fd = opened;
        /* overlayfs makes all whiteouts names of one device 0:0. */
        bool whiteout = S_ISCHR(st->st_mode) && st->st_rdev == 0;
        const char *twin = S_ISDIR(st->st_mode) || whiteout ? NULL : link_seen(&g->links, st, path);
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
        if (g->layer && h.type == '0') {
                int sparse = find_extents(g, fd, h.size);
                if (sparse < 0 || (sparse > 0 && !(map = map_of(g))))
                        return sparse < 0 ? sparse : -ENOMEM;
                if (sparse > 0)
                        h.size = extents_size(g);
        }
        layer.map = map;
        layer.whole = (uint64_t) st->st_size;
        layer.names = h.type == '5' ? 1 : st->st_nlink;
        snprintf(full, sizeof(full), "%s%s", *path ? path : ".", h.type == '5' ? "/" : "");
        int r = head_build(&g->head, &h, full, target, h.type == '1' ? -1 : fd, g->layer ? &layer : NULL);
        if (r < 0)
                return r;
        g->size = (uint64_t) st->st_size;
        g->left = map ? 0 : h.size;
        snprintf(g->member, sizeof(g->member), "%s", path);
        g->zeros = -h.size % TAR_BLOCK;
        if (h.type == '0') {
                g->fd = steal_fd(&fd);
                next_extent(g);
        }
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
        next_extent(g);
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
        free(g->extents);
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

/* What commands wrote; they stand still from then on. */
static int get_prepare_upper(struct get *g) {
        static const char name[] = "upper";
        struct stat st;
        int disk = guest_freeze();

        if (disk < 0)
                return disk;
        if (fstatat(disk, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
                return -errno;
        g->layer = true;
        g->device = st.st_dev;
        int r = send_member(g, disk, name, &st, "");
        return r < 0 ? r : walk_enter(&g->walk, disk, name);
}

static void get_open(uint32_t id, const struct args *args, bool upper) {
        static const struct channel_class class = { .close = get_close };
        struct get *g = channel_open(id, sizeof(*g), &class, get_pump);

        if (!g)
                return;
        g->fd = -1;
        g->channel.limit = number_or(args, LIMIT, 0);
        int r = upper ? get_prepare_upper(g) : get_prepare(g, args);
        if (r < 0)
                channel_fail(&g->channel, r, "open");
        else
                source_wake(&g->channel.source);
}

void tree_get(uint32_t id, const struct args *args) {
        get_open(id, args, false);
}

void tree_upper(uint32_t id, const struct args *args) {
        get_open(id, args, true);
}
