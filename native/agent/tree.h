/* TREE_PUT, TREE_GET and UPPER: directory trees as tar streams. */
#pragma once

#include "frame.h"

void tree_put(uint32_t channel, const struct args *args);
void tree_get(uint32_t channel, const struct args *args);
void tree_upper(uint32_t channel, const struct args *args);
