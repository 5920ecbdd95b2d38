"""Every shipped planner answers within any budget that covers one pass, and uses the budget."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_worlds import HashCritic, World, chain, problems, talk, talker

import search
from mas_gym.errors import ConfigError
from mas_gym.policies import ScriptedPolicy
from mas_gym.systems.loading import load_mas
from search import Budget
from search.planners.halving import considered_visits

SPECS = [
    *("single", "sc:5", "sc:5,weights=critic", "bon:5", "sbs:5,3", "sbs:2,2", "dvts:3,5", "adaptive:10", "siblings:2"),
    *("mcts:10,3", "mcts:10,3,parallel=4", "mcts:10,3,virtual_visits=false,rank=leaf", "mcts:10,3,horizon=budget"),
    *("mcts:10,3,leaf=bootstrap", "mcts:10,3,leaf=bootstrap,parallel=3", "puct:10,3", "puct:10,3,leaf=bootstrap"),
    *("puct:10,3,horizon=budget", "halving:10,3", "halving:10,3,leaf=bootstrap,width=4", "rebase:15"),
    *("rebase:15,choose=best", "cascade:single>bon:5@1>mcts:10,3@1"),
]


def plans(planner: Any, budget: Budget | None, depth: int = 4, critic: Any = None, **options: Any) -> list[search.Plan]:
    options = {"mas": chain(depth), "policy": talker(), **options}
    found = search.run(planner, problems(3), critic=critic or HashCritic(), budget=budget, **options)
    return sorted(found, key=lambda plan: plan.problem_id)


def equal_lengths(request: Any, seed: int) -> str:
    """A message of three words; the scripted policy counts words as tokens."""
    return f"Final Answer: {talk(request, seed)[-1]}"


def test_every_built_in_planner_is_tested() -> None:
    shipped = set(search.planner_names())
    assert shipped <= {spec.partition(":")[0] for spec in SPECS}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("depth", [1, 3, 4])
def test_budget_of_one_pass_gives_an_answer(spec: str, depth: int) -> None:
    for plan in plans(spec, Budget(calls=depth), depth):
        assert plan.error is None and plan.best is not None
        assert plan.usage.agent_calls <= depth


@pytest.mark.parametrize("spec", SPECS)
def test_budget_of_eighteen_calls_gives_an_answer(spec: str) -> None:
    used = [plan.usage.agent_calls for plan in plans(spec, Budget(calls=18))]
    full = [plan.usage.agent_calls for plan in plans(spec, None)]
    for part, whole in zip(used, full, strict=True):
        assert part <= 18
        # A rest that pays for no further pass or expansion may be left.
        assert part >= min(whole, 14) or "bootstrap" in spec


@pytest.mark.slow
@given(spec=st.sampled_from(SPECS), depth=st.integers(1, 5), more=st.integers(0, 60), outcome=st.booleans())
def test_search_respects_its_call_budget_and_gives_an_answer(spec: str, depth: int, more: int, outcome: bool) -> None:
    calls = depth + more
    takes_outcome = spec.startswith(("sc:5,w", "bon", "mcts", "puct", "halving")) and "bootstrap" not in spec
    critic = HashCritic(terminal_only=outcome and takes_outcome and "virtual" not in spec)
    for plan in plans(spec, Budget(calls=calls), depth, critic):
        assert plan.error is None and plan.best is not None
        assert plan.usage.agent_calls <= calls
        for candidate in plan.candidates:
            assert candidate.state.acting == depth


@given(spec=st.sampled_from(SPECS), depth=st.integers(1, 5), more=st.integers(0, 60))
def test_token_budget_is_respected_with_messages_of_equal_length(spec: str, depth: int, more: int) -> None:
    tokens = 3 * depth + more
    for plan in plans(spec, Budget(tokens=tokens), depth, policy=ScriptedPolicy(equal_lengths, "equal", 16)):
        assert plan.error is None and plan.best is not None
        # One message may begin while tokens are left.
        assert plan.usage.generated_tokens <= tokens + 2 or spec.startswith(("mcts", "puct", "halving"))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tokens", [1, 20, 40, 80, 200])
def test_token_budget_with_messages_of_unequal_length_ends_with_an_answer(spec: str, tokens: int) -> None:
    longest = 8
    for plan in plans(spec, Budget(tokens=tokens)):
        assert plan.error is None and plan.best is not None
        assert plan.usage.generated_tokens < tokens + 5 * longest


@pytest.mark.parametrize("spec", SPECS)
def test_sufficient_budget_does_not_change_the_plan(spec: str) -> None:
    if "parallel" in spec:
        pytest.skip("with a budget, simulations run one at a time")
    free, rich = plans(spec, None), plans(spec, Budget(calls=10_000))
    assert [plan.candidates for plan in free] == [plan.candidates for plan in rich]
    assert [plan.usage.agent_calls for plan in free] == [plan.usage.agent_calls for plan in rich]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("mas", ["dylan", "single"])
def test_budgets_are_respected_in_other_graphs(spec: str, mas: str) -> None:
    system = load_mas(mas)
    for calls in (len(system.agents), len(system.agents) + 7):
        for plan in plans(spec, Budget(calls=calls), mas=system):
            assert plan.error is None and plan.best is not None
            assert plan.usage.agent_calls <= calls


def test_budget_below_one_pass_fails_with_the_reason() -> None:
    for spec in SPECS:
        for plan in plans(spec, Budget(calls=3)):
            assert plan.error == "BudgetError: budget of 3 calls spent"


def test_only_passes_that_fit_the_budget_are_started() -> None:
    [plan, *_] = plans("sc:5", Budget(calls=18))
    assert len(plan.candidates) == 4 and plan.usage.agent_calls == 16


def test_beam_narrows_to_its_share_of_the_budget_at_each_turn() -> None:
    [plan, *_] = plans("sbs:5,3", Budget(calls=49))
    assert plan.usage.agent_calls == 49
    assert plan.tree is not None
    depths = [plan.tree.states[node].depth for node in range(1, len(plan.tree))]
    assert [depths.count(depth) for depth in (1, 2, 3, 4)] == [5, 14, 15, 15]


def test_messages_left_are_computed_from_the_budget_and_usage() -> None:
    budget = Budget(calls=10, tokens=100)
    assert Budget().messages_left(search.Usage()) is None
    assert Budget(seconds=1).messages_left(search.Usage()) is None
    assert Budget(calls=10).messages_left(search.Usage()) == 10
    assert budget.messages_left(search.Usage()) == 1
    assert budget.messages_left(search.Usage(agent_calls=2, generated_tokens=20)) == 8
    assert budget.messages_left(search.Usage(agent_calls=2, generated_tokens=60)) == 1
    assert budget.messages_left(search.Usage(agent_calls=4, generated_tokens=130)) == 0


# ---- the schedule of halving


@pytest.mark.parametrize(
    ("width", "n_simulations", "expected"),
    [
        # From mctx, seq_halving.get_sequence_of_considered_visits.
        (1, 4, [0, 1, 2, 3]),
        (2, 4, [0, 0, 1, 1]),
        (4, 8, [0, 0, 0, 0, 1, 1, 2, 2]),
        (4, 3, [0, 0, 0]),
        (8, 10, [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]),
        (5, 12, [0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4]),
    ],
)
def test_sequential_halving_schedule_equals_the_mctx_schedule(
    width: int, n_simulations: int, expected: list[int]
) -> None:
    assert list(considered_visits(width, n_simulations)) == expected


@pytest.mark.parametrize("spec", ["halving:10,3", "halving:1,3", "halving:37,2,width=6", "halving:10,3,leaf=bootstrap"])
def test_sequential_halving_runs_exactly_n_simulations(spec: str) -> None:
    for plan in plans(spec, None):
        assert plan.tree is not None
        virtual = len(plan.tree.children(0))
        assert plan.tree.visits[0] - virtual == search.load_planner(spec).n_simulations  # type: ignore[attr-defined]


def test_budget_horizon_reduces_children_per_node_as_the_budget_runs_out() -> None:
    world = World(4)
    plan = world.plan(search.load_planner("mcts:30,6,horizon=budget"))
    assert plan.tree is not None
    tree, fixed = plan.tree, World(4).plan(search.load_planner("mcts:30,6")).tree
    assert fixed is not None and len(tree) < len(fixed)
    widths = [len(tree.children(node)) for node in range(len(tree)) if len(tree.children(node))]
    # Nodes are numbered in the order of their creation; the root comes first.
    assert widths[0] == 6 and min(widths) < 4 and min(len(fixed.children(0)), 6) == 6


def test_budget_horizon_depends_on_remaining_calls() -> None:
    def shape(calls: int) -> list[list[int]]:
        found = plans("mcts:40,4,horizon=budget", Budget(calls=calls))
        return [[len(plan.tree.children(node)) for node in range(len(plan.tree))] for plan in found if plan.tree]

    small, large = shape(30), shape(120)
    assert small != large and all(max(widths) <= 4 for widths in small + large)


def test_budget_horizon_rejects_parallel_simulations() -> None:
    with pytest.raises(ConfigError, match="parallel=1"):
        search.load_planner("mcts:10,3,parallel=2,horizon=budget")
    with pytest.raises(ConfigError, match="horizon: expected one of"):
        search.load_planner("mcts:10,3,horizon=depth")
