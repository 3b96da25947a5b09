/* Making the cell, hearing what its processes say, giving it its order. */
#include "place.h"

#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "leaf.h"
#include "zygote.h"

enum { FIRST_UID = 200000, UIDS = 500000 /* of calls, each another; within the sandbox's 2^20 */ };

struct place cell;

static const struct confinement *confinement;
static int null_fd = -1, zygote_fd = -1;
static uint32_t cells;
static struct {
        struct cell_go go;
        uint8_t strings[CELL_ARGS_MAX];
} order; /* of the call that runs */
static size_t order_size;

/* --- making --------------------------------------------------------------------------------------------------------- */

static void socket_ready(struct watch *watch, uint32_t events) {
        (void) watch;
        (void) events;
        place_hear();
}

void place_kill(enum call_why why) {
        if (cell.why == ENDED_ITSELF)
                cell.why = why;
        (void) leaf_kill(cell.number);
        if (cell.pid > 0)
                (void) kill(cell.pid, SIGKILL);
        if (cell.worker > 0)
                (void) kill(cell.worker, SIGKILL);
}

bool output_read(struct output *o) {
        static uint8_t piece[64 << 10];
        ssize_t n = read(o->watch.fd, piece, sizeof(piece));

        if (n <= 0) {
                if (n == 0 || errno != EAGAIN)
                        watch_events(&o->watch, 0);
                return n < 0 && errno == EINTR;
        }
        o->total += (uint64_t) n;
        size_t take = min_size((size_t) n, o->cap - o->size);
        if (take > 0 && !o->data && !(o->data = pages_map_own(o->cap)))
                take = 0;
        if (take > 0)
                memcpy(o->data + o->size, piece, take);
        o->size += take;
        if (o->total > o->cap)
                place_kill(ENDED_OUTPUT);
        return true;
}

static void output_ready(struct watch *watch, uint32_t events) {
        (void) events;
        (void) output_read(CONTAINER_OF(watch, struct output, watch));
}

static int output_open(struct output *o, int *ret_theirs) {
        int fds[2];

        if (pipe2(fds, O_CLOEXEC) < 0)
                return -errno;
        *ret_theirs = fds[1];
        o->watch.ready = output_ready;
        int r = fcntl(fds[0], F_SETFL, O_NONBLOCK) < 0 ? -errno : watch_start(&o->watch, fds[0], EPOLLIN);
        if (r < 0)
                close_fd(fds[0]);
        return r;
}

static void stop_watch(struct watch *watch) {
        int fd = watch->fd;

        watch_stop(watch);
        close_fd(fd);
}

/* In two steps, because who has put its children into another PID namespace may make no new one: the first is in that
 * namespace, and the second, which makes the cell's own, still becomes our child. */
static int clone_cell(const struct cell_seat *seat, int leaf) {
        struct clone_args args = {
                .flags = CLONE_PARENT | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_INTO_CGROUP,
                .cgroup = (uint64_t) leaf,
        };
        pid_t pid = fork();

        if (pid != 0)
                return pid < 0 ? -errno : 0;
        if (syscall(SYS_clone3, &args, sizeof(args)) == 0)
                cell_run(seat);
        _exit(0);
}

/* Under memory pressure the call goes, not us. */
static void set_oom(const char *value) {
        if (confinement->oom_fd >= 0)
                (void) !pwrite(confinement->oom_fd, value, strlen(value), 0);
}

/* A socket whose other end one process of the cell has; every word on it says who sent it. */
static int open_words(struct watch *watch, int *ret_theirs) {
        int fds[2], on = 1;

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
                return -errno;
        *ret_theirs = fds[1];
        watch->ready = socket_ready;
        int r = fcntl(fds[0], F_SETFL, O_NONBLOCK) < 0 || setsockopt(fds[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) < 0
                        ? -errno
                        : watch_start(watch, fds[0], EPOLLIN);
        if (r < 0)
                close_fd(fds[0]);
        return r;
}

int place_make(void) {
        struct cell_seat seat = { .null = null_fd, .confinement = confinement, .warm = zygote_fd >= 0 };
        cleanup_fd int theirs = -1;
        int r;

        cell.number = ++cells;
        cell.uid = seat.uid = FIRST_UID + cells % UIDS;
        if ((cell.leaf = leaf_create(cell.number)) < 0)
                return cell.leaf;
        if ((r = open_words(&cell.socket, &theirs)) < 0 || (r = output_open(&cell.outputs[0], &cell.theirs[0])) < 0 ||
            (r = output_open(&cell.outputs[1], &cell.theirs[1])) < 0)
                return r;
        seat.socket = theirs;
        seat.out = cell.theirs[0];
        seat.err = cell.theirs[1];
        set_oom("900");
        r = clone_cell(&seat, cell.leaf);
        set_oom(confinement->oom_own);
        return r;
}

/* The pipes must end with the call's own processes. */
static void give_away(void) {
        close_fd(steal_fd(&cell.theirs[0]));
        close_fd(steal_fd(&cell.theirs[1]));
        close_fd(steal_fd(&cell.leaf));
}

static int make_worker(const int places[static CELL_FDS]) {
        cleanup_fd int theirs = -1;
        int r = open_words(&cell.worker_socket, &theirs);

        if (r < 0)
                return r;
        return zygote_make(zygote_fd, cell.uid, (int[ZYGOTE_FDS]) {
                [ZYGOTE_SOCKET] = theirs, [ZYGOTE_OUT] = cell.theirs[0], [ZYGOTE_ERR] = cell.theirs[1],
                [ZYGOTE_LEAF] = cell.leaf, [ZYGOTE_NS_PID] = places[CELL_NS_PID], [ZYGOTE_NS_MNT] = places[CELL_NS_MNT],
                [ZYGOTE_NS_IPC] = places[CELL_NS_IPC],
        });
}

/* A second way into the same file: reading begins at the beginning, and nothing can be written. It has no name then. */
static int open_input(void) {
        cleanup_fd int fd = openat(cell.work, PLACE_INPUT, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);

        return fd < 0 || unlinkat(cell.work, PLACE_INPUT, 0) < 0 ? -errno : steal_fd(&fd);
}

/* What the cell is to do, from the CALL. */
static int write_order(const struct args *args, struct span payload) {
        struct span value, cpus = args->bytes[CPUS];
        size_t used = 0;
        uint8_t tag;

        order.go = (struct cell_go) {
                .cpu_s = cell.cpu_max_us / 1000000u + 2,
                .file_max = number_or(args, FILE_MAX, 0),
                .nofile = number_or(args, NOFILE, 0),
                .stack = number_or(args, STACK, 0),
                .space = number_or(args, SPACE, 0),
                .argc = args->count[ARG],
                .envc = args->count[ENV],
        };
        if (cpus.size > 0)
                memcpy(order.go.cpus, cpus.data, min_size(cpus.size, sizeof(order.go.cpus)));
        for (uint8_t wanted = ARG; wanted <= ENV; wanted++)
                for (struct span rest = payload; field_next(&rest, &tag, &value) > 0;) {
                        if (tag != wanted)
                                continue;
                        if (value.size >= sizeof(order.strings) - used || memchr(value.data, 0, value.size))
                                return -EINVAL;
                        memcpy(order.strings + used, value.data, value.size);
                        order.strings[used + value.size] = 0;
                        used += value.size + 1;
                }
        order_size = sizeof(order.go) + used;
        return 0;
}

/* To PID 1 all of it, with the input; of a warm cell, that needs only the numbers, and its worker gets the rest. */
static int send_order(int socket, size_t size) {
        union {
                char room[CMSG_SPACE(sizeof(int))];
                struct cmsghdr align;
        } control = { 0 };
        struct iovec iov = { &order, size };
        struct msghdr header = { .msg_iov = &iov, .msg_iovlen = 1 };
        int in = -1;

        if (size == order_size) {
                in = cell.in < 0 ? null_fd : open_input();
                if (in < 0)
                        return in;
                header.msg_control = control.room;
                header.msg_controllen = sizeof(control.room);
                control.align = (struct cmsghdr) {
                        .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
                };
                memcpy(CMSG_DATA(&control.align), &in, sizeof(in));
        }
        int r = sendmsg(socket, &header, MSG_NOSIGNAL) < 0 ? -errno : 0;
        if (in != null_fd)
                close_fd(in);
        return r;
}

/* --- what is said --------------------------------------------------------------------------------------------------- */

/* The next word, its sender and its descriptors (-1 for none); false when there is none. */
static bool word_next(struct watch *watch, struct cell_word *ret, pid_t *ret_pid, int ret_fds[static CELL_FDS]) {
        union {
                char room[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(CELL_FDS * sizeof(int))];
                struct cmsghdr align;
        } control;
        struct iovec iov = { ret, sizeof(*ret) };
        struct msghdr message = {
                .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof(control.room),
        };
        ssize_t n = recvmsg(watch->fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);

        memset(ret_fds, -1, CELL_FDS * sizeof(int));
        *ret_pid = 0;
        if (n != (ssize_t) sizeof(*ret)) {
                if (n >= 0)
                        watch_events(watch, 0); /* closed; a death is what counts */
                return false;
        }
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
                struct ucred sender;
                if (c->cmsg_level != SOL_SOCKET)
                        continue;
                if (c->cmsg_type == SCM_RIGHTS)
                        memcpy(ret_fds, CMSG_DATA(c), min_size(c->cmsg_len - CMSG_LEN(0), CELL_FDS * sizeof(int)));
                else if (c->cmsg_type == SCM_CREDENTIALS) {
                        memcpy(&sender, CMSG_DATA(c), sizeof(sender));
                        *ret_pid = sender.pid;
                }
        }
        ret->text[sizeof(ret->text) - 1] = 0;
        return true;
}

static void announce(void) {
        give_away();
        cell.made = cell.ready = true;
        frame_empty(T_CELL, call_channel);
}

static void on_place(pid_t pid, int fds[static CELL_FDS]) {
        cell.pid = pid;
        cell.work = steal_fd(&fds[CELL_WORK]);
        if (zygote_fd < 0)
                announce();
        else {
                int r = make_worker(fds);
                if (r < 0)
                        call_broken(r, "the zygote");
        }
}

/* Of PID 1, or of the worker of a warm cell. */
static void hear_one(struct watch *watch) {
        bool worker = watch == &cell.worker_socket;
        struct cell_word word;
        int fds[CELL_FDS], r;
        pid_t pid;

        while (watch->fd >= 0 && word_next(watch, &word, &pid, fds)) {
                if (word.what == CELL_READY && worker) {
                        cell.worker = pid;
                        announce();
                } else if (word.what == CELL_READY)
                        on_place(pid, fds);
                else if (word.what == CELL_PLACED) {
                        if ((r = send_order(cell.worker_socket.fd, order_size)) < 0)
                                call_broken(r, "the worker");
                } else if (word.what == CELL_NO_EXEC)
                        cell.no_exec = word.value;
                else if (word.what == CELL_ENDED) {
                        cell.ran_us = now_us() - cell.started_us;
                        cell.status = word.value;
                        cell.told = true;
                } else
                        call_broken(word.value, word.text);
                for (size_t i = 0; i < ELEMENTS(fds); i++)
                        close_fd(fds[i]);
        }
        if (watch->fd >= 0 && watch->events == 0 && !cell.made)
                call_broken(EPIPE, "a cell died while it was made");
}

void place_hear(void) {
        hear_one(&cell.socket);
        hear_one(&cell.worker_socket);
}

static void reset(void) {
        memset(&cell, 0, sizeof(cell));
        cell.work = cell.in = cell.theirs[0] = cell.theirs[1] = cell.leaf = -1;
        cell.socket.fd = cell.worker_socket.fd = cell.outputs[0].watch.fd = cell.outputs[1].watch.fd = -1;
}

void place_clear(void) {
        stop_watch(&cell.socket);
        stop_watch(&cell.worker_socket);
        give_away();
        for (int i = 0; i < 2; i++) {
                stop_watch(&cell.outputs[i].watch);
                pages_unmap(cell.outputs[i].data, cell.outputs[i].cap);
        }
        close_fd(cell.work);
        close_fd(cell.in);
        free(cell.wanted);
        reset();
}

int place_order(const struct args *args, struct span payload) {
        int r = write_order(args, payload);

        return r < 0 ? r : send_order(cell.socket.fd, zygote_fd < 0 ? order_size : sizeof(order.go));
}

void place_zygote(int socket) {
        zygote_fd = socket;
}

void place_init(const struct confinement *c, int null) {
        confinement = c;
        null_fd = null;
        reset();
}
