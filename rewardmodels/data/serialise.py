"""How a state becomes text: the critic's input, version 1.

.. code-block:: text

    Agents: 0 Reader, 1 Planner, 2 Solver, 3 Verifier, 4 sink
    Maya has 14 marbles ...
    0>1: Facts: has 14, ...
    1>2,3: Plan: start 14, ...
    2

First a legend of names, then the question, then each message as
``speaker>recipients: text``, then the acting agent alone. The legend lets a
header be a few digits, and being the same for every problem it is encoded once.

The text is made of parts: the legend, the question with the first speaker, and
one part per message, from its ``>`` to the next speaker. So the parts of a state
begin the parts of every successor, and siblings differ in the last part only.
Parts are tokenised one by one and their ids joined, which makes that hold for
token ids as well. The last token is the acting agent, where the value is read.
"""

from __future__ import annotations

import re
from typing import Literal

from mas_gym.graph import MAS
from mas_gym.state import MASState

FORMAT = 1
"""Version of the text form; saved with each critic and with each exported data set."""

View = Literal["full", "local"]
"""``"full"``: the whole transcript. ``"local"``: what the agent that spoke last saw, and its new message."""

Parts = tuple[str, ...]
"""The parts of a state's text: legend, question, and one per message."""

CUT = "[...]"
"""What stands in a text for what was left out of it."""

_LINE_BREAK = re.compile(r"\r\n?|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_HEADER = re.compile(r"(?m)^(?=[0-9]+>[0-9,]*: )")


def clean(text: str) -> str:
    """Return a text that cannot be taken for another message's header or for a special token.

    Line breaks of every kind become one kind, a line that looks like a header is set off by a blank,
    ``<|`` is broken up, and lone surrogates, which no tokenizer takes, become ``?``.
    """
    text = _LINE_BREAK.sub("\n", text.strip()).replace("<|", "< |")
    return _HEADER.sub(" ", text).encode("utf-8", "replace").decode("utf-8")


def legend(mas: MAS) -> str:
    """Return the first part: which index stands for which agent."""
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
    """Keep what an agent said, and what reached it, as it reached it."""
    kept = []
    for speaker, recipients, text in turns:
        if speaker == agent:
            kept.append((speaker, recipients, text))
        elif agent in recipients:
            kept.append((speaker, (agent,), text))
    return kept


def state_text(mas: MAS, state: MASState, view: View = "full") -> str:
    """Return a state's text, the parts joined."""
    return "".join(state_parts(mas, state, view))


def drop_oldest(parts: list[str], count: int) -> list[str]:
    """Leave out the oldest messages of a state, visibly.

    Args:
        parts: As `state_parts` returns them.
        count: How many messages to leave out, fewer than there are.
    """
    question = parts[1].rpartition("\n")[0]
    speaker = parts[1 + count].rpartition("\n")[2]
    return [parts[0], f"{question}\n{CUT}\n{speaker}", *parts[2 + count :]]
