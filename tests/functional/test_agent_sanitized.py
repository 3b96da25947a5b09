# ruff: noqa: F811
"""The agent built with AddressSanitizer and UBSan: fed with nonsense, and in a conversation that touches everything."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from agent_box import NATIVE, TREE, Client, box, rootfs  # noqa: F401
from test_agent import TTY, feed
from test_agent_files import archive, connect, get, listing, put, serve

from dsecd.agent.frames import Tag, Type

SECONDS = 20


@pytest.fixture(scope="module")
def sanitized() -> Path:
    subprocess.run(["make", "-s", "-C", TREE / "native", "asan"], check=True)
    return NATIVE / "asan"


def test_nonsense(sanitized: Path, tmp_path: Path) -> None:
    """Every run has a seed of its own; the message names it, and the same seed finds the same again."""
    seed = int.from_bytes(os.urandom(4), "little")
    ran = subprocess.run([sanitized / "fuzz_agent", str(seed), str(SECONDS), tmp_path], capture_output=True, text=True)
    assert ran.returncode == 0, f"seed {seed}\n{ran.stderr}"
    assert int(ran.stdout.split()[0]) > 100


def test_a_conversation(sanitized: Path, rootfs: Path) -> None:
    """It is not static, so its libraries must be inside, too."""
    lower = rootfs.parent / "sanitized-root"
    shutil.copytree(rootfs, lower, symlinks=True)
    libraries = subprocess.run(["ldd", sanitized / "dsec-agent"], check=True, capture_output=True, text=True).stdout
    for word in libraries.split():
        if word.startswith("/"):
            (lower / word[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, lower / word[1:])
    with box(rootfs.parent / "sanitized", lower, sanitized / "dsec-agent") as started:
        with Client(started.socket) as client:
            converse(client)
        with Client(started.socket) as client:
            channel = client.exec("sh", "-c", "sleep 100 & yes", timeout_ms=300)
            client.send(Type.FOLLOW, channel, (Tag.STREAM, 1), (Tag.OFFSET, 0), (Tag.LIMIT, 10))
            client.expect(Type.STARTED, channel)
        time.sleep(0.5)
        with Client(started.socket) as client:
            client.send(Type.FETCH, channel)
            assert client.finish(channel).why == 1
            client.raw(Type.SHUTDOWN, 0)


def converse(client: Client) -> None:
    assert client.shell("echo hi; echo ho >&2; exit 3").exit == 3
    assert client.shell("head -c 3000000 /dev/zero", cap=1000).totals[1] == 3_000_000
    assert client.run("nothing-of-the-kind").error == (2, 2)
    assert client.run("true", user=b"nobody").error == (3, 2)
    assert feed(client, client.exec("wc", "-c", flags=2), b"x" * 1_000_000).stdout == b"1000000\n"
    assert client.shell("tty; stty size", flags=TTY, rows=3, cols=4).stdout == b"/dev/pts/0\r\n3 4\r\n"
    assert client.shell("sleep 50 & echo hi", user=b"ann").stdout == b"hi\n"
    channel = client.exec("sleep", "100")
    client.expect(Type.STARTED, channel)
    client.send(Type.KILL, channel, (Tag.FLAGS, 4))
    client.send(Type.KILL, channel, (Tag.FLAGS, 1))
    assert client.finish(channel).signal == 9
    client.write("/tmp/f", b"x" * 1_000_000, flags=1)
    assert client.read("/tmp/f") == b"x" * 1_000_000
    assert len(listing(client, b"/bin")) > 100
    put(client, archive(("a/b", {}, b"x" * 5000), ("../c", {}, b""), ("p" * 200, {}, b"")))
    tar, done = get(client)
    assert len(tar.getmembers()) == done.integer(Tag.COUNT)
    client.call(Type.REMOVE, (Tag.PATH, b"/tmp/t"), (Tag.FLAGS, 2))
    server = serve(client, "echo", 7001)
    tunnel = connect(client, 7001)
    client.expect(Type.CONNECTED, tunnel)
    client.expect(Type.CREDIT, tunnel)
    client.raw(Type.DATA, tunnel, b"ping")
    assert bytes(client.expect(Type.DATA, tunnel)) == b"ping"
    client.raw(Type.EOF, tunnel)
    client.expect(Type.EOF, tunnel)
    assert client.finish(server).exit == 0
