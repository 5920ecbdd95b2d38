"""``mas-gym eval``: compare planners and critics on one task, in a table with intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mas_gym import errors
from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout, write_outputs
from mas_gym.cli.option_groups import grouped, typed
from mas_gym.cli.option_values import check_folder, load_weights, policy_label, read_seeds
from mas_gym.cli.progress import RunProgress
from mas_gym.cli.run_notes import note_costs, note_judge, note_order, warn_of_misuse
from mas_gym.cli.worker_processes import read_workers
from mas_gym.errors import BudgetError, ConfigError, DataError
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.internal.suggestions import choice
from mas_gym.internal.text import one_line

if TYPE_CHECKING:
    from mas_gym.tasks.base import Task
    from search import Plan
    from search.compare.comparison_runs import Row, Start
    from search.compare.cost_matching import Match
    from search.compare.selection_curves import Selection
    from search.compare.worker_runs import Workers
    from search.progress import Progress
    from search.results.outcomes import Outcome
    from search.service.telemetry import ProgressListener
    from search.setup import RunSpec


@dataclass(frozen=True)
class Files:
    """Output files for the table, in addition to terminal output."""

    json: Annotated[Path | None, typer.Option(help="Write rows, intervals and differences as JSON.")] = None
    csv: Annotated[Path | None, typer.Option(help="Write the rows as CSV.")] = None
    plot: Annotated[Path | None, typer.Option(help="Plot accuracy against tokens (png, svg, pdf).")] = None
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None
    latex: Annotated[Path | None, typer.Option(help="Write the table as LaTeX.")] = None


BUDGET_SPENT = 3
"""Exit code of a command if its run budget omitted searches."""
MATCHED = 1.25
"""Ratio of costs up to which a row counts as matched."""


@grouped(task="arithmetic")
def evaluate(
    context: typer.Context,
    source: opt.TaskSource,
    agents: opt.AgentSource,
    options: opt.RunOptions,
    files: Files,
    critic: opt.CriticNames = None,
    planner: opt.PlannerNames = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Run seeds, separated by commas.")] = "42",
    store: opt.Store = None,
    workers: opt.WorkerCount = None,
    baseline: Annotated[
        str, typer.Option("--against", help="Row to compare the others with; by default the first.")
    ] = "",
    match: Annotated[
        str | None, typer.Option(help="Adjust planners to this cost on dev problems: tokens=N, calls=N or usd=X.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option(help="Search a recorded run of this store (see mas-gym import) instead of a task.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="With --recorded: name or digest of the run, if there are several.")
    ] = None,
    distinct: Annotated[
        bool, typer.Option("--distinct", help="With --recorded: draw equal messages at a state only once.")
    ] = False,
) -> None:
    """Evaluate planners and critics on a task: Hit@1, Hit@k, 95% intervals, TOK, AC and RC.

    Planners that use a critic run once per critic; other planners run once. Ctrl-C prints the finished results.
    With --recorded, planners draw recorded messages, and accuracy curves over k samples are printed.
    """
    from search import Recorded
    from search.compare.comparison_runs import start_here
    from search.compare.cost_matching import Match
    from search.option_rules import excluded
    from search.results.plots import check_figure_path

    for path in (*vars(files).values(), options.log_json):
        check_folder(path)
    if files.plot is not None:
        check_figure_path(files.plot)
    numbers = read_seeds(seeds)
    rows = pair_rows(planner or ["single"], critic)
    _check_baseline(rows, baseline)
    spec = agents.load(source.load()) if recorded is None else _recorded(recorded, run, distinct, source, critic or ())
    spec = options.apply(replace(spec, seed=numbers[0], store=store))
    target = None if match is None else Match.read(match, spec.budget.prices is not None)
    shared = None
    start: Start = start_here
    if isinstance(spec.source, Recorded):
        title = f"recorded run {one_line(spec.source.name)}"
        facts: JSONObject = {"recorded": spec.source.identity()}
    else:
        policy, task = agents.policy_spec(spec.mas), spec.problems
        warn_of_misuse(policy, source.task, spec.mas)
        if not excluded("workers", typed(context)):
            shared = read_workers(workers, policy, rows, len(task), len(numbers))
        if shared is None:
            local, start = options.engines(policy, agents.cache, store)
            spec = replace(spec, policy=local)
        title = f"{source.label}, {spec.mas.name}, policy {policy_label(policy)}"
        facts = {"task": source.task, "split": task.split, "grading": task.grading}
        facts |= {"mas": spec.mas.name, "policy": policy_label(policy)}
    load_weights(rows if spec.policy is not None else [])
    if target is not None:
        dev = _dev(source, spec.problems) if recorded is None else spec.problems
        rows, baseline = _resize(rows, spec, target, dev, baseline, start)
    with options.watched() as watch:
        outcomes, stop = measure(rows, spec, numbers, watch=watch, start=start, workers=shared)
    curves = None if recorded is None or stop is not None else _curves(rows, spec)
    if recorded is not None:
        facts["selection"] = [] if curves is None else curves.to_dicts()
    show(outcomes, title, files, _meta(spec, numbers, facts), baseline)
    if curves is not None:
        stdout().print("", curves.show(), sep="\n")
    if recorded is None:
        note_costs(spec.policy)
        note_judge(spec.problems)
    if stop is not None:
        end_early(stop, f"the table shows the finished searches; {_goes_on(store)}")


def _recorded(path: Path, run: str | None, distinct: bool, task: opt.TaskSource, critics: Sequence[str]) -> RunSpec:
    """Return the spec of a recorded run; reject questions that a critic was trained on."""
    from rewardmodels.model.training_questions import untrained
    from search import Recorded
    from search.setup import RunSpec

    source = Recorded(path, run, distinct=distinct)
    choice("--split", task.split, ("test", "held-out"))
    others = untrained(list(source), critics, path, task.split == "held-out")
    opt.check_number(task.number, len(others), str(path))
    return RunSpec(others[: task.number], source.mas, source.policy, source=source)


def _curves(rows: Sequence[Row], spec: RunSpec) -> Selection | None:
    """Return selection curves if there is a planner that only chooses among complete samples; otherwise None."""
    from search import BestOfN, Recorded, SelfConsistency
    from search.compare import select

    assert isinstance(spec.source, Recorded)
    chosen = [row for row in rows if isinstance(row.planner, BestOfN | SelfConsistency)]
    if not chosen or spec.source.distinct:
        return None
    # Values of a critic that compares samples depend on the drawn samples.
    critics = {row.critic_name: row.critic for row in chosen if row.critic is not None and not row.critic.reads_peers}
    # Not stored: the searches of a curve are not rows of a report.
    return select(spec.source, critics, problems=spec.problems, concurrency=spec.concurrency)


def _goes_on(store: Path | None) -> str:
    return f"repeat the command to resume from {store}" if store else "to make it resumable, add --store runs.db"


def _dev(source: opt.TaskSource, problems: Task) -> Task:
    """Return the dev problems or, if the task has none, the evaluated problems; their answers are not used."""
    try:
        return replace(source, split="dev", number=None).load()
    except DataError:
        note("no dev problems: sizes are matched on the evaluated problems, using only their cost", "yellow")
        return problems


def _resize(
    rows: Sequence[Row], spec: RunSpec, target: Match, dev: Task, baseline: str, start: Start
) -> tuple[list[Row], str]:
    """Set and print each planner's search parameters so that it spends the target cost on dev problems.

    Returns the rows, and the baseline's new name.
    """
    from search.compare.comparison import matched, renamed
    from search.results.table import CALIBRATION_PROBLEMS, calibrated_on

    problems = dev[:CALIBRATION_PROBLEMS]
    pairs = matched(rows, spec, target, problems, lambda reason: note(reason, "yellow"), start)
    note(calibrated_on(len(problems)), *["yellow"] * (len(problems) < CALIBRATION_PROBLEMS))
    for _, _, part in pairs:
        if max(part.spent, target.amount) > MATCHED * min(part.spent, target.amount):
            note(f"{part}: no size comes closer to {target.amount:g}, so this row is not at equal cost", "yellow")
        else:
            note(str(part))
    return [row for _, row, _ in pairs], renamed(baseline, pairs)


def _check_baseline(rows: Sequence[Row], name: str) -> None:
    if name and not any(name in (row.label, row.name) for row in rows):
        labels = ", ".join(repr(row.label) for row in rows)
        raise ConfigError(f"--against: expected one of {labels}, got {name!r}")


def pair_rows(planners: Sequence[str], critics: Sequence[str] | None = None) -> list[Row]:
    """Pair planners with compatible critics, policy likelihood by default; other pairs are skipped with a note.

    The weights of trained critics are not loaded yet.

    Raises:
        ConfigError: No pair remains, or a critic is given but no planner uses one.
    """
    from search.compare.comparison_runs import named_critics, named_planners, pair

    loaded = named_planners(planners)
    guided = any(planner.needs_critic for planner in loaded.values())
    if critics and not guided:
        raise ConfigError(
            "--critic: none of the planners uses a critic; add one that does, such as --planner mcts:10,3"
        )
    guides = named_critics(list(dict.fromkeys(critics or [opt.LIKELIHOOD])), lazy=True) if guided else {}
    return pair(loaded, guides, lambda reason: note(reason, "yellow"))


def measure(
    rows: Sequence[Row],
    spec: RunSpec,
    seeds: Sequence[int] = (),
    look: Callable[[Row, Plan], None] = lambda row, plan: None,
    watch: ProgressListener = lambda run, seed, progress: None,
    start: Start | None = None,
    workers: Workers | None = None,
) -> tuple[list[Outcome], BaseException | None]:
    """Run every row with every seed, in this process or in workers, and show the progress.

    Arguments and results are those of `search.compare.comparison_runs.measure`; ``watch`` receives every update.
    """
    from search.compare.comparison_runs import measure as measure_rows
    from search.compare.comparison_runs import start_here
    from search.compare.worker_runs import measure_in_workers

    seeds = seeds or [spec.seed]
    stopped: dict[str, Progress] = {}
    with RunProgress([row.label for row in rows], len(spec.problems) * len(seeds)) as progress:

        def listen(label: str, seed: int, now: Progress) -> None:
            progress.update(label, seed, now)
            watch(label, seed, now)
            if now.stopped is not None:
                stopped[f"{label}, seed {seed}"] = now

        if workers is not None:
            outcomes, stop = measure_in_workers(workers, rows, spec, seeds, look, listen)
        else:
            outcomes, stop = measure_rows(rows, spec, seeds, look, listen, start or start_here)
    if stop is None and stopped:
        for label, now in stopped.items():
            left = f"{(now.total or 0) - now.done:,} of {now.total:,} searches did not run"
            note(f"{one_line(label)}: {one_line(str(now.stopped))}; {left}", "yellow")
        stop = BudgetError("the run budget is spent")
    return outcomes, stop


def end_early(stop: BaseException, remark: str) -> NoReturn:
    """End a command after an interruption by Ctrl-C, the budget or an error, with a remark on how to resume."""
    if isinstance(stop, KeyboardInterrupt):
        note(f"Interrupted: {remark}.", "yellow")
        raise typer.Exit(130)
    if isinstance(stop, BudgetError):
        note(f"Stopped by --run-budget: {remark}. Raise the budget to continue.", "yellow")
        raise typer.Exit(BUDGET_SPENT)
    note(f"Stopped by an error: {remark}.", "yellow")
    raise stop


def show(outcomes: Sequence[Outcome], title: str, files: Files, meta: Mapping[str, object], baseline: str = "") -> None:
    """Print the table and write the requested files."""
    from search.compare import Comparison
    from search.results.summary import summarize

    rows = tuple(summarize(outcomes))
    # An interrupted run may lack the baseline's row.
    baseline = baseline if any(baseline in (row.label, row.planner) for row in rows) else ""
    table = Comparison(rows, tuple(outcomes), baseline, title, meta)
    console = stdout()
    console.print(table.show(console.width))
    if not table.rows:
        return
    kinds = {reason.partition(":")[0] for row in rows for reason in row.failures}
    if not kinds <= vars(errors).keys():
        note("--debug shows the traceback of each failure", "yellow")
    note_order(sum(outcome.order_varied for outcome in outcomes))
    texts = ((files.json, table.to_json), (files.csv, table.to_csv))
    write_outputs(*texts, (files.markdown, table.to_markdown), (files.latex, table.to_latex))
    if files.plot is not None and any(row.tokens.mean > 0 for row in table.rows):
        note(f"wrote {table.plot(files.plot)}")


def _meta(spec: RunSpec, seeds: Sequence[int], facts: JSONMapping) -> JSONObject:
    import mas_gym

    return {
        **facts,
        "problems": len(spec.problems),
        "seeds": list(seeds),
        "mas_gym": mas_gym.__version__,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
