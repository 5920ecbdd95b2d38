"""The usage of a search, the limits on it (budgets), and the division of a run's budget among its searches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter, sub
from typing import NamedTuple, Protocol

from mas_gym.errors import BudgetError, ConfigError, shown
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies.base import Sample


class TagUsage(NamedTuple):
    """The part of a usage that was requested with one tag (`search.Propose`).

    Attributes:
        tag: The tag.
        calls: Agent calls (AC).
        generated_tokens: Generated tokens (TOK).
        prompt_tokens: Prompt tokens.
        cached_tokens: Prompt tokens that the engine had cached.
        chosen: Messages on the paths to the chosen answers.
    """

    tag: str
    calls: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a search or a run (paper, App. "Compute budgets and accounting"); supports ``+``.

    Attributes:
        agent_calls: AC, LLM generations by agents; every sample counts, duplicates included.
        generated_tokens: TOK, generated tokens over all agent calls, duplicates included.
        reward_calls: RC, critic forward passes: one per state and search; for a combination of critics, one per member;
            for a free critic, none.
        reward_hits: Evaluations of states that this search had already scored, without a forward pass.
        prompt_tokens: Prompt tokens, once per call to the engine: servers with one sample per call process the prompt
            once per sample, others once per request.
        cached_tokens: Prompt tokens that the engine had cached.
        dropped_tokens: Tokens cut from the oldest input because a prompt did not fit the context window.
        reasoning_only: Messages without text because the reply contains only reasoning.
        critic_tokens: Tokens that the critic generated, such as a judge's verdicts; not included in TOK.
        critic_prompt_tokens: Prompt tokens that the critic read to generate them.
        unread_verdicts: Verdicts of a judge that could not be parsed.
        grader_tokens: Tokens that a judge generated to grade the answers; not included in TOK.
        grader_prompt_tokens: Prompt tokens that the judge read to generate them.
        unrecorded: Messages that a planner requested beyond those of a recorded run (`search.Recorded`).
        seconds: Wall-clock seconds from start to end; ``+`` adds them up.
        tags: The usage of each tag, sorted by name; usage without a tag is in the other fields only.
    """

    agent_calls: int = 0
    generated_tokens: int = 0
    reward_calls: int = 0
    reward_hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0
    reasoning_only: int = 0
    critic_tokens: int = 0
    critic_prompt_tokens: int = 0
    unread_verdicts: int = 0
    grader_tokens: int = 0
    grader_prompt_tokens: int = 0
    unrecorded: int = 0
    seconds: float = 0.0
    tags: tuple[TagUsage, ...] = ()

    def __post_init__(self) -> None:
        """Convert tags read from JSON (lists of lists) to `TagUsage`."""
        if self.tags != ():
            object.__setattr__(self, "tags", tuple(TagUsage(*tag) for tag in self.tags))

    def __add__(self, other: Usage) -> Usage:
        # Written out because it runs for every reply; this is many times faster than a loop over the fields.
        return Usage(
            self.agent_calls + other.agent_calls,
            self.generated_tokens + other.generated_tokens,
            self.reward_calls + other.reward_calls,
            self.reward_hits + other.reward_hits,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.dropped_tokens + other.dropped_tokens,
            self.reasoning_only + other.reasoning_only,
            self.critic_tokens + other.critic_tokens,
            self.critic_prompt_tokens + other.critic_prompt_tokens,
            self.unread_verdicts + other.unread_verdicts,
            self.grader_tokens + other.grader_tokens,
            self.grader_prompt_tokens + other.grader_prompt_tokens,
            self.unrecorded + other.unrecorded,
            self.seconds + other.seconds,
            _sum(self.tags, other.tags, 1) if self.tags or other.tags else (),
        )

    def __sub__(self, other: Usage) -> Usage:
        amounts = map(sub, _amounts(self), _amounts(other))
        return Usage(*amounts, _sum(self.tags, other.tags, -1))  # type: ignore[call-arg]

    def to_dict(self) -> JSONObject:
        """Return the fields by name; ``Usage(**found)`` reads them, also from JSON."""
        # Many times faster than dataclasses.asdict, which copies each number.
        return dict(zip(AMOUNTS, _amounts(self), strict=True)) | {"tags": self.tags}


AMOUNTS = tuple(field.name for field in fields(Usage) if field.name != "tags")
"""The fields of `Usage` that are numbers."""

_amounts = attrgetter(*AMOUNTS)


def _sum(first: tuple[TagUsage, ...], second: tuple[TagUsage, ...], sign: int) -> tuple[TagUsage, ...]:
    found = {tag.tag: tag for tag in first}
    for tag in second:
        known = found.get(tag.tag, TagUsage(tag.tag))
        found[tag.tag] = TagUsage(tag.tag, *(a + sign * b for a, b in zip(known[1:], tag[1:], strict=True)))
    return tuple(found[name] for name in sorted(found))


# ------------------------------------------------------------------ limits


class Charges(Protocol):
    """The prices of a run's models (`search.prices.Rate`)."""

    def usd(self, usage: Usage, /) -> float:
        """Return the cost of a search or a run in USD."""

    def generated(self, tag: str, /) -> float | None:
        """Return the price of a million tokens generated with a tag; None if it has no price."""


class PriceList(Protocol):
    """Prices by the name of a model (`search.prices.Prices`)."""

    def rate(self, policy: str, critic: str | None, /) -> Charges:
        """Return the prices of a run's models."""


LIMITS = ("calls", "tokens", "seconds", "usd")
"""The units that a budget limits."""


@dataclass(frozen=True)
class Budget:
    """Limits on the cost of a search or a run; None means no limit.

    Attributes:
        calls: Agent calls (AC), never exceeded.
        tokens: Generated tokens (TOK). Once they are spent, a search only completes its first path, with one message
            per turn. The last request may overshoot.
        seconds: Wall-clock seconds. Results under this limit depend on the machine's speed.
        usd: USD, limited in the same way as tokens; needs ``prices``. With a price per second, results under this
            limit also depend on the machine's speed.
        rate: The prices of the run's models; filled in by the run.
        prices: Prices by the name of a model.
    """

    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    usd: float | None = None
    rate: Charges | None = None
    prices: PriceList | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, limit in zip(LIMITS, (self.calls, self.tokens, self.seconds, self.usd), strict=True):
            if limit is not None and not (isinstance(limit, int | float) and 0 < limit < math.inf):
                raise ConfigError(f"budget: expected {name} to be a positive number or None, got {limit!r}")

    @classmethod
    def read(cls, text: str) -> Budget:
        """Parse ``"calls=40,seconds=2.5"``; numbers without a fraction become integers.

        Raises:
            ConfigError: A limit is unknown, repeated, or not a positive number.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = (piece.strip() for piece in part.partition("="))
            if name not in LIMITS or name in limits:
                raise ConfigError(
                    f"budget: expected limits on {', '.join(LIMITS)}, each at most once, such as calls=40, got "
                    f"{shown(part)}"
                )
            try:
                whole = number.removeprefix("-").isdecimal() and len(number) < 16
                limits[name] = int(number) if whole else float(number)
            except ValueError:
                raise ConfigError(f"budget: expected {name} to be a positive number, got {shown(number)}") from None
        if not all(isinstance(limits.get(name, 1), int) for name in ("calls", "tokens")):
            raise ConfigError(f"budget: expected integers for calls and tokens, got {shown(text)}")
        return cls(**limits)  # type: ignore[arg-type]

    def tightened(self, other: Budget) -> Budget:
        """Return a budget with the smaller of the two limits in each unit."""
        pairs = ((name, [vars(one)[name] for one in (self, other)]) for name in LIMITS)
        limits = {name: min((n for n in both if n is not None), default=None) for name, both in pairs}
        return replace(self, **limits)

    def check_counted(self, samples: Iterable[Sample]) -> None:
        """Check that messages have token counts, if tokens or USD are limited. Raises `BudgetError`."""
        limited = self.tokens is not None or self.usd is not None
        if limited and any(sample.text and not sample.tokens for sample in samples):
            raise BudgetError(
                "a budget in tokens or USD: expected replies with token counts, got none, because the server reports "
                "no usage; name the model's tokenizer with tokenizer=FOLDER in the policy, or limit calls"
            )

    def without_cost(self) -> Budget:
        """Return the limits on calls and seconds only."""
        return replace(self, tokens=None, usd=None)

    def priced(self, policy: str, critic: str | None) -> Budget:
        """Return the budget with the prices of a run's policy and critic, if it has prices.

        Raises:
            ConfigError: The budget limits USD and has no prices, or the prices are invalid for the models.
            UnknownNameError: A model has no price.
        """
        self.check_priced()
        return self if self.prices is None else replace(self, rate=self.prices.rate(policy, critic))

    def check_priced(self) -> None:
        """Check that a budget in USD has prices. Raises `ConfigError`."""
        if self.usd is not None and self.prices is None:
            raise ConfigError(
                f"budget: expected prices for usd={self.usd:g}, got none; pass prices=, or --prices prices.yaml"
            )

    def to_dict(self) -> JSONObject:
        """Return the form used in a run's identity, with the run's prices only if USD is limited."""
        known = (*LIMITS, "rate") if self.usd is not None else LIMITS[:-1]
        stated = asdict(replace(self, prices=None))
        return {name: stated[name] for name in known}

    def cost(self, usage: Usage) -> float:
        """Return the cost in USD; 0 without prices. Raises `ConfigError` if the budget limits USD without prices."""
        self.check_priced()
        return 0.0 if self.rate is None else self.rate.usd(usage)

    def tag_cost(self, tag: str) -> float | None:
        """Return the price of a million tokens generated with a tag, in USD; None without one."""
        return None if self.rate is None else self.rate.generated(tag)

    def reached(self, usage: Usage, wanted: int) -> str | None:
        """Return the limit that rules out ``wanted`` more agent calls, as ``"budget of 30 calls spent"``, or None.

        If ``wanted`` is 0, only the seconds are checked.
        """
        if wanted and self.calls is not None and usage.agent_calls + wanted > self.calls:
            return f"budget of {self.calls} calls spent"
        if wanted and self.tokens is not None and usage.generated_tokens >= self.tokens:
            return f"budget of {self.tokens} tokens spent"
        if wanted and self.usd is not None and self.cost(usage) >= self.usd:
            return f"budget of {self.usd:g} USD spent"
        if self.seconds is not None and usage.seconds >= self.seconds:
            return f"budget of {self.seconds:g} seconds spent"
        return None

    def messages_left(self, usage: Usage) -> int | None:
        """Return the number of messages left under calls, tokens and USD limits (`Remaining`); None without these."""
        left: list[int] = []
        if self.calls is not None:
            left.append(self.calls - usage.agent_calls)
        if self.tokens is not None:
            tokens = self.tokens - usage.generated_tokens
            # The message length is unknown before the first message.
            left.append(tokens * usage.agent_calls // max(usage.generated_tokens, 1) if usage.agent_calls else 1)
        if self.usd is not None:
            spent = self.cost(usage)
            if spent > 0:
                # Tolerate rounding errors, so that they do not reduce the count.
                left.append(int((self.usd - spent) * usage.agent_calls / spent + 1e-9))
            elif not usage.agent_calls:
                left.append(1)
        return max(0, min(left)) if left else None


class Cost(NamedTuple):
    """The cost or grant of a search in the units of budgets."""

    calls: float = 0.0
    tokens: float = 0.0
    usd: float = 0.0

    def covers(self, calls: int) -> bool:
        """Return whether this remaining budget covers more agent calls."""
        return self.calls >= calls and self.tokens > 0 and self.usd > 0


class Allowance:
    """Divides a run's budget among its searches.

    A search starts only if the remaining budget is expected to cover it completely. Otherwise too many concurrent
    searches would share the budget, and none would finish.

    The expected cost of a search is that of the most expensive search so far. Until one has ended, only one search
    runs at a time, unless the limits of each search bound its cost. Concurrent searches are granted a margin, which
    shrinks as more searches end. The unused part returns to the budget.

    Attributes:
        limited: Whether the run has a budget of calls, tokens or USD.
    """

    def __init__(self, budget: Budget, each: Budget) -> None:
        """Store the limits of the run and of each search."""
        self._budget = budget
        self._limit, self._bound = limits_of(budget), limits_of(each)
        self._largest, self._observed = Cost(), 0
        self.limited = min(self._limit) < math.inf

    @property
    def expected(self) -> Cost:
        """The expected cost of the next search; infinite if unknown."""
        return self._largest if self._observed else self._bound

    @property
    def grant(self) -> Cost:
        """The budget reserved for a search that starts."""
        margin = 1 + 1 / max(self._observed, 1)
        return Cost(*(min(margin * cost, bound) for cost, bound in zip(self.expected, self._bound, strict=True)))

    def cost(self, usage: Usage) -> Cost:
        """Convert usage to the units of budgets."""
        return Cost(usage.agent_calls, usage.generated_tokens, self._budget.cost(usage))

    def learn_cost(self, cost: Cost) -> None:
        """Record the cost of a finished search."""
        self._largest = Cost(*map(max, self._largest, cost))
        self._observed += 1

    def rest(self, spent: Usage, open_searches: Iterable[tuple[Cost, Cost]]) -> Cost:
        """Return the part of the budget that is neither spent nor granted to open searches.

        ``open_searches`` contains a pair of granted and spent cost for each open search.
        """
        pairs = list(open_searches)
        left: list[float] = []
        for unit, used in enumerate(self.cost(spent)):
            held = sum(max(0.0, granted[unit] - own[unit]) for granted, own in pairs)
            left.append(self._limit[unit] - used - held if self._limit[unit] < math.inf else math.inf)
        return Cost(*left)

    def pays(self, rest: Cost, searches: int, alone: bool) -> bool:
        """Return whether the remaining budget covers ``searches`` more searches; ``alone``: no search is open."""
        if rest.calls < 1 or rest.tokens <= 0 or rest.usd <= 0:
            return False
        if alone and searches == 1:
            return not self._observed or all(cost <= left for cost, left in zip(self.expected, rest, strict=True))
        return all(searches * cost <= left for cost, left in zip(self.grant, rest, strict=True))

    def exceeded(self, spent: Usage) -> str | None:
        """Return the limit of the run that was exceeded, or None."""
        return self._budget.reached(replace(spent, agent_calls=spent.agent_calls - 1), 1)

    def reason(self, spent: Usage) -> str:
        """Return why no further search starts: a limit is exhausted, or its remainder is too small."""
        rest = self.rest(spent, ())
        units = zip(("calls", "tokens", "USD"), (1, 1, 0), self._limit, rest, self.expected, strict=True)
        for name, least, limit, left, cost in units:
            if left <= 0 or left < max(cost, least):
                form = ".0f" if least else "g"
                spent_up = f"budget of {limit:{form}} {name} spent"
                more = f": {left:{form}} left, and another search takes up to {cost:{form}}"
                return spent_up + (more if left >= least and left > 0 and cost < math.inf else "")
        return "the remaining budget is too small for another search"


def limits_of(budget: Budget) -> Cost:
    """Return the limits of calls, tokens and USD; infinity for a missing limit."""
    limits = (budget.calls, budget.tokens, budget.usd)
    return Cost(*(math.inf if limit is None else limit for limit in limits))
