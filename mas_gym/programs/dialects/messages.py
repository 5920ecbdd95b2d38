"""Anthropic's Messages API, mapped onto chat requests.

Thinking and effort have no effect: they concern the model that the program names, and the policies of the run reply
instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONObject
from mas_gym.programs.chat_completions import CallDialect, CallError
from mas_gym.programs.dialects.fields import list_at, object_at, reject, request_digest, server_event, text_at

_REJECTED = {
    "container": "tools run in the program",
    "mcp_servers": "define tools that the program runs",
    "n": "a message has one reply",
}
_READ = {"messages", "system", "stop_sequences", "tools", "tool_choice", "metadata", "output_config"}
# Apart from the first, these concern caching, billing and users.
_WITHOUT_EFFECT = {
    *("thinking", "cache_control", "service_tier", "inference_geo", "speed", "user_profile_id", "workspace_id"),
}
_BROKEN = "INVALID_JSON"
"""The key of arguments that are no JSON object, as Anthropic's documentation recommends."""


def _chat_request(asked: JSONObject) -> JSONObject:
    reject(asked, _REJECTED)
    system = asked.get("system")
    messages = [] if system is None else [{"role": "system", "content": text_at("system", system)}]
    for i, entry in enumerate(list_at(asked, "messages")):
        messages += _messages(f"messages.{i}", entry)
    choice = object_at(asked, "tool_choice")
    others = {key for key in asked if key not in _READ | _WITHOUT_EFFECT | _REJECTED.keys()}
    return {key: asked[key] for key in others} | {
        "messages": messages,
        "stop": list_at(asked, "stop_sequences"),
        "tools": [_tool(f"tools.{i}", tool) for i, tool in enumerate(list_at(asked, "tools"))],
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "response_format": _format(object_at(object_at(asked, "output_config"), "format")),
        # The user's id may differ in each run.
        "metadata": {key: value for key, value in object_at(asked, "metadata").items() if key != "user_id"} or None,
    }


def _messages(place: str, entry: object) -> list[JSONObject]:
    """Return the chat messages of a message: tool results are separate, and precede the text beside them."""
    if not isinstance(entry, dict) or entry.get("role") not in ("user", "assistant", "system"):
        raise CallError(f"{place}: expected a message of the role user, assistant or system, got {shown(entry)}")
    content = entry.get("content")
    texts, calls, results = list[str](), list[JSONObject](), list[JSONObject]()
    if not isinstance(content, list):
        content = [{"type": "text", "text": content}]
    for i, block in enumerate(content):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "id": identity, "name": name, "input": dict(given)}:
                function = {"name": name, "arguments": given[_BROKEN] if given.keys() == {_BROKEN} else given}
                calls.append({"id": identity, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": identity}:
                result = text_at(f"{place}.content.{i}.content", block.get("content") or "")
                # Chat messages have no field for errors.
                result = f"Error: {result}" if block.get("is_error") is True else result
                results.append({"role": "tool", "tool_call_id": identity, "content": result})
            case {"type": "thinking" | "redacted_thinking"}:
                # Signed by its provider; replies contain none.
                continue
            case _:
                raise CallError(f"{place}.content.{i}: expected text, tool_use or tool_result, got {shown(block)}")
    if results and not texts and not calls:
        return results
    return [*results, {"role": entry["role"], "content": "".join(texts), "tool_calls": calls}]


def _tool(place: str, tool: object) -> JSONObject:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise CallError(
            f"{place}: expected a tool with name and input_schema, got {shown(tool)}; define a tool that the program "
            "runs, because Anthropic's tools do not run here"
        )
    without_effect = {"type", "cache_control", "eager_input_streaming"}
    function = {key: value for key, value in tool.items() if key not in without_effect and value is not None}
    function["parameters"] = function.pop("input_schema", {"type": "object"})
    return {"type": "function", "function": function}


def _tool_choice(choice: JSONObject) -> object:
    match choice.get("type"):
        case None if not choice:
            return None
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "auto" | "none" as kind:
            return kind
        case "any":
            return "required"
    raise CallError(f"tool_choice.type: expected auto, any, tool or none, got {shown(choice.get('type'))}")


def _format(wanted: JSONObject) -> JSONObject | None:
    if wanted.get("type") != "json_schema":
        return wanted or None
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": wanted.get("schema"), "strict": True}}


def _message(completion: JSONObject) -> JSONObject:
    [choice] = completion["choices"]
    said = choice["message"]
    calls = said.get("tool_calls", ())
    content: list[JSONObject] = [{"type": "text", "text": said["content"]}] if said["content"] or not calls else []
    for call in calls:
        used = {"name": call["function"]["name"], "input": _input(call["function"]["arguments"])}
        content.append({"type": "tool_use", "id": call["id"], **used})
    usage = completion["usage"]
    return {
        "id": f"msg_{request_digest(completion)}",
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": content,
        "stop_reason": "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def _input(arguments: str) -> object:
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {_BROKEN: arguments}


def _events(completion: JSONObject) -> Iterator[bytes]:
    whole = _message(completion)
    yield server_event("message_start", {"message": whole | {"content": [], "stop_reason": None}})
    begun: JSONObject
    for i, block in enumerate(whole["content"]):
        if block["type"] == "text":
            begun, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            begun, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield server_event("content_block_start", {"index": i, "content_block": block | begun})
        yield server_event("content_block_delta", {"index": i, "delta": delta})
        yield server_event("content_block_stop", {"index": i})
    end = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    yield server_event("message_delta", {"delta": end, "usage": whole["usage"]})
    yield server_event("message_stop", {})


def _error(message: str, status: int) -> JSONObject:
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


# A client adds /v1/messages to its base URL, which may end in /v1.
_PATHS = ("v1/messages", "v1/v1/messages")
MESSAGES = CallDialect(_PATHS, "ANTHROPIC", _chat_request, _message, _events, _error)
