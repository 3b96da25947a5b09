"""What a machine's DHCP client is told, and what gets no answer."""

from __future__ import annotations

import ipaddress
import struct
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.net.dhcp import Lease, Reply, answer

MAC: Final = bytes.fromhex("02d5ec00000f")
OWN: Final = bytes.fromhex("aabbccddeeff")
LEASE: Final = Lease(
    MAC,
    ipaddress.IPv4Address("100.88.0.15"),
    ipaddress.IPv4Address("100.88.0.14"),
    ipaddress.IPv4Address("100.88.63.254"),
)
ADDRESS, ROUTER, NOWHERE = LEASE.address.packed, LEASE.router.packed, bytes(4)
DISCOVER, OFFER, REQUEST, DECLINE, ACK, NAK, RELEASE, INFORM = range(1, 9)


def asked(kind: int, *options: tuple[int, bytes], mac: bytes = MAC, ciaddr: bytes = NOWHERE, op: int = 1) -> bytes:
    """A client's frame."""
    body = struct.pack("!BBBBIHH", op, 1, 6, 0, 0x12345678, 0, 0) + ciaddr + bytes(12) + mac.ljust(16, b"\0")
    body += bytes(192) + b"\x63\x82\x53\x63\0"
    body += b"".join(bytes([code, len(value)]) + value for code, value in [(53, bytes([kind])), *options]) + b"\xff"
    udp = struct.pack("!HHHH", 68, 67, 8 + len(body), 0) + body
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0) + bytes(4) + b"\xff" * 4
    return b"\xff" * 6 + mac + b"\x08\x00" + ip + udp


def told(reply: Reply | None) -> tuple[int, bytes, dict[int, bytes]]:
    """Message type, address, and all options."""
    assert reply is not None
    assert reply.frame[:14] == b"\xff" * 6 + OWN + b"\x08\x00"
    ip, udp = reply.frame[14:34], reply.frame[34:]
    assert total(ip) == 0xFFFF
    assert total(ip[12:20] + struct.pack("!HH", 17, len(udp)) + udp) == 0xFFFF
    assert struct.unpack("!HHH", udp[:6]) == (67, 68, len(udp))
    body = udp[8:]
    assert body[:4] == bytes((2, 1, 6, 0)) and body[4:8] == b"\x12\x34\x56\x78" and body[28:34] == MAC
    options, at = {}, 240
    while body[at] != 255:
        options[body[at]] = body[at + 2 : at + 2 + body[at + 1]]
        at += 2 + body[at + 1]
    assert reply.granted == (options[53][0] == ACK)
    return options[53][0], body[16:20], options


def total(data: bytes) -> int:
    """The ones' complement sum, which is all ones where a checksum is right."""
    found = sum(int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big") for at in range(0, len(data), 2))
    while found >> 16:
        found = (found & 0xFFFF) + (found >> 16)
    return found


def test_a_client_gets_its_address_the_way_out_and_the_resolver() -> None:
    for question, said in (
        (asked(DISCOVER), OFFER),
        (asked(REQUEST, (50, ADDRESS), (54, ROUTER)), ACK),
        (asked(REQUEST, (50, ADDRESS)), ACK),
        (asked(REQUEST, ciaddr=ADDRESS), ACK),
    ):
        kind, address, options = told(answer(question, LEASE, OWN))
        assert (kind, address) == (said, ADDRESS)
        assert options[1] == b"\xff" * 4 and options[3] == options[54] == ROUTER and options[6] == LEASE.resolver.packed
        assert options[51] == b"\xff" * 4
        assert options[121] == b"\x20" + ROUTER + NOWHERE + b"\0" + ROUTER
    kind, address, options = told(answer(asked(INFORM, ciaddr=ADDRESS), LEASE, OWN))
    assert (kind, address) == (ACK, NOWHERE)
    assert 51 not in options


def test_another_address_is_refused_so_that_it_asks_anew() -> None:
    for question in (asked(REQUEST, (50, bytes((10, 0, 0, 1)))), asked(REQUEST, ciaddr=ROUTER)):
        kind, address, options = told(answer(question, LEASE, OWN))
        assert (kind, address) == (NAK, NOWHERE)
        assert set(options) == {53, 54}


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        asked(DISCOVER, mac=b"\x02\xd5\xec\0\0\x10"),  # somebody else's card
        asked(DISCOVER, op=2),
        asked(REQUEST, (50, ADDRESS), (54, bytes((10, 0, 0, 1)))),  # another server's offer
        asked(DECLINE), asked(RELEASE), asked(ACK), asked(0),
        asked(DISCOVER).replace(b"\x63\x82\x53\x63", b"\x63\x82\x53\x64"),
        asked(DISCOVER)[:-1],  # shorter than its UDP header says
        asked(DISCOVER)[:12] + b"\x86\xdd" + asked(DISCOVER)[14:],
    ],
)  # fmt: skip
def test_what_gets_no_answer(frame: bytes) -> None:
    assert answer(frame, LEASE, OWN) is None


@given(st.data())
def test_nothing_that_a_guest_sends_breaks_it(data: st.DataObject) -> None:
    frame = bytearray(asked(data.draw(st.integers(0, 9)), (50, data.draw(st.binary(max_size=9)))))
    for at in data.draw(st.lists(st.integers(0, len(frame) - 1), max_size=6)):
        frame[at] = data.draw(st.integers(0, 255))
    reply = answer(
        bytes(frame[: data.draw(st.integers(0, len(frame)))]) + data.draw(st.binary(max_size=40)), LEASE, OWN
    )
    assert reply is None or len(reply.frame) < 600
