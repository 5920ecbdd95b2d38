"""Programs behind the service, on the pages, and on the command line from rollouts to a trained critic."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from loopback import serving
from openai import AsyncOpenAI
from typer.testing import CliRunner

import search
from mas_gym.cli import app
from mas_gym.cli.view import Pages
from mas_gym.policies.scripted import ScriptedPolicy
from mas_gym.programs import Program
from search.models.programs import ProgramModels
from search.service.app import make_app
from search.service.search_pool import Service
from search.setup import RunSpec

AGENTS = """
async def solve(question, client):
    async def ask(system, text):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return (await client.chat.completions.create(model="m", messages=messages)).choices[0].message.content
    work = await ask("You are the Writer.", question)
    if "REVISE" in await ask("You are the Critic.", work):
        work = await ask("You are the Writer.", work)
    return work
"""
POLICY = """
from mas_gym.policies import ScriptedPolicy
def make():
    def say(request, seed):
        if request.agent == "Critic":
            return "REVISE" if seed % 2 else "GOOD"
        return f"I say {seed % 97}. Final Answer: {seed % 3}"
    return ScriptedPolicy(say)
"""


async def odd(question: str, client: AsyncOpenAI) -> str:
    messages: Any = [{"role": "system", "content": "You are the Solver."}, {"role": "user", "content": question}]
    reply = await client.chat.completions.create(model="m", messages=messages)
    if "fail" in question:
        raise ValueError("no such thing")
    return f"in my own words: {str(reply.choices[0].message.content)[-1]}"


def test_service_returns_the_programs_answer_or_its_error() -> None:
    program = Program(odd, agents=["Solver"])
    policy = ScriptedPolicy(lambda request, seed: "Final Answer: 7")
    service = Service(RunSpec((), program.mas, policy, search.load_planner("sc:3"), source=ProgramModels(program)))
    with (
        serving(make_app(service)) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
    ):

        def ask(text: str, **more: Any) -> Any:
            messages: Any = [{"role": "user", "content": text}]
            return client.chat.completions.create(model="mas-gym", messages=messages, **more)

        assert ask("What is 3 + 4?").choices[0].message.content == "in my own words: 7"
        with pytest.raises(openai.InternalServerError, match="the program failed: ValueError: no such thing"):
            ask("fail")
        with pytest.raises(openai.APIError, match="the program failed: ValueError: no such thing"):
            list(ask("fail", stream=True))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "policy.py").write_text(POLICY)
    rows = [f"Question {i}?,{i % 3}" for i in range(12)]
    (tmp_path / "my.csv").write_text("\n".join(["question,answer", *rows]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMON = ["--task", "my.csv", "--program", "agents.py:solve", "--policy", "policy.py:make"]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def test_tree_page_of_a_program_contains_its_facts_and_agents(folder: Path) -> None:
    run("eval", *COMMON, "-n", "2", "--planner", "bon:3", "--critic", "policy-likelihood", "--store", "runs.db")
    with search.open_store(folder / "runs.db") as store:
        [shown] = store.runs()
    page = Pages(folder / "runs.db").page(f"/tree/{shown.run}", {"problem": next(iter(shown_problems(folder)))})
    [data] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    view = json.loads(data)
    assert view["program"] is True and ["program", "agents"] in view["facts"]
    assert {"Writer", "Critic"} < set(view["agents"])


def test_program_agents_are_named_on_the_command_line(folder: Path) -> None:
    names = [word for name in ("Writer", "Critic", "Editor") for word in ("--program-agent", name)]
    run("eval", *COMMON, *names, "-n", "2", "--planner", "single", "--store", "runs.db")
    with search.open_store(folder / "runs.db") as store:
        assert [agent.name for agent in store.runs()[0].mas.agents] == ["Writer", "Critic", "Editor"]
    alone = CliRunner().invoke(app, ["eval", "-n", "2", *names])
    assert alone.exit_code != 0 and "--program-agent: expected --program" in alone.output


def shown_problems(folder: Path) -> list[str]:
    with search.open_store(folder / "runs.db") as store:
        return [plan.problem_id for plan in store.plans(store.runs()[0].run)]


@pytest.mark.slow
def test_critic_trained_on_program_rollouts_guides_a_search_of_the_program(folder: Path) -> None:
    pytest.importorskip("torch", reason="training needs the extra 'train'")
    run("rollouts", *COMMON, "--split", "train", "--planner", "mcts:12,3", "--store", "trees.db")
    run("train", "masprm", "--store", "trees.db", "--out", "mine", "--set", "epochs=1")
    found = run("eval", *COMMON, "-n", "3", "--planner", "sbs:3,1", "--critic", "mine")
    assert "sbs:3,1" in found and "Failed searches" not in found
