/* The one connection to the host: accepting, reading frames, queueing frames. Every frame_* call is a no-op while nobody
 * is connected; nobody needs to check first. */
#pragma once

#include "frame.h"

struct link_hooks {
        /* Handles one whole frame. Negative: a protocol error, which ends the connection. */
        int (*frame)(const struct header *header, struct span payload);
        /* The connection has ended, or is about to be replaced. */
        void (*lost)(void);
};

/* What carries the bytes: socket.c or serial.c. */
struct carrier {
        /* Takes what it can of data: how many bytes that is, or a negative errno, of which -EAGAIN means later. */
        ssize_t (*send)(const uint8_t *data, size_t size);
        /* Once per turn of the loop: is there room for more input, and does output wait? */
        void (*turn)(bool in, bool out);
        /* The connection is over. */
        void (*drop)(void);
};

void link_init(const struct carrier *carrier, const struct link_hooks *hooks);

/* Somebody is there and has said HELLO: before that nothing is sent, as nobody knows to whom. */
bool link_up(void);
/* True while sources may queue more; false once a few hundred KiB wait for a host that reads slowly. */
bool link_room(void);
/* Sends what the socket takes, parses what came in while the queue was too full to answer, and carries out a decision to
 * drop the connection. Once per turn of the loop. */
void link_turn(void);
/* Gives memory back that is not in use now. */
void link_trim(void);

void frame_begin(enum frame_type type, uint32_t channel);
void frame_number(enum tag tag, uint64_t value);
void frame_bytes(enum tag tag, const void *data, size_t size);
void frame_text(enum tag tag, const char *text);
/* Returns the payload's size. */
size_t frame_end(void);
void frame_empty(enum frame_type type, uint32_t channel);
/* ERROR; code is a positive or a negative errno. */
void frame_error(uint32_t channel, int code, enum step step, const char *text);
void frame_credit(uint32_t channel, uint64_t limit);

/* Room for a raw payload of up to max bytes right in the queue, so that file data is not copied twice; NULL if there is
 * none. Nothing may be queued until frame_raw_commit(), which may also send less, or 0 bytes: nothing at all. */
uint8_t *frame_raw(size_t max);
void frame_raw_commit(enum frame_type type, uint32_t channel, size_t size);
/* One whole frame with a payload that is ready. */
void frame_payload(enum frame_type type, uint32_t channel, const void *payload, size_t size);

/* For carriers. A new connection; an old one ends. */
void link_begin(void);
void link_end(void);
bool link_alive(void);
/* False while answers pile up: then no more input is taken. */
bool link_accepts(void);
/* Input from a stream socket, straight into the queue. */
void link_read(int fd);
/* Input that had to be decoded first; without a connection it is thrown away. */
void link_input(const uint8_t *data, size_t size);
void link_flush(void);
