"""User ids that are shifted to a sandbox's range of 2^20, and back: numbers, file capabilities, ACLs. Pure."""

from __future__ import annotations

import struct
from typing import Final

ID_COUNT: Final = 1 << 20
CAPABILITY: Final = "security.capability"
ACLS: Final = ("system.posix_acl_access", "system.posix_acl_default")
_CAP_REVISION_2, _CAP_REVISION_3 = 0x02000000, 0x03000000
_ACL_USER, _ACL_GROUP = 0x02, 0x08


def moved(number: int, source: int, target: int) -> int:
    """An id of source's range, in target's; any other is nobody's to move."""
    return number - source + target if source <= number < source + ID_COUNT else number


def shifted_capability(value: bytes, source: int, target: int) -> bytes:
    """A version 3 file capability names the host id of the root it counts for; older ones name none."""
    if struct.unpack_from("<I", value)[0] & 0xFF000000 != _CAP_REVISION_3 or len(value) != 24:
        return value
    return value[:20] + struct.pack("<I", moved(struct.unpack_from("<I", value, 20)[0], source, target))


def shifted_acl(value: bytes, source: int, target: int) -> bytes:
    """struct posix_acl_xattr_header, then (tag, perm, id) entries; only named users and groups carry an id."""
    out = bytearray(value)
    for at in range(4, len(value) - 7, 8):
        tag, _, number = struct.unpack_from("<HHI", value, at)
        if tag in (_ACL_USER, _ACL_GROUP):
            struct.pack_into("<I", out, at + 4, moved(number, source, target))
    return bytes(out)


def plain_capability(value: bytes) -> bytes:
    """One that names the root it counts for, as an image has it: every sandbox's own root."""
    if len(value) != 24:
        return value
    magic = struct.unpack_from("<I", value)[0]
    return struct.pack("<I", (magic & 0x00FFFFFF) | _CAP_REVISION_2) + value[4:20]
