"""Self-consistency: a vote over independent passes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from mas_gym.errors import ConfigError
from mas_gym.systems.state import MASState
from search.plan import Plan
from search.planners.common import (
    check_at_least,
    evaluate,
    grow_chains,
    path_scores,
    ranked,
)
from search.planners.voting import scored_ends, sigmoid, vote, vote_curve
from search.protocol import Critic, Extract, Model, PlanGenerator, Planner, ValueKind, value_kind
from search.tree import Tree


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
            yield from evaluate(tree, scored_ends(tree, ends, kind))
        [answers] = yield [Extract([tree.states[end] for end in ends])]
        scores = path_scores(tree, ends, kind)
        weights = [sigmoid(scores[end]) if scores else 1.0 for end in ends]
        winners = [vote(answers[: n + 1], weights[: n + 1]) for n in range(len(ends))]
        anytime = vote_curve(tree, ends, [ends[winner] for winner in winners])
        return Plan(ranked(tree, ends, scores, ends[winners[-1]]), tree, anytime)
