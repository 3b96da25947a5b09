"""What the agent does in a container it does in a virtual machine: the container's own tests, over a serial port.

All of them that ask nothing but the agent; those that look at the sandbox from the host, or need a second connection at
the same time, are for containers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest
import test_agent
import test_agent_attacks
import test_agent_files
from agent_box import COMMAND_CAPS, rootfs  # noqa: F401
from test_agent_files import empty  # noqa: F401
from vmkit import SerialClient, Vm, parts

from dsecd.agent.frames import Tag

pytestmark = pytest.mark.slow

ASKED = {"client", "empty"}
NOT_HERE = {
    "test_no_fixed_floor": "counts milliseconds",
    "test_a_hundred_megabytes_of_stdin": "counts seconds",
    "test_two_thousand_files_each_way": "counts seconds",
    "test_following_late_shows_the_gap": "counts tenths of a second",
    "test_limits": "those that a container's runtime gave",
    "test_nothing_of_the_agent_is_in_the_file_system": "its socket to the keeper is in /proc/net/unix, without a name",
    "test_what_cannot_be_made_is_told_and_the_rest_is_made": "every uid exists here",
    "test_what_only_a_machine_is_asked": "this is one",
    "test_a_frame_that_carries_too_much_ends_the_link": "a port has no end; test_vm_agent.py has what is said instead",
}


def _take(module: object) -> None:
    for name, test in vars(module).items():
        if not name.startswith("test_") or name in NOT_HERE or not inspect.isfunction(test):
            continue
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        given = {word.strip() for mark in marks for word in _names(mark.args[0])}
        if set(inspect.signature(test).parameters) <= ASKED | given:
            globals()[name] = test


def _names(argument: str | tuple[str, ...]) -> list[str]:
    return argument.split(",") if isinstance(argument, str) else list(argument)


for _module in (test_agent, test_agent_files, test_agent_attacks):
    _take(_module)


@pytest.fixture(scope="module")
def vm(rootfs: Path) -> Iterator[Vm]:  # noqa: F811
    with parts(rootfs, disk=512 << 20) as made, Vm(made, memory=768) as started:
        leftovers.tolerated.append(ours := lambda item: item.startswith(f"process {started.process.pid} ("))
        yield started
        leftovers.tolerated.remove(ours)
        assert started.process.poll() is None, f"the machine ended\n{started.console()[-3000:]}"


@pytest.fixture
def client(vm: Vm) -> Iterator[SerialClient]:
    with vm.client([(Tag.CAPS, COMMAND_CAPS)]) as connected:
        yield connected
    assert "dsec-agent:" not in vm.console()
