"""A tree of independent samples, for credit and training."""

from __future__ import annotations

import random
from dataclasses import dataclass

from mas_gym.systems.state import MASState
from search.plan import Plan
from search.planners.common import check_at_least, ranked, widen
from search.protocol import Model, PlanGenerator, Planner
from search.tree import Tree


@dataclass(frozen=True)
class Siblings(Planner):
    """Sample ``k`` messages in every state and continue them all.

    Equal messages stay separate nodes and none is preferred, so siblings are independent samples, from which
    `search.credit` computes unbiased advantages. The answer is that of the first path, which is a single pass. With a
    fixed schedule of D turns AC = k + k^2 + ... + k^D.

    Attributes:
        k: Messages per state.
    """

    needs_critic = False
    size_setting = "k"

    k: int = 2

    def __post_init__(self) -> None:
        """Check the settings."""
        check_at_least(self, 1, k=self.k)

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Grow the tree turn by turn; its leaves are the candidates."""
        tree, growing, ends = Tree(root), [0], list[int]()
        while growing:
            grown = yield from widen(tree, model, dict.fromkeys(growing, self.k), answered=bool(ends))
            fresh = [child for children in grown.values() for child in children]
            ends += [node for node in fresh if tree.is_terminal(node)]
            growing = [node for node in fresh if not tree.is_terminal(node)]
        return Plan(ranked(tree, ends, {}, ends[0]), tree)
