"""The truth about a transcript: the first wrong message and its error.

Because the tasks are generated, the truth is known exactly, for any agents that write in
the language of the tiny model. A message is wrong if any of its statements about the
problem is false: a fact, a step, an equation, an answer, a hint, or a verdict on messages
that were all right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.tiny import language, ordering_roles
from benchmarks.tiny.compare import faults, steps_of
from benchmarks.tiny.language import Hint
from benchmarks.tiny.ordering_roles import QueueWorld
from benchmarks.tiny.roles import World
from benchmarks.tiny.team_roles import KEEP
from mas_gym.errors import ConfigError
from mas_gym.tasks.base import Problem
from mas_gym.tasks.procedural import arithmetic
from mas_gym.tasks.procedural.arithmetic import Fact, plan_of, step_of

KINDS = (
    "missing fact",  # the Reader leaves a fact out
    "extraneous fact",  # it takes in one that does not belong
    "wrong fact",  # it lists one with another kind or number
    "wrong operation",  # a plan, or work done at once, takes "3 times" for + 3 and the like
    "missing step",
    "extra step",
    "wrong number",  # a number is not the one it was copied from
    "wrong sum",
    "wrong rule",
    "wrong place",  # a rule is right but the queue built from it is not
    "wrong answer",
    "wrong advice",
    "false alarm",  # a checker rejects a right message
    "unreadable",
)


BY_STEP = "facts count by step"
"""Metadata of problems in which two facts are equal if they call for the same step, such as "finds 5" and "buys 5"."""


class FirstError(NamedTuple):
    """The first wrong message of a transcript.

    Attributes:
        place: Its index among the messages, from 0.
        speaker: Who wrote it.
        kind: One of `KINDS`.
    """

    place: int
    speaker: str
    kind: str


def first_error(problem: Problem, messages: Sequence[tuple[str, str]]) -> FirstError | None:
    """Find the first wrong message.

    Args:
        problem: A problem of `Arithmetic` or `Ordering`.
        messages: ``(speaker, text)`` in the order of the transcript, each text once.

    Returns:
        The first wrong message, or None if all are right.

    Raises:
        ConfigError: The problem is of another task, whose truth is not known.
    """
    if "rules" in problem.metadata:
        queue = queue_world(problem)
        kinds = [ordering_error(queue, text) for _, text in messages]
    elif "facts" in problem.metadata:
        world = story_world(problem)
        by_step = bool(problem.metadata.get(BY_STEP))
        kinds = [arithmetic_error(world, text, by_step) for _, text in messages]
    else:
        raise ConfigError(f"expected a problem of arithmetic or ordering, got {problem.id!r}; no other truth is known")
    for index, kind in enumerate(kinds):
        if kind is not None:
            return FirstError(index, messages[index][0], kind)
    return None


def rights(problem: Problem, messages: Sequence[tuple[str, str]]) -> list[bool]:
    """Return for each message whether it is right given the earlier ones.

    Statements about the problem are judged as in `first_error`. A verdict on earlier messages is right if it
    rejects them when one of them is wrong, and accepts them when none is.

    Args:
        problem: A problem of `Arithmetic` or `Ordering`.
        messages: ``(speaker, text)`` in the order of the transcript, each text once.

    Raises:
        ConfigError: The problem is of another task, whose truth is not known.
    """
    found: list[bool] = []
    judged = "facts" in problem.metadata  # no agent of Ordering judges another
    for place, (_, text) in enumerate(messages):
        wrong_before = not all(found)
        if judged and _REJECTS.search(text):
            facts = facts_of(problem)
            found.append(wrong_before and all(is_true(hint, facts) for hint in language.read_hints(text)))
        elif judged and text.strip() in _ACCEPTS:
            found.append(not wrong_before)
        else:
            found.append(first_error(problem, messages[place : place + 1]) is None)
    return found


_REJECTS = re.compile(r"INCORRECT|DISAGREE")
_ACCEPTS = ("CORRECT", f"TIP: {KEEP}")


def story_world(problem: Problem) -> World:
    """Return the facts of an Arithmetic problem."""
    return World(facts_of(problem), rival_of(problem))


def queue_world(problem: Problem) -> QueueWorld:
    """Return the facts of an Ordering problem."""
    data = problem.metadata
    rules = [tuple(rule) for rule in data["rules"]]
    return QueueWorld(rules, list(data["phrases"]), data["place"], list(data["options"]))


def arithmetic_error(world: World, text: str, by_step: bool = False) -> str | None:
    """Return the error of a message on Arithmetic if all earlier messages are right; None if there is none.

    Args:
        world: The facts of the problem.
        text: The message.
        by_step: Facts are equal if they call for the same step.
    """
    facts, plan, work = language.read_facts(text), language.read_plan(text), language.read_work(text)
    answer, hints = language.read_answer(text), language.read_hints(text)
    if "INCORRECT" in text or "DISAGREE" in text:
        return "false alarm"
    if not any(part is not None for part in (facts, plan, work, answer)) and not hints and not _is_assent(text):
        return "unreadable"
    if facts is not None and facts != world.facts and not (by_step and plan_of(facts) == plan_of(world.facts)):
        return _fact_error(world, facts)
    if plan is not None and (found := faults(world.facts, plan)):
        return _step_kind(found[0].kind)
    if work is not None and (kind := _work_error(world, work)):
        return kind
    if any(not is_true(hint, world.facts) for hint in hints):
        return "wrong advice"
    return "wrong answer" if answer is not None and answer != str(world.work[-1][3]) else None


def _is_assent(text: str) -> bool:
    return text.strip() == "CORRECT" or text.strip().startswith("TIP:")


def _fact_error(world: World, facts: list[Fact]) -> str:
    if plan_of(facts) == plan_of(world.facts):
        return "wrong fact"
    kind = faults(world.facts, [step_of(fact) for fact in facts] if facts and facts[0][0] == "has" else [])[0].kind
    return {"missing": "missing fact", "extra": "extraneous fact", "repeat": "extraneous fact"}.get(kind, "wrong fact")


def _step_kind(kind: str) -> str:
    if kind in ("times", "half", "bags"):
        return "wrong operation"
    return {"missing": "missing step", "extra": "extra step", "repeat": "extra step"}.get(kind, "wrong number")


def _work_error(world: World, work: list[arithmetic.Equation]) -> str | None:
    if any(arithmetic.apply(left, operator, right) != result for left, operator, right, result in work):
        return "wrong sum"
    found = faults(world.facts, steps_of(work))
    if found:
        return _step_kind(found[0].kind)
    return None if work == world.work else "wrong number"


def is_true(hint: Hint, facts: list[Fact]) -> bool:
    """Return whether a hint is right for a story."""
    plan = arithmetic.plan_of(facts)
    if hint[0] == "use":
        return (hint[1], hint[2]) in plan or ("start", hint[2]) == plan[0]
    if hint[0] == "leave":
        return all(hint[1] not in step[1:] for step in plan)
    return hint in facts


def ordering_error(world: QueueWorld, text: str) -> str | None:
    """Return the error of a message on Ordering if all earlier messages are right; None if there is none."""
    rules, states = ordering_roles.read_rules(text), ordering_roles.read_order(text)
    letter = ordering_roles.read_pick(text) or language.read_answer(text)
    if rules is None and states is None and letter is None:
        return "unreadable"
    if rules is not None and rules != world.rules:
        return "missing fact" if len(rules) < len(world.rules) else "wrong rule"
    if states is not None and states != world.states:
        return "wrong place"
    places = ordering_roles.read_places(text)
    if places is not None and places != world.states[-1]:
        return "wrong place"
    right = world.letter(world.states[-1][world.place])
    return "wrong answer" if letter is not None and letter != right else None


def facts_of(problem: Problem) -> list[Fact]:
    """Return the true facts of an Arithmetic problem from its metadata."""
    rows: Sequence[Sequence[Any]] = problem.metadata["facts"]
    return [tuple(row) for row in rows]


def rival_of(problem: Problem) -> tuple[int, int] | None:
    """Return `Story.rival` of an Arithmetic problem from its metadata."""
    rival = problem.metadata["rival"]
    return None if rival is None else (int(rival[0]), int(rival[1]))
