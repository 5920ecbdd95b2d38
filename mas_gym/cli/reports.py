"""Commands over a run store: ``mas-gym report``, ``mas-gym blame`` and ``mas-gym regrade``."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout, table
from mas_gym.errors import ConfigError
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.text import one_line

if TYPE_CHECKING:
    from mas_gym.tasks.base import Grader, Problem
    from search import Critic, Plan, RunInfo, Store
    from search.compare.blame import Blame
    from search.store.regrading import Regrade

StorePath = Annotated[Path, typer.Argument(metavar="RUNS.DB", help="Store written with --store.")]
RunNames = Annotated[
    list[str] | None, typer.Option("--run", help="Only this run: its name or the beginning of its digest. Repeatable.")
]


def report(
    store: Annotated[
        Path | None, typer.Argument(metavar="RUNS.DB", help="Store written with --store; optional with --service-log.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("report.html"),
    run: RunNames = None,
    baseline: Annotated[str, typer.Option("--baseline", help="Row to compare the others with.")] = "",
    prices: opt.PricesFile = None,
    figures: Annotated[Path | None, typer.Option("--figures", help="Folder for the figures as PNG files.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables as Markdown.")] = None,
    latex: Annotated[Path | None, typer.Option("--latex", help="Write the tables as LaTeX.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="Folder for TensorBoard: scalars and figures.")
    ] = None,
    service_log: Annotated[
        Path | None,
        typer.Option("--service-log", help="Log of mas-gym serve --canary SHARE --log-json FILE: adds a panel."),
    ] = None,
) -> None:
    """Write one HTML page about a run store: tables, intervals, curves, calibration and failures."""
    from search import Comparison, open_store
    from search.report.report import write_report, write_tensorboard

    for path in (out, markdown, latex):
        opt.check_folder(path)
    costs = opt.read_prices(prices)
    if store is None and service_log is None:
        raise ConfigError("expected a store, --service-log FILE or both, got neither; see mas-gym report --help")
    with nullcontext() if store is None else open_store(store) as opened:
        reports = write_report(
            opened,
            out,
            runs=run or (),
            baseline=baseline,
            figures=figures,
            prices=costs,
            service_log=service_log,
        )
    console = stdout()
    for one in reports:
        console.print(one.comparison.show(console.width))
    for path, form in ((markdown, Comparison.to_markdown), (latex, Comparison.to_latex)):
        if path is not None:
            path.write_text("\n".join(form(one.comparison) for one in reports), encoding="utf-8")
    if tensorboard is not None:
        write_tensorboard(reports, tensorboard)
    for path in filter(None, (out, figures, markdown, latex, tensorboard)):
        note(f"wrote {path}")


def blame(
    store: StorePath,
    critic: Annotated[
        str | None, typer.Option("--critic", help="Critic that scores the transcripts; by default stored values.")
    ] = None,
    run: RunNames = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", min=0.0, help="Minimum confidence to name an agent; by default 0.3.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write failed searches and blamed agents as JSON.")
    ] = None,
) -> None:
    """For each wrong answer, find the agent with the message that lowered the value most, if the drop is clear."""
    from search import open_store
    from search.compare.reliability import CONFIDENT

    opt.check_folder(json)
    least = CONFIDENT if threshold is None else threshold
    guide = None if critic is None else opt.read_critic(critic)
    document = []
    with open_store(store) as opened:
        for info in [opened.find(one) for one in run] if run else opened.runs():
            agents = [agent.name for agent in info.mas.agents]
            found = _blamed(opened, info, guide)
            if not found:
                note(f"{one_line(info.label)}: no wrong answers with values; choose a critic with --critic", "yellow")
                continue
            _show_blame(info.label, found, agents, least)
            document.append({"run": info.run, "label": info.label, "searches": [_row(b, agents, least) for b in found]})
    if json is not None:
        json.write_text(jsonlib.dumps({"schema": 1, "threshold": least, "runs": document}, indent=1), encoding="utf-8")
        note(f"wrote {json}")


def _blamed(store: Store, run: RunInfo, critic: Critic | None) -> list[Blame]:
    """Return the blame of a run's wrong answers."""
    from search.compare.blame import blamed, path_values

    scored = ((plan, path_values(plan) if critic is None else _scores(plan, critic)) for plan in store.plans(run.run))
    return blamed((plan, values) for plan, values in scored if values)


def _scores(plan: Plan, critic: Critic) -> list[float]:
    from mas_gym.envs.critic_base import finite_values, scores_of
    from mas_gym.systems.state import Action
    from search import Proposal, ScoringContext
    from search.compare.blame import chosen_path

    assert plan.tree is not None and plan.mas is not None
    nodes = [plan.tree[node] for node in chosen_path(plan)]
    contexts = [
        ScoringContext(n.state, plan.mas, Proposal(Action(n.state.text, plan.mas.ALL), n.tokens, n.logprob))
        for n in nodes
    ]
    return finite_values(critic, [context.state for context in contexts], scores_of(critic, contexts))


def _row(one: Blame, agents: Sequence[str], least: float) -> JSONObject:
    named = one.confidence >= least
    return {
        "problem": one.problem_id,
        "agent": agents[one.speaker] if named else None,
        "turn": one.turn + 1,
        "message": one.text,
        "confidence": round(one.confidence, 4),
        "values": [round(value, 4) for value in one.values],
    }


def _show_blame(label: str, found: Sequence[Blame], agents: Sequence[str], least: float) -> None:
    from rich.text import Text

    sure = sorted((one for one in found if one.confidence >= least), key=lambda one: (one.speaker, -one.confidence))
    groups = [(speaker, list(group)) for speaker, group in groupby(sure, key=lambda one: one.speaker)]
    rows: list[Sequence[str | Text]] = []
    for speaker, group in sorted(groups, key=lambda item: -len(item[1])):
        case = f"{one_line(group[0].problem_id)}: {one_line(group[0].text)}"
        rows.append([one_line(agents[speaker]), Text(str(len(group)), justify="right"), _brief(case, 100)])
    nobody = Text(str(len(found) - len(sure)), justify="right")
    rows.append([Text("nobody", style="dim"), nobody, Text("no clear fall in value", style="dim")])
    title = f"{one_line(label)}: {len(found)} wrong answers, an agent named for {len(sure)}"
    stdout().print(table(("Agent", "Blamed", "Clearest case"), rows, title, words=3))


@opt.with_task(number=False)
def regrade(
    source: opt.TaskSource,
    store: Annotated[Path, typer.Argument(help="Run store.")],
    run: Annotated[
        str | None, typer.Option("--run", help="Name or digest of one run; by default every run of the store.")
    ] = None,
    show: Annotated[int, typer.Option("--show", min=0, help="Number of differences to list per run.")] = 20,
    json: Annotated[Path | None, typer.Option("--json", help="Write all differences as JSON.")] = None,
) -> None:
    """Regrade the searches of a store without model calls; the old grades are kept.

    With --task, the reference answers come from that task, for example after corrections, and problems that are not in
    the task are left out. Otherwise the store's problems are graded with --grader, --kind or --grading.
    """
    import search
    from search.store import regrade as grade_again

    opt.check_folder(json)
    grader, problem_of, references, label = _plan(source)
    with search.open_store(store) as opened:
        runs = [opened.find(run)] if run is not None else opened.runs()
    if not runs:
        raise ConfigError(f"store {store}: expected at least one run, found none")
    done = []
    for info in runs:
        result = grade_again(store, info, grader, label, problem_of=problem_of, references=references)
        _show_regrade(result, show, label)
        done.append(_as_json(result, label))
    if json is not None:
        json.write_text(jsonlib.dumps(done, indent=2), encoding="utf-8")
        note(f"wrote {json}")
    note(f"Saved in {store}, next to the original grades: open_store({str(store)!r}).plans(run, grading={label!r})")
    failed = sum(len(result["failed"]) for result in done)
    if failed:
        note(f"{failed:,} searches could not be graded.", "yellow")
        raise typer.Exit(1)


def _plan(source: opt.TaskSource) -> tuple[Grader, Callable[[Problem], Problem | None], str | None, str]:
    """Return the grader, the source of problems, the identity of that source, and a label."""
    from dataclasses import replace

    from mas_gym.internal.identity import digest_of
    from mas_gym.tasks.catalogue import make_base
    from mas_gym.tasks.grading.graders import make_grader

    said = {"task": source.task, "grader": source.grader, "kind": source.kind, "judge": source.judge}
    label = ", ".join(f"{name}={value}" if name != "grader" else value for name, value in said.items() if value)
    label = label or f"grading={source.grading}"
    if source.task is not None:
        task = source.load()
        known = {problem.id: problem for problem in task}
        references = digest_of([[p.id, p.question, p.answer, p.kind] for p in known.values()])
        return task.grader or task, lambda problem: known.get(problem.id), references, label
    if source.columns is not None or source.data is not None:
        raise ConfigError("expected --task with --columns or --data, got none")
    base = make_base(source.grading, source.judge, source.allow_code, source.sandbox)
    grader = make_grader(source.grader, base)
    if source.kind is None:
        return grader, lambda problem: problem, None, label
    kind = opt.check_kind(source.kind)

    def as_kind(problem: Problem) -> Problem:
        return replace(problem, kind=kind)

    return grader, as_kind, kind, label


def _show_regrade(result: Regrade, most: int, label: str) -> None:
    console = stdout()
    share = [100 * count / result.searches if result.searches else 0.0 for count in (result.before, result.after)]
    head = f"{_name(result.run)}: {result.searches:,} searches, Hit@1 {share[0]:.1f} before, {share[1]:.1f} by {label}"
    right = sum(change.new_correct > change.correct for change in result.changes)
    wrong = sum(change.new_correct < change.correct for change in result.changes)
    same = len(result.changes) - right - wrong
    console.print(one_line(head), style="bold")
    console.print(f"{right:,} newly right, {wrong:,} newly wrong, {same:,} with another answer and the same grade")
    if result.changes and most:
        # Changed grades first.
        listed = sorted(result.changes, key=lambda change: change.correct == change.new_correct)[:most]
        rows = []
        for change in listed:
            pairs = ((change.answer, change.correct), (change.new_answer, change.new_correct))
            cells = [part for answer, correct in pairs for part in (_brief(answer), "right" if correct else "wrong")]
            rows.append([one_line(cell) for cell in (change.problem_id, *cells)])
        console.print(table(("Problem", "Answer before", "", "Answer now", ""), rows, words=5))
        if len(result.changes) > most:
            console.print(
                f"and {len(result.changes) - most:,} more; use --show to list more, or --json FILE for all", style="dim"
            )
    for problem, reason in list(result.failed.items())[:most]:
        note(f"{problem} could not be graded: {one_line(reason)}", "yellow")


def _name(run: RunInfo) -> str:
    return f"{run.name or run.run[:8]} ({run.label})"


def _brief(text: str | None, width: int = 60) -> str:
    text = "none" if text is None else text
    return text if len(text) <= width else text[: width - 3] + "..."


def _as_json(result: Regrade, label: str) -> JSONObject:
    facts = {"run": result.run.run, "name": result.run.name, "label": result.run.label, "grading": label}
    counts = {"searches": result.searches, "correct_before": result.before, "correct": result.after}
    return {
        **facts,
        **counts,
        "failed": dict(result.failed),
        "changes": [change._asdict() for change in result.changes],
    }
