"""Detection of programs that make no further call until they receive a reply, so that open calls can be ordered."""

from __future__ import annotations

import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from time import monotonic, thread_time

from mas_gym.programs.background import BUSY_SECONDS, Busy, Frames, Running, ThreadUsage, thread_usage
from mas_gym.programs.execution import Execution, Origin
from mas_gym.programs.program_loop import Loop

logger = logging.getLogger("mas_gym.programs")

_POLL_SECONDS = 0.002
_LOAD = 0.1
"""Maximum share of time spent on observing programs."""
_IN_FLIGHT_SECONDS = 0.01
"""Maximum seconds for which the operating system may delay a request of an idle event loop."""
_ROUNDS = 3
"""Number of times that both loops must have read their connections to exclude a request in transit."""
_MOST_TURNS = 50_000
"""Maximum number of event-loop turns that a decision waits for; a task that yields forever makes no call."""
_MOST_PUT_OFF = 100
_LONGEST_SETTLE = 1.0


class _IdleCheck:
    """An execution with open calls that are about to be ordered.

    Attributes:
        seconds: Minimum seconds for which it must be idle.
        busy: Time of its last observed activity.
        since: Time of the program's last call.
        turns: Number of observations since then with pending work on its event loop.
        rounds: Number of consecutive observations without activity or a request for the gateway.
        poll: The number of the last such round.
    """

    __slots__ = ("_usage", "busy", "poll", "rounds", "seconds", "since", "turns")

    def __init__(self, seconds: float) -> None:
        self.seconds, self.rounds, self.poll = seconds, 0, 0
        self.busy = self.since = monotonic()
        self.turns, self._usage = 0, dict[int, ThreadUsage]()

    def called(self, when: float) -> None:
        """Restart the measurement if it began before the program's last call or reply, at ``when``."""
        if when > self.since:
            self.since, self.turns = when, 0
            self._usage = {}

    def sleeps(self, busy: Iterable[Busy], seconds: float) -> bool:
        """Whether the threads of all busy parts have slept for ``seconds``; one without a thread counts as awake."""
        threads = {item.thread for item in busy if item.thread is not None}
        known = threads <= self._usage.keys()
        if known and monotonic() - min((self._usage[thread].time for thread in threads), default=0.0) < seconds:
            return False
        now = {thread: thread_usage(thread) for thread in threads}
        if known and all(now[thread].asleep_since(self._usage[thread]) for thread in now):
            return all(item.thread is not None for item in busy)
        self._usage = now
        return False


class IdleMonitor(ABC):
    """Watches the executions of a runner that have open calls.

    Attributes:
        settle: See `mas_gym.programs.Program`; increased if a call comes too late.
    """

    def __init__(self, name: str, settle: float, longest: float) -> None:
        """Start without executions; a decision waits at most ``longest`` seconds for another call."""
        self._name, self.settle, self._longest = name, settle, longest
        self._programs: Loop | None = None
        self._watched: dict[Execution, _IdleCheck] = {}
        self._unknown: set[str] = set()
        self._poll_lock = threading.Lock()
        self._polling, self._polls, self._put_off = False, 0, 0
        self._look_next = 0.0
        self._late = False

    @abstractmethod
    def _side_loop(self) -> Loop:
        """Return the internal loop, which user code never blocks."""

    def watch(self, execution: Execution, seconds: float = 0.0) -> None:
        """Call `Execution.settle` when the program has been idle for some seconds."""
        if not seconds and execution.exact:
            execution.settle()
            return
        self._watched[execution] = _IdleCheck(seconds)
        if not execution.here or Origin.LOOP in execution.origins:
            self._poll_soon()

    def late(self, seconds: float) -> None:
        """Wait longer for unobservable calls, because a call came some seconds after the decision."""
        if not self._late:
            logger.warning(
                "program %s: a concurrent call came %.2g s too late to be ordered, so another run may give other "
                "results; settle is raised; set Program(..., settle=%.2g) or more",
                self._name,
                seconds,
                max(0.1, 2 * seconds),
            )
        self._late = True
        self.settle = min(max(2 * self.settle, 2 * seconds), max(_LONGEST_SETTLE, self.settle))

    def _poll_soon(self) -> None:
        with self._poll_lock:
            begins, self._polling = not self._polling, True
        if begins:
            self._side_loop().soon(self._poll)

    def _poll(self) -> None:
        """Check the programs on threads, and make the event loop check its programs."""
        began = thread_time()
        programs, side = self._programs, self._side_loop()
        if side.pending() and self._put_off < _MOST_PUT_OFF:
            # Requests that have arrived are read first.
            self._put_off += 1
            side.loop.call_soon(self._poll)
            return
        self._put_off = 0
        self._polls += 1
        on_threads = []
        for execution in list(self._watched):
            if execution.place is None:
                on_threads.append(execution)
            elif execution.place is not programs or (
                programs.running == execution.token and not {Origin.THREAD, Origin.LOOP}.isdisjoint(execution.origins)
            ):
                # Its loop waits for the call or has ended.
                on_threads.append(execution)
        self._look(on_threads)
        if programs is not None and len(on_threads) < len(self._watched):
            programs.soon(programs.poll)
        with self._poll_lock:
            # From here on, adding an execution restarts the polling.
            self._polling = bool(self._watched)
        if self._polling:
            side.loop.call_later(max(_POLL_SECONDS, (thread_time() - began) / _LOAD), self._poll)

    def _look(self, executions: list[Execution], pending: Callable[[], set[Running | None]] = set) -> None:
        """Order the calls of the programs that cannot make another call.

        Args:
            executions: The programs.
            pending: Returns the programs with pending work on their event loop.
        """
        quiet, began, running = [], monotonic(), pending()
        threads = any(execution.activity.jobs or Origin.LOOP in execution.origins for execution in executions)
        frames = sys._current_frames() if threads else {}
        for execution in executions:
            # Removed before the check, because a call during the check adds a new entry, which must not be removed.
            watch = self._watched.pop(execution, None)
            if watch is None:
                continue
            # Observations from before a program's last call or reply are not valid.
            valid = max(watch.since, execution.touched) <= began
            if valid and self._is_quiet(execution, watch, frames, execution in running):
                quiet.append((execution, watch))
            else:
                self._watched.setdefault(execution, watch)
        # Frames keep the objects of their threads alive.
        del frames
        # A thread may have woken the event loop before it was seen to wait.
        woken = pending() - running if quiet else set()
        for execution, watch in quiet:
            if execution in woken or not execution.settle(began):
                self._watched.setdefault(execution, watch)

    def _is_quiet(self, execution: Execution, watch: _IdleCheck, frames: Frames, running: bool) -> bool:
        if not execution.waits:
            return True
        blocked, ours, perhaps = execution.open_over_http()
        # A program may also have sent a request that has not arrived.
        ours = ours or execution.activity.linked
        hidden, busy = True, set[Busy]()
        programs, loop = self._programs, None
        if programs is not None and execution.place is programs and not programs.here:
            # Seen from another thread, a program on the event loop can be idle only while it blocks the loop.
            if programs.running != execution.token:
                return False
            loop = programs.thread.ident
        if execution.observed:
            hidden, busy = execution.activity.state(frames, blocked, perhaps, loop)
        now = monotonic()
        if running or busy:
            watch.called(execution.touched)
            watch.turns += running
            ends = watch.turns > _MOST_TURNS if running else self._sleeps(watch, busy)
            if not ends and now - watch.since < self._longest:
                watch.busy, watch.rounds = now, 0
                return False
            hidden = True
        if watch.poll != self._polls:
            watch.rounds, watch.poll = watch.rounds + 1, self._polls
        seconds = watch.seconds
        if hidden:
            seconds = max(seconds, self.settle)
        elif ours:
            # A request in transit: the event loop has polled its connections in between.
            seconds = max(seconds, min(self.settle, _IN_FLIGHT_SECONDS))
        enough = watch.rounds >= _ROUNDS or not ours
        return enough and now - max(watch.busy, execution.touched) >= seconds

    def _sleeps(self, watch: _IdleCheck, busy: set[Busy]) -> bool:
        """Whether all busy parts have slept for `BUSY_SECONDS`, or for `settle` if all passed this check before."""
        names = {item.name for item in busy}
        if not watch.sleeps(busy, self.settle if names <= self._unknown else BUSY_SECONDS):
            return False
        self._unknown |= names
        return True

    def _idle(self, pending: Callable[[], set[Running | None]]) -> bool:
        """Check the event loop's programs before it waits or polls; return whether any program was idle."""
        watched = [execution for execution in list(self._watched) if execution.place is self._programs]
        if not watched:
            return False
        began = thread_time()
        if monotonic() < self._look_next:
            looked = [execution for execution in watched if not execution.activity.jobs]
        else:
            looked = watched
        self._look(looked, pending)
        if len(looked) == len(watched):
            self._look_next = monotonic() + (thread_time() - began) / _LOAD
        left = sum(execution in self._watched for execution in watched)
        if left:
            self._poll_soon()
        return left < len(watched)
