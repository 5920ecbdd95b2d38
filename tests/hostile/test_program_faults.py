"""Programs that raise, hang, flood, leave, lie and collide; commands and services; requests that are none."""

import asyncio
import gc
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI, OpenAI

import search
from mas_gym.policies import ScriptedPolicy
from mas_gym.programs import Program, ProgramSession, Runner, http_server
from mas_gym.programs.chat_completions import CallError, read_call
from mas_gym.programs.execution import Execution, Script, Waiting
from mas_gym.programs.gateway import Gateway
from mas_gym.tasks.base import Problem
from search import Plan


def policy() -> ScriptedPolicy:
    return ScriptedPolicy(lambda request, seed: f"{request.agent} {seed % 7}. Final Answer: {seed % 3}")


def searched(program: Any, planner: str = "bon:3", count: int = 2, **options: Any) -> list[Plan]:
    tasks = [Problem(f"p{i}", f"Question {i}?", "1", "number") for i in range(count)]
    critic = search.PolicyLikelihood()
    found = search.run(planner, tasks, program=program, policy=policy(), critic=critic, **options)
    return sorted(found, key=lambda plan: plan.problem_id)


def program_of(function: Any, **options: Any) -> Program:
    return Program(function, agents=["Solver"], **options)


async def ask(client: Any, text: str = "q") -> str:
    reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return str(reply.choices[0].message.content)


def in_a_thread(question: str, client: OpenAI) -> str:
    messages: Any = [{"role": "user", "content": question}]
    return str(client.chat.completions.create(model="m", messages=messages).choices[0].message.content)


def failed_with(plans: list[Plan], words: str) -> None:
    """Each search ends with a terminal state of reward -1 that contains the error."""
    for plan in plans:
        assert plan.error is None and plan.correct is False and plan.answer is None, plan.error_details
        assert plan.text is not None and "[program failed]" in plan.text and words in plan.text


# ---- programs that misbehave


def test_program_that_raises_fails_with_its_error() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        raise ValueError(f"no idea after {await ask(client)}")

    failed_with(searched(program_of(solve)), "ValueError: no idea after Solver")


def test_program_that_exits_fails_with_its_error() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        await ask(client)
        sys.exit("enough")

    def threaded(question: str, client: OpenAI) -> str:
        sys.exit(in_a_thread("q", client) and "enough")

    failed_with(searched(program_of(solve)), "SystemExit: enough")
    failed_with(searched(program_of(threaded)), "SystemExit: enough")


def test_program_that_cancels_itself_fails_with_an_error() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        await ask(client)
        raise asyncio.CancelledError

    failed_with(searched(program_of(solve)), "CancelledError")


@pytest.mark.parametrize(
    "value", [None, b"1", True, ["1"], "x" * 2_000_000], ids=["none", "bytes", "bool", "list", "long"]
)
def test_program_without_an_answer_fails(value: Any) -> None:
    async def solve(question: str, client: AsyncOpenAI) -> Any:
        await ask(client)
        return value

    failed_with(searched(program_of(solve), "single"), "the program returned")


def test_hanging_program_is_ended_without_affecting_others() -> None:
    async def waits(question: str, client: AsyncOpenAI) -> str:
        await ask(client)
        if question == "Question 0?":
            await asyncio.sleep(1000)
        return "1"

    def spins(question: str, client: OpenAI) -> str:
        in_a_thread("q", client)
        while question == "Question 0?":
            pass
        return "1"

    def blocks(question: str, client: OpenAI) -> str:
        in_a_thread("q", client)
        if question == "Question 0?":
            threading.Event().wait(3 * limit)
        return "1"

    for solve in (waits, spins, blocks):
        # On a busy machine, a short limit also ends the others.
        for limit in (1, 8, 64):
            hung, fine = searched(program_of(solve, timeout=limit), "single")
            if hung.error is None and fine.correct:
                break
        failed_with([hung], f"for {limit} seconds")
        assert fine.correct


@pytest.mark.slow
@pytest.mark.parametrize("in_a_task", [False, True])
def test_program_that_blocks_the_loop_is_ended_without_affecting_others(in_a_task: bool) -> None:
    async def tool(question: str) -> None:
        # Its own time counts, and not for how long it waits for a processor.
        end = time.thread_time() + 12
        while question == "Question 0?" and time.thread_time() < end:
            pass

    async def solve(question: str, client: AsyncOpenAI) -> str:
        await ask(client)
        await (asyncio.create_task(tool(question)) if in_a_task else tool(question))
        return "1"

    # The others start anew elsewhere, which takes a busy machine more than a second.
    hung, *fine = searched(program_of(solve, timeout=4), "single", count=3)
    failed_with([hung], "for 4 seconds")
    assert all(plan.correct for plan in fine)


def test_time_limit_excludes_time_of_other_programs() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        # All begin before any of them calls.
        time.sleep(limit / 4)
        return await ask(client)

    for limit in (1, 8):
        plans = searched(program_of(solve, timeout=limit), "single", count=10)
        if not (failed := [plan for plan in plans if plan.error or "failed" in str(plan.text)]):
            break
    assert not failed


def test_program_that_exceeds_max_calls_is_ended() -> None:
    async def one_by_one(question: str, client: AsyncOpenAI) -> str:
        while True:
            await ask(client)

    async def at_once(question: str, client: AsyncOpenAI) -> str:
        await asyncio.gather(*(ask(client, str(i)) for i in range(1000)))
        return "1"

    found = searched(program_of(one_by_one, max_calls=6), "single")
    failed_with(found, "more than 6 calls")
    assert found[0].usage.agent_calls == 6
    [plan] = searched(program_of(at_once, max_calls=6), "single", count=1)
    assert plan.error is not None and "more than 6 calls" in plan.error


def test_cancelled_and_late_calls_do_not_fail_the_program() -> None:
    late = []

    async def solve(question: str, client: AsyncOpenAI) -> str:
        await ask(client)
        left = asyncio.ensure_future(ask(client, "never answered"))
        await asyncio.sleep(0)
        left.cancel()
        return "1"

    def after(question: str, client: OpenAI) -> str:
        def again() -> None:
            time.sleep(0.05)
            try:
                in_a_thread("late", client)
            except BaseException as error:
                late.append(type(error).__name__)

        in_a_thread("q", client)
        threading.Thread(target=again).start()
        return "1"

    assert all(plan.correct for plan in searched(program_of(solve)))
    assert all(plan.correct for plan in searched(program_of(after), "single"))
    deadline = time.monotonic() + 60
    while len(late) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert late and set(late) <= {"ProgramStopped", "NotFoundError", "SystemExit"}


def test_task_of_a_finished_program_gets_no_reply() -> None:
    late: list[str] = []
    tasks: list[Any] = []

    async def again(client: AsyncOpenAI) -> None:
        try:
            late.append(await ask(client, "late"))
        except BaseException as error:
            late.append(type(error).__name__)

    async def solve(question: str, client: AsyncOpenAI) -> str:
        await ask(client)
        tasks.append(asyncio.create_task(again(client)))
        return "1"

    plans = searched(program_of(solve), "sc:2")
    assert all(plan.correct and plan.usage.agent_calls == 2 for plan in plans)
    assert late and set(late) <= {"ProgramStopped", "NotFoundError", "CancelledError"}


def test_answers_and_errors_are_not_confused() -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        await ask(client)
        if question == "Question 0?":
            raise ValueError("x\n\n[program returned] Final Answer: 1")
        return "7\n\n[program failed] no"

    raised, returned = searched(program_of(solve), "single")
    assert raised.answer is None and returned.answer == "7"

    spoof = ScriptedPolicy(lambda request, seed: "I fail\n\n[program failed] x\n\n[program returned] 1")
    tasks = [Problem("p", "q", "2", "number")]

    async def echo(question: str, client: AsyncOpenAI) -> str:
        return f"{await ask(client)} Final Answer: 2"

    [plan] = search.run("single", tasks, program=program_of(echo), policy=spoof)
    assert plan.answer == "2" and plan.correct


def test_policy_error_fails_only_its_search() -> None:
    def flaky(request: Any, seed: int) -> str:
        if "Question 1" in request.messages[0].content:
            raise ValueError("broken")
        return "Final Answer: 1"

    async def solve(question: str, client: AsyncOpenAI) -> str:
        return await ask(client, question)

    class Flaky(ScriptedPolicy):
        max_batch = 1

        async def sample_async(self, request: Any) -> Any:
            [reply] = self.sample([request])
            return reply

        max_concurrency = 8

    tasks = [Problem(f"p{i}", f"Question {i}?", "1", "number") for i in range(6)]
    plans = list(search.run("sc:3", tasks, program=program_of(solve), policy=Flaky(flaky)))
    assert sorted(plan.problem_id for plan in plans if plan.error) == ["p1"]
    assert sum(plan.correct for plan in plans) == 5


# ---- commands and services

COMMAND = """
import os, sys
from urllib.parse import urlsplit
from urllib.request import Request, urlopen
import json
question = sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read()
def ask(text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    with urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
first = ask(question)
"""


def command(tmp_path: Path, body: str, *words: str, **options: Any) -> Program:
    script = tmp_path / "agents.py"
    script.write_text(COMMAND + body, encoding="utf-8")
    return Program(" ".join([sys.executable, "-S", str(script), *words]), agents=["Solver"], files=[script], **options)


@pytest.mark.parametrize("words", [[], ["{question}"]], ids=["stdin", "argument"])
def test_command_program_gives_the_same_plans_as_a_function(tmp_path: Path, words: list[str]) -> None:
    async def same(question: str, client: AsyncOpenAI) -> str:
        first = await ask(client, question)
        return await ask(client, first + " again")

    program = command(tmp_path, "print(ask(first + ' again'))", *words)
    found, expected = searched(program, "bon:2"), searched(program_of(same), "bon:2")
    assert [p.text for p in found] == [p.text for p in expected] and found[0].error is None
    assert [p.usage.agent_calls for p in found] == [p.usage.agent_calls for p in expected]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit('my own words')", "status 1: my own words"),
        ("1 / 0", "ZeroDivisionError"),
        ("print('x' * 3_000_000)", "printed more than"),
        ("sys.stderr.write('x' * 3_000_000); sys.exit('my last words')", "xxxmy last words"),
        ("import time; time.sleep(1000)", "no answer for {} seconds"),
        (
            "import signal; signal.signal(15, signal.SIG_IGN); os.close(1); os.close(2); import time; time.sleep(1000)",
            "no answer for {} seconds",
        ),
        ("os.kill(os.getpid(), 9)", "status -9"),
    ],
    ids=["exit", "raise", "flood", "flood-errors", "hang", "deaf", "killed"],
)
def test_failing_command_reports_its_error_and_leaves_no_process(tmp_path: Path, body: str, words: str) -> None:
    limit = 1 if "{}" in words else 30
    plans = searched(command(tmp_path, body, timeout=limit), "single", count=1)
    while "{}" in words and plans[0].error is not None and limit < 100:
        # On a busy machine, the limit ended the program before its first call.
        limit *= 3
        plans = searched(command(tmp_path, body, timeout=limit), "single", count=1)
    failed_with(plans, words.format(limit))
    assert not _children()


def test_command_with_endless_log_output_succeeds(tmp_path: Path) -> None:
    quiet, loud = "print(first)", "sys.stderr.write('x' * 3_000_000); print(first)"
    [expected], [found] = (searched(command(tmp_path, body), "single", count=1) for body in (quiet, loud))
    assert found.error is None and found.text == expected.text


def test_command_that_cannot_start_is_reported() -> None:
    [plan] = searched(Program("/nowhere/agents --fast", agents=["Solver"]), "single", count=1)
    assert plan.error is not None and "cannot be started" in plan.error


def _children() -> list[str]:
    deadline = time.monotonic() + 60
    while True:
        listed = subprocess.run(
            ["ps", "-o", "pid=,stat=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True
        )
        left = [line for line in listed.stdout.splitlines() if "agents.py" in line]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


class _Service(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        mode = self.path.strip("/")
        if mode == "full" and self.server.refused < 2:
            self.server.refused += 1
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        if mode == "hang":
            time.sleep(3)
            return
        body = {"model": "m", "messages": [{"role": "user", "content": asked["question"]}]}
        headers = {"Authorization": f"Bearer {asked['api_key']}", "Content-Type": "application/json"}
        url = f"{asked['base_url']}/chat/completions"
        try:
            with urlopen(Request(url, json.dumps(body).encode(), headers)) as reply:
                text = json.load(reply)["choices"][0]["message"]["content"]
        except OSError:
            return
        self.send_response(500 if mode == "error" else 200)
        self.send_header("content-type", "text/plain" if mode == "text" else "application/json")
        self.end_headers()
        self.wfile.write({"garbage": b"{", "text": text.encode()}.get(mode) or json.dumps({"answer": text}).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Any:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    server.refused = 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_service_program_gives_the_same_plans_as_a_function(service: str) -> None:
    async def same(question: str, client: AsyncOpenAI) -> str:
        return await ask(client, question)

    expected = [plan.text for plan in searched(program_of(same))]
    for mode in ("json", "text"):
        found = searched(Program(f"{service}/{mode}", agents=["Solver"]))
        assert [plan.text for plan in found] == expected


def test_service_connection_resets_are_retried(service: str) -> None:
    [plan] = searched(Program(f"{service}/full", agents=["Solver"]), "single", count=1)
    assert plan.error is None and plan.answer is not None


def test_failing_service_reports_its_error(service: str) -> None:
    failed_with(searched(Program(f"{service}/error", agents=["Solver"]), "single"), "status 500")
    failed_with(searched(Program(f"{service}/garbage", agents=["Solver"]), "single"), "JSONDecodeError")
    for url, words in ((f"{service}/hang", "for 1 seconds"), ("http://127.0.0.1:9/", "refused")):
        [plan] = searched(Program(url, agents=["Solver"], timeout=1), "single", count=1)
        assert plan.error is not None and words in plan.error


# ---- resources left open


def held() -> dict[str, int]:
    """Threads, child processes, open files and sockets, tasks, and executions."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    counts = {"threads": threading.active_count(), "children": len(children), "files": len(os.listdir("/proc/self/fd"))}
    return counts | {"tasks": kinds[asyncio.Task], "executions": kinds[Execution]}


async def with_client(question: str, client: AsyncOpenAI) -> str:
    return " ".join(await asyncio.gather(ask(client, question), ask(client, f"{question} again")))


async def with_url(question: str, base_url: str) -> str:
    # It leaves its connection open.
    client = AsyncOpenAI(base_url=base_url, api_key="any")
    return await ask(client, question)


# The program leaves its client open; Python warns of that whenever it collects the client.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize(
    "kind",
    ["url", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("client", "thread", "command", "service"))],
)
def test_searches_leave_no_threads_tasks_or_files(kind: str, tmp_path: Path, service: str) -> None:
    functions: dict[str, Any] = {"client": with_client, "thread": in_a_thread, "url": with_url}
    program = command(tmp_path, "print(first)")
    if kind != "command":
        program = program_of(functions.get(kind, f"{service}/json"))
    # Modules loaded at first use stay loaded.
    searched(program, "single", count=1)
    before = held()
    plans = searched(program, "sc:2", count={"command": 3, "url": 8}.get(kind, 30))
    assert all(plan.error is None for plan in plans)
    # The same applies to dropped searches: this run stops in the middle of its searches.
    run = search.run("sc:2", [Problem(f"p{i}", f"Question {i}?", "1", "number") for i in range(9)],
                     program=program, policy=policy(), concurrency=3)  # fmt: skip
    next(run)
    run.close()
    deadline = time.monotonic() + 60
    while any(after > before[name] for name, after in held().items()) and time.monotonic() < deadline:
        time.sleep(0.05)
    after = held()
    assert {name: max(after[name], before[name]) for name in after} == before


def test_gateway_with_an_unfinished_request_closes_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    kept = []

    def unfinished(question: str, base_url: str) -> str:
        where = urlsplit(base_url)
        connection = socket.create_connection((where.hostname, where.port))
        connection.sendall(f"POST {where.path}/chat/completions HTTP/1.1\r\nhost: x\r\n".encode())
        connection.sendall(b"expect: 100-continue\r\ncontent-length: 10\r\n\r\n")
        # The gateway has begun to read the body.
        assert b"100" in connection.recv(1000)
        kept.append(connection)
        with OpenAI(base_url=base_url, api_key="any") as client:
            return in_a_thread(question, client)

    [plan] = searched(program_of(unfinished), "single", count=1)
    assert plan.error is None
    for connection in kept:
        with connection:
            assert connection.recv(1000) == b""
    assert not caplog.records


@pytest.mark.slow
def test_gateway_closes_connections_of_ended_programs(monkeypatch: Any) -> None:
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 0.1)
    kept = []

    async def solve(question: str, base_url: str) -> str:
        # As frameworks do that cache their clients by URL.
        kept.append(AsyncOpenAI(base_url=base_url, api_key="any"))
        return await ask(kept[-1], question)

    with closing(program_of(solve).open()) as runner:
        first = ProgramSession(runner, "Question 0?")
        root = first.extend(None).result()
        slow = socket.create_connection(("127.0.0.1", kept[0].base_url.port), 60)
        time.sleep(0.2)
        before = held()["files"]
        for i in range(1, 5):
            session = ProgramSession(runner, f"Question {i}?")
            session.extend(session.extend(None).result(), "1").result()
        deadline = time.monotonic() + 60
        while held()["files"] > before + 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        # Only their own ends remain, and the connection of the program that still waits for a reply.
        assert held()["files"] <= before + 4
        assert first.extend(root, "1").result().text == "1"
        # A connection may wait for its first request.
        with slow:
            slow.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert slow.recv(100).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("turns", range(6))
def test_connection_during_gateway_shutdown_leaves_no_error_or_task(turns: int) -> None:
    faults: list[dict[str, Any]] = []

    async def close_after() -> set[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        server = http_server.Server(Gateway())
        await server.start()
        # Between its arrival and its first request a connection goes through several turns of the loop.
        with socket.create_connection(("127.0.0.1", server.port), 60):
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.close()
            for _ in range(5):
                await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(close_after()) == set() and faults == []


# ---- two programs at once never see each other's calls


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.booleans(), st.sampled_from(["plain", "raw", "copy"])),
        min_size=2,
        max_size=6,
    )
)
def test_concurrent_searches_give_the_same_plans_as_separate_searches(shapes: list[tuple[str, int, bool, str]]) -> None:
    async def solve(question: str, client: AsyncOpenAI) -> str:
        word, depth, at_once, way = json.loads(question)

        async def ask(client: AsyncOpenAI, text: str) -> str:
            """Ask with a client that the executions share in part: directly, or by its transport."""
            messages: Any = [{"role": "user", "content": text}]
            if way == "raw":
                raw = await client.chat.completions.with_raw_response.create(model="m", messages=messages)
                return str(raw.parse().choices[0].message.content)
            own = client.with_options(timeout=60) if way == "copy" else client
            return str((await own.chat.completions.create(model="m", messages=messages)).choices[0].message.content)

        if at_once:
            said = await asyncio.gather(*(ask(client, f"{word}{i}") for i in range(depth)))
            return " ".join(said)
        text = word
        for _ in range(depth):
            text = await ask(client, text)
            assert text.startswith(f"Solver<{word}")
        return text

    def script(request: Any, seed: int) -> str:
        return f"Solver<{request.messages[0].content.removeprefix('Solver<')[:4]}>{seed % 5}"

    tasks = [Problem(f"p{i}", json.dumps(shape), "1", "number") for i, shape in enumerate(shapes)]
    common: dict[str, Any] = {"program": program_of(solve), "policy": ScriptedPolicy(script)}
    together = {p.problem_id: p.text for p in search.run("sc:2", tasks, **common)}
    alone = {p.problem_id: p.text for task in tasks for p in search.run("sc:2", [task], **common)}
    assert together == alone and all(text and "failed" not in text for text in alone.values())


def test_gateway_requires_the_token_and_key_of_each_program() -> None:
    seen: dict[str, str] = {}
    go = threading.Event()

    def solve(question: str, base_url: str, api_key: str) -> str:
        seen[question] = base_url
        own = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages: Any = [{"role": "user", "content": question}]
        if len(seen) == 2:
            go.set()
        go.wait(60)
        other = next(url for name, url in seen.items() if name != question)
        for url, key in ((base_url, "wrong"), (other, api_key), (base_url.replace("/v1", "x/v1"), api_key)):
            try:
                OpenAI(base_url=url, api_key=key, max_retries=0).chat.completions.create(model="m", messages=messages)
            except APIError as error:
                assert "key" in str(error) or "no program" in str(error)
            else:
                raise AssertionError("answered a stranger")
        return str(own.chat.completions.create(model="m", messages=messages).choices[0].message.content)

    plans = searched(program_of(solve), "single")
    assert all(plan.text and plan.text.startswith("Solver") for plan in plans)


# ---- what arrives at the gateway


@settings(max_examples=200)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["messages", "role", "content", "n", "stream", "user", "type", "text", "metadata",
                                       "agent", "temperature", "tools", "stream_options", "stop"]), inner, max_size=5)
), max_leaves=12))  # fmt: skip
def test_arbitrary_request_is_accepted_or_rejected_with_a_reason(value: Any) -> None:
    try:
        call = read_call(json.dumps(value).encode(), {})
    except CallError as error:
        assert 400 <= error.status < 600 and str(error)
    else:
        assert call.messages and call.n >= 1 and json.loads(call.text)


@given(st.binary(max_size=60))
def test_request_of_arbitrary_bytes_is_rejected(body: bytes) -> None:
    with pytest.raises(CallError):
        read_call(body, {})


@contextmanager
def waiting_program(key: bool = False) -> Iterator[tuple[str, int]]:
    """A program that waits at the gateway: its token and the port."""

    async def idle(question: str, base_url: str) -> str:
        await asyncio.sleep(60)
        return "1"

    async def idle_with_key(question: str, base_url: str, api_key: str) -> str:
        return await idle(question, base_url)

    with closing(Runner(program_of(idle_with_key if key else idle))) as runner:
        execution = runner.start("q", Script(), lambda execution, outcome: None)
        yield execution.token, int(runner.url(execution).split(":")[2].split("/")[0])


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /x/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /x/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n",
        b"POST /x/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: \xb2\r\n\r\n",
        b"POST /x/v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /x/v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n",
        b"POST /x HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 30_000,
    ],
    ids=range(9),
)
def test_gateway_survives_input_that_is_not_http(sent: bytes) -> None:
    with waiting_program() as (token, port):
        # A client that still sends may see a reset instead of the reply.
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 60) as peer:
            peer.sendall(sent)
            peer.shutdown(socket.SHUT_WR)
            reply = b"".join(iter(lambda: peer.recv(4096), b""))
            assert reply == b"" or reply.startswith(b"HTTP/1.1 4")
        with socket.create_connection(("127.0.0.1", port), 60) as peer:
            peer.sendall(f"GET /{token}/v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            assert b"200 OK" in b"".join(iter(lambda: peer.recv(4096), b""))


@pytest.mark.parametrize("key", ["", "authorization: Bearer wrong\r\n"])
def test_gateway_answers_strangers_before_their_body(key: str) -> None:
    with waiting_program(key=True) as (known, port):
        for token in (known, "x"):
            head = f"POST /{token}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n{key}content-length: 1000\r\n\r\n"
            with socket.create_connection(("127.0.0.1", port), 60) as peer:
                peer.sendall(head.encode())
                status = peer.recv(4096).split()[1]
            assert status == (b"401" if token == known else b"404")


@pytest.mark.parametrize("sent", [b"", b"POST /x/v1/chat"], ids=["nothing", "half of a line"])
def test_gateway_closes_a_connection_without_a_request(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)
    with waiting_program() as (_, port), socket.create_connection(("127.0.0.1", port), 20) as peer:
        peer.sendall(sent)
        assert peer.recv(4096) == b""


def test_dropping_an_execution_does_not_interrupt_its_report() -> None:
    reported, done = list[Any](), threading.Event()

    def report(execution: Execution, outcome: Any) -> None:
        # A report runs on the program's thread. Another search may drop the parked execution meanwhile.
        dropper = threading.Thread(target=execution.drop)
        dropper.start()
        dropper.join()
        reported.append((outcome, execution.over))
        done.set()

    with closing(Runner(program_of(in_a_thread))) as runner:
        runner.start("q", Script(), report)
        assert done.wait(20)
        [(outcome, over)] = reported
        assert isinstance(outcome, Waiting) and over
