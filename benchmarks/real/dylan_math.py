"""Selection among the answers of debating GPT-3.5 agents on MATH, with a critic trained only on outcomes.

    python -m benchmarks.real.dylan_math --store FILE

The recording is imported into the store with `benchmarks.real.dylan_reader` and graded there.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import search
from benchmarks.paper.page import Page, percent, span
from benchmarks.real.common import Source, arguments, folds_by_kind, read_rows, run_page, write_recorded
from benchmarks.real.debate import Debate, Floats, Said, features
from search.results.intervals import Interval, bootstrap, paired_difference

SOURCE = Source("dylan_math.jsonl.gz", "SALT-NLP/DyLAN, debates of gpt-3.5-turbo on hendrycks/math", "MIT; MATH: MIT")
READER = str(Path(__file__).with_name("dylan_reader.py")) + ":read"
FOLDS, INNER = 5, 3
SEED = 0


def read_debates(data: Path, store: Path, show: Callable[[str], None]) -> list[Debate]:
    """Import the recording unless the store contains it, and return its graded debates."""
    rows = {row["id"]: row for row in read_rows(data, SOURCE)}

    def listen(step: str, done: int, total: int) -> None:
        if step == "write":
            show(f"{done:,} of {total:,} problems imported")

    search.import_transcripts(data / SOURCE.file, store, format=READER, kind="expression", listen=listen)
    found: dict[str, list[Said]] = {}
    with search.open_store(store) as opened:
        for run in opened.runs():
            for problem, plan in opened.searches(run.run):
                found[problem.id] = sorted(
                    Said(*map(int, sample["id"].split()), one.state.text, one.answer, bool(one.correct))
                    for one, sample in zip(plan.candidates, problem.metadata["samples"], strict=True)
                )
    return [
        Debate(name, row["question"], row["level"], row["subject"], tuple(found[name])) for name, row in rows.items()
    ]


def candidates() -> dict[str, Callable[[], Any]]:
    """Return the classifiers of the critic: name to an untrained one."""
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return {
        "logistic regression": lambda: make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=300)),
        "boosting": lambda: HistGradientBoostingClassifier(
            max_depth=4, learning_rate=0.05, max_iter=200, l2_regularization=3.0, random_state=SEED
        ),
        "forest": lambda: RandomForestClassifier(200, min_samples_leaf=5, max_features=0.2, random_state=SEED),
    }


MEAN = "mean of the three"
SINGLE = "single agent, last round (mean over agents)"


class Table(NamedTuple):
    """The distinct answers of one problem, as the critic sees them.

    Attributes:
        features: Shape (answers, features).
        correct: Whether each is right, shape (answers,).
    """

    features: Floats
    correct: NDArray[np.bool_]


Values = list[Floats]
"""For each problem, a value of each of its answers."""


def values(train: Sequence[Table], test: Sequence[Table]) -> dict[str, Values]:
    """Return each critic's values of the test problems' answers, trained on other problems."""
    known, truth = np.vstack([one.features for one in train]), np.concatenate([one.correct for one in train])
    ends = np.cumsum([len(one.correct) for one in test])[:-1]
    asked = np.vstack([one.features for one in test])
    flat = {name: make().fit(known, truth).predict_proba(asked)[:, 1] for name, make in candidates().items()}
    flat[MEAN] = np.mean([*flat.values()], axis=0)
    return {name: np.split(found, ends) for name, found in flat.items()}


def chosen_right(tables: Sequence[Table], found: Values) -> list[bool]:
    """Return whether the answer with the highest value is right; False without answers."""
    pairs = zip(tables, found, strict=True)
    return [bool(len(value) and table.correct[int(np.argmax(value))]) for table, value in pairs]


def cross_validated(tables: Sequence[Table], show: Callable[[str], None]) -> tuple[Values, list[str]]:
    """Return the critic's values of each problem's answers, and the critic chosen within each fold's training part."""
    part, found, chosen = folds(len(tables), FOLDS, SEED), [np.zeros(0)] * len(tables), []
    for fold in range(FOLDS):
        train, test = (
            [one for one, where in zip(tables, part, strict=True) if (where == fold) == held] for held in (0, 1)
        )
        inner, hits = folds(len(train), INNER, SEED + 1), Counter()
        for left_out in range(INNER):
            seen = [one for one, where in zip(train, inner, strict=True) if where != left_out]
            rest = [one for one, where in zip(train, inner, strict=True) if where == left_out]
            hits.update({name: sum(chosen_right(rest, value)) for name, value in values(seen, rest).items()})
        name = max(hits, key=hits.__getitem__)
        chosen.append(name)
        for place, value in zip(np.flatnonzero(part == fold), values(train, test)[name], strict=True):
            found[place] = value
        show(f"fold {fold + 1} of {FOLDS}: {name}")
    return found, chosen


def majority(debate: Debate, said: Sequence[Said]) -> bool:
    """Return whether the most frequent answer is right; the one that came first wins a tie."""
    votes = debate.votes(said)
    return bool(votes) and debate.correct(max(votes, key=votes.__getitem__))


def gap_share(critic: Floats, vote: Floats, best: Floats) -> tuple[float, Interval]:
    """Return the share of the gap between vote and best that the critic closes, with a bootstrap interval."""
    share = float((critic - vote).sum() / (best - vote).sum())
    return share, bootstrap(len(critic), lambda counts: counts @ (critic - vote) / (counts @ (best - vote)))


def difference(one: Floats, other: Floats) -> str:
    """Return the difference in points with its paired interval."""
    sides = ({str(place): float(value) for place, value in enumerate(side)} for side in (one, other))
    gap = paired_difference(*sides)
    return f"{100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"


def folds(number: int, count: int, seed: int) -> NDArray[np.int64]:
    """Return the fold of each problem; folds are of equal size up to one."""
    return np.random.default_rng(seed).permutation(number) % count


def build(data: Path, store: Path, show: Callable[[str], None]) -> Page:
    """Import, cross-validate and return the page."""
    debates = read_debates(data, store, show)
    subjects = sorted({one.subject for one in debates})
    tables = [Table(features(one, subjects), np.array([one.correct(a) for a in one.answers], bool)) for one in debates]
    width = max(table.features.shape[-1] for table in tables)
    tables = [Table(table.features.reshape(-1, width), table.correct) for table in tables]
    found, chosen = cross_validated(tables, show)

    def share(right: Callable[[Debate], float]) -> Floats:
        return np.array([float(right(one)) for one in debates])

    critic = np.array(chosen_right(tables, found), dtype=float)
    vote = share(lambda one: majority(one, one.last))
    best = share(lambda one: any(said.correct for said in one.said))
    rows = {
        "single agent, first round (mean over agents)": share(lambda one: fmean(said.correct for said in one.first)),
        SINGLE: share(lambda one: fmean(said.correct for said in one.last)),
        "majority, first round": share(lambda one: majority(one, one.first)),
        "majority, last round": vote,
        "majority, all messages": share(lambda one: majority(one, one.said)),
        "outcome critic, cross-validated": critic,
        "any agent, first round": share(lambda one: any(said.correct for said in one.first)),
        "any agent, last round": share(lambda one: any(said.correct for said in one.last)),
        "any message": best,
    }
    closed, interval = gap_share(critic, vote, best)
    page = Page("dylan_math", "MATH: choosing among the answers of debating GPT-3.5 agents")
    page.text("## Who is right")
    page.table(
        ("choice", "correct", "against the majority of the last round, paired"),
        [
            (name, percent(right.mean()), "" if right is vote else difference(right, vote))
            for name, right in rows.items()
        ],
    )
    page.text(
        f"Against the majority of all messages, the critic gains {difference(critic, rows['majority, all messages'])} "
        "points."
    )
    page.text("## How it was measured")
    kinds = [{"forest": "a forest", MEAN: "the mean of the three kinds"}.get(name, name) for name in chosen]
    page.text(_METHOD.format(critics=folds_by_kind(kinds)))
    page.asks = (
        "This page compares ways to choose an answer from recorded debates of GPT-3.5 agents on MATH problems. In the "
        f"last round, a single agent solves {percent(rows[SINGLE].mean())}% of the problems, and the majority solves "
        f"{percent(vote.mean())}%. For {percent(best.mean())}%, at least one message is right. "
        f"A critic trained only on outcomes selects the right answer for {percent(critic.mean())}%, "
        f"{difference(critic, vote)} points against the majority. This closes {percent(closed)}% of the gap "
        f"between the majority and any right message ({span(*interval)}%)."
    )
    return page


_METHOD = f"""
Each message is imported as one sample of its problem and graded by the toolkit's strict grading of expressions. The
recording lacks one of the two backslashes at the ends of matrix rows in reference answers; the importer restores it.
Candidates are the distinct answers of a problem's messages, in all rounds. The critic's inputs are votes by agent and
round, the agents that kept or changed an answer, the form of the answer and its similarity to the others, message
length, word counts, whether simple arithmetic in the messages is correct, the level, the subject and words of the
question. The reference answer is not an input. Critics are cross-validated by problem in {FOLDS} folds, and the kind of
critic is chosen within the training folds: {{critics}}.
"""


def make(given: argparse.Namespace) -> Path:
    page = build(given.data, given.store, print)
    facts = [f"{SOURCE.file}; seed {SEED}; intervals over problems"]
    return write_recorded(page, SOURCE, given.pages, "python -m benchmarks.real.dylan_math --store math.db", facts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("dylan_math", "Choose among the answers of debating GPT-3.5 agents on MATH.")
    parser.add_argument("--store", type=Path, default=Path("dylan_math.db"), help="run store of the imported messages")
    run_page(make, parser.parse_args(argv))


if __name__ == "__main__":
    main()
