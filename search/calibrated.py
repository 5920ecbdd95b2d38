"""Combinations of critics, fitted to recorded outcomes or labels and cross-validated by question."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Literal, get_args

from mas_gym.errors import DataError, is_number, shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from search.critics import Combination
from search.protocol import Critic, ScoringContext

SCHEMA = 1
Method = Literal["logistic", "isotonic"]
METHODS: tuple[Method, ...] = get_args(Method)
_MOST = 1000
"""Maximum number of members, and of folds."""


@dataclass(frozen=True)
class Curve:
    """A map from the values of ``m`` critics to a probability.

    Attributes:
        mean: Logistic: the mean value of each critic, also used in place of a missing value.
        scale: Logistic: the standard deviation of each critic's values.
        weights: Logistic: a weight per standardised value, then one per missing value.
        bias: Logistic: the constant.
        at: Isotonic: the mean values at which the map is defined, ascending.
        level: Isotonic: the probabilities at these values; linear in between, constant outside.
    """

    mean: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    bias: float = 0.0
    at: tuple[float, ...] = ()
    level: tuple[float, ...] = ()

    def probability(self, values: Sequence[float]) -> float:
        """Return the probability; NaN if no critic has a value."""
        known = [value for value in values if math.isfinite(value)]
        if not known:
            return math.nan
        if self.at:
            return interpolated(math.fsum(known) / len(known), self.at, self.level)
        row = standardised(values, self.mean, self.scale)
        logit = self.bias + math.fsum(w * x for w, x in zip(self.weights, row, strict=True))
        return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0


def interpolated(x: float, at: Sequence[float], level: Sequence[float]) -> float:
    """Return the level at ``x``: linear between the points, constant outside."""
    place = bisect_right(at, x)
    if place in (0, len(at)):
        return level[max(0, place - 1)]
    low, high = at[place - 1], at[place]
    return level[place - 1] + (level[place] - level[place - 1]) * (x - low) / (high - low)


def standardised(values: Sequence[float], mean: Sequence[float], scale: Sequence[float]) -> list[float]:
    """Return standardised values (0 if missing), then a flag per value: 1 if it is missing, else 0."""
    known = [math.isfinite(value) for value in values]
    parts = zip(values, known, mean, scale, strict=True)
    return [(v - m) / s if there else 0.0 for v, there, m, s in parts] + [float(not there) for there in known]


@dataclass(frozen=True)
class CalibratedModel:
    """The parameters of `Calibrated`, as stored in ``calibrated.json``.

    Attributes:
        method: ``"logistic"``: a logistic regression on the values; ``"isotonic"``: an increasing function of their
            mean.
        members: The specs of the critics.
        final: The curve fitted to all questions.
        folds: One curve per fold, fitted without the questions of that fold.
        questions: The fold of each question, by `question_key`.
        metrics: Metrics on held-out questions.
        data: Counts of the data.
    """

    method: Method
    members: tuple[str, ...]
    final: Curve
    folds: tuple[Curve, ...]
    questions: Mapping[str, int]
    metrics: JSONMapping = field(default_factory=dict)
    data: JSONMapping = field(default_factory=dict)

    def probability(self, question: str, values: Sequence[float]) -> float:
        """Return the probability that a state is right, from a curve fitted without its question."""
        fold = self.questions.get(question_key(question))
        return (self.final if fold is None else self.folds[fold]).probability(values)

    def to_dict(self) -> JSONObject:
        """Return the JSON-able form."""
        return {"schema": SCHEMA, **asdict(self)}


def question_key(question: str) -> str:
    """Return a digest of a question's text."""
    return blake2b(" ".join(question.split()).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def read_model(data: object) -> CalibratedModel:
    """Read and validate the output of `CalibratedModel.to_dict`.

    Raises:
        DataError: The data has another schema or is corrupt.
    """
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        raise DataError(f"expected calibrated critics of schema {SCHEMA}, got {shown(data)}; train them again")
    members, folds, questions = data.get("members"), data.get("folds"), data.get("questions")
    named = isinstance(members, list) and 0 < len(members) <= _MOST and all(isinstance(one, str) for one in members)
    folded = isinstance(folds, list) and len(folds) <= _MOST and isinstance(questions, Mapping)
    if data.get("method") not in METHODS or not named or not folded:
        raise DataError("calibrated critics: expected a method, members, folds and questions; train them again")
    assert isinstance(members, list) and isinstance(folds, list) and isinstance(questions, Mapping)
    if not all(type(fold) is int and 0 <= fold < len(folds) for fold in questions.values()):
        raise DataError(f"calibrated critics: for each question, expected a fold from 0 to {len(folds) - 1}")
    facts = [data[name] if isinstance(data.get(name), Mapping) else {} for name in ("metrics", "data")]
    curves = [_curve(one, data["method"], len(members)) for one in (data.get("final"), *folds)]
    return CalibratedModel(data["method"], tuple(members), curves[0], tuple(curves[1:]), dict(questions), *facts)


def _curve(data: object, method: str, members: int) -> Curve:
    fields: JSONMapping = data if isinstance(data, Mapping) else {}
    columns = {name: fields.get(name) for name in ("mean", "scale", "weights", "at", "level")}
    sizes = {"mean": members, "scale": members, "weights": 2 * members} if method == "logistic" else {}
    for name, values in columns.items():
        fits = isinstance(values, list | tuple) and all(map(is_number, values))
        if not fits or (name in sizes and len(values) != sizes[name]):  # type: ignore[arg-type]
            raise DataError(
                f"calibrated critics: {name}: expected finite numbers, got {shown(values)}; train them again"
            )
    found = Curve(**{name: tuple(map(float, values or ())) for name, values in columns.items()}, bias=fields["bias"])
    rising = all(a <= b for a, b in zip(found.at, found.at[1:], strict=False))
    if not is_number(found.bias) or not all(s > 0 for s in found.scale) or not rising:
        raise DataError("calibrated critics: expected positive scales and ascending values; train them again")
    if method == "isotonic" and not (found.at and len(found.at) == len(found.level)):
        raise DataError("calibrated critics: expected a level for each value; train them again")
    return found


class Calibrated(Combination):
    """Several critics combined into the probability that an episode through the state is right, as ``2 p - 1``.

    For a question in the fitting data, it uses the curve that was fitted without that question, so all values are
    held-out values. A critic without a value is omitted; if no critic has a value, the state has none.

    Args:
        members: The critics, in the order of the model's members.
        model: The model.
    """

    def __init__(self, members: Sequence[Critic], model: CalibratedModel) -> None:
        """Store members and model."""
        super().__init__(members)
        self.model = model
        self.name = f"{model.method}({self.name})"

    def identity(self) -> object:
        """Return the members and the model."""
        return {"members": self.members, "model": self.model.to_dict()}

    def combined(self, context: ScoringContext, values: Sequence[float]) -> float:
        """Return the calibrated value."""
        return 2 * self.model.probability(context.state.question, values) - 1
