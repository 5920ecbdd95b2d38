"""Adapters between policies and their callers: shapes, event loops, agents.

A batch policy becomes a session, any policy an asynchronous one, a function a policy, and several policies one that
has a policy per agent.

An HTTP pool or a vLLM engine belongs to the event loop that opened it, while each call of `search.run` may use a loop
of its own. Such engines therefore live on one daemon thread per process, started at first use; callers on any other
loop await them with `on_engine_loop`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from mas_gym.errors import ConfigError, EngineUnavailableError, PolicyError
from mas_gym.policies.base import (
    AsyncPolicy,
    Meter,
    Policy,
    Sample,
    SamplingReply,
    SamplingRequest,
    SamplingSession,
    StreamingPolicy,
    meters_of,
)
from mas_gym.validation import ANYONE


def open_session(policy: Policy) -> SamplingSession:
    """Return the policy's own session, or one that collects batches of up to ``policy.max_batch`` samples."""
    return policy.open() if isinstance(policy, StreamingPolicy) else BatchSession(policy)


class BatchSession:
    """A session over `Policy.sample` in which each step is one batch; see `mas_gym.policies.base.SamplingSession`."""

    def __init__(self, policy: Policy) -> None:
        """Start empty."""
        self._policy = policy
        self._waiting: deque[tuple[Hashable, SamplingRequest]] = deque()
        self.pending = 0

    def submit(self, key: Hashable, request: SamplingRequest) -> None:
        """Queue a request."""
        self._waiting.append((key, request))
        self.pending += len(request.seeds)

    def step(self) -> list[tuple[Hashable, SamplingReply | PolicyError]]:
        """Answer one batch of the oldest requests."""
        batch: list[tuple[Hashable, SamplingRequest]] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0][1].seeds) <= self._policy.max_batch):
            batch.append(self._waiting.popleft())
            size += len(batch[-1][1].seeds)
        self.pending -= size
        return self._answer(batch) if batch else []

    def _answer(
        self, batch: list[tuple[Hashable, SamplingRequest]]
    ) -> list[tuple[Hashable, SamplingReply | PolicyError]]:
        try:
            replies = list(self._policy.sample([request for _, request in batch]))
        except EngineUnavailableError:
            raise
        except PolicyError as error:
            if len(batch) == 1:
                return [(batch[0][0], error)]
            # The failing request is unknown, so each is retried alone.
            return [answer for item in batch for answer in self._answer([item])]
        if len(replies) != len(batch):
            raise PolicyError(f"{self._policy.name}: expected {len(batch)} replies, got {len(replies)}")
        return [(key, reply) for (key, _), reply in zip(batch, replies, strict=True)]

    def close(self) -> None:
        """Forget every open request."""
        self._waiting.clear()
        self.pending = 0


_QUEUE_FACTOR = 4


class _Waiting(NamedTuple):
    request: SamplingRequest
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[SamplingReply]

    def deliver(self, outcome: SamplingReply | BaseException) -> None:
        def settle() -> None:
            if self.future.done():
                return
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)

        # The caller's event loop may be closed.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(settle)


class _SessionPolicy:
    """A batch policy's session behind an inbox; a worker thread drives it and stops while it is idle."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.max_concurrency = policy.max_batch * _QUEUE_FACTOR
        self._policy = self.identical_to = policy
        self._inbox: deque[_Waiting] = deque()
        self._lock = threading.Lock()
        self._busy = False
        self._session: SamplingSession | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"mas-gym-{policy.name}")

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Answer one request. Raises `mas_gym.errors.PolicyError`."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop, loop.create_future())
        with self._lock:
            self._inbox.append(waiting)
            start, self._busy = not self._busy, True
        if start:
            # Start one loop iteration later, so that all requests of this iteration enter the batch together.
            loop.call_soon(self._worker.submit, self._work)
        return await waiting.future

    def _work(self) -> None:
        open_ones: dict[int, _Waiting] = {}
        submitted = 0
        while True:
            try:
                if self._session is None:
                    self._session = open_session(self._policy)
                session = self._session
                fresh = dict(enumerate(self._take(2 * self._policy.max_batch - session.pending), submitted))
                open_ones |= fresh
                submitted += len(fresh)
                for number, waiting in fresh.items():
                    session.submit(number, waiting.request)
                for key, outcome in session.step():
                    assert isinstance(key, int)
                    open_ones.pop(key).deliver(outcome)
            except BaseException as error:
                # The session's state is unknown: all its requests fail, and the next request opens a new session.
                failed, self._session = self._session, None
                # A session that has failed may fail to close, too.
                with contextlib.suppress(Exception):
                    if failed is not None:
                        failed.close()
                for waiting in open_ones.values():
                    waiting.deliver(error)
                open_ones.clear()
            with self._lock:
                if not self._inbox and not open_ones:
                    self._busy = False
                    return

    def _take(self, room: int) -> list[_Waiting]:
        """Take requests for up to ``room`` samples from the inbox, and discard cancelled ones."""
        taken: list[_Waiting] = []
        with self._lock:
            while self._inbox and room > 0:
                waiting = self._inbox.popleft()
                if not waiting.future.cancelled():
                    taken.append(waiting)
                    room -= len(waiting.request.seeds)
        return taken


def as_async(policy: Policy | AsyncPolicy) -> AsyncPolicy:
    """Return ``policy`` if it is asynchronous, else an asynchronous view of it with the same replies.

    Requests that arrive while the engine is busy join its batch (`StreamingPolicy`) or form its next one.
    """
    return policy if isinstance(policy, AsyncPolicy) else _SessionPolicy(policy)


def prompt_bound(policy: Policy | AsyncPolicy) -> int | None:
    """Return an upper bound on the UTF-8 bytes of a message that fits a policy's window; None if it states none."""
    bound: int | None = getattr(policy, "max_prompt_bytes", None)
    return bound


class PerAgentPolicy:
    """An `AsyncPolicy` that sends each request to its acting agent's policy.

    Attributes:
        name: Each agent with its policy's name.
        max_concurrency: The sum over the policies.
        policies: As passed in.
    """

    def __init__(self, policies: Mapping[str, Policy | AsyncPolicy]) -> None:
        """Route by agent name.

        Args:
            policies: Maps an agent's name, or ``"*"`` for all others, to its policy; agents may share one.

        Raises:
            ConfigError: The mapping is empty.
        """
        if not policies:
            raise ConfigError("expected a policy for at least one agent, got none; name agents, or '*' for all")
        self.policies = dict(policies)
        views = {id(policy): as_async(policy) for policy in self.policies.values()}
        self._routes = {agent: views[id(policy)] for agent, policy in self.policies.items()}
        self.name = ", ".join(f"{agent}={policy.name}" for agent, policy in self._routes.items())
        self.max_concurrency = sum(view.max_concurrency for view in views.values())

    def identity(self) -> dict[str, Policy | AsyncPolicy]:
        """Return the policy of each agent, stated by its own identity."""
        return self.policies

    @property
    def max_prompt_bytes(self) -> int | None:
        """The smallest bound of its policies on the bytes of a message that fits; None if none of them has one."""
        bounds = [bound for bound in map(prompt_bound, self.policies.values()) if bound is not None]
        return min(bounds, default=None)

    @property
    def meters(self) -> dict[str, Meter]:
        """The meters of its policies, each named after the first agent that uses it."""
        first: dict[int, str] = {}
        for agent, policy in self.policies.items():
            first.setdefault(id(policy), agent)
        own = ((agent, policy) for agent, policy in self.policies.items() if first[id(policy)] == agent)
        return {f"{agent}={name}": meter for agent, policy in own for name, meter in meters_of(policy).items()}

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Answer one request.

        Raises:
            PolicyError: The acting agent has no policy, or its policy cannot answer.
        """
        policy = self._routes.get(request.agent) or self._routes.get(ANYONE)
        if policy is None:
            known = ", ".join(self._routes)
            raise PolicyError(f"expected a policy for the agent {request.agent!r}, got policies for {known}; add '*'")
        return await policy.sample_async(request)


Script = Callable[[SamplingRequest, int], str | Sample]


class ScriptedPolicy:
    """Answers each sample by calling ``script(request, seed)``.

    If the script returns a string, each word counts as one token with log-probability -1.

    Args:
        script: A pure function, so that the same request gets the same reply.
        name: Name shown in reports.
        max_batch: As in `mas_gym.policies.Policy`.

    Examples:
        >>> from mas_gym.prompts import ChatMessage
        >>> policy = ScriptedPolicy(lambda request, seed: f"{request.agent} says {seed % 10}")
        >>> request = SamplingRequest((ChatMessage("user", "14 + 3?"),), seeds=(17, 18), agent="Solver")
        >>> [sample.text for sample in policy.sample([request])[0].samples]
        ['Solver says 7', 'Solver says 8']
    """

    def __init__(self, script: Script, name: str = "scripted", max_batch: int = 256) -> None:
        """Keep the script."""
        self.script, self.name, self.max_batch = script, name, max_batch

    def identity(self) -> dict[str, str | Script]:
        """Return the name and the script, which is stated by its source code and what that refers to."""
        return {"name": self.name, "script": self.script}

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
        """Answer every request, in order."""
        return [self._reply(request) for request in requests]

    def _reply(self, request: SamplingRequest) -> SamplingReply:
        prompt = sum(len(message.content.split()) for message in request.messages)
        return SamplingReply(tuple(_sample(self.script(request, seed)) for seed in request.seeds), prompt)


def _sample(said: str | Sample) -> Sample:
    if isinstance(said, Sample):
        return said
    tokens = max(1, len(said.split()))
    return Sample(said.strip(), tokens, -float(tokens), "stop")


T = TypeVar("T")

_SHUTDOWN_SECONDS = 20.0
_lock = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop, threading.Thread] | None = None
_closers: list[Callable[[], Awaitable[None]]] = []
_before: list[Callable[[], None]] = []


def engine_loop() -> asyncio.AbstractEventLoop:
    """Return the process's engine loop; the first call (and the first after a fork) starts its thread."""
    global _running
    with _lock:
        if _running is None or _running[0] != os.getpid():
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="mas-gym-engines", daemon=True)
            thread.start()
            _closers.clear()
            _running = (os.getpid(), loop, thread)
        return _running[1]


async def on_engine_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the engine loop and await it; cancelling the caller cancels the work."""
    loop = engine_loop()
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def close_at_exit(closer: Callable[[], Awaitable[None]]) -> None:
    """Await ``closer`` on the engine loop when the interpreter exits."""
    engine_loop()
    _closers.append(closer)
    # Exit handlers run in reverse order: re-registering makes this one run before those of the engines' libraries.
    atexit.unregister(_stop)
    atexit.register(_stop)


def before_engines_close(call: Callable[[], None]) -> None:
    """Call a function when the interpreter exits, before the engine loop ends."""
    _before.append(call)


def _stop() -> None:
    for call in _before:
        call()
    if _running is None or _running[0] != os.getpid():
        return
    _, loop, thread = _running

    async def close_all() -> None:
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.gather(*(closer() for closer in _closers), return_exceptions=True)

    try:
        asyncio.run_coroutine_threadsafe(close_all(), loop).result(_SHUTDOWN_SECONDS)
    except TimeoutError:
        return
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_SHUTDOWN_SECONDS)
    if not thread.is_alive():
        loop.close()


atexit.register(_stop)
