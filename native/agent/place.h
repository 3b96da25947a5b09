/* The one cell of an agent of calls: what is known of it, from its making to its end. Shared by call.c (requests, the end),
 * place.c (its making and its words) and answer.c (what is told of it). */
#pragma once

#include "cell.h"
#include "link.h"
#include "loop.h"

enum { OUTPUT_MAX = 8 << 20, PRODUCED_MAX = 32 << 20 };

/* A name in the work directory while there is nobody else. */
#define PLACE_INPUT "\001input"

enum call_why { ENDED_ITSELF, ENDED_WALL, ENDED_STOPPED, ENDED_CPU, ENDED_OUTPUT };

struct output {
        struct watch watch;
        uint8_t *data;
        size_t size, cap;
        uint64_t total;
};

struct place {
        uint32_t number; /* of its leaf; 0: there is none */
        uid_t uid;
        pid_t pid;       /* of PID 1; 0: it has not said a word, or is gone */
        struct watch socket;
        pid_t worker;    /* of a warm cell's process, which is our child, too; 0 as above */
        struct watch worker_socket;
        int theirs[2], leaf; /* for the worker: its ends of the pipes, and the leaf; -1: given away */
        struct output outputs[2];
        int work;        /* its work directory; -1 */
        bool made;       /* it was announced */
        bool ready, running;
        /* of its call */
        int in;          /* standard input; -1: none */
        enum call_why why;
        uint64_t started_us, deadline_us, ran_us;
        uint64_t cpu_base_us, cpu_max_us, cpu_look_us;
        int status, no_exec;
        bool told;       /* the status is known */
        uint8_t *wanted; /* the CALL payload, for its NAMEs */
        size_t wanted_size;
        uint64_t produced_left;
};

extern struct place cell;
extern uint32_t call_channel;

/* null_fd: what a call without input reads. */
void place_init(const struct confinement *confinement, int null_fd);
/* From now on processes of cells are copies of a zygote, which is reached here; -1: they execute programs. */
void place_zygote(int socket);
/* Makes the next one. Negative errno. */
int place_make(void);
/* Kills all of it; the first reason is the one that is told. */
void place_kill(enum call_why why);
/* Takes the words that have come. */
void place_hear(void);
/* It is over: nothing of it is kept. */
void place_clear(void);
/* Fills in the order from a CALL and gives it to PID 1. */
int place_order(const struct args *args, struct span payload);
/* False at the end of the pipe, or when there is nothing to read now. */
bool output_read(struct output *o);

/* What failed is ours: whoever owns this sandbox takes another one. */
void call_broken(int code, const char *what);

/* answer.c: what it printed, the files that were wanted, and how it ended; then call_answered(). */
void answer_start(uint64_t cpu_us);
void call_answered(void);
