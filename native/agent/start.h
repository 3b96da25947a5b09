/* From a request to a running child: pipes or a pty, a leaf cgroup, clone. */
#pragma once

#include "child.h"
#include "command.h"

void start_init(const struct confinement *confinement, int null_fd, int pts_fd);
/* On failure *ret_step says at what; the record holds what has been opened so far and is the caller's to free. */
int command_start(struct command *c, const struct args *args, struct span payload, enum step *ret_step);
/* ROWS and COLS of a terminal. */
int terminal_resize(int fd, const struct args *args);
