/* One command, as exec.c (requests) and command.c (its life) see it. */
#pragma once

#include <sys/resource.h>

#include "feed.h"
#include "stream.h"

enum { STREAMS = 3 }; /* stdout, stderr, control; numbered from 1 on the wire */
enum why { WHY_ENDED, WHY_TIMEOUT, WHY_KILLED };
enum exec_flags { EXEC_TTY = 1, EXEC_STDIN = 2, EXEC_CONTROL = 4, EXEC_QUIET = 8, EXEC_FOLLOW = 16 };

struct command {
        struct command *next;
        struct source source;
        uint32_t channel;
        pid_t pid;
        int32_t inner_pid;
        uint64_t flags;
        uint64_t started_us, deadline_us; /* 0: none */
        uint64_t rest_us; /* when to look again for the rest that is to be killed; 0: not asked for */
        int rest_rounds;
        uint64_t ran_us, cpu_us;
        struct watch status; /* the pipe on which the child reports; open until it has become the command */
        struct feed feed;
        struct stream *streams[STREAMS];
        bool started, failed, ended, timed_out, kill_all;
        int kill_signal;
        int exit_status; /* as wait() gave it */
        /* FETCH, or the output that comes with EXIT unasked. */
        bool fetching, exit_due;
        uint64_t fetched[STREAMS], fetch_end[STREAMS];
        uint8_t *meta;
        size_t meta_size;
};

/* Fills in the callbacks of a zeroed record. */
void command_init(struct command *c, uint32_t channel);
/* Everything but the leaf: what the command's background children write is drained on. */
void command_free(struct command *c);
/* The process is gone (it was waited for). */
void command_ended(struct command *c, int status, const struct rusage *usage);
void command_fetch(struct command *c, bool all);
void command_forget_link(struct command *c);
bool command_settled(const struct command *c);
size_t command_memory(const struct command *c);
/* Reads what the child said. 1: it has become the command, 0: not yet, negative: it failed and the frame is out. */
int command_check_start(struct command *c);
