"""Terminal output: results go to stdout; progress, notes and errors go to stderr.

Text from other sources (model messages, names in files, server errors) may contain control characters.
The consoles of `stdout` and `stderr` escape everything they print, so commands need not; logs, warnings and tracebacks
are escaped here as well. `RunProgress` shows live progress: a redrawn table in a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mas_gym.internal.text import one_line, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from search.engine.progress import Progress

_PIPE_WIDTH = 120
_PLAIN_SECONDS = 15.0
_BAR = 20
_GAP = 2
_SHORTEST_LABEL = 8
_WIDE = 120


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
    """Return the console class; defined on demand, because importing rich would slow down ``--version``."""
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


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str = "", words: int = 1) -> Table:
    """Return a table for `stdout`.

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


def brief(text: str | None, width: int = 60) -> str:
    """Return a text of at most ``width`` characters for a cell of a table; ``none`` for None."""
    text = "none" if text is None else text
    return text if len(text) <= width else text[: width - 3] + "..."


def show_error(message: str) -> None:
    """Print a message in one red panel."""
    from rich.panel import Panel
    from rich.text import Text

    stderr().print(Panel(Text(message), title="Error", title_align="left", border_style="red"))


def show_traceback(error: BaseException) -> None:
    """Print an unexpected error with its traceback."""
    stderr().print("".join(traceback.format_exception(error)).rstrip(), soft_wrap=True)


def note(message: str, style: str = "dim") -> None:
    """Print a remark to stderr: wrapped between words in a terminal, as one line elsewhere."""
    console = stderr()
    console.print(message, style=style, soft_wrap=not console.is_terminal)


class _Formatter(logging.Formatter):
    """Escapes records; adds the traceback of a failed search, which is the record's ``details`` attribute."""

    def format(self, record: logging.LogRecord) -> str:
        details = vars(record).get("details")
        return printable("\n".join(filter(None, (super().format(record), details))).rstrip())


class NoteHandler(logging.Handler):
    """Prints records as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        note(record.getMessage())


def log_handler(level: int) -> logging.Handler:
    """Return a handler that prints escaped records of at least ``level`` to stderr."""
    handler = logging.StreamHandler()
    handler.setLevel(level)
    handler.setFormatter(_Formatter("%(levelname)s:%(name)s:%(message)s"))
    return handler


def escape_logs_and_warnings() -> None:
    """Escape Python's own output: warnings, and log records without a handler."""
    logging.lastResort = log_handler(logging.WARNING)
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *parts, **more: printable(plain(*parts, **more))


def examples(*commands: str) -> str:
    """Return the end of a command's help: one example per paragraph, because help texts join the lines of one."""
    return "\n\n".join(("Examples:", *commands))


class _Line:
    """One line: a run per seed, each with its latest snapshot."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total = one_line(label), total
        self.runs: dict[int, Progress] = {}

    def sum(self) -> Progress:
        from search.engine.progress import Progress

        return sum(self.runs.values(), Progress())


class RunProgress:
    """Shows the progress, cost and accuracy of runs so far.

    Args:
        labels: One line each.
        total: Searches per line.
        graded: Whether there are reference answers.
    """

    def __init__(self, labels: list[str], total: int, graded: bool = True) -> None:
        """Prepare the lines; printing starts when the context is entered."""
        self._lines = [_Line(label, total) for label in labels]
        self._graded = graded
        self._console = stderr()
        self._live: Live | None = None
        self._said = time.monotonic()

    def __enter__(self) -> Self:
        """Start drawing."""
        from rich.live import Live

        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=5, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing and restore the terminal."""
        if self._live is not None:
            self._live.stop()

    def update(self, line: int, run: int, progress: Progress) -> None:
        """Record the latest snapshot of a run."""
        current = self._lines[line]
        before = current.runs.get(run)
        current.runs[run] = progress
        if self._live is not None or (before is not None and before.done == progress.done):
            return
        now = time.monotonic()
        if current.sum().done == current.total or now - self._said > _PLAIN_SECONDS:
            self._said = now
            self._console.print(f"{current.label}: {'  '.join(filter(None, self._figures(current)))}", soft_wrap=True)

    def _render(self) -> RenderableType:
        from rich.constrain import Constrain
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        wide = self._console.width >= _WIDE
        table = Table.grid(padding=(0, _GAP, 0, 0))
        table.add_column(min_width=_SHORTEST_LABEL)
        if wide:
            table.add_column(width=_BAR)
        for _ in range(5):
            table.add_column(no_wrap=True, justify="right")
        for line in self._shown():
            done = line.sum().done
            style = "dim" if not line.runs else "green" if done == line.total else ""
            bar = [ProgressBar(line.total, done, width=_BAR)] if wide else []
            label = Text(line.label, no_wrap=True, overflow="ellipsis")
            table.add_row(label, *bar, *map(Text, self._figures(line)), style=style)
        # The last column stays free, because some terminals wrap a line that fills it.
        return Constrain(table, self._console.width - 1)

    def _shown(self) -> list[_Line]:
        # A table taller than the screen would scroll, so only the lines around the running one are shown.
        room = max(1, self._console.height - 3)
        active = next((i for i, line in enumerate(self._lines) if line.sum().done < line.total), 0)
        first = max(0, min(active - room // 2, len(self._lines) - room))
        return self._lines[first : first + room]

    def _figures(self, line: _Line) -> list[str]:
        """Return done, accuracy, agent calls, tokens and time of a line."""
        now = line.sum()
        done = f"{now.done:,}/{line.total:,}"
        if not line.runs:
            return [done, "", "", "", ""]
        notes = [f"Hit@1 {100 * now.correct / now.done:.1f}"] if now.done and self._graded else []
        notes += [f"{now.failed} failed"] if now.failed else []
        notes += [f"{now.stored} stored"] if now.stored else []
        usage, fresh = now.usage, now.done - now.stored
        rate = usage.generated_tokens / usage.seconds if usage.seconds > 0 else 0.0
        # Concurrent searches end together, so the remaining time cannot be estimated from the first few.
        reliable = fresh and now.done * 10 >= line.total and now.done < line.total
        left = f"{clock(usage.seconds / fresh * (line.total - now.done))} left" if reliable else clock(usage.seconds)
        tokens = f"TOK {rounded(usage.generated_tokens)} ({rounded(round(rate))}/s)"
        return [done, ", ".join(notes), f"AC {rounded(usage.agent_calls)}", tokens, left]


def rounded(number: int) -> str:
    """Return a number in at most five characters.

    >>> rounded(9_999), rounded(123_456), rounded(7_654_321)
    ('9,999', '123k', '7.7M')
    """
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= 10 * unit or (unit > 1000 and number >= unit):
            return f"{number / unit:.1f}{name}" if number < 10 * unit else f"{number // unit}{name}"
    return f"{number:,}"


def clock(seconds: float) -> str:
    """Return a time as ``m:ss``, or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
