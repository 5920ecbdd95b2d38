"""Rendering of an episode as plain text, as colored text, and as a picture of the graph and latest messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mas_gym.errors import MissingDependencyError
from mas_gym.systems.graph import MAS, Q
from mas_gym.systems.state import MASState, Turn

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

from mas_gym.internal.text import printable

_INDENT = "    "

WIDTH, HEIGHT = 1120, 640
# Drawn at twice the size and scaled down, for smooth lines.
_SCALE = 2
_MARGIN = 28
_GRAPH_Y = 214
_NODE_HEIGHT = 46
_RADIUS = 9
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
    """Draw a state.

    Returns:
        RGB pixels of shape (640, 1120, 3).

    Raises:
        MissingDependencyError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise MissingDependencyError("rgb_array needs Pillow: pip install 'pillow>=10.1'") from error
    image = Image.new("RGB", (WIDTH * _SCALE, HEIGHT * _SCALE), _PAPER)
    canvas = _Canvas(ImageDraw.Draw(image))
    _draw_header(canvas, mas, state, problem_id)
    _draw_graph(canvas, mas, state)
    _draw_cards(canvas, mas, state.turns)
    _draw_outcome(canvas, mas, state, facts)
    return np.asarray(image.reduce(_SCALE), dtype=np.uint8)


@lru_cache(maxsize=16)
def _font(size: int) -> FreeTypeFont:
    from PIL import ImageFont

    font = ImageFont.load_default(size * _SCALE)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise MissingDependencyError("rgb_array needs Pillow with FreeType: pip install --upgrade pillow")
    return font


class _Canvas:
    """Draws in picture coordinates, independent of the scale."""

    def __init__(self, draw: ImageDraw) -> None:
        self.draw = draw

    def text(self, x: float, y: float, text: str, size: int, color: str, anchor: str = "la") -> None:
        self.draw.text((x * _SCALE, y * _SCALE), text, fill=color, font=_font(size), anchor=anchor)

    def width(self, text: str, size: int) -> float:
        return _font(size).getlength(text) / _SCALE

    def box(self, x: float, y: float, w: float, h: float, fill: str, outline: str | None) -> None:
        corners = (x * _SCALE, y * _SCALE, (x + w) * _SCALE, (y + h) * _SCALE)
        self.draw.rounded_rectangle(corners, _RADIUS * _SCALE, fill=fill, outline=outline, width=_SCALE)

    def edge(self, x0: float, x1: float, y: float, bend: float, color: str, width: float) -> None:
        """Draw an arrow between two points at one height, as a line or as half an ellipse above (-) or below (+)."""
        left, right, thick = min(x0, x1) * _SCALE, max(x0, x1) * _SCALE, round(width * _SCALE)
        if bend:
            box = (left, (y - abs(bend)) * _SCALE, right, (y + abs(bend)) * _SCALE)
            self.draw.arc(box, *((0, 180) if bend > 0 else (180, 360)), fill=color, width=thick)
        else:
            self.draw.line((x0 * _SCALE, y * _SCALE, x1 * _SCALE, y * _SCALE), fill=color, width=thick)
        size, turn = (5 + width) * _SCALE / 2, 90 if not bend else 0 if bend > 0 else 180
        # The first corner of a polygon points up; angles are counterclockwise.
        tip = (x1 * _SCALE - size * (not bend), y * _SCALE + size * ((bend > 0) - (bend < 0)))
        self.draw.regular_polygon((*tip, size), 3, rotation=-turn, fill=color)

    def paragraph(self, x: float, y: float, text: str, size: int, color: str, width: float, lines: int) -> None:
        for i, line in enumerate(self.wrapped(text, size, width, lines)):
            self.text(x, y + i * size * 1.36, line, size, color)

    def wrapped(self, text: str, size: int, width: float, lines: int) -> list[str]:
        rows: list[str] = []
        # No more than this is visible, and measuring a megabyte would take seconds.
        for paragraph in printable(text[:_LONGEST]).expandtabs(4).split("\n"):
            row = ""
            for word in paragraph.split(" "):
                longer = f"{row} {word}" if row else word
                if row and self.width(longer, size) > width:
                    rows.append(row)
                    longer = word
                row = longer
            rows.append(row)
        cut = len(rows) > lines or len(text) > _LONGEST
        rows = [self.fitted(row, size, width) for row in rows[:lines]]
        if cut and rows:
            rows[-1] = self.fitted(rows[-1] + " ...", size, width, always=True)
        return rows

    def fitted(self, text: str, size: int, width: float, always: bool = False) -> str:
        if self.width(text, size) <= width:
            return text
        kept = text.removesuffix(" ...") if always else text
        low, high = 0, len(kept)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.width(kept[:middle] + "...", size) <= width else (low, middle - 1)
        return kept[:low] + "..."


def _draw_header(canvas: _Canvas, mas: MAS, state: MASState, problem_id: str) -> None:
    canvas.text(_MARGIN, 22, printable(mas.name), 22, _INK)
    turn = f"{printable(problem_id)}   turn {state.depth} of at most {mas.max_turns or len(mas.agents)}"
    canvas.text(WIDTH - _MARGIN, 28, canvas.fitted(turn, 14, WIDTH / 2), 14, _FAINT, "ra")
    canvas.paragraph(_MARGIN, 60, state.question, 15, _INK, WIDTH - 2 * _MARGIN, 3)


def _window(mas: MAS, state: MASState) -> list[int]:
    """Return the nodes to draw, from q to sink; in a large graph, those around the acting agent."""
    agents = len(mas.agents)
    if agents + 2 <= _MOST_NODES:
        return [Q, *range(agents), agents]
    start = min(max(state.acting - _MOST_NODES // 2, 0), agents + 2 - _MOST_NODES)
    return [Q, *range(start, start + _MOST_NODES - 2), agents]


def _draw_graph(canvas: _Canvas, mas: MAS, state: MASState) -> None:
    nodes = _window(mas, state)
    pitch = (WIDTH - 2 * _MARGIN) / len(nodes)
    width = min(pitch - 22, 132)
    center = {node: _MARGIN + pitch * (i + 0.5) for i, node in enumerate(nodes)}
    turns = state.turns
    used = {(t.speaker, r) for t in turns for r in t.recipients}
    reached = {state.acting, *(t.speaker for t in turns)}
    edges = {(e.source, e.target) for e in mas.edges} | used
    if mas.max_turns is None:
        edges.add((len(mas.agents) - 1, mas.sink))
    for source, target in sorted(edges, key=lambda edge: edge in used):
        if source in center and target in center:
            heard = (source, target) in used or (source == Q and target in reached)
            last = bool(turns) and source == turns[-1].speaker and target in turns[-1].recipients
            _draw_edge(canvas, nodes, center, width, source, target, _ACTING if last else _DONE if heard else _LINE)
    spoken = {t.speaker for t in turns}
    for node in nodes:
        _draw_node(canvas, mas, state, node, center[node], width, node in spoken)


def _draw_edge(
    canvas: _Canvas, nodes: list[int], center: dict[int, float], width: float, source: int, target: int, color: str
) -> None:
    thick = 1.5 if color == _LINE else 2.5
    hops = nodes.index(target) - nodes.index(source)
    if hops == 1:
        canvas.edge(center[source] + width / 2, center[target] - width / 2 - 1, _GRAPH_Y, 0, color, thick)
        return
    # Edges from the question and backward edges bend below the row; forward edges between agents bend above it.
    side = 1 if source == Q or hops <= 0 else -1
    ahead = 1 if hops > 0 else -1
    x0, x1 = center[source] + ahead * width * 0.28, center[target] - ahead * width * 0.28
    bend = side * min(24 + 9 * abs(hops), 74)
    canvas.edge(x0, x1, _GRAPH_Y + side * _NODE_HEIGHT / 2, bend, color, thick)


def _draw_node(canvas: _Canvas, mas: MAS, state: MASState, node: int, x: float, width: float, spoken: bool) -> None:
    fill, ink = _WAITING, _FAINT
    if node == Q:
        fill, ink = _QUESTION, "white"
    elif node == state.acting:
        fill, ink = (_GOOD if node == mas.sink else _ACTING), "white"
    elif spoken:
        fill, ink = _DONE, "white"
    canvas.box(
        x - width / 2, _GRAPH_Y - _NODE_HEIGHT / 2, width, _NODE_HEIGHT, fill, _LINE if fill == _WAITING else None
    )
    name = printable(mas.node_name(node)).replace("_", " ")
    lines = canvas.wrapped(name, 13, width - 12, 2)
    for i, line in enumerate(lines):
        canvas.text(x, _GRAPH_Y + (i - (len(lines) - 1) / 2) * 16, line, 13, ink, "mm")


def _draw_cards(canvas: _Canvas, mas: MAS, turns: Sequence[Turn]) -> None:
    shown = list(turns)[-_CARDS:]
    if not shown:
        canvas.text(WIDTH / 2, _CARD_Y + _CARD_HEIGHT / 2, "no message yet", 16, _FAINT, "mm")
        return
    width = (WIDTH - 2 * _MARGIN - _CARD_GAP * (_CARDS - 1)) / _CARDS
    for i, turn in enumerate(shown):
        x = _MARGIN + i * (width + _CARD_GAP)
        last = i == len(shown) - 1
        canvas.box(x, _CARD_Y, width, _CARD_HEIGHT, _CARD, _ACTING if last else _LINE)
        number = len(turns) - len(shown) + i + 1
        title = f"{number}. {route_text(mas, turn.speaker, turn.recipients)}"
        canvas.text(x + 14, _CARD_Y + 12, canvas.fitted(title, 14, width - 28), 14, _ACTING if last else _DONE)
        canvas.paragraph(x + 14, _CARD_Y + 40, turn.text, 14, _INK, width - 28, 9)


def _draw_outcome(canvas: _Canvas, mas: MAS, state: MASState, facts: Mapping[str, object]) -> None:
    color = _FAINT
    if "correct" in facts:
        color = _GOOD if facts["correct"] else _BAD
    elif "invalid_action" in facts:
        color = _BAD
    text = canvas.fitted(outcome_text(mas, state, facts), 17, WIDTH - 2 * _MARGIN)
    canvas.text(_MARGIN, HEIGHT - 48, text, 17, color)
