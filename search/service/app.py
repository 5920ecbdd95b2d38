"""The HTTP server and routes of the OpenAI-compatible service, which answers chat completions by search.

The server is uvicorn, adapted to exit without tracebacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import signal
import time
import uuid
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mas_gym.errors import BudgetError, EngineUnavailableError, PromptTooLongError
from mas_gym.systems.graph import FAILED
from search.service import foreign
from search.service.chat_format import (
    TOO_LONG,
    ApiError,
    ChatRequest,
    check_question,
    chunk,
    completion_document,
    parse_chat,
    read_limits,
    sse,
    usage_document,
)
from search.service.idle_connections import IdleLimits
from search.service.search_pool import Asked, SearchPool, Service
from search.service.telemetry import family

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from starlette.types import ASGIApp, Receive, Scope, Send

    from search import Budget, Plan

BODY_SECONDS = 60.0
_KEEP_ALIVE_SECONDS = 15.0
_PROGRESS_SECONDS = 0.1
_IDLE_SECONDS = 30


def make_app(service: Service) -> FastAPI:
    """Return a service as an ASGI app.

    Without a key, the app answers only requests with a local ``Host`` and ``Origin``, so that no web page can use it,
    not even through DNS rebinding. ``app.state.stop()``, safe in a signal handler, cancels all open searches;
    their clients get status 503.
    """
    pool = SearchPool(service)
    front = _Front(service, pool)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(pool.close)

    app = FastAPI(title="mas-gym", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.pool, app.state.stop = pool, front.stop
    app.add_api_route("/v1/chat/completions", front.chat, methods=["POST"])
    app.add_api_route("/v1/models", front.models, methods=["GET"])
    app.add_api_route("/health", front.health, methods=["GET"])
    app.add_api_route("/metrics", front.metrics, methods=["GET"])
    app.add_exception_handler(ApiError, front.refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(_Guard, front=front)
    return app


class _Guard:
    """Middleware that rejects requests without the service's key or, if it has none, from pages of other sites.

    `/health` needs no key, but reports only liveness without it.
    """

    def __init__(self, app: ASGIApp, front: _Front) -> None:
        self._app, self._front = app, front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if self._front.service.key is None:
                if (fault := foreign(headers.get("host"), headers.get("origin"))) is not None:
                    app = self._front.reply(ApiError(403, fault, kind="permission_error"))
            elif scope["path"] != "/health" and not self._front.authorised(headers):
                text = "expected this service's API key as a bearer token"
                app = self._front.reply(ApiError(401, text, kind="authentication_error"))
        await app(scope, receive, send)


class _Front:
    """The routes."""

    def __init__(self, service: Service, pool: SearchPool) -> None:
        self.service, self.pool, self.model = service, pool, service.model
        bounds = [n for n in (service.max_question, pool.setup.policy.max_prompt_bytes) if n is not None]
        self._max_question = min(bounds, default=None)
        self._read = pool.setup.mas.final_text
        self.stopping = False
        self.counts: Counter[str] = Counter()
        self.answers: Counter[int] = Counter()
        self.started = int(time.time())
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def stop(self) -> None:
        """Cancel every open search before the server exits."""
        self.stopping = True
        for future in tuple(self.pool.open):
            future.cancel()

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"} | (self._load() if self.authorised(request.headers) else {}))

    def _load(self) -> dict[str, int]:
        active = self.pool.scheduler.active
        # A cancelled search is active for a moment longer.
        return {"active": active, "waiting": max(0, len(self.pool.open) - active)}

    async def models(self) -> Response:
        entry = {"id": self.model, "object": "model", "created": self.started, "owned_by": "mas-gym"}
        return _json({"object": "list", "data": [entry]})

    async def metrics(self) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        answers = {(str(status),): float(n) for status, n in sorted(self.answers.items())}
        yield family("counter", "requests", answers, ("status",))
        for name in ("agent_calls", "generated_tokens", "reward_calls", "cancelled_searches", "stopped_searches"):
            yield family("counter", name, {(): self.counts[name]})
        if self.pool.grades is not None:
            graded = {(verdict,): float(number) for verdict, number in self.pool.grades.counts.items()}
            yield family("counter", "graded_answers", graded, ("verdict",))
        for name, value in self._load().items():
            yield family("gauge", f"{name}_searches", {(): value})

    async def chat(self, request: Request) -> Response:
        asked = parse_chat(await self._body(request), self.model)
        check_question(asked.question, self._max_question)
        running = self._submit(asked, read_limits(request.headers.get("x-mas-budget")))
        if asked.stream:
            stream = self._stream(asked, running)
            # The client may leave before the stream begins.
            weakref.finalize(stream, running.future.cancel)
            return StreamingResponse(stream, media_type="text/event-stream")
        plan = await self._whole(request, running)
        self._count(plan)
        return _json(completion_document(plan, asked, self.model, self._read))

    def _submit(self, asked: ChatRequest, limits: Budget | None) -> Asked:
        setup = self.pool.setup
        seed = setup.seed if asked.seed is None else asked.seed
        running = self.pool.submit(asked.question, seed, asked.sampling(setup.sampling), limits)
        # This comes last, because the signal may come at any time.
        if self.stopping:
            running.future.cancel()
            raise _stopping()
        return running

    def authorised(self, headers: Headers) -> bool:
        """Return whether a request has the key or no key is required."""
        sent = headers.get("authorization", "").encode("utf-8", "replace")
        key = self.service.key
        return key is None or hmac.compare_digest(sent, f"Bearer {key}".encode())

    async def _body(self, request: Request) -> bytes:
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.service.max_body:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > self.service.max_body:
                        raise self._too_large()
        except TimeoutError:
            raise ApiError(408, f"expected the body within {BODY_SECONDS:g} seconds") from None
        except ClientDisconnect:
            raise ApiError(499, "the client closed the connection") from None
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"expected a body of at most {self.service.max_body:,} bytes; shorten the question")

    async def _whole(self, request: Request, running: Asked) -> Plan:
        """Wait for the plan or for the client to disconnect."""
        search = asyncio.ensure_future(self._plan(running))
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((search, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not search.done():
                self.counts["cancelled_searches"] += 1
                raise ApiError(499, "the client closed the connection")
            return search.result()
        finally:
            running.future.cancel()
            leaving.cancel()
            await asyncio.gather(search, leaving, return_exceptions=True)

    async def _plan(self, running: Asked) -> Plan:
        try:
            plan = (await asyncio.wrap_future(running.future)).plan
        except EngineUnavailableError as error:
            raise ApiError(503, f"the engine is not available: {error}", retry_after=10) from error
        except asyncio.CancelledError:
            if self.stopping:
                raise _stopping() from None
            raise
        if plan.error is None:
            self._check_program(plan)
            return plan
        if self.stopping:
            raise _stopping()
        if plan.error.startswith(BudgetError.__name__):
            raise ApiError(504, f"no answer within the budget: {plan.error.partition(': ')[2]}", kind="server_error")
        if plan.error.startswith(PromptTooLongError.__name__):
            raise ApiError(400, f"the question is too long: {plan.error.partition(': ')[2]}", code=TOO_LONG)
        raise ApiError(500, f"the search failed: {plan.error}", kind="server_error")

    def _check_program(self, plan: Plan) -> None:
        """Raise `ApiError` if the best run of an agent program returned no answer."""
        best = plan.best
        if best is not None and self.pool.setup.source is not None:
            _, failed, error = best.text.rpartition(FAILED)
            if failed and not self._read(best.text):
                raise ApiError(500, f"the program failed: {error}", kind="server_error")

    async def _stream(self, asked: ChatRequest, running: Asked) -> AsyncIterator[str]:
        """Yield progress during the search, then the answer; the search ends when the client disconnects."""
        ident, search = f"chatcmpl-{uuid.uuid4().hex}", asyncio.ensure_future(self._plan(running))
        finished, sent = False, time.monotonic()
        shown: object = None
        try:
            yield sse(chunk(ident, self.model, {"role": "assistant", "content": ""}))
            while not finished:
                # With slow readers or fast searches, send fewer lines instead of growing a queue.
                await asyncio.wait((search,), timeout=_PROGRESS_SECONDS)
                finished, step = search.done(), running.step
                if step is not None and step is not shown:
                    shown, sent = step, time.monotonic()
                    agent, usage = step
                    line = f"{agent}: {usage.agent_calls} agent calls, {usage.generated_tokens} tokens\n"
                    yield sse(chunk(ident, self.model, {"reasoning_content": line}))
                elif time.monotonic() - sent > _KEEP_ALIVE_SECONDS:
                    sent = time.monotonic()
                    yield ": still searching\n\n"
            try:
                plan = search.result()
            except ApiError as error:
                self.answers[error.status] += 1
                yield sse(error.body())
                return
            self._count(plan)
            for index, candidate in enumerate(plan.candidates[: asked.n]):
                yield sse(chunk(ident, self.model, {"content": self._read(candidate.text)}, index))
                yield sse(chunk(ident, self.model, {}, index, finish_reason="stop"))
            if asked.wants_usage:
                yield sse(chunk(ident, self.model, None) | {"choices": [], "usage": usage_document(plan)})
            yield "data: [DONE]\n\n"
        finally:
            if not finished:
                self.counts["cancelled_searches"] += 1
            search.cancel()

    def _count(self, plan: Plan) -> None:
        self.answers[200] += 1
        self.counts["agent_calls"] += plan.usage.agent_calls
        self.counts["generated_tokens"] += plan.usage.generated_tokens
        self.counts["reward_calls"] += plan.usage.reward_calls
        self.counts["stopped_searches"] += plan.stopped is not None

    async def refused(self, request: Request, error: Exception) -> Response:
        """Answer a request that raised `ApiError`."""
        assert isinstance(error, ApiError)
        return self.reply(error)

    def reply(self, error: ApiError) -> Response:
        """Count a rejected request and return the error response."""
        self.answers[error.status] += 1
        headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        return _json(error.body(), error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path or method."""
    assert isinstance(error, HTTPException)
    refusal = ApiError(error.status_code, f"{request.method} {request.url.path[:100]}: {error.detail}")
    return _json(refusal.body(), refusal.status, dict(error.headers or {}))


def _stopping() -> ApiError:
    return ApiError(503, "the service is stopping", kind="server_error", retry_after=10)


async def _left(request: Request) -> None:
    """Wait until the client closes the connection; the body has already been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # ASCII, so that a lone surrogate from a client cannot break the reply.
    return Response(json.dumps(content), status, headers, media_type="application/json")


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """A server that stops at the first signal: it cancels the open searches, sends their replies, and returns."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the signal handlers; unlike uvicorn, do not raise the signals again after serving."""
        for number in _SIGNALS:
            signal.signal(number, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; a second signal ends the process immediately, even while it waits for threads at exit."""
        if self.should_exit:
            os._exit(128 + sig)
        # uvicorn would log a traceback for every interrupted request.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
        self._app.state.stop()
        super().handle_exit(sig, frame)


def listen(app: FastAPI, host: str, port: int, limit: int) -> None:
    """Serve an app until SIGINT or SIGTERM. The signal handlers remain installed, so call this last in a process.

    Args:
        app: The service.
        host: Address to listen on.
        port: Port to listen on.
        limit: Maximum number of connections with a request; further ones get status 503. Connections without a request
            are closed to make room for others (`search.service.idle_connections`).
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        # Unlike other implementations, it limits the size of headers.
        http=IdleLimits,
        log_level="warning",
        limit_concurrency=limit,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=5,
    )
    _Server(config, app).run()
