"""A request of a program to the Chat Completions API: parsing and comparing it, and formatting the reply.

A reply is one text, because search chooses among texts; tool calls are a part of it (see `mas_gym.systems.prompts`).
If the agent's policy does not support a part of the request, the request is rejected with status 400 and the reason,
so that no part is silently dropped.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote

from mas_gym.errors import MASGymError, shown
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies.base import MAX_TEMPERATURE
from mas_gym.systems.prompts import ChatMessage
from mas_gym.systems.tool_calls import ToolCall, arguments_text, split_calls, with_calls

AGENT_HEADER = "x-mas-agent"
"""The HTTP header in which a program may name the calling agent."""
NODE_HEADER = "x-mas-node"
"""The HTTP header with the calling node (quoted) and its task; see `mas_gym.programs.frameworks`."""
HERE_HEADER = "x-mas-here"
"""The HTTP header of requests from the program's own threads and tasks, and not from a process that it has started."""
NODES_HEADER = "x-mas-nodes"
"""The HTTP header with the nodes of all started graphs (quoted), separated by spaces."""

MAX_CHOICES = 64
_LONGEST_NAME = 256

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_READ = {
    *("messages", "model", "metadata", "temperature", "top_p", "max_tokens", "max_completion_tokens", "n"),
    *("stream", "stream_options"),
}
# These fields concern users, storage and billing, or seeds; a search has its own seeds.
_WITHOUT_EFFECT = {
    *("seed", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
}
_REFUSED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "logprobs": "replies contain none",
    "top_logprobs": "replies contain none",
    "modalities": "replies are text",
    "audio": "replies are text",
    "web_search_options": "replies contain no citations",
    "prediction": "it has no effect on a reply",
}
_PASSED_ON = {
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "stop"),
    *("frequency_penalty", "presence_penalty", "logit_bias"),
}
_KNOWN = _READ | _WITHOUT_EFFECT | _REFUSED.keys()
# Values without an effect, which clients send by default.
_IDLE: dict[str, tuple[object, ...]] = {
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


# Counts of 0: a program cannot depend on them, and a search counts tokens separately.
_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


class CallError(MASGymError, ValueError):
    """A request that a program's gateway rejects."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def openai_error(message: str, status: int) -> JSONObject:
    """Return the body of an error in OpenAI's format."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": status}}


class CallDialect(NamedTuple):
    """An API in which programs call models, mapped onto chat requests.

    Attributes:
        paths: The paths of its requests; the first identifies it.
        provider: Prefix of the environment variables from which its clients read their base URL and API key.
        chat_request: Converts a request to a chat request. Raises `CallError`.
        reply: Converts an unstreamed reply to a chat request (`unstreamed_reply`).
        events: Converts the same reply to the server-sent events of a stream.
        error: Returns the body of an error, given its message and status.
    """

    paths: tuple[str, ...]
    provider: str
    chat_request: Callable[[JSONObject], JSONObject]
    reply: Callable[[JSONObject], JSONObject]
    events: Callable[[JSONObject], Iterator[bytes]]
    error: Callable[[str, int], JSONObject]


@dataclass(frozen=True)
class Call:
    """A chat request of a program.

    Attributes:
        messages: The prompt.
        model: The requested model; replies contain it.
        agent: The agent named in the request's header or metadata; empty if none is named.
        node: The calling node of a graph; empty if unknown.
        nodes: The nodes of the graphs that the program has started, which may call later.
        temperature: As requested; None if the request does not set it.
        top_p: As requested, or None.
        max_tokens: As requested, or None.
        n: Number of choices; each is a separate decision.
        stream: Whether the reply is sent as server-sent events.
        usage: Whether a stream ends with the usage.
        extra_body: Further fields for the policy, such as tools; see `mas_gym.policies.SamplingRequest`.
        tools: Whether replies may call tools.
        text: The request as canonical JSON, after `normalize`; it must be equal on replay.
        dialect: The API of the request and its reply; None for Chat Completions.
    """

    messages: tuple[ChatMessage, ...]
    model: str = ""
    agent: str = ""
    node: str = ""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    usage: bool = False
    extra_body: str = ""
    tools: bool = False
    nodes: tuple[str, ...] = field(default=(), compare=False)
    text: str = field(default="", compare=False)
    dialect: CallDialect | None = field(default=None, compare=False)

    @cached_property
    def digest(self) -> bytes:
        """A fingerprint of ``text``."""
        return blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    @property
    def settings(self) -> JSONObject:
        """The requested temperature and top-p."""
        asked = {"temperature": self.temperature, "top_p": self.top_p}
        return {name: value for name, value in asked.items() if value is not None}

    @cached_property
    def system(self) -> str:
        """The system prompt, stripped; the first one if there are several."""
        return next((m.content.strip() for m in self.messages if m.role == "system"), "")


def read_call(
    body: bytes, headers: Mapping[str, str], normalize: object = None, dialect: CallDialect | None = None
) -> Call:
    """Parse a request.

    Args:
        body: The JSON body.
        headers: The HTTP headers, with names in lower case.
        normalize: Maps the parsed chat request to the JSON-serializable value that must be equal on replay.
        dialect: The API of the request; None for Chat Completions.

    Raises:
        CallError: The body is not a request of this API, or requests a feature that no policy supports.

    >>> read_call(b'{"messages": [{"role": "user", "content": "Hi"}], "stop": "."}', {}).extra_body
    '{"stop": "."}'
    """
    try:
        asked = json.loads(body.decode("utf-8"), parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise CallError(f"expected a JSON body, but parsing failed: {str(error)[:200]}") from None
    if not isinstance(asked, dict):
        raise CallError(f"expected a JSON object, got {shown(asked)}")
    if dialect is None:
        return parsed_call(asked, headers, normalize)
    return replace(parsed_call(dialect.chat_request(asked), headers, normalize), dialect=dialect)


def parsed_call(asked: JSONObject, headers: Mapping[str, str], normalize: object = None) -> Call:
    """Return the call of a parsed chat request; see `read_call`."""
    for key in asked:
        if key in _REFUSED and _asks(asked, key):
            raise CallError(f"{key}: expected none, got {shown(asked[key])}; {_REFUSED[key]}")
    messages, more = _messages(asked.get("messages"))
    extra = _extra(asked, more)
    metadata = asked.get("metadata") or {}
    agent = headers.get(AGENT_HEADER) or (metadata.get("agent") if isinstance(metadata, dict) else None)
    stream_options = asked.get("stream_options") or {}
    agent, node = agent if isinstance(agent, str) else "", headers.get(NODE_HEADER, "")
    return Call(
        messages=messages,
        model=str(asked.get("model") or ""),
        agent=agent,
        node=unquote(node.partition(" ")[0]),
        temperature=_number(asked, "temperature", 0, MAX_TEMPERATURE),
        top_p=_number(asked, "top_p", 1e-9, 1),
        max_tokens=_whole(asked, "max_completion_tokens") or _whole(asked, "max_tokens"),
        n=_whole(asked, "n", MAX_CHOICES) or 1,
        stream=asked.get("stream") is True,
        usage=isinstance(stream_options, dict) and stream_options.get("include_usage") is True,
        extra_body=json.dumps(extra, sort_keys=True) if extra else "",
        tools="tools" in extra,
        nodes=tuple(map(unquote, headers.get(NODES_HEADER, "").split())),
        text=_canonical(asked, agent, node, normalize),
    )


def _asks(asked: Mapping[str, object], key: str) -> bool:
    value = asked.get(key)
    return value is not None and value not in _IDLE.get(key, ())


def _extra(asked: JSONObject, more: list[JSONObject]) -> JSONObject:
    """Return the fields of a request and of its messages that are passed to the policy."""
    tools = asked.get("tools")
    if tools and not (isinstance(tools, list) and all(_is_function(tool) for tool in tools)):
        expected = '[{"type": "function", "function": {"name": ...}}]'
        raise CallError(f"tools: expected {expected}, got {shown(tools)}")
    extra = {key: value for key, value in asked.items() if key not in _KNOWN and _asks(asked, key)}
    if tools:
        # Without tools, these are client defaults.
        extra |= {key: asked[key] for key in ("tool_choice", "parallel_tool_calls") if asked.get(key) is not None}
    return extra | ({"messages": more} if any(more) else {})


def _is_function(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def unsupported(asked: Mapping[str, object]) -> str:
    """Return an error message for a field of a chat request that search cannot support; empty if there is none.

    >>> unsupported({"model": "m", "messages": [], "tools": []})
    ''
    """
    for key in (_REFUSED.keys() | _PASSED_ON) & asked.keys():
        if _asks(asked, key):
            return (
                f"{key}={shown(asked[key])}: expected none, because the answer of a search is plain text, sampled with "
                f"temperature, top_p and max_tokens; remove {key} from the request"
            )
    return ""


def _canonical(asked: JSONObject, agent: str, node: str, normalize: Any) -> str:
    kept: Any = {key: value for key, value in asked.items() if value is not None}
    if agent:
        kept["agent"] = agent
    if node:
        # Equal requests of different nodes count as different, because the program continues differently after them.
        kept["node"] = node
    if normalize is not None:
        try:
            # A copy, because the function may change its argument.
            kept = normalize(json.loads(json.dumps(kept)))
        except Exception as error:
            raise CallError(f"normalize raised {type(error).__name__}: {error}", 500) from error
    try:
        return json.dumps(kept, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CallError(f"normalize: expected a JSON-serializable value, got {shown(kept)} ({error})", 500) from None


def _messages(value: object) -> tuple[tuple[ChatMessage, ...], list[JSONObject]]:
    """Return the messages, and for each message the fields that a plain message does not have."""
    if not isinstance(value, list) or not value:
        raise CallError(f"messages: expected a list of at least one message, got {shown(value)}")
    pairs = [_message(f"messages.{i}", entry) for i, entry in enumerate(value)]
    return tuple(message for message, _ in pairs), [more for _, more in pairs]


def _message(place: str, entry: Any) -> tuple[ChatMessage, JSONObject]:
    role = entry.get("role") if isinstance(entry, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise CallError(f"{place}: expected one of the roles {', '.join(_ROLES)}, got {shown(role)}")
    if entry.get("function_call"):
        raise CallError(f"{place}.function_call: expected none; use tool_calls")
    calls, content = entry.get("tool_calls") or [], entry.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise CallError(f"{place}.content: expected text, got {shown(content)}")
    name = entry.get("name") or ""
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        raise CallError(f"{place}.name: expected at most {_LONGEST_NAME} characters, got {shown(name)}")
    named = {"name": name} if name else {}
    if role == "tool":
        answered = entry.get("tool_call_id")
        if not isinstance(answered, str):
            raise CallError(f"{place}.tool_call_id: expected the id of a tool call, got {shown(answered)}")
        return ChatMessage(role, content), {"tool_call_id": answered, **named}
    if not calls:
        return ChatMessage(_ROLES[role], content), named
    try:
        said = [ToolCall(call["function"]["name"], arguments_text(call["function"]["arguments"])) for call in calls]
        text = with_calls(content, said)
        functions = [call["function"] | use._asdict() for call, use in zip(calls, said, strict=True)]
        calls = [call | {"function": function} for call, function in zip(calls, functions, strict=True)]
    except (TypeError, KeyError):
        raise CallError(f"{place}.tool_calls: expected a list of function calls, got {shown(calls)}") from None
    return ChatMessage(role, text), {"content": content or None, "tool_calls": calls, **named}


def _number(asked: JSONObject, key: str, least: float, most: float) -> float | None:
    value = asked.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise CallError(f"{key}: expected a number from {least:g} to {most:g}, got {shown(value)}")
    return value


def _whole(asked: JSONObject, key: str, most: int = 2**31) -> int | None:
    value = asked.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise CallError(f"{key}: expected an integer from 1 to {most}, got {shown(value)}")
    return value


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


class Reply(NamedTuple):
    """An HTTP response from the gateway."""

    status: int
    kind: str
    body: bytes


def reply_to(call: Call, texts: list[str]) -> Reply:
    """Return the reply with one choice per text in the call's dialect, whole or as a stream of events."""
    dialect = call.dialect
    if call.stream:
        events = _events(call, texts) if dialect is None else dialect.events(unstreamed_reply(call, texts))
        return Reply(200, "text/event-stream", b"".join(events))
    reply = unstreamed_reply(call, texts)
    return Reply(200, "application/json", json.dumps(reply if dialect is None else dialect.reply(reply)).encode())


def unstreamed_reply(call: Call, texts: list[str]) -> JSONObject:
    """Return the unstreamed reply to a chat request, with one choice per text."""
    choices = []
    for i, text in enumerate(texts):
        message, reason = _said(call, i, text)
        choices.append({"index": i, "message": message | {"refusal": None}, "logprobs": None, "finish_reason": reason})
    return _head(call, "chat.completion") | {"choices": choices, "usage": _USAGE}


def _said(call: Call, choice: int, text: str) -> tuple[JSONObject, str]:
    """Return a message in OpenAI's format, and its finish reason."""
    content, calls = split_calls(text) if call.tools else (text, ())
    if not calls:
        return {"role": "assistant", "content": content}, "stop"
    # Ids are derived from the request, so replays have equal ids; some templates require nine letters and digits.
    ids = (blake2b(f"{choice} {i}".encode() + call.digest).hexdigest()[:9] for i in range(len(calls)))
    listed = [{"id": id_, "type": "function", "function": use._asdict()} for id_, use in zip(ids, calls, strict=True)]
    return {"role": "assistant", "content": content or None, "tool_calls": listed}, "tool_calls"


def _head(call: Call, kind: str) -> JSONObject:
    return {"id": f"chatcmpl-{call.digest.hex()}", "created": 0, "model": call.model, "object": kind}


def _events(call: Call, texts: list[str]) -> Iterator[bytes]:
    head = _head(call, "chat.completion.chunk")
    for i, text in enumerate(texts):
        message, end = _said(call, i, text)
        if "tool_calls" in message:
            message["tool_calls"] = [{"index": j, **use} for j, use in enumerate(message["tool_calls"])]
        for delta, reason in ((message, None), ({}, end)):
            choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": reason}
            yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n".encode()
    if call.usage:
        yield f"data: {json.dumps(head | {'choices': [], 'usage': _USAGE})}\n\n".encode()
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
    """Shorten a long line to the part around the first difference from its counterpart."""
    twin = next((other for other in others if other[0] != line[0]), line)
    same = next((i for i, (a, b) in enumerate(zip(line[1:], twin[1:], strict=False), 1) if a != b), 1)
    start = max(1, same - 60)
    return f"{line[0]}...{line[start : start + 200]}..."
