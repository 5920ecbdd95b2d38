"""``mas-gym status``: what a run store holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli.console import stdout

if TYPE_CHECKING:
    from search import RunInfo, Store


_DASH = "\N{EN DASH}"


def status(store: Annotated[Path, typer.Argument(metavar="RUNS.DB", help="A store that --store wrote.")]) -> None:
    """Show the runs of a store: how many searches, how many right, what they cost, and why some failed."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from search import open_store

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(("Run", "Task", "MAS", "Policy", "Searches", "Hit@1", "TOK", "AC", "RC", "Seconds")):
        table.add_column(name, justify="left" if place < 4 else "right", overflow="fold")
    failures: list[tuple[str, str, int]] = []
    with open_store(store) as opened:
        runs = opened.runs()
        for run in runs:
            cells, reasons = _run(opened, run)
            table.add_row(*map(Text, cells))
            failures += [(run.label, reason, number) for reason, number in reasons.most_common()]
    console = stdout()
    if not runs:
        console.print(Text(f"{store} holds no run yet."))
        return
    console.print(table)
    console.print(Text("Hit@1 in %; TOK, AC, RC and seconds per search that did not fail.", style="dim"))
    for label, reason, number in failures:
        console.print(Text(f"{number:,} failed in {label}: {reason}", style="yellow"))


def _run(store: Store, run: RunInfo) -> tuple[tuple[str, ...], Counter[str]]:
    reasons: Counter[str] = Counter()
    done = right = 0
    sums = [0.0] * 4
    for plan in store.plans(run.run, trees=False, failed=True):
        if plan.error is not None:
            reasons[plan.error] += 1
            continue
        done += 1
        right += bool(plan.correct)
        usage = plan.usage
        costs = (usage.generated_tokens, usage.agent_calls, usage.reward_calls, usage.seconds)
        sums = [total + cost for total, cost in zip(sums, costs, strict=True)]
    task = "/".join(str(run.facts[key]) for key in ("task", "split") if run.facts.get(key))
    label = (f"{run.name}: " if run.name else "") + run.label + (", true reward" if run.config["training"] else "")
    hit = f"{100 * right / run.searches:.1f}" if run.searches else _DASH
    means = [f"{total / done:,.1f}" if done else _DASH for total in sums]
    return (label, task, run.mas.name, str(run.config["policy"]["name"]), f"{run.searches:,}", hit, *means), reasons
