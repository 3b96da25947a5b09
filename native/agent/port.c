#include "port.h"

#include <dirent.h>
#include <stdio.h>

enum { DEVICE_WAIT_MS = 20000, LOOK_AGAIN_NS = 2000000 };

bool device_wait(bool (*find)(const char *name, char path[static DEVICE_PATH]), const char *name,
                 char path[static DEVICE_PATH]) {
        uint64_t end = now_us() + DEVICE_WAIT_MS * UINT64_C(1000);

        while (!find(name, path)) {
                if (now_us() > end)
                        return false;
                (void) nanosleep(&(struct timespec) { .tv_nsec = LOOK_AGAIN_NS }, NULL);
        }
        return true;
}

/* /dev/vport<N>p<M> of the port with this name. */
static bool find_port(const char *name, char path[static DEVICE_PATH]) {
        DIR *dir = opendir("/sys/class/virtio-ports");
        bool found = false;

        for (struct dirent *entry; dir && !found && (entry = readdir(dir));) {
                char file[320], text[PORT_NAME + 2];
                snprintf(file, sizeof(file), "/sys/class/virtio-ports/%s/name", entry->d_name);
                ssize_t n = read_at(AT_FDCWD, file, text, sizeof(text));
                if (n <= 0)
                        continue;
                text[strcspn(text, "\n")] = 0;
                found = strcmp(text, name) == 0;
                if (found)
                        snprintf(path, DEVICE_PATH, "/dev/%.50s", entry->d_name);
        }
        if (dir)
                closedir(dir);
        return found;
}

int port_open(const char *name) {
        char path[DEVICE_PATH];

        if (!device_wait(find_port, name, path))
                return -ENODEV;
        int fd = open(path, O_RDWR | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        return fd < 0 ? -errno : fd;
}
