/* A program of the image that has loaded libraries and whose copies are the processes of calls (dsecd/fncall/zygote.py).
 * It is the sandbox's root as the agent is, in the namespace of commands, and gets nothing that comes from a call. */
#pragma once

#include "child.h"

/* What comes along with the second kind of order: the copy's socket, its output and error, the leaf, and the cell's
 * namespaces. */
enum zygote_fd { ZYGOTE_SOCKET, ZYGOTE_OUT, ZYGOTE_ERR, ZYGOTE_LEAF, ZYGOTE_NS_PID, ZYGOTE_NS_MNT, ZYGOTE_NS_IPC, ZYGOTE_FDS };

struct zygote_order {
        uint32_t kind; /* 1: the filter, as struct sock_filter, follows; 2: make a copy */
        uint32_t uid;
};

/* Starts it with this command line; its socket is returned, and where it will be heard of: one byte when it is ready, text
 * when it is not going to be. */
int zygote_start(struct span fields, const struct args *args, const struct confinement *confinement, pid_t *ret_pid);
int zygote_make(int socket, uint32_t uid, const int fds[static ZYGOTE_FDS]);
