/* dsec-agent: starts the commands of one sandbox, keeps what they say, moves its files. docs/agent-protocol.md is what it
 * speaks; setup.c is how it keeps out of the tenant's reach.
 *
 * One thread, one loop, nothing that waits: whatever the tenant or a slow host does, the next request is served. */
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

#include "call.h"
#include "channel.h"
#include "dispatch.h"
#include "exec.h"
#include "guest.h"
#include "leaf.h"
#include "link.h"
#include "loop.h"
#include "serial.h"
#include "service.h"
#include "setup.h"
#include "socket.h"
#include "start.h"

enum { LINK_FD = 3, CGROUP_FD = 4, TRIM_MS = 1000 };

static struct setup state;

/* PID 1's death is the sandbox's; the kernel takes everything below it along. A machine of ours is switched off. */
__attribute__((noreturn)) static void stop(int status) {
        (void) leaf_kill_all();
        if (!state.is_service)
                guest_off();
        _exit(status);
}

static void children_reap(void) {
        struct rusage usage;
        int status;
        pid_t pid;

        while ((pid = wait4(-1, &status, WNOHANG | __WALL, &usage)) > 0) {
                if (pid == state.init_pid)
                        stop(1);
                if (!call_child_ended(pid, status))
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
        guest_link_lost();
        call_link_lost();
}

static int start_link(void) {
        static const struct link_hooks hooks = { .frame = dispatch_frame, .lost = on_lost };
        bool serial = state.is_vm && state.vm.serial;

        link_init(serial ? &serial_carrier : &socket_carrier, &hooks);
        return serial ? serial_start(LINK_FD) : socket_start(LINK_FD);
}

static int start(int argc, char **argv) {
        int r;

        state.is_service = is_service(argc, argv);
        state.is_vm = state.is_service || vm_is_init(argv[0]);
        if (state.is_service && (r = service_start(&state.vm)) < 0)
                return r;
        if (state.is_vm && !state.is_service)
                vm_boot(&state.vm);
        if ((r = setup(argc, argv, &state)) < 0)
                return r;
        if ((r = loop_init()) < 0 || (r = signals_start()) < 0 || (r = start_link()) < 0 ||
            (state.is_vm && (r = guest_init(&state.vm, CGROUP_FD, state.confinement.proc_fd)) < 0)) {
                fprintf(stderr, "dsec-agent: epoll: %s\n", strerror(-r));
                return r;
        }
        /* What an earlier agent of this machine left behind. */
        if (state.is_service)
                exec_note_channel(leaf_kill_all());
        start_init(&state.confinement, state.null_fd, state.pts_fd);
        dispatch_init(&state.confinement, state.calls);
        if (state.calls && (r = call_init(&state.confinement, state.null_fd)) < 0) {
                fprintf(stderr, "dsec-agent: the place of calls: %s\n", strerror(-r));
                return r;
        }
        return 0;
}

static int sooner(int a, int b) {
        return a < 0 || (b >= 0 && b < a) ? b : a;
}

static int timeout_now(int deadline, bool trim_due) {
        if (sources_queued() && link_room())
                return 0;
        return trim_due && (deadline < 0 || deadline > TRIM_MS) ? TRIM_MS : deadline;
}

int main(int argc, char **argv) {
        bool trim_due = false;

        if (argc < 1 || start(argc, argv) < 0) {
                if (state.is_vm && !state.is_service)
                        boot_off();
                return EXIT_FAILURE;
        }

        /* From here on leaving is no longer allowed: with PID 1 the whole sandbox goes. */
        while (!dispatch_finished()) {
                int timeout = timeout_now(sooner(exec_deadlines(), call_deadlines()), trim_due);

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
