"""Logs that are cut, huge, cyclic or misleading: a clear error or a counted line, and everything else is imported."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import search
from mas_gym.cli import app
from mas_gym.cli.view import Pages
from mas_gym.errors import ConfigError, DataError
from mas_gym.logs import FORMATS, BrokenLine, Transcript, read_transcripts, recognize
from search.report.report import write_report
from search.store.staged_logs import question_name

EVIL = "\x1b[2J\x1b]0;owned\x07[red]</script><script>alert(1)</script>\u202e"


def good(number: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "question": f"Number {number}?",
        "messages": [{"role": "assistant", "name": "A", "content": f"Final Answer: {number}"}],
        "answer": str(number),
        **more,
    }


def line(row: object) -> bytes:
    return json.dumps(row).encode() + b"\n"


def read(path: Path, format: str | None = "chat") -> tuple[list[Transcript], list[BrokenLine]]:
    broken: list[BrokenLine] = []
    return list(read_transcripts(path, format, broken=broken.append)), broken


def test_broken_lines_are_counted_with_line_numbers(tmp_path: Path) -> None:
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    lines = [
        line(good(1)),
        b"\xff\xfe not UTF-8\n",
        b'{"question": "cut\n',
        b"\n",
        b"null\n",
        b"7\n",
        line({"messages": 5}),
        line({"messages": [5]}),
        line({"messages": [{"content": "no role"}]}),
        line(good(2, score=float("nan"))),
        line(good(3, correct="perhaps")),
        line(good(4, answer={"a": 1, "b": 2})),
        line(good(5, kind="guess")),
        line({**good(6), "messages": [{"role": "assistant", "content": "x", "label": float("nan")}]}),
        line({**good(7), "messages": [{"role": "assistant", "name": "n" * 1000, "content": "x"}]}),
        line({**good(8), "messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}),
        b'{"messages": ' + b"9" * 10_000 + b"}\n",
        deep,
        line(good(9)),
    ]
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(lines))
    found, broken = read(path)
    assert [one.question for one in found] == ["Number 1?", "Number 9?"]
    assert [int(one.place.rpartition(":")[2]) for one in broken] == [*range(2, 4), *range(5, 19)]
    assert all(one.reason and len(one.reason) < 500 for one in broken)


def test_truncated_file_keeps_earlier_lines(tmp_path: Path) -> None:
    whole = b"".join(line(good(n)) for n in range(2000))
    zipped = gzip.compress(whole)
    (tmp_path / "a.jsonl.gz").write_bytes(zipped[: len(zipped) // 2])
    (tmp_path / "b.jsonl.gz").write_bytes(zipped[: len(zipped) // 2] + b"\0" * 1000)
    (tmp_path / "c.json").write_text(json.dumps([good(n) for n in range(50)], indent=1)[:-100], encoding="utf-8")
    for name, least in (("a.jsonl.gz", 100), ("b.jsonl.gz", 100), ("c.json", 45)):
        found, broken = read(tmp_path / name)
        assert len(found) >= least
        assert 1 <= len(broken) <= 2, broken


def test_utf16_and_binary_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json.dumps(good()).encode("utf-16"))
    with pytest.raises(DataError, match="expected UTF-8 text"):
        recognize(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(bytes(range(256)) * 100)
    with pytest.raises(DataError, match="expected a log in one of the formats"):
        recognize(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="no JSON value"):
        recognize(tmp_path / "c.jsonl")
    with pytest.raises(DataError, match="expected a log in one of the formats"):
        search.import_transcripts(tmp_path / "c.jsonl", tmp_path / "runs.db")


def test_json_lines_in_a_json_file_are_read_after_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_bytes(b'{"cut": \n' + line(good(1)) + b"{\n" + line(good(2)))
    found, broken = read(tmp_path / "log.json")
    assert [one.question for one in found] == ["Number 1?", "Number 2?"]
    assert [one.place.rpartition(":")[2] for one in broken] == ["1", "3"]


def test_file_that_is_not_a_log_is_counted_as_broken(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line({"spam": 1}))
    (tmp_path / "b.jsonl").write_bytes(line(good(1)))
    (tmp_path / "c.jsonl").write_bytes(b"")
    done = search.import_transcripts(sorted(tmp_path.glob("*.jsonl")), tmp_path / "runs.db")
    assert (done.transcripts, [Path(one.place).name for one in done.lines]) == (1, ["a.jsonl", "c.jsonl"])


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line(good()))
    found, broken = read(tmp_path / "a.jsonl", None)
    assert (len(found), broken) == (1, [])


def spans(*links: tuple[str, str | None], **more: Any) -> list[dict[str, Any]]:
    message = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "It is 5."}]}])
    asked = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "Which?"}]}])
    keys = {"gen_ai.operation.name": "invoke_agent", "gen_ai.output.messages": message, "gen_ai.input.messages": asked}
    attributes = [{"key": key, "value": {"stringValue": value}} for key, value in keys.items()]
    return [
        {"traceId": "t", "spanId": name, "parentSpanId": parent, "attributes": attributes, **more}
        for name, parent in links
    ]


def test_cycles_duplicates_and_missing_parents_of_spans_are_counted(tmp_path: Path) -> None:
    links = [("a", "b"), ("b", "c"), ("c", "a"), ("d", "d"), ("e", "gone"), ("f", None), ("f", None)]
    path = tmp_path / "traces.jsonl"
    path.write_bytes(line({"resourceSpans": [{"scopeSpans": [{"spans": spans(*links)}]}]}))
    [one], broken = read(path, None)
    assert not broken
    assert one.dropped["cycle of parent spans"] == 2
    assert one.dropped["link to a missing parent span"] == 1
    assert one.dropped["span with a duplicate id"] == 1
    assert len(one.messages) == 6


def test_long_span_chain_takes_linear_time(tmp_path: Path) -> None:
    names = [f"s{n}" for n in range(5000)]
    path = tmp_path / "traces.jsonl"
    chained = spans(*zip(names, [None, *names], strict=False))
    path.write_bytes(line({"resourceSpans": [{"scopeSpans": [{"spans": chained}]}]}))
    [one], _ = read(path, None)
    assert len(one.messages) == 5000


@pytest.mark.parametrize("value", [None, 0, -1, 1e400, "x", [], {}, [[]], {"messages": {}}, True, [None], {"": ""}])
@pytest.mark.parametrize("format", sorted(FORMATS))
def test_arbitrary_row_is_read_or_counted_as_broken(value: Any, format: str, tmp_path: Path) -> None:
    templates: list[Any] = [
        good(),
        {"chat_history": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A"}]},
        {"values": {"messages": [{"type": "human", "content": "Q?"}, {"type": "ai", "content": "A"}]}},
        {"question": "Q?", "history": [{"role": "human", "content": "x"}], "mistake_agent": "A", "mistake_step": "0"},
        {"question": "Q?", "messages": [{"role": "assistant", "content": "x"}], "step_labels": {"0": 1}},
        {"problem": "Q?", "steps": ["a"], "label": 0, "agents": ["A"], "final_answer_correct": False},
        {"question": {"problem": "Q?"}, "label": {"steps": [{"completions": [{"text": "a", "rating": 1}]}]}},
        {"question": "Q?", "steps": ["a"], "labels": [1]},
        [
            {"__event__": "a.ModelRequest", "parts": [{"content": "Q?"}]},
            {"__event__": "a.ModelResponse", "message": {}},
            {"__event__": "a.ToolResultsEvent", "results": [{"__event__": "a.ToolResultEvent", "result": {}}]},
        ],
        {"resourceSpans": [{"scopeSpans": [{"spans": spans(("a", None))}]}]},
        {"id": "t", "observations": [{"id": "g", "type": "GENERATION", "input": "Q?", "output": "A"}], "scores": []},
        {"id": "r", "run_type": "llm", "inputs": {"q": 1}, "outputs": {"generations": [[{"text": "A"}]]}},
        {"context": {"trace_id": "t", "span_id": "s"}, "attributes": {}, "events": [{"name": "gen_ai.choice"}]},
    ]

    def changed(part: Any) -> list[Any]:
        """Return the part with each value in it replaced in turn."""
        if isinstance(part, dict):
            return [value] + [{**part, key: one} for key in part for one in changed(part[key])]
        if isinstance(part, list):
            return [value] + [[*part[:i], one, *part[i + 1 :]] for i in range(len(part)) for one in changed(part[i])]
        return [value]

    rows = [row for template in templates for row in changed(template)]
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(map(line, [*rows, [good()]])))
    read(path, format)


def test_colliding_ids_lose_no_transcript(tmp_path: Path) -> None:
    rows = [
        good(1, question_id="q"), good(2, question_id="q"), good(2, question_id="q"),
        good(1, id="s"), good(1, id="s"), good(1, id="s", score=1.0),
        good(3, question_id=f"q {question_name('Number 4?', '4')}"), good(4, question_id="q"),
    ]  # fmt: skip
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(map(line, rows)))
    done = search.import_transcripts(path, tmp_path / "runs.db")
    assert done.transcripts + done.broken == len(rows)
    assert [one.place.rpartition(":")[2] for one in done.lines if "twice" in one.reason] == ["5"]
    with search.open_store(tmp_path / "runs.db") as store:
        held = [(problem.question, len(plan.candidates)) for problem, plan in store.searches()]
    assert sum(number for _, number in held) == done.transcripts


def test_reserved_names_and_answer_markers_are_imported(tmp_path: Path) -> None:
    marked = "I say.\n\n[program returned] 5"
    messages = [
        {"role": "assistant", "name": name, "content": marked}
        for name in ("sink", "sink (agent)", " Sink ", "ALL", "q", "*", "start", "A", "a")
    ]
    rows = [
        {"question": "Q?", "messages": messages, "answer": "5"},
        {"question": "Q?", "messages": messages[1:], "answer": "5"},
    ]
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(map(line, rows)))
    search.import_transcripts(path, tmp_path / "runs.db", kind="text")
    with search.open_store(tmp_path / "runs.db") as store:
        [(_, plan)] = store.searches()
    assert plan.correct is False
    assert len(plan.candidates) == 2


def test_log_text_is_escaped_in_terminal_and_page(tmp_path: Path) -> None:
    row = good(
        question=EVIL,
        messages=[{"role": "assistant", "name": EVIL, "content": EVIL, EVIL: 1, "value": -0.5}, {"role": "assistant",
                  "name": "B", "content": EVIL + "Final Answer: 1", "value": -1}],
        question_id=EVIL, id=EVIL, answer=EVIL, **{EVIL: EVIL, EVIL + "2": [EVIL]},
    )  # fmt: skip
    path, store = tmp_path / "log.jsonl", tmp_path / "runs.db"
    path.write_bytes(line(row) + f'{{"{EVIL}": "'.encode() + b'"}\n' + line({EVIL: EVIL}))
    shown = ""
    for arguments in (
        ("import", path, "--dry-run"), ("import", path, "--store", store, "--name", EVIL), ("blame", store),
        ("status", store), ("report", store, "--out", tmp_path / "r.html"),
    ):  # fmt: skip
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(one) for one in arguments])
        assert result.exit_code == 0, result.output
        shown += result.output
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    pages = Pages(store)
    with search.open_store(store) as opened:
        [run] = opened.runs()
        [problem] = opened.problems()
        write_report(opened, tmp_path / "report.html")
    tree = pages.page(f"/tree/{run.run}", {"problem": problem.id})
    for page in (pages.page("/", {}), tree, (tmp_path / "report.html").read_text(encoding="utf-8")):
        assert "<script>alert" not in page


def test_lone_surrogates_survive_the_store(tmp_path: Path) -> None:
    odd = "half \ud800 pair"
    row = good(question=odd, id=odd, messages=[{"role": "assistant", "name": "A", "content": odd}])
    path = tmp_path / "log.jsonl"
    path.write_bytes(line(row))
    done = search.import_transcripts(path, tmp_path / "runs.db")
    assert (done.transcripts, done.broken) == (1, 0)
    with search.open_store(tmp_path / "runs.db") as store:
        [plan] = store.plans()
    assert plan.text == odd


def test_log_without_transcripts_raises_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(line({"messages": [{"role": "user", "content": "alone"}]}))
    with pytest.raises(ConfigError, match=r"found none; the first broken line is .*:1: expected at least one message"):
        search.import_transcripts(path, tmp_path / "runs.db")
    assert not list(tmp_path.glob("*import*"))


@pytest.mark.slow
def test_concurrent_imports_of_one_log_succeed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(line(good(n)) for n in range(300)))
    command = [sys.executable, "-m", "mas_gym.cli", "import", str(path), "--store", str(tmp_path / "runs.db")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [(one.communicate(timeout=120), one.returncode) for one in both]
    assert 0 in [code for _, code in results]
    assert all("Traceback" not in error for (_, error), _ in results)
    with search.open_store(tmp_path / "runs.db") as store:
        assert len(list(store.plans())) == 300
