"""[stores.NAME]: what is accepted, and what is said, with the line, of what is not."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from dsecd.config import Config, StoreConfig, documented, load
from dsecd.errors import DsecError

GOOD = """
log_level = "info"
[stores.nfs]
kind = "path"
path = "/mnt/images"
direct = true
[stores.s3]
kind = "http"
url = "https://objects.example/images"
redirects = ["other.example"]
[stores.reg]
kind = "registry"
url = "registry.example:5000/team/images"
authfile = "/etc/dsecd/auth.json"
"""


def test_good(tmp_path: Path) -> None:
    (tmp_path / "c").write_text(GOOD)
    stores = load(tmp_path / "c").stores
    assert stores["nfs"] == StoreConfig(kind="path", path="/mnt/images", direct=True)
    assert stores["s3"].redirects == ("other.example",) and stores["reg"].kind == "registry"


@pytest.mark.parametrize(("text", "line", "words"), [
    ("stores = 3", 1, "[stores.NAME]"),
    ("[stores]\nnfs = 3", 1, "stores.nfs is a table"),
    ("\n[stores.Up]\nkind = 'path'", 2, "'Up' is no name for a store: [a-z0-9]"),
    ("\n[stores.local]\nkind = 'path'", 2, "not `local`"),
    ("[stores.a]\npath = '/x'", 1, "store a: kind is missing; it is one of path, http, registry"),
    ("[stores.a]\npath = '/x'\nkind = 'nfs'", 3, "store a: kind = 'nfs' is one of path, http, registry"),
    ("[stores.a]\nkind = 'path'\npahts = '/x'", 3, "store a: unknown key 'pahts'; did you mean path?"),
    ("[stores.a]\nkind = 'path'", 1, "path is missing; it is an absolute path"),
    ("[stores.a]\nkind = 'path'\npath = 'x'", 3, "path = 'x' is not an absolute path"),
    ("[stores.a]\nkind = 'path'\npath = 7", 3, "path = 7: Expected `str`, got `int`"),
    ("[stores.b]\nkind='path'\npath='/b'\n[stores.a]\nkind='http'\nurl='ftp://x/y'", 6, "is not http(s)://host/prefix"),
    ("[stores.a]\nkind = 'registry'\nurl = 'https://r/x'", 3, "is not host[:port]/repository"),
    ("[stores.a]\nkind = 'registry'\nurl = 'r.example/x'\npath = '/x'", 4, "path is not for kind registry"),
    ("[stores.a]\nkind = 'http'\nurl = 'http://r/x'\ndirect = true", 4, "direct is for kind path only"),
    ("[stores.a]\nkind = 'path'\npath = '/x'\ndirect = true\nsqueezed = true", 5, "squeezed is for"),
    ("[stores.a]\nkind = 'registry'\nurl = 'r.example/x'\nsqueezed = true", 4, "squeezed is for kinds path and http"),
    ("[stores.a]\nkind = 'http'\nurl = 'http://r/x'\nredirects = 'h'", 4, "redirects = 'h': Expected `array`"),
])  # fmt: skip
def test_bad(tmp_path: Path, text: str, line: int, words: str) -> None:
    (tmp_path / "c").write_text(text)
    with pytest.raises(DsecError) as caught:
        load(tmp_path / "c")
    assert caught.value.kind == "invalid"
    assert caught.value.message.startswith(f"{tmp_path / 'c'}:{line}: ")
    assert words in caught.value.message


def test_documented(tmp_path: Path) -> None:
    """What is printed loads as it is, and the example does when it is uncommented."""
    text = documented()
    tables = {"stores", "devices", "fncall", "environments", "network", "metrics"}
    assert tomllib.loads(text).keys() == set(Config.__struct_fields__) - tables
    plain, _, example = text.partition("# [stores.NAME]\n")
    lines = [line.removeprefix("# ") for line in example.splitlines() if not line.startswith("#   ")]
    (tmp_path / "c").write_text(plain + "[stores.example]\n" + "\n".join(lines))
    assert load(tmp_path / "c").stores["example"].kind == "path"
