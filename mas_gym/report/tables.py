"""Rows as a terminal table, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mas_gym.render import one_line
from mas_gym.report.outcomes import HIT_RANKS, SCHEMA, Row, Spread, differences
from mas_gym.report.stats import Difference

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

COLUMNS = ("Search", "Critic", "Hit@1", "95% interval", "Hit@3", "Hit@5", "TOK", "AC", "RC", "Failed")
_DASH = "\N{EN DASH}"


def percent(spread: Spread | None) -> str:
    """Return a share as per cent with its deviation over seeds, such as ``"67.8 ± 0.6"``."""
    if spread is None or math.isnan(spread.mean):
        return _DASH
    return f"{100 * spread.mean:.1f}" + (f" ± {100 * spread.std:.1f}" if spread.std is not None else "")


def count(spread: Spread) -> str:
    """Return a cost per problem with its deviation over seeds; decimals only where they tell something."""
    if math.isnan(spread.mean):
        return _DASH
    varies = spread.std is not None and round(spread.std, 1) > 0
    digits = 0 if spread.mean >= 1000 or (spread.mean == round(spread.mean) and not varies) else 1
    return f"{spread.mean:,.{digits}f}" + (f" ± {spread.std:,.{digits}f}" if varies else "")


def cells(row: Row, deviations: bool = True) -> tuple[str, ...]:
    """Return one row's cells as text, in the order of `COLUMNS`.

    Args:
        row: The row.
        deviations: Whether to show deviations over seeds.
    """
    hits = {k: spread if deviations else Spread(spread.mean, None) for k, spread in row.hits.items()}
    costs = (row.tokens, row.agent_calls, row.reward_calls)
    return (
        one_line(row.planner),
        one_line(row.critic) or _DASH,
        percent(hits[1]),
        f"{100 * row.interval.low:.1f} {_DASH} {100 * row.interval.high:.1f}",
        *(percent(hits.get(k)) for k in HIT_RANKS[1:]),
        *(count(cost if deviations else Spread(cost.mean, None)) for cost in costs),
        str(sum(row.failures.values()) or _DASH),
    )


def results_table(rows: Sequence[Row], title: str = "", width: int = 120) -> RenderableType:
    """Return the table for a terminal, with as much as its width can hold; the best Hit@1 is in bold.

    Columns that say nothing in any row are left out. A narrower terminal loses the deviations first, then Hit@3 and
    Hit@5, then gets one paragraph per row.

    Args:
        rows: From `mas_gym.report.summarise`.
        title: Line above the table.
        width: Columns of the terminal.
    """
    from rich.console import Console

    ruler = Console(width=10_000)
    for deviations, dropped in (
        (True, ()),
        (False, ()),
        (False, ("Hit@3", "Hit@5")),
        (False, ("Hit@3", "Hit@5", "RC")),
    ):
        table = _table(rows, title, deviations, dropped)
        if ruler.measure(table).maximum <= width:
            return table
    return _cards(rows, title)


def _table(rows: Sequence[Row], title: str, deviations: bool, dropped: tuple[str, ...]) -> Table:
    from rich.text import Text

    lines = [cells(row, deviations) for row in rows]
    bare = [all(line[i] == _DASH for line in lines) for i in range(len(COLUMNS))]
    shown = [i for i, name in enumerate(COLUMNS) if name not in dropped and not bare[i]]
    table = _plain_table(title)
    for i in shown:
        table.add_column(COLUMNS[i], justify="left" if i < 2 else "right", no_wrap=True)
    kinds = [row.planner.split(":")[0] for row in rows]
    blocks = len(set(kinds)) < len(kinds)
    for place, (row, line) in enumerate(zip(rows, lines, strict=True)):
        ends = blocks and kinds[place : place + 2] != [kinds[place]] * 2
        table.add_row(*(Text(line[i]) for i in shown), style=_style(row, rows), end_section=ends)
    return table


def _plain_table(title: str, header: bool = True) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    look: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD, "pad_edge": False}
    return Table(title=Text(title, style="bold") if title else None, show_header=header, **look)


def _style(row: Row, rows: Sequence[Row]) -> str:
    best = max(other.hits[1].mean for other in rows)
    return "bold green" if len(rows) > 1 and row.hits[1].mean == best > 0 else ""


def _cards(rows: Sequence[Row], title: str) -> RenderableType:
    from rich.text import Text

    text = Text(f"{title}\n" if title else "", style="bold")
    for row in rows:
        text.append(f"\n{one_line(row.label)}\n", style=_style(row, rows) or "bold")
        for name, cell in list(zip(COLUMNS, cells(row), strict=True))[2:]:
            if cell != _DASH:
                text.append(f"{name:>12} {cell}\n", style="not bold")
    return text


def caption(rows: Sequence[Row]) -> str:
    """Return the sentence that says what the table's figures are."""
    sizes = sorted({row.problems for row in rows})
    problems = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    seeds = sorted({seed for row in rows for seed in row.seeds})
    averaged = f"mean ± std over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return (
        f"{problems} problems, {averaged}. Hit in %, failed searches counted as wrong; 95% intervals over problems. "
        "TOK generated tokens, AC agent calls, RC reward calls, each per problem."
    )


def report(rows: Sequence[Row], title: str = "", width: int = 120) -> RenderableType:
    """Return everything that ends a run: the table, what its figures mean, differences, and failures by reason."""
    from rich.console import Group
    from rich.text import Text

    if not rows:
        return Text("No search has ended.", style="yellow")
    parts: list[RenderableType] = [results_table(rows, title, width), Text(caption(rows), style="dim")]
    gaps = differences(list(rows))
    if gaps:
        parts += [Text(""), _difference_table(gaps)]
    failures = [(row.label, number, reason) for row in rows for reason, number in row.failures.items()]
    if failures:
        parts += [Text(""), _failure_table(failures)]
    return Group(*parts)


def _difference_table(gaps: Sequence[tuple[Row, Row, Difference]]) -> Table:
    from rich.text import Text

    title = f"Hit@1 against {gaps[0][1].label}, in points; paired bootstrap 95% intervals"
    table = _plain_table(title, header=False)
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, overflow="fold")
    for row, _, gap in gaps:
        style = "green" if gap.low > 0 else "red" if gap.high < 0 else "dim"
        ends = f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}"
        verdict = Text("excludes 0" if gap.significant else "includes 0", style=style)
        table.add_row(Text(one_line(row.label)), f"{100 * gap.mean:+.1f}", ends, verdict)
    return table


def _failure_table(failures: Sequence[tuple[str, int, str]]) -> Table:
    from rich.text import Text

    table = _plain_table("Failed searches")
    table.add_column("Search", overflow="fold")
    table.add_column("Number", justify="right")
    table.add_column("Reason", overflow="fold")
    for label, number, reason in failures:
        table.add_row(Text(one_line(label)), str(number), Text(one_line(reason)))
    return table


def to_markdown(rows: Sequence[Row]) -> str:
    """Return the table as GitHub Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * 2 + "---:|" * (len(COLUMNS) - 2)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def to_csv(rows: Sequence[Row]) -> str:
    """Return one line per row, with a header; shares in ``[0, 1]``."""
    flat = [row.to_dict() for row in rows]
    for line in flat:
        line["seeds"] = " ".join(map(str, line["seeds"]))
        line["failures"] = json.dumps(line["failures"])
    out = io.StringIO()
    if flat:
        writer = csv.DictWriter(out, flat[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
    return out.getvalue()


def to_json(rows: Sequence[Row], meta: Mapping[str, Any] | None = None) -> str:
    """Return rows, per-problem shares and differences as one JSON document of schema `SCHEMA`.

    Args:
        rows: From `mas_gym.report.summarise`.
        meta: JSON-able facts about the run: task, MAS, policy, versions.
    """
    document = {
        "schema": SCHEMA,
        "meta": dict(meta or {}),
        "rows": [{**_finite(row.to_dict()), "shares": row.shares, "curve": row.curve} for row in rows],
        "differences": [{"of": a.label, "to": b.label, **gap._asdict()} for a, b, gap in differences(list(rows))]
        if rows
        else [],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _finite(flat: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in flat.items()}
