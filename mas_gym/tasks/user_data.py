"""Problems from user data: CSV, JSONL, JSON, Parquet, a folder of such files, or a dataset on the hub.

Each row has a question and an answer, in the default columns or in the columns that `Columns`
names. If the kind of the answers is not given, it is inferred from all answers. Splits:

* with a split column, the rows of that split;
* in a folder or on the hub, the files or partitions named train, test, and dev or validation;
* without any of these, ``"test"`` contains all rows, and so does the pool from which train and dev are taken;
* if no rows are marked as dev, dev is the 5% of the pool selected by a hash of the question,
  and train is the rest, so adding rows does not change the split of existing rows.

All other columns become metadata, which a custom grader can read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.internal.suggestions import choice, refuse_unknown
from mas_gym.systems.conditions import matcher
from mas_gym.tasks.base import KINDS, Kind, Problem
from mas_gym.tasks.choice_answers import ChoiceRow, Reading, choice_row, choose_reading, labeled_options, reading_remark
from mas_gym.tasks.data_rows import BadRow, RawRow, read_rows, storable
from mas_gym.tasks.files import listing, read_file, read_partition, stamp
from mas_gym.tasks.grading.numbers import parse_number
from mas_gym.tasks.grading.texts import accepted_texts
from mas_gym.tasks.hub_data import Hub, read_hub

logger = logging.getLogger("mas_gym.tasks")

SUFFIXES = (".csv", ".jsonl", ".json", ".parquet")
ROLES = ("question", "answer", "id", "split", "kind", "choices")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?::[\w.-]+)?")
SPLIT_WORDS = {"train": "train", "training": "train", "test": "test", "eval": "test", "evaluation": "test"} | {
    word: "dev" for word in ("dev", "val", "valid", "validation", "development")
}
_PARTITIONS = {"train": "train", "dev": "validation", "test": "test"}
_DEV_SHARE = 20


class Columns(NamedTuple):
    """The columns that contain the parts of a problem.

    Attributes:
        question: The question.
        answer: The reference answer; with several columns, every non-empty column is an accepted answer.
        id: A unique id; None to derive one from the question.
        split: The split: train, dev or test; None without splits.
        kind: The kind of each answer; None if all answers have the same kind.
        choices: One column with a list of options, or one column per option; empty if there are no options.
    """

    question: str = "question"
    answer: tuple[str, ...] = ("answer",)
    id: str | None = None
    split: str | None = None
    kind: str | None = None
    choices: tuple[str, ...] = ()

    @classmethod
    def read(cls, given: Mapping[str, object] | str | None) -> Columns:
        """Read ``{"question": "prompt", "answer": "gold"}`` or ``"question=prompt,answer=gold"``.

        Several columns for one role are given as a list or joined by ``+``.

        Raises:
            ConfigError: A role is unknown, or a name is not a string.
        """
        if isinstance(given, str):
            pairs = [part.partition("=") for part in given.split(",") if part.strip()]
            given = {role.strip(): name.strip() for role, _, name in pairs}
        roles = {} if given is None else given
        refuse_unknown("column role", roles, (*ROLES, "options"))
        read: dict[str, Any] = {}
        for role, names in roles.items():
            role = "choices" if role == "options" else role
            many = role in ("answer", "choices")
            parts = names.split("+") if many and isinstance(names, str) else names
            columns = tuple(parts) if isinstance(parts, list | tuple) else (parts,)
            named = bool(columns) and all(isinstance(name, str) and name for name in columns)
            if not named or (len(columns) > 1 and not many):
                raise ConfigError(f"columns: expected a column name for {role}, got {shown(names)}")
            read[role] = columns if many else columns[0]
        return cls(**read)

    def named(self) -> list[str]:
        """Return every column that must exist."""
        optional = [name for name in (self.id, self.split, self.kind) if name is not None]
        return [self.question, *self.answer, *optional, *self.choices]


class LoadedProblems(NamedTuple):
    """The problems of one split, with their inferred properties.

    Attributes:
        problems: The problems.
        kinds: The number of rows of each kind in all splits, most frequent first.
        remark: The inferred properties, in one line.
    """

    problems: tuple[Problem, ...]
    kinds: Mapping[str, int]
    remark: str


def is_data_source(name: str) -> bool:
    """Whether a task's name is a file, a folder or the id of a dataset on the hub."""
    if Path(name).suffix.lower() in SUFFIXES or _HUB_ID.fullmatch(name) is not None:
        return True
    return ("/" in name or "\\" in name or name.startswith((".", "~"))) and Path(name).expanduser().exists()


def load_problems(
    source: str, split: str, columns: Columns, kind: str | None, answers: str | None = None
) -> LoadedProblems:
    """Load the problems of one split; cached until the data on disk changes. See `mas_gym.load_task`.

    Raises:
        DataNotFoundError: The data cannot be found or reached.
        DataError: The data cannot be read, or some rows are not valid problems; the message lists up to 20 of them.
        ConfigError: The kind or the reading of answers does not exist, or the answers allow two readings.
    """
    if kind is not None:
        choice("kind", kind, KINDS)
    place = _place(source)
    return _load(source, place, split, columns, kind, answers, None if place is None else stamp(place))


def _place(source: str) -> Path | None:
    path = Path(source).expanduser().resolve()
    if path.exists():
        return path
    if _HUB_ID.fullmatch(source) is None or path.suffix.lower() in SUFFIXES:
        raise DataNotFoundError(
            f"no data at {shown(source)}; expected a file of type {', '.join(SUFFIXES)}, or a folder of such files"
        )
    return None


@lru_cache(maxsize=16)
def _load(
    source: str, place: Path | None, split: str, columns: Columns, kind: str | None, answers: str | None, stamp: object
) -> LoadedProblems:
    name = place.stem if place is not None else source
    parts, whole = _read(source, place)
    rows = [(part, row) for part, found in parts.items() for row in found]
    if not rows:
        raise DataError(f"{source}: expected at least one problem, found none")
    columns = _completed(source, rows[0][1], columns)
    guess = kind or ("" if columns.kind else _guess_kind(columns, [row.value for _, row in rows]))
    choices = _choice_rows([row for _, row in rows], columns, guess)
    reading = choose_reading(source, choices, answers)
    seen = Counter[str]()

    def read(number: int, fields: JSONMapping) -> tuple[str, Problem]:
        part, _ = rows[number]
        return part or _split_of(fields, columns), _problem(fields, columns, guess, reading, name, seen)

    made = read_rows(f"problems of task {name!r}", [row for _, row in rows], read)
    kinds = Counter[str](problem.kind for _, problem in made)
    if answers is not None and "choice" not in kinds:
        raise ConfigError(f"answers={shown(answers)}: expected answers of kind 'choice', got {', '.join(kinds)}")
    held_out = all(part != "dev" for part, _ in made)
    chosen = tuple(problem for part, problem in made if _is_in(problem, part, split, held_out))
    if not chosen:
        have = dict(Counter(part or "no split" for part, _ in made))
        raise DataError(f"{source}: expected problems in split {split!r}, found none among {len(made):,} rows ({have})")
    remark = _remark(name, kinds, kind, split, columns, whole and held_out)
    if options := reading_remark(reading, choices):
        remark += f"; {options}" + ("" if answers else " (inferred; set it with --answers or answers=)")
    return LoadedProblems(chosen, dict(kinds.most_common()), remark)


def _remark(name: str, kinds: Counter[str], kind: str | None, split: str, columns: Columns, hashed: bool) -> str:
    text = f"{name}: {kinds.total():,} problems of kind {', '.join(kinds)}"
    if not (kind or columns.kind):
        text += " (inferred from the answers; set it with --kind or kind=)"
    if hashed and split != "test":
        share = "5%" if split == "dev" else "95%"
        text += (
            f"; no row has the split dev, so {split} is {share} of the train rows, chosen by a hash"
            if columns.split
            else f"; it has no split column, so {split} is {share} of its rows, chosen by a hash; test is all rows, so "
            "evaluate on dev"
        )
    return text


# --------------------------------------------------------------------- reading


def _read(source: str, place: Path | None) -> tuple[dict[str, list[RawRow]], bool]:
    """Return the rows of each partition, and whether the data is one file without partitions (named ``""``)."""
    if place is None:
        return _read_hub(source)
    if place.is_file():
        if place.suffix.lower() not in SUFFIXES:
            raise DataError(
                f"{place}: expected a file of type {', '.join(SUFFIXES)}, got {place.suffix or 'no suffix'}"
            )
        return {"": read_file(place, "")}, True
    if not place.is_dir():
        raise DataError(f"{place}: expected a regular file or a folder, got neither")
    parts: dict[str, list[RawRow]] = {}
    for split, partition in _PARTITIONS.items():
        if rows := read_partition(place, partition, ""):
            parts[split] = rows
    if not parts:
        raise DataNotFoundError(
            f"{place}: expected files named train, test or validation ({', '.join(SUFFIXES)}); the folder contains "
            f"{listing(place)}"
        )
    return parts, False


def _read_hub(source: str) -> tuple[dict[str, list[RawRow]], bool]:
    path, _, config = source.partition(":")
    try:
        found = read_hub(Hub(path, config or None), _PARTITIONS.values())
    except DataNotFoundError as error:
        raise DataNotFoundError(
            f"no data for task {source!r}: {error}, and there is no local file with this name; check the path or id, "
            "or connect to the internet"
        ) from error
    parts = {split: found[partition] for split, partition in _PARTITIONS.items() if partition in found}
    return ({"": parts["train"]}, True) if list(parts) == ["train"] else (parts, False)


def _completed(source: str, first: RawRow, columns: Columns) -> Columns:
    """Check that the columns exist, and add the optional columns that have default names."""
    if not isinstance(first.value, Mapping):
        return columns
    there = [str(name) for name in first.value]
    for name in columns.named():
        if name not in there:
            hint = " (are its cells separated by commas?)" if len(there) == 1 else ""
            raise DataError(
                f"{source}: no column {name!r}; its columns are {', '.join(map(shown, there))}{hint}. Name them with "
                "columns={'question': ..., 'answer': ...} or --columns question=...,answer=..."
            )
    roles = {"id": columns.id, "split": columns.split, "kind": columns.kind}
    found: dict[str, Any] = {role: role for role, column in roles.items() if column is None and role in there}
    choices = columns.choices or next(((name,) for name in ("choices", "options") if name in there), ())
    return columns._replace(choices=choices, **found)


def _split_of(row: Mapping[str, object], columns: Columns) -> str:
    """Return the split that the split column names; ``""`` if there is no such column."""
    if columns.split is None:
        return ""
    word = str(row.get(columns.split, "")).strip()
    if word.casefold() not in SPLIT_WORDS:
        raise BadRow(f"expected the split train, dev or test in column {columns.split!r}, got {shown(word)}")
    return SPLIT_WORDS[word.casefold()]


def _is_in(problem: Problem, part: str, split: str, held_out: bool) -> bool:
    """Whether a problem of a partition (``""`` for none) belongs to a split.

    With ``held_out``, no row is marked as dev, and a hash of the question holds out 5% of the other rows.
    """
    if "test" in (part, split):
        return split == "test" and part in ("test", "")
    if not held_out:
        return part == split
    dev = int.from_bytes(sha256(_words(problem.question)).digest()[:8], "big") % _DEV_SHARE == 0
    return (split == "dev") == dev


def _words(question: str) -> bytes:
    return " ".join(question.casefold().split()).encode()


# -------------------------------------------------------------------- problems


def _problem(
    row: Mapping[str, object], columns: Columns, guess: str, reading: Reading, name: str, seen: Counter[str]
) -> Problem:
    question = _cell(row, columns.question)
    kind = _kind_of(row, columns, guess)
    used = set(columns.named())
    facts = {str(key): _plain(value) for key, value in row.items() if key not in used and value not in (None, "")}
    if kind != "choice":
        answer = _reference(kind, _answers(row, columns))
    else:
        chosen = _choice_row(row, columns)
        answer = _label(chosen, reading)
        if chosen.options:
            options = list(chosen.options)
            lines = "\n".join(f"{label}. {option}" for label, option in zip(ascii_uppercase, options, strict=False))
            question, facts["options"] = f"{question}\n\n{lines}", options
        elif answer > "D":
            # The grader assumes four options unless they are listed.
            facts["options"] = [""] * (ascii_uppercase.index(answer) + 1)
    return Problem(_id(row, columns, question, name, seen), question, answer, kind, facts)


def _kind_of(row: Mapping[str, object], columns: Columns, guess: str) -> Kind:
    stated = str(row.get(columns.kind, "")).strip().lower() if columns.kind else guess
    if stated not in KINDS:
        raise BadRow(f"expected one of the kinds {', '.join(KINDS)}, got {shown(stated)}")
    kind: Kind = stated
    return kind


def _id(row: Mapping[str, object], columns: Columns, question: str, name: str, seen: Counter[str]) -> str:
    # Derived from the question, so that adding rows or correcting answers changes no other id.
    derived = f"{name}/{sha256(_words(question)).hexdigest()[:12]}"
    problem_id = derived if columns.id is None else _cell(row, columns.id)
    seen[problem_id] += 1
    if seen[problem_id] == 1:
        return problem_id
    if columns.id is not None:
        raise BadRow(f"expected unique ids in column {columns.id!r}, got {shown(problem_id)} again")
    return f"{problem_id}-{seen[problem_id]}"


def _cell(row: Mapping[str, object], name: str) -> str:
    value = row.get(name)
    text = value if isinstance(value, str) else _number_text(value)
    if text is None or not text.strip():
        raise BadRow(f"expected text in column {name!r}, got {shown(value)}")
    return storable(text).strip()


def _number_text(value: object) -> str | None:
    if isinstance(value, int):
        return str(value)
    # An infinite or missing number is not an answer.
    return f"{value:.17g}" if isinstance(value, float) and value - value == 0 else None


def _answers(row: Mapping[str, object], columns: Columns) -> list[str]:
    """Return the accepted answers of a row, from every non-empty answer column; each item of a list is one answer."""
    answers: list[str] = []
    for name in columns.answer:
        value = row.get(name)
        if isinstance(value, list | tuple):
            answers += [_cell({name: item}, name) for item in value]
        elif value not in (None, "") or len(columns.answer) == 1:
            answers.append(_cell(row, name))
    if not answers:
        raise BadRow(f"expected an answer in column {' or '.join(map(repr, columns.answer))}, got none")
    return answers


def _reference(kind: Kind, answers: Sequence[str]) -> str:
    """Return the reference answer in the form that the grader of its kind expects."""
    if len(answers) > 1:
        if kind not in ("text", "judge"):
            raise BadRow(
                f"expected one answer of kind {kind!r}, got {len(answers)}; only 'text' and 'judge' accept several"
            )
        return json.dumps(answers, ensure_ascii=False)
    [answer] = answers
    if kind == "number" and parse_number(answer) is None and parse_number(answer, ",") is None:
        raise BadRow(f"expected a number as the answer, got {shown(answer)}; set another kind with kind= or --kind")
    if kind == "regex":
        try:
            matcher(answer)
        except ConfigError as error:
            raise BadRow(str(error)) from None
    if kind == "code":
        try:
            compile(answer, "<answer>", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BadRow(f"expected unit tests in Python, got {shown(answer)} ({error})") from None
    return answer


def _choice_rows(rows: Sequence[RawRow], columns: Columns, guess: str) -> list[tuple[str, ChoiceRow]]:
    """Return the choice problems of the rows that can be read, each with its location."""
    found = []
    for place, value in rows:
        if isinstance(value, Mapping):
            with contextlib.suppress(BadRow):
                if _kind_of(value, columns, guess) == "choice":
                    found.append((place, _choice_row(value, columns)))
    return found


def _choice_row(row: Mapping[str, object], columns: Columns) -> ChoiceRow:
    """Return the options of a row (in one column, or one column per option) and the answer that names one of them."""
    cells: list[object] = [row[name] for name in columns.choices if row.get(name) not in (None, "")]
    labels: list[str] = []
    if len(columns.choices) > 1 and len(cells) < 2:
        raise BadRow(f"expected at least two options in the columns {', '.join(columns.choices)}, got {len(cells)}")
    if len(columns.choices) == 1:
        try:
            cells, labels = labeled_options(row.get(columns.choices[0]))
        except BadRow as error:
            raise BadRow(f"column {columns.choices[0]!r}: {error}") from None
    options = [_cell({"": cell}, "") for cell in cells]
    [answer, *more] = _answers(row, columns)
    if more:
        raise BadRow(f"expected one answer of kind 'choice', got {len(more) + 1}")
    number = any(isinstance(row.get(name), int) for name in columns.answer)
    numeric = bool(cells) and all(isinstance(cell, int | float) for cell in cells)
    return choice_row(int(answer) if number else answer, options, labels, numeric)


def _label(row: ChoiceRow, reading: Reading) -> str:
    place = row.place(reading)
    if place is None:
        expected = {"index": "the index of an option, from 0,", "label": "the label of an option", "text": "an option"}
        raise BadRow(f"expected {expected[reading]} as the answer, got {shown(row.answer)}")
    return ascii_uppercase[place]


def _plain(value: object) -> object:
    """Return a metadata value in JSON-serializable form."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return shown(value)
    return value


# ------------------------------------------------------------------- guessing

_LETTER = re.compile(r"\(?[A-Ea-e]\)?\.?")
_SIGNS = re.compile(r"[-+*/^=<>()\[\]{}\\$|_.,\s\d]*")
_NAME = re.compile(r"\\?[A-Za-z]+")
_FUNCTIONS = ("sqrt", "sin", "cos", "tan", "log", "exp")
_OPERATOR = re.compile(r"[\\^=/*+]|\d[a-z]|sqrt")
_MOST_ROWS = 0.8
_TESTS = re.compile(r"^(?:[ \t]*+assert\b|def (?:test|check)\w*+\()", re.MULTILINE)


def _guess_kind(columns: Columns, rows: Sequence[object]) -> str:
    if columns.choices:
        return "choice"
    answers: list[str | None] = []
    for row in rows:
        try:
            given = _answers(row, columns) if isinstance(row, Mapping) else []
        except BadRow:
            continue
        several = len(given) > 1 or any(len(accepted_texts(answer)) > 1 for answer in given)
        answers += [None] if several else given
    return infer_kind(answers, _MOST_ROWS)


def infer_kind(answers: Sequence[str | None], share: float = 1.0) -> str:
    """Infer the kind that fits the reference answers; ``"text"`` if no other kind fits.

    Args:
        answers: The answers; None for several accepted answers, which only ``"text"`` allows.
        share: Share of the answers that must fit.
    """

    def fits(test: Callable[[str], object]) -> bool:
        fitting = sum(answer is not None and bool(test(answer)) for answer in answers)
        return fitting >= max(1.0, share * len(answers))

    def is_number(answer: str) -> bool:
        return parse_number(answer) is not None

    if fits(is_number):
        return "number"
    if fits(_LETTER.fullmatch) and len({answer for answer in answers if answer and _LETTER.fullmatch(answer)}) > 1:
        return "choice"
    if fits(lambda answer: is_number(answer) or _is_maths(answer)):
        return "expression"
    return "code" if fits(_TESTS.search) else "text"


def _is_maths(answer: str) -> bool:
    names = _NAME.findall(answer)
    plain = all(name[0] == "\\" or len(name) < 3 or name in _FUNCTIONS for name in names)
    return plain and _OPERATOR.search(answer) is not None and _SIGNS.fullmatch(_NAME.sub("", answer)) is not None
