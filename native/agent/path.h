/* Paths named by the host, resolved inside the sandbox as any program there would resolve them. */
#pragma once

#include "frame.h"

enum { PATH_BYTES = 4096, NAME_BYTES = 256 };

/* A new string: absolute, no NUL, not too long. NULL with errno. */
char *path_from(struct span text);

/* Where the last component lives: an O_PATH descriptor of its directory, and its name. "/" is "." in "/".
 * With follow, a symlink there (dangling or not) is followed to where it points. */
int path_parent(const char *path, bool follow, int *ret_dir, char ret_name[static NAME_BYTES]);

/* mkdir -p; new directories get mode and, unless uid is -1, this owner. -EEXIST if something else is in the way. */
int path_make_directories(const char *path, mode_t mode, uid_t uid, gid_t gid);
/* The same for the directory that path lies in. */
int path_make_parents(const char *path, uid_t uid, gid_t gid);
