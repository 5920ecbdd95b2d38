"""What is sent to an OpenAI-compatible server, and how its replies are read and checked.

Replies are untrusted. Every body, of whatever status, is read up to a limit that also
holds for its decompressed size; then its shape, the number of choices, every token
count and every log-probability are checked. Anything wrong becomes a `BadReply` with
the reason, which the caller retries.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from typing import Any, Literal, NamedTuple

from mas_gym.policies.base import MOST_TOKENS, Sample, SamplingRequest, finite_logprob, token_count

Api = Literal["chat", "completions"]

SEED_MASK = 2**31 - 1
"""Seeds are sent as 31 bits, which every known server takes as they are."""

_BYTES_PER_REPLY = 2**20
_BYTES_PER_TOKEN = 1024
_MAX_TEXT_CHARS = 2**20
_MAX_ROOT_CHARS = 1000
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


async def read_body(response: Any, limit: int) -> tuple[bytes, bool]:
    """Read and decompress a streamed response of any status.

    Args:
        response: An httpx response whose body has not been read.
        limit: Most bytes to keep, counted after decompression.

    Returns:
        The body, and whether it is complete; False if it was cut at the limit.

    Raises:
        BadReply: It is compressed with something other than gzip, or broken.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip", "deflate"):
        raise BadReply(f"its content-encoding is {encoding[:40]!r}; expected gzip or none")
    # 47: zlib or gzip, whichever the header of the data says.
    unpack = zlib.decompressobj(47) if encoding in ("gzip", "deflate") else None
    body, received = bytearray(), 0
    async for chunk in response.aiter_raw():
        received += len(chunk)
        try:
            body += chunk if unpack is None else unpack.decompress(chunk, limit + 1 - len(body))
        except zlib.error as error:
            raise BadReply(f"its {encoding} compression is broken ({error})") from error
        if max(len(body), received) > limit:
            return bytes(body[:limit]), False
    return bytes(body), True


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
    body = load_object(raw)
    if body.get("error"):
        raise BadReply(f"it reports an error: {str(body['error'])[:200]}")
    choices = body.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise BadReply("it has no list of choices")
    if len(choices) != n:
        raise BadReply(f"{n} choices were asked for and {len(choices)} came")
    choices = sorted(choices, key=lambda choice: _count(choice, "index"))
    found = [_choice(choice, api, logprobs) for choice in choices]
    usage = _part(body, "usage")
    prompt, generated = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    counts = _token_counts([tokens for _, tokens, _, _ in found], generated)
    samples = tuple(
        Sample(text, count, logprob, finish) for (text, _, logprob, finish), count in zip(found, counts, strict=True)
    )
    cached = _count(_part(usage, "prompt_tokens_details"), "cached_tokens")
    return WireReply(samples, prompt, cached, sum(counts))


def model_facts(body: dict[str, Any], model: str) -> dict[str, Any]:
    """Return what a server's list of models says of ``model`` that bears on its samples; empty if it is not listed."""
    entries = body.get("data")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("id") == model:
            root, window = entry.get("root"), entry.get("max_model_len")
            return {
                "id": model,
                "root": root[:_MAX_ROOT_CHARS] if isinstance(root, str) else None,
                "window": window if type(window) is int and abs(window) <= MOST_TOKENS else None,
            }
    return {}


def load_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in ``raw``; raises `BadReply` if there is none."""

    def refuse(constant: str) -> float:
        raise BadReply(f"it holds {constant}, which is not JSON")

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadReply(f"it is not whole JSON ({len(raw)} bytes)") from error
    if not isinstance(body, dict):
        raise BadReply("it is not a JSON object")
    return body


def _choice(choice: dict[str, Any], api: Api, logprobs: bool) -> tuple[str, int | None, float | None, str]:
    """Return (text, token count if known, summed log-probability, finish reason) of one choice."""
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
        raise BadReply(f"the server ended a message with finish_reason {str(finish)[:40]!r}")
    values = _logprobs(choice.get("logprobs"), api) if logprobs else None
    total = None if values is None else math.fsum(values)
    count = None if values is None else len(values)
    return clean(text).strip(), count, total, "length" if finish == "length" else "stop"


def _logprobs(found: Any, api: Api) -> list[float] | None:
    """Return the generated tokens' log-probabilities; None if the server sent none."""
    values = found.get("content" if api == "chat" else "token_logprobs") if isinstance(found, dict) else None
    if not isinstance(values, list):
        return None
    if api == "chat":
        values = [item.get("logprob") if isinstance(item, dict) else None for item in values]
    try:
        return [finite_logprob(value) for value in values]
    except ValueError as error:
        raise BadReply(f"a log-probability is {error}") from error


def _token_counts(known: list[int | None], total: int) -> list[int]:
    """Return each choice's tokens: as many as its log-probabilities, else an equal share of the server's total."""
    if len(known) == 1 and total > 0:
        return [total]
    if all(count is not None for count in known):
        return [count or 0 for count in known]
    share, rest = divmod(total, len(known))
    return [share + (i < rest) for i in range(len(known))]


def _part(body: dict[str, Any], name: str) -> dict[str, Any]:
    part = body.get(name)
    if part is None:
        return {}
    if not isinstance(part, dict):
        raise BadReply(f"its {name} is not an object")
    return part


def _count(part: dict[str, Any], name: str) -> int:
    """Return a count that the server may leave out."""
    value = part.get(name)
    try:
        return 0 if value is None else token_count(value)
    except ValueError as error:
        raise BadReply(f"its {name} is {error}; expected an integer from 0 to {MOST_TOKENS:,}") from error
