/* Files, trees and tunnels: everything on the link that is not a command, and that ends with the connection. */
#pragma once

#include "link.h"
#include "loop.h"

enum { CHANNELS_MAX = 256, CHANNEL_WINDOW = 1 << 20 };

struct channel;

/* What can happen to a channel; NULL ignores it. Each may close the channel, which frees it. */
struct channel_class {
        int (*data)(struct channel *channel, struct span data); /* negative: a protocol error */
        void (*eof)(struct channel *channel);
        void (*close)(struct channel *channel); /* undo and release; the channel itself is freed by the caller */
};

struct channel {
        struct channel *next;
        const struct channel_class *class;
        struct source source;
        uint32_t id;
        uint64_t sent, limit;       /* towards the host: bytes, and how many it will take */
        uint64_t received, granted; /* from the host */
};

/* Links the channel in; size is that of the struct it heads. NULL with an ERROR sent if there are too many. */
void *channel_open(uint32_t id, size_t size, const struct channel_class *class, bool (*pump)(struct source *source));
void channel_close(struct channel *channel);
/* ERROR, then close. */
void channel_fail(struct channel *channel, int code, const char *what);
/* Renews the host's credit once a quarter of the window is used up. */
void channel_grant(struct channel *channel);
/* How much of want may be sent now. */
static inline size_t channel_credit(const struct channel *channel, size_t want) {
        return (size_t) min_u64(channel->limit > channel->sent ? channel->limit - channel->sent : 0, want);
}

/* DATA, EOF, CREDIT, CLOSE. Frames for a channel that is gone are normal and ignored. */
int channel_request(const struct header *header, struct span payload);
bool channel_exists(uint32_t id);
bool channels_open(void);
void channels_link_lost(void);
