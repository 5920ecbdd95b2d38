"""The recipient that a message names.

An agent with ``route: message`` writes to one recipient and names it in the message:

* in a field, the first line that consists of ``RECIPIENT:`` and a name::

      SPEAKER: Algebraist
      RECIPIENT: Critic
      MESSAGE: x = 3 solves the equation.
      CURRENT ANSWER: 3

* or, in a message without that field, after the last arrow of its last line: ``... -> Critic``.

The first field is used, because the text below it may quote other messages. The name is an agent's name, or
``sink`` to end the episode. Case, spaces and punctuation are ignored. If only one recipient is
legal, as at the last turn, the message goes to this recipient, even if it contains another name.

Parsing takes time linear in the message and uses no regular expressions.
"""

from __future__ import annotations

from mas_gym.systems.graph import MAS
from mas_gym.systems.state import MASState

ARROWS = ("->", "\u2192")
_RECIPIENT, _CURRENT_ANSWER = "recipient", "currentanswer"
_LONGEST_LABEL = 40


def folded(name: str) -> str:
    """Return the form in which names are compared: only its letters and digits, case-folded.

    >>> folded("**Number Theorist**")
    'numbertheorist'
    """
    return "".join(character for character in name.casefold() if character.isalnum())


def named_recipient(text: str) -> str | None:
    """Return the recipient's name in a message, as written; None if there is no name.

    >>> named_recipient("RECIPIENT: Critic")
    'Critic'
    >>> named_recipient("Please check x = 3. -> Critic")
    'Critic'
    """
    last = ""
    for line in text.splitlines():
        if ":" in line and (value := _field(line, _RECIPIENT)) is not None:
            return value.strip()
        if line and not line.isspace():
            last = line
    places = [(last.rfind(arrow), arrow) for arrow in ARROWS]
    place, arrow = max(places)
    return None if place < 0 else last[place + len(arrow) :].strip()


def current_answer(text: str) -> str | None:
    r"""Return the text after the last ``CURRENT ANSWER:`` at the beginning of a line; None if there is no such field.

    >>> current_answer("RECIPIENT: Critic\nCURRENT ANSWER: 18")
    '18'
    """
    lines = text.splitlines()
    for i in reversed(range(len(lines))):
        if ":" in lines[i] and (value := _field(lines[i], _CURRENT_ANSWER)) is not None:
            return "\n".join([value, *lines[i + 1 :]]).strip()
    return None


def _field(line: str, label: str) -> str | None:
    """Return the text after a label and a colon at the beginning of a line; None if the line begins differently."""
    said, _, value = line.partition(":")
    return value if len(label) <= len(said) <= _LONGEST_LABEL and folded(said) == label else None


def nameable(mas: MAS, state: MASState) -> tuple[int, ...]:
    """Return the recipients that the acting agent's message may name, in node order; empty without ``route: message``.

    At the last turn this is only ``sink``; before ``min_turns`` it is every recipient except ``sink``. Edges with
    conditions are included, although a message may fail to meet the conditions.
    """
    if state.acting == mas.sink or mas.agents[state.acting].route != "message":
        return ()
    turn = state.depth + 1
    if mas.max_turns is not None and turn >= mas.max_turns:
        return (mas.sink,)
    targets = tuple(t for t in mas.targets[state.acting] if t != mas.sink or turn >= mas.min_turns)
    # An agent that cannot reach another agent ends the episode, unless other agents are waiting to act.
    return targets if targets or state.delivered else (mas.sink,)
