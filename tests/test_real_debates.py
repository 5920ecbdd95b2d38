"""The page about recorded debates: reading, features and the choice, on debates made up here."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.real import dylan_math
from benchmarks.real.debate import Debate, Said, arithmetic, features
from benchmarks.real.dylan_reader import read, with_rows


def row(name: str, answer: str, messages: list[list[str]]) -> dict:
    return {
        "id": name, "question": f"What is the value of {name}?", "answer": answer, "level": 3, "subject": "Algebra",
        "messages": messages,
    }  # fmt: skip


ROWS = [
    row("a", "7", [["So 3 + 4 = 7. The answer is 7.", "The answer is 8."], ["The answer is 8.", "The answer is 8."]]),
    row("b", r"\begin{pmatrix}1\-2\end{pmatrix}", [[r"$\boxed{\begin{pmatrix} 1 \\ -2 \end{pmatrix}}$"], ["No idea."]]),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with gzip.open(tmp_path / dylan_math.SOURCE.file, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(one) + "\n" for one in ROWS)
    return tmp_path


def test_reader_yields_one_sample_per_agent_and_round(data: Path) -> None:
    found = list(read(data / dylan_math.SOURCE.file))
    assert [one.sample_id for one in found] == ["0 0", "0 1", "1 0", "1 1", "0 0", "1 0"]
    assert found[4].reference == r"\begin{pmatrix}1\\-2\end{pmatrix}"


def test_with_rows_keeps_answers_with_intact_row_separators() -> None:
    for answer in (r"\frac{1}{2}", r"(1,\infty)", r"\begin{pmatrix}1\\-2\end{pmatrix}", r"-\sqrt{3}"):
        assert with_rows(answer) == answer


def test_read_debates_function_grades_answers_through_a_store(data: Path, tmp_path: Path) -> None:
    for _ in range(2):
        first, second = dylan_math.read_debates(data, tmp_path / "runs.db", lambda line: None)
    assert [(one.answer, one.correct) for one in first.said] == [("7", True), ("8", False), ("8", False), ("8", False)]
    assert [one.correct for one in second.said] == [True, False]
    assert first.answers == ["7", "8"] and first.correct("7") and not first.correct("8")
    assert not dylan_math.majority(first, first.last) and dylan_math.majority(first, first.first)


def debate(name: str, answers: list[list[tuple[str | None, bool]]]) -> Debate:
    said = [
        Said(agent, number, f"Then {number} + 1 = {answer}.", answer, right)
        for agent, one in enumerate(answers)
        for number, (answer, right) in enumerate(one)
    ]
    return Debate(name, "How many?", 1 + len(name) % 5, "Algebra", tuple(said))


def test_features_do_not_depend_on_correctness() -> None:
    one = debate("x", [[("1", True), ("2", False)], [("2", False), ("2", False)]])
    other = one._replace(said=tuple(said._replace(correct=not said.correct) for said in one.said))
    assert features(one, ["Algebra"]).shape[0] == 2
    assert (features(one, ["Algebra"]) == features(other, ["Algebra"])).all()


def test_features_of_a_debate_without_answers_are_empty() -> None:
    assert len(features(debate("x", [[(None, False)]]), ["Algebra"])) == 0


def test_gap_share_is_one_if_the_critic_is_always_right() -> None:
    best, vote = np.ones(40), np.array([1.0, 0.0] * 20)
    share, interval = dylan_math.gap_share(best, vote, best)
    assert share == 1 and interval == (1, 1)
    assert dylan_math.gap_share(vote, vote, best)[0] == 0


def test_critics_learn_a_rule_that_votes_cannot_express() -> None:
    debates = [debate(str(place), [[("1/2", True)], [("0.5", False)], [("0.5", False)]]) for place in range(30)]
    tables = [
        dylan_math.Table(features(one, ["Algebra"]), np.array([one.correct(answer) for answer in one.answers]))
        for one in debates
    ]
    for found in dylan_math.values(tables[:20], tables[20:]).values():
        assert all(dylan_math.chosen_right(tables[20:], found))
    assert not any(dylan_math.majority(one, one.last) for one in debates)


@given(st.integers(0, 999), st.integers(0, 999), st.integers(-3, 3))
def test_arithmetic_counts_true_and_false_equations(a: int, b: int, off: int) -> None:
    holds = abs(off) <= max(0.01 * (a + b), 1e-6)
    assert arithmetic(f"We get ${a} + {b} = {a + b + off}$.") == ((1, 0) if holds else (0, 1)) or a + b + off < 0


@given(st.text(alphabet="0123456789+-*/=.(), x\\$", max_size=60))
def test_arithmetic_function_accepts_any_text(text: str) -> None:
    right, wrong = arithmetic(text)
    assert right >= 0 and wrong >= 0


def test_page_is_skipped_if_its_recorded_data_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dylan_math.main(["--data", str(tmp_path), "--store", str(tmp_path / "runs.db"), "--pages", str(tmp_path)])
    assert "skipped: expected the recording dylan_math.jsonl.gz" in capsys.readouterr().out
