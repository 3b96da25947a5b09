/* A process of a virtual machine's agent for what the agent itself may not do, or should not wait for. */
#pragma once

#include "frame.h"

enum {
        KEEPER_REQUEST_MAX = 64 << 10, /* bytes of payload */
        KEEPER_ANSWER_MAX = 64 << 10,
        KNOB_MAX = 4096,
};

/* One packet each way; the rest of it is the frame's payload. */
struct keeper_request {
        uint32_t type;
        uint32_t channel;
        uint8_t payload[KEEPER_REQUEST_MAX];
};

struct keeper_answer {
        uint32_t channel;
        int32_t code; /* 0: the payload is that of DONE; else an errno, and the payload is text */
        uint8_t payload[KEEPER_ANSWER_MAX];
};

enum { KEEPER_HEADER = 8 };

/* While /dev and the kernel's file systems are still there. Returns our end, which does not block; or -errno. */
int keeper_start(void);
