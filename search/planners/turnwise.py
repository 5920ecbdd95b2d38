"""Shared code for planners that extend several states by one message per turn, scored by step values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from search.planners.stop_rules import Stop, StopChecks, read_stop, stop_for_run
from search.planners.tree_growth import evaluate, step_values, widen
from search.protocol import Critic, Model, Planner, Steps, planner_name
from search.tree import Tree


@dataclass(frozen=True)
class TurnByTurn(Planner):
    """Base class of planners that extend several states by one message per turn.

    Attributes:
        stop: Rule for continuing only the best state, with one message per turn, once that state is settled; see
            `search.planners.stop_rules`. None always extends all states.
    """

    stop: Stop = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", read_stop(self.stop))

    def for_run(self, critic: Critic | None, training: bool) -> Self:
        """Check that the run scores intermediate states."""
        step_values(planner_name(self), critic, training)
        return replace(self, stop=stop_for_run(self, self.stop, critic, training))


def extend(tree: Tree, model: Model, counts: dict[int, int], answered: bool) -> Steps[list[int]]:
    """Sample messages at states as `search.planners.tree_growth.widen` does; return the scored successors."""
    grown = yield from widen(tree, model, counts, answered=answered)
    fresh = [child for children in grown.values() for child in children]
    yield from evaluate(tree, fresh)
    return fresh


def unsettled(tree: Tree, checks: StopChecks, growing: list[int], ends: Sequence[int]) -> Steps[list[int]]:
    """Return the states to extend: all states, or only the best one once it is settled."""
    if checks.stopped is not None:
        return growing
    best = max([*growing, *ends], key=tree.values.__getitem__)
    return [node for node in growing if node == best] if (yield from checks.check(best, ends)) else growing
