"""A recorded transcript, independent of the log's format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mas_gym.errors import is_number, shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.systems.tool_calls import ToolCall, with_calls
from mas_gym.tasks.base import KINDS, Kind
from mas_gym.tasks.data_rows import BadRow

LONGEST_NAME = 200
LONGEST_FACT = 1_000

RIGHT, NEUTRAL, WRONG = 1, 0, -1
"""Labels of messages."""


@dataclass(frozen=True, slots=True)
class LoggedMessage:
    """One message of a transcript.

    Attributes:
        speaker: The author: an agent, a tool or a user.
        text: The content without the tool calls.
        recipients: The recipients, if the log names them.
        tool_calls: The tool calls in the message.
        label: Human label: 1 right, 0 neutral, -1 wrong; None without a label.
        value: A critic's recorded value of the transcript up to this message; None if unknown.
        tokens: Generated tokens; 0 if unknown.
        logprob: Sum of token log-probabilities (nats); None if unknown.
        agent: Whether the author is an agent rather than a tool or a user.
        verdicts: Recorded values of the transcript up to this message, or verdicts on the message, by judge.
    """

    speaker: str
    text: str
    recipients: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    label: int | None = None
    value: float | None = None
    tokens: int = 0
    logprob: float | None = None
    agent: bool = True
    verdicts: Mapping[str, float] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """The text followed by its tool calls on the last line, as in a state."""
        return with_calls(self.text, self.tool_calls) if self.tool_calls else self.text


@dataclass(frozen=True)
class Transcript:
    """One recorded episode.

    Attributes:
        question: The question or task.
        messages: The messages, oldest first; at least one.
        answer: The system's final answer, if the log stores it separately from the last message.
        reference: The right answer; None if unknown.
        correct: Whether the episode succeeded; None if unknown.
        score: A recorded score of the whole episode; None if there is none.
        question_id: Id of the question; None to derive it from the question and the reference.
        sample_id: Id of the episode.
        kind: How to grade the answer; None to infer it from the reference answers.
        agents: System prompts by speaker, if logged.
        facts: Other short facts, such as the model.
        dropped: The kinds of content that were left out, with counts.
        place: File and line, for error messages.
    """

    question: str
    messages: tuple[LoggedMessage, ...]
    answer: str | None = None
    reference: str | None = None
    correct: bool | None = None
    score: float | None = None
    question_id: str | None = None
    sample_id: str | None = None
    kind: Kind | None = None
    agents: Mapping[str, str] = field(default_factory=dict)
    facts: JSONMapping = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    place: str = ""

    @property
    def speakers(self) -> list[str]:
        """The speakers, in order of first appearance."""
        return list(dict.fromkeys(message.speaker for message in self.messages))


class BrokenLine(NamedTuple):
    """A line or row that is not a transcript.

    Attributes:
        place: File and line.
        reason: The expected and the actual content.
    """

    place: str
    reason: str


def validate_transcript(transcript: Transcript) -> Transcript:
    """Return a transcript if it is valid. Raises `BadRow` otherwise."""
    if not isinstance(transcript, Transcript):
        raise BadRow(f"expected a Transcript or a row in the chat format, got {shown(transcript)}")
    if not isinstance(transcript.question, str) or not transcript.question.strip():
        raise BadRow(f"expected a question, got {shown(transcript.question)}")
    if not transcript.messages:
        raise BadRow("expected at least one message, got none")
    for message in transcript.messages:
        if not isinstance(message, LoggedMessage):
            raise BadRow(f"expected a LoggedMessage, got {shown(message)}")
        speaker_name(message.speaker)
        label_of(message.label)
        number(message.value, "value")
        number(message.logprob, "logprob")
    if transcript.kind is not None and transcript.kind not in KINDS:
        raise BadRow(f"expected one of the kinds {', '.join(KINDS)}, got {shown(transcript.kind)}")
    number(transcript.score, "score")
    try:
        json.dumps(dict(transcript.facts), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRow(f"expected JSON-serializable facts, got {shown(transcript.facts)} ({error})") from error
    return transcript


def speaker_name(name: object) -> str:
    """Return a speaker's name without surrounding spaces. Raises `BadRow` if it is not valid."""
    if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_NAME:
        raise BadRow(f"expected a speaker's name of 1 to {LONGEST_NAME} characters, got {shown(name)}")
    return name.strip()


def number(value: object, what: str) -> float | None:
    """Return a finite number, or None for None. Raises `BadRow` otherwise."""
    if value is None:
        return None
    if is_number(value):
        return float(value)
    raise BadRow(f"expected a finite number as {what}, got {shown(value)}")


def truth(value: object, what: str = "correct") -> bool | None:
    """Parse a boolean, 1, 0, -1 or a word such as "yes"; None for None. Raises `BadRow` otherwise."""
    if value is None or isinstance(value, bool):
        return value
    known = {"true": True, "yes": True, "1": True, "1.0": True, "correct": True}
    known |= {"false": False, "no": False, "0": False, "0.0": False, "-1": False, "-1.0": False, "incorrect": False}
    word = str(value).strip().lower() if isinstance(value, str | int | float) else ""
    if word not in known:
        raise BadRow(f"expected true or false as {what}, got {shown(value)}")
    return known[word]


def label_of(value: object) -> int | None:
    """Parse a message's label: 1, 0 or -1; true is 1 and false is -1. Raises `BadRow` otherwise."""
    if value is None:
        return None
    if isinstance(value, bool):
        return RIGHT if value else WRONG
    found = number(value, "label")
    if found not in (RIGHT, NEUTRAL, WRONG):
        raise BadRow(f"expected a label of 1, 0 or -1, got {shown(value)}")
    return int(found)


def verdicts_of(value: object) -> dict[str, float]:
    """Return the verdicts on a message by judge, without null verdicts. Raises `BadRow` if they are not numbers."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadRow(f"expected an object that maps judges to verdicts, got {shown(value)}")
    found = {speaker_name(judge): number(verdict, "verdict") for judge, verdict in value.items()}
    return {judge: verdict for judge, verdict in found.items() if verdict is not None}


def small_facts(row: Mapping[str, object], but: set[str]) -> JSONObject:
    """Return ``facts``, the short strings and numbers in a row, and ``dropped``, its other fields, without ``but``."""
    facts: JSONObject = {}
    dropped: JSONObject = {}
    for key, value in row.items():
        if key in but or value is None:
            continue
        brief = isinstance(value, str) and len(value) <= LONGEST_FACT
        plain = isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
        if len(key) <= LONGEST_NAME and (brief or plain):
            facts[key] = value
        else:
            dropped[f"field {key[:LONGEST_NAME]}"] = 1
    return {"facts": facts, "dropped": dropped}
