"""What can be wrong with the edges of a MAS as a whole, beyond the form of each one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from mas_gym.graph import Q

Fault = tuple[tuple[str | int, ...], str]
"""A place in the config and the problem there."""

_MOST_CYCLES = 20
_MOST_NAMES = 12


def graph_faults(names: Sequence[str], edges: Sequence[tuple[int | None, int | None, object]]) -> Iterator[Fault]:
    """Yield every fault of a graph.

    Args:
        names: The agents' names, in schedule order.
        edges: Source, target and condition in file order. A node that could not be read is
            None: its fault is reported already, and the edge's other end is taken to be fine.
    """
    sink = len(names)
    yield from _edge_faults(names, edges, sink)
    inner = {
        (source, target): i
        for i, (source, target, _) in reversed(list(enumerate(edges)))
        if source is not None and target is not None and 0 <= source < sink and 0 <= target < sink
    }
    in_cycles: set[tuple[int, int]] = set()
    for cycle in _cycles(sink, inner):
        steps = [*cycle, cycle[0]]
        in_cycles.update(pairwise(steps))
        path = " -> ".join(names[i] for i in (steps if len(steps) <= _MOST_NAMES else steps[:_MOST_NAMES]))
        yield ("edges", inner[cycle[-1], cycle[0]]), f"a cycle, {path}: remove one of its edges, each agent acts once"
    for (source, target), i in sorted(inner.items(), key=lambda item: item[1]):
        if source > target and (source, target) not in in_cycles:
            remedy = f"list {names[source]} before {names[target]} or remove the edge"
            yield ("edges", i), f"{names[source]} -> {names[target]} goes against the order of the agents: {remedy}"
    yield from _agent_faults(names, edges, sink)


def _edge_faults(
    names: Sequence[str], edges: Sequence[tuple[int | None, int | None, object]], sink: int
) -> Iterator[Fault]:
    seen: dict[tuple[int, int], int] = {}
    for i, (source, target, condition) in enumerate(edges):
        if source == sink:
            yield ("edges", i), "an edge out of sink, which ends the episode: remove it"
        if target == Q:
            yield ("edges", i), "an edge into q, which only holds the question: remove it"
        if source == Q and target == sink:
            yield ("edges", i), "an edge from q to sink skips every agent: remove it"
        if source == Q and condition is not None:
            yield ("edges", i), "a condition on an edge from q, which sends no message: remove the condition"
        if source is None or target is None:
            continue
        first = seen.setdefault((source, target), i)
        if first != i:
            yield ("edges", i), f"the edge of edges[{first}] again: remove one, or join their conditions into one regex"


def _cycles(nodes: int, edges: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield cycles that share no edge, until none is left."""
    left = set(edges)
    for _ in range(_MOST_CYCLES):
        cycle = _cycle(nodes, left)
        if cycle is None:
            return
        left -= {(cycle[i - 1], node) for i, node in enumerate(cycle)}
        yield cycle


def _cycle(nodes: int, edges: set[tuple[int, int]]) -> list[int] | None:
    incoming: list[list[int]] = [[] for _ in range(nodes)]
    outgoing: list[list[int]] = [[] for _ in range(nodes)]
    for source, target in sorted(edges):
        incoming[target].append(source)
        outgoing[source].append(target)
    waits = [len(sources) for sources in incoming]
    ready = [node for node in range(nodes) if not waits[node]]
    while ready:
        for target in outgoing[ready.pop()]:
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    stuck = {node for node in range(nodes) if waits[node]}
    if not stuck:
        return None
    # Every stuck node has a stuck predecessor, so walking backwards must close a cycle.
    walk, node = dict[int, int](), min(stuck)
    while node not in walk:
        walk[node] = len(walk)
        node = next(source for source in incoming[node] if source in stuck)
    cycle = list(walk)[: walk[node] - 1 if walk[node] else None : -1]
    start = cycle.index(min(cycle))
    return cycle[start:] + cycle[:start]


def _agent_faults(
    names: Sequence[str], edges: Sequence[tuple[int | None, int | None, object]], sink: int
) -> Iterator[Fault]:
    incoming: list[set[int]] = [set() for _ in names]
    outgoing: list[set[int]] = [set() for _ in names]
    conditional = set[int]()
    ends_always = set[int]()
    for source, target, condition in edges:
        if target is not None and 0 <= target < sink:
            incoming[target].add(Q if source is None else source)
            if condition is not None:
                conditional.add(target)
        if source is not None and 0 <= source < sink:
            outgoing[source].add(sink if target is None else target)
            if target == sink and condition is None:
                ends_always.add(source)
    reached = _reached(incoming, outgoing, sink)
    # An agent surely acts in every episode when no condition stands anywhere above it.
    sure = [False] * len(names)
    for i in range(len(names)):
        sure[i] = i not in conditional and all(s == Q or (0 <= s < i and sure[s]) for s in incoming[i])
    next_sure = [sink] * (sink + 1)
    for i in reversed(range(sink)):
        next_sure[i] = i if sure[i] else next_sure[i + 1]
    for i, name in enumerate(names):
        if i not in reached:
            yield ("agents", i), f"no path leads from q to {name}: add an edge from q or from an earlier agent"
        later = next_sure[i + 1]
        if not outgoing[i] and later < sink:
            yield (
                ("agents", i),
                f"nobody hears {name}, and {names[later]} acts after it: add an edge from it or remove it",
            )
        if outgoing[i] == {sink} and i in ends_always and sure[i] and i + 1 < sink:
            yield ("agents", i), f"{name} always ends the episode, {names[i + 1]} never acts: remove its edge to sink"


def _reached(incoming: Sequence[set[int]], outgoing: Sequence[set[int]], sink: int) -> set[int]:
    todo = [i for i in range(sink) if Q in incoming[i]]
    reached = set(todo)
    while todo:
        for target in outgoing[todo.pop()]:
            if 0 <= target < sink and target not in reached:
                reached.add(target)
                todo.append(target)
    return reached
