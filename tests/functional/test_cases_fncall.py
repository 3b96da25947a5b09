"""Cases 1 to 13 and 29 for calls.

Case 4 is in test_fncall_many.py (places that are killed), what a call may leave behind in test_fncall_traces.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from pathlib import Path

import daemonkit
import pytest
from daemonkit import Daemon
from fnkit import c, calls, judge, python, sh
from test_fncall_traces import running

from dsecd.client import DsecError, DSecFnCallArgs, DSecSyncClient

__all__ = ["calls", "judge"]

KIB, MIB = 1 << 10, 1 << 20


def test_case_1_a_child_that_holds_stdout(calls: DSecSyncClient) -> None:
    """Unlike a sandbox's, a call's children end with it."""
    result = calls.fncall(sh("sleep 61.1 & echo hi", expected=b"hi"))
    assert (result.verdict, result.stdout) == ("ok", b"hi\n")
    assert result.wall_ms < 30_000
    assert not running("sleep\x0061.1")


def test_case_2_a_busy_loop(calls: DSecSyncClient) -> None:
    mark = "while :; do :; done # 222"
    assert calls.fncall(sh(f"sh -c '{mark}' & wait", cpu_s=0.5)).verdict == "time_limit"
    assert not running(mark)
    result = calls.fncall(c("int main(){for(;;);}", cpu_s=0.5))
    assert result.verdict == "time_limit"
    assert 400 <= result.cpu_ms < 1500


def test_case_3_no_survivor_of_a_timeout(calls: DSecSyncClient) -> None:
    line = "sleep 300.3 & setsid sleep 301.3 & (sleep 302.3 &); wait"
    assert calls.fncall(sh(line, wall_s=1)).verdict == "wall_limit"
    assert not [one for n in (300, 301, 302) for one in running(f"sleep\0{n}.3")]


def test_case_5_stdin(calls: DSecSyncClient) -> None:
    assert calls.fncall(sh("cat")).stdout == b""
    assert calls.fncall(sh("cat", stdin=b"in")).stdout == b"in"


def test_case_6_exact_bytes_and_no_fixed_floor(calls: DSecSyncClient) -> None:
    assert calls.fncall(sh("printf hello")).stdout == b"hello"
    took = sorted(calls.fncall(DSecFnCallArgs(argv=["true"])).wall_ms for _ in range(50))
    assert took[25] < 100


def test_case_7_the_transport_is_cut(judge: Daemon) -> None:
    async def work() -> None:
        client = judge.client()
        await client.open()
        call = asyncio.ensure_future(client.fncall(sh("sleep 62.7")))
        await asyncio.sleep(1)
        await client.close()
        assert (await call).verdict == "infra"
        async with asyncio.timeout(30):
            while running("sleep\x0062.7"):
                await asyncio.sleep(0.1)

    daemonkit.run(work())


def test_case_8_much_stdin(calls: DSecSyncClient) -> None:
    data = os.urandom(8 * MIB)
    assert calls.fncall(sh("sha256sum", stdin=data)).stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
    with pytest.raises(DsecError, match="length") as caught:
        calls.fncall(sh("cat", stdin=bytes(8 * MIB + 1)))
    assert caught.value.kind == "invalid"


def test_case_9_what_came_before_a_timeout(calls: DSecSyncClient) -> None:
    result = calls.fncall(sh("echo start; sleep 60", wall_s=1))
    assert (result.verdict, result.stdout) == ("wall_limit", b"start\n")


@pytest.mark.parametrize(("size", "verdict"), [(64 * KIB - 1, "ok"), (64 * KIB, "ok"), (64 * KIB + 1, "output_limit")])
def test_case_10_output_at_the_cap(calls: DSecSyncClient, size: int, verdict: str) -> None:
    result = calls.fncall(sh(f"head -c {size} /dev/zero; echo ERR >&2", output_limit_kb=64))
    assert result.verdict == verdict
    assert len(result.stdout) == min(size, 64 * KIB)
    assert result.truncated == (verdict != "ok")
    assert verdict != "ok" or result.stderr == b"ERR\n"


def test_case_10_stderr_has_a_budget_of_its_own(calls: DSecSyncClient) -> None:
    result = calls.fncall(sh("head -c 1000000 /dev/zero; echo ERR >&2; exit 3"))
    assert (len(result.stdout), result.stderr, result.exit_code) == (1_000_000, b"ERR\n", 3)


def test_case_11_endless_output(judge: Daemon, calls: DSecSyncClient) -> None:
    def held() -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{judge.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * KIB

    calls.fncall(sh("yes"))
    before, began = held(), time.monotonic()
    for _ in range(5):
        assert calls.fncall(sh("yes")).verdict == "output_limit"
    assert held() - before < 32 * MIB
    assert time.monotonic() - began < 60


def test_case_12_bytes_are_bytes(calls: DSecSyncClient) -> None:
    assert calls.fncall(sh(r"printf '\377\376\000A'")).stdout == b"\xff\xfe\x00A"


def test_case_13_long_command_lines(calls: DSecSyncClient) -> None:
    for args in (
        DSecFnCallArgs(argv=["true", *["x" * 60_000] * 5]),
        DSecFnCallArgs(argv=["true"], env={f"V{n}": "x" * 50_000 for n in range(4)}),
    ):
        with pytest.raises(DsecError, match="are over") as caught:
            calls.fncall(args)
        assert caught.value.kind == "invalid"


@pytest.mark.parametrize(("name", "args", "verdict"), [
    ("rm", sh("rm -rf /bin; test -x /bin/sh"), "ok"),
    ("kill 1", python("import os; os.kill(1, 9); open('/proc/self/stat')"), None),
    ("disk", python("open('big', 'wb').write(bytes(80 << 20))", disk_limit_mb=16, file_limit_mb=128), "memory_limit"),
    ("bomb", sh("b() { b | b & }; b; sleep 5", processes=16, wall_s=2), None),
    ("memory", c("#include <stdlib.h>\n#include <string.h>\nint main(){for(;;)memset(malloc(1<<20),1,1<<20);}",
                 memory_limit_mb=32), "memory_limit"),
])  # fmt: skip
def test_case_29_harm(calls: DSecSyncClient, name: str, args: DSecFnCallArgs, verdict: str | None) -> None:
    """Whatever it did, the next call and its neighbours are as before."""
    result = calls.fncall(args)
    assert result.verdict == verdict or (verdict is None and result.verdict != "infra"), (name, result)
    assert calls.fncall(sh("ls /bin/sh", expected=b"/bin/sh")).verdict == "ok"


def test_case_29_nproc(calls: DSecSyncClient) -> None:
    """A call has one CPU, so that those beside it do not change its figures."""
    assert calls.fncall(sh("nproc", expected=b"1")).verdict == "ok"
