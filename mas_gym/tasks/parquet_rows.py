"""Read the rows of Parquet files in batches, with a limit on their decoded size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mas_gym.errors import DataError, need, shown
from mas_gym.internal.json_types import JSONObject

LARGEST = 2 * 2**30
"""Maximum decoded size of a file, in bytes."""
_BATCH = 64
"""Rows decoded at once: a file may repeat one long text without storing it again."""
_ROW = 256
"""Least memory of a row, in bytes: Parquet stores any number of equal values in a few bytes."""


def parquet_rows(path: Path) -> Iterator[JSONObject]:
    """Yield the rows of a Parquet file.

    Raises:
        DataError: It is not a Parquet file, or its decoded rows are larger than `LARGEST`.
        MissingDependencyError: pyarrow is not installed.
    """
    pyarrow = need("pyarrow", f"{path}: reading Parquet", "data")
    parquet = need("pyarrow.parquet", f"{path}: reading Parquet", "data")
    size = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH):
                size += batch.nbytes + _ROW * batch.num_rows
                if size > LARGEST:
                    raise DataError(
                        f"{path}: expected at most {LARGEST:,} bytes of decoded rows, got more; split the file"
                    )
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: expected a Parquet file, got: {shown(str(error))}") from error
