#include "dir.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/syscall.h>

int walk_enter(struct walk *w, int parent, const char *name) {
        if (w->depth == WALK_DEPTH)
                return -ELOOP;
        cleanup_free struct level *level = calloc(1, sizeof(*level));
        if (!level)
                return -ENOMEM;
        level->fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (level->fd < 0)
                return -errno;
        strncpy(level->name, name, sizeof(level->name) - 1);
        w->levels[w->depth++] = level;
        level = NULL;
        return 0;
}

void walk_leave(struct walk *w) {
        struct level *level = w->levels[--w->depth];

        close_fd(level->fd);
        free(level);
}

void walk_close(struct walk *w) {
        while (w->depth > 0)
                walk_leave(w);
}

int level_next(struct level *level, const char **ret_name) {
        for (;;) {
                if (level->at >= level->size) {
                        ssize_t n = (ssize_t) syscall(SYS_getdents64, level->fd, level->entries, sizeof(level->entries));
                        if (n <= 0)
                                return n < 0 ? -errno : 0;
                        level->size = (size_t) n;
                        level->at = 0;
                }
                const struct dirent64 *entry = (const struct dirent64 *) (const void *) (level->entries + level->at);
                level->at += entry->d_reclen;
                if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
                        *ret_name = entry->d_name;
                        return 1;
                }
        }
}

void level_rewind(struct level *level) {
        (void) lseek(level->fd, 0, SEEK_SET);
        level->at = level->size = 0;
}
