"""What a run logs: records of the logger ``search``, each with its facts as ``record.fields``.

Failed searches are warnings; the rest is of level INFO and costs nothing where nobody listens.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from search.engine.progress import Progress
from search.engine.setup import Setup
from search.plan import Plan

logger = logging.getLogger("search")


def run_started(setup: Setup, total: int | None, **facts: Any) -> None:
    """Log what a run is."""
    if logger.isEnabledFor(logging.INFO):
        from search.registry import planner_spec

        fields = {
            "event": "run started",
            "planner": planner_spec(setup.planner),
            "mas": setup.dynamics.mas.name,
            "critic": None if setup.critic is None else setup.critic.name,
            "seed": setup.seed,
            "training": setup.training,
            "problems": total,
            **facts,
        }
        logger.info("run started: %s, seed %d", fields["planner"], setup.seed, extra={"fields": fields})


def search_ended(plan: Plan, fresh: bool) -> None:
    """Log what a search came to; ``fresh`` is False if it was read from the store."""
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
            "usage": dataclasses.asdict(plan.usage),
        }
        words = ("search of %s failed: %s", plan.problem_id, plan.error) if plan.error is not None else None
        logger.log(level, *(words or ("search of %s ended", plan.problem_id)), extra={"fields": fields})


def run_ended(progress: Progress) -> None:
    """Log what a run came to."""
    if logger.isEnabledFor(logging.INFO):
        fields = {"event": "run ended", **dataclasses.asdict(progress)}
        logger.info("run ended: %s", progress, extra={"fields": fields})
