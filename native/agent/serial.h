/* The link over a stream that outlives connections: a virtio-serial port. */
#pragma once

#include "util.h"

extern const struct carrier serial_carrier;

/* fd does not block. */
int serial_start(int fd);
