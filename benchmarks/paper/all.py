"""Every table, one after another; an interrupted run resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.paper import (
    agents,
    backbones,
    by_agent,
    confidence,
    credit,
    difficulty,
    dylan,
    frontier,
    graphs,
    heads,
    main,
    single,
    tasks,
    trainings,
    views,
    wordings,
)
from benchmarks.paper.lab import Lab, check, note, or_exit, publish
from benchmarks.paper.options import Options, read
from benchmarks.paper.oracle import KNOWN
from benchmarks.paper.page import Page
from benchmarks.tiny.stories import GENERATED

TABLES: Mapping[str, Callable[[Lab], Page]] = MappingProxyType(
    {
        "main": main.run,
        "frontier": frontier.run,
        "single": single.run,
        "credit": credit.run,
        "confidence": confidence.run,
        "by_agent": by_agent.run,
        "heads": heads.run,
        "views": views.run,
        "trainings": trainings.run,
        "backbones": backbones.run,
        "difficulty": difficulty.run,
        "graphs": graphs.run,
        "dylan": dylan.run,
        "tasks": tasks.run,
        "wordings": wordings.run,
        "agents": agents.run,
    }
)
"""In the order in which they run; tables that need a second task or model come last."""

RPSV = ("single", "graphs", "dylan")
"""Tables that compare the system of the paper's mathematics tasks with others."""

MINIATURE = ("frontier", "backbones")
"""Tables that would take as long as all the others at full size."""

ARITHMETIC = ("difficulty", "wordings")
"""Tables of the generated stories alone, which have several difficulties and two wordings."""


class Spent(NamedTuple):
    """The cost of a table in seconds: elapsed time and CPU time of this process."""

    wall: float
    cpu: float


def chosen(lab: Lab) -> list[str]:
    """Return the selected tables that apply to the task."""
    options = lab.options
    names: list[str] = []
    for name in TABLES:
        if options.tables and name not in options.tables:
            continue
        if (
            (name in ("credit", "by_agent", "confidence") and options.task not in KNOWN)
            or (name in ARITHMETIC and options.task not in ("arithmetic", *GENERATED))
            or (name in RPSV and lab.home.mas != "rpsv")
            or (name in MINIATURE and not options.miniature)
        ):
            note(f"{name}: not for {options.task} with {lab.home.mas}")
            continue
        if name == "agents" and options.policy != "tiny" and not options.other_policy:
            note("agents: left out; name other agents with --other-policy")
            continue
        names.append(name)
    return names


def make(options: Options, done: Callable[[str, Spent], None] = lambda name, spent: None) -> list[str]:
    """Run every table that applies to the task; return their names.

    Args:
        options: The run.
        done: Called with each finished table and its cost.
    """
    lab = Lab(options)
    names = chosen(lab)
    check(lab, [lab.home, *([lab.partner] if "tasks" in names else [])])
    for name in names:
        started, before = time.perf_counter(), time.process_time()
        publish(lab, TABLES[name](lab))
        spent = Spent(time.perf_counter() - started, time.process_time() - before)
        note(f"{name}: {spent.wall / 60:.1f} minutes, {spent.cpu / 60:.1f} CPU minutes")
        done(name, spent)
    return names


if __name__ == "__main__":
    with or_exit():
        make(read("python -m benchmarks.paper.all", __doc__ or "", tables=tuple(TABLES)))
