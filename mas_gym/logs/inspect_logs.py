"""Evaluation logs of Inspect: ``.eval`` files, which are zip archives, and JSON logs."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mas_gym.errors import DataError, is_number, need, shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.chats import made, reference_of, text_or_none
from mas_gym.logs.fields import has_fields, inside, list_of
from mas_gym.logs.messages import message_content, read_history
from mas_gym.logs.transcript import Transcript
from mas_gym.tasks.data_rows import BadRow, RawRow
from mas_gym.tasks.json_rows import LONGEST, json_rows, parsed

_ZIP = b"PK\x03\x04"
_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0, "yes": 1.0, "no": 0.0, "true": 1.0, "false": 0.0}
"""Inspect's grades (correct, incorrect, partial, no answer) and words as numbers, as in its own accuracy."""
_ATTACHED = "attachment://"
_DEPTH = 20
_ZSTANDARD = 93
_NAME_LENGTHS = 26
"""Position of the lengths of the name and of the extra field in the header of a member."""


def is_archive(path: Path) -> bool:
    """Whether a file is a zip archive; False for a file that cannot be read."""
    try:
        with path.open("rb") as opened:
            return opened.read(len(_ZIP)) == _ZIP
    except OSError:
        return False


def archive_samples(path: Path) -> Iterator[RawRow]:
    """Yield the samples of an ``.eval`` file; a sample that cannot be read becomes a row with a `BadRow`.

    Raises:
        DataError: The archive is damaged, or it is not an Inspect log.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            inside = archive.infolist()
            if not any(_is_sample(one) or one.filename in _HEADERS for one in inside):
                names = shown([one.filename for one in inside])
                raise DataError(f"{path}: expected an Inspect log with samples/ID_epoch_N.json, got a zip of {names}")
            for one in filter(_is_sample, inside):
                yield RawRow(f"{path} {one.filename}", _member(path, archive, one))
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path}: expected a complete Inspect log (.eval), got: {error}") from error


_HEADERS = ("header.json", "_journal/start.json")


def _is_sample(one: zipfile.ZipInfo) -> bool:
    return one.filename.startswith("samples/") and one.filename.endswith(".json")


def _member(path: Path, archive: zipfile.ZipFile, one: zipfile.ZipInfo) -> object:
    """Return the JSON value of a member of the archive, of at most `LONGEST` bytes."""
    try:
        if one.compress_type == _ZSTANDARD:
            data = _unpacked(path, one)
        else:
            with archive.open(one) as opened:
                data = opened.read(LONGEST + 1)
    except NotImplementedError as error:
        raise DataError(
            f"{path}: expected members compressed with deflate or Zstandard, got: {error}; convert the log with: "
            "inspect log convert --to json"
        ) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OSError, struct.error) as error:
        return BadRow(f"expected a complete member of the archive, got: {error}")
    if len(data) > LONGEST:
        return BadRow(f"expected a sample of at most {LONGEST:,} bytes, got more")
    return parsed(data)


def _unpacked(path: Path, one: zipfile.ZipInfo) -> bytes:
    """Return the content of a member that Inspect compressed with Zstandard, which Python 3.11 cannot read."""
    pyarrow = need("pyarrow", f"{path}: an Inspect log compressed with Zstandard", "data")
    with path.open("rb") as file:
        file.seek(one.header_offset + _NAME_LENGTHS)
        file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
        packed = file.read(min(one.compress_size, LONGEST))
    with pyarrow.CompressedInputStream(pyarrow.BufferReader(packed), "zstd") as stream:
        data: bytes = stream.read(LONGEST + 1)
    if len(data) <= LONGEST and zlib.crc32(data) != one.CRC:
        raise zipfile.BadZipFile(f"bad CRC-32 of {one.filename}")
    return data


def model_of(path: Path) -> str:
    """Return the name of the model in a log's header; empty if the log does not name it."""
    header: object = None
    if is_archive(path):
        with zipfile.ZipFile(path) as archive:
            found = [one for name in _HEADERS for one in archive.infolist() if one.filename == name]
            header = _member(path, archive, found[0]) if found else None
    else:
        header = next((row.value for row in json_rows(path)), None)
    model = inside(header, "eval", "model")
    return model if isinstance(model, str) else ""


_is_header = has_fields("eval", "plan")
_is_whole_sample = has_fields("id", "input", "target", "messages")


def is_inspect(row: object) -> bool:
    """Whether a row is a JSON log of Inspect, or one of its samples."""
    return _is_whole_sample(row) or _is_log(row)


def _is_log(row: object) -> bool:
    samples = list_of(inside(row, "samples"))
    return _is_whole_sample(samples[0]) if samples else _is_header(row)


def inspect_samples(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """Yield the samples of JSON logs, and other rows unchanged."""
    for place, row in rows:
        if isinstance(row, Mapping) and _is_log(row):
            samples = row.get("samples")
            if not isinstance(samples, list) or not samples:
                status = f"a log of status {shown(row.get('status'))} without samples"
                yield RawRow(place, BadRow(f"expected samples, got {status}; write the log with its samples"))
                continue
            yield from (RawRow(f"{place} sample {number}", sample) for number, sample in enumerate(samples))
        else:
            yield RawRow(place, row)


def inspect(row: JSONMapping) -> Transcript:
    """Read a sample of an Inspect log."""
    messages = list_of(_attached(row["messages"], row.get("attachments") or {}))
    # The choices are only in the first message.
    history = read_history(_named(messages, row), None if row.get("choices") else _asked(row["input"]))
    scores = sample_scores(row)
    name, value = next(((name, value) for name, value in scores.items() if value is not None), ("", None))
    facts = {"id": text_or_none(row["id"], "id"), "epoch": row.get("epoch"), "scorer": name}
    facts["error"] = (inside(row, "error", "message") or "")[:1000]
    return made(
        history,
        answer=_answer(row),
        reference=reference_of(row["target"] or None),
        correct=bool(value) if value in (0, 1) else None,
        score=None if value in (0, 1) else value,
        sample_id=text_or_none(row.get("uuid"), "uuid"),
        facts={key: fact for key, fact in facts.items() if fact},
    )


def _named(messages: list[JSONMapping], row: JSONMapping) -> list[object]:
    """Return the messages with the tokens of model calls and, if there are several, the solvers or agents as names."""
    authors = _authors(row.get("events"))
    several = len({name for name, _ in authors.values()} - {None}) > 1
    found: list[object] = []
    for one in messages:
        name, tokens = authors.get(one.get("id"), (None, None))
        found.append({"tokens": tokens, **({"name": name} if several and name else {}), **one})
    return found


def _authors(events: object) -> dict[object, tuple[str | None, object]]:
    """Return the span and the generated tokens of each message that a model wrote, by the message's id.

    The span is the innermost one of an agent or a solver.
    """
    parents: dict[object, object] = {}
    names: dict[object, str] = {}
    found: dict[object, tuple[str | None, object]] = {}
    for event in list_of(events):
        if event.get("event") == "span_begin":
            parents[event["id"]] = event.get("parent_id")
            if event.get("type") in ("agent", "solver"):
                names[event["id"]] = event["name"]
        elif event.get("event") == "model":
            span, passed = event.get("span_id"), 0
            while span in parents and span not in names and passed < _DEPTH:
                span, passed = parents[span], passed + 1
            for choice in list_of(inside(event, "output", "choices")):
                tokens = inside(event, "output", "usage", "output_tokens")
                found[inside(choice, "message", "id")] = names.get(span), tokens
    return found


def sample_scores(sample: JSONMapping) -> dict[str, float | None]:
    """Return a sample's scores by scorer, or by ``scorer/key`` for scores with several values; None for no number."""
    scores = sample.get("scores")
    if not isinstance(scores, Mapping):
        scores = {"score": sample["score"]} if isinstance(sample.get("score"), Mapping) else {}
    found: dict[str, float | None] = {}
    for name, score in scores.items():
        value = score.get("value") if isinstance(score, Mapping) else score
        if isinstance(value, Mapping):
            found.update({f"{name}/{key}": _number(part) for key, part in value.items()})
        else:
            found[name] = _number(value)
    return found


def _number(value: object) -> float | None:
    if isinstance(value, str):
        return _GRADES.get(value, _GRADES.get(value.strip().lower()))
    return float(value) if isinstance(value, bool) or is_number(value) else None


def question_text(sample: JSONMapping) -> str:
    """Return the text of a sample's input, to compare the questions of two logs."""
    return _asked(sample.get("input")) or ""


def _asked(given: object) -> str | None:
    if isinstance(given, list):
        users = [one for one in given if isinstance(one, Mapping) and one.get("role") == "user"]
        given = message_content(users[-1].get("content"))[0] if users else None
    return given if isinstance(given, str) and given.strip() else None


def _answer(row: JSONMapping) -> str | None:
    answers = (inside(score, "answer") for score in (row.get("scores") or {}).values())
    return next((answer for answer in answers if isinstance(answer, str) and answer.strip()), None)


def _attached(value: object, attachments: JSONMapping) -> object:
    """Return a value with the texts that are stored as attachments."""
    if isinstance(value, str) and value.startswith(_ATTACHED):
        return attachments.get(value.removeprefix(_ATTACHED), value)
    if isinstance(value, list):
        return [_attached(one, attachments) for one in value]
    if isinstance(value, Mapping):
        return {key: _attached(one, attachments) for key, one in value.items()}
    return value
