"""Comparison of planners and critics on the same problems and seeds, newly run or read from a store."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from mas_gym.errors import ConfigError
from mas_gym.internal.text import one_line
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.systems.graph import MAS
from mas_gym.tasks.base import Problem, as_task, is_task
from search.compare.comparison_runs import Bench, Row, measure, named_critics, named_planners, pair
from search.compare.cost_matching import Match, calibrate
from search.prices import PricesSource, as_prices
from search.protocol import Critic, Planner
from search.results.summary import find_row, summarize
from search.results.table import CalibratedSize
from search.setup import FromConfig, ProgramSource, read_system, resolve_policy
from search.store import Recorded
from search.store.recorded_runs import as_recorded

if TYPE_CHECKING:
    from search.budget import Budget
    from search.progress import Progress
    from search.sampling import Sampling

from search.results.table import CALIBRATION_PROBLEMS, Comparison


def compare(
    planners: str | Planner | Mapping[str, str | Planner] | Iterable[str | Planner],
    problems: Iterable[Problem] | None = None,
    *,
    recorded: Recorded | str | os.PathLike[str] | None = None,
    mas: MAS | str | None = None,
    program: ProgramSource | None = None,
    policy: Policy | AsyncPolicy | FromConfig | None = None,
    critics: str | Critic | Mapping[str, Critic] | Iterable[str | Critic] = (),
    seeds: Iterable[int] = (42,),
    baseline: str = "",
    match: str | None = None,
    dev: Iterable[Problem] | None = None,
    store: str | Path | None = None,
    concurrency: int = 64,
    sampling: Sampling | None = None,
    budget: Budget | None = None,
    run_budget: Budget | None = None,
    prices: PricesSource | None = None,
    progress: bool | Callable[[str, int, Progress], None] = False,
) -> Comparison:
    """Compare planners and critics on the same problems and seeds.

    Each planner that needs a critic runs with every critic; the others run once. A failed search counts as wrong.

    Args:
        planners: Planners or their short forms, or a mapping from custom names.
        problems: A task, or any problems with distinct ids; by default those of ``recorded``.
        recorded: A recorded run to search in place of a system and a policy, as for `search.run`; each seed
            sets the order of its messages.
        mas: The system, or an argument of `mas_gym.load_mas`.
        program: An agent program in place of the system, as for `search.run`.
        policy: Writes the messages, as for `search.run`.
        critics: Critics or their names, or a mapping from custom names.
        seeds: Run seeds; accuracies are averaged over them per problem.
        baseline: The row to compare the others with, by its label or its planner; the first by default.
        match: ``"tokens=650"``, ``"calls=40"`` or, with prices, ``"usd=0.002"``: choose each planner's size
            (`search.Planner.size_setting`) so that it spends that much per problem. A row is left out, with a warning,
            if all its calibration searches fail.
        dev: The problems for choosing sizes; by default the first 30 compared problems. Their answers are not used.
        store: Stores finished searches; repeating the call reads them back. With ``match``, calibration searches are
            stored in a second file next to it, such as ``runs.calibration.db``.
        concurrency: Maximum number of open searches; results do not depend on it.
        sampling: How agents sample; the paper's settings by default.
        budget: Limits of each search.
        run_budget: Limits of each run (one row with one seed).
        prices: Prices of the models, as for `search.run`; they add the column USD.
        progress: True for a bar per run; or a function of row label, seed and `Progress`.

    Raises:
        ConfigError: No planner can run with these critics, or an argument is out of range.
        MASGymError: A run ended early, for example if an engine is unavailable; finished searches are in the store.
    """
    recording = None if recorded is None else as_recorded(recorded)
    source = recording if problems is None else problems
    if source is None:
        raise ConfigError("expected problems, or recorded= with a recorded run, got neither")
    items = as_task(source) if is_task(source) else list(source)
    if not (chosen := list(dict.fromkeys(seeds))):
        raise ConfigError("expected at least one seed, got none")
    rows = pair(named_planners(planners), named_critics(critics))
    system, loaded = (recording.mas, None) if recording is not None else read_system(mas, program)
    writer = None if recording is not None and policy is None else resolve_policy(system, policy)
    bench = Bench(items, system, writer, chosen, concurrency, store, None, budget, run_budget, sampling, program=loaded)
    bench = replace(bench, recorded=recording, prices=None if prices is None else as_prices(prices))
    calibrated: list[CalibratedSize] = []
    if match is not None:
        sample = islice(items, CALIBRATION_PROBLEMS) if dev is None else dev
        target = Match.read(match, prices is not None)
        pairs = matched(rows, bench, target, sample, lambda reason: warnings.warn(reason, stacklevel=3))
        rows, baseline = [new for _, new, _ in pairs], renamed(baseline, pairs)
        calibrated = [part for *_, part in pairs]
    listen = (lambda row, seed, now: progress(row.label, seed, now)) if callable(progress) else progress
    outcomes, stop = measure(rows, bench, listen=listen)
    if stop is not None:
        raise stop
    table = tuple(summarize(outcomes))
    name = find_row(table, baseline).label if table else ""
    facts = {"problems": table[0].problems if table else 0, "seeds": chosen, "match": match, "baseline": name}
    return Comparison(table, tuple(outcomes), name, "", facts, tuple(calibrated))


def matched(
    rows: Sequence[Row],
    bench: Bench,
    match: Match,
    problems: Iterable[Problem],
    refused: Callable[[str], None] = lambda reason: None,
) -> list[tuple[Row, Row, CalibratedSize]]:
    """Resize every row to meet a cost; return each row before and after resizing, and its calibration.

    Args:
        rows: The rows.
        bench: The shared settings.
        match: The cost.
        problems: The calibration problems.
        refused: Called with the reason for each row that is skipped because it cannot be sized.

    Raises:
        ConfigError: No row is left.
    """
    chosen = list(problems)
    found: list[tuple[Row, Row, CalibratedSize]] = []
    reasons: list[str] = []
    for row in rows:
        try:
            found.append((row, *calibrate(row, bench, match, chosen)))
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
