/* See libdsec.h. */
#define _GNU_SOURCE
#include "libdsec.h"

#include <errno.h>
#include <seccomp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int dsec_syscall_number(const char *name) {
        return seccomp_syscall_resolve_name(name);
}

static int export_program(scmp_filter_ctx ctx, unsigned char *ret, size_t size) {
        struct stat st;
        size_t done = 0;
        int fd, r;

        /* libseccomp can write the program only to a descriptor */
        fd = memfd_create("seccomp", MFD_CLOEXEC);
        if (fd < 0)
                return -errno;
        r = seccomp_export_bpf(ctx, fd);
        if (r == 0 && fstat(fd, &st) < 0)
                r = -errno;
        if (r == 0 && (size_t) st.st_size > size)
                r = -ENOBUFS;
        while (r == 0 && done < (size_t) st.st_size) {
                ssize_t n = pread(fd, ret + done, (size_t) st.st_size - done, (off_t) done);
                if (n < 0)
                        r = -errno;
                else
                        done += (size_t) n;
        }
        close(fd);
        return r < 0 ? r : (int) done;
}

int dsec_seccomp_program(uint32_t default_action, const struct dsec_rule *rules, size_t n_rules,
                         unsigned char *ret, size_t size) {
        struct scmp_arg_cmp cmp[6];
        int r = 0;

        scmp_filter_ctx ctx = seccomp_init(default_action);
        if (!ctx)
                return -ENOMEM;
#if defined(__x86_64__)
        /* 32-bit programs run in sandboxes too; without this their system calls would kill them */
        r = seccomp_arch_add(ctx, SCMP_ARCH_X86);
        if (r == 0)
                r = seccomp_arch_add(ctx, SCMP_ARCH_X32);
#endif
        /* level 2 sorts the program into a binary tree: a system call passes about 10 instructions, not 500 */
        if (r == 0)
                (void) seccomp_attr_set(ctx, SCMP_FLTATR_CTL_OPTIMIZE, 2);
        for (size_t i = 0; r == 0 && i < n_rules; i++) {
                for (unsigned j = 0; j < rules[i].n_args && j < 6; j++)
                        cmp[j] = (struct scmp_arg_cmp) { rules[i].args[j].index, (enum scmp_compare) rules[i].args[j].op,
                                                         rules[i].args[j].a, rules[i].args[j].b };
                r = seccomp_rule_add_array(ctx, rules[i].action, rules[i].syscall, rules[i].n_args, cmp);
                if (r == -EDOM || r == -EEXIST || r == -EACCES)
                        r = 0; /* not on one of the architectures, doubled, or the same as the default */
        }
        if (r == 0)
                r = export_program(ctx, ret, size);
        seccomp_release(ctx);
        return r;
}
