"""The report panel for the canary share of a service, read from the service's log."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from mas_gym.errors import DataError, DataNotFoundError
from search.results.intervals import wilson
from search.results.table_formats import TextTable

OUTCOMES = ("unstopped", "same", "different", "failed", "dropped")
"""Outcomes of a request of the canary share (`search.service.canary.Canary`)."""

_CHECKED = ("same", "different")
NOTE = (
    "Requests of a service that were searched again without early stops. An increasing share of "
    "different answers means that the threshold no longer fits the questions: calibrate again."
)
HEAD = ("day (UTC)", *OUTCOMES, "same, % of checked", "TOK early", "TOK whole")


class CanaryRequest(NamedTuple):
    """A request of the share: its outcome and, if it was checked, the generated tokens of both searches."""

    outcome: str
    early: int = 0
    whole: int = 0


def canary_days(log: Path) -> tuple[dict[str, list[CanaryRequest]], int]:
    """Return the requests by day, in order, and the number of unreadable lines.

    Args:
        log: A file written by ``mas-gym serve --log-json``; lines of other events are ignored.

    Raises:
        DataNotFoundError: The file cannot be read.
        DataError: It contains no canary request.
    """
    days: defaultdict[str, list[CanaryRequest]] = defaultdict(list)
    broken = 0
    try:
        with log.open(encoding="utf-8", errors="replace") as stream:
            for text in stream:
                try:
                    line = json.loads(text)
                    if line.get("event") == "canary":
                        outcome = OUTCOMES[OUTCOMES.index(line["outcome"])]
                        names = ("early_tokens", "whole_tokens") if outcome in _CHECKED else ()
                        days[str(line["time"])[:10]].append(CanaryRequest(outcome, *(int(line[one]) for one in names)))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    broken += 1
    except OSError as error:
        raise DataNotFoundError(f"expected a log of mas-gym serve, got: {error}; write one with --log-json") from error
    found = {day: days[day] for day in sorted(days) if days[day]}
    if not found:
        raise DataError(
            f"{log}: expected canary requests, got none; log them with mas-gym serve --canary 0.05 --log-json {log}"
        )
    return found, broken


def canary_panel(log: Path) -> TextTable:
    """Return the panel: a table by day, with the total. Raises the errors of `canary_days`."""
    days, broken = canary_days(log)
    lines = [_cells(day, requests) for day, requests in days.items()]
    if len(lines) > 1:
        lines.append(_cells("all", list(chain(*days.values()))))
    unread = f" {broken:,} lines of the log are unreadable." if broken else ""
    return TextTable(HEAD, lines, "Canary share", NOTE + unread)


def _cells(day: str, requests: Sequence[CanaryRequest]) -> tuple[str, ...]:
    counts = Counter(one.outcome for one in requests)
    same, checked = counts["same"], counts["same"] + counts["different"]
    cells = (day, *(f"{counts[outcome]:,}" for outcome in OUTCOMES))
    if not checked:
        return (*cells, "", "", "")
    span = wilson([1.0] * same + [0.0] * (checked - same))
    share = f"{100 * same / checked:.1f} ({100 * span.low:.1f} to {100 * span.high:.1f})"
    early, whole = sum(one.early for one in requests), sum(one.whole for one in requests)
    return (*cells, share, f"{early / checked:,.1f}", f"{whole / checked:,.1f}")
