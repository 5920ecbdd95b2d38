"""Step-level beam search (paper, Alg. 3)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from mas_gym.systems.state import MASState
from search.plan import Plan
from search.planners.stop_rules import StopChecks
from search.planners.tree_growth import path_scores, ranked
from search.planners.turnwise import TurnByTurn, extend
from search.protocol import Model, PlanGenerator, check_at_least
from search.tree import Tree


@dataclass(frozen=True)
class StepBeamSearch(TurnByTurn):
    """SBS(B2, B1): sample ``b2`` messages per beam state, keep the ``b1`` best successors overall (paper, Alg. 3).

    With a fixed schedule, AC = b2 + (D - 1) b1 b2, provided b1 <= b2. Equal messages stay
    separate successors, because the algorithm's pool is a list. In a dynamic graph, states can become terminal at
    different turns. A terminal state stays in the pool with its score at no further cost, and the search ends when the
    whole beam is terminal. A budget narrows the beam: each turn gets an even share of the calls left, and the best
    states are extended first.

    Attributes:
        b2: Messages sampled per beam state.
        b1: Width of the beam.
        stop: As for `TurnByTurn`.
    """

    size_setting = "b2"

    b2: int = 5
    b1: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, b2=self.b2, b1=self.b1)

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Extend and prune the beam turn by turn; the last beam's states are the candidates."""
        tree = Tree(root)
        checks = StopChecks(self.stop, tree)
        beam = [0]
        while growing := [node for node in beam if not tree.is_terminal(node)]:
            pool = [node for node in beam if tree.is_terminal(node)]
            width = self.b2 if checks.stopped is None else 1
            fresh = yield from extend(tree, model, dict.fromkeys(growing, width), answered=bool(pool))
            beam = sorted(pool + fresh, key=lambda node: node_rank(tree, node))[: self.b1]
            ends = [node for node in beam if tree.is_terminal(node)]
            if checks.stopped is None and len(ends) < len(beam) and (yield from checks.check(beam[0], ends)):
                beam = beam[:1]
        scores = path_scores(tree, beam, "process")
        return Plan(ranked(tree, beam, scores, beam[0]), tree, stopped=checks.stopped)


def node_rank(tree: Tree, node: int) -> tuple[float, float, int]:
    """Return a sort key: score, then policy likelihood (paper, App. "Search configurations"), then age."""
    likelihood = tree.mean_logprob(node)
    return -tree.values[node], math.inf if math.isnan(likelihood) else -likelihood, node
