"""What planners share: path scores, the ranking of candidates, and growing many chains at once."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mas_gym.errors import ConfigError
from search.plan import AnytimePoint, Candidate
from search.protocol import Critic, Evaluate, Model, Proposal, Propose, Request, ValueKind, value_kind
from search.tree import Tree

Steps = Generator[list[Request], list[Any], None]


def check_at_least(planner: object, low: int, **numbers: int) -> None:
    """Refuse a planner's setting that is not a whole number of at least ``low``.

    Raises:
        ConfigError: A number is too small, or no whole number.
    """
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < low:
            raise ConfigError(
                f"{type(planner).__name__}: expected {name} to be a whole number >= {low}, got {number!r}"
            )


def check_serial(planner: Any) -> None:
    """Refuse ``parallel`` where simulations cannot be under way together.

    Raises:
        ConfigError: It is more than 1.
    """
    if planner.parallel > 1:
        name = type(planner).__name__
        raise ConfigError(f"{name}: expected parallel=1, got {planner.parallel}: only MCTS has virtual loss")


def step_values(planner: str, critic: Critic | None, training: bool) -> ValueKind:
    """Return the kind of values of a run, for a planner that needs a value at every step.

    Raises:
        ConfigError: There is no critic, or it cannot score intermediate states.
    """
    kind = value_kind(critic, training)
    if kind is None:
        raise ConfigError(f"{planner} needs a critic: pass critic=load_critic(...), such as 'policy-likelihood'")
    if kind in ("outcome", "reward"):
        what = "the true reward" if kind == "reward" else f"the outcome critic {critic.name!r}"  # type: ignore[union-attr]
        raise ConfigError(
            f"{planner} ranks intermediate states and {what} is defined on terminal ones alone: "
            "use a process critic or policy likelihood, or MCTS, sc or bon with an outcome critic"
        )
    return kind


def path_score(tree: Tree, node: int) -> float:
    """Return the mean value after each action on the way to a node (paper, App. "Search configurations")."""
    steps = tree.path(node)[1:]
    return math.fsum(tree.values[step] for step in steps) / len(steps)


def path_scores(tree: Tree, terminals: Sequence[int], kind: ValueKind | None) -> dict[int, float]:
    """Return the score of each terminal node: the path's mean for step values, its own value for outcomes."""
    if kind is None:
        return {}
    if kind in ("outcome", "reward"):
        return {node: tree.values[node] for node in terminals}
    return {node: path_score(tree, node) for node in terminals}


def ranked(
    tree: Tree, terminals: Sequence[int], scores: Mapping[int, float], chosen: int | None
) -> tuple[Candidate, ...]:
    """Return candidates: the chosen one first, then by descending score; ties keep the order of creation."""
    order = sorted(terminals, key=lambda node: (node != chosen, -scores.get(node, 0.0), node))
    return tuple(Candidate(tree.states[node], scores.get(node), node) for node in order)


def moment(tree: Tree, calls: int, tokens: int, node: int | None) -> AnytimePoint:
    """Return a point of the anytime curve."""
    return AnytimePoint(calls, tokens, None if node is None else tree.states[node], node)


def append(tree: Tree, model: Model, node: int, proposal: Proposal) -> int:
    """Add the child that a proposal leads to and return its index."""
    state = model.transition(tree.states[node], proposal.action)
    return tree.add(node, state, proposal, model.is_terminal(state))


def child_of(tree: Tree, model: Model, node: int, proposal: Proposal) -> int:
    """Return the child that a proposal leads to: a new one, or the one that an equal message led to before."""
    state = model.transition(tree.states[node], proposal.action)
    known = next((child for child in tree.children(node) if tree.states[child] == state), None)
    return tree.add(node, state, proposal, model.is_terminal(state)) if known is None else known


def grow_chains(tree: Tree, model: Model, count: int) -> Generator[list[Request], list[Any], list[int]]:
    """Run ``count`` independent passes side by side from the root and return their terminal nodes, in sample order."""
    [proposals] = yield [Propose(tree.states[0], count)]
    ends = [append(tree, model, 0, proposal) for proposal in proposals]
    while True:
        open_chains = [i for i, node in enumerate(ends) if not tree.is_terminal(node)]
        if not open_chains:
            return ends
        replies = yield [Propose(tree.states[ends[i]], 1) for i in open_chains]
        for i, [proposal] in zip(open_chains, replies, strict=True):
            ends[i] = append(tree, model, ends[i], proposal)


def evaluate(tree: Tree, nodes: Sequence[int]) -> Steps:
    """Ask the critic for the values of nodes and write them into the tree."""
    if nodes:
        [values] = yield [Evaluate([tree.states[node] for node in nodes])]
        for node, value in zip(nodes, values, strict=True):
            tree.values[node] = value
