"""Guest kernels without a network and without a guest: vmlinuz, modules, features, the store, apt's sources."""

from __future__ import annotations

import fcntl
import lzma
import os
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dsecd.errors import DsecError
from dsecd.vmm import apt, kernel_source
from dsecd.vmm.bzimage import has_pvh_entry, vmlinux_of
from dsecd.vmm.features import features_of, need
from dsecd.vmm.kernel import Kernel, KernelStore, describe
from dsecd.vmm.modules import ModuleTree, dependencies

LEAN = kernel_source.FRAGMENT.read_text()


# -- vmlinuz ----------------------------------------------------------------------------------------------------------
def elf(*, note: bytes = b"", sections: dict[str, bytes] | None = None) -> bytes:
    """A 64-bit little-endian ELF file with one PT_NOTE segment, or with sections."""
    header = bytearray(b"\x7fELF\x02\x01\x01" + bytes(57))
    if sections is None:
        struct.pack_into("<Q", header, 32, 64)
        struct.pack_into("<HH", header, 54, 56, 1)
        return bytes(header) + struct.pack("<IIQQQQQQ", 4, 0, 120, 0, 0, len(note), len(note), 4) + note
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    body, table, at = b"", bytes(64), 64
    for name, content in [*sections.items(), (".shstrtab", names)]:
        table += struct.pack("<IIQQQQ", names.index(name.encode() + b"\0"), 1, 0, 0, at, len(content)) + bytes(24)
        body, at = body + content, at + len(content)
    struct.pack_into("<Q", header, 40, at)
    struct.pack_into("<HHH", header, 58, 64, len(sections) + 2, len(sections) + 1)
    return bytes(header) + body + table


PVH_NOTE = struct.pack("<III", 4, 8, 18) + b"Xen\0" + struct.pack("<Q", 0x1000000)
OTHER_NOTE = struct.pack("<III", 4, 4, 6) + b"Xen\0" + b"3.0\0"
VMLINUX = elf(note=OTHER_NOTE + PVH_NOTE) + bytes(range(256)) * 400


def sized(packed: bytes) -> bytes:
    return packed + struct.pack("<I", len(VMLINUX))


def piped(program: str, *options: str) -> bytes:
    return subprocess.run([program, *options], input=VMLINUX, capture_output=True, check=True, timeout=20).stdout


def gzipped() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(VMLINUX) + packer.flush()


PACKERS: dict[str, Callable[[], bytes]] = {
    "gzip": gzipped,
    "xz": lambda: sized(lzma.compress(VMLINUX, check=lzma.CHECK_CRC32)),
    "zstd": lambda: sized(piped("zstd", "-qc", "-3")),
    "lz4": lambda: sized(piped("lz4", "-qcl")),
}


def bzimage(payload: bytes, sectors: int = 3, prefix: int = 1000) -> bytes:
    """Boot sectors, then protected-mode code in which the payload begins after `prefix` bytes."""
    head = bytearray((sectors + 1) * 512)
    head[0x1F1] = sectors
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", head, 0x206, 0x20F)
    struct.pack_into("<II", head, 0x248, prefix, len(payload))
    return bytes(head) + b"\x90" * prefix + payload + b"tail"


@pytest.mark.parametrize("packer", PACKERS)
def test_vmlinux_comes_out_of_vmlinuz(packer: str) -> None:
    if packer in ("lz4", "zstd") and shutil.which(packer) is None:
        pytest.skip(f"{packer} is not installed")
    found = vmlinux_of(bzimage(PACKERS[packer]()))
    assert found == VMLINUX
    assert has_pvh_entry(found)


@pytest.mark.parametrize("packer", ["gzip", "xz", "zstd"])
def test_an_altered_payload_is_refused(packer: str) -> None:
    payload = bytearray(PACKERS[packer]())
    payload[len(payload) // 2] ^= 0xFF
    with pytest.raises(DsecError, match="inside vmlinuz") as caught:
        vmlinux_of(bzimage(bytes(payload)))
    assert caught.value.kind == "image"


@pytest.mark.parametrize("cut", [0, 100, 0x208, 2048, 3100])
def test_a_truncated_vmlinuz_is_refused(cut: int) -> None:
    with pytest.raises(DsecError) as caught:
        vmlinux_of(bzimage(gzipped())[:cut])
    assert caught.value.kind == "image"


def test_what_is_no_kernel_is_refused() -> None:
    for bad, kind in ((VMLINUX, "image"), (bzimage(sized(b"unknown method" * 10)), "unsupported")):
        with pytest.raises(DsecError) as caught:
            vmlinux_of(bad)
        assert caught.value.kind == kind
    packed = lzma.compress(b"no ELF file" * 100)
    with pytest.raises(DsecError, match="no 64-bit ELF"):
        vmlinux_of(bzimage(packed + struct.pack("<I", 1100)))


def test_a_kernel_without_pvh_is_told_apart() -> None:
    assert not has_pvh_entry(elf(note=OTHER_NOTE))
    assert not has_pvh_entry(b"\x7fELF\x02\x01")
    assert not has_pvh_entry(elf(note=PVH_NOTE.replace(b"Xen", b"Foo")))


# -- modules ----------------------------------------------------------------------------------------------------------
def module(*needs: str, soft: str = "", name: str = "x") -> bytes:
    info = [b"license=GPL", b"depends=" + ",".join(needs).encode(), b"name=" + name.encode()]
    if soft:
        info.append(b"softdep=" + soft.encode())
    return elf(sections={".text": b"\x90" * 9, ".modinfo": b"\0".join(info) + b"\0"})


def tree(root: Path, modules: dict[str, bytes], builtin: str = "") -> ModuleTree:
    for name, content in modules.items():
        packed = lzma.compress(content) if name.endswith(".xz") else content
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(packed)
    (root / "modules.builtin").write_text(builtin)
    return ModuleTree(root)


def test_modules_come_after_what_they_need(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        {
            "kernel/a/nd_pmem.ko.xz": module("libnvdimm", "nd-btt"),
            "kernel/a/nd_btt.ko.xz": module("libnvdimm"),
            "kernel/a/libnvdimm.ko": module(),
            "kernel/b/erofs.ko.xz": module("libcrc32c"),
            "kernel/b/libcrc32c.ko": module(soft="pre: crc32c-fast no-such-thing post: later"),
            "kernel/b/crc32c_fast.ko": module(),
            "kernel/b/later.ko": module(),
            "kernel/c/unused.ko": module(),
        },
        "kernel/v/virtio-pci.ko\n",
    ).load_order(["virtio_pci", "nd_pmem", "erofs", "not_there"])
    assert [name for name, _ in found] == ["libnvdimm", "nd_btt", "nd_pmem", "crc32c_fast", "libcrc32c", "erofs"]
    assert dict(found)["erofs"] == module("libcrc32c")


def test_modules_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DsecError, match="needs gone"):
        tree(tmp_path / "1", {"a.ko": module("gone")}).load_order(["a"])
    with pytest.raises(DsecError, match="in a circle"):
        tree(tmp_path / "2", {"a.ko": module("b"), "b.ko": module("a")}).load_order(["a"])
    for number, content in enumerate((b"", b"\x7fELF\x02\x01" + bytes(70), elf(sections={".text": b""}), b"\x7fELF")):
        with pytest.raises(DsecError, match="module of the kernel"):
            tree(tmp_path / f"3{number}", {"a.ko": content}).load_order(["a"])


def test_the_last_byte_of_modinfo_counts() -> None:
    assert dependencies(module("a", "b-c", soft="pre: d")) == (["a", "b_c"], ["d"])
    assert dependencies(module()) == ([], [])


# -- features ---------------------------------------------------------------------------------------------------------
def test_features_of_our_own_fragment() -> None:
    assert set(features_of(LEAN).values()) == {"built-in"}


def test_features_say_how() -> None:
    config = "CONFIG_EROFS_FS=m\nCONFIG_EXT4_FS=y\n# CONFIG_OVERLAY_FS is not set\nCONFIG_VIRTIO_PMEM=m\n"
    assert features_of(config)["erofs"] == "module"
    assert features_of(config)["ext4"] == "built-in"
    assert features_of(config)["overlay"] == "absent"
    assert features_of(config)["pmem"] == "absent"  # without a block device over it
    config += "CONFIG_BLK_DEV_PMEM=y\n"
    assert features_of(config)["pmem"] == "module"
    assert features_of(config, ["virtio_pmem"]) | {"erofs": "absent"} == features_of(config, ["virtio_pmem"])
    with pytest.raises(DsecError, match="'old' has no overlay, seccomp: ") as caught:
        need("old", features_of(config), ("ext4", "overlay", "seccomp"))
    assert caught.value.kind == "vmm"
    assert caught.value.detail == {"lacking": ["overlay", "seccomp"]}


# -- the store --------------------------------------------------------------------------------------------------------
def put(store: KernelStore, name: str, *, content: bytes = VMLINUX, config: str = LEAN, modules: int = 0) -> Kernel:
    with store.workspace() as work:
        made = work.path / "kernel"
        (made / "modules").mkdir(parents=True)
        (made / "vmlinux").write_bytes(content)
        (made / "config").write_text(config)
        for number in range(modules):
            (made / "modules" / f"{number:03}-m{number}.ko").write_bytes(module(name=str(number)))
        describe(made, kind="files", source="test", version="1", release="6.12-test")
        return store.commit(work, name)


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    return KernelStore(tmp_path / "kernels")


def test_a_kernel_goes_in_and_comes_out(store: KernelStore) -> None:
    made = put(store, "one", modules=2)
    assert store.get("one") == made == store.default() == store.default("one")
    assert store.list() == (made,)
    assert made.modules == ("modules/000-m0.ko", "modules/001-m1.ko")
    assert store.vmlinux(made).read_bytes() == VMLINUX
    made.need("pmem", "dax", "damon")
    assert sorted(path.name for path in store.root.iterdir()) == ["lock", "one"]
    store.remove("one")
    assert store.list() == ()
    assert sorted(path.name for path in store.root.iterdir()) == ["lock"]


def test_the_same_name_again_replaces_it(store: KernelStore) -> None:
    first = put(store, "one")
    second = put(store, "one", content=VMLINUX + b"new", modules=1)
    assert store.list() == (second,)
    assert first.digest != second.digest
    assert sorted(path.name for path in store.root.iterdir()) == ["lock", "one"]


def test_one_initramfs_for_each_agent(store: KernelStore, tmp_path: Path) -> None:
    kernel = put(store, "one", modules=1)
    agent = tmp_path / "agent"
    agent.write_bytes(b"first")
    first = store.initrd(kernel, agent)
    made = first.stat()
    assert store.initrd(kernel, agent) == first
    assert first.stat().st_ino == made.st_ino
    agent.write_bytes(b"second")
    second = store.initrd(kernel, agent)
    assert second != first
    assert b"second" in second.read_bytes()
    assert b"modules/000-m0.ko" in second.read_bytes()
    shutil.rmtree(store.root / "one")
    with pytest.raises(DsecError, match="is gone or damaged") as caught:
        store.initrd(kernel, agent)
    assert caught.value.kind == "vmm"


def test_the_default_is_the_newest_that_can_start_machines(store: KernelStore) -> None:
    with pytest.raises(DsecError, match="dsecctl kernel import-deb") as caught:
        store.default()
    assert caught.value.kind == "vmm"
    put(store, "fit")
    useless = put(store, "useless", config="CONFIG_EROFS_FS=y\n")
    aged = msgspec.structs.replace(store.get("fit"), created="2020-01-01T00:00:00Z")
    (store.root / "fit" / "kernel.json").write_bytes(msgspec.json.encode(aged))
    assert [kernel.name for kernel in store.list()] == ["useless", "fit"]
    assert store.default().name == "fit"
    with pytest.raises(DsecError, match="'useless' has no initramfs"):
        store.default(useless.name)


def test_a_kernel_without_what_a_machine_needs_is_refused_before_it_boots(store: KernelStore) -> None:
    """Named or not; of several, one that has it is taken."""
    without = "".join(line for line in LEAN.splitlines(keepends=True) if "VIRTIO_PMEM" not in line)
    put(store, "plain", config=without)
    put(store, "bare", config=without.replace("CONFIG_EROFS_FS=y\n", ""))
    assert store.default("plain").name == store.default("", "blk").name == "plain"
    for name, needs, lacks in (("plain", ("pmem",), "pmem"), ("", ("pmem",), "pmem"), ("bare", (), "erofs")):
        with pytest.raises(DsecError, match=f"has no ([a-z]+, )*{lacks}.*dsecctl kernel import-deb") as caught:
            store.default(name, *needs)
        assert caught.value.kind == "vmm"
    put(store, "fit")
    assert store.default("", "pmem").name == "fit"


def test_names_and_damage_are_refused_in_one_sentence(store: KernelStore) -> None:
    put(store, "one")
    for name in ("", "../one", "tmp-x", "apt", "A", "a" * 129, "a/b"):
        for call in (store.get, store.remove):
            with pytest.raises(DsecError) as caught:
                call(name)
            assert caught.value.kind == "invalid", name
    with pytest.raises(DsecError) as caught:
        store.get("two")
    assert caught.value.kind == "not_found"
    with pytest.raises(DsecError) as caught:
        store.remove("one", ["one"])
    assert caught.value.kind == "conflict"
    os.truncate(store.root / "one" / "vmlinux", 10)
    with pytest.raises(DsecError, match="import it again") as caught:
        store.get("one")
    assert caught.value.kind == "vmm"
    (store.root / "one" / "vmlinux").unlink()
    with pytest.raises(DsecError, match="import it again"):
        store.get("one")
    (store.root / "one" / "kernel.json").write_text("{")
    with pytest.raises(DsecError, match="import it again"):
        store.get("one")
    assert store.list() == ()
    assert put(store, "one") in store.list()


def test_leftovers_go_and_work_in_progress_stays(store: KernelStore) -> None:
    put(store, "one")
    (store.root / "tmp-dead").mkdir()
    (store.root / "trash-dead").mkdir()
    with store.workspace() as work:
        store.collect()
        assert work.path.is_dir()
        assert {path.name for path in store.root.iterdir()} == {"lock", "one", work.path.name}
    with pytest.raises(RuntimeError), store.workspace() as work:
        raise RuntimeError
    assert {path.name for path in store.root.iterdir()} == {"lock", "one"}


def test_the_store_is_locked_while_names_change(store: KernelStore) -> None:
    put(store, "one")
    with (store.root / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody keeps it


# -- apt --------------------------------------------------------------------------------------------------------------
DEB822 = """# the machine's
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
"""


def test_backports_come_from_where_the_suite_comes_from() -> None:
    found = apt.backports_of(DEB822, "bookworm")
    assert "Suites: bookworm-backports\n" in found
    assert "URIs: http://mirror.example/debian\n" in found
    assert "Signed-By: " in found
    assert "security" not in found
    line = (
        "deb [signed-by=/k] http://mirror.example/debian bookworm main\ndeb http://x.example bookworm-security main\n"
    )
    assert apt.backports_of(line, "bookworm") == (
        "deb [signed-by=/k] http://mirror.example/debian bookworm-backports main\n"
    )
    assert apt.backports_of(DEB822, "trixie") == ""


def test_sources_of_both_forms_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    for name in ("b.sources", "a.list", "c.sources.disabled"):
        (folder / name).write_text(DEB822)
    (tmp_path / "sources.list").write_text("\n")
    assert [path.name for path in apt.machine_sources(tmp_path)] == ["b.sources", "a.list"]


def test_options_that_the_kernel_did_not_take_are_named() -> None:
    assert kernel_source.lost_options("# CONFIG_A=y\nCONFIG_B=y\nCONFIG_C=m\n", "CONFIG_B=y\nCONFIG_C=y\n") == [
        "CONFIG_C=m"
    ]
