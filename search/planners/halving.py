"""Sequential halving at the root (Karnin et al., 2013; at the root of a tree: Danihelka et al., 2022).

Of many first messages, all get the same number of simulations, the better half gets
as many again, and so on until one is left. Gumbel MuZero draws its root candidates by
Gumbel noise on the policy's logits; messages sampled from the policy are such a draw
already, so no noise is added.
"""

from __future__ import annotations

from dataclasses import dataclass

from mas_gym.state import MASState
from search.planners.common import Steps, check_at_least, check_serial
from search.planners.mcts import MCTS
from search.planners.simulation import Simulation
from search.protocol import Model


@dataclass(frozen=True)
class SequentialHalving(MCTS):
    """MCTS that divides its simulations among ``width`` first messages by halving; below them as in `MCTS`.

    Attributes:
        n_simulations: In all. A phase gives each remaining message at least one.
        width: First messages sampled.
    """

    width: int = 8

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_serial(self)
        check_at_least(self, 2, width=self.width)

    def simulation(self, model: Model, root: MASState) -> Simulation:
        """Return the machinery, with phases."""
        return _Phases(self, model, root)


class _Phases(Simulation):
    planner: SequentialHalving

    def simulate(self) -> Steps:
        tree = self.tree
        yield from self.expand([0], self.planner.width)
        left = list(tree.children(0))
        phases = max(1, (len(left) - 1).bit_length())
        for _ in range(phases):
            for _ in range(max(1, self.planner.n_simulations // (phases * len(left)))):
                for child in left:
                    yield from self.simulate_from([0, child])
            left.sort(key=lambda child: (-tree.totals[child] / max(tree.visits[child], 1), child))
            del left[(len(left) + 1) // 2 :]
