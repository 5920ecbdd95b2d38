"""`load_task` loads every task by its name.

The four benchmarks come from a local file or folder or from the Hugging Face
hub, with the paper's splits (App. "Benchmarks and Dataset Splits"); the
procedural tasks need no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, unknown_name
from mas_gym.tasks.base import SPLITS, Problem, Task
from mas_gym.tasks.formats import CONVERTERS, KINDS, BadRow, shown
from mas_gym.tasks.grading import check_mode
from mas_gym.tasks.problem_task import ProblemTask, Table
from mas_gym.tasks.sources import (
    Hub,
    Row,
    is_saved,
    listing,
    partition_files,
    read_file,
    read_hub,
    read_saved,
    three_ways,
)
from mas_gym.tasks.splits import hold_out_dev, hold_out_test, shuffled

_MOST_FAULTS = 20


class Benchmark(NamedTuple):
    """How the partitions of a released data set map to splits.

    Attributes:
        hub: Its location on the hub.
        pool: Partition that is the training pool.
        evaluation: Partition that is the test split.
        held_out: Rows held out for the test split if the whole data set is one partition; 0 if it never is.
        whole: Sizes by partition from which a complete data set, to be split here, is recognised.
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
            train is the rest. No run's seed changes this.
        data: A local file or folder instead of the hub. A file is the split as it stands: the evaluation set for
            ``"test"``, the training pool for ``"train"`` and ``"dev"``. A folder holds partitions by name. MATH is
            divided into 10,500 and 2,000 problems where all 12,500 are there.
        grading: ``"strict"`` or ``"paper"``; see `mas_gym.tasks.grading`.
        limit: Use only the first ``limit`` problems; of the test split, the first after a shuffle with seed 42, as
            the paper does.
        **options: Of procedural tasks only, such as ``difficulty`` and ``seed``.

    Returns:
        An immutable sequence of problems that can grade; its slices are tasks too.

    Raises:
        UnknownNameError: There is no such task.
        ConfigError: An argument is out of its range, or an option is not the task's.
        DataNotFoundError: The data is neither at ``data`` nor on the hub.
        DataError: The data is malformed; the message names every bad row.
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
        options: Everything else but ``split`` and ``data``.

    Raises:
        UnknownNameError: There is no such task.
        ConfigError: An option is not the task's, or out of its range.
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
    """Load the problems of one split, once per process and state of the data on disk.

    Args:
        name: Name of a benchmark.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        place: Absolute path of a file or folder; None for the hub.
        sample: Whether to shuffle the test split.
    """
    return _load_table(name, split, place, sample, None if place is None else _stamp(Path(place)))


def _stamp(place: Path) -> tuple[tuple[str, int, int], ...]:
    """Return values that differ once a file, or a file of a folder, has changed."""
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


__all__ = ["BENCHMARKS", "TASK_NAMES", "Benchmark", "Problem", "load_table", "load_task"]
