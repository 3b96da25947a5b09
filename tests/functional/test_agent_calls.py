"""An agent of calls, frame by frame: what it does, what it refuses, how it ends."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from agent_box import NATIVE, TREE, Box, Client, box, rootfs, until

from dsecd.agent.frames import Field, Fields, Tag, Type, parse_output
from dsecd.container.seccomp import caps_mask, command_filter

__all__ = ["rootfs"]

_numbers = iter(range(1000))
HELLO: list[Field] = [(Tag.SECCOMP, command_filter()), (Tag.CAPS, caps_mask())]
LIMITS: dict[str, int] = {
    "timeout_ms": 5000, "cpu_ms": 1000, "cap": 65536, "nofile": 64, "file_max": 1 << 20, "space": 1 << 24,
    "stack": 1 << 23, "limit": 1 << 20,
}  # fmt: skip


@dataclass
class Ended:
    code: int = -1
    why: int = -1
    errno: int = 0
    full: bool = False
    output: dict[int, bytes] = field(default_factory=lambda: {1: b"", 2: b""})
    files: dict[str, bytes] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)


class Caller(Client):
    """One link, one channel, one call at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, HELLO)
        self.number = self.channel()

    def begin(self) -> None:
        self.send(Type.CALLS, self.number)

    def file(self, data: bytes, name: str | None = None) -> None:
        head: list[Field] = [] if name is None else [(Tag.NAME, name.encode()), (Tag.MODE, 0o755)]
        self.send(Type.CALL_FILE, self.number, *head, (Tag.DATA, data))

    def start(self, *argv: str, want: tuple[str, ...] = (), **limits: int) -> None:
        items: list[Field] = [(Tag.ARG, one.encode()) for one in argv]
        items += [(Tag.ENV, b"PATH=/bin"), *[(Tag.NAME, one.encode()) for one in want]]
        items += [(Tag[name.upper()], value) for name, value in {**LIMITS, **limits}.items()]
        self.send(Type.CALL, self.number, *items)

    def ended(self) -> Ended:
        result = Ended()
        while True:
            kind, number, payload = self.recv()
            assert number == self.number
            if kind is Type.OUTPUT:
                stream, offset, data = parse_output(payload)
                assert offset == len(result.output[stream])
                result.output[stream] += bytes(data)
            elif kind is Type.PRODUCED:
                parsed = Fields(payload)
                name = parsed.raw(Tag.NAME).decode()
                if parsed.integer(Tag.ERRNO, 0):
                    result.refused[name] = parsed.integer(Tag.ERRNO)
                else:
                    result.files[name] = result.files.get(name, b"") + parsed.raw(Tag.DATA)
            else:
                assert kind is Type.ENDED, kind
                parsed = Fields(payload)
                result.code, result.why = parsed.integer(Tag.EXIT), parsed.integer(Tag.WHY)
                result.errno, result.full = parsed.integer(Tag.ERRNO), bool(parsed.integer(Tag.FLAGS))
                return result

    def call(self, *argv: str, stdin: bytes | None = None, want: tuple[str, ...] = (), **limits: int) -> Ended:
        self.expect(Type.CELL, self.number)
        if stdin is not None:
            self.file(stdin)
        self.start(*argv, want=want, **limits)
        return self.ended()


@pytest.fixture
def place(rootfs: Path) -> Iterator[Box]:
    """A sandbox of calls for each test: it ends with its link."""
    with box(rootfs.parent / f"calls-{next(_numbers)}", rootfs, args=("calls",)) as started:
        yield started


@pytest.fixture
def caller(place: Box) -> Iterator[Caller]:
    with Caller(place.socket) as one:
        one.begin()
        yield one


def shell(caller: Caller, line: str, **options: object) -> Ended:
    return caller.call("sh", "-c", line, **options)  # type: ignore[arg-type]


def test_calls_follow_one_another_in_cells_of_their_own(caller: Caller, place: Box) -> None:
    for n in range(20):
        done = shell(
            caller, "cat; ls /box /tmp /dev/shm; touch /box/a /tmp/b /dev/shm/c; echo $$; exit 3", stdin=b"in\n"
        )
        assert done.code == 3
        assert done.output[1] == b"in\n/box:\n\n/dev/shm:\n\n/tmp:\n2\n", n
    assert len(place.leaves()) <= 2  # of the next cell, and of the last one for a moment


def test_everything_of_a_call_is_gone_when_its_end_is_told(caller: Caller, place: Box) -> None:
    shell(caller, "(setsid sleep 1000 &); (sleep 1000 &); sleep 1000 & exit 0")
    inside = [int(pid) for group in place.cgroup.rglob("cgroup.procs") for pid in group.read_text().split()]
    assert not [pid for pid in inside if b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_limits_end_a_call_and_say_which(caller: Caller) -> None:
    assert shell(caller, "sleep 100", timeout_ms=200).why == 1
    assert shell(caller, "while :; do :; done", cpu_ms=200).why == 3
    flood = shell(caller, "yes", cap=1000)
    assert (flood.why, len(flood.output[1])) == (4, 1000)
    full = shell(caller, "cat /dev/zero >/tmp/x", space=1 << 20, file_max=1 << 30)
    assert (full.code, full.full) == (1, True)
    caller.expect(Type.CELL, caller.number)
    caller.start("sleep", "100")
    caller.send(Type.CALL_STOP, caller.number)
    assert caller.ended().why == 2
    assert shell(caller, "echo fine").output[1] == b"fine\n"


def test_only_regular_files_of_the_work_directory_are_read_back(caller: Caller) -> None:
    line = (
        "echo made >f; ln -s /etc/passwd l; ln -s f m; mkfifo p; mkdir d; echo x >d/f; mknod c c 1 3; "
        "dd if=/dev/zero of=big bs=1024 count=2000 2>/dev/null"
    )
    want = ("f", "l", "m", "p", "d", "d/f", "c", "../etc/passwd", "/etc/passwd", "big", "no")
    done = shell(caller, line, want=want, file_max=1 << 24)
    assert done.files == {"f": b"made\n", "d/f": b"x\n"}
    assert set(done.refused) == set(want) - set(done.files)


def test_a_program_that_cannot_be_executed_says_why(caller: Caller) -> None:
    assert caller.call("nothing").errno == 2
    assert caller.call("/etc/passwd").errno == 13
    caller.expect(Type.CELL, caller.number)
    caller.file(b"#!/bin/sh\necho mine $0\n", "tool")
    caller.start("./tool")
    assert caller.ended().output[1] == b"mine ./tool\n"


def test_large_input_and_files_come_in_pieces(caller: Caller) -> None:
    caller.expect(Type.CELL, caller.number)
    for _ in range(8):
        caller.file(b"x" * (1 << 20))
        caller.file(b"y" * (1 << 20), "data")
    caller.start("sh", "-c", "wc -c; wc -c <data", space=1 << 25)
    assert caller.ended().output[1].split() == [b"8388608", b"8388608"]


def test_files_that_need_more_than_the_space_are_an_error(caller: Caller) -> None:
    caller.expect(Type.CELL, caller.number)
    caller.file(b"x" * (1 << 20), "data")
    caller.start("true", space=4096)
    error = Fields(caller.expect(Type.ERROR, caller.number))
    assert "space" in error.text(Tag.TEXT)


WRONG = {
    "a call without a cell": lambda c: c.start("true"),
    "a file without a cell": lambda c: c.file(b"", "x"),
    "a command": lambda c: c.send(Type.EXEC, c.channel(), (Tag.ARG, b"true"), (Tag.CAP, 10)),
    "a file transfer": lambda c: c.send(Type.STATPATH, c.channel(), (Tag.PATH, b"/")),
    "another channel": lambda c: (c.begin(), c.send(Type.CALL_STOP, c.channel())),
    "twice": lambda c: (c.begin(), c.begin()),
    "a path": lambda c: (c.begin(), c.expect(Type.CELL, c.number), c.file(b"", "../x")),
    "a slash": lambda c: (c.begin(), c.expect(Type.CELL, c.number), c.file(b"", "a/b")),
    "dots": lambda c: (c.begin(), c.expect(Type.CELL, c.number), c.file(b"", "..")),
    "nothing to run": lambda c: (c.begin(), c.expect(Type.CELL, c.number), c.start()),
    "a field it does not have": lambda c: c.send(Type.CALLS, c.number, (Tag.PATH, b"/")),
}  # fmt: skip


# Before CALLS nothing has begun, and a better connection may follow.
QUIET = ("a call without a cell", "a file without a cell", "a command", "a file transfer", "a field it does not have")


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_belong_ends_the_link(place: Box, name: str) -> None:
    with Caller(place.socket) as one:
        WRONG[name](one)
        with pytest.raises((EOFError, ConnectionError)):
            while True:
                kind, _, _ = one.recv()
                assert kind is Type.CELL
    until(lambda: not place.alive() or name in QUIET, "the agent lives on without its link")


def test_an_agent_of_calls_ends_with_its_link(place: Box) -> None:
    with Caller(place.socket) as one:
        one.begin()
        one.expect(Type.CELL, one.number)
        one.start("sleep", "1000")
        time.sleep(0.2)
    until(lambda: not place.alive(), "the agent lives on without its link")


def test_arguments_over_the_bound_are_refused(caller: Caller) -> None:
    caller.expect(Type.CELL, caller.number)
    caller.start("echo", "x" * 60_000, "y" * 60_000)
    assert Fields(caller.expect(Type.ERROR, caller.number)).integer(Tag.ERRNO) == 22


def test_the_same_with_sanitizers(rootfs: Path) -> None:
    """Everything above in one conversation."""
    subprocess.run(["make", "-s", "-C", TREE / "native", "asan"], check=True)
    agent = NATIVE / "asan/dsec-agent"
    lower = rootfs.parent / "sanitized-calls"
    shutil.copytree(rootfs, lower, symlinks=True)
    libraries = subprocess.run(["ldd", agent], check=True, capture_output=True, text=True).stdout
    for word in libraries.split():
        if word.startswith("/"):
            (lower / word[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, lower / word[1:])
    with box(rootfs.parent / "calls-asan", lower, agent, args=("calls",)) as started, Caller(started.socket) as one:
        one.begin()
        for _ in range(3):
            assert shell(one, "cat; echo f >f; exit 3", stdin=b"x" * 60_000, want=("f", "no")).code == 3
            assert shell(one, "yes", cap=100_000).why == 4
            assert shell(one, "sleep 9", timeout_ms=100).why == 1
            assert one.call("nothing").errno == 2
    shutil.rmtree(lower)
