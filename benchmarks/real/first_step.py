"""Models of the first wrong step of a transcript: a chance of an error at each step, given that none came before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SEED = 0


class Run(NamedTuple):
    """A transcript as a model sees it.

    Attributes:
        question: Names the question; runs of one question stay in one fold.
        features: The features of each step, shape (steps, features).
        first: Index of the first wrong step; the number of steps if there is none.
    """

    question: str
    features: Floats
    first: int


def classifiers() -> dict[str, Callable[[], Any]]:
    """Return the kinds of model: name to an untrained classifier of steps."""
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return {
        "logistic regression": lambda: make_pipeline(StandardScaler(), LogisticRegression(C=0.03, max_iter=300)),
        "boosting": lambda: HistGradientBoostingClassifier(
            max_depth=4, learning_rate=0.04, max_iter=120, l2_regularization=3.0, random_state=SEED
        ),
        "forest": lambda: RandomForestClassifier(150, min_samples_leaf=5, max_features=0.3, random_state=SEED),
    }


def fit(make: Callable[[], Any], runs: Sequence[Run]) -> Any:
    """Train on the steps up to the first wrong one of each run."""
    table = np.vstack([one.features[: one.first + 1] for one in runs])
    wrong = [place == one.first for one in runs for place in range(min(one.first + 1, len(one.features)))]
    return make().fit(table, np.array(wrong))


def distribution(model: Any, run: Run) -> Floats:
    """Return the probability of each step to be the first wrong one and, last, that none is; shape (steps + 1,)."""
    chance = model.predict_proba(run.features)[:, 1]
    free = np.concatenate([[1.0], np.cumprod(1 - chance)])
    return np.append(free[:-1] * chance, free[-1])


def folds(runs: Sequence[Run], count: int, seed: int) -> NDArray[np.int64]:
    """Return the fold of each run, by question."""
    names = sorted({one.question for one in runs})
    order = np.random.default_rng(seed).permutation(len(names)) % count
    place = dict(zip(names, order.tolist(), strict=True))
    return np.array([place[one.question] for one in runs])


def accuracy(found: Sequence[Floats], runs: Sequence[Run]) -> float:
    """Return the share of runs whose most probable first wrong step is right."""
    return float(np.mean([int(np.argmax(one)) == run.first for one, run in zip(found, runs, strict=True)]))


def cross_validated(
    runs: Sequence[Run], count: int, inner: int, kinds: Sequence[str], show: Callable[[str], None] = lambda line: None
) -> tuple[list[Floats], list[str]]:
    """Return the distribution of each run by a model that has not seen its question, and each fold's kind of model.

    Args:
        runs: The runs.
        count: Folds.
        inner: Folds within the training part, by which a kind of model is chosen.
        kinds: The kinds to choose from; a single kind is used without a choice.
        show: Is called with a line per fold.
    """
    part, makers = folds(runs, count, SEED), classifiers()
    found, chosen = [np.zeros(0)] * len(runs), []
    for fold in range(count):
        train = [one for one, where in zip(runs, part, strict=True) if where != fold]
        name = kinds[0] if len(kinds) == 1 else _best(train, inner, {kind: makers[kind] for kind in kinds})
        model = fit(makers[name], train)
        for place in np.flatnonzero(part == fold):
            found[place] = distribution(model, runs[place])
        chosen.append(name)
        show(f"fold {fold + 1} of {count}: {name}")
    return found, chosen


def _best(runs: Sequence[Run], inner: int, makers: dict[str, Callable[[], Any]]) -> str:
    part = folds(runs, inner, SEED + 1)
    reached = {}
    for name, make in makers.items():
        hits = []
        for fold in range(inner):
            model = fit(make, [one for one, where in zip(runs, part, strict=True) if where != fold])
            test = [one for one, where in zip(runs, part, strict=True) if where == fold]
            hits.append(accuracy([distribution(model, one) for one in test], test) * len(test))
        reached[name] = sum(hits)
    return max(reached, key=reached.__getitem__)
