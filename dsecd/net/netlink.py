"""Netlink by hand, for the three things that happen too often for libnftables, which looks at all there is first: an
address that a name was answered with goes into its set, a counter is read, a refused packet comes out of the log.

pyroute2 would be the library for it; its set operations do not work (0.9.7), and one message type needs no library.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct

NETLINK_NETFILTER: Final = 12
_ERROR: Final = 2
_REQUEST, _ACK, _CREATE = 0x1, 0x4, 0x400
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NFTABLES, _ULOG = 10 << 8, 4 << 8
_NEW_ELEMENT, _DELETE_ELEMENT, _GET_OBJECT = _NFTABLES | 12, _NFTABLES | 14, _NFTABLES | 19
_INET: Final = 1  # NFPROTO_INET
_NESTED: Final = 0x8000
_HEADER: Final = struct.Struct("=IHHII")
_GENERIC: Final = struct.Struct("!BBH")
_ATTRIBUTE: Final = struct.Struct("=HH")


class Refused(Struct, frozen=True):
    """One packet that a sandbox was not allowed to send. port 0: neither TCP nor UDP."""

    slot: int
    address: str
    protocol: str
    port: int


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(len(value) + 4, kind) + value + bytes(-len(value) % 4)


def _message(kind: int, flags: int, sequence: int, family: int, resource: int, body: bytes = b"") -> bytes:
    payload = _GENERIC.pack(family, 0, resource) + body
    return _HEADER.pack(_HEADER.size + len(payload), kind, flags, sequence, 0) + payload


def _element(address: str, timeout_s: float | None) -> bytes:
    key = _attribute(1 | _NESTED, _attribute(1, ipaddress.ip_address(address).packed))
    timeout = _attribute(4, struct.pack("!Q", int(timeout_s * 1000))) if timeout_s is not None else b""
    return _attribute(1 | _NESTED, key + timeout)


class Nftables:
    """Addresses into sets, with a time after which they go by themselves, and counters out. One socket, made where the
    table is. An answer comes before a call returns (about 0.1 ms): it waits for nothing but the kernel.
    """

    def __init__(self, table: str) -> None:
        self._table = table.encode() + b"\0"
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._socket.settimeout(2.0)
        self._sequence = 0

    def close(self) -> None:
        self._socket.close()

    def put(self, elements: Iterable[tuple[str, str]], timeout_s: float) -> None:
        """(set, address) pairs. Those that are there get the new time. OSError when it could not be done.

        Added, taken away and added again: before Linux 6.12 the time of one that is there cannot be changed, and one
        that is not there cannot be taken away.
        """
        messages = []
        for name, address in elements:
            for kind, timeout in ((_NEW_ELEMENT, timeout_s), (_DELETE_ELEMENT, None), (_NEW_ELEMENT, timeout_s)):
                body = (
                    _attribute(1, self._table)
                    + _attribute(2, name.encode() + b"\0")
                    + _attribute(3 | _NESTED, _element(address, timeout))
                )
                flags = _REQUEST | _ACK | (_CREATE if kind == _NEW_ELEMENT else 0)
                messages.append((kind, flags, body))
        self._transact(messages)

    def counter(self, name: str) -> tuple[int, int]:
        """Bytes and packets; zeros when there is none of that name. `nft list counters` reads all there is first."""
        body = _attribute(1, self._table) + _attribute(2, name.encode() + b"\0") + _attribute(3, struct.pack("!I", 1))
        self._sequence = (self._sequence + 1) & 0x7FFF_FFFF
        self._socket.send(_message(_GET_OBJECT, _REQUEST, self._sequence, _INET, 0, body))
        while True:
            data = self._socket.recv(1 << 16)
            size, kind, _flags, sequence, _port = _HEADER.unpack_from(data)
            if sequence != self._sequence:
                continue  # of a call that was given up
            if kind == _ERROR:
                return 0, 0
            found = dict(_attributes(data[_HEADER.size + _GENERIC.size : size]))
            values = dict(_attributes(found.get(4, b"")))
            return int.from_bytes(values.get(1, b""), "big"), int.from_bytes(values.get(2, b""), "big")

    def _transact(self, messages: list[tuple[int, int, bytes]]) -> None:
        first = self._sequence = (self._sequence + 1) & 0x7FFF_FFFF
        batch = [_message(_BATCH_BEGIN, _REQUEST, first, 0, _NFTABLES >> 8)]
        for kind, flags, body in messages:
            self._sequence += 1
            batch.append(_message(kind, flags, self._sequence, _INET, 0, body))
        self._sequence += 1
        batch.append(_message(_BATCH_END, _REQUEST, self._sequence, 0, _NFTABLES >> 8))
        self._socket.send(b"".join(batch))
        waiting, failed = len(messages), 0
        while waiting:
            for sequence, number in _acknowledgements(self._socket.recv(1 << 16)):
                if sequence == first:  # the batch as a whole
                    raise OSError(number, f"nftables: {os.strerror(number)}")
                if first < sequence <= self._sequence:
                    waiting -= 1
                    failed = failed or number
        if failed:
            raise OSError(failed, f"nftables: {os.strerror(failed)}")


def _acknowledgements(data: bytes) -> Iterator[tuple[int, int]]:
    """(sequence number, errno)."""
    at = 0
    while at + _HEADER.size + 4 <= len(data):
        size, kind, _flags, sequence, _port = _HEADER.unpack_from(data, at)
        if kind == _ERROR:
            yield sequence, -struct.unpack_from("=i", data, at + _HEADER.size)[0]
        at += max(_HEADER.size, size + 3 & ~3)


class RefusalLog:
    """What the packet filter says it refused: a socket to be read when it is readable."""

    def __init__(self, group: int) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, NETLINK_NETFILTER
        )
        self._socket.bind((0, 0))
        # NFULNL_CFG_CMD_BIND, then copy the first 64 bytes of each packet: both headers.
        self._configure(group, _attribute(1, b"\x01"))
        self._configure(group, _attribute(2, struct.pack("!IBB", 64, 2, 0)))
        self._configure(group, _attribute(4, struct.pack("!I", 10)))  # hundredths of a second that one waits for more

    def _configure(self, group: int, body: bytes) -> None:
        self._socket.send(_message(_ULOG | 1, _REQUEST, 0, 0, group, body))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def read(self) -> list[Refused]:
        """What has come; at most one buffer of it. What was lost is counted by the filter anyway."""
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as exc:
            if exc.errno == errno.ENOBUFS:
                return []
            raise
        found = []
        at = 0
        while at + _HEADER.size <= len(data):
            size, kind = _HEADER.unpack_from(data, at)[:2]
            if kind == _ULOG:
                attributes = dict(_attributes(data[at + _HEADER.size + _GENERIC.size : at + size]))
                if (one := _refused(attributes.get(10, b""), attributes.get(9, b""))) is not None:
                    found.append(one)
            at += max(_HEADER.size, size + 3 & ~3)
        return found


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        yield kind & 0x3FFF, data[at + 4 : at + size]
        at += max(4, size + 3 & ~3)


def _refused(prefix: bytes, packet: bytes) -> Refused | None:
    """From our prefix (the slot) and the packet's beginning, which is the tenant's: nothing in it is believed but
    numbers of fixed places."""
    slot = prefix.rstrip(b"\0").decode("ascii", "replace")
    if not slot.isdecimal() or not packet:
        return None
    if packet[0] >> 4 == 4 and len(packet) >= 20:
        protocol, rest = packet[9], packet[(packet[0] & 15) * 4 :]
        address = str(ipaddress.IPv4Address(packet[16:20]))
    elif packet[0] >> 4 == 6 and len(packet) >= 40:
        protocol, rest = packet[6], packet[40:]
        address = str(ipaddress.IPv6Address(packet[24:40]))
    else:
        return None
    name = {6: "tcp", 17: "udp", 1: "icmp", 58: "icmp"}.get(protocol, f"protocol {protocol}")
    port = int.from_bytes(rest[2:4], "big") if protocol in (6, 17) and len(rest) >= 4 else 0
    return Refused(int(slot), address, name, port)
