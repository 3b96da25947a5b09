/* The root of a sandbox in a virtual machine, as a container's runtime would make it. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/sysmacros.h>

#include "vm.h"

enum { OPTIONS = 4096 /* a page is what mount(2) takes */, FD_FREE = 10 };

static void make_directory(const char *path, mode_t mode) {
        if (mkdir(path, mode) < 0 && errno != EEXIST)
                boot_fail(errno, "mkdir %s", path);
}

/* pmem: read straight from the host's page cache, without a copy in the guest's. */
static void mount_lower(const struct boot_plan *plan, int i) {
        const char *meta = plan->lowers[i].meta, *data = plan->lowers[i].data;
        char source[64], target[16], options[128];

        snprintf(source, sizeof(source), "/dev/%s", meta);
        snprintf(target, sizeof(target), "/l/%d", i);
        snprintf(options, sizeof(options), "%s%s%s", strncmp(meta, "pmem", 4) == 0 ? "dax=always" : "dax=never",
                 *data ? ",device=/dev/" : "", data);
        make_directory(target, 0700);
        if (mount(source, target, "erofs", MS_RDONLY | MS_NOSUID | MS_NODEV, options) < 0)
                boot_fail(errno, "mount the layer %s (%s)", meta, options);
}

static int mount_upper(const char *name) {
        char source[64];

        snprintf(source, sizeof(source), "/dev/%s", name);
        make_directory("/u", 0700);
        if (mount(source, "/u", "ext4", MS_NOSUID | MS_NODEV, "discard") < 0)
                boot_fail(errno, "mount the writable disk %s", name);
        make_directory("/u/upper", 0755);
        make_directory("/u/work", 0700);
        cleanup_fd int low = open("/u", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        int fd = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, FD_FREE);
        if (fd < 0)
                boot_fail(errno, "open the writable disk");
        return fd;
}

int root_mount(const struct boot_plan *plan) {
        char options[OPTIONS];
        size_t used;

        make_directory("/l", 0700);
        for (int i = 0; i < plan->n_lowers; i++)
                mount_lower(plan, i);
        int upper = mount_upper(plan->upper);
        /* So that the upper directory is all there is of what commands wrote. */
        used = (size_t) snprintf(options, sizeof(options),
                                 "redirect_dir=off,metacopy=off,index=off,upperdir=/u/upper,workdir=/u/work,lowerdir=");
        for (int i = 0; i < plan->n_lowers; i++)
                used += (size_t) snprintf(options + used, sizeof(options) - used, "%s/l/%d", i ? ":" : "", i);
        make_directory("/r", 0755);
        /* nodev: the tenant's device nodes are files without meaning, wherever he finds them. */
        if (mount("overlay", "/r", "overlay", MS_NODEV, options) < 0)
                boot_fail(errno, "mount the overlay");
        return upper;
}

static void mount_one(const char *type, const char *target, unsigned long flags, const char *options, bool optional) {
        make_directory(target, 0755);
        if (mount(type, target, type, flags, options) < 0 && !(optional && errno == ENODEV))
                boot_fail(errno, "mount %s", target);
}

static void make_nodes(void) {
        static const struct {
                const char *path;
                unsigned major, minor;
        } nodes[] = {
                { "/dev/null", 1, 3 },   { "/dev/zero", 1, 5 },    { "/dev/full", 1, 7 },
                { "/dev/random", 1, 8 }, { "/dev/urandom", 1, 9 }, { "/dev/tty", 5, 0 },
        };
        static const char *const links[][2] = {
                { "/proc/self/fd", "/dev/fd" },       { "/proc/self/fd/0", "/dev/stdin" }, { "/proc/self/fd/1", "/dev/stdout" },
                { "/proc/self/fd/2", "/dev/stderr" }, { "pts/ptmx", "/dev/ptmx" },
        };

        for (size_t i = 0; i < ELEMENTS(nodes); i++)
                if (mknod(nodes[i].path, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)) < 0)
                        boot_fail(errno, "mknod %s", nodes[i].path);
        for (size_t i = 0; i < ELEMENTS(links); i++)
                if (symlink(links[i][0], links[i][1]) < 0)
                        boot_fail(errno, "symlink %s", links[i][1]);
}

/* The image is on top of everything then: nothing of the initramfs, of devtmpfs or of the layers has a path any more. */
static void move_root(void) {
        static const char *const gone[] = { "/dev", "/proc", "/sys", "/u" };
        char path[16];

        for (size_t i = 0; i < ELEMENTS(gone); i++)
                if (umount2(gone[i], MNT_DETACH) < 0)
                        boot_fail(errno, "unmount %s", gone[i]);
        for (int i = 0; i < LOWERS_MAX; i++) {
                snprintf(path, sizeof(path), "/l/%d", i);
                if (umount2(path, MNT_DETACH) < 0)
                        break;
        }
        if (chdir("/r") < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0)
                boot_fail(errno, "enter the new root");
}

void root_enter(void) {
        static const unsigned long quiet = MS_NOSUID | MS_NOEXEC | MS_NODEV;

        move_root();
        mount_one("proc", "/proc", quiet, NULL, false);
        mount_one("tmpfs", "/dev", MS_NOSUID | MS_STRICTATIME, "mode=755,size=65536k", false);
        mount_one("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "ptmxmode=0666,mode=0620,gid=5", false);
        mount_one("tmpfs", "/dev/shm", quiet, "mode=1777,size=65536k", false);
        mount_one("mqueue", "/dev/mqueue", quiet, NULL, true);
        mount_one("sysfs", "/sys", quiet | MS_RDONLY, NULL, false);
        make_nodes();
}
