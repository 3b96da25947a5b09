#include "hide.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/vfs.h>

/* Those that exist are covered: files by /dev/null, directories by an empty read-only tmpfs. containers-common's list and
 * what later runtimes added. */
static const char *const masked_files[] = {
        "/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats",
        "/proc/sched_debug", "/proc/kmsg", "/proc/kallsyms", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags",
        "/proc/vmallocinfo", "/proc/slabinfo", "/proc/interrupts",
};
static const char *const masked_directories[] = {
        "/proc/acpi", "/proc/asound", "/proc/scsi", "/sys/firmware", "/sys/dev/block", "/sys/devices/virtual/powercap",
        "/sys/devices/virtual/dmi", "/sys/fs/selinux", "/sys/kernel/debug", "/sys/kernel/tracing", "/sys/kernel/security",
};
static const char *const read_only[] = { "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger" };

static int fail(struct hide_error *ret_error, const char *step, const char *path) {
        ret_error->code = errno;
        snprintf(ret_error->what, sizeof(ret_error->what), "%s %s", step, path);
        return -ret_error->code;
}

static int attach(int tree, const char *path) {
        return move_mount(tree, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH);
}

/* The runtime's /proc shows the agent. It is taken away rather than covered: what is covered comes back for whoever may
 * unmount. (The new one is made first, while the old one still proves that this namespace may have a proc at all.) */
static int replace_proc(struct hide_error *ret_error) {
        cleanup_fd int fs = fsopen("proc", FSOPEN_CLOEXEC);

        if (fs < 0 || fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
                return fail(ret_error, "make", "proc");
        cleanup_fd int mount = fsmount(fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
        if (mount < 0)
                return fail(ret_error, "mount", "proc");
        while (umount2("/proc", MNT_DETACH) == 0)
                ;
        if (attach(mount, "/proc") < 0)
                return fail(ret_error, "attach", "/proc");
        return 0;
}

static int cover_files(struct hide_error *ret_error) {
        struct stat st;

        for (size_t i = 0; i < ELEMENTS(masked_files); i++) {
                if (lstat(masked_files[i], &st) < 0)
                        continue;
                cleanup_fd int tree = open_tree(AT_FDCWD, "/dev/null", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
                if (tree < 0 || attach(tree, masked_files[i]) < 0)
                        return fail(ret_error, "mask", masked_files[i]);
        }
        return 0;
}

static int make_empty(struct hide_error *ret_error) {
        cleanup_fd int fs = fsopen("tmpfs", FSOPEN_CLOEXEC);

        if (fs < 0 || fsconfig(fs, FSCONFIG_SET_STRING, "mode", "0555", 0) < 0 ||
            fsconfig(fs, FSCONFIG_SET_STRING, "nr_inodes", "1", 0) < 0 ||
            fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
                return fail(ret_error, "make", "tmpfs");
        int mount = fsmount(fs, FSMOUNT_CLOEXEC,
                            MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
        return mount < 0 ? fail(ret_error, "mount", "tmpfs") : mount;
}

/* One empty file system serves all: with a thousand sandboxes, eight superblocks each would add up. Only an attached mount
 * can be cloned, so the first stays where it was put. */
static int cover_directories(struct hide_error *ret_error) {
        const char *origin = NULL;
        struct stat st;

        for (size_t i = 0; i < ELEMENTS(masked_directories); i++) {
                const char *path = masked_directories[i];
                if (lstat(path, &st) < 0 || !S_ISDIR(st.st_mode))
                        continue;
                cleanup_fd int tree = origin ? open_tree(AT_FDCWD, origin, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC) :
                                               make_empty(ret_error);
                if (tree < 0 && ret_error->code != 0)
                        return -ret_error->code;
                if (tree < 0 || attach(tree, path) < 0)
                        return fail(ret_error, "mask", path);
                origin = path;
        }
        return 0;
}

static int protect(struct hide_error *ret_error) {
        struct mount_attr attr = { .attr_set = MOUNT_ATTR_RDONLY };
        struct stat st;

        for (size_t i = 0; i < ELEMENTS(read_only); i++) {
                if (lstat(read_only[i], &st) < 0)
                        continue;
                cleanup_fd int tree = open_tree(AT_FDCWD, read_only[i], OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);
                if (tree < 0 || mount_setattr(tree, "", AT_EMPTY_PATH | AT_RECURSIVE, &attr, sizeof(attr)) < 0 ||
                    attach(tree, read_only[i]) < 0)
                        return fail(ret_error, "protect", read_only[i]);
        }
        return 0;
}

int hide_host(struct hide_error *ret_error) {
        int r;

        if ((r = replace_proc(ret_error)) < 0 || (r = cover_files(ret_error)) < 0 ||
            (r = cover_directories(ret_error)) < 0)
                return r;
        return protect(ret_error);
}

int hide_drop_privileges(struct hide_error *ret_error) {
        struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3 };
        struct __user_cap_data_struct none[2] = { 0 };

        for (unsigned long cap = 0; cap < 64; cap++)
                if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0) {
                        if (errno == EINVAL)
                                break; /* beyond the last one this kernel has */
                        return fail(ret_error, "drop", "capabilities");
                }
        if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0 || syscall(SYS_capset, &head, none) < 0 ||
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
                return fail(ret_error, "drop", "privileges");
        return 0;
}

void hide_program(const char *path) {
        /* Only the place that is ours by agreement; a VM's init runs from a file that should stay. */
        if (strcmp(path, "/dev/.dsec-agent") != 0)
                return;
        if (umount2(path, MNT_DETACH) == 0)
                (void) unlink(path);
}
