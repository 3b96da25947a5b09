"""The owner of all sandboxes of this host: create, find, stop, expire, take back.

Every change of state goes through `_move`, which keeps to the table in states.py, tells listeners, and is written to
the registry before anybody is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dsecd import proc
from dsecd.erofs.compose import compose
from dsecd.errors import DsecError
from dsecd.sandbox import record as records
from dsecd.sandbox.admission import Admission
from dsecd.sandbox.deadlines import Deadlines
from dsecd.sandbox.events import Events
from dsecd.sandbox.ids import new_id
from dsecd.sandbox.live import Live, Rooms
from dsecd.sandbox.record import Record, now
from dsecd.sandbox.states import ENDED, LIVE, move
from dsecd.sandbox.store import Store
from dsecd.wire import sandbox as wire
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
        self.events = Events()
        self.boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._live: dict[str, Live] = {}
        self._ended: dict[str, Record] = {}
        self._names: dict[str, str] = {}
        self._deadlines = Deadlines(self._due)
        self._tasks: set[asyncio.Task[None]] = set()
        self.closing = False
        self.created = self.failed = self.stopped = 0

    # -- finding ------------------------------------------------------------------------------------------------------
    def record(self, ident: str) -> Record:
        """By id or name, ended ones by id too; `not_found`."""
        live = self._live.get(self._names.get(ident, ident))
        if live is not None:
            return live.record
        record = self._ended.get(ident)
        if record is None:
            raise DsecError("not_found", f"no sandbox {ident[:80]!r}")
        return record

    def public(self, record: Record) -> wire.Sandbox:
        live = self._live.get(record.id)
        return records.public(record, live.commands.busy if live and live.commands else 0)

    def all(self, states: Iterable[str], labels: dict[str, str], uid: int | None) -> list[Record]:
        wanted = set(states) or LIVE
        pool = [live.record for live in self._live.values()]
        if wanted & ENDED:
            pool += self._ended.values()
        return [r for r in pool if r.state in wanted and r.matches(labels) and (uid is None or r.owner.uid == uid)]

    async def running(self, ident: str) -> Live:
        """A sandbox that can take a request now; resumes a paused one first. Counts as use."""
        record = self.record(ident)
        live = self._live.get(record.id)
        if live is not None and record.state in ("paused", "pausing", "resuming"):
            await self.resume(record.id)
        if live is None or record.state in ENDED or record.state == "stopping":
            said = f": {record.reason}" if record.reason else ""
            raise DsecError("sandbox_dead", f"sandbox {record.id} is {record.state}{said}", sandbox_id=record.id)
        if record.state == "creating":
            await self.wait(record.id, {"running", *ENDED})
            return await self.running(record.id)
        record.idle_since = now()
        return live

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
    async def create(self, spec: wire.Spec, owner: wire.Owner, request: str = "") -> Record:
        """Create and start one. With the name of a live one: that one, whatever its spec."""
        if spec.name is not None and spec.name in self._names:
            ident = self._names[spec.name]
            await self.wait(ident, {"running", "paused", *ENDED})
            existing = self.record(ident)
            if existing.state in LIVE:
                return existing
            raise DsecError("conflict", f"the sandbox named {spec.name!r} ended while it was asked for")
        if self.closing:
            raise DsecError("shutting_down", "the daemon is stopping")
        live = self._admit(spec, owner, request)
        try:
            await self._bring_up(live)
        except asyncio.CancelledError:
            await asyncio.shield(self._over(live, "broke", "its creation was cancelled"))
            raise
        except DsecError as exc:
            exc.sandbox_id = live.record.id
            await asyncio.shield(self._over(live, "broke", exc.message))
            raise
        except OSError as exc:
            await asyncio.shield(self._over(live, "broke", str(exc)))
            raise DsecError("internal", f"the sandbox could not be made: {exc}", sandbox_id=live.record.id) from exc
        return live.record

    def _admit(self, spec: wire.Spec, owner: wire.Owner, request: str) -> Live:
        backend = _choose_backend(spec)
        stack = compose(self.rooms.images, spec.image, spec.workspace, spec.toolkits)
        self.admission.check(spec)
        config = stack.config
        moment = now()
        record = Record(
            id=new_id(self.tag),
            spec=_with_image_defaults(spec, config.env, config.workdir, config.user),
            backend=backend,
            boot=self.boot,
            owner=owner,
            layers=list(stack.digests),
            created=moment,
            idle_since=moment,
            total_deadline=None if spec.ttl_total_s is None else moment + spec.ttl_total_s,
            lease_deadline=None if spec.lease_s is None else moment + spec.lease_s,
            request=request,
        )
        self.admission.take(spec)
        live = self._live[record.id] = Live(record, self.rooms)
        if spec.name is not None:
            self._names[spec.name] = record.id
        self._tell(record, "creating", "")
        return live

    async def _bring_up(self, live: Live) -> None:
        record = live.record
        async with live.lock:
            await self.store.put(record)
            await live.start()
            record.running = record.idle_since = now()
            if record.spec.lease_s is not None:  # its owner could not renew what it did not know of
                record.lease_deadline = now() + record.spec.lease_s
            await self._move(live, "started")
        self.created += 1
        self._watch(live)

    def _watch(self, live: Live) -> None:
        """From now on: deadlines, and what happens when the agent's link ends."""
        assert live.container is not None
        link = live.container.link

        def lost(_future: asyncio.Future[None]) -> None:
            if live.container is not None and live.container.link is link and not self.closing:
                self._spawn(self._link_lost(live))

        link.closed.add_done_callback(lost)
        self._deadlines.set(live.record.id, self._due(live.record.id))

    async def _link_lost(self, live: Live) -> None:
        """The link ended by itself: the sandbox died, or its agent went astray; both are the end of it."""
        record, container = live.record, live.container
        if container is None:
            return
        reason = container.link.reason or "the agent closed the link"
        if proc.start_time(container.pid) is None:
            reason = "its init process was killed or ran out of memory"
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
        if event == "stop" and live.container is not None:
            live.container.cgroup.kill()  # a start that is still under way will fail soon
        async with live.lock:
            if record.state in ENDED:
                return
            record.reason = reason
            if event == "stop" and record.state != "stopping":
                await self._move(live, "stop", must_write=False)
            try:
                await live.close()
            except (DsecError, OSError) as exc:
                log.error("something of it is left: %s", exc, extra={"sandbox_id": record.id})
                record.reason = f"{reason} (not all of it could be removed: {exc})"
            record.ended = now()
            self.stopped += event == "stop"
            self.failed += event != "stop"
            await self._move(live, "ended" if event == "stop" else "broke", must_write=False)
            self._forget(live)

    def _forget(self, live: Live) -> None:
        record = live.record
        self.admission.give_back(record.spec)
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
        """Add to a result which limits the sandbox hit while it ran. Costs nothing for a command that succeeded."""
        if result.exit_code == 0 or live.container is None:
            return result
        cgroup = live.container.cgroup
        ooms, hits = cgroup.oom_kills(), cgroup.pids_hits()
        result.oom, live.oom_seen = ooms > live.oom_seen, ooms
        result.pids_limit, live.pids_seen = hits > live.pids_seen, hits
        used, limit = await asyncio.to_thread(self.rooms.pool.usage, live.record.id)
        result.disk_full = used >= limit - limit // 64
        await self._image_trouble(live)
        return result

    async def _image_trouble(self, live: Live) -> None:
        """Say so when reads of the sandbox's layers failed for want of their store: not the command's fault."""
        for digest in live.record.layers:
            trouble = await asyncio.to_thread(self.rooms.mounts.trouble, digest)
            if trouble is not None and trouble.denied > live.denied_seen.get(digest, 0):
                live.denied_seen[digest] = trouble.denied
                what = f"reads of image {digest[7:19]} failed ({trouble.kind}): {trouble.why}"
                self._tell(live.record, "image_error", what)

    def images_lost(self, digests: Iterable[str]) -> None:
        """The page server is another, and readers of these may have seen holes: their sandboxes cannot be trusted."""
        lost = set(digests)
        for live in list(self._live.values()):
            if live.container is None and live.record.state != "creating":
                continue  # being taken back: that will be refused
            if found := lost.intersection(live.record.layers):
                reason = f"image {min(found)[7:19]}: the page server was lost while it was not all there [image]"
                self._spawn(self._over(live, "broke", reason))

    async def stats(self, ident: str) -> wire.Stats:
        record = self.record(ident)
        live = self._live.get(record.id)
        if live is None or live.container is None:
            raise DsecError("sandbox_dead", f"sandbox {record.id} is {record.state}", sandbox_id=record.id)
        figures = await asyncio.to_thread(live.container.cgroup.stats)
        used, limit = await asyncio.to_thread(self.rooms.pool.usage, record.id)
        return wire.Stats(
            id=record.id,
            memory_bytes=figures.memory_bytes,
            memory_peak_bytes=figures.memory_peak,
            memory_limit_bytes=record.spec.memory_mb << 20,
            cpu_usec=figures.cpu_usec,
            throttled_usec=figures.throttled_usec,
            pids=figures.pids,
            pids_limit=record.spec.pids,
            disk_bytes=used,
            disk_limit_bytes=limit,
            oom_kills=figures.oom_kills,
        )

    # -- pausing ------------------------------------------------------------------------------------------------------
    async def pause(self, ident: str) -> Record:
        """Freeze it. Of a paused one: nothing."""
        record = self.record(ident)
        live = self._live.get(record.id)
        if live is None or live.container is None:
            raise DsecError("conflict", f"sandbox {record.id} is {record.state}", sandbox_id=record.id)
        async with live.lock:
            if record.state != "paused":
                await self._move(live, "pause")
                try:
                    await asyncio.to_thread(live.container.cgroup.freeze)
                except DsecError:
                    await asyncio.to_thread(live.container.cgroup.thaw)
                    await self._move(live, "unpaused")
                    raise
                await self._move(live, "paused")
        return record

    async def resume(self, ident: str) -> Record:
        """Thaw it. Of a running one: nothing; many at once wait for one thaw."""
        record = self.record(ident)
        live = self._live.get(record.id)
        if live is None or live.container is None:
            raise DsecError("sandbox_dead", f"sandbox {record.id} is {record.state}", sandbox_id=record.id)
        async with live.lock:
            if record.state == "paused":
                await self._move(live, "resume")
                await asyncio.to_thread(live.container.cgroup.thaw)
                record.idle_since = now()
                await self._move(live, "resumed")
                self._deadlines.set(record.id, self._due(record.id))
        return record

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
            record.total_deadline = now() + total
        self._deadlines.set(record.id, self._due(record.id))
        await self.store.put(record)
        return record

    def renew(self, idents: Iterable[str], uid: int) -> list[str]:
        """Push leases; ids that are over, or another user's, come back. Not written: a restart renews all leases."""
        gone = []
        for ident in idents:
            live = self._live.get(ident)
            if live is None or live.record.owner.uid != uid:
                gone.append(ident)
            elif live.record.spec.lease_s is not None:
                live.record.lease_deadline = now() + live.record.spec.lease_s
        return gone

    def _due(self, ident: str) -> float | None:
        """Act on what has passed for this sandbox; the next moment to look again."""
        live = self._live.get(ident)
        if live is None or live.record.state == "stopping":
            return None
        record, moments = live.record, []
        busy = live.commands.busy if live.commands is not None else 1
        if record.spec.ttl_idle_s is not None and record.state == "running":
            idle_end = (now() if busy else record.idle_since) + record.spec.ttl_idle_s
            moments.append((idle_end, f"idle for {record.spec.ttl_idle_s:g} s"))
        if record.total_deadline is not None and record.state != "paused":
            moments.append((record.total_deadline, f"lived its {record.spec.ttl_total_s:g} s"))
        if record.lease_deadline is not None and record.state != "paused":
            moments.append((record.lease_deadline, "its lease ran out: the owner is gone"))
        if not moments:
            return None
        moment, why = min(moments)
        if moment > now():
            return moment
        self._spawn(self._expire(live, why))
        return None

    async def _expire(self, live: Live, why: str) -> None:
        record = live.record
        self._tell(record, "expired", why)
        if record.spec.on_expiry == "pause" and record.state == "running":
            await self.pause(record.id)
            return
        await self.stop(record.id, why)

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
            self.admission.take(record.spec)
            if record.spec.name is not None:
                self._names[record.spec.name] = record.id
            live.append(item)
        limit = asyncio.Semaphore(32)
        await asyncio.gather(*(self._take_back_one(item, limit) for item in live))
        await self.rooms.containers.sweep(set(self._live))
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
            else:
                await self._adopt(live)

    async def _adopt(self, live: Live) -> None:
        record = live.record
        frozen = record.state in ("pausing", "paused", "resuming")
        try:
            cgroup = self.rooms.containers.cgroups.sandbox(record.id)
            if frozen:  # its agent must answer once; it is frozen again below
                await asyncio.to_thread(cgroup.thaw)
            await live.adopt()
            if record.lease_deadline is not None and record.spec.lease_s is not None:
                record.lease_deadline = now() + record.spec.lease_s  # owners could not renew while no daemon was there
            if frozen:
                record.state = "running"
                await self.pause(record.id)
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
            if live.container is not None:
                await live.container.link.close()

    # -- inside -------------------------------------------------------------------------------------------------------
    async def _move(self, live: Live, event: str, *, must_write: bool = True) -> None:
        """must_write=False: an end is an end, also when the registry's disk is full."""
        record = live.record
        record.state = move(record.state, event)
        self._tell(record, event, record.reason)
        live.changed.set()
        try:
            await self.store.put(record)
        except DsecError as exc:
            if must_write:
                raise
            log.error("its end could not be written, ignoring: %s", exc.message, extra={"sandbox_id": record.id})

    def _tell(self, record: Record, event: str, text: str) -> None:
        log.info("%s: %s %s", event, record.state, text, extra={"sandbox_id": record.id})
        self.events.publish(record.id, event, record.state, text, record.spec.labels)

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _logged(work: object) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        try:
            await work  # type: ignore[misc]
        except DsecError as exc:
            log.error("background work failed: %s", exc)


def _choose_backend(spec: wire.Spec) -> str:
    if spec.backend not in ("container", "auto"):
        raise DsecError("unsupported", f"backend {spec.backend!r} is not built yet; this daemon runs containers")
    granted = sorted(name for name, allowed in spec.network_rules.items() if allowed)
    if granted:
        raise DsecError(
            "unsupported", f"network access to {', '.join(granted)} cannot be granted yet: every sandbox is offline"
        )
    return "container"


def _with_image_defaults(spec: wire.Spec, env: dict[str, str], workdir: str, user: str) -> wire.Spec:
    """The image's environment, directory and user, below what the caller said."""
    copy = wire.Spec(**{name: getattr(spec, name) for name in spec.__struct_fields__})
    copy.env = {**env, **spec.env}
    copy.workdir = spec.workdir or workdir or None
    copy.user = spec.user or user or None
    return copy
