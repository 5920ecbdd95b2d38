"""Credit per message: unbiasedness by enumeration, invariances, zero sums, degenerate groups, and the dispatcher."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_worlds import chain, talker

import mas_gym
import search
from mas_gym.errors import ConfigError, DataError, UnknownNameError
from mas_gym.policies import SamplingRequest, load_policy
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.prompts import chat_messages
from mas_gym.systems.state import Action, MASState
from search import Candidate, Plan, ScoringContext, Tree
from search.credit import (
    METHODS,
    Credit,
    control_variate,
    credit,
    leave_one_out,
    shared_outcome,
    tree_credit,
    value_baseline,
    value_differences,
)

MODEL = Dynamics(chain(2))
REWARDS = st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=1, max_size=8)
Shape = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Game:
    """Two agents write "a" or "b" in turn; the chance of "a" depends on the transcript, the reward on all of it."""

    chances: tuple[float, float, float]
    rewards: tuple[float, float, float, float]
    scores: tuple[float, ...] = (0.0,) * 6

    def chance(self, path: str, message: str) -> float:
        likely = self.chances[0 if not path else 1 + "ab".index(path)]
        return likely if message == "a" else 1 - likely

    def truth(self, path: str) -> float:
        """Return the expected reward after a transcript."""
        if len(path) == 2:
            return self.rewards[2 * "ab".index(path[0]) + "ab".index(path[1])]
        return sum(self.chance(path, message) * self.truth(path + message) for message in "ab")

    def value(self, path: str) -> float:
        """Return an arbitrary critic's value."""
        return self.scores[["a", "b", "aa", "ab", "ba", "bb"].index(path)] if path else 0.0


GAMES = st.builds(
    Game,
    st.tuples(*[st.floats(0.1, 0.9)] * 3),
    st.tuples(*[st.sampled_from([-1.0, 0.0, 0.5, 1.0])] * 4),
    st.tuples(*[st.floats(-2, 2)] * 6),
)


def growths(game: Game, path: str, shape: Shape) -> Iterator[tuple[float, list[tuple[str, Any]]]]:
    """Yield every outcome of sampling below a transcript with its probability.

    ``shape`` has for each turn how many messages are sampled and how many of them, the first ones, are continued.
    """
    if not shape:
        yield 1.0, []
        return
    (sampled, continued), *rest = shape
    for texts in product("ab", repeat=sampled):
        chance = math.prod(game.chance(path, text) for text in texts)
        below = [list(growths(game, path + text, tuple(rest))) for text in texts[:continued]]
        for combination in product(*below):
            subtrees = [grown for _, grown in combination] + [None] * (sampled - continued)
            yield chance * math.prod(p for p, _ in combination), list(zip(texts, subtrees, strict=True))


def planted(growth: list[tuple[str, Any]]) -> Tree:
    tree = Tree(MODEL.initial_state("q"))
    waiting = [(0, growth)]
    while waiting:
        parent, children = waiting.pop()
        for text, below in children:
            state = MODEL.transition(tree.states[parent], Action(text, MODEL.mas.ALL))
            node = tree.add(parent, state, None, MODEL.is_terminal(state))
            waiting += [(node, below)] if below else []
    return tree


def path_of(state: MASState) -> str:
    return "".join(turn.text for turn in state.turns)


def plan_of(tree: Tree, problem: str = "p", rewards: Callable[[MASState], float] | None = None) -> Plan:
    ends = [node for node in range(len(tree)) if tree.is_terminal(node)]
    correct = [rewards is not None and rewards(tree.states[node]) > 0 for node in ends]
    candidates = [Candidate(tree.states[node], None, node, "", c) for node, c in zip(ends, correct, strict=True)]
    return Plan(tuple(candidates), tree, problem_id=problem)


def moments(game: Game, shape: Shape, value: Callable[[str], float] | None = None) -> dict[str, tuple[float, float]]:
    """Return mean and variance of the credit of the first child and of its first child, by their transcript."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for chance, growth in growths(game, "", shape):
        parents, paths, waiting = [-1], [""], [(0, growth)]
        for parent, children in waiting:
            for text, below in children:
                parents.append(parent)
                paths.append(paths[parent] + text)
                if below:
                    waiting.append((len(paths) - 1, below))
        rewards = {node: game.truth(path) for node, path in enumerate(paths) if len(path) == 2}
        found = tree_credit(parents, rewards, None if value is None else [value(path) for path in paths], weight=0.8)
        for node in (1, parents.index(1)):
            for power in range(3):
                sums[paths[node]][power] += chance * found[node] ** power
    return {path: (one / p, two / p - (one / p) ** 2) for path, (p, one, two) in sums.items()}


@pytest.mark.parametrize("shape", [((2, 2), (2, 2)), ((3, 2), (2, 2)), ((2, 2), (3, 3))])
@settings(max_examples=15)
@given(game=GAMES)
def test_estimated_credit_has_the_exact_credit_as_its_expectation(shape: Shape, game: Game) -> None:
    for value in (None, game.value):
        for path, (mean, _) in moments(game, shape, value).items():
            assert mean == pytest.approx(game.truth(path) - game.truth(path[:-1]), abs=1e-9)


@settings(max_examples=15)
@given(game=GAMES)
def test_values_of_unexpanded_messages_reduce_the_variance(game: Game) -> None:
    plain = moments(game, ((2, 2), (2, 2)))
    helped = moments(game, ((3, 2), (2, 2)), game.truth)
    spread = sum(game.chance("", m) * (game.truth(m) - game.truth("")) ** 2 for m in "ab")
    for path in "ab":
        # Of the baseline's variance between messages, (1 - w)^2 + 2 w (1 - w) / 2 + w^2 / 2 is left at w = 0.8.
        assert helped[path][1] == pytest.approx(plain[path][1] - 0.48 * spread, abs=1e-9)


@settings(max_examples=15)
@given(game=GAMES, before=st.floats(-2, 2))
def test_value_baseline_gives_the_exact_expected_policy_gradient(game: Game, before: float) -> None:
    likely = game.chance("", "a")
    found = exact = 0.0
    for chance, growth in growths(game, "", ((3, 3),)):
        texts = [text for text, _ in growth]
        advantages = value_baseline([game.truth(text) for text in texts], before, weight=0.7)
        # The derivative of log pi with respect to the logit of "a".
        score = (texts[0] == "a") - likely
        found += chance * score * advantages[0]
        exact += chance * score * (game.truth(texts[0]) - game.truth(""))
    assert found == pytest.approx(exact, abs=1e-9)


def test_value_baseline_combines_siblings_and_previous_value() -> None:
    assert value_baseline([1, 0, 0], 0.25, weight=0.0).tolist() == pytest.approx(leave_one_out([1, 0, 0]).tolist())
    assert value_baseline([1, 0], 0.25, weight=0.5).tolist() == pytest.approx([1 - 0.125, 0 - 0.625])
    assert value_baseline([1], 0.25).tolist() == [0.75]
    tree = planted([("a", [("a", []), ("b", [])]), ("b", [("b", [])])])
    values = {"a": 0.5, "b": 0.1}
    (found,) = credit(
        [plan_of(tree)],
        "value-baseline",
        reward=lambda state: {"aa": 1.0, "ab": -1.0, "bb": -1.0}[path_of(state)],
        value=lambda state: values.get(path_of(state), math.nan),
    )
    shown = {path_of(tree.states[one.node]): one.advantage for one in found}
    # The question has no value, so its messages are compared with each other alone.
    assert shown == pytest.approx({"a": 1.0, "b": -1.0, "aa": 1.25, "ab": -1.75, "bb": -1.1})


@given(REWARDS, st.floats(-5, 5), st.randoms())
def test_credit_ignores_constants_and_the_order_of_samples(rewards: list[float], shift: float, random: Any) -> None:
    groups = [place % 2 for place in range(len(rewards))]
    values = [*np.sin(rewards), 0.3]
    order = list(range(len(rewards)))
    random.shuffle(order)
    tried = {
        "plain": lambda r, g, v: shared_outcome(r, g, scale=False),
        "scaled": lambda r, g, v: shared_outcome(r, g),
        "siblings": lambda r, g, v: leave_one_out(r),
        "values": lambda r, g, v: control_variate(r, v, weight=0.7),
    }
    for name, compute in tried.items():
        found = compute(rewards, groups, values)
        moved = compute([one + shift for one in rewards], groups, values)
        shuffled = compute(*([part[i] for i in order] for part in (rewards, groups)), [values[i] for i in [*order, -1]])
        assert moved == pytest.approx(found, abs=1e-6), name
        assert shuffled == pytest.approx(found[order], abs=1e-9), name


@given(REWARDS)
def test_credit_of_each_group_sums_to_zero(rewards: list[float]) -> None:
    n = len(rewards)
    agents, turns, questions = [i % 3 for i in range(n)], [i % 2 for i in range(n)], ["q"] * n
    assert leave_one_out(rewards).sum() == pytest.approx(0, abs=1e-9)
    for scale in (True, False):
        assert shared_outcome(rewards, questions, scale=scale).sum() == pytest.approx(0, abs=1e-9)
        by_agent = shared_outcome(rewards, agents, scale=scale)
        by_turn = shared_outcome(rewards, list(zip(questions, agents, turns, strict=True)), scale=scale)
        for agent in range(3):
            assert by_agent[np.equal(agents, agent)].sum() == pytest.approx(0, abs=1e-9)
            for turn in range(2):
                group = np.equal(agents, agent) & np.equal(turns, turn)
                assert by_turn[group].sum() == pytest.approx(0, abs=1e-9)


def test_advantages_equal_hand_computed_values() -> None:
    assert shared_outcome([1, 0, 0, 1, 5, 7], list("aaaabb")).tolist() == [1, -1, -1, 1, -1, 1]
    assert shared_outcome([1, 0, 0, 1, 5, 7], list("aaaabb"), scale=False).tolist() == [0.5, -0.5, -0.5, 0.5, -1, 1]
    assert leave_one_out([1, 0, 0]).tolist() == pytest.approx([1, -0.5, -0.5])
    # The other reward less its value, plus the mean value of the others.
    assert control_variate([1, 0], [0.5, 0.25, 0.75], weight=1).tolist() == pytest.approx(
        [1 - (-0.25 + 0.5), 0 - (0.5 + 0.625)]
    )


@pytest.mark.parametrize("rewards", [[1.0], [0.3, 0.3], [0.1, 0.1, 0.1], [0.1 + 0.2, 0.3]])
def test_groups_with_equal_rewards_have_zero_advantage(rewards: list[float]) -> None:
    assert shared_outcome(rewards, ["q"] * len(rewards)).tolist() == [0.0] * len(rewards)
    assert leave_one_out(rewards) == pytest.approx([0.0] * len(rewards), abs=1e-15)
    assert control_variate(rewards[:1], [0.5, 0.1]).tolist() == [0.0]


def test_credit_of_no_samples_is_empty() -> None:
    assert shared_outcome([], []).size == leave_one_out([]).size == control_variate([], []).size == 0
    for method in METHODS:
        assert credit([], method, truth=lambda state: 0.0) == []
    stopped = Plan((), planted([]), problem_id="p")
    for method in ("shared-outcome", "leave-one-out", "control-variate", "value-baseline"):
        assert credit([stopped], method) == [()]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_credit_rejects_non_finite_numbers(wrong: float) -> None:
    tree = planted([("a", [("a", []), ("b", [])])])
    for call in (
        lambda: shared_outcome([1, wrong], "qq"),
        lambda: leave_one_out([1, wrong]),
        lambda: control_variate([1, 2], [wrong, 1]),
        lambda: value_baseline([1, 2], wrong),
        lambda: tree_credit([-1, 0, 0], {1: wrong, 2: 1.0}),
        lambda: credit([plan_of(tree)], reward=lambda state: wrong),
        lambda: credit([plan_of(tree)], "shared-outcome", reward=lambda state: wrong),
    ):
        with pytest.raises(ConfigError, match="finite"):
            call()


def test_credit_rejects_arrays_of_different_lengths() -> None:
    with pytest.raises(ConfigError, match="one group per reward"):
        shared_outcome([1, 2], ["q"])
    with pytest.raises(ConfigError, match="at least one value per reward"):
        control_variate([1, 2], [0.5])
    with pytest.raises(ConfigError, match="one value per node"):
        value_differences([0.5], [-1, 0])


def test_value_credit_equals_the_increase_in_value() -> None:
    assert value_differences([0.5, 0.75, 0.0, math.nan], [-1, 0, 1, 1])[1:3].tolist() == [0.25, -0.75]
    tree = planted([("a", [("a", [])]), ("b", [("b", [])])])
    paths = {"a": 0.6, "b": 0.2, "aa": 1.0, "bb": -1.0}
    (found,) = credit([plan_of(tree)], "value", value=lambda state: paths.get(path_of(state), math.nan))
    shown = {path_of(tree.states[one.node]): one.advantage for one in found}
    # The question has no value, so the mean after its first messages is used.
    assert shown == pytest.approx({"a": 0.2, "b": -0.2, "aa": 0.4, "bb": -1.2})


@given(game=GAMES)
def test_exact_credit_sums_to_reward_minus_expectation(game: Game) -> None:
    tree = planted([("a", [("b", [])])])
    (found,) = credit([plan_of(tree)], "exact", truth=lambda state: game.truth(path_of(state)))
    assert [(one.agent, one.turn) for one in found] == [(0, 0), (1, 1)]
    assert sum(one.advantage for one in found) == pytest.approx(game.truth("ab") - game.truth(""))


def test_plans_are_grouped_by_question_and_shared_messages_get_mean_credit() -> None:
    right = lambda state: 1.0 if path_of(state) == "aa" else -1.0  # noqa: E731
    split = plan_of(planted([("a", [("a", []), ("b", [])])]), "one", right)
    alone = plan_of(planted([("b", [("b", [])])]), "one", right)
    other = plan_of(planted([("a", [("a", [])])]), "two", right)
    found = credit([split, alone, other], "shared-outcome", scale=False)
    shown = [[(one.turn, round(3 * one.advantage, 9)) for one in part] for part in found]
    assert shown == [[(0, 1), (1, 4), (1, -2)], [(0, -2), (1, -2)], [(0, 0), (1, 0)]]
    batch = credit([split, alone, other], "per-agent", scale=False)
    assert batch[2] == (Credit(1, 0, 0, 1.0), Credit(2, 1, 1, 1.0))
    assert credit([split, alone, other], "per-agent-turn", scale=False) == found


def test_credit_is_computed_from_real_searches() -> None:
    task = mas_gym.load_task("arithmetic", split="train", limit=3)
    planner = search.MCTS(n_simulations=6, max_children=2)
    plans = list(search.run(planner, task, mas="rpsv", policy=talker(), training=True))
    failed = replace(plans[0], tree=None, candidates=(), error="no reply")
    for method in METHODS:
        found = credit([*plans, failed], method, value=lambda state: 0.1 * len(state.text), truth=lambda state: 0.5)
        assert len(found) == 4 and found[3] == ()
        for plan, part in zip(plans, found, strict=False):
            assert part and [one.node for one in part] == sorted({one.node for one in part})
            for one in part:
                state = plan.tree.states[one.node]
                assert (one.agent, one.turn) == (state.speaker, state.depth - 1) and math.isfinite(one.advantage)


def test_credit_error_names_the_missing_data() -> None:
    plan = plan_of(planted([("a", [("a", []), ("b", [])])]))
    with pytest.raises(UnknownNameError, match="leave-one-out"):
        credit([plan], "leave-one-in")
    with pytest.raises(ConfigError, match="truth="):
        credit([plan], "exact")
    for method in ("value", "value-baseline"):
        with pytest.raises(ConfigError, match="pass value="):
            credit([plan], method, truth=lambda state: 0.5)
    with pytest.raises(DataError, match="pass value="):
        credit([plan], "control-variate")
    with pytest.raises(ConfigError, match="with trees"):
        credit([Plan(problem_id="p")])
    ungraded = replace(plan, candidates=tuple(replace(one, correct=None) for one in plan.candidates))
    with pytest.raises(ConfigError, match="as reward="):
        credit([ungraded])


@pytest.mark.slow
def test_enumerated_replies_match_sampled_frequencies() -> None:
    from benchmarks.enumeration import Enumerator

    policy = load_policy("tiny")
    model = Dynamics(mas_gym.load_mas("rpsv"))
    question = next(iter(mas_gym.load_task("arithmetic", limit=1))).question
    prompt = chat_messages(model.mas, model.initial_state(question))
    (replies,) = Enumerator(policy, 0.001).replies([prompt])
    (reply,) = policy.sample([SamplingRequest(prompt, tuple(range(400)), agent="Reader")])
    counts = Counter(sample.text for sample in reply.samples)
    tokens = {sample.text: sample.tokens for sample in reply.samples}
    assert sum(one.probability for one in replies) == pytest.approx(1)
    # Half the sum of differences is below 0.2 for 400 draws from up to 60 equally likely replies.
    assert sum(abs(one.probability - counts[one.text] / 400) for one in replies) / 2 < 0.2
    assert all(tokens[one.text] == one.tokens for one in replies if one.text in tokens)


@pytest.mark.slow
def test_true_value_of_a_state_is_the_mean_reward_of_its_continuations(tmp_path: Path) -> None:
    from benchmarks.learning import Truth

    task = mas_gym.load_task("arithmetic", split="train", limit=1)
    store = tmp_path / "runs.db"
    [plan] = search.run("siblings:40,turns=1", task, mas="rpsv", policy=load_policy("tiny"), training=True, store=store)
    tree = plan.tree
    contexts = [ScoringContext(state, plan.mas, None) for state in tree.states[1:]]
    truths = [math.nan, *Truth(store, "tiny").score(contexts)]
    rewards = {one.node: 1.0 if one.correct else -1.0 for one in plan.candidates}
    assert all(truths[node] == reward for node, reward in rewards.items())
    for turn in (1, 2, 3):
        # Each of the 40 rewards has this state's truth as its expectation.
        gaps = [reward - truths[tree.path(node)[turn]] for node, reward in rewards.items()]
        assert abs(sum(gaps) / len(gaps)) < 0.4
    assert len({round(one, 6) for one in truths[1:]}) > 5
