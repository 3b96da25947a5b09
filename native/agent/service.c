/* Here the machine is the sandbox, and all of it is the tenant's: commands run in its own namespaces, as its root or as any
 * of its users, without a filter. Root may kill the agent; whoever restarts it gets a new one, which knows nothing of the old
 * one's commands, and tells the host so by ending the connection that it never had. */
#include "service.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mount.h>

#include "keeper.h"
#include "setup.h"

static const char port_name[] = "dsec.agent";

bool is_service(int argc, char **argv) {
        return argc == 2 && strcmp(argv[1], "--service") == 0;
}

static int complain(int r, const char *what) {
        fprintf(stderr, "dsec-agent: %s: %s\n", what, strerror(-r));
        return r;
}

/* Of the unified hierarchy, wherever it is mounted, or nowhere: a mount of it that has no path. */
static int open_hierarchy(void) {
        cleanup_fd int fs = fsopen("cgroup2", FSOPEN_CLOEXEC);

        if (fs < 0 || fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
                return -errno;
        int fd = fsmount(fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
        return fd < 0 ? -errno : fd;
}

/* The cgroup that init put us into (systemd: Delegate=yes), or one of our own where that is everybody's. */
static int open_own_group(void) {
        char text[4096];
        ssize_t n = read_at(AT_FDCWD, "/proc/self/cgroup", text, sizeof(text));
        cleanup_fd int top = open_hierarchy();

        if (n < 0 || top < 0)
                return n < 0 ? (int) n : top;
        char *own = strncmp(text, "0::/", 4) == 0 ? text : strstr(text, "\n0::/");
        if (!own)
                return -ENOTDIR;
        own = strchr(own, '/') + 1;
        own[strcspn(own, "\n")] = 0;
        if (!*own) {
                own = strcpy(text, "dsec-agent");
                if (mkdirat(top, own, 0755) < 0 && errno != EEXIST)
                        return -errno;
        }
        int fd = openat(top, own, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        return fd < 0 ? -errno : fd;
}

int service_start(struct vm *ret) {
        int r, link, group;

        ret->serial = true;
        ret->upper_fd = -1;
        /* First, so that it does not hold the port open when we are gone. */
        if ((ret->keeper_fd = keeper_start()) < 0)
                return complain(ret->keeper_fd, "keeper");
        if ((link = port_open(port_name)) < 0)
                return complain(link, port_name);
        if ((group = open_own_group()) < 0)
                return complain(group, "cgroup2");
        if ((r = setup_descriptors(link, group, &ret->keeper_fd)) < 0)
                return complain(r, "descriptors");
        return 0;
}
