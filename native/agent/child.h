/* From clone to exec: everything that turns a copy of the agent into the command. */
#pragma once

#include <linux/filter.h>

#include "frame.h"

/* What HELLO said about all commands, and what set-up found. */
struct confinement {
        bool has_filter;
        struct sock_filter *filter; /* an agent of calls keeps it for them, and lives without */
        uint16_t filter_count;
        uint64_t caps;
        char *apparmor;       /* NULL: none */
        int proc_fd;          /* the proc of the inner PID namespace, not by a path the tenant could mount over */
        uint64_t nofile_soft, nofile_hard; /* as the runtime gave them to us */
        int oom_fd;           /* our own oom_score_adj; -1: none */
        char oom_own[8];      /* what it says */
};

/* One command to be started. Descriptors are the child's ends, all above 9. */
struct spawn {
        struct span fields;   /* the EXEC payload, for ARG and ENV */
        const struct args *args;
        int in_fd, out_fd, err_fd, control_fd; /* control_fd: -1 for none */
        int status_fd;
        bool tty;
};

/* What the child says on its status pipe: its pid in its own namespace first, then nothing if exec worked. */
struct child_report {
        int32_t pid;
        int32_t code; /* errno, 0 in the first report */
        int32_t step;
};

__attribute__((noreturn)) void child_run(const struct spawn *spawn, const struct confinement *confinement);
/* execve by the environment's PATH. Comes back only if nothing could be started, with the errno. */
int child_execute(char **argv, char **env);
/* clone3 does not exist from here on. */
int child_filter_clone3(void);
