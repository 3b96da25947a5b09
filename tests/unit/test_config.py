"""The configuration file: every key documented, every fault named with its line and what would be right."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from dsecd.config import Config, documented, load
from dsecd.envconfig import EnvConfig
from dsecd.errors import DsecError
from dsecd.fncallconfig import FnCallConfig
from dsecd.networkconfig import NetworkConfig


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
    # Commented out: a key that is written below them is none of theirs.
    tables = {"stores", "devices", "fncall", "environments", "network", "metrics"}
    assert set(tomllib.loads(text)) == set(Config.__struct_fields__) - tables
    path = tmp_path / "all.toml"
    path.write_text(text)
    assert load(path) == Config()
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line and not line.startswith("#"):
            assert lines[number - 1].startswith("# "), line


def test_the_table_of_calls_is_the_defaults_when_it_is_uncommented(tmp_path: Path) -> None:
    _, _, text = documented().partition("# [fncall]\n")
    text = text.partition("# Metrics and traces.")[0]
    lines = [line.removeprefix("# ") for line in text.splitlines() if re.match(r"# \w+ = ", line)]
    path = tmp_path / "calls.toml"
    path.write_text("[fncall]\n" + "\n".join(lines))
    assert len(lines) == len(FnCallConfig.__struct_fields__) - 1  # `languages` has tables of its own
    assert load(path) == Config()


def test_the_table_of_environments_is_the_defaults_when_it_is_uncommented(tmp_path: Path) -> None:
    _, _, text = documented().partition("# [environments]\n")
    text = text.partition("# Calls (FnCall).")[0]
    values = [line.removeprefix("# ") for line in text.splitlines() if not re.match(r"#( [A-Z`].*[.:,a-z]|)$", line)]
    path = tmp_path / "environments.toml"
    path.write_text("[environments]\n" + "\n".join(values))
    assert tomllib.loads(path.read_text())["environments"].keys() == set(EnvConfig.__struct_fields__)
    assert load(path) == Config()


def test_the_table_of_networks_is_the_defaults_when_it_is_uncommented(tmp_path: Path) -> None:
    """And the example of a service is one."""
    text = documented().partition("# [network]\n")[2].partition("# Pools of devices")[0]
    lines = [line.removeprefix("# ") for line in text.splitlines() if re.match(r"# (\w+ = |\[)", line)]
    path = tmp_path / "network.toml"
    path.write_text("[network]\n" + "\n".join(lines))
    found = load(path).network
    assert set(found.services) == {"pypi"}
    assert msgspec.structs.replace(found, services={}) == NetworkConfig()
    path.write_text('[network]\nsubnet4 = "10.0.0.0/8"\n')
    with pytest.raises(DsecError, match=r"network\.toml:2: network\.subnet4 = '10\.0\.0\.0/8'"):
        load(path)


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
        ('registry_authfile = "auth.json"', [":1:", "registry_authfile", "auth.json"]),
        ("id_first_slot = 20\nid_last_slot = 10", [":1:", "id_first_slot", "id_last_slot"]),
        ("max_sandboxes = 1\nmax_sandboxes = 2", ["overwrite", "line 2"]),
        ("max_sandboxes = ", ["line 1"]),
        ("[section]\nmax_sandboxes = 1", ["section"]),
        ("fncall = 3", [":1:", "fncall is a table"]),
        ("[fncall]\nimage = ''\nat_once = -1", [":3:", "fncall.at_once = -1", ">= 0"]),
        ("[fncall]\nat_onc = 1", ["at_onc"]),
        ("[fncall.languages.x]\nfile = 'a/b'\nrun = ['x']", [":2:", "fncall.languages", "file", "regex"]),
        ("[fncall.languages.x]\nfile = 'a'", ["fncall.languages", "run"]),
        ("[environments]\nmax_mb = 0", [":2:", "environments.max_mb = 0", ">= 1"]),
        ("[environments]\nforbidden = ['relative']", ["environments.forbidden", "regex"]),
        ("[environments.secrets]\nbad = '('", [":2:", "environments.secrets.bad", "regular expression"]),
    ],
)
def test_fault_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    """One sentence with file, line, key, and the accepted range or the nearest key."""
    message = refused(tmp_path, text)
    for word in words:
        assert word in message, message
    assert "\n" not in message


def test_the_daemons_logins_are_for_registries_without_their_own(tmp_path: Path) -> None:
    text = 'registry_authfile = "/etc/a.json"\n'
    for name, more in (("a", ""), ("b", 'authfile = "/etc/b.json"\n')):
        text += f'[stores.{name}]\nkind = "registry"\nurl = "h/{name}"\n{more}'
    text += '[stores.c]\nkind = "path"\npath = "/c"\n'
    (tmp_path / "dsecd.toml").write_text(text)
    config = load(tmp_path / "dsecd.toml")
    assert {name: store.authfile for name, store in config.stores.items()} == {
        "a": "/etc/a.json", "b": "/etc/b.json", "c": "",
    }  # fmt: skip


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


@pytest.mark.parametrize(
    ("listen", "what"),
    [("0.0.0.0:9464", "not a loopback address"), ("[::]:1", "not a loopback"), ("9464", "no address and port")],
)
def test_metrics_only_on_loopback(tmp_path: Path, listen: str, what: str) -> None:
    path = tmp_path / "m.toml"
    path.write_text(f'[metrics]\nlisten = "{listen}"\n')
    with pytest.raises(DsecError, match=rf"m\.toml:2: .*{what}"):
        load(path)
    path.write_text('[metrics]\nlisten = "127.0.0.1:9464"\n')
    assert load(path).metrics.listen
