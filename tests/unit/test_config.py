"""The configuration file: every key documented, every fault named with its line and what would be right."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dsecd.config import Config, documented, load
from dsecd.errors import DsecError


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "dsecd.toml"
    path.write_text(text)
    with pytest.raises(DsecError) as caught:
        load(path)
    assert caught.value.kind == "invalid"
    assert str(path) in caught.value.message
    return caught.value.message


def test_documented_defaults_are_the_defaults(tmp_path: Path) -> None:
    """--print-config is a valid file that changes nothing, with a comment above every key."""
    text = documented()
    assert set(tomllib.loads(text)) == set(Config.__struct_fields__) - {"stores"}  # tables: an example, commented out
    path = tmp_path / "all.toml"
    path.write_text(text)
    assert load(path) == Config()
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line and not line.startswith("#"):
            assert lines[number - 1].startswith("# "), line


def test_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    assert load(tmp_path / "empty") == Config()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('\nstate_dri = "/x"', [":2:", "state_dri", "did you mean state_dir"]),
        ("zzzzzz = 1", [":1:", "zzzzzz"]),
        ("# a\nmax_sandboxes = 0", [":2:", "max_sandboxes", "0", ">= 1"]),
        ("max_sandboxes = 100000", ["max_sandboxes", "<= 4094"]),
        ("max_sandboxes = -5", ["max_sandboxes", ">= 1"]),
        ("max_sandboxes = 2.5", ["max_sandboxes", "int"]),
        ('max_sandboxes = "ten"', ["max_sandboxes", "int"]),
        ("cpu_overcommit = nan", ["cpu_overcommit"]),
        ("cpu_overcommit = inf", ["cpu_overcommit"]),
        ("cpu_overcommit = 0", ["cpu_overcommit", "> 0"]),
        ("memory_overcommit = -1.0", ["memory_overcommit", "> 0"]),
        ('log_level = "loud"', ["log_level", "loud"]),
        ('disk_driver = "zfs"', ["disk_driver", "zfs"]),
        ('host_tag = "Über Host"', ["host_tag"]),
        ("socket = 5", ["socket", "str"]),
        ("insecure_registries = [1]", ["insecure_registries", "str"]),
        ("id_first_slot = 20\nid_last_slot = 10", [":1:", "id_first_slot", "id_last_slot"]),
        ("max_sandboxes = 1\nmax_sandboxes = 2", ["overwrite", "line 2"]),
        ("max_sandboxes = ", ["line 1"]),
        ("[section]\nmax_sandboxes = 1", ["section"]),
    ],
)
def test_fault_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    """One sentence with file, line, key, and the accepted range or the nearest key."""
    message = refused(tmp_path, text)
    for word in words:
        assert word in message, message
    assert "\n" not in message


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, word in ((tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(DsecError, match=word) as caught:
            load(path)
        assert caught.value.kind == "invalid"
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DsecError, match="not UTF-8 at byte 0") as caught:
        load(tmp_path / "bytes")
    assert caught.value.kind == "invalid"


def test_tag_is_always_a_valid_part_of_an_id() -> None:
    from dsecd.sandbox.ids import ID, TAG, new_id

    assert TAG.fullmatch(Config().tag)
    assert Config(host_tag="a1").tag == "a1"
    ident = new_id("a1")
    assert ID.fullmatch(ident)
    assert len({new_id("a") for _ in range(10_000)}) == 10_000


def test_command_line(tmp_path: Path) -> None:
    """--check-config exits 1 with one line for a bad file and 0 silently for a good one; --print-config prints it."""

    def dsecd(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "dsecd.main", *args], capture_output=True, text=True, check=False)

    (tmp_path / "bad.toml").write_text("\nmax_sandbox = 3\n")
    bad = dsecd("--check-config", "-c", str(tmp_path / "bad.toml"))
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr == f"dsecd: {tmp_path}/bad.toml:2: unknown key 'max_sandbox'; did you mean max_sandboxes?\n"
    printed = dsecd("--print-config")
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, documented(), "")
    (tmp_path / "good.toml").write_text(printed.stdout)
    good = dsecd("--check-config", "-c", str(tmp_path / "good.toml"))
    assert (good.returncode, good.stdout, good.stderr) == (0, "", "")
