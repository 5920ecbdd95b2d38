"""For any server reply, a request ends soon, with a sample or a `PolicyError`."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("openai", reason="the openai package is not installed")

from mas_gym.errors import ConfigError, EngineUnavailableError, PolicyError
from mas_gym.policies import connections
from mas_gym.policies.base import MOST_TOKENS, SamplingReply, SamplingRequest
from mas_gym.policies.openai import OpenAIOptions, OpenAIPolicy
from mas_gym.policies.openai_format import BadReply, parse_reply
from mas_gym.policies.retries import retry_after
from mas_gym.systems.prompts import ChatMessage

Chunks = Callable[[], AsyncIterator[bytes]]
CHOICE = {"index": 0, "finish_reason": "stop", "message": {"content": "hi"}, "logprobs": {"content": [{"logprob": -1}]}}
SOUND = {"choices": [CHOICE], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
REQUEST = SamplingRequest((ChatMessage("user", "How many?"),), (7,), max_new_tokens=16)


def response(body: bytes | Chunks, status: int = 200, *headers: str, length: bool = True) -> Chunks:
    async def chunks() -> AsyncIterator[bytes]:
        lines = [f"HTTP/1.1 {status} X", "content-type: application/json", *headers]
        if isinstance(body, bytes) and length:
            lines.append(f"content-length: {len(body)}")
        yield ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        if isinstance(body, bytes):
            yield body
        else:
            async for chunk in body():
                yield chunk

    return chunks


def raw(*parts: bytes) -> Chunks:
    async def chunks() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return chunks


def endless(chunk: bytes, pause: float = 0.0) -> Chunks:
    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield chunk
            await asyncio.sleep(pause)

    return chunks


def changed(**change: Any) -> Chunks:
    return response(json.dumps(SOUND | change).encode())


def choice(**change: Any) -> Chunks:
    return changed(choices=[CHOICE | change])


def usage(**change: Any) -> Chunks:
    return changed(usage=SOUND["usage"] | change)  # type: ignore[operator]


def logprob(value: str) -> Chunks:
    return response(json.dumps(SOUND).replace('"logprob": -1', f'"logprob": {value}').encode())


def waiting(status: int, value: str, key: str = "retry-after") -> Chunks:
    return response(b'{"error": {"message": "later"}}', status, f"{key}: {value}")


ERROR = b'{"error": {"message": "no"}}'
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 599)
UNREADABLE_WAITS = ("nan", "-5", "inf", "1e999", "soon", "", "Fri, 99 Foo 99999 99:99:99 GMT", "9" * 5000)
MODES: dict[str, Chunks] = {
    **{f"{status}, a wait of 1e9": waiting(status, "1000000000") for status in RETRIED},
    "500, a wait of 1e300": waiting(500, "1e300"),
    **{f"500, a wait of {value[:20]!r}": waiting(500, value) for value in UNREADABLE_WAITS},
    "503, a wait in milliseconds": waiting(503, "1e12", "retry-after-ms"),
    "200, broken gzip": response(b"\x1f\x8b not gzip", 200, "content-encoding: gzip"),
    "400, broken gzip": response(b"\x1f\x8b not gzip", 400, "content-encoding: gzip"),
    "200, cut gzip": response(gzip.compress(json.dumps(SOUND).encode())[:-20], 200, "content-encoding: gzip"),
    "200, an encoding of control characters": response(b"{}", 200, "content-encoding: \x07\x7f"),
    **{f"{status}, a slow drip": response(endless(b" ", 0.02), status) for status in (200, 400, 500)},
    "headers in a slow drip": endless(b"x", 0.02),
    "headers without end": raw(b"HTTP/1.1 200 OK\r\n", *(f"x-{i}: {'y' * 999}\r\n".encode() for i in range(2000))),
    "one header line without end": endless(b"y" * 65536),
    "interim replies without end": endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "no reply": raw(),
    "no HTTP": raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "a status of four digits": raw(b"HTTP/1.1 2000 OK\r\n\r\n"),
    "status 101": raw(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"),
    "204": raw(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "two lengths": raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\n{}"),
    "a negative length": raw(b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n{}"),
    "a length beyond the body": response(b"{}", 200, "content-length: 999999", length=False),
    "a chunk of absurd size": raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{}"),
    "a chunk of broken size": raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}"),
    "a redirect to itself": response(b"", 307, "location: /v1/chat/completions"),
    "a redirect elsewhere": response(b"", 302, "location: http://169.254.169.254/latest"),
    "a redirect of nonsense": response(b"", 308, "location: http://[::bad"),
    "an empty body": response(b""),
    "HTML": response(b"<html>It works!</html>"),
    "cut JSON": response(json.dumps(SOUND).encode()[:-9]),
    "bytes": response(bytes(range(256))),
    "UTF-16": response(json.dumps(SOUND).encode("utf-16")),
    "null": response(b"null"),
    "a list": response(b"[]"),
    "a string": response(b'"hello"'),
    "nested lists": response(b"[" * 500_000),
    "nested objects": response(b'{"a":' * 200_000),
    "nested lists in an error": response(b'{"error":' + b"[" * 50_000, 400),
    "an integer of 5,000 digits": response(b'{"choices": ' + b"9" * 5000 + b"}"),
    "an error with status 200": changed(error={"message": "\x1b[2J boom"}),
    "an error of wrong types": response(json.dumps({"error": {"message": [1], "param": {}}}).encode(), 400),
    "a list as error": response(b"[1, 2]", 400),
    "a window of 0": response(b'{"message": "maximum context length is 00 tokens, you asked for 99"}', 400),
    "no choices": changed(choices=[]),
    "choices of null": changed(choices=None),
    "choices of numbers": changed(choices=[1]),
    "an object of choices": changed(choices={"0": CHOICE}),
    "a thousand choices": changed(choices=[CHOICE] * 1000),
    "an index of 10**30": choice(index=10**30),
    "a negative index": choice(index=-1),
    "an index of words": choice(index="first"),
    "no message": choice(message=None),
    "a message of words": choice(message="hi"),
    "content of numbers": choice(message={"content": 5}),
    "a filtered message": choice(finish_reason="content_filter"),
    "a tool call": choice(finish_reason="tool_calls"),
    "a finish reason of lists": choice(finish_reason=[1]),
    **{
        f"{name} of {value!r}"[:60]: usage(**{name: value})
        for name in ("prompt_tokens", "completion_tokens")
        for value in (10**30, 2**62, MOST_TOKENS + 1, -1, 2.0, True, "7", [7], {})
    },
    "usage of a list": changed(usage=[1]),
    "usage of a number": changed(usage=3),
    "cached tokens of 10**30": usage(prompt_tokens_details={"cached_tokens": 10**30}),
    "cached tokens of -1": usage(prompt_tokens_details={"cached_tokens": -1}),
    "details of a list": usage(prompt_tokens_details=[1]),
    **{
        f"a log-probability of {value[:12]}": logprob(value)
        for value in ("NaN", "-Infinity", "-1e400", "-" + "9" * 400, "-1e300", "0.5", "true", '"-1"', "null", "[]")
    },
}
SOUND_MODES = {
    "log-probabilities of a number": choice(logprobs=5),
    "no usage": changed(usage=None),
    "a rounding error above 0": logprob("1e-7"),
    "gzip": response(gzip.compress(json.dumps(SOUND).encode()), 200, "content-encoding: gzip"),
    "a window of words": changed(
        system_fingerprint="\x00", usage={"prompt_tokens": 3, "completion_tokens": 2, "x": -1}
    ),
}


class Server:
    """A TCP server that reads one request and then writes what ``mode`` yields."""

    def __init__(self) -> None:
        self.mode: Chunks = raw()
        self.posts = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            # A socket that is closed with unread data resets the connection.
            await reader.readexactly(int(length[1]) if length is not None else 0)
            self.posts += 1
            async for chunk in self.mode():
                writer.write(chunk)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            # Reset, so that unread bytes keep no connection open.
            sock = writer.get_extra_info("socket")
            if self.mode is RESET:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            writer.close()


RESET = response(b'{"choices": [', 200, "content-length: 5000", length=False)
MODES["a reset within the body"] = RESET


@contextmanager
def listening(server: Server) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def stop(listener: asyncio.Server) -> None:
        listener.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    listener = asyncio.run_coroutine_threadsafe(asyncio.start_server(server.handle, "127.0.0.1", 0), loop).result(10)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(stop(listener), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[Server, str]]:
    server = Server()
    with listening(server) as url:
        yield server, url


def policy(url: str, **options: Any) -> OpenAIPolicy:
    return OpenAIPolicy("served", url, OpenAIOptions(**{"timeout": 0.25, "patience": 0.2, "max_attempts": 1} | options))


def ask(agent: OpenAIPolicy) -> SamplingReply:
    return asyncio.run(agent.sample_async(REQUEST))


def refusal(agent: OpenAIPolicy, within: float) -> str:
    """Return the error of a request that fails within so many seconds; a busy machine has three tries."""
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(PolicyError) as caught:
            ask(agent)
        if time.monotonic() - started < within:
            return str(caught.value)
    raise AssertionError(f"three requests took longer than {within} s")


@pytest.mark.parametrize("mode", MODES)
def test_bad_reply_raises_typed_error_in_bounded_time(place: tuple[Server, str], mode: str) -> None:
    server, url = place
    server.mode = MODES[mode]
    agent = policy(url)
    message = refusal(agent, within=3.0)
    assert message.isprintable() and len(message) < 1500
    assert agent.meter.generated_tokens <= MOST_TOKENS and agent.meter.prompt_tokens <= MOST_TOKENS


@pytest.mark.parametrize(
    "reply",
    [
        response(endless(b" " * 65536)),
        response(endless(b" " * 65536), 400),
        response(gzip.compress(b" " * 10**8), 200, "content-encoding: gzip"),
    ],
    ids=["without end", "an error without end", "compressed"],
)
def test_too_long_reply_is_rejected_before_the_timeout(
    place: tuple[Server, str], reply: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = place
    server.mode = reply
    monkeypatch.setattr(connections, "MAX_REPLY", 10**6)
    with pytest.raises(PolicyError, match="expected at most 1,000,000 bytes, got more"):
        ask(policy(url, timeout=60.0))


@pytest.mark.parametrize("mode", SOUND_MODES)
def test_unusual_valid_reply_is_used(place: tuple[Server, str], mode: str) -> None:
    server, url = place
    server.mode = SOUND_MODES[mode]
    [sample] = ask(policy(url, timeout=60.0)).samples
    assert sample.text == "hi" and sample.tokens in (0, 1, 2)


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 503])
def test_retry_after_is_respected_up_to_patience(place: tuple[Server, str], status: int) -> None:
    server, url = place
    sound = changed()
    replies = [waiting(status, "0.3"), sound]

    async def turn() -> AsyncIterator[bytes]:
        async for chunk in replies.pop(0)():
            yield chunk

    server.mode = turn
    started = time.monotonic()
    assert ask(policy(url, timeout=60.0, patience=5.0, max_attempts=2)).samples[0].text == "hi"
    assert time.monotonic() - started >= 0.3
    server.mode = waiting(status, "6")
    agent = policy(url, timeout=60.0, patience=5.0, max_attempts=10)
    assert re.search(r"6 s\b.*patience is 5 s", refusal(agent, within=2.0))


def test_reply_with_one_invalid_number_is_retried(place: tuple[Server, str]) -> None:
    server, url = place
    replies = [usage(completion_tokens=10**30), logprob("-1e400"), changed()]

    async def turn() -> AsyncIterator[bytes]:
        async for chunk in replies.pop(0)():
            yield chunk

    server.mode = turn
    agent = policy(url, timeout=60.0, patience=5.0, max_attempts=3)
    [sample] = ask(agent).samples
    assert (sample.text, sample.tokens, sample.logprob) == ("hi", 2, -1.0)
    assert agent.meter.faults == {"bad reply": 2} and agent.meter.generated_tokens == 2


@pytest.mark.parametrize("mode", ["a redirect to itself", "a redirect elsewhere"])
def test_redirects_are_not_followed_and_end_the_run(place: tuple[Server, str], mode: str) -> None:
    server, url = place
    server.mode, server.posts = MODES[mode], 0
    with pytest.raises(EngineUnavailableError, match="edirect"):
        ask(policy(url, timeout=60.0, max_attempts=5))
    assert server.posts == 1


def test_request_that_the_server_keeps_rejecting_fails(place: tuple[Server, str]) -> None:
    server, url = place
    caps = iter(range(10**6, 0, -1))

    async def turn() -> AsyncIterator[bytes]:
        text = f"max_tokens is too large; at most {14 - next(caps) % 3} or context length of {next(caps)} is exceeded"
        # Without this line the next question may go out on a connection that the server is about to close.
        async for chunk in response(json.dumps({"message": text}).encode(), 400, "connection: close")():
            yield chunk

    server.mode, server.posts = turn, 0
    with pytest.raises(PolicyError, match="rejected"):
        ask(policy(url, timeout=60.0))
    assert server.posts <= 20


@pytest.mark.parametrize("key", ["k\u00e9y", "a\nb", "a\tb"])
def test_key_invalid_as_a_header_is_rejected_and_not_printed(
    place: tuple[Server, str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(ConfigError, match="environment variable MY_KEY") as caught:
        ask(policy(place[1], key_env="MY_KEY"))
    assert key not in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PLACES = [
    ("choices",), ("usage",), ("error",), ("choices", 0), ("choices", 0, "index"), ("choices", 0, "message"),
    ("choices", 0, "finish_reason"), ("choices", 0, "logprobs"), ("choices", 0, "logprobs", "content"),
    ("choices", 0, "logprobs", "content", 0, "logprob"), ("choices", 0, "message", "content"),
    ("usage", "prompt_tokens"), ("usage", "completion_tokens"), ("usage", "prompt_tokens_details"),
]  # fmt: skip


@given(st.sampled_from(PLACES), VALUES | st.integers(-(10**40), 10**40))
@settings(max_examples=300, deadline=None)
def test_arbitrary_value_in_a_reply_is_used_or_rejected(place: tuple[Any, ...], value: Any) -> None:
    body = json.loads(json.dumps(SOUND))
    inner = body
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    try:
        reply = parse_reply(json.dumps(body).encode(), 1, "chat", True)
    except BadReply:
        return
    [sample] = reply.samples
    assert 0 <= sample.tokens <= MOST_TOKENS and 0 <= reply.prompt_tokens <= MOST_TOKENS
    assert sample.logprob is None or -1e9 < sample.logprob <= 0
    assert isinstance(sample.text, str) and sample.finish_reason in ("stop", "length")


@given(st.text() | st.floats().map(str) | st.integers().map(str) | st.datetimes().map(str))
def test_retry_after_is_a_finite_wait_or_none(value: str) -> None:
    found = retry_after({"retry-after": value})
    assert found is None or 0 <= found < float("inf")
