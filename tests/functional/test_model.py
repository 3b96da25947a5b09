"""A model-based test: random steps on real sandboxes of a real daemon, which is stopped and killed in between, against
a dictionary. After every step the list, the states, all files and their contents agree; in the end all answers do, once
more, from the log, and nothing is left on the host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from daemonkit import Daemon, container_values, guest_kernels, started
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_restart import things

from dsecd.client import DSecContainerRunArgs, DsecError, DSecMicroVMRunArgs, DSecSyncClient
from dsecd.client_sync import SyncSandbox
from dsecd.wire.images import ByRef

EXAMPLES = {"container": (7, 16), "microvm": (2, 12)}  # and steps of each; a guest here is emulated
AT_ONCE, DEATHS, PACKED = 4, 2, 2  # sandboxes, and in one example deaths of the daemon and packs
FILES = ("/root/a", "/root/b", "/tmp/c d", "/var/tmp/e")
SCRUBBED = ("/tmp/", "/var/tmp/")  # no pack has what is there
keys = itertools.count()
numbers = st.integers(0, 1000)
contents = st.one_of(st.binary(max_size=40), st.integers(0, 200_000).map(lambda n: bytes(n)))


@dataclass
class Answer:
    """What a request_id was used for, and what came."""

    line: str
    exit_code: int
    stdout: str


@dataclass
class Box:
    """What a sandbox should be."""

    state: str = "running"
    files: dict[str, bytes] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    runs: int = 0  # commands that were asked for, without repetitions


class Sandboxes(RuleBasedStateMachine):
    daemon: Daemon
    backend: str

    def __init__(self) -> None:
        super().__init__()
        self.boxes: dict[str, Box] = {}
        self.environments: dict[str, dict[str, bytes]] = {}  # what is in each beside the base
        self.deaths = 0
        self.client = DSecSyncClient(self.daemon.url).open()

    # -- helpers ------------------------------------------------------------------------------------------------------
    def pick(self, number: int, state: str | None = None) -> tuple[SyncSandbox, Box]:
        chosen = [ident for ident, box in self.boxes.items() if state is None or box.state == state]
        ident = chosen[number % len(chosen)]
        return self.client.get(ident), self.boxes[ident]

    def any_in(self, state: str) -> bool:
        return any(box.state == state for box in self.boxes.values())

    def key(self) -> str:
        return f"key-{next(keys)}"

    def launch(self, request_id: str | None = None, **args: Any) -> SyncSandbox:
        if self.backend == "microvm":
            values = container_values({"memory_limit_mb": 128, "disk_limit_mb": 128, **args})
            return self.client.run_microvm(DSecMicroVMRunArgs(**values), request_id=request_id, timeout=180)
        values = container_values({"memory_limit_mb": 64, "disk_limit_mb": 64, **args})
        return self.client.run_container(DSecContainerRunArgs(**values), request_id=request_id)

    def again(self, sandbox: SyncSandbox, key: str, answer: Answer) -> None:
        """Asked again under its id: the same answer, and no second run (the files say so)."""
        ran = sandbox.run_shell(answer.line, request_id=key)
        assert (ran.exit_code, ran.stdout, ran.replayed) == (answer.exit_code, answer.stdout, True)

    def die(self, way: Callable[[], int]) -> None:
        self.deaths += 1
        self.client.close()
        way()
        self.daemon.start()
        self.client = DSecSyncClient(self.daemon.url).open()

    # -- life ---------------------------------------------------------------------------------------------------------
    @initialize()
    def first(self) -> None:
        self.create(0)
        self.run(0, 4, named=True)

    @precondition(lambda self: len(self.boxes) < AT_ONCE)
    @rule(number=numbers)
    def create(self, number: int) -> None:
        key = self.key()
        made = self.launch(key)
        assert self.launch(key).id == made.id
        self.boxes[made.id] = Box()

    @precondition(lambda self: len(self.boxes) < AT_ONCE)
    @rule(number=numbers)
    def fork(self, number: int) -> None:
        """Copies have the files, and none of the answers."""
        sandbox, box = self.pick(number)
        if self.backend == "microvm":
            box.state = "running"  # its memory is copied, too
        for copy in sandbox.fork(min(2, AT_ONCE - len(self.boxes))):
            assert isinstance(copy, SyncSandbox)
            self.boxes[copy.id] = Box(files=dict(box.files))

    @precondition(lambda self: len(self.environments) < PACKED)
    @rule(number=numbers)
    def pack(self, number: int) -> None:
        sandbox, box = self.pick(number)
        name = f"env:{self.key()}"
        sandbox.pack_diff(name)
        self.environments[name] = {path: data for path, data in box.files.items() if not path.startswith(SCRUBBED)}

    @precondition(lambda self: self.environments and len(self.boxes) < AT_ONCE)
    @rule(number=numbers)
    def create_from_a_pack(self, number: int) -> None:
        name = list(self.environments)[number % len(self.environments)]
        self.boxes[self.launch(container_image=name).id] = Box(files=dict(self.environments[name]))

    @precondition(lambda self: len(self.boxes) > 1)
    @rule(number=numbers)
    def stop(self, number: int) -> None:
        sandbox, _ = self.pick(number)
        sandbox.stop()
        del self.boxes[sandbox.id]

    @precondition(lambda self: self.any_in("running"))
    @rule(number=numbers)
    def pause(self, number: int) -> None:
        sandbox, box = self.pick(number, "running")
        sandbox.pause()
        box.state = "paused"

    @precondition(lambda self: self.any_in("paused"))
    @rule(number=numbers)
    def resume(self, number: int) -> None:
        sandbox, box = self.pick(number, "paused")
        sandbox.resume()
        box.state = "running"

    # -- what is done inside; whoever is paused resumes for it --------------------------------------------------------
    @rule(number=numbers, status=st.integers(0, 9), named=st.booleans())
    def run(self, number: int, status: int, named: bool) -> None:
        sandbox, box = self.pick(number)
        key = self.key()
        line = f"echo {key} >> /root/runs; echo said {status}; exit {status}"
        ran = sandbox.run_shell(line, request_id=key if named else None)
        assert (ran.exit_code, ran.stdout, ran.replayed) == (status, f"said {status}\n", False)
        box.state = "running"
        box.files["/root/runs"] = box.files.get("/root/runs", b"") + f"{key}\n".encode()
        box.runs += 1
        if named:
            box.answers[key] = Answer(line, status, ran.stdout)

    @precondition(lambda self: self.backend == "container")
    @rule(number=numbers, status=st.integers(0, 9))
    def run_fresh(self, number: int, status: int) -> None:
        """Of what a command does in a fresh copy, the sandbox sees nothing."""
        sandbox, box = self.pick(number)
        ran = sandbox.run_shell(f"cat /root/* | wc -c; rm -rf /root /tmp/*; exit {status}", fresh=True)
        there = sum(len(data) for path, data in box.files.items() if path.startswith("/root/"))
        assert (ran.exit_code, ran.stdout) == (status, f"{there}\n")
        box.runs += 1

    @precondition(lambda self: any(box.answers for box in self.boxes.values()))
    @rule(number=numbers, which=numbers, other=st.booleans())
    def run_again(self, number: int, which: int, other: bool) -> None:
        chosen = [ident for ident, box in self.boxes.items() if box.answers]
        ident = chosen[number % len(chosen)]
        key, answer = list(self.boxes[ident].answers.items())[which % len(self.boxes[ident].answers)]
        if other:
            with pytest.raises(DsecError) as caught:
                self.client.get(ident).run_shell(answer.line + " # another", request_id=key)
            assert caught.value.kind == "conflict"
        else:
            self.again(self.client.get(ident), key, answer)

    @rule(number=numbers, path=st.sampled_from(FILES), data=contents)
    def write(self, number: int, path: str, data: bytes) -> None:
        sandbox, box = self.pick(number)
        sandbox.write_file(path, data)
        box.state, box.files[path] = "running", data

    @precondition(lambda self: any(set(box.files) & set(FILES) for box in self.boxes.values()))
    @rule(number=numbers, by_command=st.booleans())
    def remove(self, number: int, by_command: bool) -> None:
        chosen = [ident for ident, box in self.boxes.items() if set(box.files) & set(FILES)]
        ident = chosen[number % len(chosen)]
        sandbox, box = self.client.get(ident), self.boxes[ident]
        path = sorted(set(box.files) & set(FILES))[0]
        if by_command:
            assert sandbox.exec(["rm", path]).exit_code == 0
            box.runs += 1
        else:
            self.client.run(sandbox.aio.remove(path))
        box.state = "running"
        del box.files[path]

    # -- the daemon ---------------------------------------------------------------------------------------------------
    @precondition(lambda self: self.deaths < DEATHS)
    @rule(politely=st.booleans())
    def restart(self, politely: bool) -> None:
        self.die(self.daemon.stop if politely else self.daemon.kill)

    @precondition(lambda self: self.deaths < DEATHS)
    @rule(number=numbers)
    def killed_during_a_command(self, number: int) -> None:
        """The command goes on; asked for again under its id it is the same one, whose answer the next daemon has."""
        sandbox, box = self.pick(number)
        key, ident = self.key(), sandbox.id
        argv = ["sh", "-c", f"sleep 0.3; echo {key} >> /root/runs; echo done; exit 3"]
        before = self.client.run(sandbox.aio.start(argv, request_id=key))
        self.die(self.daemon.kill)
        sandbox = self.client.get(ident)
        after = self.client.run(sandbox.aio.start(argv, request_id=key))
        assert after.id == before.id
        ran = self.client.run(after.wait(timeout=20))
        assert (ran.exit_code, ran.stdout) == (3, "done\n")
        box.state = "running"
        box.files["/root/runs"] = box.files.get("/root/runs", b"") + f"{key}\n".encode()

    # -- what must hold -----------------------------------------------------------------------------------------------
    @invariant()
    def list_and_states_agree(self) -> None:
        assert self.daemon.sandboxes() == {ident: box.state for ident, box in self.boxes.items()}

    @invariant()
    def files_agree(self) -> None:
        for ident, box in self.boxes.items():
            if box.state != "running":  # looked at when it is resumed
                continue
            sandbox = self.client.get(ident)
            for directory in ("/root", "/tmp", "/var/tmp"):
                names = {f"{directory}/{entry.name}" for entry in sandbox.list_dir(directory)}
                found = {path for path in names if not Path(path).name.startswith(".")}
                assert found == {path for path in box.files if str(Path(path).parent) == directory}
            for path, data in box.files.items():
                assert sandbox.read_file(path) == data, path

    def teardown(self) -> None:
        try:
            for ident, box in self.boxes.items():
                sandbox = self.client.get(ident)
                for key, answer in box.answers.items():
                    self.again(sandbox, key, answer)
                self.check_log(ident, box)
                if box.answers:
                    box.state = "running"
            self.files_agree()
        finally:
            for ident in list(self.daemon.sandboxes()):
                self.client.get(ident).stop()
            for name in reversed(self.environments):
                self.client.run(self.client.aio.call("image.remove", ByRef(ref=name)))
            self.client.close()
        deadline = time.monotonic() + 10
        while any(things(self.daemon).values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(things(self.daemon).values()), things(self.daemon)

    def check_log(self, ident: str, box: Box) -> None:
        """Each command once, however often it was asked for; no entry was altered."""
        entries = self.client.trajectory(ident).entries
        assert sum(entry.method == "exec.run" for entry in entries) == box.runs
        assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
        assert self.client.run(self.client.aio.verify_trajectory(ident)).altered == []


@pytest.fixture
def own_daemon(tmp_path_factory: pytest.TempPathFactory, watched: list[Path], daemon: Daemon) -> Iterator[Daemon]:
    """As fresh_daemon, for so many restarts that its name should say so."""
    guest_kernels()
    with started(tmp_path_factory.mktemp("model"), watched, daemon.state / "images") as one:
        one.link_kernels()
        yield one


def test_sandboxes_are_as_the_model_says(own_daemon: Daemon, backend: str) -> None:
    examples, steps = EXAMPLES[backend]
    machine: Any = type("Machine", (Sandboxes,), {"daemon": own_daemon, "backend": backend})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, derandomize=True, deadline=None, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
