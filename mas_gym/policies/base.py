"""The contract of policies, which answer chat prompts with sampled messages.

Three shapes are accepted everywhere, distinguished by the methods they define:

* `Policy.sample(requests) -> replies`: a batch in, a batch out, in order;
* `StreamingPolicy.open() -> session`: a policy that also takes requests while it works on others,
  so that an engine never waits for the slowest row of a batch;
* `AsyncPolicy.sample_async(request) -> reply`: one request at a time, many awaited at once.

A request carries its own seeds, one per sample, derived by the caller from
(run seed, problem, transcript, sample index), so that a reply depends only on the
request, as far as the engine allows.

A policy states what its samples depend on with ``identity()`` (see `mas_gym.identity`),
which response caches and run stores address samples by; many policies need no such
method, because `mas_gym.identity.identity_of` states their attributes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload, runtime_checkable

from mas_gym.errors import ConfigError, PolicyError
from mas_gym.prompts import ChatMessage

MIN_TEMPERATURE = 0.01
"""Lower temperatures decode greedily.

At this temperature a token that is 0.1 nats less likely than the best has e**-10 of its probability, so sampling
and greedy decoding differ only in near ties; far below it, dividing logits by the temperature overflows float32.
"""

MAX_TEMPERATURE = 100.0
"""Highest temperature; at it, sampling is uniform for all practical purposes."""

MOST_TOKENS = 10**8
"""Largest believable token count of one prompt or message."""

_LOWEST_LOGPROB = -1e6
_LOGPROB_SLACK = 1e-3


def effective_temperature(value: float) -> float:
    """Return the temperature to sample at: 0 for values below `MIN_TEMPERATURE`, others unchanged.

    Raises:
        ConfigError: It is not a number from 0 to `MAX_TEMPERATURE`.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_TEMPERATURE:
        raise ConfigError(f"expected a temperature from 0 to {MAX_TEMPERATURE:g}, got {shortened(value)}")
    return 0.0 if 0 < value < MIN_TEMPERATURE else value


def token_count(value: object) -> int:
    """Return a token count that came from outside. Raises `ValueError` with what came if it is not believable."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_TOKENS:
        raise ValueError(shortened(value))
    return value


def finite_logprob(value: object) -> float:
    """Return a token's log-probability that came from outside, at most 0.

    Raises:
        ValueError: It is not a number from -1e6 to 0, rounding errors of servers aside; the message says what came.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not _LOWEST_LOGPROB <= value <= _LOGPROB_SLACK:  # type: ignore[operator]
        raise ValueError(shortened(value))
    return min(float(value), 0.0)  # type: ignore[arg-type]


def shortened(value: object, most: int = 40) -> str:
    """Return the beginning of ``repr(value)``, also for integers too long to print."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """A request for ``len(seeds)`` messages of one agent (defaults: paper, App. "Search configurations").

    Attributes:
        messages: The chat prompt.
        seeds: One seed in ``[0, 2**63)`` per sample.
        max_new_tokens: Cap on generated tokens per sample.
        temperature: Softmax temperature; 0 is greedy decoding, and so is anything below `MIN_TEMPERATURE`.
        top_p: Nucleus mass in ``(0, 1]``.
        agent: Name of the acting agent, for policies that serve agents differently.

    Raises:
        ConfigError: A field is out of its range.
    """

    messages: tuple[ChatMessage, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int = 1024
    temperature: float = 0.7
    top_p: float = 0.95
    agent: str = ""

    def __post_init__(self) -> None:
        """Check the ranges."""
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


@overload
def mean_logprob(logprob: float, tokens: int) -> float: ...
@overload
def mean_logprob(logprob: float | None, tokens: int) -> float | None: ...
def mean_logprob(logprob: float | None, tokens: int) -> float | None:
    """Return the length-normalised log-likelihood of a message (paper, Eq. "psi-pol"), in nats per token."""
    return None if logprob is None else logprob / max(tokens, 1)


class Sample(NamedTuple):
    """One sampled message.

    Attributes:
        text: The message, without special tokens, stripped.
        tokens: Generated tokens, the end token included.
        logprob: Sum over the generated tokens of the policy's log-probability at temperature 1 (nats); None if unknown.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    text: str
    tokens: int
    logprob: float | None
    finish_reason: str

    @property
    def mean_logprob(self) -> float | None:
        """Length-normalised log-likelihood, in nats per token."""
        return mean_logprob(self.logprob, self.tokens)


class SamplingReply(NamedTuple):
    """The answer to one request.

    Attributes:
        samples: In the order of the request's seeds.
        prompt_tokens: Tokens of the prompt, counted once however many samples were drawn.
        cached_tokens: How many of them the engine had cached.
        dropped_tokens: Tokens cut from the oldest input because the prompt did not fit the context window.
    """

    samples: tuple[Sample, ...]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0


@runtime_checkable
class Policy(Protocol):
    """A policy that answers batches.

    Attributes:
        name: What reports call it, such as ``"tiny"``.
        max_batch: How many sequences it likes to get at once; the driver collects up to this many.
    """

    name: str
    max_batch: int

    def sample(self, requests: Sequence[SamplingRequest]) -> Sequence[SamplingReply]:
        """Answer every request, in order. Raises `mas_gym.errors.PolicyError`."""
        ...


class SamplingSession(Protocol):
    """A running engine: requests go in at any time, replies come out as they are finished.

    Not thread-safe; one caller alternates between `submit` and `step`.
    A timeline with two rows of room::

        submit("a", r1); submit("b", r2)   # pending == 2
        step() -> []                       # one piece of work, nothing finished yet
        step() -> [("b", reply)]           # pending == 1
        submit("c", r3)                    # joins while "a" is still being written
    """

    @property
    def pending(self) -> int:
        """Samples asked for (one per seed) whose request is not yet answered."""
        ...

    def submit(self, key: Hashable, request: SamplingRequest) -> None:
        """Queue a request; cheap, never blocks. ``key`` comes back with the reply and is unique among the open ones."""
        ...

    def step(self) -> list[tuple[Hashable, SamplingReply | PolicyError]]:
        """Do one short piece of work and return what it finished, often nothing; at once when nothing is pending.

        A request that cannot be answered comes back as a `PolicyError`; the others go on.
        """
        ...

    def close(self) -> None:
        """Forget every open request and free the memory; the session cannot be used again."""
        ...


@runtime_checkable
class StreamingPolicy(Policy, Protocol):
    """A batch policy whose engine can also be kept full by continuous submission."""

    def open(self) -> SamplingSession:
        """Start a session. Replies are the same, request by request, as those of `sample`."""
        ...


@runtime_checkable
class AsyncPolicy(Protocol):
    """A policy that answers requests as they come; the driver keeps up to ``max_concurrency`` of them open.

    Attributes:
        name: What reports call it.
        max_concurrency: How many requests it likes to have open at once.
    """

    name: str
    max_concurrency: int

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Answer one request. Raises `mas_gym.errors.PolicyError`."""
        ...
