"""Chat messages for the acting agent: its system prompt, then its inputs."""

from __future__ import annotations

from typing import NamedTuple

from mas_gym.graph import MAS
from mas_gym.state import MASState


class ChatMessage(NamedTuple):
    """One chat message: ``role`` is ``"system"`` or ``"user"``."""

    role: str
    content: str


def agent_inputs(mas: MAS, state: MASState) -> list[str]:
    """Return the texts that reached the acting agent: the question first, then messages by speaker index."""
    agent = state.acting
    heard: list[tuple[int, str]] = []
    link: MASState = state
    while link.parent is not None:
        if agent in link.recipients:
            heard.append((link.speaker, link.text.strip()))
        link = link.parent
    heard.sort(key=lambda item: item[0])
    inputs = [text for _, text in heard]
    return [state.question.strip(), *inputs] if mas.sees_question[agent] else inputs


def chat_messages(mas: MAS, state: MASState) -> tuple[ChatMessage, ...]:
    """Return the acting agent's prompt: inputs joined by a blank line, without sender labels.

    Args:
        mas: The system.
        state: A state; if it is terminal, the result is empty.
    """
    if state.acting == mas.sink:
        return ()
    system = mas.agents[state.acting].system_prompt.strip()
    return ChatMessage("system", system), ChatMessage("user", "\n\n".join(agent_inputs(mas, state)))
