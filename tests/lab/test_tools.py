"""The lab's own tools, where they decide something: apt sources, kernel options, cache, pip requirements, a lost VM."""

from __future__ import annotations

import io
import itertools
import os
import tarfile
from pathlib import Path

import pytest
from apt import backports_of, sources_of
from cache import LabError, key_of, product
from delivery import read_disk, requirements
from kernel import FRAGMENT, run_make
from run import NESTED_VMS, NOTHING_LEFT, TESTS_FAILED, nested
from vm import Output

from dsecd.errors import DsecError
from dsecd.vmm.kernel_source import build, lost_options

pytestmark = pytest.mark.lab

DEB822 = """\
Types: deb
# a comment
URIs: http://mirror.invalid/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /key.gpg

Types: deb
URIs: http://mirror.invalid/debian-security
Suites: bookworm-security
Components: main
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dsecd"


def test_backports_come_from_the_main_suites_mirror_alone() -> None:
    assert backports_of(DEB822, "bookworm").splitlines() == [
        "Types: deb",
        "URIs: http://mirror.invalid/debian",
        "Suites: bookworm-backports",
        "Components: main",
        "Signed-By: /key.gpg",
    ]


def test_backports_of_a_one_line_source() -> None:
    text = "# deb off\ndeb [arch=amd64] http://mirror.invalid/debian bookworm main\ndeb http://x.invalid other main\n"
    assert backports_of(text, "bookworm") == "deb [arch=amd64] http://mirror.invalid/debian bookworm-backports main\n"


def test_no_backports_of_a_source_without_the_suite() -> None:
    assert backports_of(DEB822, "trixie") == ""


def test_another_suites_sources_are_these_ones_with_its_name() -> None:
    changed = sources_of(DEB822, "bookworm", "trixie")
    assert [line for line in changed.splitlines() if line.startswith("Suites:")] == [
        "Suites: trixie trixie-updates",
        "Suites: trixie-security",
    ]
    assert changed.count("http://mirror.invalid/debian") == DEB822.count("http://mirror.invalid/debian")
    line = "deb http://bookworm.invalid/my-bookworm {} main\n"
    assert sources_of(line.format("bookworm"), "bookworm", "trixie").strip() == line.format("trixie").strip()
    assert sources_of("deb http://x.invalid cloud-bookworm main", "bookworm", "trixie") == ""


def test_a_lost_kernel_option_is_named() -> None:
    fragment = '# CONFIG_C=y\nCONFIG_A=y\nCONFIG_B=y\nCONFIG_LSM="yama"\n'
    settled = 'CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_LSM="yama,bpf"\n'
    assert lost_options(fragment, settled) == ["CONFIG_B=y", 'CONFIG_LSM="yama"']


def test_the_fragment_names_no_option_twice() -> None:
    lines = [line for line in FRAGMENT.read_text().splitlines() if line.startswith("CONFIG_")]
    assert len(lines) == len({line.partition("=")[0] for line in lines})


def test_key_keeps_the_borders_of_its_parts() -> None:
    assert key_of(["ab", "c"]) != key_of(["a", "bc"])


def test_a_product_is_made_once(cache: Path) -> None:
    def make(work: Path) -> None:
        (work / "file").write_text("made")

    def never(work: Path) -> None:
        raise AssertionError("made twice")

    first = product("thing", "k", make)
    assert (first / "file").read_text() == "made"
    assert product("thing", "k", never) == first == cache / "thing-k"


def test_a_failed_product_leaves_nothing_and_a_killed_makers_rest_is_swept(cache: Path) -> None:
    stale = cache / ".making-thing-killed"
    stale.mkdir(parents=True)

    def fail(work: Path) -> None:
        (work / "half").write_text("")
        raise LabError("no")

    with pytest.raises(LabError):
        product("thing", "k", fail)
    assert [path.name for path in cache.iterdir()] == ["thing.lock"]


def test_old_products_go_and_the_last_one_stays(cache: Path) -> None:
    for age, key in enumerate(("a", "b", "c")):
        os.utime(product("thing", key, lambda work: None), (age, age))
    assert sorted(path.name for path in cache.glob("thing-*")) == ["thing-b", "thing-c"]


def test_requirements_are_the_projects_own(tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(
        '[build-system]\nrequires = ["setuptools"]\n[project]\nname = "x"\ndependencies = ["msgspec>=1"]\n'
        '[project.optional-dependencies]\nsystemd = ["systemd-python"]\ndev = ["pytest>=8", "mypy"]\n'
    )
    assert requirements(pyproject) == (["msgspec>=1", "setuptools", "systemd-python", "wheel"], ["pytest>=8"])


def results_disk(tmp_path: Path, *names: str) -> Path:
    disk = tmp_path / "disk"
    with tarfile.open(disk, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"yes"))
    return disk


def test_results_come_out(tmp_path: Path) -> None:
    disk = results_disk(tmp_path, "./junit.xml", "./deep/er/file")
    with disk.open("ab") as file:
        file.truncate(1 << 20)  # a disk is longer than what is written on it
    assert read_disk(disk, tmp_path / "out") == ["deep/er/file", "junit.xml"]
    assert (tmp_path / "out/deep/er/file").read_text() == "yes"


@pytest.mark.parametrize("name", ["../up", "/abs", "a/../../up"])
def test_results_stay_in_their_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(LabError, match="outside"):
        read_disk(results_disk(tmp_path, name), tmp_path / "out")
    assert not (tmp_path / "up").exists()


def test_an_empty_results_disk_is_an_error(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(b"\x01" * 4096)
    with pytest.raises(LabError):
        read_disk(disk, tmp_path / "out")


FAKE_MAKE = """\
#!/bin/sh
# make -C TREE TARGET…: what the kernel's own would leave behind
case "$4$3" in
    *vmlinux*) echo image > "$2/vmlinux" ;;
    *olddefconfig*) sed -i /CONFIG_NOT_HERE/d "$2/.config" ;;
    *) echo CONFIG_Z=y > "$2/.config" ;;
esac
"""


@pytest.fixture
def kernel_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    tool = tmp_path / "bin/make"
    tool.parent.mkdir()
    tool.write_text(FAKE_MAKE)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    tree = tmp_path / "out/tree"
    tree.mkdir(parents=True)
    return tree


def test_a_built_kernel_leaves_its_image_and_configuration_alone(kernel_tree: Path) -> None:
    build(kernel_tree, "CONFIG_A=y\n", kernel_tree.parent, run_make)
    assert sorted(path.name for path in kernel_tree.parent.iterdir()) == ["config", "vmlinux"]
    assert (kernel_tree.parent / "config").read_text() == "CONFIG_Z=y\nCONFIG_A=y\n"


def test_a_kernel_that_lost_an_option_is_not_built(kernel_tree: Path) -> None:
    with pytest.raises(DsecError, match="lost CONFIG_NOT_HERE=y:"):
        build(kernel_tree, "CONFIG_A=y\nCONFIG_NOT_HERE=y\n", kernel_tree.parent, run_make)
    assert not (kernel_tree.parent / "vmlinux").exists()


class LosesVMs:
    """Runs of tests that each say this much, and then end with a status or are lost."""

    def __init__(self, *runs: tuple[list[bytes], int | None]) -> None:
        self.runs = list(runs)
        self.deselected: list[list[str]] = []

    def __call__(self, tests: list[str], seconds: float, output: Output) -> int:
        self.deselected.append([test for flag, test in itertools.pairwise(tests) if flag == "--deselect"])
        said, status = self.runs.pop(0)
        for piece in said:
            output("stdout", piece)
        if status is None:
            raise LabError("lost")
        return status


X, Y, Z = "tests/lab/test_x.py::test_x", "tests/lab/test_x.py::test_y[q-1]", "tests/lab/test_z.py::test_z"


@pytest.mark.parametrize(
    ("verdict", "again"),
    [("PASSED", [Z]), ("SKIPPED", [Z]), ("FAILED", [Y, Z]), ("PASSED [ 2%]\n" + Y + " ERROR", [Y, Z])],
    ids=["good", "left-out", "bad", "bad-end"],
)
@pytest.mark.parametrize("ended", [None, TESTS_FAILED])
def test_a_lost_vm_leaves_what_has_not_passed_to_the_next(verdict: str, again: list[str], ended: int | None) -> None:
    first = [f"{X} PASS".encode(), f"ED [ 1%]\n{Y} {verdict} [ 2%]\n{Z} ".encode()]
    vms = LosesVMs((first, ended), ([f"{one} PASSED [99%]\n".encode() for one in again], 0))
    assert nested(vms) == 0
    assert vms.deselected == [[], [one for one in (X, Y) if one not in again]]


def test_what_fails_in_every_vm_has_failed() -> None:
    vms = LosesVMs(*[([f"{X} FAILED\n".encode()], TESTS_FAILED)] * NESTED_VMS)
    assert nested(vms) == TESTS_FAILED
    assert vms.deselected == [[]] * NESTED_VMS


@pytest.mark.parametrize("status", [2, 3, 4, NOTHING_LEFT])
def test_tests_that_did_not_run_are_not_tried_again(status: int) -> None:
    """Interrupted, an error of pytest's, bad arguments, none found at all."""
    assert nested(LosesVMs(([], status))) == status


def test_a_vm_that_was_lost_behind_its_last_test_failed_none() -> None:
    assert nested(LosesVMs(([f"{X} PASSED\n".encode()], None), ([], NOTHING_LEFT))) == 0


def test_not_all_vms_may_be_lost() -> None:
    with pytest.raises(LabError, match="lost"):
        nested(LosesVMs(*[([], None)] * NESTED_VMS))
