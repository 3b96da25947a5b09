#include "link.h"

#include <malloc.h>
#include <sys/socket.h>

#include "loop.h"

enum {
        SMALL = 4096,
        OUT_LOW = 256 << 10,  /* sources stop here */
        OUT_HIGH = 1 << 20,   /* no more requests are read beyond: each may ask for an answer */
        OUT_MAX = 16 << 20,   /* a host that provokes this much without reading is not ours */
};

/* Bytes [start, end) of data are waiting. data is `small` until something bigger passes. */
struct buffer {
        uint8_t *data;
        size_t size, start, end;
        uint8_t small[SMALL];
};

static struct buffer in, out;
static struct watch listener, conn = { .fd = -1 };
static const struct link_hooks *hooks;
static bool broken, greeted;
static size_t frame_start;

static size_t pending(const struct buffer *b) {
        return b->end - b->start;
}

static void buffer_release(struct buffer *b) {
        if (b->data != b->small)
                pages_unmap(b->data, b->size);
        b->data = b->small;
        b->size = SMALL;
        b->start = b->end = 0;
}

/* Makes room for n bytes after end. */
static int buffer_reserve(struct buffer *b, size_t n, size_t max) {
        if (b->start == b->end)
                b->start = b->end = 0;
        if (b->size - b->end >= n)
                return 0;
        size_t used = pending(b);
        if (b->size >= used + n && b->start >= b->size / 2) {
                memmove(b->data, b->data + b->start, used);
        } else {
                size_t size = KIB(320);
                while (size < used + n)
                        size *= 2;
                if (size > max)
                        return -ENOBUFS;
                uint8_t *data = pages_map(size);
                if (!data)
                        return -ENOMEM;
                memcpy(data, b->data + b->start, used);
                buffer_release(b);
                b->data = data;
                b->size = size;
        }
        b->start = 0;
        b->end = used;
        return 0;
}

bool link_up(void) {
        return conn.fd >= 0 && !broken;
}

bool link_room(void) {
        return pending(&out) < OUT_LOW;
}

void link_trim(void) {
        if (pending(&in) == 0)
                buffer_release(&in);
        if (pending(&out) == 0)
                buffer_release(&out);
        /* What a transfer had on the heap; below its threshold glibc would keep it. */
        (void) malloc_trim(0);
}

static void link_drop(void) {
        if (conn.fd < 0)
                return;
        int fd = conn.fd;
        watch_stop(&conn);
        close_fd(fd);
        buffer_release(&in);
        buffer_release(&out);
        broken = greeted = false;
        hooks->lost();
}

static uint8_t *out_reserve(size_t n) {
        if (!link_up())
                return NULL;
        if (buffer_reserve(&out, n, OUT_MAX) < 0) {
                broken = true;
                return NULL;
        }
        return out.data + out.end;
}

static void out_append(const void *data, size_t size) {
        uint8_t *at = out_reserve(size);

        if (!at || size == 0)
                return;
        memcpy(at, data, size);
        out.end += size;
}

void frame_begin(enum frame_type type, uint32_t channel) {
        uint8_t header[FRAME_HEADER];

        header_encode(header, (uint8_t) type, channel, 0);
        out_append(header, sizeof(header));
        /* Relative, because the buffer may move while the frame grows. */
        frame_start = pending(&out) - FRAME_HEADER;
}

void frame_bytes(enum tag tag, const void *data, size_t size) {
        uint8_t head[5] = { (uint8_t) tag, (uint8_t) size, (uint8_t) (size >> 8), (uint8_t) (size >> 16), (uint8_t) (size >> 24) };

        out_append(head, sizeof(head));
        out_append(data, size);
}

void frame_number(enum tag tag, uint64_t value) {
        uint8_t bytes[8];

        for (int i = 0; i < 8; i++)
                bytes[i] = (uint8_t) (value >> 8 * i);
        frame_bytes(tag, bytes, sizeof(bytes));
}

void frame_text(enum tag tag, const char *text) {
        frame_bytes(tag, text, min_size(strlen(text), TEXT_MAX));
}

size_t frame_end(void) {
        if (!link_up())
                return 0;
        uint8_t *at = out.data + out.start + frame_start;
        uint32_t size = (uint32_t) (pending(&out) - frame_start - FRAME_HEADER);
        for (int i = 0; i < 4; i++)
                at[i] = (uint8_t) (size >> 8 * i);
        return size;
}

void frame_empty(enum frame_type type, uint32_t channel) {
        frame_begin(type, channel);
        (void) frame_end();
}

void frame_error(uint32_t channel, int code, enum step step, const char *text) {
        frame_begin(T_ERROR, channel);
        frame_number(ERRNO, (uint64_t) abs(code));
        frame_number(STEP, step);
        frame_text(TEXT, text);
        frame_end();
}

void frame_credit(uint32_t channel, uint64_t limit) {
        frame_begin(T_CREDIT, channel);
        frame_number(STREAM, 0);
        frame_number(LIMIT, limit);
        frame_end();
}

uint8_t *frame_raw(size_t max) {
        uint8_t *at = out_reserve(FRAME_HEADER + max);

        return at ? at + FRAME_HEADER : NULL;
}

void frame_raw_commit(enum frame_type type, uint32_t channel, size_t size) {
        if (!link_up() || size == 0)
                return;
        header_encode(out.data + out.end, (uint8_t) type, channel, (uint32_t) size);
        out.end += FRAME_HEADER + size;
}

static void out_flush(void) {
        while (pending(&out) > 0 && link_up()) {
                ssize_t n = send(conn.fd, out.data + out.start, pending(&out), MSG_NOSIGNAL | MSG_DONTWAIT);
                if (n > 0)
                        out.start += (size_t) n;
                else if (n < 0 && errno == EINTR)
                        continue;
                else if (n < 0 && errno == EAGAIN)
                        break;
                else
                        broken = true;
        }
}

/* Hands over whole frames until the input runs out or the answers pile up. */
static void in_parse(void) {
        struct header header;

        while (link_up() && pending(&in) >= FRAME_HEADER && pending(&out) < OUT_HIGH) {
                const uint8_t *at = in.data + in.start;
                if (header_decode(at, &header) < 0 || (!greeted && header.type != T_HELLO)) {
                        broken = true;
                        return;
                }
                size_t whole = FRAME_HEADER + (size_t) header.size;
                if (pending(&in) < whole) {
                        if (buffer_reserve(&in, whole - pending(&in), SIZE_MAX) < 0)
                                broken = true;
                        return;
                }
                in.start += whole;
                greeted = true;
                if (hooks->frame(&header, (struct span) { at + FRAME_HEADER, header.size }) < 0)
                        broken = true;
        }
}

/* How much to read: exactly the rest of a big frame, so that the next one starts at the front of the buffer and nothing
 * has to be moved; else whatever has come. */
static size_t in_want(void) {
        struct header header;

        if (pending(&in) >= FRAME_HEADER && header_decode(in.data + in.start, &header) == 0) {
                size_t whole = FRAME_HEADER + (size_t) header.size;
                if (whole >= pending(&in) + SMALL)
                        return whole - pending(&in);
        }
        if (in.size - in.end < SMALL / 2 && buffer_reserve(&in, SMALL / 2, SIZE_MAX) < 0)
                return 0;
        return min_size(in.size - in.end, SMALL);
}

static void in_read(void) {
        for (int i = 0; i < 8 && link_up() && pending(&out) < OUT_HIGH; i++) {
                size_t want = in_want();
                ssize_t n = recv(conn.fd, in.data + in.end, want, MSG_DONTWAIT);
                if (n < 0 && (errno == EAGAIN || errno == EINTR))
                        return;
                if (n <= 0) {
                        broken = true;
                        return;
                }
                in.end += (size_t) n;
                in_parse();
                if ((size_t) n < want)
                        return;
        }
}

static void conn_ready(struct watch *watch, uint32_t events) {
        (void) watch;
        if (events & EPOLLOUT)
                out_flush();
        if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                in_read();
}

static void listener_ready(struct watch *watch, uint32_t events) {
        (void) events;
        /* First, because it also frees a descriptor: with none left accept4 would fail for ever, and so would we spin. */
        link_drop();
        int fd = accept4(watch->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
                return;
        if (watch_start(&conn, fd, EPOLLIN) < 0)
                close_fd(fd);
}

void link_turn(void) {
        if (conn.fd < 0)
                return;
        out_flush();
        in_parse();
        out_flush();
        if (broken) {
                link_drop();
                return;
        }
        watch_events(&conn, (pending(&out) < OUT_HIGH ? EPOLLIN : 0u) | (pending(&out) > 0 ? EPOLLOUT : 0u));
}

int link_init(int listen_fd, const struct link_hooks *link_hooks) {
        hooks = link_hooks;
        buffer_release(&in);
        buffer_release(&out);
        conn.ready = conn_ready;
        listener.ready = listener_ready;
        return watch_start(&listener, listen_fd, EPOLLIN);
}
