#include "socket.h"

#include <linux/vm_sockets.h>
#include <sys/socket.h>

#include "link.h"
#include "loop.h"

static struct watch listener, conn = { .fd = -1 };
static bool is_vsock;

static ssize_t socket_send(const uint8_t *data, size_t size) {
        ssize_t n = send(conn.fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);

        return n < 0 ? -errno : n;
}

static void socket_turn(bool in, bool out) {
        watch_events(&conn, (in ? EPOLLIN : 0u) | (out ? EPOLLOUT : 0u));
}

static void socket_drop(void) {
        int fd = conn.fd;

        watch_stop(&conn);
        close_fd(fd);
}

const struct carrier socket_carrier = { .send = socket_send, .turn = socket_turn, .drop = socket_drop };

static void conn_ready(struct watch *watch, uint32_t events) {
        if (events & EPOLLOUT)
                link_flush();
        if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                link_read(watch->fd);
}

static int accept_one(int fd, struct sockaddr_vm *peer) {
        socklen_t size = sizeof(*peer);

        return accept4(fd, (struct sockaddr *) peer, &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
}

static void listener_ready(struct watch *watch, uint32_t events) {
        struct sockaddr_vm peer = { 0 };

        (void) events;
        if (!is_vsock)
                link_end();
        cleanup_fd int fd = accept_one(watch->fd, &peer);
        if (fd < 0 && is_vsock && errno != EAGAIN) {
                /* Most likely no descriptor is left: ending a connection frees one. Otherwise accepting would fail for ever,
                 * and so would we spin. (Nobody but the daemon can connect to a Unix socket: there this is done first.) */
                link_end();
                fd = accept_one(watch->fd, &peer);
        }
        if (fd < 0)
                return;
        /* A process in the guest can connect to the guest's own address (vsock loopback); only the host is the daemon. */
        if (is_vsock && peer.svm_cid != VMADDR_CID_HOST)
                return;
        link_end();
        if (watch_start(&conn, fd, EPOLLIN) < 0)
                return;
        (void) steal_fd(&fd);
        link_begin();
}

int socket_start(int listen_fd) {
        int domain = AF_UNIX;
        socklen_t size = sizeof(domain);

        (void) getsockopt(listen_fd, SOL_SOCKET, SO_DOMAIN, &domain, &size);
        is_vsock = domain == AF_VSOCK;
        conn.ready = conn_ready;
        listener.ready = listener_ready;
        return watch_start(&listener, listen_fd, EPOLLIN);
}
