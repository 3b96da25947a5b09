/* This code is the sandbox's root in namespaces of its own. It builds the cell, waits for its call, and starts the one
 * process that is not root any more; then it only waits. Nothing of the tenant's ever reaches it: not a signal (it is PID
 * 1 and another user), not a descriptor, not a byte. */
#include "cell.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "hide.h"

#define WORK "/box"

static int socket_fd;

static void say_with(enum cell_says what, int value, const char *text, const int *fds, size_t count) {
        struct cell_word word = { .what = (int32_t) what, .value = value };
        union {
                char room[CMSG_SPACE(CELL_FDS * sizeof(int))];
                struct cmsghdr align;
        } control = { 0 };
        struct iovec iov = { &word, sizeof(word) };
        struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1 };

        snprintf(word.text, sizeof(word.text), "%s", text);
        if (count > 0) {
                message.msg_control = control.room;
                message.msg_controllen = CMSG_SPACE(count * sizeof(int));
                control.align = (struct cmsghdr) {
                        .cmsg_len = CMSG_LEN(count * sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
                };
                memcpy(CMSG_DATA(&control.align), fds, count * sizeof(int));
        }
        (void) !sendmsg(socket_fd, &message, MSG_NOSIGNAL);
}

static void say(enum cell_says what, int value, const char *text) {
        say_with(what, value, text, NULL, 0);
}

__attribute__((noreturn)) static void fail(const char *step) {
        say(CELL_FAILED, errno, step);
        _exit(1);
}

/* --- the place ------------------------------------------------------------------------------------------------------ */

static void bind_to(const char *from, const char *to) {
        if (mount(from, to, NULL, MS_BIND, NULL) < 0)
                fail(to);
}

/* One file system for all that can be written, so that one size limits it. Its own root is covered in the end. */
static void mount_space(uid_t uid) {
        if (mount("cell", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=256m,nr_inodes=16384,mode=0711") < 0)
                fail("mount tmpfs");
        if (mkdir("/tmp/work", 0700) < 0 || chown("/tmp/work", uid, uid) < 0 || mkdir("/tmp/tmp", 01777) < 0 ||
            mkdir("/tmp/shm", 01777) < 0)
                fail("mkdir");
        bind_to("/tmp/work", WORK);
        bind_to("/tmp/shm", "/dev/shm");
        bind_to("/tmp/tmp", "/tmp");
}

/* Processes and nothing else: what programs want to know of the machine they can ask the kernel. */
static void mount_proc(void) {
        cleanup_fd int fs = fsopen("proc", FSOPEN_CLOEXEC);

        if (fs < 0 || fsconfig(fs, FSCONFIG_SET_STRING, "subset", "pid", 0) < 0 ||
            fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
                fail("make proc");
        cleanup_fd int tree = fsmount(fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
        if (tree < 0)
                fail("mount proc");
        while (umount2("/proc", MNT_DETACH) == 0)
                ;
        if (move_mount(tree, "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH) < 0)
                fail("attach proc");
}

static void make_read_only(const char *path) {
        struct mount_attr attr = { .attr_set = MOUNT_ATTR_RDONLY };

        if (mount_setattr(AT_FDCWD, path, 0, &attr, sizeof(attr)) < 0)
                fail(path);
}

static int build(uid_t uid) {
        if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
                fail("make mounts private");
        mount_proc();
        mount_space(uid);
        /* The files of a mounted queue file system are those of the namespace it was mounted in. */
        (void) umount2("/dev/mqueue", MNT_DETACH);
        make_read_only("/");
        make_read_only("/dev");
        int work = open(WORK, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (work < 0)
                fail("open " WORK);
        return work;
}

/* --- the call ------------------------------------------------------------------------------------------------------- */

struct call {
        struct cell_go go;
        char strings[CELL_ARGS_MAX];
        size_t size;
        int in;
};

/* From the agent, or in the process of the call from PID 1. */
static void await(int from, struct call *call) {
        union {
                char room[CMSG_SPACE(sizeof(int))];
                struct cmsghdr align;
        } control;
        struct iovec iov[] = { { &call->go, sizeof(call->go) }, { call->strings, sizeof(call->strings) - 1 } };
        struct msghdr message = {
                .msg_iov = iov, .msg_iovlen = 2, .msg_control = control.room, .msg_controllen = sizeof(control.room),
        };
        ssize_t n = recvmsg(from, &message, MSG_CMSG_CLOEXEC);

        if (n < (ssize_t) sizeof(call->go))
                _exit(0); /* nobody wants it any more */
        call->size = (size_t) n - sizeof(call->go);
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
                if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
                        memcpy(&call->in, CMSG_DATA(c), sizeof(call->in));
}

static void limit(int what, uint64_t value) {
        struct rlimit now, wanted;

        if (getrlimit(what, &now) < 0)
                fail("getrlimit");
        wanted.rlim_cur = wanted.rlim_max = min_u64(value, now.rlim_max);
        if (setrlimit(what, &wanted) < 0)
                fail("setrlimit");
}

static void limits(const struct cell_go *go) {
        cpu_set_t cpus;
        uint8_t any = 0;

        for (size_t i = 0; i < sizeof(go->cpus); i++)
                any |= go->cpus[i];
        CPU_ZERO(&cpus);
        memcpy(&cpus, go->cpus, min_size(sizeof(go->cpus), sizeof(cpus)));
        if (any && sched_setaffinity(0, sizeof(cpus), &cpus) < 0)
                fail("sched_setaffinity");
        limit(RLIMIT_CPU, go->cpu_s);
        limit(RLIMIT_FSIZE, go->file_max);
        limit(RLIMIT_NOFILE, go->nofile);
        limit(RLIMIT_STACK, go->stack);
        limit(RLIMIT_CORE, 0);
        limit(RLIMIT_MEMLOCK, KIB(64));
        limit(RLIMIT_MSGQUEUE, KIB(800));
}

static void become_nobody(const struct cell_seat *seat) {
        const char *profile = seat->confinement->apparmor;
        char text[300];

        if (profile) {
                snprintf(text, sizeof(text), "exec %s", profile);
                int r = write_at(AT_FDCWD, "/proc/self/attr/apparmor/exec", text);
                if (r == -ENOENT)
                        r = write_at(AT_FDCWD, "/proc/self/attr/exec", text);
                if (r < 0)
                        fail("apparmor");
        }
        /* The last thing that is written there: a call must not make itself less likely to go than the agent is when memory
         * is short. */
        make_read_only("/proc");
        if (syscall(SYS_setgroups, 0, NULL) < 0 || setresgid(seat->uid, seat->uid, seat->uid) < 0)
                fail("groups");
        /* The bounding set can only be emptied while there are capabilities, so before the user changes. */
        for (unsigned long cap = 0; cap < 64; cap++)
                if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0 && errno == EINVAL)
                        break;
        /* All capabilities go with the user: none is kept, none is ambient, and no program gives one back. */
        if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0 || setresuid(seat->uid, seat->uid, seat->uid) < 0 ||
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
                fail("user");
}

static void filter(const struct confinement *c) {
        struct sock_fprog program = { .len = c->filter_count, .filter = c->filter };

        if (!c->has_filter)
                return;
        if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) < 0 || child_filter_clone3() < 0)
                fail("seccomp");
}

static char **split(char **at, const char *end, uint32_t count) {
        char **vector = calloc((size_t) count + 1, sizeof(*vector));

        for (uint32_t i = 0; vector && i < count; i++) {
                if (*at >= end)
                        return NULL;
                vector[i] = *at;
                *at += strlen(*at) + 1;
        }
        return vector;
}

/* Passes on what came, and the input. */
static void hand_on(int to, const struct call *call) {
        union {
                char room[CMSG_SPACE(sizeof(int))];
                struct cmsghdr align;
        } control = { 0 };
        struct iovec iov[] = { { (void *) &call->go, sizeof(call->go) }, { (void *) call->strings, call->size } };
        struct msghdr message = {
                .msg_iov = iov, .msg_iovlen = 2, .msg_control = control.room, .msg_controllen = sizeof(control.room),
        };

        control.align = (struct cmsghdr) {
                .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
        };
        memcpy(CMSG_DATA(&control.align), &call->in, sizeof(call->in));
        if (sendmsg(to, &message, MSG_NOSIGNAL) < 0)
                fail("the process of the call");
}

/* The process of the call, made before it: all that can be done ahead is done, and nothing can be taken back any more. */
__attribute__((noreturn)) static void wait_and_start(const struct cell_seat *seat, int orders) {
        static struct call call;
        sigset_t none;

        (void) setsid();
        if (dup2(seat->null, 0) < 0 || dup2(seat->out, 1) < 0 || dup2(seat->err, 2) < 0)
                fail("dup");
        become_nobody(seat);
        if (chdir(WORK) < 0)
                fail("chdir");
        filter(seat->confinement);
        umask(022);
        await(orders, &call);

        char *at = call.strings, *end = at + call.size;
        *end = 0;
        char **argv = split(&at, end, call.go.argc), **env = split(&at, end, call.go.envc);
        if (!argv || !env || !argv[0]) {
                errno = EINVAL;
                fail("arguments");
        }
        if (dup2(call.in, 0) < 0 || dup3(socket_fd, 3, O_CLOEXEC) < 0)
                fail("dup");
        socket_fd = 3;
        if (close_range(4, ~0u, 0) < 0)
                fail("close_range");
        limits(&call.go);
        sigemptyset(&none);
        (void) sigprocmask(SIG_SETMASK, &none, NULL);
        int code = child_execute(argv, env);
        say(CELL_NO_EXEC, code, "");
        _exit(127);
}

/* Orphans of the call become ours, and are reaped until its own process has ended; then our end is everybody's. */
__attribute__((noreturn)) static void watch(pid_t pid) {
        int status;
        pid_t ended;

        while ((ended = waitpid(-1, &status, __WALL)) != pid)
                if (ended < 0 && errno != EINTR)
                        fail("wait");
        say(CELL_ENDED, status, "");
        _exit(0);
}

/* In a warm cell the process is not our child, and its death is not ours to tell: the agent ends us then. */
__attribute__((noreturn)) static void reap(void) {
        sigset_t child;

        say(CELL_PLACED, 0, "");
        sigemptyset(&child);
        sigaddset(&child, SIGCHLD);
        for (;;) {
                while (waitpid(-1, NULL, WNOHANG | __WALL) > 0)
                        ;
                (void) sigwaitinfo(&child, NULL);
        }
}

/* By descriptors that we open ourselves: entering by our process would take the right to trace it. */
static size_t open_namespaces(int fds[static CELL_FDS]) {
        static const char *const names[] = { "/proc/self/ns/pid", "/proc/self/ns/mnt", "/proc/self/ns/ipc" };

        for (size_t i = 0; i < ELEMENTS(names); i++)
                if ((fds[CELL_NS_PID + i] = open(names[i], O_RDONLY | O_CLOEXEC)) < 0)
                        fail(names[i]);
        return CELL_FDS;
}

/* Its process: a copy of ours, with a way to hear from us; or nobody yet, in a warm cell. */
static pid_t make_process(const struct cell_seat *seat, int *ret_orders) {
        int fds[2];

        *ret_orders = -1;
        if (seat->warm)
                return 0;
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
                fail("socketpair");
        pid_t pid = fork();
        if (pid < 0)
                fail("fork");
        if (pid == 0) {
                close_fd(fds[0]);
                wait_and_start(seat, fds[1]);
        }
        close_fd(fds[1]);
        *ret_orders = fds[0];
        return pid;
}

void cell_run(const struct cell_seat *seat) {
        static struct call call;
        struct hide_error error = { 0 };
        int fds[CELL_FDS], orders;
        char space[32];

        socket_fd = seat->socket;
        (void) setsid();
        fds[CELL_WORK] = build(seat->uid);
        /* Who opens /dev/stdout must be able to. */
        if (fchown(seat->out, seat->uid, seat->uid) < 0 || fchown(seat->err, seat->uid, seat->uid) < 0)
                fail("chown pipes");
        pid_t pid = make_process(seat, &orders);
        size_t count = seat->warm ? open_namespaces(fds) : 1;
        say_with(CELL_READY, 0, "", fds, count);
        for (size_t i = 0; i < count; i++)
                close_fd(fds[i]);
        close_fd(seat->out);
        close_fd(seat->err);
        call.in = seat->null;
        await(socket_fd, &call);
        snprintf(space, sizeof(space), "size=%llu", (unsigned long long) call.go.space);
        if (mount(NULL, "/tmp", NULL, MS_REMOUNT | MS_NOSUID | MS_NODEV, space) < 0)
                fail("the files need more than the call's space");
        if (!seat->warm)
                hand_on(orders, &call);
        close_fd(orders);
        if (hide_drop_privileges(&error) < 0)
                fail(error.what);
        if (seat->warm)
                reap();
        watch(pid);
}
