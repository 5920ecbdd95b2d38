"""Runs of CrewAI: a saved ``CrewOutput``, or the log file of ``Crew(output_log_file="log.json")``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.messages import written
from mas_gym.logs.transcript import LoggedMessage, Transcript, small_facts, speaker_name
from mas_gym.tasks.data_rows import BadRow, RawRow


def is_crewai(row: object) -> bool:
    """Whether a row is the output of a crew, an entry of a crew's log, or such a log."""
    if isinstance(row, list):
        return bool(row) and _is_entry(row[0])
    return _is_entry(row) or (isinstance(row, Mapping) and isinstance(row.get("tasks_output"), list))


def _is_entry(row: object) -> bool:
    return isinstance(row, Mapping) and row.keys() >= {"task_name", "task", "agent", "status"}


def crewai_runs(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """Yield the runs of a crew's log; the start of the first task begins a run."""
    run: list[object] = []
    begin = ""
    for place, row in rows:
        if isinstance(row, list) and is_crewai(row):
            yield from crewai_runs(RawRow(f"{place} entry {number}", entry) for number, entry in enumerate(row))
        elif isinstance(row, Mapping) and _is_entry(row):
            first = run[0] if run else None
            if isinstance(first, Mapping) and row["status"] == "started" and row["task"] == first["task"]:
                yield RawRow(begin, {"entries": run})
                run = []
            begin = begin if run else place
            run.append(row)
        else:
            yield RawRow(place, row)
    if run:
        yield RawRow(begin, {"entries": run})


def crewai(row: object) -> Transcript:
    """Read a run: the question is the first task, and a task's output is a message of its agent.

    Raises:
        BadRow: The row has another format.
    """
    if isinstance(row, Mapping) and isinstance(row.get("entries"), list):
        ended = [one for one in row["entries"] if isinstance(one, Mapping) and one.get("status") == "completed"]
        if not ended:
            raise BadRow("expected a completed task, got a log in which no task is completed")
        return _transcript(row["entries"][0].get("task"), [_message(one, "output") for one in ended], {}, {})
    tasks = row.get("tasks_output") if isinstance(row, Mapping) else None
    if not isinstance(row, Mapping) or not isinstance(tasks, list) or not tasks:
        raise BadRow(f"expected tasks_output, or a log of tasks with agent, status and output, got {shown(row)}")
    first = tasks[0] if isinstance(tasks[0], Mapping) else {}
    facts, dropped = small_facts(row, {"raw", "tasks_output", "pydantic", "json_dict", "token_usage"})
    return _transcript(first.get("description"), [_message(one, "raw") for one in tasks], facts, dropped)


def _message(entry: object, name: str) -> LoggedMessage:
    if not isinstance(entry, Mapping) or entry.get(name) in (None, ""):
        raise BadRow(f"expected a task with agent and {name}, got {shown(entry)}")
    return LoggedMessage(speaker_name(entry.get("agent")), written(entry[name]))


def _transcript(
    question: object, messages: list[LoggedMessage], facts: JSONMapping, dropped: Mapping[str, int]
) -> Transcript:
    if not isinstance(question, str):
        raise BadRow(f"expected the description of the first task, got {shown(question)}")
    return Transcript(question, tuple(messages), facts=facts, dropped=dropped)
