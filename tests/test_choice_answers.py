"""How the answers of a file name an option: published formats, ambiguous files, unreadable rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mas_gym.cli import app
from mas_gym.errors import ConfigError, DataError
from mas_gym.tasks import load_task


def file_of(folder: Path, rows: list[dict[str, Any]], suffix: str = ".jsonl") -> Path:
    file = folder / f"rows{suffix}"
    if suffix == ".csv":
        lines = [list(rows[0]), *(row.values() for row in rows)]
        file.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


FOUR = ["8", "2", "24", "120"]
ARC = [
    ({"text": ["mass", "time", "force"], "label": ["A", "B", "C"]}, "C"),
    ({"text": ["mass", "time", "force", "heat"], "label": ["1", "2", "3", "4"]}, "2"),
    ({"text": ["mass", "time"], "label": ["B", "A"]}, "A"),
]
AQUA = ["A)21", "B)21.5", "C)22", "D)22.5", "E)None of these"]
PUBLISHED = {
    "ARC": ([{"choices": c, "answerKey": k} for c, k in ARC], "answer=answerKey", "CBB"),
    "ARC, released": (
        [{"choices": [{"text": "mass", "label": "1"}, {"text": "time", "label": "2"}], "answerKey": k} for k in "12"],
        "answer=answerKey",
        "AB",
    ),
    "AQuA": ([{"options": AQUA, "rationale": "r", "correct": k} for k in "EAB"], "answer=correct", "EAB"),
    "QuALITY": ([{"options": FOUR, "gold_label": n} for n in (1, 4, 2)], "answer=gold_label", "ADB"),
    "MedMCQA on the hub": (
        [{"opa": "p", "opb": "q", "opc": "r", "opd": "s", "cop": n} for n in (0, 3, 1)],
        "answer=cop,choices=opa+opb+opc+opd",
        "ADB",
    ),
    "MedMCQA, released": (
        [{"opa": "p", "opb": "q", "opc": "r", "opd": "s", "cop": n} for n in (4, 3, 1)],
        "answer=cop,choices=opa+opb+opc+opd",
        "DCA",
    ),
    "MedQA": ([{"options": {"A": "p", "B": "q"}, "answer_idx": k} for k in "BA"], "answer=answer_idx", "BA"),
    "WinoGrande": (
        [{"option1": "Ann", "option2": "Bea", "answer": k} for k in "12"],
        "answer=answer,choices=option1+option2",
        "AB",
    ),
    "SIQA": (
        [{"context": "c", "answerA": "p", "answerB": "q", "answerC": "r", "label": k} for k in "132"],
        "answer=label,choices=answerA+answerB+answerC",
        "ACB",
    ),
    "HellaSwag": ([{"endings": list("pqrs"), "label": k} for k in "031"], "answer=label,choices=endings", "ADB"),
    "PIQA": ([{"sol1": "p", "sol2": "q", "label": n} for n in (0, 1)], "answer=label,choices=sol1+sol2", "AB"),
    "MMLU": ([{"choices": FOUR, "answer": n} for n in (2, 1)], "answer=answer", "CB"),
    "RACE": ([{"options": FOUR, "answer": k} for k in "CA"], "answer=answer", "CA"),
    "texts": ([{"options": FOUR, "answer": k} for k in ("24", "8")], "answer=answer", "CA"),
    "numbers": ([{"options": [8, 2, 24], "answer": n} for n in (24, 2)], "answer=answer", "CB"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_answers_in_a_published_format_name_the_right_options(tmp_path: Path, name: str) -> None:
    rows, columns, letters = PUBLISHED[name]
    asked = [{"question": f"Which {n}?", **row} for n, row in enumerate(rows)]
    task = load_task(file_of(tmp_path, asked), columns=columns)
    assert "".join(problem.answer for problem in task) == letters
    right = task[0].metadata["options"]["ABCDE".index(letters[0])]
    assert f"{letters[0]}. {right}" in task[0].question and task.grade(task[0], f"Final Answer: {right}").correct


@pytest.mark.parametrize(
    ("answers", "options", "suffix", "read"),
    [
        (["1", "2", "3"], "pqrs", ".jsonl", {"index": "B", "label": "A"}),
        (["1", "2", "3"], "pqrs", ".csv", {"index": "B", "label": "A"}),
        (["2", "2"], FOUR, ".jsonl", {"index": "C", "label": "B", "text": "B"}),
        ([1, 2, 3] * 6, "pqrs", ".jsonl", {"index": "B", "label": "A"}),
        ([2, 1], [0, 1, 2], ".jsonl", {"index": "C", "label": "B", "text": "C"}),
        (["A", "B"], "BAC", ".jsonl", {"label": "A", "text": "B"}),
    ],
)
def test_answers_with_two_readings_stop_until_one_is_chosen(
    tmp_path: Path, answers: list[Any], options: Sequence[Any], suffix: str, read: dict[str, str]
) -> None:
    named = dict(zip("wxyz", options, strict=False))
    rows = [{"question": f"Which {n}?", **named, "answer": answer} for n, answer in enumerate(answers)]
    file, columns = file_of(tmp_path, rows, suffix), "choices=" + "+".join(named)
    with pytest.raises(ConfigError, match=r"two readings.*--answers: index \(from 0\), label .* or text"):
        load_task(file, columns=columns)
    assert {reading: load_task(file, columns=columns, answers=reading)[0].answer for reading in read} == read
    for other in {"index", "label", "text"} - read.keys():
        with pytest.raises(DataError, match="rows are not valid"):
            load_task(file, columns=columns, answers=other)


def test_unreadable_row_is_an_error_and_changes_no_reading(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "options": ["p", "q"], "answer": n % 2} for n in range(9)]
    with pytest.raises(DataError, match=r"1 of 10 rows .*\n.*:10: expected the index of an option, from 0.*'both'"):
        load_task(file_of(tmp_path, [*rows, {"question": "9?", "options": ["p", "q"], "answer": "both"}]))


def test_options_that_are_not_json_are_an_error_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "pandas.csv"
    file.write_text("question,choices,answer\nWhich?,\"{'text': array(['p', 'q'])}\",A\n")
    with pytest.raises(DataError, match=r"csv:2: column 'choices': expected a JSON value, got"):
        load_task(file)


@pytest.mark.parametrize(
    ("good", "bad", "kind"),
    [
        (["4", "1,000", "1/2"], "unknown", "number"),
        (["B", "a", "D"], "both", "choice"),
        (["x^2+1", r"\frac{1}{2}"], r"\text{Friday}", "expression"),
        (["4", "5"], ["5", "five"], "number"),
    ],
)
def test_one_unreadable_answer_does_not_change_the_kind_of_a_file(
    tmp_path: Path, good: list[Any], bad: Any, kind: str
) -> None:
    rows = [{"question": f"{n}?", "answer": answer} for n, answer in enumerate([*good * 4, bad])]
    file = file_of(tmp_path, rows)
    if kind == "expression":
        assert {problem.kind for problem in load_task(file)} == {kind}
        return
    with pytest.raises(DataError, match=rf"1 of {len(rows)} rows .*\n.*:{len(rows)}: expected"):
        load_task(file)


def test_options_and_answers_that_cannot_apply_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="answers='index': expected answers of kind 'choice', got number"):
        load_task(file_of(tmp_path, [{"question": "1 + 1?", "answer": 2}]), answers="index")
    rows = [{"question": f"{n}?", "a": "p", "b": "" if n else "q", "answer": 1} for n in range(20)]
    with pytest.raises(DataError, match="at least two options in the columns a, b, got 1"):
        load_task(file_of(tmp_path, rows), columns="choices=a+b")
    for cell in ({"text": ["p", "q"], "label": ["A"]}, "p, q", ["p"], {"A": "p"}):
        with pytest.raises(DataError, match="column 'options': expected"):
            load_task(file_of(tmp_path, [{"question": "?", "options": cell, "answer": "A"}]))


def test_reading_is_stated_with_its_count_and_an_example(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mas_gym.tasks")
    file = file_of(tmp_path, [{"question": f"{n}?", "choices": FOUR, "answer": n % 4} for n in range(40)])
    load_task(file)
    assert "answers are indices from 0: 40 rows; example: 0 is 'A. 8'" in caplog.messages[-1]


def test_command_reads_answers_as_chosen(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "choices": ["p", "q", "r"], "answer": "1"} for n in range(2)]
    (tmp_path / "my.py").write_text(
        "from mas_gym.policies import ScriptedPolicy\n"
        "def make():\n    return ScriptedPolicy(lambda request, seed: 'Final Answer: A')\n"
    )
    arguments = ["eval", "--task", str(file_of(tmp_path, rows)), "--policy", f"{tmp_path / 'my.py'}:make"]
    outcomes = []
    for answers in ([], ["--answers", "label"], ["--answers", "index"], ["--answers", "letter"]):
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, "--mas", "single", *answers])
        outcomes.append((done.exit_code, "100.0" in done.output))
    assert outcomes == [(2, False), (0, True), (0, False), (2, False)]
