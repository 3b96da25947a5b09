/* CONNECT: bytes to and from a TCP port inside the sandbox. */
#pragma once

#include "frame.h"

void tunnel_connect(uint32_t channel, const struct args *args);
