/* A cell is the place of one call: PID, mount and IPC namespaces of its own, one small tmpfs, and nothing else that can be
 * written. It is made ahead of the call, and goes with it. The words between its first process (PID 1 there) and the
 * agent are below. In a warm cell the process comes from elsewhere, a copy of the zygote (dsecd/fncall/zygote.py) that enters
 * these namespaces; it says the same words on a socket of its own. */
#pragma once

#include <sys/types.h>

#include "child.h"

enum { CELL_ARGS_MAX = 96 << 10, CELL_CPUS = 128 };

/* Agent to cell: begin. argc + envc strings follow, each with its NUL. A descriptor may come along: standard input. */
struct cell_go {
        uint64_t cpu_s, file_max, nofile, stack, space; /* seconds, bytes, number, bytes, bytes */
        uint8_t cpus[CELL_CPUS];                        /* affinity mask; zeros: any */
        uint32_t argc, envc;
};

enum cell_says { CELL_READY = 1, CELL_FAILED, CELL_NO_EXEC, CELL_ENDED, CELL_PLACED };
/* What comes with PID 1's READY: the work directory, and in a warm cell its namespaces. */
enum cell_fd { CELL_WORK, CELL_NS_PID, CELL_NS_MNT, CELL_NS_IPC, CELL_FDS };

/* Cell to agent, with the sender's credentials. A warm cell's PID 1 says PLACED when it has set the space. */
struct cell_word {
        int32_t what;
        int32_t value; /* FAILED, NO_EXEC: errno; ENDED: a wait status */
        char text[64]; /* FAILED: at which step */
};

/* What a new cell is given; its descriptors are close-on-exec. */
struct cell_seat {
        int socket, out, err, null;
        uid_t uid;
        bool warm;
        const struct confinement *confinement;
};

/* PID 1 of the cell, in the namespaces already. */
__attribute__((noreturn)) void cell_run(const struct cell_seat *seat);
