# ruff: noqa: F811
"""Root inside the sandbox against the agent: it must not be able to see, signal, trace, read, stop or imitate it, nor
take a descriptor from it or from its children on their way to becoming a command. agent_attack.c is the attacker."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import pytest
from agent_box import COMMAND_CAPS, Box, Client, box, client, rootfs, sandbox, until  # noqa: F401

from dsecd.agent.frames import Field, Fields, Tag, Type

QUIET = 8
ALL = 1
EPERM, EACCES, ENOSYS = 1, 13, 38
SYS = {"clone": 56, "ptrace": 101, "mount": 165, "umount2": 166, "unshare": 272, "setns": 308, "keyctl": 250}


def deny(*names: str) -> bytes:
    """A filter in the shape of a runtime's: these calls give EPERM, clone only with CLONE_NEWUSER."""

    def statement(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
        return struct.pack("<HBBI", code, jt, jf, k)

    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    program = [statement(load, 0)]
    for name in names:
        program += [statement(equal, SYS[name], 0, 1), statement(give, 0x00050000 | EPERM)]
    program += [
        statement(equal, SYS["clone"], 0, 3),
        statement(load, 16),
        statement(any_bit, 0x10000000, 0, 1),
        statement(give, 0x00050000 | EPERM),
        statement(give, 0x7FFF0000),
    ]
    return b"".join(program)


HELLO: list[Field] = [
    (Tag.CAPS, COMMAND_CAPS),
    (Tag.SECCOMP, deny("ptrace", "mount", "umount2", "unshare", "setns", "keyctl")),
    (Tag.HOSTNAME, b"a-name-of-its-own"),
]


@pytest.fixture
def confined(rootfs: Path, request: pytest.FixtureRequest):
    """A sandbox whose commands run under a seccomp filter. Yields it and a client."""
    with box(rootfs.parent / request.node.name, rootfs) as started, Client(started.socket, HELLO) as connected:
        yield started, connected


def findings(client: Client, *argv: str) -> dict[str, int]:
    result = client.run("attack", *argv)
    text = result.stdout.decode()
    assert result.exit == 0 and "LEAK" not in text, text
    return {line.rsplit(" ", 1)[0]: int(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[-1].isdigit()}


def test_only_init_is_there_and_nothing_works_on_it(client: Client, sandbox: Box) -> None:
    result = client.run("attack", "probe").stdout.decode()
    assert "LEAK" not in result
    assert [line for line in result.splitlines() if line.startswith("pid ")] == ["pid 1 init"]
    found = {line.rsplit(" ", 1)[0]: int(line.rsplit(" ", 1)[1]) for line in result.splitlines()[1:]}
    for what in ("ptrace", "vm_read"):
        assert found[what] == EPERM, what
    # its directory of descriptors may be listed, and has none
    assert client.run("ls", "-A", "/proc/1/fd").stdout == b""
    for name in ("mem", "environ", "cwd", "root", "exe", "ns/pid", "ns/mnt"):
        assert found[f"open {name}"] == EACCES, name
    # these "work": a namespace's init takes no signal from inside it
    assert found["kill"] == found["stop"] == 0
    time.sleep(0.2)
    assert client.run("true").exit == 0
    assert sandbox.alive()


def test_every_number_is_tried(client: Client) -> None:
    found = findings(client, "scan")
    exists = {name for name in found if name.startswith("exists")}
    assert found["own_parent"] == 0, "the agent is nobody's parent as far as its children can tell"
    assert len(exists) == 0 or all(found[name] for name in exists)


def test_a_shell_that_kills_all_it_can(client: Client, sandbox: Box) -> None:
    client.shell("kill -9 -1; kill -9 1; kill -STOP -1; kill -STOP 1; for i in $(seq 300); do kill -9 $i; done")
    assert client.run("true").exit == 0
    assert sandbox.alive()


def test_orphans_are_reaped(client: Client) -> None:
    client.shell("for i in 1 2 3 4 5 6 7 8 9; do (sleep 0.1 &) ; done")
    until(lambda: len(client.run("ps").stdout.splitlines()) == 3, "zombies are left")


def test_nothing_of_the_agent_is_in_the_file_system(client: Client) -> None:
    script = (
        "ls -A /dev; cat /proc/mounts; cat /proc/net/unix; cat /proc/1/cmdline; cat /proc/*/comm;"
        "cat /proc/self/environ; find / -xdev -name '*dsec*'; ls -l /proc/self/fd"
    )
    text = client.shell(script).stdout.decode()
    assert "dsec-agent" not in text and "SECRET_OF_THE_HOST" not in text and "agent.sock" not in text
    unix = client.shell("cat /proc/net/unix").stdout.splitlines()
    assert len(unix) == 1, "no socket is to be seen"
    assert client.shell("cat /proc/mounts | grep -c ' /proc proc '").stdout == b"1\n", "one proc, nothing below it"


def test_masks(client: Client) -> None:
    assert client.read("/proc/version")
    for path in ("/proc/kcore", "/proc/timer_list", "/proc/keys", "/proc/kallsyms", "/proc/kmsg"):
        assert client.shell(f"test -e {path} || exit 9; head -c 100 {path}").stdout == b"", path
    assert client.shell("ls -A /sys/firmware").stdout == b""
    for path in ("/proc/sys/kernel/panic", "/proc/sysrq-trigger", "/proc/irq/default_smp_affinity"):
        result = client.shell(f"test -e {path} || exit 0; echo 1 > {path}")
        assert b"Read-only" in result.stderr or b"denied" in result.stderr or result.exit == 0, path
    assert b"ro," in client.shell("grep ' /proc/sys ' /proc/mounts").stdout


@pytest.mark.parametrize("user", [b"root", b"ann"])
def test_children_on_their_way_are_as_closed_as_the_agent(client: Client, sandbox: Box, user: bytes) -> None:
    """The attacker stops every new process as soon as it exists, and has all its descriptors, memory and names."""
    attacker = client.exec("attack", "race", "4", user=b"root", flags=QUIET)
    client.send(Type.FOLLOW, attacker, (Tag.STREAM, 1), (Tag.OFFSET, 0), (Tag.LIMIT, 1 << 20))
    output = b""
    while b"ready" not in output:
        kind, _, payload = client.recv()
        output += bytes(payload[9:]) if kind is Type.OUTPUT else b""
    started, ended = 0, set()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        channel = client.exec("true", user=user, meta=b"m" * 1000)
        started += 1
        while channel not in ended:
            kind, number, payload = client.recv()
            if kind is Type.OUTPUT and number == attacker:
                output += bytes(payload[9:])
            elif kind in (Type.EXIT, Type.ERROR):
                ended.add(number)
        client.send(Type.FORGET, channel)
    while attacker not in ended:
        kind, number, payload = client.recv()
        output += bytes(payload[9:]) if kind is Type.OUTPUT else b""
        if kind is Type.EXIT:
            ended.add(number)
    assert started > 50
    assert b"LEAK" not in output, output.decode()
    assert int(output.split(b"caught ")[1].split()[0]) > 0, "none was caught before its exec: this proved nothing"
    assert client.run("true").exit == 0


def test_stopped_children_do_not_stop_the_agent(client: Client, sandbox: Box) -> None:
    attacker = client.exec("attack", "freeze", "3", flags=QUIET)
    client.send(Type.FOLLOW, attacker, (Tag.STREAM, 1), (Tag.OFFSET, 0), (Tag.LIMIT, 1 << 20))
    client.expect(Type.STARTED, attacker)
    client.expect(Type.OUTPUT, attacker)
    frozen = [client.exec("true", timeout_ms=1500, flags=QUIET) for _ in range(60)]
    began = time.monotonic()
    client.raw(Type.PING, 0, b"x")
    while client.recv()[0] is not Type.PONG:
        pass
    assert time.monotonic() - began < 1, "the agent waits for a child that the tenant has stopped"
    ended = {}
    while set(ended) != {*frozen, attacker}:
        kind, number, payload = client.recv()
        if kind is Type.EXIT:
            ended[number] = Fields(payload)
    assert any(ended[n].integer(Tag.WHY) == 1 for n in frozen), "none was caught"


def test_namespaces_under_a_filter(confined: tuple[Box, Client]) -> None:
    _, client = confined
    assert client.shell("hostname").stdout == b"a-name-of-its-own\n"
    found = findings(client, "namespaces")
    assert found.pop("clone3_newuser") == ENOSYS
    assert found.pop("mknod") == EPERM
    assert set(found.values()) == {EPERM}, found
    status = client.run("cat", "/proc/self/status").stdout.decode()
    assert "Seccomp:\t2" in status and "Seccomp_filters:\t2" in status and "NoNewPrivs:\t0" in status
    as_ann = client.run("cat", "/proc/self/status", user=b"ann").stdout.decode()
    assert "Seccomp_filters:\t2" in as_ann


def test_everything_works_under_a_filter(confined: tuple[Box, Client]) -> None:
    started, client = confined
    assert client.shell("tty", flags=1).stdout.startswith(b"/dev/pts/")
    client.write("/tmp/a/f", b"x", flags=1)
    assert client.read("/tmp/a/f") == b"x"
    data, _ = client.get(Type.TREE_GET, (Tag.PATH, b"/tmp/a"))
    client.put(Type.TREE_PUT, data, (Tag.PATH, b"/tmp/b"), (Tag.FLAGS, 0))
    assert client.shell("sleep 100 & sleep 100", timeout_ms=200).why == 1
    until(lambda: not started.leaves(), "a cgroup is left")
    # a later HELLO greets and changes nothing
    with Client(started.socket, [(Tag.CAPS, (1 << 41) - 1)]) as again:
        assert "CapEff:\t00000000a80425fb" in again.run("cat", "/proc/self/status").stdout.decode()
        assert "Seccomp_filters:\t2" in again.run("cat", "/proc/self/status").stdout.decode()


def test_a_wrong_filter_is_refused_and_nothing_runs(rootfs: Path) -> None:
    with box(rootfs.parent / "wrong-filter", rootfs) as started:
        for code in (b"", b"1234567", struct.pack("<HBBI", 0xFFFF, 0, 0, 0)):
            with Client(started.socket, greet=False) as client:
                client.send(Type.HELLO, 0, (Tag.VERSION, 1), (Tag.CAPS, 0), (Tag.SECCOMP, code))
                with pytest.raises(OSError):
                    client.expect(Type.READY, 0)
                client.exec("true")
                with pytest.raises((EOFError, ConnectionError)):
                    client.recv()
        with Client(started.socket, greet=False) as client:
            client.send(Type.HELLO, 0, (Tag.VERSION, 2), (Tag.CAPS, 0))
            with pytest.raises(OSError):
                client.expect(Type.READY, 0)


def test_an_apparmor_profile_that_is_not_there_fails_closed(rootfs: Path) -> None:
    hello: list[Field] = [(Tag.CAPS, COMMAND_CAPS), (Tag.APPARMOR, b"no-such-profile")]
    with box(rootfs.parent / "apparmor", rootfs) as started, Client(started.socket, hello) as client:
        result = client.run("true")
        assert result.error is not None and result.exit == -1


def test_the_end_of_init_is_the_end_of_all(rootfs: Path) -> None:
    with box(rootfs.parent / "init-dies", rootfs) as started, Client(started.socket) as client:
        channel = client.exec("sleep", "100")
        client.expect(Type.STARTED, channel)
        os.kill(started.children()[0], 9)
        with pytest.raises((EOFError, ConnectionError)):
            while True:
                client.recv(2)
        until(lambda: not started.alive(), "the agent lives on")


def test_the_end_of_the_agent_is_the_end_of_all(rootfs: Path) -> None:
    with box(rootfs.parent / "agent-dies", rootfs) as started, Client(started.socket) as client:
        channel = client.exec("sh", "-c", "setsid sleep 100 & sleep 100")
        client.expect(Type.STARTED, channel)
        began = time.monotonic()
        os.kill(started.pid, 9)
        with pytest.raises((EOFError, ConnectionError)):
            client.recv(2)
        assert time.monotonic() - began < 2
        until(lambda: not any((started.cgroup / leaf / "cgroup.procs").read_text() for leaf in started.leaves()),
              "processes are left")  # fmt: skip


def test_shutdown(rootfs: Path) -> None:
    with box(rootfs.parent / "shutdown", rootfs) as started, Client(started.socket) as client:
        channel = client.exec("sh", "-c", "trap '' TERM; setsid sleep 100 & sleep 100")
        client.expect(Type.STARTED, channel)
        client.raw(Type.SHUTDOWN, 0)
        with pytest.raises((EOFError, ConnectionError)):
            client.recv(2)
        until(lambda: not started.alive(), "the agent lives on")


def test_out_of_memory_kills_the_command_not_the_agent(rootfs: Path) -> None:
    with box(rootfs.parent / "oom", rootfs, memory=64 << 20) as started, Client(started.socket) as client:
        result = client.shell("tail /dev/zero", timeout_ms=20_000)
        assert result.signal == 9 and result.why == 0
        assert client.run("true").exit == 0


def test_the_sandbox_loses_its_programs(client: Client) -> None:
    client.shell("cp -a /bin /bin.good; rm -rf /bin/*")
    assert client.run("true").error == (2, 2)
    data, _ = client.get(Type.TREE_GET, (Tag.PATH, b"/bin.good"))
    client.put(Type.TREE_PUT, data, (Tag.PATH, b"/bin"), (Tag.FLAGS, 0))
    assert client.run("true").exit == 0


def test_the_tenant_replaces_what_is_in_dev(client: Client) -> None:
    client.shell(
        "rm -rf /dev/null /dev/ptmx /dev/pts/ptmx /dev/stdout /dev/fd; mkfifo /dev/ptmx; echo junk > /dev/stdout"
    )
    assert client.run("cat").exit == 0, "stdin is still empty"
    assert client.shell("test -t 0 && echo tty", flags=1).stdout == b"tty\r\n"
