# ruff: noqa: F811
"""The agent's commands: what they write, how they end, how they are killed, followed and taken back."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
from agent_box import COMMAND_CAPS, NATIVE, Box, Client, Result, client, rootfs, sandbox, take, until  # noqa: F401

from dsecd.agent.frames import Fields, Tag, Type, parse_output

TTY, STDIN, CONTROL, QUIET, FOLLOW = 1, 2, 4, 8, 16
ALL, FOREGROUND, REST = 1, 2, 4
FORK, EXEC, USER, CHDIR = 1, 2, 3, 4


def kill_sleeps(client: Client, sandbox: Box) -> None:
    """All of them: between fork and exec one has the shell's name still, so once is not enough."""

    def over() -> bool:
        client.shell("killall sleep")
        time.sleep(0.05)  # for its own group to go
        return not sandbox.leaves()

    until(over, "a sleep is left")


def settled(sandbox: Box) -> None:
    until(lambda: not sandbox.leaves(), f"cgroups are left: {sandbox.leaves()}")


# -- output and status


def test_exit_status_and_both_streams(client: Client) -> None:
    result = client.shell("printf hello; echo bad >&2; exit 3")
    assert (result.exit, result.signal, result.why) == (3, 0, 0)
    assert (result.stdout, result.stderr) == (b"hello", b"bad\n")
    assert result.totals == {1: 5, 2: 4}
    assert result.pid > 1


def test_a_signal_is_128_and_its_number(client: Client) -> None:
    result = client.shell("kill -9 $$")
    assert (result.exit, result.signal, result.why) == (137, 9, 0)


def test_bytes_pass_unchanged(client: Client) -> None:
    assert client.run("printf", r"\377\376\000A").stdout == b"\xff\xfe\0A"


def test_a_background_child_does_not_hold_the_command(client: Client, sandbox: Box) -> None:
    began = time.monotonic()
    result = client.shell("sleep 60 & echo hi")
    assert result.stdout == b"hi\n" and time.monotonic() - began < 2
    assert len(sandbox.leaves()) == 1
    kill_sleeps(client, sandbox)


def test_what_a_background_child_writes_later_is_drained(client: Client, sandbox: Box) -> None:
    result = client.shell("(sleep 0.2; yes | head -c 3000000; echo $? > /tmp/later) & echo hi")
    assert result.stdout == b"hi\n"
    until(lambda: client.shell("cat /tmp/later 2>/dev/null").stdout == b"0\n", "the child was stopped or killed")
    settled(sandbox)


def test_cpu_and_wall_time(client: Client) -> None:
    result = client.shell("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; sleep 0.2")
    assert result.ran_us > 200_000
    assert 1_000 < result.cpu_us < result.ran_us


def test_no_fixed_floor(client: Client) -> None:
    took = []
    for _ in range(200):
        began = time.perf_counter()
        assert client.run("true").exit == 0
        took.append(time.perf_counter() - began)
    assert statistics.median(took) < 0.005


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 102, 5000])
def test_the_cap_is_exact(client: Client, size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    client.write("/tmp/data", data)
    result = client.run("cat", "/tmp/data", cap=100)
    assert result.totals[1] == size
    pieces = result.output.get(1, [])
    got = {offset + i: byte for offset, piece in pieces for i, byte in enumerate(piece)}
    kept = set(range(min(size, 50))) | set(range(max(0, size - 50), size))
    assert got == {i: data[i] for i in kept}


# a cap, what is written: around the cap, around what the ring has beyond its tail, around it several times
@pytest.mark.parametrize(
    ("cap", "size"),
    [(100, 100), (100, 101), (100, 5000), (0, 1), (0, 200_000), (1, 65_537), (65_536, 65_537), (65_536, 163_840),
     (65_536, 163_841), (131_073, 1_000_003), (1 << 20, 5_000_001)],
)  # fmt: skip
def test_what_is_dropped_is_summed(client: Client, cap: int, size: int) -> None:
    """The digest is that of the bytes between the kept head and the kept tail: no byte more, none less."""
    data = random.Random(size).randbytes(size)
    client.write("/tmp/data", data)
    for reader in ("cat /tmp/data", "dd if=/tmp/data bs=4097 2>/dev/null", "cat /tmp/data >&2"):
        result = client.shell(reader, cap=cap)
        stream = 2 if ">&2" in reader else 1
        head, tail = (cap + 1) // 2, cap // 2
        dropped = data[head : size - tail] if size > cap else b""
        assert result.stream(stream) == data[:head] + data[max(head, size - tail) :]
        assert result.digests == ({stream: hashlib.sha256(dropped).digest()} if dropped else {}), reader


def test_what_is_dropped_is_summed_while_it_is_followed(client: Client) -> None:
    """The follower had every byte; the digest is still that of what is not kept, also when EXIT is asked for again."""
    channel = client.exec("seq", "1", "100000", cap=1000, flags=QUIET | FOLLOW)
    for stream in (1, 2):
        client.send(Type.FOLLOW, channel, (Tag.STREAM, stream), (Tag.OFFSET, 0), (Tag.LIMIT, 1 << 20))
    followed = client.finish(channel, forget=False)
    client.send(Type.FETCH, channel)
    fetched = client.finish(channel)
    assert len(followed.stdout) == followed.totals[1] > 500_000
    expected = {1: hashlib.sha256(followed.stdout[500:-500]).digest()}
    assert followed.digests == fetched.digests == expected


def test_a_flood_of_stdout_leaves_stderr_alone(client: Client) -> None:
    result = client.shell("head -c 5000000 /dev/zero | tr '\\0' x; echo ERR >&2; exit 3", cap=1 << 20)
    assert (result.exit, result.stderr, result.totals[1]) == (3, b"ERR\n", 5_000_000)
    assert len(result.stdout) == 1 << 20


def test_a_cap_of_nothing(client: Client) -> None:
    result = client.run("echo", "hi", cap=0)
    assert (result.stdout, result.totals[1]) == (b"", 3)


def test_the_control_stream(client: Client) -> None:
    result = client.shell("echo side >&9; echo main", flags=CONTROL)
    assert (result.stdout, result.stream(3), result.totals[3]) == (b"main\n", b"side\n", 5)


# -- what a command is given


def test_environment_directory_and_umask(client: Client) -> None:
    result = client.shell("pwd; echo $A; umask; env | sort", cwd=b"/tmp", env={"A": "b c"})
    # PWD, SHLVL and OLDPWD are the shell's own
    lines = [x for x in result.stdout.decode().split("\n") if not x.startswith(("PWD=", "SHLVL=", "OLDPWD="))]
    assert lines == ["/tmp", "b c", "0022", "A=b c", "HOME=/root", "PATH=/bin", ""]


def test_a_given_home_stays(client: Client) -> None:
    assert client.shell("echo $HOME", env={"HOME": "/x"}).stdout == b"/x\n"


@pytest.mark.parametrize(
    ("user", "expected", "home"),
    [
        (b"ann", "1000 1000 1000 10 44", "/home/ann"),
        (b"1000", "1000 1000 1000 10 44", "/home/ann"),
        (b"ann:video", "1000 44 44", "/home/ann"),
        (b"ann:77", "1000 77 77", "/home/ann"),
        (b"4711", "4711 0 0", ""),
        (b"4711:4712", "4711 4712 4712", ""),
        (b"0:0", "0 0 0", "/root"),
    ],
)
def test_users(client: Client, user: bytes, expected: str, home: str) -> None:
    result = client.shell("echo $(id -u) $(id -g) $(id -G); echo $HOME", user=user)
    uid_gid, groups = expected.split()[:2], set(expected.split()[2:])
    got = result.stdout.decode().split("\n")
    assert got[0].split()[:2] == uid_gid
    assert set(got[0].split()[2:]) == groups
    assert got[1] == home


@pytest.mark.parametrize("user", [b"nobody-here", b"bad", b"ann:nogroup", b"4294967295", b"", b"noline"])
def test_unknown_users(client: Client, user: bytes) -> None:
    result = client.run("true", user=user)
    assert result.error is not None and result.error[0] == USER


def test_a_hostile_user_database(client: Client) -> None:
    """It belongs to the tenant: a FIFO must not hang us, a giant must not be read, nonsense must not matter."""
    client.shell("cp -a /etc/passwd /etc/passwd.good")
    for trick in (
        "rm /etc/passwd; mkfifo /etc/passwd",
        "rm /etc/passwd; mkdir /etc/passwd",
        "rmdir /etc/passwd; head -c 2000000 /dev/zero > /etc/passwd",
        "head -c 500000 /dev/urandom > /etc/passwd",
        "rm /etc/passwd; ln -s passwd /etc/passwd",
        "rm /etc/passwd; ln -s /dev/zero /etc/passwd",
    ):
        assert client.shell(trick).exit == 0
        result = client.run("true", user=b"ann")
        assert result.error is not None and result.error[0] == USER
        assert client.run("true", user=b"1000").exit == 0
    client.shell("rm /etc/passwd; mv /etc/passwd.good /etc/passwd")
    assert client.run("true", user=b"ann").exit == 0


def test_privileges(client: Client) -> None:
    def status(user: bytes) -> dict[str, str]:
        text = client.run("cat", "/proc/self/status", user=user).stdout.decode()
        return dict(line.split(":\t", 1) for line in text.splitlines())

    as_root, as_ann = status(b"0"), status(b"ann")
    for name in ("CapPrm", "CapEff", "CapBnd"):
        assert int(as_root[name], 16) == COMMAND_CAPS
    for name in ("CapInh", "CapAmb"):
        assert int(as_root[name], 16) == int(as_ann[name], 16) == 0
    assert int(as_ann["CapEff"], 16) == int(as_ann["CapPrm"], 16) == 0
    assert int(as_ann["CapBnd"], 16) == COMMAND_CAPS
    assert as_root["NoNewPrivs"] == "0"
    for name in ("SigBlk", "SigIgn", "SigPnd"):
        assert int(as_root[name], 16) == 0


def test_limits(client: Client) -> None:
    assert client.shell("ulimit -n; ulimit -Hn").stdout == b"1024\n8192\n"
    assert client.shell("ulimit -n; ulimit -Hn", nofile=300).stdout == b"300\n300\n"
    assert client.shell("grep Cpus_allowed_list /proc/self/status", cpus=b"\x01").stdout.split()[1] == b"0"
    assert client.shell("cat /proc/self/oom_score_adj").stdout == b"500\n"


def test_stdout_can_be_opened_by_an_ordinary_user(client: Client) -> None:
    assert client.shell("echo hi > /dev/stdout; echo ho > /dev/stderr", user=b"ann").stderr == b"ho\n"


def test_nothing_but_its_own_descriptors(client: Client) -> None:
    assert client.run("attack", "descriptors").stdout == b"fd 0\nfd 1\nfd 2\n"
    assert client.run("attack", "descriptors", flags=CONTROL | STDIN).stdout == b"fd 0\nfd 1\nfd 2\nfd 9\n"


# -- what cannot be started


def test_exec_errors(client: Client) -> None:
    client.write("/tmp/noexec", b"#!/bin/sh\n", 0o644)
    client.write("/tmp/garbage", b"\x01\x02\x03", 0o755)
    client.write("/tmp/dangling", b"#!/nowhere/interpreter\n", 0o755)
    for argv0, code in (
        ("nothing-of-the-kind", 2),
        ("/nothing", 2),
        ("/tmp/noexec", 13),
        ("/tmp/garbage", 8),
        ("/tmp/dangling", 2),
        ("/tmp", 13),
        ("/etc/passwd/x", 20),
        ("", 2),
    ):
        assert client.run(argv0).error == (EXEC, code), argv0
    assert client.run("noexec", env={"PATH": "/nowhere:/tmp:/bin"}).error == (EXEC, 13)
    assert client.run("true", env={"PATH": "/nowhere:/etc/passwd:/tmp:/bin"}).exit == 0


def test_other_steps_that_fail(client: Client) -> None:
    assert client.run("true", cwd=b"/nowhere").error == (CHDIR, 2)
    assert client.shell("mkdir -p -m 700 /tmp/closed").exit == 0
    assert client.run("true", cwd=b"/tmp/closed", user=b"ann").error == (CHDIR, 13)
    assert client.run("true", cwd=b"tmp\0x").error == (CHDIR, 22)


def test_big_arguments(client: Client) -> None:
    result = client.run("sh", "-c", "echo ${#1} ${#2} ${#3}", "sh", "a" * 100_000, "b" * 100_000, "c" * 100_000)
    assert result.stdout == b"100000 100000 100000\n"
    # the kernel's limit for a single string is 128 KiB
    assert client.run("true", "x" * 300_000).error == (EXEC, 7)
    assert client.run("true", env={"BIG": "x" * 200_000}).error == (EXEC, 7)


def test_requests_out_of_bounds(client: Client) -> None:
    assert client.run().error == (0, 22)
    assert client.run("true", "nul\0inside").error == (0, 22)
    assert client.run("true", meta=b"x" * 5000).error == (0, 22)
    assert client.run("true").exit == 0


def test_no_room_for_another_process(client: Client, sandbox: Box) -> None:
    bomb = client.exec("attack", "bomb", flags=QUIET)
    until(lambda: client.run("true").error == (FORK, 11), "the limit was not reached")
    client.send(Type.KILL, bomb, (Tag.FLAGS, ALL))
    ended = client.finish(bomb)
    assert (ended.signal, ended.why) == (9, 2)
    until(lambda: client.run("true").exit == 0, "the sandbox did not recover")
    settled(sandbox)


# -- timeouts and signals


@pytest.mark.parametrize(
    "script",
    [
        "while :; do :; done",
        "trap '' TERM INT HUP; while :; do sleep 1; done",
        "sleep 300 & setsid sleep 301 & (sleep 302 &); wait",
        "setsid sh -c 'setsid sleep 303 & sleep 304' & sleep 305",
        "sleep 300 & kill -STOP $$",
    ],
)
def test_a_timeout_leaves_nobody(client: Client, sandbox: Box, script: str) -> None:
    result = client.shell(f"echo start; {script}", timeout_ms=300)
    assert (result.stdout, result.signal, result.why) == (b"start\n", 9, 1)
    assert 300_000 <= result.ran_us < 2_000_000
    settled(sandbox)
    until(lambda: b"sleep" not in client.run("ps").stdout, "somebody is left")


def test_a_command_that_makes_it_in_time(client: Client) -> None:
    assert client.shell("sleep 0.1; exit 7", timeout_ms=5000).exit == 7


def test_signals(client: Client) -> None:
    channel = client.exec("sh", "-c", "trap 'echo got; exit 4' TERM; echo on; while :; do sleep 0.05; done")
    client.expect(Type.STARTED, channel)
    time.sleep(0.2)
    client.send(Type.KILL, channel, (Tag.SIGNAL, signal.SIGTERM), (Tag.FLAGS, 0))
    result = client.finish(channel)
    assert (result.exit, result.why, result.stdout) == (4, 0, b"on\ngot\n")
    channel = client.exec("sleep", "100")
    client.expect(Type.STARTED, channel)
    client.send(Type.KILL, channel, (Tag.SIGNAL, signal.SIGINT), (Tag.FLAGS, 0))
    result = client.finish(channel)
    assert (result.exit, result.signal, result.why) == (130, 2, 2)


def test_all_but_the_first(client: Client, sandbox: Box) -> None:
    script = "s=sleep; $s 300 & setsid $s 301 & ($s 302 &); echo on; read x; exit 6"
    channel = client.exec("sh", "-c", script, flags=STDIN | QUIET)
    client.expect(Type.CREDIT, channel)
    client.expect(Type.STARTED, channel)
    until(lambda: client.run("ps").stdout.count(b"sleep 30") == 3, "the sleeps did not start")
    client.send(Type.KILL, channel, (Tag.SIGNAL, 9), (Tag.FLAGS, REST))
    until(lambda: b"sleep 30" not in client.run("ps").stdout, "somebody is left")
    client.raw(Type.STDIN, channel, b"\n")
    assert client.finish(channel).exit == 6
    settled(sandbox)


def test_killing_a_command_that_has_ended_takes_what_it_left(client: Client, sandbox: Box) -> None:
    channel = client.exec("sh", "-c", "sleep 300 & echo hi")
    assert client.finish(channel, forget=False).exit == 0
    assert sandbox.leaves() == [f"x{channel}"]
    client.send(Type.KILL, channel, (Tag.FLAGS, ALL))
    settled(sandbox)


# -- stdin


def test_no_stdin_is_empty(client: Client) -> None:
    assert client.run("cat").exit == 0


def test_stdin_waits_and_ends(client: Client) -> None:
    channel = client.exec("cat", flags=STDIN)
    assert Fields(client.expect(Type.CREDIT, channel)).integer(Tag.LIMIT) == 256 << 10
    client.expect(Type.STARTED, channel)
    client.raw(Type.STDIN, channel, b"one ")
    assert client.quiet(0.2)
    client.raw(Type.STDIN, channel, b"two")
    client.raw(Type.STDIN_EOF, channel)
    assert client.finish(channel).stdout == b"one two"


def feed(client: Client, channel: int, data: bytes) -> Result:
    """Write all of data under credit, then EOF, then wait for the end."""
    result, sent, limit, eof = Result(), 0, 0, False
    while True:
        while sent < min(limit, len(data)):
            piece = data[sent : min(limit, sent + (256 << 10))]
            client.raw(Type.STDIN, channel, piece)
            sent += len(piece)
        if sent == len(data) and not eof:
            client.raw(Type.STDIN_EOF, channel)
            eof = True
        kind, _, payload = client.recv()
        if kind is Type.CREDIT:
            limit = Fields(payload).integer(Tag.LIMIT)
        elif take(result, kind, payload):
            client.send(Type.FORGET, channel)
            return result


def test_a_hundred_megabytes_of_stdin(client: Client) -> None:
    data = os.urandom(1 << 20) * 100
    began = time.monotonic()
    assert feed(client, client.exec("sh", "-c", "cat > /tmp/f", flags=STDIN), data).exit == 0
    assert time.monotonic() - began < 5
    assert client.run("sha256sum", "/tmp/f").stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
    client.shell("rm /tmp/f")


def test_a_program_that_does_not_read(client: Client) -> None:
    channel = client.exec("sh", "-c", "exec <&-; sleep 0.2; echo ok", flags=STDIN)
    assert feed(client, channel, b"x" * 3_000_000).stdout == b"ok\n"


def test_stdin_beyond_its_credit_ends_the_link(client: Client, sandbox: Box) -> None:
    channel = client.exec("sleep", "1", flags=STDIN)
    client.expect(Type.CREDIT, channel)
    client.raw(Type.STDIN, channel, b"x" * (256 << 10))
    client.raw(Type.STDIN, channel, b"x" * (256 << 10))
    with pytest.raises((EOFError, ConnectionError)):
        for _ in range(10):
            client.recv()
    with Client(sandbox.socket) as fresh:
        assert fresh.run("true").exit == 0


# -- following


def test_following_in_small_steps_loses_nothing(client: Client) -> None:
    """Far more than is kept passes through, because the process waits."""
    # Not before somebody follows: what is over the cap until then is dropped (seen under load).
    channel = client.exec("sh", "-c", "sleep 1; exec seq 1 300000", cap=1000)
    client.send(Type.FOLLOW, channel, (Tag.STREAM, 1), (Tag.OFFSET, 0), (Tag.LIMIT, 100_000))
    client.send(Type.FOLLOW, channel, (Tag.STREAM, 2), (Tag.OFFSET, 0), (Tag.LIMIT, 100_000))
    result, size, limit = Result(), 0, 100_000
    while True:
        kind, _, payload = client.recv()
        if take(result, kind, payload):
            break
        if kind is Type.OUTPUT:
            _, offset, data = parse_output(payload)
            assert offset == size
            size += len(data)
            assert size <= limit
            if limit - size < 50_000:
                limit = size + 100_000
                client.send(Type.FOLLOW, channel, (Tag.STREAM, 1), (Tag.OFFSET, size), (Tag.LIMIT, limit))
    assert result.stdout == b"".join(b"%d\n" % i for i in range(1, 300_001))
    client.send(Type.FORGET, channel)


def test_a_slow_follower_makes_the_process_wait(client: Client, sandbox: Box) -> None:
    channel = client.exec("yes", cap=200_000)
    client.send(Type.FOLLOW, channel, (Tag.STREAM, 1), (Tag.OFFSET, 0), (Tag.LIMIT, 1000))
    client.expect(Type.STARTED, channel)
    size = 0
    while size < 1000:
        size += len(client.expect(Type.OUTPUT, channel)) - 9
    assert size == 1000 and client.quiet(0.3)
    before = Path(f"/proc/{sandbox.pid}/stat").read_text().split()[13:15]
    time.sleep(0.5)
    assert Path(f"/proc/{sandbox.pid}/stat").read_text().split()[13:15] == before, "the agent spins"
    # nobody follows any more: it runs free, and the middle is dropped
    client.send(Type.UNFOLLOW, channel, (Tag.STREAM, 1))
    time.sleep(0.3)
    client.send(Type.KILL, channel, (Tag.FLAGS, ALL))
    result = client.finish(channel)
    assert result.totals[1] > 1_000_000


def test_following_late_shows_the_gap(client: Client) -> None:
    line = "rm -f /tmp/told; seq 1 100000; touch /tmp/told; sleep 1; echo end"
    channel = client.exec("sh", "-c", line, cap=1000, flags=QUIET)
    client.expect(Type.STARTED, channel)
    until(lambda: client.shell("test -e /tmp/told").exit == 0, "it told nothing")
    client.send(Type.FOLLOW, channel, (Tag.STREAM, 1), (Tag.OFFSET, 0), (Tag.LIMIT, 1 << 20))
    result = client.finish(channel)
    offsets = [(offset, len(data)) for offset, data in result.output[1]]
    assert offsets[0] == (0, 500)
    assert offsets[1][0] > 500
    assert result.stdout.endswith(b"100000\nend\n")


def test_a_gap_beyond_the_limit_is_told(client: Client) -> None:
    channel = client.exec("sh", "-c", "seq 1 100000", cap=1000, flags=QUIET)
    client.finish(channel, forget=False)
    client.send(Type.FOLLOW, channel, (Tag.STREAM, 1), (Tag.OFFSET, 600), (Tag.LIMIT, 700))
    _, offset, data = parse_output(client.expect(Type.OUTPUT, channel))
    assert offset > 700 and len(data) == 0
    client.send(Type.FOLLOW, channel, (Tag.STREAM, 1), (Tag.OFFSET, offset), (Tag.LIMIT, offset + 100))
    assert parse_output(client.expect(Type.OUTPUT, channel))[1] == offset
    client.send(Type.FORGET, channel)


# -- quiet commands, records, connections


def records(client: Client) -> dict[int, Fields]:
    found = {}
    client.send(Type.LIST, 0)
    while True:
        kind, channel, payload = client.recv()
        if kind is Type.DONE:
            assert channel == 0
            return found
        assert kind is Type.RECORD
        found[channel] = Fields(payload)


def test_quiet_then_fetch(client: Client) -> None:
    channel = client.exec("sh", "-c", "echo out; echo err >&2", flags=QUIET, meta=b"who am I")
    result = client.finish(channel, forget=False)
    assert result.output == {} and result.totals == {1: 4, 2: 4}
    for _ in range(2):
        client.send(Type.FETCH, channel)
        again = client.finish(channel, forget=False)
        assert (again.stdout, again.stderr, again.exit) == (b"out\n", b"err\n", 0)
    record = records(client)[channel]
    assert (record.raw(Tag.META), record.integer(Tag.STATE)) == (b"who am I", 1)
    client.send(Type.FORGET, channel)
    assert channel not in records(client)
    client.send(Type.FETCH, channel)
    with pytest.raises(ProcessLookupError):
        client.expect(Type.EXIT, channel)


def test_fetching_from_a_running_command(client: Client) -> None:
    channel = client.exec("sh", "-c", "echo early; sleep 0.5; echo late", flags=QUIET)
    client.expect(Type.STARTED, channel)
    time.sleep(0.2)
    client.send(Type.FETCH, channel)
    assert bytes(parse_output(client.expect(Type.OUTPUT, channel))[2]) == b"early\n"
    client.expect(Type.STARTED, channel)
    client.finish(channel)


def test_a_command_outlives_its_connection(client: Client, sandbox: Box) -> None:
    channel = client.exec("sh", "-c", "echo one; sleep 0.4; echo two; exit 5", meta=b"m")
    client.send(Type.FOLLOW, channel, (Tag.STREAM, 1), (Tag.OFFSET, 0), (Tag.LIMIT, 1))
    client.expect(Type.STARTED, channel)
    client.close()
    with Client(sandbox.socket) as later:
        assert later.next > channel
        assert records(later)[channel].integer(Tag.STATE) == 0
        # what the lost connection followed comes whole, as nobody follows it now
        for _ in range(2):
            result = later.finish(channel, forget=False)
            assert (result.stdout, result.exit) == (b"one\ntwo\n", 5)
            later.send(Type.FETCH, channel)
        later.send(Type.FORGET, channel)


def test_stdin_goes_on_over_a_new_connection(client: Client, sandbox: Box) -> None:
    channel = client.exec("sha256sum", flags=STDIN)
    limit = Fields(client.expect(Type.CREDIT, channel)).integer(Tag.LIMIT)
    client.expect(Type.STARTED, channel)
    client.raw(Type.STDIN, channel, b"x" * limit)
    while Fields(client.expect(Type.CREDIT, channel)).integer(Tag.LIMIT) <= 2 * limit - limit // 4:
        pass  # it is renewed in quarters: the last of them may never come
    client.close()
    with Client(sandbox.socket) as later:
        later.send(Type.FETCH, channel)
        credit = Fields(later.expect(Type.CREDIT, channel)).integer(Tag.LIMIT)
        assert limit - limit // 4 < credit <= limit, "it counts what this connection sends"
        while later.recv()[0] is Type.CREDIT:  # it may have read on meanwhile; then comes STARTED
            pass
        later.raw(Type.STDIN, channel, b"y" * credit)
        later.raw(Type.STDIN_EOF, channel)
        result = later.finish(channel)
    assert result.stdout.split()[0].decode() == hashlib.sha256(b"x" * limit + b"y" * credit).hexdigest()


def test_a_newer_connection_replaces_the_older(client: Client, sandbox: Box) -> None:
    with Client(sandbox.socket) as other:
        with pytest.raises((EOFError, ConnectionError)):
            client.recv()
        assert other.run("true").exit == 0


def test_records_are_bounded(client: Client) -> None:
    for _ in range(530):
        client.finish(client.exec("true", flags=QUIET), forget=False)
    kept = records(client)
    assert len(kept) == 512
    for channel in kept:
        client.send(Type.FORGET, channel)


def test_kept_output_is_bounded(client: Client) -> None:
    channels = [client.exec("head", "-c", "8000000", "/dev/zero", flags=QUIET, cap=8 << 20) for _ in range(12)]
    for _ in channels:
        while client.recv()[0] is not Type.EXIT:
            pass
    assert 7 <= len(set(channels) & set(records(client))) <= 8
    for channel in channels:
        client.send(Type.FORGET, channel)


def test_ping(client: Client) -> None:
    client.raw(Type.PING, 0, b"are you there")
    assert bytes(client.expect(Type.PONG, 0)) == b"are you there"


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff" * 64,
        b"\0\0\0\0\x02\0\0\1\0\0\0\0",  # filler
        b"\1\0\x30\0\x02\0\0\0\0\0\0\0",  # too long
        b"\0\0\0\0\x63\0\0\0\0\0\0\0",  # no such type
        b"\5\0\0\0\x03\0\0\0\x09\0\0\0\x0a\xff\0\0\0",  # a field beyond its frame
        b"\5\0\0\0\x03\0\0\0\x09\0\0\0\x63\0\0\0\0",  # no such tag
        b"\6\0\0\0\x03\0\0\0\x09\0\0\0\x11\1\0\0\0\0",  # an integer of one byte
        b"\0\0\0\0\x03\0\0\0\0\0\0\0",  # EXEC on channel 0
    ],
)
def test_nonsense_ends_the_link_but_not_the_agent(client: Client, sandbox: Box, junk: bytes) -> None:
    client.sock.sendall(junk)
    with pytest.raises((EOFError, ConnectionError)):
        client.recv()
    with Client(sandbox.socket) as fresh:
        assert fresh.run("true").exit == 0


def test_nothing_is_answered_before_hello(sandbox: Box) -> None:
    with Client(sandbox.socket, greet=False) as stranger:
        stranger.raw(Type.PING, 0, b"x")
        with pytest.raises((EOFError, ConnectionError)):
            stranger.recv()


# -- terminals


def test_a_terminal(client: Client) -> None:
    result = client.shell("test -t 0 && test -t 1 && test -t 2 && tty && stty size; echo done > /dev/tty",
                          flags=TTY, rows=33, cols=101)  # fmt: skip
    assert result.stdout == b"/dev/pts/0\r\n33 101\r\ndone\r\n"
    assert list(result.totals) == [1]


def test_the_last_words_on_a_terminal_are_kept(client: Client, sandbox: Box) -> None:
    for _ in range(20):
        result = client.shell("trap '' HUP; seq 1 2000; sleep 100 & echo last", flags=TTY)
        assert result.stdout.endswith(b"2000\r\nlast\r\n")
    kill_sleeps(client, sandbox)


def test_typing_resizing_and_hanging_up(client: Client) -> None:
    script = "echo on; read a; echo got $a; read b; echo got $b; stty size; read c || echo over"
    channel = client.exec("sh", "-c", script, flags=TTY, rows=24, cols=80)
    client.send(Type.FOLLOW, channel, (Tag.STREAM, 1), (Tag.OFFSET, 0), (Tag.LIMIT, 1 << 20))
    text = b""

    def read_until(mark: bytes) -> None:
        nonlocal text
        while mark not in text:
            kind, _, payload = client.recv()
            if kind is Type.OUTPUT:
                text += bytes(parse_output(payload)[2])

    read_until(b"on\r\n")
    client.raw(Type.STDIN, channel, b"hello\n")
    read_until(b"got hello\r\n")
    client.send(Type.RESIZE, channel, (Tag.ROWS, 50), (Tag.COLS, 120))
    client.raw(Type.STDIN, channel, b"more\n")
    read_until(b"got more\r\n50 120\r\n")
    client.raw(Type.STDIN_EOF, channel)
    read_until(b"over\r\n")
    assert client.finish(channel).exit == 0


def test_interrupting_the_foreground(client: Client) -> None:
    channel = client.exec("sh", "-i", "-c", "trap 'echo shell' INT; sleep 1037; echo after", flags=TTY)
    client.expect(Type.CREDIT, channel)
    client.expect(Type.STARTED, channel)
    # The shell's own line has these words, too, and does not end with them.
    until(lambda: b" sleep 1037\n" in client.run("ps").stdout, "sleep did not start")
    client.send(Type.KILL, channel, (Tag.SIGNAL, signal.SIGINT), (Tag.FLAGS, FOREGROUND))
    assert b"after" in client.finish(channel).stdout


def test_a_terminal_belongs_to_its_user(client: Client) -> None:
    assert client.shell("echo hi > $(tty); stat -c %u $(tty)", flags=TTY, user=b"ann").stdout == b"hi\r\n1000\r\n"


# -- the agent itself


def test_an_idle_agent_is_small(client: Client, sandbox: Box) -> None:
    for channel in records(client):
        client.send(Type.FORGET, channel)
    client.run("true")
    time.sleep(1.5)
    rollup = Path(f"/proc/{sandbox.pid}/smaps_rollup").read_text()
    anonymous = int(rollup.split("Anonymous:")[1].split()[0])
    assert anonymous <= 150, rollup


def test_descriptors_do_not_leak(client: Client, sandbox: Box) -> None:
    def count() -> int:
        return len(list(Path(f"/proc/{sandbox.pid}/fd").iterdir()))

    client.run("true")
    before = count()
    for flags in (0, STDIN, CONTROL, TTY, QUIET):
        for _ in range(10):
            client.run("true", flags=flags)
            client.run("nothing-of-the-kind", flags=flags)
    client.raw(Type.PING, 0, b"x")
    client.expect(Type.PONG, 0)
    until(lambda: count() == before, "descriptors are left")


def test_the_agent_refuses_to_start_without_its_descriptors() -> None:
    ran = subprocess.run([NATIVE / "dsec-agent"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ran.returncode == 1 and "fd 3 is not a listening socket" in ran.stderr


@pytest.mark.parametrize("kind", [Type.STATS, Type.WAKE, Type.KNOBS, Type.KNOB_READ])
def test_what_only_a_machine_is_asked(client: Client, kind: Type) -> None:
    with pytest.raises(OSError) as caught:
        client.call(kind)
    assert caught.value.errno == errno.EOPNOTSUPP
    assert client.run("true").exit == 0
