"""`dsecctl`: the group of all commands, and the one place where a failure becomes a message and an exit status."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

import click
import msgspec

from dsecctl import output
from dsecctl.app import App, Group, global_options
from dsecctl.hints import hint_for
from dsecd.errors import DsecError, kind_of_errno

TIMED_OUT: Final = 124  # as timeout(1)
TOOL_FAILED: Final = 125  # as docker and podman: it was us and not the command
INTERRUPTED: Final = 130

COMMANDS: Final = {
    "run": "run:run", "exec": "execs:exec_", "shell": "execs:shell", "cp": "cp:cp", "logs": "logs:logs",
    "ps": "sandboxes:ps", "inspect": "sandboxes:inspect", "stop": "sandboxes:stop", "pause": "sandboxes:pause",
    "resume": "sandboxes:resume", "extend": "sandboxes:extend", "fork": "vms:fork", "stats": "stats:stats",
    "top": "top:top", "trace": "traces:trace",
    "trajectory": "trajectory:trajectory",
    "events": "events:events", "job": "jobs:job", "image": "images:image", "vm": "vms:vm", "kernel": "kernels:kernel",
    "network": "network:network",
    "choose": "choose:choose", "devices": "devices:devices", "fn": "fn:fn",
    "pack": "envs:pack", "env": "envs:env",
    "rollout": "rollouts:rollout",
    "fleet": "fleet:fleet", "cordon": "drain:cordon", "uncordon": "drain:uncordon", "drain": "drain:drain",
    "project": "projects:project", "principal": "principals:principal", "token": "tokens:token", "audit": "audit:audit",
    "whoami": "principals:whoami", "stdio": "stdio:stdio",
    "doctor": "host:doctor", "info": "host:info", "reload": "host:reload",
    "api": "api:api", "completion": "completion:completion",
}  # fmt: skip


@click.group(
    "dsecctl", cls=Group, lazy=COMMANDS, params=list(global_options(hidden=False)),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)  # fmt: skip
@click.version_option(package_name="dsecd", message="dsecctl %(version)s")
def cli() -> None:
    """Run commands in sandboxes of this host, or of another one over ssh.

    A sandbox is made from a base image with a workspace and toolkits stacked on it; it reaches nothing that was
    not allowed, and has hard limits and a disk of its own. `dsecctl doctor` says what this host can do, `dsecctl image
    import` gets an image.

    The options below may stand before the command or behind it. Exit status: of `run`, `exec` and `shell` that of the
    command, 124 when it ran into --timeout, 125 when dsecctl or the daemon failed, 126 and 127 when there was no such
    program to execute; of all others 0 or 1; 2 for wrong usage, 130 for Ctrl-C.
    """


def main() -> None:
    """The entry point."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command line; returns the exit status."""
    app = App()
    try:
        status = cli.main(argv, prog_name="dsecctl", obj=app, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as exc:
        return _usage(app, exc)
    except click.Abort:
        return INTERRUPTED
    except DsecError as exc:
        return _failed(app, exc)
    except BrokenPipeError:
        output.close_stdout()
        return 128 + signal.SIGPIPE
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename else ""
        return _failed(app, DsecError(kind_of_errno(exc.errno or 0), f"{where}{exc.strerror or exc}"))
    except msgspec.ValidationError as exc:
        return _failed(app, DsecError("invalid", str(exc)))
    except Exception as exc:  # a user is never shown a traceback, unless asked for
        if os.environ.get("DSECCTL_DEBUG"):
            raise
        bug = DsecError("internal", f"a bug in dsecctl: {type(exc).__name__}: {exc}", detail={"client": True})
        return _failed(app, bug)
    return status if isinstance(status, int) else 0


def _failed(app: App, exc: DsecError) -> int:
    output.error(exc, hint_for(exc), json=app.json)
    return TIMED_OUT if exc.kind == "timeout" and app.failure == TOOL_FAILED else app.failure


def _usage(app: App, exc: click.ClickException) -> int:
    path = exc.ctx.command_path if isinstance(exc, click.UsageError) and exc.ctx is not None else "dsecctl"
    output.error(DsecError("invalid", exc.format_message()), f"try: {path} --help", json=app.json)
    return 2
