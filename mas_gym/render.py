"""An episode as text: plain for logs, coloured for terminals."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mas_gym.graph import MAS
from mas_gym.state import MASState

if TYPE_CHECKING:
    from rich.console import Console

_INDENT = "    "
_LONGEST_LINE = 500
# Characters that reorder what follows them, and so could make a message read as something else.
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    r"""Return a text that cannot steer a terminal: control, direction and lone surrogate characters are spelled out.

    Newlines and tabs stay.

    >>> printable("ok\x1b[31m")
    'ok\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _steers(c) else _spelled(c) for c in text)


def one_line(text: object) -> str:
    r"""Return a name or a reason for a place in a line or a table: in one line, and not endless.

    >>> one_line("two\nlines")
    'two\\nlines'
    """
    whole = str(text)
    line = printable(whole[:_LONGEST_LINE]).replace("\n", "\\n").replace("\t", "\\t")
    return line if len(whole) <= _LONGEST_LINE else f"{line} ... ({len(whole) - _LONGEST_LINE:,} more characters)"


def _steers(character: str) -> bool:
    # Cc: control characters, Cs: lone surrogates, which no terminal can encode, Zl and Zp: line and paragraph ends.
    return character in _DIRECTIONS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def route_text(mas: MAS, speaker: int, recipients: tuple[int, ...]) -> str:
    """Return ``"Judge -> RefinerA, RefinerB"``; a message that reached nobody says so."""
    names = ", ".join(printable(mas.node_name(r)) for r in recipients)
    return f"{printable(mas.agents[speaker].name)} -> {names or 'nobody'}"


def outcome_text(mas: MAS, state: MASState, facts: Mapping[str, Any]) -> str:
    """Return one line on where the episode stands: who acts next, or how it ended.

    Args:
        mas: The system.
        state: The state.
        facts: What ``info`` told beside the mask: the grade, or why an action was refused.
    """
    if "correct" in facts:
        verdict = "correct, reward +1" if facts["correct"] else "not correct, reward -1"
        answer = "no answer" if facts.get("extracted") is None else f"answer {printable(str(facts['extracted']))}"
        why = facts.get("invalid_action") or facts.get("reason", "")
        return f"ended: {answer}, {verdict} ({printable(str(why))})"
    if state.acting == mas.sink:
        return "ended"
    refused = f"refused: {printable(str(facts['invalid_action']))}; " if "invalid_action" in facts else ""
    return f"{refused}{printable(mas.agents[state.acting].name)} acts next"


def state_text(mas: MAS, state: MASState, facts: Mapping[str, Any]) -> str:
    """Return a whole episode so far as plain text.

    Args:
        mas: The system.
        state: The state.
        facts: As for `outcome_text`.
    """
    lines = [f"Question ({printable(mas.name)}):", _indented(state.question)]
    for number, turn in enumerate(state.turns, start=1):
        lines += [f"{number}. {route_text(mas, turn.speaker, turn.recipients)}", _indented(turn.text)]
    lines.append(f"[{outcome_text(mas, state, facts)}]")
    return "\n".join(lines)


def print_turn(mas: MAS, state: MASState, facts: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what the last reset or step brought: the question, or one message and its outcome.

    Args:
        mas: The system.
        state: The state after it.
        facts: As for `outcome_text`.
        console: Where to print; standard output by default.
    """
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    out = console or Console()
    # Text objects, not strings: a message must not be read as console markup.
    if "invalid_action" not in facts:
        if state.parent is None:
            title, body, style = f"Question ({printable(mas.name)})", state.question, "cyan"
        else:
            title, body, style = route_text(mas, state.speaker, state.recipients), state.text, "blue"
        out.print(Panel(Text(printable(body)), title=Text(title), title_align="left", border_style=style))
    good = facts.get("correct")
    colour = {True: "bold green", False: "bold red", None: "dim"}[good]
    out.print(Text(outcome_text(mas, state, facts), style=colour if "invalid_action" not in facts else "bold red"))


def _indented(text: str) -> str:
    return "\n".join(_INDENT + line for line in printable(text).split("\n"))
