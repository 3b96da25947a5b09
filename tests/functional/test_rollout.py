"""Rollouts outlive their trainer, their daemon, and a pause; nothing is lost, and no command runs twice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import daemonkit
import pytest
import rolloutkit as kit
from daemonkit import Daemon, asynchronous, run, started

from dsecd.client import DSecClient, DSecMicroVMRunArgs, DSecSyncClient
from dsecd.client_rollout import Step


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, watched: list[Path]) -> Iterator[Daemon]:
    """The one that these tests share, with the images of rollouts; `fresh_daemon` has them too."""
    with kit.daemon_of(tmp_path_factory.mktemp("rollouts"), watched) as one:
        yield one


@asynchronous
async def test_a_rollout_from_start_to_result(daemon: Daemon) -> None:
    """The scaffold's commands are the model's; diff and reward come back; both sandboxes are gone."""
    async with daemon.client() as client:
        async with kit.trainer(daemon, kit.policy(kit.counting(3))):
            made = await kit.start(client)
            assert made.state in ("running", "waiting_model")
            result = await kit.result_of(client, made.id)
        assert (result.state, result.reason, result.steps) == ("done", "", 4)
        assert result.outcome is not None
        assert (result.outcome.exit_code, result.outcome.reward) == (0, 1.0)
        assert result.outcome.diff == b"step-0\nstep-1\nstep-2\n"
        assert daemon.sandboxes() == {}
        steps = await client.rollout_steps(made.id, bodies=True)
        assert [step.step for step in steps] == [1, 2, 3, 4]
        assert b"said-1" in bytes(steps[2].body)
        assert b"DONE" in bytes(steps[3].answer)
        assert await client.acknowledge([result.id]) == 1


@asynchronous
async def test_the_trainer_is_killed_between_step_and_answer(daemon: Daemon) -> None:
    """What it did not answer is delivered to the next one; without one the rollout waits."""
    async with daemon.client() as client:
        made = await kit.start(client)
        seen: list[int] = []

        async def dies(step: Step) -> None:
            seen.append(step.number)
            if len(seen) == 2:
                await asyncio.sleep(3600)

        async with kit.trainer(daemon, kit.policy(kit.counting(3)), on_step=dies):
            await kit.until(client, made.id, lambda r: seen == [1, 2])
        waits = await kit.until(client, made.id, lambda r: not r.attached)
        assert (waits.state, waits.open) == ("waiting_model", [2])
        async with kit.trainer(daemon, kit.policy(kit.counting(3))):
            result = await kit.result_of(client, made.id)
        assert result.outcome is not None
        assert result.outcome.diff == b"step-0\nstep-1\nstep-2\n"
        await client.acknowledge([result.id])


@asynchronous
async def test_an_answer_is_given_once(daemon: Daemon) -> None:
    """The same answer again is replayed, also when the rollout is over; another one is a conflict."""
    async with daemon.client() as client:
        made = await kit.start(client)
        await kit.waiting(client, made.id)
        steps = client.attach("test")
        step = await anext(steps)
        first = await step.answer(kit.said("echo a > /done"), tokens=[1, 2], logprobs=[-0.5, -1.25])
        again = await step.answer(kit.said("echo a > /done"), tokens=[1, 2], logprobs=[-0.5, -1.25])
        assert (first.replayed, again.replayed, again.seq) == (False, True, first.seq)
        assert await kit.kind_of(step.answer(kit.said("echo b > /done"))) == "conflict"
        assert await kit.kind_of(step.answer(kit.said("echo a > /done"), tokens=[1, 3])) == "conflict"
        await (await anext(steps)).answer(kit.said("DONE"))
        await steps.aclose()
        result = await kit.result_of(client, made.id)
        assert result.outcome is not None
        assert result.outcome.diff == b"a\n"
        late = await step.answer(kit.said("echo a > /done"), tokens=[1, 2], logprobs=[-0.5, -1.25])
        assert late.replayed
        assert await kit.kind_of(step.answer(kit.said("echo b > /done"))) == "conflict"
        kept = (await client.rollout_steps(made.id, bodies=True))[0]
        assert (kept.tokens, kept.logprobs) == ([1, 2], [-0.5, -1.25])
        await client.acknowledge([result.id])


@asynchronous
async def test_a_trainer_that_attaches_twice(daemon: Daemon) -> None:
    """The newer one takes over, with what is open; the older one is told so, once."""
    async with daemon.client() as client:
        made = await kit.start(client)

        async def never(step: Step) -> None:
            await asyncio.sleep(3600)

        async with kit.trainer(daemon, kit.policy([]), on_step=never):
            await kit.until(client, made.id, lambda r: r.attached and r.open == [1])
        silent = client.attach("test")
        step = await anext(silent)
        assert (step.rollout, step.number) == (made.id, 1)
        async with kit.trainer(daemon, kit.policy(kit.counting(1))):
            with pytest.raises(Exception, match="another trainer attached to job 'test'") as caught:
                await anext(silent)
            assert getattr(caught.value, "kind", "") == "conflict"
            result = await kit.result_of(client, made.id)
        assert result.state == "done"
        await client.acknowledge([result.id])


@pytest.mark.parametrize("politely", [True, False], ids=["SIGTERM", "SIGKILL"])
@asynchronous
async def test_the_daemon_dies_while_the_model_is_waited_for(fresh_daemon: Daemon, politely: bool) -> None:
    """The worker asks the next daemon for the same step; the trainer finds it there."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        made = await kit.start(client)
        await kit.waiting(client, made.id)
    daemon.restart(politely=politely)
    async with daemon.client() as client:
        waits = await kit.waiting(client, made.id)
        assert (waits.open, waits.steps) == ([1], 1)
        async with kit.trainer(daemon, kit.policy(kit.counting(2))):
            result = await kit.result_of(client, made.id)
        assert result.outcome is not None
        assert (result.steps, result.outcome.diff) == (3, b"step-0\nstep-1\n")
        await client.acknowledge([result.id])


@pytest.mark.parametrize("politely", [True, False], ids=["SIGTERM", "SIGKILL"])
@asynchronous
async def test_the_daemon_dies_while_a_command_runs(fresh_daemon: Daemon, politely: bool) -> None:
    """The scaffold's own command, and the worker's exec.run: each runs once. A grader in a fresh copy starts anew."""
    daemon = fresh_daemon
    diff, grade = "echo run >> /runs; sleep 1.5; cat /done /runs", "sleep 1.5; test $(wc -l < /runs) = 1"
    commands = kit.counting(2, pause=1.5)
    async with daemon.client() as client:
        made = await kit.start(client, task=kit.task("one", grade=grade, diff=diff))
        async with kit.trainer(daemon, kit.policy(commands)):
            await kit.until(client, made.id, lambda r: r.steps == 1 and r.state == "running")
            await asyncio.sleep(0.5)
    daemon.restart(politely=politely)
    async with daemon.client() as client, kit.trainer(daemon, kit.policy(commands)):
        await kit.until(client, made.id, lambda r: r.steps == 3 and r.state == "running")
        await asyncio.sleep(0.5)
    daemon.restart(politely=politely)
    await asyncio.sleep(1.8)
    daemon.restart(politely=politely)
    async with daemon.client() as client:
        result = await kit.result_of(client, made.id)
        assert result.outcome is not None
        assert (result.outcome.diff, result.outcome.reward) == (b"step-0\nstep-1\nrun\n", 1.0)
        await client.acknowledge([result.id])


@asynchronous
async def test_a_paused_rollout_goes_on_with_its_answer(fresh_daemon: Daemon) -> None:
    """The job is paused while no trainer is there; a daemon's death changes nothing; the answer resumes both."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        made = await kit.start(client)
        await kit.waiting(client, made.id)
        paused = await client.pause_job("test")
        assert {one.id: one.state for one in paused} == {made.agent: "paused", made.worker: "paused"}
        assert (await client.rollout(made.id)).paused
    daemon.restart(politely=False)
    async with daemon.client() as client:
        found = await client.rollout(made.id)
        assert (found.state, found.open, found.paused) == ("waiting_model", [1], True)
        async with kit.trainer(daemon, kit.policy(kit.counting(2))):
            result = await kit.result_of(client, made.id)
        assert result.outcome is not None
        assert result.outcome.diff == b"step-0\nstep-1\n"
        await client.acknowledge([result.id])


@asynchronous
async def test_a_rollout_that_was_paused_in_the_middle_of_a_command_goes_on_when_a_trainer_attaches(
    daemon: Daemon,
) -> None:
    """It waits for nobody's answer, so nothing else would resume it."""
    async with daemon.client() as client:
        made = await kit.start(client)
        async with kit.trainer(daemon, kit.policy(kit.counting(2, pause=1))):
            await kit.until(client, made.id, lambda r: r.steps == 1 and r.state == "running")
        for ident in (made.agent, made.worker):
            await (await client.get(ident)).pause()
        async with kit.trainer(daemon, kit.policy(kit.counting(2, pause=1))):
            result = await kit.result_of(client, made.id)
        assert result.outcome is not None
        assert result.outcome.diff == b"step-0\nstep-1\n"
        await client.acknowledge([result.id])


@asynchronous
async def test_results_are_delivered_until_they_are_acknowledged(fresh_daemon: Daemon) -> None:
    """Each has one id for ever, over a restart too; a cursor skips, an acknowledgement removes."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        async with kit.trainer(daemon, kit.policy(kit.counting(1))):
            made = [await kit.start(client, name=f"n{n}") for n in range(3)]
            first = [await kit.result_of(client, one.id) for one in made]
        assert {one.rollout for one in first} == {one.id for one in made}
    daemon.restart(politely=False)
    async with daemon.client() as client:
        again = await client.rollout_results("test")
        assert sorted((one.id, one.rollout) for one in again) == sorted((one.id, one.rollout) for one in first)
        assert await client.rollout_results("test", after=again[0].id) == again[1:]
        assert await client.rollout_results("another") == []
        assert await client.acknowledge([again[0].id, 10**9]) == 1
        assert await client.rollout_results("test") == again[1:]
        assert await client.acknowledge([one.id for one in again]) == 2
        assert await client.rollout_results("test") == []


@asynchronous
async def test_started_twice_under_one_key_it_is_one(fresh_daemon: Daemon) -> None:
    """A trainer that died while it started its rollouts starts them again; also a daemon that died meanwhile."""
    daemon = fresh_daemon
    async with daemon.client() as client:
        made = await kit.start(client, request_id="k-1")
        again = await kit.start(client, request_id="k-1")
        assert again.id == made.id
        starting = asyncio.ensure_future(kit.start(client, name="two", request_id="k-2"))
        await asyncio.sleep(0.02)
        daemon.restart(politely=False)
        assert await kit.kind_of(starting) in ("outcome_unknown", "network")
    async with daemon.client() as client:
        second = await kit.start(client, name="two", request_id="k-2")
        alive = await client.rollouts("test")
        assert {one.id for one in alive} == {made.id, second.id}
        assert len(daemon.sandboxes()) == 4
        for one in alive:
            stopped = await client.stop_rollout(one.id)
            assert (stopped.state, stopped.reason) == ("stopped", "stopped by request")
        assert daemon.sandboxes() == {}
        results = await client.rollout_results("test")
        assert [one.state for one in results] == ["stopped", "stopped"]
        await client.acknowledge([one.id for one in results])


@asynchronous
async def test_what_cannot_be_started(daemon: Daemon) -> None:
    """One clear error, and nothing is left of it but a result that says so."""
    async with daemon.client() as client:
        cases: list[tuple[Any, Any, str]] = [
            (kit.agent_args(), kit.worker_args(name="w"), "invalid"),
            (kit.agent_args(lease_s=5), kit.worker_args(), "invalid"),
            (kit.agent_args(container_image="nothing:1"), kit.worker_args(), "not_found"),
            (kit.agent_args(), kit.worker_args(container_image="nothing:1"), "not_found"),
        ]
        for agent, worker, kind in cases:
            assert await kit.kind_of(client.start_rollout(agent, worker, job="test")) == kind
        assert await kit.kind_of(client.start_rollout(kit.agent_args(), kit.worker_args(), task="x" * (1 << 20))) == (
            "invalid"
        )
        assert await kit.kind_of(client.rollout("ro-unknown")) == "not_found"
        await _settled(client)
        assert daemon.sandboxes() == {}
        results = await client.rollout_results("test")
        assert [one.state for one in results] == ["failed", "failed"]
        assert "nothing:1" in results[0].reason
        await client.acknowledge([one.id for one in results])


async def _settled(client: DSecClient) -> None:
    for one in await client.rollouts():
        await kit.over(client, one.id)


def test_the_blocking_sdk_forwards_to_an_endpoint(daemon: Daemon) -> None:
    """A trainer without an event loop; its model is an HTTP server beside it, whose log-probabilities are kept."""
    with kit.endpoint(kit.policy(kit.counting(2))) as url, DSecSyncClient(daemon.url) as client:
        made = client.start_rollout(kit.agent_args(), kit.worker_args(), task=kit.task("one"), job="test")
        steps = client.attach("test")
        for step in steps:
            assert step.body["model"] == "policy"
            step.forward(url)
            if "said-1" in str(step.body):
                break
        steps.close()  # type: ignore[attr-defined]
        (result,) = client.rollout_results("test", wait_s=30)
        assert result.outcome is not None
        assert (result.rollout, result.outcome.diff) == (made.id, b"step-0\nstep-1\n")
        kept = client.rollout_steps(made.id, bodies=True)
        assert [(step.tokens, step.logprobs) for step in kept] == [([7], [-0.5])] * 3
        assert client.acknowledge([result.id]) == 1
        deadline = time.monotonic() + 10
        while client.rollouts("test") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert client.rollout(made.id).state == "done"


@asynchronous
async def test_an_endpoint_that_is_away_is_the_trainers_trouble(daemon: Daemon) -> None:
    """The step stays open, for a second try; a refusal of the endpoint is passed on to the scaffold as it is."""
    async with daemon.client() as client:
        made = await kit.start(client)
        steps = client.attach("test")
        step = await anext(steps)
        assert await kit.kind_of(step.forward("http://127.0.0.1:9/v1")) == "network"
        assert (await client.rollout(made.id)).open == [1]
        await step.answer({"error": {"message": "no"}}, status=400)
        await steps.aclose()
        result = await kit.result_of(client, made.id)
        assert result.outcome is not None
        assert result.outcome.exit_code == 1
        assert "HTTP Error 400" in result.outcome.error
        await client.acknowledge([result.id])


def test_dsecctl_rollout(daemon: Daemon) -> None:
    """list, get, show and stop, for people within 80 columns and for programs."""

    def dsecctl(*argv: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).parent / "dsecctl"), "-H", daemon.url, "rollout", *argv],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith(("[", "{")))
        return done.stdout

    with DSecSyncClient(daemon.url) as client:
        made = client.start_rollout(kit.agent_args(), kit.worker_args(), task=kit.task("one"), job="cli")
        steps = client.attach("cli")
        next(steps).answer(kit.said("true"), tokens=[1, 2, 3])
        next(steps)
        steps.close()  # type: ignore[attr-defined]
        (line,) = [one for one in dsecctl("list", "--job", "cli").splitlines() if made.id in one]
        assert line.split()[1] == "waiting_model"
        assert [one["id"] for one in json.loads(dsecctl("list", "--json"))] == [made.id]
        shown = dsecctl("get", made.id)
        assert made.agent in shown
        assert made.worker in shown
        table = dsecctl("show", made.id).splitlines()
        assert [row.split()[0] for row in table[1:]] == ["1", "2"]
        assert table[1].split()[-1] == "3"
        both = json.loads(dsecctl("show", "--json", made.id))
        assert (both[0]["answer"]["choices"][0]["message"]["content"], both[1]["answer"]) == ("true", None)
        assert dsecctl("stop", made.id) == f"{made.id}: stopped\n"
        assert dsecctl("list", "--job", "cli").count("\n") == 1
        assert "stopped" in dsecctl("list", "-a", "--job", "cli")
        client.acknowledge([one.id for one in client.rollout_results("cli")])


@asynchronous
async def test_the_daemon_dies_while_a_rollout_ends(fresh_daemon: Daemon) -> None:
    """Decided or not yet: the next daemon finishes it, with one result, and nothing is left of it."""
    daemon = fresh_daemon
    for pause in (0.0, 0.01, 0.03):
        async with daemon.client() as client:
            made = await kit.start(client, name=f"after-{pause}")
            stopping = asyncio.ensure_future(client.stop_rollout(made.id, "enough"))
            await asyncio.sleep(pause)
            daemon.restart(politely=False)
            await asyncio.gather(stopping, return_exceptions=True)
        async with daemon.client() as client:
            if (await client.rollout(made.id)).state in ("starting", "running", "waiting_model"):
                await client.stop_rollout(made.id, "enough")
            found = await kit.over(client, made.id)
            assert (found.state, found.reason) == ("stopped", "enough")
            assert daemon.sandboxes() == {}
            results = await client.rollout_results("test")
            assert [(one.rollout, one.state, one.reason) for one in results] == [(made.id, "stopped", "enough")]
            await client.acknowledge([one.id for one in results])
            assert list((daemon.run_dir / "rollouts").iterdir()) == []


@asynchronous
async def test_the_worker_is_its_containers_root(daemon: Daemon) -> None:
    """The socket is root's, so its program is, whatever user the spec or the image has; commands are the agent's."""
    async with daemon.client() as client, kit.trainer(daemon, kit.policy(["id -un > /tmp/done"])):
        made = await client.start_rollout(
            kit.agent_args(init_user="nobody"), kit.worker_args(init_user="nobody"), job="test",
            task={**kit.task("one"), "diff": "cat /tmp/done", "files": {"/tmp/scaffold.py": kit.SCAFFOLD},
                  "scaffold": "python3 /tmp/scaffold.py one", "grade": ""},
        )  # fmt: skip
        result = await kit.result_of(client, made.id)
        assert result.outcome is not None
        assert (result.outcome.diff, result.outcome.reward) == (b"nobody\n", None)
        await client.acknowledge([result.id])


@asynchronous
async def test_a_rollout_that_is_stopped_while_it_is_made(daemon: Daemon) -> None:
    """Whoever starts it gets an error or a rollout that is over; nothing is left."""
    async with daemon.client() as client:
        for pause in (0.0, 0.01, 0.02, 0.04, 0.06):
            starting = asyncio.ensure_future(kit.start(client))
            while not (found := await client.rollouts("test")):
                await asyncio.sleep(0)
            await asyncio.sleep(pause)
            stopped = await client.stop_rollout(found[0].id, "not wanted")
            assert (stopped.state, stopped.reason) == ("stopped", "not wanted")
            assert await kit.kind_of(starting) in ("", "conflict", "sandbox_dead", "internal")
            assert daemon.sandboxes() == {}
            (result,) = await client.rollout_results("test")
            assert (result.state, result.rollout) == ("stopped", found[0].id)
            await client.acknowledge([result.id])


def test_a_rollout_under_runc(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory, watched: list[Path]) -> None:
    """The worker's directory is bound in by the other runtime, too."""
    with started(tmp_path_factory.mktemp("runc"), watched, daemon.state / "images", runtime="runc") as one:

        async def work() -> None:
            async with one.client() as client, kit.trainer(one, kit.policy(kit.counting(1))):
                made = await kit.start(client)
                result = await kit.result_of(client, made.id)
                assert result.outcome is not None
                assert (result.state, result.outcome.diff) == ("done", b"step-0\n")

        run(work())


@asynchronous
async def test_the_grader_sees_none_of_the_agents_processes(daemon: Daemon) -> None:
    """What the agent left running cannot touch the verdict; what the grader does is not in the diff."""
    lurk = "(while :; do rm -f /verdict; sleep 0.01; done) </dev/null >/dev/null 2>&1 & echo lurking > /done"
    grade = "touch /verdict; sleep 0.5; test -e /verdict"
    async with daemon.client() as client, kit.trainer(daemon, kit.policy([lurk])):
        rewards = []
        for fresh in (True, False):
            made = await kit.start(client, task=kit.task("one", grade=grade, fresh=fresh))
            result = await kit.result_of(client, made.id)
            assert result.outcome is not None
            assert result.outcome.diff == b"lurking\n"
            rewards.append(result.outcome.reward)
            await client.acknowledge([result.id])
        assert rewards == [1.0, 0.0]
        assert daemon.sandboxes() == {}


@asynchronous
async def test_an_agent_in_a_microvm(daemon: Daemon) -> None:
    """The worker is a container; what it drives may be a virtual machine, paused (saved) and resumed by an answer."""
    daemonkit.guest_kernels()
    daemon.link_kernels()
    agent = DSecMicroVMRunArgs(**vars(kit.agent_args()))
    async with daemon.client() as client:
        task = kit.task("one", fresh=False)
        made = await client.start_rollout(agent, kit.worker_args(), task=task, job="test")
        await kit.until(client, made.id, lambda r: r.state == "waiting_model", 120)
        await client.pause_job("test")
        async with kit.trainer(daemon, kit.policy(kit.counting(2))):
            result = await kit.result_of(client, made.id, 240)
        assert result.outcome is not None
        assert (result.outcome.diff, result.outcome.reward) == (b"step-0\nstep-1\n", 1.0)
        await client.acknowledge([result.id])
