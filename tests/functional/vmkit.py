"""Virtual machines for the agent's tests: QEMU directly, with the agent as init, and a client over its serial port.

No driver of ours in between, so that what is tested is the guest. `Vm` is a context manager that leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from agent_box import NATIVE, Client, make_rootfs
from daemonkit import CACHE
from erofs_kit import import_now, tar_of_directory

from dsecd.agent.frames import Field, Type
from dsecd.agent.serial import Serial
from dsecd.erofs.store import ImageStore
from dsecd.vmm.initramfs import write_initramfs

QEMU = "qemu-system-x86_64"
ALIGN = 2 << 20  # of pmem files
BOOT_S = 120.0  # two on an idle host, twenty on one that does all else at the same time
SYNC_S = 0.25


def kernel() -> Path:
    """A kernel with everything built in; skips where none was made."""
    found = sorted(CACHE.glob("kernel-*/vmlinux"), key=lambda path: path.stat().st_mtime)
    if not found or shutil.which(QEMU) is None:
        pytest.skip("needs QEMU and a guest kernel: tests/lab/run.py makes one")
    return found[-1]


def padded(source: Path, target: Path) -> Path:
    """A copy that is a multiple of 2 MiB long, as pmem wants it."""
    shutil.copyfile(source, target)
    os.truncate(target, -(-source.stat().st_size // ALIGN) * ALIGN)
    return target


class Parts:
    """What machines are made of, made once: layers topmost first, an initramfs, an empty writable disk."""

    def __init__(self, directory: Path, *trees: Path, disk: int = 64 << 20) -> None:
        self.directory = directory
        store = ImageStore(directory / "store")
        self.layers: list[tuple[Path, Path]] = []
        for number, tree in enumerate(trees):
            manifest = import_now(store, tar_of_directory(tree), name=f"x{number}")
            image = store.root / manifest.digest.removeprefix("sha256:")
            pair = [padded(image / name, directory / f"{number}.{name}") for name in ("meta.erofs", "data")]
            self.layers.append((pair[0], pair[1]))
        self.initramfs = directory / "initramfs"
        with self.initramfs.open("wb") as out:
            write_initramfs(out, NATIVE / "dsec-agent")
        self.disk = directory / "disk"
        with self.disk.open("wb") as file:
            file.truncate(disk)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^resize_inode", self.disk], check=True)


class Vm:
    """One machine. `client()` connects; at the end it is killed."""

    def __init__(
        self, parts: Parts, *, memory: int = 256, link: str = "serial:dsec.agent", blk: bool = False,
        append: tuple[str, ...] = (), words: tuple[str, ...] | None = None, initramfs: Path | None = None,
    ) -> None:  # fmt: skip
        """memory in MiB. words: the dsec.* part of the command line instead of the right one."""
        self.parts, self.memory, self.link, self.blk = parts, memory, link, blk
        self.append, self.words, self.initramfs = append, words, initramfs or parts.initramfs
        self.boot_s = 0.0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vm-", dir="/var/tmp")))
            self.socket = self.directory / "agent"
            self.console_file = self.directory / "console"
            self.disk = self.directory / "disk"
            subprocess.run(["cp", "--sparse=always", self.parts.disk, self.disk], check=True)
            # We listen, not QEMU: between its bind and its listen, who connects is refused.
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(self.socket))
            listener.listen(8)
            command = self._command(listener.fileno())
            errors = stack.enter_context((self.directory / "qemu.err").open("wb"))
            self.started = time.monotonic()
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, pass_fds=[listener.fileno()],
            )  # fmt: skip
            stack.callback(self._end)
            listener.close()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _command(self, listener: int) -> list[str]:
        command = f"{QEMU} -nodefaults -no-user-config -display none -no-reboot -M q35 -smp 2 -cpu max".split()
        command += ["-accel", "tcg,thread=multi", "-m", f"{self.memory}M,slots=2,maxmem=8G"]
        command += ["-kernel", str(kernel()), "-initrd", str(self.initramfs)]
        command += ["-chardev", f"file,id=console,path={self.console_file}", "-serial", "chardev:console"]
        command += ["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]
        command += ["-chardev", f"socket,id=agent,fd={listener},server=on,wait=off"]
        command += ["-device", "virtserialport,chardev=agent,name=dsec.agent"]
        lowers, files = [], [file for pair in self.parts.layers for file in pair]
        names = [f"vd{chr(97 + n)}" if self.blk else f"pmem{n}" for n in range(len(files))]
        for name, file in zip(names, files, strict=True):
            if self.blk:
                command += _disk(file, read_only=True)
            else:
                size = file.stat().st_size
                command += [
                    "-object",
                    f"memory-backend-file,id={name},mem-path={file},share=on,readonly=on,size={size}",
                ]
                command += ["-device", f"virtio-pmem-pci,memdev={name}"]
        command += _disk(self.disk)
        upper = f"vd{chr(97 + len(files))}" if self.blk else "vda"
        lowers = [f"dsec.lower={names[n]}:{names[n + 1]}" for n in range(0, len(names), 2)]
        words = (*lowers, f"dsec.upper={upper}", f"dsec.link={self.link}", "dsec.pids=128")
        # no_timer_check: on a busy host the kernel finds that an emulated timer does not tick, and panics
        line = ["console=ttyS0", "panic=-1", "reboot=t", "quiet", "loglevel=4", "no_timer_check"]
        line += [*(self.words or words), *self.append]
        return [*command, "-append", " ".join(line)]

    def console(self) -> str:
        return self.console_file.read_text(errors="replace") if self.console_file.exists() else ""

    def client(self, hello: list[Field] | None = None) -> SerialClient:
        """Connects, which waits for the guest to have booted."""
        try:
            client = SerialClient(self.socket, hello)
        except (EOFError, TimeoutError, OSError) as error:
            raise AssertionError(f"no answer: {error!r}\n{self.console()[-3000:]}") from error
        self.boot_s = self.boot_s or time.monotonic() - self.started
        return client

    def wait(self, seconds: float = 30) -> int:
        """For the end of QEMU; its exit status."""
        status = self.process.wait(seconds)
        sys.stdout.write((self.directory / "qemu.err").read_text(errors="replace"))  # seen when the test fails
        return status


def _disk(path: Path, *, read_only: bool = False) -> list[str]:
    options = f"if=virtio,format=raw,file={path},discard=unmap,cache=unsafe"
    return ["-drive", options + (",readonly=on" if read_only else "")]


class SerialSocket:
    """A Unix socket to a serial port, seen as the connection on it."""

    def __init__(self, path: Path, seconds: float = BOOT_S, sync: bool = True) -> None:
        self.raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.raw.connect(str(path))
        except OSError:
            self.raw.close()
            raise
        self.coding = Serial()
        self._early = b""
        if sync:
            self.synchronise(seconds)

    def synchronise(self, seconds: float = BOOT_S) -> None:
        end = time.monotonic() + seconds
        self.raw.settimeout(SYNC_S)
        try:
            while not self.coding.synced:
                if time.monotonic() > end:
                    raise TimeoutError("the agent does not answer")
                # A guest that has not booted reads nothing; what was said before waits for it.
                with contextlib.suppress(TimeoutError):
                    self.raw.sendall(self.coding.sync())
                with contextlib.suppress(TimeoutError):
                    self._early += self._feed()
        except BaseException:
            self.raw.close()
            raise

    def _feed(self) -> bytes:
        data = self.raw.recv(1 << 20)
        if not data:
            raise EOFError("the machine is gone")
        return self.coding.feed(data)

    def settimeout(self, seconds: float) -> None:
        self.raw.settimeout(seconds)

    def recv(self, _size: int) -> bytes:
        try:
            while not self._early:
                self._early = self._feed()
        except (EOFError, ConnectionResetError):
            return b""
        data, self._early = self._early, b""
        return data

    def sendall(self, data: bytes | memoryview) -> None:
        self.raw.sendall(self.coding.encode(data))

    def close(self) -> None:
        self.raw.close()


class SerialClient(Client):
    """agent_box's client over a serial port, with the patience that emulation needs."""

    def __init__(self, path: Path, hello: list[Field] | None = None) -> None:
        self.sock = SerialSocket(path, sync=False)
        try:
            super().__init__(path, hello)
        except BaseException:
            self.sock.close()
            raise

    sock: SerialSocket  # type: ignore[assignment]

    def dial(self, path: Path) -> SerialSocket:  # type: ignore[override]
        self.sock.synchronise()
        return self.sock

    def recv(self, timeout: float = BOOT_S) -> tuple[Type, int, memoryview]:
        return super().recv(timeout)


@contextlib.contextmanager
def parts(*trees: Path, disk: int = 64 << 20) -> Iterator[Parts]:
    with tempfile.TemporaryDirectory(prefix="vm-parts-", dir="/var/tmp") as directory:
        yield Parts(Path(directory), *trees, disk=disk)


if __name__ == "__main__":  # by hand: a machine with busybox, one shell line
    import sys

    with contextlib.ExitStack() as _stack:
        _root = Path(_stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))) / "root"
        make_rootfs(_root)
        _vm = _stack.enter_context(Vm(_stack.enter_context(parts(_root))))
        try:
            with _vm.client() as _client:
                print(f"READY after {_vm.boot_s:.2f} s")
                _result = _client.shell(" ".join(sys.argv[1:]) or "id; cat /proc/mounts; ls -la /dev")
                sys.stdout.write((_result.stdout + _result.stderr).decode())
                print(f"exit {_result.exit}")
        finally:
            print(_vm.console()[-4000:])
