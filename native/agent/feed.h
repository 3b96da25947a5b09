/* Bytes from the host on their way into a pipe, a pty or a socket, under credit. */
#pragma once

#include "link.h"
#include "loop.h"

enum { FEED_WINDOW = 256 << 10 };

struct feed {
        struct watch watch;
        uint32_t channel;
        uint8_t *ring; /* FEED_WINDOW bytes, while some wait */
        size_t start, waiting;
        uint64_t received, granted; /* on this connection */
        bool eof;    /* no more will come; the end is closed once nothing waits */
        bool ended;  /* the end was closed, or its reader is gone: the rest is thrown away */
        bool is_tty; /* the end of the input is a ^D, and closing would hang up */
        bool is_socket;
        void (*on_end)(struct feed *feed); /* may be NULL */
};

/* Takes fd, which must be non-blocking, and grants the first window. */
int feed_start(struct feed *feed, int fd, uint32_t channel);
/* Negative: beyond the credit. */
int feed_push(struct feed *feed, struct span data);
void feed_eof(struct feed *feed);
void feed_stop(struct feed *feed);
/* A connection has ended; the next one counts from 0, and may send nothing before feed_regrant(). */
void feed_forget_link(struct feed *feed);
void feed_regrant(struct feed *feed);
