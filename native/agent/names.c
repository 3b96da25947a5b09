#include <fcntl.h>
#include <stdio.h>
#include <sys/random.h>

#include "channel.h"
#include "dir.h"
#include "file.h"
#include "path.h"

enum {
        FOLLOW_LAST = 16,
        MKDIR_PARENTS = 1,
        REMOVE_RECURSIVE = 2,
        SLICE = 256, /* entries per turn of the loop */
        REWINDS_MAX = 1000, /* a tenant that refills a directory as fast as we empty it wins in the end */
};

void stat_fields(const struct stat *st, int dir, const char *name) {
        char target[PATH_BYTES];

        frame_number(TYPE, mode_type(st->st_mode));
        frame_number(MODE, st->st_mode);
        frame_number(UID, st->st_uid);
        frame_number(GID, st->st_gid);
        frame_number(SIZE, (uint64_t) st->st_size);
        /* Unsigned, because a tenant can set times for which the product does not fit. */
        frame_number(MTIME_NS, (uint64_t) st->st_mtim.tv_sec * UINT64_C(1000000000) + (uint64_t) st->st_mtim.tv_nsec);
        if (name && S_ISLNK(st->st_mode)) {
                ssize_t n = readlinkat(dir, name, target, sizeof(target));
                if (n >= 0)
                        frame_bytes(PATH2, target, (size_t) n);
        }
}

static void answer(uint32_t id, int r, const char *what) {
        if (r < 0)
                frame_error(id, r, STEP_OTHER, what);
        else
                frame_empty(T_DONE, id);
}

void names_stat(uint32_t id, const struct args *args) {
        cleanup_free char *path = path_from(args->bytes[PATH]);
        bool follow = number_or(args, FLAGS, 0) & FOLLOW_LAST;
        struct stat st;

        if (!path || fstatat(AT_FDCWD, path, &st, follow ? 0 : AT_SYMLINK_NOFOLLOW) < 0) {
                frame_error(id, errno, STEP_OTHER, "stat");
                return;
        }
        frame_begin(T_STAT, id);
        stat_fields(&st, AT_FDCWD, path);
        frame_end();
}

/* --- LISTDIR -------------------------------------------------------------------------------------------------------- */

struct lister {
        struct channel channel;
        struct walk walk; /* of one level */
        uint64_t count;
};

static void lister_close(struct channel *channel) {
        walk_close(&CONTAINER_OF(channel, struct lister, channel)->walk);
}

static void lister_done(struct lister *l) {
        frame_begin(T_DONE, l->channel.id);
        frame_number(COUNT, l->count);
        frame_end();
        channel_close(&l->channel);
}

static bool lister_pump(struct source *source) {
        struct lister *l = CONTAINER_OF(source, struct lister, channel.source);
        struct level *level = walk_top(&l->walk);
        const char *name;
        struct stat st;

        for (int i = 0; i < SLICE; i++) {
                /* The last one may go beyond the limit by its own size. */
                if (channel_credit(&l->channel, 1) == 0)
                        return false; /* until CREDIT */
                int r = level_next(level, &name);
                if (r < 0) {
                        channel_fail(&l->channel, r, "read the directory");
                        return false;
                }
                if (r == 0) {
                        lister_done(l);
                        return false;
                }
                if (fstatat(level->fd, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
                        continue; /* gone meanwhile */
                l->count++;
                frame_begin(T_ENTRY, l->channel.id);
                frame_bytes(NAME, name, strlen(name));
                stat_fields(&st, level->fd, name);
                l->channel.sent += frame_end();
        }
        return true;
}

void names_list(uint32_t id, const struct args *args) {
        static const struct channel_class class = { .close = lister_close };
        cleanup_free char *path = path_from(args->bytes[PATH]);

        /* Unlike the entries, the directory itself may be behind a symlink. */
        cleanup_fd int fd = path ? open(path, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
        if (fd < 0) {
                frame_error(id, errno, STEP_OTHER, "open");
                return;
        }
        struct lister *l = channel_open(id, sizeof(*l), &class, lister_pump);
        if (!l)
                return;
        l->channel.limit = number_or(args, LIMIT, 0);
        int r = walk_enter(&l->walk, fd, ".");
        if (r < 0)
                channel_fail(&l->channel, r, "open");
        else
                source_wake(&l->channel.source);
}

/* --- MKDIR, RENAME -------------------------------------------------------------------------------------------------- */

void names_mkdir(uint32_t id, const struct args *args) {
        cleanup_free char *path = path_from(args->bytes[PATH]);
        mode_t mode = (mode_t) number_or(args, MODE, 0755) & 07777;
        int r;

        if (!path)
                r = -errno;
        else if (number_or(args, FLAGS, 0) & MKDIR_PARENTS)
                r = path_make_directories(path, mode, (uid_t) -1, (gid_t) -1);
        else
                r = mkdir(path, mode) < 0 || ((mode & 07000) && chmod(path, mode) < 0) ? -errno : 0;
        answer(id, r, "mkdir");
}

void names_rename(uint32_t id, const struct args *args) {
        cleanup_free char *from = path_from(args->bytes[PATH]);
        cleanup_free char *to = from ? path_from(args->bytes[PATH2]) : NULL;

        answer(id, !from || !to || rename(from, to) < 0 ? -errno : 0, "rename");
}

/* --- REMOVE --------------------------------------------------------------------------------------------------------- */

struct remover {
        struct channel channel;
        struct walk walk;
        int dir; /* that holds the tree */
        unsigned rewinds;
};

static void remover_close(struct channel *channel) {
        struct remover *r = CONTAINER_OF(channel, struct remover, channel);

        walk_close(&r->walk);
        close_fd(r->dir);
}

/* Deeper than we hold directories open: moved up to the top of the tree, where the walk comes by again. */
static int lift(const struct remover *r, const char *name) {
        char temporary[32];
        uint64_t random;

        if (getrandom(&random, sizeof(random), GRND_NONBLOCK) != (ssize_t) sizeof(random))
                random = now_us();
        snprintf(temporary, sizeof(temporary), ".dsec-%016llx", (unsigned long long) random);
        return renameat(walk_top(&r->walk)->fd, name, r->walk.levels[0]->fd, temporary) < 0 ? -errno : 0;
}

static int remove_entry(struct remover *r, const char *name) {
        int dir = walk_top(&r->walk)->fd;
        char copy[NAME_BYTES]; /* name lies in a buffer that the next level does not own */

        if (unlinkat(dir, name, 0) == 0 || errno == ENOENT)
                return 0;
        if (errno != EISDIR && errno != EPERM)
                return -errno;
        if (unlinkat(dir, name, AT_REMOVEDIR) == 0)
                return 0;
        if (errno != ENOTEMPTY && errno != EEXIST)
                return -errno;
        strcpy(copy, name);
        return r->walk.depth == WALK_DEPTH ? lift(r, copy) : walk_enter(&r->walk, dir, copy);
}

/* The directory has been read to its end. Nothing is left of the walk when this returns 0 at depth 0. */
static int remove_directory(struct remover *r) {
        struct level *level = walk_top(&r->walk);
        int parent = r->walk.depth > 1 ? r->walk.levels[r->walk.depth - 2]->fd : r->dir;

        if (unlinkat(parent, level->name, AT_REMOVEDIR) < 0 && errno != ENOENT) {
                if ((errno != ENOTEMPTY && errno != EEXIST) || r->rewinds++ >= REWINDS_MAX)
                        return -errno;
                level_rewind(level);
                return 0;
        }
        walk_leave(&r->walk);
        return 0;
}

static bool remover_pump(struct source *source) {
        struct remover *r = CONTAINER_OF(source, struct remover, channel.source);
        const char *name;

        for (int i = 0; i < SLICE; i++) {
                int n = level_next(walk_top(&r->walk), &name);
                if (n >= 0)
                        n = n > 0 ? remove_entry(r, name) : remove_directory(r);
                if (n < 0) {
                        channel_fail(&r->channel, n, "remove");
                        return false;
                }
                if (r->walk.depth == 0) {
                        frame_empty(T_DONE, r->channel.id);
                        channel_close(&r->channel);
                        return false;
                }
        }
        return true;
}

static void remove_tree(uint32_t id, int *dir, const char *name) {
        static const struct channel_class class = { .close = remover_close };
        struct remover *r = channel_open(id, sizeof(*r), &class, remover_pump);

        if (!r)
                return;
        r->dir = steal_fd(dir);
        int n = walk_enter(&r->walk, r->dir, name);
        if (n < 0)
                channel_fail(&r->channel, n, "open");
        else
                source_wake(&r->channel.source);
}

void names_remove(uint32_t id, const struct args *args) {
        cleanup_free char *path = path_from(args->bytes[PATH]);
        cleanup_fd int dir = -1;
        char name[NAME_BYTES];

        int r = path ? path_parent(path, false, &dir, name) : -errno;
        if (r == 0 && (r = unlinkat(dir, name, 0) < 0 ? -errno : 0) < 0 && (r == -EISDIR || r == -EPERM))
                r = unlinkat(dir, name, AT_REMOVEDIR) < 0 ? -errno : 0;
        if ((r == -ENOTEMPTY || r == -EEXIST) && (number_or(args, FLAGS, 0) & REMOVE_RECURSIVE))
                remove_tree(id, &dir, name);
        else
                answer(id, r, "remove");
}
