"""Reward models on vLLM's server: its endpoints ``/pooling``, ``/classify`` and ``/score``.

The critic's spec is the address, as in ``http://127.0.0.1:8000/pooling#model=NAME&format=qwen``. The connection,
retries and limits are those of ``openai:`` policies; every reply is validated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from mas_gym.errors import ConfigError, EngineUnavailableError, PolicyError, is_number, shown, shown_url
from mas_gym.internal.event_loop import from_thread, together
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.suggestions import unknown_name
from rewardmodels.model.model_critic import rounded
from rewardmodels.verifiers.published_models import AGGREGATES, STEP_MARKS, Aggregate, qwen_chat, shepherd_text
from search.protocol import Critic, Scores, ScoringContext

ENDPOINTS = ("pooling", "classify", "score")
COLUMNS = {"qwen": 1, "shepherd": 0, "skywork": 0}
"""Column with the score in a step's row, by format of step reward models."""


class ServerCritic(Critic):
    """Scores states with a reward model on vLLM's server.

    ==============  ==========================================================  ==========================
    endpoint        sends                                                       value
    ==============  ==========================================================  ==========================
    ``/pooling``    the transcript in the ``format`` given (step reward model,  ``2 p - 1`` of the
                    served with step pooling: one row per step)                 aggregate of the steps
    ``/classify``   a chat of question and answer (scalar reward model)         ``tanh(logit / scale)``
    ``/score``      question and answer as a pair (cross-encoder)               ``2 p - 1``
    ==============  ==========================================================  ==========================

    Args:
        url: Address with the endpoint.
        model: The model's name on the server.
        format: ``"qwen"``, ``"shepherd"`` or ``"skywork"``, for ``/pooling``.
        aggregate: As in `rewardmodels.verifiers.published_models.StepRewardModel`.
        scale: As in `rewardmodels.verifiers.published_models.ScalarRewardModel`.
        prefixes: Also score non-terminal states with ``/classify`` and ``/score``.
        max_batch: Maximum number of concurrent requests.
        options: Options of `mas_gym.policies.openai.OpenAIOptions`, such as ``timeout``, ``key_env`` and ``revision``.

    Raises:
        ConfigError: The address or a setting is invalid.
        MissingDependencyError: The ``openai`` package is not installed.
    """

    free = False
    concurrent = True

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        format: str = "qwen",
        aggregate: Aggregate = "last",
        scale: float = 1.0,
        prefixes: bool = False,
        max_batch: int = 64,
        **options: Any,
    ) -> None:
        """Check the settings; nothing is sent yet."""
        from mas_gym.plugins import build
        from mas_gym.policies.openai import OpenAIOptions, OpenAIPolicy, check_address

        check_address(url)
        self._url = url.rstrip("/")
        base, _, self._endpoint = self._url.rpartition("/")
        if self._endpoint not in ENDPOINTS or not urlsplit(url).netloc:
            raise ConfigError(
                f"expected http://HOST:PORT/ENDPOINT, where ENDPOINT is one of {', '.join(ENDPOINTS)}, got {url!r}"
            )
        if not model:
            raise ConfigError(f"critic {url}: expected #model=NAME, got none; the server's /v1/models lists the names")
        if format not in COLUMNS:
            raise unknown_name("format", format, COLUMNS)
        if aggregate not in AGGREGATES:
            raise unknown_name("aggregate", aggregate, AGGREGATES)
        if not is_number(scale) or scale <= 0:
            raise ConfigError(f"critic {url}: expected a positive scale, got {scale!r}")
        settings = build("policy 'openai'", OpenAIOptions, max_concurrency=max_batch, **options)
        self._server = OpenAIPolicy(model, re.sub(r"/v1$", "", base) + "/v1", settings)
        self.name = f"http:{model}"
        self.max_batch = max_batch
        self.terminal_only = self._endpoint != "pooling" and not prefixes
        self._model, self._format, self._aggregate, self._scale = model, format, AGGREGATES[aggregate], scale
        self._stated = {"endpoint": self._endpoint, "prefixes": prefixes}
        self._stated |= (
            {"format": format, "aggregate": aggregate} if self._endpoint == "pooling" else {"scale": float(scale)}
        )

    def identity(self) -> JSONObject:
        """Return the model, its entry in the server's model list, its ``revision``, and the settings."""
        return {"server": self._server, **self._stated}

    def score(self, contexts: Sequence[ScoringContext]) -> Scores:
        """Return one value per state, in order; NaN, with the reason, for an unusable reply.

        Raises:
            EngineUnavailableError: The server is down, rejects the key or does not have the model.
        """
        found = from_thread(together(map(self._one, contexts)))
        return Scores([value for value, _ in found], reasons=[reason for _, reason in found])

    async def _one(self, context: ScoringContext) -> tuple[float, str]:
        turns = context.state.path()[1:]
        if not turns:
            return math.nan, "it has no messages"
        texts = [self._clean(turn.text) for turn in turns]
        body = self._body(self._clean(context.state.question), texts)
        try:
            reply = await self._server.post(self._url, {"model": self._model, **body})
            return rounded(self._value(reply, len(texts))), ""
        except EngineUnavailableError:
            raise
        except (PolicyError, ValueError) as error:
            return math.nan, f"{shown_url(self._url)}: {error}"

    def _clean(self, text: str) -> str:
        """Insert a space into step tags and chat markup in a text; replace line breaks that are step tags by spaces."""
        from mas_gym.policies.openai_format import defuse

        mark = STEP_MARKS[self._format]
        if self._endpoint == "pooling":
            text = " ".join(text.split("\n")) if mark == "\n" else text.replace(mark, f"{mark[0]} {mark[1:]}")
        return defuse(text.strip())

    def _body(self, question: str, texts: Sequence[str]) -> JSONObject:
        answer = "\n\n".join(texts)
        if self._endpoint == "score":
            return {"text_1": question, "text_2": answer}
        if self._endpoint == "classify":
            turns = [("user", question), ("assistant", answer)]
            return {"messages": _turns(turns), "add_generation_prompt": False, "use_activation": False}
        if self._format == "qwen":
            return {"messages": _turns(qwen_chat(question, texts)), "add_generation_prompt": False}
        if self._format == "shepherd":
            return {"input": shepherd_text(question, texts)}
        return {"input": "".join(f"{line}\n" for line in (question, *texts))}

    def _value(self, reply: JSONObject, steps: int) -> float:
        """Return the value in a reply. Raises `ValueError` with the reason if there is none."""
        data = reply.get("data")
        if not isinstance(data, list) or len(data) != 1 or not isinstance(data[0], dict):
            raise ValueError(f"expected data with one entry, got {shown(data)}")
        if self._endpoint == "score":
            return 2 * _share(data[0].get("score")) - 1
        if self._endpoint == "classify":
            probs = data[0].get("probs")
            if not isinstance(probs, list) or len(probs) != 1:
                raise ValueError(f"expected one number from a model with one label, got {shown(probs)}")
            return math.tanh(_number(probs[0]) / self._scale)
        rows = data[0].get("data")
        if not isinstance(rows, list) or len(rows) != steps:
            got = f"{len(rows)} rows" if isinstance(rows, list) else shown(rows)
            raise ValueError(
                f"expected {steps} rows, one per step, got {got}; serve the model with step pooling "
                "(--pooler-config with its step tag)"
            )
        column = COLUMNS[self._format]
        shares = []
        for row in rows:
            values = row if isinstance(row, list) else [row]
            if not column < len(values) <= 2:
                raise ValueError(f"expected rows of one or two numbers, got {shown(row)}")
            shares.append(_share(values[column]))
        return 2 * self._aggregate(shares) - 1


def _turns(turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def _number(value: object) -> float:
    if not is_number(value) or abs(value) > 1e6:
        raise ValueError(f"expected a finite number with absolute value at most 1e6, got {shown(value)}")
    return float(value)


def _share(value: object) -> float:
    share = _number(value)
    if not -1e-6 <= share <= 1 + 1e-6:
        raise ValueError(f"expected a probability, got {shown(value)}")
    return min(max(share, 0.0), 1.0)


def http(argument: str, **options: Any) -> ServerCritic:
    """Load ``"http:URL"``, or an address without this prefix."""
    return ServerCritic(argument if "://" in argument else f"http:{argument}", **options)


def https(argument: str, **options: Any) -> ServerCritic:
    """Load an address that begins with ``https:``."""
    return ServerCritic(f"https:{argument}", **options)
