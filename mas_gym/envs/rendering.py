"""Rendering of an episode as plain text, as colored text, and as a picture of the graph and latest messages."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mas_gym.errors import need
from mas_gym.internal.text import printable
from mas_gym.systems.graph import MAS, Q
from mas_gym.systems.state import MASState, Turn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INDENT = "    "

WIDTH, HEIGHT, _DPI = 1120, 640, 100
_MARGIN = 28
_GRAPH_Y = 214.0
_NODE_HEIGHT = 46
_MOST_NODES = 12
_CARDS = 3
_CARD_Y, _CARD_GAP = 330, 14
_CARD_HEIGHT = 226
_LONGEST = 4000

_PAPER, _INK, _FAINT, _LINE = "#fbfaf7", "#22262b", "#6b7480", "#d4d8dd"
_DONE, _ACTING, _WAITING, _QUESTION = "#2f6f8f", "#d9822b", "#eceff2", "#5b5f97"
_GOOD, _BAD, _CARD = "#2e8b57", "#c0392b", "#ffffff"


def route_text(mas: MAS, speaker: int, recipients: tuple[int, ...]) -> str:
    """Return the route of a message, such as ``"Judge -> RefinerA, RefinerB"`` or ``"Judge -> nobody"``."""
    names = ", ".join(printable(mas.node_name(r)) for r in recipients)
    return f"{printable(mas.agents[speaker].name)} -> {names or 'nobody'}"


def outcome_text(mas: MAS, state: MASState, facts: Mapping[str, object]) -> str:
    """Return one line on the status of the episode: the next agent, or the outcome.

    Args:
        mas: The system.
        state: The state.
        facts: The fields of ``info`` on the last step: the grade, or the reason for a rejection.
    """
    if "correct" in facts:
        verdict = "correct, reward +1" if facts["correct"] else "not correct, reward -1"
        answer = "no answer" if facts.get("extracted") is None else f"answer {printable(str(facts['extracted']))}"
        why = facts.get("invalid_action") or facts.get("reason", "")
        return f"ended: {answer}, {verdict} ({printable(str(why))})"
    if state.acting == mas.sink:
        return "ended"
    refused = f"refused: {printable(str(facts['invalid_action']))}; " if "invalid_action" in facts else ""
    return f"{refused}{printable(mas.agents[state.acting].name)} acts next"


def render_text(mas: MAS, state: MASState, facts: Mapping[str, object]) -> str:
    """Return the episode so far as plain text."""
    lines = [f"Question ({printable(mas.name)}):", _indented(state.question)]
    for number, turn in enumerate(state.turns, start=1):
        lines += [f"{number}. {route_text(mas, turn.speaker, turn.recipients)}", _indented(turn.text)]
    lines.append(f"[{outcome_text(mas, state, facts)}]")
    return "\n".join(lines)


def print_turn(mas: MAS, state: MASState, facts: Mapping[str, Any]) -> None:
    """Print the result of the last reset or step to standard output: the question, or one message and the status."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    out = Console()
    # Text objects, because strings would be parsed as console markup.
    if "invalid_action" not in facts:
        if state.parent is None:
            title, body, style = f"Question ({printable(mas.name)})", state.question, "cyan"
        else:
            title, body, style = route_text(mas, state.speaker, state.recipients), state.text, "blue"
        out.print(Panel(Text(printable(body)), title=Text(title), title_align="left", border_style=style))
    good = facts.get("correct")
    color = {True: "bold green", False: "bold red", None: "dim"}[good]
    out.print(Text(outcome_text(mas, state, facts), style=color if "invalid_action" not in facts else "bold red"))


def _indented(text: str) -> str:
    return "\n".join(_INDENT + line for line in printable(text).split("\n"))


def draw_state(mas: MAS, state: MASState, problem_id: str, facts: Mapping[str, object]) -> NDArray[np.uint8]:
    """Draw a state: the question, the graph with the acting agent and the used edges, and the latest messages.

    Returns:
        RGB pixels of shape (640, 1120, 3).

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    need("matplotlib", "rgb_array", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI, facecolor=_PAPER)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    _write(axes, (_MARGIN, 36), mas.name, 40, 14)
    turn = f"{problem_id}   turn {state.depth} of at most {mas.max_turns or len(mas.agents)}"
    _write(axes, (WIDTH - _MARGIN, 36), turn, 70, 9, _FAINT, ha="right")
    _write(axes, (_MARGIN, 62), state.question, 130, 10, lines=3, va="top")
    _draw_graph(axes, mas, state)
    _draw_messages(axes, mas, state.turns)
    color = _GOOD if facts.get("correct") else _BAD if {"correct", "invalid_action"} & set(facts) else _FAINT
    _write(axes, (_MARGIN, HEIGHT - 38), outcome_text(mas, state, facts), 100, 12, color)
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _write(
    axes: Axes,
    at: tuple[float, float],
    text: str,
    width: int,
    points: float,
    color: str = _INK,
    *,
    lines: int = 1,
    va: str = "center",
    **look: Any,
) -> None:
    """Write at most ``lines`` lines of ``width`` characters."""
    # More than this is not visible.
    paragraphs = printable(text[:_LONGEST]).expandtabs(4).split("\n")
    rows = [row for paragraph in paragraphs for row in textwrap.wrap(paragraph, width) or [""]]
    if len(rows) > lines:
        rows[lines - 1 :] = [textwrap.shorten(" ".join(rows[lines - 1 :]), width, placeholder="...")]
    style: dict[str, Any] = {"family": "monospace", "linespacing": 1.4, "parse_math": False, **look}
    axes.text(*at, "\n".join(rows), size=points, color=color, va=va, **style)


def _draw_graph(axes: Axes, mas: MAS, state: MASState) -> None:
    """Draw the nodes in one row from q to sink; in a large graph, those around the acting agent."""
    from matplotlib.patches import FancyArrowPatch

    agents = len(mas.agents)
    start = min(max(state.acting - _MOST_NODES // 2, 0), max(agents + 2 - _MOST_NODES, 0))
    nodes = [Q, *range(start, min(agents, start + _MOST_NODES - 2)), agents]
    pitch = (WIDTH - 2 * _MARGIN) / len(nodes)
    half = pitch / 2 - 11
    center = {node: _MARGIN + pitch * (i + 0.5) for i, node in enumerate(nodes)}
    turns = state.turns
    spoken = {turn.speaker for turn in turns}
    used = {(turn.speaker, recipient) for turn in turns for recipient in turn.recipients}
    last = {(turns[-1].speaker, recipient) for recipient in turns[-1].recipients} if turns else set()
    edges = {(edge.source, edge.target) for edge in mas.edges} | used
    if mas.max_turns is None:
        edges.add((agents - 1, mas.sink))
    for source, target in sorted(edges, key=lambda edge: (edge in used, edge)):
        if source in center and target in center:
            heard = (source, target) in used or (source == Q and target in {state.acting, *spoken})
            color = _ACTING if (source, target) in last else _DONE if heard else _LINE
            hops = nodes.index(target) - nodes.index(source)
            # Edges from the question and backward edges bend below the row; forward edges between agents above it.
            side = 0.0 if hops == 1 else 1.0 if source == Q or hops <= 0 else -1.0
            y = _GRAPH_Y + side * _NODE_HEIGHT / 2
            x0 = center[source] + (half / 2 if side else half)
            x1 = center[target] - (0 if side else half)
            bend = side * min(0.25, 150 / max(abs(x1 - x0), 1)) * (1 if hops > 0 else -1)
            look: dict[str, Any] = {"color": color, "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0, "zorder": 1}
            curve = f"arc3,rad={bend}"
            axes.add_patch(FancyArrowPatch((x0, y), (x1, y), arrowstyle="-|>", connectionstyle=curve, **look))
    for node in nodes:
        fill = _DONE if node in spoken else _WAITING
        if node == state.acting:
            fill = _GOOD if node == mas.sink else _ACTING
        fill = _QUESTION if node == Q else fill
        name = mas.node_name(node).replace("_", " ")
        _draw_box(axes, (center[node] - half, _GRAPH_Y - _NODE_HEIGHT / 2), (2 * half, _NODE_HEIGHT), fill)
        color = _FAINT if fill == _WAITING else _PAPER
        _write(axes, (center[node], _GRAPH_Y), name, int((2 * half - 6) / 7), 8, color, lines=2, ha="center")


def _draw_box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], fill: str, line: str = _LINE) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=9"
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=style, facecolor=fill, edgecolor=line, zorder=2))


def _draw_messages(axes: Axes, mas: MAS, turns: Sequence[Turn]) -> None:
    first = max(len(turns) - _CARDS, 0)
    width = (WIDTH - 2 * _MARGIN - _CARD_GAP * (_CARDS - 1)) / _CARDS
    for i, turn in enumerate(turns[first:]):
        x = _MARGIN + i * (width + _CARD_GAP)
        last = first + i == len(turns) - 1
        _draw_box(axes, (x, _CARD_Y), (width, _CARD_HEIGHT), _CARD, _ACTING if last else _LINE)
        title = f"{first + i + 1}. {route_text(mas, turn.speaker, turn.recipients)}"
        _write(axes, (x + 14, _CARD_Y + 20), title, 39, 9, _ACTING if last else _DONE)
        _write(axes, (x + 14, _CARD_Y + 40), turn.text, 39, 9, lines=10, va="top")
