/* What happens once, before the first connection: namespaces, mounts, descriptors. */
#pragma once

#include "child.h"
#include "vm.h"

struct setup {
        bool is_vm;      /* then vm is filled in */
        bool is_service; /* of a full VM, which is_vm too: commands run as its own programs do */
        bool calls;      /* an agent of calls (call.h) and of nothing else */
        struct vm vm;
        struct confinement confinement;
        int null_fd, pts_fd; /* pts_fd: -1 without a devpts */
        pid_t init_pid;      /* pid 1 of the namespace in which commands run; 0: our own namespace */
};

/* Descriptor 3 is the link and 4 the sandbox's cgroup: given by whoever started a container, or by
 * vm_boot() or service_start() before this.
 * Complains on stderr and returns a negative errno. Afterwards descriptors 5 to 9 are taken (by /dev/null), so that no
 * later one can be where a command expects its own. */
int setup(int argc, char **argv, struct setup *ret);
/* For those two: puts the link at 3 and the cgroup at 4, and *keeper out of their way. */
int setup_descriptors(int link, int group, int *keeper);
