"""Read transcript files in any supported format, one transcript at a time."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mas_gym.errors import DataError, DataNotFoundError, MASGymError, UserCodeError, shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.internal.suggestions import choice
from mas_gym.logs.ag2_chats import ag2, is_ag2
from mas_gym.logs.agent_processbench import agent_processbench, is_agent_processbench
from mas_gym.logs.autogen_runs import autogen, is_autogen
from mas_gym.logs.chats import chat, is_chat
from mas_gym.logs.collector import Collector
from mas_gym.logs.crewai_runs import crewai, crewai_runs, is_crewai
from mas_gym.logs.inspect_logs import archive_samples, inspect, inspect_samples, is_archive, is_inspect
from mas_gym.logs.langfuse_traces import is_langfuse, langfuse_spans
from mas_gym.logs.langgraph_runs import is_langgraph, langgraph, langgraph_runs
from mas_gym.logs.langsmith_runs import is_langsmith, langsmith_spans
from mas_gym.logs.lm_eval import is_lm_eval, lm_eval, lm_eval_samples
from mas_gym.logs.math_shepherd import is_math_shepherd, math_shepherd
from mas_gym.logs.openai_batch import batch_parts, batch_transcripts, is_openai_batch
from mas_gym.logs.openinference_spans import is_phoenix, phoenix_spans
from mas_gym.logs.otel_spans import is_otel, otel_spans
from mas_gym.logs.prm800k import is_prm800k, prm800k
from mas_gym.logs.processbench import is_processbench, processbench
from mas_gym.logs.sharegpt import is_sharegpt, sharegpt
from mas_gym.logs.smolagents_runs import is_smolagents, smolagents
from mas_gym.logs.span_transcripts import span_parts, trace_transcripts
from mas_gym.logs.spans import Span
from mas_gym.logs.transcript import BrokenLine, Transcript, validate_transcript
from mas_gym.logs.verifiers_rollouts import is_verifiers, verifiers
from mas_gym.logs.who_and_when import is_who_and_when, who_and_when
from mas_gym.plugins import Spec, find_in_file
from mas_gym.tasks.data_rows import BadRow, RawRow
from mas_gym.tasks.json_rows import json_rows

logger = logging.getLogger("mas_gym.logs")

_SNIFFED = 20


class _Format(NamedTuple):
    """A format.

    Attributes:
        fits: Returns whether a row has this format.
        read: Reads a row.
        rows: Divides or joins the rows of a file before they are read.
        parts: In place of ``read``, returns the parts of a row, each with a key.
        join: Returns the transcripts of a key and its parts, which may be from several files.
    """

    fits: Callable[[object], bool]
    read: Callable[[Any], Transcript] | None = None
    rows: Callable[[Iterable[RawRow]], Iterable[RawRow]] = iter
    parts: Callable[[JSONMapping], Iterable[tuple[str, object]]] | None = None
    join: Callable[[str, list[JSONObject]], Iterable[Transcript]] | None = None


def _of_spans(fits: Callable[[object], bool], spans: Callable[[JSONMapping], Iterable[Span]]) -> _Format:
    return _Format(fits, parts=lambda row: span_parts(spans(row)), join=trace_transcripts)


FORMATS: Mapping[str, _Format] = {
    "who-and-when": _Format(is_who_and_when, who_and_when),
    "agent-processbench": _Format(is_agent_processbench, agent_processbench),
    "processbench": _Format(is_processbench, processbench),
    "prm800k": _Format(is_prm800k, prm800k),
    "math-shepherd": _Format(is_math_shepherd, math_shepherd),
    "phoenix": _of_spans(is_phoenix, phoenix_spans),
    "otel": _of_spans(is_otel, otel_spans),
    "langsmith": _of_spans(is_langsmith, langsmith_spans),
    "langfuse": _of_spans(is_langfuse, langfuse_spans),
    "openai-batch": _Format(is_openai_batch, parts=batch_parts, join=batch_transcripts),
    "inspect": _Format(is_inspect, inspect, inspect_samples),
    "lm-eval": _Format(is_lm_eval, lm_eval, lm_eval_samples),
    "verifiers": _Format(is_verifiers, verifiers),
    "sharegpt": _Format(is_sharegpt, sharegpt),
    "crewai": _Format(is_crewai, crewai, crewai_runs),
    "smolagents": _Format(is_smolagents, smolagents),
    "autogen": _Format(is_autogen, autogen),
    "langgraph": _Format(is_langgraph, langgraph, langgraph_runs),
    "ag2": _Format(is_ag2, ag2),
    "chat": _Format(is_chat, chat),
}
"""The formats, the most specific first."""


def recognize(path: str | os.PathLike[str]) -> str:
    """Infer the format of a file from its first rows.

    Raises:
        DataNotFoundError: The file does not exist.
        DataError: The format is none of `FORMATS`.
    """
    rows = list(islice(_rows(Path(path)), _SNIFFED))
    for _, row in rows:
        for name, one in FORMATS.items():
            if one.fits(row):
                return name
    found = _described(rows[0].value if rows else BadRow("no JSON value"))
    raise DataError(
        f"{path}: expected a log in one of the formats {', '.join(FORMATS)}, got {found}; name the format with "
        "format= or --format, or write a reader: --format my.py:read"
    )


def _described(row: object) -> object:
    if isinstance(row, dict):
        return f"the fields {shown(sorted(row))}"
    return row if isinstance(row, BadRow) else shown(row)


def _rows(path: Path, listen: Callable[[int], None] = lambda done: None) -> Iterator[RawRow]:
    if not path.exists():
        raise DataNotFoundError(f"{path}: expected a log file, but no such file exists")
    if not path.is_file():
        raise DataError(f"{path}: expected a regular file")
    # Only the logs of Inspect are archives.
    return archive_samples(path) if is_archive(path) else json_rows(path, listen, _is_row)


def _is_row(value: list[Any]) -> bool:
    """Whether an array is one row, rather than a list of rows."""
    return any(one.fits(value) for one in FORMATS.values())


def log_files(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the paths of files; a folder is replaced by its files, except hidden ones, in alphabetical order."""
    found: list[Path] = []
    for path in map(Path, [files] if isinstance(files, str | os.PathLike) else files):
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        found += [one for one in inside if one is path or (one.is_file() and not one.name.startswith("."))]
    return found


def check_format(format: str | None) -> None:
    """Check that a format exists. Raises `ConfigError` otherwise."""
    if format is not None and not Spec.parse(format).file:
        choice("format", format, tuple(FORMATS))


def read_transcripts(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    format: str | None = None,
    *,
    broken: Callable[[BrokenLine], None] | None = None,
    listen: Callable[[int], None] = lambda done: None,
) -> Iterator[Transcript]:
    """Yield the transcripts of log files.

    Args:
        files: One file or several, or folders of files; gzip files are decompressed.
        format: One of `FORMATS`, or ``FILE.py:NAME``: a function that is called with a file's path and yields
            `Transcript` objects or rows in the format ``chat``. With None, each file's format is inferred.
        broken: Called with each line that is not a transcript; by default, such lines are logged as warnings.
        listen: Called with the number of bytes read so far, over all files.

    Raises:
        ConfigError: The format does not exist.
        DataNotFoundError: A file does not exist.
        DataError: A file cannot be read, or its format cannot be recognized.
        UserCodeError: The user's function raised an error.
    """
    check_format(format)
    paths = log_files(files)
    tell = broken or (lambda line: logger.warning("%s: %s", line.place, line.reason))
    for found in _read(paths, format, listen):
        if isinstance(found, BrokenLine):
            tell(found)
        else:
            yield found


def _read(paths: list[Path], format: str | None, listen: Callable[[int], None]) -> Iterator[Transcript | BrokenLine]:
    collectors: defaultdict[str, Collector] = defaultdict(Collector)
    before = 0
    for path in paths:

        def heard(done: int, before: int = before) -> None:
            listen(before + done)

        try:
            if format is not None and Spec.parse(format).file:
                yield from _by_user(format, path)
            else:
                name = format or recognize(path)
                yield from _read_file(path, name, collectors[name], heard)
        except DataError as error:
            # With several files, report this file and read the others.
            if len(paths) == 1:
                raise
            yield BrokenLine(str(path), str(error))
        before += path.stat().st_size if path.exists() else 0
    for name, collector in collectors.items():
        if (join := FORMATS[name].join) is not None:
            for place, key, parts in collector.groups():
                yield from _tried(name, place, partial(join, key, parts))


def _read_file(
    path: Path, name: str, collector: Collector, listen: Callable[[int], None]
) -> Iterator[Transcript | BrokenLine]:
    format = FORMATS[name]

    def read(place: str, row: Any) -> Iterator[Transcript]:
        if isinstance(row, BadRow):
            raise row
        # Errors of `chat` are more specific, for rows that people write.
        if format.read is not chat and not format.fits(row):
            raise BadRow(f"expected a row of format {name}, got {_described(row)}")
        if format.read is not None:
            yield format.read(row)
        elif format.parts is not None:
            collector.add(place, format.parts(row))

    for place, row in format.rows(_rows(path, listen)):
        yield from _tried(name, place, partial(read, place, row))


def _tried(name: str, place: str, read: Callable[[], Iterable[Transcript]]) -> Iterator[Transcript | BrokenLine]:
    """Yield the transcripts that ``read`` returns; if it fails, the line is broken.

    Readers do not check the type of each value, because formats nest values of any type in many places.
    """
    try:
        yield from [replace(validate_transcript(one), place=one.place or place) for one in read()]
    except BadRow as fault:
        yield BrokenLine(place, str(fault))
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        yield BrokenLine(place, f"not of format {name}: {type(error).__name__}: {shown(error)}")


def _by_user(spec: str, path: Path) -> Iterator[Transcript | BrokenLine]:
    parsed = Spec.parse(spec)
    make = find_in_file("reader", parsed)
    args, kwargs = parsed.settings()
    try:
        for number, item in enumerate(make(path, *args, **kwargs), 1):
            one = [item] if isinstance(item, Transcript) else map(chat, [item])
            yield from _tried(spec, f"{path} item {number}", partial(iter, one))
    except MASGymError:
        raise
    except Exception as error:
        raise UserCodeError(f"reader {spec!r}: {parsed.blame(error)}") from error
