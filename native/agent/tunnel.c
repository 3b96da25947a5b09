#include "tunnel.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "channel.h"
#include "feed.h"

struct tunnel {
        struct channel channel;
        struct watch watch; /* connecting, then the way to the host */
        struct feed feed;   /* the way from the host, on a descriptor of its own */
        uint16_t port;
        bool tried_six, connected, at_end;
};

static void tunnel_close(struct channel *channel) {
        struct tunnel *t = CONTAINER_OF(channel, struct tunnel, channel);
        int fd = t->watch.fd;

        watch_stop(&t->watch);
        close_fd(fd);
        if (t->feed.watch.fd >= 0)
                feed_stop(&t->feed);
}

static void feed_ended(struct feed *feed) {
        /* Not closed here: the feed is still at work. */
        source_wake(&CONTAINER_OF(feed, struct tunnel, feed)->channel.source);
}

static void connected(struct tunnel *t) {
        int copy = fcntl(t->watch.fd, F_DUPFD_CLOEXEC, 0);

        if (copy < 0) {
                channel_fail(&t->channel, errno, "dup");
                return;
        }
        t->connected = true;
        frame_empty(T_CONNECTED, t->channel.id);
        t->feed.is_socket = true;
        t->feed.on_end = feed_ended;
        int r = feed_start(&t->feed, copy, t->channel.id);
        if (r < 0) {
                close_fd(copy);
                channel_fail(&t->channel, r, "watch");
                return;
        }
        watch_events(&t->watch, EPOLLIN);
}

/* Starts to connect to this family's loopback; 0 or -errno. */
static int dial(struct tunnel *t, int family) {
        struct sockaddr_in four = { .sin_family = AF_INET, .sin_port = htons(t->port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
        struct sockaddr_in6 six = { .sin6_family = AF_INET6, .sin6_port = htons(t->port), .sin6_addr = in6addr_loopback };
        bool is_six = family == AF_INET6;
        int old = t->watch.fd;

        watch_stop(&t->watch);
        close_fd(old);
        cleanup_fd int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd < 0)
                return -errno;
        const void *address = is_six ? (const void *) &six : &four;
        if (connect(fd, address, is_six ? sizeof(six) : sizeof(four)) < 0 && errno != EINPROGRESS)
                return -errno;
        int r = watch_start(&t->watch, fd, EPOLLOUT);
        if (r == 0)
                (void) steal_fd(&fd);
        return r;
}

/* 127.0.0.1 did not answer: some servers listen on ::1 alone. */
static void dial_next(struct tunnel *t, int code) {
        if (!t->tried_six) {
                t->tried_six = true;
                if (dial(t, AF_INET6) == 0)
                        return;
        }
        channel_fail(&t->channel, code, "connect");
}

static void tunnel_ready(struct watch *watch, uint32_t events) {
        struct tunnel *t = CONTAINER_OF(watch, struct tunnel, watch);
        int code = 0;
        socklen_t size = sizeof(code);

        (void) events;
        if (t->connected) {
                watch_events(watch, 0);
                source_wake(&t->channel.source);
                return;
        }
        if (getsockopt(watch->fd, SOL_SOCKET, SO_ERROR, &code, &size) < 0)
                code = errno;
        if (code == 0)
                connected(t);
        else
                dial_next(t, code);
}

/* One frame of what the socket holds; false when it has to be waited for, or the tunnel is gone. */
static bool tunnel_pump(struct source *source) {
        struct tunnel *t = CONTAINER_OF(source, struct tunnel, channel.source);
        size_t want = channel_credit(&t->channel, KIB(64));

        if (!t->connected)
                return false;
        if (t->at_end) {
                if (t->feed.ended)
                        channel_close(&t->channel);
                return false;
        }
        uint8_t *to = want > 0 ? frame_raw(want) : NULL;
        if (!to)
                return false; /* until CREDIT */
        ssize_t n = recv(t->watch.fd, to, want, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
                watch_events(&t->watch, EPOLLIN);
                return false;
        }
        if (n < 0) {
                channel_fail(&t->channel, errno, "receive");
                return false;
        }
        frame_raw_commit(T_DATA, t->channel.id, (size_t) n);
        t->channel.sent += (uint64_t) n;
        if (n == 0) {
                t->at_end = true;
                frame_empty(T_EOF, t->channel.id);
        }
        return true;
}

static int tunnel_data(struct channel *channel, struct span data) {
        struct tunnel *t = CONTAINER_OF(channel, struct tunnel, channel);

        return t->connected ? feed_push(&t->feed, data) : -EPROTO;
}

static void tunnel_eof(struct channel *channel) {
        struct tunnel *t = CONTAINER_OF(channel, struct tunnel, channel);

        if (t->connected)
                feed_eof(&t->feed);
}

void tunnel_connect(uint32_t id, const struct args *args) {
        static const struct channel_class class = { .data = tunnel_data, .eof = tunnel_eof, .close = tunnel_close };
        struct tunnel *t = channel_open(id, sizeof(*t), &class, tunnel_pump);

        if (!t)
                return;
        t->watch.fd = t->feed.watch.fd = -1;
        t->watch.ready = tunnel_ready;
        t->channel.limit = number_or(args, LIMIT, 0);
        t->channel.granted = UINT64_MAX; /* the feed keeps the account */
        uint64_t port = number_or(args, PORT, 0);
        if (port == 0 || port > UINT16_MAX) {
                channel_fail(&t->channel, EINVAL, "not a port");
                return;
        }
        t->port = (uint16_t) port;
        int r = dial(t, AF_INET);
        if (r < 0)
                dial_next(t, -r);
}
