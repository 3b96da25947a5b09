"""The cffi edge of libdsec: builds `dsecd._native` in API mode.

cdef text is what Python may call; C does the part that must be C: libseccomp's program export,
mincore, whose mapping Python could only touch, and process_madvise, which not every libc has.
"""

from cffi import FFI

ffi = FFI()
ffi.cdef(
    """
    struct dsec_rule {
        int syscall;
        uint32_t action;
        unsigned int n_args;
        struct { unsigned int index; int op; uint64_t a, b; } args[6];
    };
    int dsec_syscall_number(const char *name);
    int dsec_seccomp_program(uint32_t default_action, const struct dsec_rule *rules, size_t n_rules,
                             unsigned char *ret, size_t size);
    int64_t dsec_cached_by_cachestat(int fd);
    int64_t dsec_cached_by_mincore(int fd);
    int64_t dsec_advise(int pidfd, int advice, const uint64_t *ranges, size_t n);
    """
)
ffi.set_source(
    "dsecd._native",
    '#include "libdsec.h"',
    sources=["native/libdsec.c"],
    include_dirs=["native"],
    libraries=["seccomp"],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
