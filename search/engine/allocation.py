"""Allocation of a run's budget to its searches by marginal gain.

All searches advance in increments, such as one pass or one simulation, and wait after each (`search.Continue`). Once
every search waits or has ended, the next round begins. A round resumes the searches with the largest expected gain per
unit of budget. Searches without an answer come first, and ties follow the order of the problems. A round resumes
about a quarter of the searches, so that engines receive batches. It resumes several only if their expected cost is at
most half of the remaining budget, so that the last rounds are small. The decisions depend only on the messages and
values of the searches, not on concurrency or time.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass, field, replace

from mas_gym.errors import ConfigError
from search.budget import Budget, Cost, limits_of
from search.setup import Setup
from search.usage import Usage

ROUND = 4
"""A round resumes one in this many searches."""


@dataclass
class _Share:
    """The cost and expected gain of a search.

    Attributes:
        spent: The search's cost at its last check.
        first: The cost of its first increment, which includes the first path; None before its first check.
        largest: The largest cost of a later increment.
        increments: Number of increments.
        gain: Expected gain per further increment.
    """

    spent: Cost = field(default_factory=Cost)
    first: Cost | None = None
    largest: Cost | None = None
    increments: int = 0
    gain: float = math.inf


class Allocation:
    """Divides a run's budget among searches that wait for their next increment.

    Attributes:
        budget: The budget.
    """

    def __init__(self, budget: Budget) -> None:
        """Store the limits of the run."""
        self.budget = budget
        self._limit = limits_of(budget)
        self._shares: dict[int, _Share] = {}
        self._first: Cost | None = None

    def cost(self, usage: Usage) -> Cost:
        """Convert a usage to the units of budgets."""
        return Cost(usage.agent_calls, usage.generated_tokens, self.budget.cost(usage))

    def enter(self, number: int) -> None:
        """Add a search, numbered by the position of its problem."""
        self._shares[number] = _Share()

    def pause(self, number: int, gain: float, spent: Cost) -> None:
        """Record that a search waits, with its expected gain per increment and its cost so far."""
        share = self._shares[number]
        cost = Cost(*(now - before for now, before in zip(spent, share.spent, strict=True)))
        if share.first is None:
            share.first = cost
            self._observe(cost)
        else:
            share.largest = cost if share.largest is None else Cost(*map(max, share.largest, cost))
        share.spent, share.gain = spent, gain
        share.increments += 1

    def leave(self, number: int, spent: Cost) -> None:
        """Remove a search that has ended, given its total cost."""
        share = self._shares.pop(number)
        if share.first is None and spent.calls:
            self._observe(spent)

    def _observe(self, first: Cost) -> None:
        self._first = first if self._first is None else Cost(*map(max, self._first, first))

    def next_round(self, spent: Cost) -> dict[int, Cost]:
        """Return the grants of the next round by search; empty if the remaining budget covers no increment.

        Args:
            spent: The cost of all searches so far.
        """
        rest = self._rest(spent)
        if rest.calls < 1 or rest.tokens <= 0 or rest.usd <= 0 or not self._shares:
            return {}
        if self._first is None:
            # Costs are unknown before the first search.
            return {min(self._shares): rest}
        ordered = sorted(self._shares, key=lambda number: (-self._worth(number), number))
        payable = [number for number in ordered if _covers(rest, self._expected(number))]
        if not payable:
            return {}
        least = self._worth(payable[math.ceil(len(payable) / ROUND) - 1])
        total, chosen = Cost(), list[int]()
        for number in payable:
            more = Cost(*map(sum, zip(total, self._expected(number), strict=True)))
            if chosen and (self._worth(number) < least or not _covers(rest, Cost(*(2 * cost for cost in more)))):
                break
            total = more
            chosen.append(number)
        return {number: _part(rest, self._expected(number), total, len(chosen)) for number in chosen}

    def limit(self, number: int, grant: Cost) -> Budget:
        """Return the limits of a search with a further ``grant``."""
        calls, tokens, usd = (own + more for own, more in zip(self._shares[number].spent, grant, strict=True))
        return replace(
            self.budget,
            calls=None if math.isinf(calls) else max(1, math.floor(calls)),
            tokens=None if math.isinf(tokens) else max(1, math.floor(tokens)),
            usd=None if math.isinf(usd) else usd,
        )

    def reason(self, number: int) -> str:
        """Return the reason for ending a search that waits."""
        return f"run budget of {self} allocated, expected gain {self._shares[number].gain:.2g} per increment"

    def shortage(self, spent: Cost) -> str:
        """Return the reason for not starting searches."""
        left = ", ".join(f"{part:{form}} {unit}" for unit, form, part in self._stated(self._rest(spent)))
        return f"budget of {self} spent: the remaining {left} are too few for another search"

    def __str__(self) -> str:
        """Return the limits."""
        return " and ".join(f"{part:{form}} {unit}" for unit, form, part in self._stated(self._limit))

    def _stated(self, cost: Cost) -> list[tuple[str, str, float]]:
        units = zip(("calls", "tokens", "USD"), (",.0f", ",.0f", "g"), cost, self._limit, strict=True)
        return [(unit, form, part) for unit, form, part, limit in units if limit < math.inf]

    def _rest(self, spent: Cost) -> Cost:
        return Cost(*(limit - used for limit, used in zip(self._limit, spent, strict=True)))

    def _worth(self, number: int) -> float:
        """Return the expected gain per unit of budget; infinite for a search without an answer."""
        share = self._shares[number]
        if share.first is None:
            return math.inf
        price = max(used / limit for used, limit in zip(share.spent, self._limit, strict=True)) / share.increments
        return share.gain / price if price > 0 else math.inf

    def _expected(self, number: int) -> Cost:
        """Return the expected cost of a search's next increment."""
        share = self._shares[number]
        known = share.largest or share.first or self._first
        assert known is not None
        return known


def _covers(rest: Cost, cost: Cost) -> bool:
    return all(part <= left for part, left in zip(cost, rest, strict=True))


def _part(rest: Cost, own: Cost, total: Cost, searches: int) -> Cost:
    """Return a search's part of the remaining budget, in proportion to its expected cost."""
    return Cost(
        *(
            left if math.isinf(left) else left * (mine / every if every else 1 / searches)
            for left, mine, every in zip(rest, own, total, strict=True)
        )
    )


def check_allocated(budget: Budget, each: Budget) -> None:
    """Check the budgets of a run and of each search.

    Raises:
        ConfigError: The run has no budget to allocate, or a limit depends on the clock.
    """
    if min(limits_of(budget)) == math.inf:
        raise ConfigError("allocate: expected a run budget of calls, tokens or usd, such as tokens=50000, got none")
    if budget.seconds is not None or each.seconds is not None:
        raise ConfigError("allocate: expected a budget without seconds, because seconds depend on the machine's speed")


def check_allocation(setup: Setup, problems: object, budget: Budget) -> None:
    """Check that a run can allocate its budget.

    Raises:
        ConfigError: As for `check_allocated`, or prices depend on the clock, or the number of problems is unknown.
    """
    check_allocated(budget, setup.budget)
    rate = setup.rate
    if budget.usd is not None and rate is not None and any(part and part.second for part in (rate.agents, rate.critic)):
        raise ConfigError("allocate: expected no price per second with a budget in usd, got one")
    if not isinstance(problems, Sized):
        raise ConfigError("allocate: expected a sized collection of problems, such as a list, got an iterator")
