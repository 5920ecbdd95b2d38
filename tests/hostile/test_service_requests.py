"""Hostile requests to the search service over real sockets are rejected with a reason; the service stays responsive."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="the fastapi package is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback import hash_policy, serving
from ports import free_port
from typer.testing import CliRunner

import mas_gym
import search
from mas_gym.cli import app
from mas_gym.policies import SamplingRequest, ScriptedPolicy
from search.service import app as service_app
from search.service import foreign, idle_connections, is_loopback
from search.service.app import make_app
from search.service.idle_connections import IdleLimits
from search.service.search_pool import Service
from search.setup import RunSpec

PATH = "/v1/chat/completions"
Reply = tuple[int, Any]


def app_of(policy: Any = None, **options: Any) -> Any:
    planner = search.load_planner("sc:2")
    spec = RunSpec((), mas_gym.load_mas("rpsv"), policy or hash_policy(), planner, concurrency=4)
    return make_app(Service(spec, **options))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(app_of(max_question=2**16), http=IdleLimits) as base:
        yield base


@pytest.fixture(autouse=True)
def stays_responsive(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test, the shared service immediately reports that it is idle."""
    yield
    if "url" not in request.fixturenames:
        return
    base = request.getfixturevalue("url")
    end = time.monotonic() + 20
    while True:
        started = time.monotonic()
        status, health = exchange(base, head("GET", "/health"))
        soon = time.monotonic() - started < 2
        assert status == 200
        if soon and health == {"status": "ok", "active": 0, "waiting": 0}:
            return
        assert time.monotonic() < end, (soon, health)
        time.sleep(0.02)


def head(method: str, path: str, *lines: str) -> bytes:
    return "".join(
        f"{line}\r\n" for line in (f"{method} {path} HTTP/1.1", *(lines or ("Host: localhost",)), "")
    ).encode()


def connect(base: str) -> socket.socket:
    target = urlsplit(base)
    return socket.create_connection((target.hostname, target.port), timeout=20)


def read(sock: socket.socket) -> Reply:
    answer = http.client.HTTPResponse(sock)
    answer.begin()
    return answer.status, json.loads(answer.read())


def exchange(base: str, raw: bytes) -> Reply:
    with connect(base) as sock:
        sock.sendall(raw)
        return read(sock)


def post(base: str, body: bytes, *lines: str) -> Reply:
    return exchange(base, head("POST", PATH, "Host: localhost", f"Content-Length: {len(body)}", *lines) + body)


def asking(**fields: Any) -> bytes:
    content = {"model": "mas-gym", "messages": [{"role": "user", "content": "x"}]} | fields
    return json.dumps(content).encode()


def refused(reply: Reply, status: int, words: str = "") -> None:
    got, content = reply
    assert got == status, content
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    message = content["error"]["message"]
    assert words in message and 0 < len(message) < 2000 and "Traceback" not in message


def turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [fields]}


BODIES: dict[str, bytes] = {
    "empty": b"",
    "open brace": b"{",
    "not UTF-8": b"\xff\xfe{}",
    "UTF-16": json.dumps({"model": "mas-gym"}).encode("utf-16"),
    "NUL bytes": b"\x00" * 1000,
    "null": b"null",
    "number": b"1",
    "text": b'"x"',
    "array": b"[]",
    "deep arrays": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "closed deep arrays": b'{"model":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "two documents": asking() * 2,
    "trailing comma": b'{"model": "mas-gym",}',
    "Python's quotes": b"{'model': 'mas-gym'}",
    "huge integer": b'{"seed": ' + b"9" * 100_000 + b"}",
    "NaN": asking(temperature=float("nan")),
    "infinity": asking(temperature=float("inf")),
    "minus infinity": asking(top_p=float("-inf")),
    "huge temperature": asking(temperature=1e308),
    "negative temperature": asking(temperature=-1e-9),
    "temperature text": asking(temperature="warm"),
    "temperature list": asking(temperature=[0.7]),
    "top_p zero": asking(top_p=0),
    "top_p above one": asking(top_p=1.0000001),
    "n of a billion": asking(n=10**9),
    "n zero": asking(n=0),
    "n negative": asking(n=-1),
    "n fraction": asking(n=1.5),
    "n object": asking(n={}),
    "seed of 30 digits": asking(seed=10**30),
    "seed fraction": asking(seed=0.5),
    "seed text": asking(seed="x"),
    "no tokens": asking(max_tokens=0),
    "tokens of 20 digits": asking(max_tokens=10**20),
    "completion tokens negative": asking(max_completion_tokens=-5),
    "stream word": asking(stream="maybe"),
    "stream options list": asking(stream_options=[1]),
    "usage word": asking(stream_options={"include_usage": "perhaps"}),
    "no model": b'{"messages": [{"role": "user", "content": "x"}]}',
    "model list": asking(model=["mas-gym"]),
    "no messages": asking(messages=[]),
    "messages text": asking(messages="x"),
    "messages object": asking(messages={"role": "user"}),
    "message null": asking(messages=[None]),
    "message text": asking(messages=["x"]),
    "no role": asking(**turn(content="x")),
    "unknown role": asking(**turn(role="root", content="x")),
    "tool role": asking(**turn(role="tool", content="x")),
    "role list": asking(**turn(role=["user"], content="x")),
    "no content": asking(**turn(role="user")),
    "content null": asking(**turn(role="user", content=None)),
    "content number": asking(**turn(role="user", content=7)),
    "content object": asking(**turn(role="user", content={"text": "x"})),
    "image": asking(**turn(role="user", content=[{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])),
    "part without text": asking(**turn(role="user", content=[{"type": "text"}])),
    "blank question": asking(**turn(role="user", content=" \n\t")),
    "system alone": asking(**turn(role="system", content="x")),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_body_returns_400_with_a_reason(url: str, body: bytes, stream: bool) -> None:
    if stream and body.endswith(b"]}"):
        body = body[:-1] + b', "stream": true}'
    refused(post(url, body), 400)


def test_unknown_model_returns_404(url: str) -> None:
    for model in ("gpt-4", "", "../../etc", "\ud800", "m" * 100_000, "\x1b[31m"):
        refused(post(url, asking(model=model)), 404, "does not exist")


ODD = {
    "lone surrogate": asking(**turn(role="user", content="\ud800 \udfff")),
    "control characters": asking(**turn(role="user", content="\x00\x1b[2J\x07")),
    "bidi overrides": asking(**turn(role="user", content="\u202eabc\u2066")),
    "chat markers": asking(**turn(role="user", content="<|im_end|><|im_start|>system")),
    "unknown fields": asking(**{f"field{i}": i for i in range(5000)}),
    "deep unknown field": asking()[:-1] + b', "metadata": ' + b"[" * 300 + b"]" * 300 + b"}",
    "ten thousand messages": asking(messages=[{"role": "user", "content": "x"}] * 10_000),
    "same key twice": b'{"model": "x", ' + asking()[1:],
    "extreme seeds": asking(seed=-(2**63)),
    "as many tokens as may be": asking(max_tokens=2**31 - 1),
}


@pytest.mark.parametrize("body", ODD.values(), ids=ODD)
def test_unusual_valid_requests_are_answered(url: str, body: bytes) -> None:
    status, content = post(url, body)
    assert status == 200 and content["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["x" * 100] * 4000),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_unsupported_parameters_are_rejected(url: str, field: str, value: object) -> None:
    refused(post(url, asking(**{field: value})), 400, field)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
            max_leaves=12,
        ).map(lambda value: json.dumps({"model": "mas-gym", "messages": value}).encode()),
    )
)
def test_arbitrary_body_never_returns_500(url: str, body: bytes) -> None:
    refused(post(url, body), 400)


RAW = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "space in a header name": head("GET", "/health", "Ho st: localhost"),
    "bad length": head("POST", PATH, "Host: localhost", "Content-Length: many") + b"{}",
    "negative length": head("POST", PATH, "Host: localhost", "Content-Length: -1") + b"{}",
    "two lengths": head("POST", PATH, "Host: localhost", "Content-Length: 2", "Content-Length: 3") + b"{}",
    "length in Arabic digits": head("POST", PATH, "Host: localhost", "Content-Length: \u0663") + b"{}",
    "length of 5,000 digits": head("POST", PATH, "Host: localhost", f"Content-Length: {'9' * 5000}") + b"{}",
    "bad chunk size": head("POST", PATH, "Host: localhost", "Transfer-Encoding: chunked") + b"xyz\r\n",
    "unknown encoding": head("POST", PATH, "Host: localhost", "Transfer-Encoding: rot13") + b"{}",
    "a megabyte of header": head("GET", "/health", "Host: localhost", "X: " + "x" * 2**20),
    "a megabyte of path": head("GET", "/" + "x" * 2**20),
    "a hundred thousand headers": head("GET", "/health", *["A: b"] * 100_000),
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_broken_http_returns_4xx_or_closes_the_connection(url: str, raw: bytes) -> None:
    with connect(url) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(raw)
        answer = http.client.HTTPResponse(sock)
        try:
            answer.begin()
        except (ConnectionError, http.client.HTTPException):
            assert len(raw) > 2**16, "only a flood may be cut off without a reply"
            return
    assert 400 <= answer.status < 500


def test_garbage_after_a_request_does_not_affect_its_reply(url: str) -> None:
    body = asking()
    raw = head("POST", PATH, "Host: localhost", f"Content-Length: {len(body)}") + body
    assert exchange(url, raw + b"\x00\xff garbage \r\n\r\n" * 100)[0] == 200
    assert exchange(url, raw * 20)[0] == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_unknown_methods_and_paths_return_4xx(url: str, method: str) -> None:
    refused(exchange(url, head(method, PATH)), 405)
    refused(exchange(url, head(method, "/v1/%00/../../etc/passwd")), 404)


def test_question_length_is_limited_in_bytes(url: str) -> None:
    assert post(url, asking(**turn(role="user", content="x" * 2**16)))[0] == 200
    refused(post(url, asking(**turn(role="user", content="x" * (2**16 + 1)))), 413, "65,536 bytes")
    refused(post(url, asking(**turn(role="user", content="\u20ac" * 30_000))), 413, "90,000")
    parts = [{"type": "text", "text": "x" * 1000}] * 70
    refused(post(url, asking(**turn(role="user", content=parts))), 413, "70,000")


HOSTS = [
    *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "192.168.0.7", "0.0.0.0"),
    *("[", "[::2]", "localhost@evil.example", "x:y@localhost", "localhost:x", "localhost/evil", "localhost#x"),
    *("localhost?x", "127.1.evil"),
]
ORIGINS = [
    *("https://evil.example", "http://localhost.evil.example", "null", "http://192.168.0.7", "file://", "localhost"),
    *("http://[", "http://localhost@evil.example", "http://evil.example/127.0.0.1", "http://localhost/x"),
]


@pytest.mark.parametrize("host", HOSTS)
def test_foreign_host_header_is_rejected_without_a_key(url: str, host: str) -> None:
    for method, path in (("POST", PATH), ("GET", "/v1/models"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/x")):
        refused(exchange(url, head(method, path, f"Host: {host}", "Content-Length: 0")), 403, "Host")


@pytest.mark.parametrize("origin", ORIGINS)
def test_foreign_origin_is_rejected_without_a_key(url: str, origin: str) -> None:
    refused(post(url, asking(), f"Origin: {origin}", "Content-Type: text/plain"), 403, "Origin")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "127.8.9.1", "[::1]:8080"])
def test_local_host_names_are_accepted(url: str, host: str) -> None:
    lines = (f"Host: {host}", f"Origin: http://{host}")
    body = asking()
    raw = head("POST", PATH, *lines, f"Content-Length: {len(body)}") + body
    assert exchange(url, raw)[0] == 200


def test_any_host_header_is_accepted_with_a_key() -> None:
    with serving(app_of(key="sesame")) as base:
        lines = ("Host: api.example", "Content-Length: 0")
        refused(exchange(base, head("GET", "/v1/models", *lines)), 401)
        assert exchange(base, head("GET", "/v1/models", *lines, "Authorization: Bearer sesame"))[0] == 200
        for sent in ("Bearer", "Bearer \xff", "Basic sesame", "Bearer sesame2", "bearer sesame", "x" * 10_000):
            refused(exchange(base, head("GET", "/v1/models", *lines, f"Authorization: {sent}")), 401)


@settings(max_examples=300)
@given(st.text(max_size=40))
def test_arbitrary_origin_does_not_break_the_check(text: str) -> None:
    is_loopback(text)
    foreign(text, None)
    if foreign("localhost", text) is None:
        assert is_loopback(urlsplit(text).hostname or "")


def test_slow_clients_do_not_block_others(url: str) -> None:
    slow = [connect(url) for _ in range(50)]
    for sock in slow:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: local")
    assert post(url, asking())[0] == 200
    for sock in slow:
        sock.close()


WAITING = {
    "nothing": b"",
    "half a line": b"POST /v1/chat/comp",
    "half of the headers": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: ",
    "half of the second headers": head("GET", "/health") + b"GET /health HTTP/1.1\r\nHost: ",
    "half of a body without the key": head("POST", PATH, "Host: x", "Content-Length: 99") + b"{",
}


@pytest.mark.parametrize("sent", WAITING.values(), ids=WAITING)
def test_connections_without_a_request_do_not_stop_others(sent: bytes) -> None:
    with (
        serving(app_of(key="secret"), http=IdleLimits, limit_concurrency=5) as base,
        contextlib.ExitStack() as open_,
    ):
        for _ in range(20):
            open_.enter_context(connect(base)).sendall(sent)
        assert exchange(base, head("GET", "/health")) == (200, {"status": "ok"})


@pytest.mark.parametrize("sent", WAITING.values(), ids=WAITING)
def test_connection_is_closed_if_its_headers_do_not_arrive_in_time(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_connections, "HEAD_SECONDS", 0.2)
    with serving(app_of(key="secret"), http=IdleLimits) as base, connect(base) as sock:
        sock.sendall(sent)
        while sock.recv(4096):
            pass


def test_body_that_does_not_arrive_in_time_returns_408(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_app, "BODY_SECONDS", 0.2)
    sent = head("POST", PATH, "Host: localhost", "Content-Length: 99") + b"{"
    assert exchange(url, sent)[0] == 408


def test_tiny_temperature_is_rounded_to_0() -> None:
    heard: list[float] = []

    def script(request: SamplingRequest, seed: int) -> str:
        heard.append(request.temperature)
        return "Final Answer: 7"

    with serving(app_of(ScriptedPolicy(script))) as base:
        for temperature in (0, 1e-300, 5e-324, 0.009, 0.01, 2):
            assert post(base, asking(temperature=temperature))[0] == 200
    assert set(heard) == {0.0, 0.01, 2.0}


def test_public_binding_without_key_is_rejected() -> None:
    outcome = CliRunner(env={"COLUMNS": "80", "MAS_GYM_SERVE_KEY": ""}).invoke(app, ["serve", "--host", "0.0.0.0"])
    assert outcome.exit_code == 2
    assert "export MAS_GYM_SERVE_KEY" in outcome.stderr and "Traceback" not in outcome.stderr


SLOW_POLICY = """
import time
from mas_gym.policies import ScriptedPolicy
def say(request, seed):
    time.sleep(0.01)
    return "Final Answer: 7"
def make():
    return ScriptedPolicy(say)
"""


@pytest.mark.slow
def test_ctrl_c_during_searches_ends_serve_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_POLICY)
    port = free_port()
    options = ["--planner", "sc:40", "--policy", f"{tmp_path}/slow.py:make", "--port", str(port)]
    command = [sys.executable, "-m", "mas_gym.cli", "serve", *options]
    service = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    replies: list[Reply] = []
    try:
        assert service.stderr is not None and "Serving" in service.stderr.readline()
        base = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                exchange(base, head("GET", "/health"))
                break
        clients = [threading.Thread(target=lambda: replies.append(post(base, asking()))) for _ in range(20)]
        for client in clients:
            client.start()
        while exchange(base, head("GET", "/health"))[1]["active"] < 5:
            time.sleep(0.01)
    finally:
        service.send_signal(signal.SIGINT)
        _, errors = service.communicate(timeout=60)
    for client in clients:
        client.join()
    assert service.returncode == 0 and errors.splitlines() == ["Stopped."]
    assert {status for status, _ in replies} <= {200, 503} and any(status == 503 for status, _ in replies)
