/* Prints every entry of the root file system, as seen inside a sandbox: what a test compares with a vector.
 * One line each: hex of the path, st_mode, uid, gid, size, rdev major and minor, links, inode, hex of a link's target
 * or "-", then name=hex of every xattr. Static, because the image under test may have no C library. */
#define _GNU_SOURCE
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

/* Mounted by the runtime, or the test's own tools. */
static const char *const left_out[] = {"/proc", "/sys", "/dev", "/opt"};

static int is_left_out(const char *path) {
        for (size_t i = 0; i < sizeof left_out / sizeof *left_out; i++)
                if (!strcmp(path, left_out[i]))
                        return 1;
        return 0;
}

static void hex(const char *data, size_t size) {
        for (size_t i = 0; i < size; i++)
                printf("%02x", (unsigned char) data[i]);
}

static void xattrs(const char *path) {
        static char names[65536], value[65536];
        ssize_t size = llistxattr(path, names, sizeof names);

        for (ssize_t at = 0; at < size; at += (ssize_t) strlen(names + at) + 1) {
                ssize_t got = lgetxattr(path, names + at, value, sizeof value);
                if (got < 0)
                        continue;
                printf(" %s=", names + at);
                hex(value, (size_t) got);
        }
}

static void entry(const char *path) {
        char target[PATH_MAX];
        struct stat st;
        ssize_t size;

        if (lstat(path, &st) < 0) {
                perror(path);
                exit(1);
        }
        hex(path + 1, strlen(path + 1));
        printf(" %o %u %u %lld %u %u %lu %lu ", st.st_mode, st.st_uid, st.st_gid, (long long) st.st_size,
               major(st.st_rdev), minor(st.st_rdev), (unsigned long) st.st_nlink, (unsigned long) st.st_ino);
        size = readlink(path, target, sizeof target);
        if (size >= 0)
                hex(target, (size_t) size);
        else
                putchar('-');
        xattrs(path);
        putchar('\n');
}

static void walk(const char *top) {
        DIR *dir = opendir(*top ? top : "/");
        struct dirent *found;

        if (!dir) {
                perror(top);
                exit(1);
        }
        while ((found = readdir(dir))) {
                char path[PATH_MAX];

                if (!strcmp(found->d_name, ".") || !strcmp(found->d_name, ".."))
                        continue;
                if ((size_t) snprintf(path, sizeof path, "%s/%s", top, found->d_name) >= sizeof path)
                        exit(1);
                if (is_left_out(path))
                        continue;
                entry(path);
                if (found->d_type == DT_DIR)
                        walk(path);
        }
        closedir(dir);
}

int main(void) {
        walk("");
        return 0;
}
