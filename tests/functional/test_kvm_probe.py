"""The probe of /dev/kvm. Where KVM works it is seen to work in the lab VM (tests/lab/test_firecracker.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsecd.vmm import kvm


def test_no_device_and_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm, "DEVICE", str(tmp_path / "kvm"))
    assert kvm.usable() == f"{tmp_path}/kvm: No such file or directory"
    (tmp_path / "kvm").write_bytes(b"")
    assert kvm.usable() == f"{tmp_path}/kvm: Inappropriate ioctl for device"
    monkeypatch.setattr(kvm, "DEVICE", "/dev/null")
    assert "Inappropriate ioctl" in kvm.usable()


def test_a_probe_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 60\n")
    stuck.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(stuck))
    monkeypatch.setattr(kvm, "PROBE_S", 0.5)
    monkeypatch.setattr(kvm, "DEVICE", "/dev/null")
    assert "did not run a small guest within 0.5 s" in kvm.usable()


@pytest.mark.skipif(not Path(kvm.DEVICE).exists(), reason="no /dev/kvm here")
def test_it_says_the_same_twice() -> None:
    assert kvm.usable() == kvm.usable()
