"""Who writes what on Ordering, in the Debate and Logic graphs, and which errors each agent makes by design.

=====  ===========================================================
rules  ``1) Ann first 2) Ben after Ann 3) Kim last 4) swap Ann Kim``
order  ``Order: Ann; Ann Ben; Ann Ben Kim; Kim Ben Ann.``
place  ``Kim is second``
pick   ``I pick B`` (debaters) or ``Final Answer: B``
=====  ===========================================================
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from mas_gym.tasks import queue
from mas_gym.tasks.ordering import LETTERS, ORDINALS
from mas_gym.tasks.queue import Rule, Slip, State


class QueueWorld(NamedTuple):
    """What is true in an Ordering problem: rules, the phrases that tell them, the place asked for, the options."""

    rules: list[Rule]
    phrases: list[str]
    place: int
    options: list[str]

    @property
    def states(self) -> list[State]:
        """The right state after each rule."""
        return queue.states_of(self.rules) or []

    def letter(self, name: str, otherwise: str = "A") -> str:
        """Return the option that names a person; another letter if no option does."""
        return LETTERS[self.options.index(name)] if name in self.options else otherwise

    def point(self, state: State, place: int) -> str:
        """Return the words that name who stands at a place of a state, as asked for."""
        asked = "last" if self.place == len(self.states[-1]) - 1 else ORDINALS[self.place]
        return f"{state[place] if place < len(state) else 'no one'} is {asked}"


QueueRole = Callable[[QueueWorld, list[str], random.Random], str]

RATES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "ConstraintExtractor": {"ahead": 0.57, "swap": 0.4},
        "WorldBuilder": {"end": 0.42, "front": 0.45},
        "QueryChecker": {"second": 0.45},
        "Angel": {"ahead": 0.57, "end": 0.45, "swap": 0.5, "front": 0.4},
        "Devil": {"ahead": 0.5, "front": 0.5, "swap": 0.57, "end": 0.4},
    }
)
# How often the Judge sees which debater's order keeps the rules; otherwise it takes the later letter.
JUDGE_NOTICES = 0.55

_RULE = re.compile(r"\d\) (?:(swap) (\w+) (\w+)|(\w+) (first|last)|(\w+) (after|before) (\w+))")
_ORDER = re.compile(r"Order: ([^.\n]*)\.")
_PICK = re.compile(r"pick ([A-D])\b")


def write_rules(rules: list[Rule]) -> str:
    """Write a numbered list of rules."""
    return " ".join(f"{number}) {_write_rule(rule)}" for number, rule in enumerate(rules, start=1))


def _write_rule(rule: Rule) -> str:
    kind, who, *other = rule
    return f"swap {who} {other[0]}" if kind == "swap" else " ".join([who, kind, *other])


def read_rules(text: str) -> list[Rule] | None:
    """Read a numbered list of rules; None if there is none."""
    rules: list[Rule] = []
    for swap, one, two, who, end, name, side, other in _RULE.findall(text):
        if swap:
            rules.append(("swap", one, two))
        else:
            rules.append((end, who) if who else (side, name, other))
    return rules or None


def write_order(states: list[State]) -> str:
    """Write the queue after each rule."""
    return "Order: " + "; ".join(" ".join(state) for state in states) + "."


def read_order(text: str) -> list[State] | None:
    """Read the queue after each rule; None if the text has none."""
    match = _ORDER.search(text)
    return None if match is None else [tuple(part.split()) for part in match[1].split("; ")]


def read_pick(text: str) -> str | None:
    """Read the letter a debater picks."""
    match = _PICK.search(text)
    return None if match is None else match[1]


def _take(role: str, slips: list[Slip], rng: random.Random) -> list[Slip]:
    return [slip for slip in slips if rng.random() < RATES[role].get(slip[0], 0.0)]


def constraint_extractor(world: QueueWorld, inputs: list[str], rng: random.Random) -> str:
    """List the rules; may read "ahead of" as after, or leave a swap out."""
    slips = _take("ConstraintExtractor", queue.reader_slips(world.rules, world.phrases), rng)
    return write_rules(queue.apply_reader_slips(world.rules, slips))


def world_builder(world: QueueWorld, inputs: list[str], rng: random.Random) -> str:
    """Build the queue rule by rule; may put "after" at the end, or "last" at the front."""
    rules = read_rules(inputs[0]) or world.rules
    return write_order(build(rules, "WorldBuilder", rng))


def build(rules: list[Rule], role: str, rng: random.Random) -> list[State]:
    """Return the states that the role builds from rules."""
    slips = _take(role, queue.builder_slips(rules), rng)
    return queue.states_of(queue.apply_builder_slips(rules, slips)) or queue.states_of(rules) or [()]


def query_checker(world: QueueWorld, inputs: list[str], rng: random.Random) -> str:
    """Look the place up in the last state; may count the second from the end."""
    state = (read_order(inputs[0]) or world.states)[-1]
    place = world.place
    if place == 1 and len(state) > 3 and rng.random() < RATES["QueryChecker"]["second"]:
        place = len(state) - 2
    return f"{world.point(state, place)}\nFinal Answer: {world.letter(state[place] if place < len(state) else '')}"


def debater(role: str) -> QueueRole:
    """Return the role of a debater: reads, builds and picks, with the misconceptions of that name."""

    def write(world: QueueWorld, inputs: list[str], rng: random.Random) -> str:
        slips = _take(role, queue.reader_slips(world.rules, world.phrases), rng)
        states = build(queue.apply_reader_slips(world.rules, slips), role, rng)
        who = states[-1][world.place] if world.place < len(states[-1]) else ""
        return f"{write_order(states)} {world.point(states[-1], world.place)}, I pick {world.letter(who)}"

    return write


def debate_judge(world: QueueWorld, inputs: list[str], rng: random.Random) -> str:
    """Take what both say; between two letters, the one with the right order if it sees that, else the later letter."""
    picks = [read_pick(text) or "A" for text in inputs]
    right = [pick for pick, text in zip(picks, inputs, strict=True) if read_order(text) == world.states]
    if right and rng.random() < JUDGE_NOTICES:
        return f"Final Answer: {right[0]}"
    return f"Final Answer: {max(picks)}"


ORDERING_ROLES: Mapping[str, QueueRole] = MappingProxyType(
    {
        "ConstraintExtractor": constraint_extractor,
        "WorldBuilder": world_builder,
        "QueryChecker": query_checker,
        "Angel": debater("Angel"),
        "Devil": debater("Devil"),
        "DebateJudge": debate_judge,
    }
)
