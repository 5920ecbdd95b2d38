"""Functions shared by planners: growing the tree within the budget, path scores, ranking candidates."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mas_gym.errors import BudgetError, ConfigError, is_number, whole_number
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Same
from search.plan import Candidate
from search.protocol import Critic, Evaluate, Model, Propose, Remaining, Steps, ValueKind, value_kind
from search.tree import Proposal, Tree


def check_at_least(planner: object, low: int, **numbers: int) -> None:
    """Check that a planner's settings are whole numbers of at least ``low``.

    Raises:
        ConfigError: A setting is too small or not a whole number.
    """
    for name, number in numbers.items():
        whole_number(f"{type(planner).__name__}: {name}", number, at_least=low)


def check_positive(planner: object, **numbers: float) -> None:
    """Check that a planner's settings are finite numbers above 0.

    Raises:
        ConfigError: A setting is not a finite number above 0.
    """
    for name, number in numbers.items():
        if not is_number(number) or number <= 0:
            raise ConfigError(
                f"{type(planner).__name__}: expected {name} to be a positive finite number, got {number!r}"
            )


def step_values(planner: str, critic: Critic | None, training: bool) -> ValueKind:
    """Return the kind of a run's values, for a planner that needs a value at every step.

    Raises:
        ConfigError: There is no critic, or it cannot score intermediate states.
    """
    kind = value_kind(critic, training)
    if kind is None:
        raise ConfigError(f"{planner} needs a critic: pass critic=load_critic(...), such as 'policy-likelihood'")
    if kind in ("outcome", "reward"):
        what = "the true reward" if kind == "reward" else f"the outcome critic {critic.name!r}"  # type: ignore[union-attr]
        raise ConfigError(
            f"{planner} ranks intermediate states, but {what} is defined on terminal states only: "
            "use a process critic or policy likelihood, or MCTS, sc or bon with an outcome critic"
        )
    return kind


class NormalDraw(NamedTuple):
    """Mean and standard deviation of a normal distribution, sampled from their posterior."""

    mean: float
    deviation: float


def draw_normal(rng: random.Random, prior: float, spread: float, n: int, total: float, squares: float) -> NormalDraw:
    """Sample a normal distribution from the posterior under a normal-inverse-gamma prior worth one observation.

    Args:
        rng: The generator.
        prior: Prior mean.
        spread: Prior standard deviation.
        n: Number of observations.
        total: Their sum.
        squares: The sum of their squares.
    """
    mean = (prior + total) / (1 + n)
    deviation = squares - 2 * mean * total + n * mean * mean + (mean - prior) ** 2
    shape = (1 + n) / 2
    scale = (spread**2 + max(deviation, 0.0)) / 2
    variance = scale / max(rng.gammavariate(shape, 1.0), 1e-12)
    return NormalDraw(rng.gauss(mean, math.sqrt(variance / (1 + n))), math.sqrt(variance))


def path_score(tree: Tree, node: int) -> float:
    """Return the mean value over the steps from the root to a node (paper, App. "Search configurations")."""
    steps = tree.path(node)[1:]
    return math.fsum(tree.values[step] for step in steps) / len(steps)


def path_scores(tree: Tree, terminals: Sequence[int], kind: ValueKind | None) -> dict[int, float]:
    """Return the score of each terminal node: its path score for step values, its own value for outcomes."""
    if kind is None:
        return {}
    if kind in ("outcome", "reward"):
        return {node: tree.values[node] for node in terminals}
    return {node: path_score(tree, node) for node in terminals}


def ranked(
    tree: Tree, terminals: Sequence[int], scores: Mapping[int, float], chosen: int | None
) -> tuple[Candidate, ...]:
    """Return the candidates: the chosen one, then the others by descending score, unscored last; ties oldest first."""
    order = sorted(terminals, key=lambda node: (node != chosen, -scores.get(node, -math.inf), node))
    return tuple(Candidate(tree.states[node], scores.get(node), node) for node in order)


def append(tree: Tree, model: Model, node: int, proposal: Proposal) -> int:
    """Add the child for a proposal and return its index."""
    state = model.transition(tree.states[node], proposal.action)
    return tree.add(node, state, proposal, model.is_terminal(state))


def append_distinct(tree: Tree, model: Model, node: int, proposals: Sequence[Proposal], same: Same | None) -> list[int]:
    """Add one child per distinct action (its first proposal) and return their indices.

    Actions differ if their recipients differ or their texts differ. Texts are compared by ``same``, without it exactly.
    """
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    for proposal in proposals:
        state = model.transition(tree.states[node], proposal.action)
        text, recipients = action = state.text, state.recipients
        if same is not None:
            action = next((a for a in first if a[1] == recipients and same(a[0], text)), action)
        if action not in first:
            first[action] = tree.add(node, state, proposal, model.is_terminal(state))
    return list(first.values())


def child_of(tree: Tree, model: Model, node: int, proposal: Proposal) -> int:
    """Return the child for a proposal; an equal message returns the existing child."""
    state = model.transition(tree.states[node], proposal.action)
    known = next((child for child in tree.children(node) if tree.states[child] == state), None)
    return tree.add(node, state, proposal, model.is_terminal(state)) if known is None else known


def evaluate(tree: Tree, nodes: Sequence[int]) -> Steps[None]:
    """Request the critic's values of nodes and write them into the tree."""
    if nodes:
        [values] = yield [Evaluate([tree.states[node] for node in nodes])]
        for node, value in zip(nodes, values, strict=True):
            tree.values[node] = value


def turns_left(model: Model, state: MASState) -> int:
    """Return an upper bound on the messages from a state to its end."""
    return max(1, model.max_depth - state.depth)


def finish(tree: Tree, model: Model, node: int) -> Steps[int]:
    """Continue a path with single messages and return its terminal node."""
    while not tree.is_terminal(node):
        [[proposal]] = yield [Propose(tree.states[node], 1)]
        node = append(tree, model, node, proposal)
    return node


def grow_chains(tree: Tree, model: Model, count: int, earlier: Sequence[int] = ()) -> Steps[list[int]]:
    """Run up to ``count`` independent passes and return their terminal nodes, in sample order.

    Passes that have already ended, ``earlier``, count as the first ones.

    Without a budget, all passes run concurrently. With a budget, only the passes it covers start: with a limit of
    calls, in one group; with a limit of tokens, a first pass and then groups sized by the length of the messages so
    far.
    """
    ends = list(earlier)
    turns = turns_left(model, tree.states[0])
    while len(ends) < count:
        [left] = yield [Remaining()]
        group = count - len(ends) if left is None else min(count - len(ends), left // turns)
        if group == 0 and ends:
            break
        chains: list[int] = []
        try:
            yield from _grow_together(tree, model, chains, max(group, 1))
        except BudgetError:
            chains = [node for node in chains if tree.is_terminal(node)]
            if not ends and not chains:
                chains = [(yield from finish(tree, model, len(tree) - 1))]
            return ends + chains
        ends += chains
        if len(chains) < group:
            # The recorded run has no more messages.
            break
    return ends


def _grow_together(tree: Tree, model: Model, chains: list[int], count: int) -> Steps[None]:
    """Run ``count`` chains from the root to their ends; ``chains`` receives their last nodes."""
    [proposals] = yield [Propose(tree.states[0], count)]
    chains += [append(tree, model, 0, proposal) for proposal in proposals]
    while growing := [i for i, node in enumerate(chains) if not tree.is_terminal(node)]:
        replies = yield [Propose(tree.states[chains[i]], 1) for i in growing]
        for i, [proposal] in zip(growing, replies, strict=True):
            chains[i] = append(tree, model, chains[i], proposal)


def widen(tree: Tree, model: Model, wanted: Mapping[int, int], answered: bool) -> Steps[dict[int, list[int]]]:
    """Sample ``wanted[node]`` messages at each node, or as many as an even share of the budget covers.

    The remaining messages are divided evenly among the remaining turns, so a search narrows instead of stopping early.
    Nodes with higher values come first.

    Args:
        tree: The tree, which receives the children.
        model: The dynamics.
        wanted: The number of messages for each node.
        answered: Whether the search has a terminal state and may stop here. Otherwise at least one message is sampled.

    Returns:
        The children by node, one per message. A node of a recorded run may have fewer.
    """
    wanted = dict(wanted)
    grown: dict[int, list[int]] = {node: [] for node in wanted}
    best_first = sorted(wanted, key=tree.values.__getitem__, reverse=True)
    turns = max(turns_left(model, tree.states[node]) for node in wanted)
    drawn = 0
    while drawn < (total := sum(wanted.values())):
        [left] = yield [Remaining()]
        amount = total - drawn if left is None else min(total, (left + drawn) // turns) - drawn
        if amount <= 0:
            if drawn or answered:
                break
            amount = 1
        served = dict.fromkeys(wanted, 0)
        for node in best_first:
            served[node] = min(wanted[node] - len(grown[node]), amount - sum(served.values()))
        nodes = [node for node in wanted if served[node]]
        try:
            replies = yield [Propose(tree.states[node], served[node]) for node in nodes]
        except BudgetError:
            if drawn or answered:
                break
            nodes = best_first[:1]
            served[nodes[0]] = 1
            replies = yield [Propose(tree.states[nodes[0]], 1)]
        for node, proposals in zip(nodes, replies, strict=True):
            grown[node] += [append(tree, model, node, proposal) for proposal in proposals]
            drawn += len(proposals)
            if len(proposals) < served[node]:
                wanted[node] = len(grown[node])
    return grown
