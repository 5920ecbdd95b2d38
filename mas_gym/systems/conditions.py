"""Conditions of edges, which test the text of a message.

Regular expressions use RE2's syntax and are matched in time linear in the text. Messages come from models and may be
malicious, so conditions never use a backtracking matcher.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mas_gym.errors import ConfigError, shown

ConditionKind = Literal["regex", "not_regex", "contains", "not_contains"]

_REMEDIES = (
    (re.compile(r"\(\?<?[=!]"), "RE2 has no lookahead or lookbehind: match the text itself, or use not_regex:"),
    (re.compile(r"\\[1-9]|\(\?P="), "RE2 has no backreferences: write the text out"),
    (re.compile(r"\(\?>|[*+?}]\+"), "RE2 has no atomic groups or possessive repeats: use ordinary ones"),
    (re.compile(r"\\Z"), r"the end of the text is \z in RE2"),
)


@dataclass(frozen=True, slots=True)
class Condition:
    """A test that a message's text must pass for an edge to deliver it.

    Attributes:
        kind: ``"regex"``, ``"not_regex"``, ``"contains"`` or ``"not_contains"``.
        pattern: The regular expression (see `matcher`) or substring to search for in the text.

    Raises:
        ConfigError: The regular expression cannot be used.
    """

    kind: ConditionKind
    pattern: str

    def __post_init__(self) -> None:
        """Compile the expression, so that an invalid one is rejected now."""
        if self.kind.endswith("regex"):
            matcher(self.pattern)

    def holds(self, text: str) -> bool:
        """Return whether a message with this text may pass."""
        found = matcher(self.pattern)(text) if self.kind.endswith("regex") else self.pattern in text
        return found is not self.kind.startswith("not_")

    def __str__(self) -> str:
        return f"{self.kind}:{self.pattern}"


@lru_cache(maxsize=256)
def matcher(pattern: str) -> Callable[[str], bool]:
    r"""Return a function that tests whether a pattern occurs in a text, in time linear in the text's length.

    Args:
        pattern: A regular expression in RE2's syntax (https://github.com/google/re2/wiki/Syntax). ``\d``, ``\s``,
            ``\w`` and ``\b`` are ASCII-only.

    Raises:
        ConfigError: RE2 does not accept the pattern.

    >>> matcher(r"(?i)verdict:\s*disagree")("VERDICT:  Disagree")
    True
    >>> matcher(r"(\w+) \1")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mas_gym.errors.ConfigError: ... RE2 has no backreferences: write the text out
    """
    import re2

    options = re2.Options()
    options.log_errors, options.never_capture = False, True
    try:
        compiled = re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        remedies = [remedy for found, remedy in _REMEDIES if found.search(pattern)]
        reason = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
        remedy = remedies[0] if remedies else "correct it; see https://github.com/google/re2/wiki/Syntax"
        raise ConfigError(f"the pattern {shown(pattern)} is not valid ({reason}): {remedy}") from error

    def found(text: str) -> bool:
        # Lone surrogates have no UTF-8 form; the replacement is not a letter either.
        return compiled.search(text.encode("utf-8", "replace")) is not None

    return found
