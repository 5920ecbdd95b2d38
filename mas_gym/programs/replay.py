"""The states that a search has reached in a program.

To extend a state with a reply, a `ProgramSession` continues the execution that is parked there, or starts the program
again and replays the earlier replies.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from mas_gym.errors import SearchError
from mas_gym.programs.chat_completions import Call
from mas_gym.programs.execution import (
    DivergenceError,
    Execution,
    Failed,
    Outcome,
    Report,
    Script,
    ScriptStep,
    Tape,
    Waiting,
)
from mas_gym.programs.runner import ProgramError, Runner, no_call
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import FAILED, RETURNED, unmarked
from mas_gym.systems.state import Action, MASState


class ProgramSession:
    """The states of one search over a program; the planner's model.

    `transition` is a look-up: the scheduler calls `extend` for a reply before the planner receives the reply.

    Attributes:
        mas: The program's system.
        max_depth: Maximum number of messages of a program with known edges; 1 without edges.
    """

    def __init__(self, runner: Runner, question: str) -> None:
        """Start without states; `extend` runs the program."""
        program = runner.program
        self.mas = program.mas
        self._dynamics = Dynamics(self.mas)
        self.max_depth = self._dynamics.max_depth if self.mas.edges else 1
        self._runner, self._program, self._question = runner, program, question
        self._waiting: dict[bytes, tuple[Call, ...]] = {}
        self._next: dict[tuple[bytes, str], Future[MASState]] = {}
        self._tape = Tape()
        self._running: set[Execution] = set()
        self._lock = threading.RLock()
        self._closed = False

    # ---- interface for planners

    def is_terminal(self, state: MASState) -> bool:
        """Return whether the program has ended."""
        return self._dynamics.is_terminal(state)

    def transition(self, state: MASState, action: tuple[str, int]) -> MASState:
        """Return the state that a proposed reply leads to.

        Raises:
            SearchError: The reply was not proposed at this state, so the program has not been run with it.
        """
        found = self._next.get((state.digest, action[0]))
        if found is None or not found.done():
            raise SearchError(
                "expected the action of a Proposal made at this state, got another action; a program's next state is "
                "known only for proposed replies"
            )
        return found.result()

    # ---- running the program

    def call(self, state: MASState) -> Call:
        """Return the call that is the decision at a state of this session."""
        return self._waiting[state.digest][0]

    def reach(self, state: MASState) -> None:
        """Run the program to a state of an earlier session, wait, and add the state to this session.

        Raises:
            DivergenceError: The program no longer reaches this state.
        """
        if state.digest in self._waiting or self.is_terminal(state):
            return
        reached = self.extend(None).result()
        for link in state.path()[1:]:
            reached = self.extend(reached, link.text).result()
        if reached != state:
            raise DivergenceError(
                "the program no longer reaches this state: on replay it calls different agents or ends early"
            )

    def extend(self, state: MASState | None, text: str = "") -> Future[MASState]:
        """Give a reply at a state and run the program to its next decision, unless this has already begun.

        Args:
            state: The state; None starts the program and runs it to its first call.
            text: The reply.

        Returns:
            The next state. Its error is a `ProgramError` if the program ends before its first call, and a
            `DivergenceError` if it makes a different call on replay.
        """
        digest = b"" if state is None else state.digest
        with self._lock:
            known = self._next.get((digest, text))
            if known is not None:
                return known
            arrived = self._next[digest, text] = Future[MASState]()
            # One of the requests that wait for the state may end without it.
            arrived.set_running_or_notify_cancel()
        report = self._reporter(state, text, arrived)
        parked = self._runner.unpark(id(self), digest)
        if parked is not None:
            self._running.add(parked)
            if parked.answer(text, report):
                return arrived
            parked.drop()
        path = [] if state is None else state.path()
        replies = zip(path, [*(link.text for link in path), text][1:], strict=True)
        steps = [ScriptStep(self._waiting.get(link.digest, (None,))[0], reply) for link, reply in replies]
        script = Script(steps, [call.digest for call in self._waiting.get(digest, ())[1:]])
        try:
            execution = self._runner.start(self._question, script, report, self._tape)
        except Exception as error:
            arrived.set_exception(error)
            return arrived
        with self._lock:
            if not arrived.done():
                self._running.add(execution)
        if self._closed:
            execution.drop()
        return arrived

    @property
    def order_varied(self) -> bool:
        """Whether a call arrived after the decision that should have ordered it."""
        return self._tape.varied

    def close(self) -> None:
        """Drop every execution of this search."""
        with self._lock:
            self._closed = True
            left, self._running = list(self._running), set()
        for execution in left:
            execution.drop()
        self._runner.forget(id(self))

    def _reporter(self, state: MASState | None, text: str, arrived: Future[MASState]) -> Report:
        """Return a callback that receives the next step's outcome, parks the execution and passes on the state."""

        def report(execution: Execution, outcome: Outcome | Exception) -> None:
            with self._lock:
                self._running.discard(execution)
            try:
                reached = self._reached(state, text, outcome)
            except Exception as error:
                execution.drop()
                arrived.set_exception(error)
                return
            if isinstance(outcome, Waiting):
                self._runner.park(id(self), reached.digest, execution)
                if self._closed:
                    self._runner.forget(id(self))
            # This comes last, so that the execution is already parked when the search continues.
            arrived.set_result(reached)

        return report

    def _reached(self, state: MASState | None, text: str, outcome: Outcome | Exception) -> MASState:
        """Return the state after a reply.

        Raises:
            DivergenceError: The program made a different call on replay.
            ProgramError: The program ended before its first call.
        """
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, Waiting):
            acting = self._program.agent_of(outcome.calls[0])
            reached = (
                self._dynamics.initial_state(self._question, acting)
                if state is None
                else self._routed(state, text, acting)
            )
            self._waiting[reached.digest] = outcome.calls
            return reached
        if state is None:
            raise no_call(self._program.name, outcome)
        if isinstance(outcome, Failed):
            return self._routed(state, text + FAILED + unmarked(outcome.error), self.mas.sink)
        answer = outcome.answer.strip()
        same = answer == text.strip() and self.mas.final_text(text) == text
        return self._routed(state, text if same else text + RETURNED + unmarked(answer), self.mas.sink)

    def _routed(self, state: MASState, text: str, acting: int) -> MASState:
        """Return the successor in which ``acting`` acts, routed along the system's edges if possible."""
        direct = self._dynamics.transition(state, Action(text, acting))
        if not self.mas.edges:
            return direct
        along = self._dynamics.transition(state, Action(text, self.mas.ALL))
        if along.acting == acting:
            return along
        if along.recipients == direct.recipients:
            names = self.mas.node_name(along.acting), self.mas.node_name(acting)
            raise ProgramError(
                f"expected {names[0]} to act after {self.mas.node_name(state.acting)} in the system {self.mas.name!r}, "
                f"got {names[1]} from the program; leave out mas=, or pass the system that matches the program"
            )
        return direct
