"""Connections over a stream that outlives them: a virtio-serial port of QEMU.

When a daemon goes and the next one comes, neither QEMU nor the guest's kernel drops what is half-way. So the byte FE is
sent as FE FF, and `FE 00` with sixteen hex digits, which payload can therefore never contain, begins a connection: the
host sends it with digits of its own until the agent says the same back, and what came before that is of another
connection.
"""

from __future__ import annotations

import secrets
from typing import Final

from dsecd.agent.frames import FrameError

_DATA: Final = b"\xfe\xff"
_SYNC: Final = b"\xfe\x00"
NONCE: Final = 16
_OVER: Final = _SYNC + NONCE * b"0"  # the agent ended the connection, or another one is there now


class Serial:
    """One connection's coding. Bytes in, bytes out; no I/O."""

    def __init__(self) -> None:
        self.synced = False
        self._nonce = secrets.token_hex(NONCE // 2).encode()
        self._held = b""

    def sync(self) -> bytes:
        """Begins the connection; may be repeated until `synced`."""
        return _SYNC + self._nonce

    @staticmethod
    def encode(data: bytes | memoryview) -> bytes:
        raw = data if isinstance(data, bytes) else bytes(data)
        return raw.replace(b"\xfe", _DATA)

    def feed(self, data: bytes) -> bytes:
        """Payload of this connection in `data`. FrameError when the other end begins a connection that we did not."""
        data, self._held = self._held + data, b""
        mark = self.sync()
        if not self.synced:
            at = data.find(mark)
            if at < 0:
                self._held = data[-len(mark) + 1 :]
                return b""
            self.synced = True
            data = data[at + len(mark) :]
        # An answer to one of our repeated beginnings says nothing new: nothing came in between.
        data = data.replace(mark, b"")
        if _OVER in data:
            raise FrameError("it ended the connection")
        last = data.rfind(b"\xfe", max(0, len(data) - len(mark) + 1))
        if last >= 0 and mark.startswith(data[last:]):
            data, self._held = data[:last], data[last:]
        if data.count(b"\xfe") != data.count(_DATA):
            raise FrameError("a serial link's escape is not valid")
        return data.replace(_DATA, b"\xfe")
