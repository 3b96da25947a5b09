"""The lab's root file system: a small Debian with systemd, of the host's own suite by default, as one ext4 image.

Immutable once made: each VM writes to a throw-away layer over it. Holds what `make install` of this project and its lab
tests need from Debian, and the runner that executes the host's commands. Never holds the project itself nor its Python
wheels: they change more often and travel on their own disk (delivery.py).
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from apt import NEEDS_BACKPORTS, Apt, missing
from cache import LabError, cache_dir, key_of, product

GUEST = Path(__file__).with_name("guest")
IMAGE_SIZE = "12G"  # sparse; room for loop images, btrfs stores and built images during a run

SYSTEM = "systemd systemd-sysv libpam-systemd dbus udev kmod procps util-linux iproute2 uidmap ca-certificates socat"
SANDBOXES = "crun runc golang-github-containers-common nftables erofs-utils btrfs-progs xfsprogs skopeo umoci"
SECURITY = "apparmor apparmor-utils"
INSTALLING = (
    "python3 python3-venv python3-dev python3-pip gcc libc6-dev make pkg-config git"
    " libseccomp-dev libsystemd-dev libffi-dev"
)
GUESTS = "e2fsprogs cpio zstd qemu-system-x86 qemu-utils"  # for guests of the guest, under its KVM
TESTING = "busybox-static attr xz-utils openssh-client"
PACKAGES = f"{SYSTEM} {SANDBOXES} {SECURITY} {INSTALLING} {GUESTS} {TESTING}".split()
BASE_PACKAGES = ["python3-minimal", "procps", "mount"]

# Half the files of a small Debian.
NOBODY_READS = ["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/zoneinfo/*"]

# Waits or works for nothing in a VM that lives for minutes. serial-getty would wait 90 s for its device.
MASKED = [
    "serial-getty@ttyS0.service",
    "getty@tty1.service",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "man-db.timer",
    "systemd-timesyncd.service",
    "systemd-random-seed.service",
    "systemd-update-utmp.service",
]

FILES = {
    "etc/hostname": "dsecd-lab\n",
    "etc/hosts": "127.0.0.1 localhost dsecd-lab\n::1 localhost\n",
    # A fixed id: an empty one makes every boot a first boot, with preset-all and all it runs.
    "etc/machine-id": "d5ec0000000000000000000000001ab0\n",
    "etc/pip.conf": "[global]\nno-index = true\nfind-links = /srv/wheels\ndisable-pip-version-check = true\n",
    "etc/systemd/journald.conf.d/lab.conf": "[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n",
}

Progress = Callable[[str], None]


def rootfs(progress: Progress, suite: str) -> Path:
    """Path of the raw ext4 image."""
    guest = [path.read_bytes() for path in sorted(GUEST.iterdir()) if path.is_file()]
    key = key_of(
        [suite, IMAGE_SIZE, *PACKAGES, *NOBODY_READS, *MASKED, *(f"{k}={v}" for k, v in sorted(FILES.items())), *guest]
    )

    def make(work: Path) -> None:
        progress(f"lab: making a Debian {suite} root file system; a minute or two, once")
        tree = work / "rootfs"
        debootstrap(suite, tree)
        furnish(tree)
        pack(tree, work / "root.ext4")
        shutil.rmtree(tree)
        progress("lab: root file system made")

    return product("rootfs", key, make) / "root.ext4"


def debootstrap(suite: str, tree: Path) -> None:
    options = [f"--include={','.join(PACKAGES)}", "--variant=minbase"]
    if suite in NEEDS_BACKPORTS:
        pin = f"Package: qemu* seabios\\nPin: release n={suite}-backports\\nPin-Priority: 600\\n"
        where = '"$1"/etc/apt/preferences.d'
        options.append(f"--setup-hook=mkdir -p {where}; printf '{pin}' > {where}/dsecd-lab")
    mmdebstrap(suite, options, tree, Apt(suite).parts)


def base_tar(progress: Progress, suite: str) -> Path:
    """A small Debian with Python as a tar, for the base image of sandboxes in the lab; there is no mirror inside."""

    def make(work: Path) -> None:
        progress("lab: making a base image for sandboxes; once")
        options = [f"--include={','.join(BASE_PACKAGES)}", "--variant=essential"]
        mmdebstrap(suite, options, work / "base.tar", Apt(suite).parts)

    return product("labbase", key_of([suite, *BASE_PACKAGES, *NOBODY_READS]), make) / "base.tar"


def mmdebstrap(suite: str, options: list[str], target: Path, sources: Path) -> None:
    if absent := missing(["mmdebstrap", "e2fsprogs"]):
        Apt().install(absent)
    log = cache_dir() / f"{target.name}-build.log"
    command = ["mmdebstrap", "--mode=root", "--aptopt=Apt::Install-Recommends false", *options]
    command += [f"--dpkgopt=path-exclude={path}" for path in NOBODY_READS]
    command += [suite, str(target), *(str(path) for path in sorted(sources.iterdir()))]
    # mmdebstrap wants a working directory that `_apt` may enter, which the cache in a home directory is not.
    with log.open("wb") as sink, tempfile.TemporaryDirectory(prefix="dsecd-lab-") as temporary:
        done = subprocess.run(command, cwd=temporary, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    if done.returncode:
        raise LabError(f"mmdebstrap of {target.name} failed; see {log}")


def furnish(tree: Path) -> None:
    """Put the lab's own files in: the runner, its unit, quiet defaults."""
    for name, text in FILES.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    library = tree / "usr/local/lib/dsecd-lab"
    library.mkdir(parents=True)
    shutil.copy(GUEST / "runner.py", library)
    units = tree / "etc/systemd/system"
    shutil.copy(GUEST / "lab-runner.service", units)
    wants = units / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "lab-runner.service").symlink_to("../lab-runner.service")
    for unit in MASKED:
        (units / unit).unlink(missing_ok=True)
        (units / unit).symlink_to("/dev/null")
    shutil.rmtree(tree / "var/cache/apt", ignore_errors=True)


def pack(tree: Path, image: Path) -> None:
    with image.open("wb") as file:
        file.truncate(0)
    # No journal: the base is never written, and a run's own layer is thrown away.
    done = subprocess.run(
        ["mkfs.ext4", "-q", "-F", "-d", tree, "-L", "lab", "-O", "^has_journal", image, IMAGE_SIZE],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise LabError(f"mkfs.ext4 of the lab's root failed: {done.stderr.strip()}")
