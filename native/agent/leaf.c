#include "leaf.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>

#include "loop.h"

enum {
        /* Each watched leaf costs a descriptor, and exists only while a background process of an ended command does. Past
         * this many the empty directory stays until the host removes the sandbox's whole cgroup. */
        LINGERING_MAX = 512,
};

/* A leaf whose command has ended but which still holds processes. */
struct lingering {
        struct watch watch; /* on cgroup.events, which wakes its pollers when the last process goes: no timer */
        uint32_t channel;
};

static int base = -1;
static unsigned n_lingering;

void leaf_init(int base_fd) {
        base = base_fd;
}

static void leaf_path(char path[static 48], uint32_t channel, const char *file) {
        snprintf(path, 48, "x%u%s", channel, file);
}

int leaf_create(uint32_t channel) {
        char path[48];

        leaf_path(path, channel, "");
        if (mkdirat(base, path, 0755) < 0)
                return -errno;
        int fd = openat(base, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0) {
                int saved = errno;
                (void) unlinkat(base, path, AT_REMOVEDIR);
                return -saved;
        }
        return fd;
}

static int kill_path(const char *path) {
        return write_at(base, path, "1");
}

int leaf_kill(uint32_t channel) {
        char path[48];

        leaf_path(path, channel, "/cgroup.kill");
        return kill_path(path);
}

uint64_t leaf_cpu_us(uint32_t channel) {
        char path[48], text[512];

        leaf_path(path, channel, "/cpu.stat");
        return read_at(base, path, text, sizeof(text)) < 0 ? 0 : number_after(text, "usage_usec");
}

int leaf_kill_others(uint32_t channel, pid_t spare) {
        char path[48], text[4096];
        size_t used = 0;
        int found = 0;
        ssize_t n;

        leaf_path(path, channel, "/cgroup.procs");
        cleanup_fd int fd = openat(base, path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return -errno;
        while (used < sizeof(text) - 1 && (n = read(fd, text + used, sizeof(text) - 1 - used)) > 0)
                used += (size_t) n;
        text[used] = 0;
        for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
                pid_t pid = atoi(line);
                /* These are numbers of our own namespace, where 1 is us; init is in no leaf. */
                if (pid <= 1 || pid == spare)
                        continue;
                (void) kill(pid, SIGKILL);
                found++;
        }
        return found;
}

static int leaf_remove(uint32_t channel) {
        char path[48];

        leaf_path(path, channel, "");
        return unlinkat(base, path, AT_REMOVEDIR) < 0 && errno != ENOENT ? -errno : 0;
}

static void lingering_ready(struct watch *watch, uint32_t events) {
        struct lingering *l = CONTAINER_OF(watch, struct lingering, watch);
        char text[64];

        (void) events;
        /* Reading is what re-arms the notification. */
        (void) !pread(watch->fd, text, sizeof(text), 0);
        if (leaf_remove(l->channel) == -EBUSY)
                return;
        int fd = watch->fd;
        watch_stop(watch);
        close_fd(fd);
        free(l);
        n_lingering--;
}

void leaf_release(uint32_t channel) {
        char path[48];

        if (leaf_remove(channel) == 0 || n_lingering >= LINGERING_MAX)
                return;
        leaf_path(path, channel, "/cgroup.events");
        cleanup_fd int fd = openat(base, path, O_RDONLY | O_CLOEXEC);
        struct lingering *l = calloc(1, sizeof(*l));
        if (fd < 0 || !l) {
                free(l);
                return;
        }
        l->channel = channel;
        l->watch.ready = lingering_ready;
        if (watch_start(&l->watch, fd, EPOLLPRI) < 0) {
                free(l);
                return;
        }
        n_lingering++;
        (void) steal_fd(&fd);
        /* It may have become empty before we looked: an event that is missed here never comes again. */
        lingering_ready(&l->watch, 0);
}

uint32_t leaf_kill_all(void) {
        char path[300];
        uint32_t highest = 0;
        int fd = openat(base, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        DIR *dir = fd < 0 ? NULL : fdopendir(fd);

        if (!dir)
                return 0;
        for (struct dirent *entry; (entry = readdir(dir));)
                if (entry->d_name[0] == 'x') {
                        snprintf(path, sizeof(path), "%s/cgroup.kill", entry->d_name);
                        (void) kill_path(path);
                        highest = (uint32_t) max_u64(highest, min_u64(strtoull(entry->d_name + 1, NULL, 10), UINT32_MAX));
                }
        closedir(dir);
        return highest;
}
