#include "path.h"

#include <fcntl.h>
#include <stdio.h>

enum { LINKS_MAX = 40 };

char *path_from(struct span text) {
        if (text.size == 0 || text.data[0] != '/') {
                errno = EINVAL;
                return NULL;
        }
        if (text.size >= PATH_BYTES) {
                errno = ENAMETOOLONG;
                return NULL;
        }
        return span_dup(text, PATH_BYTES);
}

/* Splits off the last component of path (which is modified) and opens what is before it, relative to *dir. */
static int step_into(char *path, int *dir, char name[static NAME_BYTES]) {
        size_t size = strlen(path);

        while (size > 1 && path[size - 1] == '/')
                path[--size] = 0;
        char *slash = strrchr(path, '/');
        const char *last = slash ? slash + 1 : path;
        if (strlen(last) >= NAME_BYTES)
                return -ENAMETOOLONG;
        strcpy(name, *last ? last : ".");
        if (!slash)
                return 0;
        /* "/x" lies in "/", not in "" */
        char saved = slash[1];
        slash[slash == path] = 0;
        int fd = openat(*dir, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (slash == path)
                slash[1] = saved;
        if (fd < 0)
                return -errno;
        close_fd(*dir);
        *dir = fd;
        return 0;
}

int path_parent(const char *path, bool follow, int *ret_dir, char ret_name[static NAME_BYTES]) {
        char text[PATH_BYTES], target[PATH_BYTES], name[NAME_BYTES];
        cleanup_fd int dir = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);

        if (dir < 0)
                return -errno;
        strcpy(text, path);
        for (int i = 0; i <= LINKS_MAX; i++) {
                int r = step_into(text, &dir, name);
                if (r < 0)
                        return r;
                ssize_t n = follow ? readlinkat(dir, name, target, sizeof(target)) : -1;
                if (n < 0) {
                        strcpy(ret_name, name);
                        *ret_dir = steal_fd(&dir);
                        return 0;
                }
                if (n == 0 || n >= (ssize_t) sizeof(target))
                        return -ENAMETOOLONG;
                memcpy(text, target, (size_t) n);
                text[n] = 0;
        }
        return -ELOOP;
}

static int make_one(int dir, const char *name, mode_t mode, uid_t uid, gid_t gid) {
        if (mkdirat(dir, name, mode & 0777) < 0)
                return errno == EEXIST ? 0 : -errno;
        if (uid != (uid_t) -1 && fchownat(dir, name, uid, gid, AT_SYMLINK_NOFOLLOW) < 0)
                return -errno;
        if ((mode & 07000) && fchmodat(dir, name, mode & 07777, 0) < 0)
                return -errno;
        return 0;
}

int path_make_directories(const char *path, mode_t mode, uid_t uid, gid_t gid) {
        char text[PATH_BYTES], *save = NULL;
        cleanup_fd int dir = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);

        if (dir < 0)
                return -errno;
        strcpy(text, path);
        for (char *name = strtok_r(text, "/", &save); name; name = strtok_r(NULL, "/", &save)) {
                int r = make_one(dir, name, mode, uid, gid);
                if (r < 0)
                        return r;
                int fd = openat(dir, name, O_PATH | O_DIRECTORY | O_CLOEXEC);
                if (fd < 0)
                        return errno == ENOTDIR ? -EEXIST : -errno;
                close_fd(dir);
                dir = fd;
        }
        return 0;
}

int path_make_parents(const char *path, uid_t uid, gid_t gid) {
        char text[PATH_BYTES];

        strcpy(text, path);
        size_t size = strlen(text);
        while (size > 1 && text[size - 1] == '/')
                text[--size] = 0;
        char *slash = strrchr(text, '/');
        slash[slash == text] = 0;
        return path_make_directories(text, 0755, uid, gid);
}
