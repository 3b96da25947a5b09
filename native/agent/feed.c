#include "feed.h"

#include <fcntl.h>
#include <sys/socket.h>

static void feed_close(struct feed *f) {
        if (f->ended)
                return;
        f->ended = true;
        pages_unmap(f->ring, FEED_WINDOW);
        f->ring = NULL;
        f->waiting = 0;
        int fd = f->watch.fd;
        if (f->is_tty || f->is_socket)
                watch_events(&f->watch, 0);
        else {
                watch_stop(&f->watch);
                close_fd(fd);
        }
        if (f->is_socket)
                (void) shutdown(fd, SHUT_WR);
        if (f->on_end)
                f->on_end(f);
}

/* Renewed in quarters of the window: a frame of credit for every few bytes would cost more than the bytes. */
static void feed_grant(struct feed *f) {
        uint64_t limit = f->received + FEED_WINDOW - f->waiting;

        if (f->eof || limit < f->granted + FEED_WINDOW / 4)
                return;
        f->granted = limit;
        frame_credit(f->channel, limit);
}

/* Returns how much went in; all of it once the reader is gone. */
static size_t feed_write(struct feed *f, const uint8_t *data, size_t size) {
        size_t done = 0;

        while (done < size && !f->ended) {
                ssize_t n = f->is_socket ? send(f->watch.fd, data + done, size - done, MSG_NOSIGNAL)
                                         : write(f->watch.fd, data + done, size - done);
                if (n > 0)
                        done += (size_t) n;
                else if (n < 0 && errno == EINTR)
                        continue;
                else if (n < 0 && errno == EAGAIN)
                        return done;
                else
                        feed_close(f);
        }
        return f->ended ? size : done;
}

static void feed_finish(struct feed *f) {
        if (f->eof && !f->ended && f->waiting == 0)
                feed_close(f);
}

static void feed_ready(struct watch *watch, uint32_t events) {
        struct feed *f = CONTAINER_OF(watch, struct feed, watch);

        /* An error without room to write: every reader is gone. */
        if ((events & EPOLLERR) && !f->is_tty && !f->is_socket) {
                feed_close(f);
                return;
        }
        while (f->waiting > 0) {
                size_t run = min_size(f->waiting, FEED_WINDOW - f->start);
                size_t n = feed_write(f, f->ring + f->start, run);
                if (f->ended)
                        return;
                f->start = (f->start + n) % FEED_WINDOW;
                f->waiting -= n;
                if (n < run)
                        break;
        }
        feed_grant(f);
        if (f->waiting == 0) {
                watch_events(watch, 0);
                feed_finish(f);
        }
}

int feed_start(struct feed *f, int fd, uint32_t channel) {
        f->channel = channel;
        f->watch.ready = feed_ready;
        int r = watch_start(&f->watch, fd, 0);
        if (r == 0)
                feed_grant(f);
        return r;
}

int feed_push(struct feed *f, struct span data) {
        f->received += data.size;
        if (f->received > f->granted || f->eof)
                return -EPROTO;
        if (f->waiting == 0 && !f->ended) {
                size_t n = feed_write(f, data.data, data.size);
                data.data += n;
                data.size -= n;
        }
        if (data.size > 0 && !f->ended) {
                if (!f->ring && !(f->ring = pages_map_own(FEED_WINDOW))) {
                        feed_close(f);
                        return 0;
                }
                /* Fits: no more than the window can be granted and not yet written. */
                size_t end = (f->start + f->waiting) % FEED_WINDOW;
                size_t run = min_size(data.size, FEED_WINDOW - end);
                memcpy(f->ring + end, data.data, run);
                memcpy(f->ring, data.data + run, data.size - run);
                f->waiting += data.size;
                watch_events(&f->watch, EPOLLOUT);
        }
        feed_grant(f);
        return 0;
}

void feed_eof(struct feed *f) {
        if (f->is_tty) {
                /* VEOF of a terminal in its default settings; in raw mode it is just the byte the user would have typed.
                 * It is ours, so it does not count against the credit. */
                f->granted++;
                (void) feed_push(f, (struct span) { (const uint8_t *) "\x04", 1 });
                return;
        }
        f->eof = true;
        feed_finish(f);
}

void feed_stop(struct feed *f) {
        int fd = f->watch.fd;

        f->ended = true;
        pages_unmap(f->ring, FEED_WINDOW);
        f->ring = NULL;
        f->waiting = 0;
        watch_stop(&f->watch);
        close_fd(fd);
}

void feed_forget_link(struct feed *f) {
        f->received = f->granted = 0;
}

void feed_regrant(struct feed *f) {
        if (f->watch.fd < 0 || f->eof)
                return;
        f->granted = f->received + FEED_WINDOW - f->waiting;
        frame_credit(f->channel, f->granted);
}
