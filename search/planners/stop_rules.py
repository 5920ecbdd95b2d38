"""Stop rules, which end a search early when its answer is sufficiently certain.

A planner with the setting ``stop`` applies the rule at every point where it can stop: after each pass (`BestOfN`),
after each simulation (`MCTS`, `AdaptiveBranching`, `AskTell`), or after each turn (`StepBeamSearch`, `DVTS`,
`REBASE`). A turn-by-turn search cannot stop immediately. It completes only its best state, with one message per turn.

======================== =======================================================================================
``stop=0.9``             the critic's value of the answer, converted to a probability, exceeds 0.9
``stop=stop.json``       the probability from a calibrated map exceeds the threshold in the file
``stop=stop.json@0.95``  as above, with the given threshold
======================== =======================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, is_number, shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.systems.state import MASState
from search.calibrated_critics import interpolated
from search.planners.tree_growth import path_score
from search.planners.voting import sigmoid
from search.protocol import Critic, Extract, Planner, Steps, ValueKind, planner_name, value_kind
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
    """

    root: MASState
    state: MASState
    terminal: bool
    check: int
    value: float
    score: float
    agreement: float
    found: int

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
    """

    planner: str
    critic: str
    weights: Mapping[str, float]
    bias: float = 0.0
    points: tuple[tuple[float, float], ...] = ()
    threshold: float = 1.0

    def __post_init__(self) -> None:
        if not self.weights or not set(self.weights) <= set(FEATURES):
            raise ConfigError(
                f"stop map: expected weights for some of the features {', '.join(FEATURES)}, got {shown(self.weights)}"
            )
        numbers = [*self.weights.values(), self.bias, *(x for point in self.points for x in point)]
        if not all(is_number(number) for number in numbers):
            raise ConfigError("stop map: expected finite numbers as weights, bias and points")
        if any(right[0] <= left[0] or right[1] < left[1] for left, right in pairwise(self.points)):
            raise ConfigError("stop map: expected points with increasing logits and non-decreasing probabilities")
        if any(not 0 <= p <= 1 for _, p in self.points) or not (is_number(self.threshold) and 0 <= self.threshold <= 1):
            raise ConfigError("stop map: expected probabilities and a threshold from 0 to 1")

    def probability(self, features: Mapping[str, float]) -> float:
        """Return the probability that the answer is right; NaN if a feature is NaN."""
        index = self.bias + math.fsum(weight * features[name] for name, weight in self.weights.items())
        if not self.points or math.isnan(index):
            return sigmoid(index)
        return interpolated(index, *zip(*self.points, strict=True))

    def to_dict(self, about: JSONMapping = MappingProxyType({})) -> JSONObject:
        """Return the contents of a stop-map file; ``about`` describes the calibration and is not read back."""
        return {"format": "mas-gym-stop", "schema": SCHEMA, **asdict(self), "about": dict(about)}

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
            return cls(*names, weights, found["bias"], points, found["threshold"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
            raise DataError(
                f"{path}: expected a stop map of schema {SCHEMA}, but reading it failed: {error!r:.200}; {remedy}"
            ) from None


@dataclass(frozen=True)
class Confident:
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
        if not is_number(self.threshold) or not 0 <= self.threshold <= 1:
            raise ConfigError(f"stop: expected a probability from 0 to 1, got {shown(self.threshold)}")

    def identity(self) -> object:
        """Return the data that determines the decisions: the contents of the map, not its path."""
        known = self.calibrated
        content = None if known is None else [known.weights, known.bias, [list(point) for point in known.points]]
        return {"threshold": self.threshold, "map": content, "likelihood": self.likelihood}

    def __str__(self) -> str:
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
        """Return why the search should stop, such as ``"probability 0.93 above 0.9"``; None if it should not."""
        found = self.probability(evidence)
        return f"probability {found:.3f} above {self.threshold:g}" if found > self.threshold else None


Stop = Confident | str | float | None
"""A planner's setting ``stop``, as accepted by `read_stop`."""


def read_stop(stop: Stop) -> Confident | None:
    """Parse a planner's setting ``stop``; return None if there is no rule.

    Raises:
        ConfigError: The setting is not a valid rule.
        DataError: The file is not a stop map.

    >>> read_stop("0.9")
    Confident(threshold=0.9, calibrated=None, source='', likelihood=False)
    """
    if stop is None or isinstance(stop, Confident):
        return stop
    if isinstance(stop, int | float) and not isinstance(stop, bool):
        return Confident(float(stop))
    text = str(stop) if isinstance(stop, str | Path) else ""
    if math.isfinite(_float(text)):
        return Confident(_float(text))
    path, at, threshold = text.rpartition("@")
    if text.endswith(".json"):
        path, at = text, ""
    if path.endswith(".json"):
        found = StopMap.read(Path(path).expanduser())
        return Confident(_float(threshold) if at else found.threshold, found, text)
    raise ConfigError(
        f"stop: expected a probability or FILE.json from mas-gym calibrate, as in stop=0.9, got {shown(stop)}"
    )


def stop_for_run(planner: Planner, stop: Stop, critic: Critic | None, training: bool) -> Confident | None:
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
    return rule.for_run(planner, critic, kind)


class StopChecks:
    """The checks of one search.

    Attributes:
        stopped: Reason to stop; None if the search continues.
    """

    def __init__(self, stop: Stop, tree: Tree, outcomes_only: bool = False) -> None:
        self.stopped: str | None = None
        self._rule, self._tree, self._outcomes_only = read_stop(stop), tree, outcomes_only
        self._answers: dict[int, str | None] = {}
        self._checks = 0

    def check(self, leader: int | None, ends: Sequence[int]) -> Steps[bool]:
        """Return whether the search should stop.

        Args:
            leader: The node with the current answer; None if there is no answer yet.
            ends: The terminal nodes so far.
        """
        if self._rule is None or leader is None:
            return False
        evidence = yield from self.evidence(leader, ends)
        reason = self._rule.reason(evidence)
        if reason is not None:
            self.stopped = f"settled at check {evidence.check}: {reason}"
        return self.stopped is not None

    def evidence(self, leader: int, ends: Sequence[int]) -> Steps[Evidence]:
        """Return the evidence at a check; the arguments are those of `check`."""
        tree = self._tree
        fresh = [node for node in ends if node not in self._answers]
        if fresh:
            [answers] = yield [Extract([tree.states[node] for node in fresh])]
            self._answers.update(zip(fresh, answers, strict=True))
        answer = self._answers.get(leader)
        same = sum(1 for node in ends if self._answers[node] == answer) if leader in self._answers else 0
        self._checks += 1
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
        )


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
