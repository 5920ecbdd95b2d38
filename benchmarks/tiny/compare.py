"""Compare an agent's message with the true story, step by step."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.tiny.language import Hint
from mas_gym.tasks.procedural.arithmetic import LARGE, Equation, Fact, Step, step_of


class Departure(NamedTuple):
    """One place where a list of steps departs from the true one.

    Attributes:
        kind: ``"times"``, ``"half"``, ``"bags"`` (wrong operation), ``"copy"`` (wrong number), ``"missing"``,
            ``"repeat"``, ``"extra"`` or ``"start"``.
        place: Index of the true step concerned; for an extra or repeated step the index of the true step after it.
        step: The step as written, or the true one that is missing.
    """

    kind: str
    place: int
    step: Step


def steps_of(work: list[Equation]) -> list[Step]:
    """Return the steps of equations, including the first amount."""
    steps: list[Step] = []
    pending: Equation | None = None
    for i, (left, operator, right, result) in enumerate(work):
        follows = work[i + 1] if i + 1 < len(work) else None
        if operator == "*" and follows is not None and follows[1] == "+" and follows[2] == result != follows[0]:
            pending = work[i]
            continue
        if not steps:
            steps.append(("start", left))
        if pending is not None and operator == "+" and right == pending[3]:
            steps.append(("+*", pending[0], pending[2]))
        else:
            steps.append((operator, right))
        pending = None
    return steps


def misreading(true: Step, made: Step) -> str | None:
    """Return the kind of wrong operation or number that turns the true step into the made one, if it is a known one."""
    match true[0]:
        case "*":
            return "times" if made == ("+", true[1]) else None
        case "/":
            return "half" if made == ("-", 2) else None
        case "+*":
            return "bags" if made == ("+", true[2]) else None
        case "-":
            return "copy" if int(true[1]) > LARGE and made == ("-", int(true[1]) - 10) else None
    return None


def faults(facts: list[Fact], made: list[Step]) -> list[Departure]:
    """List where the made steps depart from those of the true facts, in order."""
    true = [step_of(fact) for fact in facts]
    if not made or made[0] != true[0]:
        return [Departure("start", 0, made[0] if made else true[0])]
    found: list[Departure] = []
    i = j = 1
    while i < len(true) or j < len(made):
        if j == len(made):
            found.append(Departure("missing", i, true[i]))
            i += 1
        elif i == len(true):
            found.append(_extra(true, i, made[j]))
            j += 1
        elif true[i] == made[j]:
            i, j = i + 1, j + 1
        elif kind := misreading(true[i], made[j]):
            found.append(Departure(kind, i, made[j]))
            i, j = i + 1, j + 1
        elif len(made) - j < len(true) - i or made[j] in true[i + 1 :]:
            found.append(Departure("missing", i, true[i]))
            i += 1
        elif len(made) - j > len(true) - i:
            found.append(_extra(true, i, made[j]))
            j += 1
        else:
            found.append(Departure("copy", i, made[j]))
            i, j = i + 1, j + 1
    return found


def _extra(true: list[Step], place: int, step: Step) -> Departure:
    return Departure("repeat" if step == true[place - 1] else "extra", place, step)


def hint_of(fault: Departure, facts: list[Fact]) -> Hint:
    if fault.kind in ("extra", "repeat"):
        return ("leave", fault.step[-1])
    fact = facts[fault.place]
    if fact[0] in ("times", "half", "bags"):
        return fact
    return ("use", *step_of(fact)) if fault.place else ("use", "+", fact[1])
