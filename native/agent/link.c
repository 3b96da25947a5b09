#include "link.h"

#include <malloc.h>
#include <sys/socket.h>

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
static const struct carrier *carrier;
static const struct link_hooks *hooks;
static bool connected, broken, greeted;
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

bool link_alive(void) {
        return connected && !broken;
}

bool link_up(void) {
        return greeted && link_alive();
}

bool link_room(void) {
        return pending(&out) < OUT_LOW;
}

bool link_accepts(void) {
        return pending(&out) < OUT_HIGH;
}

void link_trim(void) {
        if (pending(&in) == 0)
                buffer_release(&in);
        if (pending(&out) == 0)
                buffer_release(&out);
        /* What a transfer had on the heap; below its threshold glibc would keep it. */
        (void) malloc_trim(0);
}

void link_begin(void) {
        link_end();
        connected = true;
}

void link_end(void) {
        if (!connected)
                return;
        carrier->drop();
        buffer_release(&in);
        buffer_release(&out);
        connected = broken = greeted = false;
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

void frame_payload(enum frame_type type, uint32_t channel, const void *payload, size_t size) {
        frame_begin(type, channel);
        out_append(payload, size);
        (void) frame_end();
}

void link_flush(void) {
        while (pending(&out) > 0 && link_up()) {
                ssize_t n = carrier->send(out.data + out.start, pending(&out));
                if (n > 0)
                        out.start += (size_t) n;
                else if (n == -EINTR)
                        continue;
                else if (n == -EAGAIN)
                        break;
                else
                        broken = true;
        }
}

/* Hands over whole frames until the input runs out or the answers pile up. */
static void in_parse(void) {
        struct header header;

        while (link_alive() && pending(&in) >= FRAME_HEADER && link_accepts()) {
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

void link_read(int fd) {
        for (int i = 0; i < 8 && link_alive() && link_accepts(); i++) {
                size_t want = in_want();
                ssize_t n = recv(fd, in.data + in.end, want, MSG_DONTWAIT);
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

void link_input(const uint8_t *data, size_t size) {
        if (!link_alive() || size == 0)
                return;
        if (buffer_reserve(&in, size, SIZE_MAX) < 0) {
                broken = true;
                return;
        }
        memcpy(in.data + in.end, data, size);
        in.end += size;
        in_parse();
}

void link_turn(void) {
        if (connected) {
                link_flush();
                in_parse();
                link_flush();
                if (broken)
                        link_end();
        }
        carrier->turn(link_accepts(), pending(&out) > 0);
}

void link_init(const struct carrier *link_carrier, const struct link_hooks *link_hooks) {
        carrier = link_carrier;
        hooks = link_hooks;
        buffer_release(&in);
        buffer_release(&out);
}
