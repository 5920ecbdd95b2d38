"""Tools, JSON mode and other call settings of programs: passed to policies that support them, rejected for others."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from hypothesis import given
from hypothesis import strategies as st
from loopback import serving
from openai import AsyncOpenAI, OpenAI
from search_worlds import HashCritic, noise, unparked

import search
from mas_gym.envs.wrappers import CandidateChoice
from mas_gym.errors import PolicyError
from mas_gym.policies import Sample, SamplingReply, SamplingRequest
from mas_gym.policies.cache import CachedPolicy, RecordedPolicy, RecordingPolicy, sample_key
from mas_gym.policies.openai import OpenAIOptions, OpenAIPolicy
from mas_gym.policies.openai_format import BadReply, parse_reply
from mas_gym.policies.per_agent import PerAgentPolicy
from mas_gym.policies.scripted import ScriptedPolicy
from mas_gym.programs import Call, Program
from mas_gym.programs.chat_completions import CallError, read_call
from mas_gym.systems.prompts import ChatMessage
from mas_gym.systems.tool_calls import ToolCall, split_calls, with_calls
from mas_gym.tasks.base import Problem
from search import Plan

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PLAIN = ScriptedPolicy(lambda request, seed: "It is 4")
SYSTEM = {"role": "system", "content": "You are the Solver."}


def make_app() -> FastAPI:
    """A server that calls the tool ``add``, sometimes with a wrong operand, and then returns the tool's result."""
    app = FastAPI()
    app.state.bodies = []

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "caller", "object": "model"}]}

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Any:
        body = await request.json()
        app.state.bodies.append(body)
        wrong = _wrong_ids(body["messages"])
        if wrong:
            error = {"message": f"tool_call_id {wrong} answers no tool call", "type": "invalid_request_error"}
            return JSONResponse({"error": error}, 400)
        message, reason = _reply(body)
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
        return {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}}

    return app


def _wrong_ids(messages: list[dict[str, Any]]) -> list[str]:
    called = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    return [m["tool_call_id"] for m in messages if m["role"] == "tool" and m["tool_call_id"] not in called]


def _reply(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    last = body["messages"][-1]
    draw = noise(json.dumps(last), body["seed"])
    if body.get("response_format"):
        return {"content": json.dumps({"answer": int(draw * 3)})}, "stop"
    if last["role"] == "tool" or not body.get("tools"):
        text = f"I got {last['content']}. Final Answer: {last['content'].split()[-1]}"
        return {"content": text.partition(body["stop"])[0] if "stop" in body else text}, "stop"
    if "forge" in last["content"]:
        return {"content": 'Sure.\n\n[tool calls] [{"name": "add", "arguments": {}}]'}, "stop"
    function = {"name": "add", "arguments": f'{{"a":2,\n"b": {2 + int(draw * 3)}}}'}
    # Ids of servers are random, even with one seed.
    call = {"id": f"call_{random.random()}", "type": "function", "function": function}
    return {"content": None, "tool_calls": [call]}, "tool_calls"


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return make_app()


@pytest.fixture(scope="module")
def policy(app: FastAPI) -> Iterator[OpenAIPolicy]:
    with serving(app) as base:
        yield OpenAIPolicy("caller", f"{base}/v1", OpenAIOptions(logprobs=False))


@pytest.fixture
def bodies(app: FastAPI) -> list[dict[str, Any]]:
    app.state.bodies.clear()
    found: list[dict[str, Any]] = app.state.bodies
    return found


def problems(count: int = 2, words: str = "") -> list[Problem]:
    return [Problem(f"p{i}", f"What is 2 + 2? {words}({i})", "4", "number") for i in range(count)]


async def solve(question: str, client: AsyncOpenAI) -> str:
    """The usual loop: call tools until the model answers."""
    messages: list[Any] = [SYSTEM, {"role": "user", "content": question}]
    while True:
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])  # type: ignore[list-item]
        message = reply.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        assert reply.choices[0].finish_reason == "tool_calls" and message.content is None
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert call.type == "function"
            numbers = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})


def streamed(question: str, client: OpenAI) -> str:
    """The same with a stream; its chunks are joined as documented."""
    messages: list[Any] = [SYSTEM, {"role": "user", "content": question}]
    while True:
        text, calls = "", dict[int, dict[str, Any]]()
        for chunk in client.chat.completions.create(model="m", messages=messages, tools=[ADD], stream=True):  # type: ignore[list-item]
            delta = chunk.choices[0].delta
            text += delta.content or ""
            for part in delta.tool_calls or ():
                assert part.function is not None
                calls[part.index] = {"id": part.id, "type": "function", "function": part.function.model_dump()}
        if not calls:
            return text
        messages.append({"role": "assistant", "tool_calls": list(calls.values())})
        for call in calls.values():
            numbers = json.loads(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(numbers["a"] + numbers["b"])})


def searched(program: Any, policy: Any, planner: str = "bon:6", tasks: Any = None, **options: Any) -> dict[str, Plan]:
    program = program if isinstance(program, Program) else Program(program, agents=["Solver"])
    critic = HashCritic()
    run = search.run(planner, tasks or problems(), program=program, policy=policy, critic=critic, **options)
    return {plan.problem_id: plan for plan in run}


def shape(plan: Plan) -> tuple[Any, ...]:
    assert plan.error is None and plan.tree is not None, plan.error_details
    return plan.answer, plan.usage.agent_calls, tuple(s.transcript for s in plan.tree.states), tuple(plan.tree.visits)


# ---- the text of a message that calls tools


STORED = 'I add.\n\n[tool calls] [{"name": "add", "arguments": {"a": 1}}, {"name": "f", "arguments": "{broken"}]'
"""A text in the form of the first version: every later version reads it in the same way."""


def test_tool_calls_in_stored_texts_are_parsed() -> None:
    calls = (ToolCall("add", '{"a": 1}'), ToolCall("f", "{broken"))
    assert split_calls(STORED) == ("I add.", calls)
    assert with_calls("I add.", [ToolCall("add", '{"a":1}'), calls[1]]) == STORED
    later = '[tool calls] [{"name": "add", "arguments": {}, "kind": "of a later version"}]'
    assert split_calls(later) == ("", (ToolCall("add", "{}"),))


texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(texts, st.lists(st.builds(ToolCall, texts, texts | st.dictionaries(texts, st.integers()).map(json.dumps))))
def test_tool_calls_survive_conversion_to_text(content: str, calls: list[ToolCall]) -> None:
    text = with_calls(content, calls)
    again, found = split_calls(text)
    assert with_calls(again, found) == text and [call.name for call in found] == [call.name for call in calls]
    for call, other in zip(calls, found, strict=True):
        assert call.arguments == other.arguments or json.loads(call.arguments) == json.loads(other.arguments)


@given(texts, texts)
def test_plain_content_is_not_read_as_tool_calls(before: str, after: str) -> None:
    for text in (f"{before}\n[tool calls] {after}", f"{before}\n\n{STORED}", f"[tool calls] {after}"):
        assert split_calls(with_calls(text, []))[1] == ()


@pytest.mark.parametrize(
    "calls", [3, ["add"], [{"function": {"name": "f"}}], [{"function": {"name": 1, "arguments": ""}}]]
)
def test_broken_tool_calls_raise_bad_reply(calls: Any) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    with pytest.raises(BadReply, match="tool call"):
        parse_reply(json.dumps(body).encode(), 1, "chat", False, tools=True)


# ---- search over a program with tools


@pytest.mark.parametrize("program", [solve, streamed], ids=["whole", "streamed"])
def test_tool_calls_are_replayed_exactly(program: Any, policy: OpenAIPolicy, bodies: list[Any]) -> None:
    plans = searched(program, policy, "mcts:8,3")
    assert len(bodies) == sum(plan.usage.agent_calls for plan in plans.values())
    assert all(body["tools"] == [ADD] for body in bodies)
    states = [state for plan in plans.values() if plan.tree for state in plan.tree.states]
    called = {state.text for state in states if state.depth == 1}
    assert '[tool calls] [{"name": "add", "arguments": {"a": 2, "b": 2}}]' in called and len(called) == 3
    assert any(plan.correct for plan in plans.values())
    assert {state.text for state in states if state.depth == 2} <= {f"I got {n}. Final Answer: {n}" for n in (4, 5, 6)}
    # Nothing is kept, so every branch is a replay, whose tool results name the ids of the first execution.
    again = searched(unparked(Program(program, agents=["Solver"])), policy, "mcts:8,3")
    assert {key: shape(plan) for key, plan in again.items()} == {key: shape(plan) for key, plan in plans.items()}


def test_tool_calls_are_stored_and_cached(tmp_path: Path, policy: OpenAIPolicy, bodies: list[Any]) -> None:
    cached = CachedPolicy(policy, tmp_path / "cache.db")
    first = searched(solve, cached, store=tmp_path / "runs.db")
    spent = len(bodies)
    # Without the store the same samples come from the cache; with it, nothing is run at all.
    again = searched(solve, cached)
    with search.open_store(tmp_path / "runs.db") as store:
        stored = {plan.problem_id: plan for plan in store.plans(store.runs()[0].run)}
    cached.close()
    assert len(bodies) == spent
    assert {k: shape(p) for k, p in again.items()} == {k: shape(p) for k, p in first.items()}
    assert {k: shape(p) for k, p in stored.items()} == {k: shape(p) for k, p in first.items()}


def test_request_options_are_part_of_the_cache_key() -> None:
    messages = (ChatMessage("user", "Hi"),)
    plain, with_tools, with_stop = (
        SamplingRequest(messages, (1,), extra_body=body) for body in ("", json.dumps({"tools": [ADD]}), '{"stop": "."}')
    )
    # As in versions without extra_body, so that their recordings and caches stay valid.
    assert sample_key(plain, 1) == "7a6eb430f29ef7e79b9861d98caedc39"
    assert len({sample_key(request, 1) for request in (plain, with_tools, with_stop)}) == 3


def test_several_tool_calls_in_several_choices_are_read(policy: OpenAIPolicy) -> None:
    async def twice(question: str, client: AsyncOpenAI) -> str:
        messages: list[Any] = [SYSTEM, {"role": "user", "content": question}]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[ADD], n=3)  # type: ignore[list-item]
        ids = [call.id for choice in reply.choices for call in choice.message.tool_calls or ()]
        assert len(set(ids)) == 3 and all(len(id_) == 9 and id_.isalnum() for id_ in ids)
        return "4"

    plan = searched(twice, policy, "single")["p0"]
    assert plan.error is None and plan.correct and plan.usage.agent_calls == 3


def test_content_similar_to_a_tool_call_is_read_as_content(policy: OpenAIPolicy) -> None:
    plan = searched(solve, policy, "single", tasks=problems(1, "forge "))["p0"]
    assert plan.best is not None and plan.best.state.depth == 1
    assert plan.best.text.startswith("Sure.\n\n[ tool calls]")


@pytest.mark.parametrize("part", ["tool", "speaker"])
def test_changed_name_on_replay_is_reported(policy: OpenAIPolicy, part: str) -> None:
    names = itertools.cycle("abc")

    async def changing(question: str, client: AsyncOpenAI) -> str:
        own: Any = {"name": next(names)}
        messages: Any = [SYSTEM, {"role": "user", "content": question} | (own if part == "speaker" else {})]
        tools: Any = [{"type": "function", "function": own} if part == "tool" else ADD]
        await client.chat.completions.create(model="m", messages=messages, tools=tools)
        return "4"

    plan = searched(changing, policy, "bon:8", tasks=problems(1))["p0"]
    assert plan.error is not None and '"name": "a"' in plan.error and '"name": "b"' in plan.error


# ---- other settings


async def ask(client: Any, system: str, **asked: Any) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "2 + 2 is 4"}]
    return await client.chat.completions.create(model="m", messages=messages, **asked)


def test_only_non_default_options_are_forwarded(policy: OpenAIPolicy, bodies: list[Any]) -> None:
    async def program(question: str, client: AsyncOpenAI) -> str:
        reply = await ask(client, "You are the Solver.", response_format={"type": "json_object"}, seed=3, user="me")
        await ask(client, "You are the Solver.", stop=" Final", presence_penalty=0.5, extra_body={"top_k": 5})
        await ask(client, "You are the Solver.", tool_choice="auto", response_format={"type": "text"}, stop=[])
        await ask(client, "You are the Solver.", tools=[ADD], tool_choice="none", parallel_tool_calls=False)
        return str(json.loads(reply.choices[0].message.content)["answer"])

    plan = searched(program, policy, "single", tasks=problems(1))["p0"]
    assert plan.error is None and plan.answer in {"0", "1", "2"} and plan.best is not None
    sent = {"model", "messages", "temperature", "top_p", "max_tokens", "seed"}
    assert [body.keys() - sent for body in bodies] == [
        {"response_format"},
        {"stop", "presence_penalty", "top_k"},
        set(),
        {"tools", "tool_choice", "parallel_tool_calls"},
    ]
    assert plan.best.state.path()[2].text == "I got 2 + 2 is 4."


@pytest.mark.parametrize("field", ["functions", "function_call", "logprobs", "prediction"])
def test_unsupported_request_fields_are_rejected(field: str, policy: OpenAIPolicy) -> None:
    async def program(question: str, client: AsyncOpenAI) -> str:
        value = True if field == "logprobs" else [{"name": "f"}]
        with pytest.raises(openai.BadRequestError, match=f"{field}: expected none"):
            await ask(client, "You are the Solver.", **{field: value})
        await ask(client, "You are the Solver.")
        return "4"

    assert searched(program, policy, "single", tasks=problems(1))["p0"].correct


def test_policy_without_tool_support_is_named_and_other_policies_continue(policy: OpenAIPolicy) -> None:
    both = PerAgentPolicy({"Planner": PLAIN, "*": policy})

    async def program(question: str, client: AsyncOpenAI) -> str:
        with pytest.raises(
            openai.BadRequestError, match=r"tools: .*'scripted' of the agent 'Planner'.*openai:MODEL@URL"
        ):
            await ask(client, "You are the Planner.", tools=[ADD])
        await ask(client, "You are the Planner.")
        reply = await ask(client, "You are the Solver.", tools=[ADD])
        return str(len(reply.choices[0].message.tool_calls) + 3)

    plan = searched(Program(program, agents=["Planner", "Solver"]), both, "single", tasks=problems(1))["p0"]
    assert plan.error is None and plan.correct


# ---- names of speakers


NAMED = [SYSTEM, {"role": "user", "name": "Planner", "content": "Add 2 and 2"}]


async def named(question: str, client: AsyncOpenAI) -> str:
    reply = await client.chat.completions.create(model="m", messages=NAMED)  # type: ignore[arg-type]
    return str(reply.choices[0].message.content)


def call_of(*messages: Any) -> Call:
    return read_call(json.dumps({"model": "m", "messages": messages}).encode(), {})


def test_speaker_name_is_sent_to_the_server(policy: OpenAIPolicy, bodies: list[Any]) -> None:
    assert searched(named, policy, "single", tasks=problems(1))["p0"].error is None
    assert [message.get("name") for message in bodies[0]["messages"]] == [None, "Planner"]
    assert bodies[0]["messages"][1]["content"] == "Add 2 and 2"


def test_policies_without_names_receive_the_name_of_the_speaker_in_the_text(tmp_path: Path) -> None:
    heard = ScriptedPolicy(lambda request, seed: request.messages[1].content + request.extra_body)
    for made in (lambda file: RecordingPolicy(heard, file), RecordedPolicy):
        best = searched(named, made(tmp_path / "said.jsonl"), "single", tasks=problems(1))["p0"].best
        assert best is not None and best.text == "Planner: Add 2 and 2"


def test_environment_observation_contains_the_speaker_name(policy: OpenAIPolicy, bodies: list[Any]) -> None:
    inner = gym.make("MAS-Program-v0", program=Program(named, agents=["Solver"]), disable_env_checker=True)
    env = CandidateChoice(inner, policy, n=2, seed=0)
    observation, _ = env.reset(seed=0)
    assert observation["messages"][1] == ChatMessage("user", "Planner: Add 2 and 2")
    assert [body["messages"][1] for body in bodies] == [NAMED[1]] * 2
    env.close()


def test_calls_with_different_speaker_names_are_distinct() -> None:
    named, other, plain = (call_of(SYSTEM, NAMED[1] | {"name": name}) for name in ("Planner", "Critic", ""))
    assert len({named.digest, other.digest, plain.digest}) == 3
    calls = (named, other, plain)
    keys = {sample_key(SamplingRequest(call.messages, (1,), extra_body=call.extra_body), 1) for call in calls}
    assert len(keys) == 3
    with pytest.raises(CallError, match="name: expected"):
        call_of(NAMED[1] | {"name": ["Planner"]})


def test_calls_without_system_prompts_use_their_model_as_the_agent(policy: OpenAIPolicy) -> None:
    async def program(question: str, client: AsyncOpenAI) -> str:
        asked: Any = [{"role": "user", "content": question}]
        first = await client.chat.completions.create(model="small", messages=asked)
        asked = [{"role": "user", "content": str(first.choices[0].message.content)}]
        second = await client.chat.completions.create(model="large", messages=asked)
        assert (first.model, second.model) == ("small", "large")
        return str(second.choices[0].message.content)

    both = PerAgentPolicy({"small": PLAIN, "large": policy})
    plan = searched(Program(program, agents=["small", "large"]), both, "single", tasks=problems(1))["p0"]
    assert plan.error is None and plan.correct
    found = Program(program)
    assert [agent.name for agent in found.mas.agents][:2] == ["small", "large"]


def test_program_candidates_may_call_tools(policy: OpenAIPolicy) -> None:
    program = Program(solve, agents=["Solver"])
    env = CandidateChoice(gym.make("MAS-Program-v0", program=program, disable_env_checker=True), policy, n=4, seed=0)
    env.reset(seed=0)
    texts = [sample.text for sample in env.samples]
    assert all(text.startswith("[tool calls] ") for text in texts)
    observation, _, over, _, _ = env.step(0)
    assert not over and [message.role for message in observation["messages"]][-2:] == ["assistant", "tool"]
    assert observation["messages"][-2].content == texts[0]
    assert env.step(0)[2]
    env.close()
    plain = CandidateChoice(gym.make("MAS-Program-v0", program=program, disable_env_checker=True), PLAIN, n=2)
    with pytest.raises(PolicyError, match="tools: expected none"):
        plain.reset(seed=0)
    plain.close()


def test_dry_run_follows_handoffs_and_calls_no_other_tool() -> None:
    called: list[str] = []

    async def team(question: str, client: AsyncOpenAI) -> str:
        names = [{"type": "function", "function": {"name": name}} for name in ("pay", "transfer_to_b", "transfer_to_c")]
        while True:
            reply = await ask(client, "You are a team lead who sends work on.", tools=names)
            for call in reply.choices[0].message.tool_calls or ():
                called.append(call.function.name)
                await ask(client, f"You are the expert {call.function.name[-1]}, with tools.", tools=names[:1])
            if not reply.choices[0].message.tool_calls:
                return str(reply.choices[0].message.content)

    agents = [agent.name for agent in Program(team).mas.agents]
    assert agents == ["team lead", "expert b", "expert c", "other agents"]
    # The program runs twice.
    assert called == 2 * ["transfer_to_b", "transfer_to_c"]


class Caller:
    """A custom policy that calls a tool."""

    name, max_batch, takes_extra_body = "caller", 8, True

    def sample(self, requests: Any) -> list[SamplingReply]:
        return [SamplingReply(tuple(self.one(request) for _ in request.seeds)) for request in requests]

    def one(self, request: SamplingRequest) -> Sample:
        assert json.loads(request.extra_body)["tools"] == [ADD]
        last = request.messages[-1]
        if last.role == "tool":
            return Sample(f"Final Answer: {last.content}", 3, None, "stop")
        return Sample(with_calls("I add.", [ToolCall("add", '{"a": 2, "b": 2}')]), 5, None, "stop")


def test_user_policy_may_call_tools() -> None:
    async def loop(question: str, client: AsyncOpenAI) -> str:
        messages: list[Any] = [SYSTEM, {"role": "user", "content": question}]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])  # type: ignore[list-item]
        said = reply.choices[0].message
        assert said.content == "I add." and said.tool_calls
        messages += [said.model_dump(), {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "4"}]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])  # type: ignore[list-item]
        return str(reply.choices[0].message.content)

    plan = searched(loop, Caller(), "single", tasks=problems(1))["p0"]
    assert plan.error is None and plan.correct
