"""Scores of paths through a tree, and the ranking of candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mas_gym.errors import ConfigError
from search.plan import Candidate
from search.protocol import Critic, ValueKind, value_kind
from search.tree import Tree


def step_values(planner: str, critic: Critic | None, training: bool) -> ValueKind:
    """Return the kind of a run's values, for a planner that needs a value at every step.

    Raises:
        ConfigError: There is no critic, or it cannot score intermediate states.
    """
    kind = value_kind(critic, training)
    if kind is None:
        raise ConfigError(f"{planner} needs a critic: pass one, such as critic=load_critic('policy-likelihood')")
    if kind in ("outcome", "reward"):
        what = "the true reward" if kind == "reward" else f"the outcome critic {critic.name!r}"  # type: ignore[union-attr]
        raise ConfigError(
            f"{planner} ranks intermediate states, but {what} is defined on terminal states only: "
            "pass a process critic or 'policy-likelihood', or change the planner to MCTS, sc or bon"
        )
    return kind


def path_score(tree: Tree, node: int) -> float:
    """Return the mean value over the steps from the root to a node (paper, App. "Search configurations")."""
    steps = tree.path(node)[1:]
    return math.fsum(tree.values[step] for step in steps) / len(steps)


def path_scores(tree: Tree, terminals: Sequence[int], kind: ValueKind | None) -> dict[int, float]:
    """Return the score of each terminal node: the path score for step values, the node's value for outcome values."""
    if kind is None:
        return {}
    if kind in ("outcome", "reward"):
        return {node: tree.values[node] for node in terminals}
    return {node: path_score(tree, node) for node in terminals}


def ranked(
    tree: Tree, terminals: Sequence[int], scores: Mapping[int, float], chosen: int | None
) -> tuple[Candidate, ...]:
    """Return the chosen candidate, then the others by descending score, unscored ones last; ties keep node order."""
    order = sorted(terminals, key=lambda node: (node != chosen, -scores.get(node, -math.inf), node))
    return tuple(Candidate(tree.states[node], scores.get(node), node) for node in order)
