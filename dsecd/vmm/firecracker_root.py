"""The directory that a Firecracker process lives in: what it may open, and how it is put there.

    <directory>/api.sock, agent.sock     hard links to the sockets that Firecracker made
    <directory>/console, vmm.pid
    <directory>/jail/<program>/vm/root/  Firecracker's working directory; with a jailer, its whole file system
        kernel initrd pmem0... drive0... state memory    what it is given
        api.sock vsock save/                             what it makes

Firecracker is told relative names only. A snapshot keeps the names it was told, so that it loads wherever the same
names mean the right files: every clone has its own disks and its own socket, without overrides that only newer releases
have. `<directory>` belongs on a disk: the jailer copies the program there, and snapshots pass through it.

With the jailer, files are bound into the root in a mount namespace that begins with this process and ends with it: the
host's mount table does not grow, and nothing is left to unmount. The root belongs to the machine's user, who may be a
guest that broke out: nothing in it is opened through a symlink or believed to be what it was.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Final

import msgspec

from dsecd.errors import DsecError
from dsecd.vmm import launch
from dsecd.vmm.machine import MachineSpec

API: Final = "api.sock"
VSOCK: Final = "vsock"
SAVE: Final = "save"
_ID: Final = "vm"  # short, for the 107 bytes of a socket's path
_ROOM: Final = 64 << 20
_BIND: Final = 'while [ "$1" != -- ]; do mount -o "$1" -- "$2" "$3"; shift 3; done; shift; exec "$@"'


class Root:
    """Of one machine. `saved`: names of snapshot files to the files themselves, when it is restored."""

    def __init__(self, spec: MachineSpec, program: Path, saved: dict[str, Path] | None = None) -> None:
        self.spec = spec
        self.path = spec.directory / "jail" / program.name / _ID / "root"
        self._program = program
        self._saved = saved or {}

    def files(self) -> list[tuple[str, Path, bool]]:
        """Name inside, file, and whether it is written."""
        spec = self.spec
        found: list[tuple[str, Path, bool]] = []
        if spec.kernel is not None:
            found.append(("kernel", spec.kernel, False))
        if spec.initrd is not None:
            found.append(("initrd", spec.initrd, False))
        if self._saved:
            found = []
        found += [(f"pmem{number}", path, False) for number, path in enumerate(spec.pmem)]
        found += [(f"drive{number}", drive.path, not drive.read_only) for number, drive in enumerate(spec.drives)]
        return found + [(name, path, False) for name, path in self._saved.items()]

    def prepare(self, jailer: Path | None) -> list[str]:
        """Make it, and say how to begin: the command line for `launch.wrapped`."""
        self.path.mkdir(mode=0o700, parents=True)
        words = [str(self._program), "--id", _ID, *_OPTIONS]
        if jailer is None:
            for name, source, _ in self.files():
                (self.path / name).symlink_to(source.absolute())
            return ["env", f"--chdir={self.path}", *words]
        limits = self.spec.limits
        # A run directory may be mounted nodev and noexec; this view of it is not.
        binds = ["bind,dev,exec", str(self.path), str(self.path)]
        for name, source, writable in self.files():
            target = self.path / name
            target.touch(0o600)
            if writable:
                os.chown(source, limits.uid, limits.gid, follow_symlinks=False)
            elif not source.stat().st_mode & stat.S_IROTH:
                raise DsecError("vmm", f"a jailed machine cannot read {source}: chmod o+r it")
            binds += ["bind" if writable else "bind,ro", str(source), str(target)]
        # No file that it writes is larger than its memory or a disk.
        largest = max([self.spec.memory, *(drive.path.stat().st_size for drive in self.spec.drives)])
        return [
            "unshare", "--mount", "--", "/bin/sh", "-ec", _BIND, "dsec-jail", *binds, "--",
            str(jailer), "--id", _ID, "--exec-file", str(self._program), "--uid", str(limits.uid),
            "--gid", str(limits.gid), "--chroot-base-dir", str(self.spec.directory / "jail"),
            "--resource-limit", f"fsize={largest + _ROOM}", "--", *_OPTIONS,
        ]  # fmt: skip

    def command(self, jailer: Path | None) -> list[str]:
        """All of it: `prepare` behind the cgroup and the network namespace. The jailer itself drops root."""
        return launch.wrapped(self.prepare(jailer), msgspec.structs.replace(self.spec.limits, uid=0, gid=0))

    def claim(self, name: str, target: Path) -> bool:
        """Give a socket that Firecracker made a second name, outside of its reach; False: it is not there yet."""
        try:
            fd = os.open(self.path / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                raise DsecError("vmm", f"Firecracker made {name}, but not as a socket")
            # With a directory descriptor, os.link is linkat(2), which alone can follow /proc's link to the open file.
            os.link(f"/proc/self/fd/{fd}", target, src_dir_fd=fd)
        finally:
            os.close(fd)
        return True

    def make_save(self) -> Path:
        """An empty directory for a snapshot's files, which the machine's user may write to."""
        path = self.path / SAVE
        shutil.rmtree(path, ignore_errors=True)  # of a daemon that died while it saved
        try:
            path.mkdir(mode=0o700)
        except OSError as exc:
            raise DsecError(
                "vmm", f"there is no room for a snapshot in the machine's directory: {exc.strerror}"
            ) from exc
        os.chown(path, self.spec.limits.uid, self.spec.limits.gid, follow_symlinks=False)
        return path


# Errors only: a guest can cause warnings at will.
_OPTIONS: Final = ("--api-sock", API, "--level", "Error", "--enable-pci")
