"""Addresses for machines that ask for one: DHCP (RFC 2131) on one link, for one card, with one answer.

What a full VM runs is its owner's, so nothing but its own DHCP client tells it an address. The socket is a packet
socket on that sandbox's link: it sees frames ahead of the packet filter, which needs no hole for a guest without an
address, and the kernel hands on nothing but what is for the port of DHCP servers. The address is the sandbox's for good
(it follows from its slot), so a lease has no end, and nobody needs the daemon to keep one.

The mask says that nobody is on the link; the way to the router is said twice, for clients with and without RFC 3442.
Some systems refuse the other choice, a link of two addresses (/31).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct

_DISCOVER, _OFFER, _REQUEST, _ACK, _NAK, _INFORM = 1, 2, 3, 5, 6, 8
_SERVER_PORT, _CLIENT_PORT = 67, 68
_ETHERNET: Final = struct.Struct("!6s6sH")
_IP: Final = struct.Struct("!BBHHHBBH4s4s")
_UDP: Final = struct.Struct("!HHHH")
# op, htype, hlen, hops, xid, secs, flags, ciaddr, yiaddr, siaddr, giaddr, chaddr, sname and file, magic
_BOOTP: Final = struct.Struct("!BBBBIHH4s4s4s4s16s192s4s")
_MAGIC: Final = b"\x63\x82\x53\x63"
_BROADCAST: Final = b"\xff" * 6
_NOWHERE: Final = bytes(4)
_FRAME_MAX: Final = 1514
_IPV4: Final = 0x0800
_AT_ONCE: Final = 8
_PAUSE_S: Final = 0.1  # so 80 frames a second are read at most; the kernel drops what does not fit its buffer

_SO_ATTACH_FILTER: Final = 26
# IPv4, UDP, no later part of a packet, to port 67; what `tcpdump -dd` makes of that, as (code, if true, if false, k).
_FILTER: Final = (
    (0x28, 0, 0, 12), (0x15, 0, 8, _IPV4), (0x30, 0, 0, 23), (0x15, 0, 6, 17), (0x28, 0, 0, 20),
    (0x45, 4, 0, 0x1FFF), (0xB1, 0, 0, 14), (0x48, 0, 0, 16), (0x15, 0, 1, _SERVER_PORT), (0x6, 0, 0, _FRAME_MAX),
    (0x6, 0, 0, 0),
)  # fmt: skip


class Lease(Struct, frozen=True):
    """What the card of that address (six bytes) is told."""

    mac: bytes
    address: ipaddress.IPv4Address
    router: ipaddress.IPv4Address
    resolver: ipaddress.IPv4Address


class Reply(Struct, frozen=True):
    """A frame for the guest. granted: it says that the address is the guest's."""

    frame: bytes
    granted: bool


def answer(frame: bytes, lease: Lease, own: bytes) -> Reply | None:
    """What a guest's frame is answered; None: nothing. own: the router's end, six bytes. Pure."""
    asked = _payload(frame)
    if asked is None or len(asked) < _BOOTP.size:
        return None
    op, hardware, size, _, xid, _, flags, ciaddr, _, _, _, chaddr, _, magic = _BOOTP.unpack_from(asked)
    if (op, hardware, size, magic) != (1, 1, 6, _MAGIC) or chaddr[:6] != lease.mac:
        return None
    options = _options(asked[_BOOTP.size :])
    kind, own4, router = options.get(53), lease.address.packed, lease.router.packed
    if kind == bytes([_DISCOVER]):
        said, given = _OFFER, own4
    elif kind == bytes([_REQUEST]):
        if options.get(54, router) != router:
            return None  # it took somebody else's offer
        wanted = options.get(50, ciaddr)
        said, given = (_ACK, own4) if wanted in (own4, _NOWHERE) else (_NAK, _NOWHERE)
    elif kind == bytes([_INFORM]):
        said, given = _ACK, _NOWHERE
    else:
        return None
    words = [(53, bytes([said])), (54, router)]
    if said != _NAK:
        # Option 121: the router is on the link, the rest is behind it.
        routes = b"\x20" + router + _NOWHERE + b"\x00" + router
        words += [(1, b"\xff" * 4), (3, router), (6, lease.resolver.packed), (121, routes)]
    if given == own4:
        words.append((51, b"\xff" * 4))  # without end
    kept = ciaddr if said == _ACK else _NOWHERE
    body = _BOOTP.pack(2, 1, 6, 0, xid, 0, flags, kept, given, _NOWHERE, _NOWHERE, chaddr, bytes(192), _MAGIC)
    body += b"".join(bytes([code, len(value)]) + value for code, value in words) + b"\xff"
    # To all, whatever the guest can already take: there is nobody else on the link.
    datagram = _datagram(router, b"\xff" * 4, body.ljust(300, b"\0"))
    return Reply(_ETHERNET.pack(_BROADCAST, own, _IPV4) + datagram, said == _ACK)


def _payload(frame: bytes) -> bytes | None:
    """What a datagram to a DHCP server has; None: it is none. The filter has looked already, but not at lengths."""
    if len(frame) < _ETHERNET.size + _IP.size or frame[12:14] != b"\x08\x00" or frame[14] >> 4 != 4:
        return None
    at = _ETHERNET.size + 4 * (frame[14] & 15)
    if frame[23] != socket.IPPROTO_UDP or len(frame) < at + _UDP.size:
        return None
    source, target, size, _ = _UDP.unpack_from(frame, at)
    if (source, target) != (_CLIENT_PORT, _SERVER_PORT) or at + size > len(frame):
        return None
    return frame[at + _UDP.size : at + size]


def _options(data: bytes) -> dict[int, bytes]:
    """By number, the first of each; what is cut off is left out."""
    found: dict[int, bytes] = {}
    at = 0
    while at + 1 < len(data) and data[at] != 255:
        if data[at] == 0:
            at += 1
            continue
        value = data[at + 2 : at + 2 + data[at + 1]]
        if len(value) == data[at + 1]:
            found.setdefault(data[at], value)
        at += 2 + data[at + 1]
    return found


def _datagram(source: bytes, target: bytes, body: bytes) -> bytes:
    size = _UDP.size + len(body)
    pseudo = source + target + struct.pack("!HH", socket.IPPROTO_UDP, size)
    words = (_SERVER_PORT, _CLIENT_PORT, size)
    udp = _UDP.pack(*words, _sum(pseudo + _UDP.pack(*words, 0) + body) or 0xFFFF)
    parts = (0x45, 0, _IP.size + size, 0, 0, 64, socket.IPPROTO_UDP)
    return _IP.pack(*parts, _sum(_IP.pack(*parts, 0, source, target)), source, target) + udp + body


def _sum(data: bytes) -> int:
    """The Internet checksum."""
    total: int = sum(word for (word,) in struct.iter_unpack("!H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def listen(link: str) -> socket.socket:
    """A socket for the questions that come from that link of the namespace that this is called in."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 0)
    try:
        with _program(_FILTER) as program:  # before it is bound: until then nothing comes in
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        sock.bind((link, _IPV4))
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _program(filter_: Iterable[tuple[int, int, int, int]]) -> Iterator[bytes]:
    """As the kernel takes a filter: its length and its address, which holds inside."""
    code = b"".join(struct.pack("=HBBI", *one) for one in filter_)
    held = ctypes.create_string_buffer(code, len(code))
    yield struct.pack("HP", len(code) // 8, ctypes.addressof(held))


class Responder:
    """Answers on one link until it is closed. Made in the loop; takes the socket of `listen`."""

    def __init__(self, sock: socket.socket, lease: Lease) -> None:
        self._socket, self._lease = sock, lease
        self._own: bytes = sock.getsockname()[4]
        self._waiting: asyncio.TimerHandle | None = None
        self.granted = asyncio.Event()  # the guest knows its address
        self._listen()

    def _listen(self) -> None:
        self._waiting = None
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)

    def _readable(self) -> None:
        """A few, then none for a moment: a guest may ask as much as it likes, but not cost as much."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        with contextlib.suppress(OSError):  # none (any more), or the link is gone
            for _ in range(_AT_ONCE):
                reply = answer(self._socket.recv(_FRAME_MAX), self._lease, self._own)
                if reply is not None:
                    self._socket.send(reply.frame)
                    if reply.granted:
                        self.granted.set()
        self._waiting = loop.call_later(_PAUSE_S, self._listen)

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        else:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
