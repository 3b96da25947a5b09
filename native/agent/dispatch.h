#pragma once

#include "child.h"

/* HELLO fills it in; exec.c has it too. */
void dispatch_init(struct confinement *of_commands, bool only_calls);
/* Handles one whole frame. Negative: a protocol error. */
int dispatch_frame(const struct header *header, struct span payload);
/* SHUTDOWN came. */
bool dispatch_finished(void);
