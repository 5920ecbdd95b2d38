"""Arithmetic: an unlimited supply of multi-step word problems, generated without data files.

Problem ``i`` of a split is generated from ``(seed, split, difficulty, i)`` alone, in
constant time. A hash of the question's text decides its split, so no question of
one split occurs in another, whatever the seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from mas_gym.errors import ConfigError
from mas_gym.tasks.base import Problem
from mas_gym.tasks.procedural import ProceduralTask, split_of
from mas_gym.tasks.story import LIMIT, Fact, answer_of, misread_answers, plan_of, work_of

WOMEN = ("Maya", "Sara", "Ann", "Lily", "Nina", "Emma", "Ruth", "Zoe")
MEN = ("Tom", "Ben", "Sam", "Leo", "Max", "Dan", "Eli", "Jack")
ITEMS = (
    "coins",
    "marbles",
    "apples",
    "cards",
    "stickers",
    "books",
    "shells",
    "pens",
    "beads",
    "stamps",
    "eggs",
    "nuts",
)

TEMPLATES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
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
)


class Level(NamedTuple):
    """The parameters of one difficulty.

    Attributes:
        events: Fewest and most events after the first fact.
        rival: Chance of a sentence with another person's count.
        neutral: Chance of an irrelevant sentence.
    """

    events: tuple[int, int]
    rival: float
    neutral: float


LEVELS: Mapping[int, Level] = MappingProxyType(
    {
        1: Level((2, 2), 0.2, 0.0),
        2: Level((2, 3), 0.25, 0.2),
        3: Level((3, 4), 0.25, 0.3),
        4: Level((4, 5), 0.3, 0.3),
        5: Level((5, 6), 0.35, 0.4),
    }
)
DEFAULT_DIFFICULTY = 3

# Chance of each kind of event; times, half and bags occur once at most, or results soon leave the range.
EVENT_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"finds": 0.15, "buys": 0.23, "loses": 0.2, "gives": 0.2, "times": 0.1, "half": 0.05, "bags": 0.07}
)
ONCE = ("times", "half", "bags")


class Story(NamedTuple):
    """A sampled story, before it is written out.

    Attributes:
        facts: The first amount and the events, in order.
        rival: Number of facts stated before another person's count, and that count; None if there is none.
        neutral: The same for an irrelevant sentence.
    """

    facts: list[Fact]
    rival: tuple[int, int] | None
    neutral: tuple[int, int] | None


def draw_story(rng: random.Random, difficulty: int) -> Story:
    """Sample a story of the given difficulty; its numbers may still leave the range."""
    level = LEVELS[difficulty]
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


def write_question(story: Story, rng: random.Random) -> tuple[str, str, str]:
    """Return the question text, the person and the items; samples names and phrases."""
    women = rng.random() < 0.5
    person = rng.choice(WOMEN if women else MEN)
    friend = rng.choice([name for name in WOMEN + MEN if name != person])
    item = rng.choice(ITEMS)
    pronoun = "she" if women else "he"

    def say(kind: str, *numbers: object) -> str:
        text = rng.choice(TEMPLATES[kind]).format(*numbers, p=person, q=friend, s=pronoun, i=item)
        return text[0].upper() + text[1:]

    sentences: list[str] = []
    for place, fact in enumerate(story.facts):
        sentences += _asides(story, place, say)
        sentences.append(say(str(fact[0]), *fact[1:]))
    sentences += _asides(story, len(story.facts), say)
    return " ".join([*sentences, say("ask")]), person, item


def _asides(story: Story, place: int, say: Any) -> list[str]:
    asides = (("rival", story.rival), ("neutral", story.neutral))
    return [say(kind, aside[1]) for kind, aside in asides if aside is not None and aside[0] == place]


def is_sound(story: Story) -> bool:
    """Return whether every reading, right or wrong, stays in range and no wrong one gives the right answer."""
    answer = answer_of(story.facts)
    if answer is None:
        return False
    misread = misread_answers(story.facts, story.rival)
    return None not in misread and answer not in misread


class Arithmetic(ProceduralTask):
    """Multi-step word problems about one person's things, all results whole numbers from 0 to 99.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``; disjoint by the text of the question.
        seed: Another seed gives other problems of the same kind.
        difficulty: 1 (two events) to 5 (five or six events and more irrelevant sentences).
        size: Number of problems in the split; each is generated on demand.
        grading: Grading mode, ``"strict"`` or ``"paper"``.

    Raises:
        ConfigError: An argument is out of its range.
    """

    name = "arithmetic"

    def __init__(
        self,
        split: str = "test",
        *,
        seed: int = 0,
        difficulty: int = DEFAULT_DIFFICULTY,
        size: int = 10**6,
        grading: str = "strict",
    ) -> None:
        """Check the arguments; problems are generated later."""
        if difficulty not in LEVELS:
            raise ConfigError(f"expected a difficulty from {min(LEVELS)} to {max(LEVELS)}, got {difficulty!r}")
        super().__init__(split, seed=seed, difficulty=difficulty, size=size, grading=grading)

    def _draw(self, rng: random.Random, problem_id: str) -> Problem | None:
        story = draw_story(rng, self.difficulty)
        question, person, item = write_question(story, rng)
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
        return Problem(problem_id, question, str(answer_of(story.facts)), "number", MappingProxyType(metadata))


def facts_of(problem: Problem) -> list[Fact]:
    """Return the true facts of an Arithmetic problem from its metadata."""
    rows: Sequence[Sequence[Any]] = problem.metadata["facts"]
    return [tuple(row) for row in rows]


def rival_of(problem: Problem) -> tuple[int, int] | None:
    """Return where another person's count stands and the count, or None."""
    rival = problem.metadata["rival"]
    return None if rival is None else (int(rival[0]), int(rival[1]))


__all__ = ["DEFAULT_DIFFICULTY", "ITEMS", "LEVELS", "LIMIT", "MEN", "WOMEN", "Arithmetic", "facts_of", "rival_of"]
