"""Stream the JSON values of a file in bounded memory: JSON Lines, an array, or one document; also with gzip."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from mas_gym.errors import DataError, DataNotFoundError, shown
from mas_gym.tasks.rows import BadRow

MAX_LINE = 1 << 25
"""Maximum length of a line and of an array item, in bytes."""
MAX_DOCUMENT = 1 << 28
"""Maximum size of a JSON document that is not an array of rows, in bytes."""

_CHUNK = 1 << 16
_SPACE = b" \t\r\n"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Value(NamedTuple):
    """A JSON value of a file, or a `BadRow` with the reason for a missing value."""

    place: str
    value: object


def json_values(path: Path, listen: Callable[[int], None] = lambda done: None) -> Iterator[Value]:
    """Yield the values of a file: one per line, one per array item, or the whole document.

    An array of chat messages is one value.

    Args:
        path: The file.
        listen: Called with the number of bytes read so far.

    Raises:
        DataNotFoundError: The file does not exist.
        DataError: The path is not a regular file, cannot be read, or is UTF-16.
    """
    if not path.exists():
        raise DataNotFoundError(f"{path}: expected a log file; there is none")
    if not path.is_file():
        raise DataError(f"{path}: expected a regular file; name the files of a folder, as in FOLDER/*.jsonl")
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            stream: IO[bytes] = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if zipped else raw
            yield from _values(path, stream, lambda: listen(raw.tell()))
    except OSError as error:
        raise DataError(f"{path}: expected a readable file, got: {error}") from error


def _values(path: Path, stream: IO[bytes], tick: Callable[[], None]) -> Iterator[Value]:
    lines = _lines(path, stream, tick)
    head = next(lines, None)
    if head is None:
        return
    place, data = head
    if isinstance(data, bytes) and data.startswith(_UTF16):
        raise DataError(f"{path}: expected UTF-8 text, got UTF-16; convert the file to UTF-8")
    first = data if isinstance(data, BadRow) else parsed(data)
    whole = path.name.removesuffix(".gz").endswith(".json") or (
        isinstance(data, bytes) and data.strip() in (b"[", b"{")
    )
    if isinstance(first, BadRow) and whole:
        yield from _document(path, stream, data if isinstance(data, bytes) else b"", tick)
        return
    yield from _expanded(place, first)
    for place, data in lines:
        yield from _expanded(place, data if isinstance(data, BadRow) else parsed(data))


def _lines(path: Path, stream: IO[bytes], tick: Callable[[], None]) -> Iterator[tuple[str, bytes | BadRow]]:
    """Yield the lines that are not blank; a line that is too long is skipped without being stored."""
    number = 0
    while True:
        number += 1
        try:
            line = stream.readline(MAX_LINE)
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                while (rest := stream.readline(_CHUNK)) and not rest.endswith(b"\n"):
                    tick()
                yield f"{path}:{number}", BadRow(f"expected a line of at most {MAX_LINE >> 20} MiB, got a longer one")
                continue
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield f"{path}:{number}", BadRow(f"the compressed file is damaged or ends early from here on: {error}")
            return
        if not line:
            return
        tick()
        if line.strip(_SPACE):
            yield f"{path}:{number}", line


def parsed(data: bytes | str) -> Any:
    """Return the value of a JSON text, or a `BadRow`."""
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    except UnicodeDecodeError as error:
        return BadRow(f"expected UTF-8 text, got the byte {error.object[error.start]:#04x} at position {error.start}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow(f"expected a JSON value, got {shown(text.strip())} ({type(error).__name__}: {error})")


def _expanded(place: str, value: object) -> Iterator[Value]:
    if isinstance(value, list) and not is_history(value):
        yield from (Value(f"{place} item {number}", item) for number, item in enumerate(value))
    else:
        yield Value(place, value)


def is_history(value: list[object]) -> bool:
    """Whether a list is one chat history rather than a list of rows."""
    return bool(value) and is_message(value[0])


def is_message(value: object) -> bool:
    """Whether a value looks like a chat message of any dialect."""
    if not isinstance(value, Mapping):
        return False
    if "__event__" in value:
        # An event of AG2.
        return True
    if "role" in value:
        return "content" in value or "parts" in value or "tool_calls" in value or "tool_responses" in value
    kind = value.get("type")
    return (kind == "constructor" and "kwargs" in value) or (
        kind in ("human", "ai", "system", "tool") and ("content" in value or "data" in value)
    )


def _document(path: Path, stream: IO[bytes], head: bytes, tick: Callable[[], None]) -> Iterator[Value]:
    """Yield the values of a file with multi-line values: consecutive values, or the items of an array."""
    text = _Text(stream, head, tick)
    if text.peek() == "[":
        yield from _array(str(path), text)
        return
    number = 0
    while text.peek():
        item = text.item(MAX_DOCUMENT)
        place = f"{path} item {number}" if number else str(path)
        if isinstance(item, BadRow):
            yield from _broken_document(path, place, item, text)
            return
        yield from _expanded(place, item)
        number += 1


def _broken_document(path: Path, place: str, fault: BadRow, text: _Text) -> Iterator[Value]:
    """Yield the lines of an invalid document if some of them are values."""
    text.whole()
    lines = [parsed(line) for line in text.buffer.splitlines() if line.strip()]
    if all(isinstance(line, BadRow) for line in lines):
        yield Value(place, fault)
        return
    for number, line in enumerate(lines, 1):
        yield from _expanded(f"{path}:{number}", line)


def _array(place: str, text: _Text) -> Iterator[Value]:
    text.take()
    number = 0
    while True:
        sign = text.peek()
        if number and sign == ",":
            text.take()
            sign = text.peek()
        if sign == "]":
            return
        item = text.item(MAX_LINE) if sign else BadRow("the array has no end: the file is truncated")
        if number == 0 and is_message(item):
            # The array is one history; return it as a whole, including its first item.
            whole = text.whole()
            yield Value(place, BadRow(whole) if whole else _rest_of_array(item, text.buffer))
            return
        yield Value(f"{place} item {number}", item)
        if isinstance(item, BadRow):
            # If an item has no end, the beginning of the next item is unknown.
            return
        number += 1


def _rest_of_array(first: object, rest: str) -> Any:
    following = rest.lstrip().removeprefix(",")
    found = parsed("[" + following)
    return found if isinstance(found, BadRow) else [first, *found]


class _Text:
    """The text of a file that is read piece by piece."""

    def __init__(self, stream: IO[bytes], head: bytes, tick: Callable[[], None]) -> None:
        self._stream, self._tick, self._ended, self._fault = stream, tick, False, ""
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self.buffer = ""
        self._feed(head)

    def _feed(self, data: bytes) -> None:
        try:
            self.buffer += self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            self._ended, self._fault = True, f"expected UTF-8 text, got the byte {error.object[error.start]:#04x}"

    def _more(self, size: int) -> bool:
        """Read the next piece; return False at the end."""
        if self._ended:
            return False
        try:
            data = self._stream.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            data, self._fault = b"", f"the compressed file is damaged or ends early: {error}"
        self._tick()
        self._feed(data)
        self._ended = self._ended or not data
        return not self._ended

    def peek(self) -> str:
        """Return the next character that is not a space; empty at the end."""
        while not (text := self.buffer.lstrip(" \t\r\n")) and self._more(_CHUNK):
            pass
        self.buffer = text
        return text[:1]

    def take(self) -> None:
        """Skip the next character."""
        self.buffer = self.buffer[1:]

    def whole(self) -> str:
        """Read the rest; return why it cannot be read, or an empty text."""
        while self._more(_CHUNK):
            if len(self.buffer) > MAX_DOCUMENT:
                return f"expected a document of at most {MAX_DOCUMENT >> 20} MiB, got a larger one"
        return self._fault

    def item(self, most: int) -> Any:
        """Read one value of at most ``most`` characters."""
        while True:
            try:
                value, end = self._json.raw_decode(self.buffer)
                # A number may continue in the next piece.
                if end < len(self.buffer) or self._ended:
                    self.buffer = self.buffer[end:]
                    return value
            except (ValueError, RecursionError) as error:
                if self._ended or isinstance(error, RecursionError):
                    reason = self._fault or f"{type(error).__name__}: {error}"
                    return BadRow(f"expected a JSON value, got {shown(self.buffer)} ({reason})")
            if len(self.buffer) > most:
                return BadRow(f"expected values of at most {most >> 20} MiB, got a larger one, or no JSON")
            # Doubling keeps the total work linear.
            self._more(max(_CHUNK, len(self.buffer)))
