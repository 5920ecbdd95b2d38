"""Results read without trees: equal to those of the rebuilt plans, and damaged rows are reported."""

from __future__ import annotations

import math
import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from search_worlds import chain, change_document, noise, problems, talker

import search
from mas_gym.cli.status import active_time
from mas_gym.errors import StoreError
from mas_gym.tasks import Grade, Problem
from mas_gym.tasks.grading.answers import KindGrader
from mas_gym.tasks.grading.graders import FunctionGrader
from search import Plan, open_store
from search.compare.reliability import tree_states, value_bins
from search.results.outcomes import outcome_of
from search.store import regrade, search_rows
from search.store.search_rows import Document, StoredCandidate
from search.store.table_schema import CHECKSUM, FORMAT, digest

RUNS: list[tuple[str, dict[str, Any]]] = [
    ("mcts:6,3", {}),
    ("mcts:6,3", {"seed": 1}),
    ("mcts:40,3", {"budget": search.Budget(calls=9), "run_name": "stopped"}),
    ("bon:3", {}),
    ("single", {}),
]


class CostlyCritic(search.Critic):
    """Values from a hash, a token each; it fails on the second problem, and without any words on no other."""

    name = "costly"
    free = False

    def identity(self) -> str:
        return self.name

    def score(self, contexts: Sequence[Any]) -> search.Scores:
        fails = [context.state.question.startswith("Question 1:") for context in contexts]
        values = [math.nan if fail else noise(c.state.digest) for fail, c in zip(fails, contexts, strict=True)]
        return search.Scores(values, tokens=[1] * len(values), reasons=["no value" * fail for fail in fails])


def odd(problem: Problem, text: str) -> Grade:
    return Grade(len(text) % 2 == 1, text[-1:], "odd length")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "runs.db"
    for planner, options in RUNS:
        options = {"mas": chain(3), "policy": talker(), "critic": CostlyCritic(), "store": path, **options}
        list(search.run(planner, problems(5), **options))
    with open_store(path) as store:
        runs = store.runs()
    for info in runs:
        regrade(path, info, FunctionGrader(odd, KindGrader()), "odd")
    return path


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    path = tmp_path / "runs.db"
    shutil.copy(whole, path)
    return path


def scored(document: Document) -> dict[int, list[Any]]:
    return dict(value_bins(tree_states(document)))


def document_of(plan: Plan) -> Document:
    nodes = [] if plan.tree is None else list(plan.tree)
    columns = {
        "parent": [node.parent for node in nodes],
        "speaker": [node.state.speaker for node in nodes],
        "value": [node.value for node in nodes],
    }
    found = [StoredCandidate(c.node, c.score, c.answer, c.correct) for c in plan.candidates if c.node is not None]
    return Document(columns, found, (), {})


@pytest.mark.parametrize("grading", [None, "odd"])
def test_outcomes_equal_those_of_rebuilt_plans(whole: Path, grading: str | None) -> None:
    found = []
    with open_store(whole) as store:
        for info in store.runs():
            read = list(store.outcomes(info.run, "a", "b", grading))
            plans = store.plans(info.run, failed=True, grading=grading)
            assert read == [outcome_of(plan, "a", "b", info.config["seed"]) for plan in plans]
            found += read
    # The store has what could differ.
    assert any(one.error for one in found) and any(one.critic_tokens for one in found)
    assert any(len(one.anytime) > 1 for one in found) and len({one.hit_rank for one in found}) > 2
    assert len({one.correct for one in found}) == 2


def test_status_counts_overlapping_time_once_and_excludes_pauses(store: Path) -> None:
    spans = [(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (100.0, 101.5), (0.5, 1.0)]
    connection = FORMAT.connect(store, create=False)
    with closing(connection):
        for number, (start, end) in enumerate(spans):
            query = "SELECT id FROM searches WHERE problem = ?"
            for (key,) in connection.execute(query, (problems(5)[number].id,)).fetchall():
                row = (end, end - start, key)
                connection.execute("UPDATE searches SET finished = ?, seconds = ? WHERE id = ?", row)
                connection.execute(f"UPDATE searches SET checksum = {CHECKSUM} WHERE id = ?", (key,))
    with open_store(store) as opened:
        for info in opened.runs():
            assert active_time([(row["finished"], row["seconds"]) for row in opened.rows(info.run)]) == pytest.approx(
                (6.5, 101.5), abs=1e-3
            )


def test_active_time_without_searches_is_zero() -> None:
    assert active_time([]) == (0.0, None)


def test_outcomes_depend_on_the_selected_grading(whole: Path) -> None:
    with open_store(whole) as store:
        for info in store.runs():
            assert list(store.outcomes(info.run)) != list(store.outcomes(info.run, grading="odd"))
        plans = list(store.plans("stopped"))
        assert all(plan.stopped for plan in plans)


def test_documents_have_the_values_of_rebuilt_plans(whole: Path) -> None:
    seen = 0
    with open_store(whole) as store:
        for info in store.runs():
            plans = list(store.plans(info.run))
            for plan, (problem, document) in zip(plans, store.documents(info.run), strict=True):
                assert problem.id == plan.problem_id and scored(document) == scored(document_of(plan))
                seen += sum(one.states for bins in scored(document).values() for one in bins)
    assert seen > 20


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found["tree"]["value"].__setitem__(1, 0.125),
        lambda found: found["tree"]["parent"].__setitem__(1, "a"),
        lambda found: found["tree"]["parent"].__setitem__(2, 999),
        lambda found: found["tree"]["recipients"].__setitem__(1, [7]),
        lambda found: found["candidates"][0].__setitem__(3, not found["candidates"][0][3]),
    ],
)
@pytest.mark.parametrize("reader", ["documents", "plans", "outcomes"])
def test_damaged_document_is_reported_on_reading(store: Path, damage: Callable[[Any], object], reader: str) -> None:
    change(store, damage)
    with open_store(store) as opened:
        whole = list(opened.outcomes("stopped"))
        found = []
        with pytest.raises(StoreError, match=r"searches are damaged: 'toy/2' \(its tree, candidates, curve or request"):
            for one in getattr(opened, reader)("stopped", **{"grading": "odd"} if reader == "outcomes" else {}):
                found.append(one)
        assert len(found) == sum(one.error is None or reader == "outcomes" for one in whole) - 1
        with pytest.raises(StoreError, match="'toy/2'"):
            opened.compare(["stopped"], grading="odd")


FORGED: list[Callable[[Any], object]] = [
    lambda found: found.update(tree=[]),
    lambda found: found.update(tree=None),
    lambda found: found.update(candidates={"0": 1}),
    lambda found: found["candidates"][0].__setitem__(0, 10**6),
    lambda found: found["candidates"][0].__setitem__(1, "0.5"),
    lambda found: found["anytime"][0].__setitem__(3, 7),
    lambda found: found["tree"].update(parent=5),
    lambda found: found["tree"]["visits"].__setitem__(1, "one"),
    lambda found: found["tree"]["tokens"].__setitem__(1, True),
    lambda found: found["tree"]["recipients"].__setitem__(0, ["x"]),
    lambda found: found["tree"]["text"].__setitem__(0, 10**6),
    lambda found: found["tree"]["parent"].__setitem__(1, 1),
    lambda found: found["tree"]["seed"].pop(),
    lambda found: found.update(requests=[1]),
    lambda found: found.pop("anytime"),
]


@pytest.mark.parametrize("forge", FORGED, ids=range(len(FORGED)))
def test_document_of_wrong_types_with_a_right_checksum_is_reported(store: Path, forge: Callable[[Any], object]) -> None:
    change(store, forge, sealed=True)
    with open_store(store) as opened:
        for read in (opened.plans, opened.documents):
            with pytest.raises(StoreError, match=r"runs\.db: .*'toy/2' \("):
                list(read("stopped"))


def test_document_that_expands_beyond_the_limit_is_reported(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_rows, "MOST_BYTES", 100)
    with open_store(store) as opened, pytest.raises(StoreError, match="more than 0 MiB"):
        list(opened.plans("stopped"))


NUMBERS = ("seconds", "hit_rank", "candidates", "correct", "generated_tokens")
TEXTS = ("curve = '[[1]]'", "tags = '[3]'", "error = X'61'", "metadata = '3'", "finished = 'never'")


@pytest.mark.parametrize(
    ("reader", "forged"),
    [*(("searches", text) for text in TEXTS), *(("outcomes", f"{column} = 'x'") for column in NUMBERS)],
)
def test_row_of_wrong_types_with_a_right_checksum_is_reported(store: Path, reader: str, forged: str) -> None:
    with closing(FORMAT.connect(store, create=False)) as connection:
        connection.execute(f"UPDATE searches SET {forged} WHERE id = {CHOSEN}")
        connection.execute(f"UPDATE searches SET checksum = {CHECKSUM} WHERE id = {CHOSEN}")
    with open_store(store) as opened, pytest.raises(StoreError, match=r"runs\.db: .*'toy/2' \("):
        list(getattr(opened, reader)("stopped"))


CHOSEN = "(SELECT id FROM searches JOIN runs USING (run) WHERE problem = 'toy/2' AND name = 'stopped')"


def change(store: Path, forge: Callable[[Any], object], sealed: bool = False) -> None:
    """Change the document of a search, with or without its checksums."""
    with closing(FORMAT.connect(store, create=False)) as connection:
        change_document(connection, CHOSEN, forge)
        if sealed:
            [(document,)] = connection.execute(f"SELECT document FROM documents WHERE search = {CHOSEN}").fetchall()
            content = digest(zlib.decompress(document).decode())
            connection.execute(f"UPDATE searches SET content = ? WHERE id = {CHOSEN}", (content,))
            connection.execute(f"UPDATE searches SET checksum = {CHECKSUM} WHERE id = {CHOSEN}")
