"""``mas-gym regrade``: grade stored searches again, without a model call, and list what changes."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout
from mas_gym.errors import ConfigError
from mas_gym.render import one_line

if TYPE_CHECKING:
    from mas_gym.tasks.base import Grader, Problem
    from search.store import Regrade, RunInfo

_LONGEST = 60


@opt.with_task(number=False)
def regrade(
    source: opt.TaskSource,
    store: Annotated[Path, typer.Argument(help="The store.")],
    run: Annotated[
        str | None, typer.Option("--run", help="Name or digest of one run; by default every run of the store.")
    ] = None,
    show: Annotated[int, typer.Option("--show", min=0, help="Number of differences to list per run.")] = 20,
    json: Annotated[Path | None, typer.Option("--json", help="Write all differences as JSON.")] = None,
) -> None:
    """Grade the searches of a store again, without a model call; the old grades stay beside the new.

    With --task the problems come from that task, so that corrected reference answers count; problems that it does not
    have are left out. Without, they are those of the store, graded by --grader, --kind or --grading.
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
        _show(result, show, label)
        done.append(_as_json(result, label))
    if json is not None:
        json.write_text(jsonlib.dumps(done, indent=2), encoding="utf-8")
        note(f"wrote {json}")
    note(f"Kept in {store} beside the grades of the runs: open_store({str(store)!r}).plans(run, grading={label!r})")
    failed = sum(len(result["failed"]) for result in done)
    if failed:
        note(f"{failed:,} searches could not be graded.", "yellow")
        raise typer.Exit(1)


def _plan(source: opt.TaskSource) -> tuple[Grader, Any, Any, str]:
    """Return the grader, the source of problems, what determines that source, and a label."""
    from dataclasses import replace

    from mas_gym.identity import digest_of
    from mas_gym.tasks.graders import make_grader
    from mas_gym.tasks.loading import make_base

    said = {"task": source.task, "grader": source.grader, "kind": source.kind, "judge": source.judge}
    label = ", ".join(f"{name}={value}" if name != "grader" else value for name, value in said.items() if value)
    label = label or f"grading={source.grading}"
    if source.task is not None:
        task: Any = source.load()
        known = {problem.id: problem for problem in task}
        references = digest_of([[p.id, p.question, p.answer, p.kind] for p in known.values()])
        return getattr(task, "grader", task), lambda problem: known.get(problem.id), references, label
    if source.columns is not None or source.data is not None:
        raise ConfigError("--columns and --data belong to --task, which is missing")
    grader = make_grader(source.grader, make_base(source.grading, source.judge, source.allow_code))
    if source.kind is None:
        return grader, lambda problem: problem, None, label
    kind = opt.check_kind(source.kind)

    def as_kind(problem: Problem) -> Problem:
        return replace(problem, kind=kind)

    return grader, as_kind, kind, label


def _show(result: Regrade, most: int, label: str) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = stdout()
    share = [100 * count / result.searches if result.searches else 0.0 for count in (result.before, result.after)]
    head = f"{_name(result.run)}: {result.searches:,} searches, Hit@1 {share[0]:.1f} before, {share[1]:.1f} by {label}"
    right = sum(change.new_correct > change.correct for change in result.changes)
    wrong = sum(change.new_correct < change.correct for change in result.changes)
    same = len(result.changes) - right - wrong
    console.print(Text(one_line(head), style="bold"))
    console.print(
        Text(f"{right:,} newly right, {wrong:,} newly wrong, {same:,} with another answer and the same grade")
    )
    if result.changes and most:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("Problem", "Answer before", "", "Answer now", ""):
            table.add_column(name, overflow="fold")
        # Other grades first.
        listed = sorted(result.changes, key=lambda change: change.correct == change.new_correct)[:most]
        for change in listed:
            pairs = ((change.answer, change.correct), (change.new_answer, change.new_correct))
            cells = [part for answer, correct in pairs for part in (_brief(answer), "right" if correct else "wrong")]
            table.add_row(*(Text(one_line(cell)) for cell in (change.problem_id, *cells)))
        console.print(table)
        if len(result.changes) > most:
            console.print(Text(f"and {len(result.changes) - most:,} more: --show, or --json FILE for all", style="dim"))
    for problem, reason in list(result.failed.items())[:most]:
        note(f"{problem} could not be graded: {one_line(reason)}", "yellow")


def _name(run: RunInfo) -> str:
    return f"{run.name or run.run[:8]} ({run.label})"


def _brief(answer: str | None) -> str:
    text = "none" if answer is None else answer
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _as_json(result: Regrade, label: str) -> dict[str, Any]:
    facts = {"run": result.run.run, "name": result.run.name, "label": result.run.label, "grading": label}
    counts = {"searches": result.searches, "correct_before": result.before, "correct": result.after}
    return {
        **facts,
        **counts,
        "failed": dict(result.failed),
        "changes": [change._asdict() for change in result.changes],
    }
