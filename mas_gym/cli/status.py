"""``mas-gym status``: the runs of a store, their results and their pace."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli.console import stdout, table
from mas_gym.cli.progress import clock
from mas_gym.internal.text import by_cause, one_line

if TYPE_CHECKING:
    from rich.table import Table

    from search import RunInfo
    from search.results.outcomes import Totals

_DASH = "\N{EN DASH}"
_RESULTS = ("Task", "MAS", "Policy", "Hit@1", "TOK", "AC", "RC", "Prompt", "Cached")
_PACE = ("Searches", "Failed", "Active", "Per min", "TOK/s", "Seconds", "Last")


def status(store: Annotated[Path, typer.Argument(metavar="RUNS.DB", help="Store written with --store.")]) -> None:
    """Show the runs of a store: progress, speed, accuracy, cost and reasons for failures."""
    from search import open_store

    with open_store(store) as opened:
        found = [(run, opened.totals(run.run)) for run in opened.runs()]
        damaged = bool(opened.damaged)
    console = stdout()
    if not found:
        console.print(f"{store} has no runs yet.")
        return
    paid = any("money" in run.facts for run, _ in found)
    console.print(_table(_RESULTS, 4, ((run, _results(run, figures)) for run, figures in found)))
    console.print("Hit@1 and cached in %; TOK, AC, RC, prompt tokens: means without failed searches.", style="dim")
    pace = (*_PACE, "Cost") if paid else _PACE
    console.print(_table(pace, 1, ((run, _pace(run, figures, paid)) for run, figures in found)))
    words = "Rates are per active time, with at least one search running; seconds are per successful search."
    console.print(words + " Cost: charges of the servers, including retries." * paid, style="dim")
    for run, figures in found:
        for reason, number in by_cause(figures.failures):
            console.print(f"{number:,} failed in {one_line(run.label)}: {reason}", style="yellow")
    if damaged:
        # The log lists the runs.
        raise typer.Exit(1)


def _results(run: RunInfo, figures: Totals) -> tuple[str, ...]:
    task = "/".join(str(run.facts[key]) for key in ("task", "split") if run.facts.get(key))
    usage, searches = figures.usage, run.searches - run.failed
    costs = (usage.generated_tokens, usage.agent_calls, usage.reward_calls, usage.prompt_tokens)
    means = [f"{cost / searches:,.1f}" if searches else _DASH for cost in costs]
    # Logs without token counts.
    if usage.agent_calls and not usage.generated_tokens:
        means[0] = _DASH
    cached = _percent(usage.cached_tokens, usage.prompt_tokens)
    policy = str(run.config["policy"]["name"])
    grades = [right for _, right in figures.grades if right is not None]
    return (task, run.system, policy, _percent(sum(grades), len(grades)), *means, cached)


def _pace(run: RunInfo, figures: Totals, paid: bool) -> tuple[str, ...]:
    wanted = run.facts.get("problems")
    done = f"{run.searches:,}" + (f"/{wanted:,}" if wanted else "")
    sound, (active, last) = run.searches - run.failed, active_time(figures.spans)
    tokens = figures.tokens if figures.tokens or not figures.usage.agent_calls else None
    rates = [f"{n / active:,.1f}" if active and n is not None else _DASH for n in (60 * run.searches, tokens)]
    each = f"{figures.usage.seconds / sound:,.1f}" if sound else _DASH
    ago = _DASH if last is None else f"{clock(max(0.0, time.time() - last))} ago"
    money = run.facts.get("money")
    cost = [_DASH if money is None else f"{money:,.4f}"] if paid else []
    return (done, f"{run.failed:,}", clock(active), *rates, each, ago, *cost)


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
    made = table(("Run", *columns), lines, words=words)
    made.padding = (0, 1, 0, 0)
    made.columns[0].min_width = 12
    for column in made.columns[words:]:
        column.no_wrap = True
    return made
