"""Self-consistency that stops once its majority is settled."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_worlds import World, chain, problems, talker

import search
from mas_gym.errors import ConfigError
from search import SelfConsistency, load_planner, planner_spec
from search.planners.voting import leading_votes, majority_probability, passes_to_settle

votes = st.lists(st.sampled_from(["x", "y", "z", None]), max_size=30)


@pytest.mark.parametrize(("lead", "second"), [(0, 0), (1, 0), (3, 1), (5, 4), (9, 2)])
def test_majority_probability_agrees_with_sampled_posteriors(lead: int, second: int) -> None:
    rng, draws = random.Random(1), 20_000
    wins = sum(rng.betavariate(lead + 1, second + 1) > 0.5 for _ in range(draws))
    assert majority_probability(lead, second) == pytest.approx(wins / draws, abs=4 * 0.5 / math.sqrt(draws))


@given(st.integers(0, 60), st.integers(0, 60))
def test_majority_probability_is_the_binomial_tail(second: int, more: int) -> None:
    trials = 2 * second + more + 1
    tail = sum(math.comb(trials, j) for j in range(second + more + 1)) / 2**trials
    assert majority_probability(second + more, second) == pytest.approx(tail, abs=1e-12)
    assert 0.5 <= majority_probability(second + more, second) <= 1


@given(votes, st.floats(0.5, 1), st.integers(1, 20), st.data())
def test_passes_to_settle_is_a_lower_bound_on_the_passes_needed(
    answers: list[str | None], stop: float, limit: int, data: st.DataObject
) -> None:
    needed = passes_to_settle(answers, stop, limit)
    assert 0 <= needed <= limit
    further = data.draw(st.lists(st.sampled_from(["x", "y", "z", None]), min_size=needed, max_size=needed))
    for more in range(needed):
        assert majority_probability(*leading_votes([*answers, *further[:more]])) <= stop


def draws(seed: int, answers: int = 3) -> World:
    """A world whose last messages are answers drawn from a seed."""
    rng = random.Random(seed)
    said: dict[tuple[str, int], str] = {}
    return World(
        depth=2,
        messages=lambda path, index: said.setdefault(
            (path, index), f"m{index % 2}" if not path else f"{min(rng.randrange(answers), rng.randrange(answers))}"
        ),
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 25), st.floats(0.5, 1))
def test_vote_with_stop_makes_at_most_k_passes_and_reports_the_reason(seed: int, k: int, stop: float) -> None:
    world = draws(seed)
    plan = world.plan(SelfConsistency(k, stop=stop))
    passes = len(plan.candidates)
    assert passes <= k and world.calls == 2 * passes
    answers = [candidate.text for candidate in plan.candidates]
    settled = majority_probability(*leading_votes(answers)) > stop
    assert (plan.stopped is not None) == (passes < k) and (passes == k or settled)


@pytest.mark.parametrize("concurrency", [1, 7])
@pytest.mark.parametrize("max_batch", [1, 16])
def test_stopped_passes_are_the_first_passes_of_the_full_vote(concurrency: int, max_batch: int) -> None:
    def run(planner: str) -> dict[str, search.Plan]:
        plans = search.run(
            planner, problems(20), mas=chain(3), policy=talker(max_batch), concurrency=concurrency, raise_errors=True
        )
        return {plan.problem_id: plan for plan in plans}

    def texts(plan: search.Plan) -> list[str]:
        return [one.state.text for one in sorted(plan.candidates, key=lambda one: one.node or 0)]

    whole, same, early = run("sc:12"), run("sc:12,stop=1"), run("sc:12,stop=0.8")
    for key, plan in whole.items():
        assert texts(same[key]) == texts(plan) and same[key].answer == plan.answer and same[key].stopped is None
        assert same[key].usage.agent_calls == plan.usage.agent_calls
        found = texts(early[key])
        assert found == texts(plan)[: len(found)]
    assert {plan.stopped is None for plan in early.values()} == {True, False}


def test_store_contains_the_reason_for_stopping(tmp_path: Path) -> None:
    def run() -> dict[str, str | None]:
        plans = search.run(
            "sc:12,stop=0.8", problems(8), mas=chain(2), policy=talker(), store=tmp_path / "runs.db", raise_errors=True
        )
        return {plan.problem_id: plan.stopped for plan in plans}

    first = run()
    assert any(str(reason).startswith("majority settled after ") for reason in first.values())
    assert run() == first


@pytest.mark.parametrize("calls", [2, 3, 7, 12, 17])
def test_searches_with_a_stopping_rule_answer_within_a_budget(calls: int) -> None:
    plans = list(
        search.run(
            "sc:12,stop=0.9",
            problems(8),
            mas=chain(2),
            policy=talker(),
            budget=search.Budget(calls=calls),
            raise_errors=True,
        )
    )
    assert all(plan.error is None and 0 < plan.usage.agent_calls <= calls for plan in plans)
    assert all(len({one.node for one in plan.candidates}) == len(plan.candidates) for plan in plans)


@pytest.mark.parametrize("settings_", ["stop=0.4", "stop=1.5", "stop=nan", "stop=true", "stop=x"])
def test_stop_rejects_values_outside_0_5_to_1(settings_: str) -> None:
    with pytest.raises(ConfigError, match=r"stop to be a number from 0\.5 to 1"):
        load_planner(f"sc:5,{settings_}")


def test_stop_rejects_weighted_votes() -> None:
    with pytest.raises(ConfigError, match="equal weights"):
        load_planner("sc:5,weights=critic,stop=0.9")


def test_stop_is_part_of_the_spec() -> None:
    assert planner_spec(load_planner("sc:20,stop=0.9")) == "sc:20,stop=0.9"
    assert planner_spec(load_planner("sc:20,stop=1")) == "sc:20"
    assert load_planner("sc:20,stop=0.9").resized(5) == SelfConsistency(5, stop=0.9)
