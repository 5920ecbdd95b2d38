"""Store files with any region flipped or cut raise only typed errors and never return a changed value."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))
from search_worlds import HashCritic, by_problem, chain, change_document, comparable, execute, problems, talker

import search
from mas_gym.cli import app
from mas_gym.errors import DataError, StoreError
from mas_gym.tasks.base import Problem
from search import open_store

COUNT = 4


def asked(count: int = COUNT) -> list[Problem]:
    facts = {"options": ["one", "two"], "odd": "\ud800"}
    return [Problem(p.id, p.question, p.answer, p.kind, facts) for p in problems(count)]


def trees(path: Path) -> Any:
    return search.run(search.MCTS(4, 2), asked(), mas=chain(2), policy=talker(), training=True, store=path)


def votes(path: Path) -> Any:
    options: dict[str, Any] = {"mas": chain(2), "policy": talker(), "critic": HashCritic(), "store": path}
    return search.run(search.SelfConsistency(2), asked(2), run_name="votes", **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two runs on small pages, as many as possible of them in use."""
    path = tmp_path_factory.mktemp("whole") / "a.db"
    for grow in (trees, votes):
        list(grow(path))
    database = sqlite3.connect(path, isolation_level=None)
    for statement in ("journal_mode=DELETE", "page_size=512"):
        database.execute(f"PRAGMA {statement}")
    database.execute("VACUUM")
    # Free pages.
    database.execute("CREATE TABLE spare (x)")
    database.execute("INSERT INTO spare VALUES (zeroblob(1500))")
    database.execute("DROP TABLE spare")
    database.close()
    return path


class Told(logging.Handler):
    """Whether something was reported as damaged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def told() -> Iterator[Told]:
    handler, logger = Told(), logging.getLogger("search.store")
    logger.addHandler(handler)
    logger.propagate = False
    yield handler
    logger.removeHandler(handler)
    logger.propagate = True


def facts(store: search.Store) -> list[Any]:
    return [(i.run, i.name, dict(i.config), dict(i.facts), i.searches, i.failed, i.label, i.mas) for i in store.runs()]


def plans(store: search.Store) -> list[Any]:
    return [(i.run, comparable(p), p.usage) for i in store.runs() for p in store.plans(i.run)]


def answers(store: search.Store) -> list[Any]:
    return [
        (i.run, p.problem_id, p.answer, p.correct, p.usage, p.error, p.stopped)
        for i in store.runs()
        for p in store.plans(i.run, trees=False, failed=True)
    ]


def questions(store: search.Store) -> list[Any]:
    return [(i.run, p, dict(p.metadata)) for i in store.runs() for p in store.problems(i.run)]


def outcomes(store: search.Store) -> list[Any]:
    return [(i.run, outcome) for i in store.runs() for outcome in store.outcomes(i.run)]


def values(store: search.Store) -> list[Any]:
    return [(i.run, found) for i in store.runs() for _, found in store.documents(i.run)]


def exported(store: search.Store) -> list[Any]:
    rows: list[Any] = []
    for info in store.runs():
        target = store.path.with_name(f"{info.run}.parquet")
        from pyarrow import parquet

        store.export(target, info.run)
        rows += parquet.read_table(target).to_pylist()
        target.unlink()
    return rows


READERS: list[Callable[[search.Store], list[Any]]] = [facts, plans, answers, questions, outcomes, values]


def check(path: Path, expected: dict[str, list[Any]], told: Told, readers: Any) -> int:
    """Read everything; return how many readers noticed something."""
    noticed = 0
    try:
        store = open_store(path)
    except StoreError:
        return len(readers)
    with store:
        for reader in readers:
            before = len(told.said)
            try:
                found = reader(store)
            except (StoreError, DataError):
                noticed += 1
                continue
            for item in found:
                assert item in expected[reader.__name__], f"{reader.__name__}: a value has changed: {item}"
            if len(told.said) > before:
                noticed += 1
            else:
                assert len(found) == len(expected[reader.__name__]), f"{reader.__name__}: something is lost"
    return noticed


def remove(path: Path) -> None:
    for file in path.parent.glob(path.name + "*"):
        file.unlink()


def flips(data: bytes, every: int) -> Iterator[tuple[int, bytes]]:
    """Copies of a file with one byte changed: all of the header, and every so many-th after it."""
    places = [*range(0, 100, 2), *range(100, len(data), every)]
    for turn, place in enumerate(places):
        for bits in (0xFF, 1 << turn % 8):
            changed = bytearray(data)
            changed[place] ^= bits
            yield place, bytes(changed)


@pytest.mark.slow
def test_flipped_bytes_in_any_region_are_reported_or_harmless(whole: Path, tmp_path: Path, told: Told) -> None:
    with open_store(whole) as store:
        expected = {reader.__name__: reader(store) for reader in READERS}
    assert len(expected["plans"]) == COUNT + 2 and not told.said
    data, path, noticed, tried = whole.read_bytes(), tmp_path / "a.db", 0, 0
    for _, changed in flips(data, 151):
        path.write_bytes(changed)
        noticed += check(path, expected, told, READERS) > 0
        tried += 1
        remove(path)
    # Exactly half are noticed. Most of the others change header fields that SQLite ignores (62 of 100 flips),
    # free pages (26), comments in the table definitions (28) or padding; none changes a value.
    assert noticed > tried / 3


TABLES = ("runs", "searches", "documents")


@pytest.mark.parametrize("table", TABLES)
def test_values_of_the_wrong_type_are_reported(table: str, whole: Path, tmp_path: Path, told: Told) -> None:
    """SQLite stores any type in any column, and one damaged byte can change a value's type."""
    path = tmp_path / "a.db"
    with open_store(whole) as store:
        expected = {reader.__name__: reader(store) for reader in READERS}
    with sqlite3.connect(whole) as database:
        columns = database.execute(f"PRAGMA table_info({table})").fetchall()
    database.close()
    for _, column, declared, *_ in columns:
        if (table, column) in (("searches", "id"), ("documents", "search")):
            # An INTEGER PRIMARY KEY is the one column whose type SQLite enforces.
            continue
        wrong = {"BLOB": f"hex(coalesce({column}, 'a'))", "": "5"}.get(
            declared, f"coalesce(CAST({column} AS BLOB), X'61')"
        )
        shutil.copy(whole, path)
        with sqlite3.connect(path) as database:
            database.execute(f"UPDATE {table} SET {column} = {wrong}")
        database.close()
        assert check(path, expected, told, READERS), f"{table}.{column}"
        remove(path)


def test_store_truncated_at_any_length_is_reported(whole: Path, tmp_path: Path, told: Told) -> None:
    with open_store(whole) as store:
        expected = {reader.__name__: reader(store) for reader in READERS}
    data, path = whole.read_bytes(), tmp_path / "a.db"
    for length in [*range(0, 120, 17), *range(120, len(data), 701), *range(512, len(data), 1024)]:
        path.write_bytes(data[:length])
        check(path, expected, told, READERS)
        remove(path)


def test_export_of_a_damaged_store_reports_the_damage(whole: Path, tmp_path: Path, told: Told) -> None:
    pytest.importorskip("pyarrow", reason="exporting needs pyarrow")
    with open_store(whole) as store:
        expected = {"exported": exported(store)}
    data, path = whole.read_bytes(), tmp_path / "a.db"
    for _, changed in flips(data, 997):
        path.write_bytes(changed)
        check(path, expected, told, [exported])
        remove(path)


def test_resuming_a_damaged_store_reports_the_damage(whole: Path, tmp_path: Path, told: Told) -> None:
    expected, data, path = by_problem(trees(whole)), whole.read_bytes(), tmp_path / "a.db"
    resumed = 0
    for _, changed in flips(data, 997):
        path.write_bytes(changed)
        try:
            assert by_problem(trees(path)) == expected
            resumed += 1
            with open_store(path) as store:
                run = next(info.run for info in store.runs() if info.name is None)
                assert by_problem(store.plans(run)) == expected
        except StoreError:
            pass
        remove(path)
    assert resumed


def test_damaged_wal_file_is_reported_or_loses_only_its_last_commits(whole: Path, tmp_path: Path, told: Told) -> None:
    """Commits that are not in the file yet: SQLite drops those from the damaged one on; the rest is intact."""
    path, copy = tmp_path / "a.db", tmp_path / "copy" / "a.db"
    copy.parent.mkdir()
    shutil.copy(whole, path)
    sqlite3.connect(path).execute("PRAGMA journal_mode=WAL").connection.close()
    part = search.run(search.SinglePass(), asked(), mas=chain(2), policy=talker(), store=path, concurrency=1)
    list(part)
    holder = open_store(path)
    list(search.run(search.SinglePass(), asked(2), mas=chain(2), policy=talker(), store=path, seed=1))
    list(search.run(search.SinglePass(), asked(2), mas=chain(2), policy=talker(), store=path, seed=2))
    main, log = path.read_bytes(), path.with_name("a.db-wal").read_bytes()
    expected = {reader.__name__: reader(holder) for reader in READERS}
    holder.close()
    assert len(log) > 1000
    for place in range(0, len(log), max(1, len(log) // 30)):
        copy.write_bytes(main)
        changed = bytearray(log)
        changed[place] ^= 0x55
        copy.with_name("a.db-wal").write_bytes(changed)
        try:
            with open_store(copy) as store:
                # A run that lost its last commits has other facts and totals, and is whole.
                for reader in READERS[2:]:
                    assert all(item in expected[reader.__name__] for item in reader(store))
        except StoreError:
            pass
        remove(copy)


def test_damaged_search_leaves_the_others_readable(whole: Path, tmp_path: Path, told: Told) -> None:
    path = tmp_path / "a.db"
    shutil.copy(whole, path)
    expected = by_problem(trees(path))
    database = sqlite3.connect(path)
    key = database.execute(
        "SELECT id FROM searches JOIN runs USING (run) WHERE problem = 'toy/1' AND name IS NULL"
    ).fetchone()
    change_document(database, str(key[0]), lambda found: found["tree"]["value"].__setitem__(2, 0.125))
    database.execute("UPDATE searches SET correct = 1 - correct WHERE problem = 'toy/3' AND run = (SELECT run FROM "
                     "runs WHERE name IS NULL)")  # fmt: skip
    database.commit()
    database.close()
    with open_store(path) as store:
        run = next(info.run for info in store.runs() if info.name is None)
        found = []
        with pytest.raises(StoreError, match=r"searches are damaged: 'toy/1' \(its tree.*, 'toy/3' \(its row"):
            for plan in store.plans(run):
                found.append(plan)
        assert by_problem(found) == {name: expected[name] for name in ("toy/0", "toy/2")}
        with pytest.raises(StoreError, match="searches are damaged: 'toy/3'"):
            list(store.problems(run))
        with pytest.raises(StoreError, match="'toy/1'"):
            store.search("toy/1", run)
    assert by_problem(trees(path)) == expected
    assert [said for said in told.said if "'toy/1' is damaged" in said]
    with open_store(path) as store:
        assert by_problem(store.plans(run)) == expected


def test_missing_search_is_reported(whole: Path, tmp_path: Path, told: Told) -> None:
    path = tmp_path / "a.db"
    shutil.copy(whole, path)
    execute(path, "DELETE FROM searches WHERE problem = 'toy/1'")
    with (
        open_store(path) as store,
        pytest.raises(StoreError, match="expected 2 searches, found 1"),
    ):
        list(store.plans("votes"))
    assert len(list(votes(path))) == 2
    assert "expected 2 searches, found 1" in told.said[-1]
    with open_store(path) as store:
        assert len(list(store.plans("votes"))) == 2


def test_damaged_run_leaves_the_others_readable(whole: Path, tmp_path: Path, told: Told) -> None:
    path = tmp_path / "a.db"
    shutil.copy(whole, path)
    execute(path, "UPDATE runs SET facts = json_set(facts, '$.problems', 9) WHERE name = 'votes'")
    with open_store(path) as store:
        assert [info.name for info in store.runs()] == [None]
        assert "is damaged" in told.said[-1]
        with pytest.raises(StoreError, match="expected one run 'votes', found 0"):
            store.find("votes")
    assert len(list(votes(path))) == 2
    with open_store(path) as store:
        assert store.find("votes").facts["problems"] == 2


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"


@pytest.mark.parametrize(
    ("statements", "name"),
    [
        (("ALTER TABLE runs RENAME TO r", f"CREATE VIEW runs AS {ENDLESS} i AS run FROM n"), "runs"),
        (("CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM documents; END",), "t"),
        (("CREATE VIRTUAL TABLE v USING rtree(id, a, b)",), "v"),
        (("ALTER TABLE documents ADD COLUMN big AS (hex(zeroblob(500000000)))",), "documents.big"),
    ],
)
def test_store_with_code_in_its_schema_is_rejected(
    whole: Path, tmp_path: Path, statements: tuple[str, ...], name: str
) -> None:
    path = tmp_path / "a.db"
    shutil.copy(whole, path)
    execute(path, *statements)
    with pytest.raises(StoreError, match=f"expected plain tables, got '{name}'"):
        open_store(path)
    with pytest.raises(StoreError, match="expected plain tables"):
        list(trees(path))


@pytest.fixture
def unwritable(whole: Path, tmp_path: Path) -> Path:
    """A store in WAL mode in a folder in which no user can create files."""
    path = tmp_path / "read?only%20.db"
    shutil.copy(whole, path)
    execute(path, "PRAGMA journal_mode=WAL")
    for name in ("-wal", "-shm"):
        path.with_name(path.name + name).unlink(missing_ok=True)
    path.with_name(f"{path.name}-shm").symlink_to("nowhere")
    return path


def test_read_only_store_is_read(whole: Path, unwritable: Path) -> None:
    with open_store(whole) as store, open_store(unwritable) as there:
        assert plans(there) == plans(store)
        assert questions(there) == questions(store)
    with pytest.raises(StoreError, match="writable"):
        list(trees(unwritable))


def test_store_with_unreadable_wal_file_is_rejected(unwritable: Path) -> None:
    other = unwritable.with_name("other.db")
    shutil.copy(unwritable, other)
    with closing(sqlite3.connect(other)) as writer:
        writer.execute("UPDATE runs SET name = NULL")
        writer.commit()
        shutil.copy(f"{other}-wal", f"{unwritable}-wal")
    with pytest.raises(StoreError, match=r"most recent data is in read\?only%20.db-wal"):
        open_store(unwritable)


@pytest.mark.parametrize(
    ("statement", "code"),
    [("DELETE FROM runs", 2), ("UPDATE runs SET facts = '{}'", 2), ("DELETE FROM runs WHERE name IS NULL", 1)],
)
def test_status_of_a_damaged_store_fails(whole: Path, tmp_path: Path, statement: str, code: int) -> None:
    path = tmp_path / "a.db"
    shutil.copy(whole, path)
    execute(path, statement)
    done = CliRunner().invoke(app, ["status", str(path)])
    assert done.exit_code == code
    assert "no runs yet" not in done.output
    assert ("votes" in done.output) == (code == 1)
