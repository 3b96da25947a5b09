"""What operators see: metrics that a parser takes, traces of requests, `dsecctl trace`."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
from pathlib import Path

import pytest
from daemonkit import Daemon, asynchronous, container_args, sandbox_of
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from terminalkit import DSECCTL, Terminal, environment

from dsecd.client import DsecError
from dsecd.metrics import CONTENT_TYPE
from dsecd.wire import execs
from dsecd.wire import trace as trace_wire


def asked(
    path: Path, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
) -> tuple[http.client.HTTPResponse, bytes]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(str(path))
        sock.sendall(request)
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        return answer, answer.read()


def families(path: Path) -> dict[str, Metric]:
    answer, body = asked(path)
    assert answer.status == 200
    assert answer.getheader("Content-Type") == CONTENT_TYPE
    text = body.decode()
    assert text.endswith("# EOF\n")
    return {one.name: one for one in text_string_to_metric_families(text)}


def value(found: dict[str, Metric], name: str, suffix: str = "", **labels: str) -> float:
    return sum(
        one.value for one in found[name].samples
        if one.name == name + suffix and labels.items() <= one.labels.items()
    )  # fmt: skip


@asynchronous
async def test_metrics_are_what_happened(daemon: Daemon) -> None:
    """The official parser reads them all, and they are as documented; what is done is counted."""
    path = daemon.run_dir / "metrics.sock"
    assert path.stat().st_mode & 0o777 == 0o660
    before = families(path)
    async with sandbox_of(daemon) as box, daemon.client() as client:
        for _ in range(3):
            await box.exec(["true"])
        with pytest.raises(DsecError, match="no command"):
            await client.call("exec.wait", execs.Wait(id=box.id, exec_id="x999"))
        await _fresh()
        now = families(path)
        assert value(now, "dsecd_sandboxes", state="running", backend="container") >= 1
        assert value(now, "dsecd_admission_memory_bytes", kind="reserved") >= 256 << 20
    grown = {
        ("dsecd_requests", "_total", "exec.run", "ok"): 3, ("dsecd_requests", "_total", "exec.wait", "not_found"): 1,
        ("dsecd_requests", "_total", "sandbox.create", "ok"): 1,
    }  # fmt: skip
    for (name, suffix, method, outcome), count in grown.items():
        labels = {"method": method, "outcome": outcome}
        assert value(now, name, suffix, **labels) - value(before, name, suffix, **labels) == count, (name, labels)
    assert (
        value(now, "dsecd_exec_overhead_seconds", "_count") - value(before, "dsecd_exec_overhead_seconds", "_count")
        == 3
    )
    assert value(now, "dsecd_trajectory_sync_seconds", "_count") > value(
        before, "dsecd_trajectory_sync_seconds", "_count"
    )
    assert value(now, "dsecd_loop_lag_seconds", "_count") > 0
    documented = (Path(__file__).parents[2] / "docs/metrics.md").read_text().partition("## The coordinator")[0]
    rows = [line.split("|")[1:5] for line in documented.splitlines() if line.startswith("| `")]
    said = {name.strip(" `"): (kind.strip(), text.strip()) for name, kind, _, text in rows}
    assert said == {name: (one.type, one.documentation) for name, one in now.items()}


async def _fresh() -> None:
    await asyncio.sleep(0.6)  # an answer is good for half a second


@asynchronous
async def test_rude_scrapers_are_in_nobodys_way(daemon: Daemon) -> None:
    """Silent ones, too many, other methods and paths, endless heads: the daemon answers all others meanwhile."""
    path = daemon.run_dir / "metrics.sock"
    silent = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    try:
        for one in silent:
            one.connect(str(path))
        async with daemon.client() as client:
            assert await client.list() is not None
        cut = 0
        for one in silent:
            one.settimeout(20)  # all are cut off: those beyond the bound at once, the others when their time is over
            cut += one.recv(1) == b""
        assert cut == len(silent)
    except ConnectionResetError:
        pass
    finally:
        for one in silent:
            one.close()
    assert asked(path, b"POST /metrics HTTP/1.1\r\n\r\n")[0].status == 405
    assert asked(path, b"GET /etc/passwd HTTP/1.1\r\n\r\n")[0].status == 404
    assert asked(path, b"hello\r\n\r\n")[0].status == 400
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(path))
        try:
            sock.sendall(b"GET /" + b"x" * 100_000)
            assert sock.recv(100) == b""
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert families(path)


@asynchronous
async def test_a_request_is_traced_down_to_its_command(daemon: Daemon) -> None:
    async with daemon.client() as client:
        box = await client.run_container(container_args(), request_id="trace-create")
        run = execs.Run(id=box.id, argv=["sh", "-c", "echo a; sleep 0.2"], request_id="trace-exec")
        await client.call("exec.run", run)
        await box.exec(["true"])
        (made,) = (await client.call("trace.get", trace_wire.Get(trace="trace-create"))).traces
        (ran,) = (await client.call("trace.get", trace_wire.Get(trace="trace-exec"))).traces
        listed: trace_wire.Traces = await client.call("trace.list", trace_wire.ListTraces(limit=3))
        await box.stop()
    names = {span.name: span for span in made.spans}
    assert made.method == "sandbox.create" and made.outcome == "ok" and made.took_ms
    for name in ("keep the key", "mount a layer", "disk", "start the container", "agent answers"):
        assert 0 <= names[name].start_ms <= names[name].start_ms + (names[name].took_ms or 0) <= made.took_ms, name
    assert names["start the container"].place == "launcher" and names["agent answers"].place == "agent"
    spans = {span.name: span for span in ran.spans}
    assert (spans["run"].took_ms or 0) >= 200 and spans["run"].place == "agent"
    assert spans["first output"].start_ms <= spans["run"].start_ms + 200
    assert {"log the request", "start the command", "log the answer"} <= spans.keys()
    assert ran.took_ms and all(one.took_ms is not None for one in ran.spans)
    assert listed.traces[0].method == "exec.run" and "#" in listed.traces[0].key
    for key in ("trace-create", listed.traces[0].key):
        done = subprocess.run([DSECCTL, "-H", daemon.url, "trace", key], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80, done.stdout
    done = subprocess.run([DSECCTL, "-H", daemon.url, "trace", "nobody"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "[not_found]" in done.stderr


@asynchronous
async def test_top_once_says_who_uses_the_cpu(daemon: Daemon) -> None:
    async with sandbox_of(daemon, job="burning", name="burner") as box, sandbox_of(daemon, name="idler"):
        await box.start(["sh", "-c", "while :; do :; done"])
        for words in (("--once",), ("--once", "-n", "1"), ()):  # without a terminal it is one table, too
            done = await asyncio.to_thread(ctl, daemon, "top", *words)
            assert done.returncode == 0, done.stderr
            assert max(map(len, done.stdout.splitlines())) <= 80, done.stdout
            head, _, table = done.stdout.partition("\n\n")
            assert "load " in head and "promised: CPU " in head and " running" in head, head
            rows = [line.split() for line in table.splitlines()[1:]]
            assert rows[0][:3] == ["burner", "burning", "running"] and int(rows[0][3].rstrip("%")) > 0
            if "-n" in words:
                assert len(rows) == 2 and rows[1][0] == "and" and rows[1][2] == "more"
            else:
                assert "idler" in {row[0] for row in rows}
        done = await asyncio.to_thread(ctl, daemon, "top", "--once", "--json", "--sort", "memory")
        said = json.loads(done.stdout)
        assert {"burner", "idler"} <= {one["name"] for one in said["sandboxes"]}
        used = [one["memory_bytes"] for one in said["sandboxes"]]
        assert used == sorted(used, reverse=True) and said["host"]["sandboxes"] >= 2
        assert ctl(daemon, "top", "--sort", "colour").returncode == 2


def test_top_on_a_terminal(daemon: Daemon) -> None:
    """It draws again by itself and when the size changes; Ctrl-C ends it; nothing of the terminal has to be mended."""
    shown = Terminal(daemon, "top", "--interval", "60s")
    try:
        shown.resize(24, 80)
        shown.expect(b"SANDBOX")
        shown.expect(b"SANDBOX")  # the second look comes after a second, whatever the interval: it has the CPU
        shown.resize(10, 40)
        shown.expect(b"\xe2\x80\xa6\x1b[K")  # cut at the new width
        shown.expect(b"SAN\xe2\x80\xa6")
        shown.type(b"\x03")
        assert shown.end() == 130
        assert b"Traceback" not in shown.seen and b"\x1b[?" not in shown.seen
    finally:
        shown.close()


def ctl(daemon: Daemon, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DSECCTL, *argv], capture_output=True, text=True, timeout=120, env=environment(daemon), check=False
    )
