"""One program that harms the process it shares fails only its own search; `isolate` gives each execution a process."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from loopback import serving
from openai import AsyncOpenAI

import search
from mas_gym.errors import ConfigError
from mas_gym.policies import ScriptedPolicy
from mas_gym.programs import Program, ProgramError
from mas_gym.tasks.base import Problem
from search.models.programs import ProgramModels
from search.service.app import make_app
from search.service.search_pool import Service
from search.setup import RunSpec

CULPRIT = "Who breaks the loop?"


async def raise_in_task(error: BaseException) -> None:
    async def child() -> None:
        raise error

    task = asyncio.create_task(child())
    await asyncio.sleep(0.01)
    task.cancelled()


async def exit_in_task() -> None:
    await raise_in_task(SystemExit(3))


async def interrupt_in_task() -> None:
    await raise_in_task(KeyboardInterrupt())


async def exit_in_callback() -> None:
    asyncio.get_running_loop().call_soon(sys.exit)
    await asyncio.sleep(0.01)


async def cancel_all() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0.01)


HARMS: list[Callable[[], Any]] = [exit_in_task, interrupt_in_task, exit_in_callback, cancel_all]


def harmful(harm: Callable[[], Any]) -> Program:
    async def say(client: AsyncOpenAI, text: str) -> str:
        messages: Any = [{"role": "system", "content": "You are the Solver."}, {"role": "user", "content": text}]
        reply = await client.chat.completions.create(model="m", messages=messages)
        return str(reply.choices[0].message.content)

    async def solve(question: str, client: AsyncOpenAI) -> str:
        first = await say(client, question)
        if question == CULPRIT:
            await harm()
        else:
            first = await asyncio.to_thread(str, first)
        return await say(client, f"{question} {first}")

    # Code with captured values has no identity.
    solve.revision = harm.__name__  # type: ignore[attr-defined]
    return Program(solve, agents=["Solver"])


def answer(request: Any, seed: int) -> str:
    return "Final Answer: 7"


@pytest.mark.parametrize("harm", HARMS)
def test_program_that_disrupts_the_event_loop_fails_only_its_search(harm: Callable[[], Any], tmp_path: Path) -> None:
    texts = [CULPRIT if i == 7 else f"Question {i}?" for i in range(20)]
    problems = [Problem(f"p{i}", text, "7", "number") for i, text in enumerate(texts)]
    store = tmp_path / "runs.db"
    list(search.run("sc:2", problems, program=harmful(harm), policy=ScriptedPolicy(answer, name="seven"), store=store))
    with search.open_store(store) as opened:
        plans = {plan.problem_id: plan for plan in opened.plans(opened.runs()[0].run)}
    assert len(plans) == 20
    failed = [id_ for id_, plan in plans.items() if plan.best is None or "[program failed]" in plan.best.text]
    assert failed == ["p7"]
    assert all(plan.correct for id_, plan in plans.items() if id_ != "p7")


def test_service_continues_after_a_program_disrupts_the_event_loop() -> None:
    # It harms no one while it is the only program.
    alone = [harm for harm in HARMS if harm is not cancel_all]
    harms = iter(alone)

    async def next_harm() -> None:
        await next(harms)()

    program = harmful(next_harm)
    service = Service(RunSpec((), program.mas, ScriptedPolicy(answer), source=ProgramModels(program)))
    with (
        serving(make_app(service)) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
    ):

        def ask(text: str) -> Any:
            messages: Any = [{"role": "user", "content": text}]
            return client.chat.completions.create(model="mas-gym", messages=messages).choices[0].message.content

        for harm in alone:
            with pytest.raises(openai.InternalServerError, match="the program failed"):
                ask(CULPRIT)
            assert ask(f"What is 3 + 4, after {harm.__name__}?") == "Final Answer: 7"


# ---- state that outlives a run


LEAKING = """
import mas_gym

MEMORY = {}

@mas_gym.recorded
def draw(question):
    MEMORY["draws"] = MEMORY.get("draws", 0) + 1
    with open("DRAWS", "a") as log:
        print(question, file=log)
    return ["any", "JSON"]

async def solve(question, client):
    print("this is no answer")
    thread = MEMORY.setdefault("1", [])
    thread.append({"role": "user", "content": f"{question} {draw(question)[0]}"})
    messages = [{"role": "system", "content": "You are Ann."}, *thread]
    reply = await client.chat.completions.create(model="m", messages=messages)
    thread.append({"role": "assistant", "content": reply.choices[0].message.content})
    if "fail" in question:
        raise ValueError("no such thing")
    messages = [{"role": "system", "content": "You are Bob."}, *thread]
    reply = await client.chat.completions.create(model="m", messages=messages)
    return reply.choices[0].message.content
"""


@pytest.fixture
def leaking(tmp_path: Path) -> str:
    (tmp_path / "leaking.py").write_text(LEAKING.replace("DRAWS", str(tmp_path / "draws")))
    return f"{tmp_path}/leaking.py:solve"


def test_state_kept_between_runs_is_reported_before_the_search(leaking: str) -> None:
    asked: list[Any] = []
    policy = ScriptedPolicy(lambda request, seed: asked.append(request) or "Final Answer: 7")
    with pytest.raises(ProgramError, match="different call") as caught:
        search.run("single", [Problem("p", "q?", "7", "number")], program=leaking, policy=policy)
    assert "isolate=True" in str(caught.value) and "APPROVED" in str(caught.value) and not asked


@pytest.mark.slow
def test_isolated_searches_do_not_share_state(leaking: str, tmp_path: Path) -> None:
    asked: list[Any] = []

    def say(request: Any, seed: int) -> str:
        asked.append(request.messages)
        return f"I say {seed}. Final Answer: 7"

    problems = [Problem(f"p{i}", text, "7", "number") for i, text in enumerate(["One?", "Why fail?"])]
    program = Program(leaking, isolate=True)
    assert [agent.name for agent in pickle.loads(pickle.dumps(program)).mas.agents] == ["Ann", "Bob", "other agents"]
    plans = {p.problem_id: p for p in search.run("sc:2", problems, program=program, policy=ScriptedPolicy(say))}
    assert [plans[id_].correct for id_ in ("p0", "p1")] == [True, False]
    best = plans["p1"].best
    assert best is not None and best.text.endswith("ValueError: no such thing")
    assert {len(messages) for messages in asked} == {2, 3}
    for messages in asked:
        assert sum("?" in message.content for message in messages) == 1
    # Recorded tools run once per branch, as they do in one process: the rehearsals and each search begin anew.
    draws = (tmp_path / "draws").read_text().split("\n")
    assert [draws.count(problem.question) for problem in problems] == [1, 1]


def test_isolate_rejects_unimportable_programs() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        return question

    with pytest.raises(ConfigError, match="top level of a file"):
        Program(solve, isolate=True)
    with pytest.raises(ConfigError, match="already run in their own processes"):
        Program("python my_agents.py", isolate=True)


@pytest.mark.parametrize(("order", "seed", "warned"), [("", "", True), ("sorted", "", False), ("", "0", False)])
def test_set_iteration_order_that_varies_between_processes_is_reported(
    tmp_path: Path, order: str, seed: str, warned: bool
) -> None:
    (tmp_path / "sets.py").write_text(f"""
async def solve(question, client):
    names = {order}({{"Ann", "Bob", "Cem", "Dora", "Eve", "Finn", "Gus", "Hal", "Ida", "Jo", "Kim", "Lea"}})
    messages = [{{"role": "user", "content": f"{{question}} Ask {{', '.join(names)}}."}}]
    return (await client.chat.completions.create(model="m", messages=messages)).choices[0].message.content
""")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | ({"PYTHONHASHSEED": seed} if seed else {})
    code = f"from mas_gym.programs import Program; Program('{tmp_path}/sets.py:solve').mas"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert ("PYTHONHASHSEED=0" in ran.stderr) == warned, ran.stderr
