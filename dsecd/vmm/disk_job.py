"""Makes one VM image in a directory of the store: a process of its own, which may take minutes and may be killed.

    python -m dsecd.vmm.disk_job WORK-DIRECTORY INPUT-FD JOB-AS-JSON

An import gives up root and the network *before it reads a byte*. Then it unpacks the stream, reads the disk's header,
and lets qemu-img copy the disk into a new qcow2 file, which has nothing of the old one but the guest's bytes. A
bootstrap works as root on packages whose signatures apt has checked. Lines of JSON (`dsecd.erofs.model.Report`) on
standard output say how far it is and how it ended. It leaves `image/` and never commits: the daemon does
(`dsecd.vmm.disk_jobs`).
"""

from __future__ import annotations

import datetime
import hashlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from dsecd.erofs.importer import NOBODY, Reporter, drop_privileges, end_with, write_all
from dsecd.erofs.streams import FdSource, decompressed
from dsecd.erofs.sys import CLONE_NEWIPC, CLONE_NEWNET, PR_SET_PDEATHSIG, prctl, unshare
from dsecd.errors import DsecError
from dsecd.vmm import debian_vm, qcow2
from dsecd.vmm.disks import Profile, VmImage

CONVERT_S: Final = 1800.0
_MEMORY: Final = 2 << 30
_LEAKS_ONLY: Final = 3  # qemu-img check: clusters that nobody uses, and no error


class DiskJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """stream: import what comes from the descriptor. debian: bootstrap `suite` with more `packages`.

    max_bytes: the largest disk, as the guest sees it. size: of a bootstrapped one. agent: that it has ours; a
    bootstrapped one gets the program `agent_file`.
    """

    kind: Literal["stream", "debian"]
    source: str = ""
    suite: str = ""
    packages: tuple[str, ...] = ()
    profile: Profile = "server"
    agent: bool = False
    agent_file: str = ""
    size: int = 8 << 30
    max_bytes: int


def run(work: Path, input_fd: int, job: DiskJob, reporter: Reporter) -> None:
    out = work / "image"
    out.mkdir()
    if job.kind == "debian":
        recipe = debian_vm.Recipe(job.suite, job.packages, job.size, Path(job.agent_file) if job.agent else None)
        raw = debian_vm.make(work, recipe, lambda: reporter.progress("bootstrap", 0))
        _convert(raw, "raw", out / "disk.qcow2", reporter)
        raw.unlink()
        _describe(out, job, job.size)
        return
    spool = work / "spool"
    for path, mode in ((work, 0o711), (out, 0o755)):
        path.chmod(mode)
    for path in (spool, out / "disk.qcow2", out / "image.json"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.fchown(fd, NOBODY, NOBODY)
        os.close(fd)
    # By descriptor from here on: nobody may not walk to the work directory, and need not.
    fds = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in (spool, out / "disk.qcow2", out / "image.json")]
    unshare(CLONE_NEWNET | CLONE_NEWIPC)
    drop_privileges()
    _import(fds[0], fds[1], fds[2], input_fd, job, reporter)


def _import(spool: int, disk: int, described: int, input_fd: int, job: DiskJob, reporter: Reporter) -> None:
    seen = FdSource(input_fd)
    source = decompressed(seen, job.max_bytes)
    length = 0
    while data := source.read(1 << 20):
        _write_sparse(spool, data)
        length += len(data)
        reporter.progress("receive", seen.seen)
    os.ftruncate(spool, length)
    header = qcow2.read_header(os.pread(spool, 4096, 0), length)
    if header.size > job.max_bytes:
        raise DsecError("image", f"the disk is {header.size} bytes for its guest, and {job.max_bytes} is the limit")
    if header.size == 0:
        raise DsecError("image", "the disk has no size")
    os.ftruncate(spool, -(-length // qcow2.SECTOR) * qcow2.SECTOR)
    path = Path(f"/proc/self/fd/{spool}")
    _convert(path, header.format, Path(f"/proc/self/fd/{disk}"), reporter, (spool, disk))
    write_all(described, msgspec.json.encode(_image(disk, job, header.size)))


def _write_sparse(fd: int, data: bytes) -> None:
    """Disks are mostly zeros, and those need no room."""
    if data.count(0) == len(data):
        os.lseek(fd, len(data), os.SEEK_CUR)
    else:
        write_all(fd, data)


def _convert(
    source: Path, form: qcow2.DiskFormat, target: Path, reporter: Reporter, fds: tuple[int, ...] = ()
) -> None:  # fmt: skip
    """A clean copy. Runs as who we are, with what we may."""
    reporter.progress("write", 0, force=True)
    if form == "qcow2":  # what points beyond its end reads as zeros, and the copy would hide that
        done = _qemu_img(["check", "-q", "-f", form, str(source)], fds)
        if done.returncode != _LEAKS_ONLY:
            qcow2.result(done, "the disk")
    # In order, so that the same disk gives the same digest.
    done = _qemu_img(["convert", "-f", form, "-O", "qcow2", str(source), str(target)], fds)
    if b"No space left" in done.stderr:
        raise DsecError("disk_full", "no space left for the image in the store")
    qcow2.result(done, "the disk")


def _qemu_img(words: list[str], fds: tuple[int, ...]) -> subprocess.CompletedProcess[bytes]:
    command = ["qemu-img", *words]
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CONVERT_S, check=False, pass_fds=fds,
            cwd="/", env={"PATH": os.environ.get("PATH", "/usr/bin"), "LC_ALL": "C.UTF-8"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY)),
        )  # fmt: skip
    except FileNotFoundError as exc:
        raise DsecError("unsupported", "qemu-img is not installed: apt-get install qemu-utils") from exc
    except subprocess.TimeoutExpired as exc:
        raise DsecError("image", f"the disk took qemu-img more than {CONVERT_S:g} s") from exc


def _image(disk: int, job: DiskJob, virtual: int) -> VmImage:
    digest = hashlib.sha256()
    size, at = os.fstat(disk).st_size, 0
    while data := os.pread(disk, 4 << 20, at):
        digest.update(data)
        at += len(data)
    debian = job.kind == "debian"
    return VmImage(
        name="", digest="sha256:" + digest.hexdigest(), source=job.source, size=size, virtual_size=virtual,
        created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), profile=job.profile,
        root="/dev/vda" if debian else "", agent=job.agent, guest_agent=debian,
    )  # fmt: skip


def _describe(out: Path, job: DiskJob, virtual: int) -> None:
    fd = os.open(out / "disk.qcow2", os.O_RDONLY | os.O_CLOEXEC)
    try:
        (out / "image.json").write_bytes(msgspec.json.encode(_image(fd, job, virtual)))
    finally:
        os.close(fd)


def main(argv: list[str]) -> int:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(5)  # sandboxes that run now matter more than one that may start a moment later
    work, input_fd = Path(argv[1]), int(argv[2])
    job = msgspec.json.decode(argv[3], type=DiskJob)
    return end_with(lambda reporter: run(work, input_fd, job, reporter))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
