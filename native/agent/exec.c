#include "exec.h"

#include <signal.h>
#include <sys/ioctl.h>

#include "command.h"
#include "leaf.h"
#include "start.h"

enum {
        RUNNING_MAX = 1024,
        ENDED_MAX = 512,
        META_MAX = 4096,
        ARGS_MAX = 65536,
        REST_AGAIN_US = 2000,
        REST_ROUNDS = 500,
};

static const size_t kept_max = MIB(64); /* of ended commands */

static struct command *commands; /* newest first */
static unsigned n_running, n_ended;
static uint32_t next_channel = 1;
static uint64_t held_us; /* since when timeouts stand still; 0: they do not */

uint32_t exec_next_channel(void) {
        return next_channel;
}

void exec_note_channel(uint32_t channel) {
        if (channel >= next_channel && channel < UINT32_MAX)
                next_channel = channel + 1;
}

static struct command *find(uint32_t channel) {
        struct command *c = commands;

        while (c && c->channel != channel)
                c = c->next;
        return c;
}

bool exec_has_channel(uint32_t channel) {
        return find(channel) != NULL;
}

/* Unlinks and frees the record; a leaf that still holds processes goes when they do. */
static void drop(struct command *c) {
        struct command **at = &commands;

        while (*at != c)
                at = &(*at)->next;
        *at = c->next;
        if (c->ended)
                n_ended--;
        else
                n_running--;
        command_free(c);
}

/* The oldest ended records go first, until few enough are left. One of which the host is about to hear stays. */
static void shed(void) {
        for (;;) {
                struct command *oldest = NULL;
                size_t kept = 0;

                for (struct command *c = commands; c; c = c->next)
                        if (c->ended) {
                                kept += command_memory(c);
                                if (!c->exit_due)
                                        oldest = c;
                        }
                if (!oldest || (n_ended <= ENDED_MAX && kept <= kept_max))
                        return;
                drop(oldest);
        }
}

void exec_child_ended(pid_t pid, int status, const struct rusage *usage) {
        struct command *c = commands;

        while (c && (c->ended || c->pid != pid))
                c = c->next;
        if (!c)
                return;
        /* If its last word has not been read yet: the pipe is closed now, so this is final. */
        if (c->failed || command_check_start(c) < 0) {
                leaf_release(c->channel);
                drop(c);
                return;
        }
        command_ended(c, status, usage);
        n_running--;
        n_ended++;
        leaf_release(c->channel);
        shed();
}

/* Everything but the first process, which may itself start new ones: until a round finds nobody, or for a second. */
static void kill_rest(struct command *c) {
        bool again = leaf_kill_others(c->channel, c->pid) > 0 && ++c->rest_rounds < REST_ROUNDS;

        c->rest_us = again ? now_us() + REST_AGAIN_US : 0;
}

int exec_deadlines(void) {
        uint64_t now = 0, next = UINT64_MAX;

        for (struct command *c = commands; c; c = c->next) {
                if (c->ended || c->timed_out || (c->deadline_us == 0 && c->rest_us == 0))
                        continue;
                if (now == 0)
                        now = now_us();
                if (c->rest_us != 0 && c->rest_us <= now)
                        kill_rest(c);
                if (c->rest_us != 0)
                        next = min_u64(next, max_u64(c->rest_us, now));
                if (c->deadline_us == 0 || held_us != 0)
                        continue;
                if (c->deadline_us <= now) {
                        c->timed_out = true;
                        (void) leaf_kill(c->channel);
                        (void) kill(c->pid, SIGKILL);
                } else
                        next = min_u64(next, c->deadline_us);
        }
        return next == UINT64_MAX ? -1 : (int) min_u64((next - now + 999) / 1000, 1u << 30);
}

void exec_hold(void) {
        if (held_us == 0)
                held_us = now_us();
}

void exec_go_on(void) {
        uint64_t now = now_us();

        for (struct command *c = commands; c && held_us != 0; c = c->next) {
                uint64_t stood = now - max_u64(held_us, c->started_us);
                if (c->ended)
                        continue;
                c->started_us += stood;
                if (c->deadline_us != 0)
                        c->deadline_us += stood;
        }
        held_us = 0;
}

void exec_link_lost(void) {
        for (struct command *c = commands; c; c = c->next) {
                source_cancel(&c->source);
                command_forget_link(c);
        }
}

/* No string may hold a NUL, the program would see it cut short. */
static bool strings_are_whole(struct span rest) {
        struct span value;
        uint8_t tag;

        while (field_next(&rest, &tag, &value) > 0)
                if ((tag == ARG || tag == ENV) && memchr(value.data, 0, value.size))
                        return false;
        return true;
}

static struct command *command_new(uint32_t channel, const struct args *args) {
        struct command *c = calloc(1, sizeof(*c));
        struct span meta = args->bytes[META];

        if (!c)
                return NULL;
        command_init(c, channel);
        c->flags = number_or(args, FLAGS, 0);
        if (meta.size > 0 && !(c->meta = malloc(meta.size))) {
                free(c);
                return NULL;
        }
        if (meta.size > 0)
                memcpy(c->meta, meta.data, meta.size);
        c->meta_size = meta.size;
        return c;
}

static int on_exec(uint32_t channel, const struct args *args, struct span payload) {
        enum step step = STEP_OTHER;

        if (args->count[ARG] == 0 || args->count[ARG] + args->count[ENV] > ARGS_MAX || args->bytes[META].size > META_MAX ||
            number_or(args, CAP, 0) > CAP_MAX || !strings_are_whole(payload)) {
                frame_error(channel, EINVAL, STEP_OTHER, "a field of the request is out of its bounds");
                return 0;
        }
        if (n_running >= RUNNING_MAX) {
                frame_error(channel, EAGAIN, STEP_LIMIT, "too many commands at once");
                return 0;
        }
        struct command *c = command_new(channel, args);
        int r = c ? command_start(c, args, payload, &step) : -ENOMEM;
        if (r < 0) {
                frame_error(channel, r, step, strerror(-r));
                if (c)
                        command_free(c);
                return 0;
        }
        /* Not by frames of their own: before they are read, the command may have written more than is kept. */
        for (int i = 0; i < STREAMS && (c->flags & EXEC_FOLLOW); i++)
                if (c->streams[i])
                        stream_follow(c->streams[i], 0, 0);
        c->next = commands;
        commands = c;
        n_running++;
        return 0;
}

/* --- the other requests --------------------------------------------------------------------------------------------- */

static struct stream *stream_of(const struct command *c, const struct args *args) {
        uint64_t number = number_or(args, STREAM, 0);

        return number >= 1 && number <= STREAMS ? c->streams[number - 1] : NULL;
}

static void on_follow(struct command *c, const struct args *args) {
        struct stream *s = stream_of(c, args);

        if (!s)
                return;
        stream_follow(s, number_or(args, OFFSET, 0), number_or(args, LIMIT, 0));
        source_wake(&c->source);
}

static void on_unfollow(struct command *c, const struct args *args) {
        struct stream *s = stream_of(c, args);

        if (!s)
                return;
        stream_unfollow(s);
        source_wake(&c->source);
}

enum kill_flags { KILL_ALL = 1, KILL_FOREGROUND = 2, KILL_REST = 4 };

static void kill_foreground(const struct command *c, int signal) {
        pid_t group;

        /* Numbers of the outer namespace, in which 1 is the agent; 0 would be our own group. */
        if (c->feed.is_tty && c->feed.watch.fd >= 0 && ioctl(c->feed.watch.fd, TIOCGPGRP, &group) == 0 && group > 1)
                (void) kill(-group, signal);
}

static void on_kill(struct command *c, const struct args *args) {
        int signal = (int) min_u64(number_or(args, SIGNAL, SIGKILL), 65);
        uint64_t flags = number_or(args, FLAGS, 0);

        if (signal > 64)
                return;
        if (flags & KILL_ALL) {
                c->kill_all = !c->ended;
                (void) leaf_kill(c->channel);
                signal = SIGKILL;
        }
        if (c->ended)
                return;
        if (flags & KILL_REST) {
                c->rest_rounds = 0;
                kill_rest(c);
                return;
        }
        c->kill_signal = signal;
        if (flags & KILL_FOREGROUND)
                kill_foreground(c, signal);
        else
                (void) kill(c->pid, signal);
}

static int on_list(void) {
        for (const struct command *c = commands; c; c = c->next) {
                frame_begin(T_RECORD, c->channel);
                frame_bytes(META, c->meta, c->meta_size);
                frame_number(STATE, c->ended);
                frame_number(PID, (uint64_t) c->inner_pid);
                frame_number(RAN_US, c->ended ? c->ran_us : now_us() - c->started_us);
                frame_end();
        }
        frame_empty(T_DONE, 0);
        return 0;
}

static const uint8_t *allowed_tags(uint8_t type) {
        static const uint8_t exec[] = { ARG, ENV, CWD, USER, FLAGS, ROWS, COLS, TIMEOUT_MS, CAP, META, CPUS, NOFILE, 0 };
        static const uint8_t follow[] = { STREAM, OFFSET, LIMIT, 0 };
        static const uint8_t signal[] = { SIGNAL, FLAGS, 0 };
        static const uint8_t resize[] = { ROWS, COLS, 0 };
        static const uint8_t none[] = { 0 };

        switch (type) {
        case T_EXEC:
                return exec;
        case T_FOLLOW:
        case T_UNFOLLOW:
                return follow;
        case T_KILL:
                return signal;
        case T_RESIZE:
                return resize;
        default:
                return none;
        }
}

/* For a command that is gone (shed, or never started) there is nothing to do, and only FETCH waits for an answer. */
static int on_command(struct command *c, const struct header *header, const struct args *args) {
        switch (header->type) {
        case T_STDIN_EOF:
                if (c && c->feed.watch.fd >= 0)
                        feed_eof(&c->feed);
                break;
        case T_FOLLOW:
                if (c)
                        on_follow(c, args);
                break;
        case T_UNFOLLOW:
                if (c)
                        on_unfollow(c, args);
                break;
        case T_KILL:
                if (c)
                        on_kill(c, args);
                break;
        case T_RESIZE:
                if (c && c->feed.is_tty && c->feed.watch.fd >= 0)
                        (void) terminal_resize(c->feed.watch.fd, args);
                break;
        case T_FETCH:
                if (!c)
                        frame_error(header->channel, ESRCH, STEP_OTHER, "no such command");
                else {
                        command_fetch(c, true);
                        feed_regrant(&c->feed);
                }
                break;
        case T_FORGET:
                if (c && c->ended)
                        drop(c);
                break;
        default:
                return -EPROTO;
        }
        return 0;
}

int exec_request(const struct header *header, struct span payload) {
        static struct args args;
        struct command *c = find(header->channel);

        if (header->type == T_STDIN) {
                /* After the end of the process, or without a pipe, it is thrown away. */
                if (c && (c->flags & (EXEC_STDIN | EXEC_TTY)) && c->feed.watch.fd >= 0)
                        return feed_push(&c->feed, payload);
                return 0;
        }
        int r = args_decode(payload, allowed_tags(header->type), &args);
        if (r < 0)
                return r;
        if (header->type == T_LIST)
                return on_list();
        if (header->type == T_EXEC)
                return on_exec(header->channel, &args, payload);
        return on_command(c, header, &args);
}
