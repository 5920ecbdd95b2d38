"""Drawings of a MAS graph: as lines for a terminal and as an SVG image."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from mas_gym.internal.text import one_line
from mas_gym.systems.graph import MAS, Edge, Q
from mas_gym.systems.state import MASState
from search.pages.templates import render

_LONGEST_NAME = 40
_LONGEST_LABEL = 16

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 116, 40, 36, 26, 10
_LABEL_GAP = 96
"""Horizontal gap if edges are labeled with conditions."""
_CHARACTERS = 14


def drawn_edges(mas: MAS) -> list[Edge]:
    """Return the edges of a system, including the implicit edge from the last scheduled agent to ``sink``."""
    last = len(mas.agents) - 1
    edges = list(mas.edges)
    if mas.max_turns is None and not any((e.source, e.target) == (last, mas.sink) for e in edges):
        edges.append(Edge(last, mas.sink))
    return edges


def graph_text(mas: MAS) -> str:
    """Draw the graph with line characters; each node's outgoing line starts below its name.

    >>> from mas_gym import load_mas
    >>> print(graph_text(load_mas("single")))
    q
    ╰──────────────╮
    Assistant ◄────╯
    ╰──────────────╮
    sink ◄─────────╯
    """
    rows = [Q, *range(len(mas.agents) + 1)]
    names = [_short(mas.node_name(node), _LONGEST_NAME) for node in rows]
    rails = _rails(mas)
    left = max(map(len, names)) + 4
    lines = []
    for i, name in enumerate(names):
        heard = {rail.column for rail in rails if i in rail.targets}
        lines.append(_row(f"{name} ◄" if heard else name, left, 2 * i, heard, rails))
        spoken = {rail.column for rail in rails if rail.source == i}
        if spoken:
            lines.append(_row("╰", left, 2 * i + 1, spoken, rails))
    return "\n".join(line.rstrip() for line in lines)


class _Rail(NamedTuple):
    """The vertical line of a source: its row, target rows, column, and first and last half row."""

    source: int
    targets: frozenset[int]
    column: int
    top: int
    bottom: int


def _rails(mas: MAS) -> list[_Rail]:
    reached: dict[int, set[int]] = {}
    for edge in drawn_edges(mas):
        reached.setdefault(edge.source + 1, set()).add(edge.target + 1)
    rails: list[_Rail] = []
    for source, targets in sorted(reached.items()):
        places = [2 * source + 1, *(2 * target for target in targets)]
        top, bottom = min(places), max(places)
        taken = {rail.column for rail in rails if rail.top <= bottom and top <= rail.bottom}
        column = next(column for column in range(len(rails) + 1) if column not in taken)
        rails.append(_Rail(source, frozenset(targets), column, top, bottom))
    return rails


def _row(label: str, left: int, place: int, joined: set[int], rails: list[_Rail]) -> str:
    """Return one line: a label, a horizontal line to the joined columns, and the rails that cross it."""
    passing = {rail.column: rail for rail in rails if rail.top <= place <= rail.bottom}
    end = max(joined, default=-1)
    line = label + ("─" if joined else " ") * (left - len(label))
    for column in range(max(passing, default=-1) + 1):
        rail = passing.get(column)
        corner = "─" if column < end else " "
        if rail is not None and column in joined:
            ends = (place == rail.top, place == rail.bottom)
            corners = {(True, False): "┬╮", (False, True): "┴╯"}.get(ends, "┼┤")
            corner = corners[column == end]
        elif rail is not None:
            corner = "│"
        line += ("─" if column <= end else " ") * 2 + corner
    return line


def graph_svg(mas: MAS, state: MASState | None = None, title: str = "") -> str:
    """Draw the graph as a standalone SVG picture, from the question on the left to ``sink`` on the right.

    Args:
        mas: The system.
        state: State to highlight (the edges taken by its messages and the acting agent), or None.
        title: Alternative text of the picture.

    Returns:
        SVG without scripts or references. Colors follow ``--md-default-fg-color`` if the page defines it.
    """
    places = _places(mas)
    pitch = _WIDTH + (_LABEL_GAP if any(edge.condition for edge in mas.edges) else _GAP_X)
    arcs = [_arc(edge, places[edge.source], places[edge.target]) for edge in drawn_edges(mas)]
    above = max(0, *(-arc.bend for arc in arcs))
    below = max(0, *(arc.bend for arc in arcs))
    rows = 1 + max(row for _, row in places.values())
    width = 2 * _MARGIN + max(c for c, _ in places.values()) * pitch + _WIDTH
    depth = rows * (_HEIGHT + _GAP_Y) - _GAP_Y
    height = 2 * _MARGIN + depth + above + below
    turns = state.turns if state is not None else ()
    used = {(turn.speaker, target) for turn in turns for target in turn.recipients}
    last = {(turns[-1].speaker, target) for target in turns[-1].recipients} if turns else set()
    drawn: list[list[dict[str, object]]] = [[], [], []]
    for arc in arcs:
        key = (arc.edge.source, arc.edge.target)
        level = 2 if key in last else 1 if key in used else 0
        drawn[level].append(_edge_values(arc, ("", " used", " last")[level], pitch, above, depth))
    nodes = []
    for node, (column, row) in places.items():
        x, y = _corner(column, row, pitch, above)
        kind = "acts" if state is not None and node == state.acting else ""
        kind = kind or ("spoke" if any(turn.speaker == node for turn in turns) else "")
        special = " q" if node == Q else " sink" if node == mas.sink else ""
        name = _short(mas.node_name(node), _CHARACTERS)
        nodes.append({"x": x, "y": y, "kind": f"box{special} {kind}", "name": name})
    return render(
        "graph.svg",
        label=title or f"graph of {one_line(mas.name)}",
        width=width,
        height=height,
        box_width=_WIDTH,
        box_height=_HEIGHT,
        # Edges used by the episode are drawn above the others.
        edges=[*itertools.chain(*drawn)],
        nodes=nodes,
    )


def _places(mas: MAS) -> dict[int, tuple[int, int]]:
    """Return the column and row of each node; the column is the length of the longest path from q."""
    column = {Q: 0}
    for node in range(len(mas.agents)):
        before = [column[e.source] for e in mas.edges if e.target == node and e.source < node]
        column[node] = 1 + max(before, default=0)
    column[mas.sink] = 1 + max(column.values())
    rows: dict[int, int] = {}
    places = {}
    for node, at in column.items():
        rows[at] = rows.get(at, -1) + 1
        places[node] = (at, rows[at])
    return places


class _Arc(NamedTuple):
    """An edge with the column and row of its ends, and its vertical offset from the rows, negative above them."""

    edge: Edge
    start: tuple[int, int]
    end: tuple[int, int]
    bend: int


def _arc(edge: Edge, start: tuple[int, int], end: tuple[int, int]) -> _Arc:
    hops = end[0] - start[0]
    if hops == 1:
        return _Arc(edge, start, end, 0)
    reach = 14 + 10 * abs(hops)
    # Edges from the question and backward edges pass below the rows, forward edges between agents above them.
    return _Arc(edge, start, end, reach if edge.source == Q or hops < 1 else -reach)


def _corner(column: int, row: int, pitch: int, above: int) -> tuple[int, int]:
    return _MARGIN + column * pitch, _MARGIN + above + row * (_HEIGHT + _GAP_Y)


def _edge_values(arc: _Arc, kind: str, pitch: int, above: int, depth: int) -> dict[str, object]:
    (x0, y0), (x1, y1) = _corner(*arc.start, pitch, above), _corner(*arc.end, pitch, above)
    ahead = arc.end[0] > arc.start[0]
    if not arc.bend:
        a, b = (x0 + _WIDTH, y0 + _HEIGHT // 2), (x1 - 1, y1 + _HEIGHT // 2)
        middle = (a[0] + b[0]) // 2
        path = f"M{a[0]} {a[1]}C{middle} {a[1]} {middle} {b[1]} {b[0]} {b[1]}"
        spot = (middle, (a[1] + b[1]) // 2 - 6)
    else:
        shift = _WIDTH // 4 if ahead else -_WIDTH // 4
        edge_of = _HEIGHT if arc.bend > 0 else 0
        a = (x0 + _WIDTH // 2 + shift, y0 + edge_of)
        b = (x1 + _WIDTH // 2 - shift, y1 + edge_of + (1 if arc.bend > 0 else -1))
        level = _MARGIN + above + arc.bend + (depth if arc.bend > 0 else 0)
        step = 30 if ahead else -30
        path = (
            f"M{a[0]} {a[1]}C{a[0]} {level} {a[0]} {level} {a[0] + step} {level}"
            f"L{b[0] - step} {level}C{b[0]} {level} {b[0]} {level} {b[0]} {b[1]}"
        )
        spot = ((a[0] + b[0]) // 2, level - 4)
    condition = arc.edge.condition
    return {
        "kind": f"edge{kind}{' if' if condition else ''}",
        "path": path,
        "x": spot[0],
        "y": spot[1],
        "label": _short(str(condition), _LONGEST_LABEL) if condition else "",
    }


def _short(name: str, most: int) -> str:
    line = one_line(name)
    return line if len(line) <= most else line[: most - 1] + "…"
