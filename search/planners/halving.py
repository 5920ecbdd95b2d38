"""Sequential halving of the root's children."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mas_gym.systems.state import MASState
from search.planners.mcts import MCTS, Search
from search.protocol import Model, Steps, check_at_least


@dataclass(frozen=True)
class SequentialHalving(MCTS):
    """MCTS that divides its simulations among ``width`` first messages by sequential halving.

    Sequential halving (Karnin et al., 2013; at the root of a tree: Danihelka et al., 2022) runs in phases of equal
    length. Each phase divides its simulations equally among the remaining first messages and keeps the better half.
    Below the first messages, selection is that of `MCTS`. The schedule is that of mctx (``seq_halving.py``), which uses
    exactly ``n_simulations``. As in mctx, decoding chooses the first message with the most visits, with ties broken by
    Q; below it, decoding follows the largest Q. Gumbel MuZero draws its root candidates by adding Gumbel noise to the
    policy's logits; sampling messages from the policy has the same effect.

    Attributes:
        n_simulations: Number of simulations.
        width: Number of first messages sampled.
    """

    serial = True

    width: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 2, width=self.width)

    def search(self, model: Model, root: MASState) -> Search:
        """Return a new search from ``root``."""
        return _Halving(self, model, root)


class _Halving(Search):
    planner: SequentialHalving

    def run(self) -> Steps[None]:
        tree = self.tree
        self.ceiling = float("inf")
        yield from self.expand([0], self.planner.width)
        children = tree.children(0)
        for visits in considered_visits(len(children), self.planner.n_simulations):
            due = [child for child in children if tree.visits[child] - self.virtual == visits]
            child = max(due, key=lambda child: tree.totals[child] / max(tree.visits[child], 1))
            if not (yield from self.simulate([0, child])) or (yield from self.settled()):
                return

    def greedy(self, node: int, all_children: bool = False) -> int | None:
        if node:
            return super().greedy(node, all_children)
        tree = self.tree
        finalists = [child for child in tree.children(0) if all_children or self.leads[child]]
        most = max((tree.visits[child] for child in finalists), default=0)
        return max(
            (child for child in finalists if tree.visits[child] == most),
            key=lambda child: tree.totals[child] / max(most, 1),
            default=None,
        )


def considered_visits(width: int, n_simulations: int) -> Iterator[int]:
    """Yield for each simulation a visit count; the best child with this count is selected."""
    phases = max(1, (width - 1).bit_length())
    visits = [0] * width
    considered, left = width, n_simulations
    while left:
        for _ in range(max(1, n_simulations // (phases * considered))):
            for i in range(min(considered, left)):
                yield visits[i]
                visits[i] += 1
                left -= 1
        considered = max(min(2, width), considered // 2)
