"""One execution of a program: its answered calls, its waiting calls, and its result.

An execution receives a script: the chosen replies of earlier executions, in order. A call is answered when it is the
next call in the script. When the script is finished and the program is idle, the waiting calls are put into a canonical
order. The first of them is the next decision::

    running --(script finished, idle)--> parked: the first waiting call is the decision
       ^                                    |
       +--------- answer(text) -------------+
    running --(returns or raises)--> over

The order is: calls that were already waiting at the last decision, in their order at that time; then new calls, sorted
by agent and text. It therefore depends only on the concurrent calls, and not on the speed of threads.
"""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import copy_context
from enum import Enum
from time import monotonic
from typing import Any, NamedTuple, Protocol

from mas_gym.errors import MASGymError
from mas_gym.programs.background import Activity, Interrupt, ProgramStopped
from mas_gym.programs.chat_completions import Call, difference
from mas_gym.programs.program_loop import Loop
from mas_gym.programs.worlds import World


class DivergenceError(MASGymError, RuntimeError):
    """A program made a different call on replay."""


class Origin(Enum):
    """How a call reaches its execution."""

    CLIENT = "from a client in this process"
    LOOP = "from a client in this process, on the thread of the program's event loop"
    THREAD = "over HTTP, from a thread that waits for the reply"
    TASK = "over HTTP, from a task of an event loop"
    HTTP = "over HTTP, from any client"


class Waiting(NamedTuple):
    """The program waits for replies; the first call is the decision."""

    calls: tuple[Call, ...]


class Ended(NamedTuple):
    """The program returned an answer."""

    answer: str


class Failed(NamedTuple):
    """The program raised an error, hung, or made too many calls."""

    error: str


Outcome = Waiting | Ended | Failed


class ScriptStep(NamedTuple):
    """A reply from the script and its call; the call is None if unknown."""

    call: Call | None
    text: str


class Script(NamedTuple):
    """Replies to give immediately, and the digests of the other calls waiting at the last reply, in order."""

    steps: Sequence[ScriptStep] = ()
    beside: Sequence[bytes] = ()


Report = Callable[["Execution", Outcome | Exception], None]
"""Called with an execution's outcome, or the `DivergenceError` that ended it."""


class ToolResult(NamedTuple):
    """A recorded tool use: the replies given before it, its result, and the token of the world's content after it."""

    before: tuple[str, ...]
    result: Any
    world: str = ""


class Tape(dict[str, list[ToolResult]]):
    """The recorded results of a search's tools, by use.

    Attributes:
        varied: Whether a call arrived after the decision that should have ordered it.
    """

    varied = False


def key_of(tool: str, arguments: object) -> str:
    """Return the key of a tool use."""
    return f"{tool}{arguments!r}"


class Use:
    """One use of a recorded tool in an execution.

    Attributes:
        found: Whether an earlier execution recorded its result.
        result: That result.
        world: The token of the world's content after it; empty without a world.
    """

    def __init__(
        self,
        tape: Tape,
        key: str,
        taken: tuple[str, ...],
        path: tuple[str, ...],
        snapshot: Callable[[], str],
    ) -> None:
        """Look up a result that was recorded after the same replies."""
        self._tape, self._key, self._taken, self._snapshot = tape, key, taken, snapshot
        hits = [use for use in tape.get(key, ()) if use.before == path[: len(use.before)]]
        self.found = bool(hits)
        self.result: Any = hits[0].result if hits else None
        self.world = hits[0].world if hits else ""

    def keep(self, result: object) -> object:
        """Record the result and the world, and return the result."""
        self._tape.setdefault(self._key, []).append(ToolResult(self._taken, result, self._snapshot()))
        return result


class Host(Protocol):
    """The interface of a runner that an execution uses."""

    def watch(self, execution: Execution, seconds: float = 0.0) -> None:
        """Call `Execution.settle` when the program has been idle for some seconds."""

    def late(self, seconds: float) -> None:
        """Wait longer for later calls, because a call came some seconds after the decision."""

    def rests(self, execution: Execution) -> None:
        """Free the slot of an execution that waits for a reply or is over; end its program if it is over."""


def given(texts: list[str]) -> list[str]:
    """Return a call's replies.

    Raises:
        ProgramStopped: The execution is over.
    """
    if not texts:
        # Raised here, because an exception in a future would keep every frame of the program alive.
        raise ProgramStopped
    return texts


class _Open:
    """A call without replies."""

    __slots__ = ("call", "context", "origin", "reply", "texts")

    def __init__(self, call: Call, origin: Origin) -> None:
        self.call, self.origin, self.texts = call, origin, list[str]()
        self.context = copy_context()
        self.reply: Future[list[str]] | None = None

    def send(self, texts: list[str]) -> None:
        """Send the reply, with one text per choice, or without texts if the execution is over."""
        if self.reply is not None:
            # Its client may have disconnected. An event loop finds the execution of the reply by the context.
            with suppress(InvalidStateError):
                self.context.run(self.reply.set_result, texts)


PATIENCE = 0.5
"""Seconds that an unexpected call waits for the expected one before the program counts as diverged."""


class Execution:
    """One execution of a program on one question; thread-safe.

    Attributes:
        token: Identifies the execution in the gateway's URLs.
        key: The API key of the program; empty if its calls need no key.
        bearer: The required authorization header of its calls.
        question: The question.
        asked: Number of calls that the program has made.
        over: Whether the program has ended or was dropped.
        touched: Time of its last call or reply, on the clock of `time.monotonic`.
        deadline: Time from which the program counts as hung, on the same clock; None while it waits for a reply.
        place: The shared loop that it runs on, if any; set by its runner.
        observed: Whether its threads and tasks can be observed; set by its source.
        activity: Its activity besides open calls.
        interrupt: Stops the program's thread, if the program has a dedicated thread.
        copy: The name of its copy of the program's world; None if there is no copy.
    """

    def __init__(
        self,
        host: Host,
        token: str,
        key: str,
        question: str,
        script: Script,
        limits: tuple[int, float],
        report: Report,
        tape: Tape,
        world: World | None = None,
    ) -> None:
        """Prepare an execution; ``limits`` are its number of calls, and the seconds after which it counts as hung.

        ``report`` is called once per decision, with the outcome or a `DivergenceError`, on any thread.
        """
        self.token, self.key, self.question = token, key, question
        self.bearer = f"Bearer {key}".encode()
        self.place: Loop | None = None
        self.observed = False
        self.activity = Activity()
        self.interrupt = Interrupt()
        self.copy: str | None = None
        self._world = world
        self._host, self._report = host, report
        self._steps, self._order = deque(script.steps), list(script.beside)
        self._taken: list[ScriptStep] = []
        self._tape, self._uses = tape, dict[str, int]()
        self._open_uses: dict[str, list[Use]] = defaultdict(list)
        self._limit, self._timeout = limits
        self._lock = threading.RLock()
        self._open: list[_Open] = []
        self.asked = self._answered = 0
        self._parked: Call | None = None
        self._parked_at = 0.0
        self._withdrawn: set[bytes] = set()
        self.over = False
        self._stuck: float | None = None
        self.touched = monotonic()
        self.deadline: float | None = None

    def began(self) -> None:
        """Start the program's timeout."""
        self.touched = monotonic()
        self.deadline = self.touched + self._timeout

    def wait_longer(self, seconds: float) -> None:
        """Postpone the deadline, if there is one."""
        with self._lock:
            if self.deadline is not None:
                self.deadline += seconds

    # ---- its copy of the world

    @property
    def has_world(self) -> bool:
        """Whether the program has a world."""
        return self._world is not None

    def enter(self) -> bool:
        """Create the program's copy of the world, if any; blocks. Returns False if the program must not start."""
        if self._world is None:
            return True
        self.deadline = None
        try:
            copy = self._world.restore(self._world.start)
        except Exception as error:
            # Not an error of the program, so not an outcome of the search.
            self.drop(error)
            return False
        with self._lock:
            starts = not self.over
            if starts:
                self.copy = copy
                self.began()
        if not starts:
            self._world.release(copy)
        return starts

    def leave(self) -> None:
        """Remove the copy, once the program no longer runs; safe to call twice."""
        if self._world is not None and self.copy is not None:
            self._world.release(self.copy)
            self.copy = None

    def _snapshot(self) -> str:
        return "" if self._world is None or self.copy is None else self._world.snapshot(self.copy)

    # ---- the program's side

    @property
    def waits(self) -> bool:
        """Whether the program has open calls, none of which has been chosen as the next decision yet."""
        return bool(self._open) and self._parked is None and not self.over

    @property
    def here(self) -> bool:
        """Whether the caller is on the thread of the shared loop that the program runs on."""
        return self.place is not None and self.place.here

    @property
    def origins(self) -> list[Origin]:
        """The origins of its open calls."""
        return [item.origin for item in list(self._open)]

    @property
    def exact(self) -> bool:
        """Whether the program's open call is the only call that it can make."""
        origins = self.origins
        if Origin.LOOP in origins:
            # Threads, and requests in transit, do not need the event loop.
            return not self.activity.jobs and not self.activity.linked
        only = self.observed and self.activity.alone and len(origins) == 1
        return only and (self.place is not None or origins[0] in (Origin.CLIENT, Origin.THREAD))

    def open_over_http(self) -> tuple[int, int, int]:
        """Return the numbers of open HTTP calls by caller: threads, tasks on its own event loop, and others."""
        origins = self.origins
        tasks = origins.count(Origin.TASK)
        ours = tasks if self.place is not None else 0
        return origins.count(Origin.THREAD), ours, origins.count(Origin.HTTP) + tasks - ours

    def ask(self, call: Call, origin: Origin) -> list[str] | Future[list[str]]:
        """Handle a call of the program; return one text per choice, or the pending reply (see `given`).

        Raises:
            ProgramStopped: The execution is over.
        """
        with self.interrupt.deferred():
            return self._ask(call, origin)

    def _ask(self, call: Call, origin: Origin) -> list[str] | Future[list[str]]:
        if self.copy is not None and json.dumps(self.copy)[1:-1] in call.text:
            self.drop(
                DivergenceError(
                    f"call {self.asked + 1}: expected no path of the world's copy, got {self.copy}, which differs in "
                    "each execution; use paths relative to it, or mask it with normalize="
                )
            )
            raise ProgramStopped
        with self._lock:
            if self.over:
                raise ProgramStopped
            self.asked += 1
            item = _Open(call, origin)
            self.touched = monotonic()
            if self._parked is not None and call.digest not in self._withdrawn:
                self._late(self.touched - self._parked_at)
            if self.asked <= self._limit:
                self._open.append(item)
                self._drain()
                if len(item.texts) < call.n:
                    item.reply = Future()
                    # The call now waits for its reply, for a bounded time.
                    self.deadline = None
        if self.asked > self._limit:
            most = f"more than {self._limit} calls; raise max_calls if the program needs them"
            self.finish(Failed(f"the program made {most}"))
            raise ProgramStopped
        if item.reply is None:
            return item.texts
        self._host.watch(self)
        return item.reply

    def wait_for(self, texts: list[str] | Future[list[str]]) -> list[str]:
        """Return the result of `ask`, waiting for it on this thread if necessary. Raises `ProgramStopped`."""
        # An exception inside of a wait could leave the future's lock acquired.
        with self.interrupt.deferred():
            return given(texts.result() if isinstance(texts, Future) else texts)

    def use(self, key: str) -> Use:
        """Return the next use of a recorded tool with these arguments."""
        with self._lock:
            number = self._uses[key] = self._uses.get(key, 0) + 1
            taken = tuple(step.text for step in self._taken)
            path = (*taken, *(step.text for step in self._steps))
        use = Use(self._tape, f"{number} {key}", taken, path, self._snapshot)
        if use.world and self._world is not None:
            self._world.restore(use.world, self.copy)
        return use

    def look_up(self, key: str) -> Use:
        """Return the next use of a tool written in another language; one without a result remains open for `record`."""
        use = self.use(key)
        if not use.found:
            with self._lock:
                self._open_uses[key].append(use)
        return use

    def record(self, key: str, result: object) -> None:
        """Record the result of the last open use, or of a new use; simultaneously open uses are interchangeable."""
        with self._lock:
            uses = self._open_uses[key]
            use = uses.pop() if uses else None
        (self.use(key) if use is None else use).keep(result)

    def withdraw(self, reply: Future[list[str]]) -> None:
        """Remove a call after its client has disconnected; the client may repeat the call."""
        with self._lock:
            self._withdrawn.update(item.call.digest for item in self._open if item.reply is reply)
            self._open = [item for item in self._open if item.reply is not reply]
            if not self._open and not self.over:
                self.deadline = monotonic() + self._timeout

    def finish(self, outcome: Ended | Failed) -> None:
        """Record the program's end."""
        with self._lock:
            if self.over:
                return
            left = self._steps[0] if self._steps else None
            parked = self._parked is not None
            self._end()
        self._host.rests(self)
        if parked:
            # The program ended without waiting for the reply; the next replay shows whether this repeats.
            return
        if left is None:
            self._report(self, outcome)
        else:
            what = f"failed: {outcome.error}" if isinstance(outcome, Failed) else "returned an answer"
            asked = "" if left.call is None else f":\n{left.call.text[:500]}"
            error = DivergenceError(
                f"the program {what} after {self._answered} calls in a replay, but made another call before{asked}"
            )
            self._report(self, error)

    # ---- the search's side

    def answer(self, text: str, report: Report) -> bool:
        """Reply to the decision and continue; return False if the program was not waiting for it."""
        with self._lock:
            if self.over or self._parked is None:
                return False
            self._steps.append(ScriptStep(self._parked, text))
            self._parked, self._report = None, report
            self.deadline = monotonic() + self._timeout
            self._drain()
            waits = bool(self._open)
            if waits:
                self.deadline = None
        if waits:
            self._host.watch(self)
        return True

    def drop(self, error: Exception | None = None) -> None:
        """End the execution; nothing is reported except the error, if one is given."""
        with self._lock:
            if self.over:
                return
            parked = self._parked is not None
            self._end()
        self._host.rests(self)
        if error is not None and not parked:
            self._report(self, error)

    def fail(self, error: str) -> None:
        """End the execution with a failure of the program."""
        self.finish(Failed(error))

    def settle(self, observed: float = math.inf) -> bool:
        """Handle a program that was idle at the time ``observed``: continue with the script, or report the decision.

        Returns False, and does nothing, if there was a call or a reply since then.
        """
        with self._lock:
            if self.touched > observed:
                return False
            if not self.waits:
                return True
            ordered = self._ordered()
            if self._steps:
                error = self._unstick(ordered)
                if error is None:
                    return True
                self._end()
            else:
                error = None
                self._order = [item.call.digest for item in ordered[1:]]
                self._parked, self._parked_at, self.deadline = ordered[0].call, monotonic(), None
        self._host.rests(self)
        if error is not None:
            self._report(self, error)
        else:
            self._report(self, Waiting(tuple(item.call for item in ordered)))
        return True

    def moved(self) -> tuple[Script, Report, Tape] | None:
        """Drop the execution, and return the inputs for an identical execution; None if no search waits for it."""
        with self._lock:
            busy = not self.over and self._parked is None
            script, report = Script([*self._taken, *self._steps], self._order), self._report
            self._end()
        self._host.rests(self)
        return (script, report, self._tape) if busy else None

    # ---- inside the lock

    def _drain(self) -> None:
        """Give the script's replies to the next calls."""
        while self._steps and (call := self._steps[0].call) is not None:
            for item in self._open:
                if item.call is call or item.call.digest == call.digest:
                    self._give(item)
                    break
            else:
                return

    def _give(self, item: _Open) -> None:
        step = self._steps.popleft()
        if self._stuck is not None:
            self._late(0.0)
        # Executions share the script's calls, which contain the prompts.
        self._taken.append(step if step.call is not None else ScriptStep(item.call, step.text))
        item.texts.append(step.text)
        self._answered += 1
        self._stuck = None
        if len(item.texts) == item.call.n:
            self._open.remove(item)
            item.send(item.texts)
        # Afterwards, because an observation before it would not see what the reply wakes.
        self.touched = monotonic()
        self.deadline = self.touched + self._timeout

    def _ordered(self) -> list[_Open]:
        """Return the waiting calls in canonical order."""
        if len(self._open) == 1:
            return list(self._open)
        places: dict[bytes, deque[int]] = defaultdict(deque)
        for place, digest in enumerate(self._order):
            places[digest].append(place)

        def key(item: _Open) -> tuple[int, int, str, str]:
            known = places.get(item.call.digest)
            first = 0 if item.texts else 1
            known_place = known.popleft() if known else len(self._order)
            return first, known_place, item.call.agent or item.call.node, item.call.text

        keyed = [(key(item), number, item) for number, item in enumerate(self._open)]
        return [item for _, _, item in sorted(keyed, key=lambda entry: entry[:2])]

    def _unstick(self, ordered: list[_Open]) -> DivergenceError | None:
        """Continue a script if its next call is unknown or delayed; return an error if the call will not arrive."""
        step = self._steps[0]
        if step.call is None:
            self._give(ordered[0])
            self._host.watch(self)
            return None
        now = monotonic()
        self._stuck = now if self._stuck is None else self._stuck
        if now - self._stuck < PATIENCE:
            self._host.watch(self, PATIENCE)
            return None
        got = ordered[0].call
        return DivergenceError(
            f"the program made a different call in a replay, at call {self._answered + 1}; - is the recorded call, + "
            f"the new one:\n{difference(step.call.text, got.text)}\nUsual causes are the time, random ids and the "
            "order of sets; mask them with normalize="
        )

    def _late(self, seconds: float) -> None:
        """Record that a call arrived after the decision that should have ordered it."""
        self._tape.varied = True
        self._host.late(seconds)

    def _end(self) -> None:
        self.over, self.deadline = True, None
        self.activity.jobs.clear()
        waiting, self._open = self._open, []
        for item in waiting:
            item.send([])
