"""Progress of runs: lines that are redrawn in a terminal, and plain lines elsewhere."""

from __future__ import annotations

from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mas_gym.cli.console import brief, stderr
from mas_gym.internal.text import one_line

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

    from search.progress import Progress

_PLAIN_SECONDS = 20.0
"""Minimum time between the lines that show unfinished runs if the output is not a terminal."""
_SHORTEST_LABEL = 8


class RunProgress:
    """Shows the progress, cost and accuracy of runs so far; the lines of finished runs stay.

    Args:
        labels: One label per line.
        total: Searches per line.
        graded: Whether there are reference answers.
    """

    def __init__(self, labels: list[str], total: int, graded: bool = True) -> None:
        """Prepare the lines; printing starts when the context is entered."""
        self._runs: dict[str, dict[int, Progress]] = {label: {} for label in labels}
        self._total, self._graded = total, graded
        self._console = stderr()
        self._live: Live | None = None
        self._printed = monotonic()

    def __enter__(self) -> Self:
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

    def update(self, label: str, run: int, progress: Progress) -> None:
        """Record the latest snapshot of a line's run; there are a few per second, even while no search ends."""
        runs = self._runs[label]
        before, runs[run] = runs.get(run), progress
        changed = before is None or before.done != progress.done
        if changed and self._sum(label).done == self._total:
            self._console.print(self._text(label), soft_wrap=True, style="green")
        elif self._live is None and monotonic() - self._printed > _PLAIN_SECONDS:
            self._printed = monotonic()
            self._console.print(self._text(label), soft_wrap=True)

    def _sum(self, label: str) -> Progress:
        from search.progress import Progress

        # Another thread may add a run.
        return sum(list(self._runs[label].values()), Progress())

    def _open(self) -> list[str]:
        """Return the unfinished lines that have begun, or the first one."""
        open_ = [label for label in self._runs if self._sum(label).done < self._total]
        return [label for label in open_ if self._runs[label]] or open_[:1]

    def _render(self) -> Text:
        from rich.text import Text

        return Text("\n".join(map(self._text, self._open())), no_wrap=True, overflow="ellipsis")

    def _text(self, label: str) -> str:
        figures, name = "  ".join(filter(None, self._figures(label))), one_line(label)
        # A terminal line that wraps would be redrawn at the wrong place.
        room = len(name) if self._live is None else max(_SHORTEST_LABEL, self._console.width - len(figures) - 3)
        return f"{brief(name, room)}: {figures}"

    def _figures(self, label: str) -> list[str]:
        """Return the finished searches, accuracy, agent calls, tokens and time of a line."""
        now = self._sum(label)
        done = f"{now.done:,}/{self._total:,}"
        if not self._runs[label]:
            return [done]
        notes = [f"Hit@1 {100 * now.correct / now.done:.1f}"] if now.done and self._graded else []
        notes += [f"{now.failed} failed"] if now.failed else []
        notes += [f"{now.stored} stored"] if now.stored else []
        usage, fresh = now.usage, now.done - now.stored
        rate = usage.generated_tokens / usage.seconds if usage.seconds > 0 else 0.0
        # Concurrent searches end together, so the remaining time cannot be estimated from the first few.
        reliable = fresh and now.done * 10 >= self._total and now.done < self._total
        left = f"{clock(usage.seconds / fresh * (self._total - now.done))} left" if reliable else clock(usage.seconds)
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
