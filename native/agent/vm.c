#include "vm.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <termios.h>

#include "keeper.h"
#include "setup.h"

enum {
        COMMAND_LINE = 4096, /* COMMAND_LINE_SIZE is 2048 on x86 and arm64 */
        VSOCK_BACKLOG = 8,
};

static bool off_by_reset;

bool vm_is_init(const char *program) {
        /* The kernel's name for the initramfs's program (init/main.c, ramdisk_execute_command). */
        return getpid() == 1 && strcmp(program, "/init") == 0;
}

void boot_off(void) {
        sync();
        (void) reboot(off_by_reset ? RB_AUTOBOOT : RB_POWER_OFF);
        /* The end of init is a panic, and that a reset (panic=-1). */
        _exit(1);
}

void boot_fail(int code, const char *format, ...) {
        va_list arguments;
        char what[256];

        va_start(arguments, format);
        vsnprintf(what, sizeof(what), format, arguments);
        va_end(arguments);
        dprintf(STDERR_FILENO, "dsec-agent: boot: %s: %s\n", what, strerror(abs(code)));
        (void) tcdrain(STDERR_FILENO);
        boot_off();
}

/* --- the command line ----------------------------------------------------------------------------------------------- */

static void take_device(char to[static DEVICE_NAME], const char *name, size_t size) {
        static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789";

        if (size == 0 || size >= DEVICE_NAME || strspn(name, letters) < size)
                boot_fail(EINVAL, "device '%.*s'", (int) size, name);
        memcpy(to, name, size);
        to[size] = 0;
}

static unsigned take_number(const char *text) {
        char *end;
        unsigned long value = strtoul(text, &end, 10);

        if (end == text || *end || value == 0 || value > UINT32_MAX - 1)
                boot_fail(EINVAL, "number '%s'", text);
        return (unsigned) value;
}

static void take_lower(struct boot_plan *plan, const char *value) {
        const char *colon = strchrnul(value, ':');

        if (plan->n_lowers == LOWERS_MAX)
                boot_fail(E2BIG, "dsec.lower");
        take_device(plan->lowers[plan->n_lowers].meta, value, (size_t) (colon - value));
        if (*colon)
                take_device(plan->lowers[plan->n_lowers].data, colon + 1, strlen(colon + 1));
        plan->n_lowers++;
}

static void take_link(struct boot_plan *plan, const char *value) {
        if (strncmp(value, "vsock:", 6) == 0)
                plan->vsock_port = take_number(value + 6);
        else if (strncmp(value, "serial:", 7) == 0 && value[7] && strlen(value + 7) < PORT_NAME)
                strcpy(plan->port, value + 7);
        else
                boot_fail(EINVAL, "dsec.link=%s", value);
}

static void take_word(struct boot_plan *plan, const char *word) {
        const char *value = strchrnul(word, '=');
        size_t size = (size_t) (value - word);

        value += *value == '=';
        if (size == 10 && memcmp(word, "dsec.lower", size) == 0)
                take_lower(plan, value);
        else if (size == 10 && memcmp(word, "dsec.upper", size) == 0)
                take_device(plan->upper, value, strlen(value));
        else if (size == 9 && memcmp(word, "dsec.link", size) == 0)
                take_link(plan, value);
        else if (size == 8 && memcmp(word, "dsec.net", size) == 0 && strlen(value) < NET_WORDS)
                strcpy(plan->net, value);
        else if (size == 9 && memcmp(word, "dsec.pids", size) == 0)
                plan->pids = take_number(value);
        else if (strcmp(word, "dsec.off=reboot") == 0)
                off_by_reset = true;
        else
                boot_fail(EINVAL, "%s", word);
}

static void read_plan(struct boot_plan *plan) {
        char line[COMMAND_LINE];
        ssize_t n = read_at(AT_FDCWD, "/proc/cmdline", line, sizeof(line));
        char *rest = line, *word;

        if (n < 0)
                boot_fail((int) n, "/proc/cmdline");
        /* How to end comes first, for whatever is wrong with the rest. */
        off_by_reset = strstr(line, "dsec.off=reboot") != NULL;
        while ((word = strsep(&rest, " \n")))
                if (strncmp(word, "dsec.", 5) == 0)
                        take_word(plan, word);
        if (plan->n_lowers == 0)
                boot_fail(EINVAL, "dsec.lower is missing");
        if (!*plan->upper)
                boot_fail(EINVAL, "dsec.upper is missing");
        if (!*plan->port && plan->vsock_port == 0)
                boot_fail(EINVAL, "dsec.link is missing");
}

/* --- the kernel's side ---------------------------------------------------------------------------------------------- */

static void mount_kernel(void) {
        static const char *const mounts[][2] = { { "/proc", "proc" }, { "/sys", "sysfs" }, { "/dev", "devtmpfs" } };

        for (size_t i = 0; i < ELEMENTS(mounts); i++) {
                (void) mkdir(mounts[i][0], 0755);
                if (mount(mounts[i][1], mounts[i][0], mounts[i][1], MS_NOSUID | MS_NOEXEC, NULL) < 0)
                        boot_fail(errno, "mount %s", mounts[i][0]);
        }
        /* The kernel opens them for us, unless the initramfs had no /dev/console. */
        for (int fd; (fd = open("/dev/console", O_RDWR | O_NOCTTY)) >= 0;)
                if (fd > STDERR_FILENO) {
                        close_fd(fd);
                        break;
                }
}

static int is_module(const struct dirent *entry) {
        size_t size = strlen(entry->d_name);

        return size > 3 && strcmp(entry->d_name + size - 3, ".ko") == 0;
}

/* In the order of their names; each file goes when it is loaded, since the initramfs is memory. */
static void load_modules(void) {
        struct dirent **entries;
        int n = scandir("/modules", &entries, is_module, alphasort);

        for (int i = 0; i < n; i++) {
                char path[300];
                snprintf(path, sizeof(path), "/modules/%s", entries[i]->d_name);
                cleanup_fd int fd = open(path, O_RDONLY | O_CLOEXEC);
                /* ENODEV: for a device that is not there. EEXIST: built in. */
                if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST && errno != ENODEV))
                        boot_fail(errno, "module %s", entries[i]->d_name);
                (void) unlink(path);
                free(entries[i]);
        }
        if (n >= 0)
                free(entries);
}

static bool find_device(const char *name, char path[static DEVICE_PATH]) {
        struct stat st;

        snprintf(path, DEVICE_PATH, "/dev/%s", name);
        return stat(path, &st) == 0 && S_ISBLK(st.st_mode);
}

static void wait_for(const char *device) {
        char path[DEVICE_PATH];

        if (!device_wait(find_device, device, path))
                boot_fail(ENODEV, "device %s", device);
}

static void wait_for_disks(const struct boot_plan *plan) {
        for (int i = 0; i < plan->n_lowers; i++) {
                wait_for(plan->lowers[i].meta);
                if (*plan->lowers[i].data)
                        wait_for(plan->lowers[i].data);
        }
        wait_for(plan->upper);
}

static int listen_vsock(unsigned port) {
        struct sockaddr_vm address = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = port };
        int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

        if (fd < 0 || bind(fd, (struct sockaddr *) &address, sizeof(address)) < 0 || listen(fd, VSOCK_BACKLOG) < 0)
                boot_fail(errno, "vsock port %u", port);
        return fd;
}

/* After this the kernel takes no more code, and tells its secrets to nobody. What it does not know is not there to close. */
static void lock_kernel(void) {
        static const char *const settings[][2] = {
                /* As hosts of containers have it: a program that asks for too much is killed, not refused. */
                { "vm/overcommit_memory", "1" },
                { "kernel/modules_disabled", "1" },
                { "kernel/kexec_load_disabled", "1" },
                { "kernel/unprivileged_bpf_disabled", "1" },
                { "kernel/dmesg_restrict", "1" },
                { "kernel/kptr_restrict", "2" },
                { "kernel/sysrq", "0" },
                /* As systemd sets them for every distribution; the kernel's own default is off. */
                { "fs/protected_hardlinks", "1" },
                { "fs/protected_symlinks", "1" },
                { "fs/protected_fifos", "1" },
                { "fs/protected_regular", "1" },
        };

        for (size_t i = 0; i < ELEMENTS(settings); i++) {
                char path[80];
                snprintf(path, sizeof(path), "/proc/sys/%s", settings[i][0]);
                int r = write_at(AT_FDCWD, path, settings[i][1]);
                if (r < 0 && r != -ENOENT)
                        boot_fail(r, "%s", path);
        }
}

/* What a runtime would have set for us. */
static void set_own_limits(void) {
        struct rlimit files = { .rlim_cur = 1024, .rlim_max = 1 << 20 };

        (void) setrlimit(RLIMIT_NOFILE, &files);
        int r = write_at(AT_FDCWD, "/proc/self/oom_score_adj", "-1000");
        if (r < 0)
                boot_fail(r, "oom_score_adj");
}

void vm_boot(struct vm *ret) {
        static struct boot_plan plan = { .pids = 512 };
        int r;

        umask(0);
        mount_kernel();
        read_plan(&plan);
        set_own_limits();
        load_modules();
        ret->serial = *plan.port != 0;
        int link = ret->serial ? port_open(plan.port) : listen_vsock(plan.vsock_port);
        if (link < 0)
                boot_fail(link, "port %s", plan.port);
        wait_for_disks(&plan);
        ret->upper_fd = root_mount(&plan);
        int group = group_make(&plan);
        net_up(&plan);
        lock_kernel();
        if ((ret->keeper_fd = keeper_start()) < 0)
                boot_fail(ret->keeper_fd, "keeper");
        root_enter();
        if ((r = setup_descriptors(link, group, &ret->keeper_fd)) < 0)
                boot_fail(r, "descriptors");
}
