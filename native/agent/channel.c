#include "channel.h"

static struct channel *channels;
static unsigned n_channels;

static struct channel *find(uint32_t id) {
        struct channel *c = channels;

        while (c && c->id != id)
                c = c->next;
        return c;
}

bool channel_exists(uint32_t id) {
        return find(id) != NULL;
}

bool channels_open(void) {
        return channels != NULL;
}

void *channel_open(uint32_t id, size_t size, const struct channel_class *class, bool (*pump)(struct source *)) {
        struct channel *c = n_channels < CHANNELS_MAX ? calloc(1, size) : NULL;

        if (!c) {
                frame_error(id, EAGAIN, STEP_LIMIT, "too many transfers at once");
                return NULL;
        }
        c->id = id;
        c->class = class;
        c->source.pump = pump;
        c->next = channels;
        channels = c;
        n_channels++;
        return c;
}

void channel_close(struct channel *c) {
        struct channel **at = &channels;

        while (*at != c)
                at = &(*at)->next;
        *at = c->next;
        n_channels--;
        source_cancel(&c->source);
        if (c->class->close)
                c->class->close(c);
        free(c);
}

void channel_fail(struct channel *c, int code, const char *what) {
        frame_error(c->id, code, STEP_OTHER, what);
        channel_close(c);
}

void channel_grant(struct channel *c) {
        uint64_t limit = c->received + CHANNEL_WINDOW;

        if (limit < c->granted + CHANNEL_WINDOW / 4)
                return;
        c->granted = limit;
        frame_credit(c->id, limit);
}

void channels_link_lost(void) {
        while (channels)
                channel_close(channels);
}

static int on_data(struct channel *c, struct span data) {
        if (!c->class->data || data.size > DATA_MAX)
                return -EPROTO;
        c->received += data.size;
        if (c->received > c->granted)
                return -EPROTO;
        return c->class->data(c, data);
}

static int on_credit(struct channel *c, struct span payload) {
        static const uint8_t allowed[] = { STREAM, LIMIT, 0 };
        static struct args args;
        int r = args_decode(payload, allowed, &args);

        if (r < 0)
                return r;
        if (!c)
                return 0;
        c->limit = max_u64(c->limit, number_or(&args, LIMIT, 0));
        if (c->source.pump)
                source_wake(&c->source);
        return 0;
}

int channel_request(const struct header *header, struct span payload) {
        struct channel *c = find(header->channel);

        if (header->type == T_CREDIT)
                return on_credit(c, payload);
        if (!c)
                return 0;
        switch (header->type) {
        case T_DATA:
                return on_data(c, payload);
        case T_EOF:
                if (!c->class->eof)
                        return -EPROTO;
                c->class->eof(c);
                return 0;
        case T_CLOSE:
                channel_close(c);
                return 0;
        default:
                return -EPROTO;
        }
}
