"""The process that compares expressions for `mas_gym.tasks.symbolic`; run as a script, never imported.

It reads one JSON pair ``[reference, answer]`` per line and writes one verdict per line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from typing import Any

CPU_SECONDS = 2.0
MEMORY_BYTES = 4 << 30
TOLERANCE = 1e-3


class OutOfTime(BaseException):
    """Raised by the CPU timer; not an `Exception`, so that no library handler swallows it."""


def _out_of_time(number: int, frame: object) -> None:
    raise OutOfTime


def main() -> None:
    """Answer until the input ends."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable(logging.CRITICAL)
    compare = _comparer()
    timed = hasattr(signal, "setitimer")
    if timed:
        signal.signal(signal.SIGVTALRM, _out_of_time)
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            if timed:
                # it fires again and again, in case one raise is lost inside a finaliser
                signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, 0.1)
            verdict = "equal" if compare(*json.loads(line)) else "different"
            if timed:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except (OutOfTime, MemoryError, RecursionError):
            if timed:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            verdict = "timed out"
        except Exception:
            if timed:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            verdict = "different"
        print(verdict, flush=True)


def _comparer() -> Any:
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Basic, Expr, N

    config = [LatexExtractionConfig(boxed_match_priority=-1)]

    def read(text: str) -> list[Any]:
        found = parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=None)
        return [expression for expression in found if isinstance(expression, Basic) or hasattr(expression, "shape")]

    def near(a: Any, b: Any) -> bool:
        if not (isinstance(a, Expr) and isinstance(b, Expr)) or a.free_symbols or b.free_symbols:
            return False
        x, y = complex(N(a, 20)), complex(N(b, 20))
        return abs(x - y) <= TOLERANCE * min(1.0, max(abs(x), abs(y)))

    def compare(reference: str, answer: str) -> bool:
        right, given = read(reference), read(answer)
        if not right or not given:
            return False
        if verify(right, given, allow_set_relation_comp=True, timeout_seconds=None):
            return True
        return near(right[0], given[0])

    return compare


if __name__ == "__main__":
    main()
