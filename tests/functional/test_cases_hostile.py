"""What root inside a sandbox can see, touch and break, by commands through the SDK. The agent's own link has more."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from daemonkit import Daemon, asynchronous, init_pid, launch, names_running, sandbox_of

from dsecd.client import DsecError, Sandbox

pytestmark = pytest.mark.containers_only("about the host's side; test_vm_agent.py attacks from inside a guest")


async def output(sandbox: Sandbox, line: str, **options: object) -> str:
    """stdout of a line that must succeed."""
    result = await sandbox.run_shell(line, **options)
    assert result.exit_code == 0, (line, result.stderr)
    return result.stdout


async def refused(sandbox: Sandbox, line: str, *words: str) -> str:
    """A line that must fail; returns what it said."""
    result = await sandbox.run_shell(line, timeout=20)
    assert result.exit_code != 0, (line, result.stdout)
    assert not result.timed_out, line
    if words:
        assert any(word in result.stderr for word in words), (line, result.stderr)
    return result.stderr


@asynchronous
async def test_no_agent_is_seen(daemon: Daemon, backend: str) -> None:
    """No process, file name, command line, environment, descriptor or mount of a command names the agent or dsecd."""
    async with sandbox_of(daemon, backend) as sandbox:
        assert await names_running(sandbox) == ["init"]
        looks = (
            "ps -eo pid,args -ww", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '", "cat /proc/self/environ | tr '\\0' '\\n'",
            "ls -l /proc/self/fd/ /dev /run /tmp /", "cat /proc/net/unix", "cat /proc/self/cgroup",
        )  # fmt: skip
        for look in looks:
            said = (await sandbox.run_shell(look)).stdout
            said = "\n".join(line for line in said.splitlines() if look not in line)
            assert "dsec" not in said.lower(), (look, said)
        assert (await output(sandbox, "ls /proc/self/fd")).split() == ["0", "1", "2", "3"], "3 is ls's own"
        assert "agent" not in await output(sandbox, "ls -la /dev")


@asynchronous
async def test_init_cannot_be_read_traced_or_killed(daemon: Daemon, backend: str) -> None:
    """Root inside reads neither memory, maps, environment, root nor descriptors of pid 1, and no signal ends it."""
    async with sandbox_of(daemon, backend) as sandbox:
        for name in ("mem", "maps", "environ", "auxv", "exe", "cwd", "root", "fd", "fdinfo", "ns", "stack", "syscall",
                     "pagemap", "smaps", "io", "personality", "map_files", "auxv"):  # fmt: skip
            code = (
                f"import os\np='/proc/1/{name}'\n"
                "try:\n"
                " if os.path.isdir(p):\n"
                "  got = [os.readlink(p + '/' + n) if os.path.islink(p + '/' + n) else n for n in os.listdir(p)]\n"
                " elif os.path.islink(p): got = os.readlink(p)\n"
                " else: got = open(p, 'rb').read(64)\n"
                "except OSError: got = ''\n"
                "print(got or 'refused')"
            )
            said = await output(sandbox, f'python3 -c "{code}"')
            assert said.strip() == "refused", (name, said)
        for number in range(1, 65):
            await sandbox.run_shell(f"kill -{number} 1")
        await output(sandbox, "true")
        status = await output(sandbox, "cat /proc/1/status")
        assert "State:\tS" in status or "State:\tR" in status
        assert (await sandbox.refresh()).state == "running"


@asynchronous
async def test_commands_have_their_seccomp_filter_and_capabilities(daemon: Daemon, backend: str) -> None:
    """seccomp mode 2; the capabilities of containers.conf and none more, in every set."""
    granted = sum(1 << n for n in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31))
    async with sandbox_of(daemon, backend) as sandbox:
        status = dict(
            line.split(":", 1) for line in (await output(sandbox, "cat /proc/self/status")).splitlines() if ":" in line
        )
        assert status["Seccomp"].strip() == "2"
        assert int(status["Seccomp_filters"]) >= 1
        for name in ("CapEff", "CapPrm", "CapBnd"):
            assert int(status[name], 16) == granted, (name, status[name])
        for name in ("CapInh", "CapAmb"):
            assert int(status[name], 16) == 0
        plain = await output(sandbox, "grep Cap /proc/self/status", user="1000:1000")
        caps = {line.split(":")[0]: int(line.split()[1], 16) for line in plain.splitlines()}
        assert caps["CapEff"] == caps["CapPrm"] == 0
        assert caps["CapBnd"] == granted


@asynchronous
async def test_namespaces_and_mounts_are_refused(daemon: Daemon, backend: str) -> None:
    """unshare, nsenter, mount, umount, pivot_root, mknod of devices, chroot escapes: no new rights by any of them."""
    async with sandbox_of(daemon, backend) as sandbox:
        for line in (
            "unshare -U true", "unshare -m true", "unshare -n true", "unshare -p -f true", "unshare -Ur id",
            "mount -t tmpfs x /mnt", "mount -t proc proc /mnt", "mount --bind / /mnt", "mount -o remount,rw /sys",
            "mount -t overlay x -o lowerdir=/etc:/usr /mnt", "umount /proc", "umount -l /sys", "umount -l /dev",
            "mknod /sda b 8 0", "mknod /kmem c 1 2", "nsenter -t 1 -m true", "nsenter -t 1 -p true",
        ):  # fmt: skip
            await refused(sandbox, line)
        before = await output(sandbox, "cat /proc/self/mountinfo")
        for line in ("echo 1 > /proc/sys/kernel/sysrq", "echo x > /proc/sysrq-trigger",
                     "echo 0 > /sys/kernel/mm/ksm/run", "echo h > /proc/sys/kernel/core_pattern",
                     "echo 1 > /proc/sys/vm/drop_caches", "echo host > /proc/sys/kernel/domainname",
                     "dmesg", "hostname changed"):  # fmt: skip
            await refused(sandbox, line)
        assert await output(sandbox, "cat /proc/self/mountinfo") == before


# number on x86-64, arguments
FORBIDDEN = {
    "clone3": (435, "0, 0"), "bpf": (321, "0, 0, 0"), "perf_event_open": (298, "0, 0, -1, -1, 0"),
    "kexec_load": (246, "0, 0, 0, 0"), "init_module": (175, "0, 0, 0"), "finit_module": (313, "0, 0, 0"),
    "open_by_handle_at": (304, "-1, 0, 0"), "userfaultfd": (323, "0"), "add_key": (248, "0, 0, 0, 0, 0"),
    "keyctl": (250, "0, 0, 0, 0, 0"), "ptrace attach": (101, "16, 1, 0, 0"), "setns": (308, "0, 0"),
    "move_mount": (429, "-1, 0, -1, 0, 0"), "fsopen": (430, "0, 0"), "mount_setattr": (442, "-1, 0, 0, 0, 0"),
    "clone NEWUSER": (56, "0x10000011, 0, 0, 0, 0"), "unshare NEWUSER": (272, "0x10000000"),
    "io_uring_setup": (425, "8, 0"), "reboot": (169, "0, 0, 0, 0"), "swapon": (167, "0, 0"), "acct": (163, "0"),
    "settimeofday": (164, "0, 0"), "iopl": (172, "3"),
    "pidfd_getfd": (438, "0, 0, 0"), "kcmp": (312, "1, 1, 0, 0, 0"),
}  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
@asynchronous
async def test_dangerous_system_calls(daemon: Daemon, backend: str, tmp_path: Path) -> None:
    """Each fails with EPERM or ENOSYS, or says that its target is out of reach; none succeeds."""
    calls = "\n".join(
        f'errno = 0; r = syscall({number}, {args}); printf("%s %ld %d\\n", "{name}", r, errno);'
        for name, (number, args) in FORBIDDEN.items()
    )
    source = tmp_path / "calls.c"
    source.write_text(
        "#include <errno.h>\n#include <stdio.h>\n#include <unistd.h>\n#include <sys/syscall.h>\n"
        f"int main(void) {{ long r;\n{calls}\nreturn 0; }}\n"
    )
    subprocess.run(["cc", "-static", "-w", "-o", tmp_path / "calls", source], check=True)
    async with sandbox_of(daemon, backend) as sandbox:
        await sandbox.write_file("/calls", (tmp_path / "calls").read_bytes(), mode=0o755)
        said = await output(sandbox, "/calls")
        seen = {line.rsplit(" ", 2)[0]: line.rsplit(" ", 2)[1:] for line in said.splitlines()}
        assert seen.keys() == FORBIDDEN.keys()
        for name, (result, number) in seen.items():
            assert result == "-1", (name, result)
            if name not in ("ptrace attach", "kcmp", "pidfd_getfd"):
                assert number in ("1", "38"), f"{name}: errno {number}"
        assert (await sandbox.refresh()).state == "running"


@asynchronous
async def test_proc_and_sys_are_masked(daemon: Daemon, backend: str) -> None:
    """Nothing of the host's memory, keys, timers, firmware or devices can be read or written through /proc and /sys."""
    async with sandbox_of(daemon, backend) as sandbox:
        for path in ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/proc/latency_stats",
                     "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/loop0", "/dev/kvm", "/dev/fuse",
                     "/dev/loop-control", "/dev/net/tun"):  # fmt: skip
            said = await output(sandbox, f"head -c 64 {path} 2>/dev/null | wc -c")
            assert said.strip() == "0", path
        for path in ("/proc/acpi", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap", "/proc/asound"):
            assert await output(sandbox, f"ls {path} 2>/dev/null | wc -l") == "0\n", path
        writable = await output(
            sandbox, "find /sys /proc/sys /proc/bus /proc/irq /proc/fs -writable -type f 2>/dev/null | head -5"
        )
        for path in writable.split():
            await refused(sandbox, f"cat {path} > /tmp/x && cat /tmp/x > {path}")
        assert "dsecd" not in await output(sandbox, "cat /proc/mounts /proc/self/mountinfo")


@asynchronous
async def test_neighbours_are_out_of_reach(daemon: Daemon, backend: str) -> None:
    """Another sandbox's and the host's processes, files, hostname, IPC and network are not there."""
    async with sandbox_of(daemon, backend) as one, sandbox_of(daemon, backend, hostname="two") as two:
        await two.start(["sleep", "4711"])
        await two.write_file("/secret-of-two", "x")
        assert "4711" not in await output(one, "ps -eo args")
        assert await names_running(one) == ["init"]
        assert await output(one, "find / -xdev -name 'secret-of-two*' 2>/dev/null") == ""
        assert (await output(two, "hostname || cat /proc/sys/kernel/hostname")).strip() == "two"
        assert (await output(one, "cat /proc/sys/kernel/hostname")).strip() != "two"
        ours, theirs = init_pid(daemon, one), init_pid(daemon, two)
        for space in ("pid", "ipc", "uts", "mnt", "net", "user", "cgroup"):
            links = {os.readlink(f"/proc/{pid}/ns/{space}") for pid in (ours, theirs, os.getpid())}
            assert len(links) == 3, f"{space} is shared"
        maps = {Path(f"/proc/{pid}/uid_map").read_text().split()[1] for pid in (ours, theirs)}
        assert len(maps) == 2
        devices = await output(one, "cat /proc/net/dev")
        assert {line.split(":")[0].strip() for line in devices.splitlines()[2:]} <= {"lo"}
        probe = "import socket; socket.create_connection(('1.1.1.1', 53), 2)"
        said = await refused(one, f'python3 -c "{probe}"')
        assert "unreachable" in said or "No module named" in said


@asynchronous
async def test_files_on_the_host_belong_to_the_shifted_root(daemon: Daemon, backend: str) -> None:
    """What root inside makes setuid is no program of the host's root; images are closed to the host's users."""
    async with sandbox_of(daemon, backend) as sandbox:
        await output(sandbox, "cp /usr/bin/id /evil && chmod 6755 /evil && chown root:root /evil")
        (found,) = (daemon.state / "pool").glob(f"{sandbox.id}/upper/evil")
        info = found.stat()
        assert info.st_uid == info.st_gid
        assert info.st_uid >= 1 << 20
        assert (daemon.state / "images").stat().st_mode & 0o077 == 0


@asynchronous
async def test_overwritten_shells_fool_nobody_but_themselves(daemon: Daemon, backend: str) -> None:
    """/bin/sh, bash, cat, libc's loader replaced by liars: exit codes of others, files, trees and stats stay true."""
    liar = b"#!/usr/bin/python3\nprint('lies'); raise SystemExit(0)\n"
    async with sandbox_of(daemon, backend) as sandbox:
        await sandbox.write_file("/truth", b"truth")
        for path in ("/bin/sh", "/bin/bash", "/usr/bin/cat", "/usr/bin/tar", "/usr/bin/true"):
            await sandbox.remove(path)
            await sandbox.write_file(path, liar, mode=0o755)
        result = await sandbox.run_shell("exit 3")
        assert (result.exit_code, result.stdout) == (0, "lies\n"), "the image's own interpreter is the image's"
        assert (await sandbox.exec(["python3", "-c", "raise SystemExit(3)"])).exit_code == 3
        assert await sandbox.read_file("/truth") == b"truth"
        await sandbox.write_file("/more", b"x" * 100_000)
        assert (await sandbox.stat("/more")).size == 100_000
        assert (await sandbox.stats()).pids >= 1
        await sandbox.exec(["python3", "-c", "import os; os.rename('/usr/lib/x86_64-linux-gnu/libc.so.6', '/gone')"])
        assert await sandbox.read_file("/truth") == b"truth"
        assert {entry.name for entry in await sandbox.list_dir("/")} >= {"truth", "more", "gone"}


@asynchronous
async def test_output_cannot_imitate_the_platform(daemon: Daemon, backend: str) -> None:
    """A command that prints frames, JSON replies and results on its output ends with its own status all the same."""
    fake = (
        'printf \'{"jsonrpc":"2.0","id":2,"result":{"exec_id":"x1","exit_code":0}}\\n\'; '
        "printf '\\000\\000\\000\\000\\104\\000\\000\\000\\001\\000\\000\\000'; exit 9"
    )
    async with sandbox_of(daemon, backend) as sandbox:
        result = await sandbox.run_shell(fake)
        assert result.exit_code == 9
        assert result.stdout_bytes.startswith(b'{"jsonrpc"')
        async with await sandbox.session() as session:
            lied = await session.run("echo 0 >&9 2>/dev/null; echo x 0 >&9 2>/dev/null; exit 7")
            assert lied.exit_code == 7


@asynchronous
async def test_cgroup_cannot_be_lifted(daemon: Daemon, backend: str) -> None:
    """Root inside can write no limit of its own control group, by any path."""
    async with sandbox_of(daemon, backend, memory_limit_mb=64, pids_limit=32) as sandbox:
        said = await output(sandbox, "find / -xdev -name 'memory.*' 2>/dev/null; ls /sys/fs/cgroup | head")
        assert "memory.limit_in_bytes" not in said
        await refused(sandbox, "echo max > /sys/fs/cgroup/memory.max")
        await refused(sandbox, "mkdir /sys/fs/cgroup/x && echo 1 > /sys/fs/cgroup/x/cgroup.procs")
        stats = await sandbox.stats()
        assert (stats.memory_limit_bytes, stats.pids_limit) == (64 << 20, 32)


@asynchronous
async def test_a_flood_of_short_commands_from_inside_costs_the_sandbox_alone(daemon: Daemon, backend: str) -> None:
    """While one sandbox forks and writes as fast as it can, a neighbour's commands still answer."""
    storm = "while :; do /bin/true; echo x >> /f; done"
    async with sandbox_of(daemon, backend) as noisy, sandbox_of(daemon, backend) as quiet:
        process = await noisy.start(["sh", "-c", storm])
        slowest = 0.0
        for _ in range(20):
            result = await quiet.exec(["true"], timeout=10)
            assert result.ok
            slowest = max(slowest, result.queued_ms)
            await asyncio.sleep(0.02)
        assert slowest < 1000
        await process.signal(everything=True)


@asynchronous
async def test_dead_link_names_the_sandbox(daemon: Daemon, backend: str) -> None:
    """An init killed between calls: the next call is `sandbox_dead` with its id; its name is free again."""
    async with daemon.client() as client:
        sandbox = await launch(client, backend, name="phoenix")
        os.kill(init_pid(daemon, sandbox), 9)
        async with asyncio.timeout(5):
            while (await sandbox.refresh()).state == "running":
                await asyncio.sleep(0.01)
        for call in (sandbox.run_shell("true"), sandbox.read_file("/etc/passwd"), sandbox.stats(), sandbox.pause()):
            with pytest.raises(DsecError) as caught:
                await call
            assert caught.value.kind in ("sandbox_dead", "conflict")
            assert caught.value.sandbox_id == sandbox.id
        again = await launch(client, backend, name="phoenix")
        assert again.id != sandbox.id
        await again.stop()
        await sandbox.stop()
