/* One epoll loop, and the queue of those that have work to do without waiting for a descriptor. */
#pragma once

#include <sys/epoll.h>

#include "util.h"

struct watch {
        int fd; /* -1: not started; the owner closes it */
        uint32_t events;
        void (*ready)(struct watch *watch, uint32_t events);
};

/* Something that sends frames or works through a directory in slices, so that no request can hold up the others. */
struct source {
        struct source *next;
        bool queued;
        /* Does one slice; true if there is more to do at once. */
        bool (*pump)(struct source *source);
};

int loop_init(void);

int watch_start(struct watch *watch, int fd, uint32_t events);
/* 0 rests: epoll reports a hang-up even to those who asked for nothing, which would spin. */
void watch_events(struct watch *watch, uint32_t events);
/* Also forgets an event that has been fetched but not delivered, so the owner may be freed. */
void watch_stop(struct watch *watch);

void source_wake(struct source *source);
void source_cancel(struct source *source);
bool sources_queued(void);
/* Each queued source gets one turn, as long as room() says so. */
void sources_run(bool (*room)(void));

/* Waits up to timeout_ms (-1: for ever) and delivers what happened. Returns how many that were, 0 after the timeout. */
int loop_once(int timeout_ms);
