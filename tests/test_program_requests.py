"""What programs send: requests kept for the chosen path, agents named by a graph's nodes, temperatures, the dry run."""

from __future__ import annotations

import json
import logging
import pickle
import sqlite3
import sys
import zlib
from collections.abc import Sequence
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from browser import CHROMIUM, Browser
from openai import OpenAI
from search_worlds import change_document, noise

import search
from mas_gym.errors import ConfigError, StoreError
from mas_gym.policies import Sample, SamplingReply, SamplingRequest
from mas_gym.programs import Program
from mas_gym.programs.schemas import instance
from mas_gym.systems.tool_calls import ToolCall, with_calls
from mas_gym.tasks.base import Problem
from search import open_store
from search.pages import write_tree_page

SEARCH = {"type": "function", "function": {"name": "search_web", "parameters": {"type": "object"}}}
LONG = "You are the Researcher. " + "Cite every source that you use. " * 400
FOUND = "Paris </script><b>has</b> 2,102,650 inhabitants"


class Caller:
    """A policy that calls a tool first and then answers."""

    name, max_batch, takes_extra_body = "caller", 64, True

    def identity(self) -> str:
        return "caller"

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
        return [SamplingReply(tuple(Sample(self.said(r, s), 5, -1.0, "stop") for s in r.seeds)) for r in requests]

    def said(self, request: SamplingRequest, seed: int) -> str:
        if request.messages[-1].role == "tool":
            return f"Final Answer: {int(noise(request.messages, seed) * 3)}"
        return with_calls("", [ToolCall("search_web", json.dumps({"query": f"q{seed % 3}"}))])


def researches(question: str, client: OpenAI) -> str:
    """Agentic retrieval: the model calls a search tool until it answers."""
    messages: list[Any] = [{"role": "system", "content": LONG}, {"role": "user", "content": question}]
    while True:
        reply = client.chat.completions.create(model="m", messages=messages, tools=[SEARCH])  # type: ignore[list-item]
        message = reply.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": FOUND} for call in message.tool_calls]


def problems(count: int) -> list[Problem]:
    return [Problem(f"p{i}", f"How many live in Paris ({i})?", "1", "number") for i in range(count)]


# ---- requests of the chosen path


def test_tree_page_shows_requests_and_tool_results(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    options: dict[str, Any] = {"program": Program(researches, agents=["Researcher"]), "policy": Caller()}
    [fresh] = search.run("sc:3", problems(1), store=store, **options)
    assert fresh.error is None, fresh.error_details
    with open_store(store) as opened:
        [stored] = opened.plans()
    assert stored.requests == fresh.requests and len(fresh.requests) == 2
    path = []
    node = fresh.best.node if fresh.best is not None else None
    while node:
        path.append(node)
        node = fresh.tree[node].parent if fresh.tree is not None else None
    assert fresh.requests.keys() == set(path)
    roles = [[message.role for message in fresh.requests[node]] for node in reversed(path)]
    assert roles == [["system", "user"], ["system", "user", "assistant", "tool"]]
    page = write_tree_page(stored, tmp_path / "tree.html").read_text(encoding="utf-8")
    assert FOUND.replace("<", "\\u003c").replace(">", "\\u003e") in page and FOUND not in page
    data = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])
    shown = {role: data["texts"][text] for role, text in data["requests"][str(max(path))]}
    assert (shown["tool"], shown["system"]) == (FOUND, LONG)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_tree_page_of_a_program_labels_its_last_recipient_as_end(tmp_path: Path) -> None:
    [plan] = search.run("single", problems(1), program=Program(researches, agents=["Researcher"]), policy=Caller())
    with Browser(tmp_path / "profile") as browser:
        page = browser.page(write_tree_page(plan, tmp_path / "tree.html").as_uri())
        assert page.js("document.querySelector('#detail h2').textContent").startswith("Researcher → end")


def test_shared_system_prompt_is_stored_once_per_search(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    program = Program(researches, agents=["Researcher"])
    plans = list(search.run("sc:2", problems(20), program=program, policy=Caller(), store=store))
    assert all(plan.error is None and plan.requests for plan in plans)
    connection = sqlite3.connect(store)
    found = [zlib.decompress(one) for (one,) in connection.execute("SELECT document FROM documents").fetchall()]
    connection.close()
    prompts = [json.loads(one)["prompts"] for one in found]
    assert len(prompts) == 20 and all(sum(len(text) > 5000 for text in some) == 1 for some in prompts)


def test_damaged_requests_are_reported(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    options: dict[str, Any] = {"program": Program(researches, agents=["Researcher"]), "policy": Caller()}
    list(search.run("single", problems(2), store=store, **options))
    connection = sqlite3.connect(store)
    change_document(connection, "(SELECT min(id) FROM searches)", lambda found: found["requests"].update({"1": []}))
    connection.commit()
    connection.close()
    with (
        open_store(store) as opened,
        pytest.raises(StoreError, match="damaged"),
    ):
        list(opened.plans())
    assert len(list(search.run("single", problems(2), store=store, **options))) == 2
    with open_store(store) as opened:
        assert all(len(plan.requests) == 2 for plan in opened.plans())


# ---- temperature


def greedy(question: str, client: OpenAI) -> str:
    said = question
    for _ in range(2):
        messages: list[Any] = [{"role": "system", "content": "You are the Solver."}, {"role": "user", "content": said}]
        reply = client.chat.completions.create(model="m", messages=messages, temperature=0)
        said = str(reply.choices[0].message.content)
    return said


class Listening(Caller):
    """Replies, and records the requested temperatures."""

    def __init__(self) -> None:
        self.temperatures = set[float]()

    def said(self, request: SamplingRequest, seed: int) -> str:
        self.temperatures.add(request.temperature)
        return f"Final Answer: {seed % 3}"


class Models(str, Enum):  # noqa: UP042 - StrEnum has another str()
    FAST = "gpt-4o"


def test_member_of_a_str_enumeration_is_sent_as_its_value() -> None:
    def solve(question: str, client: OpenAI) -> str:
        reply = client.chat.completions.create(model=Models.FAST, messages=[{"role": "user", "content": question}])
        return f"{reply.model} Final Answer: 1"

    program = Program(solve, agents=["gpt-4o"])
    [plan] = search.run("single", problems(1), program=program, policy=Caller())
    assert plan.error is None and "gpt-4o Final" in plan.text


def test_temperature_0_in_the_program_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    program, policy = Program(greedy, agents=["Solver"]), Listening()
    list(search.run("single", problems(2), program=program, policy=policy))
    assert not caplog.records
    for planner in ("sc:3", "mcts:4,2"):
        list(search.run(planner, problems(3), program=program, policy=policy, training=True))
    [record] = caplog.records
    assert "the calls of 'Solver' request temperature 0" in record.message
    assert "Program(..., temperature=0.7) or --program-temperature 0.7" in record.message
    assert policy.temperatures == {0.0}


def test_program_temperature_replaces_the_temperature_of_its_calls(caplog: pytest.LogCaptureFixture) -> None:
    plain, policy = Program(greedy, agents=["Solver"]), Listening()
    program = Program(greedy, agents=["Solver"], temperature=0.9)
    list(search.run("sc:3", problems(2), program=program, policy=policy))
    assert policy.temperatures == {0.9} and not caplog.records
    assert plain.identity() != program.identity() == {**plain.identity(), "temperature": 0.9}
    assert pickle.loads(pickle.dumps(program)).temperature == 0.9
    with pytest.raises(ConfigError, match="expected a temperature"):
        Program(greedy, agents=["Solver"], temperature=-1)


# ---- the dry run


SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "schemas.json").read_text())


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_generated_instance_matches_its_schema(schema: Any) -> None:
    jsonschema.Draft202012Validator(schema).validate(instance(schema))


def test_dry_run_supports_structured_output_and_forced_tool_calls(caplog: pytest.LogCaptureFixture) -> None:
    plan = SCHEMAS["definitions"]
    done: list[str] = []

    def orchestrates(question: str, client: OpenAI) -> str:
        def ask(system: str, **more: Any) -> Any:
            messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            return client.chat.completions.create(model="m", messages=messages, **more).choices[0].message

        form = {"type": "json_schema", "json_schema": {"name": "plan", "schema": plan, "strict": True}}
        for section in json.loads(ask("You are the Planner.", response_format=form).content)["sections"]:
            done.append(section["name"])
            ask("You are the Writer.")
        grade = {"name": "grade", "parameters": SCHEMAS["required properties"]}
        choice = {"type": "function", "function": {"name": "grade"}}
        said = ask("You are the Judge.", tools=[{"type": "function", "function": grade}], tool_choice=choice)
        return str(json.loads(said.tool_calls[0].function.arguments)["grade"])

    with caplog.at_level(logging.INFO):
        agents = [agent.name for agent in Program(orchestrates).mas.agents]
    assert agents == ["Planner", "Writer", "Judge", "other agents"] and len(done) >= 1
    said = "dry run of orchestrates: 3 model calls by Planner, Writer, Judge; it returned an answer"
    assert [(record.levelname, record.message) for record in caplog.records] == [("INFO", said)]


def test_dry_run_reports_its_failure_and_missing_agent_names(caplog: pytest.LogCaptureFixture) -> None:
    def unnamed(question: str, client: OpenAI) -> str:
        for _ in range(2):
            messages: Any = [{"role": "user", "content": question}]
            said = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
        return str(json.loads(str(said))["answer"])

    assert [agent.name for agent in Program(unnamed).mas.agents] == ["m", "other agents"]
    end, hint = caplog.records
    assert "dry run of unnamed: 2 model calls by m; it failed: JSONDecodeError" in end.message
    assert "count as 'other agents' unless agents= names them" in end.message
    assert "one agent, 'm'" in hint.message and "X-MAS-Agent" in hint.message


def test_agents_not_reached_by_the_dry_run_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def corrected(question: str, client: OpenAI) -> str:
        said = question
        for name in ("Writer", "Editor"):
            if "APPROVED" not in said:
                messages: Any = [
                    {"role": "system", "content": f"You are the {name}."},
                    {"role": "user", "content": said},
                ]
                said = str(client.chat.completions.create(model="m", messages=messages).choices[0].message.content)
        return said

    list(search.run("sc:2", problems(2), program=Program(corrected), policy=Listening()))
    [told] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "did not reach the agent 'Editor'" in told and "agents=" in told


# ---- nodes of a graph


def test_agents_without_a_system_prompt_are_named_after_their_langgraph_node(monkeypatch: pytest.MonkeyPatch) -> None:
    running: ContextVar[dict[str, Any] | None] = ContextVar("running", default=None)
    module = SimpleNamespace(var_child_runnable_config=running)
    monkeypatch.setitem(sys.modules, "langchain_core.runnables.config", module)

    def graph(question: str, client: OpenAI) -> str:
        said = question
        for node, inner in (("planner", ""), ("team", "model"), ("judge", "")):
            path = "|".join(f"{part}:1f2e" for part in (node, inner) if part)
            running.set({"metadata": {"langgraph_node": inner or node, "langgraph_checkpoint_ns": path}})
            messages: Any = [{"role": "user", "content": said}]
            system = {"team": "Work on the plan.", "judge": "You are the Critic."}.get(node)
            if system:
                messages.insert(0, {"role": "system", "content": system})
            said = str(client.chat.completions.create(model="m", messages=messages).choices[0].message.content)
        return said

    program = Program(graph)
    assert [agent.name for agent in program.mas.agents] == ["planner", "team", "Critic", "other agents"]
    [plan] = search.run("sc:3", problems(1), program=program, policy=Listening())
    assert plan.best is not None and [turn.speaker for turn in plan.best.state.turns] == [0, 1, 2]


def test_calls_of_a_node_missed_by_the_dry_run_are_assigned_to_that_node(caplog: pytest.LogCaptureFixture) -> None:
    def graph(question: str, client: OpenAI) -> str:
        said = question
        for node, prompt in (
            ("plan", "Plan."),
            ("math_agent", "You are a math agent."),
            ("expert", "You are expert 7."),
        ):
            if "APPROVED" not in said:
                messages: Any = [{"role": "system", "content": prompt}, {"role": "user", "content": said}]
                headers = {"x-mas-node": node, "x-mas-nodes": "plan math_agent expert"}
                made = client.chat.completions.create(model="m", messages=messages, extra_headers=headers)
                said = str(made.choices[0].message.content)
        return said

    program = Program(graph)
    assert [agent.name for agent in program.mas.agents] == ["plan", "math_agent", "expert", "other agents"]
    [plan] = search.run("single", problems(1), program=program, policy=Listening())
    assert plan.best is not None and [turn.speaker for turn in plan.best.state.turns] == [0, 1, 2]
    assert all(record.levelname != "WARNING" for record in caplog.records)
