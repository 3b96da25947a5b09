#include "start.h"

#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#include "leaf.h"

static const struct confinement *confinement;
static int null_fd = -1, pts_fd = -1;

void start_init(const struct confinement *c, int null, int pts) {
        confinement = c;
        null_fd = null;
        pts_fd = pts;
}

/* The child's ends; they are closed here as soon as it has its copies. */
struct child_ends {
        int fds[5];
        int n;
};

static void close_ends(struct child_ends *ends) {
        for (int i = 0; i < ends->n; i++)
                close_fd(ends->fds[i]);
}

/* A pipe of which our end does not block; the child's is remembered in ends. */
static int make_pipe(bool child_reads, struct child_ends *ends, int *ret_ours, int *ret_theirs) {
        int fds[2];

        if (pipe2(fds, O_CLOEXEC) < 0)
                return -errno;
        *ret_theirs = fds[child_reads ? 0 : 1];
        *ret_ours = fds[child_reads ? 1 : 0];
        ends->fds[ends->n++] = *ret_theirs;
        if (fcntl(*ret_ours, F_SETFL, O_NONBLOCK) < 0) {
                int saved = errno;
                close_fd(*ret_ours);
                return -saved;
        }
        return 0;
}

static int add_stream(struct command *c, int number, int fd, size_t cap) {
        c->streams[number] = stream_new(fd, cap, &c->source);
        if (c->streams[number])
                return 0;
        int saved = errno;
        close_fd(fd);
        return -saved;
}

static int add_output(struct command *c, int number, size_t cap, struct child_ends *ends, int *ret_theirs) {
        int ours;
        int r = make_pipe(false, ends, &ours, ret_theirs);

        return r < 0 ? r : add_stream(c, number, ours, cap);
}

static int add_feed(struct command *c, int fd) {
        int r = feed_start(&c->feed, fd, c->channel);

        if (r < 0)
                close_fd(fd);
        return r;
}

int terminal_resize(int fd, const struct args *args) {
        struct winsize size = {
                .ws_row = (unsigned short) min_u64(number_or(args, ROWS, 24), UINT16_MAX),
                .ws_col = (unsigned short) min_u64(number_or(args, COLS, 80), UINT16_MAX),
        };

        return ioctl(fd, TIOCSWINSZ, &size) < 0 ? -errno : 0;
}

/* The pty comes from the devpts that was mounted when the sandbox began, and its other end by descriptor: no path that the
 * tenant could have put something else under. */
static int add_tty(struct command *c, const struct args *args, size_t cap, struct child_ends *ends, struct spawn *spawn) {
        int unlock = 0;

        if (pts_fd < 0)
                return -ENODEV;
        cleanup_fd int master = openat(pts_fd, "ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
        if (master < 0 || ioctl(master, TIOCSPTLCK, &unlock) < 0)
                return -errno;
        int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
        if (slave < 0)
                return -errno;
        ends->fds[ends->n++] = slave;
        spawn->in_fd = spawn->out_fd = spawn->err_fd = slave;
        spawn->tty = true;
        int r = terminal_resize(master, args);
        if (r < 0)
                return r;
        c->feed.is_tty = true;
        int copy = fcntl(master, F_DUPFD_CLOEXEC, 0);
        if (copy < 0)
                return -errno;
        r = add_feed(c, copy);
        return r < 0 ? r : add_stream(c, 0, steal_fd(&master), cap);
}

static int add_pipes(struct command *c, size_t cap, struct child_ends *ends, struct spawn *spawn) {
        int r, ours;

        spawn->in_fd = null_fd;
        if (c->flags & EXEC_STDIN) {
                r = make_pipe(true, ends, &ours, &spawn->in_fd);
                if (r < 0 || (r = add_feed(c, ours)) < 0)
                        return r;
        }
        r = add_output(c, 0, cap, ends, &spawn->out_fd);
        return r < 0 ? r : add_output(c, 1, cap, ends, &spawn->err_fd);
}

static void status_ready(struct watch *watch, uint32_t events) {
        struct command *c = CONTAINER_OF(watch, struct command, status);

        (void) events;
        /* A failed child is dropped where it is waited for, a moment later: its pid must stay ours until then. */
        if (command_check_start(c) < 0)
                watch_events(watch, 0);
}

static int add_status(struct command *c, struct child_ends *ends, int *ret_theirs) {
        int ours;
        int r = make_pipe(false, ends, &ours, ret_theirs);

        if (r < 0)
                return r;
        c->status.ready = status_ready;
        r = watch_start(&c->status, ours, EPOLLIN);
        if (r < 0)
                close_fd(ours);
        return r;
}

/* Best effort: under memory pressure the command should go, not the agent. A child inherits the agent's value, and cannot
 * set its own: as it is not dumpable, its /proc files are not its own. */
static void set_oom(const char *value) {
        if (confinement->oom_fd >= 0)
                (void) !pwrite(confinement->oom_fd, value, strlen(value), 0);
}

/* An ordinary copy-on-write child, not a vfork-like one: the tenant can stop it, and must not be able to stop us. */
static int clone_into(struct command *c, const struct spawn *spawn) {
        cleanup_fd int leaf = leaf_create(c->channel);
        struct clone_args args = {
                .flags = CLONE_INTO_CGROUP,
                .exit_signal = SIGCHLD,
                .cgroup = (uint64_t) leaf,
        };

        if (leaf < 0) {
                int r = leaf;
                leaf = -1;
                return r;
        }
        c->started_us = now_us();
        set_oom("500");
        long pid = syscall(SYS_clone3, &args, sizeof(args));
        if (pid == 0)
                child_run(spawn, confinement);
        set_oom(confinement->oom_own);
        if (pid < 0) {
                int r = -errno;
                leaf_release(c->channel);
                return r;
        }
        c->pid = (pid_t) pid;
        return 0;
}

int command_start(struct command *c, const struct args *args, struct span payload, enum step *ret_step) {
        __attribute__((cleanup(close_ends))) struct child_ends ends = { 0 };
        struct spawn spawn = { .fields = payload, .args = args, .control_fd = -1 };
        size_t cap = (size_t) number_or(args, CAP, 8 << 20);

        int r = c->flags & EXEC_TTY ? add_tty(c, args, cap, &ends, &spawn) : add_pipes(c, cap, &ends, &spawn);
        if (r >= 0 && (c->flags & EXEC_CONTROL))
                r = add_output(c, 2, cap, &ends, &spawn.control_fd);
        if (r >= 0)
                r = add_status(c, &ends, &spawn.status_fd);
        if (r < 0)
                return r;
        *ret_step = STEP_FORK;
        r = clone_into(c, &spawn);
        if (r == 0 && number_or(args, TIMEOUT_MS, 0) > 0)
                c->deadline_us = c->started_us + min_u64(args->number[TIMEOUT_MS], UINT64_C(1) << 40) * 1000;
        return r;
}
