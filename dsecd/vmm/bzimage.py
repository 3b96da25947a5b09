"""A distribution's vmlinuz (bzImage) to the ELF vmlinux inside it, which VMMs boot by PVH.

Decompressing costs half a second once; in a guest under emulation it would cost seconds at each boot. Format:
the kernel's Documentation/arch/x86/boot.rst (offsets below) and arch/x86/boot/compressed: the payload is the compressed
vmlinux, and for all methods but gzip its plain size follows in four bytes.
"""

from __future__ import annotations

import lzma
import struct
import subprocess
import zlib
from typing import Final

from dsecd.errors import DsecError

MAX_VMLINUX: Final = 512 << 20
_SECTS, _MAGIC, _VERSION, _PAYLOAD = 0x1F1, 0x202, 0x206, 0x248
_GZIP: Final = b"\x1f\x8b"
_XZ: Final = b"\xfd7zXZ\x00"
_PIPED: Final = {b"\x28\xb5\x2f\xfd": "zstd", b"\x02\x21\x4c\x18": "lz4"}  # zstd's and lz4's legacy frame
_PROGRAM_S: Final = 60.0

# The note that says where to enter: xen/elfnote.h
_XEN_ELFNOTE_PHYS32_ENTRY: Final = 18
_PT_NOTE: Final = 4


def vmlinux_of(image: bytes) -> bytes:
    """The ELF file. DsecError `image` for anything that is no bzImage, `unsupported` for an unknown compression."""
    try:
        if image[_MAGIC : _MAGIC + 4] != b"HdrS" or struct.unpack_from("<H", image, _VERSION)[0] < 0x208:
            raise DsecError("image", "the kernel's vmlinuz is no bzImage of boot protocol 2.08 or later")
        sectors = image[_SECTS] or 4  # zero means four, in kernels older than any that matters
        offset, length = struct.unpack_from("<II", image, _PAYLOAD)
    except (struct.error, IndexError) as exc:
        raise DsecError("image", "the kernel's vmlinuz is truncated") from exc
    begin = (sectors + 1) * 512 + offset
    payload = image[begin : begin + length]
    if len(payload) != length or length < 16:
        raise DsecError("image", "the kernel's vmlinuz is truncated")
    plain = _decompress(payload)
    if plain[:6] != b"\x7fELF\x02\x01":
        raise DsecError("image", "what the kernel's vmlinuz holds is no 64-bit ELF file")
    return plain


def _decompress(payload: bytes) -> bytes:
    try:
        if payload.startswith(_GZIP):
            plain = zlib.decompressobj(31).decompress(payload, MAX_VMLINUX)
            return _sized(plain, len(plain))
        size = struct.unpack_from("<I", payload, len(payload) - 4)[0]
        if payload.startswith(_XZ):
            return _sized(lzma.LZMADecompressor(memlimit=256 << 20).decompress(payload, MAX_VMLINUX), size)
    except (zlib.error, lzma.LZMAError) as exc:
        raise DsecError("image", f"the kernel inside vmlinuz is altered ({exc})") from exc
    if (program := _PIPED.get(payload[:4])) is None:
        raise DsecError("unsupported", f"vmlinuz is compressed in an unknown way (it begins {payload[:6].hex()})")
    if size > MAX_VMLINUX:
        raise DsecError("image", f"the kernel inside vmlinuz is said to be {size} bytes")
    return _sized(_piped(program, payload[:-4]), size)


def _sized(plain: bytes, size: int) -> bytes:
    if len(plain) != size or size >= MAX_VMLINUX:
        raise DsecError("image", f"the kernel inside vmlinuz is {len(plain)} bytes and not the {size} it is said to be")
    return plain


def _piped(program: str, payload: bytes) -> bytes:
    try:
        done = subprocess.run([program, "-dcq"], input=payload, capture_output=True, timeout=_PROGRAM_S, check=False)
    except FileNotFoundError as exc:
        raise DsecError("unsupported", f"the kernel is compressed with {program}, which is not installed") from exc
    except subprocess.TimeoutExpired as exc:
        raise DsecError("internal", f"{program} did not end within {_PROGRAM_S:g} s") from exc
    if done.returncode:
        raise DsecError("image", f"the kernel inside vmlinuz is altered ({program} says so)")
    return done.stdout


def has_pvh_entry(vmlinux: bytes) -> bool:
    """Whether a VMM can enter it directly: it has the note with the 32-bit entry point."""
    try:
        (table,) = struct.unpack_from("<Q", vmlinux, 32)  # e_phoff
        size, count = struct.unpack_from("<HH", vmlinux, 54)  # e_phentsize, e_phnum
        for index in range(count):
            (kind,) = struct.unpack_from("<I", vmlinux, table + index * size)
            offset, length = struct.unpack_from("<Q16xQ", vmlinux, table + index * size + 8)  # p_offset, p_filesz
            if kind == _PT_NOTE and _names_entry(vmlinux[offset : offset + length]):
                return True
    except struct.error:
        return False
    return False


def _names_entry(notes: bytes) -> bool:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        if kind == _XEN_ELFNOTE_PHYS32_ENTRY and notes[at + 12 : at + 15] == b"Xen":
            return True
        at += 12 + -(-name_size // 4) * 4 + -(-size // 4) * 4
    return False
