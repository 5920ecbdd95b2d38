"""The inputs and the message of one agent."""

from __future__ import annotations

from typing import NamedTuple


class RoleTurn(NamedTuple):
    """One agent's turn: its input and its message.

    Attributes:
        role: Name of the role in the tokenizer; None if the system prompt is spelled out.
        sees_question: Whether the question reaches the agent.
        inputs: The messages that reach it, in speaker order.
        text: Its message.
        system: The system prompt as text, if it has no role token.
    """

    role: str | None
    sees_question: bool
    inputs: list[str]
    text: str
    system: str = ""
