/* Reading directories, and walking trees without recursion, without a descriptor too many and without following a
 * symlink. */
#pragma once

#include "util.h"

enum { WALK_DEPTH = 128 };

/* One open directory. */
struct level {
        int fd;
        char name[256]; /* in the level above */
        size_t at, size;
        uint8_t entries[4096] __attribute__((aligned(8)));
};

struct walk {
        unsigned depth;
        struct level *levels[WALK_DEPTH];
};

static inline struct level *walk_top(const struct walk *walk) {
        return walk->depth > 0 ? walk->levels[walk->depth - 1] : NULL;
}

/* Descends; -ELOOP when the walk is as deep as it may be. */
int walk_enter(struct walk *walk, int parent, const char *name);
void walk_leave(struct walk *walk);
void walk_close(struct walk *walk);

/* The next name in a directory, valid until the next call; "." and ".." are left out. 1, 0 at the end, or -errno. */
int level_next(struct level *level, const char **ret_name);
void level_rewind(struct level *level);
