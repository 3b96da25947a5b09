"""The coding of a serial agent link: nothing of an old connection gets through, nothing of the new one is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.agent.frames import FrameError
from dsecd.agent.serial import Serial

PIECES = [b"\xfe", b"\xff", b"\x00", b"abc", b"\xfe\x00", b"\xfe\xff"]
PAYLOAD = st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


@given(PAYLOAD, PAYLOAD, st.lists(st.integers(0, 1000), max_size=12), st.integers(1, 3))
def test_only_the_new_connections_bytes_come_through(old: bytes, new: bytes, cuts: list[int], answers: int) -> None:
    serial, before = Serial(), Serial()
    stream = before.sync() + Serial.encode(old)[:-1] + serial.sync() * answers + Serial.encode(new)
    assert b"".join(serial.feed(piece) for piece in pieces(stream, cuts)) == new
    assert serial.synced


def test_another_beginning_is_refused() -> None:
    serial = Serial()
    assert serial.feed(serial.sync() + b"x") == b"x"
    with pytest.raises(FrameError):
        serial.feed(Serial().sync())
