"""What of its images a microVM can be given: refused before there is a disk, a cgroup or a process for it."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from dsecd.cgroup.groups import Cgroups
from dsecd.damon.policy import Policy
from dsecd.disk import DiskPool
from dsecd.erofs.model import Manifest
from dsecd.erofs.store import ImageStore
from dsecd.errors import DsecError
from dsecd.sandbox.record import Record
from dsecd.sandbox.vms import VmDirs, Vms, VmSettings
from dsecd.vmm.disks import DiskStore
from dsecd.vmm.kernel import KernelStore
from dsecd.wire import sandbox as wire

IMAGE = Manifest(
    digest="sha256:" + "1" * 64, kind="base", name="box", source="test", created="", files=1, meta_size=0,
    meta_digest="sha256:" + "2" * 64, data_size=0, data_digest="sha256:" + "3" * 64,
)  # fmt: skip


def refused(tmp_path: Path, images: Mock, spec: wire.Spec) -> DsecError:
    dirs = VmDirs(*(tmp_path / name for name in ("run", "state", "memory", "pmem")))
    settings = VmSettings(dirs, "", tmp_path / "agent", [], Policy(enabled=False))
    driver, pool, cgroups = Mock(accel="tcg"), Mock(spec=DiskPool), Mock(spec=Cgroups)
    driver.name = "qemu"
    vms = Vms(settings, cgroups, Mock(spec=KernelStore), Mock(spec=DiskStore), lambda: driver)
    record = Record(
        id="x", spec=spec, backend="microvm", boot="", owner=wire.Owner(uid=0, pid=1), layers=[IMAGE.digest]
    )
    with pytest.raises(DsecError) as caught:
        asyncio.run(vms.start(record, 1, images, pool, None))
    assert pool.mock_calls == cgroups.mock_calls == driver.start.mock_calls == []
    return caught.value


@pytest.fixture
def images() -> Mock:
    store = Mock(spec=ImageStore)
    store.resolve.return_value = IMAGE
    return store


@pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs (erofs-utils) is not installed")
def test_an_image_that_is_not_fit_for_dax(tmp_path: Path, images: Mock) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_bytes(random.Random(1).randbytes(5000))
    images.meta_path.return_value = images.data_path.return_value = tmp_path / "meta"
    subprocess.run(["mkfs.erofs", tmp_path / "meta", tmp_path / "tree"], check=True, capture_output=True)
    error = refused(tmp_path, images, wire.Spec(image="box", root="pmem"))
    assert error.kind == "image"
    assert "image box is not fit for DAX: 1 of its 1 files" in error.message


@pytest.mark.parametrize("root", ["pmem", "blk"])
def test_an_image_whose_data_is_elsewhere(tmp_path: Path, images: Mock, root: wire.Root) -> None:
    images.data_path.side_effect = DsecError("image", "the data of box is on the store far")
    error = refused(tmp_path, images, wire.Spec(image="box", root=root))
    assert error.kind == "unsupported"
    assert "dsecctl image pull" in error.message


def test_images_that_would_take_more_of_a_guest_than_was_asked_for(
    tmp_path: Path, images: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsecd.pmem.fit.require", lambda *_: None)
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(2 << 30)
    images.meta_path.return_value = images.data_path.return_value = big
    error = refused(tmp_path, images, wire.Spec(image="box", root="pmem", memory_mb=63))
    assert error.kind == "invalid"
    assert "63 MiB of memory are too little: its images take 64 MiB" in error.message
