/* Calls: one at a time, each in a cell (cell.h) that was made before it. An agent that was started for calls does nothing
 * else: it starts no commands and moves no files. docs/agent-protocol.md, "Calls". */
#pragma once

#include "child.h"
#include "link.h"

/* Makes the work directory's mount point. */
int call_init(const struct confinement *confinement, int null_fd);
/* CALLS, CALL_FILE, CALL, CALL_STOP; negative is a protocol error. */
int call_request(const struct header *header, struct span payload);
/* True if that process was ours. */
bool call_child_ended(pid_t pid, int status);
/* Kills what has run out of time; milliseconds until the next look, -1 for none. */
int call_deadlines(void);
/* A call nobody waits for is killed; the next connection begins with CALLS. */
void call_link_lost(void);
/* There will be no more calls: the sandbox may go. */
bool call_over(void);
