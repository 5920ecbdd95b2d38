"""Parallel simulations of one tree: plans independent of concurrency, and nothing counted twice or lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_worlds import HashCritic, World, by_problem, chain, noise, problems, talker, way

import search
from mas_gym.errors import BudgetError, ConfigError
from search import MCTS, PUCT, Budget, SequentialHalving
from search.planners.mcts import ParallelSearch
from search.protocol import Propose, ValueKind

KINDS: list[Any] = ["process", "likelihood", "outcome", "reward"]
LEAVES: list[Any] = ["rollout", "bootstrap"]
NUMBERS = (st.integers(1, 30), st.integers(1, 4))


class Forced(MCTS):
    """The machinery for many simulations, with one."""

    def search(self, model: Any, root: Any) -> ParallelSearch:
        return ParallelSearch(self, model, root)


def world(seed: int, depth: int = 3) -> World:
    return World(
        depth, value=lambda p: 2 * noise("v", seed, p) - 1, reward=lambda p: 1.0 if noise(seed, p) < 0.5 else -1.0
    )


def planner(values: ValueKind, leaf: Any, n: int, c: int, parallel: int) -> MCTS:
    return MCTS(n, c, leaf=leaf if values in ("process", "likelihood") else "rollout", values=values, parallel=parallel)


@given(st.sampled_from(KINDS), st.sampled_from(LEAVES), *NUMBERS, st.integers(0, 99))
def test_search_with_parallel_1_equals_the_serial_search(values: Any, leaf: Any, n: int, c: int, seed: int) -> None:
    serial = planner(values, leaf, n, c, 1)
    one, other = world(seed), world(seed)
    plan, forced = one.plan(serial), other.plan(Forced(**vars(serial)))
    assert plan.tree is not None and forced.tree is not None
    assert forced.tree.to_dict() == plan.tree.to_dict()
    assert (forced.candidates, forced.anytime) == (plan.candidates, plan.anytime)
    assert (other.calls, other.evaluated, other.rewarded) == (one.calls, one.evaluated, one.rewarded)


@given(st.sampled_from(KINDS), st.sampled_from(LEAVES), *NUMBERS, st.integers(2, 12), st.integers(0, 99))
def test_visits_sum_to_the_number_of_simulations_without_repeated_requests(
    values: Any, leaf: Any, n: int, c: int, parallel: int, seed: int
) -> None:
    at = world(seed)
    search_of = planner(values, leaf, n, c, parallel)
    machinery = search_of.search(at.model, at.model.initial_state("q"))
    at.plan(Given(machinery))
    tree, virtual = machinery.tree, int(machinery.virtual)
    assert isinstance(machinery, ParallelSearch) and not any(machinery.losses.values()) and not machinery.in_flight
    done = tree.visits[0] - virtual
    assert done == n or (search_of.leaf == "bootstrap" and done < n)
    for node in range(len(tree)):
        children = tree.children(node)
        if children:
            below = sum(tree.visits[child] - virtual for child in children)
            # With bootstrap, the simulation that expanded a state ended there; with rollout, it continued.
            assert below == tree.visits[node] - virtual - (search_of.leaf == "bootstrap")
    ends = [node for node in range(len(tree)) if tree.is_terminal(node)]
    if search_of.leaf == "rollout":
        assert sum(tree.visits[node] - virtual for node in ends) == n
        assert at.calls <= sum(min(c**d, n) * c for d in range(at.depth))
    else:
        assert at.calls <= n * c
    assert len(at.evaluated) == len(set(at.evaluated)) and len(at.rewarded) == len(set(at.rewarded))
    inner = {way(state) for node, state in enumerate(tree.states) if tree.children(node)}
    assert at.calls == len(inner) * c


class Given:
    """Runs machinery that the test keeps."""

    def __init__(self, machinery: ParallelSearch) -> None:
        self.machinery = machinery

    def plan(self, model: Any, root: Any, rng: Any) -> Any:
        yield from self.machinery.run()
        return search.Plan()


def test_parallel_simulations_need_fewer_rounds() -> None:
    rounds = []
    for parallel in (1, 2, 4, 8):
        at = world(3, depth=4)
        plan = at.plan(MCTS(24, 3, parallel=parallel))
        assert plan.tree is not None and plan.tree.visits[0] == 24 + 3
        rounds.append(at.yields)
    assert rounds == sorted(rounds, reverse=True) and rounds[0] > 2 * rounds[2] > 2 * rounds[3]


@pytest.mark.parametrize("spec", ["mcts:12,3,parallel=4", "mcts:12,3,parallel=4,leaf=bootstrap", "mcts:9,2,parallel=9"])
@pytest.mark.parametrize("critic", [HashCritic, search.PolicyLikelihood])
def test_parallel_plans_are_independent_of_concurrency(spec: str, critic: Any) -> None:
    def plans(concurrency: int, seed: int = 5) -> Any:
        options: dict[str, Any] = {"critic": critic(), "seed": seed, "concurrency": concurrency}
        return by_problem(search.run(spec, problems(24), mas=chain(3), policy=talker(), **options))

    alone = plans(1)
    assert plans(64) == alone != plans(64, seed=6)
    for plan in alone.values():
        assert plan["error"] is None
        assert plan["usage"]["agent_calls"] % 3 == 0 or "9,2" in spec


def test_parallel_training_search_uses_true_rewards() -> None:
    run = search.run("mcts:16,3,parallel=5", problems(6), mas=chain(3), policy=talker(), training=True)
    for plan in run:
        assert plan.error is None and plan.tree is not None
        assert plan.tree.visits[0] == 16
        assert plan.usage.reward_calls == 0


def test_budget_limits_the_calls_of_parallel_searches() -> None:
    for calls in range(6, 40, 3):
        options: dict[str, Any] = {"policy": talker(), "critic": HashCritic(), "budget": Budget(calls=calls)}
        for plan in search.run("mcts:30,3,parallel=6", problems(2), mas=chain(3), **options):
            assert plan.usage.agent_calls <= calls
            assert plan.error is None or "BudgetError" in plan.error


def test_exhausted_budget_leaves_no_virtual_visits() -> None:
    at = world(1)
    machinery = ParallelSearch(MCTS(20, 3, parallel=5), at.model, at.model.initial_state("q"))
    steps = machinery.run()
    requests = next(steps)
    for _ in range(6):
        requests = steps.send([at.answer(request) for request in requests])
    assert any(machinery.losses.values()) and any(isinstance(request, Propose) for request in requests)
    with pytest.raises(BudgetError):
        steps.throw(BudgetError("spent"))
    assert not any(machinery.losses.values())


def test_parallel_specs_are_parsed_and_validated() -> None:
    assert search.load_planner("mcts:10,3,parallel=4") == replace(MCTS(10, 3), parallel=4)
    assert search.planner_spec(MCTS(10, 3, parallel=4)) == "mcts:10,3,parallel=4"
    assert search.planner_spec(MCTS(10, 3)) == "mcts:10,3"
    for make in (PUCT, SequentialHalving):
        with pytest.raises(ConfigError, match="only MCTS has virtual loss"):
            make(10, 3, parallel=2)
    with pytest.raises(ConfigError, match="parallel"):
        MCTS(10, 3, parallel=0)
