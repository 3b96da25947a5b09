#include "loop.h"

enum { BATCH = 32 };

static int epoll_fd = -1;
static struct epoll_event batch[BATCH];
static int batch_count;
static struct source *first, **last = &first;

int loop_init(void) {
        epoll_fd = epoll_create1(EPOLL_CLOEXEC);
        return epoll_fd < 0 ? -errno : 0;
}

static int control(int operation, struct watch *watch, uint32_t events) {
        struct epoll_event event = { .events = events, .data.ptr = watch };

        return epoll_ctl(epoll_fd, operation, watch->fd, &event) < 0 ? -errno : 0;
}

int watch_start(struct watch *watch, int fd, uint32_t events) {
        watch->fd = fd;
        watch->events = 0;
        if (events == 0)
                return 0;
        int r = control(EPOLL_CTL_ADD, watch, events);
        if (r < 0)
                watch->fd = -1;
        else
                watch->events = events;
        return r;
}

static void forget_batch(struct watch *watch) {
        for (int i = 0; i < batch_count; i++)
                if (batch[i].data.ptr == watch)
                        batch[i].data.ptr = NULL;
}

void watch_events(struct watch *watch, uint32_t events) {
        if (watch->fd < 0 || watch->events == events)
                return;
        int operation = watch->events == 0 ? EPOLL_CTL_ADD : events == 0 ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
        /* ADD can fail for want of kernel memory; the watch then stays at rest and the next change tries again. */
        if (control(operation, watch, events) == 0)
                watch->events = events;
        if (events == 0)
                forget_batch(watch);
}

void watch_stop(struct watch *watch) {
        if (watch->fd < 0)
                return;
        watch_events(watch, 0);
        forget_batch(watch);
        watch->fd = -1;
}

void source_wake(struct source *source) {
        if (source->queued)
                return;
        source->queued = true;
        source->next = NULL;
        *last = source;
        last = &source->next;
}

void source_cancel(struct source *source) {
        if (!source->queued)
                return;
        for (struct source **at = &first; *at; at = &(*at)->next)
                if (*at == source) {
                        *at = source->next;
                        if (last == &source->next)
                                last = at;
                        break;
                }
        source->queued = false;
}

bool sources_queued(void) {
        return first != NULL;
}

static struct source *source_pop(void) {
        struct source *source = first;

        source_cancel(source);
        return source;
}

void sources_run(bool (*room)(void)) {
        size_t turns = 0;

        for (struct source *s = first; s; s = s->next)
                turns++;
        /* A source may cancel others or free itself in its turn; then first is NULL before the turns are used up. */
        while (turns-- > 0 && first && room()) {
                struct source *source = source_pop();
                if (source->pump(source))
                        source_wake(source);
        }
}

int loop_once(int timeout_ms) {
        int n = epoll_wait(epoll_fd, batch, BATCH, timeout_ms);

        batch_count = n > 0 ? n : 0;
        for (int i = 0; i < batch_count; i++) {
                struct watch *watch = batch[i].data.ptr;
                if (watch)
                        watch->ready(watch, batch[i].events);
        }
        batch_count = 0;
        return n;
}
