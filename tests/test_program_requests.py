"""What programs send: requests kept for the chosen path, agents named by a graph's nodes, temperatures, the dry run."""

from __future__ import annotations

import json
import pickle
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from search_worlds import noise

import search
from mas_gym.errors import ConfigError, StoreError
from mas_gym.policies import Sample, SamplingReply, SamplingRequest
from mas_gym.programs import Program
from mas_gym.prompts import ToolCall, with_calls
from mas_gym.tasks.base import Problem
from search import open_store

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
    page = stored.write_page(tmp_path / "tree.html").read_text(encoding="utf-8")
    assert FOUND.replace("<", "\\u003c") in page and FOUND not in page
    data = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])
    shown = {role: data["texts"][text] for role, text in data["requests"][str(max(path))]}
    assert (shown["tool"], shown["system"]) == (FOUND, LONG)


def test_store_keeps_a_shared_system_prompt_once(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    program = Program(researches, agents=["Researcher"])
    plans = list(search.run("sc:2", problems(20), program=program, policy=Caller(), store=store))
    assert all(plan.error is None and plan.requests for plan in plans)
    connection = sqlite3.connect(store)
    assert connection.execute("SELECT count(*) FROM requests").fetchone() == (40,)
    [(texts,)] = connection.execute("SELECT count(*) FROM texts WHERE length(text) > 5000").fetchall()
    [(size,)] = connection.execute("SELECT sum(length(messages)) FROM requests").fetchall()
    connection.close()
    assert texts == 1 and size < 40 * 300


def test_long_requests_are_cut(tmp_path: Path) -> None:
    def talks(question: str, client: OpenAI) -> str:
        turns = [{"role": "user", "content": f"{i} " + "x" * (30_000 if i == 250 else 1)} for i in range(300)]
        return str(client.chat.completions.create(model="m", messages=turns).choices[0].message.content)  # type: ignore[arg-type]

    [plan] = search.run("single", problems(1), program=Program(talks, agents=["A"]), policy=Caller())
    [request] = plan.requests.values()
    assert [message.content.split()[0] for message in request] == ["0", *map(str, range(101, 300))]
    assert max(len(message.content) for message in request) == 20_006


def test_damaged_requests_are_reported(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    options: dict[str, Any] = {"program": Program(researches, agents=["Researcher"]), "policy": Caller()}
    list(search.run("single", problems(2), store=store, **options))
    connection = sqlite3.connect(store)
    connection.execute("UPDATE requests SET messages = '[]' WHERE node = 1 AND search = (SELECT min(id) FROM searches)")
    connection.commit()
    connection.close()
    with open_store(store) as opened, pytest.raises(StoreError, match="its tree is not what was written"):
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
    """Answers, and records the temperatures that it is asked for."""

    def __init__(self) -> None:
        self.temperatures = set[float]()

    def said(self, request: SamplingRequest, seed: int) -> str:
        self.temperatures.add(request.temperature)
        return f"Final Answer: {seed % 3}"


def test_temperature_0_in_the_program_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    program, policy = Program(greedy, agents=["Solver"]), Listening()
    list(search.run("single", problems(2), program=program, policy=policy))
    assert not caplog.records
    for planner in ("sc:3", "mcts:4,2"):
        list(search.run(planner, problems(3), program=program, policy=policy, training=True))
    [record] = caplog.records
    assert "the calls of 'Solver' ask for temperature 0" in record.message
    assert "Program(..., temperature=0.7) or --program-temperature 0.7" in record.message
    assert policy.temperatures == {0.0}


def test_temperature_of_the_program_replaces_that_of_its_calls(caplog: pytest.LogCaptureFixture) -> None:
    plain, policy = Program(greedy, agents=["Solver"]), Listening()
    program = Program(greedy, agents=["Solver"], temperature=0.9)
    list(search.run("sc:3", problems(2), program=program, policy=policy))
    assert policy.temperatures == {0.9} and not caplog.records
    assert plain.identity() != program.identity() == {**plain.identity(), "temperature": 0.9}
    assert pickle.loads(pickle.dumps(program)).temperature == 0.9
    with pytest.raises(ConfigError, match="expected a temperature"):
        Program(greedy, agents=["Solver"], temperature=-1)
