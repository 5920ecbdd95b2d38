"""The model behind an Arithmetic problem: facts, steps, and the ways to misread them.

A story is a list of facts about one person's things. Each fact gives one plan
step, each step one or two equations. Terms:

- **fact**: a tuple of ints and a kind, such as ``("finds", 5)`` or ``("bags", 3, 4)``; the first is ``("has", n)``.
- **step**: ``("+", 5)``, ``("-", 3)``, ``("*", 3)``, ``("/", 2)`` or ``("+*", 3, 4)``; the first is ``("start", n)``.
- **equation**: ``(left, operator, right, result)``.

The `*_variants` functions list what one agent could make of its input if it
misread it in a plausible way. The generator keeps every resulting number small,
so that errors come from *what* is computed, never from difficult arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

Fact = tuple[str | int, ...]
Step = tuple[str | int, ...]
Equation = tuple[int, str, int, int]

LIMIT = 99
GAINS = ("finds", "buys")
LOSSES = ("loses", "gives")
LARGE = 10

Slip = tuple[str, int]
"""A misreading: its kind, and the place (index of the fact, step or equation) where it happens."""


def step_of(fact: Fact) -> Step:
    """Return the plan step that a fact stands for."""
    kind, *numbers = fact
    match kind:
        case "has":
            return ("start", *numbers)
        case "finds" | "buys":
            return ("+", *numbers)
        case "loses" | "gives":
            return ("-", *numbers)
        case "times":
            return ("*", *numbers)
        case "half":
            return ("/", 2)
        case "bags":
            return ("+*", *numbers)
    raise ValueError(f"expected a known fact kind, got {kind!r}")


def plan_of(facts: list[Fact]) -> list[Step]:
    """Return the right plan for these facts."""
    return [step_of(fact) for fact in facts]


def work_of(plan: list[Step]) -> list[Equation] | None:
    """Carry out a plan.

    Returns:
        The equations in order, or None if a result leaves 0 to 99 or is not whole.
    """
    value = int(plan[0][1])
    work: list[Equation] = []
    for step in plan[1:]:
        equations = equations_of(step, value)
        if equations is None:
            return None
        work += equations
        value = work[-1][3]
    return work


def equations_of(step: Step, value: int) -> list[Equation] | None:
    """Return the equations of one step applied to a value, or None if a result leaves the range."""
    operator, operand = str(step[0]), int(step[1])
    if operator == "+*":
        amount = operand * int(step[2])
        first: list[Equation] = [(operand, "*", int(step[2]), amount)]
        operator, operand = "+", amount
    else:
        first = []
    result = apply(value, operator, operand)
    if result is None or not 0 <= result <= LIMIT or operand > LIMIT:
        return None
    return [*first, (value, operator, operand, result)]


def apply(value: int, operator: str, operand: int) -> int | None:
    """Apply one operator to whole numbers; None where the result is not whole."""
    match operator:
        case "+":
            return value + operand
        case "-":
            return value - operand
        case "*":
            return value * operand
    return value // operand if operand and value % operand == 0 else None


def answer_of(facts: list[Fact]) -> int | None:
    """Return the final amount, or None if the story leaves the range."""
    work = work_of(plan_of(facts))
    return None if not work else work[-1][3]


def reader_slips(facts: list[Fact], rival: tuple[int, int] | None) -> list[Slip]:
    """List what a Reader may get wrong: a large find dropped, another person's count taken as a gain.

    Args:
        facts: The true facts.
        rival: Where another person's count stands (number of facts before it) and the count, if the story has one.
    """
    slips = [("drop", i) for i, fact in enumerate(facts) if fact[0] == "finds" and int(fact[1]) >= LARGE]
    if rival is not None:
        slips.append(("rival", rival[0]))
    return slips


def apply_reader_slips(facts: list[Fact], rival: tuple[int, int] | None, slips: list[Slip]) -> list[Fact]:
    """Return the facts as a Reader with these slips lists them."""
    dropped = {place for kind, place in slips if kind == "drop"}
    out: list[Fact] = []
    for i, fact in enumerate(facts):
        if rival is not None and ("rival", i) in slips:
            out.append(("buys", rival[1]))
        if i not in dropped:
            out.append(fact)
    if rival is not None and rival[0] == len(facts) and ("rival", rival[0]) in slips:
        out.append(("buys", rival[1]))
    return out


def planner_slips(facts: list[Fact]) -> list[Slip]:
    """List what a Planner may get wrong: "3 times" as + 3, "half" as - 2, "3 bags of 4" as + 4."""
    return [(str(fact[0]), i) for i, fact in enumerate(facts) if fact[0] in ("times", "half", "bags")]


def apply_planner_slips(facts: list[Fact], slips: list[Slip]) -> list[Step]:
    """Return the plan of a Planner with these slips."""
    plan = plan_of(facts)
    for kind, place in slips:
        wrong: Step = ("+", facts[place][1]) if kind == "times" else ("-", 2)
        plan[place] = ("+", facts[place][2]) if kind == "bags" else wrong
    return plan


def solver_slips(plan: list[Step]) -> list[Slip]:
    """List what a Solver may get wrong: skip a step like the one before it, copy "- 12" as "- 2"."""
    slips: list[Slip] = []
    for i, step in enumerate(plan):
        if i > 1 and step[0] in ("+", "-") and step[0] == plan[i - 1][0] and ("skip", i - 1) not in slips:
            slips.append(("skip", i))
        elif step[0] == "-" and int(step[1]) > LARGE:
            slips.append(("copy", i))
    return slips


def apply_solver_slips(plan: list[Step], slips: list[Slip]) -> list[Step]:
    """Return the plan that a Solver with these slips in fact carries out."""
    out = list(plan)
    for kind, place in slips:
        if kind == "copy":
            out[place] = ("-", int(plan[place][1]) - 10)
    skipped = {place for kind, place in slips if kind == "skip"}
    return [step for i, step in enumerate(out) if i not in skipped]


def subsets(slips: list[Slip]) -> Iterator[list[Slip]]:
    """Yield every subset of the slips, the empty one first."""
    for keep in product((False, True), repeat=len(slips)):
        yield [slip for slip, kept in zip(slips, keep, strict=True) if kept]


def misread_answers(facts: list[Fact], rival: tuple[int, int] | None) -> list[int | None]:
    """Return the final amount under every combination of slips but the empty one; None where one leaves the range."""
    answers: list[int | None] = []
    for reader in subsets(reader_slips(facts, rival)):
        read = apply_reader_slips(facts, rival, reader)
        for planner in subsets(planner_slips(read)):
            plan = apply_planner_slips(read, planner)
            for solver in subsets(solver_slips(plan)):
                if reader or planner or solver:
                    work = work_of(apply_solver_slips(plan, solver))
                    answers.append(work[-1][3] if work else None)
    return answers
