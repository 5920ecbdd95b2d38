"""Agents behind any OpenAI-compatible server, over the official asynchronous client.

One HTTP call is made per sample, seeded with that sample's own seed, so a message
depends on its prompt and seed alone as far as the server allows; ``choices="n"``
asks for all samples of a prompt in one call instead, for servers that ignore seeds
and bill the prompt per call. Prompts are shortened from the oldest input when the
server says that they are too long.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
from dataclasses import replace
from typing import Any

from mas_gym.errors import EngineUnavailableError, MissingDependencyError, PolicyError
from mas_gym.policies.base import SamplingReply, SamplingRequest
from mas_gym.policies.loop import on_engine_loop
from mas_gym.policies.meter import Meter, Price
from mas_gym.policies.openai.connections import Connections
from mas_gym.policies.openai.faults import Fault, delay, fault_of
from mas_gym.policies.openai.options import OpenAIOptions, split_address
from mas_gym.policies.openai.wire import BadReply, WireReply, parse_reply, payload, reply_limit
from mas_gym.policies.registry import build, written_options

logger = logging.getLogger("mas_gym.policies")

_WRONG_COUNTS_BEFORE_SINGLES = 3
_EMPTIES_TO_BELIEVE = 2
_CUTS = 16
_CONNECT_SECONDS = 20.0
_CAP_TOO_HIGH = re.compile(r"max_(?:completion_)?tokens\b.*(?:greater than|too large|at most|exceed)", re.DOTALL)
_WINDOW = re.compile(r"context (?:length|window|size)\D{1,20}(\d{2,9})", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])\d{2,9}(?![\w.]*\d)")


class OpenAIPolicy:
    """An `AsyncPolicy` over an OpenAI-compatible server; safe to await from any event loop.

    Attributes:
        name: ``"openai:MODEL"``.
        max_concurrency: From the options.
        meter: Calls, tokens, faults and money so far.
        independent_samples: Whether each sample depends on its own seed alone, whatever it is asked for with.
        notes: What the server turned out not to offer, in words; empty at first.
    """

    def __init__(self, model: str, base_url: str | None = None, options: OpenAIOptions | None = None) -> None:
        """Point at a server; nothing is sent yet.

        Args:
            model: The model's name at the server.
            base_url: Such as ``http://127.0.0.1:8000/v1``; by default ``OPENAI_BASE_URL``, else the OpenAI service.
            options: How to call it.

        Raises:
            MissingDependencyError: Without the ``openai`` package.
        """
        try:
            import openai  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                "an openai: policy needs the openai package: pip install 'mas-gym[openai]'"
            ) from error
        self.options = options or OpenAIOptions()
        self.model = model
        self.base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        self.name = f"openai:{model}"
        self.independent_samples = self.options.choices == "seeds"
        self.max_concurrency = self.options.max_concurrency
        price = self.options.price
        self.meter = Meter(price if isinstance(price, Price) else None)
        self.notes: list[str] = []
        self._refused: set[str] = set()
        self._cap = 10**9
        self._connections = Connections(self._open)
        self._slots: asyncio.Semaphore | None = None
        self._hold_until = 0.0
        self._answered = float("-inf")
        self._down = False
        self._warned = False

    @property
    def fingerprint(self) -> str:
        """What distinguishes this policy's samples from another's, in a response cache."""
        chosen = self.options
        return f"{self.name}|{chosen.api}|{chosen.choices}|{sorted((chosen.extra_body or {}).items())!r}"

    @property
    def meters(self) -> dict[str, Meter]:
        """Its meter, by its name."""
        return {self.name: self.meter}

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Answer one request.

        Raises:
            PolicyError: When the server's faults outlast the retries, with the last fault's reason.
            EngineUnavailableError: When the server is gone, refuses the key or lacks the model.
        """
        return await on_engine_loop(self._answer(request))

    async def _answer(self, request: SamplingRequest) -> SamplingReply:
        if self.options.choices == "n" and len(request.seeds) > 1 and "n" not in self._refused:
            replies = await self._together(request)
        else:
            replies = await self._one_by_one(request)
        first, dropped = replies[0]
        samples = tuple(sample for reply, _ in replies for sample in reply.samples)
        return SamplingReply(samples, first.prompt_tokens, min(first.cached_tokens, first.prompt_tokens), dropped)

    async def _together(self, request: SamplingRequest) -> list[tuple[WireReply, int]]:
        try:
            return [await self._call(request, request.seeds)]
        except _NoManyChoicesError:
            self._refuse("n", "it sends one choice however many are asked for: samples are asked for one by one")
            return await self._one_by_one(request)

    async def _one_by_one(self, request: SamplingRequest) -> list[tuple[WireReply, int]]:
        calls = [asyncio.ensure_future(self._call(request, (seed,))) for seed in request.seeds]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _call(self, request: SamplingRequest, seeds: tuple[int, ...]) -> tuple[WireReply, int]:
        """Get one usable reply, whatever it takes within the options; and the tokens cut from the prompt for it."""
        loop = asyncio.get_running_loop()
        rng = random.Random(seeds[0])
        started, tries, faults, cuts, kept, empties = loop.time(), 0, 0, 0, 1.0, 0
        while True:
            tried_with = frozenset(self._refused)
            try:
                reply = await self._once(request, seeds)
            except Exception as error:
                fault = fault_of(error)
                if fault is None:
                    raise
            else:
                if all(sample.text for sample in reply.samples) or empties + 1 >= _EMPTIES_TO_BELIEVE:
                    return reply, self._dropped(reply, kept)
                # The model itself may have nothing to say; a server that twice says so is believed.
                empties += 1
                self.meter.faults["empty text"] += 1
                continue
            if fault.kind == "too long" and (room := _room(fault.reason)) < request.max_new_tokens:
                request = replace(request, max_new_tokens=room)
                continue
            if fault.kind == "too long" and cuts < _CUTS and len(request.messages[-1].content) > 1:
                request, share = _shortened(request, fault.reason)
                cuts, kept = cuts + 1, kept * share
                continue
            if self._lower_cap(fault, request) or self._adapt(fault, seeds, tried_with):
                continue
            tries, faults = tries + 1, faults + (not fault.away)
            self.meter.faults[fault.kind] += 1
            if len(seeds) > 1 and faults >= _WRONG_COUNTS_BEFORE_SINGLES and "1 came" in fault.reason:
                raise _NoManyChoicesError
            pause = self._pause(fault, tries, faults, started, rng)
            if fault.kind == "rate limit" and fault.retry_after:
                self._hold_until = max(self._hold_until, loop.time() + fault.retry_after)
            await asyncio.sleep(pause)

    def _dropped(self, reply: WireReply, kept: float) -> int:
        """Estimate the tokens cut from a prompt by the share of its characters that was kept."""
        dropped = round(reply.prompt_tokens * (1 / kept - 1))
        if dropped and not self._warned:
            self._warned = True
            hint = "each reply estimates its own in dropped_tokens"
            logger.warning(
                "%s: a prompt was too long and lost about %d of its oldest tokens; %s", self.name, dropped, hint
            )
        return dropped

    async def _once(self, request: SamplingRequest, seeds: tuple[int, ...]) -> WireReply:
        loop = asyncio.get_running_loop()
        slots = self._slots = self._slots or asyncio.Semaphore(self.max_concurrency)
        body = self._body(request, seeds)
        want = "logprobs" in body
        api = self.options.api
        limit = reply_limit(request, len(seeds))
        async with slots:
            # A server's Retry-After holds every call, not only the one that was told.
            while (wait := self._hold_until - loop.time()) > 0:
                await asyncio.sleep(wait)
            with self._connections.one() as client:
                endpoint = client.chat.completions if api == "chat" else client.completions
                inputs: dict[str, Any] = {"messages": []} if api == "chat" else {"prompt": ""}
                raw = bytearray()
                async with (
                    asyncio.timeout(self.options.timeout),
                    endpoint.with_streaming_response.create(model=self.model, **inputs, extra_body=body) as response,
                ):
                    async for chunk in response.iter_bytes():
                        raw += chunk
                        if len(raw) > limit:
                            raise BadReply(f"it is larger than {limit:,} bytes")
        reply = parse_reply(bytes(raw), len(seeds), api, want)
        self.meter.add(reply.prompt_tokens, reply.cached_tokens, reply.generated_tokens)
        if any(not sample.text and sample.tokens == 0 for sample in reply.samples):
            raise BadReply("a message is empty")
        if want and any(sample.logprob is None for sample in reply.samples):
            self._refuse("logprobs", "it sends no log-probabilities: policy likelihood is not available")
        self.meter.calls += 1
        self._down, self._answered = False, loop.time()
        return reply

    def _body(self, request: SamplingRequest, seeds: tuple[int, ...]) -> dict[str, Any]:
        body = payload(request, seeds, self.model, self.options.api, self.options.logprobs)
        body["max_tokens"] = min(body["max_tokens"], self._cap)
        for name in self._refused & {"logprobs", "seed"}:
            body.pop(name, None)
        if "max_tokens" in self._refused:
            body["max_completion_tokens"] = body.pop("max_tokens")
        # The client walks through typed parameters at the cost of a quarter of the call, and takes these as they are.
        return body | dict(self.options.extra_body or {})

    def _lower_cap(self, fault: Fault, request: SamplingRequest) -> bool:
        """Ask for shorter messages if that is what the server objects to, and remember it."""
        cap = min(request.max_new_tokens, self._cap)
        lower = [number for found in _NUMBER.findall(fault.reason) if (number := int(found)) < cap]
        if fault.kind != "refused" or not _CAP_TOO_HIGH.search(fault.reason) or not lower:
            return False
        self._cap = max(lower)
        note = f"it allows messages of {self._cap} tokens at most, which caps the agents' own"
        self.notes = [*(kept for kept in self.notes if "tokens at most" not in kept), f"{self.name}: {note}"]
        return True

    def _adapt(self, fault: Fault, seeds: tuple[int, ...], tried_with: frozenset[str]) -> bool:
        """Leave out what the server refuses, if it is one of the things that can be left out."""
        if fault.kind != "refused" or fault.hopeless:
            return False
        words = {
            "logprobs": "it refuses log-probabilities: policy likelihood is not available",
            "seed": "it refuses seeds: samples cannot be repeated",
            "max_tokens": "it wants max_completion_tokens",
        }
        for name, note in words.items():
            named = fault.param == name or (not fault.param and name in fault.reason)
            if named and name not in tried_with and not (name == "logprobs" and not self.options.logprobs):
                self._refuse(name, note)
                return True
        if len(seeds) > 1 and (fault.param == "n" or re.search(r"\bn\b", fault.reason)):
            raise _NoManyChoicesError
        return False

    def _refuse(self, name: str, note: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            self.notes.append(f"{self.name}: {note}")
            logger.warning("%s: %s", self.name, note)

    def _pause(self, fault: Fault, tries: int, faults: int, started: float, rng: random.Random) -> float:
        """Return the seconds to wait before another try; raise when that makes no sense."""
        where = f"{self.name} at {self._shown_url()}"
        if fault.hopeless:
            raise EngineUnavailableError(f"{where} cannot be used: {fault.reason}. {self._remedy(fault.status)}")
        if fault.kind in ("refused", "too long"):
            raise PolicyError(f"{where} refused a request: {fault.reason}")
        now = asyncio.get_running_loop().time()
        # A server that takes calls and twice answered nobody in time is as good as gone.
        away = fault.away or (fault.kind == "timeout" and tries > 1 and self._answered < started)
        left = started + (0.0 if self._down else self.options.patience) - now
        if away and left <= (fault.retry_after or 0.0):
            said = f"{tries} tries in {now - started:.0f} s: {fault.reason}"
            if self._answered > started:
                raise PolicyError(f"{where} did not serve a request, {said}")
            self._down = True
            raise EngineUnavailableError(
                f"{where} does not answer, {said}. "
                "Start the server again and repeat the command; what a run with a store has finished is kept in it"
            )
        if faults >= self.options.max_attempts:
            raise PolicyError(f"{where} failed {faults} times for one request; the last time {fault.reason}")
        pause = delay(tries, fault.retry_after, rng)
        return min(pause, left) if away else pause

    def _remedy(self, status: int) -> str:
        if status == 404:
            return f"Expected a server that has the model {self.model!r}; its list is at {self._shown_url()}/models"
        return f"Set the API key in the environment variable {self.options.key_env}"

    def _shown_url(self) -> str:
        return re.sub(r"//[^/@]*@", "//", self.base_url or "the default OpenAI endpoint")

    def _open(self) -> Any:
        import openai

        return openai.AsyncOpenAI(
            # Servers without keys accept any, but the client insists on one.
            api_key=os.environ.get(self.options.key_env) or "none",
            base_url=self.base_url,
            max_retries=0,
            # A machine that is switched off refuses nothing: only the time tells that it is away.
            timeout=openai.Timeout(self.options.timeout, connect=min(_CONNECT_SECONDS, self.options.timeout / 2)),
        )


def load_openai(argument: str, **options: Any) -> OpenAIPolicy:
    """Load ``"MODEL@URL#option=value"`` for `mas_gym.policies.load_policy`; options are those of `OpenAIOptions`."""
    address, written = written_options(argument)
    model, url = split_address(address)
    return OpenAIPolicy(model, url, build("openai", OpenAIOptions, **{**written, **options}))


class _NoManyChoicesError(Exception):
    """The server gives one choice per call."""


def _room(reason: str) -> int:
    """Return how many tokens of the server's window are kept for a message: a quarter, as in models run here."""
    window = _WINDOW.search(reason)
    return max(int(window[1]) // 4, 1) if window else 10**9


def _shortened(request: SamplingRequest, reason: str) -> tuple[SamplingRequest, float]:
    """Return the request with the oldest part of its inputs cut, and the share of the prompt that was kept."""
    numbers = [int(found) for found in _NUMBER.findall(reason)]
    window, length = (min(numbers), max(numbers)) if len(numbers) >= 2 else (0, 0)
    share = min(max(0.8 * window / length, 0.1), 0.8) if length else 0.75
    last = request.messages[-1]
    total = sum(len(message.content) for message in request.messages)
    cut = min(max(int(total * (1 - share)), 1), len(last.content) - 1)
    # A number cut in the middle would be another number.
    word = re.search(r"\s\S", last.content[cut - 1 :])
    cut += word.start() if word else 0
    shorter = last._replace(content=last.content[cut:])
    return replace(request, messages=(*request.messages[:-1], shorter)), 1 - cut / total
