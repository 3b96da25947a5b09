/* One archive member at a time, from its description to the file system. */
#pragma once

#include "beneath.h"
#include "issue.h"
#include "tar.h"

enum { UNPACK_DEPTH = 64, XATTRS_MAX = 64 };

/* A member, once all that describes it (long names, pax records) has been read. */
struct member {
        struct tar_header header;
        char path[TAR_PATH]; /* normalized; "" is the top */
        char link[TAR_PATH]; /* as given */
        char *xattr_names[XATTRS_MAX];
        struct span xattr_values[XATTRS_MAX]; /* into whoever holds the pax data */
        unsigned n_xattrs;
};

struct unpack {
        struct beneath where;
        struct issues issues;
        uint64_t count;
        bool force_owner, top_is_ours; /* top_is_ours: the directory was made for this archive, which may set its mode */
        uid_t uid;
        gid_t gid;
        int fd; /* of the regular file that is being written; -1: its data is thrown away */
        struct member current;
        /* Directories get their times once the archive has left them. */
        struct {
                char *path;
                int64_t mtime;
        } open_dirs[UNPACK_DEPTH];
        unsigned n_open;
};

/* Makes what u->current says. What fails is an issue, never the end. */
void unpack_begin(struct unpack *u);
/* Data of a regular file. Negative: the disk is full or worse, there is no point in going on. */
int unpack_data(struct unpack *u, struct span data);
void unpack_end(struct unpack *u);
/* After the last member. */
void unpack_finish(struct unpack *u);
void unpack_free(struct unpack *u);
void member_clear(struct member *m);
