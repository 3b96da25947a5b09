"""Which VMM a host gets: with KVM or without, with a VMM that is missing, old, broken, or without its jailer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dsecd.errors import DsecError
from dsecd.vmm import kvm
from dsecd.vmm.select import find_driver

REFUSES = "/dev/kvm does not run ordinary guests (a small one ended with exit reason 17)"
QEMU = """case $* in
    --version) echo "QEMU emulator version {}";;
    *-accel*) echo "-accel kvm,device=/dev/null: kvm version too old" >&2; exit 1;;
esac"""
# As 7.2 says it.
OLD_QEMU = QEMU.replace("kvm version too old", "Property 'kvm-accel.device' not found")
FIRECRACKER = """case $1 in
    --version) echo "Firecracker v{}";;
    --snapshot-version) echo v9.0.0;;
esac"""
Put = Callable[[str, str], None]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """A host of its own: puts programs on the PATH, where at first there are none."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def program(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return program


@pytest.fixture(params=["/dev/kvm: No such file or directory", REFUSES], ids=["no KVM", "KVM that refuses"])
def no_kvm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kvm, "usable", lambda: request.param)
    return str(request.param)


@pytest.fixture
def good_kvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm, "usable", lambda: "")


def refused(wanted: str) -> str:
    with pytest.raises(DsecError) as caught:
        find_driver(wanted)
    assert caught.value.kind == "unsupported"
    assert "\n" not in caught.value.message
    return caught.value.message


def test_without_kvm_qemu_emulates_and_firecracker_says_why_not(put: Put, no_kvm: str) -> None:
    put("qemu-system-x86_64", QEMU.format("10.0.2 (Debian 1:10.0.2)"))
    put("firecracker", FIRECRACKER.format("1.15.1"))
    put("jailer", 'echo "Jailer v1.15.1"')
    for wanted in ("auto", "qemu"):
        driver = find_driver(wanted)
        assert (driver.name, driver.accel, driver.version) == ("qemu", "tcg", "10.0.2")
    said = refused("firecracker")
    assert no_kvm in said
    assert "set vm_driver to qemu" in said


@pytest.mark.usefixtures("put")
def test_no_vmm_at_all(no_kvm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in ("auto", "qemu"):
        assert "apt-get install qemu-system-x86" in refused(wanted)
    monkeypatch.setattr(kvm, "usable", lambda: "")
    assert "apt-get install qemu-system-x86" in refused("auto")
    assert "put a release of Firecracker on the PATH" in refused("firecracker")


@pytest.mark.parametrize("version", ["7.2.19 (Debian 1:7.2+dfsg-7)", "6.0", "of no number"])
def test_an_old_qemu_is_not_good_enough(put: Put, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Emulated it miscompiles; with KVM it would open the device as a user who may not."""
    put("qemu-system-x86_64", OLD_QEMU.format(version))
    monkeypatch.setattr(kvm, "usable", lambda: "none")
    assert "without KVM corrupts its guests: install a newer one" in refused("auto")
    monkeypatch.setattr(kvm, "usable", lambda: "")
    assert "opens /dev/kvm itself" in refused("auto")


def test_a_qemu_that_does_not_run(put: Put, no_kvm: str) -> None:
    put("qemu-system-x86_64", "#!/no/such/interpreter\n")
    assert "does not run" in refused("auto")
    put("qemu-system-x86_64", "printf '\\377\\376'; exit 1")
    assert "install a newer one" in refused("auto")


@pytest.mark.usefixtures("good_kvm")
def test_with_kvm_firecracker_is_taken_if_all_of_it_is_there(put: Put) -> None:
    put("qemu-system-x86_64", QEMU.format("10.0.2"))
    put("firecracker", FIRECRACKER.format("1.15.1"))
    assert "jailer is not on the PATH" in refused("firecracker")
    assert find_driver("auto").name == "qemu"
    put("jailer", 'echo "Jailer v1.14.0"')
    assert "is of release 1.14.0" in refused("firecracker")
    put("jailer", 'echo "Jailer v1.15.1"')
    assert find_driver("auto").name == find_driver("firecracker").name == "firecracker"
    assert find_driver("qemu").accel == "kvm"
    put("firecracker", FIRECRACKER.format("1.13.2"))
    assert "has no virtio-pmem" in refused("firecracker")
    assert find_driver("auto").name == "qemu"
