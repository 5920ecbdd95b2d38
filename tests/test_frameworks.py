"""The same four agents in LangGraph, the OpenAI Agents SDK and AG2 give the transcripts of the YAML."""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import json
import operator
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from search_worlds import HashCritic, noise

import mas_gym
import search
from mas_gym.policies import SamplingRequest, ScriptedPolicy, load_policy
from mas_gym.policies.token_traces import traced, traces_folder
from mas_gym.programs import Program
from mas_gym.systems.tool_calls import ToolCall, with_calls

pytestmark = [
    pytest.mark.frameworks,
    # Frameworks warn as they please.
    pytest.mark.filterwarnings("default"),
]
EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "programs"
RAG = f"{Path(__file__).parent}/agentic_rag.py:solve"
AGENTS = ["Reader", "Planner", "Solver", "Verifier"]
FRAMEWORKS = {"langgraph": "langgraph_agents", "agents": "openai_agents_sdk", "ag2": "ag2_agents"}
# Ten times as many take minutes.
TIMES = int(os.environ.get("MAS_GYM_TEST_TIMES", "1"))
COUNTS = {"single": 20, "sc:5": 2, "sbs:5,1": 2, "mcts:10,3": 1}


def said(request: SamplingRequest, seed: int) -> str:
    draw = noise(request.messages, seed)
    return f"{request.agent} says {int(draw * 1000)}. Final Answer: {int(draw * 4)}"


def shapes(planner: str, count: int, policy: Any, **system: Any) -> dict[str, tuple[Any, ...]]:
    task = mas_gym.load_task("arithmetic", split="test", limit=count)
    found = {}
    for plan in search.run(planner, task, policy=policy, critic=HashCritic(), seed=7, **system):
        assert plan.error is None and plan.tree is not None, plan.error_details
        assert not plan.order_varied
        transcripts = tuple(state.transcript for state in plan.tree.states)
        found[plan.problem_id] = plan.answer, plan.correct, plan.usage.agent_calls, transcripts, tuple(plan.tree.visits)
    return found


@functools.cache
def native(planner: str, count: int, policy: Any) -> dict[str, tuple[Any, ...]]:
    return shapes(planner, count, policy, mas="rpsv")


@pytest.fixture(params=FRAMEWORKS)
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    if request.param == "ag2":
        # AG2 never closes the clients of its agents. The filter of a mark would come before that of the file.
        warnings.filterwarnings("ignore", "unclosed (transport|<socket)", ResourceWarning)
    yield Program(f"{EXAMPLES}/{FRAMEWORKS[request.param]}.py:solve", agents=AGENTS)
    # While the warnings are filtered.
    gc.collect()


SCRIPTED = ScriptedPolicy(said)


def test_langgraph_agents_are_named_by_their_nodes() -> None:
    pytest.importorskip("langgraph", reason="langgraph is not installed")
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from pydantic import BaseModel

    class Outline(BaseModel):
        sections: list[str]

    def build(base_url: str) -> Any:
        model = ChatOpenAI(model="m", base_url=base_url, api_key="any")  # type: ignore[arg-type]

        async def outline(state: Any) -> Any:
            found = await model.with_structured_output(Outline).ainvoke(state["messages"])
            return {"messages": [("assistant", str(found))]}

        def write(state: Any) -> Any:
            return {"messages": [model.invoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        steps = {"outline": outline, "write": write, "review": create_agent(model, tools=[])}
        for (name, step), before in zip(steps.items(), [START, *steps], strict=False):
            graph.add_node(name, step)
            graph.add_edge(before, name)
        graph.add_edge("review", END)
        return graph.compile()

    async def solve(question: str, base_url: str) -> str:
        return str((await build(base_url).ainvoke({"messages": [("user", question)]}))["messages"][-1].content)

    assert [agent.name for agent in Program(solve).mas.agents] == ["outline", "write", "review", "other agents"]


def retrieving(request: SamplingRequest, seed: int) -> str:
    """Search twice, because the first document is not relevant."""
    asked = request.messages[-1].content
    if "tools" in request.extra_body:
        return with_calls(
            "", [ToolCall("find", json.dumps({"query": "cats" if len(request.messages) == 1 else "dogs"}))]
        )
    return "no" if "cats" in asked else f"yes {seed}"


class Retrieving(ScriptedPolicy):
    """A policy that calls tools."""

    takes_extra_body = True


@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_langgraph_nodes_that_run_after_a_tool_call_are_agents(isolate: bool, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("langgraph", reason="langgraph is not installed")
    program = Program(RAG, isolate=isolate)
    names = [agent.name for agent in program.mas.agents]
    assert names == ["respond", "retrieve", "grade", "rewrite", "answer", "draft", "check", "other agents"]
    task = mas_gym.load_task("arithmetic", split="test", limit=1)
    [plan] = search.run("single", task, program=program, policy=Retrieving(retrieving))
    assert plan.best is not None, plan.error_details
    spoke = [names[turn.speaker] for turn in plan.best.state.turns]
    assert spoke == ["respond", "grade", "rewrite", "respond", "grade", "draft", "check"]
    assert not [record for record in caplog.records if record.name.startswith("mas_gym") and record.levelno > 20]


@pytest.mark.parametrize("planner", COUNTS)
def test_framework_transcripts_equal_those_of_the_mas(planner: str, program: Program) -> None:
    count = COUNTS[planner] * TIMES
    assert shapes(planner, count, SCRIPTED, program=program) == native(planner, count, SCRIPTED)


@functools.cache
def tiny() -> Any:
    return load_policy("tiny")


def test_framework_transcripts_with_tiny_agents_equal_those_of_the_mas(program: Program) -> None:
    pytest.importorskip("torch", reason="the tiny agents need the extra 'local'")
    assert shapes("sc:3", 2, tiny(), program=program) == native("sc:3", 2, tiny())


# ---- concurrent nodes


class Notes(TypedDict, total=False):
    """The state of a graph whose workers write at the same time."""

    question: str
    notes: Annotated[list[str], operator.add]
    answer: str


DRAWS = itertools.count()


def fan_out(base_url: str, work: Callable[[], None]) -> Any:
    """Return a graph with four workers started by `Send`; each works locally before its call."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph
    from langgraph.types import Send

    model = ChatOpenAI(model="agent", base_url=base_url, api_key="any")

    def ask(name: str, text: str) -> str:
        return str(model.invoke([("system", f"You are {name}."), ("user", text)]).content)

    def research(state: dict[str, str]) -> Notes:
        work()
        return {"notes": [ask(state["name"], state["question"])]}

    def write(state: Notes) -> Notes:
        return {"answer": ask("Writer", f"{state['question']} {state['notes']}")}

    def assign(state: Notes) -> list[Any]:
        return [
            Send("research", {"name": name, "question": state["question"]}) for name in ("Zoe", "Adam", "Mia", "Bob")
        ]

    graph = StateGraph(Notes)
    graph.add_node("research", research)
    graph.add_node("write", write)
    graph.add_conditional_edges(START, assign, ["research"])
    graph.add_edge("research", "write")
    graph.add_edge("write", END)
    return graph.compile()


def uneven() -> None:
    time.sleep(0.08 * noise("delay", next(DRAWS)))


def in_threads(question: str, base_url: str) -> str:
    return str(fan_out(base_url, uneven).invoke({"question": question})["answer"])


async def on_the_loop(question: str, base_url: str) -> str:
    return str((await fan_out(base_url, uneven).ainvoke({"question": question}))["answer"])


@pytest.mark.parametrize("solve", [in_threads, on_the_loop])
def test_nodes_started_by_send_have_the_same_order_in_each_run(solve: Callable[[str, str], Any]) -> None:
    pytest.importorskip("langgraph", reason="langgraph is not installed")
    agents = ["Adam", "Bob", "Mia", "Writer", "Zoe"]
    found = [shapes("sc:3", 2, SCRIPTED, program=Program(solve, agents=agents)) for _ in range(3)]
    assert found[0] == found[1] == found[2]


def voting(question: str, base_url: str) -> str:
    """Ask three nodes the same question at the same time, without a system prompt, and one node about their answers."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph

    model = ChatOpenAI(model="agent", base_url=base_url, api_key="any")

    def voter(name: str) -> Callable[[Notes], Notes]:
        def vote(state: Notes) -> Notes:
            uneven()
            return {"notes": [f"{name}: {model.invoke(state['question']).content}"]}

        return vote

    def count(state: Notes) -> Notes:
        return {"answer": str(model.invoke(f"{state['question']} {sorted(state['notes'])}").content)}

    graph = StateGraph(Notes)
    graph.add_node("count", count)
    for name in ("ann", "ben", "cem"):
        graph.add_node(name, voter(name))
        graph.add_edge(START, name)
        graph.add_edge(name, "count")
    graph.add_edge("count", END)
    return str(graph.compile().invoke({"question": question})["answer"])


def test_nodes_that_send_equal_requests_have_the_same_order_in_each_run() -> None:
    pytest.importorskip("langgraph", reason="langgraph is not installed")
    agents = ["ann", "ben", "cem", "count"]
    found = [shapes("sc:4", 2, SCRIPTED, program=Program(voting, agents=agents)) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    speakers = {message.speaker for _, _, _, transcripts, _ in found[0].values() for t in transcripts for message in t}
    assert len(speakers) == len(agents)


async def equal_tasks(question: str, base_url: str) -> str:
    """Ask one node the same question three times at the same time; the answer is the third reply."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph
    from langgraph.types import Send

    model = ChatOpenAI(model="agent", base_url=base_url, api_key="any")

    def work(state: Notes) -> Notes:
        uneven()
        return {"notes": [str(model.invoke(state["question"]).content)]}

    graph = StateGraph(Notes)
    graph.add_node("work", work)
    graph.add_conditional_edges(START, lambda state: [Send("work", state) for _ in range(3)], ["work"])
    graph.add_edge("work", END)
    return str((await graph.compile().ainvoke({"question": question}))["notes"][-1])


def test_tasks_that_send_equal_requests_get_the_same_replies_in_each_run() -> None:
    pytest.importorskip("langgraph", reason="langgraph is not installed")
    found = [shapes("sc:6", 2, SCRIPTED, program=Program(equal_tasks, agents=["work"])) for _ in range(4)]
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.slow
def test_searches_of_a_langgraph_program_train_its_agents(tmp_path: Path) -> None:
    pytest.importorskip("langgraph", reason="langgraph is not installed")
    pytest.importorskip("trl", reason="TRL is not installed")
    from rewardmodels.agents import credited_samples, train_agents

    program = Program(f"{EXAMPLES}/langgraph_agents.py:solve", agents=AGENTS)
    store, task = tmp_path / "runs.db", mas_gym.load_task("arithmetic", split="train", limit=2)
    policy: Any = traced(load_policy("tiny"), traces_folder(store))
    plans = list(search.run("siblings:2", task, program=program, policy=policy, training=True, store=store))
    assert not any(plan.error for plan in plans)
    samples = credited_samples(store, traces_folder(store), "leave-one-out")
    assert {sample.agent for sample in samples} <= set(AGENTS)
    quick: Any = {"batch_size": 8, "max_rows": 8, "epochs": 1.0}
    found = train_agents(samples, tmp_path / "agents", "grpo", device="cpu", **quick)
    [plan] = search.run("single", task[:1], program=program, policy=load_policy(found.policy))
    assert plan.error is None and plan.usage.agent_calls == 4
