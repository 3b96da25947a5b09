/* The wire, see docs/agent-protocol.md: numbers, and decoding that believes nothing. */
#pragma once

#include "util.h"

enum {
        FRAME_HEADER = 12,
        FRAME_MAX = 2 << 20,
        DATA_MAX = 256 << 10,
        TEXT_MAX = 512,
        PROTOCOL_VERSION = 1,
};

enum frame_type {
        T_HELLO = 1, T_PING, T_EXEC, T_STDIN, T_STDIN_EOF, T_FOLLOW, T_UNFOLLOW, T_KILL, T_RESIZE, T_FETCH, T_FORGET, T_LIST,
        T_READ = 20, T_WRITE, T_STATPATH, T_LISTDIR, T_MKDIR, T_REMOVE, T_RENAME, T_TREE_PUT, T_TREE_GET, T_CONNECT, T_CLOSE,
        T_SHUTDOWN, T_HOLD,
        T_STATS = 33, T_WAKE, T_KNOBS, T_KNOB_READ, T_UPPER,
        T_CALLS = 40, T_CALL_FILE, T_CALL, T_CALL_STOP,
        T_READY = 64, T_PONG, T_STARTED, T_OUTPUT, T_EXIT, T_RECORD, T_ERROR, T_CELL, T_PRODUCED, T_ENDED,
        T_DATA = 80, T_EOF, T_CREDIT, T_STAT, T_ENTRY, T_DONE, T_CONNECTED,
};

enum tag {
        VERSION = 1, SECCOMP, CAPS, APPARMOR, NEXT, HOSTNAME,
        ARG = 10, ENV, CWD, USER, FLAGS, ROWS, COLS, TIMEOUT_MS, CAP, META, CPUS, NOFILE,
        STREAM = 30, OFFSET, LIMIT, DATA, TOTAL, DIGEST,
        PID = 40, EXIT, SIGNAL, WHY, RAN_US, STATE, CPU_US,
        PATH = 50, PATH2, MODE, UID, GID, SIZE, MTIME_NS, TYPE, COUNT, ISSUE, ERRNO, TEXT, PORT, NAME, STEP,
        OOM_KILLS = 70, PIDS_HITS, MEM_CURRENT, MEM_PEAK, MEM_ANON, MEM_FILE, TASKS, DISK_USED, DISK_LIMIT, MEM_TOTAL,
        MEM_AVAILABLE, REALTIME_NS, SEED, NET,
        CPU_MS = 90, FILE_MAX, SPACE, STACK,
        TAG_MAX = STACK,
};

enum step { STEP_OTHER, STEP_FORK, STEP_EXEC, STEP_USER, STEP_CHDIR, STEP_LIMIT };

struct header {
        uint32_t size, channel;
        uint8_t type;
};

/* Every field of one payload by tag. Repeatable fields (ARG, ENV, NAME) are only counted here; walk them with field_next(). */
struct args {
        uint64_t number[TAG_MAX + 1];
        struct span bytes[TAG_MAX + 1];
        uint32_t count[TAG_MAX + 1];
};

/* -EBADMSG if these twelve bytes cannot start a frame. */
int header_decode(const uint8_t *at, struct header *ret);
void header_encode(uint8_t *at, uint8_t type, uint32_t channel, uint32_t size);

/* 1 and one field, 0 at the end, -EBADMSG. *rest moves on. */
int field_next(struct span *rest, uint8_t *ret_tag, struct span *ret_value);

/* Decodes a list of fields of which only those in allowed (ended by 0) may appear. -EBADMSG otherwise. */
int args_decode(struct span payload, const uint8_t *allowed, struct args *ret);

static inline bool has(const struct args *args, enum tag tag) {
        return args->count[tag] > 0;
}

static inline uint64_t number_or(const struct args *args, enum tag tag, uint64_t fallback) {
        return has(args, tag) ? args->number[tag] : fallback;
}

/* A new C string, or NULL with errno ENOMEM, or EINVAL for an embedded NUL or more than max bytes. */
char *span_dup(struct span text, size_t max);
