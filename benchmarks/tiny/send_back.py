"""Messages in a system that returns work: Reader, Planner, Solver, and a Referee that answers or names an error.

The Referee sees the question and the work. It sends a detected mistake to the agent that makes mistakes of this kind,
once per transcript. The agent corrects it or not, and the agents after it repeat their part. The system is
``benchmarks/tiny/send_back.yaml``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.tiny import language
from benchmarks.tiny.compare import faults, hint_of, steps_of
from benchmarks.tiny.language import Hint
from benchmarks.tiny.roles import Role, World, carry_out, conclude, make_plan, read_story, visible_kind
from benchmarks.tiny.turns import RoleTurn
from mas_gym.systems.loading import load_mas
from mas_gym.tasks.procedural import arithmetic
from mas_gym.tasks.procedural.arithmetic import Fact, Step

SYSTEM = Path(__file__).with_name("send_back.yaml")
CHAIN = ("Reader", "Planner", "Solver")

# How often the Referee notices an error of this kind, and an agent follows its hint.
NOTICES: Mapping[str, float] = {
    "times": 0.7,
    "half": 0.5,
    **dict.fromkeys(("bags", "copy", "missing", "drop", "extra", "repeat"), 0.65),
}
HEED_RATE = 0.8

# Who makes mistakes of this kind; the others are the Solver's.
CULPRITS: Mapping[str, str] = MappingProxyType(
    {"times": "Planner", "half": "Planner", "bags": "Planner", "drop": "Reader", "extra": "Reader", "start": "Reader"}
)


def send_back(world: World, rng: random.Random) -> list[RoleTurn]:
    """Write a transcript of at most eight turns."""
    system = load_mas(str(SYSTEM)).agents[-1].system_prompt
    heard: dict[str, list[str]] = {name: [] for name in CHAIN}
    told: dict[str, list[str]] = {name: [] for name in CHAIN}
    turns: list[RoleTurn] = []
    works: list[str] = []
    culprit: str | None = CHAIN[0]
    while culprit is not None:
        for name in CHAIN[CHAIN.index(culprit) :]:
            inputs = heard[name] + told[name]
            text = language.vary(ROLES[name](world, inputs, rng), rng)
            turns.append(RoleTurn(name, name != "Solver", list(inputs), text))
            heard.get(_after(name), works).append(text)
        verdict, culprit = referee(world, works, rng)
        turns.append(RoleTurn(None, True, list(works), verdict, system))
        if culprit is not None:
            told[culprit].append(verdict)
    return turns


def _after(name: str) -> str:
    return {"Reader": "Planner", "Planner": "Solver"}.get(name, "Referee")


def referee(world: World, works: list[str], rng: random.Random) -> tuple[str, str | None]:
    """Return the Referee's message, and to whom it sends the work back, if it does."""
    work = language.read_work(works[-1]) or world.work
    found = faults(world.facts, steps_of(work)) if len(works) == 1 else []
    if found:
        kind = visible_kind(found[0], world)
        if rng.random() < NOTICES.get(kind, 0.0):
            culprit = CULPRITS.get(kind, "Solver")
            return f"{language.write_hint(hint_of(found[0], world.facts))} -> {culprit}", culprit
    return f"{language.write_answer(conclude(work, 'Verifier', rng))} -> sink", None


def reader(world: World, inputs: list[str], rng: random.Random) -> str:
    """List the facts, and follow hints about them."""
    facts = read_story(world, "Reader", rng, _heeded(inputs, rng))
    return f"{language.write_facts(facts)} Question: how many?"


def planner(world: World, inputs: list[str], rng: random.Random) -> str:
    return language.write_plan(make_plan(_last_facts(inputs) or world.facts, "Planner", rng, _heeded(inputs, rng)))


def solver(world: World, inputs: list[str], rng: random.Random) -> str:
    plan = _last_plan(inputs) or arithmetic.plan_of(world.facts)
    return language.write_work(carry_out(plan, "Solver", rng, _heeded(inputs, rng)))


ROLES: Mapping[str, Role] = MappingProxyType({"Reader": reader, "Planner": planner, "Solver": solver})


def _heeded(inputs: list[str], rng: random.Random) -> tuple[Hint, ...]:
    hints = [hint for text in inputs if "->" in text for hint in language.read_hints(text)]
    return tuple(hints) if hints and rng.random() < HEED_RATE else ()


def _last_facts(inputs: list[str]) -> list[Fact] | None:
    return next((facts for text in reversed(inputs) if (facts := language.read_facts(text)) is not None), None)


def _last_plan(inputs: list[str]) -> list[Step] | None:
    return next((plan for text in reversed(inputs) if (plan := language.read_plan(text)) is not None), None)
