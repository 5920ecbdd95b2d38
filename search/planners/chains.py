"""Planners of independent passes through the schedule: single pass, self-consistency, best-of-n."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mas_gym.errors import ConfigError
from mas_gym.state import MASState
from search.plan import AnytimePoint, Plan
from search.planners.common import anytime_point, check_at_least, evaluate, grow_chains, path_scores, ranked
from search.protocol import Critic, Extract, Model, PlanGenerator, ValueKind, value_kind
from search.tree import Tree


@dataclass(frozen=True)
class SinglePass:
    """One pass through the schedule; AC = D (paper, Sec. "Overall experimental setup")."""

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Sample one message per agent."""
        tree = Tree(root)
        ends = yield from grow_chains(tree, model, 1)
        return Plan(ranked(tree, ends, {}, ends[0]), tree)


@dataclass(frozen=True)
class SelfConsistency:
    """A majority vote of ``k`` independent passes; AC = k D (paper, App. "Search configurations", SC@K).

    Attributes:
        k: Number of passes.
        weights: None for one vote per pass; ``"critic"`` to weigh each by the sigmoid of its path score.
        values: The kind of the values, as in `MCTS`; ``"auto"``: the kind that the run provides.
    """

    k: int = 5
    weights: Literal["critic"] | None = None
    values: ValueKind | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_at_least(self, 1, k=self.k)
        if self.weights not in (None, "critic"):
            raise ConfigError(f"SelfConsistency: expected weights None or 'critic', got {self.weights!r}")

    def for_run(self, critic: Critic | None, training: bool) -> SelfConsistency:
        """Return the planner with the kind of values that the run provides."""
        kind = value_kind(critic)
        if self.weights is None:
            return self
        if kind is None:
            raise ConfigError("a weighted vote needs a critic: pass critic=..., or leave weights out")
        return replace(self, values=kind) if self.values == "auto" else self

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Sample the passes, score them for a weighted vote, and vote."""
        tree = Tree(root)
        ends = yield from grow_chains(tree, model, self.k)
        kind: ValueKind | None = None
        if self.weights is not None:
            kind = "process" if self.values == "auto" else self.values
            yield from evaluate(tree, _scored(tree, ends, kind))
        [answers] = yield [Extract([tree.states[end] for end in ends])]
        scores = path_scores(tree, ends, kind)
        weights = [sigmoid(scores[end]) if scores else 1.0 for end in ends]
        winners = [vote(answers[: n + 1], weights[: n + 1]) for n in range(len(ends))]
        anytime = _curve(tree, ends, [ends[winner] for winner in winners])
        return Plan(ranked(tree, ends, scores, ends[winners[-1]]), tree, anytime)


@dataclass(frozen=True)
class BestOfN:
    """The pass with the highest path score among ``n``; AC = n D.

    Attributes:
        n: Number of passes.
        values: The kind of the values, as in `MCTS`; ``"auto"``: the kind that the run provides.
    """

    n: int = 5
    values: ValueKind | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_at_least(self, 1, n=self.n)

    def for_run(self, critic: Critic | None, training: bool) -> BestOfN:
        """Return the planner with the kind of values that the run provides."""
        kind = value_kind(critic)
        if kind is None:
            raise ConfigError("BestOfN needs a critic: pass critic=load_critic(...), such as 'policy-likelihood'")
        return replace(self, values=kind) if self.values == "auto" else self

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Sample the passes, score them, and take the best; the first among equals."""
        tree = Tree(root)
        kind: ValueKind = "process" if self.values == "auto" else self.values
        ends = yield from grow_chains(tree, model, self.n)
        yield from evaluate(tree, _scored(tree, ends, kind))
        scores = path_scores(tree, ends, kind)
        leaders = [max(ends[: n + 1], key=scores.__getitem__) for n in range(len(ends))]
        return Plan(ranked(tree, ends, scores, leaders[-1]), tree, _curve(tree, ends, leaders))


def sigmoid(x: float) -> float:
    """Return ``1 / (1 + exp(-x))`` without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def vote(answers: Sequence[str | None], weights: Sequence[float]) -> int:
    """Return the index of the pass that represents the winning answer.

    Weights are summed per answer; the answer seen first wins a tie, and its pass with the
    largest weight represents it. Passes without an answer vote only if no pass has one.
    """
    totals: dict[str, float] = {}
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            totals[answer] = totals.get(answer, 0.0) + weight
    winner = max(totals, key=totals.__getitem__) if totals else None
    return max((i for i, answer in enumerate(answers) if answer == winner), key=weights.__getitem__)


def _scored(tree: Tree, ends: Sequence[int], kind: ValueKind) -> Sequence[int]:
    return ends if kind in ("outcome", "reward") else range(1, len(tree))


def _curve(tree: Tree, ends: Sequence[int], chosen: Sequence[int]) -> tuple[AnytimePoint, ...]:
    calls = tokens = 0
    curve: list[AnytimePoint] = []
    for end, leader in zip(ends, chosen, strict=True):
        path = tree.path(end)[1:]
        calls += len(path)
        tokens += sum(tree.tokens[node] for node in path)
        if not curve or curve[-1].state is not tree.states[leader]:
            curve.append(anytime_point(tree, calls, tokens, leader))
    return tuple(curve)
