"""The format of a language model's verdict, which the judged text cannot forge.

A prompt ends with the exact lines that state a verdict, such as ``Verdict dcba00f6: correct``. The
code is a hash of the prompt, including the judged text. A text that quotes or claims a verdict therefore cannot
contain the right code. Only the last line of a reply is parsed, and a reply that ends differently
has no verdict. Equal prompts have equal codes, so replies can be cached and reproduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

REQUIRED = "End your reply with exactly one of these lines, and nothing after it:"
"""The text of a prompt before the verdict lines."""

_AROUND = " \t*`."


def verdict_lines(prompt: str, words: Sequence[str]) -> list[str]:
    """Return the lines that state each verdict on a prompt.

    >>> verdict_lines("Is 2 + 2 = 4?", ("yes", "no"))
    ['Verdict dcba00f6: yes', 'Verdict dcba00f6: no']
    """
    code = blake2b(prompt.encode("utf-8", "replace"), digest_size=4).hexdigest()
    return [f"Verdict {code}: {word}" for word in words]


def ask_verdict(prompt: str, words: Sequence[str]) -> str:
    """Return a prompt that ends with its verdict lines."""
    return "\n".join([f"{prompt}\n\n{REQUIRED}", *verdict_lines(prompt, words)])


def read_verdict(reply: str, prompt: str, words: Sequence[str]) -> int | None:
    """Return the index in ``words`` of a reply's verdict; None if the last line is not a verdict line.

    Args:
        reply: The reply. Case, and spaces, emphasis and a full stop around the last line are ignored.
        prompt: The prompt that was passed to `ask_verdict`.
        words: The words that were passed to `ask_verdict`.
    """
    last = reply.rstrip().rpartition("\n")[2].strip(_AROUND).casefold()
    lines = [line.casefold() for line in verdict_lines(prompt, words)]
    return lines.index(last) if last in lines else None
