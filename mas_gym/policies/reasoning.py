"""Reasoning that a model writes before its message.

Engines without a reasoning parser return it as part of the text. Only the text after it is the message: no other agent
sees the reasoning, and no answer is read from it.
"""

from __future__ import annotations

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
