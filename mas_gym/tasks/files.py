"""Read raw rows from one file, a folder, a data set saved to disk, or the Hugging Face hub."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mas_gym.errors import ConfigError, DataError, need, shown
from mas_gym.internal.json_types import JSONObject
from mas_gym.tasks.logiqa import logiqa_block
from mas_gym.tasks.rows import BadRow, Row

if TYPE_CHECKING:
    import pyarrow

MAX_BYTES = 1 << 29
"""Maximum size of a data file, and of a Parquet file's content in memory."""

MAX_COLUMNS = 1000
"""Maximum number of columns of a Parquet file; each field of a nested column counts."""

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
PARTITIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "train": ("train",),
        "test": ("test",),
        "validation": ("validation", "val", "valid", "eval"),
        "gpqa_main": ("gpqa_main", "train"),
        "gpqa_diamond": ("gpqa_diamond", "test"),
    }
)

_PART = re.compile(r"_(?:test|val|dev|train)$")
_DIGITS = re.compile(r"(\d+)")
_SHARD = re.compile(r"-\d+-of-\d+")


def stamp(place: Path) -> tuple[tuple[str, int, int], ...]:
    """Return values that change whenever the file, or a file in the folder, changes."""
    seen = [place, *(sorted(place.iterdir()) if place.is_dir() else ())]
    states = [(path.name, path.stat()) for path in seen if path.exists()]
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)


def absolute(place: str | Path) -> Path:
    """Return the absolute path of a file or folder, which may not exist.

    Raises:
        ConfigError: The text is not a path.
    """
    try:
        path = Path(place).expanduser().resolve()
        path.exists()
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"expected the path of a file or folder, got {shown(str(place))}: {error}") from None
    return path


def three_ways(name: str, why: str) -> str:
    """Return a message about missing data, with the three ways to provide it."""
    return (
        f"no data for task {name!r}: {why}. Three ways to provide it:\n"
        f"  1. a file: load_task({name!r}, data='test.jsonl'), in JSONL, JSON, Parquet or the format of the original "
        "release;\n"
        f"  2. a folder: load_task({name!r}, data='FOLDER'), with files named train, test or validation, or saved by "
        "datasets' save_to_disk;\n"
        "  3. the Hugging Face hub: pip install 'mas-gym[data]', leave data out, and be online once (later runs use "
        "its cache)"
    )


# ------------------------------------------------------------------- files


def read_file(path: Path, name: str) -> list[Row]:
    """Read the raw rows of one file.

    Raises:
        DataError: The content does not match the file's suffix.
        MissingDependencyError: The file is Parquet and pyarrow is not installed.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: expected a file of type {', '.join(SUFFIXES)}, got {path.suffix or 'no suffix'!r}")
    try:
        return list(reader(path, name))
    except OSError as error:
        raise DataError(f"{path}: expected a readable file, got: {error}") from error


def _check_size(path: Path, size: int, what: str = "file") -> None:
    if size > MAX_BYTES:
        raise DataError(
            f"{path}: expected a {what} of at most {MAX_BYTES >> 20} MiB, got {size >> 20:,} MiB; use a part of it"
        )


def _text(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"{path}: expected a regular file")
    _check_size(path, path.stat().st_size)
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # the error's position does not count a byte order mark
        start = error.start + len(data) - len(error.object)
        line = data.count(b"\n", 0, start) + 1
        raise DataError(
            f"{path}:{line}: expected UTF-8 text, got the byte {data[start]:#04x} at position {start}; "
            "convert the file to UTF-8"
        ) from None


def _jsonl(path: Path, name: str) -> Iterator[Row]:
    for number, line in enumerate(io.StringIO(_text(path), newline=None), start=1):
        if line.strip():
            yield Row(f"{path}:{number}", _parsed(line))


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow(f"expected one JSON object, got {shown(text.strip())} ({type(error).__name__}: {error})")


def _json(path: Path, name: str) -> Iterator[Row]:
    text = _text(path)
    value = _parsed(text)
    if isinstance(value, BadRow) and "\n" in text.strip():
        # some releases name their JSON Lines files .json
        yield from _jsonl(path, name)
    elif isinstance(value, list):
        yield from (Row(f"{path}: item {number}", item) for number, item in enumerate(value))
    else:
        yield Row(str(path), value)


def _parquet(path: Path, name: str) -> Iterator[Row]:
    need("pyarrow", f"{path}: reading Parquet", "data")
    import pyarrow
    import pyarrow.parquet

    try:
        _check_size(path, path.stat().st_size)
        with pyarrow.parquet.ParquetFile(path) as file:
            texts = _checked_columns(path, file.metadata)
        # Texts stay dictionary-encoded until their size is known: one stored text can encode a million equal values.
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            rows: list[JSONObject] = []
            size = 0
            for batch in file.iter_batches(_BATCH):
                size += _ROW_BYTES * batch.num_rows + sum(map(_python_bytes, batch.columns))
                _check_size(path, size, "content")
                rows += batch.to_pylist()
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: expected a Parquet file, got: {shown(str(error))}") from error
    yield from (Row(f"{path}: row {number}", row) for number, row in enumerate(rows))


_BATCH = 1024
_ROW_BYTES, _VALUE_BYTES = 512, 128
"""Approximate overhead of a row and of a value as Python objects, in bytes, without their content."""


def _checked_columns(path: Path, facts: pyarrow.parquet.FileMetaData) -> list[str]:
    """Check the declared size of a Parquet file before it is read; return its text columns."""
    if facts.num_columns > MAX_COLUMNS:
        raise DataError(
            f"{path}: expected at most {MAX_COLUMNS:,} columns, got {facts.num_columns:,}; remove those that the "
            "task does not need"
        )
    groups = [facts.row_group(place) for place in range(facts.num_row_groups)]
    columns = [facts.schema.column(place) for place in range(facts.num_columns)]
    _check_size(path, sum(group.total_byte_size for group in groups), "content")
    values = sum(
        group.column(place).num_values * (_VALUE_BYTES + max(column.length, 0))
        for group in groups
        for place, column in enumerate(columns)
    )
    _check_size(path, _ROW_BYTES * facts.num_rows + values, "content")
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _python_bytes(array: pyarrow.Array) -> int:
    """Return the approximate size in bytes of an Arrow array's values as Python objects."""
    import pyarrow
    from pyarrow import compute

    size = _VALUE_BYTES * len(array)
    if isinstance(array, pyarrow.ExtensionArray):
        return _python_bytes(array.storage)
    if isinstance(array, pyarrow.DictionaryArray):
        return size + (compute.sum(compute.binary_length(array.dictionary).take(array.indices)).as_py() or 0)
    if isinstance(array, pyarrow.StructArray):
        return size + sum(map(_python_bytes, array.flatten()))
    if isinstance(array, pyarrow.MapArray):
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return size + sum(_python_bytes(part.slice(first, last - first)) for part in (array.keys, array.items))
    if pyarrow.types.is_nested(array.type):
        return size + _python_bytes(array.flatten())
    return size + int(array.nbytes)


def _csv(path: Path, name: str) -> Iterator[Row]:
    if name != "mmlu":
        yield from _table(path)
        return
    # MMLU's own release has no header
    subject = _PART.sub("", path.stem)
    for line, cells in _cells(path):
        if not cells or (line == 1 and cells[0].strip().lower() == "question"):
            continue
        value: object = BadRow(f"expected 6 cells (question, A, B, C, D, letter), got {len(cells)}: {shown(cells)}")
        if len(cells) == 6:
            value = {"question": cells[0], "choices": cells[1:5], "answer": cells[5], "subject": subject}
        yield Row(f"{path}:{line}", value)


def _table(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file with column names in the first row."""
    rows = (row for row in _cells(path) if row[1])
    header = [cell.strip() for cell in next(rows, (0, []))[1]]
    if len(set(header)) < len(header):
        raise DataError(f"{path}: expected columns of different names, got {shown(header)}")
    for line, cells in rows:
        value: object = BadRow(f"expected {len(header)} cells, one per column, got {len(cells)}: {shown(cells)}")
        if len(cells) == len(header):
            value = dict(zip(header, cells, strict=True))
        yield Row(f"{path}:{line}", value)


def _cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the last line and the cells of each row of a CSV file."""
    reader = csv.reader(io.StringIO(_text(path), newline=""))
    while True:
        begin = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{path}:{begin}: expected cells of at most {csv.field_size_limit()} characters with closed quotes, "
                f"got: {error}"
            ) from None
        if cells is None:
            return
        yield reader.line_num, cells


def _txt(path: Path, name: str) -> Iterator[Row]:
    block: list[str] = []
    for number, line in enumerate([*io.StringIO(_text(path), newline=None), ""], start=1):
        if line.strip():
            block.append(line.strip())
        elif block:
            try:
                value: object = logiqa_block(block)
            except BadRow as error:
                value = error
            yield Row(f"{path}:{number - len(block)}", value)
            block = []


_READERS: Mapping[str, Callable[[Path, str], Iterator[Row]]] = MappingProxyType(
    {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".csv": _csv, ".txt": _txt}
)


# ----------------------------------------------------------------- folders


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(path.as_posix())]


def read_partition(folder: Path, partition: str, name: str) -> list[Row]:
    """Read the rows of a partition from a folder's files; empty if there is no such partition."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _saved(folder, partition)
    return [row for file in _partition_files(folder, partition) for row in read_file(file, name)]


def _partition_files(folder: Path, partition: str) -> list[Path]:
    """Find the files of a partition: ``test.jsonl``, ``test-00000-of-00001.parquet``, ``data/test*``, ``test/**``."""
    for place in (folder, folder / "data"):
        if not place.is_dir():
            continue
        for alias in PARTITIONS[partition]:
            inside = [child for child in place.iterdir() if _is_named(child, alias)]
            files = [child for child in inside if child.is_file() and child.suffix.lower() in SUFFIXES]
            for child in inside:
                if child.is_dir():
                    files += [path for path in child.rglob("*") if path.is_file() and path.suffix.lower() in SUFFIXES]
            if files:
                return sorted(files, key=_natural)
    return []


def _is_named(path: Path, alias: str) -> bool:
    stem = (path.stem if path.suffix.lower() in SUFFIXES else path.name).lower()
    return stem == alias or (stem.startswith(alias) and _SHARD.fullmatch(stem, len(alias)) is not None)


def _saved(folder: Path, partition: str) -> list[Row]:
    """Read a partition of a data set that the datasets library's ``save_to_disk`` wrote."""
    datasets = need("datasets", f"{folder}: reading a data set saved to disk", "data")
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{folder}: expected a data set saved by save_to_disk, got: {shown(error)}") from error
    if isinstance(saved, datasets.DatasetDict):
        saved = next((saved[alias] for alias in PARTITIONS[partition] if alias in saved), ())
    return [Row(f"{folder}: row {number}", dict(row)) for number, row in enumerate(saved)]


def listing(folder: Path) -> str:
    """List the first entries of a folder, for an error message."""
    names: Sequence[str] = sorted(child.name for child in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
