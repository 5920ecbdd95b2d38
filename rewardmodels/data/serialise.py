"""How a state becomes text: the critic's input, version 1.

.. code-block:: text

    Agents: 0 Reader, 1 Planner, 2 Solver, 3 Verifier, 4 sink
    Maya has 14 marbles ...
    0>1: Facts: has 14, ...
    1>2,3: Plan: start 14, ...
    2

The text starts with a legend of names, then the question, then each message as
``speaker>recipients: text``, then the acting agent. Thanks to the legend a header is
a few digits; the legend is the same for every problem, so it is encoded once.

The text consists of parts: the legend, the question with the first speaker, and one
part per message, from its ``>`` to the next speaker. The parts of a state are thus a
prefix of the parts of every successor, and siblings differ only in the last part.
Parts are tokenized separately, so the same holds for token ids. The last token is
the acting agent, and the value is read there.
"""

from __future__ import annotations

import re
from typing import Literal

from mas_gym.graph import MAS
from mas_gym.state import MASState

FORMAT = 1
"""Version of the text form; saved with each critic and with each exported data set."""

View = Literal["full", "local"]
"""``"full"``: the whole transcript. ``"local"``: what the last speaker saw, and its new message."""

Parts = tuple[str, ...]
"""The parts of a state's text: legend, question, and one per message."""

CUT = "[...]"
"""Marks an omission in a text."""

_LINE_BREAK = re.compile(r"\r\n?|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_HEADER = re.compile(r"(?m)^(?=[0-9]+>[0-9,]*: )")


def clean(text: str) -> str:
    """Return a text that cannot be mistaken for another message's header or a special token.

    Line breaks of every kind become newlines, a line that looks like a header gets a leading space, ``<|``
    becomes ``< |``, and lone surrogates, which tokenizers reject, become ``?``.
    """
    text = _LINE_BREAK.sub("\n", text.strip()).replace("<|", "< |")
    return _HEADER.sub(" ", text).encode("utf-8", "replace").decode("utf-8")


def legend(mas: MAS) -> str:
    """Return the first part: the name of each agent index."""
    names = [" ".join(mas.node_name(node).split()) for node in range(mas.sink + 1)]
    return "Agents: " + ", ".join(f"{node} {name}" for node, name in enumerate(names)) + "\n"


def state_parts(mas: MAS, state: MASState, view: View = "full") -> list[str]:
    """Return the parts of a state's text.

    Args:
        mas: The system.
        state: Any state.
        view: What the critic sees; see `View` (paper, App. "Local observability ablation").

    Returns:
        The legend, the question, and one part per message shown.
    """
    turns = [(s.speaker, s.recipients, s.text) for s in state.path()[1:]]
    if view == "local" and turns:
        turns = [*_heard(turns[:-1], state.speaker), turns[-1]]
    following = [*(speaker for speaker, _, _ in turns), state.acting]
    parts = [legend(mas), f"{clean(state.question)}\n{following[0]}"]
    for (_, recipients, text), speaker in zip(turns, following[1:], strict=True):
        parts.append(f">{','.join(map(str, recipients))}: {clean(text)}\n{speaker}")
    return parts


def _heard(turns: list[tuple[int, tuple[int, ...], str]], agent: int) -> list[tuple[int, tuple[int, ...], str]]:
    """Return the messages that an agent wrote or received."""
    kept = []
    for speaker, recipients, text in turns:
        if speaker == agent:
            kept.append((speaker, recipients, text))
        elif agent in recipients:
            kept.append((speaker, (agent,), text))
    return kept


def state_text(mas: MAS, state: MASState, view: View = "full") -> str:
    """Return a state's text: its parts, joined."""
    return "".join(state_parts(mas, state, view))


def drop_oldest(parts: list[str], count: int) -> list[str]:
    """Replace the oldest messages of a state by `CUT`.

    Args:
        parts: As `state_parts` returns them.
        count: Number of messages to drop, fewer than there are.
    """
    question = parts[1].rpartition("\n")[0]
    speaker = parts[1 + count].rpartition("\n")[2]
    return [parts[0], f"{question}\n{CUT}\n{speaker}", *parts[2 + count :]]
