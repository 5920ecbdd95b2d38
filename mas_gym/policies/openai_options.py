"""How an OpenAI-compatible server is called, and how that is written in a policy string."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mas_gym.errors import ConfigError
from mas_gym.policies.meter import Price
from mas_gym.policies.openai_wire import Api


@dataclass(frozen=True, slots=True)
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
    price: Price | None = None
    extra_body: Mapping[str, Any] | None = None


def parse_openai_spec(spec: str) -> tuple[str, str | None, OpenAIOptions]:
    """Read ``MODEL``, ``MODEL@URL`` or ``MODEL@URL#option=value&option=value``.

    ``price`` is ``prompt,cached,generated`` per million tokens; ``logprobs`` is ``0`` or ``1``.

    Raises:
        ConfigError: With the option that is wrong.
    """
    head, _, fragment = spec.partition("#")
    model, url = head, None
    for scheme in ("@http://", "@https://"):
        before, found, after = head.partition(scheme)
        if found:
            model, url = before, scheme[1:] + after.rstrip("/")
    if not model:
        raise ConfigError(f"expected openai:MODEL@URL, got openai:{spec!r}; name the model before the @")
    values = dict(item.partition("=")[::2] for item in fragment.split("&") if item)
    return model, url, _options(values)


def _options(values: dict[str, str]) -> OpenAIOptions:
    read: dict[str, Any] = {
        "api": _one_of("chat", "completions"),
        "choices": _one_of("seeds", "n"),
        "logprobs": lambda text: {"0": False, "1": True}[text],
        "max_concurrency": int,
        "timeout": float,
        "patience": float,
        "max_attempts": int,
        "key_env": str,
        "price": lambda text: Price(*(float(part) for part in text.split(","))),
    }
    chosen: dict[str, Any] = {}
    for name, text in values.items():
        if name not in read:
            raise ConfigError(f"unknown option {name!r} of an openai: policy; known are {', '.join(sorted(read))}")
        try:
            chosen[name] = read[name](text)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"the openai: option {name} cannot be {text!r}") from error
    return OpenAIOptions(**chosen)


def _one_of(*names: str) -> Any:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return read
