"""`dsecctl rollout`: what rollouts there are, how far they are, and their end."""

from __future__ import annotations

from typing import Final, get_args

import click

from dsecctl import output
from dsecctl.app import App, Group, command, pass_app
from dsecctl.table import moment, since, size
from dsecd.wire import rollouts as wire

HEAD: Final = ("ID", "STATE", "AGE", "STEPS", "OPEN", "REWARD", "JOB")
STEPS: Final = ("STEP", "ASKED", "ANSWERED AFTER", "SENT", "GOT", "TOKENS")
STATES: Final[tuple[wire.State, ...]] = get_args(wire.State)


@click.group("rollout", cls=Group)
def rollout() -> None:
    """Look at rollouts, and end them.

    Trainers start them through the SDK.
    """


@command(
    "list",
    examples="""
    dsecctl rollout list
    dsecctl rollout list -a --job 42
    dsecctl rollout list --json | jq -r '.[] | select(.attached | not).id'
    """,
)
@click.option("-a", "--all", "everything", is_flag=True, help="Those that are over, too.")
@click.option("--job", help="Only of this job.")
@pass_app
async def list_(app: App, everything: bool, job: str | None) -> None:
    """List rollouts, oldest first.

    STEPS were asked for, OPEN wait for an answer of the trainer.
    """
    async with app.client() as client:
        found = await client.rollouts(job, STATES if everything else ())
    if app.json:
        output.emit(found)
    else:
        output.table(HEAD, [_row(one) for one in found], shrink=(6,))


@command(
    "get",
    examples="""
    dsecctl rollout get ro-01m8n1a3q5k5e467xryh3cyncm
    dsecctl rollout get --json ro-01m8n1a3q5k5e467xryh3cyncm | jq .reason
    """,
)
@click.argument("ident", metavar="ROLLOUT")
@pass_app
async def get(app: App, ident: str) -> None:
    """Show where a rollout stands, also why it ended."""
    async with app.client() as client:
        one = await client.rollout(ident)
    _tell(app, one)


@command("show", examples="dsecctl rollout show ro-01m8n1a3q5k5e467xryh3cyncm")
@click.argument("ident", metavar="ROLLOUT")
@pass_app
async def show(app: App, ident: str) -> None:
    """List the steps of a rollout: what it asked its model, and when it was answered.

    With --json all of them with both texts, tokens and log-probabilities.
    """
    steps: list[wire.Step] = []
    async with app.client() as client:
        while page := await client.rollout_steps(ident, after=steps[-1].step if steps else 0, bodies=True):
            steps += page
    if app.json:
        output.emit(steps)
    else:
        output.table(STEPS, [_step(one) for one in steps])


@command("stop", examples="dsecctl rollout stop ro-01m8n1a3q5k5e467xryh3cyncm")
@click.argument("ident", metavar="ROLLOUT")
@pass_app
async def stop(app: App, ident: str) -> None:
    """End a rollout and remove its sandboxes.

    Its result says `stopped`.
    """
    async with app.client() as client:
        one = await client.stop_rollout(ident)
    if app.json:
        output.emit(one)
    elif not app.quiet:
        output.out(f"{one.id}: {one.state}")


for _one in (list_, get, show, stop):
    rollout.add_command(_one)


def _row(one: wire.Rollout) -> tuple[str, ...]:
    state = f"{one.state}, paused" if one.paused else one.state
    return one.id, state, since(one.created_at), str(one.steps), str(len(one.open)), _reward(one), one.job or "-"


def _reward(one: wire.Rollout) -> str:
    return "-" if one.outcome is None or one.outcome.reward is None else f"{one.outcome.reward:g}"


def _step(one: wire.Step) -> tuple[str, ...]:
    took = "-" if one.answered_at is None else f"{one.answered_at - one.asked_at:.1f}s"
    got = size(len(bytes(one.answer))) if one.answer_seq else "-"
    return str(one.step), moment(one.asked_at), took, size(len(bytes(one.body))), got, str(len(one.tokens))


def _tell(app: App, one: wire.Rollout) -> None:
    if app.json:
        output.emit(one)
        return
    output.pairs([
        ("id", one.id), ("state", f"{one.state}, paused" if one.paused else one.state), ("reason", one.reason or "-"),
        ("job", one.job or "-"), ("agent", one.agent or "-"), ("worker", one.worker or "-"),
        ("trainer", "attached" if one.attached else "-"), ("steps", str(one.steps)),
        ("open", ", ".join(map(str, one.open)) or "-"), ("last entry", str(one.seq)), ("reward", _reward(one)),
        ("created", moment(one.created_at)), ("ended", moment(one.ended_at)),
    ])  # fmt: skip
