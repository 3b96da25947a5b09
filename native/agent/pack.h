/* What comes before a file's content in an archive, and which files are the same. */
#pragma once

#include "tar.h"

/* Files with more than one name, by the one that was sent. */
struct links {
        struct linked **buckets;
        unsigned count;
};

/* The name under which this file was sent before; NULL if this is the first, and then it is remembered. */
const char *link_seen(struct links *links, const struct stat *st, const char *path);
void links_free(struct links *links);

/* The blocks of a member that are still to be sent. */
struct head {
        uint8_t *data; /* from malloc */
        size_t size, room, at;
};

/* A pax member, if one is needed, and the header (whose names are filled in). fd: where extended attributes are; or -1. */
int head_build(struct head *head, struct tar_header *h, const char *path, const char *link, int fd);
