"""Dry runs: run a program with a fixed reply to every call, to find its agents and its nondeterminism."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from mas_gym.errors import MASGymError
from mas_gym.programs.agent_names import OTHERS, agent_name, comparable, shortened
from mas_gym.programs.chat_completions import Call, difference
from mas_gym.programs.execution import Ended, Execution, Failed, Outcome, Script, ScriptStep, Waiting
from mas_gym.programs.runner import Described, ProgramError, no_call
from mas_gym.programs.schemas import structured_reply
from mas_gym.systems.tool_calls import ToolCall, with_calls
from mas_gym.systems.validation import RESERVED

logger = logging.getLogger("mas_gym.programs")

_MOST_CALLS = 32
_QUESTION, _REPLY = "What is 2 + 2?", "APPROVED. Final Answer: 4"
_HANDOFF = "transfer_to_"
_LONG_SETTLE = 0.5
_CHANGES = (
    "The replies were equal, so the calls depend on state that outlives a run (a checkpointer, a global list, a "
    "cache), on the time or on random ids. Create the state inside the program for each run, mask irrelevant parts "
    "with normalize=, or run each execution in a new process with isolate=True (--isolate)"
)


def dry_run(program: Described, elsewhere: Callable[[], Described] | None) -> list[str]:
    """Run a program twice with a fixed reply to every call, and return the names of its agents.

    The agents that make calls come first, in order, then the other nodes of the graphs (see
    `mas_gym.programs.frameworks`).

    If ``elsewhere`` is given, the program also runs in a new process, to find requests that depend on the order of a
    set. This run is skipped if ``PYTHONHASHSEED`` is set, because the order is then the same in every process.

    A call that requires structured output gets a small instance of its schema. Only tools that hand off to another
    agent are called, each once, because other tools may have side effects. The log reports where the run ended.

    Args:
        program: The program; its ``settle`` is increased if its concurrent calls need more time to be ordered.
        elsewhere: Returns the same program for a new process; None if it cannot be loaded there.

    Raises:
        ProgramError: The program ended before its first call, or made different calls in the second run.
    """
    calls, end = _one_run(program)
    again, _ = _one_run(program)
    if [call.text for call in calls] != [call.text for call in again]:
        if Counter(call.text for call in calls) == Counter(call.text for call in again):
            # The order differs.
            program.settle = max(program.settle, _LONG_SETTLE)
        else:
            raise ProgramError(f"the program {program.name} {_change(calls, again)}\n{_CHANGES}")
    _compare_elsewhere(program.name, calls, elsewhere)
    names = list(dict.fromkeys(agent_name(call) for call in calls))
    nodes = dict.fromkeys(shortened(node) for call in calls for node in call.nodes)
    known = {comparable(name) for name in (*names, *RESERVED)}
    silent = [node for node in nodes if comparable(node) not in known]
    _log_end(program.name, names, silent, [not (call.agent or call.node or call.system) for call in calls], end)
    return [*names, *silent]


def _compare_elsewhere(name: str, calls: Sequence[Call], elsewhere: Callable[[], Described] | None) -> None:
    """Warn if the requests differ in a new process, because stored searches then cannot be resumed there."""
    if elsewhere is None or os.environ.get("PYTHONHASHSEED", "random") != "random":
        return
    try:
        there, end = _one_run(elsewhere())
    except MASGymError:
        return
    if isinstance(end, Ended | Waiting) and Counter(c.text for c in calls) != Counter(c.text for c in there):
        logger.warning(
            "the program %s makes different calls in another process, so a later run cannot resume its searches; - is "
            "this process, + the other:\n%s\nUsual causes are the order of sets and values created on import: "
            "sort them, mask them with normalize=, or start every run with PYTHONHASHSEED=0",
            name,
            _first_change(calls, there)[1],
        )


def _first_change(calls: Sequence[Call], again: Sequence[Call]) -> tuple[int, str]:
    """Return the number of the first differing call of two dry runs, and the change; 0 if only the counts differ."""
    for number, (before, now) in enumerate(zip(calls, again, strict=False), 1):
        if before.text != now.text:
            return number, difference(before.text, now.text)
    return 0, f"{len(calls)} calls and {len(again)} calls"


def _change(calls: Sequence[Call], again: Sequence[Call]) -> str:
    number, changed = _first_change(calls, again)
    if number:
        return (
            f"made a different call in the second of two dry runs, at call {number}; - is the first run, + the "
            f"second:\n{changed}"
        )
    return f"made {len(calls)} calls in the first of two dry runs and {len(again)} in the second"


def _one_run(program: Described) -> tuple[list[Call], Outcome | Exception]:
    """Run a program with a fixed reply to every call; return its ordered calls and outcome. Raises `ProgramError`."""
    seen: list[Call] = []
    handed: list[str] = []
    taken: list[ScriptStep] = []
    reports: SimpleQueue[tuple[Execution, Outcome | Exception]] = SimpleQueue()

    def reply(call: Call) -> str:
        offered = json.loads(call.extra_body).get("tools", ()) if call.tools else ()
        names = (tool["function"]["name"] for tool in offered)
        tool = next((name for name in names if name.startswith(_HANDOFF) and name not in handed), None)
        if tool is None:
            return structured_reply(call, _REPLY) or _REPLY
        handed.append(tool)
        return with_calls("", [ToolCall(tool, "{}")])

    def report(execution: Execution, outcome: Outcome | Exception) -> None:
        reports.put((execution, outcome))

    runner = program.open()
    try:
        runner.start(_QUESTION, Script(), report)
        execution, end = reports.get()
        while isinstance(end, Waiting) and len(seen) < _MOST_CALLS - 1:
            seen.append(end.calls[0])
            taken.append(ScriptStep(end.calls[0], reply(end.calls[0])))
            if not execution.answer(taken[-1].text, report):
                # It has ended without waiting for the reply.
                runner.start(_QUESTION, Script(taken, [call.digest for call in end.calls[1:]]), report)
            execution, end = reports.get()
    finally:
        runner.close()
    if isinstance(end, Waiting):
        seen.extend(end.calls)
    program.settle = max(program.settle, runner.settle)
    if not seen:
        raise no_call(program.name, end)
    return seen, end


def _log_end(
    name: str, names: Sequence[str], silent: Sequence[str], unnamed: Sequence[bool], end: Outcome | Exception
) -> None:
    """Log the calling agents, the other nodes, and where the program ended; ``unnamed`` has an entry for each call."""
    if isinstance(end, Ended):
        how = "returned an answer"
    elif isinstance(end, Waiting):
        how = f"was stopped after {_MOST_CALLS} calls"
    else:
        how = f"failed: {' '.join(str(end.error if isinstance(end, Failed) else end).split())[:300]}"
    if not isinstance(end, Ended):
        how += f"; agents that it did not reach count as {OTHERS!r} unless agents= names them"
    if silent:
        how += f"; further nodes of its graph: {', '.join(silent)}"
    level = logging.INFO if isinstance(end, Ended) else logging.WARNING
    logger.log(level, "dry run of %s: %d model calls by %s; it %s", name, len(unnamed), ", ".join(names), how)
    if len(names) == 1 and len(unnamed) > 1 and all(unnamed):
        logger.warning(
            "dry run of %s: no call names its agent, so all calls count for one agent, %r, and figures per agent are "
            "not available; give each agent a system prompt, or send the header X-MAS-Agent",
            name,
            names[0],
        )
