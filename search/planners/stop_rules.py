"""Stop rules, which end a search early when its answer is sufficiently certain.

A planner with the setting ``stop`` applies the rule at every point where it can stop: after each pass (`BestOfN`),
after each simulation (`MCTS`, `AdaptiveBranching`, `AskTell`), or after each turn (`StepBeamSearch`, `DVTS`,
`REBASE`). A turn-by-turn search cannot stop immediately. It completes only its best state, with one message per turn.

======================== =======================================================================================
``stop=0.9``             the critic's value of the answer, converted to a probability, exceeds 0.9
``stop=stop.json``       the probability from a calibrated map exceeds the threshold in the file
``stop=stop.json@0.95``  as above, with the given threshold
``stop=settled:4``       the answer was the same at the last 4 checks
``stop=gain:0.002``      the expected gain in probability from one more pass or simulation is below 0.002
======================== =======================================================================================
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, is_number, shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.systems.state import MASState
from search.calibrated_critics import interpolated
from search.planners.path_scores import path_score
from search.planners.voting import sigmoid
from search.protocol import Continue, Critic, Extract, Planner, Steps, ValueKind, planner_name, value_kind
from search.tree import Tree

SCHEMA = 1
FEATURES = ("value", "score", "agreement", "found", "turn")
"""Possible features of a calibrated map, see `Evidence`."""


class Evidence(NamedTuple):
    """Evidence about the answer of a search at a check.

    Attributes:
        root: The initial state.
        state: The state with the answer, or the best state of a turn-by-turn search.
        terminal: Whether that state is terminal.
        check: The number of this check, from 1.
        value: The critic's value of ``state``.
        score: Path score of ``state``: the mean value along its path, or its own value if only outcomes have values.
        agreement: Votes for its answer, divided by the number of finished paths plus one, so that a single path is not
            full agreement; 0 for a non-terminal state.
        found: Number of finished paths.
        unchanged: Number of consecutive checks with the same answer, including this one.
        gain: Expected increase in the answer's value from one more pass or simulation, in units of the critic's values;
            infinite if unknown.
    """

    root: MASState
    state: MASState
    terminal: bool
    check: int
    value: float
    score: float
    agreement: float
    found: int
    unchanged: int
    gain: float

    @property
    def features(self) -> dict[str, float]:
        """The features of a calibrated map, with the number of finished paths as ``ln(1 + found)``."""
        return {
            "value": self.value,
            "score": self.score,
            "agreement": self.agreement,
            "found": math.log1p(self.found),
            "turn": float(self.state.depth),
        }


@dataclass(frozen=True)
class StopMap:
    """A calibrated map from evidence to the probability that the answer is right.

    The logit ``bias + sum(weights * features)`` is mapped by the sigmoid (logistic regression) or, if there are
    points, by linear interpolation between them (isotonic regression).

    Attributes:
        planner: Class name of the planner that the map was calibrated for.
        critic: Name of the critic.
        weights: Weight by feature (`FEATURES`).
        bias: Constant term of the logit.
        points: Pairs of logit and probability with increasing logit and non-decreasing probability.
        threshold: The probability above which a search stops, chosen on dev problems; 1 never stops.
        growth: By feature, the increase in the answer's logit after n more checks, per unit of ln(1 + n); empty if
            unknown.
        growth_bias: Constant term of that increase.
    """

    planner: str
    critic: str
    weights: Mapping[str, float]
    bias: float = 0.0
    points: tuple[tuple[float, float], ...] = ()
    threshold: float = 1.0
    growth: Mapping[str, float] = field(default_factory=dict)
    growth_bias: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers. Raises `ConfigError`."""
        for names, known in (("weights", self.weights), ("growth", self.growth)):
            if (not known and names == "weights") or not set(known) <= set(FEATURES):
                raise ConfigError(
                    f"stop map: expected {names} for some of the features {', '.join(FEATURES)}, got {shown(known)}"
                )
        numbers = [*self.weights.values(), self.bias, *(x for point in self.points for x in point)]
        numbers += [*self.growth.values(), self.growth_bias]
        if not all(is_number(number) for number in numbers):
            raise ConfigError("stop map: expected finite numbers as weights, bias and points")
        if any(right[0] <= left[0] or right[1] < left[1] for left, right in pairwise(self.points)):
            raise ConfigError("stop map: expected points with increasing logits and non-decreasing probabilities")
        if any(not 0 <= p <= 1 for _, p in self.points) or not (is_number(self.threshold) and 0 <= self.threshold <= 1):
            raise ConfigError("stop map: expected probabilities and a threshold from 0 to 1")

    def probability(self, features: Mapping[str, float], ahead: int = 0) -> float:
        """Return the probability that the answer is right after ``ahead`` more checks; NaN if a feature is NaN."""
        index = self.bias + math.fsum(weight * features[name] for name, weight in self.weights.items())
        if ahead:
            slope = self.growth_bias + math.fsum(weight * features[name] for name, weight in self.growth.items())
            index += slope * math.log1p(ahead)
        if not self.points or math.isnan(index):
            return sigmoid(index)
        return interpolated(index, *zip(*self.points, strict=True))

    def to_dict(self, about: JSONMapping = MappingProxyType({})) -> JSONObject:
        """Return the contents of a stop-map file; ``about`` describes the calibration and is not read back."""
        return {
            "format": "mas-gym-stop",
            "schema": SCHEMA,
            "planner": self.planner,
            "critic": self.critic,
            "weights": dict(self.weights),
            "bias": self.bias,
            "points": [list(point) for point in self.points],
            "threshold": self.threshold,
            "growth": dict(self.growth),
            "growth_bias": self.growth_bias,
            "about": dict(about),
        }

    @classmethod
    def read(cls, path: Path) -> StopMap:
        """Read a file written by ``mas-gym calibrate``.

        Raises:
            DataNotFoundError: There is no such file.
            DataError: The file has another format or is corrupt.
        """
        remedy = "write one with mas-gym calibrate --out"
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DataNotFoundError(f"stop: expected a stop map at {str(path)!r}, got: {error}; {remedy}") from error
        try:
            found = json.loads(content)
            if found["format"] != "mas-gym-stop" or found["schema"] != SCHEMA:
                raise ValueError(f"format {found['format']!r}, schema {found['schema']!r}")
            points = tuple((float(x), float(p)) for x, p in found["points"])
            weights, names = dict(found["weights"]), (str(found["planner"]), str(found["critic"]))
            growth = dict(found.get("growth", {})), found.get("growth_bias", 0.0)
            return cls(*names, weights, found["bias"], points, found["threshold"], *growth)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
            raise DataError(
                f"{path}: expected a stop map of schema {SCHEMA}, but reading it failed: {error!r:.200}; {remedy}"
            ) from None


class StopRule(ABC):
    """Base class of stop rules, which decide at each check whether the answer is settled. Rules are frozen dataclasses.

    Attributes:
        at_turns: Whether the rule supports turn-by-turn searches.
        needs_gain: Whether it reads `Evidence.gain`.
    """

    at_turns: ClassVar[bool] = True
    needs_gain: ClassVar[bool] = False

    @abstractmethod
    def reason(self, evidence: Evidence) -> str | None:
        """Return why the search should stop, such as ``"probability 0.93 above 0.9"``; None if it should not."""

    def further(self, evidence: Evidence) -> float:
        """Return the expected gain per further check if the run decides whether searches continue, else 0.

        See `search.Continue`.
        """
        return 0.0

    def for_run(self, planner: Planner, critic: Critic | None, kind: ValueKind) -> StopRule:
        """Return the rule adapted to a run. Raises `ConfigError` if it is incompatible with the planner or critic."""
        return self


@dataclass(frozen=True)
class Confident(StopRule):
    """Stops when the probability of a right answer exceeds a threshold.

    Attributes:
        threshold: The probability, from 0 to 1; 1 never stops.
        calibrated: Maps the evidence to the probability. Without a map, the critic's value v of the answer is used
            uncalibrated: (1 + v) / 2, or v for policy likelihood.
        source: The text that the rule was parsed from; not part of its identity.
        likelihood: Whether values are likelihoods; filled in for a run.
    """

    threshold: float
    calibrated: StopMap | None = None
    source: str = field(default="", compare=False)
    likelihood: bool = False

    def __post_init__(self) -> None:
        """Check the threshold. Raises `ConfigError`."""
        if not is_number(self.threshold) or not 0 <= self.threshold <= 1:
            raise ConfigError(f"stop: expected a probability from 0 to 1, got {shown(self.threshold)}")

    def identity(self) -> object:
        """Return the data that determines the decisions: the contents of the map, not its path."""
        known = self.calibrated
        content = None if known is None else [known.weights, known.bias, [list(point) for point in known.points]]
        return {"threshold": self.threshold, "map": content, "likelihood": self.likelihood}

    def __str__(self) -> str:
        """Return the short form."""
        return self.source or repr(self.threshold)

    def for_run(self, planner: Planner, critic: Critic | None, kind: ValueKind) -> Confident:
        """Check that the map was calibrated for the planner and critic. Raises `ConfigError`."""
        known, name = self.calibrated, planner_name(planner)
        got = (name, "" if critic is None else critic.name)
        if known is not None and (known.planner, known.critic) != got:
            raise ConfigError(
                f"stop: {self.source} was calibrated for {known.planner} with critic {known.critic}, but this run has "
                f"{got[0]} with critic {got[1] or 'none'}; run mas-gym calibrate with this planner and critic"
            )
        return replace(self, likelihood=kind == "likelihood")

    def probability(self, evidence: Evidence) -> float:
        """Return the probability that the answer is right."""
        if self.calibrated is not None:
            return self.calibrated.probability(evidence.features)
        return evidence.value if self.likelihood else (1 + evidence.value) / 2

    def reason(self, evidence: Evidence) -> str | None:
        """Compare the probability with the threshold."""
        found = self.probability(evidence)
        return f"probability {found:.3f} above {self.threshold:g}" if found > self.threshold else None


@dataclass(frozen=True)
class Settled(StopRule):
    """Stops when the answer has been the same at several consecutive checks.

    Attributes:
        checks: Number of checks, at least 2.
    """

    at_turns = False

    checks: int

    def __post_init__(self) -> None:
        """Check the number. Raises `ConfigError`."""
        if isinstance(self.checks, bool) or not isinstance(self.checks, int) or self.checks < 2:
            raise ConfigError(f"stop: expected settled:N with an integer N >= 2, got {shown(self.checks)}")

    def __str__(self) -> str:
        """Return the short form."""
        return f"settled:{self.checks}"

    def reason(self, evidence: Evidence) -> str | None:
        """Return the reason if enough consecutive checks had the same answer."""
        return f"same answer at {self.checks} checks" if evidence.unchanged >= self.checks else None


@dataclass(frozen=True)
class Gain(StopRule):
    """Stops when the expected gain of another pass or simulation (its value of information) is below its price.

    Attributes:
        price: Price of a pass or simulation in units of the probability of a right answer: c / W if a right answer is
            worth W USD and a simulation costs c USD.
        likelihood: Whether values are likelihoods; filled in for a run.
    """

    at_turns = False
    needs_gain = True

    price: float
    likelihood: bool = False

    def __post_init__(self) -> None:
        """Check the price. Raises `ConfigError`."""
        if not is_number(self.price) or self.price <= 0:
            raise ConfigError(f"stop: expected gain:P with a positive price P, got {shown(self.price)}")

    def __str__(self) -> str:
        """Return the short form."""
        return f"gain:{self.price!r}"

    def for_run(self, planner: Planner, critic: Critic | None, kind: ValueKind) -> Gain:
        """Set whether values are likelihoods."""
        return replace(self, likelihood=kind == "likelihood")

    def reason(self, evidence: Evidence) -> str | None:
        """Compare the gain with the price; for values in [-1, 1], halve the gain to get a probability."""
        gain = evidence.gain if self.likelihood else evidence.gain / 2
        return f"expected gain {gain:.2g} below {self.price:g}" if gain < self.price else None


Stop = StopRule | str | float | None
"""A planner's setting ``stop``, as accepted by `read_stop`."""


def read_stop(stop: Stop) -> StopRule | None:
    """Parse a planner's setting ``stop``; return None if there is no rule.

    Raises:
        ConfigError: The setting is not a valid rule.
        DataError: The file is not a stop map.

    >>> read_stop(0.9), read_stop("settled:4")
    (Confident(threshold=0.9, calibrated=None, source='', likelihood=False), Settled(checks=4))
    """
    if stop is None or isinstance(stop, StopRule):
        return stop
    if isinstance(stop, int | float) and not isinstance(stop, bool):
        return Confident(float(stop))
    text = str(stop) if isinstance(stop, str | Path) else ""
    if math.isfinite(_float(text)):
        return Confident(_float(text))
    kind, _, number = text.partition(":")
    if kind == "settled":
        return Settled(int(number) if number.isdecimal() and len(number) < 10 else number)  # type: ignore[arg-type]
    if kind == "gain":
        return Gain(_float(number))
    path, at, threshold = text.rpartition("@")
    if text.endswith(".json"):
        path, at = text, ""
    if path.endswith(".json"):
        found = StopMap.read(Path(path).expanduser())
        return Confident(_float(threshold) if at else found.threshold, found, text)
    raise ConfigError(
        "stop: expected a probability, FILE.json from mas-gym calibrate, settled:N or gain:P, as in stop=0.9, got "
        f"{shown(stop)}"
    )


def stop_for_run(
    planner: Planner, stop: Stop, critic: Critic | None, training: bool, *, at_turns: bool = False
) -> StopRule | None:
    """Return a planner's rule, adapted to the run.

    Raises:
        ConfigError: The rule is incompatible with the run.
    """
    rule = read_stop(stop)
    if rule is None:
        return None
    kind = value_kind(critic, training)
    if kind is None or kind == "reward":
        raise ConfigError(
            f"{planner_name(planner)}: stop={rule} needs critic values, but this run has none; leave out stop"
        )
    if at_turns and not rule.at_turns:
        raise ConfigError(
            f"{planner_name(planner)}: stop={rule} compares answers, and this planner has no answer until its search "
            "ends; use a probability or a file from mas-gym calibrate"
        )
    return rule.for_run(planner, critic, kind)


class Watch:
    """The checks of one search.

    Attributes:
        stopped: Reason to stop; None if the search continues.
    """

    def __init__(self, stop: Stop, tree: Tree, outcomes_only: bool = False) -> None:
        """Start without checks."""
        self.stopped: str | None = None
        self._rule, self._tree, self._outcomes_only = read_stop(stop), tree, outcomes_only
        self._answers: dict[int, str | None] = {}
        self._checks = self._unchanged = 0
        self._last: object = None

    def check(self, leader: int | None, ends: Sequence[int], gain: Callable[[], float] | None = None) -> Steps[bool]:
        """Return whether the search should stop.

        Args:
            leader: The node with the current answer; None if there is no answer yet.
            ends: The terminal nodes so far.
            gain: Returns `Evidence.gain`.
        """
        if self._rule is None or leader is None:
            return False
        evidence = yield from self.evidence(leader, ends, gain if self._rule.needs_gain else None)
        reason = self._rule.reason(evidence)
        if reason is not None:
            self.stopped = f"settled at check {evidence.check}: {reason}"
        elif (further := self._rule.further(evidence)) > 0:
            [refusal] = yield [Continue(further)]
            if refusal is not None:
                self.stopped = f"ended at check {evidence.check}: {refusal}"
        return self.stopped is not None

    def evidence(self, leader: int, ends: Sequence[int], gain: Callable[[], float] | None = None) -> Steps[Evidence]:
        """Return the evidence at a check; the arguments are those of `check`."""
        tree = self._tree
        fresh = [node for node in ends if node not in self._answers]
        if fresh:
            [answers] = yield [Extract([tree.states[node] for node in fresh])]
            self._answers.update(zip(fresh, answers, strict=True))
        answer = self._answers.get(leader)
        same = sum(1 for node in ends if self._answers[node] == answer) if leader in self._answers else 0
        # Without readable answers, two states have the same answer only if they are the same state.
        answered = (leader,) if answer is None else answer
        self._unchanged = self._unchanged + 1 if answered == self._last else 1
        self._last, self._checks = answered, self._checks + 1
        value = tree.values[leader]
        return Evidence(
            tree.states[0],
            tree.states[leader],
            tree.is_terminal(leader),
            self._checks,
            value,
            value if self._outcomes_only else path_score(tree, leader),
            same / (len(ends) + 1),
            len(ends),
            self._unchanged,
            math.inf if gain is None else gain(),
        )


def expected_excess(mean: float, deviation: float, level: float) -> float:
    """Return E[max(X - level, 0)] for a normal X, the expected gain of a draw over the best so far.

    >>> round(expected_excess(0.0, 1.0, 0.0), 4)
    0.3989
    """
    if deviation <= 0:
        return max(mean - level, 0.0)
    z = (mean - level) / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return deviation * (density + z * (1 + math.erf(z / math.sqrt(2))) / 2)


def pass_gain(scores: Sequence[float]) -> float:
    """Return the expected gain of one more pass over the best of ``scores``, assuming normally distributed scores.

    Stopping when it is below the price is optimal for search with recall (Weitzman, 1979). The gain is infinite for
    fewer than two passes.
    """
    if len(scores) < 2:
        return math.inf
    mean = math.fsum(scores) / len(scores)
    variance = math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
    return expected_excess(mean, math.sqrt(variance), max(scores))


def simulation_gain(tree: Tree, leader: int, ends: Sequence[int]) -> float:
    """Return the expected gain of one more simulation, computed as a knowledge gradient (Frazier et al., 2008).

    At each state on the path to the answer, a simulation through a child with N visits changes the child's Q by a
    normal variable with standard deviation s / sqrt(N (N + 1)), where s is the standard deviation of the terminal
    values found. The gain is the expected increase in the largest Q, for the best choice of state and child; it is
    infinite for fewer than two terminal values.
    """
    values = [tree.values[node] for node in ends]
    if len(values) < 2:
        return math.inf
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return max((_choice_gain(tree, node, spread) for node in tree.path(leader)[:-1]), default=0.0)


def _choice_gain(tree: Tree, node: int, spread: float) -> float:
    visited = [(tree.totals[child] / n, n) for child in tree.children(node) if (n := tree.visits[child])]
    if len(visited) < 2:
        return 0.0
    visited.sort(reverse=True)
    top, second = visited[0][0], visited[1][0]
    # The leader changes if it falls below the second child, or if another child rises above it.
    gaps = [(top - (second if i == 0 else q), n) for i, (q, n) in enumerate(visited)]
    return max(expected_excess(-gap, spread / math.sqrt(n * (n + 1)), 0.0) for gap, n in gaps)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
