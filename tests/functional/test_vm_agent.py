"""The agent as init of a virtual machine: real QEMU, EROFS layers over pmem with DAX, a serial port as the link.

Two machines serve most tests: `vm` as the daemon runs them, with the filter of commands; `bare` without one and with
CAP_MKNOD, for what the tenant tries with more than he has. Only one client can be connected at a time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest
from agent_box import COMMAND_CAPS, NATIVE, rootfs, until  # noqa: F401
from vmkit import Parts, SerialClient, SerialSocket, Vm, parts

from dsecd.agent.frames import Field, Fields, FrameError, Tag, Type
from dsecd.container.seccomp import caps_mask, command_filter
from dsecd.vmm.initramfs import CpioWriter

pytestmark = pytest.mark.slow

QUIET, KILL_ALL = 8, 1
BIG = 20_000_000
MIB = 1 << 20
MACHINE = "/sys/kernel/mm/damon/admin/kdamonds"


@pytest.fixture(scope="module")
def hello() -> list[Field]:
    """What the daemon says."""
    return [(Tag.CAPS, caps_mask()), (Tag.SECCOMP, command_filter()), (Tag.HOSTNAME, b"box")]


@pytest.fixture(scope="module")
def made(rootfs: Path) -> Iterator[Parts]:  # noqa: F811
    """Two layers: a toolkit with a big file over a root with busybox."""
    tool = rootfs.parent / "tool"
    (tool / "opt").mkdir(parents=True)
    (tool / "opt/big").write_bytes(os.urandom(BIG))
    (tool / "opt/layer").write_text("upper\n")
    (rootfs / "opt").mkdir()
    (rootfs / "opt/layer").write_text("lower\n")
    with parts(tool, rootfs) as ready:
        yield ready


def _running(vm: Vm) -> Iterator[Vm]:
    leftovers.tolerated.append(lambda item: item.startswith(f"process {vm.process.pid} ("))
    try:
        yield vm
        assert vm.process.poll() is None, f"the machine ended\n{vm.console()[-3000:]}"
    finally:
        leftovers.tolerated.pop()


@pytest.fixture(scope="module")
def vm(made: Parts) -> Iterator[Vm]:
    with Vm(made) as started:
        yield from _running(started)


@pytest.fixture(scope="module")
def bare(made: Parts) -> Iterator[Vm]:
    with Vm(made) as started:
        yield from _running(started)


@pytest.fixture
def client(vm: Vm, hello: list[Field]) -> Iterator[SerialClient]:
    with vm.client(hello) as connected:
        yield connected
    assert "dsec-agent:" not in vm.console()


@pytest.fixture
def tenant(bare: Vm) -> Iterator[SerialClient]:
    with bare.client([(Tag.CAPS, COMMAND_CAPS)]) as connected:
        yield connected


def stats(client: SerialClient) -> Fields:
    return client.call(Type.STATS)


def meminfo(client: SerialClient, name: str) -> int:
    """Bytes."""
    return int(client.shell(f"grep ^{name}: /proc/meminfo").stdout.split()[1]) << 10


# -- how it boots


def test_boots_to_ready(vm: Vm, client: SerialClient, record_property: pytest.FixtureRequest) -> None:
    record_property("boot_s", round(vm.boot_s, 2))  # type: ignore[operator]
    print(f"READY after {vm.boot_s:.2f} s")
    result = client.shell("printf hello; echo bad >&2; exit 3")
    assert (result.exit, result.stdout, result.stderr) == (3, b"hello", b"bad\n")
    assert client.shell("kill -9 $$").signal == 9
    assert client.shell("hostname").stdout == b"box\n"


def test_the_root_is_the_layers(client: SerialClient) -> None:
    mounts = [line.split() for line in client.run("cat", "/proc/mounts").stdout.decode().splitlines()]
    assert mounts[0][1:3] == ["/", "overlay"] and "nodev" in mounts[0][3]
    assert {words[2] for words in mounts} == {"overlay", "proc", "sysfs", "tmpfs", "devpts", "mqueue"}
    assert client.run("cat", "/opt/layer").stdout == b"upper\n"
    assert client.shell("echo mine > /opt/layer; cat /opt/layer; ls /opt").stdout == b"mine\nbig\nlayer\n"
    assert client.shell("ls -d /init /l /u /r /modules 2>/dev/null").stdout == b"", (
        "something of the initramfs is there"
    )


def test_dax_reads_leave_no_copy_in_the_guest(client: SerialClient, made: Parts, hello: list[Field]) -> None:
    """The same with disks is the other half: there the copy must show, or this would prove nothing."""

    def read(at: SerialClient) -> int:
        before = meminfo(at, "Cached")
        assert at.shell("cat /opt/big | wc -c").stdout.split() == [b"%d" % BIG]
        return meminfo(at, "Cached") - before

    assert read(client) < 3 * MIB
    with Vm(made, blk=True) as disks, disks.client(hello) as other:
        assert read(other) > BIG * 0.9


def test_dev_has_what_a_container_has(client: SerialClient) -> None:
    names = client.run("ls", "/dev").stdout.split()
    assert names == [b"fd", b"full", b"mqueue", b"null", b"ptmx", b"pts", b"random", b"shm", b"stderr", b"stdin",
                     b"stdout", b"tty", b"urandom", b"zero"]  # fmt: skip
    assert client.shell("stat -c %a /dev/shm /dev/null /dev/pts/ptmx").stdout.split() == [b"1777", b"666", b"666"]
    assert client.shell("tty; echo x > /dev/tty", flags=1).stdout == b"/dev/pts/0\r\nx\r\n"
    assert client.shell("head -c 8 /dev/urandom | wc -c; echo > /dev/full").stderr.endswith(
        b"No space left on device\n"
    )
    assert client.shell("touch /sys/x; echo 1 > /proc/sys/kernel/panic").stderr.count(b"Read-only") == 2


def test_the_kernel_is_locked(client: SerialClient) -> None:
    for name, value in (("modules_disabled", b"1\n"), ("kexec_load_disabled", b"1\n"), ("dmesg_restrict", b"1\n")):
        got = client.shell(f"cat /proc/sys/kernel/{name} 2>/dev/null || echo {value.decode().strip()}")
        assert got.stdout == value, name


def test_limits_of_a_command(client: SerialClient) -> None:
    assert client.shell("ulimit -n; ulimit -Hn").stdout == b"1024\n1048576\n"
    assert client.shell("cat /proc/self/oom_score_adj; nproc").stdout == b"500\n2\n"


# -- the link


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def command_of(client: SerialClient, script: str) -> int:
    channel = client.exec("sh", "-c", script, cap=64 << 20, flags=QUIET)
    client.send(Type.FOLLOW, channel, (Tag.STREAM, 1), (Tag.OFFSET, 0), (Tag.LIMIT, 64 << 20))
    return channel


def test_a_reconnection_in_the_middle_of_output(vm: Vm, hello: list[Field]) -> None:
    with vm.client(hello) as first:
        channel = command_of(first, "cat /opt/big; sleep 1; cat /opt/big")
        got = 0
        while got < 3_000_000:
            kind, _, payload = first.recv()
            got += len(payload) if kind is Type.OUTPUT else 0
    with vm.client(hello) as second:
        second.send(Type.FETCH, channel)
        assert second.finish(channel, forget=False).exit == 0
        second.send(Type.FETCH, channel)
        result = second.finish(channel)
        assert result.totals[1] == len(result.stdout) == 2 * BIG
        assert result.stdout[:BIG] == result.stdout[BIG:]
        assert sha256(result.stdout[:BIG]) == second.run("sha256sum", "/opt/big").stdout[:64]


def test_a_reconnection_in_the_middle_of_a_write(vm: Vm, hello: list[Field]) -> None:
    """Twice: what is cut leaves nothing, what follows is whole. Half of the bytes are the escape itself."""
    data = b"\xfe\xff\xfe\x00" * (BIG // 8) + os.urandom(BIG // 2)
    with vm.client(hello) as first:
        channel = first.channel()
        first.send(Type.WRITE, channel, (Tag.PATH, b"/root/f"), (Tag.MODE, 0o644), (Tag.FLAGS, 0))
        limit = Fields(first.expect(Type.CREDIT, channel)).integer(Tag.LIMIT)
        for at in range(0, limit, 256 << 10):
            first.raw(Type.DATA, channel, data[at : at + (256 << 10)])
        # a frame that is not whole
        first.sock.sendall(struct.pack("<IB3xI", 100_000, Type.PING, 0) + data[:5000])
    with vm.client(hello) as second:
        assert second.shell("ls -A /root").stdout == b"", "half a file is left"
        second.write("/root/f", data)
        assert second.run("sha256sum", "/root/f").stdout[:64] == sha256(data)
        assert second.read("/root/f") == data
        second.shell("rm /root/f")


def test_many_reconnections(vm: Vm, hello: list[Field]) -> None:
    for number in range(20):
        with vm.client(hello) as client:
            channel = command_of(client, "yes | head -c 300000")
            for _ in range(number % 4):
                client.recv()
            client.send(Type.KILL, channel, (Tag.SIGNAL, 9), (Tag.FLAGS, KILL_ALL))
    with vm.client(hello) as client:
        assert client.run("echo", "fine").stdout == b"fine\n"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xfe",
        b"\xfe\x00",
        b"\xfe\x00" + b"0" * 15,
        b"\xfe\x00zz",
        b"\xfe\xfe\xfe",
        b"\0" * 100_000,
        b"\xff\xfe" * 50_000,
    ],
    ids=lambda g: f"{g[:4].hex()}-{len(g)}",
)
def test_a_beginning_after_garbage(vm: Vm, hello: list[Field], garbage: bytes) -> None:
    raw = SerialSocket(vm.socket, sync=False)
    raw.raw.sendall(garbage)
    raw.synchronise()
    raw.close()
    with vm.client(hello) as client:
        assert client.run("echo", "fine").stdout == b"fine\n"


@pytest.mark.parametrize("wrong", [b"\xfe\x01", struct.pack("<IB3xI", 0, 200, 0), struct.pack("<IB3xI", 1 << 30, 2, 0)])
def test_who_breaks_the_protocol_hears_that_it_is_over(vm: Vm, hello: list[Field], wrong: bytes) -> None:
    with vm.client(hello) as client:
        client.sock.raw.sendall(wrong)
        with pytest.raises(FrameError):
            while True:
                client.recv()
    with vm.client(hello) as client:
        assert client.run("echo", "fine").stdout == b"fine\n"


def cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def test_nobody_connected_costs_nothing(vm: Vm, hello: list[Field]) -> None:
    """The port reports a hang-up all that time."""
    with vm.client(hello) as client:
        client.run("true")
    time.sleep(0.5)
    before = cpu_seconds(vm.process.pid)
    time.sleep(3)
    assert cpu_seconds(vm.process.pid) - before < 1
    with vm.client(hello) as client:
        assert client.run("true").exit == 0


# -- what only a machine is asked


def test_stats(client: SerialClient) -> None:
    found = stats(client)
    assert found.integer(Tag.MEM_TOTAL) > found.integer(Tag.MEM_AVAILABLE) > 50 * MIB
    assert found.integer(Tag.DISK_LIMIT) > 50 * MIB
    client.shell("head -c 10000000 /dev/zero > /root/f; sync")
    grown = stats(client)
    assert 9 * MIB < grown.integer(Tag.DISK_USED) - found.integer(Tag.DISK_USED) < 12 * MIB
    assert grown.integer(Tag.MEM_FILE) > 9 * MIB
    assert grown.integer(Tag.MEM_PEAK) >= grown.integer(Tag.MEM_CURRENT) > 0
    assert grown.integer(Tag.CPU_US) > found.integer(Tag.CPU_US)
    script = "x=$(head -c 30000000 /dev/zero | tr '\\0' x); sleep 100 & sleep 100; echo $x"
    channel = client.exec("sh", "-c", script, flags=QUIET)
    client.expect(Type.STARTED, channel)
    try:
        until(lambda: stats(client).integer(Tag.MEM_ANON) > 25 * MIB, "30 MB in a shell's variable", 60)
        until(lambda: stats(client).integer(Tag.TASKS) == 3, "three tasks", 30)
    finally:
        client.send(Type.KILL, channel, (Tag.FLAGS, KILL_ALL))
    client.finish(channel)
    until(lambda: stats(client).integer(Tag.TASKS) == 0, "tasks are left", 30)
    client.shell("rm /root/f")


def test_wake_sets_clock_name_and_entropy(client: SerialClient) -> None:
    now = 2_000_000_000
    client.call(Type.WAKE, (Tag.REALTIME_NS, now * 10**9), (Tag.SEED, os.urandom(256)), (Tag.HOSTNAME, b"again"))
    assert now <= int(client.run("date", "+%s").stdout) < now + 30
    assert client.run("hostname").stdout == b"again\n"
    client.call(Type.WAKE, (Tag.REALTIME_NS, time.time_ns()))
    assert abs(int(client.run("date", "+%s").stdout) - time.time()) < 30
    client.call(Type.WAKE)
    for wrong in ((Tag.SEED, b""), (Tag.SEED, b"x" * 257), (Tag.HOSTNAME, b"x" * 65), (Tag.PATH, b"/")):
        with pytest.raises(OSError):
            client.call(Type.WAKE, wrong)
    pair = b"192.0.2.1/192.0.2.0"  # this machine has no card
    for net in (
        b"",
        b"/",
        b"192.0.2.1",
        b"192.0.2.1/x",
        pair,
        pair + b"/::1",
        pair + b"/::1/::2/",
        b"1" * 128,
        b"1\0/2",
    ):
        with pytest.raises(OSError):
            client.call(Type.WAKE, (Tag.NET, net))


def knobs(client: SerialClient, *pairs: tuple[str, str]) -> Fields:
    return client.call(Type.KNOBS, *[f for k, v in pairs for f in ((Tag.PATH, k.encode()), (Tag.DATA, v.encode()))])


def knob(client: SerialClient, *paths: str) -> list[bytes]:
    return [bytes(v) for v in client.call(Type.KNOB_READ, *[(Tag.PATH, p.encode()) for p in paths]).all(Tag.DATA)]  # type: ignore[arg-type]


def test_knobs(client: SerialClient) -> None:
    knobs(client, (f"{MACHINE}/nr_kdamonds", "1"), (f"{MACHINE}/0/contexts/nr_contexts", "1"))
    paths = f"{MACHINE}/nr_kdamonds", f"{MACHINE}/0/contexts/nr_contexts", f"{MACHINE}/0/state"
    assert knob(client, *paths) == [b"1\n", b"1\n", b"off\n"]
    with pytest.raises(OSError, match=f"{MACHINE}/0/contexts/0/operations"):
        knobs(client, (f"{MACHINE}/0/contexts/0/operations", "nonsense"), (f"{MACHINE}/nr_kdamonds", "0"))
    assert knob(client, paths[0]) == [b"1\n"], "it went on after an error"
    knobs(client, (f"{MACHINE}/nr_kdamonds", "0"))


@pytest.mark.parametrize(
    "path",
    ["/sys/kernel/mm/damon", "/sys/kernel/mm/damon/../../profiling", "/sys/power/state", "sys/kernel/mm/damon/x", "",
     "/sys/kernel/mm/damonx", "/etc/passwd", "/proc/sys/kernel/panic", "/sys/kernel/mm/damon/" + "a" * 600,
     "/sys/kernel/mm/damon/a\0b"],
)  # fmt: skip
def test_knobs_elsewhere_are_refused(client: SerialClient, path: str) -> None:
    with pytest.raises(PermissionError):
        knobs(client, (path, "1"))
    with pytest.raises(PermissionError):
        knob(client, path)


def test_knobs_that_are_not_valid(client: SerialClient) -> None:
    for fields in ([(Tag.PATH, b"x")], [(Tag.DATA, b"x")], [(Tag.PATH, b"x"), (Tag.PATH, b"x")], [(Tag.UID, 1)]):
        with pytest.raises(OSError):
            client.call(Type.KNOBS, *fields)
    with pytest.raises(OSError):
        client.call(Type.KNOBS, (Tag.PATH, b"x"), (Tag.DATA, b"x" * 70_000))
    assert client.run("true").exit == 0


def test_answers_to_a_connection_that_is_gone_go_nowhere(vm: Vm, hello: list[Field]) -> None:
    with vm.client(hello) as first:
        for _ in range(20):
            first.send(Type.WAKE, first.channel())
    with vm.client(hello) as second:
        assert second.quiet(0.3)
        assert list(second.call(Type.WAKE).pairs()) == []


# -- limits


def test_a_fork_bomb(client: SerialClient) -> None:
    before = stats(client).integer(Tag.PIDS_HITS)
    bomb = client.exec("attack", "bomb", flags=QUIET)
    client.expect(Type.STARTED, bomb)
    until(lambda: stats(client).integer(Tag.PIDS_HITS) > before, "the limit was not hit", 30)
    assert stats(client).integer(Tag.TASKS) == 128
    began = time.monotonic()
    client.send(Type.KILL, bomb, (Tag.SIGNAL, 9), (Tag.FLAGS, KILL_ALL))
    assert client.finish(bomb).signal == 9
    print(f"the bomb was gone after {time.monotonic() - began:.2f} s")
    until(lambda: stats(client).integer(Tag.TASKS) == 0, "tasks are left", 30)


def test_out_of_memory(client: SerialClient) -> None:
    before = stats(client).integer(Tag.OOM_KILLS)
    result = client.shell("tail /dev/zero", timeout_ms=60_000)
    assert (result.signal, result.why) == (9, 0)
    assert stats(client).integer(Tag.OOM_KILLS) == before + 1
    # in /dev/shm, which no process's death frees; and many at once
    client.shell("for i in 1 2 3 4 5 6; do tail /dev/zero & done; cat /dev/zero > /dev/shm/x; wait", timeout_ms=120_000)
    assert stats(client).integer(Tag.OOM_KILLS) > before + 1
    client.shell("rm -f /dev/shm/x")
    assert stats(client).integer(Tag.MEM_AVAILABLE) > 50 * MIB


def test_a_full_disk(client: SerialClient) -> None:
    result = client.shell("cat /dev/zero > /root/f")
    assert result.exit == 1 and b"No space left" in result.stderr
    found = stats(client)
    assert found.integer(Tag.DISK_LIMIT) - found.integer(Tag.DISK_USED) < MIB
    with pytest.raises(OSError) as caught:
        client.write("/root/g", b"x" * 4 * MIB)
    assert caught.value.errno == errno.ENOSPC
    assert client.run("echo", "fine").stdout == b"fine\n"
    client.shell("rm /root/f; sync")
    client.write("/root/g", b"x" * 4 * MIB)
    client.shell("rm /root/g; sync")


# -- what the tenant tries


def test_the_agent_is_out_of_reach(tenant: SerialClient) -> None:
    text = tenant.run("attack", "probe").stdout.decode() + tenant.run("attack", "scan").stdout.decode()
    assert "LEAK" not in text and "pid 1 init" in text
    assert [line for line in text.splitlines() if line.startswith("pid ")] == ["pid 1 init"]
    tenant.shell("kill -9 -1; kill -9 1; kill -STOP -1; for i in $(seq 300); do kill -9 $i; kill -STOP $i; done")
    assert tenant.run("echo", "fine").stdout == b"fine\n"
    seen = tenant.shell("cat /proc/*/comm; cat /proc/*/cmdline; cat /proc/net/unix; ls -l /proc/self/fd /proc/1/")
    assert b"dsec" not in seen.stdout
    assert (
        b"/" not in tenant.run("cat", "/proc/net/unix").stdout
        and b"@" not in tenant.run("cat", "/proc/net/unix").stdout
    )
    assert (
        tenant.shell("find / -xdev -name '*dsec*'; ls -A /dev | grep -E 'dsec|vport|pmem|vd|console|mem'").stdout == b""
    )


def test_no_way_out_of_the_root(tenant: SerialClient) -> None:
    assert tenant.run("attack", "escape").stdout == b"stayed\n"


NODES = """
for where in /dev /dev/shm /root /tmp; do
    mknod $where/n $1 $2 $3 || echo not made
    dd if=$where/n of=/dev/null bs=512 count=1 2>/dev/null && echo read $where
    (exec 3> $where/n) 2>/dev/null && echo written $where
    rm -f $where/n
done
"""


def test_devices_cannot_be_had_by_their_numbers(tenant: SerialClient) -> None:
    def tried(kind: str, major: int, minor: int) -> bytes:
        return tenant.run("sh", "-c", NODES, "sh", kind, str(major), str(minor)).stdout

    # that it can be done at all
    assert tried("c", 1, 5) == b"read /dev\nwritten /dev\n"
    found = tenant.shell("cat /sys/block/*/dev; echo -; cat /sys/class/virtio-ports/*/dev /sys/class/mem/*/dev").stdout
    blocks, chars = (part.split() for part in found.split(b"-\n"))
    assert len(blocks) >= 5 and len(chars) >= 5
    wanted = [("b", *map(int, one.split(b":"))) for one in blocks]
    wanted += [
        ("c", *map(int, one.split(b":"))) for one in chars if one not in (b"1:3", b"1:5", b"1:7", b"1:8", b"1:9")
    ]
    wanted += [
        ("c", 1, 1),
        ("c", 1, 2),
        ("c", 1, 4),
        ("c", 1, 11),
        ("c", 4, 64),
        ("c", 5, 1),
        ("c", 10, 200),
        ("c", 5, 3),
    ]
    for one in wanted:
        assert tried(*one) == b"", one


def test_a_tar_brings_no_device(tenant: SerialClient) -> None:
    """The agent, who makes what a tar names, may do more than the tenant."""
    block = tenant.shell("cat /sys/block/vda/dev").stdout.decode().strip().split(":")
    tenant.shell(f"mkdir -p /root/t; cd /root/t; mknod n b {block[0]} {block[1]}; tar cf /root/t.tar n; rm n")
    told = tenant.put(Type.TREE_PUT, tenant.read("/root/t.tar"), (Tag.PATH, b"/dev/shm/t"), (Tag.FLAGS, 1))
    assert told.text(Tag.ISSUE).startswith("n: ") and told.integer(Tag.COUNT) == 0
    assert tenant.shell("ls /dev/shm/t").stdout == b""
    tenant.shell("rm -r /root/t /root/t.tar /dev/shm/t")


def test_the_console_is_not_the_tenants(tenant: SerialClient, bare: Vm) -> None:
    tenant.shell("echo HELLO > /dev/console; echo HELLO > /dev/kmsg; dmesg | head -1")
    assert "HELLO" not in bare.console()


def test_a_process_inside_cannot_be_the_host_on_vsock(made: Parts, tmp_path: Path) -> None:
    """That the real host is answered is shown where there is one: tests/lab, with Firecracker."""
    init, archive = tmp_path / "init", tmp_path / "initramfs"
    source = Path(__file__).with_name("vm_vsock.c")
    subprocess.run(["gcc", "-static", "-O1", "-Wall", "-Werror", "-o", init, source], check=True)
    with archive.open("wb") as out:
        cpio = CpioWriter(out)
        cpio.directory("dev")
        cpio.device("dev/console", (5, 1))
        cpio.file("init", init, 0o755)
        cpio.file("agent", NATIVE / "dsec-agent", 0o755)
        cpio.close()
    with Vm(made, initramfs=archive) as one:
        assert one.wait(90) == 0
        said = [line for line in one.console().splitlines() if line.startswith(("vm_vsock", "dsec-agent"))]
        assert said == ["vm_vsock: refused"] * 3 + ["vm_vsock: done"]


# -- how it ends


def test_shutdown_switches_off(made: Parts, hello: list[Field]) -> None:
    with Vm(made) as one:
        with one.client(hello) as client:
            channel = client.exec("sh", "-c", "trap '' TERM; setsid sleep 100 & sleep 100", flags=QUIET)
            client.expect(Type.STARTED, channel)
            client.write("/root/f", b"kept")
            began = time.monotonic()
            client.raw(Type.SHUTDOWN, 0)
            assert one.wait() == 0
        print(f"off after {time.monotonic() - began:.2f} s")
        assert "Power down" in one.console() and "panic" not in one.console()
        fsck = subprocess.run(["debugfs", "-R", "cat /upper/root/f", one.disk], capture_output=True, check=True)
        assert fsck.stdout == b"kept"


def test_a_machine_that_cannot_be_switched_off_is_reset(made: Parts, hello: list[Field]) -> None:
    with Vm(made, append=("dsec.off=reboot",)) as one:
        with one.client(hello) as client:
            client.raw(Type.SHUTDOWN, 0)
            assert one.wait() == 0
        assert "Restarting system" in one.console()


LOWERS = ("dsec.lower=pmem0:pmem1", "dsec.lower=pmem2:pmem3")
LINK = "dsec.link=serial:dsec.agent"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*LOWERS, LINK), "dsec.upper is missing: Invalid argument"),
        ((*LOWERS, LINK, "dsec.upper=vda", "dsec.nonsense=1"), "dsec.nonsense=1: Invalid argument"),
        ((*LOWERS, LINK, "dsec.upper=../vda"), "device '../vda': Invalid argument"),
        ((*LOWERS, LINK, "dsec.upper=vdx"), "device vdx: No such device"),
        (("dsec.lower=pmem1:pmem0", LINK, "dsec.upper=vda"), "mount the layer pmem1"),
        ((*LOWERS, LINK, "dsec.upper=pmem0"), "mount the writable disk pmem0"),
        ((*LOWERS, "dsec.link=serial:other", "dsec.upper=vda"), "port other: No such device"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_of_boot(made: Parts, words: tuple[str, ...], says: str) -> None:
    status, said = _whole_boot(made, words)
    if status == -signal.SIGABRT:  # QEMU's own fault: 10.0.2 did so once in some hundred boots
        status, said = _whole_boot(made, words)
    assert status == 0
    lines = [line for line in said.splitlines() if line.startswith("dsec-agent: ")]
    assert len(lines) == 1 and lines[0].startswith(f"dsec-agent: boot: {says}")


def _whole_boot(made: Parts, words: tuple[str, ...]) -> tuple[int, str]:
    with Vm(made, words=words) as one:
        return one.wait(90), one.console()
