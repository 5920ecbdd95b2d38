"""Evaluation of critics on transcripts with known first errors.

`bench_critic` measures how well a critic finds the first error of labeled transcripts, with ProcessBench's F1 (Zheng
et al. 2024). A critic scores every prefix (`search.compare.transcripts`). One of two rules converts values to a
prediction:

* ``"value"``: the first step after which the value is below a threshold, as in ProcessBench for reward models;
* ``"fall"``: the step with the largest fall in value, if half of the fall reaches a threshold.

The rule and its threshold are chosen on separate transcripts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mas_gym.errors import ConfigError
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.suggestions import choice
from mas_gym.systems.graph import MAS
from mas_gym.systems.loading import load_mas
from search.compare.blame import largest_fall
from search.compare.reliability import Bin, ScoredState, gap, value_bins
from search.compare.transcripts import NOBODY, LabeledTranscript, Scored, divide, read_labeled, score_transcripts
from search.costs import Usage
from search.critic_registry import load_critic
from search.protocol import Critic
from search.results.intervals import Counts, Interval, bootstrap

Rule = Literal["value", "fall"]
RULES: tuple[Rule, ...] = ("value", "fall")

_FAILED = -2
_THRESHOLDS = 200
_RESAMPLES = 1000


class Threshold(NamedTuple):
    """The rule (see the module docstring) and threshold that convert values to a prediction."""

    rule: Rule
    at: float


class Predictor:
    """Predicts the first wrong step of scored transcripts, for any threshold.

    The value before the first step is taken to be the mean, over the transcripts, of the value after the first step.
    """

    def __init__(self, scored: Sequence[Scored]) -> None:
        first = [one.values[0] for one in scored if one.values]
        start = sum(first) / len(first) if first else 0.0
        width = max((len(one.values) for one in scored), default=0)
        self._values = np.full((len(scored), width), np.inf)
        self._place = np.full(len(scored), NOBODY)
        self._confidence = np.full(len(scored), -np.inf)
        for row, one in enumerate(scored):
            self._values[row, : len(one.values)] = one.values
            if one.values:
                self._place[row], self._confidence[row] = largest_fall(one.values, start)
        self._failed = np.array([not one.values for one in scored], dtype=bool)

    def predict(self, threshold: Threshold) -> NDArray[np.int_]:
        """Return each transcript's first wrong step: -1 if no step is wrong, -2 if the transcript has no values."""
        if threshold.rule == "value":
            below = self._values < threshold.at
            found = np.where(below.any(axis=1), below.argmax(axis=1), NOBODY)
        else:
            found = np.where(self._confidence >= threshold.at, self._place, NOBODY)
        return np.where(self._failed, _FAILED, found)

    def candidates(self, rule: Rule) -> list[Threshold]:
        """Return candidate thresholds, which lie between quantiles of the rule's statistic."""
        seen = self._values[np.isfinite(self._values)] if rule == "value" else self._confidence[~self._failed]
        if not seen.size:
            return []
        levels = np.unique(np.quantile(seen, np.linspace(0, 1, _THRESHOLDS)))
        cuts = [float(low + high) / 2 for low, high in pairwise(levels)]
        return [Threshold(rule, cut) for cut in [float(levels[0]), *cuts, float(np.nextafter(levels[-1], np.inf))]]


def f1_score(predicted: NDArray[np.int_], labels: NDArray[np.int_]) -> float:
    """Return ProcessBench's F1 in percent: the harmonic mean of the accuracies on wrong and on right transcripts.

    >>> f1_score(np.array([1, 0, -1, -1]), np.array([1, 2, -1, -1]))
    66.66666666666667
    """
    hits, wrong = predicted == labels, labels != NOBODY
    return _harmonic(_share(hits[wrong]), _share(hits[~wrong]))


def _harmonic(first: float, second: float) -> float:
    return 100 * 2 * first * second / (first + second) if first + second > 0 else 0.0


def _share(hits: NDArray[np.bool_]) -> float:
    return float(hits.mean()) if hits.size else 0.0


def choose_threshold(dev: Sequence[Scored], rules: Sequence[Rule] = RULES) -> tuple[Threshold, float]:
    """Return the rule and the threshold with the best F1, and that F1 in percent.

    Raises:
        ConfigError: Either no transcript contains an error, or every transcript does.
    """
    labels = np.array([one.transcript.label for one in dev])
    if not len(dev) or (labels == NOBODY).all() or (labels != NOBODY).all():
        raise ConfigError(
            "to choose a threshold, expected dev transcripts both with and without an error, got "
            f"{(labels != NOBODY).sum()} of {len(dev)} with an error; pass other transcripts, or a rule and a threshold"
        )
    predictor = Predictor(dev)
    tried = [(f1_score(predictor.predict(t), labels), t) for rule in rules for t in predictor.candidates(rule)]
    best = max(f1 for f1, _ in tried)
    # Of equally good thresholds, the middle one is the most robust.
    rule = next(threshold.rule for f1, threshold in tried if f1 == best)
    equal = [threshold for f1, threshold in tried if f1 == best and threshold.rule == rule]
    return equal[len(equal) // 2], best


class DepthFigures(NamedTuple):
    """A critic's values after a number of steps.

    Attributes:
        prefixes: Number of prefixes.
        value: Their mean value.
        right: Share of the prefixes without an error.
        auc: AUC of the value for prefixes with and without an error, in ``[0, 1]``; 0.5 if there is only one class.
        gap: Mean distance between value and ``2 right - 1``, over bins with about the same number of prefixes.
        bins: The bins.
    """

    prefixes: int
    value: float
    right: float
    auc: float
    gap: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class FirstErrorFigures:
    """Results of `bench_critic`: shares in ``[0, 1]``, F1 in percent, None for undefined figures.

    Attributes:
        terminal_only: Whether the critic scores only whole transcripts and thus predicts no step.
        transcripts: Number of measured transcripts.
        wrong: Number of measured transcripts with an error.
        failed: Number of transcripts without values, by reason; they count as wrong predictions.
        chosen_on: Source of the threshold.
        dev_f1: F1 on the transcripts used to choose the threshold.
        first_error: Share of the wrong transcripts with a correctly predicted first wrong step.
        no_error: Share of the right transcripts without a predicted error.
        f1: Harmonic mean of ``first_error`` and ``no_error``.
        f1_interval: 95% interval of ``f1``, by a bootstrap over questions.
        agent: Share of the wrong transcripts for which the erring agent is found; None without agents.
        auc: AUC of the value for prefixes with and without an error.
        pairwise: Share of prefix pairs in which the prefix without an error has the higher value. The prefixes of a
            pair have the same question and length, and exactly one has an error; ties count half.
        pairs: Number of such pairs.
        by_depth: Calibration and AUC by number of steps.
    """

    critic: str
    terminal_only: bool
    transcripts: int
    wrong: int
    failed: dict[str, int]
    threshold: Threshold | None
    chosen_on: str
    dev_f1: float | None
    first_error: float | None
    no_error: float | None
    f1: float | None
    f1_interval: Interval | None
    agent: float | None
    auc: float
    pairwise: float | None
    pairs: int
    by_depth: dict[int, DepthFigures]
    cost: Usage

    def to_dict(self) -> JSONObject:
        """Return a JSON-serializable form."""
        flat = asdict(self)
        for name, part in (("threshold", self.threshold), ("f1_interval", self.f1_interval)):
            flat[name] = None if part is None else part._asdict()
        flat["by_depth"] = {
            str(depth): {**found._asdict(), "bins": [one._asdict() for one in found.bins]}
            for depth, found in self.by_depth.items()
        }
        return flat


def _states(one: Scored, last_alone: bool) -> Iterable[ScoredState]:
    """Yield the scored prefixes; a prefix is correct if it has no error."""
    label, first = one.transcript.label, len(one.transcript.steps) if last_alone else 1
    for depth, value in enumerate(one.values, first):
        yield ScoredState(depth, value, float(label == NOBODY or depth <= label))


def _named(scored: Sequence[Scored], labels: NDArray[np.int_], predicted: NDArray[np.int_]) -> JSONObject:
    hits, wrong = predicted == labels, labels != NOBODY
    agents = [one.transcript.agents for one in scored]
    same = [bool(a) and p >= 0 and a[p] == a[t] for a, p, t in zip(agents, predicted, labels, strict=True) if t >= 0]
    known = any(len(set(names)) > 1 for names in agents)
    return {
        "first_error": _share(hits[wrong]) if wrong.any() else None,
        "no_error": _share(hits[~wrong]) if not wrong.all() else None,
        "f1": f1_score(predicted, labels) if wrong.any() and not wrong.all() else None,
        "f1_interval": _f1_interval(scored, hits, wrong) if wrong.any() and not wrong.all() else None,
        "agent": sum(same) / len(same) if known and same else None,
    }


def _f1_interval(scored: Sequence[Scored], hits: NDArray[np.bool_], wrong: NDArray[np.bool_]) -> Interval:
    questions = {name: i for i, name in enumerate(dict.fromkeys(one.transcript.problem for one in scored))}
    sums = np.zeros((len(questions), 4))
    for one, hit, bad in zip(scored, hits, wrong, strict=True):
        sums[questions[one.transcript.problem], [0, 1] if bad else [2, 3]] += (hit, 1)

    def statistic(counts: Counts) -> list[float]:
        drawn = counts @ sums
        return [_harmonic(caught / max(bad, 1), kept / max(good, 1)) for caught, bad, kept, good in drawn]

    return bootstrap(len(sums), statistic, resamples=_RESAMPLES)


def _pairwise(scored: Sequence[Scored], last_alone: bool) -> tuple[float | None, int]:
    groups: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
    for one in scored:
        for state in _states(one, last_alone):
            groups.setdefault((one.transcript.problem, state.group), ([], []))[state.right > 0].append(state.value)
    scores = [
        (better > worse) + (better == worse) / 2
        for wrong, right in groups.values()
        for better in right
        for worse in wrong
    ]
    return (sum(scores) / len(scores), len(scores)) if scores else (None, 0)


def _by_depth(states: Sequence[ScoredState]) -> dict[int, DepthFigures]:
    found: dict[int, DepthFigures] = {}
    for depth, bins in value_bins(states).items():
        here = [state for state in states if state.group == depth]
        value, right = sum(s.value for s in here) / len(here), sum(s.right for s in here) / len(here)
        able = auc([s.value for s in here], [s.right > 0 for s in here])
        found[depth] = DepthFigures(len(here), value, right, able, gap(bins), tuple(bins))
    return found


def bench_critic(
    critic: Critic | str,
    data: str | Path | Sequence[LabeledTranscript],
    *,
    dev: str | Path | Sequence[LabeledTranscript] | None = None,
    mas: MAS | str | None = None,
    rule: Rule | None = None,
    threshold: float | None = None,
    listen: Callable[[int, int], None] = lambda done, total: None,
) -> FirstErrorFigures:
    """Measure how well a critic finds the first error of labeled transcripts.

    Args:
        critic: The critic, or an argument of `rewardmodels.load_critic`.
        data: A file as in `search.compare.transcripts`, or its transcripts.
        dev: Transcripts to choose the threshold on. By default, a part of ``data`` that is then not measured: the rows
            with ``split`` dev or, if there are none, a fifth of the questions, selected by a hash.
        mas: The system that wrote the transcripts; overrides the one named in their rows.
        rule: ``"value"`` or ``"fall"``; by default the better one on ``dev``.
        threshold: A fixed threshold. The rule is then ``"value"`` by default, and all of ``data`` is measured.
        listen: Called with the number of transcripts scored so far and the total.

    Raises:
        ConfigError: An argument is out of range, the critic compares states, or no threshold can be chosen.
        CriticError: The critic is incompatible with the system, or cannot score any transcript.
        DataError: Rows are not transcripts, or not episodes of the system.
    """
    if rule is not None:
        choice("rule", rule, RULES)
    if threshold is not None and not math.isfinite(threshold):
        raise ConfigError(f"expected a finite number as the threshold, got {threshold!r}")
    guide = load_critic(critic) if isinstance(critic, str) else critic
    system = None if mas is None else load_mas(mas)
    rest = read_labeled(data) if isinstance(data, str | Path) else list(data)
    given = Threshold(rule or "value", threshold) if threshold is not None else None
    chosen: list[LabeledTranscript] = []
    how = "given"
    if given is None and dev is not None:
        chosen, how = (read_labeled(dev), Path(dev).name) if isinstance(dev, str | Path) else (list(dev), "dev")
    elif given is None:
        chosen, rest, how = divide(rest)
    total = len(chosen) + len(rest)
    wanted = [] if guide.terminal_only else chosen
    before, _ = score_transcripts(wanted, guide, system, lambda done: listen(done, total))
    scored, cost = score_transcripts(rest, guide, system, lambda done: listen(len(wanted) + done, total))
    if not scored:
        raise ConfigError("expected transcripts for the evaluation, got only dev transcripts; pass a file with more")
    labels = np.array([one.transcript.label for one in scored])
    states = [state for one in scored for state in _states(one, guide.terminal_only)]
    right, pairs = _pairwise(scored, guide.terminal_only)
    dev_f1: float | None = None
    named: JSONObject = dict.fromkeys(("first_error", "no_error", "f1", "f1_interval", "agent"))
    if not guide.terminal_only:
        if given is None:
            given, dev_f1 = choose_threshold(before, RULES if rule is None else (rule,))
        named = _named(scored, labels, Predictor(scored).predict(given))
    return FirstErrorFigures(
        critic=guide.name,
        terminal_only=guide.terminal_only,
        transcripts=len(scored),
        wrong=int((labels != NOBODY).sum()),
        failed=dict(Counter(one.error for one in scored if one.error is not None).most_common()),
        threshold=None if guide.terminal_only else given,
        chosen_on="" if guide.terminal_only else how,
        dev_f1=dev_f1,
        auc=auc([state.value for state in states], [state.right > 0 for state in states]),
        pairwise=right,
        pairs=pairs,
        by_depth=_by_depth(states),
        cost=cost,
        **named,
    )


def auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Return the area under the ROC curve, in ``[0, 1]``; ties count half; 0.5 if one class is missing.

    >>> auc([0.1, 0.4, 0.4, 0.9], [False, True, False, True])
    0.875
    """
    values, positive = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=bool)
    ups = int(positive.sum())
    if ups in (0, positive.size):
        return 0.5
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    # The mean rank of each value, from 1 (Mann and Whitney 1947).
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[positive].sum() - ups * (ups + 1) / 2) / (ups * (positive.size - ups)))
