"""Best-of-N: the pass that the critic scores highest."""

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
from search.planners.voting import scored_ends, vote_curve
from search.protocol import Critic, Model, PlanGenerator, Planner, ValueKind, value_kind
from search.tree import Tree


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
        yield from evaluate(tree, scored_ends(tree, ends, kind))
        scores = path_scores(tree, ends, kind)
        leaders = [max(ends[: n + 1], key=scores.__getitem__) for n in range(len(ends))]
        return Plan(ranked(tree, ends, scores, leaders[-1]), tree, vote_curve(tree, ends, leaders))
