/* One output stream of one command: what is read from its pipe or pty is kept as a head and a tail, and may be followed. */
#pragma once

#include "link.h"
#include "loop.h"
#include "sha256.h"

enum { CAP_MAX = 256 << 20 };

enum stream_state {
        STREAM_OPEN,  /* the process runs */
        STREAM_FINAL, /* it has ended; `left` more bytes are its own */
        STREAM_DRAIN, /* it has ended and everything is read; what background children write is thrown away */
        STREAM_CLOSED,
};

struct stream {
        struct watch watch;
        struct source *owner; /* woken when there is something to send or the state moves; NULL: the record is gone */
        enum stream_state state;
        size_t cap_head, cap_tail;
        size_t room;          /* size of the ring: the tail, and what one read brings before the oldest of it is summed */
        uint8_t *head, *ring;
        uint64_t total;
        uint64_t left;
        bool followed, ever_followed; /* by this connection */
        uint64_t sent, limit; /* of the follower */
        struct sha256 dropped; /* of what lies between the head and the tail, as far as it has left the tail */
};

/* Takes fd, which must be non-blocking. NULL with errno. */
struct stream *stream_new(int fd, size_t cap, struct source *owner);
/* The process has ended: what the kernel holds now is the last that counts. */
void stream_finish(struct stream *s);
/* Frees what is kept; the pipe is drained until its last writer is gone. */
void stream_abandon(struct stream *s);
static inline bool stream_complete(const struct stream *s) {
        return s->state == STREAM_DRAIN || s->state == STREAM_CLOSED;
}
/* How many bytes lie between the kept head and the kept tail. */
uint64_t stream_dropped(const struct stream *s);
/* Bytes of memory that what is kept occupies. */
size_t stream_memory(const struct stream *s);

void stream_follow(struct stream *s, uint64_t offset, uint64_t limit);
void stream_unfollow(struct stream *s);
/* Sends one OUTPUT frame of what lies in [*at, end) and moves *at, also over what was dropped. False: nothing to send.
 * end is at most s->total. */
bool stream_send(struct stream *s, uint8_t number, uint32_t channel, uint64_t *at, uint64_t end, bool follower);
/* After a follower was sent something: there may be room to read again. */
void stream_resume(struct stream *s);
