/* One cell at a time: made, announced (CELL), given its files (CALL_FILE), let go (CALL), waited for, told of (ENDED), and
 * the next one is made. A call has ended when PID 1 of its cell has been waited for: by then the kernel has ended and
 * reaped every other process of it, so nothing of a call is there when its end is told. */
#include "call.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>

#include "leaf.h"
#include "place.h"
#include "zygote.h"

enum { CPU_LOOK_US = 2000 /* processor time is looked at no more often than this */ };

uint32_t call_channel;

static const struct confinement *confinement;
static struct watch zygote = { .fd = -1 };
static pid_t zygote_pid;
static bool over;

bool call_over(void) {
        return over;
}

void call_broken(int code, const char *what) {
        if (!over)
                frame_error(call_channel, code, STEP_OTHER, what);
        over = true;
}

static void next_cell(void) {
        int r = over ? 0 : place_make();

        if (r < 0)
                call_broken(r, "a cell could not be made");
}

/* --- the end of a call ---------------------------------------------------------------------------------------------- */

static void finish(void) {
        uint64_t cpu = leaf_cpu_us(cell.number);

        if (!cell.told) { /* PID 1 was killed along: by us, or for want of memory */
                cell.ran_us = now_us() - cell.started_us;
                cell.status = SIGKILL;
        }
        for (int i = 0; i < 2; i++)
                while (output_read(&cell.outputs[i]))
                        ;
        /* Nothing can be asked of it any more, and the next one is made when all of this one is told. */
        cell.ready = cell.running = false;
        answer_start(cpu > cell.cpu_base_us ? cpu - cell.cpu_base_us : 0);
}

void call_answered(void) {
        leaf_release(cell.number);
        place_clear();
        next_cell();
}

bool call_child_ended(pid_t pid, int status) {
        if (pid == zygote_pid && pid != 0) {
                call_broken(ECHILD, "the zygote died");
                return true;
        }
        if (cell.number == 0)
                return false;
        /* Their last words, and for one that died early its first: they tell who it was. */
        place_hear();
        if (pid == cell.worker) {
                cell.worker = 0;
                cell.ran_us = now_us() - cell.started_us;
                cell.status = status;
                cell.told = true;
                if (cell.pid > 0)
                        (void) kill(cell.pid, SIGKILL);
        } else if (pid == cell.pid)
                cell.pid = 0;
        else
                return false;
        if (!cell.running)
                call_broken(ECHILD, "a cell died while it waited");
        else if (cell.pid == 0 && cell.worker == 0)
                finish();
        return true;
}

int call_deadlines(void) {
        if (!cell.running || cell.why != ENDED_ITSELF)
                return -1;
        uint64_t now = now_us();
        if (cell.cpu_look_us <= now) {
                uint64_t used = leaf_cpu_us(cell.number) - cell.cpu_base_us;
                if (used >= cell.cpu_max_us)
                        place_kill(ENDED_CPU);
                /* It cannot use it up sooner than this: a call runs on one processor, or we look again. */
                cell.cpu_look_us = now + max_u64(cell.cpu_max_us - min_u64(used, cell.cpu_max_us), CPU_LOOK_US);
        }
        if (cell.deadline_us <= now)
                place_kill(ENDED_WALL);
        if (cell.why != ENDED_ITSELF)
                return -1;
        uint64_t next = min_u64(cell.deadline_us, cell.cpu_look_us);
        return (int) min_u64((next - min_u64(now, next) + 999) / 1000, 1u << 30);
}

void call_link_lost(void) {
        if (call_channel != 0)
                over = true;
}

/* --- requests ------------------------------------------------------------------------------------------------------- */

static void zygote_ready(struct watch *watch, uint32_t events) {
        char text[TEXT_MAX] = "";
        ssize_t n = recv(watch->fd, text, sizeof(text) - 1, 0);

        (void) events;
        if (n == 1 && cell.number == 0)
                next_cell();
        else if (n != -1 || errno != EAGAIN)
                call_broken(ENOEXEC, n > 1 ? text : "the zygote died");
}

static int on_calls(uint32_t on, const struct args *args, struct span payload) {
        if (call_channel != 0)
                return -EPROTO;
        call_channel = on;
        if (args->count[ARG] == 0) {
                next_cell();
                return 0;
        }
        int fd = zygote_start(payload, args, confinement, &zygote_pid);
        zygote.ready = zygote_ready;
        place_zygote(fd);
        if (fd < 0 || watch_start(&zygote, fd, EPOLLIN) < 0)
                call_broken(fd < 0 ? fd : EIO, "the zygote");
        return 0;
}

static bool name_is_plain(struct span name) {
        return name.size > 0 && name.size < 256 && !memchr(name.data, '/', name.size) && !memchr(name.data, 0, name.size) &&
               !(name.data[0] == '.' && (name.size == 1 || (name.size == 2 && name.data[1] == '.')));
}

static int append(int fd, struct span data) {
        while (data.size > 0) {
                ssize_t n = write(fd, data.data, data.size);
                if (n < 0)
                        return -errno;
                data.data += n;
                data.size -= (size_t) n;
        }
        return 0;
}

/* Nothing runs in the cell yet, so its directory is as we left it. Without a name: standard input. */
static int on_file(const struct args *args) {
        struct span name = args->bytes[NAME];

        if (!cell.ready || cell.running)
                return -EPROTO;
        if (!has(args, NAME)) {
                if (cell.in < 0)
                        cell.in = openat(cell.work, PLACE_INPUT, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0444);
                if (cell.in < 0)
                        return -errno;
                return append(cell.in, args->bytes[DATA]);
        }
        cleanup_free char *path = name_is_plain(name) ? span_dup(name, 255) : NULL;
        if (!path)
                return -EPROTO;
        cleanup_fd int fd = openat(cell.work, path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0 || fchown(fd, cell.uid, cell.uid) < 0 || fchmod(fd, (mode_t) number_or(args, MODE, 0644) & 0777) < 0)
                return -errno;
        return append(fd, args->bytes[DATA]);
}

static int on_call(const struct args *args, struct span payload) {
        if (!cell.ready || cell.running || args->count[ARG] == 0)
                return -EPROTO;
        cell.wanted = malloc(payload.size);
        if (!cell.wanted)
                return -errno;
        memcpy(cell.wanted, payload.data, payload.size);
        cell.wanted_size = payload.size;
        cell.produced_left = min_u64(number_or(args, LIMIT, 0), PRODUCED_MAX);
        for (int i = 0; i < 2; i++)
                cell.outputs[i].cap = (size_t) min_u64(number_or(args, CAP, OUTPUT_MAX), OUTPUT_MAX);
        cell.cpu_base_us = leaf_cpu_us(cell.number);
        cell.cpu_max_us = min_u64(number_or(args, CPU_MS, 1000), UINT64_C(1) << 40) * 1000;
        cell.started_us = now_us();
        cell.deadline_us = cell.started_us + min_u64(number_or(args, TIMEOUT_MS, 1000), UINT64_C(1) << 40) * 1000;
        cell.cpu_look_us = cell.started_us + max_u64(cell.cpu_max_us, CPU_LOOK_US);
        cell.running = true;
        return place_order(args, payload);
}

static int perform(const struct header *header, const struct args *args, struct span payload) {
        switch (header->type) {
        case T_CALLS:
                return on_calls(header->channel, args, payload);
        case T_CALL_FILE:
                return on_file(args);
        case T_CALL:
                return on_call(args, payload);
        default: /* T_CALL_STOP; of one that has just ended there is nothing to stop */
                if (cell.running)
                        place_kill(ENDED_STOPPED);
                return 0;
        }
}

int call_request(const struct header *header, struct span payload) {
        static const uint8_t calls[] = { ARG, 0 }, file[] = { NAME, MODE, DATA, 0 }, none[] = { 0 };
        static const uint8_t call[] = { ARG, ENV, NAME, CAP, CPUS, NOFILE, TIMEOUT_MS, CPU_MS, FILE_MAX, SPACE, STACK, LIMIT, 0 };
        static struct args args;

        if (header->type < T_CALLS || header->type > T_CALL_STOP || (header->type != T_CALLS && header->channel != call_channel))
                return -EPROTO;
        if (args_decode(payload, header->type == T_CALLS     ? calls :
                                 header->type == T_CALL      ? call :
                                 header->type == T_CALL_FILE ? file :
                                                               none,
                        &args) < 0)
                return -EPROTO;
        int r = over ? 0 : perform(header, &args, payload);
        if (r < 0 && r != -EPROTO) {
                call_broken(r, "the call could not be prepared");
                return 0;
        }
        return r;
}

int call_init(const struct confinement *c, int null) {
        confinement = c;
        place_init(c, null);
        return mkdir("/box", 0755) < 0 && errno != EEXIST ? -errno : 0;
}
