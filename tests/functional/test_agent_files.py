# ruff: noqa: F811
"""The agent's files, trees and tunnels, also when the tenant does not play along."""

from __future__ import annotations

import hashlib
import io
import os
import random
import tarfile
import time
from pathlib import Path

import pytest
from agent_box import HOST_ID, Box, Client, client, rootfs, sandbox  # noqa: F401

from dsecd.agent.frames import Fields, Tag, Type

PARENTS, NEW, APPEND, OWNER = 1, 2, 4, 8
RECURSIVE, FOLLOW = 2, 16
EEXIST, ENOTDIR, EISDIR, EINVAL, ELOOP, ENOSPC, ENOTEMPTY, EBADMSG = 17, 20, 21, 22, 40, 28, 39, 74

WEIRD = [
    b"new\nline",
    b"-rf",
    b" spaces ",
    b"x" * 255,
    b"\xff\xfe not utf-8",
    b"*",
    b"tab\t",
    b"\\",
    b"'\"",
    "ümlaut".encode(),
]


def failing(client: Client, *call: object) -> int:
    """The errno with which this call on the client fails."""
    with pytest.raises(OSError) as error:
        getattr(client, str(call[0]))(*call[1:])
    return error.value.errno or 0


# -- single files


@pytest.mark.parametrize(
    "size", [0, 1, 18 << 10, 64 << 10, 96 << 10, 128 << 10, 256 << 10, (256 << 10) + 1, 1 << 20, 10 << 20, 100 << 20]
)
def test_round_trip(client: Client, size: int) -> None:
    data = random.randbytes(min(size, 1 << 20)) * (size // (1 << 20) or 1)
    assert client.write("/tmp/f", data).integer(Tag.SIZE) == size
    assert client.run("sha256sum", "/tmp/f").stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
    assert client.read("/tmp/f") == data


def test_a_part_of_a_file(client: Client) -> None:
    client.write("/tmp/f", b"0123456789")
    assert client.read("/tmp/f", 3, 4) == b"3456"
    assert client.read("/tmp/f", 8, 100) == b"89"
    assert client.read("/tmp/f", 100, 5) == b""
    assert client.read("/tmp/f", 5) == b"56789"


def test_a_file_of_proc_has_no_size_and_is_read(client: Client) -> None:
    assert client.read("/proc/version").startswith(b"Linux")


def test_mode_and_owner(client: Client, sandbox: Box) -> None:
    client.write("/tmp/m", b"x", 0o4750, OWNER, uid=1000, gid=10)
    got = client.stat("/tmp/m")
    assert (got.integer(Tag.MODE) & 0o7777, got.integer(Tag.UID), got.integer(Tag.GID)) == (0o4750, 1000, 10)
    assert got.integer(Tag.TYPE) == 8
    client.write("/tmp/m", b"y", 0o600)
    got = client.stat("/tmp/m")
    assert (got.integer(Tag.MODE) & 0o7777, got.integer(Tag.UID)) == (0o600, 1000), (
        "an overwritten file stays its user's"
    )
    assert (sandbox.upper / "tmp/m").stat().st_uid == HOST_ID + 1000


def test_parents_exclusive_append(client: Client) -> None:
    client.shell("rm -rf /tmp/a")
    assert failing(client, "write", "/tmp/a/b/c", b"x") == 2
    client.write("/tmp/a/b/c", b"one", flags=PARENTS | OWNER, uid=1000, gid=1000)
    assert client.stat("/tmp/a/b").integer(Tag.UID) == 1000
    assert failing(client, "write", "/tmp/a/b/c", b"x", 0o644, NEW) == EEXIST
    client.write("/tmp/a/b/c", b" two", flags=APPEND)
    assert client.read("/tmp/a/b/c") == b"one two"
    client.write("/tmp/a/new", b"made", 0o640, APPEND)
    assert client.stat("/tmp/a/new").integer(Tag.MODE) & 0o777 == 0o640


@pytest.mark.parametrize("name", WEIRD)
def test_weird_names(client: Client, name: bytes) -> None:
    client.write(b"/tmp/weird/" + name, name, flags=PARENTS)
    assert client.read(b"/tmp/weird/" + name) == name
    assert name in listing(client, b"/tmp/weird")


def test_paths_that_are_none(client: Client) -> None:
    for path in ("relative", "", "/nul\0inside", "/" + "x" * 5000):
        assert failing(client, "read", path) in (EINVAL, 36)
        assert failing(client, "stat", path) in (EINVAL, 36)
    assert failing(client, "read", "/" + "y" * 300) == 36


def test_symlinks_resolve_as_for_any_program_inside(client: Client) -> None:
    client.shell("rm -rf /tmp/s; mkdir -p /tmp/s/real; ln -s real /tmp/s/dir; ln -s /tmp/s/real/f /tmp/s/abs;"
                 "ln -s dir/f /tmp/s/rel; ln -s loop /tmp/s/loop; ln -s nothing /tmp/s/dangling")  # fmt: skip
    client.write("/tmp/s/dir/f", b"1")
    assert client.read("/tmp/s/real/f") == client.read("/tmp/s/abs") == client.read("/tmp/s/rel") == b"1"
    client.write("/tmp/s/abs", b"2")
    assert client.read("/tmp/s/real/f") == b"2"
    client.write("/tmp/s/rel", b"3")
    assert client.stat("/tmp/s/rel").raw(Tag.PATH2) == b"dir/f", "the link itself must stay"
    assert client.stat("/tmp/s/rel", FOLLOW).integer(Tag.TYPE) == 8
    assert client.read("/tmp/s/real/f") == b"3"
    client.write("/tmp/s/dangling", b"4")
    assert client.read("/tmp/s/nothing") == b"4"
    assert failing(client, "write", "/tmp/s/loop", b"x") == ELOOP
    assert failing(client, "read", "/tmp/s/loop") == ELOOP


def test_a_symlink_never_leads_out(client: Client) -> None:
    """/etc/hostname exists on the host and not here; the agent's own root is the sandbox's."""
    secret = Path("/var/tmp/dsec-agent-secret")
    secret.write_text("host")
    try:
        client.shell("ln -sf /var/tmp/dsec-agent-secret /tmp/out;"
                     "ln -sf /proc/1/root/var/tmp/dsec-agent-secret /tmp/out2;"
                     "ln -sf ../../../../../../../../../../var/tmp/dsec-agent-secret /tmp/out3")  # fmt: skip
        for path in ("/tmp/out", "/tmp/out2", "/tmp/out3", "/proc/self/root/var/tmp/dsec-agent-secret"):
            assert failing(client, "read", path) in (2, 13)
        assert failing(client, "write", "/tmp/out2", b"x") in (2, 13)
        assert secret.read_text() == "host"
    finally:
        secret.unlink()


@pytest.mark.parametrize(
    ("make", "code"),
    [
        ("mkfifo /tmp/special", EINVAL),
        ("mkdir /tmp/special", EISDIR),
        ("ln -s /dev/null /tmp/special", EINVAL),
        ("ln -s /dev/zero /tmp/special", EINVAL),
        ("ln -s /dev/ptmx /tmp/special", EINVAL),
    ],
)
def test_what_is_no_file_is_refused_at_once(client: Client, make: str, code: int) -> None:
    client.shell(f"rm -rf /tmp/special; {make}")
    began = time.monotonic()
    assert failing(client, "read", "/tmp/special") == code
    assert failing(client, "write", "/tmp/special", b"x") == code
    assert failing(client, "write", "/tmp/special", b"x", 0o644, APPEND) == code
    assert time.monotonic() - began < 1
    client.shell("rm -rf /tmp/special")


def test_a_full_disk_leaves_no_half_file(client: Client) -> None:
    assert failing(client, "write", "/dev/shm/big", b"x" * (80 << 20)) == ENOSPC
    assert client.run("ls", "-A", "/dev/shm").stdout == b""


def test_a_lost_connection_leaves_no_half_file(client: Client, sandbox: Box) -> None:
    client.shell("rm -rf /tmp/half; mkdir /tmp/half")
    channel = client.channel()
    client.send(Type.WRITE, channel, (Tag.PATH, b"/tmp/half/f"), (Tag.MODE, 0o644))
    client.raw(Type.DATA, channel, b"some")
    client.expect(Type.CREDIT, channel)
    assert len(listing(client, b"/tmp/half")) == 1
    client.close()
    with Client(sandbox.socket) as later:
        assert listing(later, b"/tmp/half") == {}


def test_an_abandoned_write_leaves_nothing(client: Client) -> None:
    client.shell("rm -rf /tmp/half; mkdir /tmp/half")
    channel = client.channel()
    client.send(Type.WRITE, channel, (Tag.PATH, b"/tmp/half/f"), (Tag.MODE, 0o644))
    client.expect(Type.CREDIT, channel)
    client.raw(Type.DATA, channel, b"some")
    client.raw(Type.CLOSE, channel)
    client.raw(Type.DATA, channel, b"late")  # was under way
    client.raw(Type.EOF, channel)
    assert listing(client, b"/tmp/half") == {}


def test_a_reader_without_credit_waits(client: Client) -> None:
    client.write("/tmp/f", b"x" * 100_000)
    channel = client.channel()
    client.send(Type.READ, channel, (Tag.PATH, b"/tmp/f"), (Tag.OFFSET, 0), (Tag.SIZE, 0), (Tag.LIMIT, 1000))
    client.expect(Type.STAT, channel)
    assert len(client.expect(Type.DATA, channel)) == 1000
    assert client.quiet(0.2)
    client.send(Type.CREDIT, channel, (Tag.STREAM, 0), (Tag.LIMIT, 1500))
    assert len(client.expect(Type.DATA, channel)) == 500
    assert client.quiet(0.1)
    client.raw(Type.CLOSE, channel)
    assert client.run("true").exit == 0


def test_a_frame_that_carries_too_much_ends_the_link(client: Client) -> None:
    channel = client.channel()
    client.send(Type.WRITE, channel, (Tag.PATH, b"/tmp/f"), (Tag.MODE, 0o644))
    client.expect(Type.CREDIT, channel)
    client.raw(Type.DATA, channel, b"x" * ((256 << 10) + 1))
    with pytest.raises((EOFError, ConnectionError)):
        client.recv()


def test_a_file_that_is_swapped_for_a_symlink_while_written(client: Client) -> None:
    script = (
        "while :; do ln -sfn /etc /tmp/swap; rm -f /tmp/swap; mkdir -p /tmp/swap 2>/dev/null; rm -rf /tmp/swap; done"
    )
    channel = client.exec("sh", "-c", script, flags=8)
    for _ in range(200):
        try:
            client.write("/tmp/swap/passwd2", b"x")
        except (OSError, AssertionError):
            client._frames.clear()
    client.send(Type.KILL, channel, (Tag.FLAGS, 1))
    assert client.run("true").exit == 0


# -- names


def listing(client: Client, path: bytes) -> dict[bytes, Fields]:
    channel = client.channel()
    found: dict[bytes, Fields] = {}
    client.send(Type.LISTDIR, channel, (Tag.PATH, path), (Tag.LIMIT, 20_000))
    size, limit = 0, 20_000
    while True:
        kind, number, payload = client.recv()
        if number != channel:
            continue
        if kind is Type.ERROR:
            raise OSError(Fields(payload).integer(Tag.ERRNO), "list")
        if kind is Type.DONE:
            assert Fields(payload).integer(Tag.COUNT) == len(found)
            return found
        entry = Fields(payload)
        found[entry.raw(Tag.NAME)] = entry
        size += len(payload)
        assert size <= limit + 5000
        if limit - size < 10_000:
            limit = size + 20_000
            client.send(Type.CREDIT, channel, (Tag.STREAM, 0), (Tag.LIMIT, limit))


def test_a_listing(client: Client) -> None:
    client.shell("""rm -rf /tmp/l; mkdir -p /tmp/l/dir; cd /tmp/l; echo abc > file; ln -s file link; mkfifo fifo
        chown 1000:10 file; touch -d @1234567890 file; chmod 640 file""")
    found = listing(client, b"/tmp/l")
    assert {name: entry.integer(Tag.TYPE) for name, entry in found.items()} == {
        b"dir": 4, b"file": 8, b"link": 10, b"fifo": 1}  # fmt: skip
    file = found[b"file"]
    assert [file.integer(t) for t in (Tag.MODE, Tag.UID, Tag.GID, Tag.SIZE, Tag.MTIME_NS)] == [
        0o100640, 1000, 10, 4, 1234567890 * 10**9]  # fmt: skip
    assert found[b"link"].raw(Tag.PATH2) == b"file"
    with pytest.raises(OSError):
        listing(client, b"/tmp/l/file")
    with pytest.raises(OSError):
        listing(client, b"/tmp/l/fifo")


def test_a_long_listing(client: Client) -> None:
    client.shell("mkdir -p /tmp/many; cd /tmp/many; seq 1 5000 | xargs touch")
    assert set(listing(client, b"/tmp/many")) == {b"%d" % i for i in range(1, 5001)}


def test_directories(client: Client) -> None:
    client.shell("rm -rf /tmp/d")
    path = lambda text: (Tag.PATH, text.encode())  # noqa: E731
    client.call(Type.MKDIR, path("/tmp/d"), (Tag.MODE, 0o2750), (Tag.FLAGS, 0))
    assert client.stat("/tmp/d").integer(Tag.MODE) & 0o7777 == 0o2750
    assert failing(client, "call", Type.MKDIR, path("/tmp/d"), (Tag.MODE, 0o755), (Tag.FLAGS, 0)) == EEXIST
    client.call(Type.MKDIR, path("/tmp/d/e/f"), (Tag.MODE, 0o755), (Tag.FLAGS, PARENTS))
    client.call(Type.MKDIR, path("/tmp/d/e/f"), (Tag.MODE, 0o755), (Tag.FLAGS, PARENTS))
    client.write("/tmp/d/file", b"")
    assert failing(client, "call", Type.MKDIR, path("/tmp/d/file/x"), (Tag.MODE, 0o755), (Tag.FLAGS, PARENTS)) == EEXIST
    client.call(Type.RENAME, path("/tmp/d/file"), (Tag.PATH2, b"/tmp/d/e/file"))
    assert client.stat("/tmp/d/e/file").integer(Tag.SIZE) == 0
    assert failing(client, "call", Type.REMOVE, path("/tmp/d"), (Tag.FLAGS, 0)) == ENOTEMPTY
    assert failing(client, "call", Type.REMOVE, path("/tmp/nothing"), (Tag.FLAGS, RECURSIVE)) == 2
    client.call(Type.REMOVE, path("/tmp/d/e/file"), (Tag.FLAGS, 0))
    client.call(Type.REMOVE, path("/tmp/d/e/f"), (Tag.FLAGS, 0))
    client.call(Type.REMOVE, path("/tmp/d"), (Tag.FLAGS, RECURSIVE))
    assert failing(client, "stat", "/tmp/d") == 2


def test_removing_does_not_follow_symlinks(client: Client) -> None:
    client.shell("rm -rf /tmp/r /tmp/keep; mkdir -p /tmp/r /tmp/keep; touch /tmp/keep/me; ln -s /tmp/keep /tmp/r/link;"
                 "ln -s /tmp/keep /tmp/linkdir")  # fmt: skip
    client.call(Type.REMOVE, (Tag.PATH, b"/tmp/r"), (Tag.FLAGS, RECURSIVE))
    client.call(Type.REMOVE, (Tag.PATH, b"/tmp/linkdir"), (Tag.FLAGS, RECURSIVE))
    assert client.stat("/tmp/keep/me").integer(Tag.TYPE) == 8


def test_removing_what_is_deeper_than_we_hold_open(client: Client) -> None:
    script = "mkdir -p /tmp/deep; cd /tmp/deep; i=0; while [ $i -lt 700 ]; do mkdir d; touch f; cd d; i=$((i+1)); done"
    assert client.shell(script).exit == 0
    client.call(Type.REMOVE, (Tag.PATH, b"/tmp/deep"), (Tag.FLAGS, RECURSIVE))
    assert failing(client, "stat", "/tmp/deep") == 2


def test_a_big_removal_does_not_hold_up_others(client: Client) -> None:
    client.shell("mkdir -p /tmp/big; cd /tmp/big; seq 1 20000 | xargs touch")
    channel = client.channel()
    client.send(Type.REMOVE, channel, (Tag.PATH, b"/tmp/big"), (Tag.FLAGS, RECURSIVE))
    client.raw(Type.PING, 0, b"x")
    assert client.recv()[0] is Type.PONG, "the answer had to wait for 20,000 files"
    client.expect(Type.DONE, channel)


# -- trees


def archive(*members: tuple[str, dict[str, object], bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar of (name, TarInfo attributes, content)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as tar:
        for name, attributes, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in attributes.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def put(
    client: Client, data: bytes, path: str = "/tmp/t", flags: int = 0, piece: int = 256 << 10, **more: int
) -> Fields:
    items = [(Tag.PATH, path.encode()), (Tag.FLAGS, flags), *[(Tag[k.upper()], v) for k, v in more.items()]]
    return client.put(Type.TREE_PUT, data, *items, piece=piece)


def get(client: Client, path: str = "/tmp/t", window: int = 1 << 20) -> tuple[tarfile.TarFile, Fields]:
    data, done = client.get(Type.TREE_GET, (Tag.PATH, path.encode()), window=window)
    return tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape"), done


def issues(done: Fields) -> list[str]:
    return [line.decode(errors="replace") for line in done.all(Tag.ISSUE) if isinstance(line, bytes)]


@pytest.fixture
def empty(client: Client) -> None:
    client.shell("rm -rf /tmp/t /tmp/outside; mkdir /tmp/outside")


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("piece", [256 << 10, 511])
def test_a_tree_arrives_as_it_was(client: Client, empty: None, form: int, piece: int) -> None:
    long = "/".join(["d" * 60] * 3)
    data = random.randbytes(100_000)
    done = put(client, archive(
        ("./", {"type": tarfile.DIRTYPE, "mode": 0o751, "uid": 7}, b""),
        ("plain", {"mode": 0o640, "uid": 1000, "gid": 10, "mtime": 1234567890}, data),
        ("empty", {"mode": 0o600}, b""),
        ("dir", {"type": tarfile.DIRTYPE, "mode": 0o2775, "mtime": 1000000000}, b""),
        ("dir/setuid", {"mode": 0o4755}, b"#!/bin/sh\n"),
        ("twin", {"type": tarfile.LNKTYPE, "linkname": "plain"}, b""),
        ("link", {"type": tarfile.SYMTYPE, "linkname": "/somewhere/else", "uid": 5, "mtime": 1111111111}, b""),
        ("fifo", {"type": tarfile.FIFOTYPE, "mode": 0o622}, b""),
        (long, {}, b"deep"),
        ("with space\n", {}, b"odd"),
        form=form,
    ), piece=piece)  # fmt: skip
    assert issues(done) == []
    assert done.integer(Tag.COUNT) == 10
    assert client.read("/tmp/t/plain") == data
    assert client.read("/tmp/t/" + long) == b"deep"
    plain, twin = client.run("stat", "-c", "%i %a %u %g %Y %h", "/tmp/t/plain", "/tmp/t/twin").stdout.splitlines()
    assert plain == twin and plain.split()[1:] == [b"640", b"1000", b"10", b"1234567890", b"2"]
    rest = ["dir", "dir/setuid", "link", "fifo", "."]
    assert (
        client.shell("cd /tmp/t; stat -c '%A %u %Y' " + " ".join(rest))
        .stdout.splitlines()[0]
        .startswith(b"drwxrwsr-x 0 1000000000")
    )
    lines = client.shell("cd /tmp/t; stat -c '%A %u' dir/setuid link fifo .").stdout.splitlines()
    assert lines == [b"-rwsr-xr-x 0", b"lrwxrwxrwx 5", b"prw--w--w- 0", b"drwxr-x--x 7"]
    assert client.stat("/tmp/t/link").raw(Tag.PATH2) == b"/somewhere/else"
    assert client.run("stat", "-c", "%Y", "/tmp/t/link").stdout == b"1111111111\n"


def test_a_tree_comes_back_as_it_was(client: Client, empty: None) -> None:
    client.shell("""mkdir -p /tmp/t/dir /tmp/t/none; cd /tmp/t; echo hello > file; ln file twin; ln -s ../target link
        mkfifo fifo; chown 1000:10 file; chmod 4751 file; touch -d @1234567890 file; : > empty
        touch -d @1000000000 dir; chmod 700 none""")
    for name in WEIRD:
        client.write(b"/tmp/t/weird/" + name, name, flags=PARENTS)
    client.write("/tmp/t/" + "/".join(["e" * 200] * 4), b"far", flags=PARENTS)
    for window in (1 << 20, 777):
        tar, done = get(client, window=window)
        members = {m.name.rstrip("/"): m for m in tar}
        assert issues(done) == []
        assert done.integer(Tag.COUNT) == len(members)
        file, twin = sorted((members["file"], members["twin"]), key=lambda m: m.type)
        assert (file.mode, file.uid, file.gid, file.mtime) == (0o4751, 1000, 10, 1234567890)
        assert twin.islnk() and twin.linkname == file.name
        assert tar.extractfile(file).read() == b"hello\n"  # type: ignore[union-attr]
        assert members["link"].linkname == "../target" and members["fifo"].isfifo()
        assert members["none"].mode == 0o700 and members["dir"].mtime == 1000000000
        assert members["empty"].size == 0
        for name in WEIRD:
            member = members["weird/" + name.decode(errors="surrogateescape")]
            assert tar.extractfile(member).read() == name  # type: ignore[union-attr]
        assert tar.extractfile(members["/".join(["e" * 200] * 4)]).read() == b"far"  # type: ignore[union-attr]


def test_a_single_file_as_a_tree(client: Client, empty: None) -> None:
    client.shell("mkdir /tmp/t; echo one > /tmp/t/f; ln -s f /tmp/t/l; : > /tmp/t/zero")
    assert [(m.name, m.size) for m in get(client, "/tmp/t/f")[0]] == [("f", 4)]
    assert [(m.name, m.size) for m in get(client, "/tmp/t/l")[0]] == [("f", 4)]
    assert [(m.name, m.size) for m in get(client, "/tmp/t/zero")[0]] == [("zero", 0)]
    assert failing(client, "get", Type.TREE_GET, (Tag.PATH, b"/tmp/nothing")) == 2


def test_attributes(client: Client, empty: None, sandbox: Box) -> None:
    capability = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service=ep
    pax = {"SCHILY.xattr.user.note": "a b\n=c", "SCHILY.xattr.security.capability": capability.decode("latin-1")}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("f")
        info.pax_headers = {"SCHILY.xattr.user.note": pax["SCHILY.xattr.user.note"]}
        info.mode = 0o755
        tar.addfile(info)
        directory = tarfile.TarInfo("d")
        directory.type = tarfile.DIRTYPE
        directory.pax_headers = {"SCHILY.xattr.user.of": "dir", "SCHILY.xattr.trusted.no": "x"}
        tar.addfile(directory)
    done = put(client, out.getvalue())
    assert len(issues(done)) == 1 and "not permitted" in issues(done)[0].lower()
    host = sandbox.upper / "tmp/t"
    assert os.getxattr(host / "f", "user.note") == b"a b\n=c"
    assert os.getxattr(host / "d", "user.of") == b"dir"
    # raw bytes that no UTF-8 writer would make: by way of the file system
    os.setxattr(host / "f", "user.raw", b"\xff\0\n")
    tar, done = get(client)
    assert issues(done) == []
    data, _ = client.get(Type.TREE_GET, (Tag.PATH, b"/tmp/t"))
    assert b"SCHILY.xattr.user.raw=\xff\0\n\n" in data
    put(client, data, "/tmp/t2")
    assert os.getxattr(sandbox.upper / "tmp/t2/f", "user.raw") == b"\xff\0\n"
    client.shell("rm -rf /tmp/t2")


def test_capabilities_survive_a_round_trip(client: Client, empty: None, sandbox: Box) -> None:
    client.shell("mkdir /tmp/t; cp /bin/busybox /tmp/t/ping; setcap 2>/dev/null; true")
    record = b"SCHILY.xattr.security.capability=" + bytes.fromhex("0100000200040000000000000000000000000000")
    body = b"%d %s\n" % (len(record) + 4, record)
    head = tarfile.TarInfo("pax")
    head.type, head.size = tarfile.XHDTYPE, len(body)
    file = tarfile.TarInfo("capable")
    file.mode, file.uid = 0o755, 1000
    data = head.tobuf() + body.ljust(512, b"\0") + file.tobuf() + bytes(1024)
    assert issues(put(client, data)) == []
    assert os.getxattr(sandbox.upper / "tmp/t/capable", "security.capability")
    back, _ = client.get(Type.TREE_GET, (Tag.PATH, b"/tmp/t/capable"))
    assert record in back


def test_owner_is_forced(client: Client, empty: None) -> None:
    tar = archive(("a/b/f", {"uid": 5, "gid": 6}, b"x"), ("l", {"type": tarfile.SYMTYPE, "linkname": "f"}, b""))
    done = put(client, tar, flags=OWNER, uid=1000, gid=1001)
    assert issues(done) == []
    owners = client.shell("cd /tmp/t; stat -c '%u:%g' . a a/b a/b/f l").stdout.split()
    assert owners == [b"1000:1001"] * 5


def test_the_target_directory(client: Client, empty: None) -> None:
    tar = archive(("./", {"type": tarfile.DIRTYPE, "mode": 0o700}, b""), ("f", {}, b"x"))
    assert failing(client, "put", Type.TREE_PUT, tar, (Tag.PATH, b"/tmp/t/x/y"), (Tag.FLAGS, 0)) == 2
    put(client, tar, "/tmp/t/x/y", PARENTS)
    assert client.stat("/tmp/t/x/y").integer(Tag.MODE) & 0o777 == 0o700
    assert failing(client, "put", Type.TREE_PUT, tar, (Tag.PATH, b"/tmp/t/x/y"), (Tag.FLAGS, NEW)) == EEXIST
    put(client, tar, "/tmp")
    assert client.stat("/tmp").integer(Tag.MODE) & 0o7777 == 0o1777, "what was there keeps its mode"
    client.write("/tmp/t/file", b"")
    assert failing(client, "put", Type.TREE_PUT, tar, (Tag.PATH, b"/tmp/t/file"), (Tag.FLAGS, 0)) == ENOTDIR


def test_replacing_what_is_there(client: Client, empty: None) -> None:
    client.shell("mkdir -p /tmp/t/dir/sub /tmp/t/keep; cd /tmp/t; echo old > f; ln f other; ln -s /tmp/outside l;"
                 "mkfifo p; ln -s /tmp/outside/created s; ln -s keep inlink")  # fmt: skip
    done = put(client, archive(
        ("f", {}, b"new"), ("l", {}, b"file now"), ("p", {}, b"too"), ("dir", {}, b"cannot"), ("s", {}, b"not through"),
        ("inlink", {"type": tarfile.DIRTYPE}, b""), ("inlink/x", {}, b"below"),
    ))  # fmt: skip
    assert [line.split(":")[0] for line in issues(done)] == ["dir"]
    assert client.read("/tmp/t/f") == b"new" and client.read("/tmp/t/other") == b"old\n"
    assert client.read("/tmp/t/l") == b"file now" and client.read("/tmp/t/s") == b"not through"
    assert client.run("ls", "-A", "/tmp/outside").stdout == b""
    assert client.read("/tmp/t/keep/x") == b"below", (
        "a link to a directory below stands for it, as with /bin and usr/bin"
    )


@pytest.mark.parametrize(
    "members",
    [
        [("../outside/x", {}, b"x")],
        [("a/../../outside/x", {}, b"x")],
        [("l", {"type": tarfile.SYMTYPE, "linkname": "/tmp/outside"}, b""), ("l/x", {}, b"x")],
        [("l", {"type": tarfile.SYMTYPE, "linkname": "../outside"}, b""), ("l/x", {}, b"x")],
        [("l", {"type": tarfile.SYMTYPE, "linkname": ".."}, b""), ("l/outside/x", {}, b"x")],
        [("l", {"type": tarfile.SYMTYPE, "linkname": "/tmp/outside"}, b""), ("l", {"type": tarfile.DIRTYPE}, b""),
         ("m", {"type": tarfile.SYMTYPE, "linkname": "/tmp/outside"}, b""), ("m/x", {"type": tarfile.DIRTYPE}, b"")],
        [("h", {"type": tarfile.LNKTYPE, "linkname": "../outside/victim"}, b"")],
        [("l", {"type": tarfile.SYMTYPE, "linkname": "/tmp/outside"}, b""),
         ("h", {"type": tarfile.LNKTYPE, "linkname": "l/victim"}, b"")],
        [("l", {"type": tarfile.SYMTYPE, "linkname": "/proc/1/root/tmp/outside"}, b""), ("l/x", {}, b"x")],
    ],
)  # fmt: skip
def test_no_entry_leaves_the_directory(
    client: Client, empty: None, members: list[tuple[str, dict[str, object], bytes]]
) -> None:
    client.shell("echo mine > /tmp/outside/victim; chmod 600 /tmp/outside/victim")
    done = put(client, archive(*members))
    assert len(issues(done)) == 1
    assert client.run("ls", "-A", "/tmp/outside").stdout == b"victim\n"
    assert client.run("stat", "-c", "%h %a", "/tmp/outside/victim").stdout == b"1 600\n"


def test_absolute_names_lie_below(client: Client, empty: None) -> None:
    put(client, archive(("/etc/passwd", {}, b"not that one")))
    assert client.read("/tmp/t/etc/passwd") == b"not that one"


def test_what_cannot_be_made_is_told_and_the_rest_is_made(client: Client, empty: None) -> None:
    done = put(client, archive(
        ("disk", {"type": tarfile.BLKTYPE, "devmajor": 8, "devminor": 0}, b""),
        ("tty", {"type": tarfile.CHRTYPE, "devmajor": 5, "devminor": 0}, b""),
        ("h", {"type": tarfile.LNKTYPE, "linkname": "not-there"}, b""),
        ("x" * 256, {}, b"too long a name"),
        ("odd", {"type": b"S"}, b"sparse"),
        ("foreign", {"uid": 1 << 20, "gid": 0}, b"no such id here"),
        ("f", {}, b"fine"),
    ))  # fmt: skip
    told = [line.split(":")[0] for line in issues(done)]
    assert told == ["disk", "tty", "h", "x" * 256, "odd", "foreign"]
    assert client.read("/tmp/t/f") == b"fine" and client.read("/tmp/t/foreign") == b"no such id here"
    assert done.integer(Tag.COUNT) == 2


def test_many_issues_are_counted(client: Client, empty: None) -> None:
    done = put(client, archive(*[(f"../{i}", {}, b"") for i in range(1500)]))
    lines = issues(done)
    assert len(lines) == 1000 and lines[-1] == "and 501 more"


@pytest.mark.parametrize("cut", [0, 1, 511, 512, 1000, 1535, 1536])
def test_a_truncated_stream_is_an_error(client: Client, empty: None, cut: int) -> None:
    tar = archive(("f", {}, b"x" * 1000), form=tarfile.USTAR_FORMAT)
    assert failing(client, "put", Type.TREE_PUT, tar[:cut], (Tag.PATH, b"/tmp/t"), (Tag.FLAGS, 0)) == EBADMSG


def test_nonsense_is_an_error(client: Client, empty: None) -> None:
    tar = bytearray(archive(("f", {}, b"x")))
    tar[3] ^= 1
    for data in (bytes(tar), b"x" * 512, random.randbytes(2048)):
        assert failing(client, "put", Type.TREE_PUT, data, (Tag.PATH, b"/tmp/t"), (Tag.FLAGS, 0)) == EBADMSG


def test_big_numbers(client: Client, empty: None) -> None:
    """Base-256 sizes are understood (the stream ends long before), and so are times before 1970."""
    info = tarfile.TarInfo("huge")
    info.size = 1 << 40
    head = info.tobuf(tarfile.GNU_FORMAT)
    assert failing(client, "put", Type.TREE_PUT, head + b"x" * 512, (Tag.PATH, b"/tmp/t"), (Tag.FLAGS, 0)) == EBADMSG
    put(client, archive(("old", {"mtime": -1000}, b"")))
    assert client.run("stat", "-c", "%Y", "/tmp/t/old").stdout == b"-1000\n"
    tar, _ = get(client)
    assert {m.name: m.mtime for m in tar}["old"] == -1000


def test_what_is_no_part_of_the_tree(client: Client, empty: None) -> None:
    """Other file systems are not entered, a socket is told."""
    tar, _ = get(client, "/dev")
    names = {m.name for m in tar}
    assert "shm" in names and "pts" in names and "pts/ptmx" not in names


def test_a_tree_with_a_socket(client: Client, empty: None, sandbox: Box) -> None:
    import socket

    client.shell("mkdir /tmp/t; echo x > /tmp/t/f")
    with socket.socket(socket.AF_UNIX) as s:
        # overlayfs shows what is made in the upper directory before it is looked at
        s.bind(str(sandbox.upper / "tmp/t/sock"))
        tar, done = get(client)
        assert {m.name.rstrip("/") for m in tar} == {".", "f"}
        assert issues(done) == ["sock: a socket"]


def test_two_thousand_files_each_way(client: Client, empty: None) -> None:
    """On a tmpfs, so that it is the agent that is measured and not the disk of this host."""
    data = archive(*[(f"d{i % 40}/f{i}", {}, b"x" * 2000) for i in range(2000)])
    began = time.monotonic()
    assert put(client, data, "/dev/shm/t").integer(Tag.COUNT) == 2000
    there = time.monotonic()
    _, done = client.get(Type.TREE_GET, (Tag.PATH, b"/dev/shm/t"))
    ended = time.monotonic()
    assert done.integer(Tag.COUNT) == 2041
    assert there - began < 1 and ended - there < 1
    client.call(Type.REMOVE, (Tag.PATH, b"/dev/shm/t"), (Tag.FLAGS, RECURSIVE))


def test_a_deep_tree_is_told_not_entered_for_ever(client: Client, empty: None) -> None:
    script = "mkdir -p /tmp/t; cd /tmp/t; i=0; while [ $i -lt 200 ]; do mkdir d; cd d; i=$((i+1)); done"
    assert client.shell(script).exit == 0
    tar, done = get(client)
    assert len(tar.getmembers()) == 129
    assert len(issues(done)) == 1


def test_a_file_that_changes_while_it_is_read(client: Client, empty: None) -> None:
    client.shell("mkdir /tmp/t; head -c 3000000 /dev/zero | tr '\\0' a > /tmp/t/f; echo b > /tmp/t/g")
    channel = client.channel()
    client.send(Type.TREE_GET, channel, (Tag.PATH, b"/tmp/t/f"), (Tag.LIMIT, 1000))
    data = bytes(client.expect(Type.DATA, channel))
    assert client.shell("head -c 1000000 /dev/zero | tr '\\0' b > /tmp/t/f").exit == 0
    client.send(Type.CREDIT, channel, (Tag.STREAM, 0), (Tag.LIMIT, 1 << 30))
    while (got := client.recv())[0] is Type.DATA:
        data += got[2]
    assert len(issues(Fields(got[2]))) == 1
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [m.size for m in tar] == [3_000_000]
    assert len(data) % 512 == 0


# -- tunnels


def serve(client: Client, what: str, port: int, family: str = "4") -> int:
    channel = client.exec("attack", "serve", family, str(port), what, flags=8)
    client.expect(Type.STARTED, channel)
    client.send(Type.FOLLOW, channel, (Tag.STREAM, 1), (Tag.OFFSET, 0), (Tag.LIMIT, 10))
    client.expect(Type.OUTPUT, channel)
    return channel


def connect(client: Client, port: int, window: int = 1 << 20) -> int:
    channel = client.channel()
    client.send(Type.CONNECT, channel, (Tag.PORT, port), (Tag.LIMIT, window))
    return channel


def test_a_tunnel_both_ways(client: Client) -> None:
    server = serve(client, "echo", 7001)
    channel = connect(client, 7001, window=100_000)
    client.expect(Type.CONNECTED, channel)
    data = random.randbytes(3_000_000)
    sent = limit = 0
    received, granted, eof = bytearray(), 100_000, False
    while True:
        while sent < min(limit, len(data)):
            piece = data[sent : min(limit, sent + 60_000)]
            client.raw(Type.DATA, channel, piece)
            sent += len(piece)
        if sent == len(data) and not eof:
            client.raw(Type.EOF, channel)
            eof = True
        kind, number, payload = client.recv()
        if number != channel:
            continue
        if kind is Type.EOF:
            break
        if kind is Type.CREDIT:
            limit = Fields(payload).integer(Tag.LIMIT)
        elif kind is Type.DATA:
            received += payload
            assert len(received) <= granted
            granted = len(received) + 100_000
            client.send(Type.CREDIT, channel, (Tag.STREAM, 0), (Tag.LIMIT, granted))
    assert bytes(received) == data
    client.send(Type.FORGET, server)


def test_a_server_on_ipv6_alone(client: Client) -> None:
    if client.shell("cat /proc/net/if_inet6").stdout == b"":
        pytest.skip("no IPv6 here")
    serve(client, "hello", 7002, "6")
    channel = connect(client, 7002)
    client.expect(Type.CONNECTED, channel)


def test_nobody_listens(client: Client) -> None:
    for port, code in ((7003, 111), (0, EINVAL), (70000, EINVAL)):
        channel = connect(client, port)
        with pytest.raises(OSError) as error:
            client.expect(Type.CONNECTED, channel)
        assert error.value.errno == code


def test_closing_a_tunnel_ends_the_server(client: Client) -> None:
    server = serve(client, "echo", 7004)
    channel = connect(client, 7004)
    client.expect(Type.CONNECTED, channel)
    client.raw(Type.CLOSE, channel)
    assert client.finish(server).exit == 0


def test_a_tunnel_without_credit_makes_the_server_wait(client: Client) -> None:
    server = serve(client, "flood", 7005)
    channel = connect(client, 7005, window=5000)
    client.expect(Type.CONNECTED, channel)
    client.expect(Type.CREDIT, channel)
    size = 0
    while size < 5000:
        size += len(client.expect(Type.DATA, channel))
    assert size == 5000 and client.quiet(0.3)
    client.raw(Type.CLOSE, channel)
    client.finish(server)


def test_too_many_transfers(client: Client) -> None:
    client.write("/tmp/f", b"x")
    failed = 0
    for _ in range(300):
        channel = client.channel()
        client.send(Type.READ, channel, (Tag.PATH, b"/tmp/f"), (Tag.OFFSET, 0), (Tag.SIZE, 0), (Tag.LIMIT, 0))
        failed += client.recv()[0] is Type.ERROR
    assert failed == 300 - 256


def test_descriptors_do_not_leak(client: Client, sandbox: Box) -> None:
    def count() -> int:
        client.raw(Type.PING, 0, b"x")
        client.expect(Type.PONG, 0)
        return len(list(Path(f"/proc/{sandbox.pid}/fd").iterdir()))

    before = count()
    client.write("/tmp/f", b"x")
    for _ in range(3):
        client.read("/tmp/f")
        client.shell("rm -rf /tmp/t")
        put(client, archive(("a/f", {}, b"x"), ("../x", {}, b"")))
        get(client)
        failing(client, "put", Type.TREE_PUT, b"x" * 600, (Tag.PATH, b"/tmp/t"), (Tag.FLAGS, 0))
        failing(client, "read", "/nothing")
        failing(client, "write", "/bin", b"")
        listing(client, b"/bin")
        for path in (b"/tmp/t", b"/tmp/f"):
            client.call(Type.REMOVE, (Tag.PATH, path), (Tag.FLAGS, RECURSIVE))
        client.write("/tmp/f", b"x")
    assert count() == before
