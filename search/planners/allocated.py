"""Stop rule for runs that allocate the budget to searches by marginal gain.

See `search.engine.allocation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from mas_gym.errors import ConfigError
from search.planners.registry import planner_spec, takes_stop
from search.planners.stop_rules import Confident, Evidence, StopMap, StopRule
from search.planners.voting import largest_mean
from search.protocol import Critic, Planner, ValueKind

_REMEDY = "use stop=FILE.json with a file from mas-gym calibrate, as in mcts:20,3,stop=stop.json"


@dataclass(frozen=True)
class Allocated(StopRule):
    """Stops if a calibrated rule settles the answer or no gain is expected; otherwise asks to continue.

    Attributes:
        rule: The calibrated rule.
        size: The planner's size, which is the maximum number of checks; filled in for a run.
    """

    at_turns: ClassVar[bool] = False

    rule: Confident
    size: int = 0

    def identity(self) -> object:
        """Return the data that determines the decisions."""
        known = self.rule.calibrated
        assert known is not None
        return {"rule": self.rule.identity(), "growth": [known.growth, known.growth_bias], "size": self.size}

    def __str__(self) -> str:
        """Return the short form of the calibrated rule."""
        return str(self.rule)

    def for_run(self, planner: Planner, critic: Critic | None, kind: ValueKind) -> Allocated:
        """Bind the rule to the planner. Raises `ConfigError` if the two are incompatible."""
        return replace(self, rule=self.rule.for_run(planner, critic, kind), size=planner.current_size())

    def reason(self, evidence: Evidence) -> str | None:
        """Return the rule's reason, or a reason if no gain is expected."""
        found = self.rule.reason(evidence)
        if found is None and evidence.check < self.size and not self.further(evidence) > 0:
            return "no expected gain from further search"
        return found

    def further(self, evidence: Evidence) -> float:
        """Return the largest expected gain per further check."""
        known = self.rule.calibrated
        assert known is not None
        return gain_per_check(known, evidence, self.size - evidence.check)


def gain_per_check(known: StopMap, evidence: Evidence, left: int) -> float:
    """Return the largest mean gain in probability per check; see `search.planners.voting.largest_mean`."""
    features = evidence.features
    now = known.probability(features)
    return 0.0 if math.isnan(now) else largest_mean(lambda n: known.probability(features, n) - now, left)


def allocated(planner: Planner) -> Planner:
    """Return a planner that requests `Continue` before each increment.

    A vote computes its gains from the votes, and a cascade requests `Continue` before each stage. Other planners
    need a calibrated stop rule.

    Raises:
        ConfigError: The planner has no calibrated stop rule, or the rule's file has no expected gains; or the planner
            has no answer between increments.
    """
    return planner.for_allocation(_with_rule)


def _with_rule(planner: Planner) -> Planner:
    if not takes_stop(planner):
        raise ConfigError(f"allocate: expected a planner with a stop setting, got {planner_spec(planner)}; {_REMEDY}")
    rule = planner.stop  # type: ignore[attr-defined]
    if not isinstance(rule, Confident) or rule.calibrated is None:
        raise ConfigError(f"allocate: {planner_spec(planner)} has no calibrated stop rule; {_REMEDY}")
    if not rule.calibrated.growth:
        raise ConfigError(
            f"allocate: {rule} has no expected gains, because an older version wrote it; run mas-gym calibrate again"
        )
    changed: Planner = replace(planner, stop=Allocated(rule))  # type: ignore[type-var]
    return changed
