"""Classification of failed calls to a server, and the delays between retries."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from mas_gym.internal.text import one_line
from mas_gym.policies.openai_format import BadReply
from mas_gym.policies.server_errors import Fault, read_error

_FIRST_DELAY = 0.25
_LONGEST_DELAY = 20.0
_RETRIED_STATUS = {408, 409, 425}


class StatusError(Exception):
    """A response with a status other than 2xx, and its body."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Store the status, the headers and the body."""
        super().__init__(status)
        self.status, self.headers, self.body = status, headers, body


def fault_of(error: BaseException) -> Fault | None:
    """Return the fault that an exception represents, or None if no server caused it."""
    if isinstance(error, StatusError):
        return _status_fault(error.status, error.body, error.headers)
    if isinstance(error, BadReply):
        return Fault("bad reply", f"the reply is unusable: {error}")
    kind, library = type(error).__name__, type(error).__module__.split(".")[0]
    ours = library in ("httpx", "httpx2")
    if ours and kind == "ConnectTimeout":
        return Fault("connection", "no connection before the timeout")
    if isinstance(error, TimeoutError) or (ours and "Timeout" in kind):
        return Fault("timeout", "no response before the timeout")
    if ours and kind == "DecodingError":
        return Fault("bad reply", f"the reply is unusable: {one_line(error)}")
    if ours:
        # A refused connection means that the server is down; a later reset may affect only this request.
        reason = f"the connection failed ({kind}: {one_line(error)})"
        return Fault("connection" if kind == "ConnectError" else "reset", reason)
    return None


def _status_fault(status: int, body: bytes, headers: Mapping[str, str]) -> Fault:
    if 300 <= status < 400:
        goal = one_line(headers.get("location", ""))
        return Fault("refused", f"HTTP {status}, a redirect to {goal!r}", status)
    stated = read_error(status, body)
    fault = stated._replace(status=status, reason=f"HTTP {status}: {stated.reason}")
    if fault.kind in ("too long", "quota", "system role"):
        return fault
    if status == 429:
        return Fault("rate limit", fault.reason, status, retry_after(headers))
    if status >= 500 or status in _RETRIED_STATUS:
        return Fault("server error", fault.reason, status, retry_after(headers))
    return fault


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds a server asks the client to wait, from ``retry-after-ms`` or ``retry-after``.

    Args:
        headers: The response's headers, with lower-case keys or case-insensitive.

    Returns:
        Seconds, at least 0; None if the headers give no number.
    """
    for key, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):
            seconds = float(headers[key]) * scale
            if math.isfinite(seconds):
                return max(seconds, 0.0)
    return None


@dataclass(slots=True)
class Tries:
    """The failed calls of a request: their number, the time of the first, the request's start, and a jitter generator.

    ``repeats`` counts the replies that were unusable for the same ``reason``; a new reason restarts the count.
    """

    started: float
    rng: random.Random
    made: int = 0
    first: float = 0.0
    repeats: int = 0
    reason: str = ""

    def add(self, fault: Fault, now: float) -> None:
        """Count a failed call."""
        self.first = self.first if self.made else now
        self.made += 1
        if not fault.transient:
            self.repeats = self.repeated(fault) + 1
            self.reason = fault.reason

    def repeated(self, fault: Fault) -> int:
        """Return the number of replies that were unusable for a fault's reason."""
        return self.repeats if fault.reason == self.reason else 0


def delay(tries: int, wait: float | None, rng: random.Random) -> float:
    """Return the seconds to sleep after ``tries`` failed calls: exponential with jitter, never less than ``wait``."""
    ceiling: float = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(tries - 1, 16))
    # Half of the delay is random, so that clients that failed together do not retry together.
    spread = ceiling * (0.5 + 0.5 * rng.random())
    return spread if wait is None else wait + 0.1 * spread
