"""Read the rows of Parquet files in batches, with a limit on their decoded size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mas_gym.errors import DataError, need, shown
from mas_gym.internal.json_types import JSONObject

if TYPE_CHECKING:
    import pyarrow

LARGEST = 2 * 2**30
"""Maximum decoded size of a file, in bytes."""
_BATCH = 64
"""Rows decoded at once: a file may repeat one long text without storing it again."""
_ROW = 256
"""Least memory of a row, in bytes: Parquet stores any number of equal values in a few bytes."""
_ITEM = 64
"""Bytes of a list item as a Python object, for the same reason."""


def parquet_rows(path: Path) -> Iterator[JSONObject]:
    """Yield the rows of a Parquet file. Raises as `parquet_batches` does."""
    with _explained(path):
        for batch in parquet_batches(path, _ITEM):
            yield from batch.to_pylist()


def parquet_batches(path: Path, item: int = 0) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a Parquet file in batches, with the file's metadata.

    Args:
        path: The file.
        item: Bytes that the caller needs for each list item, in addition to Arrow's memory.

    Raises:
        DataError: It is not a Parquet file, or its decoded rows are larger than `LARGEST`.
        MissingDependencyError: pyarrow is not installed.
    """
    arrow = need("pyarrow", f"{path}: reading Parquet", "data")
    parquet = need("pyarrow.parquet", f"{path}: reading Parquet", "data")
    too_large = DataError(f"{path}: expected at most {LARGEST:,} bytes of decoded rows, got more; split the file")
    with _explained(path), parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        items = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
        size = item * items
        if max(items, size) > LARGEST:
            raise too_large
        for batch in file.iter_batches(_BATCH):
            columns = [_decoded(path, column) for column in batch.columns]
            size += sum(column.nbytes for column in columns) + _ROW * batch.num_rows
            if size > LARGEST:
                raise too_large
            yield arrow.RecordBatch.from_arrays(columns, batch.schema.names, metadata=batch.schema.metadata)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    arrow = need("pyarrow", f"{path}: reading Parquet", "data")
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: expected a Parquet file, got: {shown(str(error))}") from error


def _decoded(path: Path, column: pyarrow.Array) -> pyarrow.Array:
    """Return a column, with the values in place of categories, which may stand for much larger values."""
    from pyarrow import types

    if types.is_dictionary(column.type):
        return column.dictionary_decode()
    left = [column.type]
    while left:
        kind = left.pop()
        if types.is_dictionary(kind):
            raise DataError(f"{path}: expected lists and structs of plain values, got categories; write them as text")
        left += [kind.field(number).type for number in range(kind.num_fields)]
    return column
