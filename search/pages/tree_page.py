"""The HTML page of a search tree, as one self-contained file.

A tree page needs no network and no other files. The tree is included as JSON and displayed only as text, so model
output cannot run as code. A content security policy allows only the page's own script, by its hash.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mas_gym.errors import SearchError
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.whole_files import write_file
from mas_gym.policies.base import mean_logprob
from mas_gym.systems.graph import MAS
from search.pages.templates import render
from search.plan import Plan
from search.tree import Tree

SCHEMA = 1


def tree_page(plan: Plan, facts: Mapping[str, str] | None = None, reference: str | None = None) -> str:
    """Return a plan's search tree as an HTML page.

    Args:
        plan: The plan.
        facts: Facts for the page header, such as planner and seed, in addition to the usage.
        reference: The reference answer; None if the problem has none; nothing is then shown as right or wrong.

    Raises:
        SearchError: The plan has no tree, because the search failed or was read from a store without trees.
    """
    if plan.tree is None or plan.mas is None:
        reason = plan.error or "it was read without trees, or its planner builds none"
        raise SearchError(f"{plan.problem_id or 'plan'}: expected a plan with a search tree, got one without: {reason}")
    facts = facts or {"problem": plan.problem_id, plan.mas.kind: plan.mas.name}
    title = ", ".join(facts[name] for name in ("problem", "planner") if name in facts) or "Search tree"
    return render("tree.html", title=title, data=_data(plan, plan.tree, plan.mas, facts, reference))


def write_tree_page(
    plan: Plan,
    path: str | os.PathLike[str],
    facts: Mapping[str, str] | None = None,
    reference: str | None = None,
) -> Path:
    """Write `tree_page` to a file; return its path."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, tree_page(plan, facts, reference))
    return file


def _data(plan: Plan, tree: Tree, mas: MAS, facts: Mapping[str, str], reference: str | None) -> JSONObject:
    """Return the contents of the page, with the columns of the nodes; columns that are missing are unknown."""
    marked, usage, nodes = reference is not None, plan.usage, list(tree)
    graded = {one.node: (one.answer, one.correct) for one in plan.candidates if one.node is not None}
    visited = any(node.visits for node in nodes)
    # Logs may have no token counts.
    counted = usage.generated_tokens > 0 or usage.agent_calls == 0
    texts: dict[str, int] = {}
    columns: dict[str, Sequence[object] | None] = {
        "parent": [node.parent for node in nodes],
        "speaker": [node.state.speaker for node in nodes],
        "text": [texts.setdefault(node.state.text, len(texts)) for node in nodes],
        "recipients": [list(node.state.recipients) for node in nodes],
        "visits": [node.visits for node in nodes] if visited else None,
        "q": [node.q for node in nodes] if visited else None,
        "value": [node.value for node in nodes],
        "logprob": [mean_logprob(node.logprob, node.tokens) for node in nodes],
        "tokens": [node.tokens for node in nodes] if counted else None,
        "tag": [node.tag for node in nodes] if tree.tags else None,
        "answer": [graded.get(node.id, (None, None))[0] for node in nodes],
        "correct": [graded.get(node.id, (None, None))[1] if marked else None for node in nodes],
    }
    requests = {
        node: [(role, texts.setdefault(text, len(texts))) for role, text in messages]
        for node, messages in plan.requests.items()
    }
    tokens = f"{usage.generated_tokens:,}" if counted else "\N{EN DASH}"
    costs = {"AC": f"{usage.agent_calls:,}", "TOK": tokens, "RC": f"{usage.reward_calls:,}"}
    return {
        "question": nodes[0].state.question,
        "agents": [agent.name for agent in mas.agents],
        "sees_question": list(mas.sees_question),
        "chosen": None if plan.best is None else plan.best.node,
        "answer": plan.answer,
        "correct": plan.correct if marked else None,
        "reference": reference,
        "facts": list({**facts, **costs}.items()),
        "program": mas.external,
        "requests": requests,
        "schema": SCHEMA,
        "texts": list(texts),
        "nodes": {name: [_finite(cell) for cell in column] for name, column in columns.items() if column is not None},
    }


def _finite(cell: object) -> object:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell
