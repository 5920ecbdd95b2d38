"""An OpenAI-compatible HTTP service whose answers are found by search."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry

from mas_gym.errors import EngineUnavailableError
from mas_gym.service.pool import PoolFullError, SearchPool, Service, Ticket
from mas_gym.service.telemetry import Families, family, text_of
from mas_gym.service.wire import ApiError, ChatRequest, chunk, completion, parse_chat, sse, usage_of

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from search import Plan

_BODY_SECONDS = 30.0
_KEEP_ALIVE_SECONDS = 15.0
_PROGRESS_SECONDS = 0.1


def make_app(
    service: Service, *, model: str = "mas-gym", seed: int = 42, key: str | None = None, max_body: int = 2**20
) -> FastAPI:
    """Return the service as an ASGI app.

    Args:
        service: What answers.
        model: The name that clients ask for.
        seed: The seed of requests that bring none.
        key: What clients must send as bearer token; None for no key.
        max_body: Bytes that a request's body may have.
    """
    pool = SearchPool(service)
    front = _Front(pool, model, seed, key, max_body)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(pool.close)

    app = FastAPI(title="mas-gym", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.pool = pool
    app.add_api_route("/v1/chat/completions", front.chat, methods=["POST"])
    app.add_api_route("/v1/models", front.models, methods=["GET"])
    app.add_api_route("/health", front.health, methods=["GET"])
    app.add_api_route("/metrics", front.metrics, methods=["GET"])
    return app


class _Front:
    """The routes."""

    def __init__(self, pool: SearchPool, model: str, seed: int, key: str | None, max_body: int) -> None:
        self.pool, self.model, self.seed, self.key, self.max_body = pool, model, seed, key, max_body
        self.counts: Counter[str] = Counter()
        self.answers: Counter[int] = Counter()
        self.started = int(time.time())
        self._registry = CollectorRegistry()
        self._registry.register(Families(self._families))

    async def health(self) -> Response:
        return _json({"status": "ok", "active": self.pool.active, "waiting": self.pool.waiting})

    async def models(self, request: Request) -> Response:
        try:
            self._authorise(request)
        except ApiError as error:
            return self._refused(error)
        entry = {"id": self.model, "object": "model", "created": self.started, "owned_by": "mas-gym"}
        return _json({"object": "list", "data": [entry]})

    async def metrics(self) -> Response:
        return Response(text_of(self._registry), media_type="text/plain; version=0.0.4")

    def _families(self) -> Iterator[Metric]:
        answers = {(str(status),): float(n) for status, n in sorted(self.answers.items())}
        yield family("counter", "requests", answers, ("status",))
        for name in ("agent_calls", "generated_tokens", "reward_calls", "cancelled_searches"):
            yield family("counter", name, {(): self.counts[name]})
        for name, value in (("active", self.pool.active), ("waiting", self.pool.waiting)):
            yield family("gauge", f"{name}_searches", {(): value})

    async def chat(self, request: Request) -> Response:
        try:
            self._authorise(request)
            asked = parse_chat(await self._body(request), self.model)
            changed = asyncio.Event()
            loop = asyncio.get_running_loop()

            def tell() -> None:
                # The loop is gone when the server stops while a search still speaks.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(changed.set)

            seed = self.seed if asked.seed is None else asked.seed
            ticket = self.pool.submit(asked.question, seed, asked.sampling(), tell)
            if asked.stream:
                return StreamingResponse(self._stream(asked, ticket, changed), media_type="text/event-stream")
            plan = await self._whole(request, ticket)
        except PoolFullError:
            return self._refused(ApiError(429, "too many searches are waiting; try again later", retry_after=1))
        except ApiError as error:
            return self._refused(error)
        self._count(plan, 200)
        return _json(completion(plan, asked, self.model))

    def _authorise(self, request: Request) -> None:
        if self.key is None:
            return
        sent = request.headers.get("authorization", "")
        if not hmac.compare_digest(sent.encode("utf-8", "replace"), f"Bearer {self.key}".encode()):
            raise ApiError(401, "expected this service's API key as a bearer token", kind="authentication_error")

    async def _body(self, request: Request) -> bytes:
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > self.max_body:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > self.max_body:
                        raise self._too_large()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS:.0f} seconds") from None
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"a body may have {self.max_body:,} bytes; shorten the question")

    async def _whole(self, request: Request, ticket: Ticket) -> Plan:
        """Wait for the plan, or for the client to leave."""
        search = asyncio.ensure_future(self._plan(ticket))
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((search, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not search.done():
                self.counts["cancelled_searches"] += 1
                raise ApiError(499, "the client left")
            return search.result()
        finally:
            ticket.cancel()
            leaving.cancel()
            await asyncio.gather(search, leaving, return_exceptions=True)

    async def _plan(self, ticket: Ticket) -> Plan:
        try:
            plan = await ticket.plan()
        except EngineUnavailableError as error:
            raise ApiError(503, f"the engine is not available: {error}", retry_after=10) from error
        if plan.error is not None:
            raise ApiError(500, f"the search failed: {plan.error}", kind="server_error")
        return plan

    async def _stream(self, asked: ChatRequest, ticket: Ticket, changed: asyncio.Event) -> AsyncIterator[str]:
        """Yield progress while the search works, then the answer; a client that leaves ends the search."""
        ident, search = _ident(), asyncio.ensure_future(self._plan(ticket))
        finished = False
        try:
            yield sse(chunk(ident, self.model, {"role": "assistant", "content": ""}))
            while not search.done():
                telling = asyncio.ensure_future(changed.wait())
                try:
                    either = asyncio.FIRST_COMPLETED
                    await asyncio.wait((search, telling), timeout=_KEEP_ALIVE_SECONDS, return_when=either)
                finally:
                    telling.cancel()
                if search.done():
                    break
                step = ticket.step
                if not changed.is_set() or step is None:
                    yield ": still searching\n\n"
                    continue
                changed.clear()
                line = f"{step.agent}: {step.agent_calls} agent calls, {step.generated_tokens} tokens\n"
                yield sse(chunk(ident, self.model, {"reasoning_content": line}))
                # A slow reader, or a fast search, gets fewer lines, not a longer queue.
                await asyncio.wait((search,), timeout=_PROGRESS_SECONDS)
            finished = True
            try:
                plan = search.result()
            except ApiError as error:
                self.answers[error.status] += 1
                yield sse(error.body())
                return
            self._count(plan, 200)
            for index, candidate in enumerate(plan.candidates[: asked.n]):
                yield sse(chunk(ident, self.model, {"content": candidate.text}, index))
                yield sse(chunk(ident, self.model, {}, index, finish_reason="stop"))
            if asked.wants_usage:
                yield sse(chunk(ident, self.model, None) | {"choices": [], "usage": usage_of(plan)})
            yield "data: [DONE]\n\n"
        finally:
            if not finished:
                self.counts["cancelled_searches"] += 1
            ticket.cancel()
            search.cancel()

    def _count(self, plan: Plan, status: int) -> None:
        self.answers[status] += 1
        self.counts["agent_calls"] += plan.usage.agent_calls
        self.counts["generated_tokens"] += plan.usage.generated_tokens
        self.counts["reward_calls"] += plan.usage.reward_calls

    def _refused(self, error: ApiError) -> Response:
        self.answers[error.status] += 1
        headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        return _json(error.body(), error.status, headers)


async def _left(request: Request) -> None:
    """Return when the client has gone; the body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _ident() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # ASCII, so that a lone surrogate that a client sent cannot break the answer.
    return Response(json.dumps(content), status, headers, media_type="application/json")
