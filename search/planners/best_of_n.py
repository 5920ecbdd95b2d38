"""Best-of-N: the pass with the highest critic value."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Literal

from mas_gym.errors import BudgetError, ConfigError
from mas_gym.systems.state import MASState
from search.plan import Plan
from search.planners.stop_rules import Stop, StopChecks, read_stop, stop_for_run
from search.planners.tree_growth import evaluate, grow_chains, path_scores, ranked
from search.planners.voting import scored_ends, vote_curve
from search.protocol import Critic, Model, PlanGenerator, Planner, ValueKind, check_at_least, value_kind
from search.tree import Tree


@dataclass(frozen=True)
class BestOfN(Planner):
    """The pass with the highest path score among ``n``; AC = n D.

    Attributes:
        n: Number of passes.
        values: The kind of the values, as in `MCTS`; ``"auto"``: the kind that the run provides.
        stop: Rule for stopping once the answer is settled; see `search.planners.stop_rules`. None never stops. With a
            rule, passes are requested one after another; they match the first passes of a run without one.
    """

    size_setting = "n"

    n: int = 5
    values: ValueKind | Literal["auto"] = "auto"
    stop: Stop = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", read_stop(self.stop))
        check_at_least(self, 1, n=self.n)

    def for_run(self, critic: Critic | None, training: bool) -> BestOfN:
        """Return the planner with the kind of values that the run provides."""
        kind = value_kind(critic)
        if kind is None:
            raise ConfigError(
                "BestOfN: expected a critic, got none; pass one, such as critic=load_critic('policy-likelihood')"
            )
        stop = stop_for_run(self, self.stop, critic, training)
        return replace(self, values=kind if self.values == "auto" else self.values, stop=stop)

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Sample the passes, score them, and choose the best; ties go to the first."""
        tree = Tree(root)
        kind: ValueKind = "process" if self.values == "auto" else self.values
        checks = StopChecks(self.stop, tree, kind in ("outcome", "reward"))
        ends: list[int] = []
        scores: dict[int, float] = {}
        try:
            while len(ends) < self.n and checks.stopped is None:
                wanted = self.n if self.stop is None else len(ends) + 1
                known, first = len(ends), len(tree)
                ends = yield from grow_chains(tree, model, wanted, ends)
                yield from evaluate(tree, scored_ends(tree, ends[known:], kind, first))
                scores |= path_scores(tree, ends[known:], kind)
                if len(ends) < wanted:
                    break
                if len(ends) < self.n:
                    yield from checks.check(max(ends, key=scores.__getitem__), ends)
        except BudgetError:
            if not ends:
                raise
            # Time ran out before the last passes were scored.
            ends = [end for end in ends if end in scores] or ends
        leaders = [max(ends[: n + 1], key=lambda end: scores.get(end, -math.inf)) for n in range(len(ends))]
        curve = vote_curve(tree, ends, leaders)
        return Plan(ranked(tree, ends, scores, leaders[-1]), tree, curve, stopped=checks.stopped)
