"""Broken, endless or malicious custom data, graders and code raise a typed error in bounded time."""

import json
import os
import random
import signal
from pathlib import Path

import pytest

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, MASGymError, UserCodeError
from mas_gym.tasks import load_task

GOOD = b"question,answer\nCapital of Austria?,Vienna\n"


def refused(file: Path, **options: object) -> str:
    with pytest.raises((DataError, ConfigError, DataNotFoundError)) as caught:
        load_task(file, **options)  # type: ignore[arg-type]
    text = str(caught.value)
    assert len(text) < 5000 and "\x00" not in text and "\x1b" not in text
    return text


def test_parquet_values_of_every_type_are_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "my.parquet"
    rows = {
        "question": [f"{place} + 1?" for place in range(2500)],
        "answer": pa.array(range(1, 2501)),
        "tags": pa.array([["a", None], None, []] + [["b"]] * 2497, pa.list_(pa.string())),
        "facts": [{"n": 1, "names": ["x"]}] * 2500,
        "map": pa.array([[("k", "v")]] * 2500, pa.map_(pa.string(), pa.string())),
        "word": pa.array(["w", None] * 1250).dictionary_encode(),
        "none": pa.nulls(2500),
        "share": pa.array([0.5] * 2500),
    }
    parquet.write_table(pa.table(rows), file)
    task = load_task(file)
    assert len(task) == 2500 and [problem.answer for problem in task][-1] == "2500"
    assert task[0].metadata["facts"] == {"n": 1, "names": ["x"]} and task[0].metadata["tags"] == ["a", None]
    assert (task[0].metadata["word"], task[0].metadata["share"]) == ("w", 0.5)


BROKEN = {
    "an open quote": (b'question,answer\n"Capital,Vienna\nOf Peru?,Lima\n', r"expected 2 cells"),
    "an open quote over everything": (b'question,answer\n"' + b"x" * 200_000, "balanced quotes"),
    "quotes inside": (b'question,answer\na"b"c,"d""e"f"\n', ""),
    "UTF-16": ("question,answer\nWien?,ja\n".encode("utf-16"), "convert the file to UTF-8"),
    "UTF-16 without a mark": ("question,answer\nWien?,ja\n".encode("utf-16-le"), "no column 'question'"),
    "Latin-1": ("question,answer\nStädte?,Köln\n".encode("latin-1"), ": expected UTF-8 text"),
    "duplicate ids": (b"id,question,answer\na,1?,1\nb,2?,2\na,3?,3\n", r"unique ids in column 'id', got 'a'"),
    "an empty answer": (b"question,answer\nA?,1\nB?,\n", "expected text in column 'answer', got ''"),
    "a blank question": (b"question,answer\n  ,1\n", "expected text in column 'question'"),
    "equal columns": (b"question,answer,answer\nA?,1,2\n", "expected unique column names"),
    "a header alone": (b"question,answer\n", "found none"),
    "nothing": (b"", "found none"),
    "semicolons": (b"question;answer\nA?;1\n", "are its cells separated by commas"),
    "too many cells": (b"question,answer\nA?,1,2\n", "expected 2 cells"),
    "one column": (b"question\nA?\n", "no column 'answer'; its columns are 'question'"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_csv_error_names_the_file(fault: str, tmp_path: Path) -> None:
    content, complaint = BROKEN[fault]
    file = tmp_path / "my.csv"
    file.write_bytes(content)
    if complaint:
        assert complaint in refused(file)
    else:
        load_task(file)


def test_byte_order_mark_is_removed_from_the_column_name(tmp_path: Path) -> None:
    file = tmp_path / "my.csv"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert load_task(file)[0].answer == "Vienna"


@pytest.mark.parametrize(
    "row",
    [
        '{"question": "q", "answer": NaN}',
        '{"question": "q", "answer": 1e999}',
        '{"question": "q", "answer": {"a": 1}}',
        '{"question": "q", "answer": []}',
        '{"question": "q", "answer": [1, null]}',
        '{"question": ["q"], "answer": 1}',
        '{"question": "\\ud800", "answer": 1}',
        '{"question": "q", "answer": ' + "9" * 5000 + "}",
        "[1, 2]",
        "null",
        '{"question": "q", "answer": "(?<=a)b", "kind": "regex"}',
        '{"question": "q", "answer": "((((", "kind": "regex"}',
        '{"question": "q", "answer": "import", "kind": "code"}',
        '{"question": "q", "answer": "ten", "kind": "number"}',
        '{"question": "q", "answer": "Z", "options": ["a", "b"]}',
        '{"question": "q", "answer": "a", "options": "ab"}',
        '{"question": "q", "answer": 1, "id": ""}',
        '{"question": "q", "answer": 1, "split": {}}',
    ],
)
def test_broken_row_error_names_the_row(row: str, tmp_path: Path) -> None:
    file = tmp_path / "my.jsonl"
    file.write_text(f"{row}\n")
    try:
        first = json.loads(row)
    except ValueError:
        first = None
    columns = {"kind": "kind"} if isinstance(first, dict) and "kind" in first else None
    assert f"{file}:1" in refused(file, columns=columns, allow_code=True, sandbox="none") or first is None


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json", ".parquet"])
def test_arbitrary_bytes_are_read_or_rejected(suffix: str, tmp_path: Path) -> None:
    rng = random.Random(suffix)
    seeds = [
        GOOD * 3,
        b'{"question": "q", "answer": "a", "choices": ["a", "b"]}\n' * 2,
        b'[{"question": 1, "answer": 2}]',
    ]
    file = tmp_path / f"my{suffix}"
    for _ in range(80):
        content = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(0, 8)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        file.write_bytes(bytes(content))
        try:
            load_task(file)
        except MASGymError as error:
            assert len(str(error)) < 5000


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipe_is_rejected_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "my.csv")
    assert "regular file" in refused(tmp_path / "my.csv")


# ------------------------------------------------------------------ graders


def test_grader_hanging_in_compiled_code_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.csv").write_bytes(GOOD)
    (tmp_path / "my.py").write_text(
        "import os, re\n"
        "def grade(problem, text):\n"
        "    if text == 'hang': re.match('(a+)+$', 'a' * 60 + 'b')\n"
        "    if text == 'die': os._exit(1)\n"
        "    print('x' * 100_000)\n"
        "    return True\n"
    )
    monkeypatch.setattr("mas_gym.tasks.grading.graders.GRADER_SECONDS", 1.0)
    task = load_task(tmp_path / "my.csv", grader=f"{tmp_path}/my.py:grade")
    for text, complaint in (("hang", "within 1 seconds"), ("die", "its process ended")):
        with pytest.raises(UserCodeError, match=complaint):
            task.grade(task[0], text)
    assert task.grade(task[0], "fine \ud800").correct
    assert signal.getitimer(signal.ITIMER_REAL)[0] >= 0


@pytest.mark.parametrize("spec", ["no.py:grade", "my.py:", "my.py", "grade", "", "my.csv:grade", "\x00.py:grade"])
def test_invalid_grader_spec_is_rejected(spec: str, tmp_path: Path) -> None:
    (tmp_path / "my.csv").write_bytes(GOOD)
    with pytest.raises((ConfigError, DataNotFoundError, LookupError)):
        load_task(tmp_path / "my.csv", grader=spec)
