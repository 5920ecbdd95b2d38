"""Evaluation of critics without search: their ranking of the states of held-out trees of the dev split."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.paper.lab import Lab, Setting, rule_for
from benchmarks.paper.page import percent, span
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import same_rule
from rewardmodels import LabeledTree, LearnedCritic
from rewardmodels.data import mining
from rewardmodels.data.dataset import Example
from rewardmodels.training.metrics import interval, outcome_metrics, pair_metrics
from search import ScoringContext
from search.compare.first_errors import auc

# Scores are rounded to a millionth; the inverse of tanh must stay finite.
_EDGE = 1 - 1e-7


def pair_accuracy(lab: Lab, setting: Setting, critic: LearnedCritic) -> dict[str, Any]:
    """Measure a process critic on the pairs of the dev trees, mined by the task's rule; see `metrics.pair_metrics`."""
    same = same_rule(rule_for(setting))
    examples: list[Example] = []
    better: list[float] = []
    worse: list[float] = []
    for item in lab.dev_trees(setting):
        found = mining.pairs(item.tree, Dynamics(item.mas).max_depth, same=same)
        examples += [example_of(item, pair.chosen.state) for pair in found]
        better += _logits(critic, item, [pair.chosen.state for pair in found])
        worse += _logits(critic, item, [pair.rejected.state for pair in found])
    lab.rest(critic)
    return pair_metrics(examples, np.array(better), np.array(worse))


def outcome_auc(lab: Lab, setting: Setting, critic: LearnedCritic) -> dict[str, Any]:
    """Measure any critic on the terminal states of the dev trees; see `metrics.outcome_metrics`."""
    examples: list[Example] = []
    logits: list[float] = []
    for item in lab.dev_trees(setting):
        found = mining.outcomes(item.tree)
        examples += [example_of(item, labeled.state, labeled.target) for labeled in found]
        logits += _logits(critic, item, [labeled.state for labeled in found])
    lab.rest(critic)
    values = np.array(logits)
    if critic.info.kind == "orm":
        return outcome_metrics(examples, values)
    labels = np.array([e.chosen_target > 0 for e in examples])
    return {
        "states": len(examples),
        "auc": auc(values, labels),
        "auc_interval": interval(examples, lambda i: auc(values[i], labels[i])),
    }


def by_depth(metrics: dict[str, Any]) -> str:
    """Return the pairwise accuracy at each agent's turn, in order."""
    return " / ".join(percent(entry["mean"]) for entry in metrics["accuracy_by_depth"].values())


def pair_cells(metrics: dict[str, Any]) -> tuple[str, ...]:
    """Return pairwise accuracy, its interval and the accuracy by depth."""
    return percent(metrics["accuracy"]), span(*metrics["accuracy_interval"]), by_depth(metrics)


def auc_cells(metrics: dict[str, Any]) -> tuple[str, ...]:
    low, high = metrics["auc_interval"]
    return f"{metrics['auc']:.3f}", f"{low:.3f} to {high:.3f}"


def example_of(item: LabeledTree, state: MASState, target: float = 0.0) -> Example:
    """Return the example of a state, without its text."""
    agent = item.mas.agents[state.speaker].name
    return Example(item.problem_id, item.task, item.problem_id, item.mas.name, state.depth - 1, agent, (), target)


def _logits(critic: LearnedCritic, item: LabeledTree, states: list[MASState]) -> list[float]:
    if not states:
        return []
    scores = np.array(critic.score([ScoringContext(state, item.mas, None) for state in states]))
    return list(np.arctanh(np.clip(scores, -_EDGE, _EDGE)))
