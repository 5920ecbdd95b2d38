"""``mas-gym status``: the runs of a store, their results and their pace."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli.console import stdout
from mas_gym.cli.progress import clock
from mas_gym.internal.rich_tables import text_table
from mas_gym.internal.text import by_cause, one_line

if TYPE_CHECKING:
    from rich.table import Table

    from search import RunInfo
    from search.store.search_rows import Row

_DASH = "\N{EN DASH}"
_RESULTS = ("Task", "MAS", "Policy", "Hit@1", "TOK", "AC", "RC", "Prompt", "Cached")
_COSTS = ("generated_tokens", "agent_calls", "reward_calls", "prompt_tokens", "cached_tokens")
_PACE = ("Searches", "Failed", "Active", "Per min", "TOK/s", "Seconds", "Last")


def status(store: Annotated[Path, typer.Argument(metavar="RUNS.DB", help="Store written with --store.")]) -> None:
    """Show the runs of a store: progress, speed, accuracy, cost and reasons for failures."""
    from search import open_store

    with open_store(store) as opened:
        found = [(run, list(opened.rows(run.run))) for run in opened.runs()]
        damaged = bool(opened.damaged)
    console = stdout()
    if not found:
        console.print(f"{store} has no runs yet.")
        return
    paid = any("money" in run.facts for run, _ in found)
    console.print(_table(_RESULTS, 4, ((run, _results(run, rows)) for run, rows in found)))
    console.print("Hit@1 and cached in %; TOK, AC, RC, prompt tokens: means without failed searches.", style="dim")
    pace = (*_PACE, "Cost") if paid else _PACE
    console.print(_table(pace, 1, ((run, _pace(run, rows, paid)) for run, rows in found)))
    words = "Rates are per active time, with at least one search running; seconds are per successful search."
    console.print(words + " Cost: charges of the servers, including retries." * paid, style="dim")
    for run, rows in found:
        for reason, number in by_cause(Counter(row["error"] for row in rows if row["error"] is not None)):
            console.print(f"{number:,} failed in {one_line(run.label)}: {reason}", style="yellow")
    if damaged:
        # The log lists the runs.
        raise typer.Exit(1)


def _results(run: RunInfo, rows: Sequence[Row]) -> tuple[str, ...]:
    task = "/".join(str(run.facts[key]) for key in ("task", "split") if run.facts.get(key))
    ended = [row for row in rows if row["error"] is None]
    tokens, calls, rewards, prompt, cached = (sum(row[name] for row in ended) for name in _COSTS)
    means = [f"{cost / len(ended):,.1f}" if ended else _DASH for cost in (tokens, calls, rewards, prompt)]
    # Logs without token counts.
    if calls and not tokens:
        means[0] = _DASH
    policy = str(run.config["policy"]["name"])
    grades = [bool(row["correct"]) and row["error"] is None for row in rows if row["correct"] is not None]
    return (task, run.system, policy, _percent(sum(grades), len(grades)), *means, _percent(cached, prompt))


def _pace(run: RunInfo, rows: Sequence[Row], paid: bool) -> tuple[str, ...]:
    wanted = run.facts.get("problems")
    done = f"{len(rows):,}" + (f"/{wanted:,}" if wanted else "")
    active, last = active_time([(row["finished"], row["seconds"]) for row in rows])
    tokens = sum(row["generated_tokens"] for row in rows)
    rates = [60 * len(rows), tokens if tokens or not any(row["agent_calls"] for row in rows) else None]
    shown = [f"{n / active:,.1f}" if active and n is not None else _DASH for n in rates]
    sound = [row["seconds"] for row in rows if row["error"] is None]
    each = f"{sum(sound) / len(sound):,.1f}" if sound else _DASH
    ago = _DASH if last is None else f"{clock(max(0.0, time.time() - last))} ago"
    money = run.facts.get("money")
    cost = [_DASH if money is None else f"{money:,.4f}"] if paid else []
    return (done, f"{len(rows) - len(sound):,}", clock(active), *shown, each, ago, *cost)


def active_time(spans: Iterable[tuple[float, float]]) -> tuple[float, float | None]:
    """Return the seconds with at least one search running, and the end of the last search in Unix time.

    Args:
        spans: The end of each search, in Unix time, and its seconds.
    """
    length, last = 0.0, -math.inf
    for start, end in sorted((end - seconds, end) for end, seconds in spans):
        if end > last:
            length += end - max(start, last)
            last = end
    return length, None if last == -math.inf else last


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else _DASH


def _table(columns: Sequence[str], words: int, rows: Iterable[tuple[RunInfo, tuple[str, ...]]]) -> Table:
    """Return a table of runs: ``words`` text columns, the first for the run, then numeric columns."""
    lines = []
    for run, cells in rows:
        label = (f"{run.name}: " if run.name else "") + run.label + (", true reward" if run.config["training"] else "")
        lines.append([one_line(cell) for cell in (label, *cells)])
    made = text_table(("Run", *columns), lines, words=words)
    made.padding = (0, 1, 0, 0)
    made.columns[0].min_width = 12
    for column in made.columns[words:]:
        column.no_wrap = True
    return made
