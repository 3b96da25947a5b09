/* dsec-agent: starts the commands of one sandbox, keeps what they say, moves its files. docs/agent-protocol.md is what it
 * speaks; setup.c is how it keeps out of the tenant's reach.
 *
 * One thread, one loop, nothing that waits: whatever the tenant or a slow host does, the next request is served. */
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

#include "channel.h"
#include "dispatch.h"
#include "exec.h"
#include "leaf.h"
#include "link.h"
#include "loop.h"
#include "setup.h"
#include "start.h"

enum { LISTEN_FD = 3, TRIM_MS = 1000 };

static struct setup state;

/* PID 1's death is the sandbox's; the kernel takes everything below it along. */
__attribute__((noreturn)) static void stop(int status) {
        leaf_kill_all();
        _exit(status);
}

static void children_reap(void) {
        struct rusage usage;
        int status;
        pid_t pid;

        while ((pid = wait4(-1, &status, WNOHANG | __WALL, &usage)) > 0) {
                if (pid == state.init_pid)
                        stop(1);
                exec_child_ended(pid, status, &usage);
        }
}

static void signal_ready(struct watch *watch, uint32_t events) {
        struct signalfd_siginfo info;

        (void) events;
        while (read(watch->fd, &info, sizeof(info)) == (ssize_t) sizeof(info))
                if (info.ssi_signo == SIGTERM)
                        stop(0);
        children_reap();
}

static int signals_start(void) {
        static struct watch watch = { .ready = signal_ready };
        sigset_t set;

        sigemptyset(&set);
        sigaddset(&set, SIGCHLD);
        sigaddset(&set, SIGTERM);
        int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
        return fd < 0 ? -errno : watch_start(&watch, fd, EPOLLIN);
}

static void on_lost(void) {
        channels_link_lost();
        exec_link_lost();
}

static int start(int argc, char **argv) {
        static const struct link_hooks hooks = { .frame = dispatch_frame, .lost = on_lost };
        int r = setup(argc, argv, &state);

        if (r < 0)
                return r;
        if ((r = loop_init()) < 0 || (r = signals_start()) < 0 || (r = link_init(LISTEN_FD, &hooks)) < 0) {
                fprintf(stderr, "dsec-agent: epoll: %s\n", strerror(-r));
                return r;
        }
        start_init(&state.confinement, state.null_fd, state.pts_fd);
        dispatch_init(&state.confinement);
        return 0;
}

static int timeout_now(int deadline, bool trim_due) {
        if (sources_queued() && link_room())
                return 0;
        return trim_due && (deadline < 0 || deadline > TRIM_MS) ? TRIM_MS : deadline;
}

int main(int argc, char **argv) {
        bool trim_due = false;

        if (argc < 1 || start(argc, argv) < 0)
                return EXIT_FAILURE;

        /* From here on leaving is no longer allowed: with PID 1 the whole sandbox goes. */
        while (!dispatch_finished()) {
                int timeout = timeout_now(exec_deadlines(), trim_due);

                if (loop_once(timeout) > 0)
                        trim_due = true;
                else if (timeout == TRIM_MS) {
                        /* A second without anything to do: give back what the last hour needed. */
                        link_trim();
                        trim_due = false;
                }
                sources_run(link_room);
                link_turn();
        }
        stop(EXIT_SUCCESS);
}
