/* The agent as init of a virtual machine: from the kernel's first user process to where a container's agent starts. */
#pragma once

#include "port.h"

enum { LOWERS_MAX = 64, DEVICE_NAME = 32, NET_WORDS = 128 };

/* What the kernel's command line says. Devices are names below /dev. */
struct boot_plan {
        struct {
                char meta[DEVICE_NAME];
                char data[DEVICE_NAME]; /* empty: none */
        } lowers[LOWERS_MAX];           /* topmost first */
        int n_lowers;
        char upper[DEVICE_NAME];
        char port[PORT_NAME]; /* of virtio-serial; empty: vsock */
        unsigned vsock_port;
        unsigned pids;
        char net[NET_WORDS]; /* own/gateway of IPv4, and of IPv6 if it has that; empty: no network */
};

struct vm {
        bool serial; /* descriptor 3 is a serial port, and no listening socket */
        int keeper_fd;
        int upper_fd; /* the writable disk, below which `upper` is what commands wrote */
};

bool vm_is_init(const char *program);
/* Afterwards descriptor 3 is the link and 4 the sandbox's cgroup, as a container's agent finds them, / is the sandbox's root,
 * and ret's descriptors are above 9. If something is missing the machine says what it is on its console, and ends. */
void vm_boot(struct vm *ret);

__attribute__((noreturn, format(printf, 2, 3))) void boot_fail(int code, const char *format, ...);
/* Power off, or reset where the machine cannot (dsec.off=reboot). */
__attribute__((noreturn)) void boot_off(void);

/* vmroot.c: the layers and the writable disk, stacked; then as root, with all that belongs there. */
/* A descriptor of the writable disk, above 9. */
int root_mount(const struct boot_plan *plan);
void root_enter(void);

/* vmnet.c: its network card, if the plan has one. */
void net_up(const struct boot_plan *plan);
/* Other addresses, in the words of the plan, for a clone's card. */
int net_change(const char *words);

/* vmgroup.c: the sandbox's cgroup with its limits; commands may open only the devices that every sandbox has. */
int group_make(const struct boot_plan *plan);
