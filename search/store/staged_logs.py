"""Temporary storage of transcripts read from logs, before they are written to a store."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

from mas_gym.errors import StoreError
from mas_gym.internal.json_types import JSONObject
from mas_gym.logs import BrokenLine, LoggedMessage, ToolCall, Transcript
from mas_gym.tasks.base import Kind
from mas_gym.tasks.user_data import infer_kind

START = "start"
"""The agent of an empty first turn, used if a question's samples begin with different agents."""

BATCH = 100
"""Number of questions written in one transaction."""

_values = attrgetter(*(field.name for field in fields(LoggedMessage)))
_MOST_LISTED = 1_000
_GUESSED = 10_000

_TABLES = """
CREATE TABLE questions (id TEXT PRIMARY KEY, question TEXT NOT NULL, reference TEXT NOT NULL, kind TEXT);
CREATE TABLE samples (
    number INTEGER PRIMARY KEY,
    question TEXT NOT NULL,
    sample TEXT NOT NULL,
    place TEXT NOT NULL,
    first TEXT NOT NULL,
    data BLOB NOT NULL,             -- compressed JSON
    digest BLOB NOT NULL
);
CREATE INDEX samples_of ON samples (question, number);
"""


class StagedSample(NamedTuple):
    """A staged sample."""

    sample: str | None
    place: str
    messages: list[LoggedMessage]
    more: JSONObject


class Staging:
    """Transcripts read from logs; texts are stored as JSON, because they may have lone surrogates.

    Attributes:
        agents: The prompt of each speaker, None if it is unknown, in order of appearance.
        kind: The grading kind of questions without one.
        longest: Number of messages of the longest transcript, plus 1.
        dropped: Number of omissions from transcripts, by reason.
        broken: Number of lines that are not transcripts.
        lines: The first of these lines.
    """

    def __init__(self) -> None:
        # A temporary file, which SQLite deletes, and one transaction, which is never committed.
        self._connection = sqlite3.connect("")
        self._connection.executescript(_TABLES)
        self.agents: dict[str, str | None] = {}
        self.kind: Kind = "text"
        self.longest = 1
        self.dropped: Counter[str] = Counter()
        self.broken = 0
        self.lines: list[BrokenLine] = []

    def close(self) -> None:
        """Delete the transcripts."""
        self._connection.close()

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
        [number] = self._connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(number)

    def add_broken(self, line: BrokenLine) -> None:
        """Count a line that is not a transcript."""
        self.broken += 1
        if len(self.lines) < _MOST_LISTED:
            self.lines.append(line)

    def fill(self, transcripts: Iterable[Transcript], kind: Kind | None) -> None:
        """Stage all transcripts. Raises `StoreError` if the temporary folder is full."""
        for one in transcripts:
            try:
                self._add(one)
            except sqlite3.Error as error:
                raise StoreError(
                    f"temporary file for the import: {error}; free space in the temporary folder, or name another one "
                    "with the environment variable SQLITE_TMPDIR"
                ) from error
        query = "SELECT count(*) FROM (SELECT 1 FROM samples GROUP BY question HAVING count(DISTINCT first) > 1)"
        if self._connection.execute(query).fetchone()[0]:
            self.agents[START] = None
        query = "SELECT DISTINCT reference FROM questions WHERE reference != 'null' AND kind IS NULL LIMIT ?"
        references = [json.loads(text) for (text,) in self._connection.execute(query, (_GUESSED,))]
        guessed: Any = kind or infer_kind(references)
        # Code from a log is run only on explicit request.
        self.kind = "text" if kind is None and guessed == "code" else guessed

    def _add(self, one: Transcript) -> None:
        key = self._question(one)
        messages = [_values(message) for message in one.messages]
        more = {"answer": one.answer, "correct": one.correct, "score": one.score, "facts": dict(one.facts)}
        data = json.dumps([messages, more]).encode()
        mark = hashlib.blake2b(data, digest_size=16).digest()
        sample, first = json.dumps(one.sample_id), json.dumps(one.messages[0].speaker)
        query = "SELECT 1 FROM samples WHERE question = ? AND sample = ? AND digest = ?"
        if one.sample_id is not None and self._connection.execute(query, (key, sample, mark)).fetchone():
            self.add_broken(BrokenLine(one.place, f"expected distinct sample ids, got {one.sample_id!a} twice"))
            return
        for speaker in one.speakers:
            self.agents[speaker] = self.agents.get(speaker) or one.agents.get(speaker)
        self.dropped.update(one.dropped)
        self.longest = max(self.longest, len(one.messages) + 1)
        self._connection.execute(
            "INSERT INTO samples (question, sample, place, first, data, digest) VALUES (?, ?, ?, ?, ?, ?)",
            (key, sample, json.dumps(one.place), first, zlib.compress(data, 1), mark),
        )

    def _question(self, one: Transcript) -> str:
        """Return the id of a transcript's question, or a new id if that id belongs to another text."""
        wanted = one.question_id or question_name(one.question, one.reference)
        row = (json.dumps(one.question), json.dumps(one.reference))
        for number in count(1):
            key = json.dumps(wanted if number == 1 else f"{wanted} ({number})")
            query = "SELECT question, reference FROM questions WHERE id = ?"
            known = self._connection.execute(query, (key,)).fetchone()
            if known is None:
                self._connection.execute("INSERT INTO questions VALUES (?, ?, ?, ?)", (key, *row, one.kind))
                self.dropped.update(["question id of another question"] if number > 1 else [])
            if known in (None, row):
                return key
        raise AssertionError("unreachable")

    def questions(self, first: int) -> list[tuple[str, str, str | None, str | None]]:
        """Return id, question, reference and kind of the next questions from position ``first`` on, in log order."""
        query = "SELECT id, question, reference, kind FROM questions WHERE rowid > ? ORDER BY rowid LIMIT ?"
        rows = self._connection.execute(query, (first, BATCH))
        return [(*(json.loads(text) for text in row[:3]), row[3]) for row in rows]

    def samples(self, question: str) -> list[StagedSample]:
        """Return the samples of a question in order of appearance."""
        query = "SELECT sample, place, data FROM samples WHERE question = ? ORDER BY number"
        found = []
        for sample, place, data in self._connection.execute(query, (json.dumps(question),)):
            messages, more = json.loads(zlib.decompress(data))
            found.append(StagedSample(json.loads(sample), json.loads(place), [_message(one) for one in messages], more))
        return found


def _message(values: Sequence[Any]) -> LoggedMessage:
    speaker, text, recipients, calls, *rest = values
    return LoggedMessage(speaker, text, tuple(recipients), tuple(ToolCall(*call) for call in calls), *rest)


def question_name(question: str, reference: str | None) -> str:
    """Return an id for a question that has none; equal questions have the same id in every log."""
    text = json.dumps([" ".join(question.split()), reference])
    return "q-" + hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
