"""The faults of calls to a server, and the fault that an error body states.

Structured fields are read first: the HTTP status, ``error.code``, ``error.type``, ``error.param``, and the locations
of validation errors. What only the message states is read with `_SENTENCES`, a table of whole sentences of named
servers. An error that neither names is ``"refused"``: the request fails with the server's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.text import one_line
from mas_gym.policies.base import MOST_TOKENS

FaultKind = Literal[
    "connection", "reset", "timeout", "rate limit", "server error", "bad reply",
    "too long", "token limit", "parameter", "system role", "quota", "refused",
]  # fmt: skip

_UNAVAILABLE_STATUS = {401, 402, 403, 404, 405}
_READ_CHARS = 4000
_DEPTH = 3


class Fault(NamedTuple):
    """One failed call.

    Attributes:
        kind: Kind of failure. The first six kinds can be retried. ``"too long"``: the prompt, or the prompt with the
            reply, exceeds the context window; ``"token limit"``: the requested reply is longer than the server allows;
            ``"parameter"``: a parameter is not supported; ``"system role"``: the model's template has no system
            messages; ``"quota"``: the account has no credit; ``"refused"``: any other rejection.
        reason: Description for the error message, in one line.
        status: The HTTP status, or 0.
        retry_after: Seconds to wait before a retry, if the server sent them; else None.
        window: The context window in tokens, if stated.
        prompt: The length of the prompt in tokens, if stated.
        limit: The longest reply in tokens, if stated.
        params: The parameters that the error is about.
    """

    kind: FaultKind
    reason: str
    status: int = 0
    retry_after: float | None = None
    window: int | None = None
    prompt: int | None = None
    limit: int | None = None
    params: tuple[str, ...] = ()

    @property
    def away(self) -> bool:
        """Whether the server seems down or overloaded, so that waiting may help."""
        return self.kind in ("connection", "rate limit") or self.status in (502, 503, 504)

    @property
    def transient(self) -> bool:
        """Whether the same call may succeed later; False for unusable replies, which the server may always return."""
        return self.kind in ("connection", "rate limit", "server error", "reset", "timeout")

    @property
    def hopeless(self) -> bool:
        """Whether every request would fail, because the key, the model, the address or the account is wrong."""
        return self.kind == "quota" or self.status in _UNAVAILABLE_STATUS or 300 <= self.status < 400


_MAXIMUM = r"This model's maximum context length is (?P<window>\d+) tokens\. However, "
_SPLIT = r"you requested \d+ tokens \((?P<prompt>\d+) in the messages, \d+ in the completion\)\. "

_SENTENCES: dict[FaultKind, tuple[str, ...]] = {
    "too long": (
        # vLLM. Its version 0.15 states the window less the requested reply as the window. With "at least", it stops
        # counting at the limit, so the prompt's length is unknown.
        _MAXIMUM + r"your request has (?P<prompt>\d+) input tokens\. Please reduce the length of the input messages\."
        r"(?: None)?",
        r"This model's maximum context length is \d+ tokens\. However, your request has (?P<prompt>\d+) input tokens\. "
        r"Please reduce the length of the input messages\. \(parameter=input_tokens, value=\d+\)",
        r"'max_tokens' or 'max_completion_tokens' is too large: \d+\. This model's maximum context length is "
        r"(?P<window>\d+) tokens and your request has (?P<prompt>\d+) input tokens \(.*",
        r"You passed (?P<prompt>\d+) input tokens and requested \d+ output tokens\. However, the model's context "
        r"length is only (?P<window>\d+) tokens, resulting in a maximum input length of \d+ tokens\. .*",
        _MAXIMUM + r"(?:you requested \d+ output tokens and )?your prompt contains "
        r"(?:at least \d+ input tokens|(?P<prompt>\d+) input tokens), .*",
        _MAXIMUM + r"your prompt contains \d+ characters \(more than \d+ characters, which is the upper bound for \d+ "
        r"input tokens\)\. Please reduce the length of the input prompt\..*",
        # vLLM and DeepSeek
        _MAXIMUM + _SPLIT + r"Please reduce the length of the messages or completion\.",
        # Ollama
        r"prompt too long; exceeded max context length by \d+ tokens",
        # LM Studio
        r"Trying to keep the first (?P<prompt>\d+) tokens when context the overflows\. However, the model is loaded "
        r"with context length of only (?P<window>\d+) tokens, which is not enough\. .*",
        r"Cannot truncate prompt with n_keep \((?P<prompt>\d+)\) >= n_ctx \((?P<window>\d+)\)",
        # Anthropic through LiteLLM
        r"prompt is too long: (?P<prompt>\d+) tokens > (?P<window>\d+) maximum",
        # TGI
        r"Input validation error: `inputs` tokens \+ `max_new_tokens` must be <= (?P<window>\d+)\. Given: "
        r"(?P<prompt>\d+) `inputs` tokens and \d+ `max_new_tokens`",
        r"Input validation error: `inputs` must have less than (?P<window>\d+) tokens\. Given: (?P<prompt>\d+)",
        # SGLang
        r"Requested token count exceeds the model's maximum context length of (?P<window>\d+) tokens\. You requested a "
        r"total of \d+ tokens: (?P<prompt>\d+) tokens from the input messages and \d+ tokens for the completion\. .*",
        r"The input \((?P<prompt>\d+) tokens\) is longer than the model's context length \((?P<window>\d+) tokens\)\.",
        # OpenAI
        _MAXIMUM + r"your messages resulted in (?P<prompt>\d+) tokens.*",
        r"Input tokens exceed the configured limit of (?P<window>\d+) tokens\. Your messages resulted in "
        r"(?P<prompt>\d+) tokens\. .*",
        # Gemini
        r"The input token count (?:\((?P<prompt>\d+)\) )?exceeds the maximum number of tokens allowed "
        r"\((?P<window>\d+)\)\.",
    ),
    "token limit": (
        # vLLM
        r"max(?:_completion)?_tokens=\d+ cannot be greater than max_model_len=(?P<limit>\d+)\. .*",
        # OpenAI
        r"(?P<params>max_(?:completion_)?tokens) is too large: \d+\. This model supports at most (?P<limit>\d+) "
        r"completion tokens, whereas you provided \d+\.",
        # DeepSeek
        r"Invalid (?P<params>max_tokens) value, the valid range of max_tokens is \[1, (?P<limit>\d+)\]",
        # Groq
        r"`?(?P<params>max_(?:completion_)?tokens)`? must be less than or equal to `?(?P<limit>\d+)`?, the maximum "
        r"value for `?max_(?:completion_)?tokens`? is less than the `?context_window`? for this model",
    ),
    "parameter": (
        # vLLM
        r"Requested sample (?P<top_logprobs>logprobs) of \d+, which is (?:is )?greater than max allowed: \d+",
        # LiteLLM
        r"litellm\.UnsupportedParamsError: .* does not support parameters: \[(?P<params>[^\]]*)\].*",
        r"litellm\.UnsupportedParamsError: \S+ (?:models )?(?:don't|doesn't) support (?P<params>\w+)=.*",
        # Anthropic through LiteLLM
        r"`temperature` and `(?P<params>top_p)` cannot both be specified for this model\. Please use only one\.",
        # OpenAI
        r"Unsupported (?:parameter|value): '(?P<params>\w+)' (?:is not supported|does not support .*) "
        r"with this model\..*",
        # Groq
        r"`(?P<params>\w+)` is not supported with this model",
    ),
    "system role": (
        # vLLM
        r"System role not supported",
        r"Conversation roles must alternate user/assistant/user/assistant/\.\.\.",
        # llama.cpp, LM Studio, Gemini
        r"(?:.*\sError: )?Jinja Exception: System role not supported",
        r"Error rendering prompt with jinja template: .?Only user and assistant roles .*",
        r"Developer instruction is not enabled for models/[\w.-]+",
    ),
}
"""Whole messages of named servers, by kind of fault, as regular expressions with the groups ``window``, ``prompt`` and
``limit``, and ``params``: the parameters that the message is about, or a group named like one of them."""

_LITELLM = re.compile(
    r"litellm\.\w+: [^{]{0,200}?\w+(?:Exception|Error) - (?:b')?(?P<inner>.*?)'?"
    r"(?:\.?\s*(?:model=|Received Model Group=|No fallback model group found).*)?",
    re.DOTALL,
)
"""The error of another server in LiteLLM's message."""


def read_error(status: int, body: bytes) -> Fault:
    """Return the fault that an error response states.

    Args:
        status: The HTTP status.
        body: The body, of any form.
    """
    text = body.decode("utf-8", "replace")
    found = _json(text)
    fault = _read(found, text)
    if status == 402:
        return fault._replace(kind="quota")
    if found is None and text.startswith("{"):
        return Fault("bad reply", f"an incomplete error: {fault.reason}")
    return fault


def _json(text: str) -> object:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found


def _read(found: object, text: str, depth: int = 0) -> Fault:
    # Gemini's body is a list with one object.
    body = found[0] if isinstance(found, list) and len(found) == 1 else found
    if not isinstance(body, dict):
        return _stated(text, text)
    error = body["error"] if isinstance(body.get("error"), dict) else body
    message = next((said for key in ("message", "error") if isinstance(said := error.get(key), str)), "")
    read = _stated(message, message or text)
    if depth < _DEPTH and read.kind == "refused" and (inner := _upstream(message)):
        read = _read(_json(inner), inner, depth + 1)._replace(reason=read.reason)
    return _structured(error, read)


def _upstream(message: str) -> str:
    """Return the error of another server that a message quotes; empty if there is none."""
    if message.startswith("{"):
        return message
    wrapped = _LITELLM.fullmatch(message[:_READ_CHARS])
    return wrapped["inner"].strip() if wrapped else ""


def _stated(message: str, shown: str) -> Fault:
    """Return the fault that a message states, if it is a sentence of a named server; its reason is ``shown``."""
    said = " ".join(message[:_READ_CHARS].split())
    for kind, sentence in ((kind, sentence) for kind, listed in _SENTENCES.items() for sentence in listed):
        if found := re.fullmatch(sentence, said):
            groups = found.groupdict()
            window, prompt, limit = (_count(groups.pop(name, None)) for name in ("window", "prompt", "limit"))
            params = tuple(re.findall(r"\w+", groups.pop("params", None) or "")) or tuple(groups)
            return Fault(kind, one_line(shown), window=window, prompt=prompt, limit=limit, params=params)
    return Fault("refused", one_line(shown))


def _structured(error: JSONObject, read: Fault) -> Fault:
    """Return an error with the kind that its fields state; what its message states completes it."""
    code, kind, param = (str(error.get(key) or "") for key in ("code", "type", "param"))
    if "insufficient_quota" in (code, kind):
        return read._replace(kind="quota")
    if kind == "exceed_context_size_error":
        # llama.cpp, alone or in Ollama.
        return read._replace(
            kind="too long", window=_count(error.get("n_ctx")), prompt=_count(error.get("n_prompt_tokens"))
        )
    if code == "context_length_exceeded":
        return read._replace(kind="too long")
    params = (param,) if param else tuple(_located(error))
    if read.kind != "refused" or not params:
        return read
    return read._replace(kind="parameter", params=params)


def _located(error: JSONObject) -> Iterator[str]:
    """Yield the parameters that a list of validation errors locates in the body (FastAPI, Mistral)."""
    message = error.get("message")
    listed = (message if isinstance(message, dict) else error).get("detail")
    for fault in listed if isinstance(listed, list) else ():
        place = fault.get("loc") if isinstance(fault, dict) else None
        if isinstance(place, list) and len(place) > 1 and place[0] == "body" and isinstance(place[1], str):
            yield place[1]


def _count(value: object) -> int | None:
    """Return a positive number of tokens; None if a server states none or an implausible one."""
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10 else value
    return number if type(number) is int and 0 < number <= MOST_TOKENS else None
