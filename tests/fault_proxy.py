"""A TCP proxy before an HTTP server that spoils a share of the answers, decided by seed, body and try.

The same body sent for the k-th time gets the same fault in every run, regardless of
order and concurrency; `Fault.NONE` forwards the answer unchanged.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit


class Fault(enum.Enum):
    NONE = "none"
    TIMEOUT = "no answer"
    LIMIT = "429"
    LIMIT_WAIT = "429 with Retry-After"
    ERROR = "500"
    RESET = "reset mid-body"
    TRUNCATED = "truncated JSON"
    COUNT = "wrong number of choices"
    EMPTY = "empty text"
    NAN = "NaN log-probability"


ALL = tuple(fault for fault in Fault if fault is not Fault.NONE)


@dataclass
class FaultProxy:
    """Forwards to ``upstream``; ``share`` of the posted requests meet one of ``faults``.

    ``choose`` overrides the draw: it gets the body and the number of the try, from 1.
    """

    upstream: str
    share: float = 0.3
    seed: int = 0
    faults: tuple[Fault, ...] = ALL
    choose: Callable[[bytes, int], Fault] | None = None
    seen: Counter[Fault] = field(default_factory=Counter)
    tries: Counter[bytes] = field(default_factory=Counter)

    def fate(self, body: bytes) -> Fault:
        if not body:
            return Fault.NONE
        self.tries[body] += 1
        if self.choose is not None:
            return self.choose(body, self.tries[body])
        digest = hashlib.blake2b(body + f"|{self.seed}|{self.tries[body]}".encode(), digest_size=16).digest()
        drawn, which = struct.unpack(">QQ", digest)
        return self.faults[which % len(self.faults)] if drawn < self.share * 2**64 else Fault.NONE

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await _head(reader)) is not None:
                length = _header(head, b"content-length")
                body = await reader.readexactly(int(length)) if length else b""
                fault = self.fate(body)
                self.seen[fault] += 1
                if not await self.answer(fault, head, body, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(
        self,
        fault: Fault,
        head: bytes,
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Send one answer; return whether the connection can stay open."""
        if fault is Fault.TIMEOUT:
            await reader.read(1)
            return False
        if fault in (Fault.LIMIT, Fault.LIMIT_WAIT):
            extra = "retry-after: 0.2\r\n" if fault is Fault.LIMIT_WAIT else ""
            return await _send(writer, 429, b'{"error": {"message": "slow down"}}', extra)
        if fault is Fault.ERROR:
            return await _send(writer, 500, b"<html>Internal Server Error</html>")
        status, answer = await self.forward(head, body)
        if fault is Fault.RESET:
            writer.write(_status(status, len(answer)) + answer[: len(answer) // 2])
            await writer.drain()
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        return await _send(writer, status, spoil(fault, answer))

    async def forward(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        target = urlsplit(self.upstream)
        reader, writer = await asyncio.open_connection(target.hostname, target.port)
        try:
            lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
            writer.write(b"\r\n".join([lines[0], b"Connection: close", *lines[1:]]) + body)
            await writer.drain()
            answered = await _head(reader)
            if answered is None:
                raise ConnectionError("upstream closed")
            rest = await reader.read()
            return int(answered.split(b" ", 2)[1]), rest
        finally:
            writer.close()


def spoil(fault: Fault, answer: bytes) -> bytes:
    if fault is Fault.TRUNCATED:
        return answer[: len(answer) * 2 // 3]
    if fault is Fault.NONE or b'"choices"' not in answer:
        return answer
    reply = json.loads(answer)
    if fault is Fault.COUNT:
        reply["choices"] = reply["choices"] * 2
    if fault is Fault.EMPTY:
        reply["usage"]["completion_tokens"] = 0
    for choice in reply["choices"]:
        if fault is Fault.EMPTY and "message" in choice:
            choice["message"]["content"], choice["logprobs"] = "", None
        elif fault is Fault.EMPTY:
            choice["text"], choice["logprobs"] = "", None
        elif fault is Fault.NAN and choice.get("logprobs"):
            choice["logprobs"] = {"content": [{"logprob": float("nan")}], "token_logprobs": [float("nan")]}
    return json.dumps(reply).encode()


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


def _status(status: int, length: int, extra: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}content-length: {length}\r\n\r\n".encode()


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes, extra: str = "") -> bool:
    writer.write(_status(status, len(body), extra) + body)
    await writer.drain()
    return True


@contextmanager
def proxied(proxy: FaultProxy, port: int = 0) -> Iterator[str]:
    """Run the proxy on a thread; yields its base URL without a path."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    open_ones: set[asyncio.StreamWriter] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.add(writer)
        try:
            await proxy.handle(reader, writer)
        finally:
            open_ones.remove(writer)

    async def start() -> asyncio.Server:
        return await asyncio.start_server(handle, "127.0.0.1", port)

    async def stop(server: asyncio.Server) -> None:
        # A server that closes between accepting a connection and opening its transport leaves the transport open.
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in open_ones:
                writer.transport.abort()
            await asyncio.wait(others, timeout=0.01)
        server.close()
        # Aborted transports close in the next iterations of the loop.
        await asyncio.sleep(0.01)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(stop(server), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
