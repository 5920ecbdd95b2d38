"""Request format of OpenAI-compatible servers, and validation of their replies.

Replies are untrusted: the structure, the number of choices, every token count and every
log-probability are checked. An invalid reply raises a `BadReply` with the reason, and the
caller retries.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from mas_gym.errors import PolicyError
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies.base import (
    MOST_TOKENS,
    Certainty,
    Sample,
    SamplingRequest,
    TokenTrace,
    finite_logprob,
    token_count,
)
from mas_gym.policies.reasoning import OPENINGS, after_reasoning
from mas_gym.systems.tool_calls import ToolCall, arguments_text, with_calls

Api = Literal["chat", "completions"]

SEED_MASK = 2**31 - 1
"""Seeds are sent as 31 bits, which every known server accepts unchanged."""

_SURROGATES = re.compile("[\ud800-\udfff]")
_CHAT_MARKUP = re.compile(
    r"<(?=\|[\w./-]{1,64}\|>)"
    r"|<(?=/?(?:s|bos|eos|sys|system|user|assistant|start_of_turn|end_of_turn)>)"
    r"|<(?=</?SYS>>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS)\])",
    re.IGNORECASE,
)


_STOPPED = ("stop", "eos", "eos_token", "stop_sequence", "end_turn", "null", "none", "")
_CUT = ("length", "model_length", "max_tokens")
"""Finish reasons of complete messages and of messages cut at the token limit, in lower case."""


_REASONING = ("reasoning_content", "reasoning")
"""Fields of a message with its reasoning."""


class BadReply(Exception):
    """A reply that arrived but is unusable."""


class WireReply(NamedTuple):
    """A checked reply.

    Attributes:
        samples: In the order of the reply's choice indices.
        prompt_tokens: As counted by the server; 0 if it does not report them.
        cached_tokens: Prompt tokens that the server reports as cached.
        generated_tokens: Sum over all choices.
        first: The most likely first tokens of the only choice, with their log-probabilities; empty if not listed.
        counted: Whether the server reports the number of generated tokens, by ``usage`` or by their log-probabilities.
        reasoned: Number of choices that contain only reasoning.
    """

    samples: tuple[Sample, ...]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    first: tuple[tuple[str, float], ...] = ()
    counted: bool = True
    reasoned: int = 0

    @property
    def likely(self) -> str:
        """The most likely first token of the only choice; a token that opens reasoning if it contains no other text."""
        return OPENINGS[0] if self.reasoned else max(self.first, key=lambda pair: pair[1], default=("", 0.0))[0]


class _Read(NamedTuple):
    """One choice: its message, its reasoning, its tokens' log-probabilities if known, and its finish reason."""

    text: str
    reasoning: str
    values: list[float] | None
    finish: str


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which neither JSON nor SQLite can represent."""
    return _SURROGATES.sub("\ufffd", text)


def defuse(text: str) -> str:
    """Return ``text`` with chat-template markup broken by a space, so that no server interprets it as a role.

    Servers tokenize message contents with special tokens enabled: a message that contains
    ``<|im_start|>system`` would otherwise be read as a system message. Other text is unchanged.
    """
    return _CHAT_MARKUP.sub(lambda match: match.group() + " ", replace_surrogates(text))


def payload(
    request: SamplingRequest, seeds: tuple[int, ...], model: str, api: Api, logprobs: bool, top: int = 0
) -> JSONObject:
    """Return the body that requests ``len(seeds)`` samples, seeded with the first seed.

    ``top`` is the number of most likely tokens for which log-probabilities are also requested.
    """
    body: JSONObject = {
        "model": model,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_tokens": request.max_new_tokens,
        "seed": seeds[0] & SEED_MASK,
    }
    if len(seeds) > 1:
        body["n"] = len(seeds)
    if request.traced:
        # An extension of vLLM's server; other servers ignore it or reject it.
        body["return_token_ids"] = True
    texts = [
        (m.role, replace_surrogates(m.content) if m.role == "system" else defuse(m.content)) for m in request.messages
    ]
    if api == "chat":
        extra = json.loads(request.extra_body) if request.extra_body else {}
        more = _defused(extra.pop("messages", [{}] * len(texts)))
        pairs = zip(texts, more, strict=True)
        body["messages"] = [{"role": role, "content": text, **own} for (role, text), own in pairs]
        body |= extra
        if logprobs:
            body["logprobs"] = True
            if top:
                body["top_logprobs"] = top
    elif request.extra_body:
        raise PolicyError("the completions endpoint takes only plain text; leave out api=completions")
    else:
        body["prompt"] = "\n\n".join(text for _, text in texts) + "\n\n"
        if logprobs:
            body["logprobs"] = max(top, 1)
    return body


def _defused(value: Any) -> Any:
    """Return JSON with every string defused."""
    if isinstance(value, dict):
        return {key: _defused(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_defused(entry) for entry in value]
    return defuse(value) if isinstance(value, str) else value


def system_in_first(messages: list[JSONObject]) -> list[JSONObject]:
    """Return chat messages with the system message in front of the next one, separated by a blank line."""
    if len(messages) < 2 or messages[0]["role"] != "system":
        return messages
    system, first, *rest = messages
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]


def parse_reply(
    raw: bytes,
    n: int,
    api: Api,
    logprobs: bool,
    tools: bool = False,
    traced: bool = False,
    count: Callable[[str], int] | None = None,
) -> WireReply:
    """Parse and check a reply that should have ``n`` choices.

    Args:
        raw: The body.
        n: Number of choices.
        api: The endpoint.
        logprobs: Whether log-probabilities were requested.
        tools: Whether tools were offered; if so, texts may end with tool calls (see `mas_gym.systems.prompts`).
        traced: Whether token ids were requested.
        count: Estimates the number of tokens of a text, for servers that report none.

    Raises:
        BadReply: The reply is unusable; the message gives the reason.
    """
    body = load_object(raw)
    if body.get("error"):
        raise BadReply(f"it reports an error: {str(body['error'])[:200]}")
    choices = body.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise BadReply("it has no list of choices")
    if len(choices) != n:
        raise BadReply(f"expected {n} choices, got {len(choices)}" + ("; use choices=seeds" if n > 1 else ""))
    choices = sorted(choices, key=lambda choice: _count(choice, "index"))
    found = [_choice(choice, api, logprobs, tools) for choice in choices]
    traces = [_trace(body, choice, one.values) if traced else None for choice, one in zip(choices, found, strict=True)]
    usage = _part(body, "usage")
    prompt, generated = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    if generated or any(one.finish == "length" for one in found):
        # Gemini counts reasoning only in the total.
        generated = max(generated, _count(usage, "total_tokens") - prompt)
    counted = generated > 0 or all(one.values is not None for one in found)
    counts = _token_counts([None if one.values is None else len(one.values) for one in found], generated)
    if not counted and count is not None:
        counts = [count(one.reasoning + one.text) for one in found]
    samples = tuple(
        Sample(text, tokens, None, finish)
        if values is None
        else Sample(text, tokens, math.fsum(values), finish, Certainty(min(values)) if values else None, trace)
        for (text, _, values, finish), tokens, trace in zip(found, counts, traces, strict=True)
    )
    cached = _count(_part(usage, "prompt_tokens_details"), "cached_tokens")
    first = _first_tokens(choices[0].get("logprobs"), api) if logprobs and n == 1 else ()
    reasoned = sum(bool(one.reasoning) and not one.text for one in found)
    return WireReply(samples, prompt, cached, sum(counts), first, counted, reasoned)


def model_facts(body: JSONObject, model: str) -> JSONObject:
    """Return the fields of ``model`` in a server's model list that affect its samples; empty if it is not listed."""
    entries = body.get("data")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("id") == model:
            root, window = entry.get("root"), entry.get("max_model_len")
            return {
                "id": model,
                "root": root if isinstance(root, str) else None,
                "window": window if type(window) is int and abs(window) <= MOST_TOKENS else None,
            }
    return {}


def load_object(raw: bytes) -> JSONObject:
    """Return the JSON object in ``raw``. Raises `BadReply` if there is none."""

    def refuse(constant: str) -> float:
        raise BadReply(f"it contains {constant}, which is not JSON")

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadReply(f"it is not complete JSON ({len(raw)} bytes)") from error
    if not isinstance(body, dict):
        raise BadReply("it is not a JSON object")
    return body


def _choice(choice: JSONObject, api: Api, logprobs: bool, tools: bool) -> _Read:
    calls: list[ToolCall] = []
    reasoning = ""
    whole: object
    if api == "chat":
        message = choice.get("message")
        if not isinstance(message, dict):
            raise BadReply("a choice has no message")
        whole, reasoning = _content(message)
        calls = _tool_calls(message.get("tool_calls"), tools)
    else:
        whole = choice.get("text")
    if whole is None:
        whole = ""
    if not isinstance(whole, str):
        raise BadReply("a choice's text is not a string")
    finish = choice.get("finish_reason")
    ended = str(finish).lower()
    if ended not in (*_STOPPED, *_CUT) and not (calls and finish == "tool_calls"):
        raise BadReply(f"the server ended a message with finish_reason {str(finish)[:40]!r}")
    values = _logprobs(choice.get("logprobs"), api) if logprobs else None
    text = after_reasoning(whole)
    reasoning += whole[: len(whole) - len(text)]
    text = with_calls(replace_surrogates(text), calls) if tools else replace_surrogates(text).strip()
    return _Read(text, reasoning, values, "length" if ended in _CUT else "stop")


def _content(message: JSONObject) -> tuple[object, str]:
    """Return a message's content, and the reasoning that the server separated from it."""
    content = message.get("content")
    reasoning = next((text for key in _REASONING if isinstance(text := message.get(key), str)), "")
    if not isinstance(content, list):
        return content, reasoning
    parts = [part if isinstance(part, dict) else {} for part in content]
    texts = [part.get("text") for part in parts if part.get("type") in ("text", "output_text")]
    if not all(isinstance(text, str) for text in texts):
        raise BadReply("a text part of a message is not a string")
    reasoning += "".join(json.dumps(part) for part in parts if part.get("type") in ("thinking", "reasoning"))
    return "".join(texts), reasoning  # type: ignore[arg-type]


def _tool_calls(found: object, tools: bool) -> list[ToolCall]:
    """Return the function calls of a message."""
    if not found or not tools:
        return []
    calls = []
    for entry in found if isinstance(found, list) else [None]:
        function = entry.get("function") if isinstance(entry, dict) else None
        match function:
            case {"name": str(name), "arguments": str() | dict() as arguments}:
                calls.append(ToolCall(*map(replace_surrogates, (name, arguments_text(arguments)))))
            case _:
                raise BadReply("a tool call has no function with a name and arguments")
    return calls


def _logprobs(found: object, api: Api) -> list[float] | None:
    """Return the log-probabilities of the generated tokens; None if the server sent none."""
    values = found.get("content" if api == "chat" else "token_logprobs") if isinstance(found, dict) else None
    if not isinstance(values, list):
        return None
    if api == "chat":
        values = [item.get("logprob") if isinstance(item, dict) else None for item in values]
    try:
        return [finite_logprob(value) for value in values]
    except ValueError as error:
        raise BadReply(f"a log-probability is {error}") from error


def _trace(body: JSONObject, choice: JSONObject, values: list[float] | None) -> TokenTrace | None:
    """Return the tokens of a choice, with ids if the server sent them; None without log-probabilities."""
    if values is None:
        return None
    # A chat reply has the prompt's ids at the top level, a completion in each choice.
    prompt, completion = body.get("prompt_token_ids", choice.get("prompt_token_ids")), choice.get("token_ids")
    if prompt is None or completion is None:
        return TokenTrace((), (), tuple(values))
    if not isinstance(prompt, list) or not isinstance(completion, list) or len(completion) != len(values):
        raise BadReply("token_ids are not lists with one id per log-probability")
    try:
        return TokenTrace(tuple(map(token_count, prompt)), tuple(map(token_count, completion)), tuple(values))
    except ValueError as error:
        raise BadReply(f"expected non-negative integers as token ids, got {error}") from error


def _first_tokens(found: object, api: Api) -> tuple[tuple[str, float], ...]:
    """Return the most likely first tokens with their log-probabilities, in the order sent; empty if none were sent."""
    steps = found.get("content" if api == "chat" else "top_logprobs") if isinstance(found, dict) else None
    step = steps[0] if isinstance(steps, list) and steps else None
    if not isinstance(step, dict):
        return ()
    listed = step.get("top_logprobs") if api == "chat" else [{"token": key, "logprob": step[key]} for key in step]
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        return ()
    try:
        return tuple(
            (replace_surrogates(str(item.get("token"))), finite_logprob(item.get("logprob"))) for item in listed
        )
    except ValueError as error:
        raise BadReply(f"a log-probability is {error}") from error


def _token_counts(known: list[int | None], total: int) -> list[int]:
    """Return each choice's token count: the number of its log-probabilities, else an equal share of the total."""
    if len(known) == 1 and total > 0:
        return [total]
    if all(count is not None for count in known):
        return [count or 0 for count in known]
    share, rest = divmod(total, len(known))
    return [share + (i < rest) for i in range(len(known))]


def _part(body: JSONObject, name: str) -> JSONObject:
    part = body.get(name)
    if part is None:
        return {}
    if not isinstance(part, dict):
        raise BadReply(f"its {name} is not an object")
    return part


def _count(part: JSONObject, name: str) -> int:
    """Return a count; 0 if the server left it out."""
    value = part.get(name)
    try:
        return 0 if value is None else token_count(value)
    except ValueError as error:
        raise BadReply(f"its {name} is {error}; expected an integer from 0 to {MOST_TOKENS:,}") from error
