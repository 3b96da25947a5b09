"""A full VM's screen, keyboard and pointer, through QMP. What is on the screen is the guest's, and only ever shown."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from dsecd.errors import DsecError
from dsecd.vmm.keymap import chord, keys_for
from dsecd.vmm.qmp import Qmp, QmpError

MAX_PNG: Final = 64 << 20
MAX_TEXT: Final = 4096
CAPTURE_S: Final = 20.0
KEY_S: Final = 0.04  # keyboards hold a few events, and a guest under emulation is slow to take them
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_AXIS: Final = 0x7FFF  # QEMU's absolute axes go from 0 to this

_viewers: Final = itertools.count(1)

Button = Literal["left", "middle", "right", "wheel-up", "wheel-down", "side", "extra"]


class Picture(Struct, frozen=True):
    """A screen as PNG; width and height in pixels."""

    png: bytes
    width: int
    height: int


async def capture(qmp: Qmp, device: str | None = None, head: int = 0) -> Picture:
    """What the screen shows now. device: a display's id, where there are several.

    QEMU writes into a memory file that we hand it: it may make no files itself.
    """
    memory = os.memfd_create("screen", os.MFD_CLOEXEC)
    try:
        # A set of descriptors gives one only to who asks for its own mode, and a screendump writes.
        writable = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            added = await qmp.run("add-fd", fds=(writable,))
        finally:
            os.close(writable)
        number = added.get("fdset-id") if isinstance(added, dict) else None
        if not isinstance(number, int):
            raise DsecError("vmm", "QEMU took a descriptor and did not say where")
        try:
            where: dict[str, Any] = {"device": device, "head": head} if device is not None else {}
            await qmp.run("screendump", CAPTURE_S, filename=f"/dev/fdset/{number}", format="png", **where)
        except QmpError as exc:
            if "no default console" in exc.message.lower() or "no such" in exc.message.lower():
                raise no_screen() from exc
            raise
        finally:
            await qmp.run("remove-fd", fdset_id=number)
        return _picture(memory)
    finally:
        os.close(memory)


async def vnc(qmp: Qmp) -> socket.socket:
    """A new VNC client's end of a connection to the screen: bytes as RFC 6143 has them. The caller closes it.

    Nobody listens: whoever may ask for this is handed the connection. Only for a machine with a display: of one
    without, QEMU takes the descriptor and says nothing.
    """
    ours, theirs = socket.socketpair()
    name = f"vnc{next(_viewers)}"  # of its own: a second descriptor of one name would close the first
    try:
        with theirs:
            await qmp.run("getfd", fdname=name, fds=(theirs.fileno(),))
        try:
            await qmp.run("add_client", protocol="vnc", fdname=name, skipauth=True)
        except QmpError:
            await qmp.run("closefd", fdname=name)
            raise
    except BaseException:
        ours.close()
        raise
    ours.setblocking(False)
    return ours


def no_screen() -> DsecError:
    """What there is to say when a VM has none."""
    return DsecError("unsupported", "the VM has no screen: make it with profile desktop or android")


def _picture(memory: int) -> Picture:
    size = os.fstat(memory).st_size
    if size > MAX_PNG:
        raise DsecError("vmm", f"the screen's picture is {size >> 20} MiB, and {MAX_PNG >> 20} is the limit")
    png = os.pread(memory, size, 0)
    if len(png) < 33 or not png.startswith(_PNG) or png[12:16] != b"IHDR":
        raise DsecError("vmm", "QEMU's picture of the screen is no PNG")
    width, height = struct.unpack_from(">II", png, 16)
    return Picture(png, width, height)


async def type_text(qmp: Qmp, text: str) -> None:
    """Type it on the guest's keyboard, as a US one. `invalid`, and nothing typed, if a character has no key."""
    if len(text) > MAX_TEXT:
        raise DsecError("invalid", f"the text has {len(text)} characters, and {MAX_TEXT} is the limit at once")
    for keys in [keys_for(character) for character in text.replace("\r\n", "\n")]:
        await _press(qmp, keys)


async def press(qmp: Qmp, keys: Sequence[str]) -> None:
    """Keys or chords (`ctrl+alt+delete`), one after the other."""
    for held in [chord(key) for key in keys]:
        await _press(qmp, held)


async def _press(qmp: Qmp, keys: Sequence[str]) -> None:
    """Down and up go together: a guest that is slow would take the time between them for a key that is held."""
    down = [_key(key, down=True) for key in keys]
    up = [_key(key, down=False) for key in reversed(keys)]
    try:
        await qmp.run("input-send-event", events=down + up)
    except QmpError as exc:
        raise DsecError("invalid", f"QEMU knows no key {'+'.join(keys)}") from exc
    await asyncio.sleep(KEY_S)


def _key(key: str, *, down: bool) -> dict[str, Any]:
    return {"type": "key", "data": {"down": down, "key": {"type": "qcode", "data": key}}}


async def move(qmp: Qmp, x: int, y: int, width: int, height: int) -> None:
    """Put the pointer on a pixel of a screen of that size, as the last capture said. Needs a tablet."""
    if not (0 <= x < width and 0 <= y < height):
        raise DsecError("invalid", f"({x}, {y}) is outside of the screen ({width} by {height})")
    events = [_axis("x", x, width), _axis("y", y, height)]
    await qmp.run("input-send-event", events=events)
    await asyncio.sleep(KEY_S)


def _axis(name: str, at: int, size: int) -> dict[str, Any]:
    return {"type": "abs", "data": {"axis": name, "value": round(at * _AXIS / max(size - 1, 1))}}


async def click(qmp: Qmp, button: Button = "left", times: int = 1) -> None:
    """Press and let go, where the pointer is."""
    if not 1 <= times <= 3:
        raise DsecError("invalid", f"{times} clicks: one to three at once")
    for _ in range(times):
        for down in (True, False):
            events = [{"type": "btn", "data": {"down": down, "button": button}}]
            await qmp.run("input-send-event", events=events)
            await asyncio.sleep(KEY_S)
