#include "guest.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/statfs.h>

#include "keeper.h"
#include "loop.h"

static struct watch keeper = { .fd = -1 };
static int group = -1, proc = -1, upper = -1;
static unsigned asked, stale; /* answers to come; those of them that belong to a connection that is gone */

static void keeper_ready(struct watch *watch, uint32_t events) {
        static struct keeper_answer answer;
        char text[TEXT_MAX + 1] = { 0 };

        (void) events;
        ssize_t n = recv(watch->fd, &answer, sizeof(answer), MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
                return;
        if (n < KEEPER_HEADER) {
                /* It is gone. What is asked from now on fails at once. */
                watch_events(watch, 0);
                return;
        }
        asked--;
        if (stale > 0) {
                stale--;
                return;
        }
        size_t size = (size_t) n - KEEPER_HEADER;
        if (answer.code != 0) {
                memcpy(text, answer.payload, min_size(size, TEXT_MAX));
                frame_error(answer.channel, answer.code, STEP_OTHER, text);
                return;
        }
        frame_payload(T_DONE, answer.channel, answer.payload, size);
}

static int ask(uint32_t type, uint32_t channel, struct span payload) {
        static struct keeper_request request;

        if (payload.size > sizeof(request.payload))
                return -E2BIG;
        request.type = type;
        request.channel = channel;
        memcpy(request.payload, payload.data, payload.size);
        if (send(keeper.fd, &request, KEEPER_HEADER + payload.size, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
                return errno == EAGAIN ? -EBUSY : -errno;
        asked++;
        return 0;
}

static uint64_t group_number(const char *file) {
        char text[32];

        return read_at(group, file, text, sizeof(text)) > 0 ? strtoull(text, NULL, 10) : 0;
}

static void stats_group(void) {
        static const struct {
                const char *file, *word;
                enum tag tag;
        } words[] = {
                { "memory.events", "oom_kill", OOM_KILLS }, { "pids.events", "max", PIDS_HITS },
                { "cpu.stat", "usage_usec", CPU_US },       { "memory.stat", "anon", MEM_ANON },
                { "memory.stat", "file", MEM_FILE },
        };
        char text[4096];

        for (size_t i = 0; i < ELEMENTS(words); i++) {
                (void) read_at(group, words[i].file, text, sizeof(text));
                frame_number(words[i].tag, number_after(text, words[i].word));
        }
        frame_number(MEM_CURRENT, group_number("memory.current"));
        frame_number(MEM_PEAK, group_number("memory.peak"));
        frame_number(TASKS, group_number("pids.current"));
}

static void stats(uint32_t channel) {
        struct statfs disk = { 0 };
        char text[4096];

        /* An overlay answers for its writable layer. */
        (void) statfs("/", &disk);
        (void) read_at(proc, "meminfo", text, sizeof(text));
        frame_begin(T_DONE, channel);
        stats_group();
        uint64_t used = disk.f_blocks - disk.f_bfree;
        frame_number(DISK_USED, used * (uint64_t) disk.f_bsize);
        /* What ext4 keeps for itself is nobody's. */
        frame_number(DISK_LIMIT, (used + disk.f_bavail) * (uint64_t) disk.f_bsize);
        frame_number(MEM_TOTAL, number_after(text, "MemTotal:") << 10);
        frame_number(MEM_AVAILABLE, number_after(text, "MemAvailable:") << 10);
        frame_end();
}

void guest_request(const struct header *header, struct span payload) {
        int r = -EOPNOTSUPP;

        if (keeper.fd >= 0 && header->type == T_STATS) {
                stats(header->channel);
                return;
        }
        if (keeper.fd >= 0)
                r = ask(header->type, header->channel, payload);
        if (r < 0)
                frame_error(header->channel, r, STEP_OTHER, keeper.fd < 0 ? "not a virtual machine" : "the keeper");
}

void guest_link_lost(void) {
        stale = asked;
}

void guest_off(void) {
        if (keeper.fd < 0 || ask(T_SHUTDOWN, 0, (struct span) { (const uint8_t *) "", 0 }) < 0)
                return;
        /* It writes the disk back first; that takes what it takes, and the host has a deadline. */
        for (;;)
                (void) pause();
}

int guest_freeze(void) {
        char text[256];

        if (upper < 0)
                return -EOPNOTSUPP;
        int r = write_at(group, "cgroup.freeze", "1");
        if (r < 0)
                return r;
        ssize_t n = read_at(group, "cgroup.events", text, sizeof(text));
        if (n < 0)
                return (int) n;
        return number_after(text, "frozen") == 1 ? upper : -EAGAIN;
}

int guest_init(const struct vm *vm, int group_fd, int proc_fd) {
        group = group_fd;
        proc = proc_fd;
        upper = vm->upper_fd;
        keeper.ready = keeper_ready;
        return watch_start(&keeper, vm->keeper_fd, EPOLLIN);
}
