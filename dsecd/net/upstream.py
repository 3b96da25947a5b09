"""Asks the resolvers of the host, on behalf of sandboxes. From a fresh port with a fresh number each time."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Final

import dns.asyncquery
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rdataclass
import dns.rdatatype
import dns.rrset
from msgspec import Struct

from dsecd.networkconfig import resolver

TRY_S: Final = 2.0
TRIES: Final = 2  # of each resolver
CHAIN_MAX: Final = 8  # aliases on the way to an address
ADDRESSES_MAX: Final = 32
TTL_MAX: Final = 3600
CACHED: Final = 4096
LOST_S: Final = 5.0  # how long an answer that says nothing is kept
_RESOLV_CONF: Final = Path("/etc/resolv.conf")


class Answer(Struct, frozen=True):
    """rcode, the aliases and addresses as they came (fewer records, if there are many), and until when it holds."""

    rcode: int
    rrsets: tuple[dns.rrset.RRset, ...]
    addresses: tuple[str, ...]
    ttl: int
    expires: float


class Upstream:
    """Answers are kept for as long as they say, for all sandboxes together; one question at a time goes out."""

    def __init__(self, configured: list[str]) -> None:
        self._servers = [found for one in configured if (found := resolver(one)) is not None]
        self._cache: dict[tuple[str, int], Answer] = {}
        self._asking: dict[tuple[str, int], asyncio.Task[Answer | None]] = {}
        self.queries = 0

    async def ask(self, name: str, kind: int) -> Answer | None:
        """The answer to a question for A or AAAA; None when no resolver gave one."""
        key = (name, kind)
        known = self._cache.get(key)
        if known is not None and known.expires > time.monotonic():
            return known
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.get_running_loop().create_task(self._fetch(key))
            task.add_done_callback(lambda _task: self._asking.pop(key, None))
        return await asyncio.shield(task)

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, key: tuple[str, int]) -> Answer | None:
        name, kind = key
        for server, port in self.servers() * TRIES:
            query = dns.message.make_query(name, dns.rdatatype.RdataType(kind), use_edns=0, payload=1232)
            self.queries += 1
            try:
                reply, _tcp = await dns.asyncquery.udp_with_fallback(query, server, TRY_S, port, ignore_unexpected=True)
            except (dns.exception.DNSException, OSError, EOFError, ValueError):
                continue
            if reply.rcode() in (0, 3):  # there is one, or there is none; another server may do better than the rest
                return self._keep(key, reply)
        return None

    def servers(self) -> list[tuple[str, int]]:
        """Those of the configuration, else the host's as they are now."""
        if self._servers:
            return self._servers
        found = []
        try:
            text = _RESOLV_CONF.read_text(errors="replace")
        except OSError:
            return []
        for line in text.splitlines():
            words = line.split()
            if len(words) >= 2 and words[0] == "nameserver" and (one := resolver(words[1])) is not None:
                found.append(one)
        return found[:3]

    def _keep(self, key: tuple[str, int], reply: dns.message.Message) -> Answer:
        rrsets, addresses = follow(reply, key[0], key[1])
        ttl = min([TTL_MAX, *(one.ttl for one in rrsets)]) if addresses else 0
        answer = Answer(reply.rcode(), rrsets, addresses, ttl, time.monotonic() + max(ttl, 1 if addresses else LOST_S))
        if len(self._cache) >= CACHED:
            for old in random.sample(list(self._cache), CACHED // 8):
                del self._cache[old]
        self._cache[key] = answer
        return answer


def follow(reply: dns.message.Message, name: str, kind: int) -> tuple[tuple[dns.rrset.RRset, ...], tuple[str, ...]]:
    """The records that lead from `name` to addresses, and those. Whatever else an answer has is left out."""
    found: list[dns.rrset.RRset] = []
    at = dns.name.from_text(name)
    for _ in range(CHAIN_MAX):
        addresses = reply.get_rrset(reply.answer, at, dns.rdataclass.IN, dns.rdatatype.RdataType(kind))
        if addresses is not None:
            kept = dns.rrset.from_rdata_list(at, addresses.ttl, list(addresses)[:ADDRESSES_MAX])
            return (*found, kept), tuple(rdata.address for rdata in kept)
        alias = reply.get_rrset(reply.answer, at, dns.rdataclass.IN, dns.rdatatype.CNAME)
        if alias is None:
            break
        found.append(alias)
        at = alias[0].target
    return tuple(found), ()
