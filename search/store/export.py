"""A run's trees as one flat table: Parquet, or a Hugging Face data set."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from mas_gym.errors import MissingDependencyError
from search.store.info import RunInfo
from search.store.rows import CandidateRow, NodeRow, recipients_of

SCHEMA = 1
BATCH = 10_000
TEXT = {"problem", "question", "reference", "text", "finish", "answer"}
NUMBER = {"total", "q", "value", "logprob", "score"}
FLAG = {"terminal", "correct"}
COLUMNS = [
    "problem", "question", "reference", "node", "parent", "speaker", "recipients", "text", "terminal",
    "visits", "total", "q", "value", "tokens", "logprob", "finish", "seed",
    "rank", "score", "answer", "correct",
]  # fmt: skip

ExportedSearch = tuple[dict[str, Any], list[NodeRow], list[CandidateRow]]
"""A row of ``searches`` with its nodes and candidates."""


def _rows(row: dict[str, Any], nodes: list[NodeRow], candidates: list[CandidateRow]) -> Iterator[list[Any]]:
    """Yield a search's nodes, one for each candidate at a node that has several."""
    ends: dict[int, list[CandidateRow]] = {}
    for candidate in candidates:
        ends.setdefault(candidate.node, []).append(candidate)
    for node in nodes:
        said = [row["problem"], row["question"], row["reference"], node.node, node.parent, node.speaker]
        said += [recipients_of(node), node.text, bool(node.terminal), *node[7:]]
        for end in ends.get(node.node, [None]):
            rank = [None] * 4 if end is None else [end.rank, end.score, end.answer, bool(end.correct)]
            yield [value if not isinstance(value, str) else _plain(value) for value in (*said, *rank)]


def batches(searches: Iterable[ExportedSearch]) -> Iterator[dict[str, list[Any]]]:
    """Yield the rows of searches by problem and node, as columns, a few thousand at a time."""
    rows = (row for search in searches for row in _rows(*search))
    while batch := list(islice(rows, BATCH)):
        yield dict(zip(COLUMNS, map(list, zip(*batch, strict=True)), strict=True))


def _plain(text: str) -> str:
    # Arrow's strings are UTF-8, which has no lone surrogates.
    return text.encode("utf-8", "replace").decode("utf-8")


def arrow_schema(info: RunInfo) -> Any:
    """Return the Arrow schema, with the run's config as metadata."""
    pa = _pyarrow()
    kinds = {
        name: pa.string()
        if name in TEXT
        else pa.float64()
        if name in NUMBER
        else pa.bool_()
        if name in FLAG
        else pa.int64()
        for name in COLUMNS
    }
    kinds["recipients"] = pa.list_(pa.int64())
    about = {"schema": SCHEMA, "run": info.run, "name": info.name, "config": info.config, "facts": info.facts}
    return pa.schema(list(kinds.items()), metadata={"mas_gym": json.dumps(about, sort_keys=True)})


def write_parquet(searches: Iterable[ExportedSearch], info: RunInfo, path: Path) -> int:
    """Write one run as Parquet, completely or not at all, and return the number of rows."""
    pa = _pyarrow()
    from pyarrow import parquet

    schema, part, count = arrow_schema(info), path.with_name(path.name + ".part"), 0
    try:
        with parquet.ParquetWriter(part, schema) as writer:
            for columns in batches(searches):
                table = pa.table(columns, schema=schema)
                writer.write_table(table)
                count += table.num_rows
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return count


def to_dataset(searches: Iterable[ExportedSearch], info: RunInfo) -> Any:
    """Return one run as a ``datasets.Dataset``."""
    pa = _pyarrow()
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingDependencyError("a data set needs datasets: pip install 'mas-gym[data]'") from error
    schema = arrow_schema(info)
    tables = [pa.table(columns, schema=schema) for columns in batches(searches)]
    return Dataset(pa.concat_tables(tables) if tables else schema.empty_table())


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependencyError("exporting needs pyarrow: pip install 'mas-gym[data]'") from error
    return pyarrow
