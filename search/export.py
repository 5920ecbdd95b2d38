"""A run's trees as one flat table: Parquet, or a Hugging Face data set."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mas_gym.errors import MissingDependencyError
from search.store_rows import readable

if TYPE_CHECKING:
    from search.store import RunInfo

SCHEMA = 1
BATCH = 10_000
QUERY = """
SELECT s.problem, q.text, r.text, n.node, n.parent, n.speaker, n.recipients, t.text, n.terminal,
       n.visits, n.total, n.q, n.value, n.tokens, n.logprob, n.finish, n.seed,
       c.rank, c.score, a.text, c.correct
FROM searches s
JOIN nodes n ON n.search = s.id
JOIN texts q ON q.id = s.question
JOIN texts r ON r.id = s.reference
LEFT JOIN texts t ON t.id = n.text
LEFT JOIN candidates c ON c.search = s.id AND c.node = n.node
LEFT JOIN texts a ON a.id = c.answer
WHERE s.run = ? AND s.error IS NULL
ORDER BY s.problem, n.node
"""
TEXT = {"problem", "question", "reference", "text", "finish", "answer"}
NUMBER = {"total", "q", "value", "logprob", "score"}
FLAG = {"terminal", "correct"}
COLUMNS = [
    "problem", "question", "reference", "node", "parent", "speaker", "recipients", "text", "terminal",
    "visits", "total", "q", "value", "tokens", "logprob", "finish", "seed",
    "rank", "score", "answer", "correct",
]  # fmt: skip


def batches(connection: sqlite3.Connection, run: str) -> Iterator[dict[str, list[Any]]]:
    """Yield the rows of one run by problem and node, as columns, a few thousand at a time."""
    cursor = connection.execute(QUERY, (run,))
    while rows := cursor.fetchmany(BATCH):
        columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
        for name in TEXT:
            columns[name] = [None if value is None else _plain(readable(value)) for value in columns[name]]
        for name in FLAG:
            columns[name] = [None if value is None else bool(value) for value in columns[name]]
        columns["recipients"] = [[int(r) for r in value.split(",")] if value else [] for value in columns["recipients"]]
        yield columns


def _plain(text: str) -> str:
    # Arrow's strings are UTF-8, which has no lone surrogates.
    return text.encode("utf-8", "replace").decode("utf-8")


def arrow_schema(info: RunInfo) -> Any:
    """Return the Arrow schema, which carries the run's settings as metadata."""
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


def write_parquet(connection: sqlite3.Connection, info: RunInfo, path: Path) -> int:
    """Write one run as Parquet, whole or not at all, and return the number of rows."""
    pa = _pyarrow()
    from pyarrow import parquet

    schema, part, count = arrow_schema(info), path.with_name(path.name + ".part"), 0
    try:
        with parquet.ParquetWriter(part, schema) as writer:
            for columns in batches(connection, info.run):
                table = pa.table(columns, schema=schema)
                writer.write_table(table)
                count += table.num_rows
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return count


def to_dataset(connection: sqlite3.Connection, info: RunInfo) -> Any:
    """Return one run as a ``datasets.Dataset``."""
    pa = _pyarrow()
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingDependencyError("a data set needs datasets: pip install 'mas-gym[data]'") from error
    schema = arrow_schema(info)
    tables = [pa.table(columns, schema=schema) for columns in batches(connection, info.run)]
    return Dataset(pa.concat_tables(tables) if tables else schema.empty_table())


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependencyError("exporting needs pyarrow: pip install 'mas-gym[data]'") from error
    return pyarrow
