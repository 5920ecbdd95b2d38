"""HTML pages: a search tree as one self-contained file, the index of a run store, and its problems.

A tree page needs no network or other files. The tree is embedded as JSON and shown as text only, so model output can
never run as code; a content security policy allows only the page's own script, by its hash.

The pages of ``mas-gym view`` are plain HTML without scripts: the index of runs, where a row is a planner with a critic,
its seeds together, and the problems of one or two rows.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode

from mas_gym.errors import DataError, SearchError
from mas_gym.policies.base import mean_logprob

if TYPE_CHECKING:
    from mas_gym.tasks import Grade
    from search import Plan
    from search.compare import ResultRow
    from search.store.regrade import Regraded


SCHEMA = 1
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class TreeNodes:
    """The nodes of a tree as columns of equal length; node 0 is the root and parents precede their children.

    Attributes:
        parent: Index of the parent, -1 for the root.
        speaker: Agent that wrote the node's message; -1 for the root.
        text: The message; empty for the root.
        recipients: Nodes that received the message.
        visits: N; None for planners without visits.
        q: Mean backed-up value, None where unknown; the whole column None for planners without it.
        value: Value by the critic, None where not scored.
        logprob: Mean log-probability per token, None where unknown.
        tokens: Generated tokens.
        answer: Answer read from a terminal message, else None.
        correct: Whether a terminal message is right; None where not graded.
    """

    parent: Sequence[int]
    speaker: Sequence[int]
    text: Sequence[str]
    recipients: Sequence[Sequence[int]]
    visits: Sequence[int | float] | None = None
    q: Sequence[float | None] | None = None
    value: Sequence[float | None] | None = None
    logprob: Sequence[float | None] | None = None
    tokens: Sequence[int] | None = None
    answer: Sequence[str | None] | None = None
    correct: Sequence[bool | None] | None = None

    def columns(self) -> dict[str, Sequence[Any]]:
        """Return the columns that are present, by name."""
        return {name: column for name, column in vars(self).items() if column is not None}


@dataclass
class TreePage:
    """Everything that the page shows.

    Attributes:
        question: The question.
        agents: Agent names, in index order.
        sees_question: For each agent, whether it sees the question.
        nodes: The tree.
        chosen: Node of the answer, None if there is none.
        answer: The chosen answer.
        correct: Whether it is right; None if not graded.
        reference: The right answer, if it may be shown.
        facts: Further names and values for the head of the page, such as planner and usage.
        title: Title of the page.
        program: Whether a program wrote the prompts, so that only it knows what an agent saw.
        requests: Role and text of the messages that a program sent for a node's message, by node, as far as they are
            known.
    """

    question: str
    agents: Sequence[str]
    sees_question: Sequence[bool]
    nodes: TreeNodes
    chosen: int | None = None
    answer: str | None = None
    correct: bool | None = None
    reference: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    title: str = "Search tree"
    program: bool = False
    requests: Mapping[int, Sequence[tuple[str, str]]] = field(default_factory=dict)


def tree_page(view: TreePage) -> str:
    """Return the page as HTML.

    Raises:
        DataError: Columns differ in length, a parent does not come before its child, or a node index is out of range.
    """
    _check(view)
    folder = resources.files("mas_gym.report")
    style, script, frame = ((folder / f"tree.{kind}").read_text(encoding="utf-8") for kind in ("css", "js", "html"))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(frame).substitute(
        csp=html.escape(policy),
        title=_LONE_SURROGATE.sub("\ufffd", html.escape(view.title)),
        style=style,
        script=script,
        data=_data(view),
    )


def write_tree_page(view: TreePage, path: Path) -> Path:
    """Write `tree_page` to a file; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tree_page(view), encoding="utf-8")
    return path


def tree_view(
    plan: Plan,
    facts: Mapping[str, str] | None = None,
    reference: str | None = None,
    grade: Callable[[str], Grade | None] | None = None,
) -> TreePage:
    """Lay out a plan's tree for `write_tree_page`.

    Args:
        plan: The plan of a planner that keeps its tree, from a run or a store.
        facts: Facts for the head of the page, in addition to the usage.
        reference: The reference answer; None if the problem has none, and nothing is shown as right or wrong.
        grade: Grades the final text of the terminal nodes that are no candidates, such as those that a beam dropped;
            None, or its returning None, leaves them unmarked.

    Raises:
        SearchError: The plan has no tree.
    """
    if plan.tree is None or plan.mas is None:
        reason = plan.error or "it was read without trees, or its planner keeps none"
        raise SearchError(f"{plan.problem_id or 'plan'}: expected a plan with a search tree, got one without: {reason}")
    facts = facts or {"problem": plan.problem_id, plan.mas.kind: plan.mas.name}
    nodes = list(plan.tree)
    visited = any(node.visits for node in nodes)
    graded = _grades(plan, grade if reference is not None else None)
    columns = TreeNodes(
        parent=[node.parent for node in nodes],
        speaker=[node.state.speaker for node in nodes],
        text=[node.state.text for node in nodes],
        recipients=[list(node.state.recipients) for node in nodes],
        visits=[node.visits for node in nodes] if visited else None,
        q=[node.q for node in nodes] if visited else None,
        value=[node.value for node in nodes],
        logprob=[mean_logprob(node.logprob, node.tokens) for node in nodes],
        tokens=[node.tokens for node in nodes],
        answer=[graded[i][0] if i in graded else None for i in range(len(nodes))],
        correct=[graded[i][1] if i in graded and reference is not None else None for i in range(len(nodes))],
    )
    usage = plan.usage
    costs = {"AC": usage.agent_calls, "TOK": usage.generated_tokens, "RC": usage.reward_calls}
    return TreePage(
        question=nodes[0].state.question,
        agents=[agent.name for agent in plan.mas.agents],
        sees_question=list(plan.mas.sees_question),
        nodes=columns,
        chosen=plan.best.node if plan.best is not None else None,
        answer=plan.answer,
        correct=plan.correct if reference is not None else None,
        reference=reference,
        facts={**facts, **{name: f"{number:,}" for name, number in costs.items()}},
        program=plan.mas.program,
        requests=plan.requests,
        title=", ".join(facts[name] for name in ("problem", "planner") if name in facts) or "Search tree",
    )


def _grades(plan: Plan, grade: Callable[[str], Grade | None] | None) -> dict[int, tuple[str | None, bool | None]]:
    """Return answer and correctness by terminal node."""
    assert plan.tree is not None and plan.mas is not None
    found = {one.node: (one.answer, one.correct) for one in plan.candidates if one.node is not None}
    if grade is not None:
        once = cache(grade)
        for node, state in enumerate(plan.tree.states):
            # A message that reached nobody ended the episode without an answer.
            text = plan.mas.final_text(state.text) if state.recipients else ""
            if node not in found and plan.tree.is_terminal(node) and (result := once(text)) is not None:
                found[node] = result.extracted, result.correct
    return found


def write_plan_page(
    plan: Plan,
    path: Path,
    facts: Mapping[str, str] | None = None,
    *,
    reference: str | None = None,
    grade: Callable[[str], Grade | None] | None = None,
) -> Path:
    """Write a plan's search tree as a page; arguments and errors as for `tree_view`."""
    return write_tree_page(tree_view(plan, facts, reference, grade), path)


def _check(view: TreePage) -> None:
    columns = view.nodes.columns()
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1 or not lengths["parent"]:
        raise DataError(f"expected node columns of one length of at least 1, got {lengths}")
    size = lengths["parent"]
    if view.nodes.parent[0] != -1:
        raise DataError(f"expected node 0 to be the root with parent -1, got parent {view.nodes.parent[0]}")
    for node in range(1, size):
        if not 0 <= view.nodes.parent[node] < node:
            raise DataError(f"node {node}: expected a parent in [0, {node}), got {view.nodes.parent[node]}")
    if view.chosen is not None and not 0 <= view.chosen < size:
        raise DataError(f"expected the chosen node in [0, {size}), got {view.chosen}")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(view: TreePage) -> str:
    columns = {name: _plain(column) for name, column in view.nodes.columns().items()}
    pool: dict[str, int] = {}
    columns["text"] = [pool.setdefault(text, len(pool)) for text in view.nodes.text]
    requests = {
        node: [(role, pool.setdefault(text, len(pool))) for role, text in messages]
        for node, messages in view.requests.items()
    }
    document = {name: value for name, value in vars(view).items() if name not in ("nodes", "title")}
    document |= {
        "requests": requests,
        "schema": SCHEMA,
        "facts": list(view.facts.items()),
        "texts": list(pool),
        "nodes": columns,
    }
    # Without "<" the text can neither close the script element nor open a comment in it. A lone surrogate, which
    # models can emit, is not a valid character.
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return _LONE_SURROGATE.sub("\ufffd", text.replace("<", "\\u003c"))


def _plain(column: Sequence[Any]) -> list[Any]:
    return [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in column]


PAGE = 100
SHOWN = ("all", "differing", "wrong", "failed")
_REFRESH = '<meta http-equiv="refresh" content="1">'
_QUESTION = 240
_SCROLLS = "tabindex=0 role=region"
"""For what is wider than a small window: without focus, a keyboard could not scroll it."""
_FIGURES = ("Hit@1", "95% interval", "TOK", "AC", "RC")
_LEGEND = (
    ("Hit@1", "share of problems whose chosen answer is right, in %"),
    ("95% interval", "of Hit@1, over problems"),
    ("TOK", "generated tokens per problem"),
    ("AC", "agent calls per problem"),
    ("RC", "reward calls per problem, one forward of the critic each"),
)


class Cell(NamedTuple):
    """How one search ended: right, wrong, or failed with an error."""

    answer: str | None
    correct: bool
    error: str | None


@dataclass(frozen=True)
class StoredRow:
    """A row of the index.

    Attributes:
        key: Identifies it in links.
        setting: What it has in common with the rows that it can be compared with.
        result: Its figures.
        runs: Seed to the key of its run.
        cells: Problem id to seed to outcome.
        questions: Problem id to the beginning of its question.
    """

    key: str
    setting: str
    result: ResultRow
    runs: Mapping[int, str]
    cells: Mapping[str, Mapping[int, Cell]]
    questions: Mapping[str, str] = field(default_factory=dict)


class Choice(NamedTuple):
    """What the page of problems shows.

    Attributes:
        first: The row.
        second: Another row beside it, or None.
        shown: Which problems: one of `SHOWN`.
        query: Only problems with this text in their id or question.
        page: Page number, from 0, of `PAGE` problems each.
    """

    first: StoredRow
    second: StoredRow | None = None
    shown: str = "all"
    query: str = ""
    page: int = 0

    @property
    def rows(self) -> list[StoredRow]:
        """The rows that are shown."""
        return [self.first] if self.second is None else [self.first, self.second]

    def question(self, problem: str) -> str:
        """Return the beginning of a problem's question; of two that differ, both."""
        return " / ".join(dict.fromkeys(row.questions.get(problem, "") for row in self.rows if problem in row.cells))

    def link(self, **changes: object) -> str:
        """Return the address of this page, or of one that differs."""
        other = self._replace(**changes)  # type: ignore[arg-type]
        fields = {"a": other.first.key, "b": other.second.key if other.second else "", "show": other.shown}
        fields |= {"q": other.query, "page": str(other.page)}
        return "/problems?" + urlencode({name: text for name, text in fields.items() if text}, errors="replace")


def index_page(
    title: str,
    rows: Sequence[StoredRow],
    faults: Sequence[str] = (),
    unread: int = 0,
    plot: Callable[[Sequence[StoredRow]], str | None] = lambda rows: None,
    regraded: Sequence[Regraded] = (),
) -> str:
    """Return the page that lists all rows.

    Args:
        title: Its heading.
        rows: The rows.
        faults: Messages about runs that could not be read.
        unread: Number of runs not read yet; if positive, the page reloads itself.
        plot: Returns the picture of a setting's rows as a data URL; None for none.
        regraded: The runs that were graded again.
    """
    parts = [f"<p class=failed>{escape(fault)}</p>" for fault in faults]
    groups: dict[str, list[StoredRow]] = {}
    for row in rows:
        groups.setdefault(row.setting, []).append(row)
    for setting, group in groups.items():
        parts.append(f"<section {_SCROLLS} aria-label=Runs><h2>{escape(setting)}</h2>{_index_table(group)}")
        picture = plot(group)
        if picture is not None:
            caption = "Accuracy against generated tokens, with 95% intervals; the dotted line joins the best rows."
            parts.append(f'<figure><img src="{picture}" alt="{caption}"><figcaption>{caption}</figcaption></figure>')
        parts.append("</section>")
    parts.append(regrade_table(regraded))
    legend = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in _LEGEND)
    parts.append(f"<dl>{legend}</dl>")
    parts.append(f"<p>{len(rows)} rows{f'; reading {unread} more runs' if unread else ''}</p>")
    return _document(title, "".join(parts), _REFRESH if unread else "")


def regrade_table(lines: Sequence[Regraded]) -> str:
    """Return the table of runs that were graded again; nothing without any."""
    if not lines:
        return ""
    head = ("Run", "Graded again by", "Searches", "Hit@1 before", "Hit@1 now")

    def cell(name: str, text: str) -> str:
        return f'<td data-name="{name}">{escape(text)}</td>'

    rows = [
        (one.run, one.label, f"{one.searches:,}", *(f"{100 * n / one.searches:.1f}" for n in (one.before, one.after)))
        for one in lines
    ]
    body = "".join("<tr>" + "".join(map(cell, head, row)) + "</tr>" for row in rows)
    names = "".join(f"<th>{name}</th>" for name in head)
    return f"<table class=regraded><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"


def _figures(rows: Sequence[StoredRow]) -> list[dict[str, str]]:
    """Return the cells of each row by their columns; the search package is imported when a page is shown."""
    from search.compare.display import COLUMNS, table_cells

    return [dict(zip(COLUMNS, line, strict=True)) for line in table_cells([row.result for row in rows])]


def _index_table(group: Sequence[StoredRow]) -> str:
    from search.compare.display import PROBLEM_MARKS, marked_problems

    head = ("A", "B", "Search", "Critic", "Seeds", "Problems", *_FIGURES, "Failed")
    marked = marked_problems([row.result for row in group])
    lines = []
    for place, (row, shown) in enumerate(zip(group, _figures(group), strict=True)):
        link = f'<a href="{escape(Choice(row).link())}">{escape(shown["Search"])}</a>'
        picks = [_radio(name, row, place == chosen) for name, chosen in (("a", 0), ("b", min(1, len(group) - 1)))]
        seeds = ", ".join(map(str, row.result.seeds))
        figures = [shown[name] for name in (*_FIGURES, "Failed")]
        problems = shown["Problems"] if marked else f"{row.result.problems:,}"
        texts = [*picks, link, *map(escape, (shown["Critic"], seeds, problems, *figures))]
        labelled = zip(head, texts, strict=True)
        lines.append("<tr>" + "".join(f'<td data-name="{name}">{text}</td>' for name, text in labelled) + "</tr>")
    names = "".join(f"<th>{name}</th>" for name in head)
    return (
        f'<form action="/problems"><table class=rows><thead><tr>{names}</tr></thead><tbody>{"".join(lines)}</tbody>'
        f"</table>{f'<p>{PROBLEM_MARKS}</p>' if marked else ''}<p><button>Compare A with B</button></p></form>"
    )


def _radio(name: str, row: StoredRow, chosen: bool) -> str:
    title = f"{row.result.label} as {name.upper()}"
    mark = " checked" if chosen else ""
    return f'<input type=radio name={name} value="{escape(row.key)}" aria-label="{escape(title)}"{mark}>'


def problems_page(title: str, choice: Choice) -> str:
    """Return the page with the problems of one row, or of two side by side.

    Args:
        title: The name of the store.
        choice: The rows, and which of their problems.
    """
    choice = choice._replace(shown=choice.shown if choice.shown in SHOWN else "all")
    problems = _problems(choice)
    last = max(0, (len(problems) - 1) // PAGE)
    choice = choice._replace(page=min(max(choice.page, 0), last))
    body = "".join(_line(problem, choice) for problem in problems[choice.page * PAGE :][:PAGE])
    names = "".join(f"<th>{escape(row.result.label)}</th>" for row in choice.rows)
    parts = [
        '<p><a href="/">All runs</a></p>',
        _summary(choice),
        _tabs(choice, last),
        _search_form(choice),
        f"<table class=problems><thead><tr><th>Problem</th>{names}</tr></thead><tbody>{body}</tbody></table>",
        f"<p>{len(problems):,} problems</p>",
    ]
    return _document(f"{title}: {' and '.join(row.result.label for row in choice.rows)}", "".join(parts))


def _summary(choice: Choice) -> str:
    lines = []
    for row, shown in zip(choice.rows, _figures(choice.rows), strict=True):
        text = ", ".join(f"{name} {shown[name]}" for name in _FIGURES)
        lines.append(f"<p><b>{escape(row.result.label)}</b> {escape(text)}</p>")
    if choice.second is not None:
        first, second = choice.first.result, choice.second.result
        if first.shares.keys() & second.shares.keys():
            from search.compare import paired_difference
            from search.compare.display import gap_cells, verdict

            gap = paired_difference(first.shares, second.shares)
            mean, span = gap_cells(gap)
            names = f"{first.label} minus {second.label}"
            lines.append(
                f"<p>Difference in Hit@1, {escape(names)}: <b>{mean}</b> points, paired 95% interval {span}, "
                f"{verdict(first, second, gap)}.</p>"
            )
    return "".join(lines)


def _search_form(choice: Choice) -> str:
    keys = {"a": choice.first.key, "b": choice.second.key if choice.second else "", "show": choice.shown}
    hidden = "".join(f'<input type=hidden name={k} value="{escape(v)}">' for k, v in keys.items() if v)
    field = f'<input type=search name=q value="{escape(choice.query)}" aria-label="Text in question or id">'
    return f'<form action="/problems" class=search>{hidden}{field}<button>Search questions</button></form>'


def _problems(choice: Choice) -> list[str]:
    known = sorted({problem for row in choice.rows for problem in row.cells}, key=_natural)
    text = choice.query.casefold()
    return [
        problem
        for problem in known
        if _wanted([list(row.cells.get(problem, {}).values()) for row in choice.rows], choice.shown)
        and (not text or text in problem.casefold() or text in choice.question(problem).casefold())
    ]


def _wanted(rows: Sequence[Sequence[Cell]], shown: str) -> bool:
    ended = [cell for row in rows for cell in row]
    if shown == "differing":
        return len({cell.correct for cell in ended}) > 1
    if shown == "wrong":
        return not any(cell.correct for cell in ended)
    return shown == "all" or any(cell.error is not None for cell in ended)


def _natural(problem: str) -> list[tuple[int, str]]:
    # int() refuses very long digit strings, so those sort as names.
    return [(int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part) for part in problem.split("/")]


def _line(problem: str, choice: Choice) -> str:
    question = choice.question(problem)
    shown = question if len(question) <= _QUESTION else question[: _QUESTION - 3] + "..."
    cells = "".join(f'<td data-name="{escape(row.result.label)}">{_outcomes(problem, row)}</td>' for row in choice.rows)
    return f"<tr><th><small>{escape(problem)}</small><br>{escape(shown)}</th>{cells}</tr>"


def _outcomes(problem: str, row: StoredRow) -> str:
    found = row.cells.get(problem, {})
    return "<br>".join(_outcome(problem, row.runs[seed], cell, seed, len(row.runs) > 1) for seed, cell in found.items())


def _outcome(problem: str, run: str, cell: Cell, seed: int, named: bool) -> str:
    of = f" <small>seed {seed}</small>" if named else ""
    if cell.error is not None:
        return f'<details class="failed"><summary>failed{of}</summary>{escape(cell.error[:400])}</details>'
    mark, name = ("\u2713", "right") if cell.correct else ("\u2717", "wrong")
    link = f"/tree/{quote(run, safe='')}?{urlencode({'problem': problem}, errors='replace')}"
    answer = "no answer" if cell.answer is None else cell.answer[:24]
    return f'<a class="{name}" href="{escape(link)}">{mark} {escape(answer)}</a>{of}'


def _tabs(choice: Choice, last: int) -> str:
    # One run has one outcome per problem.
    single = sum(len(row.runs) for row in choice.rows) == 1
    shown = [name for name in SHOWN if not (single and name == "differing")]
    tabs = [_tab(name, choice.link(shown=name, page=0), name == choice.shown) for name in shown]
    if choice.page > 0:
        tabs.append(_tab("previous", choice.link(page=choice.page - 1), False))
    if choice.page < last:
        tabs.append(_tab("next", choice.link(page=choice.page + 1), False))
    return f"<nav>{''.join(tabs)}</nav>"


def _tab(name: str, link: str, here: bool) -> str:
    return f'<a href="{escape(link)}"{" aria-current=page" if here else ""}>{escape(name)}</a>'


def _document(title: str, body: str, head: str = "") -> str:
    style = (resources.files("mas_gym.report") / "listing.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'self'"
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">{head}'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>"
    )
    return text.encode("utf-8", "replace").decode("utf-8")


def report_page(title: str, sections: Iterable[str]) -> str:
    """Return the page of a report, from HTML that is escaped already."""
    parts = (f"<section {_SCROLLS} aria-label=Results>{section}</section>" for section in sections)
    return _document(title, "\n<hr>\n".join(parts))
