"""OpenAI's Responses API, mapped onto chat requests.

Each request must contain its whole input, because a response is not stored. Reasoning and verbosity have no effect:
clients set them for the model that the program names, and the policies of the run reply instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONObject
from mas_gym.programs.chat_completions import CallDialect, CallError, openai_error
from mas_gym.programs.dialects.fields import list_at, object_at, reject, request_digest, server_event, text_at

_NOT_STORED = (
    "responses are not stored; send the earlier items in input, with store=False "
    "(OpenAI Agents SDK: result.to_input_list() or a session)"
)
_REJECTED = {
    "previous_response_id": _NOT_STORED,
    "conversation": _NOT_STORED,
    "background": "wait for the reply",
    "prompt": "write the prompt in instructions",
    "n": "a response has one reply",
}
_READ = {"input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "include"}
# Apart from the first two, these concern storage, caching, billing and tools of OpenAI. Caching keys may be random.
_WITHOUT_EFFECT = {
    *("reasoning", "stream_options", "store", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    *("user", "safety_identifier", "service_tier", "max_tool_calls"),
}
_LOGPROBS = "message.output_text.logprobs"


def _chat_request(asked: JSONObject) -> JSONObject:
    reject(asked, _REJECTED)
    if _LOGPROBS in list_at(asked, "include"):
        raise CallError(f"include: expected no {_LOGPROBS}, because replies contain none")
    if asked.get("truncation") not in (None, "disabled"):
        raise CallError(f"truncation: expected 'disabled', got {shown(asked['truncation'])}; shorten input instead")
    instructions = asked.get("instructions")
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    others = {key for key in asked if key not in _READ | _WITHOUT_EFFECT | _REJECTED.keys() | {"truncation"}}
    return {key: asked[key] for key in others} | {
        "messages": [*system, *_messages(asked.get("input"))],
        "max_completion_tokens": asked.get("max_output_tokens"),
        "tools": [_tool(f"tools.{i}", tool) for i, tool in enumerate(list_at(asked, "tools"))],
        "tool_choice": _tool_choice(asked.get("tool_choice")),
        "response_format": _format(object_at(object_at(asked, "text"), "format")),
    }


def _messages(items: object) -> list[JSONObject]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise CallError(f"input: expected text or a list of items, got {shown(items)}")
    messages: list[JSONObject] = []
    for i, item in enumerate(items):
        match item:
            case {"type": "function_call", "call_id": identity, "name": name, "arguments": arguments}:
                # A message and the calls after it are one chat message.
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
                messages[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": identity, "output": output}:
                content = text_at(f"input.{i}.output", output)
                messages.append({"role": "tool", "tool_call_id": identity, "content": content})
            case {"type": "reasoning"}:
                # Encrypted by its provider; replies contain none.
                continue
            case {"role": role, "content": content} if item.get("type") in (None, "message"):
                messages.append({"role": role, "content": text_at(f"input.{i}.content", content)})
            case {"type": "item_reference"}:
                raise CallError(f"input.{i}: expected an item, got a reference; {_NOT_STORED}")
            case _:
                expected = "a message, a function_call or a function_call_output"
                raise CallError(f"input.{i}: expected {expected}, got {shown(item)}")
    return messages


def _tool(place: str, tool: object) -> JSONObject:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise CallError(
            f"{place}: expected a function, got {shown(tool)}; define a function that the program runs, because "
            "OpenAI's tools do not run here"
        )
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: object) -> object:
    match choice:
        case None | str():
            return choice
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
    raise CallError(f"tool_choice: expected auto, none, required or a function, got {shown(choice)}")


def _format(wanted: JSONObject) -> JSONObject | None:
    if wanted.get("type") != "json_schema":
        return wanted or None
    return {"type": "json_schema", "json_schema": {key: value for key, value in wanted.items() if key != "type"}}


def _response(completion: JSONObject) -> JSONObject:
    message = completion["choices"][0]["message"]
    calls = message.get("tool_calls", ())
    digest = request_digest(completion)
    output: list[JSONObject] = []
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        said = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
        output.append({"id": f"msg_{digest}", **said})
    for call in calls:
        used = {"type": "function_call", "call_id": call["id"], **call["function"], "status": "completed"}
        output.append({"id": f"fc_{call['id']}", **used})
    details = {"cached_tokens": 0, "cache_write_tokens": 0}
    return {
        "id": f"resp_{digest}",
        "object": "response",
        "created_at": completion["created"],
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": completion["model"],
        "output": output,
        "parallel_tool_calls": True,
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": completion["usage"]["prompt_tokens"],
            "input_tokens_details": details,
            "output_tokens": completion["usage"]["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": completion["usage"]["total_tokens"],
        },
    }


def _events(completion: JSONObject) -> Iterator[bytes]:
    numbers = count()

    def event(kind: str, **data: object) -> bytes:
        return server_event(f"response.{kind}", {"sequence_number": next(numbers), **data})

    whole = _response(completion)
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for i, item in enumerate(whole["output"]):
        open_item = item | {"status": "in_progress"}
        if item["type"] == "message":
            [part] = item["content"]
            at = {"item_id": item["id"], "output_index": i, "content_index": 0}
            yield event("output_item.added", output_index=i, item=open_item | {"content": []})
            yield event("content_part.added", part=part | {"text": ""}, **at)
            yield event("output_text.delta", delta=part["text"], logprobs=[], **at)
            yield event("output_text.done", text=part["text"], logprobs=[], **at)
            yield event("content_part.done", part=part, **at)
        else:
            at = {"item_id": item["id"], "output_index": i}
            yield event("output_item.added", output_index=i, item=open_item | {"arguments": ""})
            yield event("function_call_arguments.delta", delta=item["arguments"], **at)
            yield event("function_call_arguments.done", name=item["name"], arguments=item["arguments"], **at)
        yield event("output_item.done", output_index=i, item=item)
    yield event("completed", response=whole)


RESPONSES = CallDialect(("v1/responses",), "OPENAI", _chat_request, _response, _events, openai_error)
