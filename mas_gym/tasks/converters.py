"""Convert rows of the published benchmarks to problems."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from string import ascii_uppercase
from types import MappingProxyType

from mas_gym.errors import shown
from mas_gym.internal.identity import digest_of
from mas_gym.internal.json_types import JSONMapping
from mas_gym.tasks.base import Problem
from mas_gym.tasks.data_rows import BadRow, first_of, storable
from mas_gym.tasks.grading.answers import statements
from mas_gym.tasks.grading.numbers import format_number, parse_number

# -------------------------------------------------------- rows to problems


def _text(row: Mapping[str, object], *names: str) -> str:
    for name in names:
        value = row.get(name)
        if value is not None:
            if isinstance(value, str) and value.strip():
                return storable(value)
            raise BadRow(f"expected text in the field {name!r}, got {shown(value)}")
    raise BadRow(f"expected a field {' or '.join(map(repr, names))}, got the fields {shown(sorted(map(str, row)))}")


def _gsm8k(row: Mapping[str, object], problem_id: str) -> Problem:
    solution = _text(row, "answer")
    final = solution.rpartition("####")[2].strip()
    value = parse_number(final)
    if value is None:
        raise BadRow(f"expected an answer that ends in '#### NUMBER', got {shown(solution)}")
    return Problem(problem_id, _text(row, "question"), format_number(value), "number", {"solution": solution})


def _math(row: Mapping[str, object], problem_id: str) -> Problem:
    question = _text(row, "problem", "question")
    solution = row.get("solution")
    if row.get("answer") is not None:
        answer = _text(row, "answer")
    else:
        answer = next((s.span for s in statements(_text(row, "solution")) if s.declared and s.span), "")
    if not answer:
        raise BadRow(f"expected a solution with its answer in \\boxed{{...}}, got {shown(solution)}")
    facts = {"subject": row.get("subject", row.get("type")), "level": row.get("level"), "solution": solution}
    return Problem(problem_id, question, answer, "expression", {k: v for k, v in facts.items() if isinstance(v, str)})


def _choice(problem_id: str, stem: str, options: object, label: object, facts: Mapping[str, object]) -> Problem:
    if not isinstance(options, Sequence) or isinstance(options, str) or not 2 <= len(options) <= len(ascii_uppercase):
        raise BadRow(f"expected a list of 2 to {len(ascii_uppercase)} options, got {shown(options)}")
    if not all(isinstance(option, str) for option in options):
        raise BadRow(f"expected every option to be text, got {shown(list(options))}")
    options = [storable(option).strip() for option in options]
    labels = ascii_uppercase[: len(options)]
    lines = "\n".join(f"{name}. {option}" for name, option in zip(labels, options, strict=True))
    metadata = {**facts, "options": options}
    return Problem(problem_id, f"{stem.strip()}\n\n{lines}", _label(label, labels), "choice", metadata)


def _label(label: object, labels: str) -> str:
    # an index of 0 is option A, not a missing answer
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(labels):
        return labels[label]
    if isinstance(label, str):
        text = label.strip().upper()
        if len(text) == 1 and text in labels:
            return text
    raise BadRow(f"expected the index or the letter of one of {len(labels)} options, got {shown(label)}")


def _mmlu(row: Mapping[str, object], problem_id: str) -> Problem:
    subject = row.get("subject")
    facts = {"subject": subject} if isinstance(subject, str) and subject else {}
    return _choice(problem_id, _text(row, "question"), first_of(row, ("choices", "options")), row.get("answer"), facts)


def _logiqa(row: Mapping[str, object], problem_id: str) -> Problem:
    stem = f"{_text(row, 'context', 'text', 'passage').strip()}\n\n{_text(row, 'query', 'question').strip()}"
    label = first_of(row, ("correct_option", "answer", "label"))
    return _choice(problem_id, stem, first_of(row, ("options", "choices")), label, {})


_GPQA_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def _gpqa(row: Mapping[str, object], problem_id: str) -> Problem:
    question, right = _text(row, "Question"), _text(row, "Correct Answer").strip()
    options = [right, *(_text(row, name).strip() for name in _GPQA_WRONG)]
    # Seeded by the row, so that its options have the same order in every file and split.
    random.Random(digest_of([question, *options])).shuffle(options)
    domain = row.get("High-level domain")
    facts = {"subject": domain} if isinstance(domain, str) and domain else {}
    return _choice(problem_id, question, options, options.index(right), facts)


CONVERTERS: Mapping[str, Callable[[JSONMapping, str], Problem]] = MappingProxyType(
    {"gsm8k": _gsm8k, "math": _math, "mmlu": _mmlu, "logiqa": _logiqa, "gpqa": _gpqa}
)
