"""The cells, titles and notes of a table, and its formats for a terminal, Markdown, LaTeX and HTML."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mas_gym.internal.rich_tables import text_table
from mas_gym.internal.text import by_cause, one_line
from search.results.intervals import Difference, Interval
from search.results.summary import HIT_RANKS, ResultRow, Spread, hit_differences

if TYPE_CHECKING:
    from rich.console import RenderableType


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
ARM_TITLE = "Messages by arm: per problem, and the arm's share in the chosen answers, in %"
_COSTS = {"TOK": "generated tokens", "AC": "agent calls", "RC": "reward calls"}


def percent(spread: Spread | None) -> str:
    """Return a share as a percentage with its standard deviation over seeds, such as ``"67.8 ± 0.6"``."""
    if spread is None or math.isnan(spread.mean):
        return _DASH
    return percent_cell(spread.mean) + (f" ± {100 * spread.std:.1f}" if spread.std is not None else "")


def count(spread: Spread) -> str:
    """Return a cost per problem with its standard deviation over seeds; decimals are shown only if significant."""
    varies = spread.std is not None and round(spread.std, 1) > 0
    return _amount(spread, 0 if spread.mean >= 1000 or (spread.mean == spread.mean // 1 and not varies) else 1)


def dollars(spread: Spread | None) -> str:
    """Return a cost in USD with its standard deviation over seeds, to 3 significant digits, such as ``"0.00123"``."""
    if spread is None:
        return _DASH
    return _amount(spread, max(2, 2 - math.floor(math.log10(spread.mean))) if spread.mean > 0 else 2)


def _amount(spread: Spread, digits: int) -> str:
    if math.isnan(spread.mean):
        return _DASH
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


def report(rows: Sequence[ResultRow], title: str = "", width: int = 120, baseline: str = "") -> RenderableType:
    """Return the whole result: the table, its caption, differences from the baseline, and failures by reason.

    On narrow terminals, the table omits the standard deviations first, then Hit@3 and Hit@5, then RC; on narrower
    ones, each row becomes a paragraph.
    """
    from rich.console import Console, Group
    from rich.text import Text

    if not rows:
        return Text("No search has ended.", style="yellow")
    styles = ["bold green" if len(rows) > 1 and row.hits[1].mean == best_hit(rows) > 0 else "" for row in rows]
    more = [*text_tables(rows, title, baseline)[1:], *failure_tables(rows)]
    for deviations, dropped in (
        (True, ()),
        (False, ()),
        (False, ("Hit@3", "Hit@5")),
        (False, ("Hit@3", "Hit@5", "RC")),
    ):
        first = _main_table(rows, title, deviations, dropped)
        table = text_table(first.head, first.lines, title, first.words)
        for column in table.columns:
            column.no_wrap = True
        for line, style in zip(table.rows, styles, strict=True):
            line.style = style
        parts: list[RenderableType] = [table]
        if Console(width=10_000).measure(table).maximum <= width:
            break
    else:
        first = _main_table(rows, title)
        text = Text(f"{title}\n" if title else "", style="bold")
        for row, cells, style in zip(rows, first.lines, styles, strict=True):
            text.append(f"\n{one_line(row.label)}\n", style=style or "bold")
            for name, cell in list(zip(first.head, cells, strict=True))[first.words :]:
                text.append(f"{name:>12} {cell}\n" if cell != _DASH else "", style="not bold")
        parts = [text]
    return Group(*parts, Text(first.note + "\n" * bool(more), style="dim"), shown_tables(more))


def printed(shown: RenderableType, width: int) -> str:
    """Return a rich renderable as text of at most ``width`` characters per line."""
    from rich.console import Console

    # In a notebook, rich would display the table instead of writing it to the file.
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    console.print(shown)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def shown_tables(tables: Iterable[TextTable]) -> RenderableType:
    """Return tables with their titles and notes as a rich renderable."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for table in tables:
        parts += [Text(table.title, style="bold")] if table.title else []
        parts.append(text_table(table.head, table.lines, words=table.words))
        parts += [Text(f"{table.note}\n", style="dim")] if table.note else []
    return Group(*parts)


def best_hit(rows: Sequence[ResultRow]) -> float:
    """Return the best Hit@1; if the rows ran on different problems, NaN, which equals no row's Hit@1."""
    if len({row.problem_set for row in rows}) > 1:
        return math.nan
    return max((row.hits[1].mean for row in rows if row.shares), default=math.nan)


def _caption(rows: Sequence[ResultRow], columns: Sequence[str], deviations: bool) -> str:
    """Return the text that explains the columns of a table."""
    sizes = sorted({row.problems for row in rows})
    problems = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    seeds = sorted({seed for row in rows for seed in row.seeds})
    over = f"mean{' ± std' * deviations} over seeds {', '.join(map(str, seeds))}"
    averaged = over if len(seeds) > 1 else f"seed {seeds[0]}"
    costs = ", ".join(f"{name} {meaning}" for name, meaning in _COSTS.items() if name in columns)
    said = (
        f"{problems} problems, {averaged}. Hit in %, failed searches counted as wrong; 95% intervals over problems."
        + f" {costs}, each per problem." * bool(costs)
        + "".join(text for name, text in _RARE.items() if name in columns)
    )
    cut = len(frozenset().union(*(row.cut for row in rows)))
    said += f" Prompts of {cut:,} of the questions were cut to fit the context window." if cut else ""
    reasoned = sum(row.reasoning_only for row in rows)
    said += f" {reasoned:,} replies were only reasoning; raise --max-tokens." if reasoned else ""
    unknown = len(frozenset().union(*(row.unknown for row in rows)))
    return said + (f" {unknown:,} problems with no known outcome are not counted." if unknown else "")


def failure_tables(rows: Sequence[ResultRow]) -> list[TextTable]:
    """Return the table of failed searches by reason, if there are any."""
    lines = [(one_line(row.label), str(number), reason) for row in rows for reason, number in by_cause(row.failures)]
    return [TextTable(("Search", "Number", "Reason"), lines, "Failed searches", words=3)] if lines else []


class TextTable(NamedTuple):
    """A table of a page or a file; the first ``words`` columns contain words, the others numbers."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    words: int = 1


def _main_table(
    rows: Sequence[ResultRow], title: str, deviations: bool = True, dropped: Sequence[str] = ()
) -> TextTable:
    """Return the table of rows without the columns that are empty or ``dropped``, with its caption."""
    cells = table_cells(rows, deviations)
    empty = [bool(rows) and all(line[i] == _DASH for line in cells) for i in range(len(COLUMNS))]
    # Logs without outcomes have dashes as accuracy.
    shown = [i for i, name in enumerate(COLUMNS) if name not in dropped and (not empty[i] or name in COLUMNS[3:5])]
    head, lines = [COLUMNS[i] for i in shown], [[line[i] for i in shown] for line in cells]
    note = _caption(rows, head, any("±" in cell for line in lines for cell in line)) if rows else ""
    return TextTable(head, lines, title, note, words=sum(i < 2 for i in shown))


def text_tables(rows: Sequence[ResultRow], title: str = "", baseline: str = "") -> list[TextTable]:
    """Return the table with its caption, the table of arms, and the differences from the baseline.

    Args:
        rows: The rows.
        title: The title of the first table.
        baseline: The row to compare the others with; the first by default.
    """
    found = [_main_table(rows, title)]
    arms = [
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
    if arms:
        found.append(TextTable(("Search", "Arm", "AC", "TOK", "Chosen"), arms, ARM_TITLE, words=2))
    if len(rows) > 1 and (gaps := hit_differences(rows, baseline)):
        lines = [(one_line(row.label), *gap_cells(gap), verdict(row, first, gap)) for row, first, gap in gaps]
        against = f"Hit@1 against {one_line(gaps[0][1].label)}, in points; paired 95% intervals"
        found.append(TextTable(("Search", "Difference", "95% interval", "Verdict"), lines, against))
    return found


def to_markdown(rows: Sequence[ResultRow]) -> str:
    """Return the table as GitHub Markdown, with a note if the rows ran on different problems."""
    [table, *_] = text_tables(rows)
    remark = "\n" + PROBLEM_MARKS.replace("*", r"\*") + "\n" if marked_problems(rows) else ""
    return markdown_table([table.head, *table.lines], table.words) + remark


def markdown_document(tables: Sequence[TextTable]) -> str:
    """Return tables with their titles and notes as GitHub Markdown."""
    parts = []
    for table in tables:
        title, note = (text.replace("*", r"\*") for text in (table.title, table.note))
        body = markdown_table([table.head, *table.lines], table.words).strip()
        parts.append("\n\n".join(filter(None, (title, body, note))))
    return "\n\n".join(parts) + "\n"


_MARKUP = re.compile(r"\||<(?=[A-Za-z/!?])|\](?=\()")
"""Text that would be a cell's end, an HTML tag or a link in Markdown."""


def markdown_table(lines: Sequence[Sequence[str]], left: int) -> str:
    """Return a header and lines as GitHub Markdown; all but the first ``left`` columns are aligned to the right."""
    rule = "|" + "---|" * left + "---:|" * (len(lines[0]) - left)
    header, *body = ["| " + " | ".join(_MARKUP.sub(r"\\\g<0>", cell) for cell in line) + " |" for line in lines]
    return "\n".join([header, rule, *body]) + "\n"


def latex_table(table: TextTable, label: str, bold: Sequence[tuple[int, int]] = ()) -> str:
    """Return a table in LaTeX with its title and note as caption; ``bold`` lists lines and columns of bold cells."""
    left, right = "l" * table.words, "r" * (len(table.head) - table.words)
    parts = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{left}{right}}}"]
    parts += [r"\toprule", " & ".join(map(latex, table.head)) + r" \\", r"\midrule"]
    for place, line in enumerate(table.lines):
        cells = [rf"\textbf{{{latex(cell)}}}" if (place, i) in bold else latex(cell) for i, cell in enumerate(line)]
        parts.append(" & ".join(cells) + r" \\")
    said = " ".join(filter(None, (f"{table.title}." if table.title else "", table.note)))
    parts += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{latex(said)}}}", rf"\label{{tab:{label}}}"]
    return "\n".join([*parts, r"\end{table}"]) + "\n"


def latex(text: str) -> str:
    r"""Return text with LaTeX's special characters escaped.

    >>> print(latex("50% of a_b"))
    50\% of a\_b
    """
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return escaped.replace("\N{PLUS-MINUS SIGN}", r"$\pm$").replace(_DASH, "--")


def verdict(a: ResultRow, b: ResultRow, gap: Difference) -> str:
    """Return a difference's verdict, such as ``"includes 0"``, with the number of common problems if a row has more."""
    return gap.verdict + (f", {gap.problems:,} common problems" if gap.problems < max(a.problems, b.problems) else "")
