"""`dsecctl run`: make a sandbox, run a command in it, take it away."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Final, Literal

import click

from dsecctl import output
from dsecctl.app import App, command, pass_app
from dsecctl.choose import needs_of, needs_options
from dsecctl.execs import FAILED, SHELLS, argv_of, command_options, run_in, shell_in, start
from dsecctl.values import DURATION, IMAGE, PAIR, SIZE
from dsecd.client import DSecClient, DSecContainerRunArgs, DSecFullVMRunArgs, DSecMicroVMRunArgs, Sandbox
from dsecd.errors import DsecError

Args = DSecContainerRunArgs | DSecFullVMRunArgs
LEASE_S: Final = 60.0  # an attached run whose dsecctl is killed is over after this long


@command(
    "run", failure=FAILED, context_settings={"allow_interspersed_args": False},
    examples="""
    dsecctl run debian:12 -- python3 -c 'print(1)'
    dsecctl run -it debian:12
    dsecctl run -d --name box --toolkit pytest:8 --ttl 2h debian:12
    dsecctl run --workspace app:1 -w /workspace --memory 2g debian:12 make test
    dsecctl run --backend microvm debian:12 -- uname -r
    dsecctl run --backend auto --trust hostile debian:12 -- ./suspect
    dsecctl run --net pypi --net example.org:443 debian:12 -- pip install x
    dsecctl run --device gpu:2 cuda:12 -- nvidia-smi
    """,
)  # fmt: skip
@command_options
@click.option("-d", "--detach", is_flag=True, help="Leave it running and print its id.")
@click.option("--rm/--no-rm", default=None, help="Remove it at the end.  [default: unless --detach]")
@click.option(
    "--backend", type=click.Choice(["container", "microvm", "fullvm", "auto"]), default="container",
    show_default=True, help="What it is. Auto: the lightest that fits the next options.",
)  # fmt: skip
@needs_options
@click.option(
    "--root", type=click.Choice(["pmem", "blk"]), default="pmem", show_default=True,
    help="How a microVM gets its layers: sharing the host's page cache, or each with its own.",
)  # fmt: skip
@click.option(
    "--profile", type=click.Choice(["server", "desktop", "android"]),
    help="Of a full VM: with a screen, or without.  [default: its image's]",
)  # fmt: skip
@click.option("--workspace", type=IMAGE, metavar="IMAGE", help="Layer with the files to work on.")
@click.option("--toolkit", "toolkits", type=IMAGE, metavar="IMAGE", multiple=True, help="Layer with tools; repeatable.")
@click.option("--cpu", type=float, default=1.0, show_default=True, help="Cores.")
@click.option("--memory", type=SIZE, default="1g", show_default=True, help="Memory.")
@click.option("--disk", type=SIZE, default="4g", show_default=True, help="Writable disk.")
@click.option("--pids", type=int, default=512, show_default=True, help="Processes and threads.")
@click.option("--net", "rules", multiple=True, metavar="RULE", help="What it may reach (dsecctl network); repeatable.")
@click.option("--device", "devices", multiple=True, metavar="POOL[:N]", help="Devices of a pool; repeatable.")
@click.option("--device-wait", type=DURATION, default="60s", show_default=True, help="Wait so long for devices.")
@click.option("--name", help="Name of the sandbox. With -d, one of that name that runs is returned.")
@click.option("--hostname", help="Host name inside.")
@click.option("-l", "--label", "labels", type=PAIR, multiple=True, help="Label, to find it again; repeatable.")
@click.option("--job", help="Job it belongs to: `dsecctl job` acts on all of one.")
@click.option("--owner", default="", metavar="TEXT", help="Free text about who needs it.")
@click.option("--ttl", type=DURATION, help="Stop it this long after its start, whatever it does.")
@click.option("--idle", type=DURATION, help="Stop it after so long without a running command.")
@click.option("--lease", type=DURATION, help="Stop it when no client has renewed it for so long.")
@click.option(
    "--on-expiry", type=click.Choice(["stop", "pause"]), default="stop", show_default=True,
    help="What the end of a time or lease does.",
)  # fmt: skip
@click.option(
    "--paused-clock", type=click.Choice(["stopped", "running"]), default="stopped", show_default=True,
    help="Whether --ttl and --lease go on while it is paused.",
)  # fmt: skip
@click.argument("image", type=IMAGE)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[--] [COMMAND...]")
@pass_app
async def run(
    app: App, image: str, argv: tuple[str, ...], detach: bool, rm: bool | None, interactive: bool, tty: bool,
    timeout: float | None, **options: Any,
) -> int:  # fmt: skip
    """Make a sandbox and run a command in it.

    Attached, the sandbox is taken away when the command ends; output, exit status and Ctrl-C are as with `dsecctl
    exec`. Without a command, -t opens a shell. With --detach the sandbox stays until it is stopped or one of its times
    runs out; the command, if there is one, goes on in it, and `dsecctl logs` shows what it writes.

    Options stand before IMAGE; what follows IMAGE is the command. Sizes are 512m or 2g (a bare number is MiB), times
    30s, 5m, 1h or 2d (a bare number is seconds).
    """
    words = argv_of(argv)
    remove = rm if rm is not None else not detach
    _check(words, detach, remove, interactive, tty, timeout)
    args = _args(image, options)
    if remove and args.lease_s is None:
        args.lease_s = LEASE_S
    async with app.client() as client:
        if detach:
            return await _detached(app, client, args, words, timeout, _auto(options))
        if args.name is not None:
            await _refuse_existing(client, args.name)
        box = await client.run(args, backend=_auto(options))
        if box.info.choice is not None:
            app.note(box.info.choice.reason)
        try:
            if not words:
                return await shell_in(app, box, SHELLS)
            return await run_in(app, box, words, interactive=interactive, tty=tty, timeout=timeout)
        finally:
            await _leave(app, box, remove)


def _check(words: list[str], detach: bool, remove: bool, interactive: bool, tty: bool, timeout: float | None) -> None:
    if detach and (interactive or tty):
        raise click.UsageError("--detach excludes -i and -t")
    if detach and remove:
        raise click.UsageError("--detach excludes --rm: use --ttl or --idle")
    if not words and not detach and not tty:
        raise click.UsageError("give a command after IMAGE, or -it for a shell, or -d")
    if not words and timeout is not None:
        raise click.UsageError("--timeout needs a command; the sandbox has --ttl and --idle")


def _args(image: str, options: dict[str, Any]) -> Args:
    if options["backend"] == "fullvm":
        return _full(image, options)
    kind: Callable[..., DSecContainerRunArgs] = DSecContainerRunArgs
    if options["backend"] == "microvm":
        kind = functools.partial(DSecMicroVMRunArgs, root=options["root"])
    return kind(
        container_image=image, workspace=options["workspace"], toolkits=list(options["toolkits"]),
        memory_limit_mb=options["memory"], cpu_cores_limit=options["cpu"], disk_limit_mb=options["disk"],
        pids_limit=options["pids"], ttl_running_stop=options["idle"], ttl_total=options["ttl"],
        lease_s=options["lease"], init_user=options["user"], env=dict(options["env"]), workdir=options["workdir"],
        hostname=options["hostname"], name=options["name"], labels=dict(options["labels"]), owner=options["owner"],
        job=options["job"], on_expiry=options["on_expiry"], paused_clock=options["paused_clock"],
        devices=list(options["devices"]), device_wait_s=options["device_wait"],
        needs=needs_of(options), network_rules=dict.fromkeys(options["rules"], True),
    )  # fmt: skip


def _auto(options: dict[str, Any]) -> Literal["auto"] | None:
    return "auto" if options["backend"] == "auto" else None


def _full(image: str, options: dict[str, Any]) -> DSecFullVMRunArgs:
    for name in ("workspace", "toolkits", "user", "hostname", "devices"):
        if options[name]:
            raise click.UsageError(f"--{name.rstrip('s')} is for containers and microVMs: a full VM is a whole disk")
    return DSecFullVMRunArgs(
        vm_image=image, memory_limit_mb=options["memory"], cpu_cores_limit=options["cpu"],
        disk_limit_mb=options["disk"], ttl_running_stop=options["idle"], ttl_total=options["ttl"],
        lease_s=options["lease"], env=dict(options["env"]), workdir=options["workdir"], name=options["name"],
        labels=dict(options["labels"]), owner=options["owner"], job=options["job"], on_expiry=options["on_expiry"],
        paused_clock=options["paused_clock"], profile=options["profile"],
    )  # fmt: skip


async def _detached(
    app: App, client: DSecClient, args: Args, words: list[str], timeout: float | None, backend: Literal["auto"] | None
) -> int:
    box = await client.run(args, backend=backend)
    process = await start(box, words, timeout=timeout) if words else None
    if app.json:
        output.emit({"sandbox": box.info, "exec_id": process.id if process else None})
    else:
        output.out(box.id)
    return 0


async def _refuse_existing(client: DSecClient, name: str) -> None:
    """A name is get-or-create, and an attached run removes what it got: not somebody's box."""
    try:
        found = await client.get(name)
    except DsecError as exc:
        if exc.kind == "not_found":
            return
        raise
    if found.info.state not in ("stopped", "failed"):
        text = f"sandbox {name!r} is there already: use dsecctl exec, or another name"
        raise DsecError("conflict", text, sandbox_id=found.id)


async def _leave(app: App, box: Sandbox, remove: bool) -> None:
    if not remove:
        app.note(f"sandbox {box.id} goes on")
        return
    try:
        await asyncio.shield(box.stop())
    except DsecError as exc:
        if exc.kind not in ("not_found", "sandbox_dead"):
            app.note(f"sandbox {box.id} could not be removed: {exc}; its lease ends it, ignoring")
