"""Where the command line prints: results to stdout, everything else to stderr, and nothing that steers a terminal.

Messages of models, names in files, reasons of servers: whatever this program did not write is shown with its control
characters spelled out. `stdout` and `stderr` return consoles that do so with all they print, so that no command has to
remember it; tracebacks, warnings and logs are escaped here, too.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
import warnings
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mas_gym.render import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_PIPE_WIDTH = 120


def stdout() -> Console:
    """Return the console for results; a pipe gets a width that keeps tables whole."""
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
    """Return the class of consoles; made on demand, because importing rich takes longer than ``--version`` should."""
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class SafeConsole(Console):
        """Shows control characters instead of sending them to the terminal."""

        def render(self, renderable: Any, options: Any = None) -> Any:
            # Text is escaped before it is laid out, so that it wraps where it should.
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


def show_error(message: str) -> None:
    """Print a message in one red panel."""
    from rich.panel import Panel
    from rich.text import Text

    stderr().print(Panel(Text(message), title="Error", title_align="left", border_style="red"))


def show_traceback(error: BaseException) -> None:
    """Print an unexpected error with its traceback."""
    from rich.text import Text

    stderr().print(Text("".join(traceback.format_exception(error)).rstrip()), soft_wrap=True)


def note(message: str, style: str = "dim") -> None:
    """Print a remark to stderr: wrapped between words in a terminal, as one line elsewhere."""
    from rich.text import Text

    console = stderr()
    console.print(Text(message, style=style), soft_wrap=not console.is_terminal)


class _Formatter(logging.Formatter):
    """Escapes records; adds the traceback of a failed search, which its record carries as ``details``."""

    def format(self, record: logging.LogRecord) -> str:
        details = getattr(record, "details", None)
        return printable("\n".join(filter(None, (super().format(record), details))).rstrip())


def log_handler(level: int) -> logging.Handler:
    """Return a handler that prints escaped records from a level on to stderr."""
    handler = logging.StreamHandler()
    handler.setLevel(level)
    handler.setFormatter(_Formatter("%(levelname)s:%(name)s:%(message)s"))
    return handler


def escape_logs_and_warnings() -> None:
    """Escape what Python prints by itself: warnings, and log records that no handler takes."""
    logging.lastResort = log_handler(logging.WARNING)
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *parts, **more: printable(plain(*parts, **more))


def version() -> str:
    """Return the version of the installed package; ``"unknown"`` in a checkout that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("mas-gym")
    except metadata.PackageNotFoundError:
        return "unknown"
