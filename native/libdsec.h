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
