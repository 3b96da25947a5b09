"""No sequence of delegations gives a principal what its parent lacks; and how quotas are counted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dsecd.api.gate import Gate
from dsecd.errors import DsecError
from dsecd.tenants.ledger import Ledger
from dsecd.tenants.model import NAMES, Actor, Token, Tree
from dsecd.wire import tenants as wire
from dsecd.wire.access import AUDITED, BY_METHOD, RANK, ROOT, ancestry, within
from dsecd.wire.call import Peer
from dsecd.wire.methods import METHODS
from dsecd.wire.sandbox import Owner, Spec
from dsecd.wire.tenants import Quotas

BOSS = Actor("uid:0", ROOT, "admin")
SEGMENTS = ("a", "b")
PATHS = [ROOT, *(f"root/{x}" for x in SEGMENTS), *(f"root/{x}/{y}" for x in SEGMENTS for y in SEGMENTS),
         "root/a/a/a", "elsewhere"]  # fmt: skip
PEOPLE = ["ann", "ben", "cy", "dee"]
quota = st.none() | st.integers(0, 6)
quotas = st.builds(lambda s, c, m, d, r: Quotas(sandboxes=s, cpu=c, memory_mb=m, disk_mb=d, creates_per_s=r),
                   quota, quota, quota, quota, st.none() | st.integers(1, 6))  # fmt: skip


class Delegations(RuleBasedStateMachine):
    """Anybody tries anything; the oracle knows only: who gave what to whom, and what the giver had then."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        self.may: dict[str, tuple[str, int]] = {}  # principal: project and rank, as given

    def actor(self, name: str) -> Actor | None:
        if name == "uid:0":
            return BOSS
        known = self.tree.principals.get(name)
        return None if known is None else Actor(known.name, known.project, known.role)

    def effective(self, path: str, name: str) -> float:
        """By hand: the least on the way up."""
        values = [getattr(self.tree.projects[one].quotas, name) for one in ancestry(path) if one in self.tree.projects]
        return min([value for value in values if value is not None], default=float("inf"))

    @rule(who=st.sampled_from(["uid:0", *PEOPLE]), path=st.sampled_from(PATHS), given=quotas)
    def create_project(self, who: str, path: str, given: Quotas) -> None:
        actor = self.actor(who)
        if actor is None:
            return
        try:
            self.tree.create_project(actor, path, given)
        except DsecError:
            return
        parent = path.rpartition("/")[0]
        assert RANK[actor.role] == 3
        assert within(parent, actor.project)
        for name in NAMES:
            assert (getattr(given, name) or 0) <= self.effective(parent, name)

    @rule(who=st.sampled_from(["uid:0", *PEOPLE]), path=st.sampled_from(PATHS), given=quotas,
          unset=st.lists(st.sampled_from(NAMES), max_size=2, unique=True))  # fmt: skip
    def set_project(self, who: str, path: str, given: Quotas, unset: list[str]) -> None:
        actor = self.actor(who)
        if actor is None:
            return
        before = {one: self.tree.limits(one) for one in self.tree.projects}
        try:
            self.tree.set_project(actor, path, given, unset)
        except DsecError:
            assert before == {one: self.tree.limits(one) for one in self.tree.projects}
            return
        assert RANK[actor.role] == 3
        assert within(path, actor.project)
        if actor.project != ROOT:  # its own share did not change by what it did
            assert path != actor.project
            assert before[actor.project] == self.tree.limits(actor.project)

    @rule(who=st.sampled_from(["uid:0", *PEOPLE]), path=st.sampled_from(PATHS), live=st.integers(0, 1))
    def remove_project(self, who: str, path: str, live: int) -> None:
        actor = self.actor(who)
        if actor is None:
            return
        try:
            self.tree.remove_project(actor, path, live)
        except DsecError:
            return
        assert not live
        assert path != actor.project
        assert within(path, actor.project)
        assert not [one for one in self.tree.projects if within(one, path)]
        assert all(one.project != path for one in self.tree.principals.values())

    @rule(who=st.sampled_from(["uid:0", *PEOPLE]), name=st.sampled_from(PEOPLE), path=st.sampled_from(PATHS),
          role=st.sampled_from(["viewer", "user", "admin"]), uid=st.none() | st.integers(1000, 1002))  # fmt: skip
    def add_principal(self, who: str, name: str, path: str, role: wire.Granted, uid: int | None) -> None:
        actor = self.actor(who)
        if actor is None:
            return
        try:
            made = self.tree.add_principal(actor, name, path, role, uid)
        except DsecError:
            return
        assert RANK[actor.role] == 3
        assert within(path, actor.project)
        assert uid is None or actor.project == ROOT
        assert made.number > 0xFFFFFFFF  # no uid is one
        self.may[name] = (path, RANK[role])

    @rule(who=st.sampled_from(["uid:0", *PEOPLE]), name=st.sampled_from(PEOPLE))
    def remove_principal(self, who: str, name: str) -> None:
        actor = self.actor(who)
        if actor is None:
            return
        try:
            gone, _ = self.tree.remove_principal(actor, name)
        except DsecError:
            return
        assert RANK[actor.role] == 3
        assert within(gone.project, actor.project)
        del self.may[name]

    @rule(who=st.sampled_from(["uid:0", *PEOPLE]), name=st.sampled_from(PEOPLE), number=st.integers(0, 9))
    def create_token(self, who: str, name: str, number: int) -> None:
        actor = self.actor(who)
        if actor is None:
            return
        try:
            self.tree.create_token(actor, Token(f"{number}" * 64, name, 0.0))
        except DsecError:
            return
        holder = self.tree.principals[name]  # the token gives its maker nothing that it does not have
        assert within(holder.project, actor.project)
        assert who == name or RANK[actor.role] == 3

    @invariant()
    def nobody_has_more(self) -> None:
        assert self.may == {one.name: (one.project, RANK[one.role]) for one in self.tree.principals.values()}
        for path in self.tree.projects:
            limits = self.tree.limits(path)
            for name in NAMES:
                own, above = getattr(limits, name), self.effective(path.rpartition("/")[0] or ROOT, name)
                assert (float("inf") if own is None else own) == self.effective(path, name) <= above
        assert all(token.principal in self.tree.principals for token in self.tree.tokens.values())
        numbers = [one.number for one in self.tree.principals.values()]
        assert len(numbers) == len(set(numbers))


TestDelegations = Delegations.TestCase
TestDelegations.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# -- quotas -----------------------------------------------------------------------------------------------------------
def ledger_of(given: dict[str, Quotas]) -> tuple[Ledger, list[float]]:
    tree, now = Tree(), [0.0]
    tree.set_project(BOSS, ROOT, given.pop(ROOT, Quotas()), [])
    for path, one in given.items():
        tree.create_project(BOSS, path, one)
    return Ledger(tree, lambda: now[0]), now


def begin(ledger: Ledger, project: str, spec: Spec) -> None:
    ledger.allow(project, spec)
    ledger.take(project, spec)


def test_a_sandbox_counts_in_its_project_and_all_above_it() -> None:
    ledger, _ = ledger_of({ROOT: Quotas(sandboxes=3), "root/a": Quotas(sandboxes=2), "root/a/b": Quotas(cpu=1)})
    spec = Spec(image="x", cpu=0.3)
    begin(ledger, "root/a/b", spec)
    begin(ledger, "root/a", spec)
    with pytest.raises(DsecError, match=r"project root/a uses 2 of 2 sandboxes, and 1 more") as caught:
        ledger.allow("root/a/b", spec)
    assert caught.value.kind == "quota"
    assert caught.value.detail == {"project": "root/a", "quota": "sandboxes", "used": 2, "limit": 2, "asked": 1}
    begin(ledger, ROOT, spec)
    ledger.give_back("root/a", spec)
    begin(ledger, "root/a/b", spec)
    ledger.give_back(ROOT, spec)
    with pytest.raises(DsecError, match=r"root/a/b uses 0\.6 of 1 cpu, and 0\.5 more"):
        ledger.allow("root/a/b", msgspec.structs.replace(spec, cpu=0.5))


def test_creates_per_second_are_a_bucket_of_the_whole_branch() -> None:
    ledger, now = ledger_of({"root/a": Quotas(creates_per_s=2), "root/a/b": Quotas(creates_per_s=2)})
    spec = Spec(image="x")
    begin(ledger, "root/a/b", spec)
    begin(ledger, "root/a", spec)
    with pytest.raises(DsecError, match=r"2 sandboxes a second.*try again in 0\.5 s") as caught:
        ledger.allow("root/a/b", spec)
    assert caught.value.retryable
    assert caught.value.detail["retry_after_s"] == 0.5
    assert caught.value.detail["project"] == "root/a"
    now[0] = 0.5
    begin(ledger, "root/a/b", spec)
    now[0] = 100.0  # it does not save up more than a second's
    begin(ledger, "root/a", spec)
    begin(ledger, "root/a", spec)
    with pytest.raises(DsecError):
        ledger.allow("root/a", spec)


def test_nothing_is_begun_in_a_project_that_was_removed() -> None:
    ledger, _ = ledger_of({})
    with pytest.raises(DsecError, match="was removed"):
        ledger.allow("root/gone", Spec(image="x"))


def test_every_method_says_who_may_call_it() -> None:
    """One that does not is closed to all but root's admin; that is to be said, too."""
    assert METHODS.keys() == BY_METHOD.keys()
    assert METHODS.keys() >= AUDITED
    for name, method in METHODS.items():
        fields = {field.name for field in msgspec.structs.fields(method.params)}
        if method.access.scope in ("sandbox", "rollout"):
            assert "id" in fields, name
        elif "id" in fields:
            assert name == "token.revoke", f"{name} has an id that nobody looks at"
        if method.once and method.access.scope != "open":
            assert RANK[method.access.role] >= RANK["user"], f"{name} changes something"
        if method.recorded:
            assert method.access.scope == "sandbox", name


def test_a_rollout_of_somebody_else_is_not_there() -> None:
    """Its owner stands in the registry, so its handlers are guarded and not the loop."""

    class Known:
        async def owner(self, ident: str) -> Owner:
            return Owner(1, 1, principal="eve", project="root/e")

    async def handler(call: Any, params: Any) -> str:
        return "done"

    names = [name for name, method in METHODS.items() if method.access.scope == "rollout"]
    table = Gate(cast(Any, None), cast(Any, Known()), cast(Any, None)).guarded(dict.fromkeys(names, handler))
    theirs = Peer(1, 1 << 32, 0, "ann", "root/a", "admin", "", 1, bounded=True)
    above = Peer(1, 1 << 32, 0, "eva", "root/e", "admin", "", 1, bounded=True)
    for name in names:
        asked = SimpleNamespace(id="ro-1")
        with pytest.raises(DsecError, match="no rollout 'ro-1'"):
            asyncio.run(table[name](SimpleNamespace(peer=theirs), asked))
        assert asyncio.run(table[name](SimpleNamespace(peer=above), asked)) == "done"
