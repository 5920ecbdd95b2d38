"""Concurrent calls of a program are ordered by their content, however long the work before each call takes."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from search_worlds import noise

import search
from mas_gym.cli.run_notes import note_order
from mas_gym.policies import SamplingRequest, ScriptedPolicy
from mas_gym.programs import Program
from mas_gym.programs.background import Activity, ProgramThread, thread_usage
from mas_gym.programs.execution import Execution
from mas_gym.programs.idle_detection import IdleMonitor
from mas_gym.programs.program_loop import Loop
from mas_gym.tasks.base import Problem

NAMES = ["Zoe", "Adam", "Mia", "Bob"]
DRAWS = itertools.count()


def delay() -> float:
    """Return another delay at each call, up to 40 ms."""
    return 0.04 * noise("delay", next(DRAWS))


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def messages(name: str, text: str) -> Any:
    return [{"role": "system", "content": f"You are {name}."}, {"role": "user", "content": text}]


def ask(client: OpenAI, name: str, text: str) -> str:
    reply = client.chat.completions.create(model="m", messages=messages(name, text))
    return str(reply.choices[0].message.content)


async def ask_async(client: AsyncOpenAI, name: str, text: str) -> str:
    reply = await client.chat.completions.create(model="m", messages=messages(name, text))
    return str(reply.choices[0].message.content)


async def after_sleep(name: str) -> None:
    await asyncio.sleep(delay())


async def after_sleep_in_thread(name: str) -> None:
    await asyncio.to_thread(time.sleep, delay())


async def after_work_in_thread(name: str) -> None:
    await asyncio.to_thread(spin, delay() / 2)


async def after_turns(name: str) -> None:
    for _ in range(int(4000 * delay())):
        await asyncio.sleep(0)


def gathered(work: Callable[[str], Any]) -> Callable[..., Any]:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        async def branch(name: str) -> str:
            await work(name)
            first = await ask_async(client, name, question)
            await work(name)
            return await ask_async(client, name, first)

        return " ".join(await asyncio.gather(*map(branch, NAMES)))

    return solve


def over_http(work: Callable[[str], Any]) -> Callable[..., Any]:
    async def solve(question: str, base_url: str) -> str:
        async with AsyncOpenAI(base_url=base_url, api_key="any") as client:
            return str(await gathered(work)(question, client))

    return solve


async def in_threads_of_the_loop(question: str, base_url: str) -> str:
    with OpenAI(base_url=base_url, api_key="any") as client:

        def branch(name: str) -> str:
            time.sleep(delay())
            return ask(client, name, question)

        return " ".join(await asyncio.gather(*(asyncio.to_thread(branch, name) for name in NAMES)))


def pooled(question: str, client: OpenAI, places: int = len(NAMES)) -> str:
    def branch(name: str) -> str:
        time.sleep(delay())
        first = ask(client, name, question)
        spin(delay() / 2)
        return ask(client, name, first)

    with ThreadPoolExecutor(places) as pool:
        return " ".join(pool.map(branch, NAMES))


def in_a_full_pool(question: str, client: OpenAI) -> str:
    return pooled(question, client, 2)


async def by_threads_and_by_tasks_over_http(question: str, client: OpenAI, base_url: str, api_key: str) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as over_http:

        async def branch(name: str) -> str:
            first = await ask_async(over_http, name, question)
            return await ask_async(over_http, name, first)

        threads = [asyncio.to_thread(ask, client, name, question) for name in NAMES[2:]]
        return " ".join(await asyncio.gather(*map(branch, NAMES[:2]), *threads))


async def on_a_blocked_loop(question: str, client: OpenAI) -> str:
    def branch(name: str) -> str:
        time.sleep(delay())
        return ask(client, name, question)

    threads = [asyncio.create_task(asyncio.to_thread(branch, name)) for name in NAMES[1:]]
    await asyncio.sleep(0)
    time.sleep(delay())
    return " ".join([ask(client, NAMES[0], question), *await asyncio.gather(*threads)])


async def on_the_loop_of_a_thread(question: str, client: AsyncOpenAI) -> str:
    loop = asyncio.get_running_loop()

    def branch(name: str) -> str:
        time.sleep(delay())
        return asyncio.run_coroutine_threadsafe(ask_async(client, name, question), loop).result()

    threads = [asyncio.to_thread(branch, name) for name in NAMES[1:]]
    return " ".join(await asyncio.gather(ask_async(client, NAMES[0], question), *threads))


CHILD = """
import sys, threading, time, openai

def branch(name, seconds):
    time.sleep(seconds)
    messages = [{"role": "system", "content": f"You are {name}."}, {"role": "user", "content": sys.argv[2]}]
    reply = client.chat.completions.create(model="m", messages=messages)
    found[name] = reply.choices[0].message.content

client, found = openai.OpenAI(base_url=sys.argv[1], api_key="any"), {}
threads = [threading.Thread(target=branch, args=two) for two in (("Zoe", 0), ("Adam", float(sys.argv[3])))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(found["Zoe"], found["Adam"])
"""


def in_a_child_process(question: str, base_url: str) -> str:
    command = [sys.executable, "-c", CHILD, base_url, question, str(delay())]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def woken_by_callbacks(question: str, client: OpenAI) -> str:
    """Wait for callbacks of futures and not for the futures, as LangGraph does."""
    found: dict[str, str] = {}
    done = threading.Semaphore(0)

    def work(name: str) -> None:
        found[name] = ask(client, name, question)

    def wake(_: Any) -> None:
        time.sleep(delay())
        done.release()

    with ThreadPoolExecutor(len(NAMES)) as pool:
        for name in NAMES:
            pool.submit(time.sleep, 0).add_done_callback(wake)
            done.acquire()
            pool.submit(work, name)
    return " ".join(found[name] for name in NAMES)


def pooled_over_http(question: str, base_url: str) -> str:
    with OpenAI(base_url=base_url, api_key="any") as client:
        return pooled(question, client)


def in_own_threads(question: str, client: OpenAI) -> str:
    found: dict[str, str] = {}

    def branch(name: str) -> None:
        time.sleep(delay())
        found[name] = ask(client, name, question)

    threads = [threading.Thread(target=branch, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return " ".join(found[name] for name in NAMES)


PROGRAMS = {
    "sleep": gathered(after_sleep),
    "sleep in a thread": gathered(after_sleep_in_thread),
    "work in a thread": gathered(after_work_in_thread),
    "turns of the loop": gathered(after_turns),
    "over HTTP": over_http(after_sleep_in_thread),
    "threads of the loop": in_threads_of_the_loop,
    "pool": pooled,
    "pool with callbacks": woken_by_callbacks,
    "pool over HTTP": pooled_over_http,
    "own threads": in_own_threads,
    "full pool": in_a_full_pool,
    "threads and tasks over HTTP": by_threads_and_by_tasks_over_http,
    "loop of a thread": on_the_loop_of_a_thread,
}


def said(request: SamplingRequest, seed: int) -> str:
    return f"{request.agent} says {int(1000 * noise(request.messages, seed))}. Final Answer: 1"


def trees(program: Program, planner: str = "bon:2", count: int = 3) -> list[Any]:
    problems = [Problem(f"p{i}", f"Question {i}?", "1", "number") for i in range(count)]
    plans = list(
        search.run(
            planner, problems, program=program, policy=ScriptedPolicy(said), seed=3, critic=search.PolicyLikelihood()
        )
    )
    found = []
    for plan in sorted(plans, key=lambda plan: plan.problem_id):
        assert plan.error is None and plan.tree is not None, plan.error_details
        assert not plan.order_varied
        turns = tuple((turn.speaker, turn.text) for turn in plan.tree.states[-1].turns)
        found.append((plan.answer, turns, tuple(state.transcript for state in plan.tree.states)))
    return found


@pytest.mark.parametrize("kind", PROGRAMS)
def test_concurrent_calls_have_the_same_order_in_each_run(kind: str) -> None:
    found = [trees(Program(PROGRAMS[kind], agents=NAMES)) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    # Calls that are open at once are ordered by agent.
    assert [speaker for speaker, _ in found[0][0][1][:1]] == [NAMES.index("Adam")]


def test_threads_of_a_child_process_are_no_threads_of_the_program() -> None:
    # They cannot be observed, so only a long wait orders their calls.
    [(_, turns, _)] = trees(Program(in_a_child_process, agents=NAMES, settle=2.0), "single", 1)
    assert [NAMES[speaker] for speaker, _ in turns] == ["Adam", "Zoe"]


def test_call_that_blocks_the_event_loop_is_ordered_with_those_of_threads() -> None:
    # One search, because a program that blocks its loop delays all others.
    found = [trees(Program(on_a_blocked_loop, agents=NAMES), "single", 1) for _ in range(3)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (IdleMonitor, "_is_quiet"),
        (ProgramThread, "here"),
        (Activity, "state"),
        (Loop, "pending"),
        (Execution, "settle"),
    ],
)
@pytest.mark.parametrize("kind", ["pool", "full pool", "loop of a thread"])
def test_order_is_independent_of_delays_within_an_observation(
    kind: str, owner: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = getattr(owner, step)

    def slow(*arguments: Any) -> Any:
        time.sleep(delay() / 4)
        found = work(*arguments)
        time.sleep(delay() / 4)
        return found

    plain = trees(Program(PROGRAMS[kind], agents=NAMES), "single", 1)
    monkeypatch.setattr(owner, step, slow)
    assert trees(Program(PROGRAMS[kind], agents=NAMES), "single", 1) == plain


# ---- programs that cannot be observed


COMMAND = """
import json, os, sys, threading, time
from pathlib import Path
from urllib.request import Request, urlopen

def ask(name, text):
    messages = [{"role": "system", "content": f"You are {name}."}, {"role": "user", "content": text}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

question = sys.stdin.read()
found = {}

def late():
    # Later than any decision that does not wait for it: the marker appears once the policy is asked.
    while not Path(sys.argv[1]).exists():
        time.sleep(0.005)
    found["Adam"] = ask("Adam", question)

threads = [threading.Thread(target=late), threading.Thread(target=lambda: found.update(Zoe=ask("Zoe", question)))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(found["Zoe"], found["Adam"])
"""


def test_late_call_warning_suggests_the_settle_option(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script, marker = tmp_path / "late.py", tmp_path / "asked"
    script.write_text(COMMAND)

    class Slow(ScriptedPolicy):
        """A policy that answers once the late call has come."""

        def sample(self, requests: Any) -> Any:
            marker.touch()
            deadline = time.monotonic() + 60
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.01)
            return super().sample(requests)

    program = Program(f"{sys.executable} -S {script} {marker}", agents=["Adam", "Zoe"])
    [plan] = search.run("single", [Problem("p", "Question?", "1", "number")], program=program, policy=Slow(said))
    assert plan.error is None and plan.order_varied
    assert "settle" in caplog.text


def test_command_line_reports_searches_with_varying_call_order(capsys: pytest.CaptureFixture[str]) -> None:
    note_order(0)
    assert not capsys.readouterr().err
    note_order(3)
    assert "varied in 3 searches" in capsys.readouterr().err


# ---- what counts as waiting


def test_woken_thread_is_active_before_its_wait_returns() -> None:
    condition = threading.Condition()

    def wait() -> None:
        with condition:
            condition.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    job = ProgramThread(None, wait)
    job.thread = thread.ident
    while job.active(sys._current_frames()):
        time.sleep(0.001)
    with condition:
        condition.notify()
        # It cannot leave the wait before this block ends.
        for _ in range(20):
            time.sleep(0.002)
            assert job.active(sys._current_frames())
    thread.join()


def test_thread_that_starts_another_is_active_until_the_other_runs() -> None:
    may_start = threading.Event()

    class Slow(threading.Thread):
        """A thread for which the operating system needs long."""

        def _bootstrap(self) -> None:
            may_start.wait()
            super()._bootstrap()  # type: ignore[misc]

    started = Slow(target=int)
    starting = threading.Thread(target=started.start)
    starting.start()
    job = ProgramThread(None, started.start)
    job.thread = starting.ident
    wait = threading.Condition.wait.__code__
    while (frame := sys._current_frames()[starting.ident]).f_code is not wait:  # type: ignore[index]
        time.sleep(0.001)
    try:
        assert job.active({starting.ident: frame})  # type: ignore[dict-item]
    finally:
        may_start.set()
        starting.join()
        started.join()


def test_job_started_after_the_snapshot_is_active() -> None:
    job = ProgramThread(None, print)
    job.here()
    assert job.active({})


def test_threads_that_wait_for_the_gil_do_not_count_as_asleep() -> None:
    ends = threading.Event()

    def compute() -> None:
        while not ends.is_set():
            spin(0.01)

    # Several at once, so that they also wait for the interpreter's lock.
    computing = [threading.Thread(target=compute) for _ in range(4)]
    sleeping = threading.Thread(target=ends.wait)
    threads = [sleeping, *computing]
    for thread in threads:
        thread.start()
    natives = [thread.native_id or 0 for thread in threads]
    time.sleep(0.2)
    before = [thread_usage(native) for native in natives]
    time.sleep(0.5)
    asleep = [thread_usage(native).asleep_since(was) for native, was in zip(natives, before, strict=True)]
    ends.set()
    for thread in threads:
        thread.join()
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("the system does not report the times of threads")
    assert asleep == [True, False, False, False, False]


def test_job_has_the_name_of_its_function() -> None:
    run = contextvars.copy_context().run
    assert (
        ProgramThread(None, functools.partial(run, spin), (1.0,)).name
        == ProgramThread(None, run, (spin, 1.0)).name
        == f"{__name__}.spin"
    )


def after_long_work(question: str, client: OpenAI) -> str:
    """Ask in threads, each of which computes for longer than a decision waits for one that sleeps."""

    def branch(name: str) -> str:
        spin(0.6 if name == "Adam" else 0.0)
        return ask(client, name, question)

    with ThreadPoolExecutor(len(NAMES)) as pool:
        return " ".join(pool.map(branch, NAMES))


def beside_a_sleeping_thread(question: str, client: OpenAI) -> str:
    """Call the model next to a thread that never makes a call."""
    ended = threading.Event()

    def sleep() -> None:
        while not ended.is_set():
            time.sleep(0.02)

    thread = threading.Thread(target=sleep)
    thread.start()
    with ThreadPoolExecutor(len(NAMES)) as pool:
        found = " ".join(pool.map(lambda name: ask(client, name, question), NAMES))
    ended.set()
    thread.join()
    return found


@pytest.mark.parametrize("solve", [after_long_work, beside_a_sleeping_thread])
def test_idle_detection_waits_for_running_threads_but_not_for_sleeping_ones(
    solve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("background", "idle_detection"):
        monkeypatch.setattr(f"mas_gym.programs.{module}.BUSY_SECONDS", 0.25)
    found = [trees(Program(solve, agents=NAMES), "single") for _ in range(2)]
    assert found[0] == found[1]
    assert [speaker for speaker, _ in found[0][0][1][:1]] == [NAMES.index("Adam")]
