/* The link over a listening socket: a Unix one in a container, vsock in a virtual machine. */
#pragma once

#include "util.h"

extern const struct carrier socket_carrier;

int socket_start(int listen_fd);
