"""Read the scores of evaluations that others ran: Inspect logs, lm-evaluation-harness samples, stores and CSV files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from mas_gym.errors import DataError, DataNotFoundError, is_number, shown
from mas_gym.internal.suggestions import choice
from mas_gym.logs.chats import QUESTION
from mas_gym.logs.inspect_logs import (
    archive_samples,
    inspect_samples,
    is_archive,
    is_inspect,
    model_of,
    question_text,
    sample_scores,
)
from mas_gym.logs.lm_eval import is_lm_eval, sample_metrics
from mas_gym.logs.transcript import truth
from mas_gym.tasks.data_rows import BadRow, RawRow, first_of
from mas_gym.tasks.files import read_file
from mas_gym.tasks.json_rows import json_rows
from search.results.run_info import settings
from search.store.store import is_database, open_store

_STAMPED = re.compile(r"samples_(?P<task>.+?)(?:_(?P<time>\d{4}-\d{2}-\d{2}T[\d.:-]+))?")
_QUESTION_ID = ("question_id", "problem_id", "doc_id", "sample_id", "id", *QUESTION)
_SCORE = ("correct", "score", "accuracy", "acc", "exact_match", "reward")
_MODEL = ("model", "system", "run")


class Score(NamedTuple):
    """The score of one sample.

    Attributes:
        question: Key of the question.
        value: The score in ``[0, 1]``; None for a sample without a score.
        text: Digest of the question's text; empty if unknown.
    """

    question: str
    value: float | None
    text: str = ""


@dataclass(frozen=True)
class Evaluation:
    """The scores of one model, or of any other system.

    Attributes:
        name: The name in tables.
        scores: The scores by question, one per sample, each in ``[0, 1]``.
        metric: Name of the metric; empty if it has none.
        texts: Digests of the questions' texts, where known.
        unscored: Number of samples that have no score and are left out.
    """

    name: str
    scores: Mapping[str, tuple[float, ...]]
    metric: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    unscored: int = 0

    @property
    def shares(self) -> dict[str, float]:
        """The mean score of each question."""
        return {question: sum(found) / len(found) for question, found in self.scores.items()}

    @property
    def samples(self) -> int:
        """Number of scored samples."""
        return sum(map(len, self.scores.values()))


def read_evaluations(source: str | Path, metric: str = "") -> list[Evaluation]:
    """Read the evaluations of a source.

    Args:
        source: A file, a folder written with ``--log_samples``, or ``NAME=FILE,FILE``: a name, and files that have
            samples of the same model.
        metric: Name of the scorer, metric or column; by default the first.

    Raises:
        DataNotFoundError: A file does not exist.
        DataError: A file cannot be read, or its scores are outside ``[0, 1]``.
        UnknownNameError: There is no such metric.
    """
    path = Path(source).expanduser()
    name, named, files = str(source).partition("=")
    if path.exists() or not named:
        return _read(path, metric)
    parts = [_read(Path(file).expanduser(), metric) for file in files.split(",")]
    metrics = sorted({one.metric for part in parts for one in part})
    if len(metrics) > 1 or any(len(part) > 1 for part in parts):
        raise DataError(
            f"{source}: expected files of one model with one metric, got the models "
            f"{shown([one.name for part in parts for one in part])} with the metrics {shown(metrics)}"
        )
    scores = [
        Score(question, value, one.texts.get(question, ""))
        for [one] in parts
        for question, values in one.scores.items()
        for value in values
    ]
    pooled = _evaluation(name, metrics[0], scores, str(source))
    return [replace(pooled, unscored=sum(one.unscored for [one] in parts))]


def _read(path: Path, metric: str) -> list[Evaluation]:
    if path.is_dir():
        return _folder(path, metric)
    if not path.is_file():
        raise DataNotFoundError(f"{path}: expected a file or folder of an evaluation, but no such path exists")
    if is_database(path):
        return list(_store(path, metric))
    if path.suffix.lower() == ".csv":
        return _table(path, read_file(path, ""), metric)
    if is_archive(path):
        return [_inspect(path, archive_samples(path), metric)]
    first = next((row.value for row in json_rows(path)), None)
    if isinstance(first, BadRow):
        raise DataError(f"{path}: expected an Inspect log, JSON Lines, a CSV file or a run store: {first}")
    if is_inspect(first):
        return [_inspect(path, inspect_samples(json_rows(path)), metric)]
    if is_lm_eval(first):
        return [_lm_eval(path.parent.name or path.stem, [path], metric)]
    if isinstance(first, Mapping):
        return _table(path, json_rows(path), metric)
    raise DataError(
        f"{path}: expected an Inspect log (.eval, .json), samples of lm-evaluation-harness (--log_samples), a run "
        f"store, or a CSV file with columns for question and score, got {shown(first)}"
    )


def _metric(path: object, names: Iterable[str], metric: str) -> str:
    known = tuple(names)
    if not known:
        raise DataError(f"{path}: expected numbers, grades or true and false as scores, found none")
    return choice(f"{path}: metric", metric, known) if metric else known[0]


def _evaluation(name: str, metric: str, scores: Iterable[Score], place: str) -> Evaluation:
    found: dict[str, list[float]] = {}
    texts: dict[str, str] = {}
    unscored = 0
    for question, value, text in scores:
        if value is None:
            unscored += 1
            continue
        if not 0 <= value <= 1:
            raise DataError(
                f"{place}: expected scores in [0, 1], got {value:g} for question {shown(question)}; choose another "
                "metric, or scale the scores"
            )
        found.setdefault(question, []).append(value)
        if text and texts.setdefault(question, text) != text:
            raise DataError(f"{place}: expected one text per question, got two for question {shown(question)}")
    if not found:
        raise DataError(f"{place}: expected scores, found none in {unscored:,} samples; score the evaluation first")
    return Evaluation(name, {question: tuple(values) for question, values in found.items()}, metric, texts, unscored)


def _digest(text: object) -> str:
    return hashlib.sha256(str(text).encode(errors="replace")).hexdigest() if text else ""


def _values(rows: Iterable[RawRow], fits: Callable[[object], bool]) -> Iterator[Mapping[str, object]]:
    for place, row in rows:
        if isinstance(row, BadRow) or not isinstance(row, Mapping) or not fits(row):
            raise DataError(f"{place}: expected a scored sample, got {row if isinstance(row, BadRow) else shown(row)}")
        yield row


# ----------------------------------------------------------------- formats


def _inspect(path: Path, rows: Iterable[RawRow], metric: str) -> Evaluation:
    found = [(str(row["id"]), sample_scores(row), question_text(row)) for row in _values(rows, is_inspect)]
    chosen = _metric(path, dict.fromkeys(name for _, scores, _ in found for name in scores), metric)
    scores = (Score(question, scores.get(chosen), _digest(text)) for question, scores, text in found)
    return _evaluation(model_of(path) or path.stem, chosen, scores, str(path))


def _folder(folder: Path, metric: str) -> list[Evaluation]:
    inside = {place: _newest(place) for place in (folder, *sorted(one for one in folder.iterdir() if one.is_dir()))}
    found = [_lm_eval(place.resolve().name, files, metric) for place, files in inside.items() if files]
    if not found:
        raise DataError(
            f"{folder}: expected files samples_TASK_TIME.jsonl, as written with --log_samples, found none; for other "
            "evaluations pass the files"
        )
    return found


def _newest(folder: Path) -> list[Path]:
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("samples_*.jsonl")):
        found[_task(file)] = file
    return list(found.values())


def _task(file: Path) -> str:
    stamped = _STAMPED.fullmatch(file.stem)
    return stamped["task"] if stamped else file.stem


def _lm_eval(name: str, files: list[Path], metric: str) -> Evaluation:
    rows = [(_task(file), row) for file in files for row in _values(json_rows(file), is_lm_eval)]
    found = []
    for task, row in rows:
        suffix = f",{row['filter']}" if isinstance(row.get("filter"), str) else ""
        # As in the harness's tables: the metric and the filter.
        named = {f"{metric}{suffix}": value for metric, value in sample_metrics(row).items()}
        found.append((f"{task}/{row['doc_id']}", named, row.get("doc_hash") or _digest(row["doc"])))
    plain = dict.fromkeys(name for _, named, _ in found for name in named)
    whole = next((one for one in plain if one.partition(",")[0] == metric), metric)
    chosen = _metric(files[0].parent, plain, whole)
    # A response has a row per filter.
    scores = (Score(question, named[chosen], str(text)) for question, named, text in found if chosen in named)
    return _evaluation(name, chosen, scores, str(files[0].parent))


def _store(path: Path, metric: str) -> Iterator[Evaluation]:
    """Yield an evaluation per row of the store's tables; its seeds are samples."""
    with open_store(path) as store:
        for setting in settings(store.runs()):
            scores: dict[str, list[Score]] = {}
            for run, (planner, critic) in zip(setting.runs, setting.labels, strict=True):
                for one in store.outcomes(run.run, planner, critic):
                    score = Score(one.problem_id, None if one.correct is None else float(one.correct))
                    scores.setdefault(one.label, []).append(score)
            for label, found in scores.items():
                yield _evaluation(label, _metric(path, ("correct",), metric), found, str(path))


def _table(path: Path, rows: Iterable[RawRow], metric: str) -> list[Evaluation]:
    listed = list(_values(rows, lambda row: True))
    columns = dict.fromkeys(str(name) for row in listed for name in row)
    question = next((name for name in _QUESTION_ID if name in columns), None)
    score = metric or next((name for name in _SCORE if name in columns), None)
    if question is None or score is None:
        raise DataError(
            f"{path}: expected a column for the question ({', '.join(_QUESTION_ID[:5])}) and one for the score "
            f"({', '.join(_SCORE)}, or another with --metric), got the columns {shown(list(columns))}"
        )
    choice(f"{path}: metric", score, tuple(columns))
    found: dict[str, list[Score]] = {}
    for row in listed:
        model = first_of(row, _MODEL)
        text = first_of(row, ("question", "problem"))
        name = path.stem if model in (None, "") else str(model)
        found.setdefault(name, []).append(Score(str(row[question]), _cell(path, row[score]), _digest(text)))
    return [_evaluation(name, score, scores, str(path)) for name, scores in found.items()]


def _cell(path: Path, value: object) -> float | None:
    """Return the score in a cell: a number, or a word such as true; None for an empty cell."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        number = float(value) if isinstance(value, str | int | float) else None
    except ValueError:
        number = None
    if is_number(number):
        return number
    try:
        return float(bool(truth(value)))
    except BadRow as error:
        raise DataError(f"{path}: score: {error}") from None
