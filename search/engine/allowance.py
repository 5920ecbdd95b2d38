"""Admission under a run's budget: a search starts only if the remaining budget is expected to cover it completely.

Otherwise too many concurrent searches would share the budget, and none would finish.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from search.budget import Budget
from search.usage import Usage


class Cost(NamedTuple):
    """The cost or grant of a search in the units of budgets."""

    calls: float = 0.0
    tokens: float = 0.0
    usd: float = 0.0


class Allowance:
    """Divides a run's budget among its searches.

    The expected cost of a search is that of the most expensive search so far. Until one has ended, only one search runs
    at a time, unless the limits of each search bound its cost. Concurrent searches are granted a margin, which shrinks
    as more searches end. The unused part returns to the budget.

    Attributes:
        limited: Whether the run has a budget of calls, tokens or USD.
    """

    def __init__(self, budget: Budget, each: Budget) -> None:
        """Store the limits of the run and of each search."""
        self._budget = budget
        self._limit, self._bound = _limits(budget), _limits(each)
        self._largest, self._observed = Cost(), 0
        self.limited = min(self._limit) < math.inf

    @property
    def expected(self) -> Cost:
        """The expected cost of the next search; infinite if unknown."""
        return self._largest if self._observed else self._bound

    @property
    def grant(self) -> Cost:
        """The budget reserved for a search that starts."""
        margin = 1 + 1 / max(self._observed, 1)
        return Cost(*(min(margin * cost, bound) for cost, bound in zip(self.expected, self._bound, strict=True)))

    def cost(self, usage: Usage) -> Cost:
        """Convert a usage to the units of budgets."""
        return Cost(usage.agent_calls, usage.generated_tokens, self._budget.cost(usage))

    def observe(self, cost: Cost) -> None:
        """Record the cost of a finished search."""
        self._largest = Cost(*map(max, self._largest, cost))
        self._observed += 1

    def rest(self, spent: Usage, open_searches: Iterable[tuple[Cost, Cost]]) -> Cost:
        """Return the budget neither spent nor granted to open searches, which are pairs of granted and spent cost."""
        pairs = list(open_searches)
        left: list[float] = []
        for unit, used in enumerate(self.cost(spent)):
            held = sum(max(0.0, granted[unit] - own[unit]) for granted, own in pairs)
            left.append(self._limit[unit] - used - held if self._limit[unit] < math.inf else math.inf)
        return Cost(*left)

    def pays(self, rest: Cost, searches: int, alone: bool) -> bool:
        """Return whether the remaining budget covers more searches; ``alone`` if none is open."""
        if rest.calls < 1 or rest.tokens <= 0 or rest.usd <= 0:
            return False
        if alone and searches == 1:
            return not self._observed or all(cost <= left for cost, left in zip(self.expected, rest, strict=True))
        return all(searches * cost <= left for cost, left in zip(self.grant, rest, strict=True))

    def exceeded(self, spent: Usage) -> str | None:
        """Return the limit of the run that was exceeded, or None."""
        return self._budget.spent(replace(spent, agent_calls=spent.agent_calls - 1), 1)

    def reason(self, spent: Usage) -> str:
        """Return why no further search starts: a limit is exhausted, or its remainder is too small."""
        rest = self.rest(spent, ())
        units = zip(("calls", "tokens", "USD"), (1, 1, 0), self._limit, rest, self.expected, strict=True)
        for name, least, limit, left, cost in units:
            if left <= 0 or left < max(cost, least):
                form = ".0f" if least else "g"
                spent_up = f"budget of {limit:{form}} {name} spent"
                more = f": {left:{form}} left, and another search takes up to {cost:{form}}"
                return spent_up + (more if left >= least and left > 0 and cost < math.inf else "")
        return "the remaining budget is too small for another search"


def _limits(budget: Budget) -> Cost:
    limits = (budget.calls, budget.tokens, budget.usd)
    return Cost(*(math.inf if limit is None else limit for limit in limits))
