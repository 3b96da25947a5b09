/* Leaf cgroups, one per command: how a command is killed whole, however its processes hide from each other. */
#pragma once

#include "util.h"

/* base_fd: the sandbox's own cgroup. */
void leaf_init(int base_fd);

/* Makes x<channel> and returns its descriptor. */
int leaf_create(uint32_t channel);
int leaf_kill(uint32_t channel);
/* Microseconds of processor time of all that ever ran in it. */
uint64_t leaf_cpu_us(uint32_t channel);
/* SIGKILL to all but one; returns how many were found. They may fork meanwhile: ask again until it is 0. */
int leaf_kill_others(uint32_t channel, pid_t spare);
/* Removes the leaf now, or as soon as its last process is gone. */
void leaf_release(uint32_t channel);
/* SIGKILL to everything in every leaf. Returns the highest channel that has one; 0: none. */
uint32_t leaf_kill_all(void);
