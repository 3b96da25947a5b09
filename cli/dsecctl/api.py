"""`dsecctl api`: the protocol's JSON schema, made from the messages themselves."""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from dsecctl import output
from dsecctl.app import App, command, pass_app
from dsecctl.values import ParamType
from dsecd.errors import KINDS
from dsecd.wire import base, fncall, rollouts, sandbox
from dsecd.wire.methods import METHODS, Method

REF: Final = "#/$defs/{name}"
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
NOTIFICATIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "stream.data": base.StreamData, "stream.eof": base.StreamEof, "stream.credit": base.StreamCredit,
    "exec.output": base.ExecOutput, "progress": base.Progress, "sandbox.event": sandbox.Event,
    "fncall.case": fncall.CaseJudged, "rollout.step": rollouts.StepAsked,
    "$/cancelRequest": base.Cancel,
}  # fmt: skip


class _MethodName(ParamType):
    name = "method"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        names = [name for name in METHODS if name.startswith(incomplete)]
        return [click.shell_completion.CompletionItem(name, help=METHODS[name].help) for name in names]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in METHODS:
            self.fail(f"{value!r} is no method; `dsecctl api --list` has them", param, ctx)
        return str(value)


@command(
    "api",
    examples="""
    dsecctl api --list
    dsecctl api exec.run
    dsecctl api > dsecd-api.json
    """,
)
@click.option("--list", "listing", is_flag=True, help="Names of all methods and what they do.")
@click.argument("method", type=_MethodName(), required=False)
@pass_app
def api(app: App, listing: bool, method: str | None) -> None:
    """Print the JSON schema of the protocol, or of one METHOD.

    Each method has `params`, `result`, and what streams beside it. docs/protocol.md has the rules that a schema cannot
    say. This needs no daemon.
    """
    if listing and app.json:
        output.emit({name: one.help for name, one in METHODS.items()})
    elif listing:
        output.table(("METHOD", "WHAT IT DOES"), [(name, one.help) for name, one in METHODS.items()], shrink=(1,))
    else:
        output.emit(schema_of(method) if method else schema())


def schema() -> dict[str, Any]:
    """All methods, notifications and error data."""
    structs: list[Any] = [part for one in METHODS.values() for part in (one.params, one.result)]
    structs += [*NOTIFICATIONS.values(), base.ErrorBody]
    refs, found = _components(structs)
    pairs = iter(refs)
    methods = {name: _method(one, next(pairs), next(pairs)) for name, one in METHODS.items()}
    return {
        "$schema": DIALECT, "protocol": base.PROTOCOL, "methods": methods,
        "notifications": {name: next(pairs) for name in NOTIFICATIONS}, "error": next(pairs), "kinds": list(KINDS),
        "$defs": found,
    }  # fmt: skip


def schema_of(name: str) -> dict[str, Any]:
    """One method, with only what it needs."""
    one = METHODS[name]
    (params, result), found = _components([one.params, one.result])
    return {"$schema": DIALECT, "method": name, **_method(one, params, result), "$defs": found}


def _method(one: Method, params: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    return {
        "help": one.help, "params": params, "result": result, "idempotent_by_request_id": one.once,
        "role": one.access.role, "about": one.access.scope,
        "upload": one.upload, "download": one.download, "notifies": one.events or None,
    }  # fmt: skip


def _components(structs: list[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    refs, found = msgspec.json.schema_components(structs, ref_template=REF)
    return [*refs], found
