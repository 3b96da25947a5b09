/* A virtio-serial port of this machine, by its name: the way to the host on QEMU. */
#pragma once

#include "util.h"

enum { PORT_NAME = 64, DEVICE_PATH = 64 };

/* Waits for a device that comes a moment after the kernel is up; emulation is slow. find fills in path; false: not yet. */
bool device_wait(bool (*find)(const char *name, char path[static DEVICE_PATH]), const char *name,
                 char path[static DEVICE_PATH]);
/* Waits for it, too. Returns a descriptor that does not block, or -errno (EBUSY: somebody else has it open). */
int port_open(const char *name);
