"""Logging, storage and progress updates of runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sized
from dataclasses import asdict, replace
from time import perf_counter

from mas_gym.internal.json_types import JSONMapping
from mas_gym.tasks.base import Problem
from search.costs import Usage
from search.models.base import SampleOrigin
from search.plan import Plan
from search.planners.registry import planner_spec
from search.progress import Listener, Progress
from search.setup import Setup
from search.store.run_writer import RunWriter

logger = logging.getLogger("search")

UPDATE_SECONDS = 0.25
"""Maximum interval between progress updates, in seconds; a single search can take minutes."""


class Journal:
    """Updates the store, the log and the progress display of one run.

    Attributes:
        earlier: The cost of the run in earlier processes.
        closed: Whether the run has ended.
    """

    def __init__(
        self,
        setup: Setup,
        writer: RunWriter | None = None,
        listener: Listener | None = None,
        **facts: object,
    ) -> None:
        """Log the start of a run.

        Args:
            setup: The run's settings.
            writer: Stores finished searches.
            listener: Displays the progress.
            **facts: More fields for the log.
        """
        self._writer, self._listener, self._setup = writer, listener, setup
        total = len(setup.problems) if isinstance(setup.problems, Sized) else None
        self._progress = Progress(total=total)
        self._updated = perf_counter()
        self.earlier = writer.earlier if writer is not None else Usage()
        self.closed = False
        self._saved = Usage()
        _log_start(setup, total, facts)

    def lookup(self, problem: Problem) -> Plan | None:
        """Return the stored plan of a problem, or None."""
        stored = self._writer.load(problem) if self._writer is not None else None
        if stored is not None:
            self._count(stored, fresh=False)
        return stored

    def ended(self, problem: Problem, plan: Plan, origins: Mapping[tuple[bytes, str], SampleOrigin]) -> None:
        """Record a search that has just ended."""
        # Store first, so that no finished search is lost if the program ends next.
        if self._writer is not None:
            self._writer.save(problem, plan, origins)
            self._saved += plan.usage
        self._count(plan, fresh=True)

    def cost(self, usage: Usage) -> float | None:
        """Return a cost in USD at the run's prices; None without prices."""
        budget = self._setup.budget
        return None if budget.rate is None else budget.cost(usage)

    def _count(self, plan: Plan, fresh: bool) -> None:
        now = self._progress
        self._progress = replace(
            now,
            done=now.done + 1,
            correct=now.correct + bool(plan.correct),
            failed=now.failed + (plan.error is not None),
            stored=now.stored + (not fresh),
        )
        _log_search(plan, fresh)

    @property
    def due(self) -> bool:
        """Whether a progress update is due."""
        return self._listener is not None and perf_counter() - self._updated > UPDATE_SECONDS

    @property
    def patience(self) -> float | None:
        """Maximum wait until the next progress update, in seconds; None for no limit."""
        return None if self._listener is None else UPDATE_SECONDS

    def update(self, usage: Usage, open_searches: int) -> None:
        """Show progress."""
        self._updated = perf_counter()
        if self._listener is not None:
            self._listener(replace(self._progress, usage=usage, open=open_searches), False)

    def close(self, usage: Usage, calls: int, stopped: str | None) -> None:
        """Close the store and log how the run ended; safe to call twice.

        Args:
            usage: Total cost, including dropped searches.
            calls: Agent calls made, including those without a reply.
            stopped: Reason for stopping early; None if the run did not stop early.
        """
        if self.closed:
            return
        self.closed = True
        if self._writer is not None:
            self._writer.spend(replace(usage, agent_calls=max(calls, usage.agent_calls)) - self._saved)
            self._writer.close()
        last = replace(self._progress, usage=usage, stopped=stopped)
        _log_end(last)
        if self._listener is not None:
            self._listener(last, True)


def _log_start(setup: Setup, total: int | None, facts: JSONMapping) -> None:
    if logger.isEnabledFor(logging.INFO):
        fields = {
            "event": "run started",
            "planner": planner_spec(setup.planner),
            "mas": setup.dynamics.mas.name,
            "critic": None if setup.critic is None else setup.critic.name,
            "seed": setup.seed,
            "training": setup.training,
            "problems": total,
            "policy": setup.policy.name,
            **facts,
        }
        logger.info("run started: %s, seed %d", fields["planner"], setup.seed, extra={"fields": fields})


def _log_search(plan: Plan, fresh: bool) -> None:
    level = logging.INFO if plan.error is None else logging.WARNING
    if logger.isEnabledFor(level):
        fields = {
            "event": "search ended",
            "problem": plan.problem_id,
            "answer": plan.answer,
            "correct": plan.correct,
            "error": plan.error,
            "stopped": plan.stopped,
            "stored": not fresh,
            "usage": plan.usage.to_dict(),
        }
        words = ("search of %s failed: %s", plan.problem_id, plan.error) if plan.error is not None else None
        extra = {"fields": fields, "details": plan.error_details}
        logger.log(level, *(words or ("search of %s ended", plan.problem_id)), extra=extra)


def _log_end(progress: Progress) -> None:
    if logger.isEnabledFor(logging.INFO):
        fields = {"event": "run ended", **asdict(progress)}
        logger.info("run ended: %s", progress, extra={"fields": fields})
