/* What agents in training have been seen to try, as root inside a sandbox. Each line of output is a finding; `LEAK ...` must
 * never appear. Run by test_integrity.py. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <ifaddrs.h>
#include <linux/btrfs.h>
#include <linux/btrfs_tree.h>
#include <linux/fs.h>
#include <linux/netlink.h>
#include <linux/quota.h>
#include <linux/vm_sockets.h>
#include <netinet/in.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/quota.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

/* Not in any header of user space: fs/xfs/libxfs/xfs_fs.h, fs/ext4/ext4.h. */
struct xfs_swapext {
        int64_t version, target, other, offset, length;
        char pad[16];
        char bstat[192];
};
#define XFS_IOC_SWAPEXT _IOWR('X', 109, struct xfs_swapext)
#define XFS_IOC_EXCHANGE_RANGE _IOW('X', 129, char[64])
#define XFS_IOC_FSBULKSTAT _IOWR('X', 101, char[32])
#define XFS_IOC_OPEN_BY_HANDLE _IOWR('X', 107, char[56])
#define EXT4_IOC_MOVE_EXT _IOWR('f', 15, char[40])
#define EXT4_IOC_SWAP_BOOT _IO('f', 17)
#define EXT4_IOC_RESIZE_FS _IOW('f', 16, uint64_t)
#define EXT4_IOC_SHUTDOWN _IOR('X', 125, uint32_t)

static union {
        char bytes[8192];
        struct btrfs_ioctl_vol_args volume;
        struct btrfs_ioctl_vol_args_v2 volume2;
        struct btrfs_ioctl_search_args search;
        struct btrfs_ioctl_clone_range_args range;
        struct btrfs_ioctl_quota_ctl_args quota;
        struct btrfs_ioctl_qgroup_limit_args limit;
        struct btrfs_ioctl_ino_lookup_args lookup;
        struct btrfs_ioctl_space_args space;
        struct fstrim_range trim;
        struct xfs_swapext swapext;
        uint64_t number;
} arg;

static const struct request {
        const char *name;
        unsigned long number;
} requests[] = {
        { "XFS_IOC_SWAPEXT", XFS_IOC_SWAPEXT },
        { "XFS_IOC_EXCHANGE_RANGE", XFS_IOC_EXCHANGE_RANGE },
        { "XFS_IOC_FSBULKSTAT", XFS_IOC_FSBULKSTAT },
        { "XFS_IOC_OPEN_BY_HANDLE", XFS_IOC_OPEN_BY_HANDLE },
        { "EXT4_IOC_MOVE_EXT", EXT4_IOC_MOVE_EXT },
        { "EXT4_IOC_SWAP_BOOT", EXT4_IOC_SWAP_BOOT },
        { "EXT4_IOC_RESIZE_FS", EXT4_IOC_RESIZE_FS },
        { "EXT4_IOC_SHUTDOWN", EXT4_IOC_SHUTDOWN },
        { "FITRIM", FITRIM },
        { "FIFREEZE", FIFREEZE },
        { "FIBMAP", FIBMAP },
        { "BTRFS_IOC_SNAP_CREATE", BTRFS_IOC_SNAP_CREATE },
        { "BTRFS_IOC_SNAP_CREATE_V2", BTRFS_IOC_SNAP_CREATE_V2 },
        { "BTRFS_IOC_SUBVOL_CREATE", BTRFS_IOC_SUBVOL_CREATE },
        { "BTRFS_IOC_SUBVOL_CREATE_V2", BTRFS_IOC_SUBVOL_CREATE_V2 },
        { "BTRFS_IOC_SNAP_DESTROY", BTRFS_IOC_SNAP_DESTROY },
        { "BTRFS_IOC_TREE_SEARCH", BTRFS_IOC_TREE_SEARCH },
        { "BTRFS_IOC_INO_LOOKUP", BTRFS_IOC_INO_LOOKUP },
        { "BTRFS_IOC_INO_LOOKUP_USER", BTRFS_IOC_INO_LOOKUP_USER },
        { "BTRFS_IOC_GET_SUBVOL_INFO", BTRFS_IOC_GET_SUBVOL_INFO },
        { "BTRFS_IOC_GET_SUBVOL_ROOTREF", BTRFS_IOC_GET_SUBVOL_ROOTREF },
        { "BTRFS_IOC_SUBVOL_SETFLAGS", BTRFS_IOC_SUBVOL_SETFLAGS },
        { "BTRFS_IOC_DEFAULT_SUBVOL", BTRFS_IOC_DEFAULT_SUBVOL },
        { "BTRFS_IOC_QUOTA_CTL", BTRFS_IOC_QUOTA_CTL },
        { "BTRFS_IOC_QGROUP_CREATE", BTRFS_IOC_QGROUP_CREATE },
        { "BTRFS_IOC_QGROUP_LIMIT", BTRFS_IOC_QGROUP_LIMIT },
        { "BTRFS_IOC_SEND", BTRFS_IOC_SEND },
        { "BTRFS_IOC_SET_RECEIVED_SUBVOL", BTRFS_IOC_SET_RECEIVED_SUBVOL },
        { "BTRFS_IOC_DEFRAG", BTRFS_IOC_DEFRAG },
        { "BTRFS_IOC_SPACE_INFO", BTRFS_IOC_SPACE_INFO },
        { "BTRFS_IOC_DEV_INFO", BTRFS_IOC_DEV_INFO },
        { "BTRFS_IOC_RM_DEV", BTRFS_IOC_RM_DEV },
        { "BTRFS_IOC_RESIZE", BTRFS_IOC_RESIZE },
        { "BTRFS_IOC_BALANCE", BTRFS_IOC_BALANCE },
        { "BTRFS_IOC_LOGICAL_INO", BTRFS_IOC_LOGICAL_INO },
        { "BTRFS_IOC_SYNC", BTRFS_IOC_SYNC },
};

/* A plausible argument, so that what refuses is the right to it and not its form. */
static void prepare(unsigned long number, int fd, int other) {
        memset(&arg, 0, sizeof(arg));
        switch (number) {
        case BTRFS_IOC_SNAP_CREATE:
        case BTRFS_IOC_SUBVOL_CREATE:
        case BTRFS_IOC_SNAP_DESTROY:
        case BTRFS_IOC_RM_DEV:
                arg.volume.fd = fd;
                strcpy(arg.volume.name, "planted");
                break;
        case BTRFS_IOC_RESIZE:
                strcpy(arg.volume.name, "-1G");
                break;
        case BTRFS_IOC_SNAP_CREATE_V2:
        case BTRFS_IOC_SUBVOL_CREATE_V2:
                arg.volume2.fd = fd;
                strcpy(arg.volume2.name, "planted");
                break;
        case BTRFS_IOC_TREE_SEARCH:
                arg.search.key.tree_id = BTRFS_ROOT_TREE_OBJECTID;
                arg.search.key.max_objectid = arg.search.key.max_offset = arg.search.key.max_transid = UINT64_MAX;
                arg.search.key.max_type = UINT32_MAX;
                arg.search.key.nr_items = 4096;
                break;
        case BTRFS_IOC_INO_LOOKUP:
                arg.lookup.treeid = BTRFS_FS_TREE_OBJECTID;
                arg.lookup.objectid = BTRFS_FIRST_FREE_OBJECTID;
                break;
        case BTRFS_IOC_QUOTA_CTL:
                arg.quota.cmd = BTRFS_QUOTA_CTL_DISABLE;
                break;
        case BTRFS_IOC_QGROUP_LIMIT:
                arg.limit.lim.flags = BTRFS_QGROUP_LIMIT_MAX_RFER;
                arg.limit.lim.max_rfer = UINT64_MAX;
                break;
        case FITRIM:
                arg.trim.len = UINT64_MAX;
                break;
        case XFS_IOC_SWAPEXT:
                arg.swapext.target = fd;
                arg.swapext.other = other;
                arg.swapext.length = 4096;
                break;
        case EXT4_IOC_RESIZE_FS:
                arg.number = UINT64_MAX;
                break;
        }
}

static int ioctls(int count, char **paths) {
        for (int i = 0; i < count; i++) {
                int fd = open(paths[i], O_RDWR);
                if (fd < 0)
                        fd = open(paths[i], O_RDONLY);
                int other = open("/etc/passwd", O_RDONLY);
                for (size_t n = 0; n < sizeof(requests) / sizeof(*requests); n++) {
                        prepare(requests[n].number, fd, other);
                        int r = fd < 0 ? -1 : ioctl(fd, requests[n].number, &arg);
                        printf("%s%s %s %d\n", r >= 0 ? "LEAK " : "", requests[n].name, paths[i], r >= 0 ? 0 : errno);
                }
                close(fd);
                close(other);
        }
        /* A file of ours over one that only can be read, by every way of exchanging or sharing extents. */
        int theirs = open("/usr/bin/grep", O_RDONLY), ours = open("/tmp/ours", O_RDWR | O_CREAT, 0600);
        struct file_clone_range range = { .src_fd = ours };
        if (ioctl(theirs, FICLONE, ours) >= 0 || ioctl(theirs, FICLONERANGE, &range) >= 0)
                printf("LEAK clone over a file that is open for reading\n");
        struct dqblk limits = { 0 };
        if (quotactl(QCMD(Q_SETQUOTA, USRQUOTA), "/dev/sda", 0, (void *) &limits) >= 0 ||
            syscall(SYS_quotactl_fd, ours, QCMD(Q_QUOTAOFF, USRQUOTA), 0, &limits) >= 0)
                printf("LEAK quotactl\n");
        for (int flag = 0; flag < 32; flag++) {
                unsigned flags = 1u << flag;
                if ((flags & (FS_IMMUTABLE_FL | FS_APPEND_FL)) && ioctl(ours, FS_IOC_SETFLAGS, &flags) >= 0)
                        printf("LEAK flag %x\n", flags);
        }
        struct fsxattr project = { .fsx_projid = 4711 };
        if (ioctl(ours, FS_IOC_FSSETXATTR, &project) >= 0 && ioctl(ours, FS_IOC_FSGETXATTR, &project) >= 0 &&
            project.fsx_projid == 4711)
                printf("projid %d\n", 4711); /* of its own disk in a microVM; the test knows */
        printf("done\n");
        return 0;
}

/* The beginnings of every conversation that the platform has: the agent's frames, a request to the daemon. */
static const char hello[] = "\x0d\0\0\0\x01\0\0\0\0\0\0\0\x01\x08\0\0\0\x01\0\0\0\0\0\0\0";
static const char rpc[] = "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"sandbox.list\"}\n";

/* Says them to a socket. Whoever answers is not of this sandbox. */
static void talk(int fd, const char *what) {
        struct pollfd wait = { .fd = fd, .events = POLLIN };
        char got[64];

        (void) send(fd, rpc, sizeof(rpc) - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        (void) send(fd, hello, sizeof(hello) - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (poll(&wait, 1, 300) > 0) {
                ssize_t n = recv(fd, got, sizeof(got), MSG_DONTWAIT);
                if (n > 0)
                        printf("LEAK answer of %zd bytes from %s\n", n, what);
        }
}

static void dial(const char *name, size_t size) {
        struct sockaddr_un to = { .sun_family = AF_UNIX };
        char what[160];

        for (int type = SOCK_STREAM; type <= SOCK_SEQPACKET; type++) {
                if (type > SOCK_DGRAM && type < SOCK_SEQPACKET)
                        continue;
                int fd = socket(AF_UNIX, type, 0);
                memcpy(to.sun_path, name, size);
                if (connect(fd, (struct sockaddr *) &to, (socklen_t) (offsetof(struct sockaddr_un, sun_path) + size)) == 0) {
                        snprintf(what, sizeof(what), "unix socket %.*s", (int) size, name[0] ? name : name + 1);
                        printf("LEAK connected to %s\n", what);
                        talk(fd, what);
                }
                close(fd);
        }
}

static int visit(const char *path, const struct stat *st, int kind, struct FTW *at) {
        (void) kind;
        (void) at;
        if (S_ISSOCK(st->st_mode) && strlen(path) < 108) {
                printf("socket file %s\n", path);
                dial(path, strlen(path) + 1);
        }
        return 0;
}

/* Every socket that a path, a name, a family or a number leads to. The rest of the arguments are paths that the host has. */
static int sockets(int count, char **paths) {
        char line[512], *at;
        FILE *names = fopen("/proc/net/unix", "r");

        while (names && fgets(line, sizeof(line), names))
                if ((at = strchr(line, '@'))) {
                        at[strcspn(at, "\n")] = 0;
                        *at = 0;
                        dial(at, 1 + strlen(at + 1));
                }
        for (int i = 0; i < count; i++) {
                char abstract[120] = "";
                dial(paths[i], strlen(paths[i]) + 1);
                snprintf(abstract + 1, sizeof(abstract) - 1, "%s", paths[i]);
                dial(abstract, 1 + strlen(paths[i]));
        }
        nftw("/", visit, 32, FTW_PHYS);

        for (int family = 0; family < 64; family++)
                for (int type = SOCK_STREAM; type <= SOCK_PACKET; type++) {
                        int fd = socket(family, type, 0);
                        if (fd >= 0)
                                printf("family %d type %d\n", family, type);
                        close(fd);
                }
        for (unsigned cid = 0; cid < 8; cid++)
                for (unsigned port = 1; port < 1100; port++) {
                        struct sockaddr_vm to = { .svm_family = AF_VSOCK, .svm_cid = cid, .svm_port = port };
                        int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_NONBLOCK, 0);
                        if (fd < 0)
                                break;
                        if (connect(fd, (struct sockaddr *) &to, sizeof(to)) == 0)
                                printf("LEAK connected to vsock %u:%u\n", cid, port);
                        close(fd);
                }
        /* Whoever listens to netlink's groups hears nobody; and no port of it is anybody but the kernel. */
        for (int protocol = 0; protocol < 32; protocol++) {
                int fd = socket(AF_NETLINK, SOCK_RAW, protocol);
                struct sockaddr_nl self = { .nl_family = AF_NETLINK, .nl_groups = UINT32_MAX };
                if (fd < 0)
                        continue;
                (void) bind(fd, (struct sockaddr *) &self, sizeof(self));
                for (unsigned port = 1; port < 400; port++) {
                        struct sockaddr_nl to = { .nl_family = AF_NETLINK, .nl_pid = port };
                        if (port != (unsigned) getpid() &&
                            sendto(fd, rpc, sizeof(rpc), MSG_DONTWAIT, (struct sockaddr *) &to, sizeof(to)) > 0)
                                printf("LEAK netlink %d reaches process %u\n", protocol, port);
                }
                close(fd);
        }
        printf("done\n");
        return 0;
}

/* Every descriptor that was inherited: forged frames into all that takes bytes. */
static int descriptors(void) {
        struct stat st;

        for (int fd = 0; fd < 4096; fd++) {
                if (fstat(fd, &st) < 0)
                        continue;
                if (S_ISSOCK(st.st_mode) || fd > 2) {
                        printf("LEAK descriptor %d of type %o\n", fd, st.st_mode & S_IFMT);
                        talk(fd, "an inherited descriptor");
                }
        }
        fflush(stdout);
        for (int fd = 0; fd <= 2; fd++) {
                (void) !write(fd, hello, sizeof(hello) - 1);
                (void) !write(fd, rpc, sizeof(rpc) - 1);
        }
        return 7;
}

static int reached(const struct sockaddr *to, socklen_t size, int patience_ms) {
        int fd = socket(to->sa_family, SOCK_STREAM | SOCK_NONBLOCK, 0), error = 0;
        struct sockaddr_storage from = { 0 };
        socklen_t length = sizeof(error), from_size = sizeof(from);
        struct pollfd wait = { .fd = fd, .events = POLLOUT };

        int r = connect(fd, to, size);
        if (r < 0 && errno == EINPROGRESS && poll(&wait, 1, patience_ms) > 0 &&
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0)
                r = 0;
        /* By chance its own port was the one that it asked for: then it has reached itself. */
        (void) getsockname(fd, (struct sockaddr *) &from, &from_size);
        close(fd);
        return r == 0 && ((struct sockaddr_in *) &from)->sin_port != ((const struct sockaddr_in *) to)->sin_port;
}

/* Every port up to the first argument of every address that is ours, then a few of addresses that are not. */
static int ports(int count, char **addresses) {
        struct ifaddrs *all;
        int last = count > 0 ? atoi(addresses[0]) : 0;

        if (getifaddrs(&all) < 0)
                return 1;
        for (struct ifaddrs *one = all; one; one = one->ifa_next) {
                struct sockaddr_storage to = { 0 };
                if (!one->ifa_addr || (one->ifa_addr->sa_family != AF_INET && one->ifa_addr->sa_family != AF_INET6))
                        continue;
                socklen_t size = one->ifa_addr->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
                memcpy(&to, one->ifa_addr, size);
                printf("scanned %s\n", one->ifa_name);
                for (int port = 1; port <= last; port++) {
                        ((struct sockaddr_in *) &to)->sin_port = htons((uint16_t) port); /* at the same place in both */
                        if (reached((struct sockaddr *) &to, size, 0))
                                printf("open %d\n", port);
                }
        }
        static const uint16_t wanted[] = { 22, 53, 80, 443, 2375, 3128, 5000, 6443, 8080, 8443 };
        for (int i = 1; i < count; i++)
                for (size_t n = 0; n < sizeof(wanted) / sizeof(*wanted); n++) {
                        struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_port = htons(wanted[n]) };
                        struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_port = htons(wanted[n]) };
                        int is4 = inet_pton(AF_INET, addresses[i], &v4.sin_addr) == 1;
                        if (!is4 && inet_pton(AF_INET6, addresses[i], &v6.sin6_addr) != 1)
                                return 2;
                        const struct sockaddr *to = is4 ? (struct sockaddr *) &v4 : (struct sockaddr *) &v6;
                        socklen_t size = is4 ? sizeof(v4) : sizeof(v6);
                        if (reached(to, size, 200))
                                printf("LEAK %s port %d\n", addresses[i], wanted[n]);
                        int fd = socket(to->sa_family, SOCK_DGRAM, 0);
                        if (sendto(fd, rpc, sizeof(rpc), 0, to, size) > 0)
                                printf("LEAK datagram to %s port %d\n", addresses[i], wanted[n]);
                        close(fd);
                }
        printf("done\n");
        return 0;
}

/* A neighbour to be found, or not. */
static int hold(const char *port) {
        struct sockaddr_in tcp = { .sin_family = AF_INET, .sin_port = htons((uint16_t) atoi(port)) };
        struct sockaddr_un abstract = { .sun_family = AF_UNIX, .sun_path = "\0neighbour" };
        int one = socket(AF_INET, SOCK_STREAM, 0), two = socket(AF_UNIX, SOCK_STREAM, 0);

        if (bind(one, (struct sockaddr *) &tcp, sizeof(tcp)) < 0 || listen(one, 8) < 0 ||
            bind(two, (struct sockaddr *) &abstract, offsetof(struct sockaddr_un, sun_path) + 10) < 0 || listen(two, 8) < 0)
                return 1;
        printf("held\n");
        pause();
        return 0;
}

int main(int argc, char **argv) {
        setvbuf(stdout, NULL, _IOLBF, 0);
        if (argc > 1 && strcmp(argv[1], "ioctls") == 0)
                return ioctls(argc - 2, argv + 2);
        if (argc > 1 && strcmp(argv[1], "sockets") == 0)
                return sockets(argc - 2, argv + 2);
        if (argc > 1 && strcmp(argv[1], "ports") == 0)
                return ports(argc - 2, argv + 2);
        if (argc == 3 && strcmp(argv[1], "hold") == 0)
                return hold(argv[2]);
        return descriptors();
}
