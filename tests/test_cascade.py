"""Cascades: cheap searches first, expensive ones where the critic doubts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_worlds import HashCritic, World, chain, noise, problems, talker

import search
from mas_gym.errors import BudgetError, ConfigError, MASGymError
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.testing import check_planner
from search import load_planner, planner_spec
from search.planners import Cascade
from search.planners.stop_rules import Confident

SPECS = [
    "cascade:single>mcts:8,2@0.6",
    "cascade:single>mcts:8,2@0.7>mcts:12,4@0.6",
    "cascade:bon:2>bon:6@0.8",
    "cascade:sc:3>sbs:3,2@0.9",
    "cascade:mcts:4,2,stop=0.9>puct:8,3@0.8>adaptive:9@0.8",
    "cascade:dvts:2,2>rebase:6@0.7>halving:8,3@0.99",
]
ALWAYS = ["single", "bon:3", "mcts:8,2", "mcts:6,2,leaf=bootstrap", "sbs:3,2", "adaptive:9", "puct:6,3", "rebase:6"]


@pytest.mark.parametrize("spec", SPECS)
def test_cascades_pass_the_planner_check_and_keep_their_spec(spec: str) -> None:
    planner = load_planner(spec)
    check_planner(planner, systems=("rpsv", "dylan"))
    assert planner_spec(planner) == spec and load_planner(planner_spec(planner)) == planner


@pytest.mark.parametrize("first", ["single", "bon:3", "mcts:4,3", "sbs:4,2"])
@pytest.mark.parametrize("last", ALWAYS)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_cascade_that_never_settles_gives_the_result_of_the_last_stage(first: str, last: str, seed: int) -> None:
    worlds = [World(3, value=lambda path: noise(seed, path) - 0.5) for _ in range(3)]
    early, alone = worlds[0].plan(load_planner(first)), worlds[1].plan(load_planner(last))
    both = worlds[2].plan(load_planner(f"cascade:{first}>{last}@1"))
    assert [one.state for one in both.candidates] == [one.state for one in alone.candidates]
    # No message is drawn twice.
    assert max(worlds[0].calls, worlds[1].calls) <= worlds[2].calls <= worlds[0].calls + worlds[1].calls
    assert [point.state for point in both.anytime] == [one.best.state for one in (early, alone) if one.best]
    assert both.anytime[0].agent_calls == worlds[0].calls and both.anytime[1].agent_calls == worlds[2].calls


def test_cascade_to_a_larger_size_reuses_all_messages() -> None:
    small, large, both = World(3), World(3), World(3)
    small.plan(load_planner("bon:4"))
    large.plan(load_planner("bon:10"))
    both.plan(load_planner("cascade:bon:4>bon:10@1"))
    assert both.calls == large.calls > small.calls


def test_cascade_that_settles_early_ends_after_the_first_stage() -> None:
    world, alone = World(2, value=lambda path: 0.9), World(2)
    plan = world.plan(load_planner("cascade:single>mcts:20,3@0.8"))
    alone.plan(load_planner("single"))
    assert world.calls == alone.calls
    assert plan.stopped == "settled after stage 1 of 2: probability 0.950 above 0.8"


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("calls", [3, 4, 7, 15, 40])
def test_cascades_answer_within_a_budget(spec: str, calls: int) -> None:
    options: dict[str, Any] = {"mas": chain(3), "policy": talker(), "critic": HashCritic(), "raise_errors": True}
    plans = list(search.run(load_planner(spec), problems(6), budget=search.Budget(calls=calls), **options))
    assert len(plans) == 6 and all(0 < plan.usage.agent_calls <= calls for plan in plans)


def test_stage_without_budget_keeps_the_previous_answer() -> None:
    options: dict[str, Any] = {"mas": chain(3), "policy": talker(), "critic": HashCritic(), "raise_errors": True}
    single = {plan.problem_id: plan.text for plan in search.run("single", problems(6), **options)}
    limit = search.Budget(calls=3)
    for plan in search.run("cascade:single>mcts:8,2@1", problems(6), budget=limit, **options):
        assert plan.text == single[plan.problem_id] and plan.usage.agent_calls == 3


@pytest.mark.parametrize("spec", SPECS)
def test_cascades_are_independent_of_concurrency_batches_and_restarts(spec: str, tmp_path: Path) -> None:
    def found(concurrency: int, batch: int, count: int = 8) -> dict[str, Any]:
        options: dict[str, Any] = {"mas": chain(3), "policy": talker(batch), "critic": HashCritic()}
        plans = search.run(
            spec, problems(count), concurrency=concurrency, store=tmp_path / f"{batch}.db", raise_errors=True, **options
        )
        return {
            plan.problem_id: (plan.text, plan.usage.agent_calls, plan.usage.reward_calls, plan.stopped)
            for plan in plans
        }

    found(1, 1, 3)
    assert found(1, 1) == found(7, 16)


def test_outcome_critics_can_decide_escalation() -> None:
    critic = HashCritic(terminal_only=True)
    options: dict[str, Any] = {"mas": chain(3), "policy": talker(), "critic": critic, "raise_errors": True}
    plans = list(search.run("cascade:single>bon:6@0.75", problems(12), **options))
    passes = {plan.usage.agent_calls for plan in plans}
    assert passes == {3, 18}


@pytest.mark.parametrize("last", ["bon:9", "mcts:8,3", "sbs:3,2", "adaptive:9"])
def test_stages_reuse_messages_of_a_recorded_run(last: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"critic": HashCritic(), "raise_errors": True}
    store, made = tmp_path / "runs.db", {"mas": chain(3), "policy": talker()}
    list(search.run("siblings:2", problems(6), store=store, raise_errors=True, **made))
    alone = {plan.problem_id: plan for plan in search.run(last, recorded=store, **options)}
    plans = list(search.run(f"cascade:bon:2>{last}@1", recorded=store, **options))
    for plan in plans:
        whole = alone[plan.problem_id]
        assert plan.text == whole.text and len(plan.anytime) == 2
        assert plan.usage.agent_calls <= whole.usage.agent_calls + 2 * 3


class Bare:
    """A planner whose plan has no tree."""

    def plan(self, model: Any, root: Any, rng: Any) -> Any:
        state = root
        while not model.is_terminal(state):
            [[proposal]] = yield [search.Propose(state, 1)]
            state = model.transition(state, proposal.action)
        return search.Plan.single(state)


class Broken(Bare):
    def plan(self, model: Any, root: Any, rng: Any) -> Any:
        yield [search.Propose(root, 1)]
        raise BudgetError("no answer")


def test_user_planners_can_be_stages() -> None:
    bare, broken, never = search.as_planner(Bare()), search.as_planner(Broken()), (Confident(1.0),)
    plan = World(3).plan(Cascade((bare, search.MCTS(6, 2)), never))
    assert len(plan.anytime) == 2
    with pytest.raises(BudgetError):
        World(3).plan(Cascade((broken, search.MCTS(6, 2)), never))
    later = World(3).plan(Cascade((bare, broken), never))
    assert later.best is not None


def test_resizing_changes_the_last_stage_and_identity_covers_all_stages() -> None:
    planner: Any = load_planner("cascade:single>mcts:20,2@0.8>mcts:20,6@0.6")
    assert planner.current_size() == 20 and planner_spec(planner.resized(9)).endswith(">mcts:9,6@0.6")
    others = [
        planner.resized(9),
        replace(planner, rules=(Confident(0.8), Confident(0.5))),
        load_planner("cascade:single>mcts:20,2@0.8"),
    ]
    assert len({digest_of(identity_of(one)) for one in [planner, *others]}) == 4


@pytest.mark.parametrize(
    "spec",
    [
        "cascade:single",
        "cascade:single>mcts:5,3",
        "cascade:single>mcts:5,3@",
        "cascade:single>mcts:5,3@2",
        "cascade:single>mcts:5,3@-0.1",
        "cascade:single>mcts:5,3@nan",
        "cascade:single>mcts:5,3@settled:3",
        "cascade:>@0.5",
        "cascade:single>mtcs:5,3@0.5",
        "cascade:single>mcts:5,3@missing.json",
    ],
)
def test_invalid_cascades_are_rejected(spec: str) -> None:
    with pytest.raises(MASGymError) as caught:
        load_planner(spec)
    assert "expected" in str(caught.value)


def test_cascade_requires_a_critic() -> None:
    with pytest.raises(ConfigError, match="needs a critic"):
        load_planner(SPECS[0]).for_run(None, False)
