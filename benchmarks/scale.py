"""A large run on Ray: ``python -m benchmarks.scale FOLDER [--searches N] [--copies N ...]``.

A scripted policy replies immediately, so the figures are the costs of the scheduler, Ray and the store. Two parts:

1. A run of single pass on the four agents of ``rpsv`` writes FOLDER/run.db through `run_ray`, with one writer. The
   memory of each process is read during the run. The same command resumes the run after a kill.
2. The commands that read a store are measured on the run's store, and on smaller stores of the sizes given by
   ``--copies``. These have copies of a few searches under other problem ids, which share their texts.
The page states what is measured and what is computed from the slope. It goes to ``benchmarks/pages/search/scale.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple, overload

import search
from benchmarks.paper.page import write_whole
from benchmarks.store_reading import BATCH, Cost, copy, measure, memory
from mas_gym.policies import ScriptedPolicy
from mas_gym.tasks import Problem
from search.engine.ray_actors import Fleet, run_ray
from search.store.table_schema import FORMAT

PAGE = Path(__file__).with_name("pages") / "search" / "scale.md"
PLANNER, MAS = "single", "rpsv"
SAMPLES = 40
"""How often memory is read in a run."""
READS = ("status", "compare", "view", "report")
MILLION = 1_000_000


class Questions(Sequence[Problem]):
    """Problems that exist only while they are searched."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Problem: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Problem]: ...
    def __getitem__(self, place: int | slice) -> Problem | Sequence[Problem]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(self._count))]
        if not 0 <= place < self._count:
            raise IndexError(place)
        return Problem(f"p{place}", f"What is {place} modulo 5?", str(place % 5))


class Scripted(ScriptedPolicy):
    """Replies drawn from the seed, each of four agents in a sentence or two."""

    def identity(self) -> str:
        return "scripted"


def make_policy(pids: Path) -> ScriptedPolicy:
    """Load the policy in an actor, which leaves its process id in a folder."""
    (pids / str(os.getpid())).touch()
    return scripted()


def scripted() -> ScriptedPolicy:
    words = ("we add the terms", "and check each step", "of the plan", "before the answer", "is given")

    def script(request: object, seed: int) -> str:
        said = " ".join(random.Random(seed).choices(words, k=6))
        return f"{said} {seed % 977}. Final Answer: {seed % 5}"

    return Scripted(script)


class Sample(NamedTuple):
    """The state of a run: searches written, seconds, CPU seconds of the driver, and memory in MiB."""

    searches: int
    seconds: float
    cpu: float
    driver: float
    actors: list[float]


def write(folder: Path, searches: int, actors: int, minutes: float) -> list[Sample]:
    """Run the searches that the store lacks until the time is up, and return the measurements."""
    log = folder / "samples.jsonl"
    found = [Sample(*json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    earlier = found[-1] if found else Sample(0, 0.0, 0.0, 0.0, [])
    if earlier.searches >= searches or earlier.seconds >= 60 * minutes:
        return found
    pids = folder / "actors"
    pids.mkdir(parents=True, exist_ok=True)
    for file in pids.iterdir():
        file.unlink()
    run = run_ray(
        PLANNER,
        Questions(searches),
        mas=MAS,
        make_policy=partial(make_policy, pids),
        store=folder / "run.db",
        fleet=Fleet(actors=actors),
    )

    def sample(done: int) -> Sample:
        held = [memory(int(file.name), "VmRSS") for file in sorted(pids.iterdir())]
        seconds, cpu = earlier.seconds + perf_counter() - begun, earlier.cpu + process_time() - spent
        return Sample(done, seconds, cpu, memory(os.getpid(), "VmRSS"), held)

    begun = spent = 0.0
    for done, _ in enumerate(run, 1):
        if not begun:
            if not run.usage.agent_calls:
                continue
            begun, spent = perf_counter(), process_time()
        late = earlier.seconds + perf_counter() - begun >= 60 * minutes
        if late or done == searches or done % max(1, searches // SAMPLES) == 0:
            found.append(sample(done))
            with log.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(found[-1]) + "\n")
            print(found[-1], flush=True)
        if late:
            break
    run.close()
    return found


class Growth(NamedTuple):
    """A store: its size, CPU seconds per search to add the last tenth, if measured, and the cost of reading."""

    searches: int
    insert: float | None
    reads: dict[str, Cost]


def grow(folder: Path, sizes: Sequence[int]) -> list[Growth]:
    """Measure the reading of stores of copies with these sizes and of the run's store, where it is not measured yet."""
    saved, copies = folder / "growths.jsonl", folder / "copies.db"
    found: dict[int, Growth] = {}
    if saved.exists():
        for size, insert, reads in map(json.loads, saved.read_text(encoding="utf-8").splitlines()):
            found[size] = Growth(size, insert, {name: Cost(*cost) for name, cost in reads.items()})

    def note(size: int, insert: float | None, path: Path) -> None:
        found[size] = Growth(size, insert, {name: measure(name, path) for name in READS})
        with saved.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(found[size]) + "\n")
        print(found[size], flush=True)

    for size in sorted(set(sizes) - set(found)):
        if not copies.exists():
            list(search.run(PLANNER, Questions(BATCH), mas=MAS, policy=scripted(), store=copies))
        with closing(FORMAT.connect(copies, create=True)) as connection:
            [run] = connection.execute("SELECT run FROM runs").fetchone()
            copy(connection, run, size - size // 10)
            [held] = connection.execute("SELECT count(*) FROM searches").fetchone()
            start = process_time()
            copy(connection, run, size)
            each = (process_time() - start) / (size - held)
        note(size, each, copies)
    if (size := stored(folder)) not in found:
        note(size, None, folder / "run.db")
    return [found[size] for size in sorted(found)]


def stored(folder: Path) -> int:
    """Return the number of searches in the run's store."""
    with search.open_store(folder / "run.db") as store:
        return store.find().searches


def page(samples: Sequence[Sample], size: float, growths: Sequence[Growth]) -> str:
    """Return the page; ``size`` is the bytes per search of the run's store."""
    told = ", ".join(f"{name} {1e6 * each:,.1f}" for name, each, _ in slopes(growths))
    parts = [
        "# Large runs",
        "This page reports the memory and CPU time of a large run and of the commands that read its store, measured by "
        "`python -m benchmarks.scale FOLDER`. The planner is a single pass of the four agents of `rpsv` with a "
        "scripted policy, with five nodes per search. Costs are CPU seconds, because other programs ran on the two "
        "cores.",
        "## Writing: Ray actors and one writer",
        *_writing(samples, size),
        "## Reading",
        "Each cell contains CPU seconds, including the start of the process, and memory in MiB. The last store is that "
        'of the run; the others contain copies of a few searches. "insert" is the time to add a search to a store of '
        "this size.",
        _table(["searches", "insert, us", *READS], [_line(one) for one in growths]),
        f"Additional microseconds per search, from the smallest to the largest store: {told}.",
        "## Growth and limits of one file",
        _limits(samples, size, growths),
    ]
    return "\n\n".join(parts) + "\n"


def _limits(samples: Sequence[Sample], size: float, growths: Sequence[Growth]) -> str:
    half, last = samples[len(samples) // 2], samples[-1]
    few, most = growths[0], growths[-1]
    held = 2**20 * (most.reads["compare"].memory - few.reads["compare"].memory) / (most.searches - few.searches)
    driver = 2**20 * (last.driver - half.driver) / (last.searches - half.searches)
    rate = (last.searches - half.searches) / (last.cpu - half.cpu)
    lines = [
        f"Memory of an actor: {min(half.actors + last.actors):,.0f} to {max(half.actors + last.actors):,.0f} MiB in "
        "the second half of the run.",
        f"Memory of the driver: {driver:,.0f} bytes per search, for the ids of the finished problems.",
        f"The file: {size:,.0f} bytes per search, {size * MILLION / 2**30:,.1f} GiB per million. SQLite allows 16 TiB.",
        f"Reading: the CPU time of each command grows linearly. The memory of `status` is constant. `compare`, "
        f"`report` and the index of `view` need one object per search, {held:,.0f} bytes.",
        f"For short searches, the limit is the writer, with {rate:,.0f} searches per second in the second half "
        "of the run. Searches with a language model take seconds, so one writer is sufficient for hundreds of engines.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _writing(samples: Sequence[Sample], size: float) -> Iterator[str]:
    first, half, last = samples[0], samples[len(samples) // 2], samples[-1]
    each = (last.cpu - first.cpu) / (last.searches - first.searches)
    late = (last.cpu - half.cpu) / (last.searches - half.searches)
    yield (
        f"{last.searches:,} searches on {len(last.actors)} actors took {last.seconds:,.0f} s; "
        f"the store has {size:,.0f} bytes per search. The driver, which sends questions and writes to the store, takes "
        f"{1e6 * each:,.0f} microseconds per search ({1e6 * late:,.0f} in the second half), so it can process "
        f"{1 / each:,.0f} searches per second."
    )
    lines = [
        [f"{one.searches:,}", f"{one.driver:,.0f}", ", ".join(f"{held:,.0f}" for held in one.actors)]
        for one in samples[:: max(1, len(samples) // 8)]
    ]
    yield _table(["searches", "driver, MiB", "actors, MiB"], lines)
    pairs = zip([half.driver, *half.actors], [last.driver, *last.actors], strict=True)
    driver, *actors = (f"{2**20 * (new - old) / (last.searches - half.searches):,.0f}" for old, new in pairs)
    grown = " and ".join(f"{one} byte{'s' * (one != '1')}" for one in actors)
    yield (
        f"In the second half, the driver's memory grows by {driver} bytes per search, and that of the {len(actors)} "
        f"actors by {grown}."
    )


def slopes(growths: Sequence[Growth]) -> Iterator[tuple[str, float, float]]:
    """Yield for each command its CPU seconds per search, from the smallest to the largest store, and its start."""
    first, last = growths[0], growths[-1]
    for name in READS:
        each = (last.reads[name].seconds - first.reads[name].seconds) / (last.searches - first.searches)
        yield name, each, first.reads[name].seconds - each * first.searches


def _line(one: Growth) -> list[str]:
    reads = [f"{one.reads[name].seconds:,.2f} s, {one.reads[name].memory:,.0f}" for name in READS]
    return [f"{one.searches:,}", "" if one.insert is None else f"{1e6 * one.insert:,.0f}", *reads]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---:"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--searches", type=int, default=MILLION, help="searches of the run [1000000]")
    parser.add_argument("--copies", type=int, nargs="*", default=[10_000, 100_000], help="sizes of smaller stores")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time of the run, restarts included [no limit]")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    samples = write(args.folder, args.searches, args.actors, args.minutes)
    growths = grow(args.folder, args.copies)
    size = (args.folder / "run.db").stat().st_size / growths[-1].searches
    write_whole(args.page, page(samples, size, growths))
    print(f"wrote {args.page}")


if __name__ == "__main__":
    main()
