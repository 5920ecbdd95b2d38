"""How often ``mas-gym compare`` finds a difference of two models, beside the unpaired z-test.

``python -m benchmarks.compare`` writes ``benchmarks/pages/compare.md``; it takes under a minute. Of each two models,
the second changes a share of the first model's answers. The z-test is that of the harnesses' scripts: the difference
of the two accuracies over the root of the sum of their squared standard errors.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from search.compare.evaluation_files import Evaluation
from search.compare.paired_results import compare_results
from search.results.table_formats import markdown_table

QUESTIONS = (50, 200, 1000)
CASES = ((0.0, 0.1), (0.0, 0.3), (0.05, 0.1), (0.05, 0.3), (0.1, 0.3))
"""Gain, and share of the questions on which the models differ."""
RUNS = 1000
PAGE = Path(__file__).parent / "pages" / "compare.md"


def answers(questions: int, gain: float, changed: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return whether each of the two models is right, of shape (2, questions); the first is right with 60%."""
    gained, lost = (changed + gain) / 2, (changed - gain) / 2
    first = rng.random(questions) < 0.6
    flips = rng.random(questions) < np.where(first, lost / 0.6, gained / 0.4)
    return np.array([first, first ^ flips], dtype=np.float64)


def z_test_finds(pair: NDArray[np.float64]) -> bool:
    """Return whether the unpaired z-test rejects equality at 5%."""
    errors = pair.std(axis=1, ddof=1) / math.sqrt(pair.shape[1])
    return bool(abs(pair[1].mean() - pair[0].mean()) > 1.96 * math.hypot(*errors))


def found(questions: int, gain: float, changed: float) -> tuple[float, float, float]:
    """Return how often each method finds a difference, and the median number of questions that the estimate needs."""
    rng = np.random.default_rng(0)
    paired = unpaired = 0
    needed = []
    for _ in range(RUNS):
        pair = answers(questions, gain, changed, rng)
        sides = [Evaluation(str(i), {str(q): (float(v),) for q, v in enumerate(side)}) for i, side in enumerate(pair)]
        one = compare_results(*sides).differences["1"]
        paired += one.gap.significant
        unpaired += z_test_finds(pair)
        needed.append(one.questions_needed(100 * gain) if gain else math.nan)
    return paired / RUNS, unpaired / RUNS, float(np.median(needed))


def main() -> None:
    """Write the page."""
    head = (
        "Questions",
        "Difference",
        "Questions changed",
        "Paired: found",
        "Unpaired z-test: found",
        "Questions needed",
    )
    lines: list[tuple[str, ...]] = [head]
    for gain, changed in CASES:
        for questions in QUESTIONS:
            paired, unpaired, needed = found(questions, gain, changed)
            size = f"{100 * gain:.0f} points" if gain else "none"
            shares = (f"{100 * share:.1f}%" for share in (changed, paired, unpaired))
            lines.append((f"{questions:,}", size, *shares, f"{needed:,.0f}" if gain else "\N{EN DASH}"))
    text = (
        "# Paired comparisons of evaluations\n\n"
        "How often `mas-gym compare` finds a difference of two models on the same questions, beside the unpaired "
        f"z-test, in {RUNS:,} simulated evaluations per row. The first model is right on 60% of the questions; the "
        "second changes a share of the answers. Without a difference, at most 5% should be found. `Questions needed` "
        "is the median of the number that `mas-gym compare` reports for this difference (80% power).\n\n"
    )
    PAGE.write_text(f"{text}{markdown_table(lines, 0)}\nCommand: `python -m benchmarks.compare`\n", encoding="utf-8")


if __name__ == "__main__":
    main()
