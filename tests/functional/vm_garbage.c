/* init of a guest that is nobody's agent: it floods its console and the agent's port with what no agent says. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

int main(void)
{
    char noise[4096], path[32];
    int ports[8], count = 0;

    for (size_t at = 0; at < sizeof noise; at++)
        noise[at] = (char) (at % 251 == 0 ? '\n' : at * 7);
    mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
    for (int number = 0; number < 8; number++) {
        snprintf(path, sizeof path, "/dev/vport%dp%d", number / 4, 1 + number % 4);
        int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
        if (fd >= 0)
            ports[count++] = fd;
    }
    printf("vm_garbage: %d ports\n", count);
    fflush(stdout);
    for (;;) {
        for (int number = 0; number < count; number++)
            if (write(ports[number], noise, sizeof noise) < 0)
                continue;
        if (write(STDOUT_FILENO, noise, 256) < 0)
            usleep(1000);
    }
}
