/* What the sandbox must not see: a new /proc, the masks that container runtimes put over it, and our own program file. */
#pragma once

#include "util.h"

struct hide_error {
        int code; /* errno; 0: none */
        char what[60];
};

/* In the inner init: the mount belongs to the PID namespace of whoever makes it. */
int hide_host(struct hide_error *ret_error);
/* No capability, no way back to one, and not dumpable. */
int hide_drop_privileges(struct hide_error *ret_error);
/* Unmounts and unlinks the program if it was bind-mounted to path for this start only. */
void hide_program(const char *path);
