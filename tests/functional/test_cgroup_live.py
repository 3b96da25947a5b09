"""Control groups on the real tree, v2 or hybrid: delegation, limits, freezing, killing, nothing left. Needs root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.cgroup.groups import Cgroups, SandboxCgroup

MIB = 1 << 20
UID = 11 << 20
BASE = f"/dsecd-test-{os.getpid()}"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def cgroups() -> Iterator[Cgroups]:
    cgroups = Cgroups.detect(base=BASE)
    cgroups.prepare()
    yield cgroups
    left = cgroups.list_existing()
    for name in left:
        cgroups.sandbox(name).kill()
        cgroups.sandbox(name).remove()
    cgroups.remove_base()
    assert left == []
    assert not [p for p in cgroups.parents() if p.exists()]


@pytest.fixture
def box(cgroups: Cgroups) -> Iterator[SandboxCgroup]:
    """A sandbox's groups, with the v1 ones that a runtime would have made."""
    box = cgroups.sandbox("box")
    box.create_unified(UID)
    if cgroups.layout == "hybrid":
        for controller in ("memory", "pids", "cpu", "cpuacct"):
            (cgroups.root / controller / BASE.lstrip("/") / "box").mkdir(parents=True)
    yield box
    box.kill()
    box.remove()
    assert box.paths() == []


def inside(box: SandboxCgroup, code: str) -> subprocess.Popen[str]:
    """Python that joins the sandbox's groups before it runs `code`."""
    join = f"for p in {[str(p) for p in box.paths()]!r}: open(p + '/cgroup.procs', 'w').write('0')\n"
    return subprocess.Popen(
        [sys.executable, "-c", join + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str]:
    out, error = child.communicate(timeout=30)
    return child.returncode, out + error


def test_an_over_eater_is_killed_and_counted(box: SandboxCgroup) -> None:
    box.set_limits(memory=32 * MIB, pids=100, cpu=2)
    assert box.oom_kills() == 0
    status, _ = finish(inside(box, "x = bytearray(200 << 20)"))
    assert status == -9
    assert box.oom_kills() >= 1
    assert box.stats().memory_peak <= 32 * MIB


def test_tasks_are_limited_and_hits_counted(box: SandboxCgroup) -> None:
    box.set_limits(memory=256 * MIB, pids=5, cpu=2)
    status, out = _fork_until_refused(box)
    assert (status, out.strip()) == (0, "refused")
    assert box.pids_hits() >= 1


def _fork_until_refused(box: SandboxCgroup) -> tuple[int, str]:
    code = (
        "import os, time, signal\n"
        "children = []\n"
        "try:\n"
        "    for _ in range(20):\n"
        "        pid = os.fork()\n"
        "        if pid == 0: time.sleep(30); os._exit(0)\n"
        "        children.append(pid)\n"
        "except BlockingIOError: print('refused')\n"
        "for pid in children: os.kill(pid, signal.SIGKILL)\n"
    )
    return finish(inside(box, code))


def test_cpu_is_throttled(box: SandboxCgroup) -> None:
    box.set_limits(memory=256 * MIB, pids=100, cpu=0.2)
    code = (
        "import time\n"
        "start, end = time.process_time(), time.monotonic() + 1\n"
        "while time.monotonic() < end: pass\n"
        "print(time.process_time() - start)\n"
    )
    status, out = finish(inside(box, code))
    assert status == 0 and float(out) < 0.6
    assert box.stats().throttled_usec > 0


def test_limits_change_at_run_time_both_ways(box: SandboxCgroup) -> None:
    for memory in (64 * MIB, 128 * MIB, 32 * MIB):
        box.set_limits(memory=memory, pids=50, cpu=1)
    status, _ = finish(inside(box, "x = bytearray(60 << 20)"))
    assert status == -9


def test_stats_see_what_runs(box: SandboxCgroup) -> None:
    child = inside(box, "x = b'x' * (50 << 20)\nprint('ready', flush=True)\nimport time\ntime.sleep(60)")
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    stats = box.stats()
    assert 50 * MIB <= stats.anon <= stats.memory_bytes <= 100 * MIB
    assert stats.pids == 1 and stats.cpu_usec > 1000
    box.kill()
    assert finish(child)[0] == -9


def test_freeze_thaw_and_kill_while_frozen(box: SandboxCgroup) -> None:
    code = "import time\nfor i in range(10**6):\n print(i, flush=True)\n time.sleep(0.01)"
    child = inside(box, code)
    assert child.stdout is not None and child.stdout.readline() == "0\n"
    box.freeze()
    assert box.is_frozen()
    before = box.stats().cpu_usec
    time.sleep(0.1)
    assert box.stats().cpu_usec - before < 1000
    box.thaw()
    assert not box.is_frozen()
    box.freeze()
    box.kill()
    assert finish(child)[0] == -9
    assert not box.is_populated()


def test_reclaim_gives_file_pages_back(box: SandboxCgroup, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(40 * MIB))
    os.sync()
    with (tmp_path / "big").open("rb") as file:  # its pages are on our account so far
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    code = f"open({str(tmp_path / 'big')!r}, 'rb').read()\nprint('ready', flush=True)\nimport time\ntime.sleep(60)"
    child = inside(box, code)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    assert box.stats().file >= 30 * MIB
    assert box.reclaim(64 * MIB) >= 20 * MIB
    assert box.stats().file < 20 * MIB
    box.kill()
    finish(child)


def test_kill_takes_a_process_that_joined_half_the_hierarchies(cgroups: Cgroups, box: SandboxCgroup) -> None:
    if cgroups.layout == "v2":
        pytest.skip("v2 has only one hierarchy")
    procs = cgroups.root / "pids" / BASE.lstrip("/") / "box/cgroup.procs"
    code = f"open({str(procs)!r}, 'w').write('0')\nprint('ready', flush=True)\nimport time\ntime.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    box.kill()
    assert finish(child)[0] == -9


DELEGATE = """
import ctypes, os, sys
path, base = sys.argv[1], int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
group = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # as the agent gets it: no name it could open exists inside
parent = os.open(path + "/..", os.O_RDONLY | os.O_DIRECTORY)
with open(path + "/cgroup.procs", "w") as file: file.write("0")
ask, told = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    assert libc.unshare(0x10000000) == 0
    os.write(ask[1], b"x"); os.read(told[0], 1)
    os.setgid(0); os.setuid(0)
    def attempt(what, call):
        try:
            call()
            print(what, "done", flush=True)
        except OSError as error:
            print(what, error.strerror, flush=True)
    def put(where, name, text):
        fd = os.open(name, os.O_WRONLY, dir_fd=where); os.write(fd, text.encode()); os.close(fd)
    attempt("leaf", lambda: os.mkdir("leaf", dir_fd=group))
    leaf = os.open("leaf", os.O_RDONLY | os.O_DIRECTORY, dir_fd=group)
    class CloneArgs(ctypes.Structure):
        names = "flags pidfd tid ptid signal stack size tls set_tid set_size cgroup"
        _fields_ = [(name, ctypes.c_uint64) for name in names.split()]
    def clone_into():
        args = CloneArgs(flags=0x200000000, signal=17, cgroup=leaf)
        pid = libc.syscall(435, ctypes.byref(args), ctypes.sizeof(args))
        if pid == 0: os._exit(7)
        if pid < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    attempt("clone", clone_into)
    attempt("rmdir", lambda: os.rmdir("leaf", dir_fd=group))
    for name, text in (("memory.max", "max"), ("pids.max", "max"), ("cpu.max", "max"), ("cgroup.max.depth", "9"),
                       ("cgroup.freeze", "0"), ("cgroup.subtree_control", "+memory"), ("cgroup.kill", "1")):
        attempt(name, lambda: put(group, name, text))
    attempt("escape", lambda: put(parent, "cgroup.procs", "0"))
    attempt("sibling", lambda: os.mkdir("sibling", dir_fd=parent))
    os._exit(0)
os.read(ask[0], 1)
for kind in ("uid", "gid"):
    with open(f"/proc/{child}/{kind}_map", "w") as file: file.write(f"0 {base} 1048576")
os.write(told[1], b"x")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_tenant_may_make_leaves_and_nothing_else(box: SandboxCgroup) -> None:
    command = [sys.executable, "-c", DELEGATE, str(box.unified), str(UID)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    answers = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert {answers.pop(name) for name in ("leaf", "clone", "rmdir")} == {"done"}
    assert set(answers.values()) <= {"Permission denied", "No such file or directory"}, answers


def test_leaves_are_limited_in_number(box: SandboxCgroup) -> None:
    with pytest.raises(OSError):
        for i in range(2000):
            (box.unified / f"leaf{i}").mkdir()
    assert 500 < i < 2000


def test_remove_says_who_is_in_the_way(box: SandboxCgroup) -> None:
    child = inside(box, "print('ready', flush=True)\nimport time\ntime.sleep(60)")
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    with pytest.raises(Exception, match=str(child.pid)):
        box.remove(timeout=0.1)
    box.kill()
    finish(child)


@pytest.fixture(params=["crun", "runc"])
def runtime(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


def test_runtimes_keep_the_delegated_group_and_set_the_limits(cgroups: Cgroups, runtime: str, tmp_path: Path) -> None:
    """The group is there before the runtime starts; its owner and limits must survive that."""
    obstacle = cgroups.obstacle()
    if runtime == "crun" and obstacle:
        pytest.skip(obstacle)
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    name = f"dsecd-test-{os.getpid()}-{runtime}"
    bundle(cgroups, name, tmp_path)
    box = cgroups.sandbox(name)
    box.create_unified(UID)
    try:
        run(runtime, "create", "-b", str(tmp_path), "--pid-file", str(tmp_path / "pid"), name)
        run(runtime, "start", name)
        box.seal()
        assert (box.unified.stat().st_uid, (box.unified / "cgroup.procs").stat().st_uid) == (UID, UID)
        assert (box.unified / "cgroup.subtree_control").stat().st_uid == 0
        assert (box.unified / "cgroup.max.descendants").read_text() == "1024\n"
        pid = int((tmp_path / "pid").read_text())
        groups = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        assert f"0::{box.oci_path}" in groups
        stats = box.stats()
        assert stats.pids >= 1 and 0 < stats.memory_bytes < 32 * MIB  # runc: its threads, until it has execed
        box.set_limits(memory=48 * MIB, pids=60, cpu=0.5)
        box.freeze()
        box.kill()
    finally:
        box.kill()
        subprocess.run([runtime, "delete", "-f", name], check=False, capture_output=True)
        box.remove()


def bundle(cgroups: Cgroups, name: str, directory: Path) -> None:
    """The smallest container: one static program that sleeps."""
    root = directory / "root"
    for path in (root, root / "proc", root / "dev"):
        path.mkdir()
    source = directory / "init.c"
    source.write_text("#include <unistd.h>\nint main(void) { for (;;) pause(); }\n")
    subprocess.run(["gcc", "-static", "-o", str(root / "init"), str(source)], check=True)
    for path in (root, *root.iterdir()):
        os.chown(path, UID, UID)
    for parent in (directory, *directory.parents[:2]):
        parent.chmod(0o711)
    ids = [{"containerID": 0, "hostID": UID, "size": 1 << 20}]
    config = {
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["/init"], "env": [], "cwd": "/"},
        "root": {"path": str(root)},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {
            "uidMappings": ids,
            "gidMappings": ids,
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network", "user", "cgroup")],
            "cgroupsPath": cgroups.sandbox(name).oci_path,
            "resources": cgroups.oci_resources(memory=32 * MIB, pids=50, cpu=1),
        },
    }
    (directory / "config.json").write_text(json.dumps(config))


def run(*command: str) -> None:
    """Errors go to a file: a container inherits the runtime's stdio, and would hold a pipe open for ever."""
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, check=False)
        errors.seek(0)
        assert done.returncode == 0, f"{command}: {errors.read()}"
