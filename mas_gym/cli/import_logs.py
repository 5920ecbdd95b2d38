"""``mas-gym import``: import recorded transcripts into a run store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stderr, stdout
from mas_gym.cli.option_groups import grouped
from mas_gym.cli.option_values import check_folder, check_kind
from mas_gym.errors import ConfigError
from mas_gym.internal.text import cut, one_line

if TYPE_CHECKING:
    from rich.progress import TaskID

    from mas_gym.logs import BrokenLine, Transcript
    from search.store.transcript_import import Imported

_SHOWN = 10
_TEXT = 600


@grouped(**dict.fromkeys(("number", "grader", "judge", "allow_code", "sandbox", "grading", "option"), False))
def import_logs(
    source: opt.TaskSource,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Log files or folders of them, optionally compressed with gzip."),
    ],
    store: Annotated[Path | None, typer.Option("--store", help="Run store to write.")] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="A format such as chat, otel, langgraph or inspect (an unknown name lists all), or my.py:read. By "
            "default detected from the first rows.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run; by default the file name.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the first transcript as it will be stored, and write nothing.")
    ] = False,
) -> None:
    """Import recorded transcripts as a run; samples of one question become candidates and share their common prefix.

    With --task, transcripts without a reference answer get that of the same question in the task, such as a CSV file.
    Invalid lines are reported, and the other lines are imported. To resume an interrupted import, repeat the command;
    files that are already in the store are skipped.
    """
    kind = None if source.kind is None else check_kind(source.kind)
    if dry_run:
        _preview(files, format)
        return
    if store is None:
        raise ConfigError("expected --store FILE, such as --store runs.db, or --dry-run to show the first transcript")
    from rich.progress import Progress

    from search.store.transcript_import import import_transcripts

    check_folder(store)
    references = source.load() if source.task is not None else ()
    console = stderr()
    tasks: dict[str, TaskID] = {}

    def listen(step: str, done: int, total: int) -> None:
        if step not in tasks:
            tasks[step] = bars.add_task(step, total=total)
        bars.update(tasks[step], completed=done)

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        found = import_transcripts(
            files, store, format=format, name=name, kind=kind, references=references, listen=listen
        )
    _show(found, store)


def _preview(files: list[Path], format: str | None) -> None:
    from mas_gym.logs import read_transcripts, recognize
    from mas_gym.logs.reader import log_files

    files = log_files(files)
    broken: list[BrokenLine] = []
    first = next(read_transcripts(files, format, broken=broken.append), None)
    _show_broken(broken, len(broken))
    if first is None:
        raise ConfigError(f"expected at least one transcript in {', '.join(map(str, files[:3]))}, found none")
    note(f"format {format or recognize(files[0])}, {one_line(first.place)}")
    _show_transcript(first)


def _show_transcript(one: Transcript) -> None:
    console = stdout()
    console.print("Question", style="bold")
    console.print(cut(one.question, _TEXT))
    console.print(f"Agents ({len(one.speakers)}): " + ", ".join(map(one_line, one.speakers)), style="bold")
    for number, message in enumerate(one.messages, 1):
        label = "" if message.label is None else f", label {message.label}"
        value = "" if message.value is None else f", value {message.value:g}"
        console.print(f"{number}. {one_line(message.speaker)}{label}{value}", style="bold")
        console.print(cut(message.said, _TEXT))
    correct = "unknown" if one.correct is None else str(one.correct).lower()
    facts = {"answer": one.answer, "reference": one.reference, "correct": correct, "score": one.score, **one.facts}
    shown = [f"{one_line(key)}: {one_line(value)}" for key, value in facts.items() if value is not None]
    console.print("\n".join(shown))
    dropped = ", ".join(f"{one_line(what)} ({number})" for what, number in one.dropped.items())
    console.print(f"Dropped: {dropped or 'nothing'}")


def _show(found: Imported, store: Path) -> None:
    for path in found.skipped[:_SHOWN]:
        note(f"{one_line(path)}: skipped, because its contents were imported before")
    if len(found.skipped) > _SHOWN:
        note(f"and {len(found.skipped) - _SHOWN:,} more files skipped")
    if found.run is None:
        return
    note(
        f"{found.transcripts:,} transcripts of {found.questions:,} questions by {len(found.agents):,} agents, in "
        f"{store} as run {one_line(found.name)}"
    )
    for what, number in found.dropped.items():
        note(f"dropped: {one_line(what)} ({number:,})")
    _show_broken(found.lines, found.broken)
    if found.ungraded:
        note(
            f"{found.ungraded:,} transcripts have neither an outcome nor a reference answer, so their outcome is "
            "unknown; import them with --task FILE.csv, which has the columns question and answer",
            "yellow",
        )
    if found.disagree:
        note(
            f"{found.disagree:,} recorded outcomes differ from the grade of the answer; the recorded outcomes are used",
            "yellow",
        )


def _show_broken(lines: list[BrokenLine] | tuple[BrokenLine, ...], number: int) -> None:
    if number:
        note(f"skipped {number:,} lines that are not transcripts:", "yellow")
        for line in lines[:_SHOWN]:
            note(f"  {one_line(line.place)}: {one_line(line.reason)}", "yellow")
        if number > _SHOWN:
            note(f"  and {number - _SHOWN:,} more", "yellow")
