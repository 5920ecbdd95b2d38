"""``mas-gym eval``: compare planners and critics on one task, in a table with intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn

import typer

from mas_gym import errors
from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout
from mas_gym.cli.option_values import check_folder, check_plot, load_weights, policy_label, read_prices, read_seeds
from mas_gym.cli.progress import RunProgress
from mas_gym.cli.run_notes import note_costs, note_judge, note_order, warn_of_misuse
from mas_gym.cli.worker_processes import read_workers
from mas_gym.errors import BudgetError, ConfigError, DataError
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.text import one_line
from mas_gym.internal.whole_files import write_file

if TYPE_CHECKING:
    from mas_gym.tasks.base import Task
    from search import Plan
    from search.compare.comparison_runs import Bench, Row, Workers
    from search.compare.cost_matching import Match
    from search.compare.selection_curves import Selection
    from search.progress import Progress
    from search.results.outcomes import Outcome
    from search.service.telemetry import Watch


class Files(NamedTuple):
    """Output files for the table, in addition to terminal output."""

    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None
    markdown: Path | None = None
    latex: Path | None = None


JSONFile = Annotated[Path | None, typer.Option("--json", help="Write rows, intervals and differences as JSON.")]
CSVFile = Annotated[Path | None, typer.Option("--csv", help="Write the rows as CSV.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Plot accuracy against tokens (png, svg, pdf).")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", help="Write the table as Markdown.")]
LatexFile = Annotated[Path | None, typer.Option("--latex", help="Write the table as LaTeX.")]
BUDGET_SPENT = 3
"""Exit code of a command if its run budget omitted searches."""
MATCHED = 1.25
"""Ratio of costs up to which a row counts as matched."""

BaselineName = Annotated[str, typer.Option("--against", help="Row to compare the others with; by default the first.")]
MatchedCost = Annotated[
    str | None,
    typer.Option("--match", help="Adjust planners to this cost on dev problems: tokens=N, calls=N or usd=X."),
]


RecordedFile = Annotated[
    Path | None,
    typer.Option("--recorded", help="Search a recorded run of this store (see mas-gym import) instead of a task."),
]
RecordedRun = Annotated[
    str | None, typer.Option("--run", help="With --recorded: name or digest of the run, if there are several.")
]
Distinct = Annotated[
    bool,
    typer.Option("--distinct", help="With --recorded: draw equal messages at a state only once."),
]


@opt.with_task(task="arithmetic")
def evaluate(
    source: opt.TaskSource,
    agents: opt.AgentSource,
    options: opt.RunOptions,
    critic: opt.CriticNames = None,
    planner: opt.PlannerNames = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Run seeds, separated by commas.")] = "42",
    store: opt.Store = None,
    workers: opt.WorkerCount = None,
    json: JSONFile = None,
    csv: CSVFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    latex: LatexFile = None,
    baseline: BaselineName = "",
    match: MatchedCost = None,
    recorded: RecordedFile = None,
    run: RecordedRun = None,
    distinct: Distinct = False,
) -> None:
    """Evaluate planners and critics on a task: Hit@1, Hit@k, 95% intervals, TOK, AC and RC.

    Planners that use a critic run once per critic; other planners run once. Ctrl-C prints the finished results.
    With --recorded, planners draw recorded messages, and accuracy curves over k samples are printed.
    """
    from search.compare.comparison_runs import Bench
    from search.compare.cost_matching import Match
    from search.observing import is_observed

    files = _checked(Files(json, csv, plot, markdown, latex), options.log_json)
    numbers, costs = read_seeds(seeds), read_prices(options.prices)
    target = None if match is None else Match.read(match, costs is not None)
    limits = options.limits(costs)
    rows = pair_rows(planner or ["single"], critic, lazy=True)
    _check_baseline(rows, baseline)
    if recorded is None and (run is not None or distinct):
        raise ConfigError("--run and --distinct: expected --recorded FILE as well, got none")
    if recorded is not None:
        _check_recorded(source, agents, options, workers)
        bench, title = _recorded_bench(recorded, run, distinct, source, critic or ())
        assert bench.recorded is not None
        load_weights(rows)
        meta = _meta(bench, numbers, recorded=bench.recorded.identity())
    else:
        problems = source.load()
        system, code = agents.load(problems)
        spec = agents.spec(system)
        warn_of_misuse(spec, source.task, system)
        alone: dict[str, object] = {
            "--ray": options.ray,
            "--cache": agents.cache,
            "--log-json": options.log_json,
            "--match": match,
            "--actors": options.actors,
            "--gpus-per-actor": options.gpus_per_actor,
            "--traces": is_observed() or None,
            "--judge": source.judge,
            "--token-traces": options.token_traces or None,
        }
        shared = _workers(workers, alone, partial(read_workers, workers, spec, rows, len(problems), len(numbers)))
        local, remote = options.engines(spec, agents.cache, store) if shared is None else (None, None)
        load_weights(rows if local is not None else [])
        bench = Bench(problems, system, local, (), remote=remote, workers=shared, program=code)
        bench = replace(bench, sampling=agents.sampling)
        policy = policy_label(spec)
        title = f"{source.label}, {system.name}, policy {policy}"
        task = {"task": source.task, "split": problems.split, "grading": problems.grading}
        meta = _meta(bench, numbers, **task, mas=system.name, policy=policy)
    bench = replace(bench, seeds=numbers, concurrency=options.concurrency, store=store, budget=limits[0])
    bench = replace(bench, run_budget=limits[1], prices=costs)
    if target is not None:
        dev = _dev(source, bench.task) if recorded is None else bench.task
        rows, baseline = _resize(rows, bench, target, dev, baseline)
    with options.watched() as watch:
        outcomes, stop = measure(rows, bench, watch=watch)
    curves = None if recorded is None or stop is not None else _curves(rows, bench)
    if recorded is not None:
        meta["selection"] = [] if curves is None else curves.to_dicts()
    show(outcomes, title, files, meta, baseline)
    if curves is not None:
        console = stdout()
        console.print(f"\n{curves.text(console.width)}")
    if recorded is None:
        note_costs(bench.policy)
        note_judge(bench.task)
    if stop is not None:
        end_early(stop, f"the table shows the finished searches; {_goes_on(store)}")


def _check_recorded(
    source: opt.TaskSource, agents: opt.AgentSource, options: opt.RunOptions, workers: int | None
) -> None:
    """Reject options that have no effect with ``--recorded``."""
    task = replace(source, number=None, split="test" if source.split == "held-out" else source.split)
    flags = ["the task options"] if task != opt.TaskSource(task="arithmetic") else []
    default = opt.AgentSource()
    flags += [f"--{name.replace('_', '-')}" for name, value in vars(agents).items() if value != vars(default)[name]]
    flags += ["--token-traces"] * options.token_traces
    spread: dict[str, object] = {"--workers": workers, "--ray": options.ray, "--actors": options.actors}
    spread |= {"--gpus-per-actor": options.gpus_per_actor}
    flags += [flag for flag, value in spread.items() if value is not None]
    if flags:
        raise ConfigError(
            "--recorded reads problems, agents and messages from the store and runs in one process; leave out "
            + " and ".join(flags)
        )


def _recorded_bench(
    path: Path, run: str | None, distinct: bool, task: opt.TaskSource, critics: Sequence[str]
) -> tuple[Bench, str]:
    """Return the bench of a recorded run, and a title; reject questions that a critic was trained on."""
    from rewardmodels.model.training_questions import question_digest, trained_questions
    from search import Recorded
    from search.compare.comparison_runs import Bench

    source = Recorded(path, run, distinct=distinct)
    known = frozenset[str]().union(*map(trained_questions, critics))
    others = [problem for problem in source if question_digest(problem.question) not in known]
    if len(others) < len(source) and task.split != "held-out":
        raise ConfigError(
            f"expected questions that the critics were not trained on, got {len(source) - len(others):,} of "
            f"{len(source):,} that they were; leave them out with --split held-out"
        )
    if not others:
        raise ConfigError(
            f"--split held-out: the critics were trained on all {len(source):,} questions of {path}; train them on a "
            "part of the questions with mas-gym train ... --split train, or use another log"
        )
    number = task.number
    if number is not None and number > len(others):
        raise ConfigError(f"expected -n of at most {len(others):,}, the number of problems in {path}, got {number:,}")
    return Bench(others[:number], source.mas, None, (), recorded=source), f"recorded run {one_line(source.name)}"


def _curves(rows: Sequence[Row], bench: Bench) -> Selection | None:
    """Return selection curves if there is a planner that only chooses among complete samples; otherwise None."""
    from search import BestOfN, SelfConsistency
    from search.compare import select

    assert bench.recorded is not None
    chosen = [row for row in rows if isinstance(row.planner, BestOfN | SelfConsistency)]
    if not chosen or bench.recorded.distinct:
        return None
    # Values of a critic that compares samples depend on the drawn samples.
    critics = {row.critic_name: row.critic for row in chosen if row.critic is not None and not row.critic.reads_peers}
    # Not stored: the searches of a curve are not rows of a report.
    return select(bench.recorded, critics, problems=bench.task, concurrency=bench.concurrency)


def _checked(files: Files, log: Path | None) -> Files:
    for path in (*files, log):
        check_folder(path)
    check_plot(files.plot)
    return files


def _goes_on(store: Path | None) -> str:
    return f"repeat the command to resume from {store}" if store else "to make it resumable, add --store runs.db"


def _workers(wanted: int | None, alone: Mapping[str, object], read: Callable[[], Workers | None]) -> Workers | None:
    """Return the worker processes to use; None if an option requires a single process."""
    flags = [flag for flag, value in alone.items() if value is not None]
    if flags and wanted is not None and wanted > 1:
        others = " and ".join(flags)
        raise ConfigError(f"--workers {wanted}: cannot be combined with {others}; leave out --workers, or {others}")
    return None if flags else read()


def _dev(source: opt.TaskSource, problems: Task) -> Task:
    """Return the dev problems or, if the task has none, the evaluated problems, whose answers are not used."""
    try:
        return replace(source, split="dev", number=None).load()
    except DataError:
        note("no dev problems: sizes are matched on the evaluated problems, using only their cost", "yellow")
        return problems


def _resize(rows: Sequence[Row], bench: Bench, target: Match, dev: Task, baseline: str) -> tuple[list[Row], str]:
    """Set and print each planner's search parameters so that it spends the target cost on dev problems.

    Returns the rows, and the baseline's new name.
    """
    from search.compare.comparison import matched, renamed
    from search.results.table import CALIBRATION_PROBLEMS, calibrated_on, spent_text

    problems = dev[:CALIBRATION_PROBLEMS]
    pairs = matched(rows, bench, target, problems, lambda reason: note(reason, "yellow"))
    note(calibrated_on(len(problems)), *["yellow"] * (len(problems) < CALIBRATION_PROBLEMS))
    for _, _, part in pairs:
        size = f"{part.setting}={part.size}" if part.setting else "no size to change"
        text = f"{one_line(part.label)}: {size}, {spent_text(part.spent)} {target.unit} per calibration problem"
        if max(part.spent, target.amount) > MATCHED * min(part.spent, target.amount):
            note(f"{text}: no size comes closer to {target.amount:g}, so this row is not at equal cost", "yellow")
        else:
            note(text)
    return [row for _, row, _ in pairs], renamed(baseline, pairs)


def _check_baseline(rows: Sequence[Row], name: str) -> None:
    if name and not any(name in (row.label, row.name) for row in rows):
        labels = ", ".join(repr(row.label) for row in rows)
        raise ConfigError(f"--against: expected one of {labels}, got {name!r}")


def pair_rows(planners: Sequence[str], critics: Sequence[str] | None = None, lazy: bool = False) -> list[Row]:
    """Pair planners with compatible critics; incompatible pairs are skipped with a note.

    Args:
        planners: Planner specs, such as ``mcts:10,3``.
        critics: Names or folders; policy likelihood by default.
        lazy: Do not load the weights of trained critics; other processes or
            `mas_gym.cli.option_values.load_weights` load them.

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
    guides = named_critics(list(dict.fromkeys(critics or [opt.LIKELIHOOD])), lazy) if guided else {}
    return pair(loaded, guides, lambda reason: note(reason, "yellow"))


def measure(
    rows: Sequence[Row],
    bench: Bench,
    look: Callable[[Row, Plan], None] = lambda row, plan: None,
    watch: Watch = lambda run, seed, progress: None,
) -> tuple[list[Outcome], BaseException | None]:
    """Run every row with every seed, showing progress; see `search.compare.comparison_runs.measure`."""
    from search.compare.comparison_runs import measure as measure_rows

    stopped: dict[str, Progress] = {}
    lines = {row.label: line for line, row in enumerate(rows)}
    with RunProgress([row.label for row in rows], len(bench.task) * len(bench.seeds)) as progress:

        def listen(row: Row, seed: int, now: Progress) -> None:
            progress.update(lines[row.label], seed, now)
            watch(row.label, seed, now)
            if now.stopped is not None:
                stopped[f"{row.label}, seed {seed}"] = now

        outcomes, stop = measure_rows(rows, bench, look, listen)
    if stop is None and stopped:
        for label, now in stopped.items():
            left = f"{(now.total or 0) - now.done:,} of {now.total:,} searches did not run"
            note(f"{one_line(label)}: {one_line(str(now.stopped))}; {left}", "yellow")
        stop = BudgetError("the run budget is spent")
    return outcomes, stop


def end_early(stop: BaseException, remark: str) -> NoReturn:
    """End a command after an interrupted run.

    Args:
        stop: The cause of the interruption: Ctrl-C, the budget or an error.
        remark: A note on the kept results and how to resume.
    """
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
    forms = {
        files.json: table.to_json,
        files.csv: table.to_csv,
        files.markdown: table.to_markdown,
        files.latex: table.to_latex,
    }
    for path, form in forms.items():
        if path is not None:
            write_file(path, form())
    if files.plot is not None and any(row.tokens.mean > 0 for row in table.rows):
        table.plot(files.plot)
    for path in filter(None, files):
        if path.exists():
            note(f"wrote {path}")


def _meta(bench: Bench, seeds: Sequence[int], **facts: object) -> JSONObject:
    import mas_gym

    return {
        **facts,
        "problems": len(bench.task),
        "seeds": list(seeds),
        "mas_gym": mas_gym.__version__,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
