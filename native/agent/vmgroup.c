/* What holds the commands of a virtual machine together: one cgroup with limits that leave the agent and the kernel enough
 * to go on, and a device filter, since root in the machine's own user namespace may make device nodes. */
#include <fcntl.h>
#include <linux/bpf.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/syscall.h>

#include "vm.h"

/* struct bpf_cgroup_dev_ctx: u32 access << 16 | type, u32 major, u32 minor */
#define LOAD(to, offset) { .code = BPF_LDX | BPF_MEM | BPF_W, .dst_reg = to, .src_reg = BPF_REG_1, .off = offset }
#define MOVE(to, from) { .code = BPF_ALU | BPF_MOV | BPF_X, .dst_reg = to, .src_reg = from }
#define ALU(operation, to, value) { .code = BPF_ALU | operation | BPF_K, .dst_reg = to, .imm = value }
#define SHIFT_BY(to, from) { .code = BPF_ALU | BPF_RSH | BPF_X, .dst_reg = to, .src_reg = from }
/* Jumps name the instruction that comes next; at is their own number. */
#define JUMP(at, operation, of, value, next) \
        { .code = BPF_JMP | operation | BPF_K, .dst_reg = of, .imm = value, .off = next - at - 1 }
#define LEAVE { .code = BPF_JMP | BPF_EXIT }

enum {
        MEMORY_DEVICES = 1, TTY_DEVICES = 5, PTY_DEVICES = 136, /* Documentation/admin-guide/devices.txt */
        MEMORY_ALLOWED = 1 << 3 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 9, /* null, zero, full, random, urandom */
        TTY_ALLOWED = 1 << 0 | 1 << 2, /* tty, ptmx */
        MINOR_LAST = 9,
        LOOK = 15, DENY = 18, OUT = 20,
};

/* What the OCI runtime specification lets every container open. To make a node is not to open it. */
static const struct bpf_insn device_filter[] = {
        LOAD(BPF_REG_2, 0),
        LOAD(BPF_REG_4, 4),
        LOAD(BPF_REG_5, 8),
        ALU(BPF_MOV, BPF_REG_0, 1),
        MOVE(BPF_REG_3, BPF_REG_2),
        ALU(BPF_RSH, BPF_REG_3, 16),
        JUMP(6, BPF_JEQ, BPF_REG_3, BPF_DEVCG_ACC_MKNOD, OUT),
        ALU(BPF_AND, BPF_REG_2, 0xffff),
        JUMP(8, BPF_JNE, BPF_REG_2, BPF_DEVCG_DEV_CHAR, DENY),
        JUMP(9, BPF_JEQ, BPF_REG_4, PTY_DEVICES, OUT),
        ALU(BPF_MOV, BPF_REG_0, MEMORY_ALLOWED),
        JUMP(11, BPF_JEQ, BPF_REG_4, MEMORY_DEVICES, LOOK),
        ALU(BPF_MOV, BPF_REG_0, TTY_ALLOWED),
        JUMP(13, BPF_JEQ, BPF_REG_4, TTY_DEVICES, LOOK),
        JUMP(14, BPF_JA, 0, 0, DENY),
        [LOOK] = JUMP(15, BPF_JGT, BPF_REG_5, MINOR_LAST, DENY),
        SHIFT_BY(BPF_REG_0, BPF_REG_5),
        JUMP(17, BPF_JA, 0, 0, DENY + 1),
        [DENY] = ALU(BPF_MOV, BPF_REG_0, 0),
        ALU(BPF_AND, BPF_REG_0, 1),
        [OUT] = LEAVE,
};

static long bpf(int command, union bpf_attr *attr) {
        return syscall(SYS_bpf, command, attr, sizeof(*attr));
}

static void filter_devices(int group) {
        union bpf_attr load = {
                .prog_type = BPF_PROG_TYPE_CGROUP_DEVICE,
                .expected_attach_type = BPF_CGROUP_DEVICE,
                .insns = (uint64_t) (uintptr_t) device_filter,
                .insn_cnt = ELEMENTS(device_filter),
                .license = (uint64_t) (uintptr_t) "",
        };
        cleanup_fd int program = (int) bpf(BPF_PROG_LOAD, &load);

        if (program < 0)
                boot_fail(errno, "load the device filter");
        union bpf_attr attach = {
                .target_fd = (uint32_t) group,
                .attach_bpf_fd = (uint32_t) program,
                .attach_type = BPF_CGROUP_DEVICE,
        };
        if (bpf(BPF_PROG_ATTACH, &attach) < 0)
                boot_fail(errno, "attach the device filter");
}

static void set(int group, const char *name, uint64_t value) {
        char text[24];

        snprintf(text, sizeof(text), "%llu", (unsigned long long) value);
        int r = write_at(group, name, text);
        if (r < 0)
                boot_fail(r, "cgroup %s", name);
}

/* What commands may use of what is free now, when everything that the kernel takes for itself (64 bytes for each page of
 * pmem, for one) is taken. The rest keeps the kernel and the agent going when commands use all of theirs. */
static uint64_t memory_limit(void) {
        char text[4096];
        ssize_t n = read_at(AT_FDCWD, "/proc/meminfo", text, sizeof(text));

        if (n < 0)
                boot_fail((int) n, "/proc/meminfo");
        uint64_t total = number_after(text, "MemTotal:") << 10, available = number_after(text, "MemAvailable:") << 10;
        uint64_t reserve = max_u64(MIB(16), min_u64(total / 16, MIB(64)));
        if (available < reserve + MIB(16))
                boot_fail(ENOMEM, "memory: %llu MiB are left of %llu", (unsigned long long) available >> 20,
                          (unsigned long long) total >> 20);
        return available - reserve;
}

/* The hierarchy is never attached anywhere: nobody but us has a way into it. */
int group_make(const struct boot_plan *plan) {
        cleanup_fd int fs = fsopen("cgroup2", FSOPEN_CLOEXEC);

        if (fs < 0 || fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
                boot_fail(errno, "make cgroup2");
        cleanup_fd int top = fsmount(fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
        if (top < 0)
                boot_fail(errno, "mount cgroup2");
        int r = write_at(top, "cgroup.subtree_control", "+memory +pids +cpu");
        if (r < 0)
                boot_fail(r, "cgroup controllers memory, pids and cpu");
        if (mkdirat(top, "sandbox", 0755) < 0)
                boot_fail(errno, "make the cgroup");
        cleanup_fd int group = openat(top, "sandbox", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (group < 0)
                boot_fail(errno, "open the cgroup");
        set(group, "pids.max", plan->pids);
        set(group, "memory.max", memory_limit());
        filter_devices(group);
        return steal_fd(&group);
}
