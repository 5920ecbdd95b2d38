"""Labels and preference pairs from search trees, by the rules of the paper's App. "MASPRM training data generation".

All functions are pure and read a `search.Tree`. A node's *target* is ``W / N``
clipped to ``[-1, 1]``, defined if ``N > 0``; *siblings* are children of one parent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Same, same_text
from search.tree import Tree

TOP = BOTTOM = 4
PAIRS_PER_TREE = 8


class Labeled(NamedTuple):
    """A state with its target."""

    state: MASState
    target: float


class Pair(NamedTuple):
    """Two siblings, the better one first.

    Attributes:
        chosen: The sibling with the larger target.
        rejected: The other.
        depth: Depth of their parent, 0 for the root.
    """

    chosen: Labeled
    rejected: Labeled
    depth: int

    @property
    def margin(self) -> float:
        """Difference of the targets, in ``(0, 2]``."""
        return self.chosen.target - self.rejected.target


def target(tree: Tree, node: int) -> float:
    """Return ``W / N`` of a visited node, clipped to ``[-1, 1]``."""
    return max(-1.0, min(1.0, tree.totals[node] / tree.visits[node]))


def pointwise(tree: Tree) -> list[Labeled]:
    """Return the samples for the MSE head: each step of each path to a terminal state with reward +1 or -1.

    Exact duplicates are included only once. A path has ``D + 1`` nodes in a fixed schedule; in a dynamic schedule,
    it may have fewer nodes.
    """
    on_path: set[int] = set()
    for node in _decided(tree):
        while node > 0 and node not in on_path:
            on_path.add(node)
            node = tree.parents[node]
    return list(dict.fromkeys(_labeled(tree, i) for i in sorted(on_path) if tree.visits[i] > 0))


def outcomes(tree: Tree) -> list[Labeled]:
    """Return the distinct visited terminal states with their rewards (paper, ``D_out``)."""
    return list(dict.fromkeys(_labeled(tree, i) for i in _decided(tree)))


def pairs(
    tree: Tree,
    max_depth: int,
    limit: int = PAIRS_PER_TREE,
    same: Same = same_text,
) -> list[Pair]:
    """Mine preference pairs from one tree by the paper's five rules.

    At each parent, siblings are (i) deduplicated by ``same``, (ii) ranked by target, (iii) split into up to four top
    and up to four bottom siblings, and (iv) paired across the split if their targets differ. At the last step, only
    terminal siblings count. (v) At most ``limit`` pairs are kept per tree.

    Choices that the rules leave open: the most visited of several duplicates is kept; eight siblings or fewer are split
    at the widest gap between neighbors; to meet the limit, pairs are taken in turn from each depth, and within a
    depth in turn from each parent, starting with the most visited parent and the largest margin, so that a single
    branch does not fill the limit.

    Args:
        tree: The tree.
        max_depth: The scheduled depth ``D``.
        limit: The limit of rule (v).
        same: Returns whether two messages are duplicates; by default, whether their normalized texts are equal.
    """
    families: dict[int, list[int]] = defaultdict(list)
    for node in range(1, len(tree.parents)):
        if tree.visits[node] > 0 and (tree.states[node].depth < max_depth or tree.is_terminal(node)):
            families[tree.parents[node]].append(node)
    by_depth: dict[int, list[list[Pair]]] = defaultdict(list)
    for parent in sorted(families, key=lambda i: (-tree.visits[i], i)):
        found = _family_pairs(tree, families[parent], same)
        if found:
            by_depth[found[0].depth].append(found)
    rounds = [_round_robin(groups) for _, groups in sorted(by_depth.items())]
    return _round_robin(rounds)[:limit]


def _labeled(tree: Tree, node: int) -> Labeled:
    return Labeled(tree.states[node], target(tree, node))


def _decided(tree: Tree) -> list[int]:
    nodes = range(1, len(tree.parents))
    return [i for i in nodes if tree.is_terminal(i) and tree.visits[i] > 0 and abs(target(tree, i)) == 1.0]


def _family_pairs(tree: Tree, siblings: Sequence[int], same: Same) -> list[Pair]:
    ranked = _ranked(tree, siblings, same)
    cut = _split([item.target for item in ranked])
    top, bottom = ranked[:cut][:TOP], ranked[cut:][-BOTTOM:]
    found = [Pair(a, b, a.state.depth - 1) for a in top for b in bottom if a.target > b.target]
    return sorted(found, key=lambda pair: -pair.margin)


def _ranked(tree: Tree, siblings: Sequence[int], same: Same) -> list[Labeled]:
    unique: dict[tuple[str, tuple[int, ...]], int] = {}
    for node in siblings:
        text, recipients = action = tree.states[node].text, tree.states[node].recipients
        known = next((other for other in unique if other[1] == recipients and same(other[0], text)), action)
        if known not in unique or tree.visits[node] > tree.visits[unique[known]]:
            unique[known] = node
    return sorted((_labeled(tree, node) for node in unique.values()), key=lambda item: -item.target)


def _split(ranked: Sequence[float]) -> int:
    """Return the size of the top set of siblings ranked by target."""
    count = len(ranked)
    if count > TOP + BOTTOM:
        return TOP
    cuts = range(max(1, count - BOTTOM), min(TOP, count - 1) + 1)
    return max(cuts, key=lambda cut: ranked[cut - 1] - ranked[cut], default=count)


def _round_robin(groups: Sequence[list[Pair]]) -> list[Pair]:
    return [pair for turn in zip_longest(*groups) for pair in turn if pair is not None]
