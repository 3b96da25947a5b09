#include "user.h"

#include <fcntl.h>

enum { DATABASE_MAX = 1 << 20, LINE_FIELDS = 7 };

/* The whole file as one string, or NULL: a missing, strange or oversized file is an empty one. Not freed, the caller is
 * about to exec. */
static char *database_read(const char *path) {
        struct stat st;
        size_t used = 0;
        ssize_t n;

        /* Never waits for a FIFO; a symlink is fine, it resolves inside the sandbox. */
        cleanup_fd int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size > DATABASE_MAX)
                return NULL;
        char *text = pages_map(DATABASE_MAX + 1);
        if (!text)
                return NULL;
        while (used < DATABASE_MAX && (n = read(fd, text + used, DATABASE_MAX - used)) > 0)
                used += (size_t) n;
        return text;
}

/* Cuts the next line off *text and splits it at colons; missing fields are empty. False at the end. */
static bool line_next(char **text, char *fields[static LINE_FIELDS]) {
        if (!*text || !**text)
                return false;
        char *line = *text;
        char *end = strchrnul(line, '\n');
        *text = *end ? end + 1 : end;
        *end = 0;
        for (int i = 0; i < LINE_FIELDS; i++) {
                fields[i] = line;
                char *colon = strchrnul(line, ':');
                line = *colon ? colon + 1 : colon;
                *colon = 0;
        }
        return true;
}

static bool parse_id(const char *text, uint32_t *ret) {
        uint64_t value = 0;

        if (!*text)
                return false;
        for (; *text; text++) {
                if (*text < '0' || *text > '9')
                        return false;
                value = value * 10 + (uint64_t) (*text - '0');
                /* the last number means "unchanged" to the kernel */
                if (value >= UINT32_MAX)
                        return false;
        }
        *ret = (uint32_t) value;
        return true;
}

/* Does the comma-separated list hold this name? */
static bool list_holds(const char *list, const char *name) {
        size_t size = strlen(name);

        for (const char *at = list; size > 0 && at; at = strchr(at, ','), at = at ? at + 1 : NULL)
                if (strncmp(at, name, size) == 0 && (at[size] == ',' || at[size] == 0))
                        return true;
        return false;
}

/* name or uid in, entry out. A uid without an entry is fine. */
static int find_user(const char *wanted, struct user *user, const char **ret_name) {
        char *fields[LINE_FIELDS], *text = database_read("/etc/passwd");
        bool numeric = parse_id(wanted, &user->uid);
        uint32_t uid, gid;

        while (line_next(&text, fields)) {
                if (!parse_id(fields[2], &uid) || !parse_id(fields[3], &gid))
                        continue;
                if (strcmp(fields[0], wanted) != 0 && !(numeric && uid == user->uid))
                        continue;
                *ret_name = fields[0];
                user->uid = uid;
                user->gid = gid;
                user->home = fields[5];
                return 0;
        }
        return numeric ? 0 : -ENOENT;
}

static int find_groups(const char *wanted, const char *user_name, struct user *user) {
        char *fields[LINE_FIELDS], *text = database_read("/etc/group");
        bool found = !wanted || parse_id(wanted, &user->gid);
        uint32_t gid;

        while (line_next(&text, fields)) {
                if (!parse_id(fields[2], &gid))
                        continue;
                if (!found && strcmp(fields[0], wanted) == 0) {
                        user->gid = gid;
                        found = true;
                }
                /* A group given by hand replaces the memberships, as in every container runtime. */
                if (!wanted && user_name && list_holds(fields[3], user_name) && user->n_groups < GROUPS_MAX)
                        user->groups[user->n_groups++] = gid;
        }
        return found ? 0 : -ENOENT;
}

int user_lookup(const char *text, struct user *ret) {
        const char *name = NULL, *group = NULL;
        char *wanted = strdup(text ? text : "0");

        if (!wanted)
                return -ENOMEM;
        char *colon = strchr(wanted, ':');
        if (colon) {
                *colon = 0;
                group = colon + 1;
        }
        memset(ret, 0, sizeof(*ret));
        int r = find_user(wanted, ret, &name);
        if (r < 0)
                return r;
        return find_groups(group, name, ret);
}
