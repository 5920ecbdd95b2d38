"""Chat messages for the acting agent: its system prompt, then its inputs."""

from __future__ import annotations

from typing import NamedTuple

from mas_gym.graph import MAS
from mas_gym.routing import turn_prompt
from mas_gym.state import MASState


class ChatMessage(NamedTuple):
    """One chat message: ``role`` is ``"system"`` or ``"user"``."""

    role: str
    content: str


def agent_inputs(mas: MAS, state: MASState) -> list[str]:
    """Return the inputs of the acting agent: the question first, then messages.

    With ``history: inputs`` the messages that reached it by speaker index, oldest first; with ``history: private``
    all messages that it sent or received, oldest first, each as ``Speaker: text``.
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
