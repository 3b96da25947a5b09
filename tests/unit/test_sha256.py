"""The agent's own SHA-256 against hashlib's: sizes around a block, pieces of every size, both ways of computing."""

from __future__ import annotations

import ctypes
import hashlib
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

AGENT = Path(__file__).resolve().parents[2] / "native" / "agent"
STATE = 256  # more than struct sha256 has


@pytest.fixture(scope="module", params=["", "-DSHA256_PLAIN"], ids=["as-the-cpu-can", "plain"])
def digest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """digest(*pieces), by sha256.c as a library."""
    library = tmp_path_factory.mktemp("sha256") / "sha256.so"
    flags = ["-O2", "-std=gnu11", "-D_GNU_SOURCE", "-shared", "-fPIC", *request.param.split()]
    subprocess.run(["cc", *flags, "-o", library, AGENT / "sha256.c"], check=True)
    native = ctypes.CDLL(str(library))

    def of(*pieces: bytes) -> bytes:
        state, out = ctypes.create_string_buffer(STATE), ctypes.create_string_buffer(32)
        native.sha256_start(state)
        for piece in pieces:
            native.sha256_add(state, piece, ctypes.c_size_t(len(piece)))
            native.sha256_digest(state, out)  # to look changes nothing
        native.sha256_digest(state, out)
        return out.raw

    return of


def test_every_size_around_a_block(digest: Callable[..., bytes]) -> None:
    data = random.Random(6).randbytes(100_000)
    for size in (*range(300), 4095, 4096, 65_535, 65_536, 65_537, 100_000):
        assert digest(data[:size]) == hashlib.sha256(data[:size]).digest(), size


def test_pieces_of_every_size(digest: Callable[..., bytes]) -> None:
    chance = random.Random(7)
    for _ in range(200):
        sizes = [chance.choice((0, 1, 55, 56, 63, 64, 65, 128, chance.randrange(5000))) for _ in range(9)]
        pieces = [chance.randbytes(size) for size in sizes]
        assert digest(*pieces) == hashlib.sha256(b"".join(pieces)).digest(), sizes


def test_more_bits_than_32(digest: Callable[..., bytes]) -> None:
    """The length at the end has 64 bits: 513 MiB are more than 2^32."""
    piece = bytes(1 << 20)
    expected = hashlib.sha256()
    for _ in range(513):
        expected.update(piece)
    assert digest(*[piece] * 513) == expected.digest()
