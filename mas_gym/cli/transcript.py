"""A chosen transcript as a person reads it: who said what to whom, and what the critic thought of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mas_gym.render import one_line

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
        remark: What stands at the lower edge.
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
    """Return the question and every message on the way to a state; with a plan, its values and visits too."""
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
