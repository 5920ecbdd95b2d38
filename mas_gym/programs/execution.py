"""One execution of a program: which of its calls are answered, which wait, how it ended, and its recorded tools.

An execution gets a script, the replies of earlier executions in the order in which they were chosen. A call
is answered when it is next in the script, and not before. When the script is used up and the program is quiet,
the calls that wait are put into a canonical order; the first of them is the next decision::

    running --(script used up, quiet)--> parked: the first waiting call is the decision
       ^                                    |
       +--------- answer(text) -------------+
    running --(returns or raises)--> over

The order is: calls that waited at the last decision already, as they were ordered then; after them new ones,
sorted by agent and text. So it depends on what is asked at the same time, and not on which thread was faster.

A tool's result belongs to the replies that were given before it ran: a branch that shares them gets the recorded
result, any other branch runs the tool. In Python::

    @mas_gym.recorded
    def search_web(query: str) -> str: ...

In other languages, over the program's base URL: ``POST {base_url}/recorded`` with ``{"tool": ..., "arguments": ...}``
replies ``{"recorded": true, "result": ...}``, or ``{"recorded": false}``; then the program runs its tool and sends
``PUT {base_url}/recorded`` with the same fields and ``"result"``.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum
from time import monotonic
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from mas_gym.errors import MASGymError
from mas_gym.programs.calls import Call, CallError, Reply, difference


class DivergenceError(MASGymError, RuntimeError):
    """A program asked something else when it was replayed."""


class ProgramStopped(BaseException):
    """Raised inside a program whose execution is over; not an `Exception`, so that programs do not catch it."""


class Quiet(Enum):
    """How to find out that a program makes no more calls before it gets a reply."""

    NOW = "the thread or task that calls is the only one of the program"
    IDLE = "the program's event loop is idle"
    SETTLED = "no call has come for a while"


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


class Step(NamedTuple):
    """A reply of the script, and the call that it answers; None if the call is not known."""

    call: Call | None
    text: str


class Script(NamedTuple):
    """What is answered at once: the replies, and the digests of the calls that waited beside the last one, in order."""

    steps: Sequence[Step] = ()
    beside: Sequence[bytes] = ()


Report = Callable[["Execution", Outcome | Exception], None]
"""Takes an execution's outcome, or the `DivergenceError` that ended it."""


Tape = dict[str, list[tuple[tuple[str, ...], Any]]]
"""The recorded results of a search's tools: by use, the replies given before it and the result."""


def key_of(tool: str, arguments: Any) -> str:
    """Return the key of a use of a tool."""
    return f"{tool}{arguments!r}"


class Use:
    """One use of a recorded tool in an execution.

    Attributes:
        found: Whether an earlier execution recorded its result.
        result: That result.
    """

    def __init__(self, tape: Tape, key: str, taken: tuple[str, ...], path: tuple[str, ...]) -> None:
        """Look for a result that was recorded after replies that this execution gets, too."""
        self._tape, self._key, self._taken = tape, key, taken
        entries = tape.get(key, ())
        hits = [result for before, result in entries if before == path[: len(before)]]
        self.found = bool(hits)
        self.result = hits[0] if hits else None

    def keep(self, result: Any) -> Any:
        """Record the result, and return it."""
        self._tape.setdefault(self._key, []).append((self._taken, result))
        return result


class Host(Protocol):
    """What an execution needs from its runner."""

    def watch(self, execution: Execution, quiet: Quiet) -> None:
        """Call `Execution.settle` when the program is quiet."""
        ...

    def look_again(self, execution: Execution, seconds: float) -> None:
        """Call `Execution.settle` after some time."""
        ...

    def rests(self, execution: Execution) -> None:
        """Make room for others: an execution waits for a reply, or it is over and its program must end."""
        ...


def given(texts: list[str] | Future[list[str]]) -> list[str]:
    """Return a call's replies, waiting for them if need be.

    Raises:
        ProgramStopped: The execution is over.
    """
    found = texts.result() if isinstance(texts, Future) else texts
    if not found:
        # Raised here, because an exception in the future would keep every frame of the program alive.
        raise ProgramStopped
    return found


class Later(Protocol):
    """A reply that is not there yet, such as a future of either kind."""

    def set_result(self, texts: list[str], /) -> object:
        """Take one text per choice; none if the execution is over."""
        ...


class Place(Protocol):
    """A loop that executions share."""

    @property
    def here(self) -> bool:
        """Whether the caller is on the loop's thread."""
        ...

    def soon(self, work: Callable[..., Any], *args: Any) -> None:
        """Call a function on the loop; nothing happens if the loop is closed."""
        ...


def in_thread(execution: Execution) -> Future[list[str]]:
    """Return a reply for which a thread waits."""
    return Future()


L = TypeVar("L", bound=Later)


class _Open:
    """A call without its replies."""

    __slots__ = ("call", "reply", "texts")

    def __init__(self, call: Call) -> None:
        self.call, self.texts = call, list[str]()
        self.reply: Later | None = None


PATIENCE = 0.5
"""Seconds that an unexpected call waits for the expected one before the program counts as diverged."""


class Execution:
    """One execution of a program on one question; thread-safe.

    Attributes:
        token: Names the execution in the gateway's URLs.
        key: The API key that the program is given; empty if its calls need none.
        bearer: The authorization header that its calls must carry.
        question: The question.
        touched: When it last made a call or got a reply, on the clock of `time.monotonic`.
        deadline: When the program counts as hung, on the clock of `time.monotonic`; None while it waits for a reply.
        place: The loop that it runs on, if it shares one; set by its runner.
        thread: The only thread that it is known to run on; set by its source.
        alone: Whether it has started no task beside its first; set by that loop.
        nodes: The nodes of a graph that send requests, by the contents of the messages.
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
    ) -> None:
        """Prepare an execution.

        Args:
            host: The runner.
            token: See above.
            key: See above.
            question: See above.
            script: What to answer at once.
            limits: Maximum number of calls; seconds without a call or an answer, after which the program has hung.
            tape: The recorded results of the search.
            report: Called once per decision, with the outcome or a `DivergenceError`, on any thread.
        """
        self.token, self.key, self.question = token, key, question
        self.bearer = f"Bearer {key}".encode()
        self.place: Place | None = None
        self.thread: int | None = None
        self.alone = True
        self.nodes: dict[tuple[str, ...], str] = {}
        self._host, self._report = host, report
        self._steps, self._order = deque(script.steps), list(script.beside)
        self._taken: list[Step] = []
        self._tape, self._uses = tape, dict[str, int]()
        self._last_use: dict[str, Use] = {}
        self._limit, self._timeout = limits
        self._lock = threading.RLock()
        self._open: list[_Open] = []
        self._asked = self._answered = 0
        self._parked: Call | None = None
        self._over = False
        self._quiet = Quiet.SETTLED
        self._stuck: float | None = None
        self.touched = monotonic()
        self.deadline: float | None = None

    @property
    def asked(self) -> int:
        """How many calls the program has made."""
        return self._asked

    @property
    def over(self) -> bool:
        """Whether the program has ended or was dropped."""
        return self._over

    def began(self) -> None:
        """Start the clock of the program."""
        self.touched = monotonic()
        self.deadline = self.touched + self._timeout

    def wait_longer(self, seconds: float) -> None:
        """Move the deadline, if there is one."""
        with self._lock:
            if self.deadline is not None:
                self.deadline += seconds

    # ---- the program's side

    def ask(self, call: Call, quiet: Quiet, later: Callable[[Execution], L]) -> list[str] | L:
        """Take a call of the program; return one text per choice, or what ``later`` returns, which gets them.

        Raises:
            ProgramStopped: The execution is over.
        """
        with self._lock:
            if self._over:
                raise ProgramStopped
            self._asked += 1
            self._quiet, item = quiet, _Open(call)
            self.touched = monotonic()
            if self._asked <= self._limit:
                self._open.append(item)
                self._drain()
                if len(item.texts) < call.n:
                    item.reply = reply = later(self)
        if self._asked > self._limit:
            most = f"more than {self._limit} calls; raise max_calls if the program needs them"
            self.finish(Failed(f"the program made {most}"))
            raise ProgramStopped
        if item.reply is None:
            return item.texts
        self._host.watch(self, quiet)
        return reply

    def use(self, key: str) -> Use:
        """Return the next use of a recorded tool with these arguments."""
        with self._lock:
            number = self._uses[key] = self._uses.get(key, 0) + 1
            taken = tuple(step.text for step in self._taken)
            path = (*taken, *(step.text for step in self._steps))
            found = self._last_use[key] = Use(self._tape, f"{number} {key}", taken, path)
            return found

    def pending_use(self, key: str) -> Use:
        """Return the last use of a recorded tool with these arguments."""
        with self._lock:
            found = self._last_use.get(key)
        return found if found is not None else self.use(key)

    def withdraw(self, reply: Later) -> None:
        """Forget a call whose client has left; the same call may come again."""
        with self._lock:
            self._open = [item for item in self._open if item.reply is not reply]

    def finish(self, outcome: Ended | Failed) -> None:
        """Take the program's end."""
        with self._lock:
            if self._over:
                return
            left = self._steps[0] if self._steps else None
            parked = self._parked is not None
            self._end()
        self._host.rests(self)
        if parked:
            # It did not wait for the reply; the next replay shows whether it does again.
            return
        if left is None:
            self._report(self, outcome)
        else:
            what = f"failed: {outcome.error}" if isinstance(outcome, Failed) else "returned an answer"
            asked = "" if left.call is None else f" and asked\n{left.call.text[:500]}"
            error = DivergenceError(
                f"the program {what} after {self._answered} calls when it was replayed, though it went on before{asked}"
            )
            self._report(self, error)

    # ---- the search's side

    def answer(self, text: str, report: Report) -> bool:
        """Reply to the decision and run on; False if the program did not wait for it."""
        with self._lock:
            if self._over or self._parked is None:
                return False
            self._steps.append(Step(self._parked, text))
            self._parked, self._report = None, report
            self.deadline = monotonic() + self._timeout
            self._drain()
            waits = bool(self._open)
        if waits:
            self._host.watch(self, self._quiet)
        return True

    def drop(self) -> None:
        """End the execution; nothing more is reported."""
        with self._lock:
            if self._over:
                return
            self._end()
        self._host.rests(self)

    def fail(self, error: str) -> None:
        """End the execution with a failure of the program."""
        self.finish(Failed(error))

    def settle(self) -> None:
        """Note that the program is quiet: go on with the script, or report the decision."""
        with self._lock:
            if self._over or self._parked is not None or not self._open:
                return
            ordered = self._ordered()
            if self._steps:
                error = self._unstick(ordered)
                if error is None:
                    return
                self._end()
            else:
                error = None
                self._order = [item.call.digest for item in ordered[1:]]
                self._parked, self.deadline = ordered[0].call, None
        self._host.rests(self)
        if error is not None:
            self._report(self, error)
        else:
            self._report(self, Waiting(tuple(item.call for item in ordered)))

    def moved(self) -> tuple[Script, Report, Tape] | None:
        """Drop the execution, and return what another one needs to do the same; None if nothing waits for it."""
        with self._lock:
            busy = not self._over and self._parked is None
            script, report = Script([*self._taken, *self._steps], self._order), self._report
        self.drop()
        return (script, report, self._tape) if busy else None

    # ---- inside the lock

    def _drain(self) -> None:
        """Answer the calls that the script names next."""
        while self._steps and (call := self._steps[0].call) is not None:
            for item in self._open:
                if item.call is call or item.call.digest == call.digest:
                    self._give(item)
                    break
            else:
                return

    def _give(self, item: _Open) -> None:
        step = self._steps.popleft()
        self._taken.append(step if step.call is item.call else Step(item.call, step.text))
        item.texts.append(step.text)
        self._answered += 1
        self._stuck = None
        self.touched = monotonic()
        self.deadline = self.touched + self._timeout
        if len(item.texts) == item.call.n:
            self._open.remove(item)
            # The client may have left meanwhile.
            if item.reply is not None:
                with suppress(Exception):
                    item.reply.set_result(item.texts)

    def _ordered(self) -> list[_Open]:
        """Return the calls that wait in canonical order."""
        if len(self._open) == 1:
            return list(self._open)
        places: dict[bytes, deque[int]] = defaultdict(deque)
        for place, digest in enumerate(self._order):
            places[digest].append(place)

        def key(item: _Open) -> tuple[int, int, str, str]:
            known = places.get(item.call.digest)
            first = 0 if item.texts else 1
            return first, known.popleft() if known else len(self._order), item.call.agent, item.call.text

        keyed = [(key(item), number, item) for number, item in enumerate(self._open)]
        return [item for _, _, item in sorted(keyed, key=lambda entry: entry[:2])]

    def _unstick(self, ordered: list[_Open]) -> DivergenceError | None:
        """Go on in a script whose next call is not known, or has not come; return an error if it will not."""
        step = self._steps[0]
        if step.call is None:
            self._give(ordered[0])
            self._host.watch(self, self._quiet)
            return None
        now = monotonic()
        self._stuck = now if self._stuck is None else self._stuck
        if now - self._stuck < PATIENCE:
            self._host.look_again(self, PATIENCE)
            return None
        got = ordered[0].call
        return DivergenceError(
            f"the program asked something else when it was replayed, at call {self._answered + 1}; - is what it asked "
            f"before, + what it asks now:\n{difference(step.call.text, got.text)}\nUsual causes are the time, random "
            "ids and the order of sets; mask what does not matter with normalise="
        )

    def _end(self) -> None:
        self._over, self.deadline = True, None
        waiting, self._open = self._open, []
        for item in waiting:
            if item.reply is not None:
                with suppress(Exception):
                    item.reply.set_result([])


CURRENT: contextvars.ContextVar[Execution | None] = contextvars.ContextVar("mas_gym_program", default=None)
"""The execution that a function runs in."""


F = TypeVar("F", bound=Callable[..., Any])


def recorded(tool: F) -> F:
    """Return a tool that runs once per branch of a program; outside of a search it is the tool itself.

    What is recorded is the result itself, so treat it as immutable. An exception is not recorded.

    Args:
        tool: A function, synchronous or asynchronous, whose arguments have a ``repr`` that determines them.
    """
    name = f"{tool.__module__}.{tool.__qualname__}"

    @functools.wraps(tool)
    def run(*args: Any, **named: Any) -> Any:
        execution = CURRENT.get()
        if execution is None:
            return tool(*args, **named)
        use = execution.use(key_of(name, (args, named)))
        if use.found:
            return use.result
        return use.keep(tool(*args, **named))

    @functools.wraps(tool)
    async def run_async(*args: Any, **named: Any) -> Any:
        execution = CURRENT.get()
        if execution is None:
            return await tool(*args, **named)
        use = execution.use(key_of(name, (args, named)))
        if use.found:
            return use.result
        return use.keep(await tool(*args, **named))

    return cast(F, run_async if inspect.iscoroutinefunction(tool) else run)


def answer_use(execution: Execution, method: str, body: bytes) -> Reply:
    """Answer a request for a recorded result, or record one. Raises `CallError`."""
    try:
        asked = json.loads(body)
        key = key_of(asked["tool"], asked.get("arguments"))
        result = asked["result"] if method == "PUT" else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CallError('expected {"tool": ..., "arguments": ...}, and with PUT "result"') from None
    if method == "PUT":
        execution.pending_use(key).keep(result)
        content: dict[str, Any] = {"recorded": True}
    else:
        use = execution.use(key)
        content = {"recorded": use.found} | ({"result": use.result} if use.found else {})
    return Reply(200, "application/json", json.dumps(content).encode())
