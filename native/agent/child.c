/* This code runs as the sandbox's root, in the sandbox's PID namespace, with the agent's memory: the tenant can see and
 * signal it but, because it is not dumpable, neither trace it nor read it nor take its descriptors. It must therefore
 * give everything away before it becomes dumpable, which is what exec does. */
#include "child.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "user.h"

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

enum { STATUS_FD = 3, PROC_FD = 4, CONTROL_FD = 9 };

static int32_t own_pid;

__attribute__((noreturn)) static void fail(enum step step, int code) {
        struct child_report report = { .pid = own_pid, .code = code, .step = (int32_t) step };

        (void) !write(STATUS_FD, &report, sizeof(report));
        _exit(127);
}

static void place_descriptors(const struct spawn *s, const struct confinement *c) {
        bool control = s->control_fd >= 0;

        if (dup2(s->in_fd, 0) < 0 || dup2(s->out_fd, 1) < 0 || dup2(s->err_fd, 2) < 0 ||
            dup3(c->proc_fd, PROC_FD, O_CLOEXEC) < 0 || (control && dup2(s->control_fd, CONTROL_FD) < 0) ||
            dup3(s->status_fd, STATUS_FD, O_CLOEXEC) < 0)
                _exit(127);
        /* All of the agent's are close-on-exec too; this is for the time until then, and for a descriptor we forgot. */
        if ((control && close_range(PROC_FD + 1, CONTROL_FD - 1, 0) < 0) ||
            close_range(control ? CONTROL_FD + 1 : PROC_FD + 1, ~0u, 0) < 0)
                fail(STEP_OTHER, errno);
}

static void set_apparmor(const char *profile) {
        char text[300];

        snprintf(text, sizeof(text), "exec %s", profile);
        int r = write_at(PROC_FD, "self/attr/apparmor/exec", text);
        if (r == -ENOENT)
                r = write_at(PROC_FD, "self/attr/exec", text);
        if (r < 0)
                fail(STEP_OTHER, -r);
}

static void set_limits(const struct args *args, const struct confinement *c) {
        struct rlimit limit = { .rlim_cur = c->nofile_soft, .rlim_max = c->nofile_hard };

        if (has(args, NOFILE)) {
                limit.rlim_max = min_u64(args->number[NOFILE], c->nofile_hard);
                limit.rlim_cur = limit.rlim_max;
        }
        if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
                fail(STEP_LIMIT, errno);
        if (has(args, CPUS)) {
                cpu_set_t cpus;
                struct span mask = args->bytes[CPUS];

                CPU_ZERO(&cpus);
                memcpy(&cpus, mask.data, min_size(mask.size, sizeof(cpus)));
                if (sched_setaffinity(0, sizeof(cpus), &cpus) < 0)
                        fail(STEP_LIMIT, errno);
        }
}

/* A program that opens /dev/stdout gets EACCES unless the pipe belongs to it. */
static void own_stdio(uid_t uid, bool control) {
        struct stat st;

        for (int fd = 0; fd <= CONTROL_FD; fd++)
                if ((fd <= 2 || (control && fd == CONTROL_FD)) && fstat(fd, &st) == 0 &&
                    (S_ISFIFO(st.st_mode) || isatty(fd)))
                        (void) !fchown(fd, uid, (gid_t) -1);
}

/* The main filter reads the flags of clone, which it cannot do for clone3: they lie behind a pointer. The agent itself
 * needs clone3; for commands it does not exist, and every libc then falls back to clone. */
int child_filter_clone3(void) {
        struct sock_filter code[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_STMT(BPF_ALU | BPF_AND | BPF_K, 0xbfffffff), /* x32 has the same numbers with bit 30 set */
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1), /* 435 on every architecture */
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = { .len = ELEMENTS(code), .filter = code };

        return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) < 0 ? -errno : 0;
}

static void set_credentials(const struct user *user, const struct confinement *c) {
        struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3 };
        struct __user_cap_data_struct data[2] = { 0 };
        uint64_t mask = user->uid == 0 ? c->caps : 0;

        for (unsigned long cap = 0; cap < 64; cap++)
                if (!(c->caps >> cap & 1) && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0) {
                        if (errno == EINVAL)
                                break; /* beyond the last one this kernel has */
                        fail(STEP_OTHER, errno);
                }
        if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0)
                fail(STEP_OTHER, errno);
        if (syscall(SYS_setgroups, user->n_groups, user->groups) < 0 || setresgid(user->gid, user->gid, user->gid) < 0 ||
            setresuid(user->uid, user->uid, user->uid) < 0)
                fail(STEP_USER, errno);
        /* What the bounding set would take away at exec goes now: nothing between here and exec needs it. */
        if (syscall(SYS_capget, &head, data) < 0)
                fail(STEP_OTHER, errno);
        for (int i = 0; i < 2; i++) {
                data[i].permitted &= (uint32_t) (mask >> 32 * i);
                data[i].effective = data[i].permitted;
                data[i].inheritable = 0;
        }
        if (syscall(SYS_capset, &head, data) < 0)
                fail(STEP_OTHER, errno);
        /* A change of ids sets this to fs.suid_dumpable, which may be 1. */
        (void) prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
}

/* argv or envp from the fields with this tag; room for `extra` more. Never freed: exec follows. */
static char **build_vector(struct span rest, uint8_t wanted, size_t count, size_t extra) {
        char **vector = calloc(count + extra + 1, sizeof(*vector));
        struct span value;
        uint8_t tag;
        size_t n = 0;

        while (vector && n < count && field_next(&rest, &tag, &value) > 0)
                if (tag == wanted && !(vector[n++] = span_dup(value, FRAME_MAX)))
                        fail(STEP_OTHER, errno);
        if (!vector)
                fail(STEP_OTHER, ENOMEM);
        return vector;
}

static const char *environment_get(char **env, const char *name) {
        size_t size = strlen(name);

        for (; *env; env++)
                if (strncmp(*env, name, size) == 0 && (*env)[size] == '=')
                        return *env + size + 1;
        return NULL;
}

static void add_home(char **env, size_t count, const char *home) {
        if (!home || !*home || environment_get(env, "HOME"))
                return;
        if (asprintf(&env[count], "HOME=%s", home) < 0)
                fail(STEP_OTHER, ENOMEM);
}

/* As a shell does it: one that is not allowed is remembered, the search goes on. */
int child_execute(char **argv, char **env) {
        const char *path = environment_get(env, "PATH");
        int code = ENOENT;

        if (strchr(argv[0], '/')) {
                execve(argv[0], argv, env);
                return errno;
        }
        for (const char *at = path ? path : DEFAULT_PATH, *end; *argv[0]; at = end + 1) {
                char *file;

                end = strchrnul(at, ':');
                if (asprintf(&file, "%.*s%s%s", (int) (end - at), at, end > at ? "/" : "", argv[0]) < 0)
                        return ENOMEM;
                execve(file, argv, env);
                if (errno == EACCES)
                        code = EACCES;
                else if (errno != ENOENT && errno != ENOTDIR && errno != ENAMETOOLONG && errno != ELOOP)
                        return errno;
                if (!*end)
                        break;
        }
        return code;
}

static void change_directory(struct span path) {
        char *text = span_dup(path, 4096);

        if (!text || chdir(text) < 0)
                fail(STEP_CHDIR, errno);
}

void child_run(const struct spawn *spawn, const struct confinement *c) {
        static struct user user;
        const struct args *args = spawn->args;
        sigset_t none;

        place_descriptors(spawn, c);
        own_pid = getpid();
        struct child_report hello = { .pid = own_pid };
        (void) !write(STATUS_FD, &hello, sizeof(hello));

        (void) setsid();
        if (spawn->tty && ioctl(0, TIOCSCTTY, 0) < 0)
                fail(STEP_OTHER, errno);
        if (c->apparmor)
                set_apparmor(c->apparmor);
        set_limits(args, c);
        close(PROC_FD);

        char *name = has(args, USER) ? span_dup(args->bytes[USER], 256) : NULL;
        int r = has(args, USER) && !name ? -EINVAL : user_lookup(name, &user);
        if (r < 0)
                fail(STEP_USER, -r);
        char **argv = build_vector(spawn->fields, ARG, args->count[ARG], 0);
        char **env = build_vector(spawn->fields, ENV, args->count[ENV], 1);
        add_home(env, args->count[ENV], user.home);

        own_stdio(user.uid, spawn->control_fd >= 0);
        /* Needs CAP_SYS_ADMIN, so before the capabilities go; needs nothing of the syscalls it takes away. */
        if (c->has_filter && (r = child_filter_clone3()) < 0)
                fail(STEP_OTHER, -r);
        set_credentials(&user, c);
        /* As the user: a directory that it may not enter is an error, not a gift. */
        change_directory(has(args, CWD) ? args->bytes[CWD] : (struct span) { (const uint8_t *) "/", 1 });
        umask(022);
        sigemptyset(&none);
        (void) sigprocmask(SIG_SETMASK, &none, NULL);
        fail(STEP_EXEC, child_execute(argv, env));
}
