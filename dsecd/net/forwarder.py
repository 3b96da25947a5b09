"""The DNS server of all sandboxes: answers names that their rules allow, and opens the addresses before it does.

One address, one socket: who asks is told by the source address, which the packet filter holds to the link. A name that
no rule allows is refused here, and no query for it leaves the host. dnspython reads and writes the messages.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Final, Protocol

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from dsecd.net.rules import Grant
from dsecd.net.upstream import Answer, Upstream

log = logging.getLogger("dsecd.net")

QUERY_MAX: Final = 512
EACH_MAX: Final = 32  # questions of one sandbox at once; more are dropped, and asked again
ALL_MAX: Final = 1024
STREAM_S: Final = 5.0
STREAMS_EACH, STREAMS_ALL, STREAM_QUESTIONS = 4, 128, 16
_ASKED: Final = {dns.rdatatype.A: 4, dns.rdatatype.AAAA: 6}
_HEADER: Final = struct.Struct("!HHHHHH")


class Asker(Protocol):
    """What the forwarder needs to know of a sandbox."""

    def for_name(self, name: str) -> tuple[Grant, ...]: ...

    def refused(self, what: str) -> None: ...

    def learn(self, grants: tuple[Grant, ...], addresses: list[str], ttl: int) -> None:
        """Open these addresses for these rules, for at least that many seconds. OSError when that cannot be done."""

    def versions(self) -> tuple[int, ...]: ...


class Forwarder:
    """who: the sandbox of a source address. answerable: whether a name may lead to an address at all."""

    def __init__(
        self, upstream: Upstream, who: Callable[[str], Asker | None], answerable: Callable[[str], bool]
    ) -> None:
        self._upstream, self._who, self._answerable = upstream, who, answerable
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: dict[str, int] = {}
        self._streams: dict[str, int] = {}
        self._datagrams: asyncio.DatagramTransport | None = None
        self._listener: asyncio.Server | None = None

    async def serve(self, datagrams: socket.socket, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._datagrams, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self._received), sock=datagrams)
        self._listener = await asyncio.start_server(self._stream, sock=listener, limit=2 * QUERY_MAX)

    async def close(self) -> None:
        if self._datagrams is not None:
            self._datagrams.abort()
        if self._listener is not None:
            self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- from where ---------------------------------------------------------------------------------------------------
    def _received(self, data: bytes, source: tuple[str, int]) -> None:
        address = source[0]
        if self._busy.get(address, 0) >= EACH_MAX or len(self._tasks) >= ALL_MAX:
            return

        async def work() -> None:
            reply = await self.answer(data, address, QUERY_MAX)
            if reply and self._datagrams is not None and not self._datagrams.is_closing():
                self._datagrams.sendto(reply, source)

        self._busy[address] = self._busy.get(address, 0) + 1
        self._track(work(), address)

    def _track(self, work: object, address: str) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]

        def over(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            _less(self._busy, address)
            if not done.cancelled() and (exc := done.exception()) is not None:
                log.error("a DNS question was not answered: %r", exc)

        self._tasks.add(task)
        task.add_done_callback(over)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What did not fit a datagram; glibc asks for both families on one connection."""
        address = writer.get_extra_info("peername")[0]
        try:
            if self._streams.get(address, 0) >= STREAMS_EACH or sum(self._streams.values()) >= STREAMS_ALL:
                return
            self._streams[address] = self._streams.get(address, 0) + 1
            try:
                async with asyncio.timeout(STREAM_S):
                    for _ in range(STREAM_QUESTIONS):
                        size = int.from_bytes(await reader.readexactly(2), "big")
                        reply = await self.answer(await reader.readexactly(min(size, QUERY_MAX)), address, 65535)
                        if not reply:
                            return
                        writer.write(len(reply).to_bytes(2, "big") + reply)
                        await writer.drain()
            finally:
                _less(self._streams, address)
        except (OSError, EOFError, TimeoutError):
            return
        finally:
            writer.close()

    # -- what ---------------------------------------------------------------------------------------------------------
    async def answer(self, data: bytes, source: str, room: int) -> bytes:
        """The reply, or nothing for what is no question. room: without EDNS, the most that the asker takes."""
        asker = self._who(source)
        query = _parsed(data)
        if asker is None or query is None:
            return b""
        question = query.question[0]
        reply = dns.message.make_response(query, recursion_available=True)
        name = question.name.to_text(omit_final_dot=True).lower()
        grants = asker.for_name(name)
        if not grants or question.rdclass != dns.rdataclass.IN:
            asker.refused(f"name {name[:253]}")
            reply.set_rcode(dns.rcode.REFUSED)
        elif _ASKED.get(question.rdtype) in asker.versions():
            found = await self._upstream.ask(name, question.rdtype)
            self._fill(reply, found, asker, name)
        # Other types of an allowed name: it has none.
        return _written(reply, max(room, min(query.payload, 1232)))

    def _fill(self, reply: dns.message.Message, found: Answer | None, asker: Asker, name: str) -> None:
        """Addresses are opened first, so that whoever reads the reply can connect."""
        if found is None:
            reply.set_rcode(dns.rcode.SERVFAIL)
            return
        reply.set_rcode(dns.rcode.Rcode(found.rcode))
        good = [address for address in found.addresses if self._answerable(address)]
        if len(good) < len(found.addresses):
            bad = next(address for address in found.addresses if address not in good)
            asker.refused(f"name {name} leads to {bad}, which is never reachable or private")
            if not good:
                reply.set_rcode(dns.rcode.REFUSED)
                return
        # Once more: its rules may be others since it asked.
        grants = asker.for_name(name)
        if not grants:
            reply.set_rcode(dns.rcode.REFUSED)
            return
        if good:
            try:
                asker.learn(grants, good, found.ttl)
            except OSError as exc:
                asker.refused(f"name {name}, whose addresses could not be opened: {exc.strerror or exc}")
                reply.set_rcode(dns.rcode.SERVFAIL)
                return
        for rrset in found.rrsets:
            if rrset.rdtype in _ASKED:
                kept = [rdata for rdata in rrset if rdata.address in good]
                reply.answer.append(dns.rrset.from_rdata_list(rrset.name, found.ttl, kept))
            else:
                reply.answer.append(dns.rrset.from_rdata_list(rrset.name, min(rrset.ttl, found.ttl), list(rrset)[:1]))


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, received: Callable[[bytes, tuple[str, int]], None]) -> None:
        self._received = received

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if len(data) <= QUERY_MAX:
            self._received(data, addr)


def _parsed(data: bytes) -> dns.message.Message | None:
    """A query with one question, read strictly."""
    if len(data) < _HEADER.size:
        return None
    _, flags, questions, answers, authorities, more = _HEADER.unpack_from(data)
    if flags & 0xF800 or questions != 1 or answers or authorities or more > 1:
        return None
    try:
        return dns.message.from_wire(data)
    except (dns.exception.DNSException, ValueError, struct.error, IndexError):
        return None


def _written(reply: dns.message.Message, room: int) -> bytes:
    """What does not fit is left out and said so: the asker comes again by TCP."""
    try:
        return reply.to_wire(max_size=room)
    except dns.exception.TooBig:
        reply.answer.clear()
        reply.flags |= dns.flags.TC
        return reply.to_wire(max_size=room)


def _less(counts: dict[str, int], key: str) -> None:
    left = counts.get(key, 0) - 1
    if left > 0:
        counts[key] = left
    else:
        counts.pop(key, None)
