"""Searches of fixed width: independent passes (`SinglePass`, `SelfConsistency`, `BestOfN`) and beams."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mas_gym.errors import ConfigError
from mas_gym.state import MASState
from search.plan import AnytimePoint, Plan
from search.planners.common import (
    anytime_point,
    check_at_least,
    check_positive,
    evaluate,
    grow_chains,
    path_scores,
    ranked,
    step_values,
    widen,
)
from search.protocol import Critic, Extract, Model, PlanGenerator, Planner, ValueKind, value_kind
from search.tree import Tree


@dataclass(frozen=True)
class SinglePass(Planner):
    """One pass through the schedule; AC = D (paper, Sec. "Overall experimental setup")."""

    needs_critic = False

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Sample one message per agent."""
        tree = Tree(root)
        ends = yield from grow_chains(tree, model, 1)
        return Plan(ranked(tree, ends, {}, ends[0]), tree)


@dataclass(frozen=True)
class SelfConsistency(Planner):
    """A majority vote of ``k`` independent passes; AC = k D (paper, App. "Search configurations", SC@K).

    Attributes:
        k: Number of passes.
        weights: None for one vote per pass; ``"critic"`` to weigh each by the sigmoid of its path score.
        values: The kind of the values, as in `MCTS`; ``"auto"``: the kind that the run provides.
    """

    size_setting = "k"

    k: int = 5
    weights: Literal["critic"] | None = None
    values: ValueKind | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_at_least(self, 1, k=self.k)
        if self.weights not in (None, "critic"):
            raise ConfigError(f"SelfConsistency: expected weights None or 'critic', got {self.weights!r}")
        object.__setattr__(self, "needs_critic", self.weights is not None)

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
class BestOfN(Planner):
    """The pass with the highest path score among ``n``; AC = n D.

    Attributes:
        n: Number of passes.
        values: The kind of the values, as in `MCTS`; ``"auto"``: the kind that the run provides.
    """

    size_setting = "n"

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


@dataclass(frozen=True)
class StepBeamSearch(Planner):
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

    size_setting = "b2"

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
class DVTS(Planner):
    """Diverse verifier tree search (Beeching et al., 2024): independent greedy searches side by side.

    Each of ``trees`` searches samples ``width`` messages per step and keeps the best; the best
    path score among their ends wins. With a fixed schedule AC = trees width D.

    Attributes:
        trees: Number of independent searches.
        width: Messages sampled per step in each.
    """

    size_setting = "trees"

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
class REBASE(Planner):
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

    size_setting = "width"

    width: int = 15
    temperature: float = 0.1
    choose: Literal["vote", "best"] = "vote"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_at_least(self, 1, width=self.width)
        check_positive(self, temperature=self.temperature)
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
