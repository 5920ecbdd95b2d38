"""Combinations of critics, fitted to recorded outcomes or labels and cross-validated by question."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Literal, get_args

from mas_gym.errors import DataError
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.internal.suggestions import choice
from mas_gym.tasks.base import question_digest
from search.critics import Combination
from search.protocol import Critic, ScoringContext

SCHEMA = 1
Method = Literal["logistic", "isotonic"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class Curve:
    """A map from the values of ``m`` critics to a probability.

    Attributes:
        mean: Logistic: the mean value of each critic, also used in place of a missing value.
        scale: Logistic: the standard deviation of each critic's values.
        weights: Logistic: a weight per standardized value, then one per missing-value flag.
        bias: Logistic: the intercept.
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
        row = standardized(values, self.mean, self.scale)
        logit = self.bias + math.fsum(w * x for w, x in zip(self.weights, row, strict=True))
        return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0


def interpolated(x: float, at: Sequence[float], level: Sequence[float]) -> float:
    """Return the level at ``x``: linear between the points, constant outside."""
    place = bisect_right(at, x)
    if place in (0, len(at)):
        return level[max(0, place - 1)]
    low, high = at[place - 1], at[place]
    return level[place - 1] + (level[place] - level[place - 1]) * (x - low) / (high - low)


def standardized(values: Sequence[float], mean: Sequence[float], scale: Sequence[float]) -> list[float]:
    """Return standardized values (0 if missing), then a flag per value: 1 if it is missing, else 0."""
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
        questions: The fold of each question, by `mas_gym.tasks.base.question_digest`.
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
        fold = self.questions.get(question_digest(question))
        return (self.final if fold is None else self.folds[fold]).probability(values)

    def to_dict(self) -> JSONObject:
        """Return the JSON-serializable form."""
        return {"schema": SCHEMA, **asdict(self)}


def read_model(data: Any) -> CalibratedModel:
    """Read the output of `CalibratedModel.to_dict`.

    Raises:
        DataError: The data has another schema or is corrupt.
    """
    try:
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        method, members = choice("method", data["method"], METHODS), tuple(map(str, data["members"]))
        final, *folds = (read_curve(one, method, len(members)) for one in (data["final"], *data["folds"]))
        questions = dict(data["questions"])
        if not set(questions.values()) <= set(range(len(folds))):
            raise ValueError(f"for each question, expected a fold from 0 to {len(folds) - 1}")
        return CalibratedModel(method, members, final, tuple(folds), questions, data["metrics"], data["data"])
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"expected calibrated critics of schema {SCHEMA}, but reading them failed: {error!r:.200}; train them again"
        ) from error


def read_curve(data: Any, method: Method, members: int) -> Curve:
    """Read a curve over the values of ``members`` critics. Raises builtin errors if the data is invalid."""
    columns = {name: tuple(map(float, data[name])) for name in ("mean", "scale", "weights", "at", "level")}
    found = Curve(**columns, bias=float(data["bias"]))
    if method == "logistic":
        sizes = (len(found.at), len(found.mean), len(found.scale), len(found.weights))
        fits = sizes == (0, members, members, 2 * members)
    else:
        fits = len(found.at) == len(found.level) > 0
    finite = all(map(math.isfinite, (found.bias, *chain(*columns.values()))))
    if not (fits and finite and all(s > 0 for s in found.scale) and list(found.at) == sorted(found.at)):
        raise ValueError("expected finite numbers for each member, positive scales and ascending values")
    return found


class Calibrated(Combination):
    """Several critics combined into the probability that an episode through the state is right, as ``2 p - 1``.

    For a question in the fitting data, it uses the curve that was fitted without that question, so all values are
    held-out values. If a critic has no value, the isotonic method omits it, and the logistic method uses its mean and a
    missing-value flag; if no critic has a value, the state has no value.

    Args:
        members: The critics, in the order of the model's members.
        model: The model.
    """

    def __init__(self, members: Sequence[Critic], model: CalibratedModel) -> None:
        super().__init__(members)
        self.model = model
        self.name = f"{model.method}({self.name})"

    def identity(self) -> object:
        """Return the members and the model."""
        return {"members": self.members, "model": self.model.to_dict()}

    def combined(self, context: ScoringContext, values: Sequence[float]) -> float:
        """Return the calibrated value."""
        return 2 * self.model.probability(context.state.question, values) - 1
