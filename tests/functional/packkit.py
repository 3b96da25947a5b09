"""What packs and forks are held against: the tree of a container as a process inside sees it."""

from __future__ import annotations

import ast
from typing import Any

from dsecd.client import Sandbox

# Run by the image's own python3, which has few modules. Sockets are left out: each is a process's name.
_WALK = r"""
import hashlib, os, stat, sys
found, inodes = {}, {}
walks = (step for top in sys.argv[1:] for step in os.walk(os.fsencode(top), topdown=True))
for where, dirs, files in walks:
    dirs[:] = sorted(d for d in dirs if os.path.join(where, d) not in (b"/proc", b"/sys", b"/dev"))
    for name in [b"."] * (where == b"/") + dirs + files:
        path = os.path.join(where, name)
        st = os.lstat(path)
        if stat.S_ISSOCK(st.st_mode):
            continue
        content = ""
        if stat.S_ISREG(st.st_mode):
            content = hashlib.sha256(open(path, "rb").read()).hexdigest()
        elif stat.S_ISLNK(st.st_mode):
            content = repr(os.readlink(path))
        xattrs = {}
        if not stat.S_ISLNK(st.st_mode):
            xattrs = {n: os.getxattr(path, n, follow_symlinks=False).hex()
                      for n in sorted(os.listxattr(path, follow_symlinks=False))}
        shown = path.decode("utf-8", "backslashreplace")
        size = 0 if stat.S_ISDIR(st.st_mode) else st.st_size
        when = 0 if name == b"." else st.st_mtime_ns  # the root is the sandbox's own
        found[shown] = [st.st_mode, st.st_uid, st.st_gid, size, when, st.st_rdev, content, xattrs]
        if not stat.S_ISDIR(st.st_mode) and st.st_nlink > 1:
            inodes.setdefault((st.st_dev, st.st_ino), []).append(shown)
print(repr({"tree": found, "links": sorted(sorted(g) for g in inodes.values() if len(g) > 1)}))
"""


async def tree(sandbox: Sandbox, *tops: str, fresh: bool = False) -> dict[str, Any]:
    """Content, type, mode, owner, size, time, device, xattrs of every name, and which names are one file.

    tops: directories, if not all of it.
    """
    result = await sandbox.exec(["python3", "-I", "-c", _WALK, *(tops or ["/"])], timeout=120, fresh=fresh)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = ast.literal_eval(result.stdout)
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not the same, in words."""
    a, b = one["tree"], other["tree"]
    out = [f"only in the first: {name} {a[name]}" for name in sorted(a.keys() - b.keys())]
    out += [f"only in the second: {name} {b[name]}" for name in sorted(b.keys() - a.keys())]
    out += [f"{name}: {a[name]} / {b[name]}" for name in sorted(a.keys() & b.keys()) if a[name] != b[name]]
    if one["links"] != other["links"]:
        out.append(f"links: {one['links']} / {other['links']}")
    return out


# Everything that a layer can hold, made as root and as another user inside. `fresh` directories hide the base's.
MESS = r"""
set -e
mkdir -p /work/deep/er && cd /work
echo one > plain && ln plain linked && ln plain deep/linked && ln -s ../plain deep/sym && ln -s /nowhere dangling
mkfifo pipe && printf 'a' > "$(printf 'new\nline')" && printf 'b' > "$(printf 'raw\377')" && : > ./-dash
dd if=/dev/urandom of=big bs=65536 count=40 2>/dev/null && truncate -s 5M sparse && printf x >> sparse
install -m 4755 /bin/true setuid && install -m 2755 /bin/true setgid && mkdir -m 1777 sticky && chmod 000 plain
chown 1000:1000 deep && chown -h 33:33 deep/sym && chown 197609:12 big
chmod 640 /etc/hostname && rm /etc/debian_version && rm -rf /usr/share/doc && rm -rf /etc/cron.daily
mkdir /etc/cron.daily && echo fresh > /etc/cron.daily/mine
rm -rf /usr/share/perl5 && echo file-now > /usr/share/perl5
mv /etc/issue /etc/moved-issue && echo more >> /etc/passwd
python3 - <<'P'
import os
os.setxattr("/work/big", "user.note", b"\0binary\xff")
os.setxattr("/work/deep", "user.on", b"dir")
# VFS_CAP_REVISION_2, cap_net_raw: what setcap writes
os.setxattr("/work/setgid", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
# user:1000:rw
acl = "02000000" "01000600ffffffff" "02000600e8030000" "04000400ffffffff" "10000600ffffffff" "20000400ffffffff"
os.setxattr("/work/linked", "system.posix_acl_access", bytes.fromhex(acl))
P
"""
