"""What the demo's sandboxes are stacked from: base, workspace, toolkit. Everything comes from Debian and PyPI.

Sandboxes have no network, so layers are filled out here: pip unpacks pytest's wheels into a directory, and git comes as
those Debian packages that the base itself says it lacks, unpacked and not installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from tests.own import CACHE, Base

HERE: Final = Path(__file__).parent
PYTHONPATH: Final = "/opt/toolkit/python"
GIT_CONFIG: Final = """[user]
\tname = demo
\temail = demo@localhost
[safe]
\tdirectory = *
[init]
\tdefaultBranch = main
"""


def base() -> Base:
    """Debian with Python."""
    return Base("base:demo", ["python3"])


def sdist(work: Path) -> Path:
    """The project's sdist, its hash checked. To name it, pip runs the setup.py of what it has just checked."""
    target = work / "sdist"
    pip("download", "--no-build-isolation", "--no-binary", ":all:", "-d", str(target), "-r", str(HERE / "project.txt"))
    (found,) = target.glob("*.tar.gz")
    return found


def toolkit(work: Path, dpkg_status: bytes) -> tuple[Path, bool]:
    """A tar with pytest and git for a base with that dpkg status, and whether it was made by an earlier run."""
    recipe = dpkg_status + (HERE / "toolkit.txt").read_bytes() + Path(__file__).read_bytes()
    kept = CACHE / f"toolkit-{hashlib.sha256(recipe).hexdigest()[:12]}.tar"
    if kept.exists():
        return kept, True
    tree = work / "toolkit"
    pip("install", "--only-binary", ":all:", "--target", f"{tree}{PYTHONPATH}", "-r", str(HERE / "toolkit.txt"))
    _git(work, tree, dpkg_status)
    keep(tree, kept)
    return kept, False


def keep(tree: Path, kept: Path) -> None:
    """The tree as a tar in the cache, which appears whole."""
    CACHE.mkdir(parents=True, exist_ok=True)
    fresh = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        with tarfile.open(fresh, "w", format=tarfile.PAX_FORMAT) as tar:
            tar.add(tree, arcname=".")
        fresh.rename(kept)
    finally:
        fresh.unlink(missing_ok=True)


def pip(command: str, *args: str) -> None:
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--require-hashes"]
    _run([sys.executable, "-m", "pip", command, *quiet, *args])


def _git(work: Path, tree: Path, dpkg_status: bytes) -> None:
    debs = work / "debs"
    (debs / "partial").mkdir(parents=True)
    status = work / "status"
    status.write_bytes(dpkg_status)
    options = {
        "Dir::State::status": str(status), "Dir::Cache::archives": str(debs), "APT::Sandbox::User": "root",
        "Debug::NoLocking": "true",
    }  # fmt: skip
    download = ["apt-get", "-qq", "-y", "--no-install-recommends", "--download-only", "install", "git"]
    download += [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    try:
        _run(download)
    except RuntimeError:  # lists that are missing or too old
        _run(["apt-get", "-qq", "update"])
        _run(download)
    for deb in sorted(debs.glob("*.deb")):
        _run(["dpkg", "-x", str(deb), str(tree)])
    _merge_usr(tree)
    (tree / "etc").mkdir(exist_ok=True)
    (tree / "etc/gitconfig").write_text(GIT_CONFIG)


def _merge_usr(tree: Path) -> None:
    """/lib and the like are links into /usr in the base; a directory of that name in a layer above would hide them."""
    for name in ("bin", "sbin", "lib", "lib64"):
        if (tree / name).is_dir() and not (tree / name).is_symlink():
            shutil.copytree(tree / name, tree / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(tree / name)


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()[-5:]
        raise RuntimeError(f"{' '.join(argv[:4])}… failed: " + "\n".join(said))
