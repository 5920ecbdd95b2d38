"""Limits on what a search or a run spends."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mas_gym.errors import ConfigError
from search.usage import Usage


@dataclass(frozen=True)
class Budget:
    """Limits on what is spent; None means no limit.

    Attributes:
        calls: Agent calls (AC), never exceeded.
        tokens: Generated tokens (TOK). Once they are spent, a search samples nothing more, except single
            messages that bring its first path to an end. The last request may overshoot.
        seconds: Wall-clock seconds. Results under this limit depend on the machine's speed.
    """

    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Check the limits."""
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is not None and not (isinstance(limit, int | float) and 0 < limit < math.inf):
                raise ConfigError(f"budget: expected {field.name} to be a positive number or None, got {limit!r}")

    def spent(self, usage: Usage, wanted: int) -> str | None:
        """Say which limit forbids ``wanted`` more agent calls, ``"budget of 30 calls spent"``; None if none does.

        When no calls are wanted, only the seconds can be spent.
        """
        if wanted and self.calls is not None and usage.agent_calls + wanted > self.calls:
            return f"budget of {self.calls} calls spent"
        if wanted and self.tokens is not None and usage.generated_tokens >= self.tokens:
            return f"budget of {self.tokens} tokens spent"
        if self.seconds is not None and usage.seconds >= self.seconds:
            return f"budget of {self.seconds:g} seconds spent"
        return None

    def messages_left(self, usage: Usage) -> int | None:
        """Return how many more messages the calls and tokens pay for (`Remaining`); None without such a limit."""
        left: list[int] = []
        if self.calls is not None:
            left.append(self.calls - usage.agent_calls)
        if self.tokens is not None:
            tokens = self.tokens - usage.generated_tokens
            # The length of messages is unknown before the first one.
            left.append(tokens * usage.agent_calls // max(usage.generated_tokens, 1) if usage.agent_calls else 1)
        return max(0, min(left)) if left else None
