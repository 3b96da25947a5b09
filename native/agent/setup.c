/* Two PID namespaces. The runtime made the outer one, in which the agent is PID 1. Commands live in an inner one below it,
 * whose PID 1 is a copy of this process that does nothing but reap. The tenant, root or not, therefore has no number for
 * the agent: it cannot signal, trace, stop or even see it. Only the agent has both: it stays outside and puts its
 * children inside. */
#include "setup.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/sched.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#include "hide.h"
#include "leaf.h"

enum { LINK_FD = 3, CGROUP_FD = 4, RESERVED_LAST = 9 };

static int complain(int r, const char *what) {
        fprintf(stderr, "dsec-agent: %s: %s\n", what, strerror(-r));
        return r;
}

static void signals_default(void) {
        const unsigned long action[4] = { 0 }; /* the kernel's struct sigaction: SIG_DFL, no flags, empty mask */
        sigset_t all;

        /* Commands inherit dispositions through exec, and ours have no handlers: signalfd needs none. By the system call,
         * because glibc keeps 32 and 33 to itself, and whoever started the daemon may have left them ignored. */
        for (int i = 1; i < NSIG; i++)
                (void) syscall(SYS_rt_sigaction, i, &action, NULL, sizeof(uint64_t));
        sigfillset(&all);
        (void) sigprocmask(SIG_SETMASK, &all, NULL);
}

static int check_inherited(bool is_vm) {
        struct statfs fs;
        int listening = 0;
        socklen_t size = sizeof(listening);

        if (is_vm)
                return fcntl(LINK_FD, F_SETFD, FD_CLOEXEC) < 0 || fcntl(CGROUP_FD, F_SETFD, FD_CLOEXEC) < 0 ? -errno : 0;
        if (getsockopt(LINK_FD, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) < 0 || !listening)
                return complain(-ENOTSOCK, "fd 3 is not a listening socket");
        /* Without leaf cgroups a command that forks away could not be killed whole; better not to start. */
        if (fstatfs(CGROUP_FD, &fs) < 0 || fs.f_type != CGROUP2_SUPER_MAGIC)
                return complain(-ENOTDIR, "fd 4 is not a cgroup2 directory");
        if (fcntl(LINK_FD, F_SETFD, FD_CLOEXEC) < 0 || fcntl(LINK_FD, F_SETFL, O_NONBLOCK) < 0 ||
            fcntl(CGROUP_FD, F_SETFD, FD_CLOEXEC) < 0)
                return complain(-errno, "fcntl");
        return 0;
}

static int lift(int *fd) {
        int high = fcntl(*fd, F_DUPFD_CLOEXEC, RESERVED_LAST + 1);

        if (high < 0)
                return -errno;
        close_fd(*fd);
        *fd = high;
        return 0;
}

int setup_descriptors(int link, int group, int *keeper) {
        int r;

        if ((r = lift(&link)) < 0 || (r = lift(&group)) < 0 || (r = lift(keeper)) < 0)
                return r;
        if (dup2(link, LINK_FD) < 0 || dup2(group, CGROUP_FD) < 0)
                return -errno;
        close_fd(link);
        close_fd(group);
        return 0;
}

static int reserve_descriptors(bool is_vm, int *ret_null) {
        int fd;

        if (!is_vm && close_range(CGROUP_FD + 1, ~0u, 0) < 0)
                return complain(-errno, "close_range");
        do
                if ((fd = open("/dev/null", O_RDWR | O_CLOEXEC)) < 0)
                        return complain(-errno, "open /dev/null");
        while (fd <= RESERVED_LAST);
        *ret_null = fd;
        return 0;
}

/* Every running command takes a handful of descriptors. The commands themselves get the limits we were given. */
static void raise_nofile(struct confinement *c) {
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
                return;
        c->nofile_soft = limit.rlim_cur;
        c->nofile_hard = limit.rlim_max;
        limit.rlim_cur = limit.rlim_max;
        (void) setrlimit(RLIMIT_NOFILE, &limit);
}

/* Opened while our own /proc is still there, and while we are dumpable: later its files belong to the host's root. */
static void open_oom(struct confinement *c) {
        c->oom_fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
        ssize_t n = c->oom_fd < 0 ? 0 : read(c->oom_fd, c->oom_own, sizeof(c->oom_own) - 1);
        if (n <= 0)
                close_fd(steal_fd(&c->oom_fd));
}

/* Our own command line is the one thing of us that the copy inside would show. */
static void rename_process(int argc, char **argv, const char *name) {
        char *end = argv[argc - 1] + strlen(argv[argc - 1]);
        size_t size = (size_t) (end - argv[0]);

        memset(argv[0], 0, size);
        memcpy(argv[0], name, min_size(strlen(name), size));
        (void) prctl(PR_SET_NAME, name, 0, 0, 0);
}

/* PID 1 of the commands' namespace. SIGKILL from inside cannot reach it, it holds no descriptor and no capability, and it
 * is not dumpable: all that the tenant can do to it is to read its name. */
__attribute__((noreturn)) static void init_run(int peer) {
        struct hide_error error = { 0 };
        sigset_t child;
        char go;

        /* Entering a namespace by its process takes the right to trace that process; so it is locked up only when the agent
         * is in. Nobody else is here yet. */
        if (hide_host(&error) < 0 || write(peer, &error, sizeof(error)) < 0 || read(peer, &go, 1) != 1 ||
            hide_drop_privileges(&error) < 0) {
                (void) !write(peer, &error, sizeof(error));
                _exit(1);
        }
        (void) !write(peer, &error, sizeof(error));
        (void) close_range(0, ~0u, 0);
        sigemptyset(&child);
        sigaddset(&child, SIGCHLD);
        for (;;) {
                siginfo_t info = { 0 };
                /* Only orphans come here: the commands' own parent is the agent. */
                while (waitid(P_ALL, 0, &info, WEXITED | WNOHANG) == 0 && info.si_pid > 0)
                        info.si_pid = 0;
                (void) sigwaitinfo(&child, NULL);
        }
}

static int hear_init(int peer) {
        struct hide_error error;

        if (read(peer, &error, sizeof(error)) != (ssize_t) sizeof(error))
                return complain(-EPIPE, "the inner init died");
        return error.code != 0 ? complain(-error.code, error.what) : 0;
}

/* Starts it, and sees to it that our children are born in its namespace; we ourselves stay where we are. */
static int spawn_init(pid_t *ret_pid) {
        struct clone_args args = { .flags = CLONE_NEWPID, .exit_signal = SIGCHLD };
        int fds[2], r;

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
                return complain(-errno, "socketpair");
        cleanup_fd int ours = fds[0], theirs = fds[1];
        long pid = syscall(SYS_clone3, &args, sizeof(args));
        if (pid < 0)
                return complain(-errno, "clone the inner PID namespace");
        if (pid == 0) {
                close_fd(ours);
                init_run(theirs);
        }
        close_fd(steal_fd(&theirs));
        if ((r = hear_init(ours)) < 0)
                return r;
        cleanup_fd int fd = (int) syscall(SYS_pidfd_open, (pid_t) pid, 0);
        if (fd < 0 || setns(fd, CLONE_NEWPID) < 0)
                return complain(-errno, "setns to the inner PID namespace");
        if (write(ours, "", 1) != 1)
                return complain(-errno, "the inner init");
        *ret_pid = (pid_t) pid;
        return hear_init(ours);
}

static int open_typed(const char *path, long magic) {
        struct statfs fs;
        cleanup_fd int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

        if (fd < 0 || fstatfs(fd, &fs) < 0)
                return -errno;
        return fs.f_type == magic ? steal_fd(&fd) : -ENODEV;
}

/* Runtimes do this for a fresh network namespace; for the ones that do not, it costs three calls. */
static void loopback_up(void) {
        struct ifreq request = { .ifr_name = "lo" };
        cleanup_fd int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

        if (fd < 0 || ioctl(fd, SIOCGIFFLAGS, &request) < 0 || (request.ifr_flags & IFF_UP))
                return;
        request.ifr_flags |= IFF_UP;
        (void) ioctl(fd, SIOCSIFFLAGS, &request);
}

/* Out of the tenant's sight and reach; but not in a full VM, all of which is the tenant's. */
static int confine(int argc, char **argv, struct setup *ret) {
        int r;

        hide_program(argv[0]);
        ret->calls = argc == 2 && strcmp(argv[1], "calls") == 0;
        rename_process(argc, argv, "init");
        /* A program that its user may not read starts out as not dumpable. */
        (void) prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
        open_oom(&ret->confinement);
        if ((r = spawn_init(&ret->init_pid)) < 0)
                return r;
        if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
                return complain(-errno, "prctl");
        (void) prctl(PR_SET_NAME, "dsec-agent", 0, 0, 0);
        loopback_up();
        return 0;
}

int setup(int argc, char **argv, struct setup *ret) {
        int r;

        signals_default();
        umask(0);
        if ((r = check_inherited(ret->is_vm)) < 0 ||
            (r = reserve_descriptors(ret->is_vm, &ret->null_fd)) < 0)
                return r;
        raise_nofile(&ret->confinement);
        leaf_init(CGROUP_FD);
        if (ret->is_service)
                open_oom(&ret->confinement);
        else if ((r = confine(argc, argv, ret)) < 0)
                return r;
        r = ret->confinement.proc_fd = open_typed("/proc", PROC_SUPER_MAGIC);
        if (r < 0)
                return complain(r, "open /proc");
        ret->pts_fd = open_typed("/dev/pts", DEVPTS_SUPER_MAGIC);
        return 0;
}
