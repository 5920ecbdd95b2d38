"""Whole transcripts of the shipped graphs, and of a graph that returns work, written by the role oracles."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.tiny import language
from benchmarks.tiny.compare import faults, hint_of, steps_of
from benchmarks.tiny.ordering_roles import ORDERING_ROLES, QueueWorld, read_order, read_rules
from benchmarks.tiny.roles import ROLES, World
from benchmarks.tiny.send_back import send_back
from benchmarks.tiny.team_roles import TEAM_ROLES
from benchmarks.tiny.turns import RoleTurn
from mas_gym.tasks.procedural.arithmetic import step_of

FOREIGN = "foreign"
"""Name in a mix for random text (`benchmarks.tiny.foreign`)."""


class Mix(NamedTuple):
    """The content of the training data."""

    levels: Mapping[int, float]
    graphs: Mapping[str, float]

    def without(self, prefix: str) -> Mix:
        """Leave out the graphs whose names begin so; none if the prefix is empty."""
        return self._replace(graphs={k: v for k, v in self.graphs.items() if not (prefix and k.startswith(prefix))})


def _turn(role: str, sees_question: bool, inputs: list[str], world: World, rng: random.Random) -> RoleTurn:
    write = ROLES[role] if role in ROLES else TEAM_ROLES[role]
    return RoleTurn(role, sees_question, inputs, language.vary(write(world, inputs, rng), rng))


def single(world: World, rng: random.Random) -> list[RoleTurn]:
    return [_turn("Single", True, [], world, rng)]


def rpsv(world: World, rng: random.Random) -> list[RoleTurn]:
    read = _turn("Reader", True, [], world, rng)
    plan = _turn("Planner", True, [read.text], world, rng)
    work = _turn("Solver", False, [plan.text], world, rng)
    return [read, plan, work, _turn("Verifier", True, [work.text], world, rng)]


def refine(world: World, rng: random.Random) -> list[RoleTurn]:
    draft = _turn("RefineSolver", True, [], world, rng)
    verdict = _turn("Evaluator", False, [draft.text], world, rng)
    tip = _turn("Reflector", False, [draft.text, verdict.text], world, rng)
    return [draft, verdict, tip, _turn("Reviser", True, [tip.text], world, rng)]


def consensus(world: World, rng: random.Random) -> list[RoleTurn]:
    read = _turn("Reader", True, [], world, rng)
    first = _turn("SolverA", True, [read.text], world, rng)
    second = _turn("SolverB", True, [read.text], world, rng)
    return [read, first, second, _turn("ConsensusJudge", True, [read.text, first.text, second.text], world, rng)]


def dylan(world: World, rng: random.Random) -> list[RoleTurn]:
    """Write a transcript of three solvers, Judge and, where it disagrees, three refiners and the final judge."""
    drafts = [_turn(role, True, [], world, rng) for role in ("MathAnalyst", "AlgebraSolver", "ArithmeticReasoner")]
    verdict = _turn("DylanJudge", True, [draft.text for draft in drafts], world, rng)
    if "DISAGREE" not in verdict.text:
        return [*drafts, verdict]
    refined = [
        _turn(role, True, [draft.text, verdict.text], world, rng)
        for role, draft in zip(("RefinerA", "RefinerB", "RefinerC"), drafts, strict=True)
    ]
    return [*drafts, verdict, *refined, _turn("FinalJudge", True, [turn.text for turn in refined], world, rng)]


def audit(world: World, rng: random.Random) -> list[RoleTurn]:
    """Write an audit of a part of an RPSV transcript: the first fault, never missed."""
    turns = rpsv(world, rng)[: rng.randint(1, 4)]
    texts = [turn.text for turn in turns]
    return [RoleTurn("Auditor", True, texts, audit_text(world, texts))]


def audit_text(world: World, texts: list[str]) -> str:
    """Return the Auditor's message on an RPSV transcript with these messages."""
    made = [[step_of(fact) for fact in language.read_facts(texts[0]) or []]]
    made += [language.read_plan(text) or [] for text in texts[1:2]]
    made += [steps_of(language.read_work(text) or []) for text in texts[2:3]]
    for name, steps in zip(("Reader", "Planner", "Solver"), made, strict=False):
        found = faults(world.facts, steps)
        if found:
            return f"INCORRECT: {name} {language.write_hint(hint_of(found[0], world.facts))}"
    if len(texts) > 3 and language.read_answer(texts[3]) != str(world.work[-1][3]):
        return f"INCORRECT: Verifier use = {world.work[-1][3]}"
    return "CORRECT"


GRAPHS: Mapping[str, Callable[[World, random.Random], list[RoleTurn]]] = MappingProxyType(
    {
        "single": single,
        "rpsv": rpsv,
        "refine": refine,
        "consensus": consensus,
        "dylan": dylan,
        "send-back": send_back,
        "audit": audit,
    }
)


def debate(world: QueueWorld, rng: random.Random) -> list[RoleTurn]:
    angel, devil = (_queue_turn(role, True, [], world, rng) for role in ("Angel", "Devil"))
    return [angel, devil, _queue_turn("DebateJudge", True, [angel.text, devil.text], world, rng)]


def logic(world: QueueWorld, rng: random.Random) -> list[RoleTurn]:
    rules = _queue_turn("ConstraintExtractor", True, [], world, rng)
    order = _queue_turn("WorldBuilder", False, [rules.text], world, rng)
    return [rules, order, _queue_turn("QueryChecker", True, [order.text], world, rng)]


def audit_logic(world: QueueWorld, rng: random.Random) -> list[RoleTurn]:
    """Write an audit of a part of a Logic transcript: the first rule that is misread or misplaced."""
    texts = [turn.text for turn in logic(world, rng)[: rng.randint(1, 3)]]
    return [RoleTurn("Auditor", True, texts, audit_logic_text(world, texts))]


def audit_logic_text(world: QueueWorld, texts: list[str]) -> str:
    """Return the Auditor's message on a Logic transcript with these messages."""
    rules = read_rules(texts[0]) or []
    for i, rule in enumerate(world.rules):
        if i >= len(rules) or rules[i] != rule:
            return f"INCORRECT: Rules rule {i + 1}"
    states = (read_order(texts[1]) or []) if len(texts) > 1 else world.states
    for i, state in enumerate(world.states):
        if i >= len(states) or states[i] != state:
            return f"INCORRECT: Order rule {i + 1}"
    letter = world.letter(world.states[-1][world.place])
    if len(texts) > 2 and language.read_answer(texts[2]) != letter:
        return f"INCORRECT: Answer {letter}"
    return "CORRECT"


def _queue_turn(role: str, sees_question: bool, inputs: list[str], world: QueueWorld, rng: random.Random) -> RoleTurn:
    return RoleTurn(role, sees_question, inputs, language.vary(ORDERING_ROLES[role](world, inputs, rng), rng))


ORDERING_GRAPHS: Mapping[str, Callable[[QueueWorld, random.Random], list[RoleTurn]]] = MappingProxyType(
    {"debate": debate, "logic": logic, "audit-logic": audit_logic}
)

DEFAULT_MIX = Mix(
    levels={1: 0.15, 2: 0.25, 3: 0.35, 4: 0.2, 5: 0.05},
    graphs={
        "rpsv": 0.2,
        "single": 0.05,
        "refine": 0.07,
        "consensus": 0.08,
        "dylan": 0.09,
        "send-back": 0.09,
        "debate": 0.17,
        "logic": 0.21,
        "audit": 0.04,
        "audit-logic": 0.03,
        FOREIGN: 0.06,
    },
)
