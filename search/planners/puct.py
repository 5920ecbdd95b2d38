"""MCTS with priors: AlphaZero's PUCT rule in place of Eq. 1 (Silver et al., 2017).

The prior of a child is the softmax of its message's mean token log-probability among
its siblings; without log-probabilities it is uniform. The paper adds no priors to UCT;
this is for comparison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mas_gym.errors import ConfigError
from mas_gym.state import MASState
from search.planners.mcts import MCTS, Flight, Search, check_serial
from search.protocol import Model


@dataclass(frozen=True)
class PUCT(MCTS):
    """MCTS that selects by ``Q + c P sqrt(1 + sum N) / (1 + N)``; all else as in `MCTS`, ``c_uct`` being ``c``.

    Attributes:
        temperature: Temperature of the priors' softmax; the larger, the more even they are.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_serial(self)
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"PUCT: expected temperature to be a positive number, got {self.temperature!r}")

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
        # An unknown log-probability makes the sum NaN, and the priors even.
        weights = [math.exp(mean - top) for mean in means]
        total = math.fsum(weights)
        self.priors += [1 / len(means)] * len(means) if math.isnan(total) else [w / total for w in weights]
        return True

    def select(self, node: int) -> int:
        tree = self.tree
        children = tree.children(node)
        scale = self.c_uct * math.sqrt(1 + sum(tree.visits[child] for child in children))

        def score(child: int) -> float:
            n = tree.visits[child]
            return tree.totals[child] / n + scale * self.priors[child] / (1 + n) if n else math.inf

        return max(children, key=score)
