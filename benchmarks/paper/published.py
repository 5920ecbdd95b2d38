"""The paper's figures: Hit@1 in per cent on GSM8K, MATH, MMLU and LogiQA, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Row = tuple[float, ...]
Table = Mapping[tuple[str, str], Row]

SIZES = ("1.5B", "7B")
ORDER = "The paper's figures are given for each critic size, in the order GSM8K, MATH, MMLU and LogiQA."

_VOTE, _MCTS = "sc:5,weights=critic", "mcts:10,3"

MAIN: Table = MappingProxyType(
    {
        ("single", ""): (47.2, 31.0, 48.4, 32.5),
        ("sc:5", ""): (63.4, 42.4, 52.7, 35.4),
        (_VOTE, "PL"): (61.2, 41.5, 54.5, 35.9),
        (_VOTE, "ORM-1.5B"): (65.4, 45.4, 58.5, 36.1),
        (_VOTE, "MASPRM-1.5B"): (64.2, 44.8, 58.3, 36.1),
        (_VOTE, "ORM-7B"): (66.6, 47.8, 63.1, 41.6),
        (_VOTE, "MASPRM-7B"): (67.8, 49.2, 67.2, 43.0),
        ("sbs:5,1", "PL"): (55.0, 41.0, 55.0, 35.9),
        ("sbs:5,1", "MASPRM-1.5B"): (63.4, 42.5, 58.7, 36.1),
        ("sbs:5,1", "MASPRM-7B"): (73.4, 50.4, 72.4, 44.1),
        ("sbs:5,3", "PL"): (60.3, 40.4, 59.4, 37.0),
        ("sbs:5,3", "MASPRM-1.5B"): (69.1, 41.2, 60.4, 37.3),
        ("sbs:5,3", "MASPRM-7B"): (77.5, 51.3, 74.8, 45.0),
        (_MCTS, "PL"): (62.5, 42.5, 60.5, 36.5),
        (_MCTS, "ORM-1.5B"): (66.8, 45.3, 66.2, 40.2),
        (_MCTS, "MASPRM-1.5B"): (69.8, 47.3, 68.8, 42.2),
        (_MCTS, "ORM-7B"): (68.4, 46.2, 67.1, 41.4),
        (_MCTS, "MASPRM-7B"): (82.9, 51.8, 75.2, 45.5),
    }
)
"""Table "main results"."""

FIFTH: Table = MappingProxyType(
    {
        (_MCTS, "PL"): (82.1, 60.6, 71.3, 52.4),
        (_MCTS, "MASPRM-7B"): (88.2, 60.5, 77.4, 52.5),
        (_VOTE, "PL"): (81.4, 57.5, 74.9, 55.4),
        (_VOTE, "MASPRM-7B"): (81.4, 57.5, 74.9, 55.2),
    }
)
"""Hit@5, table "Hit@k"."""

LLAMA: Table = MappingProxyType(
    {
        ("single", ""): (52.6, 35.2, 56.0, 36.3),
        (_VOTE, "PL"): (64.2, 44.1, 56.4, 37.2),
        (_VOTE, "ORM-7B"): (68.8, 47.8, 63.4, 42.1),
        (_VOTE, "MASPRM-7B"): (69.8, 48.6, 66.7, 43.3),
        ("sbs:5,1", "PL"): (58.4, 42.1, 55.0, 36.1),
        ("sbs:5,1", "MASPRM-7B"): (74.6, 49.1, 71.6, 44.1),
        ("sbs:5,3", "PL"): (63.1, 41.3, 58.5, 37.6),
        ("sbs:5,3", "MASPRM-7B"): (78.2, 52.2, 74.3, 45.4),
        (_MCTS, "PL"): (64.1, 43.4, 61.9, 37.4),
        (_MCTS, "ORM-7B"): (67.3, 46.9, 67.7, 42.1),
        (_MCTS, "MASPRM-7B"): (75.3, 52.1, 74.9, 46.1),
    }
)
"""Table "cross-LLM results"."""

HEADS: Table = MappingProxyType(
    {
        ("ORM-1.5B", "BCE"): (66.8, 45.3, 66.2, 40.2),
        ("ORM-1.5B", "MSE"): (66.1, 44.5, 65.4, 39.6),
        ("ORM-7B", "BCE"): (68.4, 46.2, 67.1, 41.4),
        ("ORM-7B", "MSE"): (68.2, 46.2, 66.3, 40.8),
        ("MASPRM-1.5B", "BT"): (69.8, 47.3, 68.8, 42.2),
        ("MASPRM-1.5B", "MSE"): (65.5, 44.1, 67.6, 41.9),
        ("MASPRM-7B", "BT"): (82.9, 51.8, 75.2, 45.5),
        ("MASPRM-7B", "MSE"): (73.3, 50.6, 74.9, 44.4),
    }
)
"""Table "head-type ablation", MCTS(10,3)."""

LOCAL: Row = (77.4, 49.4, 71.7, 43.3)
"""MCTS(10,3) with the 7B critic of the local view, table "local observability"."""

SINGLE_AGENT: Row = (41.9, 17.5, 34.3, 25.8)
"""Qwen2.5-1.5B-Instruct alone, table "single-agent baselines"."""


def shown(better: Row, worse: Row) -> str:
    """Return the differences of two rows, ``"+3.0 +2.0 +2.6 +2.0"``."""
    return " ".join(f"{a - b:+.1f}" for a, b in zip(better, worse, strict=True))


def lead(planner: str, critic: str, other: str, table: Table = MAIN) -> str:
    """Return the differences of two critics under one planner, for each size that the table has.

    >>> lead("mcts:10,3", "MASPRM", "ORM")
    '1.5B: +3.0 +2.0 +2.6 +2.0; 7B: +14.5 +5.6 +8.1 +4.1'
    """
    return _by_size(table, (planner, critic), (planner, other))


def over_single(planner: str, critic: str, table: Table = MAIN) -> str:
    """Return the differences of a search to a single pass of the same system."""
    return _by_size(table, (planner, critic), ("single", ""))


def heads(kind: str, better: str, worse: str) -> str:
    """Return the differences of two losses of one kind of critic."""
    return "; ".join(
        f"{size}: {shown(HEADS[f'{kind}-{size}', better], HEADS[f'{kind}-{size}', worse])}" for size in SIZES
    )


def narrowing(planner: str) -> str:
    """Return by how much the gap from Hit@1 to Hit@5 is narrower with MASPRM-7B than with policy likelihood."""
    wide, narrow = (
        [fifth - first for fifth, first in zip(FIFTH[planner, critic], MAIN[planner, critic], strict=True)]
        for critic in ("PL", "MASPRM-7B")
    )
    return f"7B: {shown(tuple(wide), tuple(narrow))}"


def _by_size(table: Table, better: tuple[str, str], worse: tuple[str, str]) -> str:
    parts: list[str] = []
    for size in SIZES:
        one, two = (_sized(table, key, size) for key in (better, worse))
        if one is not None and two is not None:
            parts.append(f"{size}: {shown(one, two)}")
    return "; ".join(parts)


def _sized(table: Table, key: tuple[str, str], size: str) -> Row | None:
    planner, critic = key
    return table.get((planner, f"{critic}-{size}" if critic in ("ORM", "MASPRM") else critic))
