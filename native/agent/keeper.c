/* The seccomp filter of commands holds for the agent, too, and forbids setting the clock or switching the machine off; and a
 * write to DAMON's files may take as long as DAMON takes. So this copy of the agent, made before there is a filter, does
 * both. It lives outside the inner PID namespace, as the agent does, and holds its own way into sysfs, where commands see a
 * read-only one. */
#include "keeper.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <linux/random.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "vm.h"

enum { SEED_MAX = 256, NAME_MAX_HOST = 64 };

static int sys_fd = -1, random_fd = -1, iomem_fd = -1;
static struct keeper_request request;
static struct keeper_answer answer;
static size_t answer_size; /* of the payload */

static int fail(int code, const char *what) {
        answer_size = strlen(what);
        memcpy(answer.payload, what, answer_size);
        return -abs(code);
}

static int fail_at(int code, const char *what, struct span path) {
        int n = snprintf((char *) answer.payload, TEXT_MAX, "%s %.*s", what, (int) path.size, (const char *) path.data);

        answer_size = min_size((size_t) n, TEXT_MAX - 1);
        return -abs(code);
}

/* --- WAKE ----------------------------------------------------------------------------------------------------------- */

/* A machine that was restored has the pool of its snapshot, as has every clone of it. */
static int reseed(struct span seed) {
        struct {
                struct rand_pool_info head;
                uint32_t room[SEED_MAX / 4];
        } pool = { .head = { .entropy_count = (int) seed.size * 8, .buf_size = (int) seed.size } };

        if (seed.size == 0 || seed.size > SEED_MAX)
                return -EINVAL;
        memcpy(pool.room, seed.data, seed.size);
        if (ioctl(random_fd, RNDADDENTROPY, &pool) < 0)
                return -errno;
        /* ENODATA: not initialised before this; then it is from now on. */
        return ioctl(random_fd, RNDRESEEDCRNG) < 0 && errno != ENODATA ? -errno : 0;
}

static int set_clock(uint64_t ns) {
        struct timespec time = { .tv_sec = (time_t) (ns / 1000000000u), .tv_nsec = (long) (ns % 1000000000u) };

        return clock_settime(CLOCK_REALTIME, &time) < 0 ? -errno : 0;
}

static int wake(struct span payload) {
        static const uint8_t allowed[] = { REALTIME_NS, SEED, HOSTNAME, NET, 0 };
        static struct args args;
        struct span name;
        int r;

        if ((r = args_decode(payload, allowed, &args)) < 0)
                return fail(r, "not valid");
        if (has(&args, SEED) && (r = reseed(args.bytes[SEED])) < 0)
                return fail(r, "seed");
        if (has(&args, REALTIME_NS) && (r = set_clock(args.number[REALTIME_NS])) < 0)
                return fail(r, "clock");
        name = args.bytes[HOSTNAME];
        if (has(&args, HOSTNAME) && (name.size > NAME_MAX_HOST || sethostname((const char *) name.data, name.size) < 0))
                return fail(name.size > NAME_MAX_HOST ? EINVAL : errno, "hostname");
        if (has(&args, NET)) {
                cleanup_free char *words = span_dup(args.bytes[NET], NET_WORDS - 1);

                if ((r = words ? net_change(words) : -errno) < 0)
                        return fail(r, "network");
        }
        return 0;
}

/* --- KNOBS and KNOB_READ -------------------------------------------------------------------------------------------- */

/* The path below /sys if it is one of ours; NULL otherwise. */
static const char *knob_path(struct span path, char text[static 512]) {
        static const char *const roots[] = {
                "/sys/kernel/mm/damon/", "/sys/module/page_reporting/parameters/", "/sys/module/damon_reclaim/parameters/",
        };

        if (path.size >= 512 || memchr(path.data, 0, path.size))
                return NULL;
        memcpy(text, path.data, path.size);
        text[path.size] = 0;
        for (size_t i = 0; i < ELEMENTS(roots); i++)
                if (strncmp(text, roots[i], strlen(roots[i])) == 0)
                        return text + strlen("/sys/");
        return NULL;
}

static int knob_open(struct span path, uint64_t flags) {
        struct open_how how = {
                .flags = flags | O_CLOEXEC,
                .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
        };
        static const char iomem[] = "/proc/iomem";
        char text[512];

        /* DAMON must be told where the RAM is. Its addresses are shown to who opened it, and /proc is gone by now. */
        if (flags == O_RDONLY && path.size == sizeof(iomem) - 1 && memcmp(path.data, iomem, path.size) == 0) {
                int fd = lseek(iomem_fd, 0, SEEK_SET) < 0 ? -1 : fcntl(iomem_fd, F_DUPFD_CLOEXEC, 0);
                return fd < 0 ? -errno : fd;
        }
        const char *below = knob_path(path, text);

        if (!below || strstr(below, ".."))
                return -EPERM;
        int fd = (int) syscall(SYS_openat2, sys_fd, below, &how, sizeof(how));
        return fd < 0 ? -errno : fd;
}

static int knob_write(struct span path, struct span data) {
        cleanup_fd int fd = knob_open(path, O_WRONLY);

        if (fd < 0)
                return fail_at(fd, "open", path);
        if (write(fd, data.data, data.size) != (ssize_t) data.size)
                return fail_at(errno, "write", path);
        return 0;
}

static int knobs(struct span payload) {
        struct span path = { 0 }, value;
        uint8_t tag;
        int r;

        while ((r = field_next(&payload, &tag, &value)) > 0) {
                /* In turn, beginning with a path. */
                if (tag != (path.data ? DATA : PATH))
                        return fail(EBADMSG, "not valid");
                if (tag == PATH) {
                        path = value;
                        continue;
                }
                if ((r = knob_write(path, value)) < 0)
                        return r;
                path = (struct span) { 0 };
        }
        return r < 0 || path.data ? fail(EBADMSG, "not valid") : 0;
}

static int knob_read_one(struct span path) {
        cleanup_fd int fd = knob_open(path, O_RDONLY);

        if (fd < 0)
                return fail_at(fd, "open", path);
        if (answer_size + 5 + KNOB_MAX > sizeof(answer.payload))
                return fail(E2BIG, "too many files at once");
        uint8_t *at = answer.payload + answer_size;
        ssize_t n = read(fd, at + 5, KNOB_MAX);
        if (n < 0)
                return fail_at(errno, "read", path);
        at[0] = DATA;
        for (int i = 0; i < 4; i++)
                at[1 + i] = (uint8_t) ((size_t) n >> 8 * i);
        answer_size += 5 + (size_t) n;
        return 0;
}

static int knob_read(struct span payload) {
        struct span path;
        uint8_t tag;
        int r;

        while ((r = field_next(&payload, &tag, &path)) > 0) {
                if (tag != PATH)
                        return fail(EBADMSG, "not valid");
                if ((r = knob_read_one(path)) < 0)
                        return r;
        }
        return r < 0 ? fail(EBADMSG, "not valid") : 0;
}

/* --- the process ---------------------------------------------------------------------------------------------------- */

static int perform(struct span payload) {
        switch (request.type) {
        case T_WAKE:
                return wake(payload);
        case T_KNOBS:
                return knobs(payload);
        case T_KNOB_READ:
                return knob_read(payload);
        default:
                boot_off();
        }
}

__attribute__((noreturn)) static void run(int peer) {
        ssize_t n;

        (void) prctl(PR_SET_NAME, "dsec-keeper", 0, 0, 0);
        /* The link and the cgroup are the agent's. */
        while ((n = recv(peer, &request, sizeof(request), 0)) >= KEEPER_HEADER) {
                answer_size = 0;
                answer.channel = request.channel;
                answer.code = -perform((struct span) { request.payload, (size_t) n - KEEPER_HEADER });
                (void) !send(peer, &answer, KEEPER_HEADER + answer_size, MSG_NOSIGNAL);
        }
        _exit(0);
}

static int open_sys(void) {
        cleanup_fd int fs = fsopen("sysfs", FSOPEN_CLOEXEC);

        if (fs < 0 || fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
                return -errno;
        int fd = fsmount(fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
        return fd < 0 ? -errno : fd;
}

int keeper_start(void) {
        int fds[2];

        /* Before the copy is made: /dev goes while it runs. */
        cleanup_fd int sys = open_sys(), random = open("/dev/urandom", O_RDWR | O_CLOEXEC);
        cleanup_fd int iomem = open("/proc/iomem", O_RDONLY | O_CLOEXEC); /* -1: this kernel has none */
        if (sys < 0 || random < 0)
                return sys < 0 ? sys : -errno;
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
                return -errno;
        cleanup_fd int ours = fds[0], theirs = fds[1];
        if (fcntl(ours, F_SETFL, O_NONBLOCK) < 0)
                return -errno;
        pid_t pid = fork();
        if (pid < 0)
                return -errno;
        if (pid == 0) {
                sys_fd = sys;
                random_fd = random;
                iomem_fd = iomem;
                close_fd(ours);
                run(theirs);
        }
        return steal_fd(&ours);
}
