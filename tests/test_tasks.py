"""Loading tasks: every source and format, the paper's splits, and what bad data gets."""

import copy
import csv
import gzip
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, MASGymError, UnknownNameError
from mas_gym.internal.identity import identity_of
from mas_gym.internal.suggestions import unknown_name
from mas_gym.tasks import TASK_NAMES, Problem, ProblemTask, Task, load_task
from mas_gym.tasks.catalog import shuffled
from mas_gym.tasks.data_rows import BadRow
from mas_gym.tasks.json_rows import json_rows
from mas_gym.tasks.logiqa import logiqa_block

GSM8K_ROW = {"question": "How many?", "answer": "Two and two.\n#### 1,004"}


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def gsm8k_rows(size: int) -> list[dict[str, str]]:
    return [{"question": f"Question {n}?", "answer": f"#### {n}"} for n in range(size)]


def math_rows(size: int) -> list[dict[str, str]]:
    return [{"problem": f"Problem {n}", "solution": rf"It is $\boxed{{{n}}}$.", "type": "Algebra"} for n in range(size)]


def logiqa_text(size: int) -> str:
    block = "\n{letter}\nPassage {n}.\nWhich?\nA.one {n}\nB.two\nC.three\nD.four\n"
    return "".join(block.format(letter="abcd"[n % 4], n=n) for n in range(size))


def sizes(name: str, data: Path) -> tuple[int, int, int]:
    train, dev, test = (load_task(name, split, data=data) for split in ("train", "dev", "test"))
    for a, b in ((train, dev), (train, test), (dev, test)):
        assert not {problem.question for problem in a} & {problem.question for problem in b}
    return len(train), len(dev), len(test)


# ------------------------------------------------------------- sizes and splits


def test_gsm8k_has_its_published_sizes(shared_data: Path) -> None:
    assert sizes("gsm8k", shared_data / "gsm8k") == (7_100, 373, 1_319)


def test_math_from_one_file_has_the_published_split_sizes(tmp_path: Path) -> None:
    assert sizes("math", write_jsonl(tmp_path / "all.jsonl", math_rows(12_500))) == (9_975, 525, 2_000)


@pytest.mark.slow
def test_math_from_the_released_folder_has_its_published_sizes(tmp_path: Path) -> None:
    rows = math_rows(12_500)
    for number, row in enumerate(rows):
        part = tmp_path / ("train" if number < 7_500 else "test") / ("algebra" if number % 2 else "geometry")
        part.mkdir(parents=True, exist_ok=True)
        (part / f"{number}.json").write_text(json.dumps(row))
    assert sizes("math", tmp_path) == (9_975, 525, 2_000)


def test_math_test_file_is_the_evaluation_set(shared_data: Path) -> None:
    for data in (shared_data / "math500" / "test.jsonl", shared_data / "math500"):
        assert len(load_task("math", data=data)) == 500


def test_mmlu_from_the_released_folder_has_its_published_sizes(tmp_path: Path) -> None:
    for part, suffix, size in (("test", "test", 14_042), ("val", "val", 1_531), ("dev", "dev", 285)):
        (tmp_path / part).mkdir()
        for subject, first, last in (("anatomy", 0, size // 3), ("virology", size // 3, size)):
            with (tmp_path / part / f"{subject}_{suffix}.csv").open("w", newline="") as file:
                rows = ([f"{part} {n}?\nSay, now", "w", "x", "y, y", "z", "ABCD"[n % 4]] for n in range(first, last))
                csv.writer(file).writerows(rows)
    assert sizes("mmlu", tmp_path) == (13_340, 702, 1_531)
    problem = load_task("mmlu", data=tmp_path)[0]
    assert problem.question == "val 0?\nSay, now\n\nA. w\nB. x\nC. y, y\nD. z"
    assert (problem.answer, problem.metadata["subject"]) == ("A", "anatomy")


def test_logiqa_has_its_published_sizes(tmp_path: Path, shared_data: Path) -> None:
    (tmp_path / "Train.txt").write_text(logiqa_text(7_376), encoding="utf-8")
    (tmp_path / "Test.txt").write_bytes((shared_data / "logiqa" / "Test.txt").read_bytes())
    assert sizes("logiqa", tmp_path) == (7_008, 368, 651)


def test_shuffle_equals_the_datasets_library() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"row": list(range(7_473))}).shuffle(seed=42)
    assert list(rows["row"]) == shuffled(7_473)


def test_shuffle_returns_a_fixed_order() -> None:
    # published splits hang on these numbers
    assert shuffled(7_473)[:5] == [3082, 2184, 5897, 2437, 6330]
    assert sorted(shuffled(100)) == list(range(100))


def test_global_random_state_is_neither_used_nor_changed(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "train.jsonl", gsm8k_rows(100))
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()
    ids = [problem.id for problem in load_task("gsm8k", "train", data=file)]
    assert np.random.get_state()[1].tolist() == before
    assert ids == [f"gsm8k/train/{row}" for row in shuffled(100)[5:]]


def test_limit_takes_the_first_problems_after_the_shuffle(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", gsm8k_rows(40))
    few, more = (load_task("gsm8k", data=file, limit=limit) for limit in (4, 9))
    assert [problem.id for problem in few] == [f"gsm8k/test/{row}" for row in shuffled(40)[:4]]
    assert list(more)[:4] == list(few)
    assert len(load_task("gsm8k", data=file, limit=99)) == 40
    train = load_task("gsm8k", "train", data=file)
    assert list(load_task("gsm8k", "train", data=file, limit=3)) == list(train[:3])


# --------------------------------------------------------------------- formats


def saved(folder: Path, **parts: list[Any]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}).save_to_disk(folder)
    return folder


def parquet(path: Path, rows: list[Any]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_gsm8k_is_equal_from_every_source(tmp_path: Path) -> None:
    rows = gsm8k_rows(30)
    (tmp_path / "array.json").write_text(json.dumps(rows))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "bom.jsonl").write_text("\ufeff" + "\r\n\r\n".join(map(json.dumps, rows)), encoding="utf-8")
    shards = tmp_path / "hub" / "data"
    shards.mkdir(parents=True)
    parquet(shards / "test-00000-of-00002.parquet", rows[:20])
    parquet(shards / "test-00001-of-00002.parquet", rows[20:])
    sources = [
        write_jsonl(tmp_path / "rows.jsonl", rows),
        tmp_path / "array.json",
        tmp_path / "lines.json",
        tmp_path / "bom.jsonl",
        tmp_path / "hub",
        write_jsonl(tmp_path / "folder" / "test.jsonl", rows).parent,
        saved(tmp_path / "saved", train=rows[:5], test=rows),
    ]
    tasks = [load_task("gsm8k", data=source) for source in sources]
    assert [list(task) for task in tasks] == [list(tasks[0])] * len(tasks)
    assert tasks[0][3] == Problem("gsm8k/test/3", "Question 3?", "3")


@pytest.mark.parametrize("label", [0, "A", "a", " A "])
def test_mmlu_label_of_the_first_option_is_read_as_the_letter_a(tmp_path: Path, label: Any) -> None:
    rows = [{"question": "Which?", "choices": ["w", "x", "y", "z"], "answer": label}]
    [problem] = load_task("mmlu", data=write_jsonl(tmp_path / "rows.jsonl", rows))
    assert (problem.answer, problem.metadata["options"]) == ("A", ["w", "x", "y", "z"])
    assert problem.question == "Which?\n\nA. w\nB. x\nC. y\nD. z"


def test_math_answer_is_the_last_boxed_expression(tmp_path: Path) -> None:
    rows = [{"problem": "p", "solution": r"\boxed{1}, so \boxed{\frac{\sqrt{3}}{2}}.", "level": "Level 5"}]
    [problem] = load_task("math", data=write_jsonl(tmp_path / "rows.jsonl", rows))
    assert (problem.answer, problem.kind) == (r"\frac{\sqrt{3}}{2}", "expression")


def test_logiqa_hub_rows_are_read(tmp_path: Path) -> None:
    rows = [{"context": "All a are b.", "query": "So?", "options": ["w", "x", "y", "z"], "correct_option": 3}]
    [problem] = load_task("logiqa", data=write_jsonl(tmp_path / "rows.jsonl", rows))
    assert problem.question == "All a are b.\n\nSo?\n\nA. w\nB. x\nC. y\nD. z"
    assert problem.answer == "D"


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        (["A.one", "B.two", "C.three", "D.four"], ["one", "two", "three", "four"]),
        (["A.one", "C.three", "B.two", "D.four"], ["one", "two", "three", "four"]),
        (["A one", "B two", "C three", "D four"], ["one", "two", "three", "four"]),
        (["A? one", "B? two", "C.three", "d.four"], ["one", "two", "three", "four"]),
        (
            ["A.It", "B.Some", "Most on the C.S market", "The D.S city"],
            ["It", "Some", "Most on the S market", "The S city"],
        ),
        (["A.a", "B.b", "A small part of C.A area", "D.d"], ["a", "b", "A small part of A area", "d"]),
        (["Mr.A.P wrote", "B.b", "C.c", "D.d"], ["Mr.P wrote", "b", "c", "d"]),
        (["A.No.1", "Store B.3", "C.No.5", "D.No.6"], ["No.1", "Store 3", "No.5", "No.6"]),
        (["one", "two", "three", "four"], ["one", "two", "three", "four"]),
    ],
)
def test_logiqa_labels_are_corrected(lines: list[str], options: list[str]) -> None:
    assert logiqa_block(["b", "Passage", "Which?", *lines])["options"] == options


def test_logiqa_files_have_four_options_each(shared_data: Path) -> None:
    for name in ("Test", "Eval"):
        task = load_task("logiqa", data=shared_data / "logiqa" / f"{name}.txt")
        assert all(len(problem.metadata["options"]) == 4 and all(problem.metadata["options"]) for problem in task)


# -------------------------------------------------------------------- bad data


def test_every_invalid_row_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = json.dumps(GSM8K_ROW)
    file.write_text(f'{good}\n{{"question": 3\n{good}\n[1]\n{{"question": "q", "answer": "#### many"}}\n{{}}\n')
    with pytest.raises(DataError) as caught:
        load_task("gsm8k", data=file)
    message = str(caught.value)
    assert message.startswith("4 of 6 rows are not valid problems of task 'gsm8k'")
    assert f"{file}:2: expected a JSON value, got" in message
    assert f"{file}:4 item 0: expected an object with named fields, got 1" in message
    assert f"{file}:5: expected an answer that ends in '#### NUMBER'" in message
    assert f"{file}:6: expected a field 'answer', got the fields []" in message


@pytest.mark.parametrize(
    ("name", "row", "complaint"),
    [
        ("gsm8k", {"question": "", "answer": "#### 1"}, "expected text in the field 'question', got ''"),
        ("gsm8k", {"question": "q", "answer": 4}, "expected text in the field 'answer', got 4"),
        ("math", {"problem": "p", "solution": "It is 4."}, r"expected a solution with its answer in \\boxed"),
        ("math", {"problem": "p", "solution": r"\boxed{4"}, r"expected a solution with its answer in \\boxed"),
        (
            "mmlu",
            {"question": "q", "choices": ["a", "b"], "answer": 2},
            "index or the letter of one of 2 options, got 2",
        ),
        ("mmlu", {"question": "q", "choices": ["a", "b"], "answer": None}, "index or the letter of one of 2 options"),
        ("mmlu", {"question": "q", "choices": ["a", "b"], "answer": True}, "index or the letter of one of 2 options"),
        ("mmlu", {"question": "q", "choices": "ab", "answer": 0}, "expected a list of 2 to 26 options, got 'ab'"),
        ("mmlu", {"question": "q", "choices": ["a", 3], "answer": 0}, "expected every option to be text"),
        ("logiqa", {"query": "q", "options": ["a", "b"], "correct_option": 0}, "expected a field 'context'"),
    ],
)
def test_invalid_rows_are_rejected(tmp_path: Path, name: str, row: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        load_task(name, data=write_jsonl(tmp_path / "rows.jsonl", [row]))


def empty(path: Path) -> None:
    path.write_text("\n\n")


@pytest.mark.parametrize(
    ("name", "file", "make", "complaint"),
    [
        ("gsm8k", "rows.jsonl", empty, "expected problems of task 'gsm8k', split 'test', got none"),
        ("gsm8k", "rows.parquet", empty, "expected a Parquet file"),
        ("gsm8k", "rows.xlsx", empty, "expected a file of type .jsonl, .json, .parquet, .csv, .txt, got .xlsx"),
        ("logiqa", "rows.txt", lambda path: path.write_text("\na\nPassage\n"), "rows.txt:2: expected 7 lines"),
        ("logiqa", "rows.txt", lambda path: path.write_text("\n".join("eabcdef")), "rows.txt:1: .*a to d, got 'e'"),
    ],
)
def test_invalid_files_are_rejected(
    tmp_path: Path, name: str, file: str, make: Callable[[Path], Any], complaint: str
) -> None:
    path = tmp_path / file
    make(path)
    with pytest.raises(DataError, match=complaint):
        load_task(name, data=path)


@pytest.mark.parametrize("data", ["nowhere.jsonl", "."])
def test_missing_data_error_names_three_data_sources(tmp_path: Path, data: str) -> None:
    with pytest.raises(DataNotFoundError) as caught:
        load_task("gsm8k", data=tmp_path / data)
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, MASGymError)
    for way in ("1. a file", "2. a folder", "3. the Hugging Face hub: pip install 'mas-gym[data]'"):
        assert way in str(caught.value)


def test_error_for_a_missing_split_file_lists_the_folder_content(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", gsm8k_rows(3))
    with pytest.raises(DataNotFoundError, match=r"no files named 'test'; it contains train\.jsonl"):
        load_task("gsm8k", data=tmp_path)


# ------------------------------------------------------------ names and options


def test_unknown_task_error_lists_known_names_and_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown task 'gsm8'; expected one of: .*; did you mean 'gsm8k'"
    ) as caught:
        load_task("gsm8")
    assert all(name in str(caught.value) for name in TASK_NAMES)
    assert isinstance(caught.value, LookupError)


def test_unknown_name_error_is_short_and_accepts_any_type() -> None:
    assert len(str(unknown_name("task", "x" * 10**6, ["math"]))) < 200
    assert "unknown task 3" in str(unknown_name("task", 3, ["math"]))


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("gsm8k", {"split": "eval"}, "expected one of 'train', 'dev', 'test', got 'eval'"),
        ("gsm8k", {"limit": 0}, "expected an integer of at least 1, got 0"),
        ("gsm8k", {"limit": True}, "limit: expected an integer"),
        ("gsm8k", {"seed": 3}, "options among allow_code, decimal, grader, grading, judge, limit, sandbox, got seed"),
        ("arithmetic", {"level": 3}, "difficulty, grader, grading, judge, limit, sandbox, seed, size, got level"),
        ("arithmetic", {"data": "x.jsonl"}, "generates its problems"),
        ("arithmetic", {"difficulty": 99}, "difficulty"),
    ],
)
def test_invalid_options_are_rejected(name: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_task(name, **options)


@pytest.mark.parametrize("name", ["arithmetic", "ordering"])
def test_procedural_tasks_load_by_name(name: str) -> None:
    task = load_task(name, "dev", seed=3, limit=5, grading="paper")
    assert isinstance(task, Task)
    assert (task.name, task.split, task.grading, len(task)) == (name, "dev", "paper", 5)
    assert list(task) == list(load_task(name, "dev", seed=3)[:5])
    for problem in task:
        assert task.grade(problem, f"Final Answer: {problem.answer}").correct


# ------------------------------------------------------------- the task itself


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", gsm8k_rows(50))


def test_slices_are_tasks(file: Path) -> None:
    task = load_task("gsm8k", data=file)
    part = task[10:40:3][::-1]
    assert isinstance(part, Task)
    assert [problem.id for problem in part] == [f"gsm8k/test/{n}" for n in range(37, 9, -3)]
    assert part.grade(part[0], "Final Answer: 37").correct
    assert part.extract(part[0], "Final Answer: 38") == "38"
    assert part.problem("gsm8k/test/10") == task[10]
    with pytest.raises(UnknownNameError, match="gsm8k/test/11"):
        part.problem("gsm8k/test/11")
    with pytest.raises(IndexError):
        part[10]


def test_tasks_are_immutable(file: Path) -> None:
    task = load_task("gsm8k", data=file)
    with pytest.raises(FrozenInstanceError):
        task.grading = "paper"  # type: ignore[misc]
    with pytest.raises(TypeError):
        task[0].metadata["solution"] = "other"  # type: ignore[index]


def test_copies_share_the_data(file: Path) -> None:
    task = load_task("gsm8k", data=file)
    assert copy.deepcopy(task) is task
    assert load_task("gsm8k", data=file)[0] is task[0]
    assert len(pickle.dumps(task[:0])) < 1_000
    assert list(pickle.loads(pickle.dumps(task[5:9]))) == list(task[5:9])
    assert pickle.loads(pickle.dumps(task[0])) == task[0]


def test_pickled_task_loads_in_another_process(file: Path, tmp_path: Path) -> None:
    (tmp_path / "task.pkl").write_bytes(pickle.dumps(load_task("gsm8k", "train", data=file)[3:5]))
    code = "import pickle, sys; print([p.id for p in pickle.load(open(sys.argv[1], 'rb'))])"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "task.pkl"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([f"gsm8k/train/{row}" for row in shuffled(50)[5:7]])


def test_rewritten_file_is_read_again(file: Path) -> None:
    assert len(load_task("gsm8k", data=file)) == 50
    write_jsonl(file, gsm8k_rows(51))
    assert len(load_task("gsm8k", data=file)) == 51


def test_user_task_is_supported() -> None:
    problems = [Problem("a", "1 + 1?", "2"), Problem("b", "Which?", "B", "choice", {"options": ["x", "y"]})]
    task = ProblemTask.of(problems, name="mine")
    assert isinstance(task, Task)
    assert task.grade(task.problem("b"), "Final Answer: y").correct
    assert pickle.loads(pickle.dumps(task))[1] == problems[1]
    with pytest.raises(ConfigError, match="unique ids, got 'a'"):
        ProblemTask.of([problems[0], problems[0]])


def test_importing_tasks_loads_no_heavy_packages() -> None:
    heavy = "{'datasets', 'pyarrow', 'sympy', 'math_verify', 'torch'}"
    code = f"import sys, mas_gym.tasks; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_task_identity_contains_grading_and_not_problems() -> None:
    problems = [Problem(str(n), "?", str(n)) for n in range(5)]
    strict, paper = (ProblemTask.of(problems, grading=mode) for mode in ("strict", "paper"))  # type: ignore[arg-type]
    assert identity_of(strict) == identity_of(strict[1:3]) == identity_of(pickle.loads(pickle.dumps(strict)))
    assert identity_of(strict) != identity_of(paper)
    made = load_task("arithmetic")
    assert identity_of(made) == identity_of(made[:3]) == identity_of(load_task("arithmetic", seed=7))
    assert identity_of(made) != identity_of(load_task("arithmetic", grading="paper"))


def test_csv_file_with_a_header_is_not_read_as_mmlu(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('answer,question\n"They are\n#### 18",How many?\n\n#### 1\n')
    with pytest.raises(DataError, match=r"rows.csv:5: expected 2 cells.* got 1: \['#### 1'\]"):
        load_task("gsm8k", data=file)
    file.write_text('answer,question\n"They are\n#### 18",How many?\n')
    [problem] = load_task("gsm8k", data=file)
    assert (problem.question, problem.answer) == ("How many?", "18")


def test_unknown_kind_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"kind of problem 'p': expected one of 'number', .*'judge', got 'essay'"):
        Problem("p", "?", "Vienna", "essay")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "rows", "broken"),
    [
        ('{"a": 1}\n\n{"a": 2}\n', 2, 0),
        ('[{"a": 1}, {"a": 2}]', 2, 0),
        ('[\r\n {"a": 1},\r\n {"a": 2}\r\n]\r\n', 2, 0),
        ('{\n "a": 1\n}\n{\n "a": 2\n}\n', 2, 0),
        ('[\n {"a": 1},\n {"a": 2},\n {"a"', 2, 1),
        ('[\n {"a": 1},\n {"a": 2},\n', 2, 1),
        ('{"a": \n{"a": 1}\n', 1, 1),
        ("", 0, 0),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_json_rows_are_read_or_counted_as_broken(
    text: str, rows: int, broken: int, zipped: bool, tmp_path: Path
) -> None:
    data = text.encode()
    file = tmp_path / ("rows.json.gz" if zipped else "rows.json")
    file.write_bytes(gzip.compress(data) if zipped else data)
    found = list(json_rows(file))
    assert [isinstance(row.value, BadRow) for row in found].count(True) == broken
    assert len(found) == rows + broken


def test_damaged_checksum_of_a_compressed_document_is_reported(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b'[\n{"a": 1}\n]'))
    data[-6] ^= 1
    (tmp_path / "rows.json.gz").write_bytes(data)
    values = [row.value for row in json_rows(tmp_path / "rows.json.gz")]
    assert any(isinstance(value, BadRow) and "damaged" in str(value) for value in values)
