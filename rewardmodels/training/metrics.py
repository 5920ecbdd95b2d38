"""Metrics of a critic on held-out problems: ranking, discrimination, loss and calibration, by depth and agent.

All functions are pure and take numpy arrays. Intervals are 95% bootstrap intervals over
problems, the unit that is held out, with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mas_gym.internal.json_types import JSONObject
from rewardmodels.data.dataset import Example
from search.compare.first_errors import auc
from search.compare.reliability import ScoredState, gap, value_bins
from search.results.intervals import bootstrap

Floats = NDArray[np.float64]

RESAMPLES = 1000


def measured(kind: str, examples: Sequence[Example], better: Floats, worse: Floats) -> JSONObject:
    """Measure a critic on held-out examples.

    Args:
        kind: ``"masprm"`` or ``"orm"``.
        examples: Pairs, labeled states or outcomes.
        better: Logits of the pairs' better states, or of the labeled states.
        worse: Logits of the pairs' worse states; empty for labeled states and outcomes.
    """
    if len(worse):
        return pair_metrics(examples, better, worse)
    return (outcome_metrics if kind == "orm" else point_metrics)(examples, better)


def pair_metrics(examples: Sequence[Example], better: Floats, worse: Floats) -> JSONObject:
    """Measure a critic on preference pairs (paper: average margin, pairwise accuracy, AUC, BT loss).

    Args:
        examples: The pairs.
        better: Logits of the better siblings.
        worse: Logits of the worse siblings.

    Returns:
        ``margin``, ``accuracy``, ``auc`` and ``bt_loss`` on the tanh scores, the accuracy's interval, and the accuracy
        by depth and by agent. A tie counts half.
    """
    high, low = np.tanh(better), np.tanh(worse)
    right = np.where(better == worse, 0.5, (better > worse).astype(float))
    scores = np.concatenate([high, low])
    labels = np.concatenate([np.ones(len(high)), np.zeros(len(low))])
    return {
        "pairs": len(examples),
        "margin": float((high - low).mean()),
        "accuracy": float(right.mean()),
        "accuracy_interval": interval(examples, lambda i: float(right[i].mean())),
        "auc": auc(scores, labels),
        "bt_loss": float(np.logaddexp(0, low - high).mean()),
        "accuracy_by_depth": _grouped([e.depth for e in examples], right),
        "accuracy_by_agent": _grouped([e.agent for e in examples], right),
    }


def outcome_metrics(examples: Sequence[Example], logits: Floats) -> JSONObject:
    """Measure an outcome critic on terminal states.

    Returns:
        ``auc`` with its interval, ``accuracy`` at a threshold of 0, ``bce_loss`` and ``mse``, and the calibration.
    """
    target = np.array([e.chosen_target for e in examples])
    scores, labels = np.tanh(logits), target > 0
    return {
        "states": len(examples),
        "auc": auc(scores, labels),
        "auc_interval": interval(examples, lambda i: auc(scores[i], labels[i])),
        "accuracy": float(((scores > 0) == labels).mean()),
        "bce_loss": float(np.logaddexp(0, np.where(labels, -2, 2) * logits).mean()),
        "mse": float(((scores - target) ** 2).mean()),
        "calibration": calibration_by_depth(examples, logits),
    }


def point_metrics(examples: Sequence[Example], logits: Floats) -> JSONObject:
    """Measure a process critic on labeled states.

    Returns:
        ``mse``, ``correlation`` with the targets, and the calibration.
    """
    target, scores = np.array([e.chosen_target for e in examples]), np.tanh(logits)
    steady = len(examples) < 2 or scores.std() == 0 or target.std() == 0
    return {
        "states": len(examples),
        "mse": float(((scores - target) ** 2).mean()),
        "correlation": None if steady else float(np.corrcoef(scores, target)[0, 1]),
        "calibration": calibration_by_depth(examples, logits),
    }


def calibration_by_depth(examples: Sequence[Example], logits: Floats) -> dict[str, dict[str, float]]:
    """Compare scores with targets at each depth.

    Returns:
        For each depth, the number of states, the mean score, the mean target, and ``gap``. The gap is the absolute
        difference between the mean score and the mean target in a score bin, averaged over ten bins of nearly equal
        numbers of states.
    """
    scores = np.tanh(logits).tolist()
    states = [ScoredState(e.depth, v, (e.chosen_target + 1) / 2) for e, v in zip(examples, scores, strict=True)]
    return {
        str(depth): {
            "states": sum(one.states for one in bins),
            "score": float(np.average([one.value for one in bins], weights=[one.states for one in bins])),
            "target": float(np.average([2 * one.right - 1 for one in bins], weights=[one.states for one in bins])),
            "gap": gap(bins),
        }
        for depth, bins in value_bins(states).items()
    }


def interval(examples: Sequence[Example], statistic: Callable[[NDArray[np.intp]], float]) -> list[float]:
    """Return the 95% bootstrap interval of a statistic, a function of example indices; problems are resampled."""
    owner = problem_numbers(examples)
    order = np.argsort(owner, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(owner))[:-1])
    places = np.arange(len(groups))

    def of_draws(counts: NDArray[np.int64]) -> list[float]:
        return [statistic(np.concatenate([groups[i] for i in np.repeat(places, drawn)])) for drawn in counts]

    return list(bootstrap(len(groups), of_draws, resamples=RESAMPLES))


def problem_numbers(examples: Sequence[Example]) -> NDArray[np.int64]:
    """Return a number for each example's problem, counted from 0 in the order of the examples."""
    names = {name: i for i, name in enumerate(dict.fromkeys((e.task, e.problem_id) for e in examples))}
    return np.array([names[e.task, e.problem_id] for e in examples])


def _grouped(keys: Sequence[int | str], values: Floats) -> dict[str, dict[str, float]]:
    names = np.array([str(key) for key in keys])
    ordered = dict.fromkeys(str(key) for key in sorted(keys, key=lambda k: k if isinstance(k, int) else 0))
    return {
        name: {"mean": float(values[names == name].mean()), "count": int((names == name).sum())} for name in ordered
    }
