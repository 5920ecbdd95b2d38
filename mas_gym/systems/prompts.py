"""The prompt of an agent, and the recipient that a message names.

The prompt of the acting agent consists of its system prompt and its inputs. An agent with ``route: message``
writes to one recipient and names it in the message:

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

A message of a program may call tools. Its text consists of the content, a blank line, and one last line::

    [tool calls] [{"name": "add", "arguments": {"a": 1, "b": 2}}]

``arguments`` is an object, or a string if the model wrote no JSON object. Stored runs contain such texts, so readers
accept this form in every version; further fields of an entry are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mas_gym.systems.graph import MAS, Agent
from mas_gym.systems.state import MASState


class ChatMessage(NamedTuple):
    """One chat message: ``role`` is ``"system"`` or ``"user"``; in programs also ``"assistant"`` or ``"tool"``."""

    role: str
    content: str


def agent_inputs(mas: MAS, state: MASState) -> list[str]:
    """Return the inputs of the acting agent: the question first, then messages.

    With ``history: inputs``, these are the messages that reached the agent, by speaker index and then oldest first.
    With ``history: private``, these are all messages that it sent or received, oldest first, as ``Speaker: text``.
    """
    agent = state.acting
    if mas.history == "private":
        seen = [s for s in state.path()[1:] if agent == s.speaker or agent in s.recipients]
        inputs = [f"{mas.agents[s.speaker].name}: {s.text.strip()}" for s in seen]
        return [state.question.strip(), *inputs] if mas.sees_question[agent] else inputs
    heard: list[tuple[int, str]] = []
    link: MASState = state
    while link.parent is not None:
        if agent in link.recipients:
            heard.append((link.speaker, link.text.strip()))
        link = link.parent
    # The walk went backwards, and sorting is stable.
    heard.reverse()
    heard.sort(key=lambda item: item[0])
    inputs = [text for _, text in heard]
    return [state.question.strip(), *inputs] if mas.sees_question[agent] else inputs


def chat_messages(mas: MAS, state: MASState) -> tuple[ChatMessage, ...]:
    """Return the acting agent's prompt: its inputs joined by a blank line.

    Args:
        mas: The system.
        state: A state; if it is terminal, the result is empty.
    """
    if state.acting == mas.sink:
        return ()
    return ChatMessage("system", turn_prompt(mas, state)), ChatMessage("user", "\n\n".join(agent_inputs(mas, state)))


RECIPIENTS = "{recipients}"
"""In the system prompt of an agent with ``route: message``: the names that are legal at this turn."""

TURNS_LEFT = "{turns_left}"
"""In the same prompts: the number of turns left, this one included."""

ARROWS = ("->", "\u2192")
_RECIPIENT, _CURRENT_ANSWER = "recipient", "currentanswer"
_LONGEST_LABEL = 40


def folded(name: str) -> str:
    """Return the form in which names are compared: letters and digits, without case.

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
        if (value := _field(line, _RECIPIENT)) is not None:
            return value.strip()
        if not line.isspace():
            last = line or last
    places = [(last.rfind(arrow), arrow) for arrow in ARROWS]
    place, arrow = max(places)
    return None if place < 0 else last[place + len(arrow) :].strip()


def current_answer(text: str) -> str | None:
    r"""Return the text after the last ``CURRENT ANSWER:`` at the beginning of a line; None without that field.

    >>> current_answer("RECIPIENT: Critic\nCURRENT ANSWER: 18")
    '18'
    """
    lines = text.splitlines()
    for i in reversed(range(len(lines))):
        if (value := _field(lines[i], _CURRENT_ANSWER)) is not None:
            return "\n".join([value, *lines[i + 1 :]]).strip()
    return None


def _field(line: str, label: str) -> str | None:
    """Return the text after a label and a colon at the beginning of a line; None if the line begins differently."""
    said, colon, value = line.partition(":")
    return value if colon and len(label) <= len(said) <= _LONGEST_LABEL and folded(said) == label else None


def nameable(mas: MAS, state: MASState) -> tuple[int, ...]:
    """Return the recipients that the acting agent's message may name, in node order; empty without ``route: message``.

    At the last turn this is only ``sink``; before ``min_turns`` it is every recipient except ``sink``. Edges with
    conditions are included, although a message may not meet the conditions.
    """
    if state.acting == mas.sink or mas.agents[state.acting].route != "message":
        return ()
    turn = state.depth + 1
    if mas.max_turns is not None and turn >= mas.max_turns:
        return (mas.sink,)
    targets = tuple(t for t in mas.targets[state.acting] if t != mas.sink or turn >= mas.min_turns)
    # An agent that cannot reach another agent ends the episode, unless other agents are waiting to act.
    return targets if targets or state.delivered else (mas.sink,)


def filled_prompt(mas: MAS, agent: Agent, recipients: Iterable[int], turns_left: int) -> str:
    """Return an agent's system prompt with its placeholders filled; only ``route: message`` has placeholders."""
    if agent.route != "message":
        return agent.system_prompt
    names = ", ".join(map(mas.node_name, recipients))
    return agent.system_prompt.replace(TURNS_LEFT, str(turns_left)).replace(RECIPIENTS, names)


def turn_prompt(mas: MAS, state: MASState) -> str:
    """Return the acting agent's system prompt at a state."""
    agent = mas.agents[state.acting]
    return filled_prompt(mas, agent, nameable(mas, state), (mas.max_turns or 0) - state.depth).strip()
