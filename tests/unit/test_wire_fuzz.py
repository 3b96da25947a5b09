"""Lines and messages of the wire under random bytes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wirekit import asynchronous, house

from dsecd.wire import base
from dsecd.wire.framing import MAX_PARTS, FrameTooLong, Lines
from dsecd.wire.methods import METHODS

FUZZ = settings(max_examples=500, deadline=None)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def fed(pieces: list[bytes], limit: int) -> tuple[list[bytes], bool]:
    """The lines that came out, and whether one was too long."""
    lines, out = Lines(limit), []
    try:
        for piece in pieces:
            out += lines.feed(piece)
    except FrameTooLong:
        return out, True
    return out, False


@given(
    st.binary(max_size=300).map(lambda b: b.replace(b"a", b"\n")), st.lists(st.integers(0, 300)), st.integers(1, 400)
)
@FUZZ
def test_lines_however_they_are_cut(data: bytes, places: list[int], limit: int) -> None:
    """The non-empty lines, in order; too long is found for any cut, and no line after it is given out."""
    whole = [line for line in data.split(b"\n")[:-1] if line]
    out, too_long = fed(cut(data, places), limit)
    expected_long = any(len(line) > limit for line in data.split(b"\n"))
    assert too_long == expected_long
    if too_long:
        assert out == whole[: len(out)]
        assert all(len(line) <= limit for line in out)
    else:
        assert [bytes(line) for line in out] == whole


@pytest.mark.parametrize("size", [1, 2, 999, 1000])
def test_lines_at_the_limit(size: int) -> None:
    line = b"x" * 1000
    assert fed([line[:size], line[size:], b"\n"], 1000) == ([line], False)
    assert fed([line[:size], line[size:] + b"y"], 1000) == ([], True)
    assert fed([line + b"\n" + line + b"\n"], 1000) == ([line, line], False)


def test_line_of_single_bytes_costs_little() -> None:
    lines = Lines(10_000)
    for _ in range(9_999):
        assert lines.feed(b"x") == []
        assert len(lines._parts) <= MAX_PARTS
    assert lines.feed(b"x\n") == [b"x" * 10_000]


@given(st.binary(max_size=200))
@FUZZ
def test_random_bytes_as_a_message(data: bytes) -> None:
    """A message or msgspec's DecodeError; nothing else ever."""
    for decode in (base.decode_incoming, base.decode_outgoing, base.decode_stream_data):
        try:
            decode(data)
        except msgspec.DecodeError:
            pass


@given(st.sampled_from(sorted(METHODS)), JSON)
@FUZZ
def test_random_json_as_params(method: str, value: Any) -> None:
    """Every method's params: a Struct or DecodeError."""
    try:
        raw = json.dumps(value, allow_nan=True).encode()
    except UnicodeEncodeError:
        return
    try:
        found = msgspec.json.decode(raw, type=METHODS[method].params)
    except (msgspec.DecodeError, RecursionError):
        return
    assert isinstance(found, METHODS[method].params)


@given(st.sampled_from(sorted(METHODS)))
def test_params_round_trip(method: str) -> None:
    """Results and params of every method can be written and read; unknown fields are refused in params alone."""
    params = METHODS[method].params
    names = {field.encode_name for field in msgspec.structs.fields(params)}
    assert {"timeout_s", "request_id"} <= names
    with pytest.raises(msgspec.ValidationError, match=r"unknown field|missing required"):
        msgspec.json.decode(b'{"no_such_field": 1}', type=params)


@asynchronous
async def test_random_lines_to_a_server() -> None:
    """Two thousand random lines on one connection: exactly one error for each, and it still serves."""
    made = st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=80),
            JSON.map(lambda value: json.dumps(value).encode()),
            JSON.map(lambda v: json.dumps({"jsonrpc": "2.0", "id": 1, "method": "no", "params": v}).encode()),
        ),
        min_size=20,
        max_size=20,
    )
    batches: list[list[bytes]] = []

    @given(made)
    @settings(max_examples=100, deadline=None, database=None)
    def collect(lines: list[bytes]) -> None:
        batches.append(lines)

    collect()
    async with house() as h, h.talker() as talker:
        for batch in batches:
            lines = [line.replace(b"\n", b" ") for line in batch if line.strip(b"\n ")]
            talker.say(b"".join(line + b"\n" for line in lines))
            for _ in lines:
                message = await talker.reply()
                assert message["error"]["data"]["kind"] == "invalid", message
        await talker.alive()
