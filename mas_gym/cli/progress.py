"""Live progress of runs: a table that is redrawn in a terminal, plain lines elsewhere.

Every line fits the width: where the full figures do not, shorter ones are shown, and a long label loses its middle.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from mas_gym.cli.console import stderr
from mas_gym.render import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from search.engine.progress import Progress

_PLAIN_SECONDS = 15.0
_BAR = 20
_GAP = 2
_SHORTEST_LABEL = 8


class _Sum(NamedTuple):
    """Totals over the runs of one line."""

    done: int
    right: int
    failed: int
    stored: int
    agent_calls: int
    tokens: int
    seconds: float


class _Line:
    """One line: a run per seed, each with its latest snapshot."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total = one_line(label), total
        self.runs: dict[int, Progress] = {}

    def sum(self) -> _Sum:
        runs = tuple(self.runs.values())
        return _Sum(
            sum(run.done for run in runs),
            sum(run.correct for run in runs),
            sum(run.failed for run in runs),
            sum(run.stored for run in runs),
            sum(run.usage.agent_calls for run in runs),
            sum(run.usage.generated_tokens for run in runs),
            sum(run.usage.seconds for run in runs),
        )


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
        """Record the latest snapshot of a run.

        Args:
            line: Index of its line.
            run: The run within that line, such as its seed.
            progress: The snapshot.
        """
        current = self._lines[line]
        before = current.runs.get(run)
        current.runs[run] = progress
        if self._live is not None or (before is not None and before.done == progress.done):
            return
        now = time.monotonic()
        if current.sum().done == current.total or now - self._said > _PLAIN_SECONDS:
            self._said = now
            [label], [figures], _ = self._fitted([current])
            self._console.print(f"{label}: {'  '.join(filter(None, figures))}", soft_wrap=True)

    def _render(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        lines = self._shown()
        labels, figures, spare = self._fitted(lines)
        wide = spare >= _BAR + _GAP
        table = Table.grid(padding=(0, _GAP, 0, 0))
        table.add_column(no_wrap=True)
        if wide:
            table.add_column(width=_BAR)
        for _ in range(5):
            table.add_column(no_wrap=True, justify="right")
        for line, label, cells in zip(lines, labels, figures, strict=True):
            done = line.sum().done
            style = "dim" if not line.runs else "green" if done == line.total else ""
            bar = [ProgressBar(line.total, done, width=_BAR)] if wide else []
            table.add_row(Text(label), *bar, *map(Text, cells), style=style)
        return table

    def _fitted(self, lines: list[_Line]) -> tuple[list[str], list[list[str]], int]:
        """Return the labels and figures of lines as they fit the width, and the columns that are left over."""
        longest = max(len(line.label) for line in lines)
        for brief in (False, True):
            figures = [self._figures(line, brief) for line in lines]
            taken = sum(max(map(len, column)) + _GAP for column in zip(*figures, strict=True))
            # The last column stays free, because some terminals wrap a line that fills it.
            room = self._console.width - 1 - taken
            if room >= longest:
                break
        return [shortened(line.label, max(room, _SHORTEST_LABEL)) for line in lines], figures, room - longest

    def _shown(self) -> list[_Line]:
        # A table taller than the screen would scroll, so only the lines around the running one are shown.
        room = max(1, self._console.height - 3)
        active = next((i for i, line in enumerate(self._lines) if line.sum().done < line.total), 0)
        first = max(0, min(active - room // 2, len(self._lines) - room))
        return self._lines[first : first + room]

    def _figures(self, line: _Line, brief: bool) -> list[str]:
        """Return done, accuracy, agent calls, tokens and time of a line; briefly, large numbers are rounded."""
        now = line.sum()
        done = f"{now.done:,}/{line.total:,}"
        if not line.runs:
            return [done, "", "", "", ""]
        notes = [f"Hit@1 {100 * now.right / now.done:.1f}"] if now.done and self._graded else []
        notes += [f"{now.failed} failed"] if now.failed else []
        notes += [f"{now.stored} stored"] if now.stored and not brief else []
        rate = now.tokens / now.seconds if now.seconds > 0 else 0.0
        fresh = now.done - now.stored
        # Concurrent searches end together, so the first few say little about the remaining time.
        reliable = fresh and now.done * 10 >= line.total and now.done < line.total
        shown = f"{clock(now.seconds / fresh * (line.total - now.done))} left" if reliable else clock(now.seconds)
        if brief:
            return [done, ", ".join(notes), f"AC {rounded(now.agent_calls)}", f"TOK {rounded(now.tokens)}", shown]
        return [done, ", ".join(notes), f"AC {now.agent_calls:,}", f"TOK {now.tokens:,} ({rate:,.0f}/s)", shown]


def shortened(label: str, width: int) -> str:
    """Return a label of at most ``width`` characters; a longer one loses its middle.

    >>> shortened("mcts:40,3 + models/masprm", 16)
    'mcts:40,…/masprm'
    """
    if len(label) <= width:
        return label
    head = width // 2
    return f"{label[:head]}…{label[len(label) - (width - head - 1) :]}"


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
