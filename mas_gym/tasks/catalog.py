r"""`load_task` loads a task by name or from a user's file.

The published benchmarks are read from a local file or folder or from the Hugging Face
hub. The generated tasks need no data. `mas_gym.tasks.user_data` reads other files. A package
registers task names with an entry point in the group ``mas_gym.tasks``: a function
``(split, **options) -> Task``.

Splits follow the paper's App. "Benchmarks and Dataset Splits". Every shuffle is
``numpy.random.default_rng(42).permutation``, which equals
``datasets.Dataset.shuffle(seed=42)``. Data from the hub and from a file therefore have the
same splits. Splits do not depend on the seed of a run.

Rows have the fields of the hub datasets or of the original releases:

- GSM8K: ``question`` and an ``answer`` that ends in ``#### 18``.
- MATH: ``problem`` and a ``solution`` whose last ``\boxed`` is the answer, or a separate ``answer``.
- MMLU: ``question``, ``choices`` and an ``answer`` (index or letter).
- LogiQA: ``context``, ``query``, ``options`` and ``correct_option``.
- GPQA: ``Question``, ``Correct Answer`` and ``Incorrect Answer 1`` to ``3``; the options are
  shuffled with a seed derived from the row.

A complete MATH dataset of 12,500 problems is divided into a training pool of 10,500
and a test split of 2,000. The test split of GPQA is the diamond set, which is removed
from the main set for training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import numpy as np

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, MissingDependencyError, shown, whole_number
from mas_gym.internal.suggestions import choice
from mas_gym.plugins import Registry, Spec
from mas_gym.tasks.base import KINDS, SPLITS, Grader, GradingMode, Problem, Task, as_task
from mas_gym.tasks.converters import CONVERTERS
from mas_gym.tasks.data_rows import RawRow, read_rows
from mas_gym.tasks.files import listing, read_file, read_partition, stamp, three_ways
from mas_gym.tasks.grading.answers import KindGrader, check_mode
from mas_gym.tasks.grading.graders import Function, make_grader
from mas_gym.tasks.grading.numbers import Decimal
from mas_gym.tasks.grading.sandbox import Limits, check_sandbox
from mas_gym.tasks.grading.symbolic import require_math
from mas_gym.tasks.hub_data import Hub, read_hub
from mas_gym.tasks.problem_task import ProblemTask
from mas_gym.tasks.user_data import SPLIT_WORDS, Columns, is_data_source, load_problems
from mas_gym.tasks.user_data import SUFFIXES as DATA_SUFFIXES


class Benchmark(NamedTuple):
    """How the partitions of a published dataset map to splits.

    Attributes:
        hub: Location of the dataset on the hub.
        pool: Partition used as the training pool.
        evaluation: Partition used as the test split.
        held_out: Number of test rows to hold out if the dataset is loaded as a whole; 0 if it never is.
        whole: Partition sizes that identify a complete dataset, which is then split here.
        nested: Whether the training pool contains the test rows, which are then removed from it.
        mas: The MAS that the paper uses for the dataset, or the default MAS for its kind of answers.
    """

    hub: Hub
    pool: str
    evaluation: str
    held_out: int = 0
    whole: tuple[Mapping[str, int], ...] = ()
    nested: bool = False
    mas: str = "rpsv"


# The sizes of MATH on the hub, and in its release.
_MATH_WHOLE = ({"train": 12_500}, {"train": 7_500, "test": 5_000})

BENCHMARKS: Mapping[str, Benchmark] = {
    "gsm8k": Benchmark(Hub("openai/gsm8k", "main"), "train", "test"),
    "math": Benchmark(Hub("qwedsacf/competition_math"), "train", "test", held_out=2_000, whole=_MATH_WHOLE),
    # the larger partition is the training pool, although it is named "test"
    "mmlu": Benchmark(Hub("cais/mmlu", "all"), "test", "validation", mas="debate"),
    "logiqa": Benchmark(Hub("lucasmccabe/logiqa", None, "refs/convert/parquet"), "train", "test", mas="logic"),
    "gpqa": Benchmark(Hub("Idavidrein/gpqa", "*"), "gpqa_main", "gpqa_diamond", nested=True, mas="debate"),
}
PROCEDURAL = ("arithmetic", "ordering", "game24")
TASK_NAMES = (*BENCHMARKS, *PROCEDURAL)
GRADING_OPTIONS = ("grading", "limit", "grader", "judge", "allow_code", "sandbox", "decimal")

logger = logging.getLogger("mas_gym.tasks")


def load_task(
    name: str | os.PathLike[str],
    split: str | None = "test",
    data: str | Path | None = None,
    grading: str = "strict",
    limit: int | None = None,
    *,
    columns: Mapping[str, object] | str | None = None,
    kind: str | None = None,
    answers: str | None = None,
    grader: str | Function | Grader | None = None,
    judge: object = None,
    allow_code: bool = False,
    sandbox: str = "bubblewrap",
    decimal: str = ".",
    **options: object,
) -> Task:
    """Load a task.

    Args:
        name: One of `TASK_NAMES` or a name registered by a package, with optional settings, as in
            ``"arithmetic:difficulty=5"``; ``"FILE.py:NAME"`` of a function or class that makes a task (see
            `mas_gym.plugins`); your own CSV, JSONL, JSON or Parquet file or a folder of such files; or ``"OWNER/NAME"``
            or ``"OWNER/NAME:CONFIG"`` on the hub.
        split: ``"test"``, ``"dev"`` (5% of the training pool, the same for all seeds) or ``"train"`` (the rest). None
            for all problems of a benchmark's file given as ``data``; the file's name labels the split.
        data: A local file or folder instead of a benchmark's hub dataset. A file contains the evaluation set for
            ``"test"`` and the training pool for ``"train"`` and ``"dev"``. A folder contains files named by split.
        grading: ``"strict"`` or ``"paper"``; see `mas_gym.tasks.grading.answers`.
        limit: Number of problems to use; a benchmark's test split is first shuffled with seed 42, as in the paper.
        columns: For your own files: the columns of question and answer, and optionally of id, split, kind and
            choices, as in ``{"question": "prompt", "answer": "gold"}`` or ``"question=prompt,answer=gold"``.
        kind: For your own files: the kind of the answers; inferred from them by default. One of ``"number"``,
            ``"expression"``, ``"formula"``, ``"choice"``, ``"text"``, ``"regex"``, ``"code"``, ``"judge"``.
        answers: For your own files of choice problems: whether answers are the ``"index"`` (from 0), ``"label"`` (such
            as A or 1) or ``"text"`` of an option; inferred from all rows by default (`mas_gym.tasks.choice_answers`).
        grader: ``"FILE.py:NAME"`` or a function ``(problem, text) -> bool | Grade`` (`mas_gym.tasks.grading.graders`).
        judge: The policy that grades problems of kind ``"judge"``, or an argument of `mas_gym.policies.load_policy`.
        allow_code: Whether to run code from messages, for problems of kind ``"code"``.
        sandbox: Isolation of that code: ``"bubblewrap"``, or ``"none"`` (see `mas_gym.tasks.grading.sandbox`).
        decimal: The sign before the fraction of a number, ``"."`` or ``","``; needed for answers such as ``1,234`` and
            ``1.234``, which can be read in two ways.
        **options: Options of procedural tasks, such as ``difficulty`` and ``seed``.

    Returns:
        An immutable sequence of problems that can also grade answers; its slices are tasks too.

    Raises:
        UnknownNameError: The task does not exist.
        ConfigError: An argument is out of range, an option is unknown, or code is not allowed or cannot be isolated.
        DataNotFoundError: The data is neither local nor on the hub.
        DataError: The data is malformed; the message lists up to 20 bad rows.
        MissingDependencyError: A package that this task or source needs is not installed.
    """
    name = os.fspath(name)
    if split is not None:
        choice("split", split, SPLITS)
    elif name not in BENCHMARKS or data is None or not Path(data).expanduser().is_file():
        raise ConfigError(f"split: expected one of {', '.join(SPLITS)}; None needs a benchmark and a file as data")
    given = {"columns": columns, "kind": kind, "answers": answers}
    own = {option: value for option, value in given.items() if value is not None}
    check_task_options(name, {"grading": grading, "limit": limit, **own, **options})
    spec = TASKS.parse(name)
    generated = spec.name in PROCEDURAL and not spec.file
    if data is not None and name not in BENCHMARKS:
        has = "generates its problems" if generated else "provides its problems"
        raise ConfigError(f"task {name!r} {has}; expected no data, got {shown(data)}")
    base = make_base(grading, judge, allow_code, sandbox, decimal)
    if name in BENCHMARKS:
        task: Task = _benchmark(name, split, data, base.mode, limit)
    elif is_data_source(name) and not spec.file:
        task = _user_task(name, str(split), Columns.read(columns), kind, answers, base)
    else:
        task = _made(spec, str(split), {**own, **options, **({"grading": grading} if generated else {})})
    # A task with built-in grading raises an error if it gets a grader.
    if grader is not None or task.grader is not None:
        task = task.graded_by(make_grader(grader, base))
    return task if limit is None else task[:limit]


def make_base(
    grading: str, judge: Any = None, allow_code: bool = False, sandbox: str = "bubblewrap", decimal: str = "."
) -> KindGrader:
    """Return the grader that grades by kind; see `load_task`.

    Raises:
        ConfigError: The grading mode or the decimal sign does not exist, or code cannot be isolated.
    """
    decides: Grader | None = None
    if judge is not None:
        from mas_gym.tasks.grading.judge import Judge

        decides = judge if isinstance(judge, Grader) else Judge(judge)
    if sandbox != "bubblewrap" and not allow_code:
        raise ConfigError(f"sandbox={shown(sandbox)}: expected allow_code=True or --allow-code as well")
    limits = Limits(sandbox=check_sandbox(sandbox)) if allow_code else None
    return KindGrader(
        check_mode(grading), limits, decides, cast(Decimal, choice("decimal", decimal, get_args(Decimal)))
    )


def _benchmark(
    name: str, split: str | None, data: str | Path | None, mode: GradingMode, limit: int | None
) -> ProblemTask:
    if name == "math" and mode == "strict":
        require_math()
    place = None if data is None else Path(data).expanduser().resolve()
    state = None if place is None else stamp(place)
    problems = _load_rows(name, split, place, limit is not None and split == "test", state)
    label = _label(split, place)
    return ProblemTask(name, label if label in SPLITS else "", problems, mas=BENCHMARKS[name].mas)


def _label(split: str | None, place: Path | None) -> str:
    """Return the name of a split; for a whole file, the split that its name begins with, or else its name."""
    if split is not None or place is None:
        return split or ""
    return SPLIT_WORDS.get(place.stem.partition("-")[0].casefold(), place.stem)


def _user_task(
    source: str, split: str, columns: Columns, kind: str | None, answers: str | None, base: KindGrader
) -> ProblemTask:
    own = load_problems(source, split, columns, kind, answers)
    logger.info("%s", own.remark)
    if "expression" in own.kinds:
        require_math()
    refused = next(filter(None, map(base.refusal, own.kinds)), None)
    if refused is not None:
        raise ConfigError(f"{source}: {refused}; or pass another kind: {', '.join(KINDS)}")
    name = Path(source).stem if Path(source).exists() else source
    mas = mas_of_kind(next(iter(own.kinds)))
    return ProblemTask(name, split, own.problems, mas=mas)


def mas_of_kind(kind: str) -> str:
    """Return the MAS that commands use by default for answers of a kind."""
    return "debate" if kind == "choice" else "rpsv"


def default_mas(task: str | Task) -> str:
    """Return the default MAS of a task object or task name; ``"rpsv"`` if the task has none."""
    if not isinstance(task, str):
        return task.mas
    if task in BENCHMARKS:
        return BENCHMARKS[task].mas
    spec = TASKS.parse(task)
    return str(TASKS.find(spec).mas) if spec.name in PROCEDURAL and not spec.file else "rpsv"


def check_task_options(name: str, options: Mapping[str, Any]) -> None:
    """Check a task's name and options without touching its data.

    Args:
        name: The name, as for `load_task`.
        options: All other arguments of `load_task` except ``split`` and ``data``.

    Raises:
        UnknownNameError: The task does not exist.
        ConfigError: The task has no such option, or its value is out of range.
    """
    known = {*GRADING_OPTIONS}
    spec = TASKS.parse(name)
    if spec.name in PROCEDURAL and not spec.file:
        settings = set(signature(TASKS.find(spec)).parameters) - {"split", "grading"}
        known |= settings
        if wrong := sorted(TASKS.arguments(spec)[1].keys() - settings):
            raise ConfigError(
                f"task {name!r}: expected settings among {', '.join(sorted(settings))}, got {', '.join(wrong)}"
            )
    elif is_data_source(name) and not spec.file:
        known |= {"columns", "kind", "answers"}
        Columns.read(options.get("columns"))
    elif name not in BENCHMARKS:
        if not spec.file and (spec.name not in TASKS or spec.name in BENCHMARKS):
            suffixes = ", ".join(DATA_SUFFIXES)
            raise TASKS.unknown(
                name, f"for your own problems, name a file ({suffixes}) or a dataset OWNER/NAME on the hub"
            )
        # The task's function checks its options.
        return
    check_mode(options.get("grading", "strict"))
    if options.get("limit") is not None:
        whole_number("limit", options["limit"], at_least=1)
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"task {name!r}: expected options among {', '.join(sorted(known))}, got {', '.join(unknown)}")


def task_makers() -> dict[str, Callable[..., Any]]:
    """Return the classes and functions that build tasks, including registered ones, except the published benchmarks."""
    return {name: TASKS.find(Spec(name)) for name in TASKS.names() if name not in BENCHMARKS}


def _made(spec: Spec, split: str, options: Mapping[str, object]) -> Task:
    args, kwargs = TASKS.arguments(spec)
    task = TASKS.call(spec, TASKS.find(spec), *args, **{"split": split, **kwargs, **options})
    try:
        return as_task(task)
    except ConfigError as error:
        raise ConfigError(f"task {str(spec)!r}: {error}") from None


TASKS = Registry(
    "task",
    "mas_gym.tasks",
    {
        **{name: partial(load_task, name) for name in BENCHMARKS},
        "arithmetic": "mas_gym.tasks.procedural.arithmetic:Arithmetic",
        "game24": "mas_gym.tasks.procedural.game24:Game24",
        "ordering": "mas_gym.tasks.procedural.ordering:Ordering",
    },
)
"""Names of tasks; an entry point is a function ``(split, **options) -> Task``."""


@lru_cache(maxsize=16)
def _load_rows(name: str, split: str | None, place: Path | None, sample: bool, state: object) -> tuple[Problem, ...]:
    """Load the problems of one split, or all of a file; cached until ``state``, the data's stamp, changes."""
    label = _label(split, place)
    rows, order = _split_rows(name, split, place)
    if sample:
        order = [order[row] for row in shuffled(len(order))]
    wanted = sorted(order)
    read = read_rows(
        f"problems of task {name!r}",
        [rows[number] for number in wanted],
        lambda number, fields: CONVERTERS[name](fields, f"{name}/{label}/{wanted[number]}"),
    )
    problems = dict(zip(wanted, read, strict=True))
    return tuple(problems[number] for number in order)


def _split_rows(name: str, split: str | None, place: Path | None) -> tuple[list[RawRow], list[int]]:
    """Return the raw rows of the partition that contains a split, and the split's row numbers in order."""
    if split is None and place is not None:
        rows = read_file(place, name)
        return rows, list(range(len(rows)))
    benchmark = BENCHMARKS[name]
    wanted = benchmark.evaluation if split == "test" else benchmark.pool
    parts = _partitions(name, benchmark, wanted, place)
    if benchmark.nested and split != "test" and (place is None or place.is_dir()):
        tested = _partitions(name, benchmark, benchmark.evaluation, place).get(benchmark.evaluation, [])
        questions = {_question(row) for row in tested} - {None}
        parts[wanted] = [row for row in parts[wanted] if _question(row) not in questions]
    if _sizes(parts) in benchmark.whole:
        rows = [row for part in parts.values() for row in part]
        order = shuffled(len(rows))
        test, pool = order[: benchmark.held_out], order[benchmark.held_out :]
    else:
        rows = parts.get(wanted, [])
        test = pool = list(range(len(rows)))
    if not rows:
        where = benchmark.hub.path if place is None else place
        raise DataError(f"{where}: expected problems of task {name!r}, split {split!r}, got none")
    if split == "test":
        return rows, test
    pool = [pool[place] for place in shuffled(len(pool))]
    held_out = len(pool) // 20
    return rows, pool[:held_out] if split == "dev" else pool[held_out:]


def shuffled(size: int) -> list[int]:
    """Return the numbers below ``size`` in the fixed shuffled order of the paper's splits."""
    order: list[int] = np.random.default_rng(42).permutation(size).tolist()
    return order


def _partitions(name: str, benchmark: Benchmark, wanted: str, place: Path | None) -> dict[str, list[RawRow]]:
    """Read the wanted partition, or all partitions if the dataset is to be split here."""
    if place is None:
        part = "train" if benchmark.whole else wanted
        try:
            return read_hub(benchmark.hub, [part])
        except (DataNotFoundError, MissingDependencyError) as error:
            raise type(error)(three_ways(name, str(error))) from error
    if place.is_file():
        rows = read_file(place, name)
        # A file of the whole dataset is not one of its splits.
        return {"train" if {"train": len(rows)} in benchmark.whole else wanted: rows}
    if not place.is_dir():
        raise DataNotFoundError(three_ways(name, f"{place} does not exist"))
    names = ("train", "test") if benchmark.whole else (wanted,)
    parts = {part: rows for part in names if (rows := read_partition(place, part, name))}
    if wanted not in parts and _sizes(parts) not in benchmark.whole:
        why = f"the folder {place} has no files named {wanted!r}; it contains {listing(place)}"
        raise DataNotFoundError(three_ways(name, why))
    return parts


def _question(row: RawRow) -> str | None:
    return str(row.value.get("Question")).strip() if isinstance(row.value, Mapping) else None


def _sizes(parts: Mapping[str, list[RawRow]]) -> dict[str, int]:
    return {part: len(rows) for part, rows in parts.items()}
