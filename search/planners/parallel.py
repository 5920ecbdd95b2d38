"""Several simulations of one tree at once, kept apart by virtual loss (Chaslot et al., 2008).

``MCTS(parallel=K)`` keeps up to K simulations under way, which move in step: each
round asks for what all of them need, so a search waits for about a K-th as many
replies. Whoever is under way counts, at every edge that it has taken, as one more
visit that came to the worst; so the next one prefers another way. A simulation that
meets a state which another is expanding or scoring waits for it, so no state is
expanded twice and the bounds on AC and RC are those of one at a time. What a round
does depends on the replies alone: the same seed gives the same plan.

The worst is -1 where values are of terminal states alone, else the least value in
the tree so far. Visits and totals hold what has been backed up and nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from mas_gym.state import MASState
from search.planners.common import Steps
from search.planners.simulation import Simulation
from search.protocol import Model, Request
from search.tree import TERMINAL

if TYPE_CHECKING:
    from search.planners.mcts import MCTS


class Parallel(Simulation):
    """The machinery with several simulations under way."""

    def __init__(self, planner: MCTS, model: Model, root: MASState) -> None:
        """Start with the root alone."""
        super().__init__(planner, model, root)
        self.loss = math.inf if self.steps else -1.0
        self.under_way: Counter[int] = Counter()
        self.in_work: set[int] = set()
        self.spent = False

    def simulate(self) -> Steps:
        """Run the simulations, in the order in which they started within each round."""
        left = self.planner.n_simulations
        flights: list[tuple[Steps, list[Request]]] = []
        try:
            while True:
                started = len(flights)
                while left and len(flights) < self.planner.parallel and not self.spent:
                    left -= 1
                    flights += _resumed(self._fly(), None)
                if not flights:
                    return
                if len(flights) > started:
                    self._note()
                wanted = [request for _, requests in flights for request in requests]
                replies = iter((yield wanted) if wanted else ())
                answers = [[next(replies) for _ in requests] for _, requests in flights]
                going: list[tuple[Steps, list[Request]]] = []
                for (flight, _), answer in zip(flights, answers, strict=True):
                    going += _resumed(flight, answer)
                flights = going
        finally:
            for flight, _ in flights:
                flight.close()

    def _fly(self) -> Steps:
        """Run one simulation; an empty list of requests says that it waits for another."""
        tree, path = self.tree, [0]
        try:
            while True:
                node = self.descend(path)
                if node in self.in_work:
                    yield []
                    continue
                value = tree.values[node]
                if tree.first[node] == TERMINAL and value == value:
                    break
                if self.bootstrap and not self._affordable(node, len(self.in_work)):
                    self.spent = True
                    return
                self.in_work.add(node)
                if tree.first[node] == TERMINAL:
                    yield from self._score(path)
                else:
                    yield from self.expand(path, self.planner.max_children)
                self.in_work.discard(node)
                if self.bootstrap:
                    value = self._frontier_value(node)
                    break
            for step in path:
                tree.visits[step] += 1
                tree.totals[step] += value
        finally:
            self.under_way.subtract(path[1:])

    def expand(self, path: list[int], count: int) -> Steps:
        """Expand, and learn how bad values can be."""
        yield from super().expand(path, count)
        if self.steps:
            self.loss = min(self.loss, *(self.tree.values[child] for child in self.tree.children(path[-1])))

    def descend(self, path: list[int]) -> int:
        """Follow Eq. 1 with virtual losses, leaving marks on the way."""
        tree, under_way = self.tree, self.under_way
        node = path[-1]
        while (children := tree.children(node)) and node not in self.in_work:
            counts = [tree.visits[child] + under_way[child] for child in children]
            total = sum(counts)
            if total >= len(self.inverse):
                self._lengthen(total)
            scale, best = self.log_term[total], -math.inf
            for child, n in zip(children, counts, strict=True):
                if n == 0:
                    node = child
                    break
                score = (tree.totals[child] + self.loss * under_way[child]) / n + scale * self.inverse[n]
                if score > best:
                    best, node = score, child
            under_way[node] += 1
            path.append(node)
        return node


def _resumed(flight: Steps, answer: list[Any] | None) -> list[tuple[Steps, list[Request]]]:
    """Run a simulation to its next requests; an empty list says that it has ended."""
    try:
        return [(flight, flight.send(answer))]  # type: ignore[arg-type]
    except StopIteration:
        return []
