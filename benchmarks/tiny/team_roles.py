"""Messages on Arithmetic in the Refine, Consensus and DyLAN graphs: solvers, checkers, advisers and judges.

A checker compares its inputs step by step and sends the detected errors as hints. A solver that receives
a hint avoids this misconception.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.tiny import language
from benchmarks.tiny.compare import Departure, faults, hint_of, steps_of
from benchmarks.tiny.language import Hint
from benchmarks.tiny.roles import Role, World, alone, carry_out, make_plan, solve, worked
from mas_gym.tasks.procedural import arithmetic
from mas_gym.tasks.procedural.arithmetic import Fact, Step

KEEP, CHECK = "keep all steps", "check all steps"

# How often a checker notices a fault of this kind; "missing" covers a fact that was dropped and a step skipped.
NOTICES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "Evaluator": {
            "times": 0.6,
            "half": 0.5,
            "bags": 0.6,
            "missing": 0.6,
            "copy": 0.45,
            "extra": 0.5,
            "repeat": 0.5,
        },
        "ConsensusJudge": {"times": 0.65, "half": 0.4, "bags": 0.6, "missing": 0.6, "copy": 0.5, "extra": 0.6},
        "DylanJudge": {"times": 0.4, "half": 0.4, "bags": 0.45, "missing": 0.35, "copy": 0.4, "extra": 0.35},
    }
)
# How often the Reflector turns an evaluation into a usable hint, and a Refiner follows a hint.
TIP_RATE = 0.6
HEED_RATE = 0.65


def notice(role: str, found: list[Departure], facts: list[Fact], rng: random.Random) -> list[Hint]:
    """Return hints for those faults that the role notices."""
    return [hint_of(fault, facts) for fault in found if rng.random() < NOTICES[role].get(fault.kind, 0.0)]


def evaluator(world: World, inputs: list[str], rng: random.Random) -> str:
    """Compare the solution's work with its own facts; some faults go unseen."""
    facts = language.read_facts(inputs[0]) or world.facts
    work = language.read_work(inputs[0]) or world.work
    hints = notice("Evaluator", faults(facts, steps_of(work)), facts, rng)
    return f"INCORRECT: {language.write_hints(hints)}" if hints else "CORRECT"


def reflector(world: World, inputs: list[str], rng: random.Random) -> str:
    """Turn the evaluation into a tip; often too vague to help."""
    hints = language.read_hints(inputs[1])
    if not hints:
        return f"TIP: {KEEP}"
    return f"TIP: {language.write_hints(hints) if rng.random() < TIP_RATE else CHECK}"


def reviser(world: World, inputs: list[str], rng: random.Random) -> str:
    """Solve again from the question and the tip."""
    return worked(solve(world, "Reviser", rng, tuple(language.read_hints(inputs[0]))), upper=True)


def solver_a(world: World, inputs: list[str], rng: random.Random) -> str:
    """Solve from the Reader's facts."""
    facts = language.read_facts(inputs[0]) or world.facts
    return worked(carry_out(make_plan(facts, "SolverA", rng), "SolverA", rng), upper=True)


def consensus_judge(world: World, inputs: list[str], rng: random.Random) -> str:
    """Return the answer of both solvers; of two answers, name a noticed error and use the other answer, else A's."""
    answers = [language.read_answer(text) for text in inputs[1:3]]
    if answers[0] == answers[1]:
        return language.write_answer(answers[0] or "0")
    for text, other in ((inputs[1], answers[1]), (inputs[2], answers[0])):
        found = faults(world.facts, steps_of(language.read_work(text) or world.work))
        hints = notice("ConsensusJudge", found[:1], world.facts, rng)
        if hints:
            return f"Mistake: {language.write_hints(hints)}\n{language.write_answer(other or '0')}"
    return language.write_answer(answers[0] or "0")


def dylan_judge(world: World, inputs: list[str], rng: random.Random) -> str:
    """Agree with two of three solvers without a noticed error; else name the error."""
    answers = [language.read_answer(text) or "0" for text in inputs]
    hints: list[Hint] = []
    for text in inputs:
        found = faults(world.facts, steps_of(language.read_work(text) or world.work))
        hints += [hint for hint in notice("DylanJudge", found, world.facts, rng) if hint not in hints]
    answer, votes = Counter(answers).most_common(1)[0]
    right = int(answer) == world.work[-1][3]
    if votes >= 2 and (right or not hints):
        return f"VERDICT: AGREE\n{language.write_answer(answer)}"
    # The critique names one error, so the refiners may leave the rest unchanged.
    return f"VERDICT: DISAGREE\nCheck: {language.write_hints(hints[:1]) or CHECK}"


def refiner(world: World, inputs: list[str], rng: random.Random) -> str:
    """Correct the error that the critique names, if it follows the critique, and keep the rest of the draft."""
    heard = language.read_hints(inputs[1])
    draft = language.read_work(inputs[0]) or world.work
    found = faults(world.facts, steps_of(draft))
    left = [f for f in found if hint_of(f, world.facts) not in heard or rng.random() >= HEED_RATE]
    return worked(arithmetic.work_of(rebuild(world.facts, left)) or draft)


def rebuild(facts: list[Fact], left: list[Departure]) -> list[Step]:
    """Return the true steps with these faults left in."""
    steps: list[Step] = []
    for place, step in enumerate(arithmetic.plan_of(facts)):
        here = [fault for fault in left if fault.place == place]
        steps += [fault.step for fault in here if fault.kind in ("extra", "repeat")]
        swapped = [fault for fault in here if fault.kind not in ("extra", "repeat")]
        steps += [step] if not swapped else [fault.step for fault in swapped if fault.kind != "missing"]
    return steps + [f.step for f in left if f.place >= len(facts)]


def final_judge(world: World, inputs: list[str], rng: random.Random) -> str:
    """Return the answer of two of three; with three answers, the first."""
    answers = [language.read_answer(text) or "0" for text in inputs]
    return language.write_answer(Counter(answers).most_common(1)[0][0])


TEAM_ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "RefineSolver": alone("RefineSolver", "facts", upper=True),
        "Evaluator": evaluator,
        "Reflector": reflector,
        "Reviser": reviser,
        "SolverA": solver_a,
        "SolverB": alone("SolverB", upper=True),
        "ConsensusJudge": consensus_judge,
        "MathAnalyst": alone("MathAnalyst", "facts"),
        "AlgebraSolver": alone("AlgebraSolver", "plan"),
        "ArithmeticReasoner": alone("ArithmeticReasoner"),
        "DylanJudge": dylan_judge,
        "RefinerA": refiner,
        "RefinerB": refiner,
        "RefinerC": refiner,
        "FinalJudge": final_judge,
    }
)
