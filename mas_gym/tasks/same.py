"""When two messages are the same action: a rule of the task.

A search gives equal messages one child, and mining compares distinct siblings only (paper,
App. "MASPRM training data generation", rule (i)). What is equal depends on the task: the
embedded agents open their messages with one of six words that carry no information, so
``"Plan: start 4, + 2."`` and ``"Steps: start 4, + 2."`` are one action of Arithmetic.

A rule must be an equivalence relation: the first of several equal messages represents them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mas_gym.errors import ConfigError, UnknownNameError

Same = Callable[[str, str], bool]

_OPENING = re.compile(r"(?:(?<!\s)\s++)?+(?<![^\W\d_])[^\W\d_]++:")


def normalise(text: str) -> str:
    """Return the text without case, extra spaces and closing punctuation."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(".!;,")


def same_text(a: str, b: str) -> bool:
    """Return whether two messages differ at most in case, spaces and closing punctuation.

    >>> same_text("Work: 3+4.", "work:  3+4")
    True
    """
    return normalise(a) == normalise(b)


def same_after_opening(a: str, b: str) -> bool:
    """Return whether two messages are the same text after an opening word and its colon.

    >>> same_after_opening("Plan: start 4, + 2.", "Steps: start 4, + 2.")
    True
    >>> same_after_opening("Plan: start 4, + 2.", "Plan: start 4, - 2.")
    False
    """
    return same_text(_OPENING.sub("", a, count=1), _OPENING.sub("", b, count=1))


RULES: Mapping[str, Same] = MappingProxyType({"text": same_text, "opening": same_after_opening})
"""Rules by name, as in ``"mcts:10,3,same=opening"``."""

TASK_RULES: Mapping[str, str] = MappingProxyType({"arithmetic": "opening", "ordering": "opening"})
"""The tasks whose rule is not ``"text"``."""


def same_rule(rule: str | Same) -> Same:
    """Return a rule by its name; a function is its own rule.

    Raises:
        UnknownNameError: There is no rule of that name.
        ConfigError: The rule is neither a name nor a function.
    """
    if not isinstance(rule, str):
        if not callable(rule):
            raise ConfigError(f"expected a rule name or a function same(a, b), got {type(rule).__name__}")
        return rule
    if rule not in RULES:
        raise UnknownNameError(f"no rule {rule!r} for equal messages; expected one of {', '.join(RULES)}")
    return RULES[rule]


def rule_of(task: str) -> str:
    """Return the name of a task's rule, by the task's name; ``"text"`` unless the task has its own."""
    return TASK_RULES.get(task, "text")
