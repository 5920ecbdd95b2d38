"""One way to say that a name is not known: what is, and which one was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from mas_gym.errors import UnknownNameError

_LONGEST = 60


def unknown_name(what: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """Make the error for a name that is not known.

    Args:
        what: What the name should have named, such as ``"task"``.
        name: What came instead; anything, shortened in the message.
        known: The names that exist.

    Returns:
        The error, to be raised by the caller.

    >>> print(unknown_name("task", "gsm", ["gsm8k", "math"]))
    unknown task 'gsm'; expected one of: gsm8k, math; did you mean 'gsm8k'?
    """
    names = sorted(known)
    text = name if isinstance(name, str) else repr(name)
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + "..."
    folded = {candidate.casefold(): candidate for candidate in names}
    near = get_close_matches(text.casefold(), folded, n=1, cutoff=0.4)
    hint = f"; did you mean {folded[near[0]]!r}?" if near else ""
    return UnknownNameError(f"unknown {what} {text!r}; expected one of: {', '.join(names)}{hint}")
