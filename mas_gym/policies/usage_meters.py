"""Token prices, and meters of a policy's usage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from mas_gym.errors import ConfigError, shown

_MILLION = 1_000_000


@dataclass(frozen=True)
class Price:
    """Price per million tokens, in any currency.

    Attributes:
        prompt: Price of uncached prompt tokens.
        cached: Price of cached prompt tokens.
        generated: Price of generated tokens.
    """

    prompt: float
    cached: float
    generated: float

    def __post_init__(self) -> None:
        """Check the numbers. Raises `ConfigError`."""
        for name, price in asdict(self).items():
            check_price(name, price)

    def cost(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> float:
        """Return the cost of tokens; prompt tokens include cached ones."""
        fresh = prompt_tokens - cached_tokens
        total = fresh * self.prompt + cached_tokens * self.cached + generated_tokens * self.generated
        return total / _MILLION


def check_price(name: str, number: object) -> None:
    """Check that a price is a finite number of at least 0. Raises `ConfigError` otherwise."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
        raise ConfigError(f"{name}: expected a price of at least 0, got {shown(number)}")


@dataclass
class Meter:
    """Running totals of one policy over all calls, including retries.

    Attributes:
        price: Prices for `money`; None if unknown.
        calls: Calls with a usable reply.
        prompt_tokens: Prompt tokens, cached ones included, of all replies that report them, usable or not.
        cached_tokens: Prompt tokens that the engine had cached.
        generated_tokens: Generated tokens.
        faults: Number of faults of each kind.
        estimated: Whether token counts are estimated, because the server reports none.
    """

    price: Price | None = None
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    estimated: bool = False

    def add(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> None:
        """Count one call's tokens."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += min(cached_tokens, prompt_tokens)
        self.generated_tokens += generated_tokens

    @property
    def money(self) -> float | None:
        """Cost at `price`; None without prices."""
        if self.price is None:
            return None
        return self.price.cost(self.prompt_tokens, self.cached_tokens, self.generated_tokens)

    def __str__(self) -> str:
        parts = [
            f"{self.calls:,} calls",
            f"{self.prompt_tokens:,} prompt tokens ({self.cached_tokens:,} cached)",
            f"{self.generated_tokens:,} generated tokens{' (estimated)' if self.estimated else ''}",
        ]
        if self.money is not None:
            parts.append(f"cost {self.money:,.4f}")
        if self.faults:
            parts.append("retried: " + ", ".join(f"{kind} {n}" for kind, n in sorted(self.faults.items())))
        return "; ".join(parts)


def money_of(meters: Mapping[str, Meter]) -> float | None:
    """Return the cost of a policy's engines so far, from their meters; None if no meter has a price."""
    charged = [meter.money for meter in meters.values() if meter.money is not None]
    return sum(charged) if charged else None
