#include "command.h"

#include <fcntl.h>
#include <sys/wait.h>

#include "child.h"

void command_free(struct command *c) {
        source_cancel(&c->source);
        if (c->status.fd >= 0) {
                int fd = c->status.fd;
                watch_stop(&c->status);
                close_fd(fd);
        }
        if (c->feed.watch.fd >= 0)
                feed_stop(&c->feed);
        for (int i = 0; i < STREAMS; i++)
                if (c->streams[i])
                        stream_abandon(c->streams[i]);
        free(c->meta);
        free(c);
}

size_t command_memory(const struct command *c) {
        size_t sum = 0;

        for (int i = 0; i < STREAMS; i++)
                if (c->streams[i])
                        sum += stream_memory(c->streams[i]);
        return sum;
}

bool command_settled(const struct command *c) {
        if (!c->ended)
                return false;
        for (int i = 0; i < STREAMS; i++)
                if (c->streams[i] && !stream_complete(c->streams[i]))
                        return false;
        return true;
}

static void send_started(const struct command *c) {
        frame_begin(T_STARTED, c->channel);
        frame_number(PID, (uint64_t) c->inner_pid);
        frame_end();
}

static void send_totals(const struct stream *s, uint64_t number) {
        uint8_t digest[SHA256_SIZE];

        frame_number(STREAM, number);
        frame_number(TOTAL, s->total);
        if (stream_dropped(s) > 0) {
                sha256_digest(&s->dropped, digest);
                frame_bytes(DIGEST, digest, sizeof(digest));
        }
}

static void send_exit(const struct command *c) {
        bool signaled = WIFSIGNALED(c->exit_status);
        int signal = signaled ? WTERMSIG(c->exit_status) : 0;
        enum why why = c->timed_out ? WHY_TIMEOUT :
                       c->kill_all || (signaled && signal == c->kill_signal) ? WHY_KILLED : WHY_ENDED;

        frame_begin(T_EXIT, c->channel);
        frame_number(EXIT, (uint64_t) (signaled ? 128 + signal : WEXITSTATUS(c->exit_status)));
        frame_number(SIGNAL, (uint64_t) signal);
        frame_number(WHY, why);
        frame_number(RAN_US, c->ran_us);
        frame_number(CPU_US, c->cpu_us);
        for (unsigned i = 0; i < STREAMS; i++)
                if (c->streams[i])
                        send_totals(c->streams[i], i + 1);
        frame_end();
}

int command_check_start(struct command *c) {
        struct child_report report;

        if (c->started)
                return 1;
        for (;;) {
                ssize_t n = read(c->status.fd, &report, sizeof(report));
                if (n < 0 && (errno == EAGAIN || errno == EINTR))
                        return 0;
                /* Writes of this size arrive whole; anything else is the end: exec has closed the pipe. */
                if (n != (ssize_t) sizeof(report))
                        break;
                c->inner_pid = report.pid;
                if (report.code != 0) {
                        c->failed = true;
                        frame_error(c->channel, report.code, (enum step) report.step, strerror(report.code));
                        return -report.code;
                }
        }
        int fd = c->status.fd;
        watch_stop(&c->status);
        close_fd(fd);
        c->started = true;
        send_started(c);
        return 1;
}

/* One frame of what FETCH asked for; false when there is nothing left of it. */
static bool fetch_some(struct command *c) {
        for (unsigned i = 0; i < STREAMS; i++)
                if (c->streams[i] && c->fetched[i] < c->fetch_end[i] &&
                    stream_send(c->streams[i], (uint8_t) (i + 1), c->channel, &c->fetched[i],
                                min_u64(c->fetch_end[i], c->streams[i]->total), false))
                        return true;
        return false;
}

static bool follow_some(struct command *c) {
        bool sent = false;

        for (unsigned i = 0; i < STREAMS; i++) {
                struct stream *s = c->streams[i];
                if (!s || !s->followed)
                        continue;
                if (stream_send(s, (uint8_t) (i + 1), c->channel, &s->sent, min_u64(s->limit, s->total), true)) {
                        stream_resume(s);
                        sent = true;
                }
        }
        return sent;
}

static bool followers_satisfied(const struct command *c) {
        for (int i = 0; i < STREAMS; i++)
                if (c->streams[i] && c->streams[i]->followed && c->streams[i]->sent < c->streams[i]->total)
                        return false;
        return true;
}

/* Sends at most a frame for each stream. */
static bool command_pump(struct source *source) {
        struct command *c = CONTAINER_OF(source, struct command, source);

        if (!link_up())
                return false;
        if (follow_some(c))
                return true;
        if (c->fetching) {
                if (fetch_some(c))
                        return true;
                if (c->ended && !command_settled(c))
                        return false; /* a stream wakes us when it has read its last */
                c->fetching = false;
                if (!c->exit_due && c->started)
                        send_started(c);
        }
        if (c->exit_due && command_settled(c) && followers_satisfied(c)) {
                /* Output that nobody followed comes now, unasked, unless the command was started quietly. */
                if (!(c->flags & EXEC_QUIET)) {
                        c->flags |= EXEC_QUIET;
                        command_fetch(c, false);
                        return true;
                }
                c->exit_due = false;
                send_exit(c);
        }
        return false;
}

void command_fetch(struct command *c, bool all) {
        c->fetching = true;
        for (int i = 0; i < STREAMS; i++)
                if (c->streams[i] && (all || !c->streams[i]->ever_followed)) {
                        c->fetched[i] = 0;
                        c->fetch_end[i] = c->ended ? UINT64_MAX : c->streams[i]->total;
                }
        c->exit_due = c->ended;
        if (all && c->ended)
                c->flags |= EXEC_QUIET; /* it has been asked for: not once more, unasked, before EXIT */
        source_wake(&c->source);
}

void command_ended(struct command *c, int status, const struct rusage *usage) {
        c->ended = true;
        c->exit_status = status;
        c->ran_us = now_us() - c->started_us;
        c->cpu_us = (uint64_t) (usage->ru_utime.tv_sec + usage->ru_stime.tv_sec) * 1000000u +
                    (uint64_t) (usage->ru_utime.tv_usec + usage->ru_stime.tv_usec);
        if (c->feed.watch.fd >= 0)
                feed_stop(&c->feed);
        for (int i = 0; i < STREAMS; i++)
                if (c->streams[i])
                        stream_finish(c->streams[i]);
        c->exit_due = link_up();
        source_wake(&c->source);
}

void command_forget_link(struct command *c) {
        c->fetching = c->exit_due = false;
        feed_forget_link(&c->feed);
        for (int i = 0; i < STREAMS; i++)
                if (c->streams[i]) {
                        stream_unfollow(c->streams[i]);
                        c->streams[i]->ever_followed = false;
                }
}

void command_init(struct command *c, uint32_t channel) {
        c->channel = channel;
        c->source.pump = command_pump;
        c->status.fd = c->feed.watch.fd = -1;
}
