"""Many calls: the same verdict every time, daemons that are restarted in the middle, and the command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from daemonkit import Daemon, run
from fnkit import calls, cpp, judge, judging, python, sh

from dsecd.client import DSecClient, DsecError, DSecFnCallArgs, DSecSyncClient
from dsecd.wire.fncall import Case, Judged

__all__ = ["calls", "judge"]


@pytest.mark.slow
def test_a_thousand_calls_of_one_program_have_one_verdict(judge: Daemon) -> None:
    """The dice are loaded with what differs between runs, if anything does: addresses, times, what was there before."""
    program = cpp(
        "#include <cstdio>\n#include <map>\n#include <string>\nint main(){std::map<std::string,int> m;"
        "for(int i=0;i<2000;i++)m[std::to_string(i*7919%2003)]+=i;long s=0;"
        'for(auto&p:m)s=s*31+p.second;printf("%ld",s);}'
    )

    async def work() -> None:
        async with judge.client() as client:
            answer = (await client.fncall(program)).stdout
            batch = client.fncall_batch(program, [Case(expected=answer)] * 1000)
            got = [result.verdict async for _, result in batch]
            assert got == ["ok"] * 1000
            leaks = python("x = bytearray(200 << 20)", memory_limit_mb=64)
            assert {one.verdict for one in await gathered(client, [leaks] * 60)} == {"memory_limit"}

    run(work())


async def gathered(client: DSecClient, programs: list[DSecFnCallArgs]) -> list[Judged]:
    return await asyncio.gather(*(client.fncall(one) for one in programs))


@pytest.mark.slow
def test_every_call_is_answered_once_although_the_daemon_is_restarted(
    tmp_path_factory: pytest.TempPathFactory, watched: list[Path]
) -> None:
    """2,000 calls by 32 clients; one kill -9 and one polite restart in the middle."""
    total, clients = 2000, 32
    answers: list[str] = []

    async def one(daemon: Daemon, number: int) -> str:
        """A client of its own; what was cut is `infra`, and so is a daemon that is not there for a moment."""
        program = (python, sh)[number % 2]("print(1)" if number % 2 == 0 else "echo 1", expected=b"1")
        try:
            async with daemon.client() as client:
                return (await client.fncall(program)).verdict
        except (DsecError, OSError):
            return "infra"

    async def worker(daemon: Daemon, numbers: list[int]) -> None:
        while numbers:
            answers.append(await one(daemon, numbers.pop()))
            if answers[-1] == "infra":
                await asyncio.sleep(0.25)

    async def work(daemon: Daemon) -> None:
        numbers = list(range(total))
        workers = [asyncio.ensure_future(worker(daemon, numbers)) for _ in range(clients)]
        for politely, left in ((False, 1400), (True, 700)):
            while len(numbers) > left:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(daemon.restart, politely=politely)
        await asyncio.gather(*workers)
        async with daemon.client() as client:
            assert (await client.fncall(python("print(1)", expected=b"1"))).verdict == "ok"

    with judging(tmp_path_factory.mktemp("many"), watched) as daemon:
        run(work(daemon))
    assert len(answers) == total
    assert set(answers) <= {"ok", "infra"}
    # While it is away, each client gives up at most four calls a second.
    assert answers.count("ok") > total // 2, answers.count("infra")


def test_places_are_replaced_after_so_many_calls_and_shrink(
    tmp_path_factory: pytest.TempPathFactory, watched: list[Path]
) -> None:
    async def work(daemon: Daemon) -> None:
        async with daemon.client() as client:
            for _ in range(12):
                assert (await client.fncall(sh("echo 1", expected=b"1"))).verdict == "ok"

    with judging(tmp_path_factory.mktemp("recycle"), watched, recycle_after=3, boxes_max=2, boxes_min=0) as daemon:
        run(work(daemon))
        text = daemon.log_since(0)
    assert "is left" not in text


def test_places_whose_processes_are_killed_are_replaced(judge: Daemon) -> None:
    """Agents and zygotes killed from outside while calls run: `infra` for what was cut, and then all is as before."""

    async def work() -> None:
        async with judge.client() as client:
            programs = [
                (python, sh)[n % 2]("import time; time.sleep(0.1)" if n % 2 == 0 else "sleep 0.1") for n in range(40)
            ]
            running = asyncio.ensure_future(gathered(client, programs))
            for _ in range(3):
                await asyncio.sleep(0.15)
                for path in (judge.run_dir / "sandboxes").glob("*/pid"):
                    with contextlib.suppress(OSError, ValueError):
                        os.kill(int(path.read_text()), signal.SIGKILL)
            verdicts = [one.verdict for one in await running]
            assert set(verdicts) <= {"ok", "infra"}
            assert "infra" in verdicts
            after = await gathered(client, [python("print(1)", expected=b"1"), sh("echo 1", expected=b"1")] * 10)
            assert {one.verdict for one in after} == {"ok"}

    run(work())


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    for n in range(4):
        (tmp_path / f"tests/{n}.in").write_text(f"{n} 1\n")
        (tmp_path / f"tests/{n}.out").write_text(f"{n + 1}\n")
    (tmp_path / "solution.py").write_text("a, b = map(int, input().split())\nprint(a + b)\n")
    (tmp_path / "wrong.py").write_text("a, b = map(int, input().split())\nprint(a + b if a < 2 else 0)\n")
    return tmp_path


def dsecctl(daemon: Daemon, *argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [str(Path(sys.executable).parent / "dsecctl"), "-H", daemon.url, *argv]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False)


def test_dsecctl_fn_run_prints_what_the_program_prints_and_its_verdict(judge: Daemon, problem: Path) -> None:
    source = str(problem / "solution.py")
    done = dsecctl(judge, "fn", "run", source, "-i", str(problem / "tests/2.in"))
    assert (done.returncode, done.stdout) == (0, b"3\n"), done
    assert done.stderr.startswith(b"dsecctl: ok (")
    piped = dsecctl(judge, "fn", "run", "-q", "-e", str(problem / "tests/2.out"), source, stdin=b"1 1")
    assert (piped.returncode, piped.stdout, piped.stderr) == (1, b"2\n", b"")
    told = json.loads(dsecctl(judge, "--json", "fn", "run", source, stdin=b"1 1").stdout)
    assert told["verdict"] == "ok"
    assert dsecctl(judge, "fn", "run", str(problem / "tests/2.in")).returncode == 2


def test_dsecctl_fn_judge_prints_a_table_of_verdicts(judge: Daemon, problem: Path) -> None:
    done = dsecctl(judge, "fn", "judge", str(problem))
    lines = done.stdout.decode().splitlines()
    assert (done.returncode, lines[-1]) == (0, "ok (4 of 4 ok)")
    assert [line.split()[:2] for line in lines[1:-1]] == [[str(n), "ok"] for n in range(4)]
    wrong = dsecctl(judge, "fn", "judge", str(problem), "--solution", str(problem / "wrong.py"))
    assert wrong.returncode == 1
    assert wrong.stdout.decode().splitlines()[-1].startswith("wrong_answer: case 2: line 1: '0' instead of '3'")
    (problem / "checker.py").write_text("import sys; sys.exit(0)")
    assert dsecctl(judge, "fn", "judge", str(problem), "--solution", str(problem / "wrong.py")).returncode == 0


def test_a_client_that_goes_away_in_the_middle_of_a_batch_ends_it(judge: Daemon, calls: DSecSyncClient) -> None:
    async def work() -> None:
        client = judge.client()
        await client.open()
        batch = client.fncall_batch(sh("sleep 0.5; echo 1"), [Case()] * 100)
        async with contextlib.aclosing(aiter(batch)) as results:
            with contextlib.suppress(DsecError):
                await anext(results)
                await client.close()
                await anext(results)

    run(work())
    assert calls.fncall(sh("echo 1", expected=b"1")).verdict == "ok"
