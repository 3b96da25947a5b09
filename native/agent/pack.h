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

/* What the archive of a layer says beyond that of a tree: nanoseconds, holes, overlayfs's own marks. */
struct layer_member {
        uint32_t mtime_ns;
        const char *map; /* `offset,size,offset,size...` of what is no hole; NULL: it has none */
        uint64_t whole;  /* with its holes */
        uint64_t names;  /* how many the file has */
};

/* A pax member, if one is needed, and the header (whose names are filled in). fd: where extended attributes are; or -1.
 * layer: NULL for a plain tree. */
int head_build(struct head *head, struct tar_header *h, const char *path, const char *link, int fd,
               const struct layer_member *layer);
