/* What could not be transferred, one line for each entry. */
#pragma once

#include "frame.h"

enum { ISSUES_MAX = 1000 };

struct issues {
        char *lines[ISSUES_MAX];
        unsigned count;
        unsigned lost; /* beyond ISSUES_MAX */
};

/* what: an errno as text, or why it was refused */
void issue_add(struct issues *issues, const char *path, const char *what);
/* As ISSUE fields into the frame that is being built. */
void issues_fields(const struct issues *issues);
void issues_free(struct issues *issues);
