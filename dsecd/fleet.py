"""dsec-fleet: the API of one host over many. It keeps nothing: kill it, start it, run two.

A client's connection (`Front`) has one connection of its own to each host it uses, on which its requests keep their
ids; so what belongs to a sandbox (whose id names its host) is passed on as it came, streams and all, and answers come
back as they are. Only what concerns several hosts is looked into: creates are placed (dsecd.placement), lists merged.

A create with a request_id may be asked for again after this process died, so its hosts are drawn by a hash of the
key: it is looked for where the first one looked for room.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from dsecd import __version__, fleet_tenants, notify
from dsecd.errors import DsecError
from dsecd.fleet_front import Asked, Front
from dsecd.fleet_merge import follow, good, summed
from dsecd.fleet_metrics import RETRIES, Metrics
from dsecd.fleet_watch import Watch
from dsecd.fleethosts import Host, Inventory, want_of
from dsecd.logs import set_up
from dsecd.placement import View, Want, by_key, lacks, place
from dsecd.spans import spent
from dsecd.wire import base, daemon, fncall, jobs, sandbox
from dsecd.wire.methods import METHODS
from dsecd.wire.server import bound

log = logging.getLogger("dsecd.fleet")

T = TypeVar("T")
ELSEWHERE: Final = ("capacity", "shutting_down", "network")  # of one host: another one may have it
TRIES: Final = 8
KEYED: Final = 256  # of one create_many with a key, at once: each is looked for on several hosts
ID_LENGTH: Final = 26  # of an id, behind its host's tag
UNKNOWN_KEPT: Final = 10_000
INVENTORY: Final = Path("/etc/dsecd/fleet.toml")
SOCKET: Final = Path("/run/dsecd/fleet.sock")
REFRESH_S: Final = 30.0


class Fleet:
    """All hosts, and where things go."""

    def __init__(self, inventory: Inventory, seed: int | None = None) -> None:
        self.inventory = inventory
        self.chance = random.Random(seed)
        self.fronts: set[Front] = set()
        self.placed = self.refused = 0
        self._unknown: dict[str, str] = {}  # keys of creates that a host was lost with
        self.watch = Watch(self)
        self.methods: dict[str, Callable[..., Awaitable[Any]]] = fleet_tenants.methods(self) | self.watch.methods | {
            "daemon.hello": self._hello, "daemon.info": self._info, "daemon.stats": self._stats,
            "sandbox.create": self._create, "sandbox.create_many": self._create_many, "sandbox.list": self._list,
            "sandbox.stop_many": self._stop_many, "sandbox.events": self._events, "lease.renew": self._renew,
            "job.list": self._jobs, "job.pause": self._job, "job.resume": self._job, "job.stop": self._job,
            "fncall.run": self._call,
        }  # fmt: skip

    @property
    def hosts(self) -> dict[str, Host]:
        return self.inventory.hosts

    def known(self, ident: str) -> Host | None:
        """The host of a sandbox, by the tag its id begins with (no two have the same)."""
        tag = ident.rpartition("-")[0]
        return next((host for host in self.hosts.values() if host.tag == tag), None) if tag else None

    async def find(self, ident: str) -> Host:
        """As `known`; of a name, the host that knows it. `sandbox_dead` when that host is away, or may be."""
        host = self.known(ident)
        if host is None:
            answers = await self.ask_all("sandbox.get", sandbox.ById(id=ident))
            host = next((one for one, found in answers.items() if isinstance(found, sandbox.Sandbox)), None)
        if host is None:
            named = len(ident.rpartition("-")[2]) != ID_LENGTH
            for one in self.hosts.values():  # away, and its tag is not known, or it is a name: it may be there
                if one.problem and (named or not one.tag):
                    text = f"no host that answers has sandbox {ident[:80]!r}; {one.name} may: {one.problem}"
                    raise DsecError("sandbox_dead", text, sandbox_id=ident[:200])
            raise DsecError("not_found", f"no host of this fleet has a sandbox {ident[:80]!r}")
        if host.problem:
            text = f"host {host.name}, which has sandbox {ident[:80]}, cannot be reached: {host.problem}"
            raise DsecError("sandbox_dead", text, sandbox_id=ident)
        return host

    def up(self) -> list[Host]:
        return [host for host in self.hosts.values() if not host.problem]

    async def ask_all(self, method: str, params: base.Params) -> dict[Host, Any]:
        """One call to every host that is up; an error is an answer, too. Whoever only reads has a deadline."""
        changes = METHODS[method].once or method.startswith("job.")

        async def ask(host: Host) -> Any:
            try:
                return await (host.call if changes else host.question)(method, params)
            except DsecError as exc:
                return exc

        hosts = self.up()
        return dict(zip(hosts, await asyncio.gather(*map(ask, hosts)), strict=True))

    # -- placing ------------------------------------------------------------------------------------------------------
    async def placed_by(self, want: Want, key: str | None, send: Callable[[Host], Awaitable[T]]) -> T:
        """Have it done by a host that has room. `send` asks one host; `capacity` of it means the next one."""
        if key is not None:
            host = await spent("look for its key", "fleet", self._made_before(key, want))
            if host is not None:
                return await self._sent(host, key, send)
        tried: set[str] = set()
        refusal: DsecError | None = None
        while len(tried) < TRIES:
            (chosen,) = place(self._views(key, tried, want), [want], self.inventory.policy, self.chance, tried)
            if isinstance(chosen, DsecError):
                self.refused += 1
                raise refusal or chosen
            host = self.hosts[chosen.name]
            try:
                result = await self._sent(host, key, send)
            except BaseException as exc:
                chosen.lay(want, -1)
                if not isinstance(exc, DsecError) or exc.kind not in ELSEWHERE:
                    raise
                tried.add(host.name)
                RETRIES.add(1, exc.kind)
                refusal = exc
                continue
            host.settled(want)
            self.placed += 1
            return result
        raise refusal or DsecError("capacity", f"{TRIES} hosts had no room")

    async def _sent(self, host: Host, key: str | None, send: Callable[[Host], Awaitable[T]]) -> T:
        try:
            return await send(host)
        except DsecError as exc:
            if key is not None and exc.kind == "outcome_unknown":
                self._unknown[key] = host.name
                if len(self._unknown) > UNKNOWN_KEPT:
                    del self._unknown[next(iter(self._unknown))]
            raise

    async def _create(self, asked: Asked, params: sandbox.Create) -> Any:
        want = want_of(params.spec)
        return await self.placed_by(want, params.request_id, asked.of)

    async def _call(self, asked: Asked, params: fncall.Run) -> Any:
        want = Want(backend="auto", images=(params.image,) if params.image else (), memory_mb=params.limits.memory_mb)
        return await self.placed_by(want, None, asked.of)

    async def _create_many(self, _asked: Asked, params: sandbox.CreateMany) -> sandbox.Created:
        """Spread over the hosts in one go, a result for each in order; what one host refuses goes to others."""
        specs = params.expanded()
        results: list[sandbox.CreateOne] = [sandbox.CreateOne()] * len(specs)
        if params.request_id is not None:  # each by a key of its own, so that each is found again
            keys = [f"{params.request_id}/{n}" for n in range(len(specs))]
            few = asyncio.Semaphore(KEYED)
            return sandbox.Created(
                results=await asyncio.gather(*(self._one(*one, few) for one in zip(specs, keys, strict=True)))
            )
        left, tried = list(range(len(specs))), set[str]()
        while left and len(tried) < TRIES:
            wants = [want_of(specs[n]) for n in left]
            views = [host.view for host in self.hosts.values()]
            chosen = place(views, wants, self.inventory.policy, self.chance, tried)
            parts: dict[Host, list[tuple[int, Want]]] = {}
            for n, want, view in zip(left, wants, chosen, strict=True):
                if isinstance(view, View):
                    parts.setdefault(self.hosts[view.name], []).append((n, want))
                elif results[n].error is None:  # else: what a host said of it stays
                    self.refused += 1
                    results[n] = sandbox.CreateOne(error=sandbox.Failed.of(view))
            answers = await asyncio.gather(
                *(self._part(host, [specs[n] for n, _ in part]) for host, part in parts.items())
            )
            left = []
            for (host, part), answer in zip(parts.items(), answers, strict=True):
                for (n, want), one in zip(part, answer, strict=True):
                    results[n] = one
                    if one.error is None:
                        host.settled(want)
                        self.placed += 1
                        continue
                    host.view.lay(want, -1)
                    if one.error.kind in ELSEWHERE:
                        left.append(n)
                        tried.add(host.name)
                        RETRIES.add(1, one.error.kind)
        return sandbox.Created(results=results)

    async def _one(self, spec: sandbox.Spec, key: str, few: asyncio.Semaphore) -> sandbox.CreateOne:
        params = sandbox.Create(spec=spec, request_id=key)
        try:
            async with few:
                made = await self.placed_by(want_of(spec), key, lambda host: host.call("sandbox.create", params))
            return sandbox.CreateOne(sandbox=made)
        except DsecError as exc:
            return sandbox.CreateOne(error=sandbox.Failed.of(exc))

    @staticmethod
    async def _part(host: Host, specs: list[sandbox.Spec]) -> list[sandbox.CreateOne]:
        try:
            made: sandbox.Created = await host.call("sandbox.create_many", sandbox.CreateMany(specs=specs))
            if len(made.results) != len(specs):
                raise DsecError("internal", f"host {host.name} was asked for {len(specs)} and told of another number")
            return made.results
        except DsecError as exc:
            return [sandbox.CreateOne(error=sandbox.Failed.of(exc))] * len(specs)

    def _views(self, key: str | None, tried: set[str], want: Want) -> list[View]:
        """Of all hosts; for a key, of the one that its order says."""
        if key is None:
            return [host.view for host in self.hosts.values()]
        ranked = [host.view for host in _ranked(key, self.hosts.values()) if host.name not in tried]
        return by_key(ranked, want, self.inventory.policy)

    async def _made_before(self, key: str, want: Want) -> Host | None:
        """The host that was asked with this key before, among those that would have been asked first. While one is
        away that was lost in the middle of it, nobody knows."""
        params = sandbox.List(request=key)
        if (lost := self.hosts.get(self._unknown.get(key, ""))) is not None:
            try:
                found: sandbox.Sandboxes = await lost.question("sandbox.list", params)
            except DsecError as exc:
                text = f"host {lost.name}, which was asked for this, cannot be reached: ask again when it is back"
                raise DsecError("outcome_unknown", text) from exc
            self._unknown.pop(key, None)
            if found.sandboxes:
                return lost
        able = [host for host in self.up() if not lacks(host.view, want)]
        likely = _ranked(key, able)[: 2 * self.inventory.policy.draws]
        answers = await asyncio.gather(
            *(host.question("sandbox.list", params) for host in likely), return_exceptions=True
        )
        for host, answer in zip(likely, answers, strict=True):
            if isinstance(answer, sandbox.Sandboxes) and answer.sandboxes:
                return host
        return None

    # -- all hosts at once --------------------------------------------------------------------------------------------
    async def _list(self, _asked: Asked, params: sandbox.List) -> sandbox.Sandboxes:
        answers = await self.ask_all("sandbox.list", params)
        found = [
            one for answer in answers.values() if isinstance(answer, sandbox.Sandboxes) for one in answer.sandboxes
        ]
        silent = [host.name for host in self.hosts.values() if host.problem]
        silent += [host.name for host, answer in answers.items() if isinstance(answer, DsecError)]
        return sandbox.Sandboxes(sandboxes=found, missing=sorted(silent))

    async def _stop_many(self, _asked: Asked, params: sandbox.StopMany) -> sandbox.StoppedMany:
        answers = await self.ask_all("sandbox.stop_many", params)
        return sandbox.StoppedMany(stopped=sum(one.stopped for one in good(answers)))

    async def _renew(self, _asked: Asked, params: sandbox.Renew) -> sandbox.Renewed:
        by_host: dict[Host, list[str]] = {}
        gone = []
        for ident in params.ids:
            host = self.known(ident)
            if host is None:
                gone += [ident] if all(one.tag for one in self.hosts.values()) else []
            elif not host.problem:  # else it cannot be known
                by_host.setdefault(host, []).append(ident)
        answers = await asyncio.gather(
            *(host.call("lease.renew", sandbox.Renew(ids=ids)) for host, ids in by_host.items()), return_exceptions=True
        )
        return sandbox.Renewed(
            gone=gone + [one for got in answers if isinstance(got, sandbox.Renewed) for one in got.gone]
        )

    async def _events(self, asked: Asked, params: sandbox.Events) -> base.Empty:
        """Those of all hosts, of whoever comes or comes back, too; numbered anew."""
        numbers = itertools.count(1)

        def send(event: sandbox.Event) -> None:
            event.sub, event.seq = asked.ident, next(numbers)
            asked.front.send(base.Notification("2.0", "sandbox.event", event))

        await follow(self.up, params, send)
        return base.Empty()

    async def _jobs(self, _asked: Asked, params: jobs.ListJobs) -> jobs.Jobs:
        return jobs.Jobs(
            jobs=jobs.merged(job for one in good(await self.ask_all("job.list", params)) for job in one.jobs)
        )

    async def _job(self, asked: Asked, params: jobs.ByJob) -> jobs.JobDone:
        answers = await self.ask_all(asked.method, params)
        return jobs.JobDone(job=params.job, results=[one for answer in good(answers) for one in answer.results])

    # -- the fleet itself ---------------------------------------------------------------------------------------------
    async def _hello(self, _asked: Asked, params: daemon.Hello) -> daemon.Welcome:
        if params.protocol < base.PROTOCOL:
            raise DsecError("unsupported", f"this fleet speaks protocol {base.PROTOCOL}, the client {params.protocol}")
        return daemon.Welcome(
            protocol=base.PROTOCOL, version=__version__, host="fleet", uid=os.getuid(), pid=os.getpid()
        )

    async def _info(self, _asked: Asked, params: daemon.InfoParams) -> daemon.Info:
        found: list[daemon.Info] = good(await self.ask_all("daemon.info", params))
        worst = {name: max(one.waits.get(name, 0.0) for one in found) for one in found for name in one.waits}
        full = all(one.cordoned for one in found)
        return summed(found, version=__version__, host="fleet", waits=worst, cordoned=full, pressure="")

    async def _stats(self, _asked: Asked, params: daemon.StatsParams) -> daemon.Counters:
        found: list[daemon.Counters] = good(await self.ask_all("daemon.stats", params))
        return summed(found)


def _ranked(key: str, hosts: Iterable[Host]) -> list[Host]:
    """Hosts in the order that belongs to a key, whatever their load: rendezvous hashing."""
    return sorted(hosts, key=lambda host: hashlib.sha256(f"{key}\0{host.name}".encode()).digest())


# -- the process ------------------------------------------------------------------------------------------------------
async def serve(source: Path, path: Path, metrics_path: Path) -> None:
    """Until SIGTERM."""
    inventory = Inventory(source)
    fleet = Fleet(inventory)
    await inventory.refresh()
    await inventory.known()
    loop = asyncio.get_running_loop()
    stop, again = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, again.set)
    with contextlib.ExitStack() as stack:
        # Why not create_unix_server, wire/server.py says.
        server = await loop.create_server(lambda: Front(fleet), sock=_listener(stack, path), backlog=1024)
        metrics = Metrics(fleet, metrics_path)
        await metrics.open()
        notify.ready(f"{len(inventory.hosts)} hosts")
        stopping = asyncio.ensure_future(stop.wait())
        while not stop.is_set():
            waits = (stopping, asyncio.ensure_future(again.wait()))
            await asyncio.wait(waits, timeout=REFRESH_S, return_when=asyncio.FIRST_COMPLETED)
            waits[1].cancel()
            again.clear()
            try:
                await inventory.refresh()
            except DsecError as exc:
                log.error("%s; the hosts stay as they were", exc.message)
        notify.stopping()
        server.close()
        await metrics.close()
        for front in list(fleet.fronts):
            front.drop()
        await inventory.close()


def _listener(stack: contextlib.ExitStack, path: Path) -> socket.socket:
    inherited = notify.listen_fd()
    if inherited is not None:
        return stack.enter_context(socket.socket(fileno=inherited))
    path.unlink(missing_ok=True)
    sock = stack.enter_context(bound(path, 0o117))
    stack.callback(path.unlink, missing_ok=True)
    return sock


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 stopped as asked, 1 could not start, 2 bad command line."""
    parser = argparse.ArgumentParser(prog="dsec-fleet", description="One API over many dsecd hosts.")
    parser.add_argument(
        "-i", "--inventory", type=Path, default=INVENTORY, help=f"TOML, or a program (default {INVENTORY})"
    )
    parser.add_argument("-s", "--socket", type=Path, default=SOCKET, help=f"where to listen (default {SOCKET})")
    parser.add_argument(
        "-m", "--metrics", type=Path, help="socket that answers HTTP with metrics (default: as --socket, -metrics.sock)"
    )
    parser.add_argument("--version", action="version", version=f"dsec-fleet {__version__}")
    args = parser.parse_args(argv)
    set_up("info")
    try:
        metrics = args.metrics or args.socket.with_name(f"{args.socket.stem}-metrics.sock")
        asyncio.run(serve(args.inventory, args.socket, metrics))
    except DsecError as exc:
        sys.stderr.write(f"dsec-fleet: {exc.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
