"""The prompt of an agent: its system prompt and its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mas_gym.systems.graph import MAS, Agent
from mas_gym.systems.recipient_names import nameable
from mas_gym.systems.state import MASState


class ChatMessage(NamedTuple):
    """One chat message: ``role`` is ``"system"`` or ``"user"``; in programs also ``"assistant"`` or ``"tool"``."""

    role: str
    content: str


def agent_inputs(mas: MAS, state: MASState) -> list[str]:
    """Return the inputs of the acting agent: the question first, then messages.

    With ``history: inputs``, these are the messages that reached the agent, sorted by speaker index, then oldest first.
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
    """Return the acting agent's prompt: its system prompt, and its inputs joined by blank lines.

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


def filled_prompt(mas: MAS, agent: Agent, recipients: Iterable[int], turns_left: int) -> str:
    """Return an agent's system prompt with its placeholders filled; only agents with ``route: message`` have them."""
    if agent.route != "message":
        return agent.system_prompt
    names = ", ".join(map(mas.node_name, recipients))
    return agent.system_prompt.replace(TURNS_LEFT, str(turns_left)).replace(RECIPIENTS, names)


def turn_prompt(mas: MAS, state: MASState) -> str:
    """Return the acting agent's system prompt at a state."""
    agent = mas.agents[state.acting]
    names = nameable(mas, state) if agent.route == "message" else ()
    return filled_prompt(mas, agent, names, (mas.max_turns or 0) - state.depth).strip()
