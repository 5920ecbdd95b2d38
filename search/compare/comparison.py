"""Comparing planners and critics on the same problems and seeds: `compare`, its table, and that of stored runs."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mas_gym.errors import ConfigError, MissingDependencyError
from mas_gym.graph import MAS
from mas_gym.render import one_line
from search.compare import display
from search.compare.bench import (
    Arm,
    Bench,
    Calibrated,
    Match,
    calibrate,
    measure,
    named_critics,
    named_planners,
    outcome_of,
    pair,
)
from search.compare.outcomes import Difference, Outcome, ResultRow, differences, find_row, summarise
from search.protocol import Critic, Planner
from search.setup import ProgramSource, read_system
from search.store import RunInfo, Store

if TYPE_CHECKING:
    import pandas

    from mas_gym.policies import AsyncPolicy, Policy
    from mas_gym.tasks.base import Problem
    from search.engine.journal import Progress
    from search.setup import Budget, Sampling


CALIBRATION_PROBLEMS = 30
"""Problems on which sizes are chosen by default; with fewer, tables and `Comparison` warn."""
_WIDTH = 120


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`: one row per planner and critic.

    ``print(table)`` shows rows, intervals, differences and failures.

    Attributes:
        rows: The rows, in the order of planners and critics.
        outcomes: The searches behind them.
        baseline: The label of the row that the others are compared with.
        title: The line above the table.
        meta: JSON-able facts about the run.
        calibrated: With ``match``, the size of each planner and what it spent on the calibration problems.
    """

    rows: tuple[ResultRow, ...]
    outcomes: tuple[Outcome, ...] = ()
    baseline: str = ""
    title: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    calibrated: tuple[Calibrated, ...] = ()

    def differences(self) -> dict[str, Difference]:
        """Return the paired difference in Hit@1 of each other row to the baseline, by label."""
        return {row.label: gap for row, _, gap in differences(self.rows, self.baseline)} if self.rows else {}

    def __getitem__(self, label: str) -> ResultRow:
        """Return the row with a label such as ``"mcts:10,3 + masprm"``, or the only one of a planner."""
        if not self.rows:
            raise ConfigError("the comparison has no rows: no search has ended")
        return find_row(self.rows, label)

    def to_markdown(self) -> str:
        """Return the table as GitHub Markdown."""
        return display.to_markdown(self.rows)

    def to_latex(self) -> str:
        """Return the table in LaTeX, for the package booktabs."""
        return display.to_latex(self.rows, self.title)

    def to_csv(self) -> str:
        """Return one line per row, with a header; shares in [0, 1]."""
        return display.to_csv(self.rows)

    def to_json(self) -> str:
        """Return rows, per-problem shares, differences and facts as one JSON document."""
        return display.to_json(self.rows, self.meta, self.baseline)

    def to_pandas(self) -> pandas.DataFrame:
        """Return one line per row, with the difference to the baseline and its interval.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingDependencyError("to_pandas needs pandas; install it with: pip install pandas") from error
        gaps = self.differences()
        lines = []
        for row in self.rows:
            gap = gaps.get(row.label)
            ends = ("difference", "difference_low", "difference_high")
            lines.append({**row.to_dict(), **dict(zip(ends, gap[:3] if gap else (None,) * 3, strict=True))})
        return pandas.DataFrame(lines)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw accuracy against tokens, with the frontier of the best rows, to a file (png, svg, pdf).

        Raises:
            ConfigError: The file suffix is not a known format, or no search has ended.
            MissingDependencyError: matplotlib is not installed.
        """
        from search.compare.display import save_tradeoff

        return save_tradeoff(self.rows, Path(path), self.title)

    def show(self, width: int = _WIDTH) -> Any:
        """Return the whole result as a renderable of rich."""
        return display.report(self.rows, self.title, width, self.baseline)

    def __str__(self) -> str:
        """Return what ``print`` shows."""
        from rich.console import Console

        # In a notebook rich would display the table instead of writing it.
        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_jupyter=False)
        console.print(self.show())
        lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
        if self.calibrated:
            lines.append(calibrated_on(self.calibrated[0].problems))
        for part in self.calibrated:
            size = f"{part.setting}={part.size}" if part.setting else "no size to change"
            lines.append(f"{one_line(part.label)}: {size}, {part.spent:,.1f} per problem in calibration")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return one line: each row's label and Hit@1."""
        rows = "; ".join(f"{one_line(row.label)} {100 * row.hits[1].mean:.1f}" for row in self.rows)
        return f"<Comparison of {len(self.rows)} rows: {rows}>"

    def _repr_html_(self) -> str:
        return display.to_html(self.rows, self.title, self.baseline)


def compare(
    planners: str | Planner | Mapping[str, str | Planner] | Iterable[str | Planner],
    problems: Iterable[Problem],
    *,
    mas: MAS | str | None = None,
    program: ProgramSource | None = None,
    policy: Policy | AsyncPolicy | None = None,
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
    progress: bool | Callable[[str, int, Progress], None] = False,
) -> Comparison:
    """Compare planners and critics on the same problems and seeds.

    Each planner that needs a critic runs with every critic; the others run once. A failed search counts as wrong.

    Args:
        planners: Planners or their short forms, or a mapping from your own names.
        problems: A task, or any problems with distinct ids.
        mas: The system, or what `mas_gym.load_mas` takes.
        program: An agent program in place of the system, as for `search.run`.
        policy: Writes the messages; by default what the MAS names under ``policies``.
        critics: Critics or their names, or a mapping from your own names.
        seeds: Run seeds; accuracies are averaged over them per problem.
        baseline: The row to compare the others with, by its label or its planner; the first by default.
        match: ``"tokens=650"`` or ``"calls=40"``: choose each planner's size (`search.Planner.size_setting`), so that
            it spends that much per problem. A row whose calibration searches all fail is left out, with a warning.
        dev: The problems to find sizes on; by default the first 30 compared. Their answers are not used.
        store: Keeps finished searches; the same call reads them back. With ``match``, calibration searches are kept in
            a second file beside it, such as ``runs.calibration.db``.
        concurrency: Open searches at once; results do not depend on it.
        sampling: How agents sample; the paper's settings by default.
        budget: Limits of each search.
        run_budget: Limits of each run, of one row with one seed.
        progress: True for a bar per run; or a function of row label, seed and `Progress`.

    Raises:
        ConfigError: No planner can run with these critics, or an argument is out of its range.
        MASGymError: A run ended early, such as when an engine is gone; finished searches are in the store.
    """
    items = problems if hasattr(problems, "grade") else list(problems)
    if not (chosen := list(dict.fromkeys(seeds))):
        raise ConfigError("expected at least one seed, got none")
    guides: Any = [critics] if isinstance(critics, str) or hasattr(critics, "score") else critics
    arms = pair(named_planners(planners), named_critics(guides))
    system, loaded = read_system(mas, program)
    bench = Bench(items, system, policy, chosen, concurrency, store, None, budget, run_budget, sampling, program=loaded)
    calibrated: list[Calibrated] = []
    if match is not None:
        sample = islice(items, CALIBRATION_PROBLEMS) if dev is None else dev
        pairs = matched(arms, bench, Match.read(match), sample, lambda reason: warnings.warn(reason, stacklevel=3))
        arms, baseline = [new for _, new, _ in pairs], renamed(baseline, pairs)
        calibrated = [part for *_, part in pairs]
    listen = (lambda arm, seed, now: progress(arm.label, seed, now)) if callable(progress) else progress
    outcomes, stop = measure(arms, bench, listen=listen)
    return _table(outcomes, stop, chosen, match, baseline, calibrated)


def _table(
    outcomes: Sequence[Outcome],
    stop: BaseException | None,
    chosen: Sequence[int],
    match: str | None,
    baseline: str,
    calibrated: list[Calibrated],
) -> Comparison:
    if stop is not None:
        raise stop
    rows = tuple(summarise(outcomes))
    name = find_row(rows, baseline).label if rows else ""
    facts = {"problems": rows[0].problems if rows else 0, "seeds": chosen, "match": match, "baseline": name}
    return Comparison(rows, tuple(outcomes), name, "", facts, tuple(calibrated))


def matched(
    arms: Sequence[Arm],
    bench: Bench,
    match: Match,
    problems: Iterable[Problem],
    refused: Callable[[str], None] = lambda reason: None,
) -> list[tuple[Arm, Arm, Calibrated]]:
    """Give every arm the size that meets a cost; return each arm before and after, and what it spent.

    Args:
        arms: The arms.
        bench: What they have in common.
        match: The cost.
        problems: The calibration problems.
        refused: Called with the reason for each arm that is left out because it cannot be sized.

    Raises:
        ConfigError: No arm is left.
    """
    chosen = list(problems)
    found: list[tuple[Arm, Arm, Calibrated]] = []
    reasons: list[str] = []
    for arm in arms:
        try:
            found.append((arm, *calibrate(arm, bench, match, chosen)))
        except ConfigError as error:
            reasons.append(f"{one_line(arm.label)} left out: {error}")
    if not found:
        raise ConfigError("; ".join(reasons))
    for reason in reasons:
        refused(reason)
    return found


def renamed(name: str, pairs: Iterable[tuple[Arm, Arm, Calibrated]]) -> str:
    """Return the label after resizing of a row, which is named by its label or its planner."""
    for old, new, _ in pairs:
        if name in (old.label, old.name):
            return new.label if name == old.label else new.name
    return name


def calibrated_on(problems: int) -> str:
    """Return the line that states on how many problems sizes were chosen, with a warning if they are few."""
    few = f"; with fewer than {CALIBRATION_PROBLEMS} the costs are uncertain" if problems < CALIBRATION_PROBLEMS else ""
    return f"sizes chosen on {problems} problems{few}"


_ROW = ("planner", "critic", "seed")


@dataclass(frozen=True)
class Setting:
    """Runs that may stand in one table: they differ in planner, critic and seed alone.

    Attributes:
        title: What they have in common, in a few words.
        runs: The runs, oldest first.
        labels: For each run, planner and critic in tables.
    """

    title: str
    runs: tuple[RunInfo, ...]
    labels: tuple[tuple[str, str], ...]


def settings(runs: Iterable[RunInfo]) -> list[Setting]:
    """Group runs by what they have in common, largest group first."""
    groups: dict[str, list[RunInfo]] = {}
    for run in runs:
        shared = {name: value for name, value in run.config.items() if name not in _ROW}
        key = json.dumps([shared, run.facts.get("task"), run.facts.get("split")], sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    found = [Setting(_title(group[0]), tuple(group), tuple(_labels(group))) for group in groups.values()]
    return sorted(found, key=lambda setting: -sum(run.searches for run in setting.runs))


def _title(run: RunInfo) -> str:
    policy, task = run.config["policy"]["name"], run.facts.get("task") or "own problems"
    return (
        f"{task} {run.facts.get('split') or ''}".strip()
        + f", {run.mas.name}, policy {policy}"
        + (", true reward" if run.config["training"] else "")
    )


def _labels(runs: Sequence[RunInfo]) -> list[tuple[str, str]]:
    """Return planner and critic of each run, with part of a digest where different rows would share a name."""
    keys = [json.dumps([run.config["planner"], run.config["critic"]], sort_keys=True) for run in runs]
    names = {key: (_name(run, "planner"), _name(run, "critic")) for key, run in zip(keys, runs, strict=True)}
    marks = {key: run.run[:6] for key, run in zip(reversed(keys), reversed(runs), strict=True)}
    common = Counter(names.values())
    return [
        names[key] if common[names[key]] == 1 else (f"{names[key][0]} [{marks[key]}]", names[key][1]) for key in keys
    ]


def _name(run: RunInfo, part: str) -> str:
    if part == "planner":
        return str(run.facts["planner"])
    critic: dict[str, Any] | None = run.config["critic"]
    return str(critic["name"]) if critic else ""


def stored_comparison(
    store: Store, runs: Iterable[str] = (), baseline: str = "", grading: str | None = None
) -> Comparison:
    """Return the table of stored runs; see `Store.compare`."""
    chosen = [store.find(run) for run in runs] or store.runs()
    groups = settings(chosen)
    if len(groups) != 1:
        listed = "; ".join(f"{group.title}: {', '.join(run.run[:8] for run in group.runs)}" for group in groups)
        raise ConfigError(
            f"expected runs that differ in planner, critic and seed alone, got {len(groups)} settings "
            f"({listed or 'no run'}); choose the runs of one with runs=[...]"
        )
    setting = groups[0]
    outcomes = [
        outcome_of(plan, planner, critic, run.config["seed"])
        for run, (planner, critic) in zip(setting.runs, setting.labels, strict=True)
        for plan in store.plans(run.run, failed=True, grading=grading)
    ]
    return table_of(store, setting, outcomes, baseline)


def table_of(store: Store, setting: Setting, outcomes: Sequence[Outcome], baseline: str = "") -> Comparison:
    """Return the table of one setting, rows by rising cost."""
    rows = tuple(sorted(summarise(outcomes), key=lambda row: (isnan(row.tokens.mean), row.tokens.mean)))
    name = find_row(rows, baseline).label if rows else ""
    seeds = sorted({run.config["seed"] for run in setting.runs})
    facts = {"store": store.path.name, "seeds": seeds, "baseline": name}
    return Comparison(rows, tuple(outcomes), name, setting.title, facts)
