"""PUCT: MCTS with policy priors in the selection rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mas_gym.systems.state import MASState
from search.planners.mcts import MCTS, Flight, Search
from search.protocol import Model, check_positive


@dataclass(frozen=True)
class PUCT(MCTS):
    """MCTS with selection by ``Q + c P sqrt(1 + sum N) / (1 + N)``, where ``c`` is ``c_uct``.

    This is AlphaZero's rule in place of Eq. 1 (Silver et al., 2017); everything else is as in `MCTS`. The prior of a
    child is the softmax over siblings of the message's mean token log-probability; without log-probabilities it is
    uniform. The Q of an unvisited child is the mean value of its parent's simulations, so the priors also order first
    visits. The paper adds no priors to UCT; this planner is for comparison.

    Attributes:
        temperature: Temperature of the priors' softmax; larger values give more uniform priors.
    """

    serial = True

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, temperature=self.temperature)

    def search(self, model: Model, root: MASState) -> Search:
        """Return a new search from ``root``."""
        return _WithPriors(self, model, root)


class _WithPriors(Search):
    def __init__(self, planner: PUCT, model: Model, root: MASState) -> None:
        super().__init__(planner, model, root)
        self.temperature = planner.temperature
        self.priors = [1.0]

    def expand(self, path: list[int], count: int | None = None) -> Flight:
        tree = self.tree
        if not (yield from super().expand(path, count)):
            return False
        children = range(len(self.priors), len(tree))
        means = [tree.mean_logprob(child) / self.temperature for child in children]
        top = max(means)
        # An unknown log-probability makes the sum NaN; the priors are then uniform.
        weights = [math.exp(mean - top) for mean in means]
        total = math.fsum(weights)
        self.priors += [1 / len(means)] * len(means) if math.isnan(total) else [w / total for w in weights]
        return True

    def select(self, node: int) -> int:
        tree = self.tree
        children = tree.children(node)
        scale = self.c_uct * math.sqrt(1 + sum(tree.visits[child] for child in children))
        unvisited = tree.totals[node] / max(tree.visits[node], 1)

        def score(child: int) -> float:
            n = tree.visits[child]
            return (tree.totals[child] / n if n else unvisited) + scale * self.priors[child] / (1 + n)

        return max(children, key=score)
