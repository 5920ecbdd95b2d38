"""Data files that are broken, or made to break what reads them: one typed error that names the file and the line."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, MASGymError
from mas_gym.internal import parquet_rows
from mas_gym.tasks import TASK_NAMES, json_rows, load_task
from mas_gym.tasks.catalog import BENCHMARKS

GOOD = {
    "gsm8k": {"question": "How many?", "answer": "They are 18.\n#### 18"},
    "math": {"problem": "Simplify.", "solution": r"So \boxed{\frac{1}{2}}."},
    "mmlu": {"question": "Which?", "choices": ["w", "x", "y", "z"], "answer": 0},
    "logiqa": {"context": "A text.", "query": "Which?", "options": ["w", "x", "y", "z"], "correct_option": 1},
    "gpqa": {"Question": "Which?", "Correct Answer": "w"} | {f"Incorrect Answer {n}": f"x{n}" for n in (1, 2, 3)},
}
DEEP = 100_000
BROKEN_LINES = {
    "deep nesting": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"question": ' * DEEP,
    "a huge integer": b'{"question": "q", "answer": ' + b"9" * DEEP + b"}",
    "not a number": b'{"question": NaN, "answer": NaN, "problem": NaN, "context": NaN}',
    "infinity": b'{"question": Infinity, "problem": -Infinity, "context": Infinity}',
    "a huge float": b'{"question": 1e999999999, "problem": 1e999999999, "context": 1}',
    "half a surrogate pair": rb'{"question": "\ud800", "problem": "\ud800", "context": "\ud800", "query": "q",'
    rb' "answer": "#### 1", "choices": ["a", "b"], "options": ["a", "b"]}',
    "a string": b'"text"',
    "null": b"null",
    "half an object": b'{"question": "q"',
    "control characters": b'{"question": "\x00\x1b[2J"}',
    "wrong types": b'{"question": {"a": []}, "problem": 1, "context": true, "answer": [], "choices": {}}',
    "empty texts": b'{"question": " ", "problem": "", "context": "\\n"}',
    "a line of a megabyte": b'{"question": "' + b"x" * 10**6 + b'", "unknown": 1}',
    "a megabyte of keys": b"{" + b",".join(b'"%d": 0' % n for n in range(50_000)) + b"}",
}


def check(error: MASGymError, place: str) -> None:
    text = str(error)
    assert place in text
    assert len(text) < 5000
    assert text.isprintable() or "\n" in text
    assert "\x1b" not in text and "\x00" not in text


@pytest.mark.parametrize("fault", BROKEN_LINES)
@pytest.mark.parametrize("task", BENCHMARKS)
def test_broken_line_error_names_the_line(task: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    good = json.dumps(GOOD[task]).encode()
    file.write_bytes(good + b"\n\n" + BROKEN_LINES[fault] + b"\n" + good + b"\n")
    with pytest.raises(DataError) as caught:
        load_task(task, data=file)
    check(caught.value, f"{file}:3:")
    assert "1 of 3 rows" in str(caught.value)


@pytest.mark.parametrize("fault", BROKEN_LINES)
def test_broken_json_file_error_names_the_file(fault: str, tmp_path: Path) -> None:
    file = tmp_path / "test.json"
    file.write_bytes(BROKEN_LINES[fault])
    with pytest.raises(DataError) as caught:
        load_task("gsm8k", data=file)
    check(caught.value, str(file))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".txt"])
@pytest.mark.parametrize("line", [b"\xff\xfe\x00", b"caf\xe9 au lait", b"\xed\xa0\x80"])
def test_wrong_encoding_error_names_the_file(suffix: str, line: bytes, tmp_path: Path) -> None:
    file = tmp_path / f"test{suffix}"
    file.write_bytes(b"first\nsecond\n" + line + b"\n")
    with pytest.raises(DataError, match="expected UTF-8 text, got") as caught:
        load_task("logiqa", data=file)
    check(caught.value, str(file))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('"q",a,b,c,d,A\n"' + "x" * 200_000 + "\n", 2),  # an open quote swallows the rest of the file
        ("q,a,b,c,d,A\nq,a,b\n", 2),
        ("q,a,b,c,d,A\nq,a,b,c,d,E\n", 2),
        ("q,a,b,c,d,A\n" + "," * 10_000 + "\n", 2),
        ('question,A,B,C,D,answer\nq,a,b,c,d,A\n"two\nlines",a,b,c,d,9\n', 4),
    ],
)
def test_broken_csv_file_error_names_the_line(content: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "test.csv"
    file.write_text(content)
    with pytest.raises(DataError) as caught:
        load_task("mmlu", data=file)
    check(caught.value, f"{file}:{line}:")


def test_broken_parquet_file_error_names_the_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "test.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([GOOD["gsm8k"]] * 50), file)
    whole = file.read_bytes()
    assert len(load_task("gsm8k", data=file)) == 50
    rng = random.Random(8)
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        file.write_bytes(bytes(content[: rng.choice([len(content), rng.randrange(len(content))])]))
        try:
            load_task("gsm8k", data=file)
        except DataError as error:
            check(error, str(file))


@pytest.mark.parametrize(
    "suffix",
    [".jsonl", ".csv", *(pytest.param(name, marks=pytest.mark.slow) for name in (".json", ".txt", ".parquet"))],
)
def test_arbitrary_bytes_are_read_or_rejected(suffix: str, tmp_path: Path) -> None:
    rng = random.Random(suffix)
    seeds = [json.dumps(row).encode() for row in GOOD.values()] + [b"a\nA text.\nWhich?\nA.w\nB.x\nC.y\nD.z\n\n"]
    seeds += [b"q,w,x,y,z,A\n", b'",[{\n', b"\xef\xbb\xbf\x00"]
    for _ in range(60):
        content = bytearray(rng.choice(seeds) + b"\n" + rng.choice(seeds))
        for _ in range(rng.randint(0, 6)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        file = tmp_path / f"test{suffix}"
        file.write_bytes(bytes(content))
        for task in BENCHMARKS:
            try:
                assert load_task(task, data=file)
            except DataError as error:
                check(error, str(file))


@pytest.mark.parametrize("path", ["missing/x", "", ".", "/dev/null"])
@pytest.mark.parametrize("task", TASK_NAMES)
def test_path_without_data_raises_typed_error(task: str, path: str) -> None:
    with pytest.raises((ConfigError, DataNotFoundError, DataError)):
        load_task(task, data=path)


def test_many_faults_give_a_short_message(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text("{}\n" * 40_000)
    with pytest.raises(DataError) as caught:
        load_task("gsm8k", data=file)
    assert str(caught.value).count("\n") < 25
    assert "40000 of 40000 rows" in str(caught.value) and "more" in str(caught.value)


def compressed(text: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(gzip.compress(text)) and None


def parquet_of(rows: Callable[[Any], Any]) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        pa = pytest.importorskip("pyarrow", reason="reads Parquet with the extra 'data'")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"question": rows(pa), "answer": rows(pa)}), file)

    return write


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("test.jsonl", compressed(b'{"question": "' + b"x" * 10**6 + b'"}')),
        ("test.jsonl", compressed(b"\n" * 9 + b"x" * 10**6)),
        ("test.json", compressed(b'[\n{"question": "q"}' + b",\n{}" * 10**5 + b"]")),
        ("test.json", compressed(b"[" + b" " * 10**6 + b"]")),
        ("test.parquet", parquet_of(lambda pa: pa.array(["x" * 1000] * 5000).dictionary_encode())),
        ("test.parquet", parquet_of(lambda pa: pa.array(["x" * 10**5] * 64).dictionary_encode())),
        ("test.parquet", parquet_of(lambda pa: pa.array([[None] * 10**5], pa.list_(pa.null())))),
    ],
    ids=["a line", "a later line", "a document of lines", "a document", "equal texts", "categories", "a list of nulls"],
)
def test_small_file_with_large_content_is_rejected(
    name: str, write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "LONGEST", 10**5)
    monkeypatch.setattr(parquet_rows, "LARGEST", 10**6)
    write(tmp_path / name)
    assert (tmp_path / name).stat().st_size < 10**5
    with pytest.raises(DataError, match=r"expected .*at most .* got more"):
        load_task("gsm8k", data=tmp_path / name)


def test_categories_in_lists_are_rejected(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="reads Parquet with the extra 'data'")
    kind = pa.list_(pa.dictionary(pa.int32(), pa.string()))
    parquet_of(lambda pa: pa.array([["x"]], kind))(tmp_path / "test.parquet")
    with pytest.raises(DataError, match="got categories"):
        load_task("gsm8k", data=tmp_path / "test.parquet")
