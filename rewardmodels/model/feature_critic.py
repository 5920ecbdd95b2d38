"""A critic without a language model: a logistic regression on features of a transcript and of other samples.

It is a baseline for learned critics. Its folder contains ``features.json`` and a model card.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from mas_gym.errors import DataError, shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.internal.suggestions import choice
from mas_gym.policies.folder_checks import read_object
from mas_gym.tasks.grading.numbers import parse_number
from rewardmodels.model.critic_folder import HEADS
from search.calibrated_critics import Curve, read_curve
from search.protocol import Critic, Peers, ScoringContext

FILE = "features.json"
SCHEMA = 2

FEATURES = (
    *("length", "length so far", "numbers", "new numbers", "hedges", "repeats", "agents agree", "answered"),
    *("answer is a number", "answer length", "samples agree", "logprob", "logprob known"),
)
"""Features of each state, in order.

No feature is the agent, the position of the message or a property of the question, because a critic could then repeat
how often each agent or question fails without a look at the messages.
"""

_NUMBER = re.compile(r"[0-9]{1,15}(?:[.,][0-9]{1,15})*")
_HEDGE = re.compile(r"(?i)\b(?:sorry|cannot|can't|unable|error|maybe|perhaps|unsure|wait|however|apologize)\b")


def features_of(context: ScoringContext) -> list[float]:
    """Return the features of a state, one number per name in `FEATURES`; the answers of its peers are also used."""
    state, mas = context.state, context.mas
    texts = [mas.final_text(one.text) if one.acting == mas.sink else one.text for one in state.path()[1:]]
    last, earlier = (texts[-1] if texts else ""), texts[:-1]
    found = _NUMBER.findall(last)
    before = set(_NUMBER.findall(" ".join([state.question, *earlier])))
    ends = [numbers[-1] for text in earlier if (numbers := _NUMBER.findall(text))]
    answer, answers, _ = context.peers or Peers()
    others = list(answers)
    if answer in others:
        others.remove(answer)
    logprob = None if context.proposal is None else context.proposal.mean_logprob
    return [
        math.log1p(len(last)),
        math.log1p(sum(map(len, texts))),
        math.log1p(len(found)),
        sum(number not in before for number in found) / max(len(found), 1),
        math.log1p(len(_HEDGE.findall(last))),
        float(last in earlier),
        sum(number == found[-1] for number in ends) / len(ends) if found and ends else 0.0,
        float(answer is not None),
        float(answer is not None and parse_number(answer) is not None),
        math.log1p(len(answer or "")),
        others.count(answer) / len(others) if answer is not None and others else 0.0,
        0.0 if logprob is None else logprob,
        float(logprob is not None),
    ]


class FeatureModel(NamedTuple):
    """The parameters of a `FeatureCritic`.

    Attributes:
        kind: ``"masprm"`` for any state, ``"orm"`` for terminal states only.
        curve: Maps the features to the probability that an episode through the state is right.
        data: Counts of the training data.
        metrics: Metrics on held-out questions.
    """

    kind: str
    curve: Curve
    data: JSONMapping
    metrics: JSONMapping

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each standardized feature."""
        return self.curve.weights[: len(FEATURES)]

    def to_dict(self) -> JSONObject:
        """Return the JSON-serializable form of ``features.json``."""
        curve = {"mean": self.curve.mean, "scale": self.curve.scale, "weights": self.weights, "bias": self.curve.bias}
        stated = {"schema": SCHEMA, "features": list(FEATURES), "kind": self.kind}
        return {**stated, **curve, "data": self.data, "metrics": self.metrics}


def read_features(folder: Path) -> FeatureModel:
    """Read and check ``features.json``.

    Raises:
        DataError: The file is missing or is not JSON, or has a different version.
    """
    path = folder / FILE
    data = read_object(path)
    if data.get("schema") != SCHEMA or data.get("features") != list(FEATURES):
        raise DataError(
            f"{path}: expected schema {SCHEMA} with the features of this release, got {shown(data.get('schema'))} with "
            f"{shown(data.get('features'))}; train the critic again"
        )
    try:
        # No feature is ever missing, so the flags for missing values have no weight.
        weights = [*data["weights"], *(0.0 for _ in FEATURES)]
        curve = read_curve({**data, "weights": weights, "at": (), "level": ()}, "logistic", len(FEATURES))
        return FeatureModel(choice("kind", data["kind"], tuple(HEADS)), curve, data["data"], data["metrics"])
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"cannot read {path}: {error!r:.200}; train the critic again") from error


class FeatureCritic(Critic):
    """Scores states by features, in ``[-1, 1]``: ``2 p - 1``. It makes no model calls and does not read the texts.

    Agreement is computed among the samples scored in a search, so a state's value depends on the other samples.

    Args:
        folder: A folder written with ``mas-gym train ... --base features``.

    Attributes:
        name: ``"features"``.
        model: The regression.
        terminal_only: True for an outcome model.
    """

    name = "features"
    free = True
    reads_peers = True

    def __init__(self, folder: str | Path) -> None:
        self.model = read_features(Path(folder))
        self.terminal_only = self.model.kind == "orm"

    def identity(self) -> JSONObject:
        """Return the digest of the model."""
        text = repr(self.model.to_dict())
        return {"model": blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()}

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return one value in ``[-1, 1]`` per state, in order."""
        return [2 * self.model.curve.probability(features_of(one)) - 1 for one in contexts]
