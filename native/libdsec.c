/* See libdsec.h. */
#define _GNU_SOURCE
#include "libdsec.h"

#include <errno.h>
#include <seccomp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
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

#define NR_CACHESTAT 451 /* 6.5; the same number on every architecture */

int64_t dsec_cached_by_cachestat(int fd) {
        struct { uint64_t off, len; } range = { 0, 0 }; /* len 0: to the end */
        struct { uint64_t cache, dirty, writeback, evicted, recently_evicted; } found = { 0 };

        if (syscall(NR_CACHESTAT, fd, &range, &found, 0) < 0)
                return -errno;
        return (int64_t) found.cache * sysconf(_SC_PAGESIZE);
}

int64_t dsec_cached_by_mincore(int fd) {
        const size_t page = (size_t) sysconf(_SC_PAGESIZE), step = 64ul << 20;
        unsigned char resident[64ul << 20 >> 12]; /* a byte for each page of a step; pages are not smaller than 4 KiB */
        int64_t pages = 0;
        struct stat st;

        if (fstat(fd, &st) < 0)
                return -errno;
        /* a window at a time: a file may be larger than what we want to have page tables for */
        for (size_t at = 0; at < (size_t) st.st_size; at += step) {
                size_t left = (size_t) st.st_size - at;
                size_t length = left < step ? left : step, n = (length + page - 1) / page;

                void *map = mmap(NULL, length, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, (off_t) at);
                if (map == MAP_FAILED)
                        return -errno;
                int r = mincore(map, length, resident) < 0 ? -errno : 0;
                (void) munmap(map, length);
                if (r < 0)
                        return r;
                for (size_t i = 0; i < n; i++)
                        pages += resident[i] & 1;
        }
        return pages * (int64_t) page;
}

#define NR_PROCESS_MADVISE 440 /* the same number on every architecture */

int64_t dsec_advise(int pidfd, int advice, const uint64_t *ranges, size_t n) {
        struct iovec vector[64];

        if (n > sizeof(vector) / sizeof(vector[0]))
                return -EINVAL;
        for (size_t i = 0; i < n; i++)
                vector[i] = (struct iovec) { (void *) (uintptr_t) ranges[2 * i], ranges[2 * i + 1] };
        long r = syscall(NR_PROCESS_MADVISE, pidfd, vector, n, advice, 0);
        return r < 0 ? -errno : r;
}
