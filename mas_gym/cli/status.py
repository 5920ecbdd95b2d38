"""``mas-gym status``: the runs of a store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mas_gym.cli.console import clock, stdout
from mas_gym.render import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from search import RunInfo, Store
    from search.plan import Usage


_DASH = "\N{EN DASH}"
_RESULTS = ("Task", "MAS", "Policy", "Hit@1", "TOK", "AC", "RC", "Prompt", "Cached")
_PACE = ("Searches", "Failed", "Active", "Per min", "TOK/s", "Seconds", "Last")


class _Figures(NamedTuple):
    """Totals over the searches of one run.

    Attributes:
        right: Searches with the right answer.
        reasons: Number of failed searches by reason.
        sound: Usage of the searches that did not fail.
        tokens: Generated tokens of all searches.
        active: Seconds in which at least one search was running.
        last: When the last search ended, in Unix time; None if none has.
    """

    right: int
    reasons: Counter[str]
    sound: Usage
    tokens: int
    active: float
    last: float | None


def status(store: Annotated[Path, typer.Argument(metavar="RUNS.DB", help="Store written with --store.")]) -> None:
    """Show the runs of a store: progress, speed, accuracy, cost, and why searches failed."""
    from rich.text import Text

    from search import open_store

    with open_store(store) as opened:
        found = [(run, _figures(opened, run)) for run in opened.runs()]
    console = stdout()
    if not found:
        console.print(Text(f"{store} has no runs yet."))
        return
    paid = any("money" in run.facts for run, _ in found)
    console.print(_table(_RESULTS, 3, ((run, _results(run, figures)) for run, figures in found)))
    console.print(
        Text("Hit@1 and cached in %; TOK, AC, RC, prompt tokens: means without failed searches.", style="dim")
    )
    pace = (*_PACE, "Cost") if paid else _PACE
    console.print(_table(pace, 0, ((run, _pace(run, figures, paid)) for run, figures in found)))
    words = "Rates per active time, in which at least one search ran; seconds per search that did not fail."
    console.print(Text(words + " Cost: what the servers charged, retries included." * paid, style="dim"))
    for run, figures in found:
        for reason, number in figures.reasons.most_common():
            console.print(Text(f"{number:,} failed in {one_line(run.label)}: {one_line(reason)}", style="yellow"))


def _figures(store: Store, run: RunInfo) -> _Figures:
    from search.plan import Usage

    reasons: Counter[str] = Counter()
    sound, tokens, right = Usage(), 0, 0
    for plan in store.plans(run.run, trees=False, failed=True):
        tokens += plan.usage.generated_tokens
        if plan.error is not None:
            reasons[plan.error] += 1
            continue
        sound += plan.usage
        right += bool(plan.correct)
    spans = store.spans(run.run)
    return _Figures(right, reasons, sound, tokens, _covered(spans), max((end for _, end in spans), default=None))


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans, given in order of their starts."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _results(run: RunInfo, figures: _Figures) -> tuple[str, ...]:
    task = "/".join(str(run.facts[key]) for key in ("task", "split") if run.facts.get(key))
    sound, searches = figures.sound, run.searches - run.failed
    costs = (sound.generated_tokens, sound.agent_calls, sound.reward_calls, sound.prompt_tokens)
    means = [f"{cost / searches:,.1f}" if searches else _DASH for cost in costs]
    cached = _percent(sound.cached_tokens, sound.prompt_tokens)
    policy = str(run.config["policy"]["name"])
    return (task, run.mas.name, policy, _percent(figures.right, run.searches), *means, cached)


def _pace(run: RunInfo, figures: _Figures, paid: bool) -> tuple[str, ...]:
    wanted = run.facts.get("problems")
    done = f"{run.searches:,}" + (f"/{wanted:,}" if wanted else "")
    sound, active = run.searches - run.failed, figures.active
    rates = [f"{number / active:,.1f}" if active else _DASH for number in (60 * run.searches, figures.tokens)]
    each = f"{figures.sound.seconds / sound:,.1f}" if sound else _DASH
    ago = _DASH if figures.last is None else f"{clock(max(0.0, time.time() - figures.last))} ago"
    money = run.facts.get("money")
    cost = [_DASH if money is None else f"{money:,.4f}"] if paid else []
    return (done, f"{run.failed:,}", clock(active), *rates, each, ago, *cost)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else _DASH


def _table(columns: Sequence[str], words: int, rows: Iterable[tuple[RunInfo, tuple[str, ...]]]) -> Table:
    """Return a table of runs; the first ``words`` columns after the run hold words, the others numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Run", overflow="fold", min_width=12)
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < words else "right", overflow="fold", no_wrap=place >= words)
    for run, cells in rows:
        label = (f"{run.name}: " if run.name else "") + run.label + (", true reward" if run.config["training"] else "")
        table.add_row(*(Text(one_line(cell)) for cell in (label, *cells)))
    return table
