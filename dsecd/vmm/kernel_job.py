"""Makes one guest kernel in a directory of the store: a process of its own, which may take minutes and may be killed.

    python -m dsecd.vmm.kernel_job WORK-DIRECTORY JOB-AS-JSON

Lines of JSON (`dsecd.erofs.model.Report`) on standard output say how far it is and how it ended. It leaves `kernel/` in
the work directory and never commits; the daemon does (`dsecd.vmm.kernel_jobs`). Works as root on packages whose
signatures apt has checked.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from dsecd.erofs.importer import Reporter, end_with
from dsecd.erofs.sys import PR_SET_PDEATHSIG, prctl
from dsecd.errors import DsecError
from dsecd.vmm import kernel_source
from dsecd.vmm.apt import PrivateApt, higher, missing
from dsecd.vmm.bzimage import has_pvh_entry, vmlinux_of
from dsecd.vmm.kernel import describe
from dsecd.vmm.modules import WANTED, ModuleTree

UNPACK_S: Final = 300.0
_STEP: Final = re.compile(rb"^  (CC|AS|LD|AR|HOSTCC|GEN|OBJCOPY)\b")


class KernelJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """deb: unpack `package`, or the image package that it depends on. build: compile with `options` added.

    apt: directory for package lists. known: recipe to directory of kernels that are there already.
    """

    kind: Literal["deb", "build"]
    package: str = ""
    options: tuple[str, ...] = ()
    apt: str
    known: dict[str, str] = {}


def run(work: Path, job: KernelJob, reporter: Reporter) -> None:
    reporter.progress("fetch", 0, force=True)
    apt = PrivateApt(Path(job.apt))
    out = work / "kernel"
    if job.kind == "deb":
        import_deb(apt, work, out, job, reporter)
    else:
        build(apt, work, out, job, reporter)


def import_deb(apt: PrivateApt, work: Path, out: Path, job: KernelJob, reporter: Reporter) -> None:
    newest = _newest(apt, job.package)
    package = next((name for name in apt.depends(newest) if name.startswith("linux-image-")), newest)
    version = apt.candidate(package)
    recipe = _recipe("deb", package, version, *WANTED)
    if _known(recipe, job, out):
        return
    deb = apt.download(package, work)
    reporter.progress("fetch", deb.stat().st_size, deb.stat().st_size, force=True)
    tree = work / "deb"
    _checked(["dpkg-deb", "-x", str(deb), str(tree)])
    images = sorted((tree / "boot").glob("vmlinuz-*"))
    if len(images) != 1:
        raise DsecError("invalid", f"the package {package} holds {len(images)} kernels and not one")
    release = images[0].name.removeprefix("vmlinuz-")
    vmlinux = vmlinux_of(images[0].read_bytes())
    if not has_pvh_entry(vmlinux):
        raise DsecError("unsupported", f"the kernel of {package} has no PVH entry, by which machines start")
    out.mkdir()
    (out / "vmlinux").write_bytes(vmlinux)
    shutil.copyfile(tree / "boot" / f"config-{release}", out / "config")
    reporter.progress("unpack", len(vmlinux), force=True)
    places = [tree / top / release for top in ("lib/modules", "usr/lib/modules")]
    modules = ModuleTree(next((place for place in places if place.is_dir()), places[0])).load_order()
    (out / "modules").mkdir()
    for number, (name, content) in enumerate(modules):
        (out / "modules" / f"{number:03}-{name}.ko").write_bytes(content)
    describe(out, kind="deb", source=package, version=version, release=release, recipe=recipe)


def _newest(apt: PrivateApt, package: str) -> str:
    """Of linux-image-cloud-amd64 and its like for one series each, linux-image-6.12-cloud-amd64, the newest."""
    flavour = package.removeprefix("linux-image-")
    names = [package]
    if not flavour[:1].isdigit():
        pattern = rf"^linux-image-[0-9]+\.[0-9]+-{re.escape(flavour)}$"
        names += [line.split()[0] for line in apt.run("apt-cache", "search", "--names-only", pattern).splitlines()]
    best = names[0]
    for name in names[1:]:
        if higher(apt.candidate(name), apt.candidate(best)):
            best = name
    return best


def build(apt: PrivateApt, work: Path, out: Path, job: KernelJob, reporter: Reporter) -> None:
    if absent := missing(kernel_source.BUILD_PACKAGES):
        raise DsecError("unsupported", f"building a kernel needs packages: apt-get install {' '.join(absent)}")
    package = kernel_source.source_package(apt)
    version = apt.candidate(package)
    fragment = kernel_source.FRAGMENT.read_text() + "".join(f"{option}\n" for option in job.options)
    recipe = _recipe("build", package, version, fragment)
    if _known(recipe, job, out):
        return
    tree = kernel_source.unpack(apt, package, work)
    reporter.progress("unpack", 0, force=True)
    release = _release(tree)
    out.mkdir()
    maker = _Maker(work / "make.log", reporter)
    kernel_source.build(tree, fragment, out, maker.make)
    (out / "modules").mkdir()
    describe(out, kind="build", source=package, version=version, release=release, recipe=recipe)


def _recipe(*parts: str) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _known(recipe: str, job: KernelJob, out: Path) -> bool:
    """The same kernel is here, perhaps by another name: its files never change, so links will do."""
    if (directory := job.known.get(recipe)) is None:
        return False
    shutil.copytree(directory, out, copy_function=os.link, ignore=shutil.ignore_patterns("initrd-*", ".initrd-*"))
    return True


def _release(tree: Path) -> str:
    head = dict(re.findall(r"^(VERSION|PATCHLEVEL|SUBLEVEL|EXTRAVERSION) *= *(\S*)$",
                           (tree / "Makefile").read_text(), re.MULTILINE))  # fmt: skip
    return f"{head['VERSION']}.{head['PATCHLEVEL']}.{head['SUBLEVEL']}{head['EXTRAVERSION']}"


def _checked(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=UNPACK_S, check=False)
    except FileNotFoundError as exc:
        raise DsecError("unsupported", f"{command[0]} is not installed") from exc
    except subprocess.TimeoutExpired as exc:
        raise DsecError("internal", f"{command[0]} did not end within {UNPACK_S:g} s") from exc
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise DsecError("image", f"{command[0]} failed: {(said or ['it said nothing'])[-1][:400]}")


class _Maker:
    """Runs make so that all of it ends when this process does, and counts what it has done."""

    def __init__(self, log: Path, reporter: Reporter) -> None:
        self._log, self._reporter = log, reporter
        self._steps = 0

    def make(self, tree: Path, target: str) -> None:
        command = ["make", "-C", str(tree), f"-j{len(os.sched_getaffinity(0))}", target]
        if os.geteuid() == 0:
            # Its compilers are many levels below: a PID namespace takes them all along.
            command = ["unshare", "--pid", "--fork", "--kill-child", *command]
        with self._log.open("ab") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )  # fmt: skip
            with process:
                assert process.stdout is not None
                for line in process.stdout:
                    if _STEP.match(line):
                        self._steps += 1
                        self._reporter.progress("build", self._steps)
        if process.returncode:
            said = [line for line in self._end_of_log() if "error" in line.lower()] or self._end_of_log()
            raise DsecError("unsupported", f"make {target} of the kernel failed: {(said or ['no reason given'])[-1]}")

    def _end_of_log(self) -> list[str]:
        return [line.strip()[:400] for line in self._log.read_text(errors="replace").splitlines()[-50:] if line.strip()]


def main(argv: list[str]) -> int:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(10)  # sandboxes that run now matter more
    work = Path(argv[1])
    job = msgspec.json.decode(argv[2], type=KernelJob)
    return end_with(lambda reporter: run(work, job, reporter))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
