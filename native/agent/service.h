/* The agent as a service of a full VM: `dsec-agent --service`, started by that machine's own init. */
#pragma once

#include "vm.h"

bool is_service(int argc, char **argv);
/* As vm_boot(), but in a machine that is up and is not ours: complains on stderr and returns a negative errno. */
int service_start(struct vm *ret);
