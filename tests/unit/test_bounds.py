"""Limits above the sandboxes, in a tree of plain files as cgroup v2 writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsecd.cgroup.bounds import Bounds, bounds


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """<root>/dsec.slice/unit, without limits; the root's own files are nobody's limit."""
    unit = tmp_path / "dsec.slice/unit"
    unit.mkdir(parents=True)
    for one in (unit, unit.parent):
        for name, text in (("memory.max", "max"), ("memory.high", "max"), ("cpu.max", "max 100000")):
            (one / name).write_text(f"{text}\n")
    (tmp_path / "memory.max").write_text("1\n")
    return unit


def test_none_where_nobody_set_any(tmp_path: Path, group: Path) -> None:
    assert bounds(tmp_path, group) == Bounds(None, None)


def test_the_tightest_of_unit_and_slice_holds(tmp_path: Path, group: Path) -> None:
    (group / "memory.max").write_text(f"{4 << 30}\n")
    (group.parent / "memory.max").write_text(f"{3 << 30}\n")
    (group.parent / "memory.high").write_text(f"{2 << 30}\n")
    (group / "cpu.max").write_text("300000 100000\n")
    (group.parent / "cpu.max").write_text("75000 50000\n")
    assert bounds(tmp_path, group) == Bounds(2 << 30, 1.5)


def test_a_tree_without_controllers_has_none(tmp_path: Path) -> None:
    assert bounds(tmp_path, tmp_path / "dsecd") == Bounds(None, None)
