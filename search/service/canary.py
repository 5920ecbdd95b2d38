"""The canary share of a service: requests that are searched again without early stops, to compare the answers."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from mas_gym.errors import ConfigError, shown
from mas_gym.policies.base import derive_seed
from search.protocol import as_planner
from search.report.canary_panel import OUTCOMES

if TYPE_CHECKING:
    from concurrent.futures import Future

    from search import Critic, Plan, Planner
    from search.engine.scheduler import Searched

_LOGGER = logging.getLogger("search")


class Canary:
    """Checks early stops by repeating a share of the requests as complete searches.

    Attributes:
        planner: The planner without early stops, adapted to the critic.
        counts: Requests of the share by outcome: not stopped early; same or different answer of the complete search;
            failed; or dropped because the service was busy.
    """

    def __init__(self, share: float, planner: Planner) -> None:
        self.planner, self._share = planner, share
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))

    def chosen(self, question: str, seed: int) -> bool:
        """Return whether a request belongs to the share, as determined by its question and seed."""
        return derive_seed(seed, question, b"canary", 0) % 2**32 < self._share * 2**32

    def compare(self, early: Plan, whole: Future[Searched]) -> None:
        """Count and log the outcome of a complete search; runs on the scheduler's thread."""
        if whole.cancelled() or whole.exception() is not None or whole.result().plan.error is not None:
            self.add("failed", stopped=early.stopped)
            return
        plan = whole.result().plan
        same = plan.answer == early.answer and (plan.answer is not None or plan.text == early.text)
        fields: dict[str, object] = {"stopped": early.stopped}
        for name, one in (("early", early), ("whole", plan)):
            fields |= {f"{name}_answer": one.answer, f"{name}_tokens": one.usage.generated_tokens}
        self.add("same" if same else "different", **fields)

    def add(self, outcome: str, **fields: object) -> None:
        """Count and log the outcome of a request of the share; `search.report.canary_panel` reads the log."""
        self.counts[outcome] += 1
        _LOGGER.info("canary request ended", extra={"fields": {"event": "canary", "outcome": outcome, **fields}})


def make_canary(share: float, planner: Planner, critic: Critic | None) -> Canary | None:
    """Return the canary of a service; None if the share is 0.

    Raises:
        ConfigError: The share is not a number from 0 to 1, or the planner never stops early.
    """
    from search.planners.registry import planner_spec, whole_search

    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"canary: expected a fraction from 0 to 1, got {shown(share)}")
    if not share:
        return None
    whole = whole_search(planner)
    if whole == planner:
        raise ConfigError(
            f"canary: {planner_spec(planner)} never stops early, so there is nothing to check; use a planner with "
            "stop=, or a cascade"
        )
    return Canary(share, as_planner(whole.for_run(critic, False)))
