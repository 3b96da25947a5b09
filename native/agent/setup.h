/* What happens once, before the first connection: namespaces, mounts, descriptors. */
#pragma once

#include "child.h"

struct setup {
        struct confinement confinement;
        int null_fd, pts_fd; /* pts_fd: -1 without a devpts */
        pid_t init_pid;      /* pid 1 of the namespace in which commands run */
};

/* Complains on stderr and returns a negative errno. Afterwards descriptors 5 to 9 are taken (by /dev/null), so that no
 * later one can be where a command expects its own. */
int setup(int argc, char **argv, struct setup *ret);
