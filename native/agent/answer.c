/* What is told of a call that has ended. */
#include "place.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>

enum { PIECE = 256 << 10 };

/* Where the answer stands: first what was printed, then the files that were wanted, then the end itself. It goes out as the
 * host takes it. */
static struct {
        struct source source;
        unsigned stream;  /* 0, 1; 2: both are sent */
        size_t at;        /* in that stream */
        struct span rest; /* of the CALL's fields */
        struct span name; /* of the file that is being sent; fd is -1 between files */
        int fd;
        uint64_t cpu_us;
} answer = { .fd = -1 };

static void send_output_piece(void) {
        struct output *o = &cell.outputs[answer.stream];
        size_t take = min_size(o->size - answer.at, PIECE);
        uint8_t *to = take > 0 ? frame_raw(9 + take) : NULL;

        if (to) {
                to[0] = (uint8_t) (answer.stream + 1);
                for (int i = 0; i < 8; i++)
                        to[1 + i] = (uint8_t) ((uint64_t) answer.at >> 8 * i);
                memcpy(to + 9, o->data + answer.at, take);
                frame_raw_commit(T_OUTPUT, call_channel, 9 + take);
        }
        answer.at += take;
        if (answer.at == o->size) {
                answer.stream++;
                answer.at = 0;
        }
}

static void refuse(int code) {
        frame_begin(T_PRODUCED, call_channel);
        frame_bytes(NAME, answer.name.data, answer.name.size);
        frame_number(ERRNO, (uint64_t) code);
        frame_end();
}

/* The tenant made these files: only a regular one, of its own file system, is read, and no further than agreed. */
static void open_produced(void) {
        struct open_how how = {
                .flags = O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC,
                .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV,
        };
        cleanup_free char *path = span_dup(answer.name, 255);
        struct stat st;

        cleanup_fd int fd = path ? (int) syscall(SYS_openat2, cell.work, path, &how, sizeof(how)) : -1;
        if (fd < 0 || fstat(fd, &st) < 0)
                refuse(errno);
        else if (!S_ISREG(st.st_mode))
                refuse(EISDIR);
        else if ((uint64_t) st.st_size > cell.produced_left)
                refuse(EFBIG);
        else {
                cell.produced_left -= (uint64_t) st.st_size;
                answer.fd = steal_fd(&fd);
        }
}

static void send_produced_piece(void) {
        static uint8_t piece[PIECE];
        ssize_t n = read(answer.fd, piece, sizeof(piece));

        frame_begin(T_PRODUCED, call_channel);
        frame_bytes(NAME, answer.name.data, answer.name.size);
        frame_bytes(DATA, piece, n > 0 ? (size_t) n : 0);
        frame_end();
        if (n < (ssize_t) sizeof(piece))
                close_fd(steal_fd(&answer.fd));
}

static bool next_wanted(void) {
        uint8_t tag;

        while (field_next(&answer.rest, &tag, &answer.name) > 0)
                if (tag == NAME)
                        return true;
        return false;
}

static bool space_is_full(void) {
        struct statfs fs;

        return cell.work >= 0 && fstatfs(cell.work, &fs) == 0 && (fs.f_bavail == 0 || fs.f_ffree == 0);
}

static void send_ended(uint64_t cpu_us) {
        bool signaled = WIFSIGNALED(cell.status);

        frame_begin(T_ENDED, call_channel);
        frame_number(EXIT, (uint64_t) (signaled ? 128 + WTERMSIG(cell.status) : WEXITSTATUS(cell.status)));
        frame_number(SIGNAL, (uint64_t) (signaled ? WTERMSIG(cell.status) : 0));
        frame_number(WHY, cell.why);
        frame_number(RAN_US, cell.ran_us);
        frame_number(CPU_US, cpu_us);
        frame_number(FLAGS, space_is_full() ? 1 : 0);
        frame_number(ERRNO, (uint64_t) cell.no_exec);
        for (unsigned i = 0; i < 2; i++) {
                frame_number(STREAM, i + 1);
                frame_number(TOTAL, cell.outputs[i].total);
        }
        frame_end();
}

static bool answer_pump(struct source *source) {
        (void) source;
        if (answer.stream < ELEMENTS(cell.outputs))
                send_output_piece();
        else if (answer.fd >= 0)
                send_produced_piece();
        else if (next_wanted())
                open_produced();
        else {
                send_ended(answer.cpu_us);
                call_answered();
                return false;
        }
        return true;
}

void answer_start(uint64_t cpu_us) {
        answer.source.pump = answer_pump;
        answer.stream = 0;
        answer.at = 0;
        answer.rest = (struct span) { cell.wanted, cell.wanted_size };
        answer.cpu_us = cpu_us;
        source_wake(&answer.source);
}
