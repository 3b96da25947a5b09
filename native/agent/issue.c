#include "issue.h"

#include <stdio.h>

#include "link.h"

void issue_add(struct issues *issues, const char *path, const char *what) {
        char line[TEXT_MAX];
        /* The reason must survive a long path. */
        int shown = (int) (sizeof(line) - 3 - min_size(strlen(what), 200));

        if (issues->count == ISSUES_MAX) {
                issues->lost++;
                return;
        }
        snprintf(line, sizeof(line), "%.*s: %s", shown, path, what);
        char *copy = strdup(line);
        if (copy)
                issues->lines[issues->count++] = copy;
        else
                issues->lost++;
}

void issues_fields(const struct issues *issues) {
        char more[64];

        /* The last line's place is kept for this one. */
        unsigned shown = issues->lost > 0 && issues->count == ISSUES_MAX ? issues->count - 1 : issues->count;
        for (unsigned i = 0; i < shown; i++)
                frame_text(ISSUE, issues->lines[i]);
        if (issues->lost > 0) {
                snprintf(more, sizeof(more), "and %u more", issues->lost + issues->count - shown);
                frame_text(ISSUE, more);
        }
}

void issues_free(struct issues *issues) {
        for (unsigned i = 0; i < issues->count; i++)
                free(issues->lines[i]);
        issues->count = 0;
}
