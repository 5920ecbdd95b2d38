"""Reasoning that a model writes before its message.

Engines without a reasoning parser return it as part of the text. Only the text after it is the message: no other agent
sees the reasoning, and no answer is read from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mas_gym.errors import PolicyError

_BLOCKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_CHANNEL, _FINAL = "<|channel|>", "<|channel|>final<|message|>"
_ENDS = ("<|return|>", "<|end|>")

OPENINGS = (*(opening for opening, _ in _BLOCKS), _CHANNEL)
"""Tokens that open reasoning."""


def after_reasoning(text: str) -> str:
    """Return the text after the reasoning; empty if the reasoning is unfinished.

    The opening mark may be missing, because some chat templates write it into the prompt.

    >>> after_reasoning("<think>2 + 2, so 4</think>The answer is 4")
    'The answer is 4'
    >>> after_reasoning("[THINK]2 + 2, so")
    ''
    """
    for opening, closing in _BLOCKS:
        text = text.rpartition(closing)[2]
        if text.lstrip().startswith(opening):
            return ""
    _, final, message = text.rpartition(_FINAL)
    if final:
        for end in _ENDS:
            message = message.partition(end)[0]
        return message
    return "" if text.lstrip().startswith(_CHANNEL) else text


def check_first_token(policy: str, words: Sequence[str], token: str) -> None:
    """Raise `PolicyError` if the most likely first token of a reply opens reasoning instead of one of the words."""
    if token.strip() in OPENINGS:
        raise PolicyError(
            f"{policy}: expected a reply that begins with {' or '.join(words)}, got reasoning; use mode=share, or turn "
            "reasoning off, such as chat_options={enable_thinking: false} or, on a server, "
            "extra_body={chat_template_kwargs: {enable_thinking: false}}"
        )
