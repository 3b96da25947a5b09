/* READ and WRITE (file.c); STATPATH, LISTDIR, MKDIR, REMOVE and RENAME (names.c). */
#pragma once

#include "link.h"

void file_read(uint32_t channel, const struct args *args);
void file_write(uint32_t channel, const struct args *args);

void names_stat(uint32_t channel, const struct args *args);
void names_list(uint32_t channel, const struct args *args);
void names_mkdir(uint32_t channel, const struct args *args);
void names_remove(uint32_t channel, const struct args *args);
void names_rename(uint32_t channel, const struct args *args);

enum write_flags { WRITE_PARENTS = 1, WRITE_NEW = 2, WRITE_APPEND = 4, WRITE_OWNER = 8 };

/* The fields of STAT into the frame that is being built; with the target if dir and name lead to a symlink. */
void stat_fields(const struct stat *st, int dir, const char *name);
