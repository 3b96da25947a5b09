"""The audit log: numbers go on over files and restarts, it is bounded, and refusals cannot wash it out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from dsecd.errors import DsecError
from dsecd.sandbox import logfile
from dsecd.tenants.audit import FILES, REFUSALS, AuditLog, entry
from dsecd.wire.call import Peer
from dsecd.wire.tenants import ByPath

BOSS = Peer(1, 0, 0, "uid:0", real_uid=0)
ANN = Peer(2, 1 << 32, 0, "ann", "root/a", "viewer", "0" * 12, 1000, True)


async def done() -> None:
    """What is audited."""


def test_it_goes_on_over_files_and_restarts_and_is_bounded(tmp_path: Path) -> None:
    async def write() -> list[int]:
        log = AuditLog(tmp_path / "audit", file_max=500)
        await log.open()
        return [await log.put(entry("done", "project.create", BOSS if n % 2 else ANN)) for n in range(20)]

    numbers = asyncio.run(write()) + asyncio.run(write())
    assert numbers == list(range(1, 41))
    files = sorted((tmp_path / "audit").iterdir())
    assert len(files) == FILES
    for path in files:
        found = logfile.scan(path, f"audit-{int(path.stem[6:])}")
        assert not found.bad
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}

    async def read() -> None:
        log = AuditLog(tmp_path / "audit", file_max=500)
        await log.open()
        every, last = await log.read(0, 1000, "root")
        assert last == 40
        assert [one.seq for one in every] == list(range(every[0].seq, 41))
        assert [one.seq for one in (await log.read(36, 2, "root"))[0]] == [37, 38]
        assert {one.principal for one in (await log.read(0, 1000, "root/a"))[0]} == {"ann"}
        assert (await log.read(0, 1000, "root/b"))[0] == []

    asyncio.run(read())


def test_what_was_asked_stands_there_before_it_is_done(tmp_path: Path) -> None:
    async def work() -> None:
        log = AuditLog(tmp_path)
        await log.open()

        async def fails() -> None:
            seen, _ = await log.read(0, 10, "root")
            assert [one.event for one in seen] == ["asked"]
            raise DsecError("conflict", "no")

        with pytest.raises(DsecError):
            await log.around("project.remove", ByPath(path="root/a"), BOSS, fails)
        await log.around("project.remove", ByPath(path="root/b"), BOSS, done)
        seen, _ = await log.read(0, 10, "root")
        shown = [(one.event, one.ref, one.outcome, msgspec.to_builtins(one.params)) for one in seen]
        assert shown == [
            ("asked", 0, "", {"path": "root/a"}), ("done", 1, "conflict", None),
            ("asked", 0, "", {"path": "root/b"}), ("done", 3, "ok", None),
        ]  # fmt: skip

    asyncio.run(work())


def test_refusals_do_not_wash_it_out(tmp_path: Path) -> None:
    """So many a minute of each are kept; of those who are nobody, none."""

    async def work() -> None:
        log = AuditLog(tmp_path)
        await log.open()
        nobody = msgspec.structs.replace(ANN, principal="uid:1000", role="nobody")
        for _ in range(3 * REFUSALS):
            log.refused("project.create", ByPath(path="root/a"), ANN, DsecError("denied", "no"))
            log.refused("project.create", ByPath(path="root/a"), nobody, DsecError("denied", "no"))
        await log.close()
        seen, _ = await log.read(0, 1000, "root")
        assert {one.principal for one in seen} == {"ann"}
        assert REFUSALS <= len(seen) <= 2 * REFUSALS  # a minute may have begun

    asyncio.run(work())
