"""Frames of the agent link under random bytes: bounded time and memory, never anything but FrameError."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecd.agent.frames import (
    HEADER,
    INTEGERS,
    MAX_PAYLOAD,
    Decoder,
    Fields,
    FrameError,
    Tag,
    Type,
    fields,
    frame,
    header,
    parse_fields,
    parse_output,
    signed,
)

FUZZ = settings(max_examples=500, deadline=None)
U64 = st.integers(0, 2**64 - 1)
field_lists = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(INTEGERS)), U64),
        st.tuples(st.sampled_from(sorted(set(Tag) - INTEGERS)), st.binary(max_size=60)),
    ),
    max_size=12,
)
frames = st.tuples(st.sampled_from(list(Type)), st.integers(0, 2**32 - 1), st.binary(max_size=200))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in pieces, cut at these places."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def decoded(pieces: list[bytes]) -> list[tuple[Type, int, bytes]]:
    decoder = Decoder()
    return [(kind, channel, bytes(payload)) for piece in pieces for kind, channel, payload in decoder.feed(piece)]


@given(field_lists)
@FUZZ
def test_fields_round_trip(items: list[tuple[Tag, int | bytes]]) -> None:
    assert parse_fields(fields(items)) == items


@given(st.lists(frames, max_size=8), st.lists(st.integers(0, 10_000), max_size=20))
@FUZZ
def test_frames_however_they_are_cut(sent: list[tuple[Type, int, bytes]], places: list[int]) -> None:
    """The same frames come out whatever reads they came in."""
    data = b"".join(frame(kind, channel, payload) for kind, channel, payload in sent)
    assert decoded(cut(data, places)) == sent


@given(st.binary(max_size=600), st.lists(st.integers(0, 600), max_size=6))
@FUZZ
def test_random_bytes_in_the_decoder(data: bytes, places: list[int]) -> None:
    """FrameError or frames, and the same for any cut."""

    def outcome(pieces: list[bytes]) -> object:
        try:
            return decoded(pieces)
        except FrameError as exc:
            return str(exc)

    whole = outcome([data])
    parts = outcome(cut(data, places))
    if isinstance(whole, list):
        assert parts == whole
    else:
        assert isinstance(parts, str)


@given(st.lists(frames, min_size=1, max_size=4), st.integers(0, 10_000), st.integers(0, 255))
@FUZZ
def test_one_altered_byte(sent: list[tuple[Type, int, bytes]], place: int, value: int) -> None:
    data = bytearray(b"".join(frame(kind, channel, payload) for kind, channel, payload in sent))
    data[place % len(data)] = value
    try:
        for kind, _channel, payload in Decoder().feed(bytes(data)):
            if kind is Type.OUTPUT:
                parse_output(payload)
            else:
                parse_fields(payload)
    except FrameError:
        pass


@given(st.binary(max_size=300))
@FUZZ
def test_random_bytes_as_fields(data: bytes) -> None:
    """FrameError or fields that encode to the same bytes."""
    try:
        items = parse_fields(data)
    except FrameError:
        return
    assert fields(items) == data


@given(st.binary(max_size=40))
@FUZZ
def test_random_bytes_as_output(data: bytes) -> None:
    try:
        stream, offset, rest = parse_output(memoryview(data))
    except FrameError:
        return
    assert stream in (1, 2, 3)
    assert 0 <= offset < 2**64
    assert bytes(rest) == data[9:]


@given(field_lists, st.sampled_from(list(Tag)))
@FUZZ
def test_typed_access(items: list[tuple[Tag, int | bytes]], tag: Tag) -> None:
    """A missing, repeated or wrong field is FrameError; text never fails to decode and is bounded."""
    parsed = Fields(fields(items))
    mine = [value for t, value in items if t is tag]
    for get in (parsed.integer, parsed.raw):
        try:
            value = get(tag)
        except FrameError:
            assert len(mine) != 1 or not isinstance(mine[0], int if get == parsed.integer else bytes)
        else:
            assert mine == [value]
    if tag not in INTEGERS and len(mine) <= 1:
        assert len(parsed.text(tag, 16)) <= 16


@pytest.mark.parametrize("size", [MAX_PAYLOAD + 1, 2**31, 2**32 - 1])
def test_long_frame_is_refused_at_its_header(size: int) -> None:
    """A length over the cap is refused before anything is kept for it."""
    with pytest.raises(FrameError):
        Decoder().feed(HEADER.pack(size, Type.DATA, b"\0\0\0", 1))


def test_frame_of_the_cap() -> None:
    payload = bytes(MAX_PAYLOAD)
    assert decoded([header(Type.DATA, 1, MAX_PAYLOAD), payload[:100], payload[100:]]) == [(Type.DATA, 1, payload)]
    with pytest.raises(ValueError, match="at most"):
        frame(Type.DATA, 1, bytes(MAX_PAYLOAD + 1))


@pytest.mark.parametrize("bad", [b"\1\0\0", b"\0\1\0", b"\0\0\1"])
def test_filler_must_be_zero(bad: bytes) -> None:
    with pytest.raises(FrameError):
        Decoder().feed(HEADER.pack(0, Type.PONG, bad, 0))


def test_decoder_memory_is_bounded() -> None:
    """50 MB of frames, and then a frame that never ends: what is held stays near one frame."""
    decoder = Decoder()
    block = frame(Type.DATA, 1, bytes(65_000)) * 8
    decoder.feed(block)
    tracemalloc.start()
    try:
        for _ in range(100):
            decoder.feed(block)
        decoder.feed(header(Type.DATA, 1, MAX_PAYLOAD))
        for _ in range(31):
            assert decoder.feed(bytes(65_536)) == []
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert current < 2 * MAX_PAYLOAD + (1 << 20)
    assert peak < 6 * MAX_PAYLOAD


@given(st.integers(-(2**63), 2**63 - 1))
def test_signed(value: int) -> None:
    ((_, raw),) = parse_fields(fields([(Tag.MTIME_NS, value)]))
    assert isinstance(raw, int)
    assert signed(raw) == value
