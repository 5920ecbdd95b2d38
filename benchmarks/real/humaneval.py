"""Selection among 100 programs by CodeGen-16B with the tests that CodeGen-16B wrote, on HumanEval.

    python -m benchmarks.real.humaneval --cache FILE

Programs run in the sandbox; ``--cache`` names the file with their results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper.page import percent, span
from benchmarks.real.choosing import CODET, RULES, Draw, Floats, Samples, features, right
from benchmarks.real.common import RealPage, Source, arguments, folds_by_kind, read_rows, run_page
from benchmarks.real.execution import CASE_SECONDS, TESTS_PER_SAMPLE, TRUTH_SECONDS, execute, read_problem
from benchmarks.real.paired import folds, paired, points
from mas_gym.tasks.grading.sandbox import Sandbox
from search.results.intervals import mean_interval

SOURCE = Source(
    "humaneval_codegen.jsonl.gz", "microsoft/CodeT, samples of CodeGen-16B on openai/human-eval", "MIT; HumanEval: MIT"
)
CRITIC = "outcome critic"
SIZES = (10, 20, 33, 50, 100)
THIRD = 33
DRAWS = 20
FOLDS, INNER = 5, 3
SEED = 0

Table = dict[int, Floats]
"""By number of samples, the probability of a right choice for each problem, shape (problems,)."""


class Point(NamedTuple):
    """One draw with the scores of every rule, by name."""

    draw: Draw
    scores: dict[str, Floats]


def drawn(samples: Samples, rng: np.random.Generator) -> list[dict[int, Draw]]:
    """Return, for each of `DRAWS` orders of the programs and of the test sets, its beginnings of all sizes."""
    orders = [(rng.permutation(samples.size), rng.permutation(samples.size)) for _ in range(DRAWS)]
    return [{size: samples.draw(programs[:size], sets[:size]) for size in SIZES} for programs, sets in orders]


def candidates() -> dict[str, Callable[[], Any]]:
    """Return the critics to choose from: name to an untrained classifier."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    boosting = partial(HistGradientBoostingClassifier, learning_rate=0.05, l2_regularization=5.0, random_state=SEED)
    return {
        "logistic regression": lambda: make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=300)),
        "boosting of depth 2": lambda: boosting(max_depth=2, max_iter=100),
        "boosting of depth 3": lambda: boosting(max_depth=3, max_iter=80),
    }


Examples = list[tuple[Floats, NDArray[np.bool_]]]


def examples(draws: Sequence[Mapping[int, Draw]]) -> Examples:
    """Return features and truth of a problem's programs, from draws of several sizes."""
    chosen = [draws[place % len(draws)][size] for place, size in enumerate((10, 20, 33, 33, 50, 100))]
    return [(features(draw), draw.correct) for draw in chosen]


def fitted(make: Callable[[], Any], known: Sequence[Examples]) -> Any:
    pairs = [pair for one in known for pair in one]
    return make().fit(np.vstack([table for table, _ in pairs]), np.concatenate([truth for _, truth in pairs]))


def reached(model: Any, known: Examples) -> float:
    """Return how often the critic's choice is right on a problem's examples."""
    return fmean(_right(truth, model.predict_proba(table)[:, 1]) for table, truth in known)


def _right(truth: NDArray[np.bool_], score: Floats) -> float:
    return float(truth[score >= score.max() - 1e-9].mean())


def train(known: Sequence[Examples]) -> tuple[str, Any]:
    """Choose a critic by cross-validation over these problems, and train it on all of them."""
    part, makers = folds(len(known), INNER, SEED + 1), candidates()
    means = {}
    for name, make in makers.items():
        found = []
        for fold in range(INNER):
            model = fitted(make, [one for one, where in zip(known, part, strict=True) if where != fold])
            found += [reached(model, one) for one, where in zip(known, part, strict=True) if where == fold]
        means[name] = fmean(found)
    best = max(means, key=means.__getitem__)
    return best, fitted(makers[best], known)


def scored(problems: Sequence[Samples], show: Callable[[str], None]) -> tuple[list[list[dict[int, Point]]], list[str]]:
    """Return every rule's scores of every problem, draw and size, and the critic chosen in each fold."""
    rng = np.random.default_rng(SEED)
    draws = [drawn(one, rng) for one in problems]
    known = [examples(one) for one in draws]
    part, chosen = folds(len(problems), FOLDS, SEED), []
    found: list[list[dict[int, Point]]] = [[] for _ in problems]
    for fold in range(FOLDS):
        name, model = train([one for one, where in zip(known, part, strict=True) if where != fold])
        chosen.append(name)
        show(f"fold {fold + 1} of {FOLDS}: {name}")
        for place in np.flatnonzero(part == fold):
            found[place] = [{size: _point(draw, model) for size, draw in one.items()} for one in draws[place]]
    return found, chosen


def _point(draw: Draw, model: Any) -> Point:
    scores = {name: rule(draw) for name, rule in RULES.items()}
    return Point(draw, scores | {CRITIC: model.predict_proba(features(draw))[:, 1]})


def accuracy(found: Sequence[Sequence[Mapping[int, Point]]], name: str) -> Table:
    """Return how often a rule is right at each size, by problem."""
    return {
        size: np.array([fmean(right(one[size].draw, one[size].scores[name]) for one in draws) for draws in found])
        for size in SIZES
    }


def against(one: Floats, other: Floats) -> str:
    """Return the difference in points with its paired interval."""
    return points(paired(one, other))


def build(data: Path, cache: Path, sandbox: Sandbox, jobs: int, show: Callable[[str], None]) -> RealPage:
    """Run all programs that are not in the cache, and return the page."""
    problems = [read_problem(row) for row in read_rows(data, SOURCE)]
    results = execute(problems, cache, sandbox=sandbox, jobs=jobs)
    samples = [Samples(problem, results[problem.id]) for problem in problems]
    found, chosen = scored(samples, show)
    tables = {name: accuracy(found, name) for name in (*RULES, CRITIC)}
    plain, critic, codet = tables["at random"][SIZES[-1]], tables[CRITIC], tables[CODET]
    level = paired(critic[THIRD], codet[SIZES[-1]])
    better = paired(critic[THIRD], codet[THIRD])
    above = paired(critic[SIZES[-1]], codet[SIZES[-1]])
    page = RealPage("humaneval", "HumanEval: choosing among CodeGen-16B's programs", SOURCE)
    page.finding = _finding(plain, codet, critic, level, better, above)
    page.heading("All samples: 100 programs and 100 generated test sets")
    page.table(
        ("choice", "correct", "95% interval", "against CodeT, paired"),
        [
            (
                name,
                percent(table[100].mean()),
                span(*mean_interval(table[100], 0, 1)),
                "" if name == CODET else against(table[100], codet[100]),
            )
            for name, table in tables.items()
        ],
    )
    page.heading("Fewer samples")
    page.table(
        ("difference", "points, 95% interval over problems"),
        [
            (f"{CRITIC}, {THIRD} samples, against CodeT, 100 samples", against(critic[THIRD], codet[100])),
            (f"{CRITIC} against CodeT, {THIRD} samples each", against(critic[THIRD], codet[THIRD])),
            (f"{CRITIC} against CodeT, 100 samples each", against(critic[100], codet[100])),
        ],
    )
    page.heading("How it was measured")
    page.text(_METHOD.format(critics=folds_by_kind(chosen)))
    return page


_METHOD = f"""
Programs and tests are truncated as in CodeT, and only the first {TESTS_PER_SAMPLE} tests of a set are used. A generated
test has a limit of {CASE_SECONDS} seconds, as in CodeT, but in CPU time; the limit of the hidden tests is
{TRUTH_SECONDS:g} seconds. CodeT's rule is that of its published code: consensus sets of programs that pass the same
tests, ranked by the number of tests times the square root of the number of programs; a tie counts as the mean over the
tied programs. "Agreement" compares the values that programs return for the calls in the generated tests. `k` samples
are `k` programs and `k` test sets, drawn without replacement; a figure is the mean over {DRAWS} draws, which are the
same for every rule.

The inputs of the outcome critic are the scores of all rules, the programs' lengths and a few word counts, and it is
trained only on outcomes. It is cross-validated by problem in {FOLDS} folds, and its kind is chosen within the training
folds: {{critics}}.
"""


def _finding(plain: Floats, codet: Table, critic: Table, level: Any, better: Any, above: Any) -> str:
    goal = "level with" if not level.significant else "above" if level.mean > 0 else "below"
    tie = "not significantly different from CodeT's rule"
    same = "above CodeT's rule" if better.significant and better.mean > 0 else tie
    more = "above CodeT's rule" if above.significant and above.mean > 0 else tie
    return (
        "This page compares rules that choose one of CodeGen-16B's recorded programs for problems of HumanEval. "
        f"A random program is correct in {percent(plain.mean())}% of cases, and CodeT's rule raises this "
        f"to {percent(codet[100].mean())}% with 100 programs and 100 generated test sets. "
        f"An outcome critic on features of the executions of the programs on the tests reaches "
        f"{percent(critic[THIRD].mean())}% with {THIRD} of each, which is {goal} CodeT's "
        f"{percent(codet[100].mean())}% with 100 (difference "
        f"{100 * level.mean:+.1f} points, {100 * level.low:+.1f} to {100 * level.high:+.1f}). "
        f"With {THIRD} samples for both, the critic is {same} ({100 * better.mean:+.1f} points, "
        f"{100 * better.low:+.1f} to {100 * better.high:+.1f}); with 100 for both, the critic is {more} "
        f"({100 * above.mean:+.1f} points, {100 * above.low:+.1f} to {100 * above.high:+.1f})."
    )


def make(given: argparse.Namespace) -> Path:
    page = build(given.data, given.cache, given.sandbox, given.jobs, print)
    facts = [f"{SOURCE.file}; 100 programs and 100 generated test sets per problem; seed {SEED}"]
    return page.write(given.pages, "python -m benchmarks.real.humaneval --cache humaneval.jsonl", facts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("humaneval", "Choose among CodeGen-16B's programs on HumanEval.")
    parser.add_argument("--cache", type=Path, default=Path("humaneval.jsonl"), help="results of the programs")
    parser.add_argument("--sandbox", choices=get_args(Sandbox), default="bubblewrap", help="isolation of the programs")
    parser.add_argument("--jobs", type=int, default=2, help="programs that run at once")
    run_page(make, parser.parse_args(argv))


if __name__ == "__main__":
    main()
