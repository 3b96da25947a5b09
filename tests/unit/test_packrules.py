"""Globs and rules of packs, and what an environment's digest covers. No I/O."""

from __future__ import annotations

import time

import pytest

from dsecd.envconfig import EnvConfig
from dsecd.erofs.model import Builder, ImageConfig, identity
from dsecd.erofs.packrules import Checker, compile_globs, shown
from dsecd.errors import DsecError


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("/tmp/**", ["tmp/a", "tmp/a/b"], ["tmp", "tmpx/a", "a/tmp/b"]),
        ("/root/.cache", ["root/.cache", "root/.cache/x/y"], ["root/.cachex", "home/root/.cache"]),
        (
            "/home/*/.ssh/id_*",
            ["home/me/.ssh/id_rsa", "home/me/.ssh/id_d/x"],
            ["home/a/b/.ssh/id_rsa", "home/.ssh/id_x"],
        ),
        ("/**/answer.?", ["answer.c", "a/answer.c", "a/b/answer.c/d"], ["answer.cc", "a/answer."]),
        ("/a/**/z", ["a/z", "a/b/z", "a/b/c/z"], ["z", "az", "a/zz"]),
        ("/x.y", ["x.y"], ["xzy"]),
        ("/new*line", ["new\nline"], []),
    ],
)
def test_globs(glob: str, yes: list[str], no: list[str]) -> None:
    pattern = compile_globs([glob])
    assert pattern is not None
    assert [path for path in yes if not pattern.match(path.encode())] == []
    assert [path for path in no if pattern.match(path.encode())] == []


@pytest.mark.parametrize("glob", ["relative", "/", "//", "/a/../b", "/**/**/**"])
def test_bad_globs(glob: str) -> None:
    with pytest.raises(DsecError) as caught:
        compile_globs([glob])
    assert caught.value.kind == "invalid"


def test_a_hostile_path_costs_little() -> None:
    pattern = compile_globs(["/**/a*a*/**/b", *(f"/x{n}/**" for n in range(250))])
    assert pattern is not None
    began = time.monotonic()
    for path in (b"a" * 255 + b"/", b"a/" * 2000, b"/".join([b"a" * 200] * 20)):
        pattern.match(path + b"c")
    assert time.monotonic() - began < 2


def test_rules_are_named_and_paths_escaped() -> None:
    checker = Checker(EnvConfig(max_mb=1, max_files=3, forbidden=("/secret/**",), secrets={"token": "tok_[0-9]{4}"}))
    checker.name(b"a")
    checker.content(b"a", b"tok_12 tok_abcd")
    checker.content(b"binary", b"\0 tok_1234")
    with pytest.raises(DsecError) as caught:
        checker.content(b"we\nird\xff", b"x tok_1234")
    error = caught.value
    assert (error.kind, error.detail) == ("denied", {"rule": "secrets.token", "path": "/we\\nird\\xff"})
    with pytest.raises(DsecError, match="forbidden by '/secret/") as caught:
        checker.name(b"secret/x")
    with pytest.raises(DsecError, match="more than 3 files"):
        checker.name(b"b")
        checker.name(b"c")
    checker.size(b"a", 1 << 19, 1 << 19)
    with pytest.raises(DsecError, match="more than 1 MiB"):
        checker.size(b"sparse", 0, 1 << 40)
    assert len(shown(b"x" * 5000)) < 210


def test_the_digest_covers_builder_and_layers() -> None:
    def of(below: tuple[str, ...], builder: Builder | None) -> str:
        return identity("environment", ImageConfig(), "m", "d", below, builder)

    assert len({of(("x",), Builder(1)), of(("x",), Builder(2)), of(("y",), Builder(1)), of(("x",), None)}) == 4
