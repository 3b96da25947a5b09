"""The chooser's table over all combinations of what a task declares and what a host lacks: every one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import pytest

from dsecd.errors import DsecError
from dsecd.sandbox.choose import CALL_S, TABLE, Form, Host, Task, check, choose, require
from dsecd.wire import sandbox as wire

ROWS = ("fncall", "container", "microvm", "fullvm")
OWN_KERNEL = {"microvm", "fullvm"}
BOTH: frozenset[Form] = frozenset({"layers", "disk"})
ONE: tuple[frozenset[Form], ...] = (frozenset({"layers"}), frozenset({"disk"}), BOTH)


def tasks() -> Iterator[Task]:
    flags = itertools.product((False, True), repeat=6)
    for stateless, kernel, system, gui, device, layered in flags:
        for os, trust, life, images in itertools.product(
            ("linux", "other"), ("normal", "hostile"), (None, CALL_S, CALL_S + 1), ONE
        ):
            needs = wire.Needs(
                stateless=stateless, kernel=kernel, system=system, gui=gui, os=os, trust=trust, life_s=life
            )
            yield Task(needs=needs, device=device, images=images, layered=layered)


def hosts() -> Iterator[Host]:
    for lacks in itertools.product(("", "no such thing"), repeat=4):
        yield Host(**dict(zip(ROWS, lacks, strict=True)))


def fits(backend: str, task: Task, host: Host) -> bool:
    """What each backend can do, written down a second time, from the backends' side and not as a table."""
    needs = task.needs
    if getattr(host, backend):
        return False
    if needs.trust == "hostile" and backend not in OWN_KERNEL:
        return False
    one_call = needs.stateless and (needs.life_s is None or needs.life_s <= CALL_S)
    match backend:
        case "fncall":
            plain = not (needs.kernel or needs.system or needs.gui or needs.os == "other")
            return one_call and plain and "layers" in task.images
        case "container":
            return not (needs.kernel or needs.system or needs.gui or needs.os == "other") and "layers" in task.images
        case "microvm":
            return not (needs.system or needs.gui or needs.os == "other" or task.device) and "layers" in task.images
        case _:
            return not task.device and not task.layered and "disk" in task.images


def test_every_combination() -> None:
    """The lightest that fits, or none; the isolation of the choice is never less than what was asked for."""
    count = 0
    for task, host in itertools.product(list(tasks()), list(hosts())):
        count += 1
        right = next((backend for backend in ROWS if fits(backend, task, host)), "")
        chosen = choose(task, host)
        assert chosen.backend == right, (task, host, chosen.reason)
        assert task.needs.trust == "normal" or chosen.backend in {"", *OWN_KERNEL}
        assert [one.backend for one in chosen.considered] == list(ROWS)
        for one in chosen.considered:
            assert bool(one.why) != fits(one.backend, task, host)
        assert chosen.reason and "\n" not in chosen.reason
    assert count == 64 * 36 * 16


def test_changes_are_true_and_complete() -> None:
    """Each says what happens; and where one word decides, it is among them."""
    for task in list(tasks())[::7]:
        for host in list(hosts())[::3]:
            chosen = choose(task, host)
            words = [change.what for change in chosen.changes]
            assert len(words) == len(set(words))
            assert all(change.backend != chosen.backend for change in chosen.changes)
            flipped = "normal" if task.needs.trust == "hostile" else "hostile"
            other = msgspec.structs.replace(task, needs=msgspec.structs.replace(task.needs, trust=flipped))
            then = choose(other, host).backend
            said = {change.what: change.backend for change in chosen.changes}
            text = "it were hostile" if flipped == "hostile" else "it were trusted to share the host's kernel"
            assert said.get(text, chosen.backend) == then


@pytest.mark.parametrize(("task", "host", "backend", "words"), [
    (Task(), Host(), "container", "container is the lightest that fits: fncall keeps nothing between calls"),
    (Task(needs=wire.Needs(stateless=True)), Host(), "fncall", "fncall is the lightest that fits"),
    (Task(needs=wire.Needs(stateless=True)), Host(fncall="no pools"), "container", "fncall cannot run here: no pools"),
    (Task(needs=wire.Needs(stateless=True, life_s=61)), Host(), "container", "fncall is for calls of at most 60 s"),
    (Task(needs=wire.Needs(trust="hostile")), Host(emulated=True), "microvm",
     "microvm (emulated here: there is no KVM) is the lightest that fits: fncall keeps nothing between calls; "
     "container shares the host's kernel, which hostile code must not"),
    (Task(needs=wire.Needs(kernel=True)), Host(), "microvm", "container shares the host's kernel"),
    (Task(needs=wire.Needs(system=True)), Host(), "fullvm", "microvm runs commands without an init"),
    (Task(needs=wire.Needs(gui=True)), Host(), "fullvm", "microvm has no screen"),
    (Task(needs=wire.Needs(os="other")), Host(), "fullvm", "runs Linux programs only"),
    (Task(images=frozenset({"disk"})), Host(), "fullvm", "container starts from layers (base, workspace)"),
    (Task(device=True), Host(), "container", "lightest"),
    (Task(device=True, needs=wire.Needs(trust="hostile")), Host(), "", "microvm gets no device of the host"),
])  # fmt: skip
def test_reasons_are_sentences(task: Task, host: Host, backend: str, words: str) -> None:
    chosen = choose(task, host)
    assert chosen.backend == backend and words in chosen.reason


def test_hostile_never_becomes_a_container_and_the_refusal_says_what_to_install() -> None:
    host = Host(fncall="none", microvm="there is no guest kernel yet: get one with `dsecctl kernel import-deb`")
    task = Task(needs=wire.Needs(trust="hostile"), images=frozenset({"layers"}))
    with pytest.raises(DsecError) as caught:
        require(task, host)
    assert caught.value.kind == "unsupported" and "dsecctl kernel import-deb" in caught.value.message
    (change,) = [one for one in choose(task, host).changes if one.backend == "microvm"]
    assert change.what.startswith("microvm could run here (there is no guest kernel")


def test_named_backends_are_held_against_what_is_declared() -> None:
    """Nothing declared: every one is fine. Never another one instead."""
    for row in TABLE:
        if row.backend != "fncall":
            check(row.backend, Task())
    for backend, task in (
        ("container", Task(needs=wire.Needs(trust="hostile"))), ("container", Task(needs=wire.Needs(kernel=True))),
        ("microvm", Task(needs=wire.Needs(gui=True))), ("microvm", Task(device=True)), ("fullvm", Task(device=True)),
    ):  # fmt: skip
        with pytest.raises(DsecError) as caught:
            check(backend, task)
        assert caught.value.kind == "unsupported" and caught.value.message.startswith(
            f"backend {backend} was asked for"
        )
