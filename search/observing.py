"""Observers of searches, calls and scores, such as traces; a scheduler takes the current observer when it starts.

Each method is a context manager that yields a function to call with the result. The context ends with an exception if
there is no result. Contexts nest in the task of their search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mas_gym.critics import Critic, ScoringContext
from mas_gym.policies.base import SamplingRequest
from mas_gym.tasks.base import Problem
from search.setup import Setup

Observed = AbstractContextManager[Callable[..., None]]


def _ignore(*result: object) -> None: ...


class Observer:
    """An observer that records nothing; base class of the others."""

    def search(self, setup: Setup, problem: Problem) -> Observed:
        """Observe a search; the result is its plan and the exception that made it fail."""
        return nullcontext(_ignore)

    def call(self, request: SamplingRequest) -> Observed:
        """Observe a request to the policy; the result is the reply."""
        return nullcontext(_ignore)

    def scores(self, critic: Critic, contexts: Sequence[ScoringContext]) -> Observed:
        """Observe the scoring of states; the result is the scores."""
        return nullcontext(_ignore)


def _unobserved(policy: str) -> Observer:
    return Observer()


_current: Callable[[str], Observer] = _unobserved


def is_observed() -> bool:
    """Return whether new schedulers are observed."""
    return _current is not _unobserved


def observer(policy: str) -> Observer:
    """Return an observer for a new scheduler with a policy of this name."""
    return _current(policy)


@contextmanager
def observed(make: Callable[[str], Observer]) -> Iterator[None]:
    """Use another observer in all schedulers that start inside this context in this process."""
    global _current
    before, _current = _current, make
    try:
        yield
    finally:
        _current = before
