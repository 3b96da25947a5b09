"""`dsecctl network`: what a sandbox may reach, and what it tried in vain."""

from __future__ import annotations

import click

from dsecctl import output
from dsecctl.app import App, Group, command, pass_app
from dsecctl.table import moment, printable
from dsecctl.values import SANDBOX
from dsecd.wire import network as wire


@click.group("network", cls=Group)
def network() -> None:
    """See and change what sandboxes may reach.

    A rule is a service of the daemon's configuration, or HOST[:PORT[/tcp|udp]], where HOST is a name, `*.` and a
    domain, an address or a network; IPv6 in brackets. What no rule allows is denied.
    """


@command(
    "set",
    examples="""
    dsecctl network set box pypi example.org:443
    dsecctl network set box '*.example.org' --deny evil.example.org
    dsecctl network set box --none
    """,
)
@click.option("--deny", "denied", multiple=True, metavar="RULE", help="Take away from what others allow; repeatable.")
@click.option("--none", "nothing", is_flag=True, help="Cut it off from everything.")
@click.argument("sandbox", type=SANDBOX)
@click.argument("rules", nargs=-1, metavar="[RULE]...")
@pass_app
async def set_(app: App, denied: tuple[str, ...], nothing: bool, sandbox: str, rules: tuple[str, ...]) -> None:
    """Give a sandbox these rules in place of all it had.

    They hold when the command ends. Connections that they do not allow any more are cut, others go on.
    """
    if nothing == bool(rules or denied):
        raise click.UsageError("give rules, or --none")
    async with app.sandbox(sandbox) as (_client, box):
        _show(app, await box.set_network(dict.fromkeys(rules, True) | dict.fromkeys(denied, False)))


@command("show", examples="dsecctl network show box")
@click.argument("sandbox", type=SANDBOX)
@pass_app
async def show(app: App, sandbox: str) -> None:
    """Show a sandbox's rules, its addresses, and what names it asked for have opened."""
    async with app.sandbox(sandbox) as (_client, box):
        _show(app, await box.network())


@command("log", examples="dsecctl network log box")
@click.argument("sandbox", type=SANDBOX)
@pass_app
async def log(app: App, sandbox: str) -> None:
    """List what a sandbox tried to reach and may not, the latest last.

    The last 256 different ones since the daemon started. All names are counted, of packets a sample (five in a second);
    `dsecctl stats --json` has the number of all.
    """
    async with app.sandbox(sandbox) as (_client, box):
        found = await box.network_log()
    if app.json:
        output.emit(found)
        return
    rows = [(moment(one.last_at), str(one.count), printable(one.what)) for one in found]
    output.table(("LAST", "TIMES", "WHAT"), rows, shrink=(2,))


@command("services", examples="dsecctl network services")
@pass_app
async def services(app: App) -> None:
    """List what rules may call by name: the daemon's configuration."""
    async with app.client() as client:
        found = await client.network_services()
    if app.json:
        output.emit(found)
        return
    rows = [(one.name, ", ".join(one.hosts), ", ".join(one.ports) or "all") for one in found]
    output.table(("SERVICE", "HOSTS", "PORTS"), rows, shrink=(1, 2))


def _show(app: App, found: wire.SandboxNetwork) -> None:
    if app.json:
        output.emit(found)
        return
    allowed = [key for key, yes in found.rules.items() if yes]
    denied = [key for key, yes in found.rules.items() if not yes]
    output.wrapped("allowed: ", ", ".join(allowed) or "nothing")
    if denied:
        output.wrapped("denied: ", ", ".join(denied))
    output.wrapped("addresses: ", ", ".join(found.addresses) or "none: it has no link")
    if found.open:
        output.wrapped("open by name: ", ", ".join(found.open))


for _command in (set_, show, log, services):
    network.add_command(_command)
