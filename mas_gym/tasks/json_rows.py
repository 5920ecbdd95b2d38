"""Read the rows of JSON files: JSON Lines, an array, or one or more documents. A file may be compressed with gzip."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from mas_gym.errors import DataError, shown
from mas_gym.tasks.data_rows import BadRow, RawRow

LONGEST = 64 * 2**20
"""Maximum size of a line, and of a document of several lines, in bytes, decompressed."""
_GAP = re.compile(r"[\s,]*")


def json_rows(
    path: Path,
    listen: Callable[[int], None] = lambda done: None,
    whole: Callable[[list[Any]], bool] = lambda value: False,
) -> Iterator[RawRow]:
    """Yield the rows of a file: one per line of JSON Lines, one per item of an array, or one per document.

    JSON Lines are read line by line, and documents as a whole; both are limited to `LONGEST`. An invalid part becomes a
    row with a `BadRow` as its value.

    Args:
        path: The file.
        listen: Called with the number of bytes read so far.
        whole: Returns whether an array is one row.

    Raises:
        DataError: The file cannot be read, or a line or document is too long.
    """
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if zipped else raw  # type: ignore[assignment]
            lines = _lines(path, stream, lambda: listen(raw.tell()))
            for place, value in _values(path, lines):
                if isinstance(value, list) and not whole(value):
                    yield from (RawRow(f"{place} item {number}", item) for number, item in enumerate(value))
                else:
                    yield RawRow(place, value)
    except OSError as error:
        raise DataError(f"{path}: expected a readable file, got: {error}") from error


def _lines(path: Path, stream: IO[bytes], tick: Callable[[], None]) -> Iterator[RawRow]:
    number = 0
    try:
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST + 1), b""), 1):
            if len(line) > LONGEST:
                raise _too_long(f"{path}:{number}", "line")
            tick()
            if line.strip():
                yield RawRow(f"{path}:{number}", line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = f"the compressed file is damaged or ends early from here on: {error}"
        yield RawRow(f"{path}:{number + 1}", BadRow(reason))


def _values(path: Path, lines: Iterator[RawRow]) -> Iterable[RawRow]:
    first = next(lines, None)
    if first is None:
        return ()
    is_document = path.name.removesuffix(".gz").endswith(".json") or first.value in (b"[\n", b"[\r\n", b"{\n", b"{\r\n")
    if is_document and isinstance(parsed(first.value), BadRow):
        return _document(path, list(_limited(path, chain([first], lines))))
    return (RawRow(place, parsed(data)) for place, data in chain([first], lines))


def _limited(path: Path, lines: Iterable[RawRow]) -> Iterator[RawRow]:
    size = 0
    for line in lines:
        size += len(line.value) if isinstance(line.value, bytes) else 0
        if size > LONGEST:
            raise _too_long(str(path), "document")
        yield line


def _too_long(place: str, what: str) -> DataError:
    return DataError(
        f"{place}: expected a {what} of at most {LONGEST:,} bytes after decompression, got more; write JSON Lines with "
        "one row per line"
    )


def _document(path: Path, lines: list[RawRow]) -> list[RawRow]:
    """Return the values of a file in which a value may take several lines."""
    data = b"".join(line.value for line in lines if isinstance(line.value, bytes))
    damage = [line for line in lines if isinstance(line.value, BadRow)]
    found = parsed(data)
    if not isinstance(found, BadRow):
        return [RawRow(str(path), found), *damage]
    text = _text(data)
    rows = [RawRow(str(path), text)] if isinstance(text, BadRow) else list(_items(str(path), text))
    by_line = [RawRow(place, parsed(value)) for place, value in lines]
    valid = any(not isinstance(row.value, BadRow) for row in by_line)
    return by_line if valid and isinstance(rows[0].value, BadRow) else [*rows, *damage]


def _items(path: str, text: str) -> Iterator[RawRow]:
    """Yield consecutive values or the items of an array, up to the first invalid one."""
    decoder, number = json.JSONDecoder(), 0
    is_array = text.lstrip().startswith("[")
    at = text.index("[") + 1 if is_array else 0
    while (at := _GAP.match(text, at).end()) < len(text) or is_array:  # type: ignore[union-attr]
        place = f"{path} item {number}"
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            yield RawRow(place, _broken(text[at:], error))
            return
        yield RawRow(place, value)
        number += 1


def parsed(data: object) -> object:
    """Return the value of a JSON text, given as text or UTF-8 bytes, or a `BadRow`; a given `BadRow` is kept."""
    text = _text(data)
    if isinstance(text, BadRow):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return _broken(text, error)


def _text(data: object) -> str | BadRow:
    if isinstance(data, BadRow):
        return data
    try:
        return data.decode("utf-8-sig") if isinstance(data, bytes) else str(data)
    except UnicodeDecodeError as error:
        return BadRow(f"expected UTF-8 text, got: {error}; convert the file to UTF-8")


def _broken(text: str, error: Exception) -> BadRow:
    return BadRow(f"expected a JSON value, got {shown(text.strip())} ({type(error).__name__}: {error})")
