"""Who may call which method: the role it takes, and what it is about. Grouped, so that a reader sees all at once.

A method that stands in no line is for the admin of the root project alone; a test wants each in one.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

ROOT: Final = "root"
Role = Literal["nobody", "viewer", "user", "admin"]
RANK: Final[dict[str, int]] = {"nobody": 0, "viewer": 1, "user": 2, "admin": 3}

# open: nothing of anybody's. project: its handler keeps to the caller's subtree. sandbox, rollout: `id` must be of
# that subtree. host: what all tenants share; for those of the root project.
Scope = Literal["open", "project", "sandbox", "rollout", "host"]


class Access(Struct, frozen=True):
    role: Role
    scope: Scope


_TABLE: Final[dict[Access, str]] = {
    Access("nobody", "open"): "daemon.hello session.login session.whoami",
    Access("viewer", "open"):
        "daemon.info sandbox.choose network.services image.list image.get image.verify environment.rules kernel.list"
        " fleet.status",
    Access("viewer", "project"):
        "sandbox.list sandbox.events job.list device.list rollout.list project.list project.show principal.list"
        " token.create token.revoke trace.get trace.list",
    Access("viewer", "sandbox"):
        "sandbox.get sandbox.wait sandbox.stats trajectory.read trajectory.verify trajectory.export network.get"
        " network.log exec.list vm.snapshots",
    Access("viewer", "rollout"): "rollout.get rollout.steps",
    Access("user", "open"):
        "fncall.run fncall.batch image.import image.bootstrap image.collapse image.pull environment.import"
        " environment.export rollout.worker.task rollout.worker.ask rollout.worker.partial rollout.worker.result",
    Access("user", "project"):
        "sandbox.create sandbox.create_many sandbox.stop_many job.pause job.resume job.stop lease.renew rollout.start"
        " rollout.results rollout.ack",
    Access("user", "sandbox"):
        "sandbox.stop sandbox.pause sandbox.resume sandbox.fork sandbox.pack_diff sandbox.extend sandbox.set_network"
        " exec.run exec.start exec.attach exec.stdin exec.signal exec.resize exec.wait session.open session.run"
        " session.close port.connect file.read file.write file.list file.stat file.mkdir file.remove file.rename"
        " tree.upload tree.download vm.snapshot vm.revert vm.drop vm.console screen.capture screen.input",
    Access("user", "rollout"): "rollout.stop rollout.attach rollout.answer",
    Access("admin", "project"):
        "project.create project.set project.remove principal.add principal.remove audit.read",
    Access("admin", "host"):
        "daemon.stats daemon.cordon daemon.doctor daemon.fix daemon.reload daemon.drain fleet.cordon fleet.doctor"
        " image.push image.remove image.gc kernel.import_deb kernel.build kernel.remove",
}  # fmt: skip

BY_METHOD: Final[dict[str, Access]] = {name: access for access, names in _TABLE.items() for name in names.split()}
CLOSED: Final = Access("admin", "host")

# Management: each goes into the audit log, refused ones too.
AUDITED: Final = frozenset((
    "project.create", "project.set", "project.remove", "principal.add", "principal.remove", "token.create",
    "token.revoke", "daemon.cordon", "daemon.drain", "daemon.fix", "daemon.reload", "image.remove", "image.gc",
    "image.push", "kernel.import_deb", "kernel.build", "kernel.remove",
))  # fmt: skip


def within(project: str, top: str) -> bool:
    """Whether a project is `top` or below it."""
    return project == top or project.startswith(top + "/")


def ancestry(project: str) -> list[str]:
    """It and all above it, root last."""
    found = [project]
    while "/" in project:
        project = project.rpartition("/")[0]
        found.append(project)
    return found
