"""Credit for each message: advantages from groups of samples or from search trees, for training the agents.

`credit` takes the name of a method and computes advantages for finished plans. The other functions take plain arrays.
Each docstring has the formula, the shapes and the source. In the shapes, ``M`` is the number of messages, ``G`` of
transcripts, ``N`` of tree nodes, ``K`` of continued siblings and ``S >= K`` of all sampled siblings.

| method | compares a message with | unbiased for the exact credit |
|---|---|---|
| ``shared-outcome`` | the other transcripts of the question (GRPO) | no |
| ``per-agent`` | all messages of the agent in the batch (Dr. MAS, arXiv 2602.08847) | no |
| ``per-agent-turn`` | the agent's messages at the same turn of the question (AT-GRPO, arXiv 2510.11062) | no |
| ``value`` | the critic's value of the state before it (MASPRM) | only with a perfect critic |
| ``leave-one-out`` | continuations of its siblings (C3, RLOO) | yes |
| ``control-variate`` | the same, corrected by the values of siblings that were not continued | yes, with any critic |
| ``value-baseline`` | continuations of its siblings and the critic's value of the state before it | up to a constant |
| ``exact`` | the expected reward before it | it is the exact credit |

The exact credit of a message ``a`` in a state ``s`` is ``E[R | s, a] - E[R | s]``. The estimates are unbiased if
siblings are independent samples and the choice of siblings to continue does not depend on their texts or values. Trees
of planners that merge equal messages or continue the better ones, such as MCTS, give biased estimates. "Up to a
constant" means a constant that is equal for all messages in a state; it does not change the expected policy gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mas_gym.errors import ConfigError, DataError
from mas_gym.internal.suggestions import unknown_name
from mas_gym.systems.state import MASState
from search.plan import Plan
from search.tree import Tree

METHODS = (
    "shared-outcome",
    "per-agent",
    "per-agent-turn",
    "value",
    "leave-one-out",
    "control-variate",
    "value-baseline",
    "exact",
)

StateFunction = Callable[[MASState], float]
Sample = tuple[Plan, Tree]
Floats = NDArray[np.float64]

_EQUAL = 1e-9
"""Relative tolerance: rewards of one group with smaller differences are equal up to rounding."""


class Credit(NamedTuple):
    """The advantage of one message.

    Attributes:
        node: The message's node in the plan's tree.
        agent: Index of the agent that wrote it.
        turn: Its position in the transcript, from 0.
        advantage: Its advantage over the messages it is compared with.
    """

    node: int
    agent: int
    turn: int
    advantage: float


def credit(
    plans: Sequence[Plan],
    method: str = "leave-one-out",
    *,
    reward: StateFunction | None = None,
    value: StateFunction | None = None,
    truth: StateFunction | None = None,
    scale: bool = True,
    weight: float = 0.5,
) -> list[tuple[Credit, ...]]:
    """Return the credit of the messages of each plan, in the order of the plans and of the nodes.

    Plans with one ``problem_id`` are samples of one question. A message that several transcripts of a tree share gets
    the mean of their advantages. A message has no credit if the method cannot compute one: its state has no value, or
    no transcript below it has a reward. A failed plan has no messages.

    Args:
        plans: Finished plans with trees.
        method: One of `METHODS`.
        reward: Reward of a terminal state; by default +1 for a correct candidate and -1 for a wrong one.
        value: Critic's value of a state; by default the one stored in the tree.
        truth: Expected reward of a state, for ``exact``.
        scale: Whether the first three methods divide by the standard deviation.
        weight: Factor of the critic's values in ``control-variate`` and ``value-baseline``.

    Raises:
        UnknownNameError: There is no such method.
        ConfigError: The plans lack data that the method needs, or a number is not finite.
    """
    if method not in METHODS:
        raise unknown_name("credit method", method, METHODS)
    if method == "exact" and truth is None:
        raise ConfigError("credit: method 'exact' requires truth=, a function from a state to its expected reward")
    sampled = [(plan, tree) for plan in plans if (tree := _tree(plan)) is not None]
    if method == "exact":
        found = _state_differences(sampled, truth, "truth")
    elif method == "value":
        found = _state_differences(sampled, value, "value")
    else:
        rewards = [_rewards(plan, tree, reward) for plan, tree in sampled]
        if method in ("shared-outcome", "per-agent", "per-agent-turn"):
            found = _grouped(sampled, rewards, method, scale)
        else:
            found = [
                _compared(tree, dict(known), method, value, weight)
                for (_, tree), known in zip(sampled, rewards, strict=True)
            ]
    advantages = iter(found)
    return [() if plan.tree is None else _credits(plan.tree, next(advantages)) for plan in plans]


def _credits(tree: Tree, advantages: dict[int, float]) -> tuple[Credit, ...]:
    return tuple(
        Credit(node, tree.states[node].speaker, tree.states[node].depth - 1, advantages[node])
        for node in sorted(advantages)
    )


def shared_outcome(rewards: ArrayLike, groups: Sequence[Hashable], *, scale: bool = True) -> Floats:
    """Return the advantage of each transcript or message over the others of its group.

    ``A_i = (R_i - mean_g) / std_g`` over the members of group ``g``; without ``scale``, ``R_i - mean_g``. If the groups
    are the questions of transcripts, this is GRPO with outcome supervision (DeepSeekMath, arXiv 2402.03300, Sec.
    4.1.2); without the division, Dr. GRPO (arXiv 2503.20783).

    Args:
        rewards: ``[G]`` rewards of the transcripts, or ``[M]`` rewards of each message's transcript.
        groups: The group of each, of the same length.
        scale: Whether to divide by the population standard deviation.

    Returns:
        Advantages of the same length. Those of each group sum to 0; a group of one, or one with equal rewards, has
        advantage 0.
    """
    found = _finite("rewards", rewards)
    if len(groups) != found.size:
        raise ConfigError(f"expected one group per reward, got {len(groups)} groups for {found.size} rewards")
    members: dict[Hashable, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        members[group].append(place)
    advantages = np.zeros_like(found)
    for places in members.values():
        own = found[places]
        if np.ptp(own) > _EQUAL * np.abs(own).max():
            advantages[places] = (own - own.mean()) / (own.std() if scale else 1.0)
    return advantages


def value_differences(values: ArrayLike, parents: Sequence[int]) -> Floats:
    """Return the change in value that each node's message causes.

    ``A(s_t, a_t) = V(s_{t+1}) - V(s_t)``. Source: MASPRM's values (arXiv 2510.24803) used as a potential. With true
    expected rewards in place of the values, this is the exact credit.

    Args:
        values: ``[N]`` value of each node's state; NaN if unknown.
        parents: ``[N]`` index of each node's parent; -1 for the root.

    Returns:
        ``[N]`` differences; NaN for the root and if one of the two values is unknown.
    """
    found = np.asarray(values, dtype=np.float64)
    above = np.asarray(parents, dtype=np.intp)
    if found.ndim != 1 or found.shape != above.shape:
        raise ConfigError(f"expected one value per node, got shapes {found.shape} and {above.shape}")
    differences: Floats = np.where(above < 0, math.nan, found - found[above])
    return differences


def leave_one_out(rewards: ArrayLike) -> Floats:
    """Return the advantage of each of several sibling messages over the others.

    ``A_i = R_i - 1/(K-1) sum_{j != i} R_j``, with the expectation ``E[R | s, a_i] - E[R | s]`` given the message
    ``a_i``. Source: C3 (arXiv 2603.06859), the leave-one-out baseline of RLOO (Kool et al. 2019; arXiv 2402.14740) over
    messages in one frozen context.

    Args:
        rewards: ``[K]`` reward of each message's continuation, or the mean over its continuations.

    Returns:
        ``[K]`` advantages, which sum to 0; 0 for a message without siblings.
    """
    found = _finite("rewards", rewards)
    if found.size < 2:
        return np.zeros_like(found)
    advantages: Floats = (found - found.mean()) * (found.size / (found.size - 1))
    return advantages


def control_variate(rewards: ArrayLike, values: ArrayLike, *, weight: float = 0.5) -> Floats:
    """Return leave-one-out advantages with a baseline that also uses the values of siblings that were not continued.

    ``A_i = R_i - [mean_{j != i, j <= K} (R_j - w V_j) + w mean_{j != i, j <= S} V_j]``. The bracket has the expectation
    ``E[R | s]`` for any values and any fixed weight, because both means of ``V`` have the same expectation. The more of
    ``R`` the values explain, the smaller the variance, so a message that is scored but not continued partly replaces
    a continuation. Without such messages the result is that of `leave_one_out`. Source: control variates with an
    estimated mean (double sampling; Cochran 1977, Sampling Techniques, Ch. 12).

    Args:
        rewards: ``[K]`` rewards of the continued messages.
        values: ``[S]`` critic's value after each message, the ``K`` continued ones first.
        weight: The factor ``w``. Do not choose it from the same rewards.

    Returns:
        ``[K]`` advantages; 0 for a message without a continued sibling.
    """
    found, scores = _finite("rewards", rewards), _finite("values", values)
    count = found.size
    if scores.size < count:
        raise ConfigError(f"expected at least one value per reward, got {scores.size} for {count} rewards")
    if count < 2:
        return np.zeros_like(found)
    own = scores[:count]
    residuals = found - weight * own
    baselines = (residuals.sum() - residuals) / (count - 1) + weight * (scores.sum() - own) / (scores.size - 1)
    advantages: Floats = found - baselines
    return advantages


def value_baseline(rewards: ArrayLike, before: float, *, weight: float = 0.5) -> Floats:
    """Return the advantage of each of several sibling messages over a mix of the others and the critic's value.

    ``A_i = R_i - [w V(s) + (1-w)/(K-1) sum_{j != i} R_j]``. Its expectation given ``a_i`` is the exact credit plus
    ``w (E[R | s] - V(s))``, which is the same for all siblings, so the expected policy gradient is exact for any
    critic. The baseline's variance is ``(1-w)^2`` times that in `leave_one_out`. Source: baselines as control variates
    of the policy gradient (Williams 1992; Greensmith et al. 2004, JMLR 5:1471).

    Args:
        rewards: ``[K]`` reward of each message's continuation, or the mean over its continuations.
        before: Critic's value ``V(s)`` of the state in which the messages were written.
        weight: The factor ``w``; the baseline of a message without siblings is only the value.

    Returns:
        ``[K]`` advantages.
    """
    found, (value,) = _finite("rewards", rewards), _finite("before", [before])
    factor = weight if found.size > 1 else 1.0
    advantages: Floats = (1 - factor) * leave_one_out(found) + factor * (found - value)
    return advantages


def tree_credit(
    parents: Sequence[int],
    rewards: dict[int, float],
    values: ArrayLike | None = None,
    baselines: ArrayLike | None = None,
    *,
    weight: float = 0.5,
) -> dict[int, float]:
    """Return the credit of every message with a reward below it in a tree, from comparisons of siblings.

    The estimate of a terminal node is its reward; that of any other node, computed from its children, is
    ``mean_continued(estimate - w V) + w mean_all(V)``, or the plain mean without values. Siblings are compared by
    `leave_one_out`; if ``values`` are given, by `control_variate`; if ``baselines`` are given, by `value_baseline`.

    Args:
        parents: ``[N]`` index of each node's parent, which precedes the node; -1 for the root.
        rewards: Reward by terminal node.
        values: ``[N]`` critic's values; None for plain means. If a terminal node's value is NaN, its reward is used.
            Nodes without a value that were not continued are ignored.
        baselines: ``[N]`` critic's values as baselines of the messages that follow. If a value is NaN, which is usual
            for the root, the siblings are compared by `leave_one_out`.
        weight: The factor ``w``.

    Returns:
        Advantage by node.

    Raises:
        DataError: A continued node has no value.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(parents):
        children[parent].append(node)
    _finite("rewards", list(rewards.values()))
    scores = None if values is None else np.array(values, dtype=np.float64)
    before = np.full(len(parents), math.nan) if baselines is None else np.asarray(baselines, dtype=np.float64)
    if scores is not None:
        for node, one in rewards.items():
            scores[node] = one if math.isnan(scores[node]) else scores[node]
    estimates, found = dict(rewards), dict[int, float]()
    for node in range(len(parents) - 1, -1, -1):
        continued = [child for child in children[node] if child in estimates]
        if not continued:
            continue
        below = np.array([estimates[child] for child in continued])
        if scores is None:
            plain = math.isnan(before[node])
            advantages = leave_one_out(below) if plain else value_baseline(below, before[node], weight=weight)
            estimate = below.mean()
        else:
            left = [child for child in children[node] if child not in estimates and not math.isnan(scores[child])]
            sampled = scores[[*continued, *left]]
            if unscored := [child for child in continued if math.isnan(scores[child])]:
                raise DataError(f"node {unscored[0]}: expected a critic's value, got none; pass value=")
            advantages = control_variate(below, sampled, weight=weight)
            estimate = below.mean() + weight * (sampled.mean() - sampled[: len(continued)].mean())
        estimates[node] = float(estimate)
        found.update(zip(continued, advantages.tolist(), strict=True))
    return found


def _finite(name: str, numbers: ArrayLike) -> Floats:
    found = np.asarray(numbers, dtype=np.float64)
    if found.ndim != 1 or not np.isfinite(found).all():
        raise ConfigError(f"{name}: expected a 1-D array of finite numbers, got {numbers!r:.80}; drop failed samples")
    return found


def _tree(plan: Plan) -> Tree | None:
    if plan.tree is None and plan.error is None:
        name = plan.problem_id or "plan"
        raise ConfigError(
            f"{name}: expected a plan with a search tree, got one without; read the store with trees=True"
        )
    return plan.tree


def _rewards(plan: Plan, tree: Tree, reward: StateFunction | None) -> list[tuple[int, float]]:
    if reward is not None:
        return [(node, float(reward(tree.states[node]))) for node in range(len(tree)) if tree.is_terminal(node)]
    known = []
    for one in plan.candidates:
        if one.node is None or one.correct is None:
            name = plan.problem_id or "plan"
            raise ConfigError(f"{name}: expected graded candidates, got {one!r:.80}; pass a function as reward=")
        known.append((one.node, 1.0 if one.correct else -1.0))
    return known


def _values(tree: Tree, value: StateFunction | None) -> list[float]:
    return list(tree.values) if value is None else [float(value(state)) for state in tree.states]


def _state_differences(sampled: Sequence[Sample], function: StateFunction | None, name: str) -> list[dict[int, float]]:
    """Return the difference in value between each state and its predecessor.

    If a question's initial state has no value, the mean value after its first messages is used.
    """
    values = [_values(tree, function) for _, tree in sampled]
    first: dict[str, list[float]] = defaultdict(list)
    for (plan, tree), known in zip(sampled, values, strict=True):
        first[plan.problem_id] += [known[child] for child in tree.children(0) if not math.isnan(known[child])]
    found = []
    for (plan, tree), known in zip(sampled, values, strict=True):
        if math.isnan(known[0]) and first[plan.problem_id]:
            known[0] = math.fsum(first[plan.problem_id]) / len(first[plan.problem_id])
        differences = value_differences(known, tree.parents).tolist()
        found.append({node: one for node, one in enumerate(differences) if not math.isnan(one)})
    if sampled and not any(found):
        raise ConfigError(f"credit: expected states with values, got none; search with a critic or pass {name}=")
    return found


def _compared(
    tree: Tree, rewards: dict[int, float], method: str, value: StateFunction | None, weight: float
) -> dict[int, float]:
    if not rewards:
        return {}
    if method == "leave-one-out":
        return tree_credit(tree.parents, rewards)
    values = _values(tree, value)
    if method == "control-variate":
        return tree_credit(tree.parents, rewards, values, weight=weight)
    if all(math.isnan(values[parent]) for parent in tree.parents[1:]):
        raise ConfigError("credit: expected states with values, got none; search with a critic or pass value=")
    return tree_credit(tree.parents, rewards, baselines=values, weight=weight)


def _grouped(
    sampled: Sequence[Sample], rewards: Sequence[list[tuple[int, float]]], method: str, scale: bool
) -> list[dict[int, float]]:
    """Return the mean advantage of each node over the transcripts that pass through it."""
    transcripts = [
        (place, one, tree.path(node)[1:])
        for place, ((_, tree), known) in enumerate(zip(sampled, rewards, strict=True))
        for node, one in known
    ]
    messages = [(place, node) for place, _, path in transcripts for node in path]
    lengths = [len(path) for _, _, path in transcripts]
    outcomes: ArrayLike = [one for _, one, _ in transcripts]
    groups: list[Hashable]
    if method == "shared-outcome":
        groups = [sampled[place][0].problem_id for place, _, _ in transcripts]
        advantages = np.repeat(shared_outcome(outcomes, groups, scale=scale), lengths)
    else:
        states = [(sampled[place][0].problem_id, sampled[place][1].states[node]) for place, node in messages]
        by_turn = method == "per-agent-turn"
        groups = [(asked, state.speaker, state.depth) if by_turn else state.speaker for asked, state in states]
        advantages = shared_outcome(np.repeat(outcomes, lengths), groups, scale=scale)
    passing: list[dict[int, list[float]]] = [defaultdict(list) for _ in sampled]
    for (place, node), one in zip(messages, advantages.tolist(), strict=True):
        passing[place][node].append(one)
    return [{node: math.fsum(ones) / len(ones) for node, ones in nodes.items()} for nodes in passing]
