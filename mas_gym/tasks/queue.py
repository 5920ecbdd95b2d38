"""The model behind an Ordering problem: a queue that grows rule by rule, and the ways to misread it.

- **rule**: a tuple such as ``("first", "Ann")``, ``("after", "Ben", "Ann")`` (Ben stands right after Ann),
  ``("before", "Kim", "Ben")``, ``("last", "Tom")`` or ``("swap", "Ann", "Kim")``.
- **state**: the names in order, front to back. Each rule turns one state into the next.

A rule read the wrong way round still gives a queue, so no error shows as a
contradiction, only by comparison with the text.
"""

from __future__ import annotations

from itertools import product

Rule = tuple[str, ...]
State = tuple[str, ...]
Slip = tuple[str, int]


def follow(rule: Rule, state: State) -> State | None:
    """Apply one rule; None if it refers to somebody who is not in the queue, or adds somebody who is."""
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
    """List what a reader of the text may get wrong: "ahead of" as after, a swap left out.

    Args:
        rules: The true rules.
        phrases: The phrase that states each rule, such as ``"ahead"``.
    """
    slips = [("ahead", i) for i, phrase in enumerate(phrases) if phrase == "ahead"]
    return slips + [("swap", i) for i, rule in enumerate(rules) if rule[0] == "swap"]


def apply_reader_slips(rules: list[Rule], slips: list[Slip]) -> list[Rule]:
    """Return the rules as a reader with these slips lists them."""
    ahead = {i for kind, i in slips if kind == "ahead"}
    dropped = {i for kind, i in slips if kind == "swap"}
    return [("after", *rule[1:]) if i in ahead else rule for i, rule in enumerate(rules) if i not in dropped]


def builder_slips(rules: list[Rule]) -> list[Slip]:
    """List what a builder may get wrong: "after" somebody in the middle as last, "last" as first."""
    states = states_of(rules) or []
    slips: list[Slip] = []
    for i, rule in enumerate(rules[: len(states)]):
        if rule[0] == "after" and rule[2] != states[i - 1][-1]:
            slips.append(("end", i))
        elif rule[0] == "last" and i > 1:
            slips.append(("front", i))
    return slips


def apply_builder_slips(rules: list[Rule], slips: list[Slip]) -> list[Rule]:
    """Return the rules that a builder with these slips in fact follows."""
    wrong = {i: ("last" if kind == "end" else "first") for kind, i in slips}
    return [(wrong[i], rule[1]) if i in wrong else rule for i, rule in enumerate(rules)]


def misread_states(rules: list[Rule], phrases: list[str]) -> list[State | None]:
    """Return the last state under every combination of slips but the empty one; None where rules cannot be followed."""
    out: list[State | None] = []
    for reader in _subsets(reader_slips(rules, phrases)):
        read = apply_reader_slips(rules, reader)
        for builder in _subsets(builder_slips(read)):
            if reader or builder:
                states = states_of(apply_builder_slips(read, builder))
                out.append(states[-1] if states else None)
    return out


def _subsets(slips: list[Slip]) -> list[list[Slip]]:
    return [
        [slip for slip, kept in zip(slips, keep, strict=True) if kept]
        for keep in product((False, True), repeat=len(slips))
    ]
