/* Commands: their records, from EXEC to FORGET. */
#pragma once

#include <sys/resource.h>

#include "link.h"

/* One of the requests below; negative is a protocol error. */
int exec_request(const struct header *header, struct span payload);
bool exec_has_channel(uint32_t channel);

void exec_child_ended(pid_t pid, int status, const struct rusage *usage);
/* Nobody follows any more, and nobody knows what was sent. */
void exec_link_lost(void);
/* Kills what has run out of time; milliseconds until the next one, -1 for none. */
int exec_deadlines(void);
/* From now on the time of commands stands still: they are about to be frozen, and so is this process. */
void exec_hold(void);
/* It goes on, as if nothing had been between. Without a hold: nothing. */
void exec_go_on(void);
/* Lowest channel number that was never used, for READY. */
uint32_t exec_next_channel(void);
void exec_note_channel(uint32_t channel);
