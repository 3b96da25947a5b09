"""`dsecctl` without a daemon: parsing, layout, help, schema, completion, and what failures look like."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner
from dsecctl import api, app, hints, main, output, progress, sources, table, values
from dsecctl.cp import Place, _PlaceType
from dsecctl.execs import argv_of

from dsecd.errors import KINDS, DsecError
from dsecd.wire import base
from dsecd.wire import sandbox as wire
from dsecd.wire.methods import METHODS

CLI = Path(main.__file__).parent
NOWHERE = "unix:///nonexistent/dsecd.sock"


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with the words that call it."""
    context = click.Context(main.cli)
    for name in main.cli.list_commands(context):
        found = main.cli.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield name, found
            for inner in found.list_commands(context):
                yield f"{name} {inner}", found.commands[inner]
        else:
            yield name, found


COMMANDS = dict(commands())


@pytest.fixture
def dsecctl(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command line; gives (status, stdout, stderr)."""
    monkeypatch.delenv("DSEC_URL", raising=False)

    def run(*argv: str) -> tuple[int, str, str]:
        status = main.run([*argv])
        found = capfd.readouterr()
        return status, found.out, found.err

    return run


# -- help -------------------------------------------------------------------------------------------------------------
def test_help_fits_80_columns_and_has_an_example() -> None:
    for words, one in COMMANDS.items():
        result = CliRunner().invoke(main.cli, [*words.split(), "--help"], prog_name="dsecctl", obj=app.App())
        assert result.exit_code == 0, result.output
        assert [line for line in result.output.splitlines() if len(line) > 80] == [], words
        if not isinstance(one, click.Group):
            examples = result.output.partition("\nExamples:\n")[2]
            assert re.search(rf"dsecctl (-H \S+ )?{words}\b", examples), result.output


def test_the_first_line_of_help_is_one_sentence() -> None:
    for words, one in COMMANDS.items():
        assert one.help is not None
        first = one.help.strip().split("\n\n")[0].replace("\n", " ")
        assert first.endswith("."), words
        assert ". " not in first, words
        assert len(first) <= 80, words


def test_the_list_of_commands_is_not_cut() -> None:
    for words in ([], ["image"]):
        found = CliRunner().invoke(main.cli, [*words, "--help"], prog_name="dsecctl", obj=app.App()).output
        assert "..." not in found.partition("Commands:")[2]


def test_no_arguments_show_help_as_an_error(dsecctl: Any) -> None:
    status, out, err = dsecctl()
    assert (status, out) == (2, "")
    assert err.startswith("Usage: dsecctl")


def test_only_one_module_prints() -> None:
    for path in CLI.glob("*.py"):
        called = {
            ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        }
        if path.name != "output.py":
            assert not called & {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"}, path


# -- what may be typed ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "mib"), [("512m", 512), ("2g", 2048), ("1.5G", 1536), ("64", 64), ("2GiB", 2048), ("1t", 1 << 20)]
)
def test_sizes(text: str, mib: int) -> None:
    assert values.SIZE.convert(text, None, None) == mib


@pytest.mark.parametrize("text", ["", "x", "-1", "1k", "0", "1gg", "m", "1e9", "nan"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(click.BadParameter):
        values.SIZE.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("30s", 30), ("5m", 300), ("1.5h", 5400), ("2d", 172800), ("250ms", 0.25)]
)
def test_times(text: str, seconds: float) -> None:
    assert values.DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1w", "inf"])
def test_bad_times(text: str) -> None:
    with pytest.raises(click.BadParameter):
        values.DURATION.convert(text, None, None)


def test_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "value")
    monkeypatch.delenv("NOT_OURS", raising=False)
    assert values.PAIR.convert("a=b=c", None, None) == ("a", "b=c")
    assert values.ENV.convert("OURS", None, None) == ("OURS", "value")
    assert values.ENV.convert("EMPTY=", None, None) == ("EMPTY", "")
    for kind, text in ((values.PAIR, "a"), (values.PAIR, "=b"), (values.ENV, "NOT_OURS")):
        with pytest.raises(click.BadParameter):
            kind.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("box:/etc", Place("box", "/etc")),
        ("box:etc", Place("box", "/etc")),
        ("box:", Place("box", "/")),
        ("h-01ABC:/a:b", Place("h-01ABC", "/a:b")),
        ("./a:b", Place(None, "./a:b")),
        ("/a:b", Place(None, "/a:b")),
        ("a/b:c", Place(None, "a/b:c")),
        ("file", Place(None, "file")),
        ("-", Place(None, "-")),
    ],
)
def test_places(text: str, place: Place) -> None:
    assert _PlaceType().convert(text, None, None) == place


def test_contents_of_a_directory() -> None:
    assert [Place(None, text).contents for text in ("a/.", ".", "/", "a", "a/", "a/..")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_a_double_dash_before_the_command_is_optional() -> None:
    assert argv_of(("--", "a", "--", "b")) == ["a", "--", "b"]
    assert argv_of(("a", "--", "b")) == ["a", "--", "b"]
    assert argv_of(()) == argv_of(("--",)) == []


# -- tables and values ------------------------------------------------------------------------------------------------
def test_a_table_fits_80_columns_with_the_longest_ids() -> None:
    ident = "a" * 16 + "-" + "0" * 26
    rows = [(ident, "resuming", "23h59m", "23h59m", "23h59m", "registry/" * 10 + "x:1", "n" * 128)]
    head = ("ID", "STATE", "AGE", "IDLE", "LEFT", "IMAGE", "NAME")
    found = table.layout(head, rows, (5, 6), 80)
    assert all(len(line) <= 80 for line in found), found
    assert ident in found[1]
    assert table.layout(head, rows, (5, 6), 0)[1].endswith("n" * 128)


def test_a_table_lines_up_wide_characters_and_shows_no_control_characters() -> None:
    found = table.layout(("A", "B"), [("日本", "x"), ("a\x1b[31m\nb", "y")], (), 80)
    assert found == ["A         B", "日本      x", "a·[31m b  y"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0, "0s"), (99, "99s"), (100, "1m"), (3599, "59m"), (3600, "1h"), (11520, "3h12m"), (187200, "2d4h")],
)
def test_spans(seconds: float, text: str) -> None:
    assert table.span(seconds) == text


def test_sizes_for_people() -> None:
    assert [table.size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]


def test_progress_says_phase_amount_rate_and_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    line = progress.ProgressLine(quiet=True, total=200)
    line._sent = 100
    line._phase_began = 10.0
    line.update(base.Progress(1, "send", 1 << 20, 4 << 20))
    line._now = base.Progress(1, "unpack", 1 << 20, 4 << 20)
    assert line.text(12.0) == "unpack: 1.0 MiB of 4.0 MiB (25%), 512.0 KiB/s, 50% sent"


def test_json_has_all_fields_and_bytes_as_base64() -> None:
    found = output.plain(wire.Stats(id="x"))
    assert found["pids"] == 0
    assert set(found) == set(wire.Stats.__struct_fields__)
    assert output.plain({"a": [b"\xff"]}) == {"a": ["/w=="]}


# -- failures ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "status"), [(("ps",), 1), (("run", "x", "true"), 125), (("exec", "x", "true"), 125), (("shell", "x"), 125)]
)
def test_no_daemon(dsecctl: Any, argv: tuple[str, ...], status: int) -> None:
    found, out, err = dsecctl("-H", NOWHERE, *argv)
    assert (found, out) == (status, "")
    first, second = err.splitlines()
    assert first.startswith("dsecctl: no daemon at /nonexistent/dsecd.sock")
    assert first.endswith("[network]")
    assert "systemctl start dsecd" in second


def test_global_options_stand_before_or_behind_the_command(dsecctl: Any) -> None:
    for argv in (
        ("-H", NOWHERE, "--json", "ps"),
        ("ps", "--json", "-H", NOWHERE),
        ("--json", "ps", f"--host={NOWHERE}"),
    ):
        status, out, _err = dsecctl(*argv)
        assert status == 1
        assert json.loads(out)["error"]["kind"] == "network"


def test_the_daemon_is_named_by_the_environment(dsecctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_URL", "unix:///from/the/environment")
    assert "/from/the/environment" in dsecctl("ps")[2]


def test_doctor_without_a_daemon_is_a_failed_check(dsecctl: Any) -> None:
    status, out, _err = dsecctl("-H", NOWHERE, "doctor", "--json")
    (check,) = json.loads(out)
    assert (status, check["name"], check["level"]) == (1, "daemon", "fail")
    assert check["fix"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("frob",), "No such command"),
        (("ps", "--frob"), "No such option"),
        (("run",), "Missing argument"),
        (("run", "x"), "give a command"),
        (("run", "-d", "-t", "x"), "excludes"),
        (("run", "-d", "--rm", "x"), "excludes"),
        (("run", "--memory", "lots", "x", "true"), "not a size"),
        (("run", "--ttl", "0", "x", "true"), "not a time"),
        (("exec", "x", "--"), "missing"),
        (("cp", "a", "b"), "SANDBOX:PATH"),
        (("cp", "x:/a", "y:/b"), "SANDBOX:PATH"),
        (("cp", "--chown", "root", "a", "x:/b"), "UID"),
        (("stop",), "name sandboxes"),
        (("stop", "--all-mine", "x"), "name sandboxes"),
        (("extend", "x"), "--ttl"),
        (("vm", "vnc", "--listen", "5901", "x"), "no address"),
        (("vm", "vnc", "--listen", "0.0.0.0:5901", "x"), "password"),
        (("vm", "vnc", "--listen", "[::1]:70000", "x"), "no port"),
        (("api", "no.method"), "no method"),
        (("completion", "tcsh"), "tcsh"),
        (("-H", "http://x", "ps"), "neither"),
    ],
)
def test_wrong_usage_is_one_line_and_what_to_do(dsecctl: Any, argv: tuple[str, ...], words: str) -> None:
    status, out, err = dsecctl(*argv)
    assert words in err
    assert out == ""
    assert "Traceback" not in err
    assert "[invalid]" in err.splitlines()[0]
    if argv[0] != "-H":
        assert status == 2
        assert re.search(r"try: dsecctl( \w+)* --help", err)


def test_wrong_usage_as_json(dsecctl: Any) -> None:
    status, out, err = dsecctl("--json", "stop")
    assert status == 2
    assert json.loads(out)["error"]["hint"] == "try: dsecctl stop --help"
    assert err


@pytest.mark.parametrize(
    ("raised", "status", "words"),
    [
        (DsecError("capacity", "no room"), 1, "no room [capacity]"),
        (FileNotFoundError(2, "No such file or directory", "/x"), 1, "/x: No such file or directory [not_found]"),
        (RuntimeError("oops"), 1, "a bug in dsecctl: RuntimeError: oops [internal]"),
        (KeyboardInterrupt(), 130, ""),
        (DsecError("internal", "a\x1b]0;evil\x07\nb"), 1, "a·]0;evil· b [internal]"),
    ],
)
def test_a_failure_is_never_a_traceback(
    dsecctl: Any, monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: int, words: str
) -> None:
    def fail(*_args: object) -> None:
        raise raised

    monkeypatch.setattr(api, "schema", fail)
    found, out, err = dsecctl("api")
    assert (found, out) == (status, "")
    assert words in err
    assert "Traceback" not in err


def test_a_closed_pipe_is_no_error(dsecctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(api, "schema", fail)
    monkeypatch.setattr(output, "close_stdout", lambda: None)
    assert dsecctl("api") == (141, "", "")


@pytest.mark.parametrize("kind", KINDS)
def test_hints_are_one_line_that_fits(kind: Any) -> None:
    for message in ("x", "no daemon at /x", "/x: permission denied", "image sha256:ab: its data is altered"):
        found = hints.hint_for(DsecError(kind, message))
        assert "\n" not in found
        assert len(found) <= 70


# -- finding a sandbox ------------------------------------------------------------------------------------------------
class _Client:
    """As much of the SDK as `find` needs."""

    def __init__(self, *idents: str) -> None:
        self.idents = idents

    async def get(self, ident: str) -> Any:
        if ident in self.idents:
            return _Box(ident)
        raise DsecError("not_found", f"no sandbox {ident!r}")

    async def list(self) -> list[Any]:
        return [_Box(ident) for ident in self.idents]


class _Box(msgspec.Struct):
    id: str


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h-01ABCDEF", "h-01ABCDEF"),
        ("01ABCDEF", "h-01ABCDEF"),
        ("h-01ABC", "h-01ABCDEF"),
        ("01ABXX", "h-01ABXXXX"),
        ("01AB", None),
        ("h-01AB", None),
        ("nothere", None),
    ],
)
def test_a_sandbox_by_the_beginning_of_its_id(text: str, found: str | None) -> None:
    client: Any = _Client("h-01ABCDEF", "h-01ABXXXX")
    if found is None:
        with pytest.raises(DsecError) as caught:
            asyncio.run(app.find(client, text))
        assert caught.value.kind == "not_found"
    else:
        assert asyncio.run(app.find(client, text)).id == found


# -- sources of images ------------------------------------------------------------------------------------------------
def _tar(path: Path, names: list[str], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    return path


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (["./", "./bin", "./oci-layout"], "tar"),
        (["bin/sh"], "tar"),
        (["blobs/sha256/x", "oci-layout", "index.json"], "oci"),
        (["./", "./blobs", "./index.json", "./oci-layout"], "oci"),
        (["a" * 64 + ".json", "b" * 64 + "/layer.tar", "manifest.json"], "docker"),
        (["blobs"], "tar"),
        ([], "tar"),
    ],
)
@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_what_a_tar_is(tmp_path: Path, names: list[str], form: str, mode: str) -> None:
    assert sources.detect(_tar(tmp_path / "t", names, mode)) == form


def test_what_is_no_tar_is_left_to_the_importer(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    assert sources.detect(tmp_path / "x") == "tar"


def test_sources(tmp_path: Path) -> None:
    (tmp_path / "oci-layout").touch()
    assert sources.open_source(str(tmp_path), "auto").format == "oci"
    assert sources.open_source(str(tmp_path), "tar").format == "tar"
    found = sources.open_source("docker://debian:12", "auto")
    assert (found.format, found.reference, found.stream) == ("registry", "docker://debian:12", None)
    with pytest.raises(FileNotFoundError):
        sources.open_source(str(tmp_path / "nothing"), "auto")


# -- schema and completion --------------------------------------------------------------------------------------------
def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from _refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _refs(item)


def test_the_schema_has_every_method_and_all_it_refers_to(dsecctl: Any) -> None:
    status, out, _err = dsecctl("api")
    found = json.loads(out)
    assert status == 0
    assert set(found["methods"]) == set(METHODS)
    assert {ref.removeprefix("#/$defs/") for ref in _refs(found)} <= set(found["$defs"])
    assert found["kinds"] == list(KINDS)


def test_the_schema_of_one_method_is_whole_and_says_the_same() -> None:
    for name, method in METHODS.items():
        one = api.schema_of(name)
        assert {ref.removeprefix("#/$defs/") for ref in _refs(one)} <= set(one["$defs"]), name
        params = one["$defs"][one["params"]["$ref"].removeprefix("#/$defs/")]
        assert set(params["properties"]) == set(method.params.__struct_fields__)
        assert params["additionalProperties"] is False


def test_every_notification_of_a_method_is_in_the_schema() -> None:
    assert {one.events for one in METHODS.values() if one.events} <= set(api.NOTIFICATIONS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(dsecctl: Any, shell: str) -> None:
    status, out, err = dsecctl("completion", shell)
    assert (status, err) == (0, "")
    assert f"_DSECCTL_COMPLETE={shell}_complete" in out


def _complete(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str) -> list[str]:
    monkeypatch.setenv("_DSECCTL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - (words[-1] != "")))
    monkeypatch.setenv("DSEC_URL", NOWHERE)
    with pytest.raises(SystemExit):
        main.run([])
    return [line.partition(",")[2] for line in capfd.readouterr().out.splitlines() if line]


def test_completion_of_commands_and_methods(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert {"ps", "pack", "pause", "project", "principal"} == set(_complete(monkeypatch, capfd, "dsecctl", "p")) - {"p"}
    assert "import" in _complete(monkeypatch, capfd, "dsecctl", "image", "im")


def test_completion_without_a_daemon_is_empty_and_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _complete(monkeypatch, capfd, "dsecctl", "exec", "b") == []
