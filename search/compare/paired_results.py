"""Paired statistics of evaluations of several models on the same questions."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mas_gym.errors import ConfigError
from mas_gym.internal.suggestions import choice
from mas_gym.internal.text import one_line
from mas_gym.internal.whole_files import write_file
from search.compare.evaluation_files import Evaluation, read_evaluations
from search.pages.templates import render
from search.results.intervals import FEWEST_PROBLEMS, Difference, accuracy_interval, paired_difference
from search.results.table_formats import (
    TextTable,
    gap_cells,
    interval_cell,
    latex_table,
    markdown_document,
    percent_cell,
    printed,
    shown_tables,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "mas-gym-paired-results/1"
POINTS = (1, 2, 5, 10)
"""Differences, in points, for which the tables show the number of questions needed."""
_Z = 1.959964 + 0.841621
"""Normal quantiles of a two-sided test at 5% with a power of 80%."""
_WIDTH = 80
_FLIPS = 10
_DASH = "\N{EN DASH}"


class Flip(NamedTuple):
    """The key of a question on which two models differ, with the mean scores of the baseline and of the model."""

    question: str
    baseline: float
    score: float


@dataclass(frozen=True)
class PairedDifference:
    """The difference of a model and the baseline on their common questions.

    Attributes:
        gap: The mean difference with its 95% interval.
        flips: The questions with different scores; those with the largest difference first.
        spread: Standard deviation of the questions' differences, with a pseudo-question at -1 and one at 1.
        different: Number of questions with equal keys and different texts, which are left out.
    """

    gap: Difference
    flips: tuple[Flip, ...]
    spread: float
    different: int = 0

    @property
    def better(self) -> int:
        """Number of questions on which the model has the higher score."""
        return sum(flip.score > flip.baseline for flip in self.flips)

    @property
    def worse(self) -> int:
        """Number of questions on which the baseline has the higher score."""
        return len(self.flips) - self.better

    def questions_needed(self, points: float) -> int:
        """Return how many questions a difference needs to be found with a probability of 80%.

        The test is two-sided at 5%. The differences are assumed to vary between questions as they do here, with as
        many samples per question.

        Args:
            points: The difference, in percentage points, in ``(0, 100]``.

        Raises:
            ConfigError: ``points`` is out of range.
        """
        if not 0 < points <= 100:
            raise ConfigError(f"expected a difference of more than 0 and at most 100 points, got {points!r}")
        return max(FEWEST_PROBLEMS, math.ceil((_Z * self.spread / (points / 100)) ** 2))


@dataclass(frozen=True, repr=False)
class PairedResults:
    """The result of `compare_results`.

    ``print(result)`` shows scores, paired differences, the questions needed and the first flipped questions.

    Attributes:
        evaluations: The evaluations; the names are distinct.
        baseline: Name of the evaluation that the others are compared with.
    """

    evaluations: tuple[Evaluation, ...]
    baseline: str

    @cached_property
    def differences(self) -> dict[str, PairedDifference]:
        """The difference of each other model from the baseline, by name."""
        first = next(one for one in self.evaluations if one.name == self.baseline)
        return {one.name: _paired(one, first) for one in self.evaluations if one is not first}

    def tables(self) -> list[TextTable]:
        """Return the tables as text: scores, paired differences, and questions needed."""
        base, gaps = one_line(self.baseline), self.differences
        head = ("Model", "Questions", "Samples", "Score", "95% interval")
        scores = [
            (
                one_line(one.name), f"{len(one.scores):,}", f"{one.samples:,}",
                percent_cell(float(np.mean(list(one.shares.values())))),
                interval_cell(accuracy_interval(list(one.shares.values()), one.samples)),
            )
            for one in self.evaluations
        ]  # fmt: skip
        differences = [
            (one_line(name), *gap_cells(one.gap), f"{one.better:,}", f"{one.worse:,}", self._verdict(name))
            for name, one in gaps.items()
        ]
        needed = [
            (one_line(name), *(f"{one.questions_needed(points):,}" for points in POINTS)) for name, one in gaps.items()
        ]
        found = [TextTable(head, scores, f"Score in %: {self._metrics()}", self._notes())]
        title = f"Difference from {base}, in points; paired 95% intervals"
        columns = ("Model", "Difference", "95% interval", "Better", "Worse", "Verdict")
        note = "Better, Worse: number of questions with a higher or lower score than the baseline's."
        found.append(TextTable(columns, differences, title, note))
        title = "Questions that a difference needs to be found (80% power, 5% level)"
        return [
            *found,
            TextTable(("Model", *(f"{points} point{'s' * (points > 1)}" for points in POINTS)), needed, title),
        ]

    def flip_tables(self, most: int | None = None) -> list[TextTable]:
        """Return a table of the flipped questions per model, of at most ``most`` questions."""
        found = []
        for name, one in self.differences.items():
            if one.flips:
                shown = one.flips[:most]
                rest = len(one.flips) - len(shown)
                lines = [(one_line(key), percent_cell(base), percent_cell(score)) for key, base, score in shown]
                title = f"Questions on which {one_line(name)} differs: {len(one.flips):,} of {one.gap.problems:,}"
                note = f"and {rest:,} more" if rest else ""
                found.append(TextTable(("Question", one_line(self.baseline), one_line(name)), lines, title, note))
        return found

    def _metrics(self) -> str:
        return ", ".join(dict.fromkeys(one_line(one.metric) for one in self.evaluations if one.metric)) or "score"

    def _notes(self) -> str:
        left = ", ".join(f"{one_line(one.name)} {one.unscored:,}" for one in self.evaluations if one.unscored)
        used = ", ".join(f"{one_line(one.name)} {one_line(one.metric)}" for one in self.evaluations)
        differ = len({one.metric for one in self.evaluations}) > 1
        notes = [f"The metrics differ: {used}." * differ, f"Samples without a score are left out: {left}." * bool(left)]
        return " ".join(filter(None, notes))

    def _verdict(self, name: str) -> str:
        one = self.differences[name]
        sizes = {len(each.scores) for each in self.evaluations if each.name in (name, self.baseline)}
        common = f", {one.gap.problems:,} common" if max(sizes) > one.gap.problems else ""
        return one.gap.verdict + common + (f", {one.different:,} with different texts" if one.different else "")

    def to_markdown(self) -> str:
        """Return the tables as GitHub Markdown."""
        return markdown_document(self.tables())

    def to_latex(self) -> str:
        """Return the tables in LaTeX, with labels, for the package booktabs."""
        labels = ("scores", "differences", "needed")
        return "\n".join(latex_table(table, label) for table, label in zip(self.tables(), labels, strict=True))

    def to_json(self) -> str:
        """Return scores per question, differences, flips and questions needed as one JSON document."""
        document = {
            "schema": SCHEMA,
            "baseline": self.baseline,
            "evaluations": [
                {"name": one.name, "metric": one.metric, "unscored": one.unscored, "scores": one.scores}
                for one in self.evaluations
            ],
            "differences": [
                {
                    "of": name,
                    **one.gap._asdict(),
                    "verdict": one.gap.verdict,
                    "better": one.better,
                    "worse": one.worse,
                    "different_texts": one.different,
                    "questions_needed": {str(points): one.questions_needed(points) for points in POINTS},
                    "flips": [flip._asdict() for flip in one.flips],
                }
                for name, one in self.differences.items()
            ],
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def write_page(self, path: str | os.PathLike[str]) -> None:
        """Write one HTML page with the tables and every flipped question."""
        sections = [{"tables": self.tables(), "pictures": (), "more": self.flip_tables(), "failures": {}}]
        write_file(path, render("report.html", title=f"Paired comparison with {self.baseline}", sections=sections))

    def show(self) -> RenderableType:
        """Return the tables and the first flipped questions as a rich renderable."""
        return shown_tables([*self.tables(), *self.flip_tables(_FLIPS)])

    def __str__(self) -> str:
        return printed(self.show(), _WIDTH)

    def __repr__(self) -> str:
        gaps = (f"{one_line(name)} {gap_cells(one.gap)[0]}" for name, one in self.differences.items())
        return f"<PairedResults against {one_line(self.baseline)}: {'; '.join(gaps)}>"

    def _repr_html_(self) -> str:
        return render("tables.html", tables=[*self.tables(), *self.flip_tables(_FLIPS)])


def compare_results(
    *sources: str | os.PathLike[str] | Evaluation, baseline: str = "", metric: str = ""
) -> PairedResults:
    """Compare evaluations that other tools ran, paired by question.

    Several samples of a question, such as Inspect's epochs or a store's seeds, are averaged first, because they are
    not independent.

    Args:
        sources: At least one: Inspect logs (``.eval`` or JSON), folders or files of lm-evaluation-harness
            (``--log_samples``), run stores, CSV or JSON Lines files with a question and a score per row and optionally
            a model, ``NAME=FILE,FILE`` for several files of one model, or `Evaluation` objects.
        baseline: Name of the model that the others are compared with; by default the first.
        metric: Name of the scorer, metric or column; by default each source's first.

    Raises:
        ConfigError: There are fewer than two models, or two models have no question in common.
        UnknownNameError: There is no such baseline or metric.
        DataError: A file cannot be read as an evaluation.
    """
    found: list[Evaluation] = []
    for source in sources:
        found += [source] if isinstance(source, Evaluation) else read_evaluations(os.fspath(source), metric)
    named = _distinct(found)
    if len(named) < 2:
        raise ConfigError(f"expected the results of at least two models, got {len(named)}; pass several files")
    return PairedResults(named, choice("baseline", baseline or named[0].name, tuple(one.name for one in named)))


def _distinct(found: Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    """Number the names that occur several times."""
    common, seen = Counter(one.name for one in found), Counter[str]()
    named = []
    for one in found:
        seen[one.name] += 1
        repeated = common[one.name] > 1
        named.append(replace(one, name=f"{one.name} ({seen[one.name]})") if repeated else one)
    return tuple(named)


def _paired(one: Evaluation, base: Evaluation) -> PairedDifference:
    shares, others = one.shares, base.shares
    both = shares.keys() & others.keys()
    known = {key for key in both if one.texts.get(key) and base.texts.get(key)}
    different = {key for key in known if one.texts[key] != base.texts[key]}
    if both and both == different:
        raise ConfigError(
            f"expected {one.name!r} and {base.name!r} to have the same questions, got the same ids with different "
            "texts; evaluate both on one task and split"
        )
    same = {key: shares[key] for key in shares if key not in different}
    gap = paired_difference(same, others)
    flips = [Flip(key, others[key], share) for key, share in same.items() if key in others and others[key] != share]
    flips.sort(key=lambda flip: (-abs(flip.score - flip.baseline), flip.question))
    gaps = [share - others[key] for key, share in same.items() if key in others]
    return PairedDifference(gap, tuple(flips), float(np.std([*gaps, -1.0, 1.0])), len(different))
