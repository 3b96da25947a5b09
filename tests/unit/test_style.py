"""The house rules, as tests: formatting, types, arrows between rooms, sizes, words, warnings of the C compiler."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
MODULES = sorted(p for top in ("dsecd", "cli") for p in (TREE / top).rglob("*.py"))
SOURCES = sorted((TREE / "native").rglob("*.[ch]"))
MAX_LINES = 600


def tool(name: str) -> str:
    """A program of the venv."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not installed: make setup")
    return found


def passes(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"


def test_test_modules_have_names_of_their_own() -> None:
    """`make test` imports the modules of both directories by their bare names: two of one name stop the whole run."""
    names = sorted(p.name for top in ("unit", "functional") for p in (TREE / "tests" / top).glob("test_*.py"))
    assert names == sorted(set(names))


def test_ruff_check() -> None:
    passes(tool("ruff"), "check", "dsecd", "cli", "tests")


def test_ruff_format() -> None:
    passes(tool("ruff"), "format", "--check", "dsecd", "cli", "tests")


def test_mypy_strict() -> None:
    passes(tool("mypy"))


def test_arrows_between_rooms() -> None:
    """[tool.importlinter] in pyproject.toml draws them."""
    passes(tool("lint-imports"), "--no-cache")


def test_native_builds_without_warnings(tmp_path: Path) -> None:
    """Everything from scratch; the Makefile has -Werror."""
    assert "-Werror" in (TREE / "native/Makefile").read_text()
    passes("make", "-s", "-j2", "-C", TREE / "native", f"BUILD={tmp_path}")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(TREE)))
def test_module_is_short_and_says_what_it_is(path: Path) -> None:
    """At most 600 lines, and a docstring that begins with a sentence."""
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES, f"{path} has {len(text.splitlines())} lines: split it"
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring, f"{path} has no docstring"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(TREE)))
def test_c_file_is_short_and_opens_with_o_cloexec(path: Path) -> None:
    """A file one can read in one sitting; descriptors are close-on-exec from birth."""
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    opens = re.search(r"\b(open|openat|openat2|pipe2|socket|accept4|memfd_create|epoll_create1|signalfd)\s*\(", text)
    assert not opens or "CLOEXEC" in text, f"{path}: {opens[0]} without O_CLOEXEC"
    assert not re.search(r"\b(sprintf|gets|pipe|accept|epoll_create)\s*\(", text), path


def test_every_broad_except_gives_its_reason() -> None:
    """`noqa: BLE001` is followed by why."""
    for path in MODULES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "noqa: BLE001" in line:
                assert re.search(r"noqa: BLE001 - \S+", line), f"{path}:{number}"


def test_client_side_imports_nothing_of_the_daemon() -> None:
    """A trainer's process that imports the SDK loads no cffi, no psutil, no sqlite, and no room but the wire."""
    code = (
        "import sys, dsecd.client\n"
        "heavy = ('cffi', 'psutil', 'sqlite3', '_cffi_backend')\n"
        "loaded = sorted(m for m in sys.modules if m.startswith('dsecd.') or m in heavy)\n"
        "allowed = ('dsecd.client', 'dsecd.client_sync', 'dsecd.errors', 'dsecd.flow', 'dsecd.trees', 'dsecd.wire')\n"
        "print([m for m in loaded if not m.startswith(allowed)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
