"""The search service over real HTTP: the official client, curl, and clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("openai", reason="the openai package is not installed")
pytest.importorskip("fastapi", reason="the fastapi package is not installed")

import openai
from loopback import hash_policy, serving
from loopback import make_app as make_model_server
from ports import free_port

import mas_gym
import search
from mas_gym.errors import EngineUnavailableError, PolicyError
from mas_gym.policies import load_policy
from mas_gym.policies.base import SamplingReply, SamplingRequest
from mas_gym.policies.cache import CachedPolicy
from mas_gym.policies.per_agent import PerAgentPolicy
from mas_gym.policies.scripted import ScriptedPolicy
from mas_gym.tasks import Problem, ProblemTask
from rewardmodels import load_critic
from search.engine import one_search
from search.engine.one_search import ActiveSearch
from search.service.app import make_app
from search.service.chat_format import ChatRequest
from search.service.search_pool import Asked, Service
from search.setup import RunSpec

QUESTION = "How many?"


def load(app: Any) -> tuple[int, int]:
    """Return the number of active and of waiting searches."""
    pool = app.state.pool
    return pool.scheduler.active, len(pool.open) - pool.scheduler.active


class SlowPolicy:
    """Replies as `hash_policy` does once it is released; counts the open requests."""

    name, max_concurrency = "slow", 512

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.open = self.answered = 0

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        self.open += 1
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.005)
            self.answered += 1
            return hash_policy().sample([request])[0]
        finally:
            self.open -= 1


class BrokenPolicy:
    """Fails every request with one error."""

    name, max_concurrency = "broken", 8

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        raise self.error


def app_of(policy: Any, planner: str = "sc:3", **options: Any) -> Any:
    searches = {name: options.pop(name) for name in ("concurrency", "budget", "critic", "seed") if name in options}
    spec = RunSpec((), mas_gym.load_mas("rpsv"), policy, search.load_planner(planner), **searches)
    return make_app(Service(spec, **options))


@contextlib.contextmanager
def client_of(app: Any, key: str = "none") -> Iterator[Any]:
    with serving(app) as base, openai.OpenAI(base_url=base + "/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(app_of(hash_policy(), concurrency=8)) as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: Any, question: str = QUESTION, **options: Any) -> Any:
    return client.chat.completions.create(model="mas-gym", messages=[{"role": "user", "content": question}], **options)


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def direct(question: str, seed: int = 42) -> search.Plan:
    task = ProblemTask.of([Problem("question", question, "", "number")])
    return next(search.run("sc:3", task, mas="rpsv", policy=hash_policy(), seed=seed))


def test_official_client_receives_the_answer_of_the_search(client: Any) -> None:
    plan, got = direct(QUESTION), ask(client)
    assert got.choices[0].message.content == plan.candidates[0].text
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.completion_tokens == plan.usage.generated_tokens == 12 * 7
    assert got.usage.prompt_tokens == plan.usage.prompt_tokens > 0
    assert got.mas_gym["answers"] == [plan.answer] and got.mas_gym["agent_calls"] == 12
    assert [model.id for model in client.models.list()] == ["mas-gym"]


def test_service_supports_seeds_choices_and_sampling(client: Any) -> None:
    other = ask(client, seed=7, n=2)
    assert [c.message.content for c in other.choices] == [c.text for c in direct(QUESTION, 7).candidates[:2]]
    assert ask(client, seed=7).choices[0].message.content == other.choices[0].message.content
    assert ask(client, temperature=0.0, top_p=0.5, max_tokens=5, user="x", tools=[]).choices


def test_service_accepts_content_parts_and_conversations(client: Any) -> None:
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]
    messages = [{"role": "user", "content": parts}]
    got = client.chat.completions.create(model="mas-gym", messages=messages)
    assert got.choices[0].message.content == ask(client).choices[0].message.content
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "A"}, {"role": "user", "content": "B"}]
    got = client.chat.completions.create(model="mas-gym", messages=messages)
    assert got.choices[0].message.content == direct("S\n\nA\n\nB").candidates[0].text


@pytest.mark.parametrize(("decimal", "answer"), [(".", "1.234"), (",", "1234")])
def test_answers_are_read_with_the_decimal_sign_of_the_service(decimal: str, answer: str) -> None:
    policy = ScriptedPolicy(lambda request, seed: "Final Answer: 1.234")
    with client_of(app_of(policy, "single", decimal=decimal)) as client:
        assert ask(client).mas_gym["answers"] == [answer]


def test_streaming_sends_progress_then_answer_then_usage(client: Any) -> None:
    policy = SlowPolicy()
    with client_of(app_of(policy)) as slow:
        stream = ask(slow, stream=True, stream_options={"include_usage": True})
        assert next(stream).choices[0].delta.role == "assistant"
        policy.gate.set()
        pieces = list(stream)
    told = "".join(getattr(p.choices[0].delta, "reasoning_content", None) or "" for p in pieces if p.choices)
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert "agent calls" in told
    assert text == direct(QUESTION).candidates[0].text
    assert pieces[-1].usage.completion_tokens == 84 and not pieces[-1].choices


def test_critic_is_shared_by_all_searches() -> None:
    class Counting:
        name, terminal_only, free = "counting", False, False

        def __init__(self) -> None:
            self.threads: set[int] = set()

        def score(self, contexts: Any) -> list[float]:
            self.threads.add(threading.get_ident())
            return [len(context.state.text) % 7 / 7 for context in contexts]

    critic = Counting()
    with client_of(app_of(hash_policy(), "mcts:4,2", critic=critic, concurrency=8)) as client:
        alone = [ask(client, f"Q{i}").choices[0].message.content for i in range(6)]
        together = run_many(client, [f"Q{i}" for i in range(6)] * 4)
    assert together == alone * 4
    assert len(critic.threads) == 1


def test_speaker_name_is_part_of_the_question() -> None:
    turns = [{"role": "user", "name": "Ann", "content": "2 + 2?"}, {"role": "user", "content": "Be brief."}]
    assert ChatRequest.model_validate({"model": "m", "messages": turns}).question == "Ann: 2 + 2?\n\nBe brief."


def run_many(client: Any, questions: list[str]) -> list[str]:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as many:
            replies = await asyncio.gather(*(ask(many, question) for question in questions))
        return [reply.choices[0].message.content for reply in replies]

    return asyncio.run(run())


def test_concurrent_clients_receive_their_own_answers(client: Any) -> None:
    questions = [f"Question {i}" for i in range(200)]
    assert run_many(client, questions) == [direct(question).candidates[0].text for question in questions]


@pytest.mark.slow
def test_finished_and_disconnected_clients_release_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = app_of(hash_policy(), concurrency=8)
    body = b'{"model": "mas-gym", "messages": [{"role": "user", "content": "x"}], "stream": true}'
    threads = set()

    def kept() -> int:
        gc.collect()
        # Not isinstance, because some libraries' objects warn when their class is read.
        return sum(type(thing) in (ActiveSearch, Asked, search.Run) for thing in gc.get_objects())

    def ours() -> int:
        return sum(thread.name.startswith("mas-gym") for thread in threading.enumerate())

    before, others = kept(), ours()
    with client_of(app) as client:
        for _ in range(3):
            run_many(client, [f"Question {i}" for i in range(200)])
            for sock in [post(f"http://{client.base_url.netloc.decode()}", body) for _ in range(20)]:
                sock.close()
            wait_for(lambda: load(app) == (0, 0) and kept() <= before)
            threads.add(ours())
    # The scheduler of this app and the engine loop; no thread belongs to a search.
    assert len(threads) == 1 and max(threads) - others <= 2 and "was destroyed" not in caplog.text


@pytest.mark.slow
def test_memory_of_concurrent_long_questions_is_bounded() -> None:
    tracemalloc.start()
    try:
        with client_of(app_of(hash_policy(), "single", concurrency=4)) as client:
            questions = [f"{i} " + "long question " * 20_000 for i in range(200)]
            before, _ = tracemalloc.get_traced_memory()
            run_many(client, questions)
            after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Of 56 MB that arrive, each waiting question is in memory a few times at most, at both ends of the connection.
    assert peak - before < 10 * sum(map(len, questions)) and after - before < 10 * 2**20


def test_request_to_a_full_queue_is_rejected_and_others_are_served() -> None:
    policy = SlowPolicy()
    app = app_of(policy, concurrency=2, queue=3)

    async def run(base: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as many:
            calls = [asyncio.ensure_future(ask(many, f"Q{i}")) for i in range(12)]
            while sum(call.done() for call in calls) < 7:
                await asyncio.sleep(0.01)
            policy.gate.set()
            return await asyncio.gather(*calls, return_exceptions=True)

    with serving(app) as base:
        replies = asyncio.run(run(base + "/v1"))
    refused = [reply for reply in replies if isinstance(reply, openai.RateLimitError)]
    assert len(refused) == 7 and all(reply.response.headers["retry-after"] == "1" for reply in refused)
    assert sum(not isinstance(reply, Exception) for reply in replies) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_search_of_a_disconnected_client_is_ended(stream: bool) -> None:
    policy = SlowPolicy()
    app = app_of(policy, concurrency=2)
    body = json.dumps({"model": "mas-gym", "messages": [{"role": "user", "content": "x"}], "stream": stream})
    with serving(app) as base:
        # Two at work and one in the queue, all abandoned.
        clients = [post(base, body.encode()) for _ in range(3)]
        wait_for(lambda: load(app) == (2, 1) and policy.open > 0)
        for sock in clients:
            sock.close()
        wait_for(lambda: load(app) == (0, 0) and policy.open == 0)
        assert policy.answered == 0
        policy.gate.set()
        with openai.OpenAI(base_url=base + "/v1", api_key="none") as client:
            assert ask(client).choices


def test_client_that_does_not_read_does_not_block_a_search() -> None:
    app = app_of(hash_policy(), concurrency=2)
    body = b'{"model": "mas-gym", "messages": [{"role": "user", "content": "x"}], "stream": true}'
    with serving(app) as base:
        clients = [post(base, body) for _ in range(20)]
        with openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client:
            assert ask(client).choices
        wait_for(lambda: load(app) == (0, 0))
        for sock in clients:
            sock.close()


def post(base: str, body: bytes, headers: str = "", length: int | None = None) -> socket.socket:
    """Send a request and return the open socket."""
    target = urlsplit(base)
    sock = socket.create_connection((target.hostname, target.port), timeout=30)
    size = len(body) if length is None else length
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {size}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def status_of(sock: socket.socket) -> tuple[int, Any]:
    answer = http.client.HTTPResponse(sock)
    answer.begin()
    content = json.loads(answer.read())
    sock.close()
    return answer.status, content


def test_oversized_bodies_are_rejected_early(url: str) -> None:
    app = app_of(hash_policy(), max_body=2000)
    with serving(app) as base:
        assert status_of(post(base, b"", length=10**9))[0] == 413
        chunked = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
        target = urlsplit(base)
        sock = socket.create_connection((target.hostname, target.port), timeout=30)
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked * 3
        )
        assert status_of(sock)[0] == 413
        sock = post(base, b'{"model": "mas-gym"}')
        assert status_of(sock)[0] == 400


@pytest.mark.parametrize("sent", ["", "Authorization: Bearer wrong\r\n", "Authorization: sesame\r\n"])
def test_wrong_key_is_rejected(sent: str) -> None:
    with serving(app_of(hash_policy(), key="sesame")) as base:
        status, content = status_of(post(base, b"{}", sent))
        assert (status, content["error"]["type"]) == (401, "authentication_error")
        with openai.OpenAI(base_url=base + "/v1", api_key="sesame") as client:
            assert ask(client).choices
            assert list(client.models.list())
        with openai.OpenAI(base_url=base + "/v1", api_key="x") as client, pytest.raises(openai.AuthenticationError):
            list(client.models.list())


def test_service_with_a_key_reveals_nothing_without_that_key() -> None:
    def get(path: str, key: str = "") -> tuple[int, str]:
        asked = Request(base + path, headers={"Authorization": f"Bearer {key}"} if key else {})
        try:
            with urlopen(asked, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()

    with serving(app_of(hash_policy(), key="sesame")) as base:
        assert get("/health") == get("/health", "wrong") == (200, '{"status": "ok"}')
        assert "waiting" in get("/health", "sesame")[1]
        for path in ("/metrics", "/v1/models", "/v1/chat/completions", "/nothing", "/docs"):
            status, content = get(path)
            assert status == 401 and "mas_gym_" not in content
        status, content = get("/metrics", "sesame")
        assert status == 200 and 'requests_total{status="401"} 5.0' in content


@pytest.mark.parametrize(
    ("error", "status"),
    [(PolicyError("no luck"), 500), (EngineUnavailableError("gone"), 503)],
    ids=["search", "engine"],
)
def test_failures_are_returned_with_a_reason(error: Exception, status: int) -> None:
    with client_of(app_of(BrokenPolicy(error))) as client:
        with pytest.raises(openai.InternalServerError, match=str(error)) as caught:
            ask(client)
        assert caught.value.status_code == status
        with pytest.raises(openai.APIError, match=str(error)):
            list(ask(client, stream=True))


def test_exhausted_budget_returns_the_best_answer() -> None:
    app = app_of(hash_policy(), "mcts:50,3", critic=load_critic("policy-likelihood"), budget=search.Budget(calls=30))
    with client_of(app) as client:
        got = ask(client)
    assert "budget" in got.mas_gym["stopped"] and got.mas_gym["agent_calls"] <= 30


@pytest.mark.parametrize(("header", "calls"), [("calls=6", 6), ("tokens=20 , calls=9", 9), ("calls=900", 30)])
def test_budget_header_limits_one_search(header: str, calls: int) -> None:
    app = app_of(hash_policy(), "mcts:50,3", critic=load_critic("policy-likelihood"), budget=search.Budget(calls=30))
    with client_of(app) as client:
        got = ask(client, extra_headers={"X-MAS-Budget": header})
        assert 0 < got.mas_gym["agent_calls"] <= calls and "budget of" in got.mas_gym["stopped"]
        assert ask(client).mas_gym["agent_calls"] > 9


@pytest.mark.parametrize(
    "header",
    [
        *("", "calls", "calls=0", "calls=-3", "calls=nan", "calls=1.5", "seconds=0", "seconds=-1", "seconds=inf"),
        *("usd=1", "call=3", "calls=1,calls=2", "calls=" + "9" * 400, "seconds=1e999", "\u00e9=1"),
    ],
)
def test_budget_header_rejects_invalid_budgets(url: str, header: str) -> None:
    body = json.dumps({"model": "mas-gym", "messages": [{"role": "user", "content": QUESTION}]}).encode()
    with contextlib.closing(post(url, body, f"X-MAS-Budget: {header}\r\n")) as sock:
        status, reply = status_of(sock)
    assert status == 400 and "X-MAS-Budget: " in str(reply)


@pytest.mark.parametrize("planner", ["single", "sbs:3,2", "bon:3", "mcts:5,3"])
def test_request_without_an_answer_within_its_time_budget_returns_504(planner: str) -> None:
    app = app_of(SlowPolicy(), planner, critic=load_critic("policy-likelihood"))
    with client_of(app) as client, pytest.raises(openai.InternalServerError, match="within the budget") as caught:
        ask(client, extra_headers={"X-MAS-Budget": "seconds=0.05"})
    assert caught.value.status_code == 504


class FourAnswers(SlowPolicy):
    """Answers four requests and keeps the others waiting."""

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        while self.answered >= 4:
            await asyncio.sleep(0.005)
        self.gate.set()
        return await super().sample_async(request)


def test_time_budget_spent_in_a_later_stage_returns_the_earlier_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(app_of(hash_policy(), "single")) as client:
        expected = ask(client).choices[0].message.content
    policy = FourAnswers()
    # The budget ends a second after the fourth answer, however long that took.
    monkeypatch.setattr(one_search, "perf_counter", lambda: time.perf_counter() + 599 * (policy.answered >= 4))
    app = app_of(policy, "cascade:single>bon:20@1", critic=load_critic("policy-likelihood"))
    with client_of(app) as client:
        got = ask(client, extra_headers={"X-MAS-Budget": "seconds=600"})
        metrics = urlopen(str(client.base_url.join("/metrics"))).read().decode()
    assert "mas_gym_stopped_searches_total 1.0" in metrics
    assert got.mas_gym["stopped"] == "budget of 600 seconds spent" and got.choices[0].message.content == expected


def test_curl_reads_completions_health_and_metrics(url: str, client: Any) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")

    def fetch(*arguments: str) -> str:
        return subprocess.run([curl, "-sS", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout

    body = json.dumps({"model": "mas-gym", "messages": [{"role": "user", "content": QUESTION}]})
    got = json.loads(fetch(f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body))
    assert got["choices"][0]["message"]["content"] == ask(client).choices[0].message.content
    assert json.loads(fetch(f"{url}/health")) == {"status": "ok", "active": 0, "waiting": 0}
    metrics = fetch(f"{url}/metrics")
    assert 'mas_gym_requests_total{status="200"}' in metrics and "mas_gym_active_searches 0" in metrics
    assert fetch("-o", "/dev/null", "-w", "%{http_code}", f"{url}/v1/nothing") == "404"
    assert fetch("-o", "/dev/null", "-w", "%{http_code}", f"{url}/v1/chat/completions") == "405"
    streamed = fetch("-N", f"{url}/v1/chat/completions", "-d", body[:-1] + ', "stream": true}')
    assert streamed.endswith("data: [DONE]\n\n")


def test_stopping_the_server_ends_open_searches() -> None:
    policy = SlowPolicy()
    app = app_of(policy)
    with serving(app) as base:
        sock = post(base, b'{"model": "mas-gym", "messages": [{"role": "user", "content": "x"}]}')
        wait_for(lambda: policy.open > 0)
    assert load(app)[0] == 0 and policy.open == 0
    sock.close()


def test_overlong_questions_are_rejected_before_tokenization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # They exceed the bundled model's window even without --max-question and with a cache.
    tiny = load_policy("tiny")
    for policy in (
        tiny,
        CachedPolicy(tiny, tmp_path / "replies.db"),
        PerAgentPolicy({"Solver": hash_policy(), "*": tiny}),
    ):
        with serving(app_of(policy, "sc:2")) as base:
            with monkeypatch.context() as patched:
                patched.setattr(tiny.format, "encode", None)
                sent = [post(base, chat_body("word " * 200_000)) for _ in range(8)]
                for status, content in map(status_of, sent):
                    assert status == 413 and "bytes" in content["error"]["message"]
                    assert content["error"]["code"] == "context_length_exceeded"
            # A question that only the tokenizer can measure is also a client error.
            status, content = status_of(post(base, chat_body("7 " * 3000)))
            assert status == 400 and "too long" in content["error"]["message"]


def test_question_too_long_for_a_servers_model_returns_400() -> None:
    # Not even the system prompts fit this window.
    with serving(make_model_server(hash_policy(), window=5)) as model, serving(app_of(policy_at(model))) as base:
        status, content = status_of(post(base, chat_body(QUESTION)))
    assert status == 400 and "maximum context length is 5 tokens" in content["error"]["message"]
    assert content["error"]["code"] == "context_length_exceeded"


def chat_body(question: str) -> bytes:
    return json.dumps({"model": "mas-gym", "messages": [{"role": "user", "content": question}]}).encode()


def policy_at(base: str) -> Any:
    return load_policy(f"openai:served@{base}/v1")


@pytest.mark.slow
def test_serve_command_returns_the_same_answer_as_the_solve_command(tmp_path: Path) -> None:
    port = free_port()
    mas_gym_command = [sys.executable, "-m", "mas_gym.cli"]
    options = ["--planner", "sc:2", "--policy", "tiny", "--seed", "7"]
    question = "Maya has 14 marbles. She finds 6 more. Then she loses 3. How many marbles does Maya have now?"
    env = os.environ | {"MAS_GYM_SERVE_KEY": "sesame"}
    serving = [*mas_gym_command, "serve", *options, "--port", str(port), "--log-json", str(tmp_path / "log.jsonl")]
    service = subprocess.Popen(serving, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert service.stderr is not None and f"http://127.0.0.1:{port}/v1" in service.stderr.readline()
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="sesame", max_retries=20) as client:
            told = ask(client, question)
        with (
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            ask(client, question)
    finally:
        service.send_signal(signal.SIGINT)
        _, errors = service.communicate(timeout=60)
    assert service.returncode == 0 and "Traceback" not in errors
    solve = [*mas_gym_command, "solve", question, *options]
    solved = subprocess.run(solve, capture_output=True, text=True, check=True, timeout=120)
    assert f"Answer: {told.mas_gym['answers'][0]}" in solved.stdout
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert "search ended" in {line["event"] for line in logged}


# ---------------------------------------------------------------------- grading


def graded(url: str) -> dict[str, float]:
    page = urlopen(f"{url}/metrics", timeout=30).read().decode()
    lines = [line for line in page.splitlines() if line.startswith("mas_gym_graded_answers_total")]
    return {line.partition('"')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}


def test_answers_to_task_questions_are_graded_after_sending() -> None:
    let, seen = threading.Event(), []

    def grade(problem: Any, text: str) -> bool:
        seen.append((problem.id, problem.answer, text))
        if problem.id == "raises":
            raise ValueError("no")
        return let.wait(30) and problem.id == "right"

    names = ("right", "wrong", "raises")
    task = ProblemTask.of([Problem(name, f"Is it {name}?", "gold", "text") for name in names], grader=grade)
    app = app_of(hash_policy(), grader=task.grader, references=task)
    with serving(app) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        # The first grade waits; the replies do not.
        answers = [ask(client, f"Is it  {name}?").choices[0].message.content for name in (*names, "unknown")]
        assert graded(url) == {"right": 0, "wrong": 0, "failed": 0, "dropped": 0}
        let.set()
        wait_for(lambda: sum(graded(url).values()) == 3)
        assert graded(url) == {"right": 1, "wrong": 1, "failed": 1, "dropped": 0}
    assert seen == [(name, "gold", answer) for name, answer in zip(names, answers, strict=False)]


def test_grader_without_task_grades_every_answer() -> None:
    grader = ProblemTask.of([], grader=lambda problem, text: not problem.answer).grader
    with serving(app_of(hash_policy(), grader=grader)) as url:
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            ask(client)
        wait_for(lambda: graded(url)["right"] == 1)


def test_service_without_grader_counts_no_grades(url: str) -> None:
    assert graded(url) == {}
