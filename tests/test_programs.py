"""Search over agent programs: branching by replay, equality with a MAS, identity, resumption, order, divergence."""

import asyncio
import contextvars
import copy
import fcntl
import gc
import itertools
import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import gymnasium as gym
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from search_worlds import noise, unparked

import mas_gym
import rewardmodels
import search
from mas_gym.envs.wrappers import CandidateChoice
from mas_gym.errors import ConfigError, IdentityError, SearchError
from mas_gym.policies import SamplingReply, SamplingRequest, load_policy
from mas_gym.policies.base import Sample
from mas_gym.programs import DivergenceError, Program, ProgramError, ProgramSession
from mas_gym.programs.background import ProgramStopped
from mas_gym.programs.execution import Execution
from mas_gym.programs.idle_detection import IdleMonitor
from mas_gym.programs.program_loop import Loop
from mas_gym.tasks.base import Grade, Problem
from search import Plan
from search.store import regrade

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "programs"
AGENTS = ["Reader", "Planner", "Solver", "Verifier"]


class Echo:
    """Answers by a hash of prompt and seed, and counts its calls."""

    name, max_batch = "echo", 64

    def __init__(self, text: Callable[[SamplingRequest, float], str] | None = None) -> None:
        self.calls, self.requests = 0, list[SamplingRequest]()
        self.text = text or (
            lambda request, draw: f"{request.agent} says {int(draw * 1000)}. Final Answer: {int(draw * 3)}"
        )

    def identity(self) -> str:
        return "echo"

    def sample(self, requests: Any) -> list[SamplingReply]:
        replies = []
        for request in requests:
            self.requests.append(request)
            self.calls += len(request.seeds)
            texts = [self.text(request, noise(request.messages, seed)) for seed in request.seeds]
            replies.append(SamplingReply(tuple(Sample(text, 5, -1.0, "stop") for text in texts)))
        return replies


def problems(count: int = 3) -> list[Problem]:
    return [Problem(f"p{i}", f"Question {i}?", "1", "number") for i in range(count)]


def searched(
    program: Any, planner: str = "bon:3", tasks: Any = None, policy: Any = None, **options: Any
) -> dict[str, Plan]:
    options |= {"program": program, "policy": policy or Echo(), "critic": search.PolicyLikelihood()}
    return {plan.problem_id: plan for plan in search.run(planner, tasks or problems(), **options)}


def shape(plan: Plan) -> tuple[Any, ...]:
    assert plan.error is None and plan.tree is not None, plan.error_details
    return plan.answer, plan.usage.agent_calls, tuple(s.transcript for s in plan.tree.states), tuple(plan.tree.visits)


def shapes(plans: dict[str, Plan]) -> dict[str, Any]:
    return {key: shape(plan) for key, plan in plans.items()}


async def ask(client: Any, system: str, text: str, **more: Any) -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    reply = await client.chat.completions.create(model="m", messages=messages, **more)
    return str(reply.choices[0].message.content)


async def chained(question: str, client: AsyncOpenAI) -> str:
    facts = await ask(client, "You are the Reader. Read.", question)
    return await ask(client, "You are the Solver. Solve.", f"{question}\n\n{facts}")


def say(client: OpenAI, system: str, text: str) -> str:
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return str(client.chat.completions.create(model="m", messages=messages).choices[0].message.content)


def threaded(question: str, client: OpenAI) -> str:
    facts = say(client, "You are the Reader. Read.", question)
    return say(client, "You are the Solver. Solve.", f"{question}\n\n{facts}")


async def by_url(question: str, base_url: str) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key="any") as client:
        return await chained(question, client)


@pytest.mark.slow
@pytest.mark.parametrize(("planner", "count"), [("single", 12), ("sc:5", 12), ("sbs:5,1", 6), ("mcts:10,3", 3)])
def test_example_program_gives_the_same_transcripts_as_the_mas(planner: str, count: int) -> None:
    task = mas_gym.load_task("arithmetic", split="test", limit=count)
    policy, critic = load_policy("tiny"), search.PolicyLikelihood()
    common: dict[str, Any] = {"policy": policy, "critic": critic, "seed": 7}
    program = Program(f"{EXAMPLES}/plain_openai.py:solve", agents=AGENTS)
    native, found = (
        search.run(planner, task, **system, **common) for system in ({"mas": "rpsv"}, {"program": program})
    )
    assert {plan.problem_id: shape(plan) for plan in found} == {plan.problem_id: shape(plan) for plan in native}


def test_program_with_a_mas_uses_the_agents_and_edges_of_the_mas() -> None:
    spec = f"{EXAMPLES}/plain_openai.py:solve"
    native = {plan.problem_id: shape(plan) for plan in search.run("sc:3", problems(), mas="rpsv", policy=Echo())}
    found = {p.problem_id: shape(p) for p in search.run("sc:3", problems(), mas="rpsv", program=spec, policy=Echo())}
    assert found == native


def test_async_threaded_and_url_programs_give_the_same_plans() -> None:
    policies = [Echo() for _ in range(3)]
    programs = zip((chained, threaded, by_url), policies, strict=True)
    found = [searched(program, "mcts:8,3", policy=policy) for program, policy in programs]
    assert shapes(found[0]) == shapes(found[1]) == shapes(found[2])
    # A replay makes no model call: the policy received exactly the requests that the plans count.
    assert [p.calls for p in policies] == [sum(plan.usage.agent_calls for plan in plans.values()) for plans in found]


def test_agents_are_found_by_a_dry_run_without_model_calls() -> None:
    program = Program(chained)
    assert [agent.name for agent in program.mas.agents] == ["Reader", "Solver", "other agents"]
    plan = searched(program, "single")["p0"]
    assert plan.best is not None
    assert [program.mas.node_name(turn.speaker) for turn in plan.best.state.turns] == ["Reader", "Solver"]


def test_agents_may_be_named_by_header_by_metadata_or_by_a_mapping() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        first = await ask(client, "Read.", question, extra_headers={"X-MAS-Agent": "A"})
        second = await ask(client, "Read.", first, metadata={"agent": "B"})
        own = client.with_options(default_headers={"X-MAS-Agent": "A"})
        return await ask(client, "Now, third one, answer.", await ask(own, "Read.", second))

    program = Program(solve, agents={"A": "header", "B": "metadata", "C": "third one"})
    plan = searched(program, "single")["p0"]
    assert plan.best is not None and [turn.speaker for turn in plan.best.state.turns] == [0, 1, 0, 2]
    with pytest.raises(ConfigError, match="got both"):
        Program(solve, agents=["A"], mas="rpsv")
    stranger = searched(Program(solve, agents=["A", "B"]), "single")["p0"]
    assert stranger.error is not None and "one of the agents A, B" in stranger.error


def test_returned_answer_is_graded_instead_of_the_last_message() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> int:
        await ask(client, "You are the Solver.", question)
        return 1

    policy = Echo(lambda request, draw: f"I say {draw}. Final Answer: 7")
    plan = searched(solve, "sc:3", policy=policy)["p0"]
    assert plan.answer == "1" and plan.correct and plan.text is not None
    assert plan.text.startswith("I say") and plan.text.endswith("[program returned] 1")


def test_regrading_uses_the_returned_answer(tmp_path: Path) -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        await ask(client, "You are the Solver.", question)
        if question == "Question 0?":
            raise ValueError("Final Answer: 1")
        return "one"

    store = tmp_path / "runs.db"
    searched(Program(solve, agents=["Solver"]), "single", store=store, tasks=problems(2))
    grader = SimpleNamespace(identity=lambda: "one", grade=lambda problem, text: Grade(text == "one", text))
    with search.open_store(store) as opened:
        [run] = opened.runs()
    done = regrade(store, run, grader, "one")
    assert (done.before, done.after) == (0, 1)


def test_store_resumes_and_distinguishes_programs(tmp_path: Path) -> None:
    store, policy = tmp_path / "runs.db", Echo()
    program = Program(chained, agents=["Reader", "Solver"])
    first = searched(program, "mcts:6,3", store=store, policy=policy)
    spent = policy.calls
    again = searched(program, "mcts:6,3", tasks=problems(4), store=store, policy=policy)
    assert shapes(first).items() <= shapes(again).items()
    assert policy.calls == spent + again["p3"].usage.agent_calls
    searched(Program(threaded, agents=["Reader", "Solver"]), "mcts:6,3", store=store, policy=policy)
    with search.open_store(store) as opened:
        assert len(opened.runs()) == 2
        plans = {plan.problem_id: plan for plan in opened.plans(opened.runs()[0].run)}
    assert shapes(plans) == shapes(again)


def test_store_rejects_commands_without_the_files_argument(tmp_path: Path) -> None:
    program = Program("python my_agents.py", agents=["A"])
    with pytest.raises(IdentityError, match="files="):
        searched(program, "single", store=tmp_path / "runs.db")


@pytest.mark.slow
def test_replayed_command_keeps_its_set_iteration_order(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(
        "import openai, sys\n"
        "names = ' '.join({'Ada', 'Bo', 'Cy', 'Di', 'Ed', 'Fay'})\n"
        "for text in (sys.stdin.read(), 'again'):\n"
        "    asked = [{'role': 'user', 'content': f'{text} {names}'}]\n"
        "    reply = openai.OpenAI().chat.completions.create(model='m', messages=asked)\n"
        "print(reply.choices[0].message.content)\n"
    )
    program = unparked(Program(f"{sys.executable} {tmp_path / 'command.py'}", agents=["Solver"]))
    plan = searched(program, "bon:3", tasks=problems(1))["p0"]
    assert plan.error is None, plan.error


def test_program_survives_pickling() -> None:
    program = pickle.loads(pickle.dumps(Program(chained, agents=["Reader", "Solver"], max_calls=7)))
    assert program.max_calls == 7 and [agent.name for agent in program.mas.agents] == ["Reader", "Solver"]


# ---- calls at the same time


async def gathered(question: str, client: AsyncOpenAI) -> str:
    async def branch(name: str) -> str:
        first = await ask(client, f"You are {name}.", question)
        return await ask(client, f"You are {name}.", f"again {first}")

    return " ".join(await asyncio.gather(branch("Zoe"), branch("Adam"), branch("Mia")))


DRAWS = itertools.count()


def pooled(question: str, client: OpenAI) -> str:
    def late(name: str, text: str) -> str:
        time.sleep(noise("late", next(DRAWS)) * 0.004)
        return say(client, f"You are {name}.", text)

    with ThreadPoolExecutor(3) as pool:
        return " ".join(pool.map(lambda name: late(name, f"again {late(name, question)}"), ["Zoe", "Adam", "Mia"]))


def test_concurrent_calls_have_a_canonical_order(caplog: pytest.LogCaptureFixture) -> None:
    plans = searched(gathered, "mcts:8,2")
    once = searched(Program(pooled, settle=0.05), "mcts:8,2", tasks=problems(1))
    assert not once["p0"].order_varied, caplog.text
    assert shape(once["p0"]) == shape(plans["p0"])
    program = Program(gathered)
    best = plans["p0"].best
    assert best is not None
    said = [program.mas.node_name(turn.speaker) for turn in best.state.turns]
    # Zoe, Adam and Mia ask first, and only then again, one after the other.
    assert sorted(said[:3]) == ["Adam", "Mia", "Zoe"] and len(said) == 6
    # However few executions are kept, each state is reached again by replay.
    assert shapes(searched(unparked(Program(gathered)), "mcts:8,2")) == shapes(plans)


def test_call_that_arrives_during_an_observation_waits_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = IdleMonitor._is_quiet

    def slow(monitor: IdleMonitor, execution: Execution, *rest: Any) -> bool:
        quiet = observe(monitor, execution, *rest)
        began = time.monotonic()
        while not execution.waits and not execution.over and time.monotonic() - began < 0.1:
            time.sleep(0.0005)
        return quiet

    plans = searched(pooled, "mcts:8,2", tasks=problems(1))
    monkeypatch.setattr(IdleMonitor, "_is_quiet", slow)
    assert shapes(searched(pooled, "mcts:8,2", tasks=problems(1))) == shapes(plans)


def test_dropping_the_oldest_waiting_execution_does_not_affect_the_others() -> None:
    many, few = (Program(chained, agents=["Reader", "Solver"]) for _ in range(2))
    few.source.parked = 3
    plans = searched(few, "bon:6", tasks=problems(20))
    assert shapes(plans) == shapes(searched(many, "bon:6", tasks=problems(20)))


def test_closed_runner_starts_nothing() -> None:
    before = set(threading.enumerate())
    runner = Program(chained, agents=["Reader", "Solver"]).open()
    runner.close()
    with pytest.raises(SearchError):
        ProgramSession(runner, "q").extend(None).result(60)
    assert not set(threading.enumerate()) - before


def test_calls_after_the_end_of_a_program_end_its_threads() -> None:
    begun, errors = threading.Event(), list[type[BaseException]]()

    def solve(question: str, client: OpenAI) -> str:
        def retry() -> str:
            begun.wait(60)
            while True:
                try:
                    return say(client, "You are A.", question)
                except Exception as error:
                    errors.append(type(error))

        with ThreadPoolExecutor(1, "retries") as pool:
            late = pool.submit(retry)
            say(client, "You are A.", "first")
            return late.result()

    runner = Program(solve, agents=["A"], timeout=0.5).open()
    with closing(runner):
        ProgramSession(runner, "q").extend(None).result(60)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("retries")]
    begun.set()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)


def test_calls_in_executor_threads_do_not_block_each_other() -> None:
    async def solve(question: str, client: OpenAI) -> str:
        first = await asyncio.to_thread(say, client, "You are the Reader.", question)
        return await asyncio.to_thread(say, client, "You are the Solver.", first)

    # More executions wait for replies than a loop has threads by default.
    program = Program(solve, agents=["Reader", "Solver"], timeout=60.0)
    many = [Problem(f"p{i}", f"Question {i}?", "1", "number") for i in range(40)]
    plans = searched(program, "single", tasks=many, policy=Patient())
    assert not any(plan.error for plan in plans.values()) and len(plans) == 40
    assert not any("[program failed]" in plan.best.text for plan in plans.values() if plan.best)


class Patient:
    """A policy that answers no call before forty programs wait for one."""

    name, max_concurrency = "patient", 64

    def __init__(self) -> None:
        self.all_wait = asyncio.Event()
        self.calls = 0

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        self.calls += 1
        if self.calls >= 40:
            self.all_wait.set()
        await asyncio.wait_for(self.all_wait.wait(), 30)
        return SamplingReply(tuple(Sample(f"It is {seed % 5}", 5, -1.0, "stop") for seed in request.seeds))


def test_stopped_task_logs_no_unretrieved_error(caplog: pytest.LogCaptureFixture) -> None:
    async def stopped() -> None:
        raise ProgramStopped

    loop = Loop("test")
    loop.task(stopped)
    time.sleep(0.1)
    loop.close()
    gc.collect()
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_connection_survives_a_reused_file_descriptor() -> None:
    # An openai client that is never closed: the collector closes its socket, and the client closes the rest later.
    left: list[asyncio.Transport] = []

    class Client:
        def __init__(self, transport: asyncio.Transport) -> None:
            self.transport, self.itself = transport, self

        def __del__(self) -> None:
            left.append(self.transport)

    async def lost(end: socket.socket) -> None:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=end)
        await asyncio.sleep(0)
        transport.pause_reading()
        Client(transport)

    async def talked() -> bytes:
        (first, second), (third, fourth) = socket.socketpair(), socket.socketpair()
        with second, third, fourth:
            number = first.fileno()
            await lost(first)
            del first
            gc.collect()
            again = socket.socket(fileno=fcntl.fcntl(third.fileno(), fcntl.F_DUPFD, number))
            assert again.fileno() == number
            reader, writer = await asyncio.open_connection(sock=again)
            left.pop().close()
            fourth.send(b"!")
            with closing(writer):
                return await asyncio.wait_for(reader.read(1), 60)

    loop = Loop("test")
    with closing(loop):
        assert asyncio.run_coroutine_threadsafe(talked(), loop.loop).result(60) == b"!"


SEEN = contextvars.ContextVar("seen", default="")


SEARCH = """
import asyncio, os
import search
from mas_gym.policies import ScriptedPolicy
from mas_gym.programs import Program
from mas_gym.tasks import Problem, ProblemTask

{}

policy = ScriptedPolicy(lambda request, seed: "Final Answer: 1")
[plan] = search.run("single", ProblemTask.of([Problem("p", "q?", "1")]), program=program, policy=policy)
print(plan.error, plan.correct, flush=True)
os._exit(0)
"""

STOPPED = """
async def solve(question, client):
    messages = [{"role": "user", "content": question}]
    reply = await client.chat.completions.create(model="m", messages=messages)
    print("asked", flush=True)
    for _ in range(8):
        await asyncio.sleep(0.1)
    return reply.choices[0].message.content

program = Program(solve, agents=["A"], timeout=%g)
"""


def test_suspended_process_does_not_time_out_programs() -> None:
    # On a busy machine, the program may need more than the first limit.
    for limit in (1.5, 12.0):
        command = [sys.executable, "-c", SEARCH.format(STOPPED % limit)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            time.sleep(limit + 1.1)
            process.send_signal(signal.SIGCONT)
            if (output := process.stdout.read()) == "None True\n":
                break
    assert output == "None True\n" and process.returncode == 0


GREEDY = """
async def solve(question, client):
    while True:
        # No other thread runs until a sum is there.
        sum(range(250_000_000))

program = Program(solve, agents=["A"], timeout=1.0)
"""


@pytest.mark.slow
def test_program_that_holds_the_gil_is_terminated() -> None:
    done = subprocess.run([sys.executable, "-c", SEARCH.format(GREEDY)], capture_output=True, text=True, timeout=120)
    assert "blocked its event loop" in done.stdout, done.stdout + done.stderr


def test_program_executions_have_separate_context_variables() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        found = SEEN.get()
        SEEN.set(question)
        await ask(client, "You are the Solver.", question)
        return await ask(client, "You are the Solver.", f"again, after {found!r}")

    # One at a time, so that each is started when the one before it waits for a reply.
    program = unparked(Program(solve, agents=["Solver"]))
    program.source.running = 1
    plans = searched(program, "bon:3")
    assert all(plan.error is None for plan in plans.values())
    assert shapes(searched(Program(solve, agents=["Solver"]), "bon:3")) == shapes(plans)


def test_each_choice_is_a_separate_decision() -> None:
    async def vote(question: str, client: AsyncOpenAI) -> str:
        messages: Any = [{"role": "system", "content": "You are a Voter."}, {"role": "user", "content": question}]
        reply = await client.chat.completions.create(model="m", messages=messages, n=3)
        return "".join(str(choice.message.content)[-1] for choice in reply.choices)

    plan = searched(vote, "single")["p0"]
    assert plan.best is not None and plan.usage.agent_calls == 3
    assert plan.answer == "".join(turn.text.partition("\n\n[program")[0][-1] for turn in plan.best.state.turns)


def test_streamed_reply_has_the_same_text() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        messages: Any = [{"role": "system", "content": "You are the Solver."}, {"role": "user", "content": question}]
        options = {"include_usage": True}
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True, stream_options=options)  # type: ignore[call-overload]
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    plan = searched(solve, "sc:3")["p1"]
    assert plan.best is not None and "[program" not in plan.best.text and plan.best.text.startswith("Solver says")


def test_call_settings_are_passed_to_the_policy() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        return await ask(client, "You are the Solver.", question, temperature=0.2, top_p=0.5, max_tokens=9)

    policy = Echo()
    searched(solve, "single", tasks=problems(1), policy=policy)
    [request] = policy.requests
    assert (request.temperature, request.top_p, request.max_new_tokens, request.agent) == (0.2, 0.5, 9, "Solver")


@pytest.mark.parametrize(
    "asked", [{"tools": [{"type": "function"}]}, {"response_format": {"type": "json_object"}}, {"stop": ["."]}], ids=str
)
def test_unsupported_call_settings_are_rejected(asked: dict[str, Any]) -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        await ask(client, "You are the Reader.", question)
        with pytest.raises(openai.BadRequestError, match=next(iter(asked))):
            await ask(client, "You are the Solver.", question, **asked)
        return "1"

    assert searched(solve, "single")["p0"].correct


# ---- replays that differ


def test_changed_request_on_replay_fails_with_the_difference() -> None:
    ticks = itertools.count()

    async def solve(question: str, client: AsyncOpenAI) -> str:
        first = await ask(client, "You are the Reader.", f"{question} at tick {next(ticks)}")
        return await ask(client, "You are the Solver.", first)

    plan = searched(Program(solve, agents=["Reader", "Solver"]), "bon:3", tasks=problems(1))["p0"]
    assert plan.error is not None and plan.error.startswith(DivergenceError.__name__)
    assert "at call 1" in plan.error and "tick 0" in plan.error and "tick 1" in plan.error

    def masked(request: dict[str, Any]) -> Any:
        return [message["content"].partition(" at tick")[0] for message in request["messages"]]

    kept = Program(solve, agents=["Reader", "Solver"], normalize=masked)
    assert searched(kept, "bon:3", tasks=problems(1))["p0"].error is None


def test_early_end_on_replay_is_reported() -> None:
    runs = itertools.count()

    async def solve(question: str, client: AsyncOpenAI) -> str:
        if next(runs):
            return "1"
        return await ask(client, "You are the Solver.", await ask(client, "You are the Reader.", question))

    plan = searched(Program(solve, agents=["Reader", "Solver"]), "bon:3", tasks=problems(1))["p0"]
    assert plan.error is not None and "returned an answer after 0 calls" in plan.error


# ---- the client


async def every_way(question: str, client: AsyncOpenAI) -> str:
    messages: Any = [{"role": "system", "content": "You are the Solver."}, {"role": "user", "content": question}]
    said = [await ask(client, "You are the Solver.", question)]
    async with client.with_options(timeout=60) as other:
        said.append(await ask(other, "You are the Solver.", question))
    raw = await client.chat.completions.with_raw_response.create(model="m", messages=messages)
    said.append(str(raw.parse().choices[0].message.content))
    await client.close()
    completions = client.chat.completions
    said.append(str((await completions.create(model="m", messages=messages)).choices[0].message.content))
    assert [model.id async for model in client.models.list()] == ["mas-gym"] and not hasattr(completions, "nothing")
    return " | ".join(said)


def every_way_in_a_thread(question: str, client: OpenAI) -> str:
    messages: Any = [{"role": "system", "content": "You are the Solver."}, {"role": "user", "content": question}]
    said = [client.chat.completions.create(model="m", messages=messages)]
    with client.with_options(timeout=60) as other:
        said.append(other.chat.completions.create(model="m", messages=messages))
    said.append(client.chat.completions.with_raw_response.create(model="m", messages=messages).parse())
    client.close()
    said.append(client.chat.completions.create(model="m", messages=messages))
    assert [model.id for model in client.models.list()] == ["mas-gym"]
    return " | ".join(str(reply.choices[0].message.content) for reply in said)


def test_program_client_supports_options_raw_responses_and_closing() -> None:
    for program in (every_way, every_way_in_a_thread):
        for plan in searched(Program(program, agents=["Solver"]), "single").values():
            assert plan.best is not None and plan.error is None and plan.text is not None
            said = [turn.text.partition("\n\n[program")[0] for turn in plan.best.state.turns]
            assert len(said) == 4 and plan.text.endswith(" | ".join(said))


# ---- resources left open


def test_open_runner_releases_ended_executions() -> None:
    question = "Who is still here?"

    def left(count: int) -> int:
        deadline = time.monotonic() + 60
        while (found := sum(type(e) is Execution and e.question == question for e in gc.get_objects())) > count:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return found

    with closing(Program(chained, agents=["Reader", "Solver"]).open()) as runner:
        session = ProgramSession(runner, question)
        root = session.extend(None).result()
        middle = [session.extend(root, text).result() for text in ("a", "b")]
        assert left(2) == 2
        assert [session.extend(state, "c").result().acting for state in middle] == [2, 2]
        assert left(0) == 0
        session.extend(root, "d").result()
        assert left(1) == 1
        session.close()
        assert left(0) == 0


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda question: question, "question, base_url"),
        (3, "expected a function"),
        ("", "expected a command"),
        ("http://", "expected an address"),
        ("'unclosed", "quote it"),
    ],
    ids=["no parameter for calls", "number", "empty", "no host", "quotes"],
)
def test_objects_that_are_not_programs_are_rejected(program: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Program(program)


def test_run_requires_a_mas_or_a_program() -> None:
    with pytest.raises(ConfigError, match="got neither"):
        search.run("single", problems(), policy=Echo())


def test_program_without_calls_is_rejected() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        return "1"

    with pytest.raises(ProgramError, match="before its first model call"):
        search.run("single", problems(), program=solve, policy=Echo())


# ---- the environment


def test_program_environment_supports_steps_and_snapshots() -> None:
    env = gym.make(
        "MAS-Program-v0", program=chained, task="arithmetic", program_options={"agents": ["Reader", "Solver"]}
    )
    inner: Any = env.unwrapped
    observation, info = env.reset(seed=3)
    assert observation in env.observation_space and info["agent"] == "Reader"
    assert observation["messages"][0].content == "You are the Reader. Read." and info["action_mask"].sum() == 1
    start = inner.clone_state()
    observation, _, over, _, info = env.step(("facts", inner.ALL))
    middle = inner.clone_state()
    assert not over and info["agent"] == "Solver" and observation["messages"][1].content.endswith("facts")
    answer = inner.task.problem(info["problem_id"]).answer
    _, reward, over, _, info = env.step((f"Final Answer: {answer}", inner.ALL))
    assert (reward, over, info["correct"]) == (1.0, True, True)
    inner.restore_state(start)
    assert env.step(("other facts", inner.ALL))[0]["messages"][1].content.endswith("other facts")
    # Another environment reaches the same state by replay.
    twin = copy.deepcopy(env)
    other: Any = twin.unwrapped
    other.restore_state(middle)
    assert other.observe()[0]["messages"] == observation["messages"]
    _, reward, over, _, info = twin.step(("no idea", 0))
    assert (reward, over) == (-1.0, True) and "ALL" in info["invalid_action"]
    env.close(), twin.close()


def test_environment_reports_a_failing_program() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        raise ValueError(await ask(client, "You are the Solver.", question))

    env = gym.make("MAS-Program-v0", program=solve, disable_env_checker=True)
    env.reset(seed=0)
    _, reward, over, _, info = env.step(("my reply", env.unwrapped.ALL))  # type: ignore[attr-defined]
    assert (reward, over, info["program_error"]) == (-1.0, True, "ValueError: my reply")
    env.close()


def test_candidate_choice_wrapper_runs_a_program() -> None:
    program = Program(chained, agents=["Reader", "Solver"])
    env = CandidateChoice(gym.make("MAS-Program-v0", program=program), Echo(), n=3)
    env.reset(seed=0)
    steps = [env.step(0)[2] for _ in range(2)]
    assert steps == [False, True]
    env.close()


# ---- training


def test_rollouts_of_a_program_are_training_data(tmp_path: Path) -> None:
    task = mas_gym.load_task("arithmetic", split="train", limit=12)
    program = Program(f"{EXAMPLES}/plain_openai.py:solve", agents=AGENTS)
    policy, store = (
        Echo(lambda request, draw: f"{request.agent} {int(draw * 9)}. Final Answer: {int(draw * 2)}"),
        tmp_path / "t.db",
    )
    easy = [Problem(p.id, p.question, "1", "number") for p in task]
    plans = list(search.run("mcts:12,3", easy, program=program, policy=policy, training=True, store=store))
    assert not any(plan.error for plan in plans)
    data = rewardmodels.collect(rewardmodels.stored_trees(store), "pairs")
    assert {example.agent for example in data.examples} <= set(AGENTS) and len(data.examples) > 20
    assert all(example.chosen[0].startswith("Agents: 0 Reader, 1 Planner") for example in data.examples)


# ---- recorded tools


def test_recorded_tool_runs_once_per_branch() -> None:
    runs: list[str] = []

    @mas_gym.recorded
    def draw(word: str) -> str:
        runs.append(word)
        return f"{word}#{len(runs)}"

    @mas_gym.recorded
    async def lookup(word: str) -> str:
        return draw(f"looked {word}")

    async def solve(question: str, client: AsyncOpenAI) -> str:
        first = await ask(client, "You are the Reader.", draw(question))
        second = await ask(client, "You are the Solver.", await lookup(first))
        return await ask(client, "You are the Solver.", draw("same") + draw("same") + second)

    assert draw("outside") == "outside#1"
    runs.clear()
    [plan] = searched(Program(solve, agents=["Reader", "Solver"]), "mcts:12,3", tasks=problems(1)).values()
    assert plan.error is None and plan.tree is not None
    states = [state for state in plan.tree.states if state.acting != 2]
    assert runs.count("Question 0?") == 1
    assert len([run for run in runs if run.startswith("looked")]) == len([s for s in states if s.depth == 1])
    assert runs.count("same") == 2 * len([s for s in states if s.depth == 2])


@pytest.mark.parametrize("uses", [1, 2])
def test_program_records_concurrent_tool_results_separately_through_its_base_url(uses: int) -> None:
    runs: list[int] = []

    def solve(question: str, base_url: str) -> str:
        def send(method: str, url: str, body: Any) -> Any:
            sent = Request(f"{base_url}/{url}", json.dumps(body).encode(), method=method)
            with urlopen(sent) as reply:
                return json.load(reply)

        def say(text: str) -> str:
            reply = send("POST", "chat/completions", {"model": "m", "messages": [{"role": "user", "content": text}]})
            return str(reply["choices"][0]["message"]["content"])

        use = {"tool": "dice", "arguments": [6]}
        found = [send("POST", "recorded", use) for _ in range(uses)]
        for entry in found:
            if not entry["recorded"]:
                runs.append(1)
                send("PUT", "recorded", {**use, "result": len(runs)})
                entry["result"] = len(runs)
        # Uses with equal arguments are interchangeable.
        return say(say(f"{question} {sorted(entry['result'] for entry in found)}"))

    plan = searched(unparked(Program(solve, agents=["Solver"])), "mcts:6,3", tasks=problems(1))["p0"]
    assert plan.error is None and len(runs) == uses, plan.error_details


# ---- examples


def test_examples_are_short() -> None:
    examples = sorted(EXAMPLES.glob("*.py"))
    assert len(examples) >= 4
    assert all(len(path.read_text().splitlines()) < 60 for path in examples)
