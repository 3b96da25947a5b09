#include "beneath.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/syscall.h>

enum { ATTEMPTS = 32 };

int beneath_open(const struct beneath *b, const char *path, int flags) {
        struct open_how how = {
                .flags = (uint64_t) (flags | O_CLOEXEC),
                .resolve = RESOLVE_NO_MAGICLINKS | (b->is_real_root ? RESOLVE_IN_ROOT : RESOLVE_BENEATH),
        };

        for (int i = 0; i < ATTEMPTS; i++) {
                int fd = (int) syscall(SYS_openat2, b->root, *path ? path : ".", &how, sizeof(how));
                if (fd >= 0)
                        return fd;
                /* Something was renamed while the kernel looked at a "..": it cannot tell, so it asks to try again. */
                if (errno != EAGAIN)
                        return -errno;
        }
        return -EAGAIN;
}

static int make_parents(const struct beneath *b, char *path) {
        for (char *slash = path; slash; slash = strchr(slash + 1, '/')) {
                /* path is "a/b/c": each prefix, then the whole */
                char *end = strchr(slash + 1, '/');
                if (end)
                        *end = 0;
                char *last = strrchr(path, '/');
                if (last)
                        *last = 0;
                cleanup_fd int dir = beneath_open(b, last ? path : "", O_PATH | O_DIRECTORY);
                if (last)
                        *last = '/';
                const char *name = last ? last + 1 : path;
                int r = dir < 0 ? dir : mkdirat(dir, name, 0755) < 0 ? -errno : 0;
                if (r == 0 && b->uid != (uid_t) -1)
                        r = fchownat(dir, name, b->uid, b->gid, AT_SYMLINK_NOFOLLOW) < 0 ? -errno : 0;
                if (end)
                        *end = '/';
                if (r < 0 && r != -EEXIST)
                        return r;
        }
        return 0;
}

int beneath_parent(struct beneath *b, const char *path, int *ret_dir, const char **ret_name) {
        const char *slash = strrchr(path, '/');
        size_t size = slash ? (size_t) (slash - path) : 0;
        char parent[sizeof(b->parent_path)];

        *ret_name = slash ? slash + 1 : path;
        if (b->parent >= 0 && strlen(b->parent_path) == size && memcmp(b->parent_path, path, size) == 0) {
                *ret_dir = b->parent;
                return 0;
        }
        memcpy(parent, path, size);
        parent[size] = 0;
        int fd = beneath_open(b, parent, O_PATH | O_DIRECTORY);
        if (fd == -ENOENT && size > 0) {
                int r = make_parents(b, parent);
                if (r < 0)
                        return r;
                fd = beneath_open(b, parent, O_PATH | O_DIRECTORY);
        }
        if (fd < 0)
                return fd;
        close_fd(b->parent);
        b->parent = fd;
        strcpy(b->parent_path, parent);
        *ret_dir = fd;
        return 0;
}

void beneath_close(struct beneath *b) {
        close_fd(b->parent);
        close_fd(b->root);
        b->parent = b->root = -1;
}
