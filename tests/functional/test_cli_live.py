"""The real `dsecctl` against a real daemon: exit statuses, bytes, signals, terminals, copies, images."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from daemonkit import BASE, Daemon
from terminalkit import DSECCTL, Terminal, environment

from dsecd.client_sync import SyncSandbox

VECTOR = Path(__file__).parents[1] / "data" / "oci-tricky"
SMALL = ("--memory", "256m", "--disk", "512m")


class Run(Protocol):
    """Run `dsecctl` to its end. json: parse its stdout."""

    def __call__(self, *argv: str | bytes, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]: ...


@pytest.fixture
def dsecctl(daemon: Daemon, tmp_path: Path) -> Run:
    def run(*argv: str | bytes, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            [DSECCTL, *argv], input=stdin, capture_output=True, timeout=120, env=environment(daemon), cwd=tmp_path,
            check=False,
        )  # fmt: skip
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        return done

    return run


@contextlib.contextmanager
def started(daemon: Daemon, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """One that goes on beside the test."""
    pipe = subprocess.PIPE
    with subprocess.Popen([DSECCTL, *argv], stdin=pipe, stdout=pipe, stderr=pipe, env=environment(daemon)) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], object], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def runs(sandbox: SyncSandbox, marker: str) -> bool:
    """Whether a process with `marker` in its command line runs inside."""
    return sandbox.exec(["pgrep", "-f", f"[{marker[0]}]{marker[1:]}"]).exit_code == 0


# -- run --------------------------------------------------------------------------------------------------------------
def test_run_streams_and_takes_the_sandbox_away(dsecctl: Run, daemon: Daemon) -> None:
    before = daemon.sandboxes()
    done = dsecctl("run", *SMALL, BASE, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    assert daemon.sandboxes() == before


def test_run_passes_limits_and_environment(dsecctl: Run) -> None:
    script = "echo $A$B; pwd; id -un; hostname; cat /proc/self/limits >/dev/null"
    done = dsecctl(
        "run", *SMALL, "-e", "A=1", "-e", "B=2", "-w", "/usr", "-u", "nobody", "--hostname", "here", BASE,
        "sh", "-c", script,
    )  # fmt: skip
    assert done.stdout.split() == [b"12", b"/usr", b"nobody", b"here"], done


def test_run_as_json(dsecctl: Run) -> None:
    done = dsecctl("--json", "run", *SMALL, BASE, "printf", r"a\377")
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit_code"], found["stdout_base64"]) == (0, 0, "Yf8=")


def test_exit_statuses(dsecctl: Run) -> None:
    for argv, status, kind in (
        (("run", *SMALL, "no/such:image", "true"), 125, "[not_found]"),
        (("run", *SMALL, BASE, "nosuchprogram"), 127, "[not_found]"),
        (("run", *SMALL, BASE, "/etc/passwd"), 126, "[denied]"),
        (("run", *SMALL, "--timeout", "0.3", BASE, "sleep", "60"), 124, "[timeout]"),
        (("run", *SMALL, BASE, "sh", "-c", "kill -9 $$"), 137, ""),
        (("run", "--memory", "99999g", BASE, "true"), 125, "["),
        (("exec", "nobody-there", "true"), 125, "[not_found]"),
        (("inspect", "nobody-there"), 1, "[not_found]"),
    ):
        done = dsecctl(*argv)
        assert done.returncode == status, (argv, done)
        assert kind in done.stderr.decode(), (argv, done)


def test_detached_by_name_with_labels_until_stopped(dsecctl: Run, daemon: Daemon) -> None:
    argv = ("run", "-d", *SMALL, "--name", "cli-box", "-l", "job=cli", "--ttl", "1h", BASE, "sh", "-c", "echo hello")
    ident = dsecctl(*argv).stdout.decode().strip()
    try:
        assert dsecctl(*argv).stdout.decode().strip() == ident
        assert dsecctl("run", *SMALL, "--name", "cli-box", BASE, "true").returncode == 125
        assert dsecctl("ps", "-q", "-l", "job=cli").stdout.decode().split() == [ident]
        assert dsecctl("ps", "-q", "-l", "job=other").stdout == b""
        lines = dsecctl("ps").stdout.decode().splitlines()
        assert all(len(line) <= 80 for line in lines)
        assert any(ident in line and "cli-box" in line for line in lines)
        assert json.loads(dsecctl("inspect", "--json", "cli-box").stdout)["labels"] == {"job": "cli"}
        assert dsecctl("exec", ident[:-3], "echo", "by prefix").stdout == b"by prefix\n"
        assert b"59m" in dsecctl("extend", "--idle", "1h", "cli-box").stdout
        found = json.loads(dsecctl("logs", "--json", "cli-box").stdout)
        assert found[0]["command"] == "sh -c echo hello"
        until(lambda: dsecctl("logs", "cli-box", found[0]["exec_id"]).stdout == b"hello\n")
        assert json.loads(dsecctl("stats", "--json", "cli-box").stdout)[0]["pids"] > 0
        assert dsecctl("pause", "cli-box").returncode == 0
        assert json.loads(dsecctl("inspect", "--json", "cli-box").stdout)["state"] == "paused"
        assert dsecctl("resume", "cli-box").returncode == 0
    finally:
        done = dsecctl("stop", "-l", "job=cli")
    assert done.stdout.decode().split() == [ident]
    assert daemon.sandboxes().get(ident) is None
    assert ident in dsecctl("ps", "-a").stdout.decode()


def test_stop_goes_on_behind_one_that_fails(dsecctl: Run) -> None:
    ident = dsecctl("run", "-d", *SMALL, BASE).stdout.decode().strip()
    done = dsecctl("stop", "nobody-there", ident)
    assert (done.returncode, done.stdout.decode().split()) == (1, [ident])
    assert b"nobody-there" in done.stderr


def test_a_killed_dsecctl_leaves_no_sandbox(daemon: Daemon) -> None:
    """Attached runs hold a lease that only a living dsecctl renews."""
    before = daemon.sandboxes()
    with started(daemon, "run", *SMALL, "--lease", "1s", BASE, "sh", "-c", "echo up; sleep 600") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        time.sleep(2.5)
        assert len(daemon.sandboxes()) == len(before) + 1
        process.kill()
    until(lambda: daemon.sandboxes() == before)


# -- exec -------------------------------------------------------------------------------------------------------------
def test_bytes_go_through_unchanged(dsecctl: Run, sandbox: SyncSandbox) -> None:
    data = os.urandom(3_000_000)
    done = dsecctl("exec", "-i", sandbox.id, "cat", stdin=data)
    assert done.returncode == 0, done.stderr
    assert done.stdout == data


def test_large_output_is_whole(dsecctl: Run, sandbox: SyncSandbox) -> None:
    sandbox.exec(["sh", "-c", "head -c 40000000 /dev/urandom > /tmp/big"])
    done = dsecctl("exec", sandbox.id, "cat", "/tmp/big")
    inside = sandbox.exec(["sha256sum", "/tmp/big"]).stdout.split()[0]
    assert hashlib.sha256(done.stdout).hexdigest() == inside, done.stderr


def test_output_is_whole_however_fast_it_comes(daemon: Daemon, sandbox: SyncSandbox) -> None:
    """More than the cap may be written before dsecctl has attached: the command waits for it."""
    for _ in range(5):
        with started(daemon, "exec", sandbox.id, "head", "-c", "50000000", "/dev/zero") as process:
            assert process.stdout is not None
            count = 0
            while data := process.stdout.read(1 << 20):
                count += len(data)
        assert count == 50_000_000


def test_limits_that_were_hit_are_said(dsecctl: Run, sandbox: SyncSandbox) -> None:
    done = dsecctl("exec", sandbox.id, "python3", "-c", "x = bytearray(1 << 30)")
    assert (done.returncode, done.stderr) == (137, b"dsecctl: the sandbox ran out of memory\n")


def test_output_is_live_and_stdin_ends_where_ours_ends(daemon: Daemon, sandbox: SyncSandbox) -> None:
    with started(daemon, "exec", "-i", sandbox.id, "cat") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in (b"one\n", b"two\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline() == line
        process.stdin.close()
        assert process.wait(20) == 0


def test_without_i_stdin_is_not_read(dsecctl: Run, sandbox: SyncSandbox) -> None:
    assert dsecctl("exec", sandbox.id, "cat", stdin=b"not for it").stdout == b""


def test_a_reader_that_leaves_ends_the_command(daemon: Daemon, sandbox: SyncSandbox) -> None:
    with started(daemon, "exec", sandbox.id, "yes", "cli-marker-yes") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 141
    until(lambda: not runs(sandbox, "cli-marker-yes"))


def test_the_first_interrupt_is_the_commands(daemon: Daemon, sandbox: SyncSandbox) -> None:
    script = "trap 'echo caught; exit 3' INT; echo up; while :; do sleep 0.1; done"
    with started(daemon, "exec", sandbox.id, "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"caught\n"
        assert process.wait(20) == 3


def test_the_second_interrupt_kills_all_of_it(daemon: Daemon, sandbox: SyncSandbox) -> None:
    script = "trap '' INT; setsid sleep 4321 & echo up; while :; do sleep 0.1; done"
    with started(daemon, "exec", sandbox.id, "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 137
    until(lambda: not runs(sandbox, "sleep 4321"))


def test_other_signals_are_passed_on(daemon: Daemon, sandbox: SyncSandbox) -> None:
    script = "trap 'exit 5' TERM; echo up; while :; do sleep 0.1; done"
    with started(daemon, "exec", sandbox.id, "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(20) == 5


def test_logs_of_a_running_command_are_followed(daemon: Daemon, dsecctl: Run, sandbox: SyncSandbox) -> None:
    running = sandbox._client.run(sandbox.aio.start(["sh", "-c", "echo a; sleep 1; echo b >&2"]))
    done = dsecctl("logs", sandbox.id, running.id)
    assert done.returncode == 1
    assert b"-f" in done.stderr
    done = dsecctl("logs", "-f", sandbox.id, running.id)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a\n", b"b\n")


def test_what_was_cut_from_a_log_is_said(dsecctl: Run, sandbox: SyncSandbox) -> None:
    running = sandbox._client.run(sandbox.aio.start(["sh", "-c", "seq 10000"], cap_bytes=1024))
    sandbox._client.run(running.wait())
    done = dsecctl("logs", sandbox.id, running.id)
    assert done.stdout.startswith(b"1\n2\n")
    assert done.stdout.endswith(b"9999\n10000\n")
    assert b"bytes of stdout are missing" in done.stderr


# -- terminals --------------------------------------------------------------------------------------------------------
@pytest.fixture
def terminal(daemon: Daemon) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*argv: str) -> Terminal:
        made.append(Terminal(daemon, *argv))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_shell_has_size_resize_interrupt_and_status(terminal: Callable[..., Terminal], sandbox: SyncSandbox) -> None:
    shell = terminal("shell", sandbox.id)
    shell.type(b"echo up-$((1+1))\r")
    shell.expect(b"up-2")
    shell.resize(11, 77)
    time.sleep(0.5)
    shell.type(b"stty size\r")
    shell.expect(b"11 77")
    shell.type(b"sleep 600\r")
    shell.expect(b"sleep 600")
    time.sleep(0.5)
    shell.type(b"\x03")
    shell.type(b"echo $0-$TERM\r")
    shell.expect(b"/bin/bash-xterm")
    shell.type(b"exit 9\r")
    assert shell.end() == 9


def test_shell_without_bash(terminal: Callable[..., Terminal], sandbox: SyncSandbox) -> None:
    sandbox.exec(["rm", "/bin/bash"])
    shell = terminal("shell", sandbox.id)
    shell.type(b"echo $0 here\r")
    shell.expect(b"/bin/sh here")
    shell.type(b"\x04")
    assert shell.end() == 0


def test_run_it_opens_a_shell_and_cleans_up(terminal: Callable[..., Terminal], daemon: Daemon) -> None:
    before = daemon.sandboxes()
    shell = terminal("run", "-it", *SMALL, BASE)
    shell.type(b"echo up-$((1+1))\r")
    shell.expect(b"up-2")
    shell.type(b"exit\r")
    assert shell.end() == 0
    assert daemon.sandboxes() == before


def test_ctrl_c_at_a_terminal(terminal: Callable[..., Terminal], sandbox: SyncSandbox) -> None:
    plain = terminal("exec", sandbox.id, "sh", "-c", "echo up; exec sleep 600")
    plain.expect(b"up")
    plain.type(b"\x03")
    assert plain.end() == 130
    events = terminal("events", "--since", "0")
    events.expect(b"started")
    events.type(b"\x03")
    assert events.end() == 130


def test_import_shows_one_line_of_progress(terminal: Callable[..., Terminal], dsecctl: Run, base_tar: Path) -> None:
    shown = terminal("image", "import", str(base_tar), "cli/progress:1")
    assert shown.end(120) == 0
    assert b"\r\x1b[K" in shown.seen
    assert b"MiB" in shown.seen
    assert shown.seen.count(b"\n") == 1
    assert dsecctl("image", "rm", "cli/progress:1").returncode == 0


# -- cp ---------------------------------------------------------------------------------------------------------------
ODD = b"odd \n\xff\x1b[31m name"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with names and kinds of all sorts."""
    top = tmp_path / "tree"
    (top / "sub").mkdir(parents=True)
    (top / "a b").write_text("hello")
    (top / "a b").chmod(0o750)
    os.link(top / "a b", top / "sub" / "hard")
    (top / "sub" / "link").symlink_to("../a b")
    (top / "empty").touch()
    Path(os.fsdecode(os.fsencode(top) + b"/" + ODD)).write_bytes(b"\0\xff")
    return top


def picture(top: Path) -> dict[bytes, tuple[Any, ...]]:
    """Names with kind, mode, number of links, and content."""
    found: dict[bytes, tuple[Any, ...]] = {}
    for path in top.rglob("*"):
        stat, name = path.lstat(), os.fsencode(path.relative_to(top))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("dir", stat.st_mode)
        else:
            found[name] = ("file", stat.st_mode, stat.st_nlink, path.read_bytes())
    return found


def test_a_tree_goes_in_and_comes_out_the_same(dsecctl: Run, sandbox: SyncSandbox, tree: Path, tmp_path: Path) -> None:
    assert dsecctl("cp", "tree", f"{sandbox.id}:/deep/er/tree").returncode == 0
    done = dsecctl("cp", f"{sandbox.id}:/deep/er/tree", "back")
    assert (done.returncode, done.stderr) == (0, b"")
    assert picture(tmp_path / "back") == picture(tree)


def test_copies_land_where_cp_would_put_them(dsecctl: Run, sandbox: SyncSandbox, tree: Path, tmp_path: Path) -> None:
    box = sandbox.id
    for argv in (
        ("tree", f"{box}:/new"), ("tree", f"{box}:/new"), ("tree/.", f"{box}:/plain"), ("tree/a b", f"{box}:/new"),
        ("tree/a b", f"{box}:/x/renamed"), ("tree/a b", f"{box}:/y/"),
    ):  # fmt: skip
        assert dsecctl("cp", *argv).returncode == 0, argv
    listing = sandbox.exec(["find", "/new", "/plain", "/x", "/y", "-name", "a b", "-o", "-name", "renamed"]).stdout
    assert sorted(listing.splitlines()) == ["/new/a b", "/new/tree/a b", "/plain/a b", "/x/renamed", "/y/a b"]
    (tmp_path / "there").mkdir()
    for source, target, made in (
        ("/new", "there", "there/new/a b"), ("/plain/.", "there", "there/a b"),
        ("/x/renamed", "there", "there/renamed"), ("/x/renamed", "file", "file"),
    ):  # fmt: skip
        assert dsecctl("cp", f"{box}:{source}", target).returncode == 0
        assert (tmp_path / made).read_text() == "hello"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".dsecctl")]


def test_odd_names_one_by_one(dsecctl: Run, sandbox: SyncSandbox, tree: Path, tmp_path: Path) -> None:
    box = sandbox.id.encode()
    assert dsecctl("cp", b"tree/" + ODD, box + b":/in " + ODD).returncode == 0
    assert sandbox.read_file(b"/in " + ODD) == b"\0\xff"
    assert dsecctl("cp", box + b":/in " + ODD, ".").returncode == 0
    assert Path(os.fsdecode(os.fsencode(tmp_path) + b"/in " + ODD)).read_bytes() == b"\0\xff"
    (tmp_path / "with:colon").write_text("c")
    assert dsecctl("cp", "./with:colon", box + b":/c").returncode == 0
    assert sandbox.read_file("/c") == b"c"


def test_owners(dsecctl: Run, sandbox: SyncSandbox, tree: Path) -> None:
    os.chown(tree / "empty", 1234, 2345)
    for options, owner in (((), "0 0"), (("-a",), "1234 2345"), (("--chown", "7:8"), "7 8"), (("--chown", "9"), "9 9")):
        assert dsecctl("cp", *options, "tree/empty", f"{sandbox.id}:/empty").returncode == 0
        assert sandbox.exec(["stat", "-c", "%u %g", "/empty"]).stdout.strip() == owner


def test_a_tar_through_stdin_and_stdout(dsecctl: Run, sandbox: SyncSandbox) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        info = tarfile.TarInfo("d/f")
        info.size, info.uid = 3, 42
        tar.addfile(info, io.BytesIO(b"abc"))
    assert dsecctl("cp", "-a", "-", f"{sandbox.id}:/t", stdin=made.getvalue()).returncode == 0
    assert sandbox.exec(["stat", "-c", "%u", "/t/d/f"]).stdout.strip() == "42"
    done = dsecctl("cp", f"{sandbox.id}:/t", "-")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        content = tar.extractfile("d/f")
        assert content is not None
        assert content.read() == b"abc"


def test_nothing_leads_out_of_the_target(dsecctl: Run, sandbox: SyncSandbox, tmp_path: Path) -> None:
    sandbox.exec(
        ["sh", "-c", "mkdir /e; cd /e; ln -s /etc abs; ln -s ../../.. up; mkfifo pipe; ln -s . here; echo x > ok"]
    )
    done = dsecctl("cp", f"{sandbox.id}:/e", "e")
    assert done.returncode == 1
    assert done.stderr.count(b"left out") == 3
    assert sorted(os.listdir(tmp_path / "e")) == ["here", "ok"]


def test_copies_that_fail_say_why(dsecctl: Run, sandbox: SyncSandbox, tree: Path) -> None:
    box = sandbox.id
    for argv, words in (
        (("nothing", f"{box}:/x"), "nothing: No such file or directory [not_found]"),
        ((f"{box}:/nothing", "x"), "[not_found]"),
        (("tree", f"{box}:/etc/passwd"), "is no directory [conflict]"),
        ((f"{box}:/etc", "tree/a b"), "is no directory [conflict]"),
        ((f"{box}:/etc/passwd", "no/such/place"), "no such directory [not_found]"),
    ):
        done = dsecctl("cp", *argv)
        assert done.returncode == 1, argv
        assert words in done.stderr.decode(), argv


# -- images -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def image(dsecctl: Run) -> Iterator[Callable[..., dict[str, Any]]]:
    """Import under a name; gone at the end."""
    names: list[str] = []

    def make(*argv: str, stdin: bytes = b"") -> dict[str, Any]:
        names.append(argv[-1])
        done = dsecctl("image", "import", "--json", *argv, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    yield make
    for name in names:
        dsecctl("image", "rm", name)


def test_a_directory_keeps_what_it_has(dsecctl: Run, image: Any, tree: Path) -> None:
    os.chown(tree / "sub", 1000, 2000)
    os.setxattr(tree / "a b", "user.k", b"\0\xff")
    (tree / "suid").touch()
    (tree / "suid").chmod(0o4755)
    found = image("--kind", "workspace", "--prefix", "work", "tree", "cli/dir:1")
    assert (found["kind"], found["name"]) == ("workspace", "cli/dir:1")
    script = (
        "import os; s = os.stat; print([s('/work/sub').st_uid, s('/work/sub').st_gid,"
        " s('/work/sub/hard').st_ino == s('/work/a b').st_ino, os.getxattr('/work/a b', 'user.k').hex(),"
        " oct(s('/work/suid').st_mode), os.readlink('/work/sub/link'),"
        " sorted(n.hex() for n in os.listdir(b'/work'))])"
    )
    done = dsecctl("run", *SMALL, "--workspace", "cli/dir:1", BASE, "python3", "-c", script)
    names = sorted(name.hex() for name in os.listdir(os.fsencode(tree)))
    assert ast.literal_eval(done.stdout.decode()) == [1000, 2000, True, "00ff", "0o104755", "../a b", names]


def test_a_tar_is_the_same_image_from_a_file_a_pipe_and_a_directory(
    dsecctl: Run, image: Any, tree: Path, tmp_path: Path
) -> None:
    subprocess.run(["tar", "-C", str(tree), "-czf", str(tmp_path / "t.tgz"), "."], check=True)
    first = image("t.tgz", "cli/tar:1")
    assert image("-", "cli/tar:2", stdin=(tmp_path / "t.tgz").read_bytes())["digest"] == first["digest"]
    assert image("tree", "cli/tar:3")["files"] == first["files"]


def test_an_oci_layout_as_directory_and_as_tar(dsecctl: Run, image: Any, tmp_path: Path) -> None:
    layout = VECTOR / "oci"
    first = image(str(layout), "cli/oci:1")
    for number, argv in enumerate((["."], ["index.json", "blobs", "oci-layout"]), 2):
        subprocess.run(["tar", "-C", str(layout), "-cf", str(tmp_path / "oci.tar"), *argv], check=True)
        assert image("oci.tar", f"cli/oci:{number}")["digest"] == first["digest"]
    shown = json.loads(dsecctl("image", "show", "--json", "cli/oci:1").stdout)
    assert shown["env"] == {"PATH": "/bin:/usr/bin", "GREETING": "hi there"}
    lines = dsecctl("image", "list").stdout.decode().splitlines()
    assert all(len(line) <= 80 for line in lines)


def test_a_docker_archive(image: Any, tmp_path: Path) -> None:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("from-docker"), io.BytesIO())
    diff = f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"
    rootfs = {"type": "layers", "diff_ids": [diff]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Env": ["A=b"]}, "rootfs": rootfs}).encode()
    name = hashlib.sha256(config).hexdigest()
    manifest = json.dumps([{"Config": f"{name}.json", "RepoTags": ["x:1"], "Layers": ["l/layer.tar"]}]).encode()
    with tarfile.open(tmp_path / "docker.tar", "w") as tar:
        for member, data in ((f"{name}.json", config), ("manifest.json", manifest), ("l/layer.tar", layer.getvalue())):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    found = image("docker.tar", "cli/docker:1")
    assert (found["env"], found["source"]) == ({"A": "b"}, "docker")


def test_imports_that_fail_say_why(dsecctl: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not an image\n" * 100)
    (tmp_path / "empty").touch()
    for source, name, words in (
        ("text", "cli/x:1", "[image]"),
        ("empty", "cli/x:1", "the input is empty [image]"),
        ("nothing", "cli/x:1", "nothing: No such file or directory [not_found]"),
        ("text", "Not A Name", "[invalid]"),
    ):
        done = dsecctl("image", "import", source, name)
        assert (done.returncode, done.stdout) == (1, b"")
        assert words in done.stderr.decode()
    done = dsecctl("image", "rm", "cli/nothing:1")
    assert done.returncode == 1
    assert b"[not_found]" in done.stderr


def test_what_may_not_be_read_is_left_out_and_said(daemon: Daemon, image: Any, dsecctl: Run, tree: Path) -> None:
    """As root everything can be read but a socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        before = os.getcwd()
        os.chdir(tree)  # a socket's path is short
        try:
            sock.bind("sock")
        finally:
            os.chdir(before)
    done = dsecctl("image", "import", "tree", "cli/partly:1")
    assert done.returncode == 1
    assert b"left out: sock: a socket" in done.stderr
    assert dsecctl("image", "rm", "cli/partly:1").returncode == 0


# -- the rest ---------------------------------------------------------------------------------------------------------
def test_events_are_followed(daemon: Daemon, dsecctl: Run) -> None:
    with started(daemon, "events", "--json", "-l", "job=events") as process:
        assert process.stdout is not None
        time.sleep(1)
        dsecctl("run", *SMALL, "-l", "job=events", BASE, "true")
        seen: list[dict[str, Any]] = []
        while not seen or seen[-1]["state"] != "stopped":
            seen.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert [one["state"] for one in seen] == ["creating", "running", "stopping", "stopped"]


def test_info_doctor_and_stats(dsecctl: Run, sandbox: SyncSandbox) -> None:
    assert json.loads(dsecctl("info", "--json").stdout)["sandboxes"] >= 1
    checks = json.loads(dsecctl("doctor", "--json").stdout)
    assert {check["level"] for check in checks} <= {"ok", "warn", "fail"}
    done = dsecctl("doctor")
    assert all(len(line) <= 80 for line in done.stdout.decode().splitlines())
    assert done.returncode == int(any(check["level"] == "fail" for check in checks))
    shown = dsecctl("stats").stdout.decode()
    assert sandbox.id.rpartition("-")[2] in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_completion_asks_the_daemon(daemon: Daemon, sandbox: SyncSandbox) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    words = {"_DSECCTL_COMPLETE": "bash_complete", "COMP_WORDS": f"dsecctl exec {sandbox.id[:5]}", "COMP_CWORD": "2"}
    done = subprocess.run([DSECCTL], env={**environment(daemon), **words}, capture_output=True, timeout=30, check=False)
    assert f"plain,{sandbox.id}" in done.stdout.decode().split()
