"""`Searcher`: what a run searches with, and the run's limits: the scheduler of this process, or a fleet of actors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import NamedTuple

from mas_gym.errors import SearchError
from mas_gym.tasks.base import Problem
from search.budget import Allowance, Budget, Cost
from search.plan import Plan
from search.sampling import SampleOrigin
from search.usage import Usage


class DroppedError(SearchError):
    """A search was dropped before its end."""


class Searched(NamedTuple):
    """A finished search: its plan, the origin of each message, and the exception that made it fail."""

    problem: Problem
    plan: Plan
    samples: dict[tuple[bytes, str], SampleOrigin]
    failure: BaseException | None


class Searcher(ABC):
    """Searches problems on the running event loop, within the limits of a run.

    Attributes:
        concurrency: Maximum number of open searches.
        stopped: Reason for accepting no more problems; None while problems are accepted.
        closed: Whether no more problems are accepted.
        earlier: The cost of the run in earlier processes, which counts towards its budget.
    """

    def __init__(self, concurrency: int, run_budget: Budget, budget: Budget) -> None:
        """Start without searches; the budgets are those of the run and of each search."""
        self.concurrency = concurrency
        self.stopped: str | None = None
        self.closed = False
        self.earlier = Usage()
        self._started = perf_counter()
        self.limit(run_budget, budget)

    def limit(self, run_budget: Budget, budget: Budget) -> None:
        """Set the limits of the run and of each search, before the first search."""
        self._budget, self._allowance = run_budget, Allowance(run_budget, budget)

    @property
    @abstractmethod
    def usage(self) -> Usage:
        """The cost of all searches so far, including failed and dropped ones."""

    @property
    @abstractmethod
    def calls(self) -> int:
        """Agent calls made so far, including those without a reply."""

    @property
    @abstractmethod
    def active(self) -> int:
        """Number of searches in progress."""

    @property
    @abstractmethod
    def spent(self) -> Usage:
        """The cost that counts towards the run's budget; open searches may be covered by their grants instead."""

    @abstractmethod
    def rest(self) -> Cost:
        """Return the budget that is neither spent nor granted to open searches."""

    @abstractmethod
    async def search(self, problem: Problem) -> Searched:
        """Search a problem. Raises `DroppedError` if the search was dropped, and the errors of engines."""

    @abstractmethod
    async def close(self) -> None:
        """Drop open searches and release the engines; safe to call twice."""

    def stop(self, reason: str) -> None:
        """Accept no more problems, drop the open searches, and record the reason."""
        self.stopped, self.closed = self.stopped or reason, True

    def observe(self, usage: Usage) -> None:
        """Update the expected cost of a search from a finished one."""
        self._allowance.observe(self._allowance.cost(usage))

    def shortage(self, starting: int) -> str | None:
        """Return why the budget covers no further search beside the open and ``starting`` ones; None if it does."""
        alone = not self.active and not starting
        if self._allowance.limited and not self._allowance.pays(self.rest(), starting + 1, alone):
            return self._allowance.reason(self.spent)
        return None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the run's time limit; None without a limit."""
        limit = self._budget.seconds
        return None if limit is None else limit - self.earlier.seconds - (perf_counter() - self._started)

    def out_of_time(self) -> None:
        """Stop because of the run's time limit."""
        self.stop(f"budget of {self._budget.seconds:g} seconds spent")
