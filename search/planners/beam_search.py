"""Searches of fixed width: independent passes (`SinglePass`, `SelfConsistency`, `BestOfN`) and beams."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from mas_gym.systems.state import MASState
from search.plan import Plan
from search.planners.common import (
    check_at_least,
    evaluate,
    path_scores,
    ranked,
    step_values,
    widen,
)
from search.protocol import Critic, Model, PlanGenerator, Planner
from search.tree import Tree


@dataclass(frozen=True)
class StepBeamSearch(Planner):
    """SBS(B2, B1): sample ``b2`` messages per beam state, keep the ``b1`` best successors of all (paper, Alg. 3).

    With a fixed schedule AC = b2 + (D - 1) b1 b2, provided b1 <= b2. Equal messages stay
    separate successors, because the algorithm's pool is a list. In a dynamic graph a state
    can be terminal before others: it stays in the pool with its score, costs nothing more,
    and the search ends when the whole beam is terminal. A budget narrows the beam: each
    turn gets an even share of the calls left, and the best states are extended first.

    Attributes:
        b2: Messages sampled per beam state.
        b1: Width of the beam.
    """

    size_setting = "b2"

    b2: int = 5
    b1: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        check_at_least(self, 1, b2=self.b2, b1=self.b1)

    def for_run(self, critic: Critic | None, training: bool) -> StepBeamSearch:
        """Check that the run scores intermediate states."""
        step_values("StepBeamSearch", critic, training)
        return self

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Extend and prune the beam turn by turn; the last beam's states are the candidates."""
        tree = Tree(root)
        beam = [0]
        while growing := [node for node in beam if not tree.is_terminal(node)]:
            pool = [node for node in beam if tree.is_terminal(node)]
            grown = yield from widen(tree, model, dict.fromkeys(growing, self.b2), answered=bool(pool))
            fresh = [child for children in grown.values() for child in children]
            yield from evaluate(tree, fresh)
            beam = sorted(pool + fresh, key=lambda node: node_rank(tree, node))[: self.b1]
        return Plan(ranked(tree, beam, path_scores(tree, beam, "process"), beam[0]), tree)


def node_rank(tree: Tree, node: int) -> tuple[float, float, int]:
    """Order by score; ties by policy likelihood (paper, App. "Search configurations"), then the older node."""
    likelihood = tree.mean_logprob(node)
    return -tree.values[node], math.inf if math.isnan(likelihood) else -likelihood, node
