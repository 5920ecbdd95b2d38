"""Diverse verifier tree search."""

from __future__ import annotations

import random
from dataclasses import dataclass

from mas_gym.systems.state import MASState
from search.plan import Plan
from search.planners.stop_rules import StopChecks
from search.planners.tree_growth import evaluate, path_scores, ranked, widen
from search.planners.turnwise import TurnByTurn, unsettled
from search.protocol import Model, PlanGenerator, check_at_least
from search.tree import Tree


@dataclass(frozen=True)
class DVTS(TurnByTurn):
    """Diverse verifier tree search (Beeching et al., 2024): independent greedy searches in parallel.

    Each of ``trees`` searches samples ``width`` messages per step and keeps the best; the terminal state with the best
    path score is chosen. With a fixed schedule, AC = ``trees * width * D``.

    Attributes:
        trees: Number of independent searches.
        width: Messages sampled per step in each search.
        stop: As for `TurnByTurn`.
    """

    size_setting = "trees"

    trees: int = 3
    width: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, trees=self.trees, width=self.width)

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Extend all searches turn by turn."""
        tree = Tree(root)
        checks = StopChecks(self.stop, tree)
        grown = yield from widen(tree, model, {0: self.trees * self.width}, answered=False)
        first = grown[0]
        groups = [first[i : i + self.width] for i in range(0, len(first), self.width)]
        ends: list[int] = []
        while groups:
            yield from evaluate(tree, [node for group in groups for node in group])
            leaders = [max(group, key=tree.values.__getitem__) for group in groups]
            ends += [node for node in leaders if tree.is_terminal(node)]
            growing = [node for node in leaders if not tree.is_terminal(node)]
            if growing:
                growing = yield from unsettled(tree, checks, growing, ends)
            if not growing:
                break
            width = self.width if checks.stopped is None else 1
            grown = yield from widen(tree, model, dict.fromkeys(growing, width), answered=bool(ends))
            groups = [group for group in grown.values() if group]
        scores = path_scores(tree, ends, "process")
        return Plan(ranked(tree, ends, scores, max(ends, key=scores.__getitem__)), tree, stopped=checks.stopped)
