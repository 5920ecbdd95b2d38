"""The HTML page of a search tree, as one self-contained file.

A tree page needs no network and no other files. The tree is included as JSON and displayed only as text, so model
output cannot run as code. A content security policy allows only the page's own script, by its hash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mas_gym.errors import DataError
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.whole_files import write_file
from search.pages.templates import render

SCHEMA = 1


@dataclass
class TreeNodes:
    """The nodes of a tree as columns of equal length; node 0 is the root and parents precede their children.

    Attributes:
        parent: Index of the parent, -1 for the root.
        speaker: Agent that wrote the node's message; -1 for the root.
        text: The message; empty for the root.
        recipients: Nodes that received the message.
        visits: Visit counts (N); the column is None for planners without visits.
        q: Mean backed-up value, None if unknown; the column is None for planners without it.
        value: The critic's value, None if not scored.
        logprob: Mean log-probability per token, None if unknown.
        tokens: Generated tokens.
        arm: Name of the model that wrote the message; the column is None for a policy with one model.
        answer: Answer parsed from a terminal message; None for other messages.
        correct: Whether a terminal message is right; None if not graded.
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
    arm: Sequence[str] | None = None
    answer: Sequence[str | None] | None = None
    correct: Sequence[bool | None] | None = None

    def columns(self) -> dict[str, Sequence[object]]:
        """Return the columns that are present, by name."""
        return {name: column for name, column in vars(self).items() if column is not None}


@dataclass
class TreePage:
    """The contents of a tree page.

    Attributes:
        question: The question.
        agents: Agent names, in index order.
        sees_question: For each agent, whether it sees the question.
        nodes: The tree.
        chosen: Node of the chosen answer, None if there is none.
        answer: The chosen answer.
        correct: Whether the chosen answer is right; None if not graded.
        reference: The right answer, if it may be shown.
        facts: Further names and values for the head of the page, such as planner and usage.
        title: Title of the page.
        program: Whether a program wrote the prompts, so that the agents' inputs are unknown.
        requests: The program's prompt (role and text of each message) for a node's message, by node, if known.
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
    return render("tree.html", title=view.title, data=_data(view))


def write_tree_page(view: TreePage, path: Path) -> Path:
    """Write `tree_page` to a file; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, tree_page(view))
    return path


def _check(view: TreePage) -> None:
    columns = view.nodes.columns()
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1 or not lengths["parent"]:
        raise DataError(f"expected non-empty node columns of equal length, got {lengths}")
    size = lengths["parent"]
    if view.nodes.parent[0] != -1:
        raise DataError(f"expected node 0 to be the root with parent -1, got parent {view.nodes.parent[0]}")
    for node in range(1, size):
        if not 0 <= view.nodes.parent[node] < node:
            raise DataError(f"node {node}: expected a parent in [0, {node}), got {view.nodes.parent[node]}")
    if view.chosen is not None and not 0 <= view.chosen < size:
        raise DataError(f"expected the chosen node in [0, {size}), got {view.chosen}")


def _data(view: TreePage) -> JSONObject:
    columns = {name: _plain(column) for name, column in view.nodes.columns().items()}
    pool: dict[str, int] = {}
    columns["text"] = [pool.setdefault(text, len(pool)) for text in view.nodes.text]
    requests = {
        node: [(role, pool.setdefault(text, len(pool))) for role, text in messages]
        for node, messages in view.requests.items()
    }
    document = {name: value for name, value in vars(view).items() if name not in ("nodes", "title")}
    return document | {
        "requests": requests,
        "schema": SCHEMA,
        "facts": list(view.facts.items()),
        "texts": list(pool),
        "nodes": columns,
    }


def _plain(column: Sequence[object]) -> list[object]:
    return [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in column]
