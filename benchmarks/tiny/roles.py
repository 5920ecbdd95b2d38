"""Messages of each agent on Arithmetic, and the errors that each agent makes by design.

Every agent has specific misconceptions. Each depends on a feature that a problem or an
input may have, and occurs at the rate below if the feature is present. All are visible in
the text: a missing fact, or an operation or number that differs from the input. Sums are
never wrong.

A role is a function ``(world, inputs, rng) -> text``; the inputs are the
messages that reach the agent, in speaker order, without the question.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.tiny import language
from benchmarks.tiny.compare import Departure, faults, steps_of
from benchmarks.tiny.language import Hint
from mas_gym.tasks.procedural import arithmetic
from mas_gym.tasks.procedural.arithmetic import LARGE, Equation, Fact, Slip, Step


class World(NamedTuple):
    """The facts of a problem, and the count of another person if the story has one."""

    facts: list[Fact]
    rival: tuple[int, int] | None

    @property
    def work(self) -> list[Equation]:
        """The right equations."""
        return arithmetic.work_of(arithmetic.plan_of(self.facts)) or []


Role = Callable[[World, list[str], random.Random], str]

# How often an agent falls for a misconception where the text invites it. Above 0.5 it is the agent's favorite
# reading, so that neither likelihood nor a vote can find it; below 0.35 sampling at temperature 0.7 hides it.
RATES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "Reader": {"drop": 0.55, "rival": 0.42},
        "Planner": {"times": 0.57, "half": 0.4, "bags": 0.4},
        "Solver": {"skip": 0.4, "copy": 0.5},
        "Verifier": {"minus": 0.4},
        "Single": {"drop": 0.4, "rival": 0.35, "times": 0.5, "half": 0.35, "bags": 0.35, "skip": 0.3, "copy": 0.35},
        "RefineSolver": {"drop": 0.4, "times": 0.5, "half": 0.4, "bags": 0.4, "skip": 0.4, "copy": 0.45},
        "Reviser": {"rival": 0.4, "times": 0.5, "half": 0.4, "bags": 0.4, "skip": 0.4, "copy": 0.45},
        "SolverA": {"times": 0.55, "half": 0.4, "bags": 0.4, "skip": 0.45},
        "SolverB": {"drop": 0.45, "rival": 0.4, "half": 0.45, "skip": 0.4, "copy": 0.5},
        "MathAnalyst": {"drop": 0.55, "rival": 0.5, "times": 0.55, "skip": 0.45, "copy": 0.4},
        "AlgebraSolver": {"drop": 0.5, "times": 0.6, "bags": 0.5, "half": 0.5, "copy": 0.5, "rival": 0.4},
        "ArithmeticReasoner": {"drop": 0.5, "times": 0.5, "skip": 0.5, "copy": 0.55, "bags": 0.5, "half": 0.5},
    }
)

# How often the Verifier notices and corrects an error of this kind.
NOTICES: Mapping[str, float] = MappingProxyType(
    {"times": 0.45, "bags": 0.4, "half": 0.0, "copy": 0.45, "missing": 0.45, "drop": 0.0, "extra": 0.0}
)


def take(role: str, slips: list[Slip], rng: random.Random) -> list[Slip]:
    """Return those slips that the role makes this time."""
    return [slip for slip in slips if rng.random() < RATES[role].get(slip[0], 0.0)]


def reader(world: World, inputs: list[str], rng: random.Random) -> str:
    """List the facts; may drop a large find, or take another person's count as a gain."""
    facts = read_story(world, "Reader", rng)
    return f"{language.write_facts(facts)} Question: how many?"


def read_story(world: World, role: str, rng: random.Random, heard: tuple[Hint, ...] = ()) -> list[Fact]:
    """Return the facts as the role reads them; hints it has heard protect it."""
    slips = [
        slip
        for slip in arithmetic.reader_slips(world.facts, world.rival)
        if not (slip[0] == "drop" and ("use", "+", world.facts[slip[1]][1]) in heard)
        and not (slip[0] == "rival" and world.rival is not None and ("leave", world.rival[1]) in heard)
    ]
    return arithmetic.apply_reader_slips(world.facts, world.rival, take(role, slips, rng))


def make_plan(facts: list[Fact], role: str, rng: random.Random, heard: tuple[Hint, ...] = ()) -> list[Step]:
    """Return the plan that the role makes of the facts."""
    slips = [slip for slip in arithmetic.planner_slips(facts) if facts[slip[1]] not in heard]
    return arithmetic.apply_planner_slips(facts, take(role, slips, rng))


def carry_out(plan: list[Step], role: str, rng: random.Random, heard: tuple[Hint, ...] = ()) -> list[Equation]:
    """Return the equations that the role writes for the plan."""
    slips = [slip for slip in arithmetic.solver_slips(plan) if ("use", *plan[slip[1]]) not in heard]
    slipped = arithmetic.apply_solver_slips(plan, take(role, slips, rng))
    # A chain of several agents' errors may leave the range of 0 to 99; then the role keeps to the plan.
    return arithmetic.work_of(slipped) or arithmetic.work_of(plan) or []


def planner(world: World, inputs: list[str], rng: random.Random) -> str:
    """Turn the Reader's facts into steps; may take "3 times" for + 3, "half" for - 2, "3 bags of 4" for + 4."""
    facts = language.read_facts(inputs[0]) or world.facts
    return language.write_plan(make_plan(facts, "Planner", rng))


def solver(world: World, inputs: list[str], rng: random.Random) -> str:
    """Execute the plan; may skip a step with the sign of the previous one, or copy "- 12" as "- 2"."""
    plan = language.read_plan(inputs[0]) or arithmetic.plan_of(world.facts)
    return language.write_work(carry_out(plan, "Solver", rng))


def verifier(world: World, inputs: list[str], rng: random.Random) -> str:
    """Compare the work with the question; corrects some errors, and may answer with the number before a last "-"."""
    work = language.read_work(inputs[0]) or world.work
    found = faults(world.facts, steps_of(work))
    if found and rng.random() < NOTICES.get(visible_kind(found[0], world), 0.0):
        return f"{language.write_work(world.work, 'Fix')}\n{language.write_answer(world.work[-1][3])}"
    return language.write_answer(conclude(work, "Verifier", rng))


def visible_kind(fault: Departure, world: World) -> str:
    """Return the kind of a fault; ``"drop"`` for a missing large find, which is a Reader's."""
    fact = world.facts[min(fault.place, len(world.facts) - 1)]
    large_find = fact[0] == "finds" and int(fact[1]) >= LARGE
    return "drop" if fault.kind == "missing" and large_find else fault.kind


def conclude(work: list[Equation], role: str, rng: random.Random) -> int:
    """Return the result that the role reads off the work."""
    left, operator, _, result = work[-1]
    return left if operator == "-" and rng.random() < RATES[role].get("minus", 0.0) else result


def solve(world: World, role: str, rng: random.Random, heard: tuple[Hint, ...] = ()) -> list[Equation]:
    """Read, plan and compute in one message, with the misconceptions of this role."""
    plan = make_plan(read_story(world, role, rng, heard), role, rng, heard)
    return carry_out(plan, role, rng, heard)


def worked(work: list[Equation], upper: bool = False) -> str:
    """Return a message of work and its answer."""
    return f"{language.write_work(work)}\n{language.write_answer(work[-1][3], upper)}"


def alone(role: str, shows: str = "", upper: bool = False) -> Role:
    """Return a role that solves from the question; it lists its ``"facts"`` or its ``"plan"`` before the work."""

    def write(world: World, inputs: list[str], rng: random.Random) -> str:
        facts = read_story(world, role, rng)
        plan = make_plan(facts, role, rng)
        shown = {"facts": language.write_facts(facts) + "\n", "plan": language.write_plan(plan) + "\n"}
        return shown.get(shows, "") + worked(carry_out(plan, role, rng), upper)

    return write


ROLES: Mapping[str, Role] = MappingProxyType(
    {"Reader": reader, "Planner": planner, "Solver": solver, "Verifier": verifier, "Single": alone("Single")}
)
