#include "zygote.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>

enum { AGENT_FD = 3 };

__attribute__((noreturn)) static void run(struct span fields, const struct args *args, int socket, int null) {
        static char *env[] = { "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", NULL };
        char **argv = calloc((size_t) args->count[ARG] + 1, sizeof(*argv));
        struct span value;
        sigset_t none;
        uint8_t tag;
        size_t n = 0;

        while (argv && field_next(&fields, &tag, &value) > 0)
                if (tag == ARG && !(argv[n++] = span_dup(value, FRAME_MAX)))
                        _exit(127);
        if (!argv || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0 || dup2(socket, AGENT_FD) < 0 ||
            close_range(AGENT_FD + 1, ~0u, 0) < 0)
                _exit(127);
        (void) setsid();
        umask(0);
        sigemptyset(&none);
        (void) sigprocmask(SIG_SETMASK, &none, NULL);
        (void) child_execute(argv, env);
        _exit(127);
}

int zygote_start(struct span fields, const struct args *args, const struct confinement *c, pid_t *ret_pid) {
        struct zygote_order order = { .kind = 1 };
        struct iovec iov[] = { { &order, sizeof(order) }, { c->filter, c->filter_count * sizeof(*c->filter) } };
        struct msghdr message = { .msg_iov = iov, .msg_iovlen = 2 };
        int fds[2];

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
                return -errno;
        cleanup_fd int ours = fds[0], theirs = fds[1];
        cleanup_fd int null = open("/dev/null", O_RDWR | O_CLOEXEC);
        if (null < 0 || sendmsg(ours, &message, MSG_NOSIGNAL) < 0 || fcntl(ours, F_SETFL, O_NONBLOCK) < 0)
                return -errno;
        pid_t pid = fork();
        if (pid < 0)
                return -errno;
        if (pid == 0)
                run(fields, args, theirs, null);
        *ret_pid = pid;
        return steal_fd(&ours);
}

int zygote_make(int socket, uint32_t uid, const int fds[static ZYGOTE_FDS]) {
        struct zygote_order order = { .kind = 2, .uid = uid };
        union {
                char room[CMSG_SPACE(ZYGOTE_FDS * sizeof(int))];
                struct cmsghdr align;
        } control = { 0 };
        struct iovec iov = { &order, sizeof(order) };
        struct msghdr message = {
                .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof(control.room),
        };

        control.align = (struct cmsghdr) {
                .cmsg_len = CMSG_LEN(ZYGOTE_FDS * sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
        };
        memcpy(CMSG_DATA(&control.align), fds, ZYGOTE_FDS * sizeof(int));
        return sendmsg(socket, &message, MSG_NOSIGNAL) < 0 ? -errno : 0;
}
