"""Terminal output: results go to stdout; progress, notes and errors go to stderr.

Text from other sources (model messages, names in files, server errors) may contain control characters.
The consoles of `stdout` and `stderr` escape everything they print, so commands need not.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mas_gym.internal.text import printable
from mas_gym.internal.whole_files import write_file

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


_PIPE_WIDTH = 120


def stdout() -> Console:
    """Return the console for results; in a pipe it is wide enough for whole tables."""
    return _console(stderr=False)


def stderr() -> Console:
    """Return the console for progress, notes and errors."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    made: Console = _safe_console()(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)
    return made


@functools.cache
def _safe_console() -> type[Console]:
    """Return the console class, which is defined on demand because importing rich would slow down ``--version``."""
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class SafeConsole(Console):
        """Prints control characters as escapes instead of sending them to the terminal."""

        def render(self, renderable: Any, options: Any = None) -> Any:
            # Text is escaped before layout, so that lines wrap at the right width.
            if isinstance(renderable, str):
                renderable = printable(renderable)
            elif isinstance(renderable, Text):
                renderable = _escaped(renderable)
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    return SafeConsole


def _escaped(text: Text) -> Text:
    if text.plain == printable(text.plain):
        return text
    from rich.text import Span

    places = list(accumulate((len(printable(character)) for character in text.plain), initial=0))
    copy = text.copy()
    copy.plain = printable(text.plain)
    copy.spans = [Span(places[span.start], places[span.end], span.style) for span in text.spans]
    return copy


def brief(text: str | None, width: int = 60) -> str:
    """Return the text of a table cell, cut to at most ``width`` characters; ``none`` for None."""
    text = "none" if text is None else text
    return text if len(text) <= width else text[: width - 3] + "..."


def note(message: str, style: str = "dim") -> None:
    """Print a remark to stderr: wrapped between words in a terminal, as one line elsewhere."""
    console = stderr()
    console.print(message, style=style, soft_wrap=not console.is_terminal)


def write_outputs(*outputs: tuple[Path | None, Callable[[], str]]) -> None:
    """Write the text of each output to its file, if it has one."""
    for path, text in outputs:
        if path is not None:
            write_file(path, text())
            note(f"wrote {path}")


def examples(*commands: str) -> str:
    """Return the epilog of a command's help: one example per paragraph, because help joins lines within a paragraph."""
    return "\n\n".join(("Examples:", *commands))
