"""Progress of a run: its snapshot, and the displays for the argument ``progress`` of `search.run`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mas_gym.errors import ConfigError
from search.costs import Usage


@dataclass(frozen=True)
class Progress:
    """A snapshot of a run.

    Attributes:
        total: Number of problems; None if unknown.
        done: Searches that have ended, including failed and stored ones.
        correct: Number of ended searches with the right answer.
        failed: Number of failed searches.
        stored: Number of searches read from the store.
        open: Searches in progress.
        usage: The cost of this run so far.
        stopped: Reason for stopping early; None if the run did not stop early.
    """

    total: int | None = None
    done: int = 0
    correct: int = 0
    failed: int = 0
    stored: int = 0
    open: int = 0
    usage: Usage = field(default_factory=Usage)
    stopped: str | None = None

    def __add__(self, other: Progress) -> Progress:
        """Add the counts of another run."""
        return replace(
            self,
            done=self.done + other.done,
            correct=self.correct + other.correct,
            failed=self.failed + other.failed,
            stored=self.stored + other.stored,
            open=self.open + other.open,
            usage=self.usage + other.usage,
        )

    def __str__(self) -> str:
        total = "" if self.total is None else f"/{self.total}"
        seconds = max(self.usage.seconds, 1e-9)
        rate = self.usage.generated_tokens / seconds
        parts = [
            f"{self.done}{total} searches",
            f"{self.correct / self.done:.1%} right" if self.done else "none right yet",
            f"AC {self.usage.agent_calls:,}",
            f"TOK {self.usage.generated_tokens:,} ({rate:,.0f}/s)",
            f"RC {self.usage.reward_calls:,}",
        ]
        if self.failed:
            parts.append(f"{self.failed} failed")
        return " · ".join(parts)


Listener = Callable[[Progress, bool], None]
"""A display of progress: takes a snapshot and whether it is the last one."""


def listener(progress: bool | Callable[[Progress], None]) -> Listener | None:
    """Return the display for the ``progress`` argument of `search.run`."""
    if progress is True:
        return _bar()
    if progress is False:
        return None
    if callable(progress):
        return lambda now, last: progress(now)
    raise ConfigError(f"expected progress to be True, False or a function, got {progress!r}")


def _bar() -> Listener:
    """Return a one-line progress display on standard error; without a terminal, it shows only the last snapshot."""
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns: list[ProgressColumn] = [
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    ]
    bar = RichProgress(*columns, console=Console(stderr=True))
    task = bar.add_task("starting", total=None)

    def show(progress: Progress, last: bool) -> None:
        bar.start()
        bar.update(task, total=progress.total, completed=progress.done, description=str(progress))
        if last:
            bar.stop()

    return show
