"""A finished search as people read it: its chosen transcript in the terminal, its tree on a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mas_gym.policies.base import mean_logprob
from mas_gym.render import one_line
from mas_gym.report.page import TreeNodes, TreeView

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mas_gym.graph import MAS
    from mas_gym.state import MASState
    from search import Plan

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
_LONGEST = 20_000


def shortened(text: str) -> str:
    """Return at most the first 20,000 characters of a message, saying how many more there are."""
    more = len(text) - _LONGEST
    return text[:_LONGEST] + (f" ... ({more:,} more characters)" if more > 0 else "")


def names(mas: MAS, recipients: tuple[int, ...]) -> str:
    """Return readable names of recipients, in order."""
    return ", ".join(one_line(mas.node_name(node)) for node in recipients) or "nobody"


def message_panel(mas: MAS, speaker: int, recipients: tuple[int, ...], text: str, remark: str = "") -> RenderableType:
    """Return one message in a box whose colour is its speaker's.

    Args:
        mas: The system.
        speaker: Node index; -1 for the question node.
        recipients: Nodes that it reached.
        text: The message.
        remark: Text at the lower edge.
    """
    from rich.panel import Panel
    from rich.text import Text

    colour = "white" if speaker < 0 else COLOURS[speaker % len(COLOURS)]
    title = Text(one_line(mas.node_name(speaker)), style=f"bold {colour}")
    if recipients:
        title.append(f" to {names(mas, recipients)}", style=colour)
    body = Text(shortened(text)) if text.strip() else Text("(empty message)", style="dim italic")
    note = Text(remark, style="dim") if remark else None
    return Panel(body, title=title, title_align="left", subtitle=note, subtitle_align="right", border_style=colour)


def transcript(mas: MAS, state: MASState, plan: Plan | None = None) -> RenderableType:
    """Return the question and every message of a state; with a plan, also values and visits."""
    from rich.console import Group

    listeners = tuple(agent for agent, hears in enumerate(mas.sees_question) if hears)
    parts = [message_panel(mas, -1, listeners, state.question)]
    remarks = _remarks(plan) if plan is not None else {}
    for depth, link in enumerate(state.path()[1:], 1):
        parts.append(message_panel(mas, link.speaker, link.recipients, link.text, remarks.get(depth, "")))
    return Group(*parts)


def _remarks(plan: Plan) -> dict[int, str]:
    if plan.tree is None or plan.best is None or plan.best.node is None:
        return {}
    remarks: dict[int, str] = {}
    for depth, index in enumerate(plan.tree.path(plan.best.node)):
        node = plan.tree[index]
        figures = [("value", node.value), ("Q", node.q)]
        shown = [f"{name} {figure:.3f}" for name, figure in figures if figure is not None]
        shown += [f"N {node.visits}"] if node.visits else []
        shown += [f"{node.tokens} tokens"] if node.tokens else []
        remarks[depth] = "  ".join(shown)
    return remarks


def tree_view(plan: Plan, mas: MAS, facts: Mapping[str, str], reference: str | None = None) -> TreeView:
    """Lay out a plan's tree for `mas_gym.report.write_tree_page`.

    Args:
        plan: The plan of a planner that keeps its tree.
        mas: The system that was searched.
        facts: Facts for the head of the page, beside the usage.
        reference: The right answer, for problems that have one.
    """
    assert plan.tree is not None
    nodes = list(plan.tree)
    visited = any(node.visits for node in nodes)
    graded = {candidate.node: candidate for candidate in plan.candidates}
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
        answer=[graded[i].answer if i in graded else None for i in range(len(nodes))],
        correct=[graded[i].correct if i in graded and reference is not None else None for i in range(len(nodes))],
    )
    usage = plan.usage
    costs = {"AC": usage.agent_calls, "TOK": usage.generated_tokens, "RC": usage.reward_calls}
    return TreeView(
        question=nodes[0].state.question,
        agents=[agent.name for agent in mas.agents],
        sees_question=list(mas.sees_question),
        nodes=columns,
        chosen=plan.best.node if plan.best is not None else None,
        answer=plan.answer,
        correct=plan.correct if reference is not None else None,
        reference=reference,
        facts={**facts, **{name: f"{number:,}" for name, number in costs.items()}},
        title=f"{facts.get('problem', 'question')}, {facts.get('planner', 'search')}",
    )
