"""Moving ids in a copied space: the byte formats that carry them."""

from __future__ import annotations

import struct

from dsecd.idshift import ID_COUNT, shifted_acl, shifted_capability

SOURCE, TARGET = 5 << 20, 9 << 20


def test_version_3_capabilities_name_a_root_and_it_moves() -> None:
    old = struct.pack("<6I", 0x03000001, 1 << 10, 0, 0, 0, SOURCE)
    assert shifted_capability(old, SOURCE, TARGET) == struct.pack("<6I", 0x03000001, 1 << 10, 0, 0, 0, TARGET)
    foreign = old[:20] + struct.pack("<I", 0)
    assert shifted_capability(foreign, SOURCE, TARGET) == foreign


def test_version_2_capabilities_stay() -> None:
    old = struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)
    assert shifted_capability(old, SOURCE, TARGET) == old


def acl(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def test_only_named_users_and_groups_of_an_acl_move() -> None:
    undefined = 0xFFFFFFFF
    before = acl((1, 7, undefined), (2, 6, SOURCE + 1000), (2, 6, 33), (8, 4, SOURCE + ID_COUNT), (16, 7, undefined))
    after = acl((1, 7, undefined), (2, 6, TARGET + 1000), (2, 6, 33), (8, 4, SOURCE + ID_COUNT), (16, 7, undefined))
    assert shifted_acl(before, SOURCE, TARGET) == after
