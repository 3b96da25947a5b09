/* Which frame goes where, and HELLO, which belongs to nobody else. */
#include "dispatch.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/syscall.h>

#include "call.h"
#include "channel.h"
#include "exec.h"
#include "file.h"
#include "guest.h"
#include "tree.h"
#include "tunnel.h"

static struct confinement *confinement;
static bool configured, finished, calls;

void dispatch_init(struct confinement *of_commands, bool only_calls) {
        confinement = of_commands;
        calls = only_calls;
}

bool dispatch_finished(void) {
        return finished || call_over();
}

/* The filter is for commands, which inherit it. It can only be installed here: in a child it would cost each start the
 * checking and compiling of several hundred instructions. The agent lives within it, too; it allows clone3. */
static int install_filter(struct span code) {
        struct sock_fprog program;
        size_t count = code.size / sizeof(struct sock_filter);

        if (code.size % sizeof(struct sock_filter) != 0 || count == 0 || code.size > KIB(64) || count > BPF_MAXINSNS)
                return -EINVAL;
        cleanup_free struct sock_filter *copy = malloc(code.size); /* the payload is not aligned */
        if (!copy)
                return -ENOMEM;
        memcpy(copy, code.data, code.size);
        /* Cells need what it forbids, and each call gets it by itself. */
        if (calls) {
                confinement->filter = copy;
                confinement->filter_count = (uint16_t) count;
                copy = NULL;
                return 0;
        }
        program = (struct sock_fprog) { .len = (unsigned short) count, .filter = copy };
        /* With CAP_SYS_ADMIN, so that no_new_privs stays off: sudo and friends work inside. */
        return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) < 0 ? -errno : 0;
}

static int configure(const struct args *args) {
        struct confinement *c = confinement;
        struct span host = args->bytes[HOSTNAME];
        int r;

        c->caps = number_or(args, CAPS, 0);
        /* Before the filter, which knows that commands may not do this. */
        if (has(args, HOSTNAME) && sethostname((const char *) host.data, host.size) < 0)
                return -errno;
        if (has(args, APPARMOR) && !(c->apparmor = span_dup(args->bytes[APPARMOR], 255)))
                return -errno;
        if (has(args, SECCOMP)) {
                if ((r = install_filter(args->bytes[SECCOMP])) < 0)
                        return r;
                c->has_filter = true;
        }
        configured = true;
        return 0;
}

static int on_hello(struct span payload) {
        static const uint8_t allowed[] = { VERSION, SECCOMP, CAPS, APPARMOR, HOSTNAME, 0 };
        struct args args;
        int r = args_decode(payload, allowed, &args);

        if (r < 0)
                return r;
        if (args.number[VERSION] != PROTOCOL_VERSION) {
                frame_error(0, EPROTONOSUPPORT, STEP_OTHER, "another version");
                return 0;
        }
        exec_go_on(); /* a daemon that comes back finds a sandbox that runs */
        if (!configured && (r = configure(&args)) < 0) {
                frame_error(0, r, STEP_OTHER, "this configuration cannot be applied");
                return 0;
        }
        frame_begin(T_READY, 0);
        frame_number(VERSION, PROTOCOL_VERSION);
        frame_number(NEXT, exec_next_channel());
        frame_number(PID, (uint64_t) getpid());
        frame_end();
        return 0;
}

static int on_ping(struct span payload) {
        uint8_t *to = payload.size <= 64 ? frame_raw(64) : NULL;

        if (payload.size > 64)
                return -EPROTO;
        if (payload.size == 0)
                frame_empty(T_PONG, 0);
        else if (to) {
                memcpy(to, payload.data, payload.size);
                frame_raw_commit(T_PONG, 0, payload.size);
        }
        return 0;
}

static int on_hold(struct span payload) {
        static const uint8_t allowed[] = { FLAGS, 0 };
        struct args args;
        int r = args_decode(payload, allowed, &args);

        if (r < 0)
                return r;
        if (number_or(&args, FLAGS, 0) != 0)
                exec_hold();
        else
                exec_go_on();
        frame_empty(T_PONG, 0);
        return 0;
}

/* Requests that open a channel of files, trees or tunnels. */
static const struct {
        uint8_t type;
        uint8_t allowed[8];
        void (*start)(uint32_t channel, const struct args *args);
} transfers[] = {
        { T_READ, { PATH, OFFSET, SIZE, LIMIT }, file_read },
        { T_WRITE, { PATH, MODE, FLAGS, UID, GID }, file_write },
        { T_STATPATH, { PATH, FLAGS }, names_stat },
        { T_LISTDIR, { PATH, LIMIT }, names_list },
        { T_MKDIR, { PATH, MODE, FLAGS }, names_mkdir },
        { T_REMOVE, { PATH, FLAGS }, names_remove },
        { T_RENAME, { PATH, PATH2 }, names_rename },
        { T_TREE_PUT, { PATH, FLAGS, UID, GID }, tree_put },
        { T_TREE_GET, { PATH, LIMIT }, tree_get },
        { T_UPPER, { LIMIT }, tree_upper },
        { T_CONNECT, { PORT, LIMIT }, tunnel_connect },
};

static bool channel_is_new(uint32_t channel) {
        if (channel == 0 || exec_has_channel(channel) || channel_exists(channel))
                return false;
        exec_note_channel(channel);
        return true;
}

static int on_transfer(const struct header *header, struct span payload) {
        static struct args args;

        for (size_t i = 0; i < ELEMENTS(transfers); i++) {
                if (transfers[i].type != header->type)
                        continue;
                int r = args_decode(payload, transfers[i].allowed, &args);
                if (r < 0 || !channel_is_new(header->channel))
                        return -EPROTO;
                transfers[i].start(header->channel, &args);
                return 0;
        }
        return -EPROTO;
}

/* There is nothing else in such a sandbox, and commands would be without a filter. */
static int on_calls(const struct header *header, struct span payload) {
        if (!configured || header->channel == 0)
                return -EPROTO;
        return call_request(header, payload);
}

int dispatch_frame(const struct header *header, struct span payload) {
        if (calls && header->type > T_PING && header->type != T_SHUTDOWN)
                return on_calls(header, payload);
        switch (header->type) {
        case T_HELLO:
                return on_hello(payload);
        case T_PING:
                return on_ping(payload);
        case T_SHUTDOWN:
                finished = true;
                return 0;
        case T_HOLD:
                return on_hold(payload);
        case T_STATS ... T_KNOB_READ:
                if (!channel_is_new(header->channel))
                        return -EPROTO;
                guest_request(header, payload);
                return 0;
        case T_EXEC:
                if (!configured || !channel_is_new(header->channel))
                        return -EPROTO;
                return exec_request(header, payload);
        case T_STDIN ... T_RESIZE:
        case T_FETCH ... T_LIST:
                return exec_request(header, payload);
        case T_CLOSE:
        case T_DATA ... T_CREDIT:
                return channel_request(header, payload);
        default:
                return on_transfer(header, payload);
        }
}
