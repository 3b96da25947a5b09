"""Commands of a full VM, through QEMU's guest agent: run to the end, nothing more.

That agent keeps no channel to a command: there is no following, no terminal and no signal, and a command whose time is
up can only be asked to die. What needs those needs dsec-agent in the image.
"""

from __future__ import annotations

import itertools
import time
from typing import Final

from dsecd.errors import DsecError
from dsecd.sandbox.commands import argv_of
from dsecd.sandbox.record import Record, now
from dsecd.vmm.fullvm import FullVm
from dsecd.wire import execs as wire

TIMED_OUT: Final = 124  # as timeout(1) has it; the guest does not say
LONGEST_S: Final = 24 * 3600.0
_CD: Final = ("/bin/sh", "-c", 'cd "$0" && exec "$@"')


class GuestCommands:
    """`busy`: commands under way, for which the sandbox is not idle."""

    def __init__(self, record: Record, vm: FullVm) -> None:
        self._record = record
        self._vm = vm
        self._numbers = itertools.count(1)
        self.busy = 0

    async def run(self, asked: wire.Run, received: float) -> wire.Ran:
        """exec.run. `timed_out` when it did not end in time: it may run on in the guest."""
        argv = argv_of(asked)
        if asked.user is not None:
            raise DsecError("unsupported", "a full VM's guest agent runs commands as its own user: leave out `user`")
        cwd = asked.cwd or self._record.spec.workdir
        if cwd:
            argv = [*_CD, cwd, *argv]
        env = {**self._record.spec.env, **asked.env}
        started = time.monotonic()
        self.busy += 1
        try:
            ran = await self._vm.run(argv, env, asked.stdin or b"", asked.timeout_s or LONGEST_S)
        except DsecError as exc:
            if exc.kind != "timeout":
                raise
            ran = None
        finally:
            self.busy -= 1
            self._record.idle_since = now()
        self._record.commands += 1
        result = wire.Ran(
            exec_id=f"g{next(self._numbers)}",
            exit_code=TIMED_OUT,
            queued_ms=round((started - received) * 1000, 3),
            ran_ms=round((time.monotonic() - started) * 1000, 3),
        )
        if ran is None:
            result.timed_out = True
            return result
        cap = asked.cap_bytes
        result.exit_code, result.signal = (128 + ran.signal if ran.signal else ran.exit_code) & 0xFF, ran.signal
        result.stdout, result.stderr = ran.stdout[:cap], ran.stderr[:cap]
        # How much the guest's agent itself threw away it does not say: at least one byte.
        result.stdout_dropped = max(0, len(ran.stdout) - cap) + ran.truncated
        result.stderr_dropped = max(0, len(ran.stderr) - cap)
        result.stdout_head, result.stderr_head = len(result.stdout), len(result.stderr)
        return result
