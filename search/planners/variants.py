"""Tree searches to compare the paper's MCTS with: PUCT, sequential halving, and adaptive branching."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mas_gym.errors import BudgetError, ConfigError
from mas_gym.state import MASState
from search.plan import Plan
from search.planners.common import Steps, check_at_least, child_of, evaluate, path_scores, ranked, step_values
from search.planners.mcts import MCTS, Flight, Search, check_serial
from search.protocol import Critic, Model, PlanGenerator, Propose
from search.tree import Tree


@dataclass(frozen=True)
class PUCT(MCTS):
    """MCTS that selects by ``Q + c P sqrt(1 + sum N) / (1 + N)``; all else as in `MCTS`, ``c_uct`` being ``c``.

    This is AlphaZero's rule in place of Eq. 1 (Silver et al., 2017). The prior of a child is the
    softmax of its message's mean token log-probability among its siblings; without
    log-probabilities it is uniform. The paper adds no priors to UCT; this is for comparison.

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


@dataclass(frozen=True)
class SequentialHalving(MCTS):
    """MCTS that divides its simulations among ``width`` first messages by halving; below them as in `MCTS`.

    Sequential halving (Karnin et al., 2013; at the root of a tree: Danihelka et al., 2022): all
    first messages get the same number of simulations, then the better half gets as many again,
    and so on. The schedule is that of mctx (``seq_halving.py``), which spends ``n_simulations``
    exactly. Gumbel MuZero draws its root candidates by adding Gumbel noise to the policy's
    logits; messages sampled from the policy are such a draw already.

    Attributes:
        n_simulations: Number of simulations.
        width: First messages sampled.
    """

    width: int = 8

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_serial(self)
        check_at_least(self, 2, width=self.width)

    def search(self, model: Model, root: MASState) -> Search:
        """Return a new search from ``root``."""
        return _Halving(self, model, root)


class _Halving(Search):
    planner: SequentialHalving

    def run(self) -> Steps:
        tree = self.tree
        self.ceiling = float("inf")
        yield from self.expand([0], self.planner.width)
        children = tree.children(0)
        for visits in considered_visits(len(children), self.planner.n_simulations):
            due = [child for child in children if tree.visits[child] - self.virtual == visits]
            child = max(due, key=lambda child: tree.totals[child] / max(tree.visits[child], 1))
            if not (yield from self.simulate([0, child])):
                return


def considered_visits(width: int, n_simulations: int) -> Iterator[int]:
    """Yield for each simulation the number of visits of the children among which it chooses the best."""
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


@dataclass(frozen=True)
class AdaptiveBranching:
    """AB-MCTS with Gaussian arms; AC is at most ``n_simulations`` D.

    At each state, Thompson sampling decides between a new message and a known one (Inoue et al.,
    2025). A state's arms are its children and "sample another". The value of an arm is a normal
    distribution with unknown mean and variance, learned from the values backed up through it;
    the arm of new messages learns from the first value of each child. The arm with the largest
    sampled mean is taken, so a state grows wide if its messages differ and deep if they are good.

    A simulation goes down to a terminal state, sampling one message at each new state, and backs
    up the value of its terminal state. Decoding follows the largest Q among children.

    Attributes:
        n_simulations: Number of simulations.
        spread: Prior standard deviation of values around their mean, in units of the critic's values.
    """

    n_simulations: int = 20
    spread: float = 0.3

    def __post_init__(self) -> None:
        """Check the settings."""
        check_at_least(self, 1, n_simulations=self.n_simulations)

    def for_run(self, critic: Critic | None, training: bool) -> AdaptiveBranching:
        """Check that the run scores intermediate states."""
        step_values("AdaptiveBranching", critic, training)
        return self

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Run the simulations and decode; the budget can end them early."""
        search = _Growth(self, model, root, rng)
        try:
            for _ in range(self.n_simulations):
                yield from search.simulate()
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

    def simulate(self, start: Sequence[int] = (0,)) -> Steps:
        tree, path, new = self.tree, [*start], [*start[1:]]
        while not tree.is_terminal(path[-1]):
            node = self._choose(path[-1])
            if node is None:
                yield from self._sample(path)
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

    def _sample(self, path: list[int]) -> Steps:
        """Extend the path by the child that a new message leads to, which may already exist."""
        tree, parent = self.tree, path[-1]
        [[proposal]] = yield [Propose(tree.states[parent], 1)]
        child = child_of(tree, self.model, parent, proposal)
        if child == len(self.squares):
            self.squares.append(0.0)
            yield from evaluate(tree, [child])
        path.append(child)

    def _choose(self, node: int) -> int | None:
        """Return the child with the largest sampled mean; None if a new message has it, or there is no child."""
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
        firsts = self.firsts.get(node, [])
        fresh = self._draw(mean, len(firsts), math.fsum(firsts), math.fsum(v * v for v in firsts))
        return best if best_sample >= fresh else None

    def _draw(self, prior: float, n: int, total: float, squares: float) -> float:
        """Sample a mean from the posterior of a normal with a normal-inverse-gamma prior worth one observation."""
        mean = (prior + total) / (1 + n)
        deviation = squares - 2 * mean * total + n * mean * mean + (mean - prior) ** 2
        shape = (1 + n) / 2
        scale = (self.planner.spread**2 + max(deviation, 0.0)) / 2
        variance = scale / max(self.rng.gammavariate(shape, 1.0), 1e-12)
        return self.rng.gauss(mean, math.sqrt(variance / (1 + n)))

    def finish(self) -> Plan:
        tree, node = self.tree, 0
        while visited := [child for child in tree.children(node) if tree.visits[child]]:
            node = max(visited, key=lambda child: tree.totals[child] / tree.visits[child])
        return Plan(ranked(tree, self.ends, path_scores(tree, self.ends, "process"), node), tree)
