/* dsec-launch: give one sandbox its root file system, then become the OCI runtime.
 *
 *   dsec-launch --stage DIR --scratch DIR --ids BASE:COUNT --lower DIR [--lower DIR ...] [--node NODE ...] -- RUNTIME ARGS...
 *
 * Everything is mounted in a mount namespace that only this process and the runtime's children ever see. The host's
 * mount table does not grow with the number of sandboxes (a new mount namespace copies the whole table, so 1,000
 * overlays on it would make each further start slower), and there is nothing to unmount when a sandbox dies or when
 * the daemon is killed half-way: the kernel frees the mounts with the last process of the namespace.
 *
 *   <stage>/0 ... N-1   the read-only lowers, topmost first, idmapped to BASE..BASE+COUNT
 *   <stage>/s           the scratch directory: s/upper and s/work, owned by BASE:BASE
 *   <stage>/root        the overlay; config.json names it as root.path
 *   <stage>/n/0 ...     device nodes, one for each --node TYPE:MAJOR:MINOR:MODE:UID:GID, which config.json binds into place:
 *                       a user namespace makes none, and the host's own belong to ids that mean nobody inside
 *
 * On failure: one line on stderr and exit status 120. Otherwise the status is the runtime's.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/capability.h>
#include <linux/mount.h>

enum {
        EXIT_LAUNCH = 120,
        LOWERS_MAX = 64, /* overlayfs takes 500; image.compose refuses more than this long before */
        NODES_MAX = 256,
        OPTIONS_MAX = 4096 /* mount(2) copies one page of option text */
};

struct node {
        mode_t mode;
        dev_t device;
        uid_t uid;
        gid_t gid;
};

struct plan {
        const char *stage, *scratch;
        const char *lowers[LOWERS_MAX];
        int n_lowers;
        struct node nodes[NODES_MAX];
        int n_nodes;
        uint64_t id_base, id_count;
        char **runtime;
};

__attribute__((format(printf, 1, 2), noreturn)) static void die(const char *format, ...) {
        int saved = errno;
        va_list ap;

        fputs("dsec-launch: ", stderr);
        va_start(ap, format);
        vfprintf(stderr, format, ap);
        va_end(ap);
        if (saved != 0)
                fprintf(stderr, ": %s", strerror(saved));
        fputc('\n', stderr);
        exit(EXIT_LAUNCH);
}

__attribute__((noreturn)) static void die_usage(const char *what) {
        errno = 0;
        die("%s", what);
}

static uint64_t parse_id(const char *text, char **ret_end) {
        errno = 0;
        uint64_t value = strtoull(text, ret_end, 10);
        if (errno != 0 || *ret_end == text || value > UINT32_MAX)
                die_usage("--ids takes BASE:COUNT, both below 2^32");
        return value;
}

static struct node parse_node(const char *text) {
        unsigned major, minor, mode, uid, gid;
        char type, rest;

        if (sscanf(text, "%c:%u:%u:%o:%u:%u%c", &type, &major, &minor, &mode, &uid, &gid, &rest) != 6 ||
            (type != 'c' && type != 'b') || (mode & ~0777u) != 0)
                die_usage("--node takes c|b:MAJOR:MINOR:MODE:UID:GID");
        return (struct node) {
                .mode = (type == 'c' ? S_IFCHR : S_IFBLK) | mode,
                .device = makedev(major, minor),
                .uid = uid,
                .gid = gid,
        };
}

static void parse_args(int argc, char **argv, struct plan *ret) {
        static const struct option options[] = {
                { "stage", required_argument, NULL, 's' },
                { "scratch", required_argument, NULL, 'd' },
                { "ids", required_argument, NULL, 'i' },
                { "lower", required_argument, NULL, 'l' },
                { "node", required_argument, NULL, 'n' },
                { 0 },
        };
        char *end;
        int c;

        while ((c = getopt_long(argc, argv, "+", options, NULL)) != -1)
                switch (c) {
                case 's':
                        ret->stage = optarg;
                        break;
                case 'd':
                        ret->scratch = optarg;
                        break;
                case 'i':
                        ret->id_base = parse_id(optarg, &end);
                        if (*end != ':')
                                die_usage("--ids takes BASE:COUNT");
                        ret->id_count = parse_id(end + 1, &end);
                        break;
                case 'l':
                        if (ret->n_lowers == LOWERS_MAX)
                                die_usage("too many --lower");
                        ret->lowers[ret->n_lowers++] = optarg;
                        break;
                case 'n':
                        if (ret->n_nodes == NODES_MAX)
                                die_usage("too many --node");
                        ret->nodes[ret->n_nodes++] = parse_node(optarg);
                        break;
                default:
                        die_usage("unknown option");
                }
        if (!ret->stage || !ret->scratch || ret->n_lowers == 0 || ret->id_count == 0 || optind >= argc)
                die_usage("--stage, --scratch, --ids, --lower and a runtime command are all needed");
        ret->runtime = argv + optind;
}

static void write_file(const char *path, const char *text) {
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        if (fd < 0 || write(fd, text, strlen(text)) < 0)
                die("write %s", path);
        close(fd);
}

/* The mapping of an idmapped mount is given as a user namespace; only its maps are used, so it may be empty. */
static int open_user_namespace(uint64_t base, uint64_t count) {
        char path[64], map[64];
        int status, fd;

        pid_t pid = (pid_t) syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, NULL, NULL, NULL, NULL);
        if (pid < 0)
                die("clone a user namespace");
        if (pid == 0)
                for (;;)
                        pause();

        snprintf(map, sizeof(map), "0 %" PRIu64 " %" PRIu64 "\n", base, count);
        snprintf(path, sizeof(path), "/proc/%d/uid_map", pid);
        write_file(path, map);
        snprintf(path, sizeof(path), "/proc/%d/gid_map", pid);
        write_file(path, map);
        snprintf(path, sizeof(path), "/proc/%d/ns/user", pid);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                die("open %s", path);
        (void) kill(pid, SIGKILL);
        (void) waitpid(pid, &status, 0);
        return fd;
}

static void make_dir(const char *path) {
        if (mkdir(path, 0711) < 0)
                die("mkdir %s", path);
}

static void mount_lower(const char *source, const char *target, int userns) {
        struct mount_attr attr = {
                .attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_IDMAP,
                .userns_fd = (uint64_t) userns,
        };

        int tree = (int) syscall(SYS_open_tree, AT_FDCWD, source, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_SYMLINK_NOFOLLOW);
        if (tree < 0)
                die("open layer %s", source);
        if (syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attr, sizeof(attr)) < 0)
                die("idmap layer %s", source);
        make_dir(target);
        if (syscall(SYS_move_mount, tree, "", AT_FDCWD, target, MOVE_MOUNT_F_EMPTY_PATH) < 0)
                die("attach layer %s", source);
        close(tree);
}

static void mount_rootfs(const struct plan *plan) {
        char options[OPTIONS_MAX], name[16];
        int userns = open_user_namespace(plan->id_base, plan->id_count);

        /* size: a few dozen directories and nothing else ever live here */
        if (mount("dsec", plan->stage, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=256k,mode=0711") < 0)
                die("mount tmpfs on %s", plan->stage);
        /* From here on all names are relative: short options, and no host path in the sandbox's mountinfo. */
        if (chdir(plan->stage) < 0)
                die("chdir %s", plan->stage);

        /* Off where the host has them on: what is in the upper directory must be all there is of it, since forks and packs are
         * made of that alone. */
        size_t used = (size_t) snprintf(
                        options, sizeof(options), "redirect_dir=off,metacopy=off,index=off,upperdir=s/upper,workdir=s/work,lowerdir=");
        for (int i = 0; i < plan->n_lowers; i++) {
                snprintf(name, sizeof(name), "%d", i);
                mount_lower(plan->lowers[i], name, userns);
                used += (size_t) snprintf(options + used, sizeof(options) - used, "%s%d", i ? ":" : "", i);
        }
        make_dir("s");
        if (mount(plan->scratch, "s", NULL, MS_BIND, NULL) < 0)
                die("bind scratch %s", plan->scratch);
        make_dir("root");
        if (mount("overlay", "root", "overlay", 0, options) < 0)
                die("mount overlay (%s)", options);
        close(userns);
}

/* On a tmpfs of their own, since the stage's is nodev. It is this namespace's: no host path leads to them, and they go with it. */
static void make_nodes(const struct plan *plan) {
        char name[16];

        if (plan->n_nodes == 0)
                return;
        make_dir("n");
        if (mount("dsec", "n", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,nr_inodes=512,mode=0711") < 0)
                die("mount tmpfs for device nodes");
        for (int i = 0; i < plan->n_nodes; i++) {
                const struct node *node = &plan->nodes[i];

                snprintf(name, sizeof(name), "n/%d", i);
                if (mknod(name, node->mode, node->device) < 0)
                        die("make a node of device %u:%u", major(node->device), minor(node->device));
                if (chmod(name, node->mode & 0777) < 0 || lchown(name, node->uid, node->gid) < 0)
                        die("give away a node of device %u:%u", major(node->device), minor(node->device));
        }
}

/* overlayfs writes with the credentials of whoever mounted it, and file systems let CAP_SYS_RESOURCE past disk quotas:
 * with it, the sandbox's disk limit would not hold. The runtime does without it, too. */
static void drop_sys_resource(void) {
        struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
        struct __user_cap_data_struct data[2];
        const uint32_t bit = 1u << CAP_SYS_RESOURCE;

        if (prctl(PR_CAPBSET_READ, CAP_SYS_RESOURCE, 0, 0, 0) == 1 && prctl(PR_CAPBSET_DROP, CAP_SYS_RESOURCE, 0, 0, 0) < 0)
                die("drop CAP_SYS_RESOURCE from the bounding set");
        if (syscall(SYS_capget, &header, data) < 0)
                die("capget");
        data[0].effective &= ~bit;
        data[0].permitted &= ~bit;
        data[0].inheritable &= ~bit;
        if (syscall(SYS_capset, &header, data) < 0)
                die("capset");
}

int main(int argc, char **argv) {
        struct plan plan = { 0 };

        parse_args(argc, argv, &plan);
        drop_sys_resource();
        if (unshare(CLONE_NEWNS) < 0)
                die("unshare the mount namespace");
        if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
                die("make mounts private");
        mount_rootfs(&plan);
        make_nodes(&plan);
        if (chdir("/") < 0)
                die("chdir /");
        execvp(plan.runtime[0], plan.runtime);
        die("exec %s", plan.runtime[0]);
}
