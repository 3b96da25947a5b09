"""What an import fetches as root before any of it is parsed: a registry's image by skopeo, a Debian base by mmdebstrap.

Both write below the import's own work directory only, so that removing that removes everything.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from dsecd.erofs.logins import check_authfile
from dsecd.erofs.model import ImportJob, Limits
from dsecd.erofs.sys import PR_SET_PDEATHSIG, prctl
from dsecd.errors import DsecError, Kind

# (what skopeo says, what that is). First match wins; the rest of its failures are the network's.
_SKOPEO_SAYS: Final[tuple[tuple[str, Kind], ...]] = (
    ("no space left on device", "disk_full"), ("disk quota exceeded", "disk_full"), ("manifest unknown", "not_found"),
    ("name unknown", "not_found"), ("404 (not found)", "not_found"), ("unauthorized", "denied"),
    ("authentication required", "denied"), ("denied", "denied"), ("rejected by policy", "denied"),
    ("invalid reference format", "invalid"), ("no image found in", "image"), ("digest did not match", "image"),
    ("unsupported", "image"), ("unexpected end of json", "image"), ("does not match", "image"),
)  # fmt: skip

_MMDEBSTRAP_SAYS: Final[tuple[tuple[str, Kind], ...]] = (
    ("No space left on device", "disk_full"), ("Unable to locate package", "not_found"),
    ("has no installation candidate", "not_found"), ("Could not resolve", "network"),
    ("Could not connect", "network"), ("Connection failed", "network"), ("Connection timed out", "network"),
    ("does not have a Release file", "not_found"), ("404  Not Found", "not_found"), ("Failed to fetch", "network"),
)  # fmt: skip

_LOOPBACK: Final = re.compile(r"127(\.\d{1,3}){3}")  # 127.something.example is somebody else

Report = Callable[[str, int], None]


def skopeo(job: ImportJob, limits: Limits, work: Path, report: Report) -> Path:
    """The OCI layout that the reference was copied to."""
    layout = work / "layout"
    check_authfile(limits.authfile)
    command = ["skopeo", "copy", "--quiet", "--retry-times=2"]
    if not Path("/etc/containers/policy.json").exists():
        command.insert(1, "--insecure-policy")
    command.append(f"--src-authfile={limits.authfile}" if limits.authfile else "--src-no-creds")
    if plain_http(job.reference, limits.insecure_registries):
        command.append("--src-tls-verify=false")
    command += [job.reference, f"oci:{layout}:image"]
    fetching = _start(command, work, "skopeo.log", subprocess.DEVNULL)
    while fetching.process.poll() is None:
        report("fetch", _bytes_below(work))
        time.sleep(0.1)
    if fetching.process.returncode != 0:
        raise _skopeo_failed(job.reference, fetching.said())
    return layout


class Bootstrap(NamedTuple):
    """mmdebstrap as its unprivileged reader sees it: the tar, how it ended (one byte), and what it said."""

    tar: int
    ended: int
    log: int


def mmdebstrap(job: ImportJob, work: Path) -> Bootstrap:
    """Start it and return *in a child*, which may give up root; this process stays behind as root and minds both.

    It must: a parent-death signal from a process that gave up root does not reach one that is root. mmdebstrap has
    namespaces of its own, so that its mounts and children end with it.
    """
    command = [
        "unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc",
        "mmdebstrap", "--mode=root", "--variant=minbase", "--format=tar",
        # Nothing here survives a crash anyway, so dpkg need not sync; the option itself stays out of the image.
        "--dpkgopt=force-unsafe-io", '--customize-hook=rm -f "$1/etc/dpkg/dpkg.cfg.d/99mmdebstrap"',
    ]  # fmt: skip
    if job.packages:
        command.append("--include=" + ",".join(job.packages))
    command += [job.suite, "-", *apt_sources(job.suite, work)]
    fetching = _start(command, work, "mmdebstrap.log", subprocess.PIPE)
    assert fetching.process.stdout is not None
    tar = os.dup(fetching.process.stdout.fileno())  # a Popen closes its own when it is collected
    fetching.process.stdout.close()
    ended, end = os.pipe()
    reader = os.fork()
    if reader:
        os.close(tar)
        _mind(fetching.process.pid, reader, end)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(end)
    return Bootstrap(tar, ended, fetching.log)


def _mind(mmdebstrap: int, reader: int, end: int) -> NoReturn:
    """Tell the reader how mmdebstrap ended; end when the reader does, and mmdebstrap with us."""
    while True:
        pid, status = os.wait()
        if pid == reader:
            os._exit(min(abs(os.waitstatus_to_exitcode(status)), 255))
        if pid == mmdebstrap:
            os.write(end, b"0" if status == 0 else b"1")


def check_bootstrap(bootstrap: Bootstrap) -> None:
    """Raise what mmdebstrap says, which explains more than the broken tar that came of it."""
    if os.read(bootstrap.ended, 1) == b"0":
        return
    text = _end_of(bootstrap.log)
    for sign, kind in _MMDEBSTRAP_SAYS:
        if sign in text:
            raise DsecError(kind, f"mmdebstrap: {_last_line(text, sign)}")
    raise DsecError("image", f"mmdebstrap failed: {_last_line(text, 'E: ')}")


def plain_http(reference: str, insecure: tuple[str, ...]) -> bool:
    """Registries on the loopback interface need no TLS; others only where the config says so."""
    host_port = reference.removeprefix("docker://").split("/", 1)[0]
    host = host_port.rsplit(":", 1)[0]
    return host == "localhost" or bool(_LOOPBACK.fullmatch(host)) or host_port in insecure


def apt_sources(suite: str, work: Path) -> list[str]:
    """Files for mmdebstrap with the host's own sources of its distribution, for another suite where one is asked for.

    Sources of third parties are left out. No mirror is ever named here.
    """
    host = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    deb822 = [text for path in _files("*.sources") for text in _stanzas(path.read_text(), host, suite)]
    lines = [
        text for path in [*_files("*.list"), Path("/etc/apt/sources.list")] if path.is_file()
        for text in _one_lines(path.read_text(), host, suite)
    ]  # fmt: skip
    written = []
    for name, texts in (("host.sources", deb822), ("host.list", lines)):
        if texts:
            (work / name).write_text("\n".join(texts) + "\n")
            written.append(str(work / name))
    if not written:
        raise DsecError("unsupported", f"this host has no apt source of its own distribution ({host or 'unknown'})")
    return written


def _files(pattern: str) -> list[Path]:
    return sorted(Path("/etc/apt/sources.list.d").glob(pattern))


def _stanzas(text: str, host: str, suite: str) -> list[str]:
    found = []
    for stanza in re.split(r"\n\s*\n", text):
        lines = [line for line in stanza.splitlines() if line.strip() and not line.startswith("#")]
        suites = [i for i, line in enumerate(lines) if line.lower().startswith("suites:")]
        disabled = any(re.fullmatch(r"enabled:\s*(no|false)", line.strip().lower()) for line in lines)
        if suites and not disabled and (wanted := _suites(lines[suites[0]].split()[1:], host, suite)):
            lines[suites[0]] = "Suites: " + " ".join(wanted)
            found.append("\n".join(lines) + "\n")
    return found


def _one_lines(text: str, host: str, suite: str) -> list[str]:
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"(deb\s+(?:\[[^]]*\]\s+)?\S+\s+)(\S+)(\s.*)", line.strip())
        if match and (wanted := _suites([match[2]], host, suite)):
            found.append(match[1] + wanted[0] + match[3])
    return found


def _suites(names: list[str], host: str, suite: str) -> list[str]:
    """bookworm, bookworm-updates -> trixie, trixie-updates. The rolling suites have no such companions."""
    rolling = suite in ("sid", "unstable", "experimental")
    kept = [name for name in names if name == host or (not rolling and name in (host + "-updates", host + "-security"))]
    return [suite + name[len(host) :] for name in kept]


class Fetching(NamedTuple):
    """A child and its log, which stays readable when root is given up."""

    process: subprocess.Popen[bytes]
    log: int

    def said(self) -> str:
        return _end_of(self.log)


def _start(command: list[str], work: Path, log_name: str, stdout: int) -> Fetching:
    """Same process group, so that who kills the import kills this too; and it does not outlive the importer."""
    env = {k: v for k, v in os.environ.items() if k in _PASSED_ON} | {"TMPDIR": str(work), "HOME": str(work)}
    log = os.open(work / log_name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def go_down_with_the_importer() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=log, env=env, cwd=work,
            preexec_fn=go_down_with_the_importer,
        )  # fmt: skip
    except FileNotFoundError as e:
        raise DsecError("unsupported", f"{command[0]} is not installed on this host") from e
    return Fetching(process, log)


_PASSED_ON: Final = {
    "PATH", "LANG", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "APT_CONFIG",
}  # fmt: skip


def _skopeo_failed(reference: str, text: str) -> DsecError:
    lower = text.lower()
    kind: Kind = next((kind for sign, kind in _SKOPEO_SAYS if sign in lower), "network")
    return DsecError(kind, f"skopeo could not fetch {reference}: {_last_line(text, 'msg=')}")


def _end_of(log: int) -> str:
    return os.pread(log, 8192, max(0, os.fstat(log).st_size - 8192)).decode("utf-8", "replace")


def _last_line(text: str, sign: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    said = [line for line in lines if sign in line] or lines or ["it said nothing"]
    return said[-1].strip()[-500:]


def _bytes_below(directory: Path) -> int:
    total = 0
    for where, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(where) / name).lstat().st_size
            except FileNotFoundError:
                continue
    return total
