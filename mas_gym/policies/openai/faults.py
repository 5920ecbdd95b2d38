"""Faults of a server: what went wrong, whether another try can help, and when to make it."""

from __future__ import annotations

import asyncio
import email.utils
import math
import random
import re
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from mas_gym.policies.openai.wire import BadReply, load_object, read_body

FaultKind = Literal["connection", "reset", "timeout", "rate limit", "server error", "bad reply", "too long", "refused"]

_FIRST_DELAY = 0.25
_LONGEST_DELAY = 20.0
_RETRIED_STATUS = {408, 409, 425}
_UNAVAILABLE_STATUS = {401, 403, 404}
_TOO_LONG = re.compile(r"context[ _-](?:length|window|size)|maximum context|too (?:long|many tokens)", re.IGNORECASE)
_ERROR_BYTES = 2**16
_REASON_CHARS = 500


class StatusError(Exception):
    """A response whose status is not 2xx, with the beginning of its body."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Keep them."""
        super().__init__(status)
        self.status, self.headers, self.body = status, headers, body


async def raise_for_status(response: Any) -> None:
    """Raise `StatusError` unless an httpx response is 2xx; an event hook, so that no client reads the body before.

    Redirects are refused as well: prompts and the API key go to the configured address only.
    """
    if not response.is_success:
        try:
            body, _ = await read_body(response, _ERROR_BYTES)
        except BadReply:
            body = b""
        raise StatusError(response.status_code, response.headers, body)


class Fault(NamedTuple):
    """One failed call.

    Attributes:
        kind: What went wrong; everything except ``"too long"`` and ``"refused"`` is worth another try.
        reason: A description for the error that may follow.
        retry_after: Seconds that the server asked to wait; None if it did not.
        status: The HTTP status; 0 without one.
        param: The parameter that the server objects to, if it names one.
    """

    kind: FaultKind
    reason: str
    retry_after: float | None = None
    status: int = 0
    param: str = ""

    @property
    def away(self) -> bool:
        """Whether the server seems down or overloaded, so that waiting may help."""
        return self.kind in ("connection", "rate limit") or self.status in (502, 503, 504)

    @property
    def hopeless(self) -> bool:
        """Whether every other request would fail as well, because the key, the model or the address is wrong."""
        return self.status in _UNAVAILABLE_STATUS or 300 <= self.status < 400


def fault_of(error: BaseException) -> Fault | None:
    """Return what went wrong, or None for an exception that no server caused."""
    import openai

    # Some versions of the client wrap what its event hooks raise.
    cause = error.__cause__ or error
    for found in (error, cause):
        if isinstance(found, StatusError):
            return _status_fault(found.status, found.body, found.headers)
        if isinstance(found, BadReply):
            return Fault("bad reply", f"the reply is unusable: {found}")
    if type(cause).__name__ == "ConnectTimeout":
        return Fault("connection", "no connection in time")
    if isinstance(error, asyncio.TimeoutError | openai.APITimeoutError):
        return Fault("timeout", "no answer in time")
    if isinstance(error, openai.APIConnectionError):
        # A refused connection means that the server is down; a reset later may concern this request alone.
        kind: FaultKind = "connection" if type(cause).__name__ == "ConnectError" else "reset"
        return Fault(kind, f"the connection failed ({type(cause).__name__}: {_printable(str(cause))})")
    # A reset in the middle of a body surfaces as the HTTP library's own error, which the client does not wrap.
    if type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2", "h11"):
        kind = "timeout" if "Timeout" in type(error).__name__ else "reset"
        return Fault(kind, f"the connection broke ({type(error).__name__}: {_printable(str(error))})")
    return None


def _status_fault(status: int, body: bytes, headers: Mapping[str, str]) -> Fault:
    message, param = _message(body)
    text = f"HTTP {status}: {message}"
    wait = retry_after(headers, time.time())
    if 300 <= status < 400:
        return Fault(
            "refused", f"HTTP {status}, a redirect to {_printable(headers.get('location', ''))!r}", None, status
        )
    if status == 429:
        return Fault("rate limit", text, wait, status)
    if status >= 500 or status in _RETRIED_STATUS:
        return Fault("server error", text, wait, status)
    if status in (400, 413, 422) and _TOO_LONG.search(message):
        return Fault("too long", text, None, status, param)
    return Fault("refused", text, None, status, param)


def _message(body: bytes) -> tuple[str, str]:
    """Return an error body's message and the parameter that it names."""
    try:
        found: Any = load_object(body)
    except BadReply:
        return _printable(body.decode("utf-8", "replace")), ""
    # OpenAI nests the error in an object, others do not.
    error = found["error"] if isinstance(found.get("error"), dict) else found
    message, param = error.get("message"), error.get("param")
    return _printable(message if isinstance(message, str) else str(found)), param if isinstance(param, str) else ""


def _printable(text: str) -> str:
    """Return the beginning of a server's text on one line, without control characters."""
    return "".join(c if c.isprintable() else " " for c in text[:_REASON_CHARS]).strip()


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Read how many seconds a server asks to wait, from ``retry-after-ms`` or ``retry-after`` (seconds or a date).

    Args:
        headers: Of the response, keys in lower case or any case-insensitive mapping.
        now: Unix time, for dates.

    Returns:
        Seconds, at least 0; None without a readable value.
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
            except (ValueError, TypeError, OverflowError):
                continue
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    return None


def delay(tries: int, wait: float | None, rng: random.Random) -> float:
    """Return the seconds to sleep after ``tries`` failed calls: exponential with jitter, never less than ``wait``."""
    ceiling: float = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(tries - 1, 16))
    # Half of the delay is random, so that clients that failed together do not come back together.
    spread = ceiling * (0.5 + 0.5 * rng.random())
    return spread if wait is None else wait + 0.1 * spread
