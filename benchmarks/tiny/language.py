"""The language of the agents in the Arithmetic graphs, and its parsers.

======  =====================================================
facts   ``Facts: has 12, finds 5, 3 times, half, 3 bags of 4.``
plan    ``Plan: start 12, + 5, * 3, / 2, + 3 * 4.``
work    ``Work: 12 + 5 = 17, 17 * 3 = 51.``
answer  ``Final Answer: 51`` or ``FINAL ANSWER: 51``
hints   ``3 times means * 3, use + 5, do not use 9``
======  =====================================================

A message may begin with another word for its label (`LABELS`). Otherwise most samples of an agent would be equal, and
a search would have few different messages to choose from. The parsers accept any text and return None if the text is
not in this language.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from types import MappingProxyType

from mas_gym.tasks.procedural.arithmetic import Equation, Fact, Step

Hint = tuple[str | int, ...]
"""``("times", 3)``, ``("half",)``, ``("bags", 3, 4)``, ``("use", "+", 5)`` or ``("leave", 9)``."""

LABELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Facts": ("Facts", "Given", "Known", "Data", "Story", "Info"),
        "Plan": ("Plan", "Steps", "Method", "Recipe", "Scheme", "Path"),
        "Work": ("Work", "Sums", "Maths", "Count", "Solve", "Result"),
        "Rules": ("Rules", "Clues", "Limits", "Terms", "Hints", "Notes"),
        "Order": ("Order", "Queue", "Line", "Row", "Build", "Lineup"),
    }
)
"""The words with which a message may begin, by their label."""


def label_pattern(*labels: str) -> str:
    """Return the regular expression of all words for some labels."""
    return f"(?:{'|'.join(word for label in labels for word in LABELS.get(label, (label,)))})"


_FACTS = re.compile(rf"{label_pattern('Facts')}: ([^.\n]*)\.")
_PLAN = re.compile(rf"{label_pattern('Plan')}: ([^.\n]*)\.")
_WORK = re.compile(rf"{label_pattern('Work', 'Fix')}: ([^.\n]*)\.")
_ANSWER = re.compile(r"final answer: (-?\d+|[A-D])\b", re.IGNORECASE)
_EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
_FACT = re.compile(r"(has|finds|buys|loses|gives) (\d+)|(\d+) (times)|(half)|(\d+) bags of (\d+)")
_STEP = re.compile(r"start (\d+)|\+ (\d+) \* (\d+)|([-+*/]) (\d+)")
_HINT = re.compile(
    r"(\d+) times means \* (\d+)|(half) means / 2|(\d+) bags of (\d+) means \+ \d+ \* \d+|use ([-+*/]) (\d+)"
    r"|do not use (\d+)"
)


def vary(text: str, rng: random.Random) -> str:
    """Begin a message with one of the words for its label; a message without a label is unchanged."""
    label, _, rest = text.partition(":")
    return f"{rng.choice(LABELS[label])}:{rest}" if label in LABELS else text


def write_fact(fact: Fact) -> str:
    """Write one fact as the Reader lists it."""
    match fact[0]:
        case "times":
            return f"{fact[1]} times"
        case "half":
            return "half"
        case "bags":
            return f"{fact[1]} bags of {fact[2]}"
    return f"{fact[0]} {fact[1]}"


def write_facts(facts: list[Fact]) -> str:
    return "Facts: " + ", ".join(map(write_fact, facts)) + "."


def read_facts(text: str) -> list[Fact] | None:
    """Read the first list of facts in a text."""
    parts = _parts(_FACTS, text)
    if parts is None:
        return None
    facts: list[Fact] = []
    for part in parts:
        match = _FACT.fullmatch(part)
        if match is None:
            return None
        kind, number, k, _, half, bags, size = match.groups()
        if kind:
            facts.append((kind, int(number)))
        elif k:
            facts.append(("times", int(k)))
        else:
            facts.append(("half",) if half else ("bags", int(bags), int(size)))
    return facts


def write_step(step: Step) -> str:
    if step[0] == "+*":
        return f"+ {step[1]} * {step[2]}"
    return f"{step[0]} {step[1]}"


def write_plan(plan: list[Step]) -> str:
    return "Plan: " + ", ".join(map(write_step, plan)) + "."


def read_plan(text: str) -> list[Step] | None:
    """Read the first plan in a text."""
    parts = _parts(_PLAN, text)
    if parts is None:
        return None
    plan: list[Step] = []
    for part in parts:
        match = _STEP.fullmatch(part)
        if match is None:
            return None
        start, bags, size, operator, operand = match.groups()
        if start:
            plan.append(("start", int(start)))
        else:
            plan.append(("+*", int(bags), int(size)) if bags else (operator, int(operand)))
    return plan


def write_work(work: list[Equation], label: str = "Work") -> str:
    """Write equations; the label is ``"Work"`` or ``"Fix"``."""
    return f"{label}: " + ", ".join(f"{a} {op} {b} = {c}" for a, op, b, c in work) + "."


def read_work(text: str) -> list[Equation] | None:
    """Read the first line of equations in a text."""
    parts = _parts(_WORK, text)
    if parts is None:
        return None
    matches = [_EQUATION.fullmatch(part) for part in parts]
    if None in matches:
        return None
    return [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in matches if m is not None]


def write_answer(answer: int | str, upper: bool = False) -> str:
    """Write the final answer; the prompts of the Refine and Consensus solvers require upper case."""
    return f"{'FINAL ANSWER' if upper else 'Final Answer'}: {answer}"


def read_answer(text: str) -> str | None:
    """Read the last final answer in a text."""
    found = _ANSWER.findall(text)
    return found[-1].upper() if found else None


def write_hint(hint: Hint) -> str:
    match hint[0]:
        case "times":
            return f"{hint[1]} times means * {hint[1]}"
        case "half":
            return "half means / 2"
        case "bags":
            return f"{hint[1]} bags of {hint[2]} means + {hint[1]} * {hint[2]}"
        case "leave":
            return f"do not use {hint[1]}"
    return f"use {hint[1]} {hint[2]}"


def write_hints(hints: list[Hint]) -> str:
    return ", ".join(map(write_hint, hints))


def read_hints(text: str) -> list[Hint]:
    """Read every piece of advice in a text."""
    hints: list[Hint] = []
    for match in _HINT.finditer(text):
        times, _, half, bags, size, operator, operand, leave = match.groups()
        if times:
            hints.append(("times", int(times)))
        elif half:
            hints.append(("half",))
        elif bags:
            hints.append(("bags", int(bags), int(size)))
        else:
            hints.append(("use", operator, int(operand)) if operator else ("leave", int(leave)))
    return hints


def _parts(pattern: re.Pattern[str], text: str) -> list[str] | None:
    match = pattern.search(text)
    return None if match is None else match[1].split(", ")
