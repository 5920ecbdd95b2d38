"""Cost of reading a large run store: ``python -m benchmarks.store_reading FOLDER [SEARCHES ...]``.

A store has four runs of MCTS(10,3), two critics with two seeds each: copies of a few real searches under other
problem ids. It stays in FOLDER and is used again. By default there are two stores, of 100 and
20,000 searches. Each command runs in a separate process, three times for up to `FEW` searches; the least CPU time is
printed. On the store of 100 searches this is almost only the start of the process and its imports, so the cost per
search is the difference from the smallest store.
"""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple
from urllib.request import HTTPCookieProcessor, build_opener

import search
from mas_gym.internal.database import transaction
from mas_gym.policies import ScriptedPolicy
from mas_gym.tasks import Problem
from search.store.search_rows import seal_run, search_id
from search.store.table_schema import FORMAT, ROW, checksum

REAL = 25
FEW = 20_000
BATCH = 500
PORT = 8799


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
    with closing(FORMAT.connect(part, create=True)) as connection:
        for (run,) in connection.execute("SELECT run FROM runs").fetchall():
            copy(connection, run, searches // 4)
    return part.rename(path)


def copy(connection: sqlite3.Connection, run: str, wanted: int) -> None:
    """Fill up a run with copies of its searches."""
    query = f"SELECT {', '.join(ROW)}, document FROM searches JOIN documents ON search = id WHERE run = ? LIMIT ?"
    rows = [(dict(zip(ROW, row, strict=False)), row[-1]) for row in connection.execute(query, (run, BATCH))]
    [held] = connection.execute("SELECT count(*) FROM searches WHERE run = ?", (run,)).fetchone()
    for start in range(held, wanted, BATCH):
        with transaction(connection):
            for number in range(start, min(start + BATCH, wanted)):
                row, document = rows[number % len(rows)]
                row = row | {"id": search_id(run, f"p{number}"), "problem": f"p{number}"}
                row["checksum"] = checksum(*(row[name] for name in ROW[:-1]))
                connection.execute(f"INSERT INTO searches VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
                connection.execute("INSERT INTO documents VALUES (?, ?)", (row["id"], document))
    with transaction(connection):
        connection.execute("UPDATE runs SET searches = ? WHERE run = ?", (max(wanted, held), run))
        seal_run(connection, run)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mas_gym.cli", *map(str, arguments)]


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "status": lambda path: command("status", path),
    "compare": lambda path: [sys.executable, "-c", f"import search; search.open_store({str(path)!r}).compare()"],
    "view": lambda path: command("view", path, "--port", PORT, "--no-open"),
    "report": lambda path: command("report", path, "--out", path.with_suffix(".html")),
}


class Cost(NamedTuple):
    """The cost of a command: CPU seconds of the process, and its peak memory in MiB."""

    seconds: float
    memory: float


def open_index(printed: Iterable[str]) -> None:
    """Request the index until it lists every run; it reloads itself after each second of reading.

    Args:
        printed: The output of ``mas-gym view``, which contains the address of the index with its token.
    """
    address = next(found[0] for line in printed if (found := re.search(r"http://\S+", line)))
    browser, end = build_opener(HTTPCookieProcessor()), monotonic() + 600
    while monotonic() < end:
        with browser.open(address) as reply:
            if b'http-equiv="refresh"' not in reply.read():
                return


def memory(pid: int, field: str) -> float:
    """Return a field of a process's status in MiB, such as VmRSS; 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(field)), 0.0)


def measure(name: str, path: Path) -> Cost:
    """Run a command on a store in a separate process."""
    # Installed packages are compiled.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    quiet = subprocess.DEVNULL
    notes = subprocess.PIPE if name == "view" else quiet
    with subprocess.Popen(COMMANDS[name](path), env=environment, stdout=quiet, stderr=notes, text=True) as process:
        if process.stderr is not None:
            open_index(process.stderr)
        most = 0.0
        # Not ru_maxrss, which starts from the memory of this process.
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            most = max(most, memory(process.pid, "VmHWM"))
            if name == "view":
                process.terminate()
            sleep(0.02)
        _, code, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode and name != "view":
        raise SystemExit(f"{name} failed")
    return Cost(used.ru_utime + used.ru_stime, most)


def main(folder: str, *sizes: int) -> None:
    paths = {searches: make(Path(folder), searches) for searches in sizes or (100, 20_000)}
    least: dict[str, tuple[int, float]] = {}
    for searches, path in paths.items():
        print(f"{searches:,} searches, {path.stat().st_size / 2**20:.0f} MiB", flush=True)
        for name in COMMANDS:
            found = [measure(name, path) for _ in range(3 if searches <= FEW else 1)]
            cost = Cost(min(one.seconds for one in found), max(one.memory for one in found))
            first, start = least.setdefault(name, (searches, cost.seconds))
            each = f"{1e6 * (cost.seconds - start) / (searches - first):6.0f} us a search" if searches > first else ""
            print(f"{name:9} {cost.seconds:6.2f} s {cost.memory:6.0f} MiB {each}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
