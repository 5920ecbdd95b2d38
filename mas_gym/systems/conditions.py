"""Patterns of routing conditions, in RE2's syntax and matched in time linear in the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from mas_gym.errors import ConfigError, shown

MAX_PATTERN = 500
"""Maximum number of characters in a pattern."""

_MAX_MEMORY = 1 << 22
_REMEDIES = (
    (re.compile(r"\(\?<?[=!]"), "RE2 has no lookahead or lookbehind: match the text itself, or use not_regex:"),
    (re.compile(r"\\[1-9]|\(\?P="), "RE2 has no backreferences: write the text out"),
    (re.compile(r"\(\?>|[*+?}]\+"), "RE2 has no atomic groups and possessive repeats: use ordinary ones"),
    (re.compile(r"\\Z"), r"the end of the text is \z in RE2"),
)


@lru_cache(maxsize=256)
def matcher(pattern: str) -> Callable[[str], bool]:
    r"""Return a function that says whether a pattern occurs in a text, in time linear in the text.

    Args:
        pattern: A regular expression in RE2's syntax (https://github.com/google/re2/wiki/Syntax), at most
            `MAX_PATTERN` characters. ``\d``, ``\s``, ``\w`` and ``\b`` mean ASCII characters.

    Raises:
        ConfigError: RE2 does not accept the pattern.

    >>> matcher(r"(?i)verdict:\s*disagree")("VERDICT:  Disagree")
    True
    >>> matcher(r"(\w+) \1")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mas_gym.errors.ConfigError: ... RE2 has no backreferences: write the text out
    """
    import re2

    if len(pattern) > MAX_PATTERN:
        raise ConfigError(f"a pattern has {len(pattern)} characters, at most {MAX_PATTERN} are allowed: shorten it")
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, _MAX_MEMORY
    try:
        compiled = re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        remedies = [remedy for found, remedy in _REMEDIES if found.search(pattern)]
        reason = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
        remedy = remedies[0] if remedies else "correct it, see https://github.com/google/re2/wiki/Syntax"
        raise ConfigError(f"the pattern {shown(pattern)} is not valid ({reason}): {remedy}") from error

    def found(text: str) -> bool:
        return compiled.search(_utf8(text)) is not None

    return found


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Lone surrogates have no UTF-8 form; the replacement character is not a letter either.
        return re.sub("[\ud800-\udfff]", "\ufffd", text).encode()
