"""Runs that allocate their budget to searches by expected gain."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_worlds import HashCritic, by_problem, chain, command, noise, problems, said, talker, way

import search
from benchmarks.adaptive import allocate, traced
from mas_gym.errors import ConfigError, DataError, SearchError
from search import Budget, Continue, Propose, load_planner
from search.budget import Cost
from search.compare.stop_thresholds import FEATURES, Check, Checked, fit
from search.engine.allocation import Allocation
from search.planners.stop_rules import Confident, StopMap
from search.planners.voting import majority_probability, vote_gain

MAP = StopMap(
    "BestOfN", "hash", {"value": 2.0, "agreement": 1.0}, -1.0, growth={"found": -0.3, "value": -0.2}, growth_bias=0.8
)
SPECS = {"bon:9": "BestOfN", "mcts:9,3": "MCTS", "mcts:9,3,parallel=3": "MCTS", "adaptive:9": "AdaptiveBranching"}
SPECS |= {"puct:9,3": "PUCT", "halving:9,3,width=4": "SequentialHalving", "mcts:9,2,leaf=bootstrap": "MCTS"}


def planner(spec: str = "bon:9", threshold: float = 1.0) -> Any:
    return replace(load_planner(spec), stop=Confident(threshold, replace(MAP, planner=SPECS[spec])))  # type: ignore[type-var]


def growing() -> Any:
    """Return a planner that always expects a gain."""
    return replace(load_planner("bon:9"), stop=Confident(1.0, replace(MAP, growth={"turn": 0.0})))  # type: ignore[type-var]


def run(limit: Budget | None, count: int = 8, spec: Any = "bon:9", batch: int = 4, **options: Any) -> search.Run:
    chosen = planner(spec) if isinstance(spec, str) else spec
    options = {"mas": chain(3), "critic": HashCritic(), "policy": talker(batch), "run_budget": limit} | options
    return search.run(chosen, options.pop("task", problems(count)), **{"allocate": True, **options})


# ---- runs


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("limit", [Budget(calls=150), Budget(tokens=1100), Budget(calls=190, tokens=1200)])
def test_allocation_is_independent_of_concurrency(spec: str, limit: Budget) -> None:
    if "parallel" in spec:
        # Its first increment is that of three simulations.
        limit = replace(limit, calls=limit.calls and 2 * limit.calls, tokens=limit.tokens and 2 * limit.tokens)
    runs = [run(limit, spec=spec, concurrency=n, batch=batch) for n, batch in ((1, 1), (5, 3), (64, 64))]
    first, *others = [by_problem(one) for one in runs]
    assert len(first) == 8 and all(other == first for other in others)
    assert all(plan["answer"] is not None and plan["error"] is None for plan in first.values())
    assert runs[0].usage.agent_calls <= (limit.calls or math.inf) and runs[0].stopped is None


@pytest.mark.parametrize("spec", ["bon:9", "mcts:9,3"])
def test_allocated_searches_are_prefixes_of_complete_searches(spec: str) -> None:
    whole: dict[str, Any] = {plan.problem_id: plan for plan in run(None, spec=spec, allocate=False)}
    costs = set()
    for plan in run(Budget(calls=150), spec=spec):
        assert plan.tree is not None
        known, found = (set(map(way, tree.states)) for tree in (whole[plan.problem_id].tree, plan.tree))
        assert found <= known
        costs.add(plan.usage.agent_calls)
    assert len(costs) > 1


def test_allocation_with_a_sufficient_budget_equals_complete_searches() -> None:
    assert by_problem(run(Budget(calls=10_000), spec=growing())) == by_problem(run(None, allocate=False))


@given(st.integers(1, 260), st.integers(1, 9), st.integers(1, 12), st.sampled_from(["bon:9", "mcts:9,3"]))
@settings(max_examples=25, deadline=None)
def test_allocation_never_exceeds_its_call_budget(limit: int, count: int, concurrency: int, spec: str) -> None:
    found = run(Budget(calls=limit), count, spec, concurrency=concurrency)
    plans = list(found)
    assert found.usage.agent_calls <= limit and sum(plan.usage.agent_calls for plan in plans) <= limit
    assert len(plans) == count or "budget of" in str(found.stopped)


def test_allocation_spends_most_of_the_budget() -> None:
    for limit in (60, 100, 150):
        found = run(Budget(calls=limit))
        list(found)
        assert limit - 3 < found.usage.agent_calls <= limit


def test_allocation_respects_a_usd_budget() -> None:
    prices = {"talker": {"prompt": 0, "generated": 1000.0}, "hash": {"forward": 0}}
    found = run(Budget(usd=1.0), prices=prices)
    spent = sum(plan.usd or 0.0 for plan in found)
    assert 0.8 < spent <= 1.0
    free = {"talker": {"prompt": 0, "generated": 0}, "hash": {"forward": 0}}
    assert by_problem(run(Budget(usd=1e-9), spec=growing(), prices=free)) == by_problem(run(None, allocate=False))


# ---- votes and cascades

VOTE, CASCADE = "sc:9,stop=0.95", "cascade:bon:1>mcts:4,2@0.9>mcts:9,3@0.8"


@pytest.mark.parametrize("spec", [VOTE, CASCADE, "mcts:9,3,arms=thompson"])
@pytest.mark.parametrize("limit", [Budget(calls=110), Budget(tokens=900)])
def test_allocation_of_votes_and_cascades_is_independent_of_concurrency(spec: str, limit: Budget) -> None:
    chosen: Any = load_planner(spec)
    if "arms" in spec:
        chosen = replace(chosen, planner=planner("mcts:9,3"))
    runs = [run(limit, spec=chosen, concurrency=n, batch=batch) for n, batch in ((1, 1), (5, 3), (64, 64))]
    first, *others = [by_problem(one) for one in runs]
    assert len(first) == 8 and all(other == first for other in others)
    assert all(plan["answer"] is not None and plan["error"] is None for plan in first.values())
    assert runs[0].usage.agent_calls <= (limit.calls or math.inf)
    assert len({plan["usage"]["agent_calls"] for plan in first.values()}) > 1


@given(st.integers(1, 200), st.integers(1, 9), st.sampled_from([VOTE, CASCADE]))
@settings(max_examples=20, deadline=None)
def test_allocation_of_votes_and_cascades_never_exceeds_its_call_budget(limit: int, count: int, spec: str) -> None:
    found = run(Budget(calls=limit), count, load_planner(spec))
    plans = list(found)
    assert found.usage.agent_calls <= limit and sum(plan.usage.agent_calls for plan in plans) <= limit
    assert len(plans) == count or "too few for another search" in str(found.stopped)


@pytest.mark.parametrize("spec", [VOTE, "sc:9", CASCADE])
def test_sufficient_budget_does_not_change_votes_and_cascades(spec: str) -> None:
    chosen = load_planner(spec)
    found, whole = (
        by_problem(run(Budget(calls=10_000), spec=chosen)),
        by_problem(run(None, spec=chosen, allocate=False)),
    )
    for name, plan in whole.items():
        if "no gain" not in str(found[name]["stopped"]):
            # The nodes of a vote have another order, and equal prompts of different passes are not merged.
            same = ("answer", "correct", "error") if spec.startswith("sc") else tuple(plan)
            assert {key: found[name][key] for key in same} == {key: plan[key] for key in same}
            assert found[name]["usage"]["agent_calls"] == plan["usage"]["agent_calls"]


def test_contested_votes_get_more_passes_than_clear_ones() -> None:
    calls: dict[bool, list[int]] = {True: [], False: []}
    for plan in run(Budget(calls=110), spec=load_planner("sc:9")):
        votes = Counter(candidate.answer for candidate in plan.candidates).most_common()
        calls[len(votes) == 1].append(plan.usage.agent_calls)
    assert calls[True] and calls[False]
    assert fmean(calls[True]) < fmean(calls[False])


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 12))
def test_vote_gain_equals_the_recursive_expectation_over_passes(lead: int, second: int, passes: int) -> None:
    def after(a: int, b: int, left: int) -> float:
        if not left:
            return majority_probability(max(a, b), min(a, b))
        share = (a + 1) / (a + b + 2)
        return share * after(a + 1, b, left - 1) + (1 - share) * after(a, b + 1, left - 1)

    lead, second, passes = max(lead, second), min(lead, second), min(passes, 6)
    expected = after(lead, second, passes) - majority_probability(lead, second)
    assert vote_gain(lead, second, passes) == pytest.approx(expected, abs=1e-9)
    assert vote_gain(lead, second, passes) <= vote_gain(lead, second, passes + 1) + 1e-9


def test_unused_budget_of_settled_searches_goes_to_other_searches() -> None:
    settled = by_problem(run(Budget(calls=120), spec=planner("bon:9", 0.75)))
    stopped = {name for name, plan in settled.items() if "settled" in str(plan["stopped"])}
    alone = by_problem(run(Budget(calls=120)))
    others = settled.keys() - stopped
    assert stopped and others

    def calls(plans: dict[str, Any]) -> int:
        return sum(plans[name]["usage"]["agent_calls"] for name in others)

    assert calls(settled) > calls(alone)


def killed_after(searches: int, path: Path) -> None:
    """Run an allocation in a process that kills itself once it has written so many searches."""

    def kill(progress: search.Progress) -> None:
        if progress.done == searches:
            os.kill(os.getpid(), signal.SIGKILL)

    list(run(Budget(calls=120), store=path, progress=kill))


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
@pytest.mark.slow
@pytest.mark.parametrize("written", [1, 5])
def test_killed_allocation_is_repeated_with_the_same_result(written: int, tmp_path: Path) -> None:
    whole, path = by_problem(run(Budget(calls=120))), tmp_path / "runs.db"
    child = multiprocessing.get_context("spawn").Process(target=killed_after, args=(written, path))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    [info] = search.open_store(path).runs()
    assert info.searches == written
    again = run(Budget(calls=120), concurrency=2, store=path)
    assert by_problem(again) == whole and again.usage.agent_calls > 0
    third = run(Budget(calls=120), store=path)
    assert by_problem(third) == whole and third.usage.agent_calls == 0


def test_allocation_identity_depends_on_problems_and_budget(tmp_path: Path) -> None:
    options: dict[str, Any] = {"store": tmp_path / "runs.db"}
    for limit, count in ((120, 8), (121, 8), (120, 7)):
        one = run(Budget(calls=limit), count, **options)
        list(one)
        assert one.usage.agent_calls > 0
    assert len(search.open_store(tmp_path / "runs.db").runs()) == 3


def test_allocation_of_a_tiny_budget_reports_the_remaining_budget() -> None:
    found = run(Budget(calls=10))
    plans = list(found)
    assert len(plans) == 3 and found.usage.agent_calls == 9
    assert found.stopped is not None
    assert "10 calls" in found.stopped and "remaining 1 calls" in found.stopped
    none = run(Budget(calls=1))
    assert [plan.error for plan in none] == ["BudgetError: budget of 1 calls spent"] and none.usage.agent_calls == 1


def test_failed_search_does_not_block_an_allocation() -> None:
    class Broken(HashCritic):
        def score(self, contexts: Any) -> list[float]:
            return [math.nan if "Question 3" in one.state.question else noise(one.state.digest) for one in contexts]

    plans = {plan.problem_id: plan for plan in run(Budget(calls=120), critic=Broken())}
    assert "CriticError" in str(plans["toy/3"].error) and len(plans) == 8
    assert all(plan.error is None for name, plan in plans.items() if name != "toy/3")


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_allocation_with_a_constant_confident_critic_answers_every_question(value: float) -> None:
    class Sure(HashCritic):
        def score(self, contexts: Any) -> list[float]:
            return [value for _ in contexts]

    found = run(Budget(calls=100), critic=Sure())
    plans = list(found)
    assert len(plans) == 8 and found.usage.agent_calls <= 100 and all(plan.answer is not None for plan in plans)


class Asks(search.Planner):
    """Asks to continue with given gains, without any rule."""

    needs_critic = False

    def __init__(self, *requests: Any) -> None:
        self.requests = requests

    def plan(self, model: Any, root: Any, rng: Any) -> Any:
        state = root
        while not model.is_terminal(state):
            [[proposal]] = yield [Propose(state)]
            state = model.transition(state, proposal.action)
        for request in self.requests:
            replies = yield request
            assert replies == [None]
        return search.Plan.single(state)


def test_continue_request_outside_an_allocation_returns_immediately() -> None:
    plans = list(search.run(Asks([Continue(0.5)], [Continue(0.1)]), problems(2), mas=chain(2), policy=talker()))
    assert all(plan.error is None for plan in plans)


@pytest.mark.parametrize("request_", [[Continue(0.0)], [Continue(math.nan)], [Continue(0.1), Continue(0.2)]])
def test_continue_request_without_a_positive_gain_fails_the_search(request_: Any) -> None:
    [plan] = search.run(Asks(request_), problems(1), mas=chain(2), policy=talker())
    assert SearchError.__name__ in str(plan.error) and "expected Continue with a positive gain" in str(plan.error)


def test_simulated_allocation_equals_the_allocation_of_a_run() -> None:
    # The figures of `benchmarks.adaptive` are simulated.
    world: dict[str, Any] = {"mas": chain(3), "policy": talker()}
    traces = traced("bon:9", HashCritic(), problems=problems(8), **world)
    for limit, threshold in ((900, 1.0), (1100, 0.75), (5000, 1.0)):
        simulated = allocate(traces, replace(MAP, threshold=threshold), limit)
        plans = list(run(Budget(tokens=limit), spec=planner("bon:9", threshold), seed=14))
        assert {plan.problem_id: plan.usage.generated_tokens for plan in plans} == simulated.tokens
        assert {plan.problem_id: float(bool(plan.correct)) for plan in plans} == simulated.hits


# ---- rounds

costs = st.integers(1, 9)
gains = st.floats(1e-6, 1, exclude_min=True)


@given(st.integers(1, 300), st.lists(st.lists(st.tuples(costs, gains), min_size=1, max_size=6), max_size=12))
@settings(max_examples=150, deadline=None)
def test_rounds_terminate_and_grants_stay_within_the_budget(
    limit: int, searches: list[list[tuple[int, float]]]
) -> None:
    allocation = Allocation(Budget(calls=limit))
    for number in range(len(searches)):
        allocation.enter(number)
    spent, done = [0] * len(searches), [0] * len(searches)
    for _ in range(10_000):
        grants = allocation.next_round(Cost(calls=sum(spent)))
        if not grants:
            break
        assert sum(math.floor(grant.calls) for grant in grants.values()) <= limit - sum(spent)
        for number, grant in grants.items():
            cost, gain = searches[number][done[number]]
            allowed = allocation.limit(number, grant).calls
            assert allowed is not None and allowed <= spent[number] + grant.calls
            wanted = min(cost, allowed - spent[number])
            spent[number] += wanted
            done[number] += 1
            if wanted < cost or done[number] == len(searches[number]):
                allocation.leave(number, Cost(calls=spent[number]))
            else:
                allocation.pause(number, gain, Cost(calls=spent[number]))
    else:
        raise AssertionError("the rounds did not end")
    assert sum(spent) <= limit


def test_rounds_prefer_higher_gain_per_cost_then_earlier_problems() -> None:
    allocation = Allocation(Budget(calls=1000))
    offers = {0: (0.01, 10), 1: (0.1, 10), 2: (0.05, 4), 3: (0.1, 10)}
    for number, (gain, cost) in offers.items():
        allocation.enter(number)
        allocation.pause(number, gain, Cost(calls=cost))
    order = []
    while chosen := [*allocation.next_round(Cost(calls=34))]:
        order.append(chosen)
        for number in chosen:
            allocation.leave(number, Cost(calls=34))
    assert order == [[2], [1, 3], [0]]


# ---- gains


def searches(right: Any, checks: int = 12, count: int = 60) -> list[Checked]:
    """Searches with a noisy value; ``right(i, n)`` returns whether the answer at a check is right."""
    found = []
    for i in range(count):
        marks = [bool(right(i, n)) for n in range(checks)]
        values = [(0.6 if mark else -0.6) + noise("value", i, n) - 0.5 for n, mark in enumerate(marks)]
        made = [
            Check((v, v, 0.5, math.log1p(n + 1), 3.0), m) for n, (v, m) in enumerate(zip(values, marks, strict=True))
        ]
        found.append(Checked(str(i), tuple(made), marks[-1]))
    return found


def features(value: float, found: int) -> dict[str, float]:
    return dict(zip(FEATURES, (value, value, 0.5, math.log1p(found), 3.0), strict=True))


def test_fitted_gain_is_large_for_uncertain_answers_that_improve() -> None:
    improving = fit(searches(lambda i, n: n >= 12 * noise("when", i)), "BestOfN", "hash").map
    doubt, sure = (
        improving.probability(features(v, 2), 8) - improving.probability(features(v, 2)) for v in (-0.8, 0.8)
    )
    assert doubt > 0.1 and doubt > 2 * sure
    assert improving.probability(features(-0.8, 2), 8) > improving.probability(features(-0.8, 2), 1)


def test_fitted_gain_is_small_if_answers_never_change() -> None:
    still = fit(searches(lambda i, n: i % 2), "BestOfN", "hash").map
    for value in (-0.8, 0.0, 0.8):
        assert abs(still.probability(features(value, 3), 8) - still.probability(features(value, 3))) < 0.12


def test_stop_map_with_growth_is_read_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "stop.json"
    path.write_text(json.dumps(MAP.to_dict()), encoding="utf-8")
    assert StopMap.read(path) == MAP
    older = {key: value for key, value in MAP.to_dict().items() if not key.startswith("growth")}
    path.write_text(json.dumps(older), encoding="utf-8")
    assert StopMap.read(path) == replace(MAP, growth={}, growth_bias=0.0)
    with pytest.raises(ConfigError, match="run mas-gym calibrate again"):
        run(Budget(calls=50), spec=load_planner(f"bon:9,stop={path}"))
    for changed in ({"growth": {"colour": 1.0}}, {"growth_bias": math.inf}, {"growth": 3}):
        path.write_text(json.dumps(MAP.to_dict() | changed), encoding="utf-8")
        with pytest.raises(DataError, match="expected a stop map"):
            StopMap.read(path)


# ---- arguments


def test_allocation_rejects_unsupported_budgets_and_planners() -> None:
    with pytest.raises(ConfigError, match="expected a run budget of calls, tokens or usd"):
        run(None)
    with pytest.raises(ConfigError, match="without seconds"):
        run(Budget(calls=50, seconds=9.0))
    with pytest.raises(ConfigError, match="without seconds"):
        run(Budget(calls=50), budget=Budget(seconds=9.0))
    timed = {"talker": {"second": 0.1}, "hash": {"forward": 0}}
    with pytest.raises(ConfigError, match="price per second"):
        run(Budget(usd=1.0), prices=timed)
    with pytest.raises(ConfigError, match="sized collection"):
        run(Budget(calls=50), task=iter(problems(3)))
    for spec in ("single", "bon:5", "bon:5,stop=0.9"):
        with pytest.raises(ConfigError, match=r"allocate: .* stop"):
            run(Budget(calls=50), spec=load_planner(spec))
    turns = replace(load_planner("sbs:4,2"), stop=Confident(0.9, replace(MAP, planner="StepBeamSearch")))  # type: ignore[type-var]
    for spec in (turns, load_planner("dvts:4,2"), load_planner("rebase:4,arms=thompson")):
        with pytest.raises(ConfigError, match="answer before the end"):
            run(Budget(calls=50), spec=spec)
    with pytest.raises(ConfigError, match="equal weights"):
        run(Budget(calls=50), spec=load_planner("sc:5,weights=critic"))


@pytest.mark.slow
def test_eval_allocates_a_run_budget(tmp_path: Path) -> None:
    path = tmp_path / "stop.json"
    path.write_text(json.dumps(replace(MAP, critic="policy-likelihood").to_dict()), encoding="utf-8")
    options = ["eval", "-n", "4", "--planner", f"bon:5,stop={path}", "--store", tmp_path / "runs.db"]
    shown = command(*options, "--run-budget", "tokens=900", "--allocate")
    assert shown.exit_code == 0, shown.output
    stored = search.open_store(tmp_path / "runs.db")
    [info] = stored.runs()
    assert sum(plan.usage.generated_tokens for plan in stored.plans(info.run)) <= 900
    for more, message in (
        (["--allocate"], "expected a run budget of calls, tokens or usd"),
        (["--allocate", "--run-budget", "tokens=0"], "positive number"),
        (["--allocate", "--run-budget", "seconds=5"], "expected a run budget of calls, tokens or usd"),
        (["--alocate", "--run-budget", "tokens=50"], "No such option"),
    ):
        wrong = command(*options, *more)
        assert wrong.exit_code != 0 and message in said(wrong)
