"""Searches of fixed width: step-level beam search, diverse verifier tree search, and reward-balanced search."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mas_gym.errors import ConfigError
from mas_gym.state import MASState
from search.plan import Plan
from search.planners.chains import sigmoid, vote
from search.planners.common import check_at_least, evaluate, path_scores, ranked, step_values, widen
from search.protocol import Critic, Extract, Model, PlanGenerator
from search.tree import Tree


@dataclass(frozen=True)
class StepBeamSearch:
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
            beam = sorted(pool + fresh, key=lambda node: _rank(tree, node))[: self.b1]
        return Plan(ranked(tree, beam, path_scores(tree, beam, "process"), beam[0]), tree)


def _rank(tree: Tree, node: int) -> tuple[float, float, int]:
    """Order by score; ties by policy likelihood (paper, App. "Search configurations"), then the older node."""
    likelihood = tree.mean_logprob(node)
    return -tree.values[node], math.inf if math.isnan(likelihood) else -likelihood, node


@dataclass(frozen=True)
class DVTS:
    """Diverse verifier tree search (Beeching et al., 2024): independent greedy searches side by side.

    Each of ``trees`` searches samples ``width`` messages per step and keeps the best; the best
    path score among their ends wins. With a fixed schedule AC = trees width D.

    Attributes:
        trees: Number of independent searches.
        width: Messages sampled per step in each.
    """

    trees: int = 3
    width: int = 5

    def __post_init__(self) -> None:
        """Check the settings."""
        check_at_least(self, 1, trees=self.trees, width=self.width)

    def for_run(self, critic: Critic | None, training: bool) -> DVTS:
        """Check that the run scores intermediate states."""
        step_values("DVTS", critic, training)
        return self

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Extend all searches turn by turn."""
        tree = Tree(root)
        grown = yield from widen(tree, model, {0: self.trees * self.width}, answered=False)
        first = grown[0]
        groups = [first[i : i + self.width] for i in range(0, len(first), self.width)]
        ends: list[int] = []
        while groups:
            yield from evaluate(tree, [node for group in groups for node in group])
            leaders = [max(group, key=tree.values.__getitem__) for group in groups]
            ends += [node for node in leaders if tree.is_terminal(node)]
            growing = [node for node in leaders if not tree.is_terminal(node)]
            if not growing:
                break
            grown = yield from widen(tree, model, dict.fromkeys(growing, self.width), answered=bool(ends))
            groups = [group for group in grown.values() if group]
        scores = path_scores(tree, ends, "process")
        return Plan(ranked(tree, ends, scores, max(ends, key=scores.__getitem__)), tree)


@dataclass(frozen=True)
class REBASE:
    """Reward-balanced search (Wu et al., 2024): a fixed width, shared among states by their values.

    At each depth the samples are shared among the states in proportion to the softmax of their
    values; terminal states keep their share of the width. With a
    fixed schedule AC = width D.

    Attributes:
        width: Messages sampled per depth.
        temperature: Temperature of the softmax; the smaller, the larger the share of the best state.
        choose: ``"vote"``: the answers vote, weighted by the sigmoid of their path scores; ``"best"``: the best
            path score wins.
    """

    width: int = 15
    temperature: float = 0.1
    choose: Literal["vote", "best"] = "vote"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_at_least(self, 1, width=self.width)
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"REBASE: expected temperature to be a positive number, got {self.temperature!r}")
        if self.choose not in ("vote", "best"):
            raise ConfigError(f"REBASE: expected choose to be 'vote' or 'best', got {self.choose!r}")

    def for_run(self, critic: Critic | None, training: bool) -> REBASE:
        """Check that the run scores intermediate states."""
        step_values("REBASE", critic, training)
        return self

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Extend depth by depth, and choose among the terminal states."""
        tree = Tree(root)
        ends: list[int] = []
        shares = {0: self.width}
        while shares:
            grown = yield from widen(tree, model, shares, answered=bool(ends))
            fresh = [child for children in grown.values() for child in children]
            yield from evaluate(tree, fresh)
            ends += [node for node in fresh if tree.is_terminal(node)]
            growing = [node for node in fresh if not tree.is_terminal(node)]
            values = [tree.values[node] / self.temperature for node in growing]
            counts = share(self.width - len(ends), values) if growing else []
            shares = {node: n for node, n in zip(growing, counts, strict=True) if n}
        scores = path_scores(tree, ends, "process")
        chosen = max(ends, key=scores.__getitem__)
        if self.choose == "vote":
            [answers] = yield [Extract([tree.states[end] for end in ends])]
            chosen = ends[vote(answers, [sigmoid(scores[end]) for end in ends])]
        return Plan(ranked(tree, ends, scores, chosen), tree)


def share(amount: int, logits: Sequence[float]) -> list[int]:
    """Divide ``amount`` in proportion to the softmax of ``logits``; the largest fractional parts are rounded up."""
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    exact = [amount * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(part) for part in exact]
    # Logits may differ by less than their exponentials show.
    order = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], -logits[i], i))
    for i in order[: amount - sum(counts)]:
        counts[i] += 1
    return counts
