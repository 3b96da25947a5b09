/* The agent's small vocabulary: locals that clean up after themselves, time, memory by whole pages. */
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define KIB(n) ((size_t) (n) << 10)
#define MIB(n) ((size_t) (n) << 20)
#define ELEMENTS(a) (sizeof(a) / sizeof((a)[0]))
#define CONTAINER_OF(p, type, member) ((type *) (void *) ((char *) (p) - offsetof(type, member)))

#define cleanup_fd __attribute__((cleanup(close_fd_p)))
#define cleanup_free __attribute__((cleanup(free_p)))

/* Bytes that belong to somebody else; not terminated. */
struct span {
        const uint8_t *data;
        size_t size;
};

static inline size_t min_size(size_t a, size_t b) {
        return a < b ? a : b;
}

static inline uint64_t min_u64(uint64_t a, uint64_t b) {
        return a < b ? a : b;
}

static inline uint64_t max_u64(uint64_t a, uint64_t b) {
        return a > b ? a : b;
}

/* Accepts -1, and leaves errno alone so that it can run on the way out of a failure. */
static inline void close_fd(int fd) {
        int saved = errno;

        if (fd >= 0)
                (void) close(fd);
        errno = saved;
}

static inline void close_fd_p(int *fd) {
        close_fd(*fd);
}

static inline int steal_fd(int *fd) {
        int taken = *fd;

        *fd = -1;
        return taken;
}

static inline void free_p(void *p) {
        void *memory;

        memcpy(&memory, p, sizeof(memory));
        free(memory);
}

static inline uint64_t now_us(void) {
        struct timespec t;

        (void) clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t) t.tv_sec * 1000000u + (uint64_t) t.tv_nsec / 1000u;
}

/* Zeroed memory that costs only the pages that get touched, and that goes back to the kernel when it is unmapped: a
 * heap would keep what one big transfer needed, a thousand times over on a full host. */
static inline void *pages_map(size_t size) {
        void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        return p == MAP_FAILED ? NULL : p;
}

/* The same for what no child needs to have: a fork does not copy its page tables, nor one command's output into the
 * memory of the next. */
static inline void *pages_map_own(size_t size) {
        void *p = pages_map(size);

        if (p)
                (void) madvise(p, size, MADV_DONTFORK);
        return p;
}

static inline void pages_unmap(void *p, size_t size) {
        if (p)
                (void) munmap(p, size);
}

/* The dirent type of a mode, as the protocol wants it. */
static inline uint64_t mode_type(mode_t mode) {
        return (uint64_t) (mode & S_IFMT) >> 12;
}

/* The first size - 1 bytes of a kernel's text file, terminated; -errno. */
static inline ssize_t read_at(int dir, const char *path, char *text, size_t size) {
        cleanup_fd int fd = openat(dir, path, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? -1 : read(fd, text, size - 1);

        text[n > 0 ? n : 0] = 0;
        return n < 0 ? -errno : n;
}

static inline int write_at(int dir, const char *path, const char *text) {
        cleanup_fd int fd = openat(dir, path, O_WRONLY | O_CLOEXEC);

        return fd < 0 || write(fd, text, strlen(text)) < 0 ? -errno : 0;
}

/* The number behind a word that begins a line; 0 if there is none. */
static inline uint64_t number_after(const char *text, const char *word) {
        size_t size = strlen(word);

        for (const char *line = text; line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
                if (strncmp(line, word, size) == 0 && (line[size] == ' ' || word[size - 1] == ':'))
                        return strtoull(line + size, NULL, 10);
        return 0;
}
