"""Runs a program for the searches of a run: starts, parks, continues and ends its executions.

A `Runner` belongs to one run and owns its threads, its port and its parked executions. It ends executions that hang.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from time import monotonic, process_time
from typing import TYPE_CHECKING, Any, Protocol

from mas_gym.errors import MASGymError, PolicyError, SearchError, need
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies.base import PolicyBase, fitted
from mas_gym.programs.background import CURRENT, track
from mas_gym.programs.chat_completions import Call, CallError
from mas_gym.programs.execution import Execution, Failed, Outcome, Report, Script, Tape
from mas_gym.programs.frameworks import name_nodes
from mas_gym.programs.gateway import Gateway
from mas_gym.programs.idle_detection import IdleMonitor
from mas_gym.programs.program_kinds import Source
from mas_gym.programs.program_loop import Loop
from mas_gym.programs.worlds import World
from mas_gym.systems.graph import MAS

if TYPE_CHECKING:
    from mas_gym.programs.http_server import Server

_SWEEP_SECONDS = 0.2
_STOPPED_SECONDS = 2.0


class Described(Protocol):
    """The interface of a program that a runner uses; see `mas_gym.programs.Program`."""

    name: str
    source: Source
    normalize: Callable[[JSONObject], object] | None
    max_calls: int
    timeout: float
    settle: float
    temperature: float | None
    world: World | None

    @property
    def mas(self) -> MAS:
        """The system that search uses."""

    def agent_of(self, call: Call) -> int:
        """Return the index of the agent that makes a call."""

    def open(self) -> Runner:
        """Return a new runner."""


class ProgramError(MASGymError, RuntimeError):
    """A program cannot be searched.

    It fails or returns before its first call, makes different calls when it runs again, calls an unknown agent, or
    calls an agent that its system's edges do not allow.
    """


def no_call(program: str, outcome: Outcome | Exception) -> ProgramError:
    """Return the error of a program that ends before its first call."""
    what = f"failed ({outcome.error})" if isinstance(outcome, Failed) else "returned"
    return ProgramError(f"program {program} {what} before its first model call to the gateway")


class Runner(IdleMonitor):
    """Runs one program for many searches; thread-safe."""

    def __init__(self, program: Described, policy: PolicyBase | None = None) -> None:
        """Configure the runner; calls may use the fields that ``policy`` supports, or all fields if it is None."""
        super().__init__(program.name, program.settle, program.timeout)
        self.program = program
        self.policy = policy
        self.gateway = Gateway(program.normalize, self._fitted)
        self._templates: dict[bool, Any] = {}
        self._lock = threading.RLock()
        self._parked: OrderedDict[tuple[int, bytes], Execution] = OrderedDict()
        self._side: Loop | None = None
        self._server: Server | None = None
        self._queue: deque[Execution] = deque()
        self._busy: set[Execution] = set()
        self._stops: dict[Execution, Callable[[], None]] = {}
        self._closed = False
        self._swept, self._worked = monotonic(), process_time()
        self._context = copy_context()
        self._context.run(CURRENT.set, None)
        track()
        name_nodes()

    def _fitted(self, call: Call) -> Call:
        """Convert a call for the policy of its agent. Raises `CallError` if this would drop a part."""
        if self.program.temperature is not None:
            call = replace(call, temperature=self.program.temperature)
        if not call.extra_body or self.policy is None:
            return call
        try:
            agent = self.program.mas.agents[self.program.agent_of(call)].name
        except MASGymError:
            # The search fails with this error when the call is the decision.
            return call
        try:
            messages, extra_body = fitted(self.policy, agent, call.messages, call.extra_body)
        except PolicyError as error:
            raise CallError(str(error)) from None
        return replace(call, messages=messages, extra_body=extra_body)

    def close(self) -> None:
        """End every execution and release the threads and the port; safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            left = list(self.gateway.open.values())
            self._parked.clear()
            self._queue.clear()
        for execution in left:
            execution.drop()
        if self._programs is not None:
            self._programs.close()
        self._watched.clear()
        if self._side is not None:
            self._side.close(self._server.close if self._server is not None else None)

    # ---- executions

    def start(self, question: str, script: Script, report: Report, tape: Tape | None = None) -> Execution:
        """Start the program on a question; ``report`` is called with every outcome, on any thread."""
        tape = Tape() if tape is None else tape
        program = self.program
        token, key = secrets.token_hex(16), secrets.token_hex(16) if program.source.needs_key else ""
        limits = program.max_calls, program.timeout

        execution = Execution(self, token, key, question, script, limits, report, tape, program.world)
        with self._lock:
            if self._closed:
                raise SearchError("the program's runner is closed; open a new one with program.open()")
            self._side_loop()
            self.gateway.open[token] = execution
            self._queue.append(execution)
        self._start_next()
        return execution

    def _start_next(self) -> None:
        while True:
            with self._lock:
                if not self._queue or len(self._busy) >= self.program.source.running:
                    return
                execution = self._queue.popleft()
                dropped = execution.over
                if not dropped:
                    self._busy.add(execution)
            if not dropped:
                # Outside of the context of the program that freed the slot.
                self._context.copy().run(self._launch, execution)

    def _launch(self, execution: Execution) -> None:
        execution.began()
        self._stops[execution] = self.program.source.start(execution, self)
        if execution.over:
            self.rests(execution)

    def rests(self, execution: Execution) -> None:
        """Free the slot of an execution that waits for a reply or is over; end its program if it is over."""
        stop = None
        with self._lock:
            self._busy.discard(execution)
            if execution.over:
                self.gateway.open.pop(execution.token, None)
                stop = self._stops.pop(execution, None)
            waits = bool(self._queue)
        if stop is not None:
            stop()
        if waits and self._side is not None:
            # On a different thread: this one may be the program's thread, which is interrupted when its execution ends.
            self._side.soon(self._start_next)

    def park(self, session: int, digest: bytes, execution: Execution) -> None:
        """Store an execution that waits at a state; beyond the limit, the oldest one is dropped."""
        dropped = []
        with self._lock:
            self._parked[session, digest] = execution
            while len(self._parked) > self.program.source.parked:
                dropped.append(self._parked.popitem(last=False)[1])
        for old in dropped:
            old.drop()

    def unpark(self, session: int, digest: bytes) -> Execution | None:
        """Remove and return the execution that waits at a state, if any."""
        with self._lock:
            return self._parked.pop((session, digest), None)

    def forget(self, session: int) -> None:
        """Drop a search's parked executions."""
        with self._lock:
            keys = [key for key in self._parked if key[0] == session]
            left = [self._parked.pop(key) for key in keys]
        for execution in left:
            execution.drop()

    # ---- interface for sources

    def url(self, execution: Execution) -> str:
        """Return the base URL for an execution's calls, on a loopback port."""
        with self._lock:
            if self._server is None:
                # uvicorn takes 0.1 s to import, and most programs call the gateway in this process.
                from mas_gym.programs.http_server import Server

                self._server = Server(self.gateway)
                self._side_loop().task(self._server.start)
        execution.activity.port = self._server.port
        return f"http://127.0.0.1:{self._server.port}/{execution.token}/v1"

    def client(self, execution: Execution, asynchronous: bool) -> object:
        """Return an OpenAI client that needs no socket. Raises `MissingDependencyError`."""
        need("openai", "a program with client=", "openai")
        from mas_gym.programs.clients import async_client, client_of, sync_client

        if asynchronous not in self._templates:
            self._templates[asynchronous] = (async_client if asynchronous else sync_client)(self.gateway)
        return client_of(execution, self._templates[asynchronous])

    def on_loop(self, execution: Execution, work: Callable[[], Any]) -> Callable[[], None]:
        """Run a coroutine on the programs' loop."""
        with self._lock:
            if self._closed:
                return lambda: None
            if self._programs is None:
                self._programs = loop = Loop("mas-gym-programs")
                loop.selector.idle = lambda: self._idle(loop.pending)
            programs = execution.place = self._programs
        execution.activity.loop_thread = programs.thread.native_id
        # Waking the loop lets other threads run, which would then wait for the lock.
        return programs.task(work, execution.token)

    def on_side_loop(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Run a coroutine on the internal loop, which user code never blocks."""
        return self._side_loop().task(work)

    def _side_loop(self) -> Loop:
        with self._lock:
            if self._side is None:
                self._side = Loop("mas-gym-gateway")
                self._side.soon(self._side.loop.call_later, _SWEEP_SECONDS, self._sweep)
            return self._side

    def _sweep(self) -> None:
        """End hung programs. A program's timeout pauses while another program occupies the shared loop."""
        now = monotonic()
        with self._lock:
            programs, timed = self._programs, [e for e in self.gateway.open.values() if e.deadline is not None]
        # No program counts as hung while the process is stopped, as after Ctrl-Z, or has no processor. A program that
        # blocks this thread by holding the interpreter lock does use the processor.
        worked = process_time()
        if (idle := now - self._swept - _SWEEP_SECONDS - (worked - self._worked)) > _STOPPED_SECONDS:
            self._swept += idle
            for execution in timed:
                execution.wait_longer(idle)
            if programs is not None:
                programs.wait_longer(idle)
        busy, stuck, culprit = (False, 0.0, "") if programs is None else programs.look()
        for execution in timed:
            if busy and execution.place is programs:
                execution.wait_longer(now - self._swept)
            elif execution.deadline is not None and execution.deadline < now:
                execution.fail(f"the program made no call and returned no answer for {self.program.timeout:g} seconds")
        self._swept, self._worked = now, worked
        if programs is not None and busy and stuck > self.program.timeout:
            self._leave(programs, culprit)
        if self._side is not None and not self._closed:
            self._side.loop.call_later(_SWEEP_SECONDS, self._sweep)

    def _leave(self, blocked: Loop, culprit: str) -> None:
        """Abandon a loop that one program blocks: fail this program, and restart the others on a new loop."""
        with self._lock:
            if blocked.running != culprit:
                return
            stranded = [execution for execution in self.gateway.open.values() if execution.place is blocked]
            self._programs = None
        known = any(execution.token == culprit for execution in stranded)
        # Before the loop is closed, because closing it ends every program on it with an error.
        moved: list[tuple[str, tuple[Any, ...]]] = []
        for execution in stranded:
            if execution.token == culprit or not known:
                seconds = f"{self.program.timeout:g} seconds"
                execution.fail(f"the program blocked its event loop and made no call for {seconds}; await instead")
            elif (again := execution.moved()) is not None:
                moved.append((execution.question, again))
        blocked.close(wait=False)
        for question, again in moved:
            self.start(question, *again)
