"""Read raw rows from one file, a folder, a dataset saved to disk, or the Hugging Face hub."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from mas_gym.errors import DataError, need, shown
from mas_gym.internal.parquet_rows import parquet_rows
from mas_gym.tasks.data_rows import BadRow, RawRow
from mas_gym.tasks.json_rows import json_rows
from mas_gym.tasks.logiqa import logiqa_block

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
PARTITIONS: Mapping[str, tuple[str, ...]] = {
    "train": ("train",),
    "test": ("test",),
    "validation": ("validation", "val", "valid", "eval"),
    "gpqa_main": ("gpqa_main", "train"),
    "gpqa_diamond": ("gpqa_diamond", "test"),
}

_PART = re.compile(r"_(?:test|val|dev|train)$")
_DIGITS = re.compile(r"(\d+)")
_SHARD = re.compile(r"-\d+-of-\d+")


def stamp(place: Path) -> tuple[tuple[str, int, int], ...]:
    """Return values that change whenever the file, or a file in the folder, changes."""
    seen = [place, *(sorted(place.iterdir()) if place.is_dir() else ())]
    states = [(path.name, path.stat()) for path in seen if path.exists()]
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)


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


def read_file(path: Path, name: str) -> list[RawRow]:
    """Read the raw rows of one file.

    Raises:
        DataError: The content does not match the file's suffix.
        MissingDependencyError: The file is Parquet and pyarrow is not installed.
    """
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise DataError(f"{path}: expected a file of type {', '.join(SUFFIXES)}, got {path.suffix or 'no suffix'}")
    try:
        # MMLU's own release has no header.
        return list(_mmlu(path) if suffix == ".csv" and name == "mmlu" else _READERS[suffix](path))
    except OSError as error:
        raise DataError(f"{path}: expected a readable file, got: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text, got: {error}; convert the file to UTF-8") from None


def _parquet(path: Path) -> Iterator[RawRow]:
    yield from (RawRow(f"{path}: row {number}", row) for number, row in enumerate(parquet_rows(path)))


def _mmlu(path: Path) -> Iterator[RawRow]:
    subject = _PART.sub("", path.stem)
    for line, cells in _cells(path):
        if not cells or (line == 1 and cells[0].strip().lower() == "question"):
            continue
        value: object = BadRow(f"expected 6 cells (question, A, B, C, D, letter), got {len(cells)}: {shown(cells)}")
        if len(cells) == 6:
            value = {"question": cells[0], "choices": cells[1:5], "answer": cells[5], "subject": subject}
        yield RawRow(f"{path}:{line}", value)


def _table(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a CSV file with column names in the first row."""
    rows = (row for row in _cells(path) if row[1])
    header = [cell.strip() for cell in next(rows, (0, []))[1]]
    if len(set(header)) < len(header):
        raise DataError(f"{path}: expected unique column names, got {shown(header)}")
    for line, cells in rows:
        value: object = BadRow(f"expected {len(header)} cells, one per column, got {len(cells)}: {shown(cells)}")
        if len(cells) == len(header):
            value = dict(zip(header, cells, strict=True))
        yield RawRow(f"{path}:{line}", value)


def _cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the last line number and the cells of each row of a CSV file."""
    reader = csv.reader(io.StringIO(_text(path), newline=""))
    while True:
        begin = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{path}:{begin}: expected cells of at most {csv.field_size_limit()} characters and "
                f"balanced quotes in the row that begins here; reading it failed: {error}"
            ) from None
        if cells is None:
            return
        yield reader.line_num, cells


def _txt(path: Path) -> Iterator[RawRow]:
    block: list[str] = []
    for number, line in enumerate([*io.StringIO(_text(path), newline=None), ""], start=1):
        if line.strip():
            block.append(line.strip())
        elif block:
            try:
                value: object = logiqa_block(block)
            except BadRow as error:
                value = error
            yield RawRow(f"{path}:{number - len(block)}", value)
            block = []


_READERS: Mapping[str, Callable[[Path], Iterator[RawRow]]] = MappingProxyType(
    {".jsonl": json_rows, ".json": json_rows, ".parquet": _parquet, ".csv": _table, ".txt": _txt}
)


# ----------------------------------------------------------------- folders


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(path.as_posix())]


def read_partition(folder: Path, partition: str, name: str) -> list[RawRow]:
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
            paths = [path for child in inside for path in (child, *child.rglob("*"))]
            if files := [path for path in paths if path.is_file() and path.suffix.lower() in SUFFIXES]:
                return sorted(files, key=_natural)
    return []


def _is_named(path: Path, alias: str) -> bool:
    stem = (path.stem if path.suffix.lower() in SUFFIXES else path.name).lower()
    return stem == alias or (stem.startswith(alias) and _SHARD.fullmatch(stem, len(alias)) is not None)


def _saved(folder: Path, partition: str) -> list[RawRow]:
    """Read a partition of a dataset that the datasets library's ``save_to_disk`` wrote."""
    datasets = need("datasets", f"{folder}: reading a data set saved to disk", "data")
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{folder}: expected a dataset saved by save_to_disk, got: {shown(error)}") from error
    if isinstance(saved, datasets.DatasetDict):
        saved = next((saved[alias] for alias in PARTITIONS[partition] if alias in saved), ())
    return [RawRow(f"{folder}: row {number}", dict(row)) for number, row in enumerate(saved)]


def listing(folder: Path) -> str:
    """List the first entries of a folder, for an error message."""
    names: Sequence[str] = sorted(child.name for child in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
