"""Calibration of stop rules on dev problems.

Searches run to completion, with a rule that only records the evidence at every check. The label of a check is whether
the answer at that point is right. A turn-by-turn search has no answer yet at a check, so the search is run once more
per check and stopped there. With the same seed, these runs draw the same messages.

Thresholds are chosen on held-out probabilities: those for each of five folds of problems come from a map fitted on the
other four folds. The map in the file is fitted on all problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mas_gym.errors import ConfigError, need
from mas_gym.internal.suggestions import choice
from mas_gym.tasks.base import Problem
from search.calibrated_critics import METHODS
from search.compare.critic_fitting import fit_curve
from search.plan import Plan
from search.planners.registry import load_planner, takes_stop
from search.planners.stop_rules import FEATURES, Confident, Evidence, StopMap
from search.protocol import Critic, Planner, as_critic, planner_name
from search.runs import run

FOLDS = 5
FEWEST = 20
"""Minimum number of problems for calibration; with fewer, intervals are uninformative."""


class Check(NamedTuple):
    """A check of a finished search.

    Attributes:
        features: The values of `search.planners.stop_rules.FEATURES`.
        right: Whether the search would be right if it stopped at the check.
    """

    features: tuple[float, ...]
    right: bool


class Checked(NamedTuple):
    """A complete search with its checks in order, and whether its answer was right."""

    problem: str
    checks: tuple[Check, ...]
    right: bool


class Stopped(NamedTuple):
    """Results of searches that stop at a threshold.

    Attributes:
        threshold: The threshold.
        hit: Hit@1 of searches that stop at the threshold.
        coverage: Share of the searches that stop early.
        accuracy: Share of right answers among the searches that stop early; None if there are none.
        claimed: Mean predicted probability at the stop, over searches that stop early; None if there are none.
    """

    threshold: float
    hit: float
    coverage: float
    accuracy: float | None
    claimed: float | None


class Calibration(NamedTuple):
    """A stop map, the results at its threshold on held-out dev problems, and Hit@1 of complete searches."""

    map: StopMap
    chosen: Stopped
    hit: float
    searches: tuple[Checked, ...]


@dataclass(frozen=True)
class _Recorder(Confident):
    """Records the evidence of all checks, and stops at the check ``end``; 0 never stops."""

    threshold: float = 1.0
    end: int = 0
    found: list[Evidence] = field(default_factory=list)

    def identity(self) -> object:
        """Return the check at which the search stops."""
        return {"end": self.end}

    def reason(self, evidence: Evidence) -> str | None:
        self.found.append(evidence)
        return "stop check of calibration" if evidence.check == self.end else None


def calibrate_stop(
    planner: Planner | str,
    problems: Iterable[Problem],
    *,
    critic: Critic,
    seeds: Sequence[int] = (42,),
    method: Literal["logistic", "isotonic"] = "logistic",
    **options: Any,
) -> Calibration:
    """Calibrate the rule ``stop=FILE.json`` of a planner on dev problems.

    Args:
        planner: A planner with a setting ``stop``, or its short form.
        problems: Dev problems with reference answers; of problems with the same question, only the first is used.
        critic: The critic to calibrate.
        seeds: Run seeds.
        method: ``"logistic"`` for logistic regression; ``"isotonic"`` adds a monotone map of the regression's logit.
        options: As for `search.run`: ``mas``, ``program``, ``policy``, ``sampling``, ``concurrency``, ``progress``.

    Raises:
        ConfigError: The planner has no such setting, there are too few problems, or every answer is right,
            or every answer is wrong.
        MissingDependencyError: scikit-learn is not installed.
    """
    need("sklearn", "calibrating a stop rule", "train")
    found: Any = load_planner(planner)
    choice("method", method, METHODS)
    if not takes_stop(found) or not found.needs_critic:
        raise ConfigError(
            f"{planner_name(found)} has no stop rule to calibrate: expected bon, sbs, mcts, puct, halving, dvts, "
            "rebase or adaptive"
        )
    chosen = list({problem.question: problem for problem in reversed(list(problems))}.values())[::-1]
    if len(chosen) < FEWEST:
        raise ConfigError(f"expected at least {FEWEST} dev problems with different questions, got {len(chosen)}")
    searches: list[Checked] = []
    for seed in seeds:

        def searched(rule: Confident, seed: int = seed) -> dict[str, Plan]:
            stopping = replace(found, stop=rule)
            plans = run(stopping, chosen, critic=critic, seed=seed, raise_errors=True, **options)
            return {plan.problem_id: plan for plan in plans}

        searches += _checked(chosen, searched)
    return fit(searches, planner_name(found), as_critic(critic).name, method)


def _checked(problems: Sequence[Problem], searched: Callable[[Confident], dict[str, Plan]]) -> list[Checked]:
    """Run the searches of one seed and label their checks."""
    record = _Recorder()
    plans = searched(record)
    by_question: dict[str, list[Evidence]] = {}
    for evidence in record.found:
        by_question.setdefault(evidence.root.question, []).append(evidence)
    by_turns = any(not one.terminal for one in record.found)
    early = max(one.check for one in record.found) if by_turns else 0
    stopped = {number: searched(_Recorder(end=number)) for number in range(1, early + 1)}
    found: list[Checked] = []
    for problem in problems:
        plan = plans[problem.id]
        verdicts = {candidate.state: bool(candidate.correct) for candidate in plan.candidates}
        checks = [
            Check(
                tuple(one.features[name] for name in FEATURES),
                bool(stopped[one.check][problem.id].correct) if early else verdicts[one.state],
            )
            for one in by_question.get(problem.question, [])
        ]
        found.append(Checked(problem.id, tuple(checks), bool(plan.correct)))
    return found


def fit(searches: Sequence[Checked], planner: str, critic: str, method: str = "logistic") -> Calibration:
    """Fit a map to the checks of searches, and choose the threshold on held-out probabilities.

    The threshold is the smallest one from 0.30 to 0.99 at which some search stops early and held-out Hit@1 is at least
    that of complete searches, or 1 if there is none.

    Raises:
        ConfigError: There are no checks, or all of them are right, or all are wrong.
    """
    ids = list(dict.fromkeys(one.problem for one in searches))
    fold = {problem: i % FOLDS for i, problem in enumerate(ids)}
    held_out: dict[int, list[float]] = {}
    for number in range(FOLDS):
        model = _fitted([one for one in searches if fold[one.problem] != number], planner, critic, method)
        for i, one in enumerate(searches):
            if fold[one.problem] == number:
                named = (dict(zip(FEATURES, check.features, strict=True)) for check in one.checks)
                held_out[i] = [model.probability(features) for features in named]
    probabilities = [held_out[i] for i in range(len(searches))]
    whole = sum(one.right for one in searches) / len(searches)
    grid = [round(0.3 + 0.01 * i, 2) for i in range(70)]
    tried = (stopped_by(searches, probabilities, threshold) for threshold in grid)
    chosen = next((one for one in tried if one.hit >= whole and one.coverage), stopped_by(searches, probabilities, 1.0))
    return Calibration(
        replace(_fitted(searches, planner, critic, method), threshold=chosen.threshold), chosen, whole, tuple(searches)
    )


def stopped_by(searches: Sequence[Checked], probabilities: Sequence[Sequence[float]], threshold: float) -> Stopped:
    """Return the results of searches that stop at a threshold, given the probability at each of their checks."""
    right, stops = 0, list[tuple[bool, float]]()
    for one, known in zip(searches, probabilities, strict=True):
        at = next((i for i, p in enumerate(known) if p > threshold), None)
        if at is None:
            right += one.right
        else:
            stops.append((one.checks[at].right, known[at]))
    right += sum(correct for correct, _ in stops)
    shares = [sum(column) / len(stops) for column in zip(*stops, strict=True)] if stops else [None, None]
    return Stopped(threshold, right / len(searches), len(stops) / len(searches), *shares)


def _fitted(searches: Sequence[Checked], planner: str, critic: str, method: str) -> StopMap:
    pairs = [(check, 1 / len(one.checks)) for one in searches for check in one.checks]
    right = np.array([check.right for check, _ in pairs], dtype=bool)
    if not pairs or right.all() or not right.any():
        which = "with right answers" if right.any() else "with wrong answers"
        got = f"{len(pairs):,} checks, all {which}" if pairs else "none, because the searches end at their first answer"
        raise ConfigError(
            "expected right answers at some checks (points at which a search may stop) and wrong answers at others, "
            f"got {got}; use more or different dev problems"
        )
    rows: NDArray[np.float64] = np.array([check.features for check, _ in pairs])
    # Each search has the same total weight, independent of its number of checks.
    weights = np.array([weight for _, weight in pairs])
    outcomes = right * weights, ~right * weights
    curve = fit_curve(rows, *outcomes)
    slopes = np.array(curve.weights[: len(FEATURES)]) / np.array(curve.scale)
    bias = curve.bias - float(slopes @ np.array(curve.mean))
    points: tuple[tuple[float, float], ...] = ()
    if method == "isotonic":
        rising = fit_curve((rows @ slopes + bias)[:, None], *outcomes, "isotonic")
        points = tuple(zip(rising.at, rising.level, strict=True))
    return StopMap(planner, critic, dict(zip(FEATURES, slopes.tolist(), strict=True)), bias, points)
