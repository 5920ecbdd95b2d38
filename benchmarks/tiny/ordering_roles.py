"""Messages of each agent on Ordering in the Debate and Logic graphs, and the errors that each agent makes by design.

======  =================================================================
rules   ``Rules: 1) Ann front 2) Ben after Ann 3) Kim end 4) swap Ann Kim``
order   ``Order: Ann front: Ann; Ben after Ann: Ann Ben; Kim end: Ann Ben Kim.``
places  ``So Ann first Ben second Kim last.``
scan    ``A Kim last no B Ben second yes``
pick    ``I pick B`` (debaters) or ``Final Answer: B``
======  =================================================================

A message may begin with another word for its label, see `benchmarks.tiny.language.LABELS`.
Each step depends only on the preceding text or on one place of the question, because a
model of this size learns to copy but not to search for an inverse.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.tiny.language import label_pattern
from mas_gym.tasks.procedural import ordering
from mas_gym.tasks.procedural.ordering import LETTERS, ORDINALS, Rule, Slip, State


class QueueWorld(NamedTuple):
    """The facts of an Ordering problem: rules, their phrases, the requested place, the options."""

    rules: list[Rule]
    phrases: list[str]
    place: int
    options: list[str]

    @property
    def states(self) -> list[State]:
        """The right state after each rule."""
        return ordering.states_of(self.rules) or []

    def letter(self, name: str, otherwise: str = "A") -> str:
        """Return the option that names a person; another letter if no option does."""
        return LETTERS[self.options.index(name)] if name in self.options else otherwise

    @property
    def asked(self) -> str:
        """The word for the requested place."""
        return ordinal(self.place, len(self.states[-1]))


def ordinal(place: int, people: int) -> str:
    """Return the word for a place, counted from 0: the last one is called last."""
    return "last" if place == people - 1 else ORDINALS[place]


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

_RULE = re.compile(r"\d\) (?:(swap) (\w+) (\w+)|(\w+) (front|end)|(\w+) (after|before) (\w+))")
_ORDER = re.compile(rf"{label_pattern('Order')}: ([^.\n]*)\.")
_PLACES = re.compile(r"\bSo ([^.\n]*)\.")
# A message uses different words for the place where a person joins and for the final place.
_ENDS = MappingProxyType({"first": "front", "last": "end"})
_KINDS = MappingProxyType({word: kind for kind, word in _ENDS.items()})
_PICK = re.compile(r"pick ([A-D])\b")


def write_rules(rules: list[Rule]) -> str:
    """Write a numbered list of rules."""
    return "Rules: " + " ".join(f"{number}) {_write_rule(rule)}" for number, rule in enumerate(rules, start=1))


def _write_rule(rule: Rule) -> str:
    kind, who, *other = rule
    return f"swap {who} {other[0]}" if kind == "swap" else " ".join([who, _ENDS.get(kind, kind), *other])


def read_rules(text: str) -> list[Rule] | None:
    """Read a numbered list of rules; None if there is none."""
    rules: list[Rule] = []
    for swap, one, two, who, end, name, side, other in _RULE.findall(text):
        if swap:
            rules.append(("swap", one, two))
        else:
            rules.append((_KINDS[end], who) if who else (side, name, other))
    return rules or None


def write_order(rules: list[Rule], followed: list[Rule]) -> str:
    """Write each rule as listed with the resulting queue, then the final order.

    Args:
        rules: The rules as the writer lists them.
        followed: The rules that it in fact follows, one for one.
    """
    states = ordering.states_of(followed) or ordering.states_of(rules) or [()]
    steps = "; ".join(f"{_write_rule(rule)}: {' '.join(state)}" for rule, state in zip(rules, states, strict=False))
    last = states[-1]
    places = " ".join(f"{name} {ordinal(place, len(last))}" for place, name in enumerate(last))
    return f"Order: {steps}.\nSo {places}."


def read_order(text: str) -> list[State] | None:
    """Read the queue after each rule; None if the text has none."""
    match = _ORDER.search(text)
    return None if match is None else [tuple(part.rpartition(": ")[2].split()) for part in match[1].split("; ")]


def read_places(text: str) -> State | None:
    """Read the final order, front to back; None if the text has no such line."""
    match = _PLACES.search(text)
    return None if match is None else tuple(match[1].split()[::2])


def scan(world: QueueWorld, state: State, place: int) -> str:
    """Write the place of each option's person, up to the requested place, and write yes for that option."""
    out = []
    for letter, name in zip(LETTERS, world.options, strict=True):
        found = state.index(name) if name in state else -1
        out.append(f"{letter} {name} {ordinal(found, len(state)) if found >= 0 else 'no'}")
        out.append("yes" if found == place else "no")
        if found == place:
            break
    return " ".join(out)


def read_pick(text: str) -> str | None:
    """Read the letter a debater picks."""
    match = _PICK.search(text)
    return None if match is None else match[1]


def _take(role: str, slips: list[Slip], rng: random.Random) -> list[Slip]:
    return [slip for slip in slips if rng.random() < RATES[role].get(slip[0], 0.0)]


def constraint_extractor(world: QueueWorld, inputs: list[str], rng: random.Random) -> str:
    """List the rules; may read "ahead of" as after, or leave a swap out."""
    slips = _take("ConstraintExtractor", ordering.reader_slips(world.rules, world.phrases), rng)
    return write_rules(ordering.apply_reader_slips(world.rules, slips))


def world_builder(world: QueueWorld, inputs: list[str], rng: random.Random) -> str:
    """Build the queue rule by rule; may put "after" at the end, or "last" at the front."""
    rules = read_rules(inputs[0]) or world.rules
    return write_order(rules, follow(rules, "WorldBuilder", rng))


def follow(rules: list[Rule], role: str, rng: random.Random) -> list[Rule]:
    """Return the rules that the role in fact follows when it is given these."""
    return ordering.apply_builder_slips(rules, _take(role, ordering.builder_slips(rules), rng))


def query_checker(world: QueueWorld, inputs: list[str], rng: random.Random) -> str:
    """Find the option at the requested place; may count the second place from the end."""
    state = read_places(inputs[0]) or world.states[-1]
    place = world.place
    if place == 1 and len(state) > 3 and rng.random() < RATES["QueryChecker"]["second"]:
        place = len(state) - 2
    who = state[place] if place < len(state) else ""
    return f"{scan(world, state, place)}\nFinal Answer: {world.letter(who)}"


def debater(role: str) -> QueueRole:
    """Return the role of a debater: reads, builds and picks, with the misconceptions of that name."""

    def write(world: QueueWorld, inputs: list[str], rng: random.Random) -> str:
        slips = _take(role, ordering.reader_slips(world.rules, world.phrases), rng)
        rules = ordering.apply_reader_slips(world.rules, slips)
        text = write_order(rules, follow(rules, role, rng))
        state = read_places(text) or ()
        who = state[world.place] if world.place < len(state) else ""
        return f"{text}\n{scan(world, state, world.place)} I pick {world.letter(who)}"

    return write


def debate_judge(world: QueueWorld, inputs: list[str], rng: random.Random) -> str:
    """Return the letter of both; of two letters, the one with the right order if it notices it, else the later one."""
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
