"""``mas-gym regrade``: grade the searches of a store again."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import brief, note, stdout, write_outputs
from mas_gym.cli.option_groups import grouped
from mas_gym.cli.option_values import check_folder, check_kind
from mas_gym.errors import ConfigError
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.rich_tables import text_table
from mas_gym.internal.text import one_line

if TYPE_CHECKING:
    from mas_gym.tasks.base import Grader, Problem
    from search import RunInfo
    from search.store.regrading import Regrade


@grouped(number=False)
def regrade(
    source: opt.TaskSource,
    store: Annotated[Path, typer.Argument(help="Run store.")],
    run: Annotated[
        str | None, typer.Option("--run", help="Name or digest of one run; by default every run of the store.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all differences as JSON.")] = None,
) -> None:
    """Regrade the searches of a store without model calls; the old grades are kept.

    With --task, the reference answers come from that task, for example after corrections, and problems that are not in
    the task are left out. Otherwise the store's problems are graded with --grader, --kind or --grading.
    """
    import search
    from search.store import regrade as grade_again

    check_folder(json)
    grader, problem_of, references, label = _plan(source)
    with search.open_store(store) as opened:
        runs = [opened.find(run)] if run is not None else opened.runs()
    if not runs:
        raise ConfigError(f"store {store}: expected at least one run, found none")
    done = []
    for info in runs:
        result = grade_again(store, info, grader, label, problem_of=problem_of, references=references)
        _show_regrade(result, label)
        done.append(_as_json(result, label))
    write_outputs((json, lambda: jsonlib.dumps(done, indent=2)))
    note(f"Saved in {store}, next to the original grades: open_store({str(store)!r}).plans(run, grading={label!r})")
    failed = sum(len(result["failed"]) for result in done)
    if failed:
        note(f"{failed:,} searches could not be graded.", "yellow")
        raise typer.Exit(1)


def _plan(source: opt.TaskSource) -> tuple[Grader, Callable[[Problem], Problem | None], str | None, str]:
    """Return the grader, the source of problems, the identity of that source, and a label."""
    from dataclasses import replace

    from mas_gym.internal.identity import digest_of
    from mas_gym.tasks.grading.graders import make_grader

    said = {"task": source.task, "grader": source.grader, "kind": source.kind, "judge": source.judge}
    label = ", ".join(f"{name}={value}" if name != "grader" else value for name, value in said.items() if value)
    label = ", ".join([label or f"grading={source.grading}", *(source.option or ())])
    if source.task is not None:
        task = source.load()
        known = {problem.id: problem for problem in task}
        references = digest_of([[p.id, p.question, p.answer, p.kind] for p in known.values()])
        return task.grader or task, lambda problem: known.get(problem.id), references, label
    grader = make_grader(source.grader, source.base_grader())
    if source.kind is None:
        return grader, lambda problem: problem, None, label
    kind = check_kind(source.kind)

    def as_kind(problem: Problem) -> Problem:
        return replace(problem, kind=kind)

    return grader, as_kind, kind, label


_SHOWN = 20
_GRADES = {True: "right", False: "wrong", None: "unknown"}


def _show_regrade(result: Regrade, label: str) -> None:
    console = stdout()
    counts = ((result.before, result.known), (result.after, result.searches))
    before, after = (f"{100 * right / known:.1f}" if known else "unknown" for right, known in counts)
    head = f"{_name(result.run)}: {result.searches:,} searches, Hit@1 {before} before, {after} by {label}"
    right = sum(change.new_correct and change.correct is not True for change in result.changes)
    wrong = sum(not change.new_correct and change.correct is not False for change in result.changes)
    same = len(result.changes) - right - wrong
    console.print(one_line(head), style="bold")
    console.print(f"{right:,} newly right, {wrong:,} newly wrong, {same:,} with another answer and the same grade")
    if result.changes:
        # Changed grades first.
        listed = sorted(result.changes, key=lambda change: change.correct == change.new_correct)[:_SHOWN]
        rows = []
        for change in listed:
            pairs = ((change.answer, change.correct), (change.new_answer, change.new_correct))
            cells = [part for answer, correct in pairs for part in (brief(answer), _GRADES[correct])]
            rows.append([one_line(cell) for cell in (change.problem_id, *cells)])
        console.print(text_table(("Problem", "Answer before", "", "Answer now", ""), rows, words=5))
        if len(result.changes) > _SHOWN:
            console.print(f"and {len(result.changes) - _SHOWN:,} more; use --json FILE for all", style="dim")
    for problem, reason in list(result.failed.items())[:_SHOWN]:
        note(f"{problem} could not be graded: {one_line(reason)}", "yellow")


def _name(run: RunInfo) -> str:
    return f"{run.name or run.run[:8]} ({run.label})"


def _as_json(result: Regrade, label: str) -> JSONObject:
    facts = {"run": result.run.run, "name": result.run.name, "label": result.run.label, "grading": label}
    counts = {"searches": result.searches, "correct_before": result.before, "correct": result.after}
    return {
        **facts,
        **counts,
        "failed": dict(result.failed),
        "changes": [change._asdict() for change in result.changes],
    }
