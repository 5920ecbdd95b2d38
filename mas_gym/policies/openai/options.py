"""How an OpenAI-compatible server is called, and how that is written in a policy string."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mas_gym.errors import ConfigError
from mas_gym.policies.meter import Price
from mas_gym.policies.openai.wire import Api


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIOptions:
    """How to call a server.

    Attributes:
        api: ``"chat"``, or ``"completions"`` for base models: system prompt and inputs joined by a blank line.
        logprobs: Ask for log-probabilities, which policy likelihood needs.
        choices: ``"seeds"``: one call per sample with its own seed; ``"n"``: one call for all samples of a prompt.
        max_concurrency: HTTP calls open at once.
        timeout: Seconds for one call, queueing at the server included.
        patience: Seconds that a request goes on while the server is away or limits its rate.
        max_attempts: Calls for one request that may fail otherwise (server errors, time-outs, unusable replies).
        key_env: Environment variable that holds the API key.
        price: Money per million prompt, cached and generated tokens.
        extra_body: Further parameters of every call, such as ``{"top_k": -1}`` for vLLM.
    """

    api: Api = "chat"
    logprobs: bool = True
    choices: Literal["seeds", "n"] = "seeds"
    max_concurrency: int = 128
    timeout: float = 300.0
    patience: float = 120.0
    max_attempts: int = 6
    key_env: str = "OPENAI_API_KEY"
    price: Price | str | None = None
    extra_body: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check every value. Raises `ConfigError`."""
        if self.price is not None:
            object.__setattr__(self, "price", _price(self.price))
        for name, allowed in (
            ("api", ("chat", "completions")),
            ("choices", ("seeds", "n")),
            ("logprobs", (True, False)),
        ):
            if getattr(self, name) not in allowed:
                raise _wrong(name, " or ".join(map(repr, allowed)), getattr(self, name))
        for name in ("max_concurrency", "max_attempts", "timeout", "patience"):
            value = getattr(self, name)
            kinds: Any = int if name.startswith("max_") else int | float
            if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
                raise _wrong(name, "a positive number", value)
        if self.extra_body is not None and not isinstance(self.extra_body, Mapping):
            raise _wrong("extra_body", "a mapping", self.extra_body)


def _price(value: Any) -> Price:
    parts = value.split(",") if isinstance(value, str) else value
    try:
        return Price(*(float(part) for part in parts))
    except (TypeError, ValueError) as error:
        raise _wrong("price", "prompt,cached,generated per million tokens", value) from error


def _wrong(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(f"policy 'openai', option {name}: expected {expected}, got {got!r}")


def split_address(argument: str) -> tuple[str, str | None]:
    """Read ``MODEL`` or ``MODEL@URL``; a model's name may hold an ``@`` of its own.

    Raises:
        ConfigError: No model is named.
    """
    found = re.fullmatch(r"(.*?)@(https?://.*)", argument, re.DOTALL)
    model, url = (found[1], found[2].rstrip("/")) if found else (argument, None)
    if not model:
        raise ConfigError(f"expected openai:MODEL@URL, got openai:{argument}; name the model before the @")
    return model, url
