"""Which faults of a server are worth another try, and when."""

from __future__ import annotations

import asyncio
import email.utils
import random
import re
import time
from collections.abc import Mapping
from typing import Literal, NamedTuple

from mas_gym.policies.openai.wire import BadReply

FaultKind = Literal["connection", "reset", "timeout", "rate limit", "server error", "bad reply", "too long", "refused"]

_FIRST_DELAY = 0.25
_LONGEST_DELAY = 20.0
_RETRIED_STATUS = {408, 409, 425}
_UNAVAILABLE_STATUS = {401, 403, 404}
_TOO_LONG = re.compile(r"context[ _-](?:length|window|size)|maximum context|too (?:long|many tokens)", re.IGNORECASE)


class Fault(NamedTuple):
    """One failed call.

    Attributes:
        kind: What went wrong; everything but ``"too long"`` and ``"refused"`` is worth another try.
        reason: In words, for the error that may follow.
        retry_after: Seconds that the server asked to wait; None if it did not.
        status: The HTTP status; 0 without one.
        param: The parameter that the server objects to, where it says so.
    """

    kind: FaultKind
    reason: str
    retry_after: float | None = None
    status: int = 0
    param: str = ""

    @property
    def away(self) -> bool:
        """Whether the server seems to be gone or overloaded, rather than wrong: worth waiting for."""
        return self.kind in ("connection", "rate limit") or self.status in (502, 503, 504)

    @property
    def hopeless(self) -> bool:
        """Whether no other request would fare better: the key or the model is wrong."""
        return self.status in _UNAVAILABLE_STATUS


def fault_of(error: Exception) -> Fault | None:
    """Return what went wrong, or None for an exception that no server caused."""
    import openai

    if isinstance(error, BadReply):
        return Fault("bad reply", f"the reply is unusable: {error}")
    if type(error.__cause__).__name__ == "ConnectTimeout":
        return Fault("connection", "no connection in time")
    if isinstance(error, asyncio.TimeoutError | openai.APITimeoutError):
        return Fault("timeout", "no answer in time")
    if isinstance(error, openai.APIStatusError):
        return _status_fault(error.status_code, str(error.message), error.param or "", error.response.headers)
    if isinstance(error, openai.APIConnectionError):
        cause = error.__cause__ or error
        # Refused at the door, the server is away; cut off later, the fault may lie with this one request.
        kind: FaultKind = "connection" if type(cause).__name__ == "ConnectError" else "reset"
        return Fault(kind, f"the connection failed ({type(cause).__name__}: {cause})")
    # A reset in the middle of a body surfaces as the HTTP library's own error, past the client's wrapping.
    if type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2", "h11"):
        kind = "timeout" if "Timeout" in type(error).__name__ else "reset"
        return Fault(kind, f"the connection broke ({type(error).__name__}: {error})")
    return None


def _status_fault(status: int, message: str, param: str, headers: Mapping[str, str]) -> Fault:
    text = f"HTTP {status}: {message[:500]}"
    wait = retry_after(headers, time.time())
    if status == 429:
        return Fault("rate limit", text, wait, status)
    if status >= 500 or status in _RETRIED_STATUS:
        return Fault("server error", text, wait, status)
    if status in (400, 413, 422) and _TOO_LONG.search(message):
        return Fault("too long", text, None, status, param)
    return Fault("refused", text, None, status, param)


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Read how many seconds a server asks to wait, from ``retry-after-ms`` or ``retry-after`` (seconds or a date).

    Args:
        headers: Of the response, keys in lower case or any case-insensitive mapping.
        now: Unix time, for dates.
    """
    for key, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(key)
        if value is None:
            continue
        try:
            seconds = float(value) * scale
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(value).timestamp() - now
            except ValueError:
                continue
        if seconds == seconds and seconds != float("inf"):
            return max(seconds, 0.0)
    return None


def delay(tries: int, wait: float | None, rng: random.Random) -> float:
    """Return the seconds to sleep after ``tries`` failed calls: exponential with jitter, never under ``wait``."""
    ceiling: float = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(tries - 1, 16))
    # Half of the delay is random, so that clients that failed together do not come back together.
    spread = ceiling * (0.5 + 0.5 * rng.random())
    return spread if wait is None else wait + 0.1 * spread
