"""Training of the feature-based baseline critic (`rewardmodels.model.feature_critic`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from mas_gym.errors import ConfigError, DataError, need
from mas_gym.tasks.base import question_digest
from rewardmodels.data.cards import LOADING, facts_table, markdown
from rewardmodels.data.dataset import check_continuations
from rewardmodels.model.critic_folder import write_whole
from rewardmodels.model.feature_critic import FEATURES, FILE, FeatureModel, features_of
from rewardmodels.model.training_questions import write_questions
from search.compare.critic_fitting import cross_fitted, fit_curve, probability_metrics
from search.store import RecordedState

STRENGTHS = (0.01, 0.1, 1.0, 10.0)
"""Candidate inverse strengths of the L2 penalty; cross-validation by question selects the best."""


def train_features(
    rows: Sequence[RecordedState],
    out: str | Path,
    kind: Literal["masprm", "orm"],
    log: Callable[[str], None] = lambda line: None,
    min_continuations: int | None = None,
) -> FeatureModel:
    """Fit the baseline critic and write its folder.

    Rows are weighted by their number of episodes. The penalty's strength and the metrics come from five-fold
    cross-validation by question. The saved model is fitted to all rows.

    Args:
        rows: From `search.store.recorded_states`.
        out: A new folder, or one with an earlier ``features.json``.
        kind: Kind of critic.
        log: Receives progress lines.
        min_continuations: As for `rewardmodels.data.dataset.collect`; for a process critic.

    Raises:
        ConfigError: The folder contains other files.
        DataError: There are fewer than two questions, or only right or only wrong episodes; or each target of a process
            critic is the outcome of a single sample.
        MissingDependencyError: scikit-learn is not installed.
    """
    need("sklearn", "a critic on features", "train")
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()) and not (folder / FILE).exists():
        raise ConfigError(f"expected an empty folder or one with {FILE}, got {folder}; choose another folder")
    if kind == "masprm":
        rows = _supported(rows, min_continuations)
    data = np.array([features_of(row.context) for row in rows])
    right = np.array([row.right for row in rows], dtype=np.float64)
    wrong = np.array([row.total for row in rows], dtype=np.float64) - right
    questions = [row.question for row in rows]
    if len(set(questions)) < 2 or not right.sum() or not wrong.sum():
        raise DataError(
            f"expected episodes with right and wrong answers from at least two questions, got {right.sum():.0f} right "
            f"and {wrong.sum():.0f} wrong (questions: {len(set(questions))}); record more episodes"
        )
    held_out = {one: cross_fitted(data, right, wrong, questions, strength=one)[1] for one in STRENGTHS}
    tried = {one: probability_metrics(found, right, wrong) for one, found in held_out.items()}
    strength = min(STRENGTHS, key=lambda one: tried[one]["log loss"])
    counts = {"questions": len(set(questions)), "states": len(rows), "right": int(right.sum()),
              "wrong": int(wrong.sum()), "penalty C": strength}  # fmt: skip
    model = FeatureModel(kind, fit_curve(data, right, wrong, strength=strength), counts, tried[strength])
    write_whole(folder / "README.md", _card(model))
    write_questions(folder, (question_digest(row.context.state.question) for row in rows))
    write_whole(folder / FILE, json.dumps(model.to_dict(), indent=2, ensure_ascii=True) + "\n")
    log("features are counts of numbers, lengths and agreement: this critic does not read the text")
    log(f"{len(rows):,} states of {len(set(questions)):,} questions; penalty C = {strength:g} by cross-validation")
    return model


def _supported(rows: Sequence[RecordedState], least: int | None) -> list[RecordedState]:
    """Return the terminal states, and the others with enough continuations."""
    inner = [row.context.state.acting != row.context.mas.sink for row in rows]
    if least is None:
        check_continuations(Counter(row.total for row, waits in zip(rows, inner, strict=True) if waits))
    return [row for row, waits in zip(rows, inner, strict=True) if not waits or row.total >= (least or 1)]


def _card(model: FeatureModel) -> str:
    states = "only terminal states" if model.kind == "orm" else "every state after a message"
    order = sorted(zip(FEATURES, model.weights, strict=True), key=lambda item: -abs(item[1]))
    weights = [f"| {name} | {weight:+.3f} |" for name, weight in order]
    return markdown(
        "# A critic on features, without a language model",
        f"Scores {states} in [-1, 1] by a logistic regression on features of the transcript and of the other "
        "samples. It does not read the text: it measures how messages are written and how often they agree, but it "
        "cannot recognize a wrong statement. It was fitted to recorded outcomes; metrics are for held-out questions, "
        "by five-fold cross-validation.",
        LOADING,
        facts_table({**model.data, **model.metrics}),
        "\n".join(["| feature | weight, per standard deviation |", "|---|---:|", *weights]),
    )
