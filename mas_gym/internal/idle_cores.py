"""Number of processor cores that other processes leave idle.

Threads of a matrix product wait for each other in a loop. Beside a process that keeps a core busy, the thread that has
to wait for a core delays all others, and two threads are slower than one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_SECONDS = 1.0
# Idle, and waiting for a disk.
_IDLE = slice(3, 5)


class IdleCores:
    """Measures over intervals of at least a second how many cores other processes use."""

    def __init__(self) -> None:
        self._last = _read()
        self._others = 0

    def others(self) -> int:
        """Return how many of this process's cores others used in the last interval; 0 if the system does not say."""
        if self._last is not None and time.monotonic() - self._last[0] >= _SECONDS and (now := _read()) is not None:
            passed, used = (after - before for after, before in zip(now, self._last, strict=True))
            self._others = max(0, round(used / passed))
            self._last = now
        return self._others


def _read() -> tuple[float, float] | None:
    """Return seconds since an arbitrary start: the time, and the use of this process's cores by others."""
    try:
        allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = (line.split() for line in _STAT.read_text("ascii").splitlines())
        own = [[int(field) for field in rest[:8]] for name, *rest in lines if name in allowed]
        used = sum(sum(fields) - sum(fields[_IDLE]) for fields in own)
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None
    return time.monotonic(), used / ticks - time.process_time()
