"""Cost of reading a large run store: ``python -m benchmarks.store_reading FOLDER [SEARCHES] [NAME ...]``.

The store has four runs of MCTS(10,3), two critics with two seeds each, and 20,000 searches by default. They are copies
of a few real searches with other problem ids, created row by row in SQL. The store is kept in FOLDER and used again.
Each command runs in a separate process. Its CPU seconds include "start", the imports of the command line.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from time import monotonic, sleep
from urllib.error import URLError
from urllib.request import urlopen

import search
from mas_gym.internal.database import transaction
from mas_gym.policies import ScriptedPolicy
from mas_gym.tasks import Problem
from search.store.file import CONTENT, FORMAT, checksum, content_of, seal
from search.store.rows import search_id

REAL = 25
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
    """Fill up a run with copies of its searches, row by row."""
    real = connection.execute("SELECT id FROM searches WHERE run = ?", (run,)).fetchall()
    for start in range(len(real), wanted, BATCH):
        with transaction(connection):
            for number in range(start, min(start + BATCH, wanted)):
                name, [old] = f"p{number}", real[number % len(real)]
                new = search_id(run, name)
                for table in CONTENT:
                    copy_rows(connection, table, "search", old, {"search": new})
                content = checksum(content_of(connection, [new])[0])
                copy_rows(connection, "searches", "id", old, {"id": new, "problem": name, "content": content})
                seal(connection, "searches", "id", new)
    with transaction(connection):
        connection.execute("UPDATE runs SET searches = ? WHERE run = ?", (max(wanted, len(real)), run))
        seal(connection, "runs", "run", run)


def copy_rows(connection: sqlite3.Connection, table: str, column: str, key: int, changes: dict[str, object]) -> None:
    """Insert the rows of a table with ``column = key`` again, with other values in some columns."""
    names = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
    values = ", ".join(f":{name}" if name in changes else name for name in names)
    statement = f"INSERT INTO {table} SELECT {values} FROM {table} WHERE {column} = :key"
    connection.execute(statement, {**changes, "key": key})


def compare(path: Path) -> list[str]:
    return [sys.executable, "-c", f"import search; search.open_store({str(path)!r}).compare()"]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mas_gym.cli", *map(str, arguments)]


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "start": lambda path: command("status", "--help"),
    "report": lambda path: command("report", path, "--out", path.with_suffix(".html")),
    "compare": compare,
    "status": lambda path: command("status", path),
    "view": lambda path: command("view", path, "--port", PORT, "--no-open"),
}


def open_index() -> None:
    """Request the index until it lists every run; it reloads itself after each second of reading."""
    end = monotonic() + 60
    while monotonic() < end:
        try:
            with urlopen(f"http://127.0.0.1:{PORT}/") as reply:
                if b'http-equiv="refresh"' not in reply.read():
                    return
        except URLError:
            sleep(0.1)


def measure(name: str, path: Path) -> None:
    with subprocess.Popen(COMMANDS[name](path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        if name == "view":
            open_index()
            process.terminate()
        _, code, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode and name != "view":
        raise SystemExit(f"{name} failed")
    print(f"{name:9} {used.ru_utime + used.ru_stime:6.2f} s {used.ru_maxrss / 1024:6.0f} MiB", flush=True)


def main(folder: str, searches: int = 20_000, *names: str) -> None:
    path = make(Path(folder), searches)
    print(f"{searches:,} searches, {path.stat().st_size / 2**20:.0f} MiB", flush=True)
    for name in names or COMMANDS:
        measure(name, path)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]), *sys.argv[3:])
