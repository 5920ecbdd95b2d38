"""Adaptive branching: trees that grow wider at states with varying values."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mas_gym.errors import BudgetError, ExhaustedError
from mas_gym.systems.state import MASState
from search.plan import Plan
from search.planners.normal_posterior import draw_normal
from search.planners.stop_rules import Stop, StopChecks, read_stop, stop_for_run
from search.planners.tree_growth import child_of, evaluate, path_scores, ranked, step_values
from search.protocol import Critic, Model, PlanGenerator, Planner, Propose, Steps, check_at_least, check_positive
from search.tree import Tree


@dataclass(frozen=True)
class AdaptiveBranching(Planner):
    """AB-MCTS with Gaussian arms; AC is at most ``n_simulations * D``.

    At each state, Thompson sampling decides between a new message and a known one (Inoue et al.,
    2025). A state's arms are its children and the arm "new message". The value of an arm is a normal distribution with
    unknown mean and variance, learned from the values backed up through it; the arm "new message" learns from the first
    value of each child. The arm with the largest sampled mean is chosen, so the tree grows wide at states
    with diverse messages and deep below good ones.

    A simulation descends to a terminal state, sampling one message at each new state, and backs up the value of the
    terminal state. Decoding follows the largest Q among children. In a recorded run, the arm "new message" is disabled
    at a state without further messages.

    Attributes:
        n_simulations: Number of simulations.
        spread: Prior standard deviation of values around their mean, in units of the critic's values.
        stop: Rule for stopping once the answer is settled; see `search.planners.stop_rules`. None never stops.
    """

    size_setting = "n_simulations"

    n_simulations: int = 20
    spread: float = 0.3
    stop: Stop = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", read_stop(self.stop))
        check_at_least(self, 1, n_simulations=self.n_simulations)
        check_positive(self, spread=self.spread)

    def for_run(self, critic: Critic | None, training: bool) -> AdaptiveBranching:
        """Check that the run scores intermediate states."""
        step_values("AdaptiveBranching", critic, training)
        return replace(self, stop=stop_for_run(self, self.stop, critic, training))

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Run the simulations and decode; the budget can end them early."""
        search = _Growth(self, model, root, rng)
        try:
            for _ in range(self.n_simulations):
                yield from search.simulate()
                if self.stop is not None and (yield from search.settled()):
                    break
        except BudgetError:
            if not search.ends:
                yield from search.simulate(search.tree.path(len(search.tree) - 1))
        return search.finish()


class _Growth:
    def __init__(self, planner: AdaptiveBranching, model: Model, root: MASState, rng: random.Random) -> None:
        self.planner, self.model, self.rng = planner, model, rng
        self.tree = Tree(root)
        self.squares = [0.0]
        self.firsts: dict[int, list[float]] = {}
        self.ends: list[int] = []
        self.exhausted: set[int] = set()
        self.checks = StopChecks(planner.stop, self.tree)

    def settled(self) -> Steps[bool]:
        return (yield from self.checks.check(self._decode(), self.ends))

    def simulate(self, start: Sequence[int] = (0,)) -> Steps[None]:
        tree, path, new = self.tree, [*start], [*start[1:]]
        while not tree.is_terminal(path[-1]):
            node = self._choose(path[-1])
            if node is None:
                try:
                    yield from self._sample(path)
                except ExhaustedError:
                    self.exhausted.add(path[-1])
                else:
                    new.append(path[-1])
            else:
                path.append(node)
        value = tree.values[path[-1]]
        if not tree.visits[path[-1]]:
            self.ends.append(path[-1])
        for node in path:
            if node in new and not tree.visits[node]:
                self.firsts.setdefault(tree.parents[node], []).append(value)
            tree.visits[node] += 1
            tree.totals[node] += value
            self.squares[node] += value * value

    def _sample(self, path: list[int]) -> Steps[None]:
        """Extend the path by the child for a new message, which may already exist."""
        tree, parent = self.tree, path[-1]
        [[proposal]] = yield [Propose(tree.states[parent], 1)]
        child = child_of(tree, self.model, parent, proposal)
        if child == len(self.squares):
            self.squares.append(0.0)
            yield from evaluate(tree, [child])
        path.append(child)

    def _choose(self, node: int) -> int | None:
        """Return the child with the largest sampled mean, or None to sample a new message."""
        tree = self.tree
        best, best_sample = None, -math.inf
        children = tree.children(node)
        if not children:
            return None
        mean = tree.totals[node] / max(tree.visits[node], 1)
        for child in children:
            n, total = tree.visits[child], tree.totals[child]
            sample = self._draw(mean, n, total, self.squares[child])
            if sample > best_sample:
                best, best_sample = child, sample
        if node in self.exhausted:
            return best
        firsts = self.firsts.get(node, [])
        fresh = self._draw(mean, len(firsts), math.fsum(firsts), math.fsum(v * v for v in firsts))
        return best if best_sample >= fresh else None

    def _draw(self, prior: float, n: int, total: float, squares: float) -> float:
        return draw_normal(self.rng, prior, self.planner.spread, n, total, squares).mean

    def _decode(self) -> int:
        tree, node = self.tree, 0
        while visited := [child for child in tree.children(node) if tree.visits[child]]:
            node = max(visited, key=lambda child: tree.totals[child] / tree.visits[child])
        return node

    def finish(self) -> Plan:
        scores = path_scores(self.tree, self.ends, "process")
        return Plan(ranked(self.tree, self.ends, scores, self._decode()), self.tree, stopped=self.checks.stopped)
