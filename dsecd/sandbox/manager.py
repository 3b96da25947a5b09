"""The owner of all sandboxes of this host: create, find, stop, expire, take back.

Every change of state goes through `_move`, which keeps to the table in states.py, tells listeners, and is written to
the registry before anybody is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from dsecd import proc
from dsecd.devices.model import Bind
from dsecd.devices.pools import wanted
from dsecd.erofs.compose import Stack, compose
from dsecd.erofs.model import ImageConfig
from dsecd.errors import DsecError, kind_of_errno
from dsecd.sandbox import choose, expiry, figures
from dsecd.sandbox import record as records
from dsecd.sandbox.accounts import check_account
from dsecd.sandbox.admission import Admission
from dsecd.sandbox.deadlines import Deadlines
from dsecd.sandbox.events import Events
from dsecd.sandbox.facts import Facts
from dsecd.sandbox.ids import ID, new_id
from dsecd.sandbox.live import Live, Rooms
from dsecd.sandbox.pausing import Pausing
from dsecd.sandbox.record import Record, now
from dsecd.sandbox.states import ENDED, LIVE, move
from dsecd.sandbox.store import Store
from dsecd.vmm.backend import Vm
from dsecd.vmm.fullvm import FullVm
from dsecd.wire import sandbox as wire
from dsecd.wire.access import ROOT, within
from dsecd.wire.execs import Ran

log = logging.getLogger("dsecd.sandbox")

KEEP_ENDED: Final = 10_000  # records of ended sandboxes that `get` still knows


class Manager:
    """One per daemon. Live sandboxes are in memory with their resources; ended ones as records only."""

    def __init__(self, tag: str, rooms: Rooms, store: Store, admission: Admission) -> None:
        self.tag = tag
        self.rooms = rooms
        self.store = store
        self.admission = admission
        self.trajectory = rooms.recorder.trajectories
        self.facts = Facts(rooms.vms, rooms.images)
        self.events = Events()
        self.boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._live: dict[str, Live] = {}
        self._ended: dict[str, Record] = {}
        self._names: dict[str, str] = {}
        self._deadlines = Deadlines(self._due)
        self.pausing = Pausing(self)
        self._tasks: set[asyncio.Task[None]] = set()
        self.closing = False
        self.created = self.failed = self.stopped = 0

    # -- finding ------------------------------------------------------------------------------------------------------
    def record(self, ident: str) -> Record:
        """By id or name, ended ones by id too; `not_found`."""
        live = self._live.get(ident) or self._live.get(self._names.get(ident, ""))
        if live is not None:
            return live.record
        record = self._ended.get(ident)
        if record is None:
            raise DsecError("not_found", f"no sandbox {ident[:80]!r}")
        return record

    def present(self, ident: str) -> tuple[Record, Live | None]:
        """Its record; and what it is made of, when it has been built and is not over."""
        record = self.record(ident)
        live = self._live.get(record.id)
        return record, live if live is not None and live.body is not None else None

    def public(self, record: Record) -> wire.Sandbox:
        live = self._live.get(record.id)
        return records.public(record, live.busy if live and live.body else 0)

    def all(
        self, states: Iterable[str], labels: dict[str, str], uid: int | None, job: str | None = None,
        project: str = ROOT,
    ) -> list[Record]:  # fmt: skip
        wanted = set(states) or LIVE
        pool = [live.record for live in self._live.values()]
        if wanted & ENDED:
            pool += self._ended.values()
        return [
            r for r in pool
            if r.state in wanted and r.matches(labels) and (uid is None or r.owner.uid == uid)
            and (job is None or r.spec.job == job) and within(r.owner.project, project)
        ]  # fmt: skip

    async def running(self, ident: str) -> Live:
        """A sandbox that can take a request now; resumes a paused one first. Counts as use."""
        record = self.record(ident)
        live = self._live.get(record.id)
        if live is not None and record.state in ("paused", "pausing", "resuming"):
            await self.pausing.resume(record.id)
        if live is None or record.state in ENDED or record.state == "stopping":
            said = f": {record.reason}" if record.reason else ""
            raise DsecError("sandbox_dead", f"sandbox {record.id} is {record.state}{said}", sandbox_id=record.id)
        if record.state == "creating":
            await self.wait(record.id, {"running", *ENDED})
            return await self.running(record.id)
        record.idle_since = now()
        return live

    def standing(self, ident: str) -> Live:
        """One that runs or is paused, as it is: nothing is resumed, and it does not count as use. `sandbox_dead`."""
        record, live = self.present(ident)
        if live is None:
            raise DsecError("sandbox_dead", f"sandbox {record.id} is {record.state}", sandbox_id=record.id)
        return live

    async def answering(self, ident: str) -> Live:
        """`running`, for a request to its agent. That of a full VM may be starting anew: it is waited for."""
        live = await self.running(ident)
        if isinstance(live.body, FullVm):
            await live.body.answering()
        return live

    def alive(self) -> list[Live]:
        return list(self._live.values())

    def running_vms(self) -> list[Vm]:
        return [
            live.body for live in self._live.values() if isinstance(live.body, Vm) and live.record.state == "running"
        ]

    def counts(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for live in self._live.values():
            out[live.record.state] = out.get(live.record.state, 0) + 1
        return out

    async def wait(self, ident: str, states: set[str]) -> Record:
        """Until it is in one of `states`; at once when it is over."""
        record = self.record(ident)
        while record.state not in states and (live := self._live.get(record.id)) is not None:
            live.changed.clear()
            await live.changed.wait()
        return record

    # -- creating -----------------------------------------------------------------------------------------------------
    async def create(
        self, spec: wire.Spec, owner: wire.Owner, request: str = "", binds: tuple[Bind, ...] = ()
    ) -> Record:
        """Create and start one. With the name of a live one: that one, whatever its spec. binds: only containers."""
        if (existing := await self._existing(spec, owner)) is not None:
            return existing
        choice = await self._choice(spec)
        if (existing := await self._existing(spec, owner)) is not None:  # made while the host was asked what it can do
            return existing
        if self.closing:
            raise DsecError("shutting_down", "the daemon is stopping")
        live = self._admit(spec, choice, owner, request, binds)
        try:
            await self.bring_up(live, live.start)
        except asyncio.CancelledError:
            await self.give_up(live, "its creation was cancelled")
            raise
        except DsecError as exc:
            exc.sandbox_id = live.record.id
            await self.give_up(live, exc.message)
            raise
        except OSError as exc:
            await self.give_up(live, str(exc))
            raise DsecError("internal", f"the sandbox could not be made: {exc}", sandbox_id=live.record.id) from exc
        return live.record

    async def _existing(self, spec: wire.Spec, owner: wire.Owner) -> Record | None:
        """The live one of that name, when it runs. `conflict` when its kind is ruled out by what was asked for, or it
        is of another project: names are the host's."""
        if spec.name is None or spec.name not in self._names:
            return None
        ident = self._names[spec.name]
        if not within(self.record(ident).owner.project, owner.project):
            raise DsecError("conflict", f"the name {spec.name!r} is taken on this host: take another one")
        await self.wait(ident, {"running", "paused", *ENDED})
        existing = self.record(ident)
        if existing.state in LIVE:
            if why := choose.unfit(existing.backend, choose.Task(needs=choose.isolation(spec))):
                raise DsecError("conflict", f"the {existing.backend} named {spec.name!r} {why}")
            return existing
        raise DsecError("conflict", f"the sandbox named {spec.name!r} ended while it was asked for")

    async def _choice(self, spec: wire.Spec) -> wire.Choice | None:
        """What `auto` becomes; None for a backend that was named, which is only held against what is declared."""
        if spec.backend != "auto":
            choose.check(spec.backend, choose.Task(needs=spec.needs or wire.Needs(), device=bool(spec.devices)))
            return None
        task, host = await self.facts.task(spec), await self.facts.host()
        return choose.require(task, msgspec.structs.replace(host, fncall="a call is no sandbox: fncall.run makes it"))

    def _admit(
        self, spec: wire.Spec, choice: wire.Choice | None, owner: wire.Owner, request: str, binds: tuple[Bind, ...]
    ) -> Live:
        if spec.name is not None and ID.fullmatch(spec.name):
            raise DsecError("invalid", f"the name {spec.name!r} looks like an id: take another one")
        self.rooms.network.check(spec.network_rules)
        self.rooms.devices.check(wanted(spec.devices))
        backend = spec.backend if choice is None else choice.backend
        stack = self._stack(spec, backend)
        check_account(self.rooms.environments, stack, owner)
        self.admission.check(spec, owner.project)
        config = stack.config
        record = Record(
            id=new_id(self.tag),
            spec=_with_image_defaults(spec, config.env, config.workdir, config.user),
            backend=backend,
            choice=choice,
            boot=self.boot,
            owner=owner,
            layers=list(stack.digests),
            request=request,
        )
        return self.enter(record, binds=binds)

    def enter(self, record: Record, why: str = "", binds: tuple[Bind, ...] = ()) -> Live:
        """A new one, admitted before: counted and found from now on, and not started yet."""
        expiry.begin(record)
        self.admission.take(record.spec, record.owner.project)
        live = self._live[record.id] = Live(record, self.rooms, binds)
        if record.spec.name is not None:
            self._names[record.spec.name] = record.id
        self._tell(record, "creating", why)
        return live

    def _stack(self, spec: wire.Spec, backend: str) -> Stack:
        """A full VM's image is a whole disk: it has no layers."""
        if backend != "fullvm":
            return compose(self.rooms.images, spec.image, spec.workspace, spec.toolkits)
        if spec.workspace is not None or spec.toolkits:
            raise DsecError("invalid", "a full VM is one disk image: workspace and toolkits are for the other backends")
        self.rooms.vms.disks.get(spec.image)
        return Stack((), ImageConfig())

    async def bring_up(self, live: Live, start: Callable[[], Awaitable[None]]) -> None:
        """Start a new one and see to it from then on. When that fails it is the caller's to `give_up`."""
        record = live.record
        async with live.lock:
            await self.store.put(record)
            await start()
            record.running = record.idle_since = now()
            expiry.renew(record)  # its owner could not renew what it did not know of
            await self.move(live, "started")
        self.created += 1
        self._watch(live)

    async def give_up(self, live: Live, why: str) -> None:
        """It could not be started: nothing of it stays."""
        await asyncio.shield(self._over(live, "broke", why))

    def _watch(self, live: Live) -> None:
        """From now on: deadlines, and what happens when the agent's link ends."""
        assert live.body is not None
        body = live.body

        def lost(_future: asyncio.Future[None]) -> None:
            if live.body is body and not self.closing:
                self._spawn(self._link_lost(live))

        body.closed.add_done_callback(lost)
        self.look(live)

    async def _link_lost(self, live: Live) -> None:
        """The link ended by itself: the sandbox died, or its agent went astray; both are the end of it."""
        record, body = live.record, live.body
        if body is None:
            return
        reason = body.reason or "the agent closed the link"
        if proc.start_time(body.pid) is None:
            container = record.backend == "container"
            reason = "its init process was killed or ran out of memory" if container else "the machine ended"
        if record.state in LIVE and record.state != "stopping":
            log.warning("died: %s", reason, extra={"sandbox_id": record.id})
            await self._over(live, "broke", reason)

    # -- ending -------------------------------------------------------------------------------------------------------
    async def stop(self, ident: str, reason: str) -> Record:
        """Kill and remove. Of an ended one: its record."""
        record = self.record(ident)
        live = self._live.get(record.id)
        if live is not None:
            await asyncio.shield(self._over(live, "stop", reason))
        return record

    async def _over(self, live: Live, event: str, reason: str) -> None:
        """The one way a sandbox ends, on purpose (`stop`) or not (`broke`)."""
        record = live.record
        if event == "stop":
            live.kill()
        async with live.lock:
            if record.state in ENDED:
                return
            record.reason = reason
            if event == "stop" and record.state != "stopping":
                await self.move(live, "stop", must_write=False)
            try:
                await live.close()
            except (DsecError, OSError) as exc:
                log.error("something of it is left: %s", exc, extra={"sandbox_id": record.id})
                record.reason = f"{reason} (not all of it could be removed: {exc})"
            record.ended = now()
            self.stopped += event == "stop"
            self.failed += event != "stop"
            await self.move(live, "ended" if event == "stop" else "broke", must_write=False)
            self._forget(live)

    def _forget(self, live: Live) -> None:
        record = live.record
        self.admission.give_back(record.spec, record.owner.project)
        self._deadlines.drop(record.id)
        self._live.pop(record.id, None)
        if record.spec.name is not None and self._names.get(record.spec.name) == record.id:
            del self._names[record.spec.name]
        self._ended[record.id] = record
        if len(self._ended) > KEEP_ENDED:
            surplus = list(self._ended)[: len(self._ended) - KEEP_ENDED + KEEP_ENDED // 10]
            for ident in surplus:
                del self._ended[ident]
            self._spawn(self.store.drop(surplus))
        live.changed.set()

    # -- use ----------------------------------------------------------------------------------------------------------
    async def judge(self, live: Live, result: Ran) -> Ran:
        """Add to a result which limits the sandbox hit while it ran."""
        for what in await figures.judge(self.rooms, live, result):
            self._tell(live.record, "image_error", what)
        return result

    def images_lost(self, digests: Iterable[str]) -> None:
        """The page server is another, and readers of these may have seen holes: their sandboxes cannot be trusted."""
        lost = set(digests)
        for live in list(self._live.values()):
            if live.body is None and live.record.state != "creating":
                continue  # being taken back: that will be refused
            if found := lost.intersection(live.record.layers):
                reason = f"image {min(found)[7:19]}: the page server was lost while it was not all there [image]"
                self._spawn(self._over(live, "broke", reason))

    def network_refused(self, ident: str, what: str) -> None:
        if (live := self._live.get(ident)) is not None:
            self._tell(live.record, "network_refused", what)

    async def stats(self, ident: str) -> wire.Stats:
        live = self.standing(ident)
        return await figures.stats(self.rooms, live, live.record)

    # -- time ---------------------------------------------------------------------------------------------------------
    async def extend(self, ident: str, idle: float | None, total: float | None) -> Record:
        record = self.record(ident)
        if record.state in ENDED:
            raise DsecError("sandbox_dead", f"sandbox {record.id} is {record.state}", sandbox_id=record.id)
        if idle is not None:
            record.spec.ttl_idle_s = idle
            record.idle_since = now()
        if total is not None:
            record.spec.ttl_total_s = total
            record.total_deadline = record.clock + total
        if live := self._live.get(record.id):
            self.look(live)
        await self.store.put(record)
        return record

    def renew(self, idents: Iterable[str], uid: int) -> list[str]:
        """Push leases; ids that are over, or another user's, come back. Not written: a restart renews all leases."""
        gone = []
        for ident in idents:
            live = self._live.get(ident)
            if live is None or live.record.owner.uid != uid:
                gone.append(ident)
            else:
                expiry.renew(live.record)
        return gone

    def _due(self, ident: str) -> float | None:
        """Act on what has passed for this sandbox; the next moment to look again."""
        live = self._live.get(ident)
        if live is None or live.record.state == "stopping":
            return None
        end = expiry.next_end(live.record, live.busy > 0)
        if end is None or end.moment > now():
            return end and end.moment
        self._spawn(self._expire(live, end))
        return None

    async def _expire(self, live: Live, end: expiry.End) -> None:
        record = live.record
        self._tell(record, "expired", end.why)
        if record.spec.on_expiry == "pause" and record.state == "running":
            expiry.act_once(record, end)
            try:
                await self.pausing.pause(record.id)
            except DsecError:
                expiry.act_again(record, end)
                self.look(live)
                raise
            return
        await self.stop(record.id, end.why)

    # -- restart ------------------------------------------------------------------------------------------------------
    async def take_back(self) -> None:
        """Adopt what an earlier daemon left running, end what is half-made, sweep what nobody owns."""
        found = self.store.load()
        live: list[Live] = []
        for record in found:
            if record.state in ENDED:
                self._ended[record.id] = record
                continue
            item = self._live[record.id] = Live(record, self.rooms)
            self.admission.take(record.spec, record.owner.project)
            if record.spec.name is not None:
                self._names[record.spec.name] = record.id
            live.append(item)
        limit = asyncio.Semaphore(32)
        await asyncio.gather(*(self._take_back_one(item, limit) for item in live))
        await self.rooms.vms.sweep(set(self._live))
        await self.rooms.containers.sweep(set(self._live))
        await self.rooms.network.sweep()
        for ident in await asyncio.to_thread(self.rooms.pool.list):
            if ident not in self._live:
                await asyncio.to_thread(self.rooms.pool.destroy, ident)

    async def _take_back_one(self, live: Live, limit: asyncio.Semaphore) -> None:
        record = live.record
        async with limit:
            if record.boot != self.boot:
                await self._over(live, "broke", "the host was restarted")
            elif record.state in ("creating", "stopping"):
                event = "broke" if record.state == "creating" else "stop"
                await self._over(live, event, record.reason or "the daemon was restarted while it was made")
            elif record.fleeting:
                await self._over(live, "stop", "the daemon was restarted while its one command ran")
            else:
                await self._adopt(live)

    async def _adopt(self, live: Live) -> None:
        record = live.record
        frozen = record.state in ("pausing", "paused", "resuming")
        try:
            await live.adopt()
            if frozen and (record.frozen or not record.pid):
                record.state = "paused"  # it stays so until somebody asks for it
                expiry.stand_still(record)
            elif frozen:  # a VM that was not saved yet, or is loaded already
                record.state = "running"
                await self.pausing.pause(record.id)
            expiry.renew(record)  # owners could not while no daemon was there
            self._watch(live)
        except (DsecError, OSError) as exc:
            message = exc.message if isinstance(exc, DsecError) else str(exc)
            log.warning("could not be taken back: %s", message, extra={"sandbox_id": record.id})
            await self._over(live, "broke", message)

    def detach(self) -> None:
        """From now on nothing new is started, and what is cancelled is let go of, not killed."""
        self.closing = True
        for live in self._live.values():
            if live.commands is not None:
                live.commands.detached = True

    async def close(self) -> None:
        """Let go of all sandboxes; they go on without us."""
        self.detach()
        self._deadlines.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for live in self._live.values():
            if live.body is not None:
                await live.body.release()

    # -- moves (also for dsecd.sandbox.pausing) ------------------------------------------------------------------------
    async def move(self, live: Live, event: str, *, must_write: bool = True) -> None:
        """must_write=False: an end is an end, also when the registry's disk is full."""
        record = live.record
        record.state = move(record.state, event)
        noted = self._tell(record, event, record.reason)
        live.changed.set()
        try:
            await asyncio.gather(self.store.put(record), noted)
        except DsecError as exc:
            if must_write:
                raise
            log.error("its end could not be written, ignoring: %s", exc.message, extra={"sandbox_id": record.id})

    async def carry(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for a move that goes on when its caller gives up: half-way, it would be the end of the sandbox."""
        task = self._track(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(task)
        except OSError as exc:
            kind = kind_of_errno(exc.errno or 0)
            raise DsecError(kind, f"the host could not do it: {exc.strerror or exc}", infra=True) from exc

    async def keep(self, record: Record) -> None:
        """Write it as it is."""
        await self.store.put(record)

    def broke(self, live: Live, why: str) -> None:
        """It is over by itself; its end goes on without the caller."""
        self._spawn(self._over(live, "broke", why))

    def look(self, live: Live) -> None:
        """Its deadlines are others than before."""
        self._deadlines.set(live.record.id, self._due(live.record.id))

    def _tell(self, record: Record, event: str, text: str) -> asyncio.Task[None]:
        """Log it, tell who listens, and put it into its trajectory: durable when the task is done."""
        log.info("%s: %s %s", event, record.state, text, extra={"sandbox_id": record.id})
        self.events.publish(record.id, event, record.state, text, record.spec.labels, record.owner.project)
        noted = self._track(self._note(record, event, text))
        noted.add_done_callback(lambda done: done.cancelled() or done.exception())
        return noted

    async def _note(self, record: Record, event: str, text: str) -> None:
        data: dict[str, Any] = {"state": record.state, "text": text}
        if event == "creating":
            data |= {"spec": record.spec, "owner": record.owner, "layers": record.layers, "backend": record.backend}
        await self.trajectory.note(record.id, event, data)

    def _spawn(self, work: object) -> None:
        self._track(_logged(work))

    def _track(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that `close` ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _logged(work: object) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        try:
            await work  # type: ignore[misc]
        except DsecError as exc:
            log.error("background work failed: %s", exc)


def _with_image_defaults(spec: wire.Spec, env: dict[str, str], workdir: str, user: str) -> wire.Spec:
    """The image's environment, directory and user, below what the caller said."""
    copy = wire.Spec(**{name: getattr(spec, name) for name in spec.__struct_fields__})
    copy.env = {**env, **spec.env}
    copy.workdir = spec.workdir or workdir or None
    copy.user = spec.user or user or None
    return copy
