"""Ordering: an unlimited supply of puzzles about positions in a queue, with options A to D.

Generated like `Arithmetic`, with the same guarantees: problem ``i`` depends only on
``(seed, split, difficulty, i)``, and no problem occurs in two splits.

A queue grows by one rule at a time, and every rule can be misread:

- **rule**: a tuple such as ``("first", "Ann")``, ``("after", "Ben", "Ann")`` (Ben stands right after Ann),
  ``("before", "Kim", "Ben")``, ``("last", "Tom")`` or ``("swap", "Ann", "Kim")``.
- **state**: the names in order, front to back. Each rule turns one state into the next.

A misread rule still gives a valid queue. The error never appears as a contradiction; it is
found only by comparing the queue with the text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from mas_gym.tasks.base import Problem
from mas_gym.tasks.procedural.arithmetic import Slip, subsets
from mas_gym.tasks.procedural.generated import SampledTask, split_of

Rule = tuple[str, ...]
State = tuple[str, ...]


def follow(rule: Rule, state: State) -> State | None:
    """Apply one rule; None if it refers to a person who is not in the queue, or adds a person who already is."""
    kind, who = rule[0], rule[1]
    if kind == "swap":
        if who not in state or rule[2] not in state:
            return None
        other = {who: rule[2], rule[2]: who}
        return tuple(other.get(name, name) for name in state)
    if who in state or (kind in ("after", "before") and rule[2] not in state):
        return None
    if kind == "first":
        return (who, *state)
    if kind == "last":
        return (*state, who)
    place = state.index(rule[2]) + (kind == "after")
    return (*state[:place], who, *state[place:])


def states_of(rules: list[Rule]) -> list[State] | None:
    """Return the state after each rule, or None if a rule cannot be followed."""
    state: State = ()
    states: list[State] = []
    for rule in rules:
        following = follow(rule, state)
        if following is None:
            return None
        state = following
        states.append(state)
    return states


def reader_slips(rules: list[Rule], phrases: list[str]) -> list[Slip]:
    """List the errors that a reader of the text may make: reading "ahead of" as "after", or omitting a swap.

    Args:
        rules: The true rules.
        phrases: Key in `TEMPLATES` of the sentence for each rule, such as ``"ahead"``.
    """
    slips = [("ahead", i) for i, phrase in enumerate(phrases) if phrase == "ahead"]
    return slips + [("swap", i) for i, rule in enumerate(rules) if rule[0] == "swap"]


def apply_reader_slips(rules: list[Rule], slips: list[Slip]) -> list[Rule]:
    """Return the rules as read by someone who makes these slips."""
    ahead = {i for kind, i in slips if kind == "ahead"}
    dropped = {i for kind, i in slips if kind == "swap"}
    return [("after", *rule[1:]) if i in ahead else rule for i, rule in enumerate(rules) if i not in dropped]


def builder_slips(rules: list[Rule]) -> list[Slip]:
    """List a builder's possible errors: placing a person last instead of "after" one, or first instead of "last"."""
    states = states_of(rules) or []
    slips: list[Slip] = []
    for i, rule in enumerate(rules[: len(states)]):
        if rule[0] == "after" and rule[2] != states[i - 1][-1]:
            slips.append(("end", i))
        elif rule[0] == "last" and i > 1:
            slips.append(("front", i))
    return slips


def apply_builder_slips(rules: list[Rule], slips: list[Slip]) -> list[Rule]:
    """Return the rules that a builder with these slips follows."""
    wrong = {i: ("last" if kind == "end" else "first") for kind, i in slips}
    return [(wrong[i], rule[1]) if i in wrong else rule for i, rule in enumerate(rules)]


def misread_states(rules: list[Rule], phrases: list[str]) -> list[State | None]:
    """Return the last state under every non-empty combination of slips; None if a rule cannot be followed."""
    out: list[State | None] = []
    for reader in subsets(reader_slips(rules, phrases)):
        read = apply_reader_slips(rules, reader)
        for builder in subsets(builder_slips(read)):
            if reader or builder:
                states = states_of(apply_builder_slips(read, builder))
                out.append(states[-1] if states else None)
    return out


# ----------------------------------------------------------------- puzzles

NAMES = (
    "Maya", "Sara", "Ann", "Lily", "Nina", "Emma", "Ruth", "Zoe", "Tom", "Ben", "Sam", "Leo", "Max", "Dan", "Eli",
    "Jack",
)  # fmt: skip
ORDINALS = ("first", "second", "third", "fourth", "fifth")
LETTERS = "ABCD"

# Keyed by phrase: "ahead" states the same rule as "before", in words that some agents misread.
TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "first": ("{0} joins at the front.", "{0} steps in at the front."),
    "last": ("{0} joins at the end.", "{0} steps in at the end."),
    "after": ("{0} joins right after {1}.", "{0} steps in right after {1}."),
    "before": ("{0} joins right before {1}.", "{0} steps in right before {1}."),
    "ahead": ("{0} joins right ahead of {1}.", "{0} steps in right ahead of {1}."),
    "swap": ("Then {0} and {1} swap places.", "{0} and {1} swap places."),
    "aside": ("{0} is older than {1}.", "{0} is a friend of {1}."),
}


class Level(NamedTuple):
    """The parameters of one difficulty level.

    Attributes:
        people: Number of people in the queue.
        swap: Probability that two of them swap places.
        aside: Probability of an irrelevant sentence.
    """

    people: int
    swap: float
    aside: float


LEVELS: Mapping[int, Level] = MappingProxyType(
    {1: Level(4, 0.0, 0.0), 2: Level(4, 0.25, 0.2), 3: Level(4, 0.5, 0.3), 4: Level(5, 0.4, 0.3), 5: Level(5, 0.7, 0.4)}
)


class Puzzle(NamedTuple):
    """A sampled puzzle, before it is written out.

    Attributes:
        rules: The rules, in the order in which the text states them.
        phrases: For each rule, the key of its sentence in `TEMPLATES`.
        aside: Number of rules before an irrelevant sentence; None if there is none.
    """

    rules: list[Rule]
    phrases: list[str]
    aside: int | None


def draw_puzzle(rng: random.Random, difficulty: int) -> Puzzle:
    """Sample a puzzle of the given difficulty."""
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
    """Return the question text, the label of the correct option, the requested position (from 0) and the options."""
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
    """Return whether every misreading puts a different person at the requested position."""
    order = (states_of(rules) or [()])[-1]
    misread = misread_states(rules, phrases)
    return bool(order) and all(state is not None and state[place] != order[place] for state in misread)


class Ordering(SampledTask):
    """Queue puzzles with options A to D.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``; no question is in two splits.
        seed: Seed of the puzzles.
        difficulty: 1 (four people, no swaps) to 5 (five people, swaps, irrelevant sentences).
        size: Number of problems in the split; each is generated on demand.
        grading: Grading mode, ``"strict"`` or ``"paper"``.

    Raises:
        ConfigError: An argument is out of range.
    """

    name, mas, levels = "ordering", "logic", LEVELS

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
