r"""`load_task` loads every task by its name.

The four benchmarks come from a local file or folder or from the Hugging Face
hub. The procedural tasks need no data.

Splits follow the paper's App. "Benchmarks and Dataset Splits". Every shuffle is
``numpy.random.default_rng(42).permutation``, which is also what
``datasets.Dataset.shuffle(seed=42)`` does, so data from the hub and from a file
are split alike. Splits do not depend on the seed of a run.

Rows come in the layouts of the hub and of the original releases. GSM8K:
``question`` and an ``answer`` that ends in ``#### 18``. MATH: ``problem`` and a
``solution`` whose last ``\boxed`` is the answer, or a separate ``answer``.
MMLU: ``question``, ``choices`` and an index or letter. LogiQA: ``context``,
``query``, ``options`` and ``correct_option``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import signature
from pathlib import Path
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, unknown_name
from mas_gym.tasks.base import SPLITS, Kind, Problem, Task
from mas_gym.tasks.grading import check_mode, statements
from mas_gym.tasks.numerals import format_number, parse_number
from mas_gym.tasks.sequences import ProblemTask, Table
from mas_gym.tasks.sources import (
    SHOWN,
    BadRow,
    Hub,
    Row,
    is_saved,
    listing,
    partition_files,
    read_file,
    read_hub,
    read_saved,
    shown,
    three_ways,
)

# ------------------------------------------------------------------ splits

SHUFFLE_SEED = 42


class Split(NamedTuple):
    """Row numbers of the train and dev splits, in the order in which they are used."""

    train: list[int]
    dev: list[int]


def shuffled(size: int) -> list[int]:
    """Return the numbers below ``size`` in the fixed shuffled order."""
    order: list[int] = np.random.default_rng(SHUFFLE_SEED).permutation(size).tolist()
    return order


def hold_out_dev(pool: list[int]) -> Split:
    """Hold out the first 5% (rounded down) of the shuffled training pool as dev; the rest is train.

    >>> [len(part) for part in hold_out_dev(list(range(7473)))]
    [7100, 373]
    """
    order = [pool[place] for place in shuffled(len(pool))]
    held_out = len(order) // 20
    return Split(train=order[held_out:], dev=order[:held_out])


def hold_out_test(size: int, held_out: int) -> tuple[list[int], list[int]]:
    """Divide one shuffled data set into ``held_out`` rows for evaluation and the training pool.

    Returns:
        The evaluation rows and the pool, both in shuffled order.
    """
    order = shuffled(size)
    return order[:held_out], order[held_out:]


# -------------------------------------------------------- rows to problems


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
        raise BadRow(f"expected an answer that ends in '#### NUMBER', got {shown(solution[-SHOWN:])}")
    return Problem(problem_id, _text(row, "question"), format_number(value), "number", {"solution": solution})


def _math(row: Mapping[str, Any], problem_id: str) -> Problem:
    question = _text(row, "problem", "question")
    solution = row.get("solution")
    if row.get("answer") is not None:
        answer = _text(row, "answer")
    else:
        answer = next((s.span for s in statements(_text(row, "solution")) if s.declared and s.span), "")
    if not answer:
        raise BadRow(f"expected a solution with its answer in \\boxed{{...}}, got {shown(str(solution)[-SHOWN:])}")
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


# ----------------------------------------------------------------- loading

_MOST_FAULTS = 20


class Benchmark(NamedTuple):
    """How the partitions of a published data set map to splits.

    Attributes:
        hub: Its location on the hub.
        pool: Partition used as the training pool.
        evaluation: Partition used as the test split.
        held_out: Number of test rows to hold out if the data set comes as a whole; 0 if it never does.
        whole: Partition sizes that identify a complete data set, which is then split here.
    """

    hub: Hub
    pool: str
    evaluation: str
    held_out: int = 0
    whole: tuple[Mapping[str, int], ...] = ()


# The sizes of MATH on the hub, and in its release.
_MATH_WHOLE = (MappingProxyType({"train": 12_500}), MappingProxyType({"train": 7_500, "test": 5_000}))

BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        "gsm8k": Benchmark(Hub("openai/gsm8k", "main"), "train", "test"),
        "math": Benchmark(Hub("qwedsacf/competition_math"), "train", "test", held_out=2_000, whole=_MATH_WHOLE),
        # the larger partition is the training pool, whatever its name
        "mmlu": Benchmark(Hub("cais/mmlu", "all"), "test", "validation"),
        "logiqa": Benchmark(Hub("lucasmccabe/logiqa", None, "refs/convert/parquet"), "train", "test"),
    }
)
PROCEDURAL = ("arithmetic", "ordering")
TASK_NAMES = (*BENCHMARKS, *PROCEDURAL)


def load_task(
    name: str,
    split: str = "test",
    data: str | Path | None = None,
    grading: str = "strict",
    limit: int | None = None,
    **options: Any,
) -> Task:
    """Load a task by its name.

    Args:
        name: ``"gsm8k"``, ``"math"``, ``"mmlu"``, ``"logiqa"``, ``"arithmetic"`` or ``"ordering"``.
        split: ``"train"``, ``"dev"`` or ``"test"``. Dev is the first 5% of the training pool shuffled with seed 42;
            train is the rest. The seed of a run does not change this.
        data: A local file or folder instead of the hub. A file holds the evaluation set for ``"test"`` and the
            training pool for ``"train"`` and ``"dev"``. A folder holds partitions by name. A complete MATH data
            set of 12,500 problems is divided into 10,500 and 2,000.
        grading: ``"strict"`` or ``"paper"``; see `mas_gym.tasks.grading`.
        limit: Use only the first ``limit`` problems. The test split is shuffled with seed 42 first, as in the
            paper.
        **options: Options of procedural tasks, such as ``difficulty`` and ``seed``.

    Returns:
        An immutable sequence of problems that can grade; its slices are tasks too.

    Raises:
        UnknownNameError: There is no such task.
        ConfigError: An argument is out of range, or the task has no such option.
        DataNotFoundError: The data is neither at ``data`` nor on the hub.
        DataError: The data is malformed; the message lists up to 20 bad rows.
        MissingDependencyError: A package that this task or source needs is not installed.
    """
    if split not in SPLITS:
        raise ConfigError(f"expected a split of {', '.join(SPLITS)}, got {split!r}")
    check_task_options(name, {"grading": grading, "limit": limit, **options})
    mode = check_mode(grading)
    if name in PROCEDURAL:
        if data is not None:
            raise ConfigError(f"task {name!r} generates its problems; expected no data, got {shown(data)}")
        task: Task = _procedural(name)(split, grading=mode, **options)
        return task if limit is None else task[:limit]
    if KINDS[name] == "expression" and mode == "strict":
        from mas_gym.tasks.symbolic import require_math

        require_math()
    place = None if data is None else _absolute(data)
    sample = limit is not None and split == "test"
    table = load_table(name, split, place, sample)
    size = len(table.problems) if limit is None else min(limit, len(table.problems))
    return ProblemTask(name, split, mode, table, range(size))


def _absolute(data: str | Path) -> str:
    try:
        place = Path(data).expanduser().resolve()
        place.exists()
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"expected the path of a file or folder as data, got {shown(str(data))}: {error}") from None
    return str(place)


def check_task_options(name: str, options: Mapping[str, Any]) -> None:
    """Check a task's name and options without touching its data.

    Args:
        name: The name, as `load_task` takes it.
        options: All other arguments of `load_task` except ``split`` and ``data``.

    Raises:
        UnknownNameError: There is no such task.
        ConfigError: The task has no such option, or its value is out of range.
    """
    if name not in TASK_NAMES:
        raise unknown_name("task", name, TASK_NAMES)
    check_mode(options.get("grading", "strict"))
    limit = options.get("limit")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ConfigError(f"expected a limit of 1 or more problems, or None, got {limit!r}")
    own = set(signature(_procedural(name)).parameters) - {"split"} if name in PROCEDURAL else set()
    known = sorted(own | {"grading", "limit"})
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError(f"task {name!r} takes the options {', '.join(known)}; got {', '.join(unknown)}")


def _procedural(name: str) -> Any:
    if name == "arithmetic":
        from mas_gym.tasks.arithmetic import Arithmetic

        return Arithmetic
    from mas_gym.tasks.ordering import Ordering

    return Ordering


def load_table(name: str, split: str, place: str | None, sample: bool) -> Table:
    """Load the problems of one split; cached until the data on disk changes.

    Args:
        name: Name of a benchmark.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        place: Absolute path of a file or folder; None for the hub.
        sample: Whether to shuffle the test split.
    """
    return _load_table(name, split, place, sample, None if place is None else _stamp(Path(place)))


def _stamp(place: Path) -> tuple[tuple[str, int, int], ...]:
    """Return values that change whenever the file, or a file in the folder, changes."""
    seen = [place, *(sorted(place.iterdir()) if place.is_dir() else ())]
    states = [(path.name, path.stat()) for path in seen if path.exists()]
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)


@lru_cache(maxsize=16)
def _load_table(name: str, split: str, place: str | None, sample: bool, stamp: object) -> Table:
    rows, order = _split_rows(name, split, place)
    if sample:
        order = [order[row] for row in shuffled(len(order))]
    problems, faults = [], []
    for number in order:
        row = rows[number]
        try:
            if isinstance(row.value, BadRow):
                raise row.value
            if not isinstance(row.value, Mapping):
                raise BadRow(f"expected an object with named fields, got {shown(row.value)}")
            problems.append(CONVERTERS[name](row.value, f"{name}/{split}/{number}"))
        except BadRow as error:
            faults.append((number, f"{row.place}: {error}"))
    if faults:
        raise DataError(_report(name, len(rows), [line for _, line in sorted(faults)]))
    return Table(problems, origin=(load_table, (name, split, place, sample)))


def _report(name: str, size: int, faults: Sequence[str]) -> str:
    more = f"\n  and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
    lines = "\n  ".join(faults[:_MOST_FAULTS])
    return f"{len(faults)} of {size} rows are not problems of task {name!r}; correct or remove them:\n  {lines}{more}"


def _split_rows(name: str, split: str, place: str | None) -> tuple[list[Row], list[int]]:
    """Return the raw rows of the partition that holds a split, and the split's row numbers in order."""
    benchmark = BENCHMARKS[name]
    wanted = benchmark.evaluation if split == "test" else benchmark.pool
    parts = _partitions(name, benchmark, wanted, place)
    sizes = {part: len(rows) for part, rows in parts.items()}
    if any(sizes == dict(whole) for whole in benchmark.whole):
        rows = [row for part in sizes for row in parts[part]]
        test, pool = hold_out_test(len(rows), benchmark.held_out)
    else:
        rows = parts.get(wanted, [])
        test = pool = list(range(len(rows)))
    if not rows:
        where = benchmark.hub.path if place is None else place
        raise DataError(f"{where}: expected problems of task {name!r}, split {split!r}, got none")
    if split == "test":
        return rows, test
    held_out = hold_out_dev(pool)
    return rows, held_out.dev if split == "dev" else held_out.train


def _partitions(name: str, benchmark: Benchmark, wanted: str, place: str | None) -> dict[str, list[Row]]:
    """Read the wanted partition, or all partitions if the data set is to be split here."""
    if place is None:
        part = "train" if benchmark.whole else wanted
        return {part: read_hub(benchmark.hub, part, name)}
    path = Path(place)
    if path.is_file():
        rows = read_file(path, name)
        # a file of the whole data set is not one of its splits
        part = "train" if any(dict(whole) == {"train": len(rows)} for whole in benchmark.whole) else wanted
        return {part: rows}
    if not path.is_dir():
        raise DataNotFoundError(three_ways(name, f"{place} does not exist"))
    parts = {}
    for part in ("train", "test") if benchmark.whole else (wanted,):
        if is_saved(path):
            rows = read_saved(path, part) or []
        else:
            rows = [row for file in partition_files(path, part) for row in read_file(file, name)]
        if rows:
            parts[part] = rows
    if wanted not in parts and not any({p: len(r) for p, r in parts.items()} == dict(w) for w in benchmark.whole):
        why = f"the folder {place} has no files named {wanted!r}; it holds {listing(path)}"
        raise DataNotFoundError(three_ways(name, why))
    return parts
