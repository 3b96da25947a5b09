#include "unpack.h"

#include <fcntl.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>

void member_clear(struct member *m) {
        while (m->n_xattrs > 0)
                free(m->xattr_names[--m->n_xattrs]);
        m->path[0] = m->link[0] = 0;
}

static void complain(struct unpack *u, int code) {
        issue_add(&u->issues, *u->current.path ? u->current.path : ".", strerror(code < 0 ? -code : code));
}

static void owner_of(const struct unpack *u, uid_t *ret_uid, gid_t *ret_gid) {
        *ret_uid = u->force_owner ? u->uid : u->current.header.uid;
        *ret_gid = u->force_owner ? u->gid : u->current.header.gid;
}

static struct timespec seconds(int64_t time) {
        return (struct timespec) { .tv_sec = time };
}

/* Owner, mode, attributes and time of what fd is, in the order in which none undoes another: a change of owner takes set-id
 * bits and capabilities away, everything changes times. */
static void set_metadata(struct unpack *u, int fd, bool with_time) {
        const struct member *m = &u->current;
        struct timespec times[2] = { { .tv_nsec = UTIME_OMIT }, seconds(m->header.mtime) };
        uid_t uid;
        gid_t gid;

        owner_of(u, &uid, &gid);
        if (fchown(fd, uid, gid) < 0 || fchmod(fd, m->header.mode) < 0)
                complain(u, errno);
        for (unsigned i = 0; i < m->n_xattrs; i++)
                if (fsetxattr(fd, m->xattr_names[i], m->xattr_values[i].data, m->xattr_values[i].size, 0) < 0)
                        complain(u, errno);
        if (with_time && futimens(fd, times) < 0)
                complain(u, errno);
}

/* The same for what must not be opened. No attributes: those that matter are for files and directories. */
static void set_metadata_at(struct unpack *u, int dir, const char *name) {
        const struct tar_header *h = &u->current.header;
        struct timespec times[2] = { { .tv_nsec = UTIME_OMIT }, seconds(h->mtime) };
        uid_t uid;
        gid_t gid;

        owner_of(u, &uid, &gid);
        if (fchownat(dir, name, uid, gid, AT_SYMLINK_NOFOLLOW) < 0 ||
            utimensat(dir, name, times, AT_SYMLINK_NOFOLLOW) < 0)
                complain(u, errno);
}

/* --- directory times ------------------------------------------------------------------------------------------------ */

static void dir_times_pop(struct unpack *u) {
        u->n_open--;
        struct timespec times[2] = { { .tv_nsec = UTIME_OMIT }, seconds(u->open_dirs[u->n_open].mtime) };
        cleanup_free char *path = u->open_dirs[u->n_open].path;
        cleanup_fd int fd = beneath_open(&u->where, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK);

        if (fd >= 0)
                (void) futimens(fd, times);
}

static bool lies_in(const char *path, const char *dir) {
        size_t size = strlen(dir);

        return size == 0 || (strncmp(path, dir, size) == 0 && path[size] == '/');
}

static void dir_times_leave(struct unpack *u, const char *path) {
        while (u->n_open > 0 && !lies_in(path, u->open_dirs[u->n_open - 1].path))
                dir_times_pop(u);
}

static void dir_times_push(struct unpack *u) {
        char *path = u->n_open < UNPACK_DEPTH ? strdup(u->current.path) : NULL;

        if (!path)
                return; /* it keeps the time of its last change */
        u->open_dirs[u->n_open].path = path;
        u->open_dirs[u->n_open++].mtime = u->current.header.mtime;
}

/* --- kinds of members ----------------------------------------------------------------------------------------------- */

/* What is in the way goes, unless it is a directory. True if it is worth trying again. */
static bool make_way(int dir, const char *name) {
        return errno == EEXIST && unlinkat(dir, name, 0) == 0;
}

static int make_regular(struct unpack *u, int dir, const char *name) {
        const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;

        u->fd = openat(dir, name, flags, 0600);
        if (u->fd < 0 && make_way(dir, name))
                u->fd = openat(dir, name, flags, 0600);
        return u->fd < 0 ? -errno : 0;
}

static int make_directory(struct unpack *u, int dir, const char *name) {
        struct stat st;

        if (mkdirat(dir, name, 0700) < 0) {
                int code = errno;
                if (code != EEXIST || fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
                        return -code;
                if (S_ISLNK(st.st_mode)) {
                        /* A link to a directory that is still below, such as /bin to usr/bin: the archive means that one,
                         * and its mode is none of the archive's business. */
                        cleanup_fd int target = beneath_open(&u->where, u->current.path, O_PATH | O_DIRECTORY);
                        if (target >= 0)
                                return 0;
                }
                if (!S_ISDIR(st.st_mode) && (unlinkat(dir, name, 0) < 0 || mkdirat(dir, name, 0700) < 0))
                        return -errno;
        }
        cleanup_fd int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (fd < 0)
                return -errno;
        set_metadata(u, fd, false);
        dir_times_push(u);
        return 0;
}

static int make_symlink(struct unpack *u, int dir, const char *name) {
        const char *target = u->current.link;

        if (symlinkat(target, dir, name) < 0 && !(make_way(dir, name) && symlinkat(target, dir, name) == 0))
                return -errno;
        set_metadata_at(u, dir, name);
        return 0;
}

/* The target is a member's name, so it lies below like all of them, and a symlink there is linked, not followed. */
static int make_hard_link(struct unpack *u, int dir, const char *name) {
        const char *link = u->current.link, *target;
        char path[TAR_PATH];

        int r = tar_path((struct span) { (const uint8_t *) link, strlen(link) }, path);
        if (r < 0)
                return r;
        target = strrchr(path, '/');
        if (target)
                path[target++ - path] = 0;
        cleanup_fd int from = beneath_open(&u->where, target ? path : "", O_PATH | O_DIRECTORY);
        if (from < 0)
                return from;
        target = target ? target : path;
        if (linkat(from, target, dir, name, 0) == 0)
                return 0;
        struct stat a, b;
        if (errno != EEXIST || fstatat(from, target, &a, AT_SYMLINK_NOFOLLOW) < 0 ||
            fstatat(dir, name, &b, AT_SYMLINK_NOFOLLOW) < 0)
                return -errno;
        /* Already the same file: making way would destroy it. */
        if (a.st_dev == b.st_dev && a.st_ino == b.st_ino)
                return 0;
        errno = EEXIST;
        return make_way(dir, name) && linkat(from, target, dir, name, 0) == 0 ? 0 : -errno;
}

static int make_node(struct unpack *u, int dir, const char *name) {
        const struct tar_header *h = &u->current.header;
        mode_t mode = h->mode | (h->type == '6' ? S_IFIFO : h->type == '3' ? S_IFCHR : S_IFBLK);
        dev_t device = h->type == '6' ? 0 : makedev(h->dev_major, h->dev_minor);

        /* As the kernel says in a user namespace; 0:0 is no device, but an overlay's whiteout. */
        if (device != 0 || h->type == '4')
                return -EPERM;
        if (mknodat(dir, name, mode, device) < 0 && !(make_way(dir, name) && mknodat(dir, name, mode, device) == 0))
                return -errno;
        set_metadata_at(u, dir, name);
        /* Again, for set-id bits; there is nobody to follow a symlink that is not one. */
        return h->mode & 07000 && fchmodat(dir, name, h->mode, 0) < 0 ? -errno : 0;
}

static int make_top(struct unpack *u) {
        if (u->current.header.type != '5')
                return -EINVAL;
        if (!u->top_is_ours)
                return 0;
        cleanup_fd int fd = beneath_open(&u->where, "", O_RDONLY | O_DIRECTORY | O_NONBLOCK);
        if (fd < 0)
                return fd;
        set_metadata(u, fd, false);
        dir_times_push(u);
        return 0;
}

static int make(struct unpack *u) {
        const char *name;
        int dir;

        if (u->current.path[0] == 0)
                return make_top(u);
        int r = beneath_parent(&u->where, u->current.path, &dir, &name);
        if (r < 0)
                return r;
        switch (u->current.header.type) {
        case '0':
        case '7':
                return make_regular(u, dir, name);
        case '1':
                return make_hard_link(u, dir, name);
        case '2':
                return make_symlink(u, dir, name);
        case '3':
        case '4':
        case '6':
                return make_node(u, dir, name);
        case '5':
                return make_directory(u, dir, name);
        default:
                return -ENOTSUP;
        }
}

void unpack_begin(struct unpack *u) {
        u->fd = -1;
        dir_times_leave(u, u->current.path);
        int r = make(u);
        if (r < 0)
                complain(u, r);
        else if (u->fd < 0)
                u->count++;
}

int unpack_data(struct unpack *u, struct span data) {
        while (data.size > 0 && u->fd >= 0) {
                ssize_t n = write(u->fd, data.data, data.size);
                if (n < 0 && errno == EINTR)
                        continue;
                if (n <= 0)
                        return n < 0 ? -errno : -EIO;
                data.data += n;
                data.size -= (size_t) n;
        }
        return 0;
}

void unpack_end(struct unpack *u) {
        if (u->fd < 0)
                return;
        set_metadata(u, u->fd, true);
        close_fd(steal_fd(&u->fd));
        u->count++;
}

void unpack_finish(struct unpack *u) {
        while (u->n_open > 0)
                dir_times_pop(u);
}

void unpack_free(struct unpack *u) {
        close_fd(u->fd);
        while (u->n_open > 0)
                free(u->open_dirs[--u->n_open].path);
        member_clear(&u->current);
        issues_free(&u->issues);
        beneath_close(&u->where);
}
