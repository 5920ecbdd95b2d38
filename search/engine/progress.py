"""Progress of a run: a snapshot for programs, a bar for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mas_gym.errors import ConfigError
from search.plan import Plan, Usage


@dataclass(frozen=True)
class Progress:
    """A snapshot of a run.

    Attributes:
        total: Number of problems; None if unknown.
        done: Searches that have ended, including failed and stored ones.
        correct: How many of them found the right answer.
        failed: How many failed.
        stored: How many were read from the store.
        open: Searches in progress.
        usage: What this run has spent so far.
        stopped: Why the run ended early; None if it did not.
    """

    total: int | None = None
    done: int = 0
    correct: int = 0
    failed: int = 0
    stored: int = 0
    open: int = 0
    usage: Usage = field(default_factory=Usage)
    stopped: str | None = None

    def with_plan(self, plan: Plan, fresh: bool) -> Progress:
        """Count one more plan."""
        return replace(
            self,
            done=self.done + 1,
            correct=self.correct + bool(plan.correct),
            failed=self.failed + (plan.error is not None),
            stored=self.stored + (not fresh),
        )

    def with_run(self, usage: Usage, open_searches: int, stopped: str | None) -> Progress:
        """Add the state of the run."""
        return replace(self, usage=usage, open=open_searches, stopped=stopped)

    def __str__(self) -> str:
        """Return one line."""
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


class Listener(Protocol):
    """A display of progress."""

    def show(self, progress: Progress) -> None:
        """Show a new snapshot."""
        ...

    def close(self, progress: Progress) -> None:
        """Show the last snapshot and end the display."""
        ...


def listener(progress: bool | Callable[[Progress], None]) -> Listener | None:
    """Return the display for the ``progress`` argument of `search.run`."""
    if progress is True:
        return _Bar()
    if progress is False:
        return None
    if callable(progress):
        return _Caller(progress)
    raise ConfigError(f"expected progress to be True, False or a function, got {progress!r}")


class _Caller:
    def __init__(self, function: Callable[[Progress], None]) -> None:
        self._function = function

    def show(self, progress: Progress) -> None:
        self._function(progress)

    def close(self, progress: Progress) -> None:
        self._function(progress)


class _Bar:
    """A line on standard error, drawn only if that is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns: list[Any] = [BarColumn(bar_width=20), TextColumn("{task.description}"), TimeRemainingColumn()]
        self._bar = RichProgress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("starting", total=None)
        self._bar.start()

    def show(self, progress: Progress) -> None:
        self._bar.update(self._task, total=progress.total, completed=progress.done, description=str(progress))

    def close(self, progress: Progress) -> None:
        self.show(progress)
        self._bar.stop()
