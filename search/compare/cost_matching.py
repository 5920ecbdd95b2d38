"""Search parameters that give planners an equal cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mas_gym.errors import ConfigError
from mas_gym.tasks.base import Problem
from search.compare.comparison_runs import Row, Start, measure, start_here
from search.costs import Budget
from search.planners.registry import planner_spec
from search.protocol import planner_name
from search.results.outcomes import Outcome
from search.results.table import CalibratedSize
from search.setup import RunSpec

_ROUNDS = 8
_LARGEST = 4096
_COSTS: dict[str, Callable[[Outcome], float]] = {
    "tokens": lambda outcome: outcome.tokens,
    "calls": lambda outcome: outcome.agent_calls,
    "usd": lambda outcome: outcome.usd or 0.0,
}


class Match(NamedTuple):
    """The target cost per problem of every planner.

    Attributes:
        unit: ``"tokens"``, ``"calls"`` or ``"usd"``.
        amount: Amount per problem.
    """

    unit: str
    amount: float

    @classmethod
    def read(cls, text: str, priced: bool = False) -> Match:
        """Parse a target such as ``"tokens=650"``; USD requires a ``priced`` comparison.

        Raises:
            ConfigError: The unit is unknown, the number is not positive, or the unit is USD and there are no prices.
        """
        unit, _, amount = text.partition("=")
        try:
            number = float(amount)
        except ValueError:
            number = 0.0
        if unit.strip() not in _COSTS or not 0 < number < float("inf"):
            raise ConfigError(f"match: expected tokens=N, calls=N or usd=X, such as tokens=650, got {text!r}")
        if unit.strip() == "usd" and not priced:
            raise ConfigError(f"match: expected prices for {text}, got none; pass prices=, or --prices prices.yaml")
        return cls(unit.strip(), number)


def match_size(
    row: Row, spec: RunSpec, match: Match, problems: Sequence[Problem], start: Start = start_here
) -> tuple[Row, CalibratedSize]:
    """Return a row resized to the cost closest to the target, and its calibration.

    The size is the planner's `search.Planner.size_setting`, such as the number of passes or
    simulations. Sizes are chosen only by cost, never by correctness. With a store, the searches are stored in a
    separate file next to it, such as ``runs.calibration.db``, so that they are not repeated.

    Raises:
        ConfigError: Every search failed, the planner's ``size_setting`` is wrong, or searches cost 0 tokens or USD.
    """
    store = None if spec.store is None else Path(spec.store)
    beside = None if store is None else store.with_suffix(f".calibration{store.suffix}")
    spec = replace(spec, problems=problems, store=beside, run_budget=Budget())
    setting = row.planner.size_setting

    def spent(candidate: Row) -> float:
        outcomes, stop = measure([candidate], spec, start=start)
        if stop is not None:
            raise stop
        costs = [_COSTS[match.unit](outcome) for outcome in outcomes if outcome.error is None]
        if not costs:
            reason = outcomes[0].error if outcomes else "expected at least one problem, got none"
            raise ConfigError(f"every calibration search failed: {reason}")
        mean = sum(costs) / len(costs)
        if match.unit != "calls" and not mean > 0:
            raise ConfigError(
                f"match: searches cost 0 {match.unit}, because the prices are 0 or the engine counts no tokens, so no "
                "planner size reaches the target; use calls=N"
            )
        return mean

    if not setting:
        return row, CalibratedSize(row.label, "", 0, spent(row), len(problems))
    size = row.planner.current_size()
    tried: dict[int, float] = {}
    for _ in range(_ROUNDS):
        tried[size] = spent(_resized(row, size))
        size = _next_size(tried, match.amount)
        if size in tried:
            break
    best = min(tried, key=lambda tried_size: abs(tried[tried_size] - match.amount))
    chosen = _resized(row, best)
    return chosen, CalibratedSize(chosen.label, setting, best, tried[best], len(problems))


def _resized(row: Row, size: int) -> Row:
    planner = row.planner.resized(size)
    name = planner_spec(planner)
    return replace(row, planner=planner, name=f"{row.name} {size}" if name == planner_name(planner) else name)


def _next_size(tried: Mapping[int, float], amount: float) -> int:
    """Return the next size to try, by linear interpolation between the two nearest costs, or a tried size when done."""
    below = max((size for size in tried if tried[size] <= amount), default=0)
    above = min((size for size in tried if tried[size] > amount), default=_LARGEST + 1)
    near, *others = sorted(tried, key=lambda size: abs(tried[size] - amount))
    slope = tried[near] / near
    if others and tried[near] != tried[others[0]]:
        slope = (tried[near] - tried[others[0]]) / (near - others[0])
    guess = near + round((amount - tried[near]) / slope) if slope > 0 else 2 * near
    inside = min(max(guess, below + 1), above - 1)
    return inside or above
