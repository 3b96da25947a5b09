"""`dsecctl doctor --fleet`: what is wrong with which host."""

from __future__ import annotations

from typing import Final

import click

from dsecctl import output
from dsecctl.app import App
from dsecd.wire import fleet as wire

HEAD: Final = ("HOST", "VERSION", "STATE", "FAILS", "WARNS")
AWAY: Final = (
    "is it up? there: systemctl status dsecd, journalctl -u dsecd; from the coordinator: its ssh key and known_hosts"
)
ORDER: Final = ("fail", "warn")
COLOURS: Final = {"fail": "red", "warn": "yellow"}


async def examine(app: App) -> int:
    """Exit status: 1 when a host cannot be asked, or something fails on one."""
    async with app.client() as client:
        found: wire.Doctors = await client.call("fleet.doctor", wire.DoctorParams())
    if app.json:
        output.emit(found)
    else:
        output.table(HEAD, [_row(host) for host in found.hosts], shrink=(0, 1))
        for level, names, text, fix in differences(found.hosts):
            output.wrapped(f"{click.style(level, fg=COLOURS[level])}  {', '.join(names)}: ", text)
            if fix:
                output.wrapped("      fix: ", fix)
    return int(any(host.problem or _count(host, "fail") for host in found.hosts))


def differences(hosts: list[wire.Examined]) -> list[tuple[str, list[str], str, str]]:
    """Level, hosts, text and what to do, of all that is not good; what several hosts say alike once. Failures first."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for host in hosts:
        if host.problem:
            said.setdefault(("fail", f"cannot be asked: {host.problem}", AWAY), []).append(host.name)
        for check in host.checks:
            if check.level in ORDER:
                said.setdefault((check.level, f"{check.name}: {check.text}", check.fix), []).append(host.name)
    versions = sorted({host.version for host in hosts if host.version})
    if len(versions) > 1:
        names = [host.name for host in hosts if host.version not in ("", versions[-1])]
        text = f"not all hosts have the same version: {', '.join(versions)}"
        said["warn", text, "dsecctl fleet drain HOST, upgrade it, dsecctl fleet uncordon HOST"] = names
    found = [(level, names, text, fix) for (level, text, fix), names in said.items()]
    return sorted(found, key=lambda one: ORDER.index(one[0]))


def _row(host: wire.Examined) -> tuple[str, ...]:
    fails, warns = _count(host, "fail"), _count(host, "warn")
    state = "away" if host.problem else "fail" if fails else "warn" if warns else "ok"
    return (host.name, host.version or "-", state, str(fails), str(warns))


def _count(host: wire.Examined, level: str) -> int:
    return sum(check.level == level for check in host.checks)
