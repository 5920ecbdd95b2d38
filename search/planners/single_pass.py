"""A single pass of the system without search."""

from __future__ import annotations

import random
from dataclasses import dataclass

from mas_gym.systems.state import MASState
from search.plan import Plan
from search.planners.tree_growth import grow_chains, ranked
from search.protocol import Model, PlanGenerator, Planner
from search.tree import Tree


@dataclass(frozen=True)
class SinglePass(Planner):
    """One pass through the schedule; AC = D (paper, Sec. "Overall experimental setup")."""

    needs_critic = False

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Sample one message per agent."""
        tree = Tree(root)
        ends = yield from grow_chains(tree, model, 1)
        return Plan(ranked(tree, ends, {}, ends[0]), tree)
