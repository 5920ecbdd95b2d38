"""The page of trained agents: the point at which a curve reaches a level, and the content of its tables."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the page has a picture: pip install 'mas-gym[plot]'")

from benchmarks.learning_page import Point, Row, chosen, crossing, write
from search.results.outcomes import Outcome


@pytest.mark.parametrize(
    ("level", "reached"), [(0.4, 0.0), (0.6, 15.0), (0.8, 20.0), (0.85, 25.0), (0.95, math.inf)], ids=str
)
def test_crossing_interpolates_between_points(level: float, reached: float) -> None:
    assert crossing([0, 10, 20, 30], [0.4, 0.4, 0.8, 0.9], level) == pytest.approx(reached)


def test_crossing_is_the_first_one_if_a_curve_reaches_the_level_twice() -> None:
    assert crossing([0, 10, 20, 30], [0.2, 0.6, 0.2, 0.6], 0.4) == pytest.approx(5.0)


def row(name: str, accuracies: list[float], seeds: int) -> Row:
    def point(tokens: int, accuracy: float) -> Point:
        right = {str(place): float(place < 10 * accuracy) for place in range(10)}
        return Point(tokens, tokens, "tiny", right, {key: 2 * value - 1 for key, value in right.items()})

    curves = [[point(1000 * place, one) for place, one in enumerate(accuracies)] for _ in range(seeds)]
    single = [[Outcome("single", "", 14, key, bool(value), tokens=70) for key, value in curves[0][-1].right.items()]]
    return Row(name, curves, {"single": single * seeds})


def test_page_compares_tokens_and_keeps_notes(tmp_path: Path) -> None:
    page = tmp_path / "learning.md"
    page.write_text("# Old\n\n## Discussion\n\n- A note.\n", encoding="utf-8")
    args = argparse.Namespace(
        page=page, words="", base="tiny", task="arithmetic",
        tokens=2000, rounds=2, seeds=(0, 1), number=10, searched=0,
        dev=10, rate=1e-3,
    )  # fmt: skip
    rows = [row("before", [0.4], 1), row("grpo, shared outcome", [0.4, 0.5, 0.7], 2), row("sft", [0.4, 0.9, 0.8], 1)]
    write(rows, args)
    text = page.read_text(encoding="utf-8")
    assert "| grpo, shared outcome | 2 | 2,000 | " in text and "| sft | 1 | 2,000 | " in text
    # 70% is reached at 600 of 2,000 tokens; the shared outcome's maximum is its end.
    assert "| sft | 30% (" in text and ") | 30% (" in text
    assert "| sft: single pass over the agents before | +40.0 |" in text
    assert text.endswith("## Discussion\n\n- A note.\n") and (tmp_path / "learning.png").stat().st_size > 10_000


def test_chosen_round_is_the_first_best_round_on_dev() -> None:
    assert [chosen(row("sft", accuracies, 1).curves[0]) for accuracies in ([0.4, 0.9, 0.9], [0.4, 0.3, 0.3])] == [1, 0]
