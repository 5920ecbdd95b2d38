"""Formats of a table: terminal, Markdown, LaTeX, HTML, CSV, JSON and a plot.

The plot shows accuracy against cost, as in the paper's first figure.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.internal.text import by_cause, one_line
from search.pages.templates import render
from search.results.intervals import Difference, Interval
from search.results.summary import HIT_RANKS, SCHEMA, ResultRow, Spread, hit_differences

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


COLUMNS = (
    *("Search", "Critic", "Problems", "Hit@1", "95% interval", "Hit@3", "Hit@5"),
    *("TOK", "USD", "AC", "RC", "Critic TOK", "Judge TOK", "Bound", "Failed"),
)
PROBLEM_MARKS = (
    "Problems: rows marked S1, S2 and so on ran on different sets of problems; compare them only by paired "
    "differences. * marks a row whose seeds ran on different problems."
)
_RARE = {
    "Problems": f" {PROBLEM_MARKS}",
    "USD": " USD: cost per problem at the given prices, without grading.",
    "Critic TOK": " Critic TOK: tokens of judges that guide the search, not included in TOK.",
    "Judge TOK": " Judge TOK: tokens of the judge that grades the answers, not included in TOK.",
    "Bound": " Bound: % of searches that requested more messages than were recorded.",
}
"""Optional columns, and their explanations for the caption."""
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    character: "\\" + character for character in "&%$#_{}"
}
_DASH = "\N{EN DASH}"
_COSTS = {"TOK": "generated tokens", "AC": "agent calls", "RC": "reward calls"}


def percent(spread: Spread | None) -> str:
    """Return a share as a percentage with its standard deviation over seeds, such as ``"67.8 ± 0.6"``."""
    if spread is None or math.isnan(spread.mean):
        return _DASH
    return percent_cell(spread.mean) + (f" ± {100 * spread.std:.1f}" if spread.std is not None else "")


def count(spread: Spread) -> str:
    """Return a cost per problem with its standard deviation over seeds; decimals are shown only if significant."""
    if math.isnan(spread.mean):
        return _DASH
    varies = spread.std is not None and round(spread.std, 1) > 0
    digits = 0 if spread.mean >= 1000 or (spread.mean == round(spread.mean) and not varies) else 1
    return f"{spread.mean:,.{digits}f}" + (f" ± {spread.std:,.{digits}f}" if varies else "")


def dollars(spread: Spread | None) -> str:
    """Return a cost in USD with its standard deviation over seeds, to 3 significant digits, such as ``"0.00123"``."""
    if spread is None or math.isnan(spread.mean):
        return _DASH
    digits = 2 if spread.mean <= 0 else max(2, 2 - math.floor(math.log10(spread.mean)))
    varies = spread.std is not None and round(spread.std, digits) > 0
    return f"{spread.mean:,.{digits}f}" + (f" ± {spread.std:,.{digits}f}" if varies else "")


def percent_cell(share: float) -> str:
    """Return a share as a percentage with one decimal place."""
    return _DASH if math.isnan(share) else f"{100 * share:.1f}"


def interval_cell(interval: Interval) -> str:
    """Return an interval of shares as percentages, such as ``"41.0 - 52.3"`` with an en dash; a dash if undefined."""
    if math.isnan(interval.low):
        return _DASH
    return f"{100 * interval.low:.1f} {_DASH} {100 * interval.high:.1f}"


def gap_cells(gap: Difference) -> tuple[str, str]:
    """Return a difference and its interval in percentage points, such as ``("+3.1", "-0.4 to +6.5")``."""
    # Adding 0 turns -0.0 into 0.0.
    mean, low, high = (round(100 * value, 1) + 0.0 for value in gap[:3])
    return f"{mean:+.1f}", f"{low:+.1f} to {high:+.1f}"


def marked_problems(rows: Sequence[ResultRow]) -> bool:
    """Return whether rows, or the seeds of a row, ran on different problems; every table format marks this."""
    return len({row.problem_set for row in rows}) > 1 or any(row.uneven for row in rows)


def _problem_cells(rows: Sequence[ResultRow]) -> list[str]:
    """Return each row's number of problems and problem set, such as ``"30 S1"``; dashes if sets are not marked."""
    if not marked_problems(rows):
        return [_DASH] * len(rows)
    sets = list(dict.fromkeys(row.problem_set for row in rows))
    return [f"{row.problems:,} S{sets.index(row.problem_set) + 1}{'*' if row.uneven else ''}" for row in rows]


def table_cells(rows: Sequence[ResultRow], deviations: bool = True) -> list[tuple[str, ...]]:
    """Return the cells of each row as text, in the order of `COLUMNS`."""
    return [_cells(row, problems, deviations) for row, problems in zip(rows, _problem_cells(rows), strict=True)]


def _cells(row: ResultRow, problems: str, deviations: bool) -> tuple[str, ...]:
    def shown(spread: Spread) -> Spread:
        return spread if deviations else Spread(spread.mean, None)

    hits = {k: shown(spread) for k, spread in row.hits.items()}
    return (
        one_line(row.planner),
        one_line(row.critic) or _DASH,
        problems,
        percent(hits[1]),
        interval_cell(row.interval),
        *(percent(hits.get(k)) for k in HIT_RANKS[1:]),
        count(shown(row.tokens)),
        dollars(None if row.usd is None else shown(row.usd)),
        *(count(shown(cost)) for cost in (row.agent_calls, row.reward_calls)),
        *(count(shown(cost)) if cost.mean > 0 else _DASH for cost in (row.critic_tokens, row.grader_tokens)),
        f"{100 * row.bounded:.1f}" if row.bounded else _DASH,
        str(sum(row.failures.values()) or _DASH),
    )


def _fitted(rows: Sequence[ResultRow], title: str, width: int) -> tuple[RenderableType, bool, tuple[str, ...]]:
    """Return the table for ``width`` characters, whether it has standard deviations, and the omitted columns.

    The best Hit@1 is bold.

    Columns that are empty in every row are omitted. On narrow terminals, the deviations are omitted first, then Hit@3
    and Hit@5, then RC; on narrower ones, each row becomes a paragraph.
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
            return table, deviations, dropped
    return _cards(rows, title), True, ()


def _table(rows: Sequence[ResultRow], title: str, deviations: bool, dropped: tuple[str, ...]) -> Table:
    from rich.text import Text

    lines = table_cells(rows, deviations)
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


def _style(row: ResultRow, rows: Sequence[ResultRow]) -> str:
    return "bold green" if len(rows) > 1 and row.hits[1].mean == _best(rows) > 0 else ""


def _best(rows: Sequence[ResultRow]) -> float:
    """Return the best Hit@1; if the rows ran on different problems, NaN, which equals no row's Hit@1."""
    if len({row.problem_set for row in rows}) > 1:
        return math.nan
    return max((row.hits[1].mean for row in rows if row.shares), default=math.nan)


def _cards(rows: Sequence[ResultRow], title: str) -> RenderableType:
    from rich.text import Text

    text = Text(f"{title}\n" if title else "", style="bold")
    for row, line in zip(rows, table_cells(rows), strict=True):
        text.append(f"\n{one_line(row.label)}\n", style=_style(row, rows) or "bold")
        for name, cell in list(zip(COLUMNS, line, strict=True))[2:]:
            if cell != _DASH:
                text.append(f"{name:>12} {cell}\n", style="not bold")
    return text


def caption(rows: Sequence[ResultRow], shown: bool = True, dropped: Sequence[str] = ()) -> str:
    """Return the text that explains the table's numbers.

    Args:
        rows: The rows of the table.
        shown: Whether the table has standard deviations over seeds.
        dropped: Columns that the table omits.
    """
    sizes = sorted({row.problems for row in rows})
    problems = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    seeds = sorted({seed for row in rows for seed in row.seeds})
    deviations = any("±" in cell for line in table_cells(rows, shown) for cell in line)
    over = f"mean{' ± std' * deviations} over seeds {', '.join(map(str, seeds))}"
    averaged = over if len(seeds) > 1 else f"seed {seeds[0]}"
    costs = ", ".join(f"{name} {meaning}" for name, meaning in _COSTS.items() if name not in dropped)
    return (
        f"{problems} problems, {averaged}. Hit in %, failed searches counted as wrong; 95% intervals over problems. "
        f"{costs}, each per problem." + "".join(_remarks(rows))
    )


def _remarks(rows: Sequence[ResultRow]) -> list[str]:
    columns = dict(zip(COLUMNS, zip(*table_cells(rows), strict=True), strict=True))
    cut = len(frozenset().union(*(row.cut for row in rows)))
    said = f" Prompts of {cut:,} of the questions were cut to fit the context window." if cut else ""
    reasoned = sum(row.reasoning_only for row in rows)
    said += f" {reasoned:,} replies were only reasoning; raise --max-tokens." if reasoned else ""
    unknown = len(frozenset().union(*(row.unknown for row in rows)))
    said += f" {unknown:,} problems with no known outcome are not counted." if unknown else ""
    return [*(text for name, text in _RARE.items() if set(columns[name]) != {_DASH}), said]


def report(rows: Sequence[ResultRow], title: str = "", width: int = 120, baseline: str = "") -> RenderableType:
    """Return the whole result: the table, its caption, differences from the baseline, and failures by reason."""
    from rich.console import Group
    from rich.text import Text

    if not rows:
        return Text("No search has ended.", style="yellow")
    table, deviations, dropped = _fitted(rows, title, width)
    parts: list[RenderableType] = [table, Text(caption(rows, deviations, dropped), style="dim")]
    if arms := arm_cells(rows):
        parts += [Text(""), lines_table(ARM_TITLE, ARM_HEAD, arms, ARM_HEAD[2:])]
    gaps = hit_differences(rows, baseline)
    if gaps:
        parts += [Text(""), _difference_table(gaps)]
    failures = [(one_line(row.label), str(number), reason) for row in rows for reason, number in by_cause(row.failures)]
    if failures:
        head = ("Search", "Number", "Reason")
        parts += [Text(""), lines_table("Failed searches", head, failures, ("Number",))]
    return Group(*parts)


ARM_HEAD = ("Search", "Arm", "AC", "TOK", "Chosen")
ARM_TITLE = "Messages by arm: per problem, and the arm's share in the chosen answers, in %"


def arm_cells(rows: Sequence[ResultRow]) -> list[tuple[str, ...]]:
    """Return the cells of a table of arms, under `ARM_HEAD`; empty for policies without arms."""
    return [
        (
            one_line(row.label) if place == 0 else "",
            one_line(share.arm),
            count(Spread(share.agent_calls, None)),
            count(Spread(share.tokens, None)),
            percent_cell(share.chosen),
        )
        for row in rows
        for place, share in enumerate(row.arms)
    ]


def lines_table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]], right: Sequence[str]) -> Table:
    """Return a table of text; the columns ``right`` are right-aligned."""
    from rich.text import Text

    table = _plain_table(title)
    for name in head:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _difference_table(gaps: Sequence[tuple[ResultRow, ResultRow, Difference]]) -> Table:
    from rich.text import Text

    shown = _difference_text(gaps)
    table = _plain_table(shown.title, header=False)
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, overflow="fold")
    for (_, _, gap), line in zip(gaps, shown.lines, strict=True):
        style = "dim" if not gap.significant else "green" if gap.low > 0 else "red"
        table.add_row(*map(Text, line[:3]), Text(line[3], style=style))
    return table


class TextTable(NamedTuple):
    """A table of a page or a file."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""


def _difference_text(gaps: Sequence[tuple[ResultRow, ResultRow, Difference]]) -> TextTable:
    title = f"Hit@1 against {one_line(gaps[0][1].label)}, in points; paired 95% intervals"
    lines = [(one_line(row.label), *gap_cells(gap), verdict(row, first, gap)) for row, first, gap in gaps]
    return TextTable(("Search", "Difference", "95% interval", "Verdict"), lines, title)


def text_tables(rows: Sequence[ResultRow], title: str = "", baseline: str = "") -> list[TextTable]:
    """Return the table with its caption, the table of arms, and the differences from the baseline.

    Args:
        rows: The rows.
        title: The title of the first table.
        baseline: The row to compare the others with; the first by default.
    """
    header, *body = _fixed_columns(rows)
    found = [TextTable(header, body, title, caption(rows) if rows else "")]
    if arms := arm_cells(rows):
        found.append(TextTable(ARM_HEAD, arms, ARM_TITLE))
    if len(rows) > 1 and (gaps := hit_differences(rows, baseline)):
        found.append(_difference_text(gaps))
    return found


def to_markdown(rows: Sequence[ResultRow]) -> str:
    """Return the table as GitHub Markdown, with a note if the rows ran on different problems."""
    remark = "\n" + PROBLEM_MARKS.replace("*", r"\*") + "\n" if marked_problems(rows) else ""
    return markdown_table(_fixed_columns(rows), left=2) + remark


def markdown_document(rows: Sequence[ResultRow], title: str = "", baseline: str = "") -> str:
    """Return `text_tables` as GitHub Markdown."""
    parts = []
    for place, table in enumerate(text_tables(rows, title, baseline)):
        body = markdown_table([table.head, *table.lines], left=2 if place == 0 else 1)
        said = (text.replace("*", r"\*") for text in (table.title, table.note))
        parts.append("\n\n".join(filter(None, (next(said), body.strip(), next(said)))))
    return "\n\n".join(parts) + "\n"


_MARKUP = re.compile(r"\||<(?=[A-Za-z/!?])|\](?=\()")
"""Text that would be a cell's end, an HTML tag or a link in Markdown."""


def markdown_table(lines: Sequence[Sequence[str]], left: int) -> str:
    """Return a header and lines as GitHub Markdown; all but the first ``left`` columns are aligned to the right."""
    rule = "|" + "---|" * left + "---:|" * (len(lines[0]) - left)
    header, *body = ["| " + " | ".join(_MARKUP.sub(r"\\\g<0>", cell) for cell in line) + " |" for line in lines]
    return "\n".join([header, rule, *body]) + "\n"


def _fixed_columns(rows: Sequence[ResultRow]) -> list[tuple[str, ...]]:
    """Return the header and lines of a table with all columns except empty optional ones."""
    lines = [COLUMNS, *table_cells(rows)]
    shown = [i for i, name in enumerate(COLUMNS) if name not in _RARE or any(line[i] != _DASH for line in lines[1:])]
    return [tuple(line[i] for i in shown) for line in lines]


def to_csv(rows: Sequence[ResultRow]) -> str:
    """Return the table as CSV with a header; shares are in ``[0, 1]``."""
    flat = [row.to_dict() for row in rows]
    for line in flat:
        line["seeds"] = " ".join(map(str, line["seeds"]))
        line["failures"] = json.dumps(line["failures"])
        if any(row.arms for row in rows):
            line["arms"] = json.dumps(line.get("arms", []))
    out = io.StringIO()
    if flat:
        # Rows have rare columns, such as ``cut``, only if they need them.
        names = dict.fromkeys(name for line in sorted(flat, key=len, reverse=True) for name in line)
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
    return out.getvalue()


def to_latex(rows: Sequence[ResultRow], title: str = "", baseline: str = "") -> str:
    """Return the table and the differences from the baseline in LaTeX, with booktabs rules and labels.

    The best Hit@1 is in bold.
    """
    first, *more = text_tables(rows, title, baseline)
    shown = [i for i in range(len(first.head)) if any(line[i] != _DASH for line in first.lines)]
    hit, best = first.head.index("Hit@1"), _best(rows)
    lines = [
        [rf"\textbf{{{latex(line[i])}}}" if i == hit and row.hits[1].mean == best else latex(line[i]) for i in shown]
        for row, line in zip(rows, first.lines, strict=True)
    ]
    said = " ".join(filter(None, (f"{title}." if title else "", first.note)))
    label = re.sub(r"\W+", "-", title.casefold(), flags=re.ASCII).strip("-") or "results"
    parts = [latex_table([first.head[i] for i in shown], lines, said, label, sum(i < 2 for i in shown))]
    for one in more:
        lines = [[latex(cell) for cell in line] for line in one.lines]
        kind = "arms" if one.head == ARM_HEAD else "differences"
        parts.append(latex_table(one.head, lines, f"{one.title}.", f"{label}-{kind}", 1))
    return "\n".join(parts)


def latex_table(head: Sequence[str], lines: Sequence[Sequence[str]], said: str, label: str, left: int) -> str:
    """Return one LaTeX table of escaped lines with the caption ``said``; the first ``left`` columns contain words."""
    parts = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{'l' * left}{'r' * (len(head) - left)}}}"]
    parts += [r"\toprule", " & ".join(map(latex, head)) + r" \\", r"\midrule"]
    parts += [" & ".join(line) + r" \\" for line in lines]
    parts += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{latex(said)}}}", rf"\label{{tab:{label}}}"]
    return "\n".join([*parts, r"\end{table}"]) + "\n"


def latex(text: str) -> str:
    r"""Return text with LaTeX's special characters escaped.

    >>> print(latex("50% of a_b"))
    50\% of a\_b
    """
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return escaped.replace("\N{PLUS-MINUS SIGN}", r"$\pm$").replace(_DASH, "--")


def to_html(rows: Sequence[ResultRow], title: str = "", baseline: str = "") -> str:
    """Return the table, its caption and the differences as an HTML fragment for notebooks."""
    return render("tables.html", tables=text_tables(rows, title, baseline))


def verdict(a: ResultRow, b: ResultRow, gap: Difference) -> str:
    """Return a difference's verdict, such as ``"includes 0"``, with the number of common problems if a row has more."""
    return gap.verdict + (f", {gap.problems:,} common problems" if gap.problems < max(a.problems, b.problems) else "")


def to_json(rows: Sequence[ResultRow], meta: JSONMapping | None = None, baseline: str = "") -> str:
    """Return rows, per-problem shares and differences as one JSON document of schema `SCHEMA`.

    Args:
        rows: From `search.results.summary.summarize`.
        meta: JSON-serializable facts about the run: task, MAS, policy, versions.
        baseline: The row to compare the others with; the first by default.
    """
    document = {
        "schema": SCHEMA,
        "meta": dict(meta or {}),
        "rows": [{**_finite(row.to_dict()), "shares": row.shares, "curve": row.curve} for row in rows],
        "differences": [
            {"of": a.label, "to": b.label, **gap._asdict(), "verdict": gap.verdict}
            for a, b, gap in hit_differences(rows, baseline)
        ]
        if rows
        else [],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _finite(flat: JSONObject) -> JSONObject:
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in flat.items()}
