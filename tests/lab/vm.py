"""One lab VM: QEMU (TCG) with the lab's kernel and root, and a line to run commands in it.

`LabVM` is a context manager: it yields a booted guest and leaves no process, file or socket behind, however it ends.
The guest's writes go to a temporary layer that QEMU itself unlinks at once, so the base image stays as it was made.
Knows nothing of what is tested; never touches the host's network.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cache import LabError
from emulator import qemu

MEMORY_MIB = 3072
RESULT_BYTES = 1 << 30  # sparse
BOOT_S = 300.0  # twelve on an idle host, forty on one that compiles at the same time
POWER_OFF_S = 60.0
GRACE_S = 30.0  # the guest keeps a command's own deadline; ours only catches a guest that is stuck
COMMAND_LINE = "root=/dev/vda rw console=ttyS0 panic=-1 quiet loglevel=4 systemd.show_status=true apparmor=1"
# KVM keeps the TSC's rate as it was first measured at boot; the kernel measures better 2 s later. Where they differ by
# more than 250 ppm (a busy host) and the CPU does not scale, KVM refuses its own default rate ("user requested TSC rate
# below hardware speed"): the clock that it keeps for guests is wrong then, and none of this VM comes up.
COMMAND_LINE += " kvm.tsc_tolerance_ppm=100000"

Output = Callable[[str, bytes], None]


@dataclass(frozen=True)
class Result:
    """How a command ended in the guest. A command that was killed for its time has `timed_out` and status 137."""

    status: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    seconds: float


class LabVM:
    """A booted lab VM; `run` executes in it, `collect` brings results out."""

    def __init__(
        self, kernel: Path, root: Path, console: Path, delivery: Path | None = None, memory: int = MEMORY_MIB
    ) -> None:
        self.kernel, self.root, self.console, self.delivery = kernel, root, console, delivery
        self.memory = memory
        self._qemu = qemu()
        self.boot_s = 0.0
        self.release = ""
        self._stack = contextlib.ExitStack()
        self._buffer = b""
        self._next_id = 0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            # Beside the console: what a killed run leaves there goes with the next run's clean start.
            self.console.parent.mkdir(parents=True, exist_ok=True)
            self.console.unlink(missing_ok=True)
            scratch = tempfile.TemporaryDirectory(prefix=".vm-", dir=self.console.parent)
            self._scratch = Path(stack.enter_context(scratch))
            self._results = self._scratch / "results.tar"
            with self._results.open("wb") as file:
                file.truncate(RESULT_BYTES)
            self._line, theirs = socket.socketpair()
            stack.enter_context(self._line)
            with theirs:
                self._process = self._start(theirs)
            stack.callback(self._reap)
            started = time.monotonic()
            hello = self._receive(started + BOOT_S, "to boot")
            self.release = str(hello["hello"])
            self.boot_s = time.monotonic() - started
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, line: socket.socket) -> subprocess.Popen[bytes]:
        # setpriv: the machine dies with us, however we die.
        command = ["setpriv", "--pdeathsig", "KILL", *self._command(line.fileno())]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self._scratch / "qemu.err").open("wb"),
            pass_fds=[line.fileno()],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": str(self._scratch)},
        )

    def _command(self, line_fd: int) -> list[str]:
        command = [*self._qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        # No usable KVM is assumed; +svm gives the guest one of its own, which TCG emulates.
        command += f"-M q35 -accel tcg,thread=multi -smp 2 -m {self.memory} -cpu EPYC,+svm,+npt".split()
        command += ["-kernel", str(self.kernel), "-append", COMMAND_LINE]
        command += ["-chardev", f"file,id=console,path={self.console}", "-serial", "chardev:console"]
        command += ["-device", "virtio-serial-pci", "-chardev", f"socket,id=line,fd={line_fd}"]
        command += ["-device", "virtserialport,chardev=line,name=lab.0", "-device", "virtio-rng-pci"]
        command += ["-drive", f"if=virtio,format=raw,file={self.root},snapshot=on"]
        # Without a delivery the second disk is there all the same, empty, so that the results stay on the third.
        delivery = self.delivery or self._scratch / "empty"
        if not self.delivery:
            delivery.write_bytes(bytes(512))
        command += ["-drive", f"if=virtio,format=raw,file={delivery},readonly=on"]
        command += ["-drive", f"if=virtio,format=raw,file={self._results},cache=unsafe"]
        return command

    def run(self, command: str | Sequence[str], timeout: float, output: Output | None = None) -> Result:
        """Run a shell line or an argument vector in the guest; `output` is called with (stream, data) as it comes."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        self._next_id += 1
        request = {"id": self._next_id, "argv": argv, "timeout": timeout}
        started = time.monotonic()
        deadline = started + timeout + GRACE_S
        self._line.settimeout(GRACE_S)
        try:
            self._line.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._lost("to take a command") from error
        streams: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        while True:
            message = self._receive(deadline, f"to finish {argv[-1]!r}")
            if message.get("id") != self._next_id:
                continue
            if "status" in message:
                out, err = (b"".join(streams[name]) for name in ("stdout", "stderr"))
                return Result(message["status"], out, err, message["timed_out"], time.monotonic() - started)
            data = base64.b64decode(message["data"])
            streams[message["stream"]].append(data)
            if output:
                output(message["stream"], data)

    def check(self, command: str | Sequence[str], timeout: float) -> str:
        """Output of a command that has to succeed."""
        result = self.run(command, timeout)
        if result.status:
            last = (result.stderr or result.stdout).decode(errors="replace").strip().splitlines()[-1:]
            raise LabError(f"in the guest, {command!r} ended with {result.status}: {(last or ['no output'])[0]}")
        return result.stdout.decode(errors="replace")

    def unpack_delivery(self) -> None:
        self.check("tar -xf /dev/vdb -C /", 120)

    def collect(self, guest_dir: str) -> Path:
        """The file that holds a tar of the guest's directory; gone with the VM."""
        self.check(["tar", "-cf", "/dev/vdc", "-C", guest_dir, "."], 120)
        self.check(["sync", "/dev/vdc"], 60)
        return self._results

    def power_off(self) -> None:
        """Shut the guest down as an administrator would, so that what only happens then is seen on the console."""
        self.run("systemctl --no-block poweroff", 30)
        try:
            self._process.wait(POWER_OFF_S)
        except subprocess.TimeoutExpired as error:
            raise LabError(f"the guest did not power off within {POWER_OFF_S:.0f} s; see {self.console}") from error

    def _receive(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LabError(f"the guest took too long {what}; see {self.console}")
            self._line.settimeout(left)
            try:
                data = self._line.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError as error:
                raise self._lost(what) from error
            if not data:
                raise self._lost(what)
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(text)
        return message

    def _lost(self, what: str) -> LabError:
        """The machine went away: say why, from the best witness there is."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        told = (self._scratch / "qemu.err").read_text(errors="replace").splitlines()
        errors = [line for line in told if line.strip() and "warning:" not in line]
        shown = self.console.read_text(errors="replace").splitlines() if self.console.is_file() else []
        panics = [line for line in shown if "Kernel panic" in line]
        witness = (errors or panics or [f"no word from it; see {self.console}"])[0].strip()
        return LabError(f"the lab VM ended before it was able {what}: {witness}")

    def _reap(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
