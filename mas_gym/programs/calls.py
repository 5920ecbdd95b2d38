"""One model call of a program: the OpenAI chat request, read and compared, and the reply in the same format.

A reply is one text, because search chooses among texts. Of a request, everything that a policy cannot honour
is refused with status 400 and the reason, so that no part of it is silently dropped.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn

from mas_gym.errors import MASGymError, shown
from mas_gym.policies.base import MAX_TEMPERATURE
from mas_gym.prompts import ChatMessage

AGENT_HEADER = "x-mas-agent"
"""The HTTP header in which a program may name the agent that calls."""

MAX_CHOICES = 64

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNSUPPORTED = {
    *("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "response_format", "stop"),
    *("frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs", "modalities", "audio"),
    *("web_search_options", "prediction"),
}
# Values that ask for nothing: clients send them by default.
_IDLE: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "stop": ([],),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class CallError(MASGymError, ValueError):
    """A request that a program's gateway refuses.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        """Keep the reason and the status."""
        super().__init__(message)
        self.status = status

    def body(self) -> bytes:
        """Return the error in OpenAI's format."""
        error = {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.status}
        return json.dumps({"error": error}).encode()


@dataclass(frozen=True)
class Call:
    """A chat request of a program.

    Attributes:
        messages: The prompt.
        model: The model that the program asked for; replies carry it.
        agent: The agent that the request names, in the header or the metadata; empty if none.
        temperature: As requested; None if the program leaves it open.
        top_p: As requested, or None.
        max_tokens: As requested, or None.
        n: Number of choices; each is a decision of its own.
        stream: Whether the reply is sent as server-sent events.
        usage: Whether a stream ends with the usage.
        text: The request as canonical JSON, after `normalise`: what must be equal when the program is replayed.
    """

    messages: tuple[ChatMessage, ...]
    model: str = ""
    agent: str = ""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    usage: bool = False
    text: str = field(default="", compare=False)

    @cached_property
    def digest(self) -> bytes:
        """A fingerprint of ``text``."""
        return blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    @property
    def system(self) -> str:
        """The system prompt, stripped; the first one if there are several."""
        return next((m.content.strip() for m in self.messages if m.role == "system"), "")


def read_call(body: bytes, headers: Mapping[str, str], normalise: Any = None) -> Call:
    """Read a request.

    Args:
        body: The JSON body.
        headers: The HTTP headers, names in lower case.
        normalise: A function from the parsed request to what must be equal on replay, JSON-able.

    Raises:
        CallError: It is no chat request, or asks for what no policy can do.
    """
    try:
        asked = json.loads(body.decode("utf-8"), parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise CallError(f"expected a JSON body: {str(error)[:200]}") from None
    if not isinstance(asked, dict):
        raise CallError(f"expected a JSON object, got {shown(asked)}")
    if reason := unsupported(asked):
        raise CallError(reason)
    metadata = asked.get("metadata") or {}
    agent = headers.get(AGENT_HEADER) or (metadata.get("agent") if isinstance(metadata, dict) else None)
    stream_options = asked.get("stream_options") or {}
    agent = agent if isinstance(agent, str) else ""
    return Call(
        messages=_messages(asked.get("messages")),
        model=str(asked.get("model") or ""),
        agent=agent,
        temperature=_number(asked, "temperature", 0, MAX_TEMPERATURE),
        top_p=_number(asked, "top_p", 1e-9, 1),
        max_tokens=_whole(asked, "max_completion_tokens") or _whole(asked, "max_tokens"),
        n=_whole(asked, "n", MAX_CHOICES) or 1,
        stream=asked.get("stream") is True,
        usage=isinstance(stream_options, dict) and stream_options.get("include_usage") is True,
        text=_canonical(asked, agent, normalise),
    )


def unsupported(asked: Mapping[str, Any]) -> str:
    """Say which field of a chat request changes the reply in a way that no search can honour; empty if none does.

    >>> unsupported({"model": "m", "messages": [], "tools": []})
    ''
    """
    for key in _UNSUPPORTED & asked.keys():
        value = asked[key]
        if value is not None and value not in _IDLE.get(key, ()):
            return (
                f"{key}={shown(value)}: expected none, because agents reply with plain text, sampled with temperature, "
                f"top_p and max_tokens; remove {key} from the request"
            )
    return ""


def _canonical(asked: dict[str, Any], agent: str, normalise: Any) -> str:
    kept: Any = {key: value for key, value in asked.items() if value is not None}
    if agent:
        kept["agent"] = agent
    if normalise is not None:
        try:
            kept = normalise(kept)
        except Exception as error:
            raise CallError(f"normalise raised {type(error).__name__}: {error}", 500) from error
    try:
        return json.dumps(kept, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CallError(f"normalise: expected a JSON-able value, got {shown(kept)} ({error})", 500) from None


def _messages(value: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise CallError(f"messages: expected a list of at least one message, got {shown(value)}")
    return tuple(_message(f"messages.{i}", entry) for i, entry in enumerate(value))


def _message(place: str, entry: Any) -> ChatMessage:
    role = entry.get("role") if isinstance(entry, dict) else None
    if role not in _ROLES:
        raise CallError(f"{place}: expected the role system, developer, user or assistant, got {shown(role)}")
    if entry.get("tool_calls") or entry.get("function_call"):
        raise CallError(f"{place}: agents of a search reply with plain text; run tools in the program")
    content = entry.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise CallError(f"{place}.content: expected text, got {shown(content)}")
    return ChatMessage(_ROLES[role], content)


def _number(asked: dict[str, Any], key: str, least: float, most: float) -> float | None:
    value = asked.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise CallError(f"{key}: expected a number from {least:g} to {most:g}, got {shown(value)}")
    return value


def _whole(asked: dict[str, Any], key: str, most: int = 2**31) -> int | None:
    value = asked.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise CallError(f"{key}: expected a whole number from 1 to {most}, got {shown(value)}")
    return value


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


class Reply(NamedTuple):
    """An HTTP reply of the gateway."""

    status: int
    kind: str
    body: bytes


def reply_to(call: Call, texts: list[str]) -> Reply:
    """Return the reply with one choice per text, whole or as a stream of events.

    Token counts are 0: the program cannot depend on them, and a search counts its own.
    """
    head = {"id": f"chatcmpl-{call.digest.hex()}", "created": 0, "model": call.model}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    if call.stream:
        head["object"] = "chat.completion.chunk"
        return Reply(200, "text/event-stream", b"".join(_events(head, texts, usage if call.usage else None)))
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
        for i, text in enumerate(texts)
    ]
    content = head | {"object": "chat.completion", "choices": choices, "usage": usage}
    return Reply(200, "application/json", json.dumps(content).encode())


def _events(head: dict[str, Any], texts: list[str], usage: dict[str, int] | None) -> Iterator[bytes]:
    for i, text in enumerate(texts):
        for delta, reason in (({"role": "assistant", "content": text}, None), ({}, "stop")):
            choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": reason}
            yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n".encode()
    if usage is not None:
        yield f"data: {json.dumps(head | {'choices': [], 'usage': usage})}\n\n".encode()
    yield b"data: [DONE]\n\n"


def difference(expected: str, got: str) -> str:
    """Return the first differing lines of two requests, for an error message."""
    before, after = (json.dumps(json.loads(text), indent=1, sort_keys=True).splitlines() for text in (expected, got))
    changed = [
        line
        for line in difflib.unified_diff(before, after, lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    shown_lines = [line if len(line) <= 300 else _around(line, changed) for line in changed[:6]]
    return "\n".join(shown_lines) + ("\n..." if len(changed) > 6 else "")


def _around(line: str, others: list[str]) -> str:
    """Cut a long line to the part where it begins to differ from its counterpart."""
    twin = next((other for other in others if other[0] != line[0]), line)
    same = next((i for i, (a, b) in enumerate(zip(line[1:], twin[1:], strict=False), 1) if a != b), 1)
    start = max(1, same - 60)
    return f"{line[0]}...{line[start : start + 200]}..."
