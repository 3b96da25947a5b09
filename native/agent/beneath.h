/* Opening and making what an archive names, without ever leaving the directory it is unpacked into. */
#pragma once

#include "util.h"

/* A directory in which an archive is unpacked. */
struct beneath {
        int root;        /* O_PATH */
        bool is_real_root; /* "/": then absolute symlinks mean what they say */
        uid_t uid;       /* for directories that are made on the way; -1: whatever they get */
        gid_t gid;
        int parent;      /* the last one that was asked for, and its path: neighbours come one after the other */
        char parent_path[4096];
};

/* Opens a directory or (with O_PATH) anything, below the root. Symlinks on the way are followed as long as they stay. */
int beneath_open(const struct beneath *b, const char *path, int flags);
/* The directory that path lies in, made with its parents if it is missing; stays owned by b. *ret_name points into path. */
int beneath_parent(struct beneath *b, const char *path, int *ret_dir, const char **ret_name);
void beneath_close(struct beneath *b);
