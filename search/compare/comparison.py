"""Comparison of planners and critics on the same problems and seeds, newly run or read from a store."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Unpack

from mas_gym.errors import ConfigError
from mas_gym.internal.text import one_line
from mas_gym.tasks.base import Problem, Task
from search.compare.comparison_runs import Row, Start, measure, named_critics, named_planners, pair, start_here
from search.compare.cost_matching import Match, match_size
from search.progress import Progress
from search.protocol import Critic, Planner
from search.results.summary import find_row, summarize
from search.results.table import CALIBRATION_PROBLEMS, CalibratedSize, Comparison
from search.runs import CompareSettings, load_spec, shows
from search.setup import RunSpec


@shows(CompareSettings)
def compare(
    planners: str | Planner | Mapping[str, str | Planner] | Iterable[str | Planner],
    problems: Iterable[Problem] | None = None,
    *,
    critics: str | Critic | Mapping[str, Critic] | Iterable[str | Critic] = (),
    seeds: Iterable[int] = (42,),
    baseline: str = "",
    match: str | None = None,
    dev: Iterable[Problem] | None = None,
    progress: bool | Callable[[str, int, Progress], None] = False,
    **settings: Unpack[CompareSettings],
) -> Comparison:
    """Compare planners and critics on the same problems and seeds.

    Each planner that needs a critic runs with every critic; the others run once. A failed search counts as wrong.

    Args:
        planners: Planners or their short forms, or a mapping from custom names.
        problems: A task, or any problems with distinct ids; by default those of ``recorded``.
        critics: Critics or their names, or a mapping from custom names.
        seeds: Run seeds; accuracies are averaged over them per problem.
        baseline: The row to compare the others with, by its label or its planner; the first by default.
        match: ``"tokens=650"``, ``"calls=40"`` or, with prices, ``"usd=0.002"``: choose each planner's size
            (`search.Planner.size_setting`) so that it spends that much per problem. A row is left out, with a warning,
            if all its calibration searches fail.
        dev: The problems for choosing sizes; by default the first 30 compared problems. Their answers are not used.
        progress: True for a bar per run; or a function of row label, seed and `Progress`.
        settings: The settings of every run (one row with one seed), as for `search.run`. Each seed sets the order of
            the messages of a recorded run, and prices add the column USD. With ``match`` and a store, calibration
            searches are stored in a second file next to it, such as ``runs.calibration.db``.

    Raises:
        ConfigError: No planner can run with these critics, or an argument is out of range.
        MASGymError: A run ended early, for example if an engine is unavailable; finished searches are in the store.
    """
    if not (chosen := list(dict.fromkeys(seeds))):
        raise ConfigError("expected at least one seed, got none")
    rows = pair(named_planners(planners), named_critics(critics))
    spec = replace(load_spec(problems, takes=CompareSettings, **settings), seed=chosen[0])
    if not isinstance(spec.problems, Task):
        spec = replace(spec, problems=list(spec.problems))
    calibrated: list[CalibratedSize] = []
    if match is not None:
        sample = islice(spec.problems, CALIBRATION_PROBLEMS) if dev is None else dev
        target = Match.read(match, spec.budget.prices is not None)
        pairs = matched(rows, spec, target, sample, lambda reason: warnings.warn(reason, stacklevel=3))
        rows, baseline = [new for _, new, _ in pairs], renamed(baseline, pairs)
        calibrated = [part for *_, part in pairs]
    outcomes, stop = measure(rows, spec, chosen, listen=progress)
    if stop is not None:
        raise stop
    table = tuple(summarize(outcomes))
    name = find_row(table, baseline).label if table else ""
    facts = {"problems": table[0].problems if table else 0, "seeds": chosen, "match": match, "baseline": name}
    return Comparison(table, tuple(outcomes), name, "", facts, tuple(calibrated))


def matched(
    rows: Sequence[Row],
    spec: RunSpec,
    match: Match,
    problems: Iterable[Problem],
    refused: Callable[[str], None] = lambda reason: None,
    start: Start = start_here,
) -> list[tuple[Row, Row, CalibratedSize]]:
    """Change the size of each row to match a cost; return the old row, the new row and the new size.

    ``refused`` is called with the reason for each skipped row.

    Raises:
        ConfigError: No row is left.
    """
    chosen = list(problems)
    found: list[tuple[Row, Row, CalibratedSize]] = []
    reasons: list[str] = []
    for row in rows:
        try:
            found.append((row, *match_size(row, spec, match, chosen, start)))
        except ConfigError as error:
            reasons.append(f"{one_line(row.label)} skipped: {error}")
    if not found:
        raise ConfigError("; ".join(reasons))
    for reason in reasons:
        refused(reason)
    return found


def renamed(name: str, pairs: Iterable[tuple[Row, Row, CalibratedSize]]) -> str:
    """Return a row's label or planner after resizing; a name that matches no row is returned unchanged."""
    for old, new, _ in pairs:
        if name in (old.label, old.name):
            return new.label if name == old.label else new.name
    return name
