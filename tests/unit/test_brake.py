"""When a host takes no new sandboxes because those it has wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsecd.errors import DsecError
from dsecd.sandbox.admission import Admission, Capacity
from dsecd.sandbox.brake import PRESSURE, Brake, Limits, measured
from dsecd.wire.sandbox import Spec


class Kernel:
    """A tree as /proc/pressure is."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.free = 0.05
        self.say("cpu", 0, 0), self.say("memory", 0, 0), self.say("io", 0, 0)

    def say(self, what: str, some: float, full: float) -> None:
        (self.root / what).write_text(
            f"some avg10={some:.2f} avg60=0.00 avg300=0.00 total=1\n"
            f"full avg10={full:.2f} avg60=0.00 avg300=0.00 total=0\n"
        )

    def brake(self, **limits: float) -> Brake:
        return Brake(Limits(**limits), self.root, lambda: self.free)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_it_holds_above_the_limit_and_lets_go_below_half_of_it(kernel: Kernel) -> None:
    brake = kernel.brake(memory=20)
    kernel.say("memory", 90, 20)  # some waited, which is no reason
    assert brake.reason() == ""
    kernel.say("memory", 90, 20.5)
    assert brake.reason() == (
        "tasks waited for memory 20.5 % of the last 10 s (above 20 % nobody new comes, until it is below 10 %)"
    )
    for still in (15, 10.1):
        kernel.say("memory", 90, still)
        assert brake.reason()
    kernel.say("memory", 90, 10)
    assert not brake.reason()
    kernel.say("memory", 90, 15)
    assert not brake.reason()


def test_a_sandbox_at_its_own_limit_closes_nothing(kernel: Kernel) -> None:
    brake = kernel.brake(memory=20)
    kernel.say("memory", 99, 99)
    kernel.free = 0.6
    assert not brake.reason()
    kernel.free = 0.1
    assert brake.reason()
    kernel.free = 0.6
    assert not brake.reason()


def test_each_has_its_limit_and_a_hundred_is_none(kernel: Kernel) -> None:
    for what in ("cpu", "memory", "io"):
        kernel.say(what, 100, 100)
    assert not kernel.brake().reason()
    why = kernel.brake(cpu=90, io=50).reason()
    assert "cpu 100 %" in why and "io 100 %" in why and "memory" not in why
    kernel.say("cpu", 95, 0)  # on a core somebody always runs
    assert "cpu 95 %" in kernel.brake(cpu=90).reason()


@pytest.mark.parametrize("text", ["", "some\n", "full avg10=x\n", "full avg60=1\n", None])
def test_a_kernel_that_does_not_say_holds_nothing(kernel: Kernel, text: str | None) -> None:
    if text is None:
        (kernel.root / "memory").unlink()
    else:
        (kernel.root / "memory").write_text(text)
    assert not kernel.brake(memory=1).reason()
    assert not measured(kernel.root)


def test_this_kernels_own_files_are_read() -> None:
    assert measured() == (PRESSURE / "memory").exists()


def test_a_create_is_refused_as_capacity(kernel: Kernel, tmp_path: Path) -> None:
    room = Capacity(sandboxes=10, cpu=10, memory_mb=1000, disk_mb=10000, cpu_each=2, memory_each_mb=1000)
    admission = Admission(room, tmp_path / "cordon", kernel.brake(memory=20))
    spec = Spec(image="x", memory_mb=64, disk_mb=64)
    admission.check(spec)
    kernel.say("memory", 50, 50)
    with pytest.raises(DsecError, match=r"^this host is busy: tasks waited for memory 50 %") as caught:
        admission.check(spec)
    assert (caught.value.kind, caught.value.detail) == ("capacity", {"short": ["pressure"]})
    kernel.say("memory", 0, 0)
    admission.check(spec)
