#include "file.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/random.h>

#include "channel.h"
#include "path.h"

/* Opens without waiting for anybody (a FIFO's other end, the holder of a lease) and only what is a file. */
static int open_regular(const char *path, struct stat *ret_st) {
        struct stat st;

        /* Looked at first, because opening some devices already does something. */
        if (stat(path, &st) < 0)
                return -errno;
        if (!S_ISREG(st.st_mode))
                return S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL;
        cleanup_fd int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &st) < 0)
                return -errno;
        if (!S_ISREG(st.st_mode))
                return -EINVAL;
        *ret_st = st;
        return steal_fd(&fd);
}

/* --- READ ----------------------------------------------------------------------------------------------------------- */

struct reader {
        struct channel channel;
        int fd;
        uint64_t offset, left;
};

static void reader_close(struct channel *channel) {
        close_fd(CONTAINER_OF(channel, struct reader, channel)->fd);
}

static void reader_done(struct reader *r) {
        frame_begin(T_DONE, r->channel.id);
        frame_number(SIZE, r->channel.sent);
        frame_end();
        channel_close(&r->channel);
}

static bool reader_pump(struct source *source) {
        struct reader *r = CONTAINER_OF(source, struct reader, channel.source);
        size_t want = channel_credit(&r->channel, (size_t) min_u64(r->left, DATA_MAX));

        if (r->left == 0) {
                reader_done(r);
                return false;
        }
        if (want == 0)
                return false; /* until CREDIT */
        uint8_t *to = frame_raw(want);
        if (!to)
                return false;
        ssize_t n = pread(r->fd, to, want, (off_t) r->offset);
        if (n < 0) {
                channel_fail(&r->channel, errno, "read");
                return false;
        }
        frame_raw_commit(T_DATA, r->channel.id, (size_t) n);
        r->offset += (uint64_t) n;
        r->left -= (uint64_t) n;
        r->channel.sent += (uint64_t) n;
        if (n == 0)
                r->left = 0;
        return true;
}

void file_read(uint32_t id, const struct args *args) {
        static const struct channel_class class = { .close = reader_close };
        cleanup_free char *path = path_from(args->bytes[PATH]);
        struct stat st;
        int fd = path ? open_regular(path, &st) : -errno;

        if (fd < 0) {
                frame_error(id, fd, STEP_OTHER, "open");
                return;
        }
        struct reader *r = channel_open(id, sizeof(*r), &class, reader_pump);
        if (!r) {
                close_fd(fd);
                return;
        }
        r->fd = fd;
        r->offset = min_u64(number_or(args, OFFSET, 0), INT64_MAX);
        r->left = number_or(args, SIZE, 0) ? args->number[SIZE] : UINT64_MAX;
        r->channel.limit = number_or(args, LIMIT, 0);
        frame_begin(T_STAT, id);
        stat_fields(&st, -1, NULL);
        frame_end();
        source_wake(&r->channel.source);
}

/* --- WRITE ---------------------------------------------------------------------------------------------------------- */

struct writer {
        struct channel channel;
        int dir, fd;
        char name[NAME_BYTES];
        char temporary[32]; /* "" when writing in place */
        uint64_t flags;
        mode_t mode;
        uid_t uid;
        gid_t gid;
};

static void writer_close(struct channel *channel) {
        struct writer *w = CONTAINER_OF(channel, struct writer, channel);

        close_fd(w->fd);
        if (w->temporary[0])
                (void) unlinkat(w->dir, w->temporary, 0);
        close_fd(w->dir);
}

static int writer_data(struct channel *channel, struct span data) {
        struct writer *w = CONTAINER_OF(channel, struct writer, channel);

        while (data.size > 0) {
                ssize_t n = write(w->fd, data.data, data.size);
                if (n < 0 && errno == EINTR)
                        continue;
                if (n <= 0) {
                        channel_fail(channel, n < 0 ? errno : EIO, "write");
                        return 0;
                }
                data.data += n;
                data.size -= (size_t) n;
        }
        channel_grant(channel);
        return 0;
}

static int writer_commit(struct writer *w) {
        /* The owner first: changing it takes the set-id bits away. */
        if (w->uid != (uid_t) -1 && fchown(w->fd, w->uid, w->gid) < 0)
                return -errno;
        if (!(w->flags & WRITE_APPEND) && fchmod(w->fd, w->mode) < 0)
                return -errno;
        if (!w->temporary[0])
                return 0;
        if (renameat2(w->dir, w->temporary, w->dir, w->name, w->flags & WRITE_NEW ? RENAME_NOREPLACE : 0) < 0)
                return -errno;
        w->temporary[0] = 0;
        return 0;
}

static void writer_eof(struct channel *channel) {
        struct writer *w = CONTAINER_OF(channel, struct writer, channel);
        int r = writer_commit(w);

        if (r < 0) {
                channel_fail(channel, r, "rename");
                return;
        }
        frame_begin(T_DONE, channel->id);
        frame_number(SIZE, channel->received);
        frame_end();
        channel_close(channel);
}

/* What is there now decides the owner, and the mode if none was given: an overwritten file stays its user's. */
static int writer_look(struct writer *w, const struct args *args) {
        struct stat st;
        bool exists = fstatat(w->dir, w->name, &st, AT_SYMLINK_NOFOLLOW) == 0;

        if (!exists && errno != ENOENT)
                return -errno;
        if (exists && !S_ISREG(st.st_mode))
                return S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL;
        if (exists && (w->flags & WRITE_NEW))
                return -EEXIST;
        w->mode = (mode_t) number_or(args, MODE, exists ? st.st_mode : 0644) & 07777;
        w->uid = exists ? st.st_uid : (uid_t) -1;
        w->gid = exists ? st.st_gid : (gid_t) -1;
        if (w->flags & WRITE_OWNER) {
                w->uid = (uid_t) number_or(args, UID, 0);
                w->gid = (gid_t) number_or(args, GID, 0);
        }
        return 0;
}

static int writer_open(struct writer *w) {
        struct stat st;
        uint64_t random;

        if (w->flags & WRITE_APPEND) {
                w->fd = openat(w->dir, w->name,
                               O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, w->mode);
                if (w->fd < 0 || fstat(w->fd, &st) < 0)
                        return -errno;
                return S_ISREG(st.st_mode) ? 0 : -EINVAL;
        }
        if (getrandom(&random, sizeof(random), GRND_NONBLOCK) != (ssize_t) sizeof(random))
                random = now_us();
        snprintf(w->temporary, sizeof(w->temporary), ".dsec-%016llx", (unsigned long long) random);
        w->fd = openat(w->dir, w->temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (w->fd < 0) {
                w->temporary[0] = 0;
                return -errno;
        }
        return 0;
}

static int writer_prepare(struct writer *w, const struct args *args) {
        cleanup_free char *path = path_from(args->bytes[PATH]);
        int r;

        if (!path)
                return -errno;
        w->flags = number_or(args, FLAGS, 0);
        if (w->flags & WRITE_PARENTS) {
                bool owned = w->flags & WRITE_OWNER;
                r = path_make_parents(path, owned ? (uid_t) number_or(args, UID, 0) : (uid_t) -1,
                                      owned ? (gid_t) number_or(args, GID, 0) : (gid_t) -1);
                if (r < 0)
                        return r;
        }
        if ((r = path_parent(path, true, &w->dir, w->name)) < 0 || (r = writer_look(w, args)) < 0)
                return r;
        return writer_open(w);
}

void file_write(uint32_t id, const struct args *args) {
        static const struct channel_class class = { .data = writer_data, .eof = writer_eof, .close = writer_close };
        struct writer *w = channel_open(id, sizeof(*w), &class, NULL);

        if (!w)
                return;
        w->dir = w->fd = -1;
        int r = writer_prepare(w, args);
        if (r < 0)
                channel_fail(&w->channel, r, "open");
        else
                channel_grant(&w->channel);
}
