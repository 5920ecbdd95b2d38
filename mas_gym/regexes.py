"""A static guard against regular expressions whose matching time explodes on hostile text.

Python's matcher backtracks: when a match fails it tries every way in which the
pattern could have read the text. A pattern is read as an automaton whose states
are its characters ("positions", after Glushkov), and two known criteria are
checked on it (Weber and Seidl, "On the degree of ambiguity of finite automata"):

* exponential time: some state can return to itself on one word along two paths;
* polynomial time of a high degree: two states loop, and one leads to the other,
  on one and the same word.

Counted repeats such as ``{2,5}`` are treated as loops by the first check, as
nested ones explode too, and as single occurrences by the second.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

MAX_PATTERN = 500
MAX_POSITIONS = 200
_STEPS = 2_000_000
_OTHER = 1 << 256
_ANY = (_OTHER << 1) - 1

_EXPONENTIAL = (
    "can read one text in exponentially many ways (a repeat inside a repeat, or alternatives that overlap under one): "
    "drop the outer repeat, or make the parts begin with different characters"
)
_POLYNOMIAL = (
    "has two unbounded repeats that can read the same characters, which is slow on long messages: "
    "keep one of them, or bound one, as in .{0,80}"
)
_COMPLEX = "is too large to be checked for runaway matching: shorten it"
_BACKREFERENCE = "refers back to a group, which can take exponential time: spell the text out instead"


class _UnsafeError(Exception):
    """Carries the reason why a pattern is refused."""


class _Part(NamedTuple):
    """A piece of the pattern: in how many ways it matches nothing, and its first and last positions, likewise."""

    empty: int
    first: dict[int, int]
    last: dict[int, int]


_NOTHING = _Part(1, {}, {})
_State = tuple[int, ...]


def regex_fault(pattern: str) -> str | None:
    r"""Return why a pattern must not be used on untrusted text, with a remedy; None if it may.

    >>> regex_fault(r"(?i)verdict:\s*disagree") is None
    True
    >>> regex_fault(r"(\w+\s?)*:").split(" (")[0]
    'can read one text in exponentially many ways'
    """
    if len(pattern) > MAX_PATTERN:
        return f"has {len(pattern)} characters, at most {MAX_PATTERN} are allowed: shorten it"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(pattern)
            tree = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        return f"is not a regular expression that Python can compile ({error}): correct it"
    try:
        _Automaton(tree, counted_loops=True).refuse_exponential()
        _Automaton(tree, counted_loops=False).refuse_polynomial()
    except _UnsafeError as reason:
        return str(reason)
    return None


class _Automaton:
    """The position automaton of a parsed pattern."""

    def __init__(self, tree: Any, *, counted_loops: bool) -> None:
        self.counted_loops = counted_loops
        self.sets: list[int] = []
        self.follow: list[dict[int, int]] = []
        self.anchored = False
        self.steps = _STEPS
        self.last = set(self._sequence(tree, bool(tree.state.flags & re.IGNORECASE)).last)
        self.reach = self._closure()

    def _sequence(self, tree: Any, fold: bool) -> _Part:
        whole = _NOTHING
        for op, argument in tree:
            part = self._part(op, argument, fold)
            self._connect(whole.last, part.first)
            whole = _Part(
                min(2, whole.empty * part.empty),
                _add(whole.first, part.first, whole.empty),
                _add(part.last, whole.last, part.empty),
            )
        return whole

    def _part(self, op: Any, argument: Any, fold: bool) -> _Part:
        characters = _characters(op, argument, fold)
        if characters is not None:
            return self._position(characters)
        if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            low, high, body = argument
            return self._repeat(low, high, body, fold)
        if op is _constants.SUBPATTERN:
            _, added, removed, body = argument
            return self._sequence(body, (fold or bool(added & re.IGNORECASE)) and not removed & re.IGNORECASE)
        if op is _constants.ATOMIC_GROUP:
            return self._sequence(argument, fold)
        if op is _constants.BRANCH:
            parts = [self._sequence(body, fold) for body in argument[1]]
            first, last = dict[int, int](), dict[int, int]()
            for part in parts:
                first, last = _add(first, part.first), _add(last, part.last)
            return _Part(min(2, sum(part.empty for part in parts)), first, last)
        if op is _constants.AT:
            self.anchored = True
            return _NOTHING
        if op in (_constants.ASSERT, _constants.ASSERT_NOT):
            # A lookaround fails or not like an anchor; its inside is matched on its own and is checked as such.
            self.anchored = True
            self._sequence(argument[1], fold)
            return _NOTHING
        raise _UnsafeError(_BACKREFERENCE)

    def _position(self, characters: int) -> _Part:
        self.sets.append(characters)
        self.follow.append({})
        if len(self.sets) > MAX_POSITIONS:
            raise _UnsafeError(_COMPLEX)
        here = {len(self.sets) - 1: 1}
        return _Part(0, here, dict(here))

    def _repeat(self, low: int, high: int, body: Any, fold: bool) -> _Part:
        part = self._sequence(body, fold)
        if high == 0:
            return _NOTHING
        counted = high is not _constants.MAXREPEAT
        if high > 1 and (self.counted_loops or not counted):
            self._connect(part.last, part.first)
        return part if low else part._replace(empty=1 + min(1, part.empty))

    def _connect(self, last: dict[int, int], first: dict[int, int]) -> None:
        for (p, ways), (q, more) in product(last.items(), first.items()):
            self.follow[p][q] = min(2, self.follow[p].get(q, 0) + ways * more)

    def _closure(self) -> list[int]:
        reach = [sum(1 << q for q in following) for following in self.follow]
        for middle in range(len(reach)):
            through = reach[middle]
            reach = [r | through if r >> middle & 1 else r for r in reach]
        return reach

    def _leads(self, p: int, q: int) -> bool:
        return bool(self.reach[p] >> q & 1)

    def _successors(self, state: _State) -> Iterator[_State]:
        """Yield the tuples of positions that one character can lead to from a tuple of positions."""
        for following in product(*(self.follow[p] for p in state)):
            self.steps -= 1
            if self.steps < 0:
                raise _UnsafeError(_COMPLEX)
            shared = _ANY
            for p in following:
                shared &= self.sets[p]
            if shared:
                yield following

    def refuse_exponential(self) -> None:
        """Raise if some position returns to itself on one word along two paths."""
        for p, following in enumerate(self.follow):
            if any(ways > 1 and self._leads(q, p) for q, ways in following.items()):
                raise _UnsafeError(_EXPONENTIAL)
        for p in range(len(self.sets)):
            if not self._leads(p, p):
                continue
            pairs = self._reachable((p, p), lambda pair, p=p: all(self._leads(q, p) for q in pair))  # type: ignore[misc]
            if any(q != r for q, r in _leading_to((p, p), pairs)):
                raise _UnsafeError(_EXPONENTIAL)

    def _reachable(self, start: _State, keep: Callable[[_State], bool]) -> dict[_State, list[_State]]:
        seen: dict[_State, list[_State]] = {}
        todo = [start]
        while todo:
            state = todo.pop()
            if state not in seen:
                seen[state] = [s for s in self._successors(state) if keep(s)]
                todo.extend(seen[state])
        return seen

    def refuse_polynomial(self) -> None:
        """Raise if two positions loop, and the first leads to the second, on one and the same word."""
        loops = [p for p in range(len(self.sets)) if self._leads(p, p)]
        for p, q in product(loops, loops):
            # Without anchors a search ends as soon as it reaches a last position, so nothing repeats after it.
            ends = not self.anchored and q in self.last
            if p == q or ends or not self._leads(p, q) or self._leads(q, p):
                continue

            def keep(state: _State, p: int = p, q: int = q) -> bool:
                one, two, three = state
                return self._leads(one, p) and self._leads(q, three) and (two == q or self._leads(two, q))

            if (p, q, q) in self._reachable((p, p, q), keep):
                raise _UnsafeError(_POLYNOMIAL)


def _leading_to(goal: _State, graph: dict[_State, list[_State]]) -> set[_State]:
    before: dict[_State, list[_State]] = {}
    for state, following in graph.items():
        for successor in following:
            before.setdefault(successor, []).append(state)
    found: set[_State] = set()
    todo = [goal]
    while todo:
        for state in before.get(todo.pop(), ()):
            if state not in found:
                found.add(state)
                todo.append(state)
    return found


def _add(ways: dict[int, int], more: dict[int, int], times: int = 1) -> dict[int, int]:
    if not times:
        return ways
    total = dict(ways)
    for position, count in more.items():
        total[position] = min(2, total.get(position, 0) + count * times)
    return total


def _characters(op: Any, argument: Any, fold: bool) -> int | None:
    """Return the set that a one-character item matches: a bit per code point below 256, one for all others."""
    if op is _constants.ANY:
        return _ANY
    if op is _constants.LITERAL:
        return _folded(_range(argument, argument), fold)
    if op is _constants.NOT_LITERAL:
        return _ANY & ~_folded(_range(argument, argument), fold) | _OTHER
    if op is not _constants.IN:
        return None
    union, negated = 0, False
    for kind, value in argument:
        if kind is _constants.NEGATE:
            negated = True
        elif kind is _constants.LITERAL:
            union |= _range(value, value)
        elif kind is _constants.RANGE:
            union |= _range(*value)
        else:
            union |= _category(value)
    union = _folded(union, fold)
    return _ANY & ~union | _OTHER if negated else union


def _range(low: int, high: int) -> int:
    below = ((1 << (min(high, 255) + 1)) - 1) & ~((1 << low) - 1) if low < 256 else 0
    return below | (_OTHER if high > 255 else 0)


def _bits(points: Iterable[int]) -> int:
    return sum(1 << point for point in points)


_CLASSES = {
    letter: _bits(c for c in range(256) if re.match(f"\\{letter}", chr(c))) | _OTHER for letter in ("d", "s", "w")
}


def _category(value: Any) -> int:
    # The names end in DIGIT, SPACE or WORD, with NOT before it for the complement.
    words = str(value).split("_")
    inside = _CLASSES[words[-1][0].lower()]
    return _ANY & ~inside | _OTHER if "NOT" in words else inside


def _folded(characters: int, fold: bool) -> int:
    if not fold:
        return characters
    both = characters | (_OTHER if characters >> 128 else 0)
    for c in range(256):
        if characters >> c & 1:
            both |= _bits(ord(v) for v in {chr(c).lower(), chr(c).upper()} if len(v) == 1 and ord(v) < 256)
    return both
