"""Fitting of critic combinations (`search.calibrated_critics`) to recorded outcomes or message labels."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mas_gym.critics import scores_of
from mas_gym.errors import ConfigError, DataError, need, shown
from mas_gym.internal.database import copy_database
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.suggestions import choice
from mas_gym.internal.whole_files import replace_files
from mas_gym.tasks.base import question_digest
from search.calibrated_critics import METHODS, CalibratedModel, Curve, Method, standardized
from search.compare.transcripts import NOBODY, read_labeled
from search.critic_registry import CALIBRATED as FILE
from search.critic_registry import CRITICS, is_plain_critic
from search.protocol import Critic, ScoringContext
from search.store import RecordedState

Target = Literal["outcomes", "labels"]
TARGETS: tuple[Target, ...] = ("outcomes", "labels")
FOLDS = 5
Array = NDArray[np.float64]


def label_examples(path: str | Path) -> Iterator[RecordedState]:
    """Yield every prefix of a store's labeled transcripts; a prefix is right if no message in it is labeled wrong."""
    for one in read_labeled(path):
        mas, states = one.states()
        for place, state in enumerate(states):
            right = one.label == NOBODY or place < one.label
            yield RecordedState(one.problem, ScoringContext(state, mas, None), right, 1)


def calibrate_critics(
    critics: Mapping[str, Critic],
    examples: Sequence[RecordedState],
    method: Method = "logistic",
    log: Callable[[str], None] = lambda line: None,
) -> CalibratedModel:
    """Fit a combination of critics to outcomes or labels of states.

    One curve is fitted to all questions, and one more without each of five folds of the questions. Metrics are
    computed on the held-out folds.

    Args:
        critics: The critics by spec; a saved combination loads its critics from these specs.
        examples: From `search.store.recorded_states` or `label_examples`; the states must be terminal if a critic is an
            outcome critic.
        method: As for `search.calibrated_critics.CalibratedModel`.
        log: Receives progress lines.

    Raises:
        ConfigError: There is no such method, or no critic.
        DataError: There are fewer than two questions, or all states are right, or all are wrong.
        MissingDependencyError: scikit-learn is not installed.
    """
    need("sklearn", "calibrating critics", "train")
    choice("method", method, METHODS)
    if not critics:
        raise ConfigError("expected at least one critic to calibrate, got none")
    columns = []
    for spec, critic in critics.items():
        scores = scores_of(critic, [one.context for one in examples])
        columns.append(scores.values)
        missing = sum(not math.isfinite(value) for value in scores.values)
        log(f"{spec}: {len(examples) - missing:,} of {len(examples):,} states have a value")
    values = np.array(columns, dtype=np.float64).T.reshape(len(examples), len(critics))
    right = np.array([one.right for one in examples], dtype=np.float64)
    wrong = np.array([one.total for one in examples], dtype=np.float64) - right
    keys = [question_digest(one.context.state.question) for one in examples]
    fold_of = folds_of(keys)
    known: NDArray[np.bool_] = np.any(np.isfinite(values), axis=1)
    if len(fold_of) < 2 or not right[known].sum() or not wrong[known].sum():
        raise DataError(
            "expected scored states with right and with wrong outcomes from at least two questions, got "
            f"right: {right[known].sum():.0f}, wrong: {wrong[known].sum():.0f}, questions: {len(fold_of)}; "
            "use more examples"
        )
    curves, found = cross_fitted(values, right, wrong, keys, method)
    metrics: JSONObject = {"combined": probability_metrics(found[known], right[known], wrong[known])}
    for spec, column in zip(critics, values.T, strict=True):
        there = np.isfinite(column)
        metrics[spec] = {"auc": _auc(column[there], right[there], wrong[there])}
    data = {"questions": len(fold_of), "states": len(examples), "right": int(right.sum()), "wrong": int(wrong.sum())}
    final = fit_curve(values, right, wrong, method)
    return CalibratedModel(method, tuple(critics), final, tuple(curves), fold_of, metrics, data)


def folds_of(questions: Iterable[str]) -> dict[str, int]:
    """Return the fold of each distinct question, by name."""
    return {name: place % FOLDS for place, name in enumerate(sorted(set(questions)))}


def cross_fitted(
    values: Array,
    right: Array,
    wrong: Array,
    questions: Sequence[str],
    method: Method = "logistic",
    strength: float = 1.0,
) -> tuple[list[Curve], Array]:
    """Return a curve per fold of the questions, fitted without the fold, and each row's held-out probability.

    The arguments are those of `fit_curve`; ``questions`` has the question of each row.
    """
    fold_of = folds_of(questions)
    folds = np.array([fold_of[name] for name in questions])
    others = [folds != fold for fold in range(min(FOLDS, len(fold_of)))]
    curves = [fit_curve(values[some], right[some], wrong[some], method, strength) for some in others]
    found = [curves[fold].probability(row) for fold, row in zip(folds, values.tolist(), strict=True)]
    return curves, np.array(found)


def fit_curve(values: Array, right: Array, wrong: Array, method: Method = "logistic", strength: float = 1.0) -> Curve:
    """Fit a curve to outcomes.

    Args:
        values: ``[N, m]`` values of ``m`` critics or features; NaN if missing. Rows without a value are left out.
        right: ``[N]`` number of right outcomes of each row.
        wrong: ``[N]`` number of wrong outcomes.
        method: As for `search.calibrated_critics.CalibratedModel`.
        strength: Logistic: the inverse strength of the L2 penalty.
    """
    chosen = np.any(np.isfinite(values), axis=1)
    values, right, wrong = values[chosen], right[chosen], wrong[chosen]
    if not right.sum() or not wrong.sum():
        # Only one class: its share, smoothed by one pseudo-state of each class.
        share = float((right.sum() + 1) / (right.sum() + wrong.sum() + 2))
        members = values.shape[1]
        if method == "isotonic":
            return Curve(at=(0.0,), level=(share,))
        return Curve((0.0,) * members, (1.0,) * members, (0.0,) * 2 * members, math.log(share / (1 - share)))
    if method == "isotonic":
        from sklearn.isotonic import IsotonicRegression

        model = IsotonicRegression(y_min=0.0, y_max=1.0)
        model.fit(np.nanmean(values, axis=1), right / (right + wrong), sample_weight=right + wrong)
        return Curve(at=_floats(model.X_thresholds_), level=_floats(model.y_thresholds_))
    from sklearn.linear_model import LogisticRegression

    mean = np.array([np.nanmean(column) if np.isfinite(column).any() else 0.0 for column in values.T])
    scale = np.array([np.nanstd(column) if np.isfinite(column).any() else 1.0 for column in values.T])
    scale[scale < 1e-9] = 1.0
    rows = np.array([standardized(row, mean.tolist(), scale.tolist()) for row in values.tolist()])
    model = LogisticRegression(C=strength, max_iter=1000)
    labels, weights = np.repeat([1, 0], len(rows)), np.concatenate([right, wrong])
    model.fit(np.concatenate([rows, rows]), labels, sample_weight=weights)
    return Curve(_floats(mean), _floats(scale), _floats(model.coef_[0]), float(model.intercept_[0]))


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _auc(values: Array, right: Array, wrong: Array) -> float:
    from sklearn.metrics import roc_auc_score

    if not right.sum() or not wrong.sum():
        return math.nan
    labels = np.repeat([1, 0], len(values))
    weights = np.concatenate([right, wrong])
    return float(roc_auc_score(labels, np.concatenate([values, values]), sample_weight=weights))


def probability_metrics(found: Array, right: Array, wrong: Array) -> dict[str, float]:
    """Return AUC, log loss and Brier score of probabilities, weighted by the numbers of outcomes."""
    weight = float(right.sum() + wrong.sum())
    sure = np.clip(found, 1e-6, 1 - 1e-6)
    loss = -float((right * np.log(sure) + wrong * np.log(1 - sure)).sum()) / weight
    brier = float((right * (1 - found) ** 2 + wrong * found**2).sum()) / weight
    return {"auc": _auc(found, right, wrong), "log loss": loss, "brier": brier}


def write_calibrated(model: CalibratedModel, out: str | Path) -> Path:
    """Write a combination and its members to a folder, for `load_critic`; an earlier combination is replaced.

    Folders of critics and recorded stores are copied into the folder, so it can be moved and published.

    Raises:
        ConfigError: The folder is not empty and contains no combination, or as for `check_members`.
    """
    check_members(model.members)
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()) and not (folder / FILE).exists():
        raise ConfigError(f"expected an empty folder or one with {FILE}, got {folder}; choose another folder")

    def write(fresh: Path) -> None:
        names: dict[Path, str] = {}
        members = tuple(_copied(member, fresh, names) for member in model.members)
        text = json.dumps(replace(model, members=members).to_dict(), indent=1)
        (fresh / FILE).write_text(text + "\n", encoding="utf-8")

    replace_files(folder, write, FILE)
    return folder


def check_members(specs: Iterable[str]) -> None:
    """Check that critics can be members of a combination in a file.

    Raises:
        ConfigError: A critic is neither a folder, a recorded store nor a registered critic without arguments.
    """
    for spec in specs:
        if not is_plain_critic(spec) and _source(spec) is None:
            raise ConfigError(
                f"{shown(spec)}: expected a folder of a critic, recorded:STORE or a registered critic without an "
                "argument, because a saved combination must not name code, addresses or policies; to combine others, "
                "use search.calibrated_critics.Calibrated in Python"
            )


def _source(spec: str) -> Path | None:
    if (folder := Path(spec).expanduser()).is_dir():
        return folder
    parsed = CRITICS.parse(spec)
    store = Path(parsed.argument).expanduser()
    return store if parsed.name == "recorded" and not parsed.file and store.is_file() else None


def _copied(spec: str, fresh: Path, names: dict[Path, str]) -> str:
    """Copy a member into a folder unless ``names`` has it; return the member's spec relative to the folder."""
    source = None if is_plain_critic(spec) else _source(spec)
    if source is None:
        return spec
    if source not in names:
        name = source.resolve().name
        taken = name in (FILE, *names.values()) or is_plain_critic(name)
        names[source] = f"{len(names)}-{name}" if taken else name
        if source.is_dir():
            shutil.copytree(
                source, fresh / names[source], ignore=shutil.ignore_patterns(".*", "checkpoint*", "adapter")
            )
        else:
            copy_database(source, fresh / names[source])
    name = names[source]
    return name if source.is_dir() else str(CRITICS.parse(spec)._replace(argument=name))
