"""Programs that call their models with OpenAI's Responses API and Anthropic's Messages API."""

from __future__ import annotations

import copy
import functools
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from search_worlds import HashCritic, noise, unparked

import search
from mas_gym.policies import SamplingRequest, ScriptedPolicy
from mas_gym.policies.openai_format import parse_reply
from mas_gym.programs import Program
from mas_gym.programs.chat_completions import Call, CallError, read_call, reply_to
from mas_gym.programs.dialects import DIALECTS
from mas_gym.systems.tool_calls import ToolCall, with_calls
from mas_gym.tasks.base import Problem

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
SYSTEM = "You are the Solver."
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
RESPONSES_TOOL: Any = {"type": "function", "name": "add", "parameters": SCHEMA}
MESSAGES_TOOL: Any = {"name": "add", "input_schema": SCHEMA}


class Caller(ScriptedPolicy):
    """A policy that calls the tool twice at once, once with varying arguments, and then answers."""

    takes_extra_body = True


def said(request: SamplingRequest, seed: int) -> str:
    tools = json.loads(request.extra_body or "{}").get("tools", [])
    last = request.messages[-1]
    draw = int(noise([message.content for message in request.messages], seed) * 3)
    if last.role == "tool" or not tools:
        return f"I got {last.content}. Final Answer: {last.content.split()[-1]}"
    calls = [ToolCall("add", json.dumps({"a": 1, "b": 1})), ToolCall("add", json.dumps({"a": 2, "b": 1 + draw}))]
    return with_calls("I add." if draw else "", calls)


POLICY = Caller(said)


def added(arguments: Any) -> str:
    return str(arguments["a"] + arguments["b"])


async def chat(question: str, client: AsyncOpenAI) -> str:
    """The usual tool loop; the other programs say the same in their dialects."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    while True:
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL])
        message: Any = reply.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            content = added(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def after_response(items: list[Any], response: Any) -> str | None:
    """Append a response and the results of its tool calls to the input; return its text if it calls no tool."""
    items += [item.model_dump(exclude_none=True) for item in response.output]
    calls = [item for item in response.output if item.type == "function_call"]
    for call in calls:
        output = added(json.loads(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    return None if calls else response.output_text


async def responses(question: str, client: AsyncOpenAI) -> str:
    items: list[Any] = [{"role": "user", "content": question}]
    text = None
    while text is None:
        response = await client.responses.create(model="m", instructions=SYSTEM, input=items, tools=[RESPONSES_TOOL])
        text = after_response(items, response)
    return text


def responses_streamed(question: str, client: OpenAI) -> str:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": question}]}]
    text = None
    while text is None:
        asked: dict[str, Any] = {"model": "m", "instructions": SYSTEM, "input": items, "tools": [RESPONSES_TOOL]}
        with client.responses.stream(**asked) as stream:
            deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            response = stream.get_final_response()
        assert deltas == response.output_text
        text = after_response(items, response)
    return text


def responses_over_http(question: str, base_url: str, api_key: str) -> str:
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        return responses_streamed(question, client)


def after_message(messages: list[Any], message: Any) -> str | None:
    """Append a message and the results of its tool calls; return its text if it calls no tool."""
    messages.append(
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}
    )
    calls = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == ("tool_use" if calls else "end_turn")
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": added(call.input)} for call in calls]
    if not calls:
        return str(message.content[0].text)
    messages.append({"role": "user", "content": results})
    return None


def anthropic_asked(messages: list[Any]) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 512, "system": SYSTEM, "messages": messages, "tools": [MESSAGES_TOOL]}


async def messages(question: str, base_url: str) -> str:
    from anthropic import AsyncAnthropic

    entries: list[Any] = [{"role": "user", "content": question}]
    text = None
    async with AsyncAnthropic(base_url=base_url, api_key="any") as client:
        while text is None:
            text = after_message(entries, await client.messages.create(**anthropic_asked(entries)))
    return text


def messages_streamed(question: str, base_url: str, api_key: str) -> str:
    """With the key of the program, and with the base URL that Anthropic's documentation has."""
    from anthropic import Anthropic

    entries: list[Any] = [{"role": "user", "content": [{"type": "text", "text": question}]}]
    text = None
    with Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        while text is None:
            with client.messages.stream(**anthropic_asked(entries)) as stream:
                deltas = "".join(stream.text_stream)
                message: Any = stream.get_final_message()
            assert deltas == "".join(block.text for block in message.content if block.type == "text")
            text = after_message(entries, message)
    return text


def agents_client(client: AsyncOpenAI) -> Any:
    from agents import OpenAIProvider, RunConfig

    return RunConfig(model_provider=OpenAIProvider(openai_client=client), tracing_disabled=True)


def solver_agent() -> Any:
    """An agent with the default model and the default model settings."""
    from agents import Agent, function_tool

    @function_tool
    def add(a: int, b: int) -> str:
        return added({"a": a, "b": b})

    return Agent(name="Solver", instructions=SYSTEM, tools=[add])


async def agents_sdk(question: str, client: AsyncOpenAI) -> str:
    from agents import Runner

    return str((await Runner.run(solver_agent(), question, run_config=agents_client(client))).final_output)


async def agents_sdk_streamed(question: str, base_url: str) -> str:
    from agents import Runner

    async with AsyncOpenAI(base_url=base_url, api_key="any") as client:
        result = Runner.run_streamed(solver_agent(), question, run_config=agents_client(client))
        async for _ in result.stream_events():
            pass
    return str(result.final_output)


def problems(count: int) -> list[Problem]:
    return [Problem(f"p{i}", f"What is 2 + 2? ({i})", "4", "number") for i in range(count)]


def searched(program: Any, planner: str = "mcts:8,3", count: int = 2, **options: Any) -> dict[str, Any]:
    """Return the answer and the tree of each problem."""
    found = {}
    made = program if isinstance(program, Program) else Program(program, agents=["Solver"], **options)
    for plan in search.run(planner, problems(count), program=made, policy=POLICY, critic=HashCritic(), seed=3):
        assert plan.error is None and plan.tree is not None, plan.error_details
        transcripts = tuple(state.transcript for state in plan.tree.states)
        found[plan.problem_id] = plan.answer, plan.usage.agent_calls, transcripts, tuple(plan.tree.visits)
    return found


@functools.cache
def expected() -> dict[str, Any]:
    found = searched(chat)
    transcripts = [transcript for _, _, transcripts, _ in found.values() for transcript in transcripts]
    assert len({transcript[0].text for transcript in transcripts if transcript}) == 3
    assert {len(transcript) for transcript in transcripts} == {0, 1, 2}
    return found


@pytest.fixture
def installed(request: pytest.FixtureRequest) -> Iterator[None]:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    yield
    gc.collect()


CLIENTS = [
    pytest.param(responses, "openai", id="openai"),
    pytest.param(responses_streamed, "openai", id="openai streamed"),
    pytest.param(responses_over_http, "openai", id="openai over HTTP"),
    *(
        pytest.param(solve, client, id=f"{client} {kind}", marks=pytest.mark.frameworks)
        for client, whole, streamed in (
            ("anthropic", messages, messages_streamed),
            ("agents", agents_sdk, agents_sdk_streamed),
        )
        for kind, solve in (("whole", whole), ("streamed", streamed))
    ),
]


# Frameworks and clients have warnings of their own.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("solve", "installed"), CLIENTS, indirect=["installed"])
def test_search_gives_the_tree_of_chat_completions_in_each_dialect(solve: Callable[..., Any], installed: None) -> None:
    assert searched(solve) == expected()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("solve", "installed"), CLIENTS, indirect=["installed"])
def test_branches_are_replayed_exactly_in_each_dialect(solve: Callable[..., Any], installed: None) -> None:
    # No execution is kept, so that each branch replays tool calls with the ids of the first execution.
    assert searched(unparked(Program(solve, agents=["Solver"]))) == expected()


@pytest.mark.frameworks
@pytest.mark.filterwarnings("default")
def test_agents_sdk_command_needs_only_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("agents", reason="openai-agents is not installed")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    (tmp_path / "program.py").write_text(
        "from agents import Agent, Runner\n"
        "helper = Agent(name='Helper', instructions='You are the Helper.', handoff_description='helps')\n"
        "agent = Agent(name='Solver', instructions='You are the Solver.', handoffs=[helper])\n"
        "print(Runner.run_sync(agent, input()).final_output)\n"
    )
    program = Program(f"{sys.executable} {tmp_path / 'program.py'}", agents=["Solver", "Helper"])
    handing = Caller(
        lambda request, seed: (
            f"Final Answer: {request.agent}"
            if request.messages[-1].role == "tool"
            else with_calls("", [ToolCall("transfer_to_helper", "{}")])
        )
    )
    [plan] = search.run("single", problems(1), program=program, policy=handing)
    assert plan.error is None and plan.text == "Final Answer: Helper", plan.error_details


def test_command_has_the_variables_of_each_provider(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import json, os\nfrom urllib.request import Request, urlopen\n"
        "base, key = os.environ['ANTHROPIC_BASE_URL'], os.environ['ANTHROPIC_API_KEY']\n"
        "body = {'max_tokens': 5, 'messages': [{'role': 'user', 'content': input()}]}\n"
        "request = Request(base + '/v1/messages', json.dumps(body).encode(), {'x-api-key': key})\n"
        "print(json.load(urlopen(request))['content'][0]['text'])\n"
    )
    program = Program(f"{sys.executable} {tmp_path / 'program.py'}", agents=["Solver"])
    [plan] = search.run("single", problems(1), program=program, policy=POLICY)
    assert plan.error is None and plan.text and plan.text.startswith("I got What is 2 + 2?"), plan.error_details


# ---- requests

# Requests of the three APIs that say the same.
REQUESTS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "requests.json").read_text())
CHAT_REQUEST = REQUESTS.pop("chat/completions")


def call_of(path: str, request: dict[str, Any]) -> Call:
    return read_call(json.dumps(request).encode(), {}, dialect=DIALECTS[path])


@pytest.mark.parametrize("path", REQUESTS)
def test_request_equals_the_chat_request_that_says_the_same(path: str) -> None:
    assert call_of(path, REQUESTS[path]) == read_call(json.dumps(CHAT_REQUEST).encode(), {})


@pytest.mark.parametrize(
    ("path", "other"),
    [("v1/responses", {"prompt_cache_key": "x", "store": False}), ("v1/messages", {"metadata": {"agent": "Adder"}})],
)
def test_fields_that_differ_in_each_run_are_no_part_of_the_replayed_request(path: str, other: dict[str, Any]) -> None:
    assert call_of(path, REQUESTS[path]).digest == call_of(path, REQUESTS[path] | other).digest


def test_chat_request_with_object_arguments_equals_the_one_with_text() -> None:
    request = copy.deepcopy(CHAT_REQUEST)
    request["messages"][2]["tool_calls"][0]["function"]["arguments"] = {"a": 1}
    assert read_call(json.dumps(request).encode(), {}) == read_call(json.dumps(CHAT_REQUEST).encode(), {})


def test_object_arguments_in_replies_of_servers_are_read() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
    }
    reply = parse_reply(json.dumps(body).encode(), 1, "chat", False, tools=True)
    assert '[tool calls] [{"name": "add", "arguments": {"a": 1}}]' in str(reply)


def test_broken_arguments_reach_an_anthropic_client_and_return_unchanged() -> None:
    text = with_calls("", [ToolCall("add", "{broken")])
    path = "v1/messages"
    reply = json.loads(reply_to(call_of(path, REQUESTS[path]), [text]).body)
    entry = {"role": reply["role"], "content": reply["content"]}
    again = call_of(path, {"messages": [{"role": "user", "content": "What?"}, entry]})
    assert again.messages[-1].content == text


IMAGE = {"role": "user", "content": [{"type": "input_image"}]}
REJECTED = [
    ("v1/responses", {"previous_response_id": "resp_1"}, "to_input_list"),
    ("v1/responses", {"conversation": "conv_1"}, "not stored"),
    ("v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0: .* not stored"),
    ("v1/responses", {"input": [IMAGE]}, "input.0.content: expected text"),
    ("v1/responses", {"tools": [{"type": "web_search"}]}, "tools.0: .* define a function"),
    ("v1/responses", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ("v1/responses", {"include": ["message.output_text.logprobs"]}, "logprobs"),
    ("v1/responses", {"truncation": "auto"}, "truncation"),
    ("v1/responses", {"background": True}, "background"),
    ("v1/responses", {"n": 2}, "one reply"),
    ("v1/responses", {"input": 3}, "input: expected"),
    ("v1/messages", {"messages": "x"}, "messages: expected"),
    ("v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
    ("v1/messages", {"messages": [{"role": ["user"], "content": "x"}]}, "messages.0: expected a message"),
    ("v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ("v1/messages", {"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ("v1/messages", {"mcp_servers": [{}]}, "mcp_servers"),
    ("v1/messages", {"system": 3}, "system: expected text"),
]


@pytest.mark.parametrize(("path", "asked", "reason"), REJECTED)
def test_unsupported_part_of_a_request_is_rejected_with_a_remedy(path: str, asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(CallError, match=reason):
        call_of(path, REQUESTS[path] | asked)


ODD: list[Any] = [None, True, 3, "x", [], {}, [3], [{}], {"type": [3]}, {"type": "text"}, {"function": "x"}]


def altered(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value with one part replaced by an odd value."""
    yield from ODD
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        for part in altered(value[key]):
            if isinstance(value, dict):
                yield value | {key: part}
            else:
                yield [*value[:key], part, *value[key + 1 :]]


@pytest.mark.parametrize("path", [None, *REQUESTS])
def test_malformed_request_is_accepted_or_rejected_with_a_reason(path: str | None) -> None:
    dialect, request = (DIALECTS[path], REQUESTS[path]) if path else (None, CHAT_REQUEST)
    for value in altered(request):
        try:
            call = read_call(json.dumps(value).encode(), {}, dialect=dialect)
        except CallError as error:
            assert error.status == 400 and str(error)
        else:
            assert call.messages and json.loads(call.text) and reply_to(call, [""]).status == 200


# ---- what clients see


class Sum(BaseModel):
    """The structured output that a program asks for."""

    total: int


def test_responses_client_parses_structured_output_and_sees_rejections() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        with pytest.raises(openai.BadRequestError, match="not stored"):
            await client.responses.create(model="m", input="x", previous_response_id="resp_1")
        parsed = (await client.responses.parse(model="m", input=question, text_format=Sum)).output_parsed
        assert parsed is not None
        return str(parsed.total)

    def total(request: SamplingRequest, seed: int) -> str:
        assert json.loads(request.extra_body)["response_format"]["json_schema"]["name"] == "Sum"
        return '{"total": 4}'

    [plan] = search.run("single", problems(1), program=Program(solve, agents=["Solver"]), policy=Caller(total))
    assert plan.error is None and plan.correct, plan.error_details


@pytest.mark.frameworks
def test_anthropic_client_parses_structured_output_and_sees_rejections() -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

    def solve(question: str, base_url: str, api_key: str) -> str:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": question}]}
        with (
            anthropic.Anthropic(base_url=base_url, api_key="wrong", max_retries=0) as stranger,
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            stranger.messages.create(**asked)
        assert refused.value.body["error"]["type"] == "authentication_error"
        with anthropic.Anthropic(base_url=base_url, api_key=api_key) as client:
            with pytest.raises(anthropic.BadRequestError, match="runs") as rejected:
                client.messages.create(**asked, tools=[{"type": "web_search_20250305", "name": "web_search"}])
            assert rejected.value.body["error"]["type"] == "invalid_request_error"
            return str(client.messages.parse(**asked, output_format=Sum).parsed_output.total)

    policy = Caller(lambda request, seed: '{"total": 4}' if "json_schema" in request.extra_body else "no format")
    [plan] = search.run("single", problems(1), program=Program(solve, agents=["Solver"]), policy=policy)
    assert plan.error is None and plan.correct, plan.error_details
