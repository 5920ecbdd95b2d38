"""First errors in AgentProcessBench: recorded judges and their combination."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.paper.page import percent
from benchmarks.real.common import RealPage, Source, arguments, folds_by_kind, read_rows, run_page
from benchmarks.real.first_step import Floats, Run, classifiers, cross_validated
from benchmarks.real.paired import points
from search.compare.first_errors import f1_score
from search.results.intervals import paired_difference

UNSTATED = "no license stated in its repository"
VERDICTS = Source("agent_processbench_verdicts.jsonl.gz", "RUCBM/AgentProcessBench", UNSTATED)

SMALL = (
    *("Llama-3.1-8B-Instruct", "Llama-3.2-3B-Instruct", "Qwen3-4B", "Qwen3-4B-Instruct-2507"),
    *("Qwen3-4B-Thinking", "Qwen3-4B-Thinking-2507", "Qwen3-8B", "Qwen3-8B-Thinking"),
)
"""The recorded judges of at most 8 billion parameters."""

RIVAL = "GPT-5.2"
FOLDS, INNER = 5, 3


class Judged(NamedTuple):
    """One run of AgentProcessBench with the verdicts on it.

    Attributes:
        part: The data set.
        question: Names the question.
        sample: Which of the question's five runs.
        steps: Message index of each step, ascending.
        truth: Index of the first wrong step; the number of steps if there is none.
        labels: People's labels of the steps.
        verdicts: By judge, its labels of the steps; NaN where it gave none; shape (steps,).
        finals: By judge, its label of the result; 0 where it gave none.
    """

    part: str
    question: str
    sample: int
    steps: tuple[int, ...]
    truth: int
    labels: tuple[int, ...]
    verdicts: dict[str, Floats]
    finals: dict[str, float]

    def first(self, judge: str) -> int:
        """Return the first step that a judge calls wrong; the number of steps if it calls none so."""
        return _first(self.verdicts[judge])


def _first(labels: Floats) -> int:
    wrong = np.flatnonzero(labels == -1)
    return int(wrong[0]) if wrong.size else len(labels)


def read_judged(rows: Sequence[Mapping[str, Any]]) -> list[Judged]:
    """Return the runs with their verdicts, by data set and name."""
    groups: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        groups[row["dataset"], row["record_id"]][row["judge"].strip()] = row
    found = []
    for (part, _), by in sorted(groups.items()):
        human = by.pop("human")
        steps = tuple(sorted(map(int, human["step_labels"])))
        labels = tuple(human["step_labels"][str(step)] for step in steps)
        verdicts = {name: _labels(row, steps) for name, row in by.items()}
        finals = {name: float(row["final_label"] or 0) for name, row in by.items()}
        question = f"{part} {human['query_index']}"
        truth = _first(np.array(labels, dtype=float))
        found.append(Judged(part, question, human["sample_index"], steps, truth, labels, verdicts, finals))
    return found


def _labels(row: Mapping[str, Any], steps: Sequence[int]) -> Floats:
    given = row["step_labels"] or {}
    return np.array([given.get(str(step), np.nan) for step in steps], dtype=float)


# ------------------------------------------------------------- combining judges


def judged_features(run: Judged, judges: Sequence[str], parts: Sequence[str]) -> Floats:
    """Return the combination's features of each step, shape (steps, features)."""
    steps = len(run.steps)
    table = np.nan_to_num(np.array([run.verdicts[judge] for judge in judges]).reshape(-1, steps))
    wrong = table == -1
    firsts = np.array([run.first(judge) for judge in judges])
    finals = [run.finals[judge] for judge in judges]
    rows = []
    for place in range(steps):
        row = [float(place), place / steps, float(steps), float(run.steps[place]), float(run.steps[0])]
        row.append(float(run.steps[place] - (run.steps[place - 1] if place else 0)))
        row += [float(run.part == part) for part in parts]
        # The number of the run among the question's five runs identifies the run's system.
        row += [float(run.part == part and run.sample == sample) for part in parts for sample in range(5)]
        row += [float(run.sample == sample) for sample in range(5)]
        row += [*(firsts == place), *(firsts < place), *table[:, place], *finals]
        row += [
            (firsts == place).mean(),
            (firsts < place).mean(),
            wrong.mean(),
            fmean(final == -1 for final in finals),
        ]
        row += [wrong[:, place].mean(), (table[:, place] == 1).mean(), wrong[:, :place].sum() / (place or 1)]
        row += [wrong[:, place + 1 :].sum() / max(1, steps - place - 1), wrong[:, place:].any(1).mean()]
        row += [wrong[:, place - 1].mean() if place else 0, wrong[:, place + 1].mean() if place + 1 < steps else 0]
        rows.append([float(value) for value in row])
    return np.array(rows)


def combined(runs: Sequence[Judged], judges: Sequence[str]) -> list[Run]:
    """Return the runs as a model sees them."""
    parts = sorted({run.part for run in runs})
    return [Run(run.question, judged_features(run, judges, parts), run.truth) for run in runs]


def plurality(run: Judged, judges: Sequence[str]) -> int:
    """Return the step that most judges call the first wrong one; the earliest of equals."""
    votes = Counter(run.first(judge) for judge in judges)
    return min(votes, key=lambda step: (-votes[step], step))


# ------------------------------------------------------------- figures


class Scores(NamedTuple):
    """How often a way to name the first wrong step is right.

    Attributes:
        hits: By question, the share of its runs.
        accuracy: Mean over runs.
        f1: ProcessBench's F1, in percent.
        by_part: Accuracy by data set.
    """

    hits: dict[str, float]
    accuracy: float
    f1: float
    by_part: dict[str, float]


def scores(runs: Sequence[Judged], named: Sequence[int]) -> Scores:
    """Return the scores of predicted first wrong steps."""
    right = [int(step) == run.truth for run, step in zip(runs, named, strict=True)]
    by: dict[str, list[bool]] = defaultdict(list)
    parts: dict[str, list[bool]] = defaultdict(list)
    for run, hit in zip(runs, right, strict=True):
        by[run.question].append(hit)
        parts[run.part].append(hit)
    ends = np.array([len(run.steps) for run in runs])
    predicted, truth = np.array(named), np.array([run.truth for run in runs])
    f1 = f1_score(np.where(predicted == ends, -1, predicted), np.where(truth == ends, -1, truth))
    return Scores({name: fmean(hit) for name, hit in by.items()}, fmean(right), f1,
                  {name: fmean(hit) for name, hit in parts.items()})  # fmt: skip


# ------------------------------------------------------------- the page


def build(data: Path, show: Callable[[str], None]) -> RealPage:
    """Return the page."""
    runs = read_judged(read_rows(data, VERDICTS))
    judges = sorted(runs[0].verdicts)
    table = {judge: scores(runs, [run.first(judge) for run in runs]) for judge in judges}
    best = max(SMALL, key=lambda judge: table[judge].accuracy)
    show("combining the small judges")
    found, chosen = cross_validated(combined(runs, SMALL), FOLDS, INNER, tuple(classifiers()), show)
    combination = scores(runs, [int(np.argmax(one)) for one in found])
    ways = {
        f"best small judge: {best}": table[best],
        RIVAL: table[RIVAL],
        "plurality of the small judges": scores(runs, [plurality(run, SMALL) for run in runs]),
        "combination of the small judges": combination,
    }
    parts = sorted({run.part for run in runs})
    page = RealPage("process_judges", "AgentProcessBench: who finds the first error", VERDICTS)
    page.heading("Combining recorded judges")
    page.table(
        ("way to name the first error", "correct", "F1", f"against {best}", f"against {RIVAL}", *parts),
        [
            (
                name,
                percent(one.accuracy),
                f"{one.f1:.1f}",
                "" if one is table[best] else points(paired_difference(one.hits, table[best].hits)),
                "" if one is table[RIVAL] else points(paired_difference(one.hits, table[RIVAL].hits)),
                *(percent(one.by_part[part]) for part in parts),
            )
            for name, one in ways.items()
        ],
    )
    page.text(
        f"{len(runs)} runs of {len({run.question for run in runs})} questions. A prediction is correct if it is the "
        "first step that the annotators labeled as wrong, or if there is none and none is predicted, as in the "
        "published comparison. Differences are paired over questions."
    )
    page.heading("How it was measured")
    page.text(_METHOD.format(kinds=folds_by_kind(["a forest" if name == "forest" else name for name in chosen])))
    page.finding = (
        "This page measures how often recorded LLM judges find the first error of a run, separately and combined. "
        "Eight judges with at most 8B parameters, combined by a model that is cross-validated by question, find the "
        f"first error in {percent(combination.accuracy)}% of the runs of AgentProcessBench, "
        f"{points(paired_difference(combination.hits, table[best].hits))} points against the best of them, {best} "
        f"({percent(table[best].accuracy)}%), and {points(paired_difference(combination.hits, table[RIVAL].hits))} "
        f"against {RIVAL} ({percent(table[RIVAL].accuracy)}%)."
    )
    return page


_METHOD = f"""
The combination is a model of the probability that a step is the first wrong one, given that no earlier step is wrong.
Its inputs are each small judge's verdicts on all steps and on the result, the step's position, the data set, and the
number of the run among a question's five runs, which identifies the system that wrote it. It is cross-validated by
question in {FOLDS} folds, and its kind is chosen within the training folds: {{kinds}}.
"""


def make(given: argparse.Namespace) -> Path:
    page = build(given.data, print)
    facts = [f"{VERDICTS.file}; seed 0; intervals over questions"]
    return page.write(given.pages, "python -m benchmarks.real.process_judges", facts)


def main(argv: Sequence[str] | None = None) -> None:
    run_page(make, arguments("process_judges", "Find first errors with recorded judges.").parse_args(argv))


if __name__ == "__main__":
    main()
