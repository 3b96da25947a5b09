/* Users as the sandbox's own /etc/passwd and /etc/group name them. Both files belong to the tenant: they are read with a
 * size limit, never waited for, and only ever in a child that is about to become the command. */
#pragma once

#include <sys/types.h>

#include "util.h"

enum { GROUPS_MAX = 1024 };

struct user {
        uid_t uid;
        gid_t gid;
        char *home; /* NULL if not known */
        gid_t groups[GROUPS_MAX];
        size_t n_groups;
};

/* text: `user`, `uid`, `user:group` or `uid:gid`; NULL is 0:0. -ENOENT for a name nobody has. */
int user_lookup(const char *text, struct user *ret);
