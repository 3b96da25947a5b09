#include "stream.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/uio.h>

enum {
        READ_MAX = 256 << 10,
        ROOM_READ = 64 << 10, /* as much as a pipe holds */
        TTY_LAST = 64 << 10, /* a pty cannot say how much it holds; the kernel's own limit is about this */
};

/* How much may be read now. A follower makes the process wait rather than lose a byte that was not sent yet. */
static uint64_t stream_allowance(const struct stream *s) {
        uint64_t allowed = READ_MAX;

        if (s->followed) {
                uint64_t end = max_u64(s->sent, s->cap_head) + s->room;
                allowed = end > s->total ? min_u64(end - s->total, READ_MAX) : 0;
        }
        if (s->state == STREAM_FINAL)
                allowed = min_u64(allowed, s->left);
        return allowed;
}

static int stream_allocate(struct stream *s, uint64_t want) {
        if (s->total < s->cap_head && !s->head && !(s->head = pages_map_own(s->cap_head)))
                return -ENOMEM;
        if (s->total + want > s->cap_head && !s->ring && !(s->ring = pages_map_own(s->room)))
                return -ENOMEM;
        return 0;
}

static ssize_t stream_read(struct stream *s, uint64_t want) {
        struct iovec iov[3];
        int n = 0;

        if (s->total < s->cap_head) {
                size_t take = (size_t) min_u64(want, s->cap_head - s->total);
                iov[n++] = (struct iovec) { s->head + s->total, take };
                want -= take;
        }
        /* Never over what the kept tail may still become, whatever of this read there is. */
        want = min_u64(want, s->room - s->cap_tail);
        if (want > 0) {
                size_t position = s->total > s->cap_head ? (size_t) ((s->total - s->cap_head) % s->room) : 0;
                size_t take = min_size((size_t) want, s->room - position);
                iov[n++] = (struct iovec) { s->ring + position, take };
                if (want > take)
                        iov[n++] = (struct iovec) { s->ring, (size_t) want - take };
        }
        return readv(s->watch.fd, iov, n);
}

uint64_t stream_dropped(const struct stream *s) {
        uint64_t kept = (uint64_t) s->cap_head + s->cap_tail;

        return s->total > kept ? s->total - kept : 0;
}

/* What has left the tail is summed while it is still in the ring. */
static void stream_sum_dropped(struct stream *s) {
        uint64_t end = stream_dropped(s);

        while (s->dropped.size < end) {
                size_t position = (size_t) (s->dropped.size % s->room);
                size_t take = (size_t) min_u64(end - s->dropped.size, s->room - position);
                sha256_add(&s->dropped, s->ring + position, take);
        }
}

static void stream_free_kept(struct stream *s) {
        pages_unmap(s->head, s->cap_head);
        pages_unmap(s->ring, s->room);
        s->head = s->ring = NULL;
}

static void stream_set(struct stream *s, enum stream_state state) {
        s->state = state;
        if (state == STREAM_DRAIN)
                watch_events(&s->watch, EPOLLIN);
        if (state == STREAM_CLOSED) {
                int fd = s->watch.fd;
                watch_stop(&s->watch);
                close_fd(fd);
        }
        if (s->owner)
                source_wake(s->owner);
        else if (state == STREAM_CLOSED)
                free(s);
}

/* Throws away what is there; true at the end of the file. */
static bool stream_discard(struct stream *s) {
        char waste[4096];

        for (int i = 0; i < 64; i++) {
                ssize_t n = read(s->watch.fd, waste, sizeof(waste));
                if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
                        return true;
                if (n < (ssize_t) sizeof(waste))
                        return false;
        }
        return false;
}

static void stream_ready(struct watch *watch, uint32_t events) {
        struct stream *s = CONTAINER_OF(watch, struct stream, watch);

        /* A hang-up alone: nothing is left to read, and no memory needed for it. Most streams of most commands end so. */
        if (!(events & EPOLLIN)) {
                stream_set(s, STREAM_CLOSED);
                return;
        }
        if (s->state == STREAM_DRAIN) {
                if (stream_discard(s))
                        stream_set(s, STREAM_CLOSED);
                return;
        }
        uint64_t want = stream_allowance(s);
        if (want == 0) {
                watch_events(watch, 0);
                return;
        }
        if (stream_allocate(s, want) < 0) {
                /* No memory for it: counted as dropped, which is what a full tail does too. */
                stream_set(s, STREAM_DRAIN);
                return;
        }
        ssize_t n = stream_read(s, want);
        if (n > 0) {
                s->total += (uint64_t) n;
                stream_sum_dropped(s);
                if (s->state == STREAM_FINAL && (s->left -= (uint64_t) n) == 0)
                        stream_set(s, STREAM_DRAIN);
                else if (s->followed && s->owner)
                        source_wake(s->owner);
        } else if (n < 0 && errno == EINTR) {
                return;
        } else if (n < 0 && errno == EAGAIN) {
                if (s->state == STREAM_FINAL)
                        stream_set(s, STREAM_DRAIN);
        } else
                /* 0, or EIO: the last slave end of a pty was closed. */
                stream_set(s, STREAM_CLOSED);
}

struct stream *stream_new(int fd, size_t cap, struct source *owner) {
        struct stream *s = calloc(1, sizeof(*s));

        if (!s)
                return NULL;
        s->cap_tail = cap / 2;
        s->cap_head = cap - s->cap_tail;
        s->room = s->cap_tail + ROOM_READ;
        sha256_start(&s->dropped);
        s->owner = owner;
        s->watch.ready = stream_ready;
        int r = watch_start(&s->watch, fd, EPOLLIN);
        if (r < 0) {
                free(s);
                errno = -r;
                return NULL;
        }
        return s;
}

void stream_finish(struct stream *s) {
        int queued;

        if (s->state != STREAM_OPEN)
                return;
        s->state = STREAM_FINAL;
        /* Counted once, now: a background child that writes without end must not keep the command from ending. */
        s->left = TTY_LAST;
        if (!isatty(s->watch.fd) && ioctl(s->watch.fd, FIONREAD, &queued) == 0)
                s->left = (uint64_t) queued;
        if (s->left == 0)
                stream_set(s, STREAM_DRAIN);
        /* As a rule all of it fits in one or two reads; then EXIT can go out in this turn of the loop. */
        while (s->state == STREAM_FINAL && stream_allowance(s) > 0)
                stream_ready(&s->watch, EPOLLIN);
}

void stream_abandon(struct stream *s) {
        stream_free_kept(s);
        s->owner = NULL;
        s->followed = false;
        if (s->state == STREAM_CLOSED) {
                free(s);
                return;
        }
        s->state = STREAM_DRAIN;
        watch_events(&s->watch, EPOLLIN);
}

size_t stream_memory(const struct stream *s) {
        size_t in_head = (size_t) min_u64(s->total, s->cap_head);
        size_t in_ring = (size_t) min_u64(s->total - in_head, s->room);

        return ((in_head + 4095) & ~(size_t) 4095) + ((in_ring + 4095) & ~(size_t) 4095);
}

void stream_resume(struct stream *s) {
        if (s->state == STREAM_OPEN || s->state == STREAM_FINAL)
                watch_events(&s->watch, stream_allowance(s) > 0 ? EPOLLIN : 0);
}

void stream_follow(struct stream *s, uint64_t offset, uint64_t limit) {
        if (!s->followed) {
                s->followed = s->ever_followed = true;
                s->sent = min_u64(offset, s->total);
                s->limit = 0;
        }
        s->limit = max_u64(s->limit, limit);
        stream_resume(s);
}

void stream_unfollow(struct stream *s) {
        s->followed = false;
        stream_resume(s);
}

/* The longest run of kept bytes at or after *at. A follower may also have what lies before the kept tail but is still in
 * the ring. */
static struct span stream_slice(const struct stream *s, uint64_t *at, bool follower) {
        if (*at < s->cap_head && *at < s->total)
                return (struct span) { s->head + *at, (size_t) (min_u64(s->total, s->cap_head) - *at) };
        if (s->total <= s->cap_head)
                return (struct span) { 0 };
        uint64_t begin = s->total - min_u64(s->total - s->cap_head, follower ? s->room : s->cap_tail);
        *at = max_u64(*at, begin);
        if (*at >= s->total)
                return (struct span) { 0 };
        size_t position = (size_t) ((*at - s->cap_head) % s->room);
        return (struct span) { s->ring + position, min_size((size_t) (s->total - *at), s->room - position) };
}

bool stream_send(struct stream *s, uint8_t number, uint32_t channel, uint64_t *at, uint64_t end, bool follower) {
        uint64_t asked = *at;
        struct span run = stream_slice(s, at, follower);

        if (*at >= end && *at == asked)
                return false;
        /* Nothing but the new offset, if what was dropped reaches beyond the limit: else neither side would ever move. */
        size_t size = *at < end ? min_size((size_t) min_u64(run.size, end - *at), DATA_MAX) : 0;
        uint8_t *to = frame_raw(9 + size);
        if (!to)
                return false;
        to[0] = number;
        for (int i = 0; i < 8; i++)
                to[1 + i] = (uint8_t) (*at >> 8 * i);
        memcpy(to + 9, run.data, size);
        frame_raw_commit(T_OUTPUT, channel, 9 + size);
        *at += size;
        return true;
}
