/* What only the agent of a virtual machine is asked: STATS here; WAKE, KNOBS and KNOB_READ by way of the keeper. */
#pragma once

#include "link.h"
#include "vm.h"

/* group_fd: the sandbox's cgroup; proc_fd: any /proc. */
int guest_init(const struct vm *vm, int group_fd, int proc_fd);
void guest_request(const struct header *header, struct span payload);
/* Answers to earlier requests have nobody to go to. */
void guest_link_lost(void);
/* Stops all commands for good, and gives the disk that they wrote to. -EAGAIN: not all stand still yet. -EOPNOTSUPP: no
 * machine of ours. */
int guest_freeze(void);
/* Ends the machine, if this is one. */
void guest_off(void);
