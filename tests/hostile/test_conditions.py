"""Edge conditions: no valid pattern can block a run, for any message."""

import time

import pytest

from mas_gym.errors import ConfigError
from mas_gym.systems.conditions import Condition
from tests.hostile.growth import assert_linear

LONGEST = 65_536
SECONDS = 5.0
RUNAWAY = [
    r"((a?){30})a{30}",
    r"(?:a?){20}b",
    r"(a?){25}b",
    r"\d+x",
    r"(a+)+$",
    r"(a*)*b",
    r"(a|aa)+$",
    r"(a|a?)+b",
    r"(a?a?)*b",
    r"((a?|b?)c)*d",
    r"(\w+\s?)*:",
    r"(.*,)*x",
    r"(x+x+)+y",
    r"^(([a-z])+.)+[A-Z]([a-z])+$",
    r"(?:(?:a{1,9}){1,9}){1,9}b",
    r"(.|\s)*x",
    r"(?i)(?:a1|A1)*b",
    r"\s*\s*x",
    r"\d*\w*x",
    r".*a.*b.*c",
    r".*foo.*$",
    r"[ab]*a[ab]{900}c",
    r"(?s).*a.{990}Q",
    "(" + "|".join(f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrs") + ")*!",
]
TEXTS = {
    "a": "a" * LONGEST,
    "digits": "7" * LONGEST,
    "ab": "ab" * (LONGEST // 2),
    "spaces": " " * LONGEST,
    "words": "akbkalbl aa1A1 " * (LONGEST // 15),
    "many scripts": "\u00e9\u4e2d\u0663 \U0001f600" * (LONGEST // 5),
}


@pytest.mark.parametrize("pattern", RUNAWAY, ids=lambda p: p[:30])
def test_every_pattern_matches_in_linear_time(pattern: str) -> None:
    condition = Condition("regex", pattern)
    assert_linear(lambda size: [condition.holds(text[:size]) for text in TEXTS.values()], LONGEST)


@pytest.mark.parametrize(
    "pattern", ["a{1000}{1000}", "(?:a{1000}){1000}", "(?:(?:(?:a{99}){99}){99}){99}", r"\pL{999}", r"(?i)[^\PL]{999}"]
)
def test_pattern_with_huge_memory_use_is_rejected_immediately(pattern: str) -> None:
    begin = time.process_time()
    with pytest.raises(ConfigError):
        Condition("regex", pattern)
    assert time.process_time() - begin < SECONDS
