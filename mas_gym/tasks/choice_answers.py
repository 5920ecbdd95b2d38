"""How the answers in a file of choice problems name the right option: by index, by label or by text.

One reading holds for a whole file and is chosen from all rows: the reading that fits the most answers. If several
readings fit equally, labels given in the file decide, then the type (an integer is an index). Otherwise, a file that
two readings interpret differently is an error, and the user chooses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from string import ascii_lowercase, ascii_uppercase
from typing import Literal, NamedTuple, cast, get_args

from mas_gym.errors import ConfigError, shown
from mas_gym.internal.suggestions import choice
from mas_gym.tasks.data_rows import BadRow
from mas_gym.tasks.json_rows import parsed

Reading = Literal["index", "label", "text"]
READINGS: tuple[Reading, ...] = get_args(Reading)
"""The names of the readings, as for ``--answers``."""

_NAMES: Mapping[Reading, str] = {"index": "indices from 0", "label": "labels", "text": "texts of options"}
_PREFIX = re.compile(r"\(?(\w{1,2})(?:\)|[.:]\s)\s*(?=\S)")
_NUMBER = re.compile(r"(\d{1,2})(?:\.0)?")
_SERIES = (ascii_uppercase, ascii_lowercase, [str(number) for number in range(1, 27)])
_FORMS = (("label", "text"), ("key", "value"))
_UNLIKELY = 0.01


class ChoiceRow(NamedTuple):
    """The options and the answer of one row.

    Attributes:
        answer: The answer as in the file: a text or an integer.
        options: The texts of the options, without labels.
        labels: The labels that the file gives for them; empty if it gives none.
        written: The options as written in the file, which may begin with their labels, as in ``"A) 21"``.
        numeric: Whether the options are numbers, so that an integer may be the text of an option.
    """

    answer: str | int
    options: Sequence[str] = ()
    labels: Sequence[str] = ()
    written: Sequence[str] = ()
    numeric: bool = False

    def place(self, reading: Reading) -> int | None:
        """Return the index of the option that the answer names in this reading; None if it names no option."""
        text = str(self.answer).strip()
        if reading == "text":
            return _only(text in forms for forms in zip(self.options, self.written, strict=True))
        bare = text.strip("().: ")
        number = int(found[1]) if (found := _NUMBER.fullmatch(bare)) is not None else None
        if reading == "index":
            return number if number is not None and number < len(self.options) else None
        if self.labels:
            return _only(bare.casefold() == label.strip("().: ").casefold() for label in self.labels)
        if number is not None:
            return number - 1 if 1 <= number <= len(self.options) else None
        letters = ascii_uppercase[: len(self.options) or None]
        return letters.index(bare.upper()) if len(bare) == 1 and bare.upper() in letters else None


def _only(matches: Iterable[bool]) -> int | None:
    places = [place for place, same in enumerate(matches) if same]
    return places[0] if len(places) == 1 else None


def choice_row(
    answer: str | int, written: Sequence[str], labels: Sequence[str] = (), numeric: bool = False
) -> ChoiceRow:
    """Return a row; options that begin with A, B, C or 1, 2, 3 in order give their labels.

    >>> choice_row("B", ["A) 21", "B) 22"])[1:3]
    (('21', '22'), ('A', 'B'))
    """
    prefixes = [match for option in written if (match := _PREFIX.match(option)) is not None]
    if [match[1] for match in prefixes] in [list(series[: len(written)]) for series in _SERIES] and prefixes:
        options = tuple(option[match.end() :] for option, match in zip(written, prefixes, strict=True))
        return ChoiceRow(answer, options, labels or tuple(match[1] for match in prefixes), tuple(written), numeric)
    return ChoiceRow(answer, tuple(written), tuple(labels), tuple(written), numeric)


def labeled_options(value: object) -> tuple[list[object], list[str]]:
    """Return the options in a cell, and the labels that it gives for them (empty if it gives none).

    The cell, or the JSON text in it, is a list of options, ``{"text": [...], "label": [...]}`` (ARC),
    ``{"A": ..., "B": ...}`` or a list of ``{"label": ..., "text": ...}`` or ``{"key": ..., "value": ...}``.

    Raises:
        BadRow: The cell has none of these forms.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        value = parsed(value)
    if isinstance(value, BadRow):
        raise value
    labels: list[object] = []
    options = value
    if isinstance(value, Mapping):
        if isinstance(value.get("text"), list) and isinstance(value.get("label"), list):
            labels, options = value["label"], value["text"]
        else:
            # Parquet has the same keys in every row, with None for the options that a row lacks.
            stated = {label: text for label, text in value.items() if text is not None}
            labels, options = list(stated), list(stated.values())
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for label, text in _FORMS:
            if all(isinstance(item, Mapping) and {label, text} <= item.keys() for item in value):
                labels, options = [item[label] for item in value], [item[text] for item in value]
    if not isinstance(options, list | tuple) or not 2 <= len(options) <= len(ascii_uppercase):
        raise BadRow(f"expected a list of 2 to {len(ascii_uppercase)} options, got {shown(value)}")
    if labels and len(labels) != len(options):
        raise BadRow(f"expected one label per option, got {len(labels)} labels for {len(options)} options")
    return list(options), [str(label) for label in labels]


def choose_reading(source: str, rows: Sequence[tuple[str, ChoiceRow]], given: str | None) -> Reading:
    """Return how the answers of a file name the right options, given rows with their locations.

    Raises:
        ConfigError: The reading does not exist, or two readings fit equally and name different options.
    """
    if given is not None:
        return cast(Reading, choice("answers", given, list[str](READINGS)))
    misfits = {reading: sum(row.place(reading) is None for _, row in rows) for reading in READINGS}
    fitting = [reading for reading in READINGS if misfits[reading] == min(misfits.values())]
    if "label" in fitting and any(row.labels for _, row in rows):
        return "label"
    differing = [(place, row, names) for place, row in rows if len(names := _named(row, fitting)) > 1]
    if not differing or ("index" in fitting and _counts_from_zero([row for _, row in rows])):
        return fitting[0]
    place, row, names = differing[0]
    readings = " or ".join(
        f"{shown(row.options[option])} (answers are {', '.join(_NAMES[reading] for reading in readings)})"
        for option, readings in names.items()
    )
    raise ConfigError(
        f"{source}: the answers allow two readings: in {place}, {shown(row.answer)} means {readings}; choose one with "
        "answers= or --answers: index (from 0), label (A, B, ... or 1, 2, ...) or text"
    )


def _named(row: ChoiceRow, readings: Sequence[Reading]) -> dict[int, list[Reading]]:
    """Return the options that an answer names, each with the readings in which it does."""
    named: dict[int, list[Reading]] = {}
    for reading in readings:
        if (place := row.place(reading)) is not None:
            named.setdefault(place, []).append(reading)
    return named


def _counts_from_zero(rows: Sequence[ChoiceRow]) -> bool:
    """Return whether answers are integers, none of which is an option itself, and would include a 0 if from 0."""
    if not all(isinstance(row.answer, int) and not row.numeric for row in rows if row.place("index") is not None):
        return False
    return any(row.answer == 0 for row in rows) or prod(1 - 1 / len(row.options) for row in rows) > _UNLIKELY


def reading_remark(reading: Reading, rows: Sequence[tuple[str, ChoiceRow]]) -> str:
    """Return the reading with the number of rows and an example, in one line."""
    read = [(row, place) for _, row in rows if (place := row.place(reading)) is not None]
    if not read:
        return ""
    row, place = next(((row, place) for row, place in read if row.options), read[0])
    example = f"{ascii_uppercase[place]}. {row.options[place]}" if row.options else ascii_uppercase[place]
    return f"answers are {_NAMES[reading]}: {len(read):,} rows; example: {shown(row.answer)} is {shown(example)}"
