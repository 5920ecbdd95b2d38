"""Tables of text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def text_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]] = (), title: str = "", words: int = 1
) -> Table:
    """Return a table for a rich console, without markup in its cells.

    Args:
        columns: The headings.
        rows: The cells of each row.
        title: The line above the table.
        words: Number of columns that contain words; the columns after them contain numbers.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    heading = Text(title, style="bold") if title else None
    found = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(columns):
        found.add_column(name, justify="left" if place < words else "right", overflow="fold")
    for row in rows:
        found.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return found
