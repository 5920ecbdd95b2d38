"""Rules that select one of several generated programs by their results on generated tests and calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.real.execution import Problem, Result

Floats = NDArray[np.float64]


class Draw(NamedTuple):
    """Programs and generated tests drawn for one problem.

    Attributes:
        passed: Whether each program passes each test, shape (programs, tests).
        tests: How many of the drawn sets contain each test, shape (tests,).
        outputs: Code of what each program returns for each call, -1 if it fails, shape (programs, calls).
        calls: How many of the drawn sets contain each call, shape (calls,).
        texts: Figures of the programs' texts, shape (programs, figures).
        copies: Number of each distinct text, shape (programs,).
        correct: Whether each program passes the hidden tests; never seen by a rule.
    """

    passed: NDArray[np.bool_]
    tests: NDArray[np.int64]
    outputs: NDArray[np.int64]
    calls: NDArray[np.int64]
    texts: Floats
    copies: NDArray[np.int64]
    correct: NDArray[np.bool_]


class Samples:
    """All samples of one problem, of which `draw` takes some."""

    def __init__(self, problem: Problem, results: Sequence[Result]) -> None:
        tests = {text: place for place, text in enumerate(problem.distinct_tests)}
        calls = {text: place for place, text in enumerate(problem.distinct_calls)}
        self.id, self.size = problem.id, len(problem.programs)
        self._tests = _counts(problem.tests, tests)
        self._calls = _counts(problem.calls, calls)
        self._passed = np.array([one.passed for one in results], dtype=bool).reshape(self.size, len(tests))
        self._outputs = _codes([one.outputs for one in results], len(calls))
        self._texts = np.array([_figures(text, problem.entry_point) for text in problem.programs])
        numbers = {text: place for place, text in enumerate(dict.fromkeys(problem.programs))}
        self._copies = np.array([numbers[text] for text in problem.programs])
        self.correct = np.array([one.correct for one in results])

    def draw(self, programs: NDArray[np.int64], sets: NDArray[np.int64]) -> Draw:
        """Return the programs and test sets with these indices; tests and calls in none of the sets are left out."""
        tests, calls = self._tests[sets].sum(0), self._calls[sets].sum(0)
        return Draw(
            self._passed[programs][:, tests > 0],
            tests[tests > 0],
            self._outputs[programs][:, calls > 0],
            calls[calls > 0],
            self._texts[programs],
            self._copies[programs],
            self.correct[programs],
        )


def _counts(sets: Sequence[Sequence[str]], places: dict[str, int]) -> NDArray[np.int64]:
    found = np.zeros((len(sets), len(places)), dtype=np.int64)
    for row, one in enumerate(sets):
        for text in one:
            found[row, places[text]] += 1
    return found


def _codes(outputs: Sequence[Sequence[str | None]], calls: int) -> NDArray[np.int64]:
    found = np.full((len(outputs), calls), -1)
    for call in range(calls):
        known: dict[str, int] = {}
        for row, values in enumerate(outputs):
            if (value := values[call]) is not None:
                found[row, call] = known.setdefault(value, len(known))
    return found


def _figures(text: str, entry_point: str) -> list[float]:
    words = ("\n", "return", "for ", "if ", "while", "lambda", "import", "pass", entry_point)
    return [float(np.log1p(len(text))), *map(float, map(text.count, words)), float(not text.strip())]


def at_random(draw: Draw) -> Floats:
    """Score all programs the same."""
    return np.zeros(len(draw.correct))


def generated_tests(draw: Draw) -> Floats:
    """Return the number of generated tests that each program passes, repeated tests as often as they occur."""
    return (draw.passed @ draw.tests).astype(float)


def same_behavior(draw: Draw) -> Floats:
    """Return how many programs return the same as each one for all calls; 0 for those that always fail."""
    return _group_sizes(draw.outputs) * (draw.outputs >= 0).any(1)


def agreement(draw: Draw) -> Floats:
    """Return how many programs agree with each one's output, summed over the calls.

    A call counts by the square root of its frequency. Without calls all are equal.
    """
    score = at_random(draw)
    for values, weight in zip(draw.outputs.T, np.sqrt(draw.calls), strict=True):
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        score += weight * counts[place] * (values >= 0)
    return score


def dual_agreement(draw: Draw) -> Floats:
    """Return CodeT's score (Chen et al. 2022, arXiv:2207.10397), as its published code computes it.

    Programs that pass the same tests form a consensus set. Its score is the number of tests that they pass
    times the square root of its number of programs, repeated programs and tests as often as they occur.
    """
    return np.sqrt(_group_sizes(draw.passed)) * generated_tests(draw)


def dual_agreement_on_outputs(draw: Draw) -> Floats:
    """Return CodeT's score with consensus sets of programs that return the same for all calls, and no square root."""
    return _group_sizes(draw.outputs) * generated_tests(draw)


RULES: dict[str, Callable[[Draw], Floats]] = {
    "at random": at_random,
    "generated tests": generated_tests,
    "largest group with the same behavior": same_behavior,
    "agreement per call": agreement,
    "CodeT: dual execution agreement": dual_agreement,
    "dual agreement on outputs": dual_agreement_on_outputs,
}
"""Rules without training, by name."""

CODET = "CodeT: dual execution agreement"


def right(draw: Draw, score: Floats) -> float:
    """Return the probability that the program with the highest score is correct; ties are broken at random."""
    return float(draw.correct[score >= score.max() - 1e-9].mean())


def features(draw: Draw) -> Floats:
    """Return the outcome critic's features of each program, shape (programs, features)."""
    scores = [rule(draw) for name, rule in RULES.items() if name != "at random"]
    share = scores[0] / max(1, draw.tests.sum())
    size = _group_sizes(draw.outputs) / len(share)
    failing = (draw.outputs < 0).mean(1) if draw.outputs.shape[1] else np.ones(len(share))
    varied = np.array([len(set(row[row >= 0])) / max(1, (row >= 0).sum()) for row in draw.outputs])
    copies = (draw.copies[:, None] == draw.copies).mean(1)
    own = [*map(_relative, scores), *map(_rank, scores), share, size, np.sqrt(size), failing, varied, copies]
    whole = [
        share.max(initial=0.0),
        len(np.unique(draw.outputs, axis=0)) / len(share),
        size.max(),
        draw.passed.shape[1],
    ]
    return np.hstack([
        np.array(own).T,
        draw.texts,
        draw.texts - draw.texts.mean(0),
        np.tile(whole, (len(share), 1)),
    ]).astype(np.float32)  # fmt: skip


def _relative(score: Floats) -> Floats:
    return score / max(score.max(), 1e-9)


def _rank(score: Floats) -> Floats:
    """Return the share of scores that are lower, ties counted as half."""
    ranks: Floats = ((score[:, None] > score).mean(1) + (score[:, None] >= score).mean(1)) / 2
    return ranks


def _group_sizes(rows: NDArray) -> Floats:
    """Return, for each row, how many rows are equal to it."""
    keys = [row.tobytes() for row in np.ascontiguousarray(rows)]
    counts: dict[bytes, int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    return np.array([counts[key] for key in keys], dtype=float)
