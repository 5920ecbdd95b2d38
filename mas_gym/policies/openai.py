"""Policies for OpenAI-compatible servers.

The official client determines the address and the headers, and its HTTP client sends the requests. Its typed calls are
not used, because they retry a fixed number of times.

Each sample is one HTTP call with the seed of that sample, so a message depends only on
its prompt and seed, as far as the server allows. ``choices="n"`` requests all samples of a
prompt in one call, for servers that ignore seeds and charge for the prompt per call. A parameter that the server
rejects and that a request can do without is left out of later requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

from mas_gym.errors import (
    ConfigError,
    EngineUnavailableError,
    PolicyError,
    is_number,
    need,
    shown,
    shown_url,
    whole_number,
)
from mas_gym.internal.event_loop import from_thread, on_engine_loop, together
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.internal.suggestions import choice
from mas_gym.plugins import build
from mas_gym.policies.base import AsyncPolicy, Choice, SamplingReply, SamplingRequest, log_sum, spellings
from mas_gym.policies.connections import Connections, read_body
from mas_gym.policies.folder_checks import check_model
from mas_gym.policies.openai_format import (
    Api,
    BadReply,
    WireReply,
    load_object,
    model_facts,
    parse_reply,
    payload,
    system_in_first,
)
from mas_gym.policies.prompt_length import reserved_tokens, too_long
from mas_gym.policies.reasoning import check_first_token
from mas_gym.policies.retries import StatusError, Tries, delay, fault_of
from mas_gym.policies.server_errors import Fault
from mas_gym.policies.usage_meters import Meter, Price
from mas_gym.systems.prompts import ChatMessage

if TYPE_CHECKING:
    from openai import DefaultAsyncHttpxClient

logger = logging.getLogger("mas_gym.policies")

# The maximum that OpenAI and vLLM allow, and the maximum of other servers.
_LISTED, _FEWER_LISTED = 20, 5
_CHANGES = 16
_FAULTS_TO_REPORT = 4
_CONNECT_SECONDS = 20.0
_NO_LIST = (400, 404, 405, 501)
_MOST_KEPT = 0.98
"""Largest share of a prompt that is kept at once, because characters only estimate tokens."""
_ENDPOINT = re.compile(r"/(?:chat/)?completions/*$")
_OMITTED = {
    "logprobs": "it rejects log-probabilities: policy likelihood is not available",
    "top_logprobs": "it lists no likely tokens: a judge uses mode=share",
    "return_token_ids": "it rejects return_token_ids: traces have log-probabilities but no token ids",
    "seed": "it rejects seeds: samples cannot be repeated",
    "temperature": "it rejects the temperature: messages are sampled at the server's own",
    "top_p": "it rejects top_p: messages are sampled with the server's own",
    "max_tokens": "it requires max_completion_tokens",
}
"""Parameters that a request can do without, and the consequence."""
_FOLDED = "it has no system role: system prompts are put in front of the first message"
_UNCOUNTED = "it reports no usage: TOK and costs are too low, and limits of tokens and USD fail"
_ESTIMATED = "it reports no usage: token counts are estimated with the tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIOptions:
    """Options for calling a server.

    Attributes:
        api: ``"chat"``, or ``"completions"`` for base models: system prompt and inputs joined by a blank line.
        logprobs: Whether to request log-probabilities, which policy likelihood needs.
        choices: ``"seeds"``: one call per sample with its own seed; ``"n"``: one call for all samples of a prompt.
        max_concurrency: HTTP calls open at once.
        timeout: Seconds for one call, including queueing at the server.
        patience: Seconds to keep retrying a request after its first fault, however often its calls fail.
        max_attempts: Number of replies that are unusable for the same reason before a request fails. A request that
            times out gets at least this many calls, even after ``patience``.
        key_env: Environment variable with the API key.
        price: Price per million prompt, cached and generated tokens.
        extra_body: Additional parameters of every call, such as ``{"top_k": -1}`` for vLLM; null leaves one out.
        revision: Version of the served weights, part of the identity; change it if the weights behind the name change.
        truncate: Whether to remove the oldest text of a prompt that exceeds the context window, in place of an error.
        tokenizer: Folder or hub id of the model's tokenizer, to estimate the tokens of replies without ``usage``.
    """

    api: Api = "chat"
    logprobs: bool = True
    choices: Literal["seeds", "n"] = "seeds"
    max_concurrency: int = 128
    timeout: float = 300.0
    patience: float = 120.0
    max_attempts: int = 6
    key_env: str = "OPENAI_API_KEY"
    price: Price | str | None = None
    extra_body: JSONMapping | None = None
    revision: str | None = None
    truncate: bool = False
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        """Check every value. Raises `ConfigError`."""
        if self.price is not None:
            object.__setattr__(self, "price", _price(self.price))
        choice("api", self.api, ("chat", "completions"))
        choice("choices", self.choices, ("seeds", "n"))
        choice("logprobs", self.logprobs, (True, False))
        choice("truncate", self.truncate, (True, False))
        whole_number("max_concurrency", self.max_concurrency, at_least=1)
        whole_number("max_attempts", self.max_attempts, at_least=1)
        for name, seconds in (("timeout", self.timeout), ("patience", self.patience)):
            if not is_number(seconds) or seconds <= 0:
                raise ConfigError(f"{name}: expected a positive number of seconds, got {shown(seconds)}")
        if self.extra_body is not None and not isinstance(self.extra_body, Mapping):
            raise ConfigError(f"extra_body: expected a mapping, got {shown(self.extra_body)}")
        if self.revision is not None:
            # In a policy string, YAML parses dates and numbers.
            object.__setattr__(self, "revision", str(self.revision))


def _price(value: Any) -> Price:
    if isinstance(value, Price):
        return value
    parts = value.split(",") if isinstance(value, str) else value
    try:
        return Price(*(float(part) for part in parts))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "price: expected prices per million tokens as prompt,cached,generated, such as 0.15,0.08,0.6, got "
            f"{shown(value)}"
        ) from error


class OpenAIPolicy(AsyncPolicy):
    """A policy on an OpenAI-compatible server; its calls can be awaited from any event loop.

    Attributes:
        name: ``"openai:MODEL"``.
        max_concurrency: From the options.
        meter: Calls, tokens, faults and cost so far.
        independent_samples: Whether each sample is a separate call, and therefore depends only on its own seed.
        notes: Descriptions of features found to be unsupported by the server; initially empty.
        takes_extra_body: Whether requests may have further fields such as tools; True for the chat endpoint.
    """

    def __init__(self, model: str, base_url: str | None = None, options: OpenAIOptions | None = None) -> None:
        """Configure the server; nothing is sent yet.

        Args:
            model: The model's name on the server.
            base_url: URL such as ``http://127.0.0.1:8000/v1``; by default ``OPENAI_BASE_URL``, else the OpenAI service.
            options: Options for calling the server.

        Raises:
            MissingDependencyError: The ``openai`` package is not installed.
            ConfigError: There is no API key for the OpenAI service.
        """
        need("openai", "an openai: policy", "openai")
        self.options = options or OpenAIOptions()
        self.model = model
        url = base_url or os.environ.get("OPENAI_BASE_URL") or ""
        check_address(url)
        self.base_url = _ENDPOINT.sub("", url.rstrip("/")) or None
        if self.base_url is None and not os.environ.get(self.options.key_env, "").strip():
            raise ConfigError(
                f"policy openai:{model}: expected the API key of the OpenAI service in the environment variable "
                f"{self.options.key_env}, which is not set; export {self.options.key_env}=..., or name your server, as "
                f"in openai:{model}@http://127.0.0.1:8000/v1"
            )
        self.name = f"openai:{model}"
        self.independent_samples = self.options.choices == "seeds"
        self.chooses = None if self.options.logprobs else False
        self.takes_extra_body = self.options.api == "chat"
        self.max_concurrency = self.options.max_concurrency
        price = self.options.price
        self.meter = Meter(price if isinstance(price, Price) else None)
        self.meters = {self.name: self.meter}
        self.notes: list[str] = []
        self._refused: set[str] = set()
        self._listed = _LISTED
        self._count = _counter(self.options.tokenizer)
        self._cap = 10**9
        self._connections = Connections(self._open)
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._hold_until = self._silent_until = 0.0
        self._answered = float("-inf")
        self._down = self._warned = False
        self._served: JSONObject | None = None
        self._describing = threading.Lock()

    def identity(self) -> dict[str, object]:
        """Return the model, its entry in the server's ``/v1/models``, and the options that affect samples.

        The address is not included, so the identity stays the same if only the address changes. The first call queries
        the server and blocks; do not call this method on the engine loop.

        Raises:
            PolicyError: The server does not respond.
        """
        with self._describing:
            if self._served is None:
                self._served = from_thread(self._describe())
        chosen = self.options
        return {
            "model": self.model,
            "served": self._served,
            "revision": chosen.revision,
            "api": chosen.api,
            "choices": chosen.choices,
            "logprobs": chosen.logprobs,
            "extra_body": dict(chosen.extra_body or {}),
            **({"truncate": True} if chosen.truncate else {}),
            **({"tokenizer": chosen.tokenizer} if chosen.tokenizer else {}),
        }

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Return the reply to one request.

        Raises:
            PromptTooLongError: The prompt does not fit the server's window, or cannot be shortened to fit it.
            PolicyError: The server rejects the request or the retries are exhausted; the message gives the reason.
            EngineUnavailableError: The server is down, rejects the key or does not have the model.
        """
        return await on_engine_loop(self._answer(request))

    async def choose_async(self, messages: Sequence[ChatMessage], words: Sequence[str]) -> Choice:
        """Return the log-probability that the reply begins with each word, from only the most likely first tokens.

        These are the 20 most likely tokens, or 5 on servers that allow no more. If the server lists no tokens, each
        log-probability is minus infinity.

        Raises:
            PolicyError: As for `sample_async`, or the model begins with reasoning.
        """
        request = SamplingRequest(tuple(messages), (0,), 1, 1.0, 1.0)
        reply, _ = await on_engine_loop(self._call(request, (0,), True))
        check_first_token(self.name, words, reply.likely)
        listed = dict(reply.first)
        known = ([listed[form] for form in spellings(word) if form in listed] for word in words)
        return Choice(tuple(log_sum(values) for values in known), reply.prompt_tokens, reply.generated_tokens)

    async def _answer(self, request: SamplingRequest) -> SamplingReply:
        groups = [request.seeds] if self.options.choices == "n" else [(seed,) for seed in request.seeds]
        replies = await together(self._call(request, seeds) for seeds in groups)
        samples = tuple(sample for reply, _ in replies for sample in reply.samples)
        counts = ((one.prompt_tokens, min(one.cached_tokens, one.prompt_tokens), lost) for one, lost in replies)
        return SamplingReply(samples, *map(sum, zip(*counts, strict=True)))

    async def _call(self, request: SamplingRequest, seeds: tuple[int, ...], top: bool = False) -> tuple[WireReply, int]:
        """Return a usable reply, after retries and adaptations if needed, and the prompt tokens that were cut."""
        tries = Tries(asyncio.get_running_loop().time(), random.Random(seeds[0]))
        changes, kept, empty = 0, 1.0, False
        while True:
            tried_with, listed = frozenset(self._refused), self._listed if top else 0
            try:
                reply = await self._once(request, seeds, top)
            except Exception as error:
                fault = fault_of(error)
                if fault is None:
                    raise
            else:
                said = all(sample.text or sample.finish_reason == "length" for sample in reply.samples)
                if top or said or empty:
                    return reply, self._dropped(reply, kept)
                # The model may generate an empty message: two in a row are accepted.
                empty = True
                self.meter.faults["empty text"] += 1
                continue
            if changes < _CHANGES:
                changes += 1
                if (fitted := self._fitted(request, fault)) is not None:
                    request, kept = fitted[0], kept * fitted[1]
                    continue
                if self._lower_cap(fault, request) or self._adapt(fault, tried_with, listed):
                    continue
                changes -= 1
            if fault.kind == "too long":
                raise self._too_long(request, fault)
            await self._wait(fault, tries)

    async def post(self, url: str, body: Mapping[str, object]) -> JSONObject:
        """Post JSON to an address of the server; return the JSON object in the reply.

        Raises:
            PolicyError: As for `sample_async`.
        """
        found = await on_engine_loop(self._json("POST", _without_login(url), body))
        assert found is not None
        return found

    async def _describe(self) -> JSONObject:
        """Return this model's fields in the server's model list; empty without a usable list."""

        def absent(fault: Fault) -> bool:
            return fault.status in _NO_LIST or fault.kind == "bad reply"

        listed = await self._json("GET", "models", absent=absent)
        return {} if listed is None else model_facts(listed, self.model)

    async def _json(
        self,
        method: str,
        url: str,
        body: JSONMapping | None = None,
        absent: Callable[[Fault], bool] = lambda fault: False,
    ) -> JSONObject | None:
        """Repeat a call until it returns a JSON object; return None after a fault for which ``absent`` is true."""
        tries = Tries(asyncio.get_running_loop().time(), random.Random(0))
        while True:
            try:
                reply = load_object(await self._exchange(method, url, body))
            except Exception as error:
                fault = fault_of(error)
                if fault is None:
                    raise
            else:
                self._down, self._answered = False, asyncio.get_running_loop().time()
                return reply
            if absent(fault):
                return None
            await self._wait(fault, tries)

    async def _wait(self, fault: Fault, tries: Tries) -> None:
        """Sleep before the next attempt; raise if no further attempt is allowed."""
        tries.add(fault, asyncio.get_running_loop().time())
        self.meter.faults[fault.kind] += 1
        pause = self._pause(fault, tries)
        stays = fault.away or (fault.transient and tries.made >= _FAULTS_TO_REPORT)
        if stays and (now := asyncio.get_running_loop().time()) > self._silent_until:
            self._silent_until, where = now + 60.0, f"{self.name} at {self._shown_url()}"
            logger.warning("%s: %s; retrying for up to %g s", where, fault.reason, self.options.patience)
        if fault.away and fault.retry_after:
            self._hold_until = max(self._hold_until, asyncio.get_running_loop().time() + fault.retry_after)
        await asyncio.sleep(pause)

    def _dropped(self, reply: WireReply, kept: float) -> int:
        """Estimate how many tokens were cut from a prompt, given the share of its characters that was kept."""
        dropped = round(reply.prompt_tokens * (1 / kept - 1))
        if dropped and not self._warned:
            self._warned = True
            hint = "dropped_tokens estimates them for each reply"
            logger.warning(
                "%s: a prompt was too long; about %d of its oldest tokens were dropped; %s", self.name, dropped, hint
            )
        return dropped

    async def _once(self, request: SamplingRequest, seeds: tuple[int, ...], top: bool) -> WireReply:
        body = self._body(request, seeds, top)
        want = "logprobs" in body
        api = self.options.api
        url = "chat/completions" if api == "chat" else "completions"
        raw = await self._exchange("POST", url, body)
        reply = parse_reply(raw, len(seeds), api, want, "tools" in body, request.traced, self._count)
        if not reply.counted and any(sample.text for sample in reply.samples):
            self._note(_UNCOUNTED if self._count is None else _ESTIMATED)
            if self._count is not None:
                self.meter.estimated = True
                prompt = self._count("\n\n".join(message.content for message in request.messages))
                reply = reply._replace(prompt_tokens=reply.prompt_tokens or prompt)
        self.meter.add(reply.prompt_tokens, reply.cached_tokens, reply.generated_tokens)
        if not reply.reasoned and any(not sample.text and sample.tokens == 0 for sample in reply.samples):
            raise BadReply("a message is empty")
        if reply.reasoned and not top:
            self._note("some replies are only reasoning, which is no message; raise --max-tokens")
        if want and any(sample.logprob is None for sample in reply.samples):
            self._refuse("logprobs", "it returns no log-probabilities: policy likelihood is not available")
        self.meter.calls += 1
        self._down, self._answered = False, asyncio.get_running_loop().time()
        return reply

    async def _exchange(self, method: str, url: str, body: JSONMapping | None) -> bytes:
        """Make one call as soon as a slot is free; return the body. Raises `StatusError`.

        Redirects are not followed: prompts and the API key are sent to the configured address only.
        """
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            # A forked child has another event loop.
            self._slots = loop, asyncio.Semaphore(self.max_concurrency)
        async with self._slots[1]:
            # A Retry-After delays every call, not only the one that received it.
            while (wait := self._hold_until - loop.time()) > 0:
                await asyncio.sleep(wait)
            with self._connections.one() as client:
                async with asyncio.timeout(self.options.timeout):
                    async with client.stream(method, url, json=body, follow_redirects=False) as response:
                        content = await read_body(response.aiter_bytes())
        if not response.is_success:
            raise StatusError(response.status_code, response.headers, content)
        return content

    def _body(self, request: SamplingRequest, seeds: tuple[int, ...], top: bool) -> JSONObject:
        listed = self._listed if top and "top_logprobs" not in self._refused else 0
        body = payload(request, seeds, self.model, self.options.api, self.options.logprobs, listed)
        body["max_tokens"] = min(body["max_tokens"], self._cap)
        for name in self._refused & _OMITTED.keys() - {"max_tokens"}:
            body.pop(name, None)
        if "logprobs" in self._refused:
            body.pop("top_logprobs", None)
        if "max_tokens" in self._refused:
            body["max_completion_tokens"] = body.pop("max_tokens")
        if "system" in self._refused and "messages" in body:
            body["messages"] = system_in_first(body["messages"])
        body |= dict(self.options.extra_body or {})
        return {name: value for name, value in body.items() if value is not None}

    def _fitted(self, request: SamplingRequest, fault: Fault) -> tuple[SamplingRequest, float] | None:
        """Return a request that fits the window, and the kept share of its prompt; None if there is none."""
        window, prompt = fault.window, fault.prompt
        if fault.kind != "too long":
            return None
        cap = min(request.max_new_tokens, self._cap)
        reserved = cap if window is None else reserved_tokens(window, cap)
        # The reply's limit may be the reason, rather than the prompt.
        room = reserved if window is None or prompt is None else min(cap, window - prompt)
        if reserved <= room < cap:
            return replace(request, max_new_tokens=room), 1.0
        if not self.options.truncate or len(request.messages[-1].content) <= 1:
            return None
        return _shortened(request, 0.75 if window is None or prompt is None else (window - reserved) / prompt)

    def _too_long(self, request: SamplingRequest, fault: Fault) -> PolicyError:
        reserved = 0 if fault.window is None else reserved_tokens(fault.window, min(request.max_new_tokens, self._cap))
        return too_long(f"{self.name} at {self._shown_url()}", fault.prompt, fault.window, reserved, fault.reason)

    def _lower_cap(self, fault: Fault, request: SamplingRequest) -> bool:
        """Lower the token limit of this and later requests if the server rejects it as too high."""
        # A concurrent request may have lowered the limit after this one was sent.
        if fault.kind != "token limit" or fault.limit is None or fault.limit >= request.max_new_tokens:
            return False
        self._cap = min(self._cap, fault.limit)
        note = f"it limits messages to {self._cap} tokens, below the agents' max_new_tokens"
        self.notes = [*(kept for kept in self.notes if "limits messages" not in kept), f"{self.name}: {note}"]
        return True

    def _adapt(self, fault: Fault, tried_with: frozenset[str], listed: int) -> bool:
        """Leave out the rejected parameters if a request can do without one of them."""
        if fault.kind == "system role" and "system" not in tried_with:
            self._refuse("system", _FOLDED)
            return True
        if fault.kind != "parameter":
            return False
        if listed > _FEWER_LISTED and {"top_logprobs", "logprobs"} & {*fault.params}:
            self._listed = _FEWER_LISTED
            return True
        for name in fault.params:
            if name in _OMITTED and name not in tried_with and not (name == "logprobs" and not self.options.logprobs):
                self._refuse(name, _OMITTED[name])
                return True
        return False

    def _refuse(self, name: str, note: str) -> None:
        self._refused.add(name)
        self._note(note)

    def _note(self, note: str) -> None:
        """Report a limit of the server, once."""
        if (line := f"{self.name}: {note}") not in self.notes:
            self.notes.append(line)
            logger.warning("%s", line)

    def _pause(self, fault: Fault, tries: Tries) -> float:
        """Return the seconds to wait before the next attempt; raise if no further attempt is allowed."""
        where = f"{self.name} at {self._shown_url()}"
        if fault.hopeless:
            reason = fault.reason.rstrip(".")
            raise EngineUnavailableError(f"{where} cannot be used: {reason}. {self._remedy(fault)}")
        if not fault.transient and fault.kind != "bad reply":
            raise PolicyError(
                f"{where} rejected a request: {fault.reason}; leave a rejected parameter out with "
                "extra_body={NAME: null}, log-probabilities with logprobs=false, and n with choices=seeds"
            )
        now = asyncio.get_running_loop().time()
        # A server that accepts calls counts as down if it timed out twice and completed no other call meanwhile.
        away = fault.away or (fault.kind == "timeout" and tries.made > 1 and self._answered < tries.started)
        left = tries.first + (0.0 if away and self._down else self.options.patience) - now
        wait = fault.retry_after or 0.0
        if tries.repeated(fault) >= self.options.max_attempts:
            raise PolicyError(f"{where} failed {tries.repeats} times for one request; the last error: {fault.reason}")
        # A call that times out, or has an unusable reply, may exceed the patience.
        slow = not away and fault.kind in ("timeout", "bad reply") and tries.made < self.options.max_attempts
        if left <= wait and not slow:
            said = f"{tries.made} tries in {now - tries.started:.0f} s: {fault.reason}"
            if wait:
                said += f"; it requests a wait of {wait:.6g} s, and patience is {self.options.patience:g} s"
            if not away or self._answered > tries.started:
                raise PolicyError(f"{where} did not serve a request after {said}; raise patience or check the server")
            self._down = True
            raise EngineUnavailableError(
                f"{where} did not respond after {said}. "
                "Start the server again and repeat the command; a run with a store keeps its finished searches"
            )
        pause = delay(tries.made, fault.retry_after, tries.rng)
        return pause if slow else min(pause, left)

    def _remedy(self, fault: Fault) -> str:
        status = fault.status
        if fault.kind == "quota":
            return f"Add credit to the account of the key in {self.options.key_env}, or use another key"
        if status in (404, 405) and self.base_url and not re.search(r"/v\d", self.base_url):
            return f"Expected the base URL of the API, which usually ends in /v1, as in {self._shown_url()}/v1"
        if status in (404, 405):
            return (
                f"Expected a server with the model {self.model!r}; its models are listed at {self._shown_url()}/models"
            )
        if 300 <= status < 400:
            return "Redirects are not followed; use the address of the redirect"
        return f"Set the API key in the environment variable {self.options.key_env}"

    def _shown_url(self) -> str:
        return shown_url(self.base_url or "the default OpenAI endpoint")

    def _open(self) -> DefaultAsyncHttpxClient:
        import openai

        key = os.environ.get(self.options.key_env, "").strip()
        if not key.isascii() or not key.isprintable():
            raise ConfigError(
                f"environment variable {self.options.key_env}: expected an API key of printable ASCII characters"
            )
        # An unreachable machine does not refuse connections, so only a time limit detects it.
        limits = openai.Timeout(self.options.timeout, connect=min(_CONNECT_SECONDS, self.options.timeout / 2))
        # The client logs the address of each request, so a password in it is sent by other means.
        parts = urlsplit(self.base_url or "")
        login = None if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))
        http = openai.DefaultAsyncHttpxClient(timeout=limits, auth=login)
        # Servers without keys accept any key, but the client requires one.
        official = openai.AsyncOpenAI(
            api_key=key or "none", base_url=_without_login(self.base_url or "") or None, http_client=http
        )
        http.base_url = official.base_url
        headers = {name: value for name, value in official.default_headers.items() if isinstance(value, str)}
        http.headers.update({**headers, "Authorization": f"Bearer {official.api_key}"})
        return http


def load_openai(argument: str, **options: object) -> OpenAIPolicy:
    """Load ``"MODEL@URL"`` for `mas_gym.policies.load_policy`; options are those of `OpenAIOptions`."""
    model, url = split_address(argument)
    return OpenAIPolicy(model, url, build("policy 'openai'", OpenAIOptions, **options))


def load_ollama(argument: str, **options: object) -> OpenAIPolicy:
    """Load ``"NAME"``, a model that Ollama serves on this machine; options are those of `OpenAIOptions`."""
    return load_openai(f"{argument}@http://127.0.0.1:11434/v1", **options)


def load_lmstudio(argument: str, **options: object) -> OpenAIPolicy:
    """Load ``"NAME"``, a model that LM Studio serves on this machine; options are those of `OpenAIOptions`."""
    return load_openai(f"{argument}@http://127.0.0.1:1234/v1", **options)


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def check_address(url: str) -> None:
    """Check the port of an address, and that it has no spaces and no query.

    Raises:
        ConfigError: The port is no number, for example because a ``/`` in a password is not written as ``%2F``; or the
            address has a space or a control character, or a query, which is not sent.
    """
    if not url.isprintable() or " " in url:
        raise ConfigError("expected an address without spaces and control characters; write them as %20 and so on")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ConfigError(
            f"{shown_url(url)}: expected http://HOST:PORT/PATH; write special characters in a password as %2F and so on"
        ) from None
    if parts.query or parts.fragment:
        raise ConfigError(
            f"{shown_url(url)}: expected an address without a query, which would not be sent; set the API key in an "
            "environment variable (option key_env), and further parameters with extra_body"
        )


def _counter(tokenizer: str | None) -> Callable[[str], int] | None:
    """Return a function that counts the tokens of a text; None without a tokenizer."""
    if tokenizer is None:
        return None
    need("transformers", "tokenizer= of an openai: policy", "local")
    from transformers import AutoTokenizer

    check_model(tokenizer)
    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer: expected a tokenizer's folder or hub id, got {tokenizer!r}: {error}") from error
    return lambda text: len(loaded(text, add_special_tokens=False)["input_ids"])


def _shortened(request: SamplingRequest, share: float) -> tuple[SamplingRequest, float]:
    """Return the request without the oldest part of its input, to keep about a share of it, and the exact share."""
    last = request.messages[-1]
    total = sum(len(message.content) for message in request.messages)
    cut = min(max(math.ceil(total * (1 - min(share, _MOST_KEPT))), 1), len(last.content) - 1)
    # A truncated number would be a different number.
    word = re.search(r"\s\S", last.content[cut - 1 :])
    cut += word.start() if word else 0
    shorter = last._replace(content=last.content[cut:])
    return replace(request, messages=(*request.messages[:-1], shorter)), 1 - cut / total


def split_address(argument: str) -> tuple[str, str | None]:
    """Split ``MODEL`` or ``MODEL@URL``; the model's name may contain an ``@``.

    Raises:
        ConfigError: The model's name is missing, or the address has no ``http://`` or ``https://``.
    """
    found = re.fullmatch(r"(.*?)@(https?://.*)", argument, re.DOTALL | re.IGNORECASE)
    model, url = (found[1], _ENDPOINT.sub("", found[2].rstrip("/"))) if found else (argument, None)
    if not model:
        raise ConfigError(f"expected openai:MODEL@URL, got openai:{argument}; name the model before the @")
    if url is None and (bare := re.search(r"@((?:localhost|[\w.-]+:\d+)(?:/\S*)?)$", argument)):
        raise ConfigError(f"expected openai:MODEL@URL, where URL has http:// or https://, as in http://{bare[1]}")
    return model, url
