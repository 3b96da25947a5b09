/* Init of a test machine: starts the agent on a vsock port as its init would have it, then dials it from inside, as a tenant
 * could: by the loopback address. Says on the console what came of it, and switches off. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PORT = 1024 };

static void need(int ok, const char *what) {
        if (ok)
                return;
        printf("vm_vsock: %s: %s\n", what, strerror(errno));
        fflush(stdout);
        reboot(RB_POWER_OFF);
}

static struct sockaddr_vm address(unsigned cid) {
        return (struct sockaddr_vm) { .svm_family = AF_VSOCK, .svm_cid = cid, .svm_port = PORT };
}

static void run_agent(void) {
        struct sockaddr_vm any = address(VMADDR_CID_ANY);
        int listener = socket(AF_VSOCK, SOCK_STREAM, 0);

        need(bind(listener, (struct sockaddr *) &any, sizeof(any)) == 0 && listen(listener, 8) == 0, "listen");
        int group = open("/cg/box", O_RDONLY | O_DIRECTORY);
        need(group >= 0, "cgroup");
        group = fcntl(group, F_DUPFD, 20);
        need(dup2(listener, 3) == 3 && dup2(group, 4) == 4, "dup2");
        execl("/agent", "/agent", NULL);
        need(0, "exec");
}

/* 1: an answer; 0: the connection was closed without one. */
static int answered(unsigned cid) {
        /* HELLO with VERSION 1 and CAPS 0: docs/agent-protocol.md */
        static const unsigned char hello[] = { 26, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
                                               3, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 };
        struct sockaddr_vm to = address(cid);
        struct timeval patience = { .tv_sec = 30 };
        char answer[12];
        int fd = socket(AF_VSOCK, SOCK_STREAM, 0);

        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
        for (int i = 0; connect(fd, (struct sockaddr *) &to, sizeof(to)) < 0; i++) {
                need(i < 200, "connect");
                usleep(50000);
        }
        (void) !send(fd, hello, sizeof(hello), MSG_NOSIGNAL);
        ssize_t n = recv(fd, answer, sizeof(answer), 0);
        need(n >= 0 || errno == ECONNRESET, "recv");
        close(fd);
        return n > 0;
}

int main(void) {
        mkdir("/proc", 0755);
        mkdir("/sys", 0755);
        mkdir("/cg", 0755);
        need(mount("proc", "/proc", "proc", 0, NULL) == 0 && mount("sysfs", "/sys", "sysfs", 0, NULL) == 0 &&
             mount("devtmpfs", "/dev", "devtmpfs", 0, NULL) == 0 && mount("cgroup2", "/cg", "cgroup2", 0, NULL) == 0 &&
             mkdir("/cg/box", 0755) == 0, "mount");
        signal(SIGPIPE, SIG_IGN);
        long pid = syscall(SYS_clone, CLONE_NEWPID | CLONE_NEWNS | SIGCHLD, NULL, NULL, NULL, NULL);
        need(pid >= 0, "clone");
        if (pid == 0)
                run_agent();
        for (int i = 0; i < 3; i++)
                printf("vm_vsock: %s\n", answered(VMADDR_CID_LOCAL) ? "ANSWERED" : "refused");
        need(kill((pid_t) pid, 0) == 0, "the agent");
        printf("vm_vsock: done\n");
        fflush(stdout);
        reboot(RB_POWER_OFF);
        return 1;
}
