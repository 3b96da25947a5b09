"""A sandbox for the agent's tests: the real agent, started by the real crun through the real launcher, on a root file
system that holds busybox and little else. And a client that speaks frames over the agent's socket, synchronously, so
that a test reads as a conversation.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import leftovers
import pytest

from dsecd.agent.frames import Decoder, Field, Fields, Tag, Type, fields, frame, parse_output

TREE = Path(__file__).resolve().parents[2]
NATIVE = TREE / "build" / "native"
HOST_ID = 1 << 24
ID_COUNT = 1 << 20
AGENT_CAPS = [
    "CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER",
    "CAP_FSETID", "CAP_KILL", "CAP_MKNOD", "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SYS_CHROOT", "CAP_SETFCAP",
    "CAP_AUDIT_WRITE",
]  # fmt: skip
# chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw sys_chroot mknod audit_write
# setfcap
COMMAND_CAPS = sum(1 << n for n in (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))


def build_native() -> None:
    subprocess.run(["make", "-s", "-C", TREE / "native"], check=True)


def cgroup2_root() -> Path:
    unified = Path("/sys/fs/cgroup/unified")
    return unified if (unified / "cgroup.procs").exists() else Path("/sys/fs/cgroup")


def make_rootfs(root: Path, *programs: Path) -> None:
    """busybox with all its names, users, and the given static programs in /bin."""
    for name in ("bin", "etc", "proc", "sys", "dev", "tmp", "root", "home/ann", "var", "usr/bin"):
        (root / name).mkdir(parents=True)
    shutil.copy("/usr/bin/busybox", root / "bin/busybox")
    names = subprocess.run(["/usr/bin/busybox", "--list"], check=True, capture_output=True, text=True).stdout.split()
    for name in names:
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    for program in programs:
        shutil.copy(program, root / "bin")
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\nnoline\nbad:x:9999999999:1::/:\n"
    )
    (root / "etc/group").write_text("root:x:0:\nann:x:1000:\nwheel:x:10:bob,ann\nvideo:x:44:ann\nother:x:45:annika\n")
    os.chown(root / "home/ann", 1000, 1000)


def _config(stage: Path, agent: Path, cgroup: str, memory: int, args: tuple[str, ...]) -> dict[str, object]:
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/dev/.dsec-agent", *args],
            "env": ["SECRET_OF_THE_HOST=1"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted", "inheritable"), AGENT_CAPS),
            "noNewPrivileges": False,
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 1024, "hard": 8192}],
        },
        "root": {"path": str(stage / "root")},
        "hostname": "box",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64m"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
             "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm",
             "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=64m"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
            {"destination": "/dev/.dsec-agent", "type": "bind", "source": str(agent), "options": ["bind", "ro"]},
        ],
        "linux": {
            "uidMappings": [{"containerID": 0, "hostID": HOST_ID, "size": ID_COUNT}],
            "gidMappings": [{"containerID": 0, "hostID": HOST_ID, "size": ID_COUNT}],
            "namespaces": [{"type": t} for t in ("pid", "ipc", "uts", "mount", "network", "user")],
            "cgroupsPath": cgroup,
            "resources": {"memory": {"limit": memory}, "pids": {"limit": 128}},
        },
    }  # fmt: skip


@dataclass
class Box:
    """A running sandbox."""

    directory: Path
    cgroup: Path
    pid: int
    socket: Path

    @property
    def upper(self) -> Path:
        return self.directory / "scratch" / "upper"

    def leaves(self) -> list[str]:
        return sorted(p.name for p in self.cgroup.iterdir() if p.is_dir())

    def children(self) -> list[int]:
        """The inner init, and commands that run."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def alive(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        return False


@contextlib.contextmanager
def box(
    directory: Path, lower: Path, agent: Path = NATIVE / "dsec-agent", memory: int = 1 << 30, args: tuple[str, ...] = ()
) -> Iterator[Box]:
    """Start one; at the end it is killed and nothing of it may be left."""
    name = f"dsec-agent-test-{os.getpid()}-{directory.name}"
    cgroup = cgroup2_root() / name
    stage, scratch, state = directory / "stage", directory / "scratch", directory / "crun"
    for path in (stage, scratch / "upper", scratch / "work", state):
        path.mkdir(parents=True)
    for path in (scratch / "upper", scratch / "work"):
        os.chown(path, HOST_ID, HOST_ID)
    cgroup.mkdir()
    for path in (cgroup, cgroup / "cgroup.procs"):
        os.chown(path, HOST_ID, HOST_ID)
    (directory / "config.json").write_text(json.dumps(_config(stage, agent, f"/{name}", memory, args)))
    address = directory / "agent.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(address))
    listener.listen(8)
    crun = ["crun", "--root", str(state), "--cgroup-manager=cgroupfs"]
    group = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)

    def place() -> None:
        far = [fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for fd in (listener.fileno(), group)]
        for number, fd in zip((3, 4), far, strict=True):
            os.dup2(fd, number)
        os.closerange(5, 256)

    launch = [NATIVE / "dsec-launch", "--stage", stage, "--scratch", scratch, "--ids", f"{HOST_ID}:{ID_COUNT}",
              "--lower", lower, "--", *crun, "run", "-d", "-b", directory, "--preserve-fds", "2",
              "--pid-file", directory / "pid", name]  # fmt: skip
    try:
        log = (directory / "log").open("wb")
        ran = subprocess.run(
            launch, stdin=subprocess.DEVNULL, stdout=log, stderr=log, close_fds=False, preexec_fn=place, timeout=30
        )
        log.close()
        assert ran.returncode == 0, (directory / "log").read_text()
        listener.close()
        started = Box(directory, cgroup, int((directory / "pid").read_text()), address)
        until(started.children, "the agent has no init")
        yield started
        assert not (directory / "log").read_text(), "the agent complained"
    finally:
        listener.close()
        os.close(group)
        subprocess.run([*crun, "delete", "-f", name], capture_output=True)
        until(lambda: _remove_cgroup(cgroup), "the cgroup did not become empty")


def _remove_cgroup(cgroup: Path) -> bool:
    if not cgroup.exists():
        return True
    with contextlib.suppress(OSError):
        (cgroup / "cgroup.kill").write_text("1")
        for leaf in cgroup.iterdir():
            if leaf.is_dir():
                leaf.rmdir()
        cgroup.rmdir()
    return not cgroup.exists()


def until(condition, what: str, seconds: float = 5):  # type: ignore[no-untyped-def]
    """Wait for something that no event tells us about."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(what)


@dataclass
class Result:
    """What came of one command."""

    pid: int = -1
    exit: int = -1
    signal: int = 0
    why: int = 0
    ran_us: int = 0
    cpu_us: int = 0
    totals: dict[int, int] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)
    output: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    error: tuple[int, int] | None = None

    def stream(self, number: int) -> bytes:
        return b"".join(data for _, data in self.output.get(number, []))

    @property
    def stdout(self) -> bytes:
        return self.stream(1)

    @property
    def stderr(self) -> bytes:
        return self.stream(2)


class Client:
    """The host's end."""

    def __init__(self, path: Path, hello: list[Field] | None = None, greet: bool = True) -> None:
        self.sock = self.dial(path)
        self.sock.settimeout(20)
        self._decoder = Decoder()
        self._frames: list[tuple[Type, int, memoryview]] = []
        self.next = 1
        if greet:
            default: list[Field] = [(Tag.CAPS, COMMAND_CAPS)]
            self.send(Type.HELLO, 0, (Tag.VERSION, 1), *(default if hello is None else hello))
            ready = Fields(self.expect(Type.READY, 0))
            self.next = ready.integer(Tag.NEXT)

    def dial(self, path: Path) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(path))
        return sock

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def channel(self) -> int:
        self.next += 1
        return self.next - 1

    def send(self, kind: Type, channel: int, *items: Field) -> None:
        self.sock.sendall(frame(kind, channel, fields(items)))

    def raw(self, kind: Type, channel: int, data: bytes = b"") -> None:
        self.sock.sendall(frame(kind, channel, data))

    def recv(self, timeout: float = 20) -> tuple[Type, int, memoryview]:
        """The next frame from anywhere. EOFError when the agent hung up."""
        while not self._frames:
            self.sock.settimeout(timeout)
            try:
                data = self.sock.recv(1 << 20)
            finally:
                self.sock.settimeout(20)
            if not data:
                raise EOFError
            self._frames.extend(self._decoder.feed(data))
        return self._frames.pop(0)

    def quiet(self, seconds: float) -> bool:
        """Does nothing come for so long?"""
        try:
            self._frames.insert(0, self.recv(seconds))
        except TimeoutError:
            return True
        return False

    def expect(self, kind: Type, channel: int) -> memoryview:
        got, number, payload = self.recv()
        if got is Type.ERROR and kind is not Type.ERROR:
            parsed = Fields(payload)
            raise OSError(parsed.integer(Tag.ERRNO), parsed.text(Tag.TEXT))
        assert (got, number) == (kind, channel), f"{got.name} on {number} instead of {kind.name} on {channel}"
        return payload

    # -- commands
    def exec(self, *argv: str | bytes, env: dict[str, str] | None = None, flags: int = 0, timeout_ms: int = 0,
             cap: int = 1 << 20, **more: int | bytes) -> int:  # fmt: skip
        """Send EXEC; returns its channel. `more` are fields by lower-case tag name."""
        channel = self.channel()
        items: list[Field] = [(Tag.ARG, os.fsencode(a)) for a in argv]
        items += [(Tag.ENV, f"{k}={v}".encode()) for k, v in ({"PATH": "/bin"} | (env or {})).items()]
        items += [(Tag.FLAGS, flags), (Tag.TIMEOUT_MS, timeout_ms), (Tag.CAP, cap)]
        items += [(Tag[name.upper()], value) for name, value in more.items()]
        self.send(Type.EXEC, channel, *items)
        return channel

    def finish(self, channel: int, *, forget: bool = True) -> Result:
        """Collect frames of this command until it ends or fails."""
        result = Result()
        while True:
            kind, number, payload = self.recv()
            if number != channel:
                continue
            if take(result, kind, payload):
                break
        if forget and result.error is None:
            self.send(Type.FORGET, channel)
        return result

    def run(self, *argv: str | bytes, **options: object) -> Result:
        return self.finish(self.exec(*argv, **options))  # type: ignore[arg-type]

    def shell(self, script: str, **options: object) -> Result:
        return self.run("/bin/sh", "-c", script, **options)

    # -- files
    def call(self, kind: Type, *items: Field) -> Fields:
        """A request with one DONE or STAT for an answer; OSError for an ERROR."""
        channel = self.channel()
        self.send(kind, channel, *items)
        return Fields(self.expect(Type.STAT if kind is Type.STATPATH else Type.DONE, channel))

    def put(self, kind: Type, data: bytes, *items: Field, piece: int = 256 << 10) -> Fields:
        """WRITE or TREE_PUT: stream data under the agent's credit."""
        channel = self.channel()
        self.send(kind, channel, *items)
        limit = sent = 0
        view = memoryview(data)
        while sent < len(data):
            if limit <= sent or not self.quiet(0 if self._frames else 0.000001):
                limit = Fields(self.expect(Type.CREDIT, channel)).integer(Tag.LIMIT)
                continue
            take_now = view[sent : sent + min(piece, limit - sent)]
            self.sock.sendall(struct.pack("<IB3xI", len(take_now), Type.DATA, channel))
            self.sock.sendall(take_now)
            sent += len(take_now)
        self.raw(Type.EOF, channel)
        while True:
            got, _, payload = self.recv()
            if got is Type.CREDIT:
                continue
            self._frames.insert(0, (got, channel, payload))
            return Fields(self.expect(Type.DONE, channel))

    def write(self, path: str | bytes, data: bytes, mode: int = 0o644, flags: int = 0, **more: int) -> Fields:
        items: list[Field] = [(Tag.PATH, os.fsencode(path)), (Tag.MODE, mode), (Tag.FLAGS, flags)]
        return self.put(Type.WRITE, data, *items, *[(Tag[k.upper()], v) for k, v in more.items()])

    def get(self, kind: Type, *items: Field, window: int = 1 << 20) -> tuple[bytes, Fields]:
        """READ or TREE_GET: collect the stream, granting as it comes."""
        channel = self.channel()
        self.send(kind, channel, *items, (Tag.LIMIT, window))
        if kind is Type.READ:
            self.expect(Type.STAT, channel)
        got: list[bytes] = []
        size, granted = 0, window
        while True:
            what, number, payload = self.recv()
            assert number == channel
            if what is Type.DATA:
                got.append(bytes(payload))
                size += len(payload)
                assert size <= granted, "the agent went beyond its limit"
                if granted - size < window // 2:
                    granted = size + window
                    self.send(Type.CREDIT, channel, (Tag.STREAM, 0), (Tag.LIMIT, granted))
                continue
            self._frames.insert(0, (what, number, payload))
            return b"".join(got), Fields(self.expect(Type.DONE, channel))

    def read(self, path: str | bytes, offset: int = 0, size: int = 0) -> bytes:
        return self.get(Type.READ, (Tag.PATH, os.fsencode(path)), (Tag.OFFSET, offset), (Tag.SIZE, size))[0]

    def stat(self, path: str | bytes, flags: int = 0) -> Fields:
        return self.call(Type.STATPATH, (Tag.PATH, os.fsencode(path)), (Tag.FLAGS, flags))


def take(result: Result, kind: Type, payload: memoryview) -> bool:
    """Adds one frame of a command; True if it was the last."""
    if kind is Type.OUTPUT:
        stream, offset, data = parse_output(payload)
        result.output.setdefault(stream, []).append((offset, bytes(data)))
    elif kind is Type.STARTED:
        result.pid = Fields(payload).integer(Tag.PID)
    elif kind is Type.ERROR:
        parsed = Fields(payload)
        result.error = (parsed.integer(Tag.STEP), parsed.integer(Tag.ERRNO))
        return True
    elif kind is Type.EXIT:
        parsed = Fields(payload)
        result.exit, result.signal = parsed.integer(Tag.EXIT), parsed.integer(Tag.SIGNAL)
        result.why, result.ran_us = parsed.integer(Tag.WHY), parsed.integer(Tag.RAN_US)
        result.cpu_us = parsed.integer(Tag.CPU_US)
        for tag, value in parsed.pairs():
            if tag is Tag.STREAM:
                stream = int(value)
            elif tag is Tag.TOTAL:
                result.totals[stream] = int(value)
            elif tag is Tag.DIGEST:
                result.digests[stream] = bytes(value)  # type: ignore[arg-type]
        return True
    return False


def kill_hard(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# -- fixtures, for the modules that import them


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root file system with busybox and the attacker's program. On disk: an overlay on tmpfs has no user xattrs."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    build_native()
    directory = Path(tempfile.mkdtemp(prefix="dsec-agent-", dir="/var/tmp"))
    directory.chmod(0o711)
    attack = directory / "attack"
    source = Path(__file__).with_name("agent_attack.c")
    subprocess.run(["gcc", "-static", "-O1", "-Wall", "-Werror", "-o", attack, source], check=True)
    make_rootfs(directory / "root", attack)
    yield directory / "root"
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def sandbox(rootfs: Path, request: pytest.FixtureRequest) -> Iterator[Box]:
    """One sandbox for all tests of a module: each gets a new connection, and must leave it usable."""
    with box(rootfs.parent / request.module.__name__.rpartition(".")[2], rootfs) as started:
        # They are there before and after each test, but not always in the same state.
        ours = tuple(f"process {pid} (" for pid in (started.pid, *started.children()))
        leftovers.tolerated.append(tolerates := lambda item: item.startswith(ours))
        yield started
        leftovers.tolerated.remove(tolerates)


@pytest.fixture
def client(sandbox: Box) -> Iterator[Client]:
    with Client(sandbox.socket) as connected:
        yield connected
    assert sandbox.alive(), "the agent died"
