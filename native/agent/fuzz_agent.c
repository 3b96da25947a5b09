/* Nonsense for the agent's decoders: frames through the real link into every handler, tar streams into a real directory,
 * user databases. Built with sanitizers; any finding ends the process.
 *
 *   fuzz_agent SEED SECONDS DIRECTORY
 *
 * It runs as root, so it locks itself into DIRECTORY (which is filled with rubbish) and out of the network first. */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "channel.h"
#include "dispatch.h"
#include "exec.h"
#include "leaf.h"
#include "link.h"
#include "serial.h"
#include "socket.h"
#include "start.h"
#include "tar.h"
#include "user.h"

enum { SCRATCH = 1 << 20 };

static uint64_t state;
static uint8_t scratch[SCRATCH];

/* splitmix64: small, and the same everywhere, so that a seed repeats a finding */
static uint64_t any(void) {
        uint64_t z = (state += UINT64_C(0x9e3779b97f4a7c15));

        z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
        return z ^ (z >> 31);
}

static size_t below(size_t n) {
        return (size_t) (any() % n);
}

static bool one_in(size_t n) {
        return below(n) == 0;
}

static uint64_t interesting(void) {
        static const uint64_t numbers[] = { 0, 1, 2, 3, 4, 9, 16, 511, 512, 513, 4095, 4096, 65536, 262144, 1 << 20, 1u << 31,
                                            UINT32_MAX, UINT64_C(1) << 40, INT64_MAX, UINT64_MAX };

        return one_in(3) ? any() : numbers[below(ELEMENTS(numbers))];
}

static void mutate(uint8_t *data, size_t size) {
        for (size_t n = size ? below(6) : 0; n > 0; n--)
                data[below(size)] = one_in(2) ? (uint8_t) any() : (uint8_t) "\0/.0:9\n\xff="[below(9)];
}

/* --- frames --------------------------------------------------------------------------------------------------------- */

static size_t put_field(uint8_t *to, uint8_t tag, const void *data, size_t size) {
        to[0] = tag;
        for (int i = 0; i < 4; i++)
                to[1 + i] = (uint8_t) (size >> 8 * i);
        memcpy(to + 5, data, size);
        return size + 5;
}

static const char *any_path(void) {
        static char path[5000];
        static const char *const parts[] = { "/", "a", "b", "..", ".", "link", "fifo", "//", "tmp/", "\n", "loop", "dir/" };

        strcpy(path, one_in(20) ? "" : "/");
        for (size_t n = below(one_in(30) ? 600 : 5); n > 0; n--)
                strcat(path, parts[below(ELEMENTS(parts))]);
        return path;
}

static bool tag_is_text(uint8_t tag) {
        static const uint8_t text[] = { SECCOMP, APPARMOR, HOSTNAME, ARG, ENV, CWD, USER, META, CPUS, PATH, PATH2, NAME,
                                        DATA, SEED, NET, 0 };

        return strchr((const char *) text, tag) != NULL;
}

static size_t any_field(uint8_t *to, uint8_t tag) {
        if (tag_is_text(tag)) {
                const char *path = any_path();
                return put_field(to, tag, path, strlen(path));
        }
        uint64_t number = interesting();
        return put_field(to, tag, &number, 8);
}

/* Mostly what the request takes, so that the handlers are reached. */
static size_t any_fields(uint8_t type, uint8_t *to) {
        static const uint8_t tags[T_KNOB_READ + 1][8] = {
                [T_EXEC] = { ARG, ENV, FLAGS, CAP, TIMEOUT_MS, USER },
                [T_FOLLOW] = { STREAM, OFFSET, LIMIT },
                [T_UNFOLLOW] = { STREAM },
                [T_KILL] = { SIGNAL, FLAGS },
                [T_RESIZE] = { ROWS, COLS },
                [T_HOLD] = { FLAGS },
                [T_READ] = { PATH, OFFSET, SIZE, LIMIT },
                [T_WRITE] = { PATH, MODE, FLAGS, UID, GID },
                [T_STATPATH] = { PATH, FLAGS },
                [T_LISTDIR] = { PATH, LIMIT },
                [T_MKDIR] = { PATH, MODE, FLAGS },
                [T_REMOVE] = { PATH, FLAGS },
                [T_RENAME] = { PATH, PATH2 },
                [T_TREE_PUT] = { PATH, FLAGS },
                [T_TREE_GET] = { PATH, LIMIT },
                [T_CONNECT] = { PORT, LIMIT },
                [T_WAKE] = { REALTIME_NS, SEED, HOSTNAME, NET },
                [T_KNOBS] = { PATH, DATA },
                [T_KNOB_READ] = { PATH },
        };
        size_t size = 0;

        if (type == T_CREDIT) {
                size = any_field(to, STREAM);
                return size + any_field(to + size, LIMIT);
        }
        for (const uint8_t *tag = type <= T_KNOB_READ ? tags[type] : tags[0]; *tag; tag++)
                if (!one_in(10))
                        size += any_field(to + size, *tag);
        if (one_in(40))
                size += any_field(to + size, (uint8_t) below(90));
        return size;
}

static uint8_t any_type(void) {
        static const uint8_t types[] = { T_PING, T_EXEC, T_STDIN, T_STDIN_EOF, T_FOLLOW, T_UNFOLLOW, T_KILL, T_RESIZE, T_FETCH,
                                         T_FORGET, T_LIST, T_HOLD, T_READ, T_WRITE, T_STATPATH, T_LISTDIR, T_MKDIR, T_REMOVE,
                                         T_RENAME, T_TREE_PUT, T_TREE_GET, T_CONNECT, T_CLOSE, T_STATS, T_WAKE, T_KNOBS, T_DATA, T_DATA, T_DATA, T_EOF, T_CREDIT };

        return one_in(200) ? (uint8_t) any() : types[below(sizeof(types))];
}

/* --- tar ------------------------------------------------------------------------------------------------------------ */

static size_t any_member(uint8_t *to) {
        static const char types[] = "0123456750000LKxxg\0S";
        struct tar_header h = { .type = types[below(sizeof(types))], .mode = (mode_t) any() & 07777, .size = below(2000),
                                .uid = (uint32_t) interesting(), .mtime = (int64_t) interesting() };
        size_t body;

        snprintf(h.name, sizeof(h.name), "%.99s", any_path());
        snprintf(h.link, sizeof(h.link), "%.99s", any_path());
        if (one_in(50))
                h.size = interesting();
        body = h.size < 5000 ? (size_t) h.size : 0;
        tar_encode(&h, to);
        memset(to + TAR_BLOCK, 'x', body);
        if (h.type == 'x' && body > 100) {
                static const char *const keys[] = { "path", "linkpath", "size", "mtime", "uid", "SCHILY.xattr.user.x", "GNU.sparse.x", "" };
                size_t used = 0;
                while (used + 80 < body)
                        used += (size_t) snprintf((char *) to + TAR_BLOCK + used, 80, "%zu %s=%.20s\n", below(60),
                                                  keys[below(ELEMENTS(keys))], one_in(2) ? any_path() : "12345");
        }
        size_t whole = TAR_BLOCK + (body + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK;
        memset(to + TAR_BLOCK + body, 0, whole - TAR_BLOCK - body);
        /* A wrong checksum ends it all, so that it should be rare; the body may be anything. */
        if (one_in(100))
                mutate(to, TAR_BLOCK);
        mutate(to + TAR_BLOCK, whole - TAR_BLOCK);
        return whole;
}

static size_t any_archive(uint8_t *to, size_t room) {
        size_t used = 0;

        for (size_t n = below(20); n > 0 && used + 16384 < room; n--)
                used += any_member(to + used);
        if (!one_in(4)) {
                memset(to + used, 0, 1024);
                used += 1024;
        }
        return used;
}

/* --- the three targets ---------------------------------------------------------------------------------------------- */

static void fuzz_decoders(void) {
        char key[300], path[TAR_PATH];
        struct tar_header tar;
        struct header header;
        struct span value;
        struct args args;
        uint8_t allowed[8] = { ARG, ENV, PATH, FLAGS, LIMIT, (uint8_t) any(), 0 };
        int64_t number;

        size_t size = any_member(scratch);
        (void) tar_decode(scratch, &tar);
        (void) header_decode(scratch, &header);
        struct span rest = { scratch + TAR_BLOCK, size - TAR_BLOCK };
        while (pax_next(&rest, key, &value) > 0) {
                (void) pax_number(value, &number);
                (void) tar_path(value, path);
        }
        size = any_fields(any_type(), scratch);
        mutate(scratch, size);
        (void) args_decode((struct span) { scratch, size }, allowed, &args);
}

static void fuzz_users(void) {
        static struct user user;
        static const char *const names[] = { "root", "0", "ann", "a:b", "1000:x", ":", "", "4294967295", "x:1" };

        for (int which = 0; which < 2; which++) {
                int fd = open(which ? "/etc/group" : "/etc/passwd", O_WRONLY | O_CREAT | O_TRUNC, 0644);
                char text[] = "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000:ann,root,a:/home/ann:/bin/sh\nx:x:1:a,b,root\n";
                mutate((uint8_t *) text, sizeof(text) - 1);
                (void) !write(fd, text, sizeof(text) - 1 - below(5));
                close(fd);
        }
        /* In a child, as always: it does not free. */
        pid_t pid = fork();
        if (pid == 0) {
                for (size_t i = 0; i < ELEMENTS(names); i++)
                        (void) user_lookup(names[i], &user);
                _exit(0);
        }
        int status;
        if (waitpid(pid, &status, 0) != pid || status != 0)
                abort();
}

static bool room_always(void) {
        return true;
}

static void turns(int n) {
        while (n-- > 0) {
                (void) exec_deadlines();
                (void) loop_once(0);
                sources_run(room_always);
                link_turn();
        }
}

/* Our end of the serial port, which stays; -1: the link is a socket. */
static int port = -1;

static void drain(int fd) {
        static uint8_t sink[65536];

        while (recv(fd, sink, sizeof(sink), 0) > 0)
                ;
}

/* As send(); but a port takes all of it, in its coding, with noise now and then. */
static ssize_t say(int fd, const uint8_t *data, size_t size) {
        static uint8_t coded[2 * SCRATCH + 64];
        size_t used = 0, sent = 0;

        if (fd != port)
                return send(fd, data, size, MSG_NOSIGNAL);
        for (size_t i = 0; i < size; i++) {
                coded[used++] = data[i];
                if (data[i] == 0xfe && !one_in(1000))
                        coded[used++] = 0xff;
        }
        if (one_in(500))
                used += (size_t) snprintf((char *) coded + used, 40, "\xfe%c%016llx", one_in(2) ? 0 : 'x',
                                          (unsigned long long) any());
        while (sent < used) {
                ssize_t n = send(fd, coded + sent, used - sent, MSG_NOSIGNAL);
                if (n > 0) {
                        sent += (size_t) n;
                        continue;
                }
                turns(1);
                drain(fd);
        }
        return (ssize_t) size;
}

static int dial(void) {
        struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = "/s" };
        int fd = port >= 0 ? port : socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        uint8_t hello[64];
        char begin[24] = "\xfe";
        uint64_t number = PROTOCOL_VERSION;

        if (fd == port) {
                snprintf(begin + 2, sizeof(begin) - 2, "%016llx", (unsigned long long) any());
                if (send(fd, begin, 18, MSG_NOSIGNAL) != 18)
                        abort();
                turns(2);
        } else if (connect(fd, (struct sockaddr *) &address, sizeof(address)) < 0)
                abort();
        size_t size = put_field(hello + FRAME_HEADER, VERSION, &number, 8);
        number = 0;
        size += put_field(hello + FRAME_HEADER + size, CAPS, &number, 8);
        header_encode(hello, T_HELLO, 0, (uint32_t) size);
        (void) !say(fd, hello, FRAME_HEADER + size);
        return fd;
}

/* A conversation. The host's end reads most of the time, and hangs up now and then. */
static void fuzz_link(uint32_t *channel) {
        int fd = dial();

        for (size_t n = below(200); n > 0; n--) {
                uint8_t type = any_type();
                uint8_t *payload = scratch + FRAME_HEADER;
                size_t size = type == T_DATA ? any_archive(payload, DATA_MAX) :
                              type == T_STDIN || type == T_PING ? below(80) : any_fields(type, payload);
                bool opens = type == T_EXEC || (type >= T_READ && type < T_CLOSE) || (type >= T_STATS && type <= T_KNOB_READ);
                uint32_t on = type == T_LIST ? 0 : opens ? ++*channel : *channel - (uint32_t) below(4);

                if (one_in(50))
                        mutate(payload, size);
                header_encode(scratch, type, on, (uint32_t) size);
                if (one_in(300))
                        mutate(scratch, FRAME_HEADER);
                size_t whole = FRAME_HEADER + size, sent = 0;
                while (sent < whole) {
                        ssize_t k = say(fd, scratch + sent, min_size(whole - sent, one_in(3) ? below(100) + 1 : whole));
                        sent += k > 0 ? (size_t) k : 0;
                        turns(1);
                        if (k < 0 && errno != EAGAIN)
                                break;
                        if (!one_in(5))
                                drain(fd);
                }
                turns(3);
        }
        if (fd == port)
                drain(fd);
        else
                close(fd);
        turns(5);
}

static void lock_in(const char *directory) {
        /* The leak checker wants a /proc. */
        if (unshare(CLONE_NEWNET | CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
            chdir(directory) < 0 || (mkdir("proc", 0755) < 0 && errno != EEXIST) ||
            mount("proc", "proc", "proc", MS_RDONLY, NULL) < 0 || chroot(".") < 0) {
                perror("fuzz_agent: lock in");
                exit(2);
        }
}

static void fill(void) {
        (void) mkdir("/etc", 0755);
        (void) mkdir("/tmp", 0755);
        (void) mkdir("/dir", 0755);
        (void) mkfifo("/fifo", 0644);
        (void) symlink("/dir", "/link");
        (void) symlink("loop", "/loop");
}

static const struct link_hooks hooks = { .frame = dispatch_frame, .lost = channels_link_lost };

static void plug_in(void) {
        int fds[2];

        link_init(&serial_carrier, &hooks);
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) < 0 || loop_init() < 0 ||
            serial_start(fds[0]) < 0)
                abort();
        port = fds[1];
}

static void listen_on(const char *path) {
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

        strcpy(address.sun_path, path);
        (void) unlink(path);
        link_init(&socket_carrier, &hooks);
        if (bind(fd, (struct sockaddr *) &address, sizeof(address)) < 0 || listen(fd, 8) < 0 || loop_init() < 0 ||
            socket_start(fd) < 0)
                abort();
}

int main(int argc, char **argv) {
        static struct confinement confinement = { .oom_fd = -1 };
        uint64_t end, rounds = 0;
        uint32_t channel = 8;

        if (argc != 4)
                return 2;
        state = strtoull(argv[1], NULL, 0);
        end = now_us() + strtoull(argv[2], NULL, 0) * 1000000u;
        lock_in(argv[3]);
        fill();
        signal(SIGPIPE, SIG_IGN);
        leaf_init(-1); /* nothing is ever cloned */
        start_init(&confinement, open("/etc/passwd", O_RDWR | O_CREAT, 0644), -1);
        dispatch_init(&confinement, false);
        /* Every other seed speaks over a serial port. */
        if (state & 1)
                plug_in();
        else
                listen_on("/s");
        for (; now_us() < end; rounds++) {
                fuzz_decoders();
                if (rounds % 50 == 0)
                        fuzz_users();
                if (rounds % 20 == 0) {
                        fuzz_link(&channel);
                        /* It may have been removed or renamed. */
                        fill();
                        if (port < 0 && access("/s", F_OK) < 0)
                                listen_on("/s");
                }
        }
        printf("%llu rounds\n", (unsigned long long) rounds);
        return 0;
}
