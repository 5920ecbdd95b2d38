"""Self-consistency: a vote over independent passes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from mas_gym.errors import ConfigError, shown
from mas_gym.systems.state import MASState
from search.plan import Plan
from search.planners.tree_growth import evaluate, grow_chains, path_scores, ranked
from search.planners.voting import (
    leading_votes,
    majority_probability,
    passes_to_settle,
    scored_ends,
    sigmoid,
    vote,
    vote_curve,
)
from search.protocol import Critic, Extract, Model, PlanGenerator, Planner, Steps, ValueKind, check_at_least, value_kind
from search.tree import Tree


@dataclass(frozen=True)
class SelfConsistency(Planner):
    """A majority vote of ``k`` independent passes; AC = k D (paper, App. "Search configurations", SC@K).

    With ``stop``, it runs fewer passes on problems with a clear early majority.

    Attributes:
        k: Number of passes.
        weights: None for one vote per pass; ``"critic"`` to weight each vote by the sigmoid of its path score.
        values: The kind of the values, as in `MCTS`; ``"auto"``: the kind that the run provides.
        stop: Stop before ``k`` passes once the leading answer keeps its majority with a probability above ``stop``
            (`search.planners.voting.majority_probability`); 1 never stops. The passes match the first passes of
            a run without ``stop``, regardless of concurrency.
    """

    size_setting = "k"

    k: int = 5
    weights: Literal["critic"] | None = None
    values: ValueKind | Literal["auto"] = "auto"
    stop: float = 1.0

    def __post_init__(self) -> None:
        check_at_least(self, 1, k=self.k)
        if self.weights not in (None, "critic"):
            raise ConfigError(f"SelfConsistency: expected weights to be None or 'critic', got {self.weights!r}")
        if isinstance(self.stop, bool) or not isinstance(self.stop, int | float) or not 0.5 <= self.stop <= 1:
            raise ConfigError(f"SelfConsistency: expected stop to be a number from 0.5 to 1, got {shown(self.stop)}")
        if self.stop < 1 and self.weights is not None:
            raise ConfigError(
                "SelfConsistency: stop counts votes, so it needs equal weights; leave out weights or stop"
            )
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
        ends, stopped = yield from self._passes(tree, model)
        kind: ValueKind | None = None
        if self.weights is not None:
            kind = "process" if self.values == "auto" else self.values
            yield from evaluate(tree, scored_ends(tree, ends, kind))
        [answers] = yield [Extract([tree.states[end] for end in ends])]
        scores = path_scores(tree, ends, kind)
        weights = [sigmoid(scores[end]) if scores else 1.0 for end in ends]
        winners = [vote(answers[: n + 1], weights[: n + 1]) for n in range(len(ends))]
        anytime = vote_curve(tree, ends, [ends[winner] for winner in winners])
        return Plan(ranked(tree, ends, scores, ends[winners[-1]]), tree, anytime, stopped=stopped)

    def _passes(self, tree: Tree, model: Model) -> Steps[tuple[list[int], str | None]]:
        """Run passes until the vote is settled; return the terminal nodes and the reason for stopping early.

        Each group has the smallest number of passes that can settle the vote, so no pass is wasted.
        """
        ends = yield from grow_chains(tree, model, passes_to_settle((), self.stop, self.k))
        while self.stop < 1 and len(ends) < self.k:
            [answers] = yield [Extract([tree.states[end] for end in ends])]
            votes, left, done = leading_votes(answers), self.k - len(ends), f"{len(ends)} of {self.k} passes"
            more = passes_to_settle(answers, self.stop, left)
            if more == 0:
                return ends, f"majority settled after {done}: probability {majority_probability(*votes):.3f}"
            wanted = len(ends) + more
            ends = yield from grow_chains(tree, model, wanted, ends)
            if len(ends) < wanted:
                break
        return ends, None
