"""Growth of CPU time with the size of an input, which does not depend on the speed of the machine."""

from collections.abc import Callable
from time import thread_time

STEEPEST = 8.0  # four times the input: linear time grows by 4, quadratic time by 16
LEAST = 0.005  # seconds that the clock measures well


def cpu(work: Callable[[int], object], size: int) -> float:
    begin = thread_time()
    work(size)
    return thread_time() - begin


def assert_linear(work: Callable[[int], object], size: int) -> None:
    """Check that ``work`` takes at most eight times as long for ``size`` as for a quarter of it."""
    small = min(cpu(work, size // 4) for _ in range(3))
    # Several times, as a collection of garbage may fall into one measurement.
    large = [cpu(work, size)]
    while min(large) > STEEPEST * max(small, LEAST):
        assert len(large) < 6, f"{size // 4}: {small:.3f} s, {size}: {min(large):.3f} s"
        large.append(cpu(work, size))
