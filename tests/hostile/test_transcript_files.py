"""Files of labeled transcripts that are broken on purpose, and critics that fail on them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mas_gym.errors import CriticError, DataError, DataNotFoundError
from search import ScoringContext
from search.compare import bench_critic
from search.compare.transcripts import LabeledTranscript, read_labeled

GOOD: dict[str, Any] = {"problem": "1 + 1?", "steps": ["2"], "label": -1}

FAULTS: dict[str, tuple[object, str]] = {
    "no object": (["a"], "expected an object"),
    "no problem": ({"steps": ["2"], "label": -1}, "expected a non-empty string as problem, got None"),
    "no steps": (GOOD | {"steps": []}, "at least one step"),
    "steps as text": (GOOD | {"steps": "2"}, "expected a list of steps"),
    "a step that is no text": (GOOD | {"steps": ["a", None]}, "steps: .* got None"),
    "label too large": (GOOD | {"label": 1}, "from -1 .* to 0 .*, got 1"),
    "label too small": (GOOD | {"label": -2}, "got -2"),
    "label as truth": (GOOD | {"label": True}, "got True"),
    "label as text": (GOOD | {"label": "0"}, "got '0'"),
    "label not a number": (GOOD | {"label": math.nan}, "got nan"),
    "huge label": (GOOD | {"label": 10**400}, "expected a label"),
    "agents of other number": (GOOD | {"agents": ["A", "B"]}, "expected 1 agents"),
    "path as system": (GOOD | {"mas": "../../etc/passwd"}, "expected the name of a shipped system"),
    "infinite log-probability": (GOOD | {"tokens": [1], "logprobs": [-math.inf]}, "logprobs: .* got -inf"),
    "positive log-probability": (GOOD | {"tokens": [1], "logprobs": [0.5]}, "logprobs: .* got 0.5"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_invalid_row_error_names_the_row(name: str, tmp_path: Path) -> None:
    row, said = FAULTS[name]
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join([json.dumps(GOOD), json.dumps(row)]), encoding="utf-8")
    with pytest.raises(
        DataError, match=rf"1 of 2 rows are not valid labeled transcripts(.|\n)*t\.jsonl:2( item 0)?: .*{said}"
    ):
        read_labeled(file)


def test_files_that_are_not_transcripts_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="no such file"):
        read_labeled(tmp_path / "none.json")
    (tmp_path / "t.csv").write_text("problem,steps,label\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"expected a file of type \.json, \.jsonl, \.parquet"):
        read_labeled(tmp_path / "t.csv")
    (tmp_path / "t.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match="at least one transcript"):
        read_labeled(tmp_path / "t.json")
    (tmp_path / "p.parquet").write_bytes(b"PAR1" + b"\0" * 64 + b"PAR1")
    with pytest.raises(DataError, match="expected a Parquet file"):
        read_labeled(tmp_path / "p.parquet")
    (tmp_path / "deep.jsonl").write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(DataError, match="1 of 1 rows"):
        read_labeled(tmp_path / "deep.jsonl")


class Broken:
    """Returns the given value for transcripts with the word "odd", and 0.5 for others."""

    name, terminal_only, free = "broken", False, False

    def __init__(self, odd: object) -> None:
        self._odd = odd

    def score(self, contexts: Sequence[ScoringContext]) -> list[Any]:
        if isinstance(self._odd, Exception) and any("odd" in context.state.question for context in contexts):
            raise self._odd
        return [self._odd if "odd" in context.state.question else 0.5 for context in contexts]


ODD = {
    "not a number": (math.nan, "expected a finite number, got nan"),
    "infinite": (math.inf, "expected a finite number, got inf"),
    "text": ("high", "expected a finite number, got 'high'"),
    "nothing": (None, "expected a finite number, got None"),
    "an error": (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
    "an error without words": (KeyError(), "KeyError"),
}


@pytest.mark.parametrize("name", ODD)
def test_critic_error_excludes_only_the_affected_transcripts(name: str) -> None:
    odd, reason = ODD[name]
    rows = [LabeledTranscript(str(i), f"{i} odd" if i == 3 else f"{i}", ("s", "t"), 1 - i % 3) for i in range(9)]
    found = bench_critic(Broken(odd), rows, threshold=0.0)
    [(said, number)] = found.failed.items()
    assert (number, reason in said) == (1, True)
    assert found.by_depth[1].prefixes == 8
    with pytest.raises(CriticError, match="scored none of 1 transcripts"):
        bench_critic(Broken(odd), rows[3:4], threshold=0.0)


def test_critic_with_too_few_values_fails() -> None:
    class Short(Broken):
        def score(self, contexts: Sequence[ScoringContext]) -> list[Any]:
            return super().score(contexts)[1:]

    with pytest.raises(CriticError, match="expected 2 values, got 1"):
        bench_critic(Short(0), [LabeledTranscript("a", "q", ("s", "t"), 0)], threshold=0.0)
