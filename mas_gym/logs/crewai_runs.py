"""Runs of CrewAI: a saved ``CrewOutput``, or the log file of ``Crew(output_log_file="log.json")``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.fields import field_text, has_fields, inside
from mas_gym.logs.transcript import LoggedMessage, Transcript, small_facts, speaker_name
from mas_gym.tasks.data_rows import BadRow, RawRow

_is_entry = has_fields("task_name", "task", "agent", "status")


def is_crewai(row: object) -> bool:
    """Whether a row is the output of a crew, an entry of a crew's log, or such a log."""
    if isinstance(row, list):
        return bool(row) and _is_entry(row[0])
    return _is_entry(row) or isinstance(inside(row, "tasks_output"), list)


def crewai_runs(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """Yield the runs of a crew's log, each a list; the start of the first task begins a run."""
    run: list[JSONMapping] = []
    begin = ""
    for place, row in rows:
        if isinstance(row, list) and is_crewai(row):
            yield from crewai_runs(RawRow(f"{place} entry {number}", entry) for number, entry in enumerate(row))
        elif isinstance(row, Mapping) and _is_entry(row):
            if run and row["status"] == "started" and row["task"] == run[0]["task"]:
                yield RawRow(begin, run)
                run = []
            begin = begin if run else place
            run.append(row)
        else:
            yield RawRow(place, row)
    if run:
        yield RawRow(begin, run)


def crewai(row: JSONMapping | list[JSONMapping]) -> Transcript:
    """Read a run: the question is the first task, and a task's output is a message of its agent."""
    if isinstance(row, list):
        ended = [one for one in row if one["status"] == "completed"]
        if not ended:
            raise BadRow("expected a completed task, got a log in which no task is completed")
        return Transcript(row[0]["task"], tuple(_message(one, "output") for one in ended))
    tasks = row["tasks_output"]
    messages = tuple(_message(one, "raw") for one in tasks)
    others = small_facts(row, {"raw", "tasks_output", "pydantic", "json_dict", "token_usage"})
    return Transcript(tasks[0]["description"], messages, **others)


def _message(entry: JSONMapping, name: str) -> LoggedMessage:
    return LoggedMessage(speaker_name(entry["agent"]), field_text(entry, name))
