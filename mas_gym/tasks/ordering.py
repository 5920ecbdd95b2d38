"""Ordering: an unlimited supply of puzzles about positions in a queue, with options A to D.

Generated like `Arithmetic`, with the same guarantees: problem ``i`` depends on
``(seed, split, difficulty, i)`` alone, and splits are disjoint by content.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from mas_gym.errors import ConfigError
from mas_gym.tasks.base import Problem
from mas_gym.tasks.procedural import ProceduralTask, split_of
from mas_gym.tasks.queue import Rule, State, misread_states, states_of

NAMES = (
    "Maya", "Sara", "Ann", "Lily", "Nina", "Emma", "Ruth", "Zoe", "Tom", "Ben", "Sam", "Leo", "Max", "Dan", "Eli",
    "Jack",
)  # fmt: skip
ORDINALS = ("first", "second", "third", "fourth", "fifth")
LETTERS = "ABCD"

# Keyed by phrase: "ahead" states the same rule as "before", in words that some agents misread.
TEMPLATES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "first": ("{0} joins at the front.", "{0} steps in at the front."),
        "last": ("{0} joins at the end.", "{0} steps in at the end."),
        "after": ("{0} joins right after {1}.", "{0} steps in right after {1}."),
        "before": ("{0} joins right before {1}.", "{0} steps in right before {1}."),
        "ahead": ("{0} joins right ahead of {1}.", "{0} steps in right ahead of {1}."),
        "swap": ("Then {0} and {1} swap places.", "{0} and {1} swap places."),
        "aside": ("{0} is older than {1}.", "{0} is a friend of {1}."),
    }
)


class Level(NamedTuple):
    """The parameters of one difficulty.

    Attributes:
        people: Number of people in the queue.
        swap: Chance that two of them swap places.
        aside: Chance of an irrelevant sentence.
    """

    people: int
    swap: float
    aside: float


LEVELS: Mapping[int, Level] = MappingProxyType(
    {1: Level(4, 0.0, 0.0), 2: Level(4, 0.25, 0.2), 3: Level(4, 0.5, 0.3), 4: Level(5, 0.4, 0.3), 5: Level(5, 0.7, 0.4)}
)
DEFAULT_DIFFICULTY = 3


class Puzzle(NamedTuple):
    """A sampled puzzle, before it is written out.

    Attributes:
        rules: The rules, in the order in which the text states them.
        phrases: The template that states each rule.
        aside: Number of rules before an irrelevant sentence; None if there is none.
    """

    rules: list[Rule]
    phrases: list[str]
    aside: int | None


def draw_puzzle(rng: random.Random, difficulty: int) -> Puzzle:
    """Draw the rules of a queue."""
    level = LEVELS[difficulty]
    names = rng.sample(NAMES, level.people)
    rules: list[Rule] = [("first", names[0])]
    for place, name in enumerate(names[1:], start=1):
        kind = rng.choices(("after", "before", "first", "last"), (0.38, 0.38, 0.08, 0.16))[0]
        rules.append((kind, name) if kind in ("first", "last") else (kind, name, rng.choice(names[:place])))
    if rng.random() < level.swap:
        rules.append(("swap", *rng.sample(names, 2)))
    phrases = ["ahead" if rule[0] == "before" and rng.random() < 0.4 else rule[0] for rule in rules]
    return Puzzle(rules, phrases, rng.randint(1, len(rules)) if rng.random() < level.aside else None)


def write_question(puzzle: Puzzle, order: State, rng: random.Random) -> tuple[str, str, int, list[str]]:
    """Return the question text, the right letter, the place asked for (from 0) and the options; samples phrases."""
    sentences = [
        rng.choice(TEMPLATES[phrase]).format(*rule[1:])
        for phrase, rule in zip(puzzle.phrases, puzzle.rules, strict=True)
    ]
    if puzzle.aside is not None:
        sentences.insert(puzzle.aside, rng.choice(TEMPLATES["aside"]).format(*rng.sample(order, 2)))
    place = rng.randrange(len(order))
    others = [name for i, name in enumerate(order) if i != place]
    options = [order[place], *rng.sample(others, 3)]
    rng.shuffle(options)
    ask = "last" if place == len(order) - 1 else ORDINALS[place]
    listed = " ".join(f"{letter}) {name}" for letter, name in zip(LETTERS, options, strict=True))
    question = f"{' '.join(sentences)} Who is {ask} in the queue? {listed}"
    return question, LETTERS[options.index(order[place])], place, options


def is_sound(rules: list[Rule], phrases: list[str], place: int) -> bool:
    """Return whether every misreading gives a queue with another person at the place asked for."""
    order = (states_of(rules) or [()])[-1]
    misread = misread_states(rules, phrases)
    return bool(order) and all(state is not None and state[place] != order[place] for state in misread)


class Ordering(ProceduralTask):
    """Queue puzzles with options A to D.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``; disjoint by the text of the question.
        seed: Another seed gives other puzzles of the same kind.
        difficulty: 1 (four people, nobody swaps) to 5 (five people, swaps, irrelevant sentences).
        size: Number of problems in the split; each is generated on demand.
        grading: Grading mode, ``"strict"`` or ``"paper"``.

    Raises:
        ConfigError: An argument is out of its range.
    """

    name = "ordering"

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
        puzzle = draw_puzzle(rng, self.difficulty)
        states = states_of(puzzle.rules) or []
        question, letter, place, options = write_question(puzzle, states[-1], rng)
        if split_of(question) != self.split or not is_sound(puzzle.rules, puzzle.phrases, place):
            return None
        metadata = {
            "rules": [list(rule) for rule in puzzle.rules],
            "phrases": puzzle.phrases,
            "states": [list(state) for state in states],
            "place": place,
            "options": options,
            "difficulty": self.difficulty,
        }
        return Problem(problem_id, question, letter, "choice", MappingProxyType(metadata))


__all__ = ["DEFAULT_DIFFICULTY", "LEVELS", "NAMES", "Ordering"]
