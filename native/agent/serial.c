/* Neither QEMU nor the kernel forgets what is half-way when one daemon goes and the next one comes. So the byte FE is sent
 * as FE FF, and FE 00 with sixteen hex digits, which payload therefore cannot contain, begins a connection: the host sends
 * it, with digits of its own, until we have sent the same back. After any FE the decoder starts anew, so that it finds the
 * next beginning in whatever garbage. */
#include "serial.h"

#include <poll.h>
#include <sys/timerfd.h>

#include "link.h"
#include "loop.h"

enum {
        ESCAPE = 0xfe,
        NONCE = 16,
        SYNC = 2 + NONCE,
        PIECE = 4096, /* what the port gives at once */
        GONE_S = 1,
        CODED = 32 << 10, /* what it takes at once: drivers/char/virtio_console.c, port_fops_write() */
};

enum state { PLAIN, ESCAPED, IN_NONCE };

static const uint32_t ALONE = EPOLLIN | EPOLLOUT | EPOLLET;

static struct watch port = { .fd = -1 }, timer = { .fd = -1 };
static bool host_there;

static enum state state;
static uint8_t nonce[NONCE];
static size_t nonce_size;
static uint8_t current[NONCE]; /* of the connection, or of the last one */

/* Encoded and not yet taken by the port. Bytes [start, end). */
static uint8_t coded[CODED];
static size_t coded_start, coded_end;

static bool is_hex(uint8_t c) {
        return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
}

static void coded_add(const void *data, size_t size) {
        memcpy(coded + coded_end, data, size);
        coded_end += size;
}

static void coded_mark(const uint8_t digits[static NONCE]) {
        static const uint8_t begin[2] = { ESCAPE, 0 };

        if (coded_start > 0) {
                memmove(coded, coded + coded_start, coded_end - coded_start);
                coded_end -= coded_start;
                coded_start = 0;
        }
        /* No room: the host, who asks faster than it reads, will ask again. */
        if (CODED - coded_end < SYNC)
                return;
        coded_add(begin, sizeof(begin));
        coded_add(digits, NONCE);
}

/* Encodes from the front of data as much as fits; returns how much that was. */
static size_t encode(const uint8_t *data, size_t size) {
        static const uint8_t escaped[2] = { ESCAPE, 0xff };
        size_t at = 0;

        coded_start = coded_end = 0;
        while (at < size && CODED - coded_end >= sizeof(escaped)) {
                if (data[at] == ESCAPE) {
                        coded_add(escaped, sizeof(escaped));
                        at++;
                        continue;
                }
                size_t run = min_size(size - at, CODED - coded_end);
                const uint8_t *stop = memchr(data + at, ESCAPE, run);
                run = stop ? (size_t) (stop - data) - at : run;
                coded_add(data + at, run);
                at += run;
        }
        return at;
}

/* 0 when all is written. */
static int coded_write(void) {
        while (coded_start < coded_end) {
                ssize_t n = write(port.fd, coded + coded_start, coded_end - coded_start);
                if (n < 0 && errno == EINTR)
                        continue;
                if (n <= 0)
                        return n < 0 ? -errno : -EAGAIN;
                coded_start += (size_t) n;
        }
        return 0;
}

static ssize_t serial_send(const uint8_t *data, size_t size) {
        int r = coded_write();

        if (r < 0)
                return r;
        size_t taken = encode(data, size);
        /* An error shows again at the next call. */
        (void) coded_write();
        return (ssize_t) taken;
}

static void serial_turn(bool in, bool out) {
        (void) coded_write();
        /* Without a host the port reports a hang-up for as long as that lasts. Edge-triggered, it does so once, and then tells
         * of the change: the driver wakes its waiters when a host connects. */
        watch_events(&port, host_there ? (in ? EPOLLIN : 0u) | (out || coded_start < coded_end ? EPOLLOUT : 0u) : ALONE);
}

/* Digits of nobody tell a host that goes on talking that its connection is over. */
static void serial_drop(void) {
        memset(current, '0', NONCE);
        coded_mark(current);
}

const struct carrier serial_carrier = { .send = serial_send, .turn = serial_turn, .drop = serial_drop };

/* The host repeats a beginning until it is answered; only the first of equal ones begins anything, and what follows a later
 * one may already be payload. */
static void synchronise(void) {
        if (!link_alive() || memcmp(current, nonce, NONCE) != 0) {
                link_end();
                coded_start = coded_end = 0;
                memcpy(current, nonce, NONCE);
                link_begin();
        }
        coded_mark(current);
}

/* Takes one byte that is not plain payload; returns true if it stands for a payload byte FE. */
static bool decode_special(uint8_t c) {
        if (c == ESCAPE)
                state = ESCAPED;
        else if (state == ESCAPED && c == 0) {
                state = IN_NONCE;
                nonce_size = 0;
        } else if (state == IN_NONCE && is_hex(c)) {
                nonce[nonce_size++] = c;
                if (nonce_size == NONCE) {
                        state = PLAIN;
                        synchronise();
                }
        } else {
                bool payload = state == ESCAPED && c == 0xff;
                state = PLAIN;
                if (!payload)
                        link_end();
                return payload;
        }
        return false;
}

/* Decodes in place, and hands payload on in pieces as long as possible. */
static void decode(uint8_t *data, size_t size) {
        size_t at = 0, from = 0, to = 0;

        while (at < size) {
                if (state == PLAIN && data[at] != ESCAPE) {
                        const uint8_t *stop = memchr(data + at, ESCAPE, size - at);
                        size_t run = stop ? (size_t) (stop - data) - at : size - at;
                        memmove(data + to, data + at, run);
                        to += run;
                        at += run;
                        continue;
                }
                /* What came before the last digit belongs to the connection that it ends. */
                if (state == IN_NONCE && nonce_size == NONCE - 1) {
                        link_input(data + from, to - from);
                        from = to;
                }
                if (decode_special(data[at++]))
                        data[to++] = ESCAPE;
        }
        link_input(data + from, to - from);
}

/* A host that went may be back already: the news of both comes apart from the data, and later than what the new one said.
 * So the connection ends only if nobody is there a while after. */
static void host_gone(void) {
        struct itimerspec in_a_while = { .it_value.tv_sec = GONE_S };

        host_there = false;
        if (link_alive())
                (void) timerfd_settime(timer.fd, 0, &in_a_while, NULL);
}

static void timer_ready(struct watch *watch, uint32_t events) {
        struct pollfd poll_port = { .fd = port.fd };
        uint64_t count;

        (void) events;
        (void) !read(watch->fd, &count, sizeof(count));
        if (poll(&poll_port, 1, 0) > 0 && (poll_port.revents & POLLHUP))
                link_end();
        else
                host_there = true;
}

static void serial_read(void) {
        static const struct itimerspec never = { 0 };
        static uint8_t piece[PIECE];

        /* Without a host there may be something of the next one, who waits while the queue is full for the last one. */
        for (int i = 0; i < 16 && (link_accepts() || !host_there); i++) {
                ssize_t n = read(port.fd, piece, sizeof(piece));
                if (n < 0 && errno == EINTR)
                        continue;
                if (n == 0 || (n < 0 && errno != EAGAIN)) {
                        host_gone();
                        return;
                }
                if (!host_there)
                        (void) timerfd_settime(timer.fd, 0, &never, NULL);
                host_there = true;
                if (n < 0)
                        return;
                decode(piece, (size_t) n);
        }
}

static void port_ready(struct watch *watch, uint32_t events) {
        (void) watch;
        if (events & EPOLLOUT)
                link_flush();
        if (events & EPOLLHUP)
                host_there = false;
        serial_read();
}

int serial_start(int fd) {
        int timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);

        port.ready = port_ready;
        timer.ready = timer_ready;
        int r = timer_fd < 0 ? -errno : watch_start(&timer, timer_fd, EPOLLIN);
        /* To a host that talks to an agent that was here before us. */
        serial_drop();
        return r < 0 ? r : watch_start(&port, fd, ALONE);
}
