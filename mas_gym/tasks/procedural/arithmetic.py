"""Arithmetic: an unlimited supply of multi-step word problems, generated without data files.

Problem ``i`` of a split depends only on ``(seed, split, difficulty, i)`` and is generated in
constant time. A hash of the question's text determines its split, so no question of
one split occurs in another, for any seed.

A story is a list of facts about one person's items. Each fact gives one plan step,
and each step after the first gives one or two equations:

- **fact**: a kind and its numbers, such as ``("finds", 5)`` or ``("bags", 3, 4)``; the first is ``("has", n)``.
- **step**: ``("+", 5)``, ``("-", 3)``, ``("*", 3)``, ``("/", 2)`` or ``("+*", 3, 4)``; the first is ``("start", n)``.
- **equation**: ``(left, operator, right, result)``.

The `*_slips` functions list the plausible misreadings of an agent's input. All
numbers stay small, so errors come from the choice of computation, not from difficult
arithmetic.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from mas_gym.tasks.base import Problem
from mas_gym.tasks.procedural.generated import SampledTask, split_of

Fact = tuple[str | int, ...]
Step = tuple[str | int, ...]
Equation = tuple[int, str, int, int]

LIMIT = 99
LARGE = 10

Slip = tuple[str, int]
"""A misreading: its kind, and the index of the fact, step or equation that it affects."""


_OPERATORS = {"has": "start", "finds": "+", "buys": "+", "loses": "-", "gives": "-", "times": "*", "bags": "+*"}


def step_of(fact: Fact) -> Step:
    """Return the plan step that a fact requires."""
    kind, *numbers = fact
    return ("/", 2) if kind == "half" else (_OPERATORS[str(kind)], *numbers)


def plan_of(facts: list[Fact]) -> list[Step]:
    """Return the right plan for these facts."""
    return [step_of(fact) for fact in facts]


def work_of(plan: list[Step]) -> list[Equation] | None:
    """Execute a plan.

    Returns:
        The equations in order, or None if a result is not a whole number from 0 to 99.
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
    """Return the equations of one step applied to a value, or None if a result is out of range."""
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
    """Apply one operator to whole numbers; None if the result is not whole."""
    match operator:
        case "+":
            return value + operand
        case "-":
            return value - operand
        case "*":
            return value * operand
    return value // operand if operand and value % operand == 0 else None


def answer_of(facts: list[Fact]) -> int | None:
    """Return the final amount, or None if a result is out of range."""
    work = work_of(plan_of(facts))
    return None if not work else work[-1][3]


def reader_slips(facts: list[Fact], rival: tuple[int, int] | None) -> list[Slip]:
    """List the errors that a Reader may make: omitting a "finds" fact, or counting another person's items as a gain.

    Args:
        facts: The true facts.
        rival: The number of facts before the sentence about another person's items, and the number of these items;
            None if there is no such sentence.
    """
    slips = [("drop", i) for i, fact in enumerate(facts) if fact[0] == "finds" and int(fact[1]) >= LARGE]
    if rival is not None:
        slips.append(("rival", rival[0]))
    return slips


def apply_reader_slips(facts: list[Fact], rival: tuple[int, int] | None, slips: list[Slip]) -> list[Fact]:
    """Return the facts as listed by a Reader who makes these slips."""
    out: list[Fact] = []
    for i in range(len(facts) + 1):
        if rival is not None and ("rival", i) in slips:
            out.append(("buys", rival[1]))
        if i < len(facts) and ("drop", i) not in slips:
            out.append(facts[i])
    return out


def planner_slips(facts: list[Fact]) -> list[Slip]:
    """List the errors that a Planner may make: reading "3 times" as + 3, "half" as - 2, or "3 bags of 4" as + 4."""
    return [(str(fact[0]), i) for i, fact in enumerate(facts) if fact[0] in ("times", "half", "bags")]


def apply_planner_slips(facts: list[Fact], slips: list[Slip]) -> list[Step]:
    """Return the plan of a Planner with these slips."""
    plan = plan_of(facts)
    for kind, place in slips:
        wrong: Step = ("+", facts[place][1]) if kind == "times" else ("-", 2)
        plan[place] = ("+", facts[place][2]) if kind == "bags" else wrong
    return plan


def solver_slips(plan: list[Step]) -> list[Slip]:
    """List the errors that a Solver may make: skipping a + or - after the same operator, or copying "- 12" as "- 2"."""
    slips: list[Slip] = []
    for i, step in enumerate(plan):
        if i > 1 and step[0] in ("+", "-") and step[0] == plan[i - 1][0] and ("skip", i - 1) not in slips:
            slips.append(("skip", i))
        elif step[0] == "-" and int(step[1]) > LARGE:
            slips.append(("copy", i))
    return slips


def apply_solver_slips(plan: list[Step], slips: list[Slip]) -> list[Step]:
    """Return the plan that a Solver with these slips executes."""
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
    """Return the final amount under every non-empty combination of slips; None if a result is out of range."""
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


# ---------------------------------------------------------------- problems

WOMEN = ("Maya", "Sara", "Ann", "Lily", "Nina", "Emma", "Ruth", "Zoe")
MEN = ("Tom", "Ben", "Sam", "Leo", "Max", "Dan", "Eli", "Jack")
ITEMS = (
    "coins", "marbles", "apples", "cards", "stickers", "books", "shells", "pens", "beads", "stamps", "eggs", "nuts",
)  # fmt: skip

TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "has": ("{p} has {0} {i}.", "{p} starts with {0} {i}.", "At first {p} has {0} {i}."),
    "finds": ("{s} finds {0} more.", "Then {s} finds {0} {i}.", "{p} finds {0} {i}."),
    "buys": ("{s} buys {0} more.", "Then {s} buys {0} {i}.", "{p} buys {0} {i}."),
    "loses": ("{s} loses {0}.", "Then {s} loses {0} {i}.", "{p} loses {0} of them."),
    "gives": ("{s} gives {0} to {q}.", "Then {s} gives {q} {0} {i}.", "{p} gives {0} {i} to {q}."),
    "times": ("Now {s} has {0} times as many.", "Then {s} has {0} times as many {i}."),
    "half": ("{s} gives away half.", "Then {s} sells half of them."),
    "bags": ("{s} gets {0} bags of {1} {i}.", "Then {s} gets {0} bags with {1} each."),
    "rival": ("{q} has {0} {i}.", "{q} has {0} {i} too."),
    "neutral": ("{p} is {0} years old.", "The walk takes {0} minutes.", "It is {0} degrees outside."),
    "ask": ("How many {i} does {p} have now?", "How many {i} does {p} have at the end?"),
}


class Level(NamedTuple):
    """The parameters of one difficulty level.

    Attributes:
        events: Minimum and maximum number of events after the first fact.
        rival: Probability of a sentence about another person's items.
        neutral: Probability of an irrelevant sentence.
    """

    events: tuple[int, int]
    rival: float
    neutral: float


LEVELS: Mapping[int, Level] = {
    1: Level((2, 2), 0.2, 0.0),
    2: Level((2, 3), 0.25, 0.2),
    3: Level((3, 4), 0.25, 0.3),
    4: Level((4, 5), 0.3, 0.3),
    5: Level((5, 6), 0.35, 0.4),
}

# Probability of each kind of event; times, half and bags occur at most once, or results soon leave the range.
EVENT_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"finds": 0.15, "buys": 0.23, "loses": 0.2, "gives": 0.2, "times": 0.1, "half": 0.05, "bags": 0.07}
)
ONCE = ("times", "half", "bags")


class Story(NamedTuple):
    """A sampled story, before it is written out.

    Attributes:
        facts: The first amount and the events, in order.
        rival: Number of facts stated before another person's count, and that count; None if there is none.
        neutral: The number of facts before an irrelevant sentence, and the number in it; None if there is none.
    """

    facts: list[Fact]
    rival: tuple[int, int] | None
    neutral: tuple[int, int] | None


def draw_story(rng: random.Random, level: Level) -> Story:
    """Sample a story of the given level, without checking that its numbers stay in range."""
    facts: list[Fact] = [("has", rng.randint(4, 30))]
    kinds, weights = list(EVENT_WEIGHTS), list(EVENT_WEIGHTS.values())
    for _ in range(rng.randint(*level.events)):
        kind = rng.choices(kinds, weights)[0]
        while kind in ONCE and any(fact[0] == kind for fact in facts):
            kind = rng.choices(kinds, weights)[0]
        facts.append(_draw_fact(rng, kind))
    rival = (rng.randint(1, len(facts)), rng.randint(2, 15)) if rng.random() < level.rival else None
    neutral = (rng.randint(1, len(facts)), rng.randint(5, 30)) if rng.random() < level.neutral else None
    return Story(facts, rival, neutral)


def _draw_fact(rng: random.Random, kind: str) -> Fact:
    if kind == "times":
        return ("times", rng.randint(2, 4))
    if kind == "half":
        return ("half",)
    if kind == "bags":
        return ("bags", rng.randint(2, 4), rng.randint(2, 5))
    # Some agents make errors on large amounts, so these are common, but not the majority.
    large = rng.random() < (0.45 if kind == "finds" else 0.35)
    return (kind, rng.randint(11, 15) if large else rng.randint(2, 9))


def write_question(
    story: Story,
    rng: random.Random,
    templates: Mapping[str, Sequence[str]] = TEMPLATES,
    others: Mapping[int, Mapping[str, Sequence[str]]] = MappingProxyType({}),
) -> tuple[str, str, str]:
    """Write the question; names and phrases are sampled.

    Args:
        story: The facts.
        rng: Samples names and phrases.
        templates: Phrases per kind of sentence.
        others: Alternative templates for some of the facts, by index of the fact.

    Returns:
        The text, the person and the items.
    """
    women = rng.random() < 0.5
    person = rng.choice(WOMEN if women else MEN)
    friend = rng.choice([name for name in WOMEN + MEN if name != person])
    item = rng.choice(ITEMS)
    pronoun = "she" if women else "he"

    def say(kind: str, *numbers: object, phrases: Mapping[str, Sequence[str]] = templates) -> str:
        text = rng.choice(phrases[kind]).format(*numbers, p=person, q=friend, s=pronoun, i=item)
        return text[0].upper() + text[1:]

    sentences: list[str] = []
    for place, fact in enumerate(story.facts):
        sentences += _asides(story, place, say)
        sentences.append(say(str(fact[0]), *fact[1:], phrases=others.get(place, templates)))
    sentences += _asides(story, len(story.facts), say)
    return " ".join([*sentences, say("ask")]), person, item


def _asides(story: Story, place: int, say: Any) -> list[str]:
    asides = (("rival", story.rival), ("neutral", story.neutral))
    return [say(kind, aside[1]) for kind, aside in asides if aside is not None and aside[0] == place]


def is_sound(story: Story) -> bool:
    """Return whether the results of all readings are in range and no misreading gives the right answer."""
    answer = answer_of(story.facts)
    if answer is None:
        return False
    misread = misread_answers(story.facts, story.rival)
    return None not in misread and answer not in misread


class Arithmetic(SampledTask):
    """Multi-step word problems about one person's items; all results are integers from 0 to 99.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``; no question is in two splits.
        seed: Seed of the problems.
        difficulty: 1 (two events) to 5 (five or six events and more irrelevant sentences).
        size: Number of problems in the split; each is generated on demand.
        grading: Grading mode, ``"strict"`` or ``"paper"``.

    Raises:
        ConfigError: An argument is out of range.
    """

    name, mas, levels, templates = "arithmetic", "rpsv", LEVELS, TEMPLATES

    def _draw(self, rng: random.Random, problem_id: str) -> Problem | None:
        story = draw_story(rng, self.levels[self.difficulty])
        question, person, item = write_question(story, rng, self.templates)
        # The hash is much cheaper than checking all readings, so it comes first.
        if split_of(question) != self.split or not is_sound(story):
            return None
        metadata = {
            "facts": [list(fact) for fact in story.facts],
            "rival": None if story.rival is None else list(story.rival),
            "plan": [list(step) for step in plan_of(story.facts)],
            "values": [list(equation) for equation in work_of(plan_of(story.facts)) or ()],
            "person": person,
            "item": item,
            "difficulty": self.difficulty,
        }
        return Problem(problem_id, question, str(answer_of(story.facts)), "number", metadata)
