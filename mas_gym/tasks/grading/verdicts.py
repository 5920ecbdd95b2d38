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
"""What a prompt says before the lines."""

_AROUND = " \t*`."


def verdict_lines(prompt: str, words: Sequence[str]) -> list[str]:
    """Return the lines that state each verdict on a prompt.

    >>> verdict_lines("Is 2 + 2 = 4?", ("yes", "no"))
    ['Verdict dcba00f6: yes', 'Verdict dcba00f6: no']
    """
    code = blake2b(prompt.encode("utf-8", "replace"), digest_size=4).hexdigest()
    return [f"Verdict {code}: {word}" for word in words]


def ask_verdict(prompt: str, words: Sequence[str]) -> str:
    """Return a prompt that ends with the lines of its verdicts."""
    return "\n".join([f"{prompt}\n\n{REQUIRED}", *verdict_lines(prompt, words)])


def read_verdict(reply: str, prompt: str, words: Sequence[str]) -> int | None:
    """Return the place of the word that a reply states, or None if its last line is not one of the lines.

    Args:
        reply: The reply. Spaces, emphasis and a full stop around the line do not matter.
        prompt: The prompt as `ask_verdict` took it.
        words: The words as `ask_verdict` took them.
    """
    last = reply.rstrip().rpartition("\n")[2].strip(_AROUND)
    lines = verdict_lines(prompt, words)
    return lines.index(last) if last in lines else None
