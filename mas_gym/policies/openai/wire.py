"""What goes over the wire to an OpenAI-compatible server and what may come back; pure functions.

A reply is checked as a stranger's: its size, its shape, the number of choices and
every log-probability. Whatever is wrong with it becomes a `BadReply` with the
reason, which the caller retries.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal, NamedTuple

from mas_gym.policies.base import Sample, SamplingRequest

Api = Literal["chat", "completions"]

SEED_MASK = 2**31 - 1
"""Seeds are sent as 31 bits, which every known server takes as they are."""

_BYTES_PER_REPLY = 2**20
_BYTES_PER_TOKEN = 1024
_MAX_TEXT_CHARS = 2**20
_LOGPROB_SLACK = 1e-3

_SURROGATES = re.compile("[\ud800-\udfff]")
_CHAT_MARKUP = re.compile(
    r"<(?=\|[\w./-]{1,64}\|>)"
    r"|<(?=/?(?:s|bos|eos|sys|system|user|assistant|start_of_turn|end_of_turn)>)"
    r"|<(?=</?SYS>>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS)\])",
    re.IGNORECASE,
)


class BadReply(Exception):
    """A reply that arrived but cannot be used."""


class WireReply(NamedTuple):
    """A checked reply.

    Attributes:
        samples: In the order of the reply's choice indices.
        prompt_tokens: As the server counts them, 0 if it does not.
        cached_tokens: Prompt tokens that it says it had cached.
        generated_tokens: Over all choices.
    """

    samples: tuple[Sample, ...]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


def clean(text: str) -> str:
    """Replace lone surrogates, which neither JSON nor SQLite can carry."""
    return _SURROGATES.sub("\ufffd", text)


def defuse(text: str) -> str:
    """Return ``text`` with chat-template markup broken by a space, so that no server reads a role out of it.

    Servers tokenise message contents with their special tokens switched on: a message that says
    ``<|im_start|>system`` would otherwise speak as the system. All else is left as it is.
    """
    return _CHAT_MARKUP.sub(lambda match: match.group() + " ", clean(text))


def payload(request: SamplingRequest, seeds: tuple[int, ...], model: str, api: Api, logprobs: bool) -> dict[str, Any]:
    """Return the body that asks for ``len(seeds)`` samples of ``request``, seeded with the first seed."""
    body: dict[str, Any] = {
        "model": model,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_tokens": request.max_new_tokens,
        "seed": seeds[0] & SEED_MASK,
    }
    if len(seeds) > 1:
        body["n"] = len(seeds)
    texts = [(m.role, clean(m.content) if m.role == "system" else defuse(m.content)) for m in request.messages]
    if api == "chat":
        body["messages"] = [{"role": role, "content": text} for role, text in texts]
        if logprobs:
            body["logprobs"] = True
    else:
        body["prompt"] = "\n\n".join(text for _, text in texts) + "\n\n"
        if logprobs:
            body["logprobs"] = 1
    return body


def reply_limit(request: SamplingRequest, n: int) -> int:
    """Return how many bytes a reply with ``n`` choices may have."""
    return n * (_BYTES_PER_REPLY + _BYTES_PER_TOKEN * request.max_new_tokens)


def parse_reply(raw: bytes, n: int, api: Api, logprobs: bool) -> WireReply:
    """Check and read a reply that should hold ``n`` choices.

    Raises:
        BadReply: With the reason.
    """
    body = _load(raw)
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    choices = body.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise BadReply("it has no list of choices")
    if len(choices) != n:
        raise BadReply(f"{n} choices were asked for and {len(choices)} came")
    choices = sorted(choices, key=lambda choice: _count(choice.get("index")))
    found = [_choice(choice, api, logprobs) for choice in choices]
    generated = _count(usage.get("completion_tokens"))
    counts = _token_counts([tokens for _, tokens, _, _ in found], generated)
    samples = tuple(
        Sample(text, count, logprob, finish) for (text, _, logprob, finish), count in zip(found, counts, strict=True)
    )
    details = usage.get("prompt_tokens_details") or {}
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    return WireReply(samples, _count(usage.get("prompt_tokens")), cached, sum(counts))


def _load(raw: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> float:
        raise BadReply(f"it holds {constant}, which is not JSON")

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadReply(f"it is not whole JSON ({len(raw)} bytes)") from error
    if not isinstance(body, dict):
        raise BadReply("it is not a JSON object")
    if body.get("error"):
        raise BadReply(f"it reports an error: {str(body['error'])[:200]}")
    return body


def _choice(choice: dict[str, Any], api: Api, logprobs: bool) -> tuple[str, int | None, float | None, str]:
    """Return (text, token count if told, summed log-probability, finish reason) of one choice."""
    if api == "chat":
        message = choice.get("message")
        if not isinstance(message, dict):
            raise BadReply("a choice has no message")
        text = message.get("content")
    else:
        text = choice.get("text")
    if text is None:
        text = ""
    if not isinstance(text, str) or len(text) > _MAX_TEXT_CHARS:
        raise BadReply("a choice's text is not a string of at most a million characters")
    finish = choice.get("finish_reason")
    if finish not in ("stop", "length", "eos", "eos_token"):
        raise BadReply(f"the server ended a message with finish_reason {finish!r}")
    values = _logprobs(choice.get("logprobs"), api) if logprobs else None
    total = None if values is None else math.fsum(values)
    count = None if values is None else len(values)
    return clean(text).strip(), count, total, "length" if finish == "length" else "stop"


def _logprobs(found: Any, api: Api) -> list[float] | None:
    """Return the generated tokens' log-probabilities; None where the server sent none."""
    values = found.get("content" if api == "chat" else "token_logprobs") if isinstance(found, dict) else None
    if not isinstance(values, list):
        return None
    if api == "chat":
        values = [item.get("logprob") if isinstance(item, dict) else None for item in values]
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value > _LOGPROB_SLACK:
            raise BadReply(f"a log-probability is {value!r}")
    return [min(float(value), 0.0) for value in values]


def _token_counts(told: list[int | None], total: int) -> list[int]:
    """Return each choice's tokens: told by its log-probabilities, else an equal share of the server's total."""
    if len(told) == 1 and total > 0:
        return [total]
    if all(count is not None for count in told):
        return [count or 0 for count in told]
    share, rest = divmod(total, len(told))
    return [share + (i < rest) for i in range(len(told))]


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
