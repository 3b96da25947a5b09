"""What travels into the lab and out of it, as tar archives on raw disks: no file system to make, mount or leak.

In: the project's files as git knows them (`/srv/project`), the Python wheels of its dependencies (`/srv/wheels`), the
test runner's own packages (`/srv/lab-site`, for PYTHONPATH), a kernel for guests of the guest (`/srv/vmlinux`, with its
configuration beside it), a base image for sandboxes (`/srv/base.tar`), and releases of Firecracker where this machine
has them (`/srv/bin/`).
Out: one directory of results. What is compiled is compiled on the host, the project's own wheel (`/srv/built`) and
native parts too, because that is ten times slower under emulation; installing stays the guest's work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path

from apt import Apt, codename, missing
from cache import LabError, cache_dir, key_of, product

PROJECT = Path(__file__).resolve().parents[2]
WHEEL_PACKAGES = ["python3-venv", "python3-dev", "gcc", "pkg-config", "libsystemd-dev", "libffi-dev"]
TEST_TOOLS = ("pytest", "hypothesis")
PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
SOURCE_ONLY = ("systemd-python",)  # has no wheels
VENV = "/usr/lib/dsecd/venv"  # where `make install PREFIX=/usr` puts it
SECTOR = 512

Progress = Callable[[str], None]


def requirements(pyproject: Path = PROJECT / "pyproject.toml") -> tuple[list[str], list[str]]:
    """What the installed project needs, and what its tests need, as pip requirements."""
    table = tomllib.loads(pyproject.read_text())
    extras: dict[str, list[str]] = table["project"].get("optional-dependencies", {})
    install = [
        *table["build-system"]["requires"],
        "wheel",
        *table["project"]["dependencies"],
        *extras.get("systemd", []),
    ]
    tests = [line for line in extras.get("dev", []) if line.startswith(TEST_TOOLS)]
    return sorted(set(install)), sorted(tests)


def wheels(progress: Progress, suite: str) -> Path:
    """A directory with `wheels/`, `site/` and `venv/`, built for the Python of the suite. Of another suite than this
    machine's: no `venv/`, and what must be compiled is there as source."""
    install, tests = requirements()
    if suite != codename():
        return foreign_wheels(progress, suite, install, tests)

    def make(work: Path) -> None:
        progress("lab: building Python wheels for the guest")
        if absent := missing(WHEEL_PACKAGES):
            Apt().install(absent)
        # Debian's own interpreter, whatever `python3` is here: the guest runs that one.
        pip(["/usr/bin/python3", "-m", "venv", str(work / "venv")])
        tool = [str(work / "venv/bin/pip"), "--quiet", "--disable-pip-version-check"]
        pip([*tool, "install", "wheel"])
        pip([*tool, "wheel", "--wheel-dir", str(work / "wheels"), *install])
        pip([*tool, "install", "--target", str(work / "site"), *tests])
        pip([*tool, "install", "--no-index", "--find-links", str(work / "wheels"), *install])
        relocate(work / "venv")

    return product("wheels", key_of([codename(), VENV, *install, "", *tests]), make)


def foreign_wheels(progress: Progress, suite: str, install: list[str], tests: list[str]) -> Path:
    version = PYTHONS.get(suite)
    if version is None:
        raise LabError(f"no Python is known for Debian {suite}: the lab can be {codename()} or {', '.join(PYTHONS)}")
    source = [line for line in install if line.startswith(SOURCE_ONLY)]
    ready = [line for line in install if line not in source]

    def make(work: Path) -> None:
        progress(f"lab: fetching Python wheels for {suite}'s Python {version}")
        pip(["/usr/bin/python3", "-m", "venv", str(work / "tool")])
        tool = [str(work / "tool/bin/pip"), "--quiet", "--disable-pip-version-check"]
        pip([*tool, "install", "setuptools", "wheel"])
        theirs = ["--python-version", version, "--only-binary=:all:"]
        pip([*tool, "download", "--dest", str(work / "wheels"), *theirs, *ready])
        pip([*tool, "download", "--dest", str(work / "wheels"), "--no-deps", "--no-binary=:all:",
             "--no-build-isolation", *source])  # fmt: skip
        pip([*tool, "install", "--target", str(work / "site"), *theirs, *tests])
        shutil.rmtree(work / "tool")

    return product("wheels", key_of([suite, version, *install, "", *tests]), make)


def relocate(venv: Path) -> None:
    """Make the environment one that was made at VENV: scripts name their interpreter by its path."""
    for path in [venv / "pyvenv.cfg", *(venv / "bin").iterdir()]:
        if path.is_file() and not path.is_symlink():
            path.write_bytes(path.read_bytes().replace(bytes(venv), VENV.encode()))


def built(wheel_dir: Path, into: Path) -> Path:
    """What the guest would compile: `wheels/`, with the project's own, and `native/`, as make leaves it."""
    tree = into / "tree"
    for name in project_files():
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(PROJECT / name, target)  # with its times: make in the guest compares them
    make = ["make", "-s", "-C", str(tree / "native"), f"BUILD={into / 'native'}", "all"]
    done = subprocess.run(make, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"the native parts did not build: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    # By the interpreter: the environment's scripts name the guest's.
    tool = [str(wheel_dir / "venv/bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    pip([*tool, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(into / "wheels"), str(tree)])
    shutil.rmtree(tree)
    return into


def pip(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise LabError(f"{' '.join(command[:4])} … failed for the guest's wheels: {reason}")


def project_files() -> list[str]:
    """Tracked files and new ones that git does not ignore, as they are in the work tree."""
    command = ["git", "-C", str(PROJECT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in listed.split("\0") if name and (PROJECT / name).is_file()})


def write_disk(
    disk: Path, wheel_dir: Path, vmlinux: Path, base: Path | None = None, compiled: Path | None = None
) -> None:
    """Fill the delivery disk; the guest unpacks it over its root.

    With `compiled` (see `built`), dependencies are in the environment already, as when an older version is installed:
    making and filling it takes the guest minutes. The project is never in it.
    """
    with tarfile.open(disk, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in project_files():
            tar.add(PROJECT / name, f"srv/project/{name}", filter=owned_by_root)
        tar.add(wheel_dir / "wheels", "srv/wheels", filter=owned_by_root)
        tar.add(wheel_dir / "site", "srv/lab-site", filter=owned_by_root)
        if compiled:
            tar.add(wheel_dir / "venv", VENV.lstrip("/"), filter=owned_by_root)
            tar.add(compiled / "wheels", "srv/built", filter=owned_by_root)
            tar.add(compiled / "native", "srv/project/build/native", filter=owned_by_root)
        tar.add(vmlinux, "srv/vmlinux", filter=owned_by_root)
        tar.add(vmlinux.with_name("config"), "srv/vmlinux.config", filter=owned_by_root)
        if base:
            tar.add(base, "srv/base.tar", filter=owned_by_root)
        for name, path in firecrackers():
            tar.add(path.resolve(), f"srv/bin/{name}", filter=owned_by_root)
    pad_to_sector(disk)


def firecrackers() -> list[tuple[str, Path]]:
    """Firecracker and its jailer, as `<n>/firecracker` and `<n>/jailer`, one <n> for each release that is here.

    Debian has no package of them: DSEC_FIRECRACKER names one, else one on the PATH and those in the cache are taken.
    They must be static, as the releases are: the jailer changes the root directory.
    """
    named = os.environ.get("DSEC_FIRECRACKER") or shutil.which("firecracker")
    found = [Path(named)] if named else []
    found += [] if os.environ.get("DSEC_FIRECRACKER") else sorted((cache_dir() / "bin").glob("**/firecracker"))
    pairs: list[tuple[str, Path]] = []
    for number, path in enumerate(path for path in found if path.is_file()):
        pairs += [(f"{number}/{one.name}", one) for one in (path, path.with_name("jailer")) if one.is_file()]
    return pairs


def owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


def pad_to_sector(disk: Path) -> None:
    with disk.open("ab") as file:
        file.truncate(-(-file.tell() // SECTOR) * SECTOR)


def read_disk(disk: Path, into: Path) -> list[str]:
    """Unpack the regular files that the guest wrote; their names.

    The guest is ours, yet a test in it is not trusted with our paths. (Debian 12's tarfile has no filters yet.)
    """
    names: list[str] = []
    try:
        with disk.open("rb") as raw, tarfile.open(fileobj=raw, mode="r|") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    continue
                if member.name.startswith("/") or ".." in Path(member.name).parts:
                    raise LabError(f"the guest's results hold a file outside their directory: {member.name}")
                target = into / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file)
                names.append(str(Path(member.name)))
    except tarfile.ReadError as error:
        raise LabError("the guest wrote no results") from error
    return sorted(names)
