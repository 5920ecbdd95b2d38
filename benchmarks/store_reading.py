"""What reading a large run store costs: ``python -m benchmarks.store_reading FOLDER [SEARCHES] [NAME ...]``.

The store has four runs of MCTS(10,3), two critics with two seeds each, and 20,000 searches by default, copies of a few
real ones under other problem ids. It stays in FOLDER and is used again. Each command runs in a separate process, which
prints the CPU seconds after its imports and its peak memory; ``searches`` times every tree read back, for comparison.
"""

from __future__ import annotations

import contextlib
import io
import resource
import subprocess
import sys
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from time import process_time

import search
from mas_gym.cli.listings import status
from mas_gym.cli.reports import report
from mas_gym.cli.view import Pages
from mas_gym.internal.database import transaction
from mas_gym.policies import ScriptedPolicy
from mas_gym.tasks import Problem
from search.store.file import FORMAT, Held, seal_run
from search.store.rows import Writer

REAL = 25
BATCH = 500


class DrawnCritic(search.Critic):
    """Values drawn from a hash of the transcript."""

    free = False

    def __init__(self, name: str) -> None:
        self.name = name

    def identity(self) -> str:
        return self.name

    def score(self, contexts: object) -> list[float]:
        drawn = (blake2b(self.name.encode() + context.state.digest, digest_size=2).digest() for context in contexts)
        return [int.from_bytes(two, "big") / 2**16 for two in drawn]


def make(folder: Path, searches: int) -> Path:
    """Return a store of so many searches, made once."""
    path = folder / f"searches-{searches}.db"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    for file in folder.glob(f"{part.name}*"):
        file.unlink()
    policy = ScriptedPolicy(lambda request, seed: f"It may be {seed % 977}. Final Answer: {seed % 5}")
    problems = [Problem(f"p{n}", f"What is {n} modulo 5?", str(n % 5)) for n in range(REAL)]
    for name in ("first", "second"):
        for seed in (1, 2):
            critic = DrawnCritic(name)
            run = search.run("mcts:10,3", problems, mas="rpsv", policy=policy, critic=critic, seed=seed, store=part)
            list(run)
    connection = FORMAT.connect(part, create=True)
    with search.open_store(part) as store:
        for info in store.runs():
            copy(connection, info.run, list(store.searches(info.run)), searches // 4)
    connection.close()
    return part.rename(path)


def copy(connection, run: str, real: list[tuple[Problem, search.Plan]], wanted: int) -> None:
    """Fill up a run with copies of its searches."""
    writer, held = Writer(connection), Held.of(connection, run)
    for start in range(len(real), wanted, BATCH):
        with transaction(connection):
            for number in range(start, min(start + BATCH, wanted)):
                problem, plan = real[number % len(real)]
                name = f"p{number}"
                mark = writer.search(run, replace(problem, id=name), replace(plan, problem_id=name), {})
                held = held.changed(mark, 0, 1)
            seal_run(connection, run, held)


def run_report(path: Path) -> None:
    report(path, path.with_suffix(".html"))


def run_compare(path: Path) -> None:
    with search.open_store(path) as store:
        store.compare()


def run_view(path: Path) -> None:
    pages = Pages(path)
    # The page lists what could be read in a second, and reloads itself.
    while 'http-equiv="refresh"' in pages.page("/", {}):
        pass


def run_searches(path: Path) -> None:
    with search.open_store(path) as store:
        for info in store.runs():
            for _ in store.plans(info.run):
                pass


COMMANDS = {"report": run_report, "compare": run_compare, "status": status, "view": run_view, "searches": run_searches}


def measure(name: str, path: Path) -> None:
    start = process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        COMMANDS[name](path)
    spent, memory = process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name:9} {spent:6.2f} s {memory:6.0f} MiB", flush=True)


def main(folder: str, searches: int = 20_000, *names: str) -> None:
    path = make(Path(folder), searches)
    print(f"{searches:,} searches, {path.stat().st_size / 2**20:.0f} MiB", flush=True)
    for name in names or ("report", "compare", "status", "view"):
        subprocess.run([sys.executable, "-m", "benchmarks.store_reading", "--measure", name, path], check=True)


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measure(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1], *map(int, sys.argv[2:3]), *sys.argv[3:])
