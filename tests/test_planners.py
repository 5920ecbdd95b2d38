"""Planners against the paper's formulas, hand-checked trees, a literal reading of the algorithms, and odd worlds."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from search_worlds import HashCritic, World, noise, way

import search
from mas_gym.errors import BudgetError, ConfigError, MASGymError, UnknownNameError
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.loading import load_mas
from mas_gym.testing import check_planner
from search import (
    DVTS,
    MCTS,
    PUCT,
    REBASE,
    AdaptiveBranching,
    BestOfN,
    SelfConsistency,
    SequentialHalving,
    SinglePass,
    StepBeamSearch,
)
from search.planners.rebase import share
from search.planners.stop_rules import Confident
from search.planners.voting import vote

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json"))


# ---- child sets


def worded(way: str, index: int) -> str:
    return ("Plan: a", "Steps: a", "Plan: b")[index % 3]


@pytest.mark.parametrize("planner", [MCTS(6, 3), PUCT(6, 3), SequentialHalving(6, 3), MCTS(6, 3, parallel=2)])
def test_messages_equal_under_a_merge_rule_share_one_child(planner: MCTS) -> None:
    wide, narrow = (World(2, worded), World(2, worded))
    texts = [
        {state.text for state in world.plan(one).tree.states if state.depth == 1}
        for world, one in ((wide, planner), (narrow, replace(planner, same="opening")))
    ]
    assert texts == [{"Plan: a", "Steps: a", "Plan: b"}, {"Plan: a", "Plan: b"}]
    assert len(narrow.evaluated) < len(wide.evaluated)


def test_merge_rule_is_part_of_the_identity() -> None:
    named, own = MCTS(same="opening"), MCTS(same=lambda a, b: a == b)
    assert len({digest_of(identity_of(planner)) for planner in (MCTS(), named, own)}) == 3
    with pytest.raises(UnknownNameError, match="text, opening"):
        search.load_planner("mcts:10,3,same=label")


# ---- hand-checked trees


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_trees_are_unchanged(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    messages, values, expect = case["messages"], case["values"], case["expect"]
    world = World(case["depth"], lambda way, i: messages[way][i], value=values.__getitem__, reward=values.__getitem__)
    planner = search.load_planner(case["planner"])
    if isinstance(planner, MCTS):
        planner = replace(planner, values=case["values_are"])
    plan = world.plan(planner)
    tree = plan.tree
    assert tree is not None
    at = {way(state): node for node, state in enumerate(tree.states)}
    for name, visits in expect["visits"].items():
        assert tree.visits[at[name]] == visits, name
    for name, total in expect["totals"].items():
        assert tree.totals[at[name]] == pytest.approx(total), name
    assert [(way(c.state), c.score) for c in plan.candidates] == [
        (name, pytest.approx(score)) for name, score in expect["candidates"]
    ]
    assert world.calls == expect["agent_calls"]
    if case["values_are"] != "likelihood":
        assert len(world.evaluated) == expect["reward_calls"]
    curve = [[m.agent_calls, None if m.state is None else way(m.state)] for m in plan.anytime]
    assert curve == expect["anytime"]


# ---- the paper's budgets


@pytest.mark.parametrize(
    ("planner", "calls"),
    [
        (SinglePass(), (1, 3, 4)),
        (SelfConsistency(5), (5, 15, 20)),
        (BestOfN(5), (5, 15, 20)),
        (StepBeamSearch(5, 1), (5, 15, 20)),
        (StepBeamSearch(5, 3), (5, 35, 50)),
        # Beyond the paper.
        (DVTS(3, 5), (15, 45, 60)),
        (REBASE(15), (15, 45, 60)),
        (REBASE(7, choose="best"), (7, 21, 28)),
    ],
    ids=str,
)
def test_number_of_agent_calls_at_depths_1_3_and_4_equals_that_of_the_paper(planner: Any, calls: Any) -> None:
    worlds = [World(depth) for depth in (1, 3, 4)]
    assert all(world.plan(planner).best is not None for world in worlds)
    assert tuple(world.calls for world in worlds) == calls


@pytest.mark.parametrize(
    "planner", [StepBeamSearch(5, 3), MCTS(10, 3), SelfConsistency(5, "critic"), BestOfN(5)], ids=str
)
def test_step_critic_scores_each_successor_once(planner: Any) -> None:
    world = World(4)
    world.plan(planner)
    assert len(world.evaluated) == world.calls == len(set(world.evaluated))


def test_outcome_critic_scores_terminal_states_once() -> None:
    world = World(4)
    world.plan(MCTS(200, 2, values="outcome"))
    assert all(path.count("/") == 3 for path in world.evaluated)
    assert len(world.evaluated) == len(set(world.evaluated)) <= 16
    world = World(4)
    world.plan(SelfConsistency(5, "critic", values="outcome"))
    assert len(world.evaluated) == 5


def rollout_bound(simulations: int, children: int, depth: int) -> int:
    return sum(min(children**d, simulations) * children for d in range(depth))


@given(
    simulations=st.integers(1, 40),
    children=st.integers(1, 4),
    depth=st.integers(1, 5),
    c=st.sampled_from([0.0, 0.3, 2.0, 4.0]),
    leaf=st.sampled_from(["rollout", "bootstrap"]),
    seed=st.integers(0, 10**6),
)
def test_mcts_agent_calls_are_within_the_bound_for_each_leaf_setting(
    simulations: int, children: int, depth: int, c: float, leaf: Any, seed: int
) -> None:
    world = World(depth, value=lambda path: noise(seed, path))
    plan = world.plan(MCTS(simulations, children, c, leaf))
    assert plan.best is not None and world.model.is_terminal(plan.best.state)
    if leaf == "rollout":
        assert world.calls <= rollout_bound(simulations, children, depth)
    else:
        assert world.calls <= max(simulations * children, children + depth - 1)


# ---- a literal reading of Alg. 1 and Alg. 2, on dictionaries


def literal_mcts(world: World, simulations: int, children: int, c: float, *, training: bool, bootstrap: bool) -> Any:
    """The pseudocode line by line; N and W are keyed by the path that an edge leads to."""
    n: dict[str, int] = {}
    w: dict[str, float] = {}
    expanded: dict[str, list[str]] = {}
    depth = world.depth

    def terminal(path: str) -> bool:
        return path != "" and path.count("/") == depth - 1

    def join(path: str, text: str) -> str:
        return f"{path}/{text}" if path else text

    def select(path: str) -> str:
        tried = [b for b in expanded[path] if n[b] > 0]
        untried = [b for b in expanded[path] if n[b] == 0]
        if untried:
            return untried[0]
        total = sum(n[b] for b in tried)
        return max(tried, key=lambda b: w[b] / n[b] + c * math.sqrt(math.log(1 + total) / (1 + n[b])))

    def expand(path: str) -> None:
        expanded[path] = [join(path, world.messages(path, i)) for i in range(children)]
        for b in expanded[path]:
            n[b], w[b] = (0, 0.0) if training else (1, world.value(b))

    for _ in range(simulations):
        s, path = "", []
        while s in expanded and not terminal(s):
            s = select(s)
            path.append(s)
        if not terminal(s):
            expand(s)
            while not bootstrap and not terminal(s):
                if s not in expanded:
                    expand(s)
                s = select(s)
                path.append(s)
        v = world.reward(s) if training else world.value(s) if s else 0.0
        for b in path:
            n[b] += 1
            w[b] += v
    return n, w


@given(
    simulations=st.integers(1, 60),
    children=st.integers(1, 4),
    depth=st.integers(1, 4),
    c=st.sampled_from([0.0, 0.5, 2.0, 4.0]),
    mode=st.sampled_from(["training", "rollout", "bootstrap"]),
    seed=st.integers(0, 10**6),
)
def test_mcts_equals_a_reference_implementation_of_the_pseudocode(
    simulations: int, children: int, depth: int, c: float, mode: str, seed: int
) -> None:
    world = World(
        depth,
        value=lambda path: noise("v", seed, path),
        reward=lambda path: 1.0 if noise("r", seed, path) < 0.5 else -1.0,
    )
    planner = {
        "training": MCTS(simulations, children, c, values="reward"),
        "rollout": MCTS(simulations, children, c),
        "bootstrap": MCTS(simulations, children, c, "bootstrap"),
    }[mode]
    world.model = Bare(world.model)  # type: ignore[assignment]
    plan = world.plan(planner)
    assert plan.tree is not None
    n, w = literal_mcts(world, simulations, children, c, training=mode == "training", bootstrap=mode == "bootstrap")
    nodes = {way(node.state): node for node in plan.tree if node.id}
    # A bootstrap search that met no terminal state is completed beyond the pseudocode.
    extra = set(nodes) - set(n)
    assert not extra or (mode == "bootstrap" and not any(path.count("/") == depth - 1 for path in n))
    assert {path: nodes[path].visits for path in n} == n
    for path in n:
        assert nodes[path].total == pytest.approx(w[path])


class Bare:
    """A model without a known depth, so that no simulation is abandoned for the completion."""

    def __init__(self, model: Dynamics) -> None:
        self.mas, self.is_terminal, self.transition = model.mas, model.is_terminal, model.transition
        self.initial_state, self.max_depth = model.initial_state, 1


def test_training_uses_the_papers_configuration() -> None:
    planner = MCTS(40, 3).for_run(None, training=True)
    assert planner.values == "reward"
    world = World(4)
    plan = world.plan(planner)
    assert plan.tree is not None and not world.evaluated
    assert plan.tree.visits[0] == 40
    assert sum(plan.tree.visits[i] for i in range(len(plan.tree)) if plan.tree.is_terminal(i)) == 40
    assert world.calls <= 40 * 3 * 4
    assert len(world.rewarded) == len(set(world.rewarded)) <= 40


# ---- decoding and ranking


@given(st.integers(0, 10**6), st.sampled_from(["rollout", "bootstrap"]), st.sampled_from(["process", "likelihood"]))
def test_decoding_returns_only_terminal_states(seed: int, leaf: Any, values: Any) -> None:
    # Values that rise towards the root make the greedy path end as early as possible.
    world = World(4, value=lambda path: noise(seed, path) + 3 - path.count("/"))
    plan = world.plan(MCTS(10, 3, 0.5, leaf, values=values))
    assert plan.candidates
    assert all(world.model.is_terminal(candidate.state) for candidate in plan.candidates)
    assert all(m.state is None or world.model.is_terminal(m.state) for m in plan.anytime)


def test_bootstrap_search_without_virtual_visits_returns_an_answer() -> None:
    for seed in range(30):
        world = World(3, value=lambda path, seed=seed: noise(seed, path))  # type: ignore[misc]
        plan = world.plan(MCTS(6, 2, 1.0, "bootstrap", virtual_visits=False))
        assert plan.best is not None


def test_decoding_skips_unvisited_children() -> None:
    # Every visited leaf is wrong (-1), so an unvisited sibling's empty Q of 0 would win.
    world = World(2, reward=lambda path: -1.0)
    plan = world.plan(MCTS(3, 3, values="reward"))
    assert plan.best is not None and plan.tree is not None and plan.best.node is not None
    assert plan.tree.visits[plan.best.node] > 0
    assert len(plan.candidates) == 3


def test_candidates_are_ranked_by_path_score_or_by_leaf_q() -> None:
    values = {"a": 0.9, "b": 0.8, "a/a": 0.1, "a/b": 0.2, "b/a": 0.3, "b/b": 0.25}
    world = World(2, value=values.__getitem__)
    by_path = world.plan(MCTS(8, 2, 1.0))
    assert [c.score for c in by_path.candidates[1:]] == sorted((c.score for c in by_path.candidates[1:]), reverse=True)
    by_leaf = World(2, value=values.__getitem__).plan(MCTS(8, 2, 1.0, rank="leaf"))
    assert by_leaf.tree is not None
    for candidate in by_leaf.candidates:
        assert candidate.node is not None
        assert candidate.score == by_leaf.tree[candidate.node].q
    assert by_path.best is not None and by_leaf.best is not None
    assert by_path.best.state == by_leaf.best.state


@pytest.mark.parametrize("rank", ["path", "leaf"])
def test_answer_option_selects_the_best_candidate(rank: Any) -> None:
    # The first message is worth more by its mean, the second has the best leaf.
    values = {"a": 0.5, "b": -0.9, "a/a": 0.5, "a/b": 0.4, "b/a": 0.9, "b/b": -0.9}
    leaf_only = {"rank": rank, "values": "outcome"}
    decoded, best = (
        World(2, value=values.__getitem__).plan(MCTS(8, 2, 100.0, answer=answer, **leaf_only))
        for answer in ("decode", "best")
    )
    assert decoded.best is not None and best.best is not None
    assert (decoded.best.score, best.best.score) == (0.5, 0.9)
    assert best.anytime[-1].state == best.best.state
    assert {c.state for c in decoded.candidates} == {c.state for c in best.candidates}


@given(st.integers(0, 10**6))
def test_candidates_without_q_rank_last(seed: int) -> None:
    # All values are negative, so a missing Q that counted as 0 would lead.
    world = World(2, value=lambda path: noise(seed, path) - 1.5)
    plan = world.plan(MCTS(3, 3, virtual_visits=False, rank="leaf"))
    scores = [candidate.score for candidate in plan.candidates]
    assert None in scores and scores[0] is not None
    known = [score for score in scores[1:] if score is not None]
    assert scores[1:] == sorted(known, reverse=True) + [None] * (len(scores) - 1 - len(known))


def test_curve_contains_the_answer_at_each_cost() -> None:
    for seed in range(20):
        world = World(3, value=lambda path, seed=seed: noise(seed, path))  # type: ignore[misc]
        whole = world.plan(MCTS(12, 3))
        answers = {}
        for simulations in range(1, 13):
            part = World(3, value=world.value)
            plan = part.plan(MCTS(simulations, 3))
            assert plan.best is not None
            answers[part.calls] = way(plan.best.state)
        curve = {m.agent_calls: way(m.state) for m in whole.anytime if m.state is not None}
        for calls, answer in answers.items():
            assert curve[max(cost for cost in curve if cost <= calls)] == answer


# ---- votes


@pytest.mark.parametrize(
    ("answers", "weights", "winner"),
    [
        (["1", "2", "2"], [1, 1, 1], 1),
        (["1", "2"], [1, 1], 0),
        (["1", "2", "2"], [0.9, 0.4, 0.4], 0),
        (["1", "2", "2"], [0.7, 0.4, 0.5], 2),
        ([None, None, "3"], [1, 1, 1], 2),
        ([None, None], [1, 1], 0),
        (["A", "B", "A"], [1, 1, 1], 0),
    ],
)
def test_majority_vote_counts_equal_answers(answers: list[str | None], weights: list[float], winner: int) -> None:
    assert vote(answers, weights) == winner


def test_weighted_vote_sums_the_sigmoids_of_path_scores() -> None:
    # Answers x, y, y: sigmoid(3) = 0.953 against 2 sigmoid(-0.1) = 0.950.
    texts = {"": ["p", "q", "r"], "p": ["x"], "q": ["y"], "r": ["y"]}
    values = {"p": 2.0, "p/x": 4.0, "q": -0.1, "q/y": -0.1, "r": -0.1, "r/y": -0.1}
    world = World(2, lambda path, i: texts[path][i], value=values.__getitem__)
    assert world.plan(SelfConsistency(3, "critic")).text == "x"
    world = World(2, lambda path, i: texts[path][i], value=values.__getitem__)
    assert world.plan(SelfConsistency(3)).text == "y"


# ---- beams in graphs whose schedule depends on the messages


def test_beam_keeps_states_that_end_early() -> None:
    model = Dynamics(load_mas("dylan"))
    world = World(
        2, lambda path, i: "VERDICT: AGREE" if i == 0 else "VERDICT: DISAGREE", value=lambda path: noise(path)
    )
    world.model = model
    plan = world.plan(StepBeamSearch(2, 4))
    depths = {candidate.state.depth for candidate in plan.candidates}
    assert depths <= {4, 8} and all(model.is_terminal(c.state) for c in plan.candidates)
    early = World(2, lambda path, i: "VERDICT: AGREE", value=lambda path: noise(path))
    early.model = model
    plan = early.plan(StepBeamSearch(2, 4))
    assert {candidate.state.depth for candidate in plan.candidates} == {4}
    assert early.calls == 2 + 2 * 2 + 4 * 2 + 4 * 2


def test_beam_ties_are_broken_in_favor_of_the_likelier_message() -> None:
    plan = Likely([-3, -2, -1], lambda path: 0.5).plan(StepBeamSearch(3, 1))
    assert plan.text == "c"


class Likely(World):
    """A world of depth 2 with the given log-probabilities of a state's proposals."""

    def __init__(self, logprobs: list[float], value: Any) -> None:
        super().__init__(2, value=value)
        self.logprobs = logprobs

    def propose(self, state: Any, n: int) -> Any:
        return [one._replace(logprob=self.logprobs[i]) for i, one in enumerate(super().propose(state, n))]


# ---- degenerate worlds


@pytest.mark.parametrize(
    "planner", [MCTS(5, 1), MCTS(5, 1, leaf="bootstrap"), StepBeamSearch(1, 1), SinglePass()], ids=str
)
def test_search_of_width_1_makes_a_single_pass(planner: Any) -> None:
    world = World(4)
    assert world.plan(planner).best is not None
    assert world.calls == 4


@pytest.mark.parametrize("leaf", ["rollout", "bootstrap"])
def test_duplicates_share_a_child_and_are_all_counted(leaf: Any) -> None:
    world = World(3, lambda path, i: "same")
    plan = world.plan(MCTS(10, 3, leaf=leaf))
    assert plan.tree is not None and len(plan.tree) == 4
    assert world.calls == 9 and len(world.evaluated) == 3


def test_duplicates_are_separate_in_a_beam() -> None:
    world = World(3, lambda path, i: "same")
    plan = world.plan(StepBeamSearch(5, 3))
    assert world.calls == 35 and len(plan.candidates) == 3


@pytest.mark.parametrize("leaf", ["rollout", "bootstrap"])
def test_children_of_the_root_may_be_terminal(leaf: Any) -> None:
    world = World(1)
    plan = world.plan(MCTS(10, 3, leaf=leaf))
    assert world.calls == 3 and len(plan.candidates) == 3


def test_constant_critic_gives_uniform_search() -> None:
    world = World(2, value=lambda path: 0.5)
    plan = world.plan(MCTS(9, 3, 2.0))
    assert plan.tree is not None
    assert [plan.tree.visits[i] for i in plan.tree.children(0)] == [4, 4, 4]


def test_empty_messages_are_valid() -> None:
    world = World(3, lambda path, i: "" if i == 0 else "x")
    plan = world.plan(MCTS(10, 2))
    assert plan.tree is not None and len(plan.tree.children(0)) == 2


def test_budget_ends_the_simulations_and_keeps_the_answer() -> None:
    class Limited(World):
        def propose(self, state: Any, n: int) -> Any:
            if self.calls >= 12:
                raise BudgetError("spent")
            return super().propose(state, n)

    world = Limited(3)
    generator = MCTS(50, 3).plan(world.model, world.model.initial_state("q"), None)  # type: ignore[arg-type]
    requests = next(generator)
    with pytest.raises(StopIteration) as end:
        while True:
            try:
                replies = [world.answer(request) for request in requests]
            except BudgetError as error:
                requests = generator.throw(error)
            else:
                requests = generator.send(replies)
    assert end.value.value.best is not None


# ---- beyond the paper


@given(st.integers(0, 10**6), st.sampled_from(["rollout", "bootstrap"]), st.sampled_from([0.3, 1.0, 30.0]))
def test_puct_and_halving_return_an_answer_within_their_bounds(seed: int, leaf: Any, temperature: float) -> None:
    def world() -> World:
        return World(4, value=lambda path: noise(seed, path))

    puct, halving = world(), world()
    assert puct.plan(PUCT(10, 3, 1.0, leaf, temperature=temperature)).best is not None
    assert rollout_bound(10, 3, 4) == 69 and puct.calls <= (69 if leaf == "rollout" else 30)
    plan = halving.plan(SequentialHalving(16, 3, 1.0, leaf, width=6))
    assert plan.best is not None and plan.tree is not None
    visits = sorted(plan.tree.visits[child] for child in plan.tree.children(0))
    # 6, 3, 2 messages with 16 // 18 -> 1, 16 // 9 = 1 and 16 // 6 = 2 simulations each, the last three of the 16
    # for the two that are left, and the virtual visit.
    assert visits == [2, 2, 2, 3, 6, 7]


def test_puct_priors_set_the_order_of_first_visits_in_an_outcome_search() -> None:
    third = [-9.0, -9.0, -0.1]

    def visits(n_simulations: int, reward: float) -> list[int]:
        world = Likely(third, lambda path: reward)
        tree = world.plan(PUCT(n_simulations, 3, c_uct=1.0, values="outcome")).tree
        assert tree is not None
        return [tree.visits[child] for child in tree.children(0)]

    assert visits(1, 1.0) == [0, 0, 1]
    # Q of a child without visits is the mean so far, so an unlikely one is not tried before the likely one again.
    assert visits(3, 1.0) == visits(3, -1.0) == [0, 0, 3]
    # Where the likely one disappoints, the others are tried.
    world = Likely(third, lambda path: -1.0 if path[0] == "c" and path != "c/c" else 1.0)
    tree = world.plan(PUCT(40, 3, c_uct=1.0, values="outcome")).tree
    assert tree is not None and all(tree.visits[child] for child in tree.children(0))


def test_sequential_halving_selects_its_answer_among_the_finalists() -> None:
    leaves = {"a/a": 1.0, "b/a": 0.9, "c/a": 0.5, "d/a": 0.4}
    world = World(2, value=lambda path: leaves.get(path, -1.0))
    plan = world.plan(SequentialHalving(8, 3, width=4, values="outcome"))
    assert plan.tree is not None and plan.best is not None
    visits = [plan.tree.visits[child] for child in plan.tree.children(0)]
    means = [plan.tree.totals[child] / plan.tree.visits[child] for child in plan.tree.children(0)]
    # The best mean belongs to a message that was given up; the answer comes from those that were not.
    assert visits == [3, 3, 1, 1] and max(means) == means[2]
    assert plan.best.state.path()[1].text == "a" and plan.best.text == "a"
    assert plan.anytime[-1].node == plan.best.node


def test_puct_visits_are_even_for_equal_likelihoods_and_favor_likelier_children() -> None:
    flat = lambda path: 0.5  # noqa: E731
    even, led = World(2, value=flat), Likely([-0.1, -9.0, -9.0], flat)
    spread = [even.plan(PUCT(30, 3, 2.0)).tree, led.plan(PUCT(30, 3, 2.0)).tree]
    visits = [[tree.visits[i] for i in tree.children(0)] for tree in spread if tree is not None]
    assert max(visits[0]) - min(visits[0]) <= 1
    assert visits[1][0] > 3 * visits[1][1]


def test_rebase_expands_better_states_more() -> None:
    values = {"a": 0.9, "b": 0.5, "c": 0.5}
    world = World(2, value=lambda path: values.get(path, 0.5))
    tree = world.plan(REBASE(3, temperature=0.2)).tree
    assert tree is not None
    assert [len(tree.children(i)) for i in tree.children(0)] == [3, 0, 0]


@example(1, [0.0, 5e-324])
@given(st.integers(0, 50), st.lists(st.floats(-50, 50), min_size=1, max_size=20))
def test_rebase_shares_add_up_to_the_total_and_follow_the_score_order(amount: int, logits: list[float]) -> None:
    counts = share(amount, logits)
    assert sum(counts) == amount and min(counts) >= 0
    ranked = sorted(zip(logits, counts, strict=True))
    assert all(few <= many or low == high for (low, few), (high, many) in itertools.pairwise(ranked))


def test_adaptive_branching_widens_until_it_finds_a_good_candidate() -> None:
    def visits(value: Any) -> list[int]:
        world = World(2, value=value)
        plan = world.plan(AdaptiveBranching(60, 0.1))
        assert plan.tree is not None and plan.best is not None and world.calls <= 60 * 2
        return [plan.tree.visits[child] for child in plan.tree.children(0)]

    assert len(visits(lambda path: 0.5)) >= 8
    late = visits(lambda path: float(path[0] == "d"))
    assert 4 <= len(late) <= 7 and late[3] >= 40


@pytest.mark.parametrize("planner", [PUCT(), SequentialHalving(), DVTS(), REBASE(), AdaptiveBranching()], ids=str)
def test_puct_halving_dvts_rebase_and_adaptive_require_a_critic(planner: Any) -> None:
    with pytest.raises(ConfigError, match="needs a critic"):
        planner.for_run(None, False)
    check_planner(planner)


# ---- rejected arguments


@pytest.mark.parametrize(
    "make",
    [
        lambda: MCTS(0),
        lambda: MCTS(10, 0),
        lambda: MCTS(10, 3, -1.0),
        lambda: MCTS(10, 3, math.nan),
        lambda: MCTS(10, 3, leaf="both"),  # type: ignore[arg-type]
        lambda: MCTS(10, 3, leaf="bootstrap", values="outcome"),
        lambda: MCTS(10, 3, virtual_visits=True, values="reward"),
        lambda: MCTS(2.5),  # type: ignore[arg-type]
        lambda: StepBeamSearch(5, 0),
        lambda: SelfConsistency(0),
        lambda: SelfConsistency(5, "votes"),  # type: ignore[arg-type]
        lambda: BestOfN(True),
        lambda: MCTS().for_run(None, False),
        lambda: BestOfN().for_run(None, False),
        lambda: SelfConsistency(5, "critic").for_run(None, False),
        lambda: StepBeamSearch().for_run(None, False),
        lambda: StepBeamSearch().for_run(HashCritic(terminal_only=True), False),
        lambda: StepBeamSearch().for_run(None, True),
        lambda: MCTS(leaf="bootstrap").for_run(HashCritic(terminal_only=True), False),
    ],
)
def test_invalid_settings_are_rejected(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected|needs|defined|virtual"):
        make()


def test_planners_choose_their_value_type_by_the_kind_of_critic() -> None:
    assert MCTS().for_run(HashCritic(), False).values == "process"
    assert MCTS().for_run(HashCritic(terminal_only=True), False).values == "outcome"
    assert MCTS().for_run(search.PolicyLikelihood(), False).values == "likelihood"
    assert SelfConsistency(weights="critic").for_run(HashCritic(terminal_only=True), False).values == "outcome"


# ---- names


@pytest.mark.parametrize(
    ("spec", "planner"),
    [
        ("single", SinglePass()),
        ("sc", SelfConsistency()),
        ("sc:7", SelfConsistency(7)),
        ("sc:5,weights=critic", SelfConsistency(5, "critic")),
        ("bon:8", BestOfN(8)),
        ("sbs:5,3", StepBeamSearch(5, 3)),
        ("mcts:10,3", MCTS(10, 3)),
        (" mcts: 40, 3 , c=4 ", MCTS(40, 3, 4)),
        ("mcts:10,3,leaf=bootstrap,c=0.5,rank=leaf", MCTS(10, 3, 0.5, "bootstrap", rank="leaf")),
        ("mcts:n_simulations=7", MCTS(7)),
        ("mcts:10,3,same=opening", MCTS(10, 3, same="opening")),
        ("mcts:7,virtual_visits=false", MCTS(7, virtual_visits=False)),
        ("puct:10,3,c=1,temperature=0.5", PUCT(10, 3, 1, temperature=0.5)),
        ("halving:16,3,width=4", SequentialHalving(16, 3, width=4)),
        ("dvts:3,5", DVTS(3, 5)),
        ("rebase:15,choose=best", REBASE(15, choose="best")),
        ("adaptive:20,spread=0.5", AdaptiveBranching(20, 0.5)),
    ],
)
def test_specs_are_parsed(spec: str, planner: Any) -> None:
    assert search.load_planner(spec) == planner
    assert search.load_planner(search.planner_spec(planner)) == planner


@pytest.mark.parametrize("spec", ["mtcs:10", "", "MCTS 10", "beam"])
def test_unknown_planner_error_lists_known_names(spec: str) -> None:
    with pytest.raises(UnknownNameError, match=r"expected one of: .*bon, .*mcts, .*sbs, sc, .*single"):
        search.load_planner(spec)


@pytest.mark.parametrize(
    "spec",
    [
        *("single:1", "mcts:1,2,3,4,5,6,7,8,9", "mcts:x", "mcts:c=x"),
        *("mcts:foo=1", "mcts:c=2,10", "sbs:5,3,b1=2", "mcts:1,n_simulations=2"),
    ],
)
def test_invalid_settings_in_specs_are_rejected(spec: str) -> None:
    with pytest.raises(ConfigError):
        search.load_planner(spec)


@given(st.sampled_from(["mcts", "puct", "adaptive", "rebase"]), st.floats(1e-6, 1e6), st.integers(1, 99))
def test_specs_preserve_every_digit(name: str, number: float, size: int) -> None:
    setting = {"mcts": "c", "puct": "temperature", "adaptive": "spread", "rebase": "temperature"}[name]
    planner = search.load_planner(f"{name}:{size},{setting}={number!r}")
    assert search.load_planner(search.planner_spec(planner)) == planner


FLOATS = [
    (name, setting.name)
    for name in search.planner_names()
    for setting in fields(search.load_planner(name))  # type: ignore[arg-type]
    if "float" in str(setting.type)
]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "true", "high"])
@pytest.mark.parametrize(("name", "setting"), FLOATS)
def test_float_settings_accept_only_finite_numbers_in_range(name: str, setting: str, value: str) -> None:
    assert len(FLOATS) >= 6
    with pytest.raises(ConfigError, match=f"expected {setting} to be a"):
        search.load_planner(f"{name}:{setting}={value}")


OTHER: dict[type, Any] = {int: 17, float: 0.7171, bool: True, str: "other"}
CHOICES = {
    "leaf": "bootstrap",
    "rank": "leaf",
    "answer": "best",
    "weights": "critic",
    "choose": "best",
    "values": "likelihood",
    "same": "opening",
    "stop": 0.9,
    "horizon": "budget",
    "stages": (BestOfN(2), MCTS()),
    "rules": (Confident(0.3),),
}


@pytest.mark.parametrize("name", ["single", *sorted(set(search.planner_names()) - {"single"})])
def test_each_setting_of_a_shipped_planner_is_in_its_identity(name: str) -> None:
    planner: Any = search.load_planner(name)
    assert identity_of(planner) == identity_of(search.load_planner(name))
    seen = [identity_of(planner)]
    for setting in fields(planner):
        if setting.name == "parallel" and type(planner) is not MCTS:
            continue
        default = getattr(planner, setting.name)
        other = CHOICES.get(
            setting.name, 1.5 if default is None and setting.name == "c_uct" else OTHER.get(type(default), True)
        )
        seen.append(identity_of(replace(planner, **{setting.name: other})))
    assert all(one != two for one, two in itertools.combinations(seen, 2))


@given(st.text(max_size=30))
def test_arbitrary_spec_is_parsed_or_rejected(text: str) -> None:
    for spec in (text, f"mcts:{text}"):
        try:
            search.load_planner(spec)
        except MASGymError as error:
            assert str(error)
