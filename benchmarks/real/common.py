"""Shared parts of the pages about recorded runs: reading a recording, and writing a page that states its source."""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paper.page import Page, write_page
from mas_gym.errors import DataError, DataNotFoundError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "real"
PAGES = Path(__file__).resolve().parents[1] / "pages" / "real"


class Source(NamedTuple):
    """A recording.

    Attributes:
        file: Name of its file in the data folder, gzipped JSON Lines.
        origin: Repository that published it.
        license: Its license.
    """

    file: str
    origin: str
    license: str


def recording(folder: Path, source: Source) -> Path:
    """Return the file of a recording.

    Raises:
        DataNotFoundError: The folder does not contain it.
    """
    path = folder / source.file
    if not path.is_file():
        raise DataNotFoundError(f"expected the recording {source.file} in {folder}, found none; set --data")
    return path


def read_rows(folder: Path, source: Source) -> list[dict[str, Any]]:
    """Read every row of a recording.

    Raises:
        DataNotFoundError: The folder does not contain the recording.
        DataError: It is not gzipped JSON Lines.
    """
    path = recording(folder, source)
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path}: expected gzipped JSON Lines, got {error}; copy the file again") from error


def write_recorded(page: Page, source: Source, folder: Path, command: str, facts: Sequence[str]) -> Path:
    """Write a page about recorded runs and return its file; `write_page` has the arguments."""
    stated = f"Recording: {source.origin} ({source.license}), about half of its questions; none of its text is part of "
    return write_page(page, folder, command, [f"{stated}this project.", *facts])


def folds_by_kind(chosen: Sequence[str]) -> str:
    """Return in how many folds each kind of critic was chosen, in words.

    >>> folds_by_kind(["boosting", "a forest", "boosting"])
    'boosting in 2 folds, a forest in 1'
    """
    (first, count), *rest = Counter(chosen).items()
    return ", ".join([f"{first} in {count} fold{'s' * (count > 1)}", *(f"{name} in {n}" for name, n in rest)])


def arguments(module: str, purpose: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every page has: ``--data`` and ``--pages``."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.real.{module}", description=purpose)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the recordings")
    parser.add_argument("--pages", type=Path, default=PAGES, help="folder of the page [benchmarks/pages/real]")
    return parser


def run_page(make: Callable[[argparse.Namespace], Path], given: argparse.Namespace) -> None:
    """Write a page and print its place; without the recording, print why it is skipped."""
    try:
        print(f"wrote {make(given)}")
    except DataNotFoundError as error:
        print(f"skipped: {error}")
