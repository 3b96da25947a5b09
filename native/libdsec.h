/* libdsec: the C half of dsecd, called through cffi. Functions return a negative errno and print nothing. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* One seccomp rule: all its argument comparisons must hold. op is libseccomp's enum scmp_compare. */
struct dsec_rule {
        int syscall;
        uint32_t action;
        unsigned int n_args;
        struct {
                unsigned int index;
                int op;
                uint64_t a, b;
        } args[6];
};

/* The number of a system call on this architecture, negative when it has none of that name. */
int dsec_syscall_number(const char *name);

/* Compile rules into an array of struct sock_filter in `ret`; returns its length in bytes. -ENOBUFS: `size` is too small. */
int dsec_seccomp_program(uint32_t default_action, const struct dsec_rule *rules, size_t n_rules,
                         unsigned char *ret, size_t size);

/* Bytes of the file that are in the page cache. Reads none of them, so asking changes nothing. Two ways, of which
 * the first is cheaper and younger (Linux 6.5); -ENOSYS, -EPERM or -EOPNOTSUPP: try the other. */
int64_t dsec_cached_by_cachestat(int fd);
int64_t dsec_cached_by_mincore(int fd);

/* process_madvise(2), Linux 5.10: `n` ranges (start, length, start, …) of another process. Returns bytes advised. */
int64_t dsec_advise(int pidfd, int advice, const uint64_t *ranges, size_t n);
