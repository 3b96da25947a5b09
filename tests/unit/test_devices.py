"""CDI files: what is read, what is refused and how it is said; pools; leases under contention. Without root."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecd.config import DevicePool, load
from dsecd.devices import cdi
from dsecd.devices.leases import Leases
from dsecd.devices.model import Bind, Grant, Node, merged
from dsecd.devices.pools import DevicePools, wanted
from dsecd.errors import DsecError

NULL: dict[str, Any] = {"path": "/dev/null"}


def spec(*devices: dict[str, Any], kind: str = "example.org/thing", **more: Any) -> dict[str, Any]:
    return {"cdiVersion": "0.6.0", "kind": kind, "devices": [*devices], **more}


def device(name: str = "a", **edits: Any) -> dict[str, Any]:
    return {"name": name, "containerEdits": edits}


def write(path: Path, document: object) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    path.chmod(0o644)
    return path


def pools_of(directory: Path, *matches: str, **settings: Any) -> DevicePools:
    pool = DevicePool(match=matches or ("example.org/thing=*",), **settings)
    pools = DevicePools([directory], {"things": pool})
    asyncio.run(pools.refresh())
    return pools


def lease(pools: DevicePools, count: int = 1) -> Grant:
    return asyncio.run(pools.lease("box", {"things": count}, 0))[1]


def refused(kind: str, directory: Path, **edits: Any) -> str:
    """Lease a device with these edits: what is said, in one sentence of that kind."""
    write(directory / "x.json", spec(device(**edits)))
    with pytest.raises(DsecError) as caught:
        lease(pools_of(directory))
    assert caught.value.kind == "not_found", "of a pool that has only this one"
    pools = pools_of(directory)
    member = pools.members["things"][0]
    assert member.why and "\n" not in member.why and member.why in caught.value.message
    with pytest.raises(DsecError) as caught:
        member.device.grant(hooks=False)
    assert caught.value.kind == kind
    return member.why


# -- files ------------------------------------------------------------------------------------------------------------
def test_everything_a_device_may_want(tmp_path: Path) -> None:
    """Edits of the file and of the device, put together; host paths, ids and modes as CDI has them."""
    extra = tmp_path / "lib.so"
    extra.touch()
    write(
        tmp_path / "x.json",
        spec(
            device(
                env=["A=1", "B=x=y"],
                deviceNodes=[{"path": "/dev/thing0", "hostPath": "/dev/null", "fileMode": 0o600, "uid": 7, "gid": 8,
                              "permissions": "rm", "type": "c", "major": 1, "minor": 3}],
                mounts=[{"hostPath": str(extra), "containerPath": "/usr/lib/lib.so",
                         "options": ["ro", "nosuid", "nodev", "rbind", "noexec"]}],
            ),
            containerEdits={"env": ["A=0", "C=2"], "deviceNodes": [{"path": "/dev/zero"}]},
            annotations={"who": "cares"},
        ),
    )  # fmt: skip
    grant = lease(pools_of(tmp_path))
    assert grant.env == {"A": "1", "B": "x=y", "C": "2"}, "the device's own word is the last"
    mode = os.stat("/dev/zero").st_mode & 0o777
    assert grant.nodes == (
        Node("/dev/zero", "c", 1, 5, mode, 0, 0, "rw"),
        Node("/dev/thing0", "c", 1, 3, 0o600, 7, 8, "r"),
    )
    assert grant.binds == (Bind(str(extra), "/usr/lib/lib.so", noexec=True),)
    assert grant.hooks == ()


@pytest.mark.parametrize(("text", "words"), [
    ("", "no CDI file"),
    ("[]", "no CDI file"),
    ("{" * 100_000, "no CDI file"),
    ('{"cdiVersion": "0.6.0"}', "missing required field `kind`"),
    (spec(device(), kind="thing"), "$.kind"),
    (spec(device(), kind="example.org/a b"), "$.kind"),
    (spec(device(), kind="example.org/a\n"), "$.kind"),
    (spec(device(), cdiVersion="2.0.0"), "$.cdiVersion"),
    (spec(device("-a")), "$.devices[0].name"),
    (spec({"name": "a"}), "containerEdits"),
    (spec(device(), device()), "example.org/thing=a twice"),
    (spec(device(env=["A"])), "$.devices[0].containerEdits.env[0]"),
    (spec(device(env=["A=\0"])), "$.devices[0].containerEdits.env[0]"),
    (spec(device(deviceNodes=[{"path": 3}])), "Expected `str`"),
    (spec(device(deviceNodes=[{"path": "/dev/null", "fileMode": 0o4755}])), "fileMode"),
    (spec(device(deviceNodes=[{"path": "/dev/null", "permissions": "x"}])), "permissions"),
    (spec(device(rootfs=["/"])), "unknown field `rootfs`"),
    (spec(*(device(f"d{n}") for n in range(1025))), "$.devices"),
])  # fmt: skip
def test_wrong_files_are_one_sentence_and_stop_nobody(tmp_path: Path, text: object, words: str) -> None:
    write(tmp_path / "bad.json", text)
    write(tmp_path / "good.json", spec(device("ok", deviceNodes=[NULL])))
    pools = pools_of(tmp_path)
    (problem,) = pools.problems
    assert problem.file.name == "bad.json" and words in problem.text and "\n" not in problem.text
    assert lease(pools).nodes[0].path == "/dev/null"
    with pytest.raises(DsecError) as caught:
        cdi.read(tmp_path / "bad.json")
    assert caught.value.kind == "invalid" and str(tmp_path) in caught.value.message


def test_files_of_others_than_root_and_strange_ones(tmp_path: Path) -> None:
    """What everybody could write, what is a FIFO, a directory, too large or a dead link: refused, and nothing hangs."""
    write(tmp_path / "open.json", spec(device())).chmod(0o666)
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "dir.json").mkdir()
    write(tmp_path / "large.json", json.dumps(spec(device())) + " " * cdi.MAX_BYTES)
    (tmp_path / "dead.json").symlink_to("nowhere")
    write(tmp_path / "notes.txt", "not read")
    found = {problem.file.name: problem.text for problem in pools_of(tmp_path).problems}
    assert found.keys() == {"open.json", "fifo.json", "dir.json", "large.json", "dead.json"}
    assert "others than root" in found["open.json"]


@pytest.mark.parametrize("quick", [True, False], ids=["libyaml", "python"])
def test_yaml_where_it_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    """With PyYAML's own parser and libyaml's; what would take for ever, or be a billion strings, is refused at once."""
    yaml = pytest.importorskip("yaml")
    if not quick:
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    text = "cdiVersion: 0.6.0\nkind: example.org/thing\ndevices:\n- name: '0'\n  containerEdits:\n"
    write(tmp_path / "x.yaml", text + "    deviceNodes:\n    - path: /dev/null\n")
    assert lease(pools_of(tmp_path)).nodes[0].minor == 3
    for bad, words in (
        ("a: 'b", "is no YAML"),
        (text + "    env: [*a]\n", "references and"),
        (text + "    env: &a [A=1]\n    x: *a", "references and"),
        ("[" * 40 + "]" * 40, "32 levels"),
        ("[" * 500_000, "x.yaml is no "),
        ("- " * 500_000, "x.yaml is no "),
        (text.replace("'0'", "0") + "    env: []", "Expected `str`"),
    ):
        write(tmp_path / "x.yaml", bad)
        (problem,) = pools_of(tmp_path).problems
        assert words in problem.text and "\n" not in problem.text
    monkeypatch.setitem(sys.modules, "yaml", None)
    (problem,) = pools_of(tmp_path).problems
    assert "write it as JSON" in problem.text


def test_a_later_directory_counts_and_one_name_in_two_files_is_nobodys(tmp_path: Path) -> None:
    etc, run = tmp_path / "etc", tmp_path / "run"
    etc.mkdir(), run.mkdir()
    write(etc / "x.json", spec(device(env=["FROM=etc"]), device("b", env=["FROM=etc"])))
    write(run / "x.json", spec(device(env=["FROM=run"])))
    pools = DevicePools([etc, run, tmp_path / "gone"], {"things": DevicePool(match=("example.org/thing=*",))})
    assert lease(pools, 2).env["FROM"] in ("etc", "run")
    found = {member.device.name: member.device.file for member in pools.members["things"]}
    assert found == {"example.org/thing=a": run / "x.json", "example.org/thing=b": etc / "x.json"}
    write(run / "y.json", spec(device()))
    asyncio.run(pools.refresh())
    assert "example.org/thing=a is in" in pools.problems[0].text
    assert [member.device.file for member in pools.members["things"]] == [etc / "x.json", etc / "x.json"]


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_garbage_is_refused_and_nothing_else(text: bytes) -> None:
    """Any bytes at all, alone and in the middle of a good file, as JSON and as YAML."""
    good = json.dumps(spec(device(deviceNodes=[NULL]))).encode()
    with tempfile.TemporaryDirectory() as directory:
        for name, content in itertools.product(("x.json", "x.yaml"), (text, good[:60] + text + good[60:])):
            path = Path(directory, name)
            path.write_bytes(content)
            with contextlib.suppress(DsecError):
                assert cdi.read(path).kind


def test_a_file_as_nvidia_ctk_writes_it(tmp_path: Path) -> None:
    """Its shape, with nodes and files that are here: YAML, hooks, groups for render nodes, `all`, sockets."""
    pytest.importorskip("yaml")
    render = tmp_path / "renderD128"
    render.symlink_to("/dev/tty")
    gid = os.stat("/dev/tty").st_gid
    write(tmp_path / "nvidia.yaml", NVIDIA.format(render=render, gid=gid, file=__file__))
    pools = DevicePools([tmp_path], {"gpu": DevicePool(match=("nvidia.com/gpu=*",), hooks=True)})
    asyncio.run(pools.refresh())
    assert pools.problems == []
    assert {m.device.name: bool(m.why) for m in pools.members["gpu"]} == {
        "nvidia.com/gpu=0": False, "nvidia.com/gpu=GPU-1b2c": True, "nvidia.com/gpu=all": True
    }  # fmt: skip
    _, grant = asyncio.run(pools.lease("box", {"gpu": 1}, 0))
    assert [node.path for node in grant.nodes] == ["/dev/nvidiactl", "/dev/nvidia0", "/dev/dri/renderD128"]
    assert grant.nodes[2].mode == 0o666, "0660 on the host, whose group the sandbox does not have"
    assert grant.env == {"NVIDIA_VISIBLE_DEVICES": "void", "NVIDIA_CTK_LIBCUDA_DIR": "/usr/lib"}
    assert [(name, hook.args[1]) for name, hook in grant.hooks] == [
        ("createContainer", "create-symlinks"), ("createContainer", "update-ldcache")
    ]  # fmt: skip


NVIDIA = """---
cdiVersion: 0.7.0
containerEdits:
  deviceNodes:
  - hostPath: /dev/null
    path: /dev/nvidiactl
  env:
  - NVIDIA_CTK_LIBCUDA_DIR=/usr/lib
  - NVIDIA_VISIBLE_DEVICES=void
  hooks:
  - args: [nvidia-cdi-hook, create-symlinks, --link, libcuda.so.1::/usr/lib/libcuda.so]
    env: [NVIDIA_CTK_DEBUG=false]
    hookName: createContainer
    path: /bin/true
  - args: [nvidia-cdi-hook, update-ldcache, --folder, /usr/lib]
    hookName: createContainer
    path: /bin/true
  mounts:
  - containerPath: /usr/bin/nvidia-smi
    hostPath: {file}
    options: [ro, nosuid, nodev, rbind, rprivate]
devices:
- containerEdits:
    additionalGids: [{gid}]
    deviceNodes:
    - hostPath: /dev/zero
      path: /dev/nvidia0
    - hostPath: {render}
      path: /dev/dri/renderD128
      fileMode: 432
  name: "0"
- containerEdits:
    deviceNodes:
    - hostPath: /dev/zero
      path: /dev/nvidia0
    - hostPath: {render}
      path: /dev/dri/renderD128
  name: GPU-1b2c
- containerEdits:
    deviceNodes:
    - hostPath: /dev/zero
      path: /dev/nvidia0
    - hostPath: {render}
      path: /dev/dri/renderD128
  name: all
kind: nvidia.com/gpu
"""


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("edits", "words"), [
    ({"intelRdt": {"closID": "x"}}, "intelRdt"),
    ({"netDevices": [{"hostInterfaceName": "eth0", "name": "eth0"}]}, "netDevices"),
    ({"hooks": [{"hookName": "createContainer", "path": "/bin/true"}]}, "the host's root: `hooks = true`"),
    ({"deviceNodes": [{"path": "/etc/passwd", "hostPath": "/dev/null"}]}, "nodes are below /dev"),
    ({"deviceNodes": [{"path": "/dev/../etc/x", "hostPath": "/dev/null"}]}, "nothing may be put at"),
    ({"deviceNodes": [{"path": "/dev/.dsec-agent", "hostPath": "/dev/null"}]}, "nothing may be put at"),
    ({"deviceNodes": [{"path": "/dev/pts/0", "hostPath": "/dev/null"}]}, "nothing may be put at"),
    ({"deviceNodes": [{"path": "/dev/x", "hostPath": "dev/null"}]}, "nodes are below /dev"),
    ({"deviceNodes": [{"path": "/dev/null", "type": "p"}]}, "of type 'p'"),
    ({"deviceNodes": [{"path": "/dev/null", "uid": 1 << 20}]}, "ids below"),
    ({"mounts": [{"hostPath": "/etc", "containerPath": "/etc", "options": ["rw"]}]}, "read-only"),
    ({"mounts": [{"hostPath": "/etc", "containerPath": "/proc/sys"}]}, "nothing may be put at '/proc/sys'"),
    ({"mounts": [{"hostPath": "/etc", "containerPath": "/"}]}, "nothing may be put at '/'"),
    ({"mounts": [{"hostPath": "/etc", "containerPath": "/dev"}]}, "nothing may be put at '/dev'"),
    ({"mounts": [{"hostPath": "/etc", "containerPath": "etc"}]}, "nothing may be put at 'etc'"),
    ({"mounts": [{"hostPath": "/etc/../etc", "containerPath": "/x"}]}, "no absolute path"),
    ({"mounts": [{"hostPath": "/etc", "containerPath": "/x", "type": "tmpfs"}]}, "only bind mounts"),
    ({"mounts": [{"hostPath": "/etc", "containerPath": "/x", "options": ["suid"]}]}, "with 'suid'"),
    ({"deviceNodes": [NULL, {"path": "/dev/null", "hostPath": "/dev/zero"}]}, "two of the devices want to be"),
])  # fmt: skip
def test_refused(tmp_path: Path, edits: dict[str, Any], words: str) -> None:
    if "two of" in words:  # within one device's edits the later one would hide the other
        write(
            tmp_path / "x.json",
            spec(device(deviceNodes=edits["deviceNodes"][1:]), containerEdits={"deviceNodes": [NULL]}),
        )
        assert words in pools_of(tmp_path).members["things"][0].why
        return
    assert words in refused("unsupported", tmp_path, **edits)


@pytest.mark.parametrize(("edits", "words"), [
    ({"deviceNodes": [{"path": "/dev/dsec-no-such"}]}, "is gone: /dev/dsec-no-such: No such file"),
    ({"deviceNodes": [{"path": "/dev/x", "hostPath": "/etc/passwd"}]}, "is no such device"),
    ({"deviceNodes": [{"path": "/dev/null", "type": "b"}]}, "is no such device"),
    ({"deviceNodes": [{"path": "/dev/null", "major": 1, "minor": 9}]}, "is 1:3 now, and not 1:9"),
    ({"deviceNodes": [{"path": "/dev/null", "major": 2}]}, "is 1:3 now, and not 2:*"),
    ({"mounts": [{"hostPath": "/no/such", "containerPath": "/x"}]}, "/no/such is not there"),
])  # fmt: skip
def test_gone(tmp_path: Path, edits: dict[str, Any], words: str) -> None:
    assert words in refused("not_found", tmp_path, **edits)


def test_hooks_where_the_pool_allows_them(tmp_path: Path) -> None:
    hook = {"hookName": "createContainer", "path": "/bin/true", "args": ["true", "x"], "timeout": 3}
    write(tmp_path / "x.json", spec(device(hooks=[hook])))
    ((name, found),) = lease(pools_of(tmp_path, hooks=True)).hooks
    assert (name, found.path, found.args, found.timeout) == ("createContainer", "/bin/true", ("true", "x"), 3)
    for change, words in (({"hookName": "startContainer"}, "'startContainer'"), ({"path": "true"}, "hook"),
                          ({"path": "/no/such"}, "its hook /no/such is not there")):  # fmt: skip
        write(tmp_path / "x.json", spec(device(hooks=[hook | change])))
        assert words in pools_of(tmp_path, hooks=True).members["things"][0].why


def test_devices_of_a_kind_share_what_they_have_in_common() -> None:
    node, own = Node("/dev/ctl", "c", 1, 3, 0o666, 0, 0, "rw"), Node("/dev/x0", "c", 1, 5, 0o666, 0, 0, "rw")
    bind = Bind("/etc", "/x", noexec=False)
    both = merged([Grant({"A": "1"}, (node, own), (bind,)), Grant({"A": "2"}, (node,), (bind,))])
    assert both == Grant({"A": "2"}, (node, own), (bind,))
    for other in (
        Grant(binds=(Bind("/usr", "/x", noexec=False),)),
        Grant(binds=(Bind("/etc", "/dev/x0", noexec=False),)),
    ):
        with pytest.raises(DsecError, match="unsupported"):
            merged([both, other])
    many = tuple(Bind("/etc", f"/x{n}", noexec=False) for n in range(1025))
    with pytest.raises(DsecError, match="more than"):
        merged([Grant(binds=many)])


# -- pools ------------------------------------------------------------------------------------------------------------
def test_the_same_hardware_is_not_leased_twice(tmp_path: Path) -> None:
    """`all` and a UUID beside indices, as vendors' tools write them; slices of one card are their own."""
    nodes = [{"path": "/dev/null"}, {"path": "/dev/zero"}, {"path": "/dev/full"}]
    write(tmp_path / "x.json", spec(
        device("0", deviceNodes=nodes[:1]), device("1", deviceNodes=nodes[1:2]), device("all", deviceNodes=nodes),
        device("GPU-12ab", deviceNodes=nodes[:1]), device("env-only", env=["A=1"]),
    ))  # fmt: skip
    found = {m.device.name.partition("=")[2]: m.why for m in pools_of(tmp_path).members["things"]}
    assert {name for name, why in found.items() if not why} == {"0", "1", "env-only"}
    assert "has it in it" in found["all"] and "example.org/thing=0 of pool things" in found["GPU-12ab"]
    slices = [device(f"0:{n}", deviceNodes=[nodes[0], nodes[n]]) for n in (1, 2)]
    write(tmp_path / "x.json", spec(*slices))
    assert [m.why for m in pools_of(tmp_path).members["things"]] == ["", ""]


def test_a_device_is_in_the_first_pool_that_names_it(tmp_path: Path) -> None:
    write(tmp_path / "x.json", spec(device("a"), device("b")))
    pools = DevicePools([tmp_path], {
        "one": DevicePool(match=("example.org/thing=a",)), "rest": DevicePool(match=("example.org/*=?",), share=4),
    })  # fmt: skip
    asyncio.run(pools.refresh())
    assert [m.why for m in pools.members["one"]] == [""]
    assert ["of pool one" in m.why for m in pools.members["rest"]] == [True, False]


def test_what_changes_on_the_host_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", spec(device("a")))
    pools = pools_of(tmp_path)
    assert len(pools.members["things"]) == 1
    write(path, spec(device("a"), device("b")))
    lease(pools, 2)
    path.unlink()
    with pytest.raises(DsecError) as caught:
        asyncio.run(pools.lease("other", {"things": 1}, 0))
    assert (caught.value.kind, caught.value.retryable) == ("not_found", False)


def test_wanted() -> None:
    assert wanted(["gpu:2", "fuse", "gpu"]) == {"gpu": 3, "fuse": 1}


# -- leases -----------------------------------------------------------------------------------------------------------
def leases(share: int = 1, members: str = "ab") -> Leases:
    found = Leases({"p": share, "q": 1})
    found.set_members({"p": tuple(members), "q": ("x",)})
    return found


async def take(found: Leases, owner: str, count: int = 1, wait: float = 0, **more: int) -> dict[str, tuple[str, ...]]:
    return await found.take(owner, {"p": count, **more}, wait)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_exclusive_and_shared() -> None:
    async def main() -> None:
        found = leases()
        assert await take(found, "one") == {"p": ("a",)}
        assert await take(found, "two") == {"p": ("b",)}
        with pytest.raises(DsecError) as caught:
            await take(found, "three", wait=0.01)
        assert (caught.value.kind, caught.value.retryable) == ("capacity", True)
        assert "within 0.01 s" in caught.value.message and found.waiting("p") == 0
        found.release("one")
        assert await take(found, "three") == {"p": ("a",)}
        shared = leases(share=2)
        got = [(await take(shared, f"o{n}"))["p"][0] for n in range(4)]
        assert got == ["a", "b", "a", "b"], "the least used first"
        assert shared.users("a") == ["o0", "o2"]
        with pytest.raises(DsecError):
            await take(shared, "o4")

    asyncio.run(main())


def test_unknown_pools_and_too_many() -> None:
    async def main() -> None:
        for asked, words in (({"r": 1}, "which has: p, q"), ({"p": 3}, "has 2 usable devices, and 3")):
            with pytest.raises(DsecError) as caught:
                await leases().take("one", asked, 10)
            assert caught.value.kind == "not_found" and words in caught.value.message

    asyncio.run(main())


def test_first_come_first_served() -> None:
    """A request for two is not overtaken by requests for one; another pool's are not held up by it."""

    async def main() -> None:
        found = leases()
        await take(found, "holder")
        order: list[str] = []

        async def ask(name: str, count: int, **more: int) -> None:
            await take(found, name, count, 10, **more)
            order.append(name)

        tasks = [asyncio.create_task(ask("big", 2)), asyncio.create_task(ask("small", 1))]
        await settled()
        assert await found.take("elsewhere", {"q": 1}, 0) == {"q": ("x",)}
        found.release("elsewhere")
        tasks.append(asyncio.create_task(ask("mixed", 1, q=1)))
        await settled()
        assert order == [] and found.waiting("p") == 3 and found.waiting("q") == 1
        found.release("holder")
        await settled()
        assert order == ["big"]
        found.release("big")
        await settled()
        assert order == ["big", "small", "mixed"]
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_cancelled_late_and_abandoned_requests_hold_nothing_up() -> None:
    async def main() -> None:
        found = leases(members="a")
        await take(found, "holder")
        gone = asyncio.create_task(take(found, "gone", wait=10))
        ended = asyncio.create_task(take(found, "ended", wait=10))
        next_one = asyncio.create_task(take(found, "next", wait=10))
        await settled()
        gone.cancel()
        found.abandon("ended")
        found.abandon("holder")  # has it, and keeps it
        await settled()
        assert gone.cancelled() and found.waiting("p") == 1 and found.users("a") == ["holder"]
        with pytest.raises(DsecError) as caught:
            await ended
        assert caught.value.kind == "conflict"
        # Cancelled in the very moment in which it is served: it is given back.
        found.release("holder")
        next_one.cancel()
        await settled()
        assert next_one.cancelled() and found.users("a") == []

    asyncio.run(main())


def test_taken_back_after_a_restart() -> None:
    async def main() -> None:
        found = leases(share=2)
        found.claim("old", {"p": ("a",), "no-more": ("b",)})
        assert await take(found, "new") == {"p": ("a",)}, "b was of a pool that is gone, and is its owner's alone"
        with pytest.raises(DsecError):
            await take(found, "newer")
        found.release("old")
        assert await take(found, "newer") == {"p": ("b",)}

    asyncio.run(main())


def test_never_more_users_than_the_share_whatever_happens() -> None:
    """10,000 random takes, releases, cancels and changes of the host; at the end everybody has been served."""
    rng = random.Random(5)

    async def main() -> None:
        found = Leases({"p": 1, "q": 3})
        everything = {"p": ("a", "b", "c"), "q": ("x", "y")}
        found.set_members(everything)
        tasks: dict[str, asyncio.Task[Any]] = {}
        for step in range(10_000):
            roll = rng.random()
            if roll < 0.5 and len(tasks) < 40:
                asked = {name: rng.randint(1, 2) for name in rng.sample(["p", "q"], rng.randint(1, 2))}
                tasks[f"o{step}"] = asyncio.create_task(found.take(f"o{step}", asked, 1000))
            elif roll < 0.9 and tasks:
                owner = rng.choice(sorted(tasks))
                tasks.pop(owner).cancel()
                found.release(owner)
            elif roll < 0.95:
                found.set_members({**everything, "p": tuple(rng.sample("abc", 2))})
            await asyncio.sleep(0)
            for pool, names in everything.items():
                for name in names:
                    assert len(found.users(name)) <= found.pools[pool].share
        found.set_members(everything)
        while tasks:
            await settled()
            done = [owner for owner, task in tasks.items() if task.done()]
            assert done, "somebody waits for ever"
            for owner in done:
                await tasks.pop(owner)
                found.release(owner)
        assert not any(found.users(name) for names in everything.values() for name in names)

    asyncio.run(main())


# -- the configuration ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "line", "words"), [
    ("devices = 3", 1, "[devices.NAME]"),
    ("[devices]\ngpu = 3", 1, "devices.gpu is a table"),
    ("\n[devices.GPU]\nmatch = ['a/b=c']", 2, "no name for a device pool"),
    ("[devices.gpu]\nshare = 2", 1, "match is missing"),
    ("[devices.gpu]\nmatch = ['gpu']", 2, "each is vendor.com/class=device"),
    ("[devices.gpu]\nmatch = []", 2, "match = []"),
    ("[devices.gpu]\nmatch = ['a/b=c']\nshare = 0", 3, "share = 0"),
    ("[devices.gpu]\nmatch = ['a/b=c']\nshares = 2", 3, "did you mean share?"),
    ("cdi_dirs = ['cdi']", 1, "cdi_dirs"),
])  # fmt: skip
def test_bad_configuration(tmp_path: Path, text: str, line: int, words: str) -> None:
    (tmp_path / "c").write_text(text)
    with pytest.raises(DsecError) as caught:
        load(tmp_path / "c")
    assert caught.value.message.startswith(f"{tmp_path / 'c'}:{line}: ") and words in caught.value.message


def test_good_configuration(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("[devices.gpu]\nmatch = ['nvidia.com/gpu=*']\nshare = 4\nhooks = true\n")
    assert load(tmp_path / "c").devices == {"gpu": DevicePool(match=("nvidia.com/gpu=*",), share=4, hooks=True)}
