"""Patterns of routing conditions: what they may contain, and matching in linear time."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from mas_gym.errors import ConfigError, shown

MAX_PATTERN = 500
"""Maximum number of characters in a pattern."""

_MAX_MEMORY = 1 << 22
_MAX_CHARACTERS = 1000
_MAX_DEPTH = 50
_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.UNICODE
# `re` folds these four together; Unicode's simple case folding keeps the dotted and dotless i apart.
_I = "iI\u0130\u0131"
_ANCHORS = {
    _constants.AT_BEGINNING_STRING: r"\A",
    _constants.AT_END_STRING: r"\z",
    _constants.AT_BOUNDARY: r"\b",
    _constants.AT_NON_BOUNDARY: r"\B",
}
_REMEDIES = {
    _constants.ASSERT: "a lookahead or lookbehind: match the text itself, or use not_regex:",
    _constants.ASSERT_NOT: "a negative lookahead or lookbehind: match the text itself, or use not_regex:",
    _constants.GROUPREF: "a backreference: spell the text out",
    _constants.GROUPREF_EXISTS: "a conditional group: list both alternatives with |",
    _constants.ATOMIC_GROUP: "an atomic group: use an ordinary group (?:...)",
    _constants.POSSESSIVE_REPEAT: "a possessive repeat: use an ordinary one, such as a*",
}
_NESTED = "is nested too deeply: drop groups that are not needed"


class _RefusedError(Exception):
    """The fault of a pattern, and the remedy."""


@lru_cache(maxsize=256)
def matcher(pattern: str) -> Callable[[str], bool]:
    r"""Return a function that says whether a pattern occurs in a text, in time linear in the text.

    Args:
        pattern: A regular expression in Python's syntax, at most `MAX_PATTERN` characters.

    Raises:
        ConfigError: The pattern is wrong, or cannot be matched in linear time.

    >>> matcher(r"(?i)verdict:\s*disagree")("VERDICT:  Disagree")
    True
    >>> matcher(r"(\w+) \1")
    Traceback (most recent call last):
    mas_gym.errors.ConfigError: the pattern '(\\w+) \\1' uses a backreference: spell the text out
    """
    try:
        compiled = _compiled(pattern)
    except _RefusedError as reason:
        raise ConfigError(f"the pattern {shown(pattern)} {reason}") from reason

    def found(text: str) -> bool:
        return compiled.search(_utf8(text)) is not None

    return found


def _compiled(pattern: str) -> Any:
    import re2

    if len(pattern) > MAX_PATTERN:
        raise _RefusedError(f"has {len(pattern)} characters, at most {MAX_PATTERN} are allowed: shorten it")
    try:
        pattern.encode()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tree = _parser.parse(pattern)
        if _length(tree) > _MAX_CHARACTERS:
            # The time per character of text grows with the pattern once its counts are spelled out.
            problem = f"is longer than {_MAX_CHARACTERS} characters with its repeats spelled out"
            raise _RefusedError(f"{problem}: lower the counts")
        translated = _sequence(tree, tree.state.flags)
    except RecursionError as error:
        raise _RefusedError(_NESTED) from error
    except (re.error, OverflowError, Warning, UnicodeEncodeError) as error:
        raise _RefusedError(f"is not a valid Python regular expression ({error}): correct it") from error
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, _MAX_MEMORY
    try:
        return re2.compile(translated, options)
    except re2.error as error:
        raise _RefusedError("is too large to match quickly: shorten it, or lower its repeat counts") from error


def _length(tree: Any, depth: int = 0) -> int:
    """Return the number of characters of a pattern with its repeats spelled out."""
    if depth > _MAX_DEPTH:
        raise _RefusedError(_NESTED)
    total = 0
    for op, argument in tree:
        if op is _constants.BRANCH:
            total += sum(_length(branch, depth + 1) for branch in argument[1])
        elif op is _constants.SUBPATTERN:
            total += _length(argument[3], depth + 1)
        elif op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            low, high, body = argument
            total += _length(body, depth + 1) * int(low + 1 if high is _constants.MAXREPEAT else high)
        else:
            total += 1
    return total


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Lone surrogates have no UTF-8 form; the replacement character is not a letter either.
        return re.sub("[\ud800-\udfff]", "\ufffd", text).encode()


def _sequence(tree: Any, flags: int) -> str:
    if flags & ~_FLAGS:
        raise _RefusedError("uses the flag a or L: drop it, and write sets such as [A-Za-z0-9_] instead of classes")
    return "".join(_item(op, argument, flags) for op, argument in tree)


def _item(op: Any, argument: Any, flags: int) -> str:
    if op in _REMEDIES:
        raise _RefusedError(f"uses {_REMEDIES[op]}")
    if op is _constants.ANY:
        return "(?s:.)" if flags & re.DOTALL else "[^\\n]"
    if op is _constants.AT:
        return _anchor(argument, flags)
    if op is _constants.BRANCH:
        return f"(?:{'|'.join(_sequence(branch, flags) for branch in argument[1])})"
    if op is _constants.SUBPATTERN:
        _, added, removed, body = argument
        return f"(?:{_sequence(body, (flags | added) & ~removed)})"
    if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
        low, high, body = argument
        return f"(?:{_sequence(body, flags)}){{{low},{'' if high is _constants.MAXREPEAT else high}}}"
    if op is _constants.LITERAL:
        return _set([(op, argument)], flags)
    if op is _constants.NOT_LITERAL:
        return _set([(_constants.NEGATE, None), (_constants.LITERAL, argument)], flags)
    return _set(argument, flags)


def _anchor(kind: Any, flags: int) -> str:
    if kind is _constants.AT_BEGINNING:
        return "(?m:^)" if flags & re.MULTILINE else r"\A"
    if kind is _constants.AT_END:
        return "(?m:$)" if flags & re.MULTILINE else r"(?:\n?\z)"
    return _ANCHORS[kind]


def _set(items: Any, flags: int) -> str:
    """Return a character set; a literal is a set of one."""
    parts, negated = [], ""
    for kind, value in items:
        if kind is _constants.NEGATE:
            negated = "^"
        elif kind is _constants.CATEGORY:
            parts.append(_category(value))
        else:
            low, high = (value, value) if kind is _constants.LITERAL else value
            parts.append(f"\\x{{{low:x}}}-\\x{{{high:x}}}")
            if flags & re.IGNORECASE and any(low <= ord(letter) <= high for letter in _I):
                parts.append(_I)
    fold = "i" if flags & re.IGNORECASE else ""
    return f"(?{fold}:[{negated}{''.join(parts)}])"


@cache
def _category(value: Any) -> str:
    r"""Return what ``\d``, ``\W`` and the like match, taken from `re` itself for every code point."""
    # The names end in DIGIT, SPACE or WORD, with NOT before it for the complement.
    words = str(value).split("_")
    letter = words[-1][0] if "NOT" in words else words[-1][0].lower()
    everything = np.arange(0x110000, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    runs = re.finditer(rf"\{letter}+", everything)
    return "".join(f"\\x{{{run.start():x}}}-\\x{{{run.end() - 1:x}}}" for run in runs)
