"""The eight images of the images bench: a Debian base as one layer, and what each is for as a second, in a registry.

Everything comes from Debian, through the host's own sources. Made once and kept in the cache as the storage directory
of docker-registry, which is what both sides of the bench read:

    ~/.cache/dsecd/benchoci-<key>/registry/     pushed by skopeo, which compresses the layers
    ~/.cache/dsecd/benchoci-<key>/sizes.json    name -> bytes of own content
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from daemonkit import host_suite

from tests.bench.images_layout import Layout
from tests.lab import cache

OWN_BYTES: Final = 300 << 20  # what each image has beyond the base, at least
STEP_S: Final = 900


@dataclass(frozen=True)
class Content:
    """An image and its task: what a task of the burst runs, which must print `right`."""

    name: str
    packages: tuple[str, ...]
    task: str
    right: str


CONTENTS: Final = (
    Content(
        "cxx", ("g++", "make", "cmake", "gdb", "libboost-dev", "libssl-dev", "libeigen3-dev"),
        "printf '#include <boost/algorithm/string.hpp>\n#include <iostream>\nint main() {"
        " std::string s = \"right\"; boost::to_upper(s); std::cout << s << std::endl; }' > /tmp/a.cc"
        " && g++ -o /tmp/a /tmp/a.cc && /tmp/a", "RIGHT",
    ),
    Content(
        "node", ("nodejs", "npm", "node-typescript", "webpack", "eslint", "chromium"),
        "printf 'const a: number = 6; console.log(\"RIGHT\", a * 7);' > /tmp/a.ts"
        " && tsc --noLib false --outDir /tmp/out /tmp/a.ts > /tmp/log; node /tmp/out/a.js", "RIGHT 42",
    ),
    Content(
        "java", ("openjdk-17-jdk-headless", "maven", "ant", "ivy", "junit5", "groovy"),
        "printf 'public class A { public static void main(String[] a) { System.out.println(\"RIGHT \" +"
        " java.util.stream.IntStream.range(0, 9).sum()); } }' > /tmp/A.java"
        " && java -version 2>&1 && javac -d /tmp /tmp/A.java && java -cp /tmp A", "RIGHT 36",
    ),
    Content(
        "python", ("python3-numpy", "python3-pandas", "python3-scipy", "python3-matplotlib", "python3-sklearn"),
        "python3 -c 'import numpy, pandas; f = pandas.DataFrame({\"a\": numpy.arange(9)});"
        " print(\"RIGHT\", f.a.sum())'", "RIGHT 36",
    ),
    Content(
        "go", ("golang-go",),
        "mkdir /tmp/go && cd /tmp/go"
        " && printf 'package main\nimport \"fmt\"\nfunc main() { fmt.Println(\"RIGHT\", 6*7) }' > a.go"
        " && HOME=/tmp go run a.go", "RIGHT 42",
    ),
    Content(
        "rust", ("rustc", "cargo"),
        "printf 'fn main() { println!(\"RIGHT {}\", (0..9).sum::<i32>()); }' > /tmp/a.rs"
        " && rustc -o /tmp/a /tmp/a.rs && /tmp/a", "RIGHT 36",
    ),
    Content(
        "databases", ("postgresql", "mariadb-server", "redis-server", "sqlite3"),
        "export PATH=$PATH:/usr/lib/postgresql/15/bin; install -d -o postgres /tmp/pg"
        " && setpriv --reuid=postgres --regid=postgres --clear-groups sh -c '"
        "initdb -D /tmp/pg/data >/tmp/pg/log && echo \"select 40 + 2\""
        " | postgres --single -D /tmp/pg/data postgres' | grep -o '\"42\"'", '"42"',
    ),
    Content(
        "clang", ("clang", "lld", "llvm-dev", "libclang-dev"),
        "printf '#include <stdio.h>\nint main(void) { puts(\"RIGHT\"); }' > /tmp/a.c"
        " && clang -O2 -fuse-ld=lld -o /tmp/a /tmp/a.c && /tmp/a", "RIGHT",
    ),
)  # fmt: skip

# In namespaces of its own: what is mounted ends with it. Downloads and lists are shared and stay out of the layer.
_INSTALL: Final = """
base=$1 upper=$2 work=$3 root=$4 debs=$5 lists=$6; shift 6
mount --make-rprivate /
mount -t overlay -o lowerdir=$base,upperdir=$upper,workdir=$work overlay $root
mount --bind $debs $root/var/cache/apt/archives
mount --bind $lists $root/var/lib/apt/lists
mount -t tmpfs tmpfs $root/tmp
mount --rbind /dev $root/dev
mount -t proc proc $root/proc
touch $root/etc/resolv.conf
mount --bind /etc/resolv.conf $root/etc/resolv.conf
printf '#!/bin/sh\\nexit 101\\n' > $root/usr/sbin/policy-rc.d
chmod 755 $root/usr/sbin/policy-rc.d
export DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin
[ -e $lists/done ] || { chroot $root apt-get -qq update && touch $lists/done; }
chroot $root apt-get -qq -y --no-install-recommends -o APT::Sandbox::User=root -o Dpkg::Use-Pty=0 \\
    -o DPkg::Options::=--force-unsafe-io install "$@" >&2
rm $root/usr/sbin/policy-rc.d
umount $root/etc/resolv.conf
rm -f $root/var/cache/apt/*.bin
"""


def registry() -> Path:
    """The product of the cache; minutes of work when it is not there."""
    recipe = [host_suite(), _INSTALL, *(" ".join((one.name, *one.packages)) for one in CONTENTS)]
    return cache.product("benchoci", cache.key_of(recipe), _make)


def sizes(product: Path) -> dict[str, int]:
    """Bytes of each image's own files."""
    found: dict[str, int] = json.loads((product / "sizes.json").read_text())
    return found


def _make(product: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="dsecd-benchimages-", dir="/var/tmp") as directory:
        work = Path(directory)
        base = work / "base"
        _run(["mmdebstrap", "--mode=root", "--variant=minbase", "--dpkgopt=force-unsafe-io",
              '--customize-hook=rm -f "$1/etc/dpkg/dpkg.cfg.d/99mmdebstrap"', host_suite(), str(base)])  # fmt: skip
        layout = Layout(work / "layout")
        lowest = layout.layer(base)
        (product / "registry").mkdir()
        (work / "debs/partial").mkdir(parents=True)
        (work / "lists").mkdir()
        own = {}
        with serving(product / "registry", free_port()) as address:
            for content in CONTENTS:
                upper = work / "upper"
                _install(work, upper, content)
                own[content.name] = sum(
                    path.lstat().st_size for path in upper.rglob("*") if path.is_file() and not path.is_symlink()
                )
                if own[content.name] < OWN_BYTES:
                    raise cache.LabError(f"image {content.name} has only {own[content.name] >> 20} MiB of its own")
                layout.image(content.name, [lowest, layout.layer(upper)])
                _run(["skopeo", "--insecure-policy", "copy", "-q", "--dest-tls-verify=false",
                      f"oci:{layout.root}:{content.name}", f"docker://{address}/{content.name}:1"])  # fmt: skip
                shutil.rmtree(upper)
    (product / "sizes.json").write_text(json.dumps(own))


def _install(work: Path, upper: Path, content: Content) -> None:
    shutil.rmtree(work / "overlay", ignore_errors=True)
    for path in (upper, work / "overlay/work", work / "overlay/root"):
        path.mkdir(parents=True)
    upper.chmod(0o755)
    places = [work / "base", upper, work / "overlay/work", work / "overlay/root", work / "debs", work / "lists"]
    _run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", _INSTALL, "sh",
          *map(str, places), *content.packages])  # fmt: skip


@contextlib.contextmanager
def serving(storage: Path, port: int, prefix: tuple[str, ...] = ()) -> Iterator[str]:
    """Debian's docker-registry on the loopback interface; prefix: a command that it is started through."""
    settings = {
        "REGISTRY_STORAGE_FILESYSTEM_ROOTDIRECTORY": str(storage), "REGISTRY_HTTP_ADDR": f"127.0.0.1:{port}",
        "REGISTRY_LOG_LEVEL": "error", "REGISTRY_LOG_ACCESSLOG_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none",
    }  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as config:
        config.write("version: 0.1\nstorage: {filesystem: {}}\nhttp: {}\n")
        config.flush()
        process = subprocess.Popen(
            [*prefix, "docker-registry", "serve", config.name], env=os.environ | settings,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _answers(process, port, prefix)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)


def _answers(process: subprocess.Popen[bytes], port: int, prefix: tuple[str, ...]) -> None:
    """Wait until it accepts connections, in whichever network namespace it is."""
    knock = [*prefix, "python3", "-c", f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"]
    until = time.monotonic() + 20
    while subprocess.run(knock, capture_output=True, check=False).returncode:
        if process.poll() is not None or time.monotonic() > until:
            raise cache.LabError("docker-registry does not answer; run it by hand to see why")
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=STEP_S, check=False)
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-5:]
        raise cache.LabError(f"{' '.join(argv[:3])}… failed: " + " / ".join(said))
