"""`as_policy`: policies of every kind behind the one interface of the library, `AsyncPolicy`.

A policy that processes batches gets a queue per event loop. The queue waits until the callers on its loop have made
their requests, and passes them to the policy together. Requests that arrive during a batch join it (`StreamingPolicy`)
or form the next one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from mas_gym.errors import ConfigError, EngineUnavailableError, PolicyError
from mas_gym.internal.adapter import Adapter, describe_type, has_method, wrapped_part
from mas_gym.internal.event_loop import BATCH_TURNS, Threads, from_thread, on_engine_thread, outside_loop, settle
from mas_gym.policies.base import (
    AsyncPolicy,
    Choice,
    Policy,
    PolicyBase,
    SamplingReply,
    SamplingRequest,
    SamplingSession,
)
from mas_gym.systems.prompts import ChatMessage

T = TypeVar("T")
R = TypeVar("R")

_QUEUE_FACTOR = 4

Choosing = tuple[Sequence[ChatMessage], tuple[str, ...]]
"""A prompt, and the words of which one begins the reply."""


_locks: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()
_new_lock = threading.Lock()


def _lock_of(part: object) -> threading.Lock:
    """Return the lock of a batch policy, which is not thread-safe; all its wrappers share one lock."""
    with _new_lock:
        return _locks.setdefault(id(part), threading.Lock())


def as_policy(part: object) -> AsyncPolicy:
    """Return an asynchronous policy unchanged, and wrap any other policy.

    An object with ``sample_async`` or ``sample`` is a policy; missing attributes get the defaults of the base classes.

    Raises:
        ConfigError: The object has neither method.
    """
    if isinstance(part, AsyncPolicy):
        return part
    if has_method(part, "sample_async"):
        return _AdaptedAsyncPolicy(part, AsyncPolicy)
    if has_method(part, "sample"):
        return BatchedPolicy(part)
    raise ConfigError(
        f"expected a policy with sample(requests) or sample_async(request), got {describe_type(part)}; make one with "
        "mas_gym.policies.load_policy('tiny'), or derive from mas_gym.policies.Policy"
    )


def sample_all(policy: AsyncPolicy, requests: Sequence[SamplingRequest]) -> list[SamplingReply | Exception]:
    """Return the reply to every request, or its error; for callers without an event loop."""

    async def replies() -> list[SamplingReply | Exception]:
        slots = asyncio.Semaphore(max(1, policy.max_concurrency))

        async def one(request: SamplingRequest) -> SamplingReply | Exception:
            async with slots:
                try:
                    return await policy.sample_async(request)
                except Exception as error:
                    return error

        return list(await asyncio.gather(*map(one, requests)))

    return from_thread(replies())


class _Adapted(Adapter, AsyncPolicy):
    """An asynchronous policy made from an object that may define only a policy's methods."""

    def __init__(self, part: object, base: type[PolicyBase]) -> None:
        self.chooses = has_method(part, "choose") or has_method(part, "choose_async")
        super().__init__(part, base)

    def serving(self, agent: str) -> PolicyBase:
        inner = wrapped_part(self.identical_to)
        return self if inner is self.identical_to else as_policy(inner).serving(agent)

    def tags(self, agent: str) -> tuple[str, ...]:
        inner = wrapped_part(self.identical_to)
        return () if inner is self.identical_to else as_policy(inner).tags(agent)


class _AdaptedAsyncPolicy(_Adapted):
    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        reply: SamplingReply = await self.identical_to.sample_async(request)
        return reply

    async def choose_async(self, messages: Sequence[ChatMessage], words: Sequence[str]) -> Choice:
        found: Choice = await self.identical_to.choose_async(messages, words)
        return found


class BatchedPolicy(_Adapted):
    """A batch policy as an asynchronous one with the same replies; see `as_policy`.

    Batches run one at a time, on the thread of the event loop that awaits them. On the loop of the process's engine
    clients, which must not be blocked, they run on another thread.

    Attributes:
        max_batch: As for the batch policy.
        local_batch: The same.
        identical_to: The batch policy; its other attributes are available as attributes of this object.
    """

    max_batch: int = Policy.max_batch

    def __init__(self, part: Any) -> None:
        """Wrap an object with ``sample(requests)`` and, for a `StreamingPolicy`, ``open()``."""
        super().__init__(part, Policy)
        self.local_batch, self.max_concurrency = self.max_batch, _QUEUE_FACTOR * self.max_batch
        self._lock = _lock_of(part)
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Return the reply to one request. Raises `mas_gym.errors.PolicyError`."""
        queue = self._queue()
        reply: SamplingReply = await queue.reply(queue.requests, request)
        return reply

    async def choose_async(self, messages: Sequence[ChatMessage], words: Sequence[str]) -> Choice:
        """Return the log-probability that the reply begins with each word. Raises `mas_gym.errors.PolicyError`."""
        queue = self._queue()
        choice: Choice = await queue.reply(queue.prompts, (messages, tuple(words)))
        return choice

    def _queue(self) -> _Queue:
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None:
            queue = self._queues[loop] = _Queue(self.identical_to, self.name, max(1, self.max_batch), self._lock)
        return queue


def _outcomes(call: Callable[[Sequence[T]], Sequence[R]], batch: Sequence[T], name: str) -> list[R | PolicyError]:
    """Return the reply to every item of a batch, or its error."""
    try:
        replies = list(call(batch))
    except EngineUnavailableError:
        raise
    except PolicyError as error:
        if len(batch) == 1:
            return [error]
        # The failing item is unknown, so each one is retried separately.
        return [outcome for item in batch for outcome in _outcomes(call, [item], name)]
    if len(replies) != len(batch):
        raise PolicyError(f"{name}: expected {len(batch)} replies, got {len(replies)}")
    return [*replies]


class _Queue:
    """The requests of one event loop to a batch policy.

    The session of a `StreamingPolicy` receives at most two batches of requests, one running and one queued; the rest
    can be cancelled.

    Attributes:
        requests: Sampling requests that wait, by the future of the reply.
        prompts: Prompts whose first words are chosen, with the words.
    """

    def __init__(self, policy: Any, name: str, max_batch: int, lock: threading.Lock) -> None:
        self._policy, self._name, self._max_batch, self._lock = policy, name, max_batch, lock
        self._streams = has_method(policy, "open")
        self.requests: OrderedDict[asyncio.Future[Any], SamplingRequest] = OrderedDict()
        self.prompts: OrderedDict[asyncio.Future[Any], Choosing] = OrderedDict()
        self._running: set[asyncio.Future[Any]] = set()
        self._session: SamplingSession | None = None
        self._busy = False
        self._threads: Threads | None = None

    async def reply(self, waiting: OrderedDict[asyncio.Future[Any], T], item: T) -> Any:
        """Return the outcome of an item that waits in ``requests`` or ``prompts``."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        waiting[future] = item
        if not self._busy:
            self._busy = True
            loop.call_soon(self._turn, loop, BATCH_TURNS)
        try:
            return await future
        finally:
            waiting.pop(future, None)
            self._running.discard(future)

    def _turn(self, loop: asyncio.AbstractEventLoop, turns: int) -> None:
        """Start a batch after some turns of the loop. Callbacks, unlike a task, may be left in a closed loop."""
        if turns:
            loop.call_soon(self._turn, loop, turns - 1)
        elif not (self.requests or self.prompts or self._running):
            self._busy = False
            self._drop_session()
            if self._threads is not None:
                self._threads.close()
                self._threads = None
        else:
            chosen, fresh = self._chosen(), self._fresh()
            self._running.update(chosen, fresh)
            work = partial(self._work, chosen, fresh)
            if on_engine_thread():
                self._threads = self._threads or Threads("mas-gym-policy")
                self._threads.start(work, lambda outcome: loop.call_soon_threadsafe(self._settle, loop, outcome))
                return
            try:
                outcome = outside_loop(work)
            except Exception as error:
                self._settle(loop, error)
            except BaseException:
                # An interrupt ends the callers, too.
                self._busy = False
                self._drop_session()
                raise
            else:
                self._settle(loop, outcome)

    def _chosen(self) -> dict[asyncio.Future[Any], Choosing]:
        """Take the waiting prompts that ask for the same words as the oldest one."""
        words = next((words for _, words in self.prompts.values()), ())
        chosen = {future: prompt for future, prompt in self.prompts.items() if prompt[1] == words}
        for future in chosen:
            del self.prompts[future]
        return chosen

    def _fresh(self) -> dict[asyncio.Future[Any], SamplingRequest]:
        """Take the oldest waiting requests: one batch, or those that the session has room for."""
        room = 2 * self._max_batch if self._streams else self._max_batch
        room -= 0 if self._session is None else self._session.pending
        fresh: dict[asyncio.Future[Any], SamplingRequest] = {}
        while self.requests and room > 0:
            future, request = next(iter(self.requests.items()))
            room -= len(request.seeds)
            if room < 0 and fresh and not self._streams:
                break
            fresh[future] = self.requests.pop(future)
        return fresh

    def _work(
        self, chosen: dict[asyncio.Future[Any], Choosing], fresh: dict[asyncio.Future[Any], SamplingRequest]
    ) -> list[tuple[Any, Any]]:
        """Process a batch, or do one step of the session; return the futures with their outcomes."""
        done: list[tuple[Any, Any]] = []
        with self._lock:
            if chosen:
                words = next(iter(chosen.values()))[1]
                call = partial(self._policy.choose, words=words)
                prompts = [messages for messages, _ in chosen.values()]
                done += zip(chosen, _outcomes(call, prompts, self._name), strict=True)
            if fresh and not self._streams:
                done += zip(fresh, _outcomes(self._policy.sample, list(fresh.values()), self._name), strict=True)
            elif fresh and self._session is None:
                self._session = self._policy.open()
            if self._session is not None:
                for future, request in fresh.items():
                    self._session.submit(future, request)
                done += self._session.step()
        return done

    def _settle(self, loop: asyncio.AbstractEventLoop, outcome: list[tuple[Any, Any]] | Exception) -> None:
        """Deliver replies; after an error, every request of the session fails, and the next one opens another."""
        if isinstance(outcome, Exception):
            self._drop_session()
            outcome = [(future, outcome) for future in self._running]
        for future, reply in outcome:
            self._running.discard(future)
            settle(future, reply)
        # A step without replies makes no caller go on.
        loop.call_soon(self._turn, loop, BATCH_TURNS if outcome else 0)

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            # A failed engine may also fail to close.
            with suppress(Exception):
                session.close()
