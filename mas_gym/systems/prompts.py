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
    agent, turns = state.acting, state.path()[1:]
    if mas.history == "private":
        seen = [turn for turn in turns if agent == turn.speaker or agent in turn.recipients]
        inputs = [f"{mas.agents[turn.speaker].name}: {turn.text.strip()}" for turn in seen]
    else:
        heard = sorted((turn for turn in turns if agent in turn.recipients), key=lambda turn: turn.speaker)
        inputs = [turn.text.strip() for turn in heard]
    return [state.question.strip(), *inputs] if mas.sees_question[agent] else inputs


def chat_messages(mas: MAS, state: MASState) -> tuple[ChatMessage, ...]:
    """Return the acting agent's system prompt, and its inputs joined by blank lines; empty for a terminal state."""
    if state.acting == mas.sink:
        return ()
    agent = mas.agents[state.acting]
    legal = nameable(mas, state) if agent.route == "message" else ()
    prompt = filled_prompt(mas, agent, legal, (mas.max_turns or 0) - state.depth).strip()
    return ChatMessage("system", prompt), ChatMessage("user", "\n\n".join(agent_inputs(mas, state)))


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
