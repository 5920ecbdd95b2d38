"""The words that are one token each; all other words are encoded as bytes."""

from __future__ import annotations

_NAMES = """
Maya Sara Ann Lily Nina Emma Ruth Zoe Tom Ben Sam Leo Max Dan Eli Jack Kim Joe
"""
_THINGS = """
coins marbles apples cards stickers books shells pens beads stamps eggs nuts bags boxes items years minutes degrees
line row queue race shelf house table friends people person place seat money dollars hours days week weeks time
"""
_STORY = """
has have had starts At at first Then then finds more buys loses of them gives to times as many Now now sells half away
gets with each too is are old The the takes walk It it outside How does do the end He he She she his her They they
"""
_MESSAGES = """
Facts Question how many Plan start Work Fix Final Answer FINAL ANSWER CORRECT INCORRECT TIP VERDICT AGREE DISAGREE
Given Known Data Story Info Method Recipe Scheme Path Sums Maths Count Solve Result
Clues Limits Terms Hints Notes Queue Line Row Build Lineup Steps
means use not keep all steps solution answer check Check Mistake Equations Let x right wrong missing Both agree both
"""
_ORDERING = """
before after behind ahead front left right last second third fourth next just directly stand stands sit sits in a and
A B C D E Who who comes arrives finishes either or between neither swap swaps places joins only if If must be can
could true false Order order Rules Rule rule so So State States valid option options because but says I pick choose
think challenge Options immediately join steps step friend older younger somewhere arrive run runs finish which Which
following possible position positions earlier later than no yes one
"""
_COMMON = """
about an any away been before bought by came cost could day did down every few for from get give go good got he him into
its just know left like long look made make me much my need number off on other out over paid part price per put same
see sold some spend spent take tell that their there these this total twice up was way we were what when where while
will would year you your found lost gave took went work equal left remaining altogether
"""


def _unique(text: str) -> list[str]:
    return list(dict.fromkeys(text.split()))


WORDS: list[str] = _unique(_NAMES + _THINGS + _STORY + _MESSAGES + _ORDERING + _COMMON)
