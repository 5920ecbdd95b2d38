"""The report panel for the canary share of a service, read from the service's log."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mas_gym.errors import DataError, DataNotFoundError
from search.results.intervals import wilson
from search.results.table_formats import TextTable

OUTCOMES = ("unstopped", "same", "different", "failed", "dropped")
"""Outcomes of a request of the canary share (`search.service.canary.Canary`)."""

NOTE = (
    "Requests of a service that were searched again without early stops. An increasing share of "
    "different answers means that the threshold no longer fits the questions: calibrate again."
)
HEAD = ("day (UTC)", *OUTCOMES, "same, % of checked", "TOK early", "TOK whole")


@dataclass
class CanaryDay:
    """The requests of one day.

    Attributes:
        counts: Requests by outcome.
        early: Generated tokens of the checked searches that stopped early.
        whole: Generated tokens of the complete searches.
    """

    counts: Counter[str] = field(default_factory=Counter)
    early: int = 0
    whole: int = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of the log. Raises `ValueError` if it is not a canary event."""
        outcome = line["outcome"]
        if outcome not in OUTCOMES:
            raise ValueError(outcome)
        if outcome in ("same", "different"):
            self.early += int(line["early_tokens"])
            self.whole += int(line["whole_tokens"])
        self.counts[outcome] += 1

    def cells(self, day: str) -> tuple[str, ...]:
        """Return the cells under `HEAD`."""
        same, checked = self.counts["same"], self.counts["same"] + self.counts["different"]
        counts = [f"{self.counts[outcome]:,}" for outcome in OUTCOMES]
        if not checked:
            return (day, *counts, "", "", "")
        span = wilson([1.0] * same + [0.0] * (checked - same))
        share = f"{100 * same / checked:.1f} ({100 * span.low:.1f} to {100 * span.high:.1f})"
        return (day, *counts, share, f"{self.early / checked:,.1f}", f"{self.whole / checked:,.1f}")


def canary_days(log: Path) -> tuple[dict[str, CanaryDay], int]:
    """Return the requests by day, in order, and the number of unreadable lines.

    Args:
        log: A file written by ``mas-gym serve --log-json``; lines of other events are ignored.

    Raises:
        DataNotFoundError: The file cannot be read.
        DataError: It contains no canary request.
    """
    days: dict[str, CanaryDay] = defaultdict(CanaryDay)
    broken = 0
    for text in _lines(log):
        try:
            line = json.loads(text)
            if line.get("event") == "canary":
                days[str(line["time"])[:10]].add(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            broken += 1
    if not any(one.counts for one in days.values()):
        raise DataError(
            f"{log}: expected canary requests, got none; log them with mas-gym serve --canary 0.05 --log-json {log}"
        )
    return {day: days[day] for day in sorted(days) if days[day].counts}, broken


def _lines(log: Path) -> Iterator[str]:
    try:
        with log.open(encoding="utf-8", errors="replace") as stream:
            yield from stream
    except OSError as error:
        raise DataNotFoundError(f"expected a log of mas-gym serve, got: {error}; write one with --log-json") from error


def canary_panel(log: Path) -> TextTable:
    """Return the panel: a table by day, with the total. Raises the errors of `canary_days`."""
    days, broken = canary_days(log)
    total = CanaryDay()
    for one in days.values():
        total.counts.update(one.counts)
        total.early, total.whole = total.early + one.early, total.whole + one.whole
    lines = [one.cells(day) for day, one in days.items()]
    if len(lines) > 1:
        lines.append(total.cells("all"))
    unread = f" {broken:,} lines of the log are unreadable." if broken else ""
    return TextTable(HEAD, lines, "Canary share", NOTE + unread)
