r"""Convert rows of each benchmark to problems, in the layouts of the hub and of the original releases.

GSM8K: ``question`` and ``answer`` that ends in ``#### 18``. MATH: ``problem``
and ``solution`` whose last ``\boxed`` is the answer, or an ``answer`` beside it.
MMLU: ``question``, ``choices`` and an index or letter. LogiQA: ``context``,
``query``, ``options`` and ``correct_option``, or its blocks of text.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any

from mas_gym.tasks.base import Kind, Problem
from mas_gym.tasks.extraction import statements
from mas_gym.tasks.numerals import format_number, parse_number

_SHOWN = 60
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = _SHOWN + 3
_BRIEF.maxlist = _BRIEF.maxdict = _BRIEF.maxtuple = 20


class BadRow(Exception):
    """A row is malformed; the message says what was expected and what was found."""


def shown(value: object) -> str:
    """Show a value of any kind and size in one short line of ASCII; only as much of it is read as is shown."""
    text = ascii(value[: _SHOWN + 1]) if isinstance(value, str | bytes) else _BRIEF.repr(value)
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _text(row: Mapping[str, Any], *names: str) -> str:
    for name in names:
        value = row.get(name)
        if value is not None:
            if isinstance(value, str) and value.strip():
                return _storable(value)
            raise BadRow(f"expected text in the field {name!r}, got {shown(value)}")
    raise BadRow(f"expected a field {' or '.join(map(repr, names))}, got the fields {shown(sorted(map(str, row)))}")


def _storable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            f"expected text of valid Unicode, got half of a surrogate pair at character {error.start} of {shown(text)}"
        ) from None
    return text


def _gsm8k(row: Mapping[str, Any], problem_id: str) -> Problem:
    solution = _text(row, "answer")
    final = solution.rpartition("####")[2].strip()
    value = parse_number(final)
    if value is None:
        raise BadRow(f"expected an answer that ends in '#### NUMBER', got {shown(solution[-_SHOWN:])}")
    return Problem(problem_id, _text(row, "question"), format_number(value), "number", {"solution": solution})


def _math(row: Mapping[str, Any], problem_id: str) -> Problem:
    question = _text(row, "problem", "question")
    solution = row.get("solution")
    if row.get("answer") is not None:
        answer = _text(row, "answer")
    else:
        answer = next((s.span for s in statements(_text(row, "solution")) if s.declared and s.span), "")
    if not answer:
        raise BadRow(f"expected a solution with its answer in \\boxed{{...}}, got {shown(str(solution)[-_SHOWN:])}")
    facts = {"subject": row.get("subject", row.get("type")), "level": row.get("level"), "solution": solution}
    return Problem(problem_id, question, answer, "expression", {k: v for k, v in facts.items() if isinstance(v, str)})


def _choice(problem_id: str, stem: str, options: Any, label: Any, facts: Mapping[str, Any]) -> Problem:
    if not isinstance(options, Sequence) or isinstance(options, str) or not 2 <= len(options) <= len(ascii_uppercase):
        raise BadRow(f"expected a list of options, got {shown(options)}")
    if not all(isinstance(option, str) for option in options):
        raise BadRow(f"expected every option to be text, got {shown(list(options))}")
    options = [_storable(option).strip() for option in options]
    labels = ascii_uppercase[: len(options)]
    lines = "\n".join(f"{name}. {option}" for name, option in zip(labels, options, strict=True))
    metadata = {**facts, "options": options}
    return Problem(problem_id, f"{stem.strip()}\n\n{lines}", _label(label, labels), "choice", metadata)


def _label(label: Any, labels: str) -> str:
    # an index of 0 is option A, not a missing answer
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(labels):
        return labels[label]
    if isinstance(label, str):
        text = label.strip().upper()
        if len(text) == 1 and text in labels:
            return text
        if text.isascii() and text.isdigit() and len(text) == 1 and int(text) < len(labels):
            return labels[int(text)]
    raise BadRow(f"expected the index or the letter of one of {len(labels)} options, got {shown(label)}")


def _first(row: Mapping[str, Any], *names: str) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _mmlu(row: Mapping[str, Any], problem_id: str) -> Problem:
    subject = row.get("subject")
    facts = {"subject": subject} if isinstance(subject, str) and subject else {}
    return _choice(problem_id, _text(row, "question"), _first(row, "choices", "options"), row.get("answer"), facts)


def _logiqa(row: Mapping[str, Any], problem_id: str) -> Problem:
    stem = f"{_text(row, 'context', 'text', 'passage').strip()}\n\n{_text(row, 'query', 'question').strip()}"
    label = _first(row, "correct_option", "answer", "label")
    return _choice(problem_id, stem, _first(row, "options", "choices"), label, {})


CONVERTERS: Mapping[str, Callable[[Mapping[str, Any], str], Problem]] = MappingProxyType(
    {"gsm8k": _gsm8k, "math": _math, "mmlu": _mmlu, "logiqa": _logiqa}
)
KINDS: Mapping[str, Kind] = MappingProxyType(
    {"gsm8k": "number", "math": "expression", "mmlu": "choice", "logiqa": "choice"}
)


# ------------------------------------------------- the text blocks of LogiQA

_MARKED = re.compile(r"\s*([A-Da-d])\s*[.\uff0e、:\uff1a)?\uff1f]\s*")
_SPACED = re.compile(r"\s*([A-D])\s+")
_INSIDE = re.compile(r"(?<![A-Za-z])([A-D])[.\uff0e]")


def logiqa_block(lines: Sequence[str]) -> Mapping[str, Any]:
    """Read one block of LogiQA's release: the right letter, the passage, the question and four options.

    The letter names an option by its label. Some blocks list their options out
    of order (A, C, B, D), and in some the translation has moved a label into its
    sentence ("Most spirits on the C.S City market"); both are corrected.
    """
    if len(lines) != 7:
        raise BadRow(
            f"expected 7 lines (letter, passage, question, four options), got {len(lines)}: {shown(' '.join(lines))}"
        )
    letter = lines[0].strip().upper()
    if letter not in ("A", "B", "C", "D"):
        raise BadRow(f"expected the right option's letter, a to d, got {shown(lines[0])}")
    options = _by_label(lines[3:])
    return {"context": lines[1], "query": lines[2], "options": options, "correct_option": "ABCD".index(letter)}


def _by_label(lines: Sequence[str]) -> list[str]:
    found: dict[str, str] = {}
    rest: dict[int, str] = {}
    for place, line in enumerate(lines):
        marked = _MARKED.match(line)
        if marked is not None and marked[1].upper() not in found:
            found[marked[1].upper()] = line[marked.end() :]
        else:
            rest[place] = line
    for reader in (_label_in_place, _label_inside):
        for place, line in list(rest.items()):
            missing = [name for name in "ABCD" if name not in found]
            read = reader(line, place, missing)
            if read is not None:
                found[read[0]] = read[1]
                del rest[place]
    missing = [name for name in "ABCD" if name not in found]
    found.update(zip(missing, rest.values(), strict=True))
    return [found[name] for name in "ABCD"]


def _label_in_place(line: str, place: int, missing: Sequence[str]) -> tuple[str, str] | None:
    spaced = _SPACED.match(line)
    if spaced is not None and spaced[1] in missing and spaced[1] == "ABCD"[place]:
        return spaced[1], line[spaced.end() :]
    return None


def _label_inside(line: str, place: int, missing: Sequence[str]) -> tuple[str, str] | None:
    del place
    for name in missing:
        inside = next((found for found in _INSIDE.finditer(line) if found[1] == name), None)
        if inside is not None:
            return name, line[: inside.start()] + line[inside.end() :]
    return None
