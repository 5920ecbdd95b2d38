"""First errors in ProcessBench and AgentProcessBench: a feature-based critic, recorded judges, and their combination.

    python -m benchmarks.real.process_judges --store FILE

The runs with text are imported into the store, where ``mas-gym bench-critic`` evaluates the recorded judges.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import search
from benchmarks.paper.page import percent, span
from benchmarks.real.common import RealPage, Source, arguments, folds_by_kind, read_rows, run_page
from benchmarks.real.debate import arithmetic
from benchmarks.real.first_step import Floats, Run, classifiers, cross_validated, distribution, fit, folds
from benchmarks.real.paired import points
from search.compare.first_errors import FirstErrorFigures, Predictor, Scored, bench_critic, choose_threshold, f1_score
from search.compare.transcripts import LabeledTranscript
from search.results.intervals import bootstrap, mean_interval, paired_difference

STEPS = Source("processbench.jsonl.gz", "Qwen/ProcessBench", "Apache-2.0")
TEXTS = "agent_processbench_hotpotqa.jsonl.gz"
UNSTATED = "no license stated in its repository"
VERDICTS = Source("agent_processbench_verdicts.jsonl.gz", "RUCBM/AgentProcessBench", UNSTATED)
BOTH = Source("", f"{STEPS.origin} ({STEPS.license}) and {VERDICTS.origin}", UNSTATED)

SMALL = (
    *("Llama-3.1-8B-Instruct", "Llama-3.2-3B-Instruct", "Qwen3-4B", "Qwen3-4B-Instruct-2507"),
    *("Qwen3-4B-Thinking", "Qwen3-4B-Thinking-2507", "Qwen3-8B", "Qwen3-8B-Thinking"),
)
"""The recorded judges of at most 8 billion parameters."""

RIVAL = "GPT-5.2"
GOAL, GOAL_SHARE, COVERAGE = 0.583, 0.80, 0.40
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


def judged_features(run: Judged, judges: Sequence[str], parts: Sequence[str], who: bool) -> Floats:
    """Return the combination's features of each step, shape (steps, features).

    Args:
        run: The run.
        judges: The judges with verdicts as features; if empty, only the structure of the run is used.
        parts: The data sets.
        who: Whether the number of the run among the question's five runs is a feature; it identifies the run's system.
    """
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
        if who:
            row += [float(run.part == part and run.sample == sample) for part in parts for sample in range(5)]
            row += [float(run.sample == sample) for sample in range(5)]
        if judges:
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


def combined(runs: Sequence[Judged], judges: Sequence[str], who: bool) -> list[Run]:
    """Return the runs as a model sees them."""
    parts = sorted({run.part for run in runs})
    return [Run(run.question, judged_features(run, judges, parts, who), run.truth) for run in runs]


def counted(run: Judged, judges: Sequence[str], least: int) -> int:
    """Return the first step that at least this many judges call wrong."""
    wrong = sum((run.verdicts[judge] == -1).astype(int) for judge in judges)
    return _first(np.where(wrong >= least, -1.0, 1.0))


def best_count(runs: Sequence[Judged], judges: Sequence[str]) -> NDArray[np.int64]:
    """Return the step named by the best number of judges, which is chosen on the other folds."""
    shells = [Run(run.question, np.zeros((0, 0)), run.truth) for run in runs]
    part, truth = folds(shells, FOLDS, 0), np.array([run.truth for run in runs])
    named = {k: np.array([counted(run, judges, k) for run in runs]) for k in range(1, len(judges) + 1)}
    found = np.zeros(len(runs), dtype=np.int64)
    for fold in range(FOLDS):
        here = part == fold
        best = max(named, key=lambda k: (named[k] == truth)[~here].mean())
        found[here] = named[best][here]
    return found


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


def step_accuracy(runs: Sequence[Judged], judge: str) -> float:
    """Return the share of steps with people's label."""
    return fmean(
        float(given == label) for run in runs for given, label in zip(run.verdicts[judge], run.labels, strict=True)
    )


class Coverage(NamedTuple):
    """Accuracy among the most confident runs, with its interval."""

    share: float
    accuracy: float
    low: float
    high: float


def coverage(runs: Sequence[Judged], found: Sequence[Floats], share: float) -> Coverage:
    """Return the accuracy on the share of runs with the highest confidence, resampling questions for its interval."""
    right = np.array([int(np.argmax(one)) == run.truth for one, run in zip(found, runs, strict=True)])
    order = np.argsort([-one.max() for one in found], kind="stable")[: round(share * len(runs))]
    names = {name: place for place, name in enumerate(dict.fromkeys(run.question for run in runs))}
    sums = np.zeros((len(names), 2))
    for place in order:
        sums[names[runs[place].question]] += (right[place], 1)
    span_ = bootstrap(len(names), lambda counts: (counts @ sums[:, 0]) / np.maximum(1, counts @ sums[:, 1]))
    return Coverage(share, float(right[order].mean()), *span_)


# ------------------------------------------------------------- ProcessBench

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_WORDS = (
    "=",
    "\\",
    "therefore",
    "however",
    "wait",
    "assume",
    "since",
    "let ",
    "boxed",
    "approximately",
    "cannot",
    "must",
)


def step_features(row: Mapping[str, Any], parts: Sequence[str]) -> Floats:
    """Return the feature critic's features of each step of a solution, shape (steps, features)."""
    known, wrong_before, rows = set(_NUMBER.findall(row["problem"])), 0, []
    part = row["id"].rpartition("-")[0]
    for place, step in enumerate(row["steps"]):
        right, wrong = arithmetic(step)
        numbers = _NUMBER.findall(step)
        new = [number for number in numbers if number not in known]
        lowered = step.lower()
        found = [place, len(step), len(row["problem"]), right, wrong, wrong_before, len(numbers), len(new)]
        rows.append(
            [*map(float, found), *(float(lowered.count(word)) for word in _WORDS), *(float(part == p) for p in parts)]
        )
        known.update(numbers)
        wrong_before += wrong
    return np.array(rows)


def process_bench(rows: Sequence[Mapping[str, Any]], kind: str) -> dict[str, dict[str, float]]:
    """Return first-error accuracy, no-error accuracy and F1 by part, cross-validated by question.

    A threshold is chosen for F1 on one fold, a model trained on the folds but this and the measured one.
    """
    parts = sorted({row["id"].rpartition("-")[0] for row in rows})
    runs = [
        Run(row["problem"], step_features(row, parts), row["label"] if row["label"] >= 0 else len(row["steps"]))
        for row in rows
    ]
    shown = [LabeledTranscript(row["id"], row["problem"], tuple(row["steps"]), row["label"]) for row in rows]
    part, predicted = folds(runs, FOLDS, 0), np.zeros(len(rows), dtype=np.int64)
    for fold in range(FOLDS):
        dev = (fold + 1) % FOLDS
        model = fit(
            classifiers()[kind], [run for run, where in zip(runs, part, strict=True) if where not in (fold, dev)]
        )
        scored = {
            where: [_scored(model, runs[place], shown[place]) for place in np.flatnonzero(part == where)]
            for where in (fold, dev)
        }
        threshold, _ = choose_threshold(scored[dev], ("value",))
        predicted[part == fold] = Predictor(scored[fold]).predict(threshold)
    labels = np.array([row["label"] for row in rows])
    of = np.array([row["id"].rpartition("-")[0] for row in rows])
    found = {}
    for name in parts:
        hits, wrong = (predicted == labels)[of == name], (labels >= 0)[of == name]
        found[name] = {
            "solutions": float((of == name).sum()),
            "first error": float(hits[wrong].mean()),
            "no error": float(hits[~wrong].mean()),
            "F1": f1_score(predicted[of == name], labels[of == name]),
        }
    return found


def text_runs(data: Path, store: Path, judges: Sequence[str]) -> list[FirstErrorFigures]:
    """Return what `bench_critic` measures of recorded judges, and of the small ones' vote, on the runs with text."""
    search.import_transcripts(data / TEXTS, store, format="agent-processbench")
    specs = [f"recorded:{store}#judge={judge}" for judge in judges]
    vote = "vote:" + ",".join(spec for spec, judge in zip(specs, judges, strict=True) if judge in SMALL)
    return [bench_critic(spec, store) for spec in (*specs, vote)]


def _scored(model: Any, run: Run, transcript: LabeledTranscript) -> Scored:
    free = 1 - np.cumsum(distribution(model, run)[:-1])
    return Scored(transcript, tuple(map(float, free)))


# ------------------------------------------------------------- the page


def draw_figure(path: Path, curves: Mapping[str, Sequence[Coverage]], rival: float) -> None:
    """Write the figure of accuracy against coverage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    for place, (name, curve) in enumerate(curves.items()):
        shares = [100 * one.share for one in curve]
        axes.plot(shares, [100 * one.accuracy for one in curve], marker="o", markersize=3, label=name)
        if not place:
            low, high = ([100 * getattr(one, end) for one in curve] for end in ("low", "high"))
            axes.fill_between(shares, low, high, alpha=0.15)
    axes.axhline(100 * rival, color="grey", linestyle="--", linewidth=1, label=f"{RIVAL}, all runs")
    axes.plot([100 * COVERAGE], [100 * GOAL_SHARE], "r*", markersize=12, label="goal")
    axes.set_xlabel("runs on which a first error is stated (%), most confident first")
    axes.set_ylabel("first error named correctly (%)")
    axes.set_title("AgentProcessBench: combining eight judges of at most 8B, with abstention", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def build(data: Path, store: Path, show: Callable[[str], None]) -> RealPage:
    """Return the page."""
    solutions = read_rows(data, STEPS)
    runs = read_judged(read_rows(data, VERDICTS))
    judges = sorted(runs[0].verdicts)
    table = {judge: scores(runs, [run.first(judge) for run in runs]) for judge in judges}
    best = max(SMALL, key=lambda judge: table[judge].accuracy)
    kinds = tuple(classifiers())
    show("combining the small judges")
    main, chosen = cross_validated(combined(runs, SMALL, True), FOLDS, INNER, kinds, show)
    common = max(set(chosen), key=chosen.count)
    show(f"ablations, with a {common}")
    others = {
        "without the identity of the system": cross_validated(combined(runs, SMALL, False), FOLDS, INNER, (common,))[0],
        "no judge: data set, system, position": cross_validated(combined(runs, (), True), FOLDS, INNER, (common,))[0],
        "all 20 judges": cross_validated(combined(runs, judges, True), FOLDS, INNER, (common,))[0],
    }
    ways = {
        f"best small judge: {best}": table[best],
        RIVAL: table[RIVAL],
        "plurality of the small judges": scores(runs, [plurality(run, SMALL) for run in runs]),
        "at least k small judges, k chosen on other folds": scores(runs, best_count(runs, SMALL).tolist()),
        "combination of the small judges": scores(runs, _named(main)),
        **{f"combination, {name}": scores(runs, _named(found)) for name, found in others.items()},
    }
    named = fmean(any(run.first(judge) == run.truth for judge in SMALL) for run in runs)
    parts = sorted({run.part for run in runs})
    shares = [share / 100 for share in range(10, 101, 10)]
    curves = {
        "combination of the small judges": [coverage(runs, main, share) for share in shares],
        "without the identity of the system": [
            coverage(runs, others["without the identity of the system"], share) for share in shares
        ],
        "all 20 judges": [coverage(runs, others["all 20 judges"], share) for share in shares],
    }
    show("ProcessBench")
    bench = process_bench(solutions, "boosting")
    page = RealPage("process_judges", "ProcessBench and AgentProcessBench: who finds the first error", BOTH)
    page.heading("AgentProcessBench: combining recorded judges")
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
        "published comparison. Differences are paired over questions. "
        f"At least one small judge names the right step on {percent(named)}% of the runs."
    )
    page.heading("Abstention")
    page.picture(
        "process_judges.png", "First errors named correctly against coverage", partial(
            draw_figure, curves=curves, rival=table[RIVAL].accuracy
        )
    )  # fmt: skip
    page.table(
        ("coverage", *(f"{name}" for name in curves)),
        [
            (
                f"{100 * share:.0f}%",
                *(
                    f"{percent(curve[place].accuracy)} ({span(curve[place].low, curve[place].high)})"
                    for curve in curves.values()
                ),
            )
            for place, share in enumerate(shares)
        ],
    )
    page.heading("Recorded judges")
    page.table(
        ("judge", "at most 8B", "first error", "95% interval", "F1", "steps", *parts),
        [
            (
                judge,
                "yes" if judge in SMALL else "",
                percent(one.accuracy),
                span(*mean_interval([*one.hits.values()], 0, 1)),
                f"{one.f1:.1f}",
                percent(step_accuracy(runs, judge)),
                *(percent(one.by_part[part]) for part in parts),
            )
            for judge, one in sorted(table.items(), key=lambda pair: -pair[1].accuracy)
        ],
    )
    page.heading("The runs with text, with `mas-gym bench-critic`")
    texts = text_runs(data, store, (*SMALL, RIVAL))
    page.table(
        ("critic", "first error", "no error", "F1", "95% interval", "AUC", "RC"),
        [
            (
                judge,
                percent(one.first_error or 0.0),
                percent(one.no_error or 0.0),
                f"{one.f1 or 0.0:.1f}",
                "" if one.f1_interval is None else f"{one.f1_interval.low:.1f} to {one.f1_interval.high:.1f}",
                f"{one.auc:.3f}",
                one.cost.reward_calls,
            )
            for judge, one in zip((*SMALL, RIVAL, "vote of the small judges"), texts, strict=True)
        ],
    )
    page.text(
        "The runs are those of the HotpotQA part, imported from its log; the judges are `recorded:STORE#judge=NAME` "
        "and `vote:...`. "
        f"Thresholds are chosen on a fifth of the questions, and the critics are evaluated on {texts[0].transcripts} "
        f"runs, {texts[0].wrong} of them with an error. The vote is the mean verdict of the eight small judges."
    )
    page.heading("ProcessBench: a critic on features")
    page.table(
        ("part", "solutions", "first error", "no error", "F1"),
        [
            (name, int(one["solutions"]), percent(one["first error"]), percent(one["no error"]), f"{one['F1']:.1f}")
            for name, one in bench.items()
        ],
    )
    mean_f1 = fmean(one["F1"] for one in bench.values())
    page.text(
        f"Mean F1 {mean_f1:.1f}. The critic is the baseline without a language model: position, length, whether plain "
        "arithmetic holds, numbers that did not occur before, and counts of words. Zheng et al. (2024) report mean F1 "
        "of 31.5 for Math-Shepherd-PRM-7B, 56.5 for Qwen2.5-Math-7B-PRM800K and 61.9 for GPT-4o as a judge, on all "
        "3,400 solutions; these are quoted, not compared."
    )
    page.heading("How it was measured")
    page.text(_METHOD.format(kinds=folds_by_kind(["a forest" if name == "forest" else name for name in chosen])))
    at = next(one for one in curves["combination of the small judges"] if one.share == COVERAGE)
    page.finding = _finding(ways, table, best, at, named)
    return page


def _named(found: Sequence[Floats]) -> list[int]:
    return [int(np.argmax(one)) for one in found]


_METHOD = f"""
The combination is a model of the probability that a step is the first wrong one, given that no earlier step is wrong.
Its inputs are each small judge's verdicts on all steps and on the result, the step's position, the data set, and the
number of the run among a question's five runs, which identifies the system that wrote it. It is cross-validated by
question in {FOLDS} folds, and its kind is chosen within the training folds: {{kinds}}. The rows below the combination
in the table use the most frequent kind. The confidence is the largest probability. For ProcessBench, the model is
boosting, trained on three folds, with its threshold chosen on a fourth fold and evaluated on the fifth.
"""


def _finding(ways: Mapping[str, Scores], table: Mapping[str, Scores], best: str, at: Coverage, named: float) -> str:
    one = ways["combination of the small judges"]
    gain = paired_difference(one.hits, table[best].hits)
    rest = paired_difference(one.hits, table[RIVAL].hits)
    met = "met" if one.accuracy >= GOAL or at.accuracy >= GOAL_SHARE else "missed"
    every = ways["combination, all 20 judges"].accuracy
    return (
        "This page measures how often recorded LLM judges find the first error of a run, separately and combined. "
        "Eight judges with at most 8B parameters, combined by a model that is cross-validated by question, find the "
        f"first error in {percent(one.accuracy)}% of the runs of AgentProcessBench, {points(gain)} points against the "
        f"best of them, {best} ({percent(table[best].accuracy)}%), and {points(rest)} against {RIVAL} "
        f"({percent(table[RIVAL].accuracy)}%). "
        f"On the {100 * COVERAGE:.0f}% of the runs with the highest confidence, it is right in "
        f"{percent(at.accuracy)}% ({span(at.low, at.high)}%), so the goal of {percent(GOAL)}% overall or "
        f"{100 * GOAL_SHARE:.0f}% at this coverage is {met}. "
        f"The verdicts limit the accuracy: none of the eight judges finds the right step on {percent(1 - named)}% of "
        f"the runs, and the same model with all 20 judges reaches {percent(every)}%."
    )


def make(given: argparse.Namespace) -> Path:
    page = build(given.data, given.store, print)
    facts = [f"{STEPS.file}, {VERDICTS.file}; seed 0; intervals over questions"]
    return page.write(given.pages, "python -m benchmarks.real.process_judges --store judges.db", facts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("process_judges", "Find first errors with recorded judges.")
    parser.add_argument("--store", type=Path, default=Path("judges.db"), help="run store of the runs with text")
    run_page(make, parser.parse_args(argv))


if __name__ == "__main__":
    main()
