"""Arithmetic of one difficulty in two wordings, and Stories, in which a misreading may give the right answer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from benchmarks.tiny import language
from benchmarks.tiny.truth import BY_STEP, story_world
from benchmarks.tiny.turns import RoleTurn
from mas_gym.tasks.base import Problem
from mas_gym.tasks.procedural.arithmetic import (
    LEVELS,
    Arithmetic,
    Story,
    answer_of,
    draw_story,
    plan_of,
    work_of,
    write_question,
)
from mas_gym.tasks.procedural.generated import split_of


class Stories(Arithmetic):
    """Word problems that are rejected only if the right answer leaves the numbers that the agents can write."""

    name = "stories"
    marks: ClassVar[Mapping[str, object]] = MappingProxyType({})
    """Further metadata of each problem."""

    def _draw(self, rng: random.Random, problem_id: str) -> Problem | None:
        story = draw_story(rng, self.levels[self.difficulty])
        question, person, item = self._write(story, rng)
        if split_of(question) != self.split or answer_of(story.facts) is None:
            return None
        truth = {
            "facts": [list(fact) for fact in story.facts],
            "rival": None if story.rival is None else list(story.rival),
            "person": person,
            "item": item,
            "difficulty": self.difficulty,
        }
        return Problem(problem_id, question, str(answer_of(story.facts)), "number", truth | self.marks)

    def _write(self, story: Story, rng: random.Random) -> tuple[str, str, str]:
        return write_question(story, rng, self.templates)


def transcript(problem: Problem) -> list[RoleTurn]:
    """Return the correct transcript of RPSV."""
    world = story_world(problem)
    facts = f"{language.write_facts(world.facts)} Question: how many?"
    plan = language.write_plan(plan_of(world.facts))
    work = language.write_work(work_of(plan_of(world.facts)) or [])
    return [
        RoleTurn("Reader", True, [], facts),
        RoleTurn("Planner", True, [facts], plan),
        RoleTurn("Solver", False, [plan], work),
        RoleTurn("Verifier", True, [work], language.write_answer(world.work[-1][3])),
    ]


class Retold(Arithmetic):
    """Arithmetic in another wording: the same kinds of stories in the past tense."""

    name = "retold"
    templates = MappingProxyType(
        {
            "has": ("At first the shelf of {p} had {0} {i}.", "{p} had {0} {i} at first."),
            "finds": ("Then {0} more were found.", "Then {0} {i} were found by {p}.", "They found {0} more."),
            "buys": ("Then {0} more were bought.", "{0} {i} were bought by {p}.", "Then {p} came by with {0} more."),
            "loses": ("Then {0} were lost.", "{0} of them were lost by {p}.", "Then {0} {i} went away."),
            "gives": ("{q} took {0} of them.", "Then {0} {i} went to {q}.", "{q} got {0} {i} from {p}."),
            "times": ("Then there were {0} times as many.", "Now there were {0} times as many {i}."),
            "half": ("Then half of them were sold.", "Then half went away."),
            "bags": ("Then {0} bags came, each with {1} {i}.", "{0} bags of {1} {i} were put in."),
            "rival": ("The shelf of {q} had {0} {i}.", "{q} had {0} {i}."),
            "neutral": ("It took {0} minutes.", "It was {0} degrees that week.", "The seat was {0} years old."),
            "ask": ("How many {i} were left for {p} at the end?", "How many {i} are in the shelf of {p} now?"),
        }
    )


class StoriesOfLength(Stories):
    """Stories whose number of events is their difficulty, 2 to 5."""

    name = "stories-of-length"
    levels = MappingProxyType({events: LEVELS[3]._replace(events=(events, events)) for events in range(2, 6)})


class Reworded(Stories):
    """Stories of two events in which each fact has the words of `Retold` with a probability of level / 10.

    Agents that learned `Stories` have seen none of those sentences and few of their words. Facts are compared by the
    step that they call for, because the words do not tell such agents whether a gain is found or bought.
    """

    name = "reworded"
    levels = MappingProxyType(dict.fromkeys(range(1, 6), LEVELS[3]._replace(events=(2, 2))))
    marks = MappingProxyType({BY_STEP: True})

    def _write(self, story: Story, rng: random.Random) -> tuple[str, str, str]:
        places = [place for place in range(len(story.facts)) if rng.random() < self.difficulty / 10]
        return write_question(story, rng, self.templates, dict.fromkeys(places, Retold.templates))


FAMILIES: Mapping[str, type[Arithmetic]] = MappingProxyType(
    {"arithmetic": Arithmetic, "stories": StoriesOfLength, "retold": Retold, "reworded": Reworded}
)

GENERATED = tuple(f"{family}-{level}" for family, task in FAMILIES.items() for level in task.levels)
"""Tasks of one difficulty: ``arithmetic-1`` to ``arithmetic-5``, ``stories-2`` to ``stories-5``, ``retold-1`` to
``retold-5``, ``reworded-1`` to ``reworded-5``."""


def generated(name: str, split: str) -> Arithmetic:
    family, _, level = name.partition("-")
    return FAMILIES[family](split, difficulty=int(level))
