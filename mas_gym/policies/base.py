"""The base classes of policies, which reply to chat prompts with sampled messages.

The library uses one interface, `AsyncPolicy`: ``await sample_async(request)`` returns the reply to one request, and
many requests are open at a time. An engine that processes batches may define one of these interfaces instead:

* `Policy` defines ``sample(requests) -> replies``, which handles one batch and returns the replies in order;
* `StreamingPolicy` also defines ``open() -> session``. A session accepts requests while it works on others,
  so an engine never waits for the slowest row of a batch.

`mas_gym.policies.as_policy` wraps these, and objects that define only the methods, when they are loaded or passed in.

A request contains one seed per sample, derived by the caller from (run seed, problem,
transcript, sample index). A reply therefore depends only on the request, as far as the engine
allows.

``identity()`` returns everything that determines a policy's samples (see
`mas_gym.internal.identity`). Response caches and run stores use it to decide which samples can be
reused. A policy that is loaded from a spec or is a dataclass needs no such method.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, overload

from mas_gym.errors import ConfigError, PolicyError, shown
from mas_gym.internal.adapter import ClassName
from mas_gym.policies.usage_meters import Meter
from mas_gym.systems.graph import MAS, Agent
from mas_gym.systems.prompts import ChatMessage
from mas_gym.systems.validation import DEFAULT_MAX_NEW_TOKENS

MIN_TEMPERATURE = 0.01
"""Lower temperatures decode greedily.

At this temperature a token that is 0.1 nats less likely than the best has e**-10 of its probability, so sampling
and greedy decoding differ only in near ties; far below it, dividing logits by the temperature overflows float32.
"""

MAX_TEMPERATURE = 100.0
"""Highest temperature; sampling is practically uniform there."""

MOST_TOKENS = 10**8
"""Largest plausible token count of a prompt or message."""

ARMS = "arms:"
"""Prefix of the names and specs of policies with several models (`mas_gym.policies.arms_policy`)."""

_LOWEST_LOGPROB = -1e6
_LOGPROB_SLACK = 1e-3


def effective_temperature(value: float) -> float:
    """Return the temperature to sample at: 0 for values below `MIN_TEMPERATURE`, others unchanged.

    Raises:
        ConfigError: It is not a number from 0 to `MAX_TEMPERATURE`.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_TEMPERATURE:
        raise ConfigError(f"expected a temperature from 0 to {MAX_TEMPERATURE:g}, got {shown(value)}")
    return 0.0 if 0 < value < MIN_TEMPERATURE else value


def token_count(value: object) -> int:
    """Check a token count from an untrusted source. Raises `ValueError` with the value if it is not plausible."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_TOKENS:
        raise ValueError(shown(value))
    return value


def finite_logprob(value: object) -> float:
    """Check a token's log-probability from an untrusted source; rounding errors above 0 become 0.

    Raises:
        ValueError: It is not a number from -1e6 to 0; the message is the value.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not _LOWEST_LOGPROB <= value <= _LOGPROB_SLACK:  # type: ignore[operator]
        raise ValueError(shown(value))
    return min(float(value), 0.0)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of agents (paper, App. "Search configurations").

    Attributes:
        temperature: Softmax temperature; values below 0.01 mean greedy decoding. An agent's own value replaces it.
        top_p: Nucleus mass in ``(0, 1]``. An agent's own value replaces it.
        max_new_tokens: Maximum length of one message, in tokens; an agent's own maximum also applies. None for no
            maximum besides the agents' own, or for 1024 in a program.
    """

    temperature: float = 0.7
    top_p: float = 0.95
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", effective_temperature(self.temperature))
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling: expected top_p in (0, 1], got {self.top_p!r}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(f"sampling: expected max_new_tokens >= 1, got {self.max_new_tokens!r}")

    @property
    def limit(self) -> int:
        """The maximum length as a number."""
        return DEFAULT_MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    def for_system(self, mas: MAS) -> Sampling:
        """Return the same sampling with the maximum length as a number."""
        if self.max_new_tokens is not None:
            return self
        own = () if mas.external else (agent.max_new_tokens for agent in mas.agents)
        return replace(self, max_new_tokens=max([DEFAULT_MAX_NEW_TOKENS, *own]))

    def for_agent(self, agent: Agent) -> Sampling:
        """Return the sampling of one agent of a system."""
        if agent.temperature is None and agent.top_p is None:
            return self
        temperature = self.temperature if agent.temperature is None else agent.temperature
        return replace(self, temperature=temperature, top_p=self.top_p if agent.top_p is None else agent.top_p)


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """A request for ``len(seeds)`` messages of one agent (defaults: paper, App. "Search configurations").

    Attributes:
        messages: The chat prompt.
        seeds: One seed in ``[0, 2**63)`` per sample.
        max_new_tokens: Limit on generated tokens per sample.
        temperature: Softmax temperature; 0 and values below `MIN_TEMPERATURE` mean greedy decoding.
        top_p: Probability mass for nucleus sampling, in ``(0, 1]``.
        agent: Name of the acting agent, for policies that serve agents differently.
        extra_body: Further fields of an OpenAI chat request, such as ``tools``, as canonical JSON; empty if none. Its
            ``messages`` holds further fields of each message. A policy receives only supported fields (see `fitted`).
        traced: Whether to return the `TokenTrace` of each sample. It does not affect the samples.
        tag: Chooses among the models of a policy that has several (`PolicyBase.tags`); empty for the policy's choice.

    Raises:
        ConfigError: A field is out of its range.
    """

    messages: tuple[ChatMessage, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int = 1024
    temperature: float = 0.7
    top_p: float = 0.95
    agent: str = ""
    extra_body: str = ""
    traced: bool = False
    tag: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", effective_temperature(self.temperature))
        expected = ""
        if not self.messages or not self.seeds:
            expected = f"messages and seeds, got {len(self.messages)} messages and {len(self.seeds)} seeds"
        elif self.max_new_tokens < 1:
            expected = f"max_new_tokens of at least 1, got {self.max_new_tokens}"
        elif not 0 < self.top_p <= 1:
            expected = f"top_p above 0 and at most 1, got {self.top_p}"
        elif min(self.seeds) < 0 or max(self.seeds) >= 1 << 63:
            expected = f"seeds in [0, 2**63), got {self.seeds}"
        if expected:
            raise ConfigError(f"sampling request: expected {expected}")


def spoken(messages: Messages, extra_body: str) -> tuple[Messages, str]:
    """Move speaker names from ``extra_body`` into the message texts, for policies that support only roles.

    >>> spoken((ChatMessage("user", "Add."),), '{"messages": [{"name": "Planner"}]}')
    ((ChatMessage(role='user', content='Planner: Add.'),), '')
    """
    asked = json.loads(extra_body) if extra_body else {}
    more = asked.pop("messages", None)
    if more is None:
        return messages, extra_body
    names = [fields.pop("name", None) for fields in more]
    pairs = zip(messages, names, strict=True)
    messages = tuple(m._replace(content=f"{name}: {m.content}") if name else m for m, name in pairs)
    asked |= {"messages": more} if any(more) else {}
    return messages, json.dumps(asked, sort_keys=True) if asked else ""


@overload
def mean_logprob(logprob: float, tokens: int) -> float: ...
@overload
def mean_logprob(logprob: float | None, tokens: int) -> float | None: ...
def mean_logprob(logprob: float | None, tokens: int) -> float | None:
    """Return the length-normalized log-likelihood of a message (paper, Eq. "psi-pol"), in nats per token."""
    return None if logprob is None else logprob / max(tokens, 1)


class Certainty(NamedTuple):
    """Certainty of a policy about one message, at temperature 1 and without top-p; None for unavailable statistics.

    Attributes:
        least: Smallest log-probability of a generated token, in nats.
        entropy: Mean entropy of the next-token distributions, in nats.
        self_certainty: Mean KL divergence of the uniform distribution from the next-token distributions, in nats
            (Kang et al. 2025, "Scalable Best-of-N Selection for Large Language Models via Self-Certainty").
    """

    least: float | None = None
    entropy: float | None = None
    self_certainty: float | None = None


class TokenTrace(NamedTuple):
    """The tokens of one sample, exactly as the engine processed and generated them.

    Attributes:
        prompt: Token ids of the prompt; empty if a server returns none.
        completion: Generated token ids, the end token included; empty if a server returns none.
        logprobs: Log-probability of each generated token at temperature 1 and without top-p, in nats.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]


class Sample(NamedTuple):
    """One sampled message.

    Attributes:
        text: The message, without special tokens or surrounding whitespace.
        tokens: Generated tokens, the end token included.
        logprob: Sum over the generated tokens of the policy's log-probability at temperature 1 (nats); None if unknown.
        finish_reason: ``"stop"`` or ``"length"``.
        certainty: Statistics of the next-token distributions; None if unknown.
        trace: The sample's tokens, if the request is ``traced`` and the engine returns them.
    """

    text: str
    tokens: int
    logprob: float | None
    finish_reason: str
    certainty: Certainty | None = None
    trace: TokenTrace | None = None

    @property
    def mean_logprob(self) -> float | None:
        """Length-normalized log-likelihood, in nats per token."""
        return mean_logprob(self.logprob, self.tokens)


class SamplingReply(NamedTuple):
    """The reply to one request.

    Attributes:
        samples: In the order of the request's seeds.
        prompt_tokens: Prompt tokens that the engine processed; the prompt is counted once per call to the engine.
        cached_tokens: Prompt tokens that the engine had cached.
        dropped_tokens: Tokens cut from the oldest input because the prompt did not fit in the context window.
    """

    samples: tuple[Sample, ...]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0


class Choice(NamedTuple):
    """Log-probabilities that a reply begins with given words.

    Attributes:
        logprobs: Log-probability of each word as the first token, at temperature 1. The probabilities of its
            single-token spellings (case, a leading space) are added up. Minus infinity for a word that the engine does
            not list.
        prompt_tokens: Tokens of the prompt.
        tokens: Generated tokens.
    """

    logprobs: tuple[float, ...]
    prompt_tokens: int
    tokens: int = 1


def spellings(word: str) -> tuple[str, ...]:
    """Return the spellings that count as the given word."""
    return tuple(space + form for space in ("", " ") for form in dict.fromkeys((word, word.capitalize(), word.upper())))


def log_sum(logprobs: Sequence[float]) -> float:
    """Return the log of a sum of probabilities; minus infinity for an empty sequence."""
    most = max(logprobs, default=-math.inf)
    return most + math.log(math.fsum(math.exp(value - most) for value in logprobs)) if most > -math.inf else most


def first_tokens(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Return the possible first tokens of each word: its single-token spellings or, if there are none, its first token.

    Args:
        words: The words.
        encode: Returns the tokens of a text, without special ones.

    Raises:
        PolicyError: Two words begin with the same token, so the first token cannot distinguish them.
    """
    ids = [[list(encode(spelling)) for spelling in spellings(word)] for word in words]
    single = [{tokens[0] for tokens in forms if len(tokens) == 1} or {forms[0][0]} for forms in ids]
    # A token shared by several words, such as the unknown token, does not distinguish them.
    found = [own.difference(*(other for other in single if other is not own)) for own in single]
    if not all(found):
        raise PolicyError(f"expected words that differ in their first token, got {', '.join(map(repr, words))}")
    return [sorted(tokens) for tokens in found]


class SamplingSession(Protocol):
    """A running engine: it accepts requests at any time and returns replies as they finish.

    Not thread-safe; one caller alternates between `submit` and `step`.
    Example timeline of an engine with room for two rows::

        submit("a", r1); submit("b", r2)   # pending == 2
        step() -> []                       # one unit of work, nothing finished yet
        step() -> [("b", reply)]           # pending == 1
        submit("c", r3)                    # joins while "a" is still being generated
    """

    @property
    def pending(self) -> int:
        """Number of requested samples (one per seed) without a reply so far."""

    def submit(self, key: Hashable, request: SamplingRequest) -> None:
        """Queue a request without blocking. ``key``, returned with the reply, must be unique among open requests."""

    def step(self) -> list[tuple[Hashable, SamplingReply | PolicyError]]:
        """Do one short unit of work and return the requests that it finished, often none.

        Returns at once if nothing is pending. A failed request yields a `PolicyError`; the others continue.
        """

    def close(self) -> None:
        """Discard all open requests and free the memory; the session cannot be used again."""


@dataclass(frozen=True)
class Purpose:
    """The tasks and systems that a policy was made for; the value of a policy's attribute ``made_for``.

    Attributes:
        graphs: Names of the supported MAS, by task.
        knows: Returns whether a question without a task is supported; None to accept every such question.
    """

    graphs: Mapping[str, Sequence[str]]
    knows: Callable[[str], bool] | None = None

    def misuse(self, task: str | None, mas: str, question: str = "") -> str | None:
        """Return a one-sentence reason why results are not meaningful; None if the policy was made for this.

        Args:
            task: The task's name; None for a question without a task.
            mas: The MAS's name.
            question: The question, if there is no task.
        """
        known = task is None and (self.knows is None or self.knows(question))
        if mas in self.graphs.get(task or "", ()) or (known and any(mas in names for names in self.graphs.values())):
            return None
        made = " and ".join(f"{name} ({', '.join(graphs)})" for name, graphs in self.graphs.items())
        if task is None and not known:
            return f"made for {made}; this question has words outside its vocabulary, so its answers are not meaningful"
        return f"made for {made}; its answers to {task or 'this question'} with {mas} are not meaningful"


class PolicyBase:
    """The attributes of every policy, with their defaults; derive from `Policy`, `StreamingPolicy` or `AsyncPolicy`.

    Attributes:
        name: Name shown in reports, such as ``"tiny"``; by default the class's name.
        takes_extra_body: Fields of an OpenAI chat request (`SamplingRequest.extra_body`) that the policy supports: True
            for all, or a set of names.
        independent_samples: True if each sample is a separate call that depends only on its seed; False if one call
            returns all samples of a request, which a response cache then keeps together; None if each sample depends
            only on its seed, but may not be a separate call.
        chooses: Whether the policy provides log-probabilities of first words through ``choose`` or ``choose_async``;
            None if only a call shows it.
        max_prompt_bytes: Upper bound on the UTF-8 bytes of a message that fits in the context window; None if unknown.
        meters: Calls, tokens and cost so far, by engine; empty for local models.
        made_for: The tasks and systems that the policy was trained for; None for a general-purpose policy.
        identical_to: For a wrapper that does not change samples, such as a cache: the wrapped policy. The wrapper has
            the same identity and supports the same requests (see `AsyncPolicy.stand_for`).
    """

    name: str = ClassName()  # type: ignore[assignment]
    takes_extra_body: bool | Set[str] = False
    independent_samples: bool | None = None
    chooses: bool | None = False
    max_prompt_bytes: int | None = None
    meters: Mapping[str, Meter] = MappingProxyType({})
    made_for: Purpose | None = None
    identical_to: Any = None

    def serving(self, agent: str) -> PolicyBase:
        """Return the policy that serves an agent: this policy or, for a wrapper, what the wrapped policy returns.

        Raises:
            PolicyError: There is no policy for this agent.
        """
        serving: PolicyBase = self if self.identical_to is None else self.identical_to.serving(agent)
        return serving

    def tags(self, agent: str) -> tuple[str, ...]:
        """Return the tags that an agent's requests may have, such as names of models; empty for one model."""
        tags: tuple[str, ...] = () if self.identical_to is None else self.identical_to.tags(agent)
        return tags


class Policy(PolicyBase, ABC):
    """A policy that processes batches of requests. A subclass defines `sample`.

    Attributes:
        max_batch: Preferred number of sequences per call; up to this many are collected into a batch.
    """

    max_batch: int = 64

    @abstractmethod
    def sample(self, requests: Sequence[SamplingRequest]) -> Sequence[SamplingReply]:
        """Return the reply to every request, in order. Raises `mas_gym.errors.PolicyError`."""

    def choose(self, prompts: Sequence[Sequence[ChatMessage]], words: Sequence[str]) -> Sequence[Choice]:
        """Return, for each prompt, the log-probability that the reply begins with each word, if the policy `chooses`.

        Raises:
            PolicyError: The policy does not support this.
        """
        raise PolicyError(f"policy {self.name!r} provides no first-word log-probabilities; use a local model or vLLM")


class StreamingPolicy(Policy):
    """A batch policy with sessions that accept new requests continuously, so the engine's batch stays full."""

    @abstractmethod
    def open(self) -> SamplingSession:
        """Start a session. Each request gets the same reply as from `sample`."""

    def sample(self, requests: Sequence[SamplingRequest]) -> Sequence[SamplingReply]:
        """Return the reply to every request, in order, from one session. Raises `mas_gym.errors.PolicyError`."""
        session = self.open()
        try:
            for place, request in enumerate(requests):
                session.submit(place, request)
            replies: dict[Hashable, SamplingReply] = {}
            while session.pending:
                for key, reply in session.step():
                    if isinstance(reply, PolicyError):
                        raise reply
                    replies[key] = reply
        finally:
            session.close()
        return [replies[place] for place in range(len(requests))]


class AsyncPolicy(PolicyBase, ABC):
    """A policy that processes single requests; up to ``max_concurrency`` of them are open at a time.

    Attributes:
        max_concurrency: Maximum number of open requests.
        local_batch: For an engine that computes in this process: preferred number of sequences per batch. Its requests
            are awaited on the event loop of the caller, and those of other engines on one event loop per process.
    """

    max_concurrency: int = 64
    local_batch: int | None = None

    @abstractmethod
    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Return the reply to one request. Raises `mas_gym.errors.PolicyError`."""

    def stand_for(self, policy: AsyncPolicy) -> None:
        """Set `identical_to`, and copy the attributes of the wrapped policy."""
        self.identical_to = policy
        self.name, self.made_for, self.meters = policy.name, policy.made_for, policy.meters
        self.max_prompt_bytes = policy.max_prompt_bytes
        self.max_concurrency, self.local_batch = policy.max_concurrency, policy.local_batch

    async def choose_async(self, messages: Sequence[ChatMessage], words: Sequence[str]) -> Choice:
        """Return the log-probability that the reply begins with each word, if the policy `chooses`.

        Raises:
            PolicyError: The policy does not support this.
        """
        raise PolicyError(f"policy {self.name!r} provides no first-word log-probabilities; use a local model or vLLM")


Messages = tuple[ChatMessage, ...]


def fitted(policy: PolicyBase, agent: str, messages: Messages, extra_body: str) -> tuple[Messages, str]:
    """Return messages and ``extra_body`` in the form that the policy of an agent supports.

    Speaker names are prepended to the text, except for policies that support every field
    (`PolicyBase.takes_extra_body`).

    Raises:
        PolicyError: The policy would drop a part of ``extra_body``.
    """
    if not extra_body or (serving := policy.serving(agent)).takes_extra_body is True:
        return messages, extra_body
    messages, extra_body = spoken(messages, extra_body)
    refuse_extra_body(serving, agent, extra_body)
    return messages, extra_body


def refuse_extra_body(policy: PolicyBase, agent: str, extra_body: str) -> None:
    """Raise `PolicyError` if a policy does not support a part of the further fields of an agent's request."""
    taken = policy.takes_extra_body
    some = taken if isinstance(taken, Set) else frozenset()
    if not extra_body or taken is True or not (left := sorted(json.loads(extra_body).keys() - some)):
        return
    asked = ", ".join("tool calls in messages" if key == "messages" else key for key in left)
    also = f", {', '.join(sorted(some))}" if some else ""
    raise PolicyError(
        f"{asked}: expected none, because the policy {policy.name!r} of the agent {agent!r} takes only plain "
        f"chat messages{also}; give the agent an OpenAI-compatible policy (openai:MODEL@URL), or leave this out of the "
        "request"
    )


def derive_seed(run_seed: int, problem_id: str, state_digest: bytes, sample_index: int) -> int:
    """Return the seed of one sample, the same in every process and on every machine.

    Args:
        run_seed: The seed of the run, any integer.
        problem_id: The problem's id.
        state_digest: `MASState.digest` of the state at which the agent acts.
        sample_index: Number of samples drawn at this state earlier in this search.

    Returns:
        An integer in ``[0, 2**63)``. Different prompts get different seeds, because engines use
        nearly the same noise for prompts with the same seed.
    """
    name = problem_id.encode("utf-8", "surrogatepass")
    # The length prefix separates the fields, so they may contain any bytes.
    body = f"{run_seed}|{sample_index}|{len(name)}|".encode() + name + state_digest
    return int.from_bytes(blake2b(body, digest_size=8).digest(), "big") >> 1
