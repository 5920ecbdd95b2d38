"""Formats of logs: a small file of each tool, or in the documented shape, is recognized and read; damage is reported.

The files in data/logs were written by the tools, with rule-based models: inspect-ai 0.3.285 (three solvers, one
question, two epochs in the archive), langgraph 1.2.24 with langchain-core 1.8.3 (three nodes), smolagents 1.26.0 (a
tool-calling agent), crewai 1.15.30 (three tasks), openai 3.57.0 (replies of chat.completions with added names). Those
in data/logs/documented have the documented shape. ``expected.json`` has the format and the transcripts of each file.
"""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from eval_logs import inspect_sample, lm_eval_row, write_eval
from typer.testing import CliRunner

import search
from mas_gym.cli import app
from mas_gym.errors import DataError
from mas_gym.logs import FORMATS, BrokenLine, LoggedMessage, Transcript, read_transcripts, recognize
from mas_gym.logs.chats import chat

ASKED, SAID = "What is 1 + 1?", "Final Answer: 2"
RECORDED = Path(__file__).parent / "data" / "logs"
SHOP = "Shop 0 has 3 boxes with 4 pens each and gives 1 pens away. How many pens are left?"
TEAM = ("planner", "solver", "writer")


def recorded(name: str) -> Any:
    """Return the content of a file; of a file of lines, their list."""
    text = (RECORDED / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


EXPECTED = recorded("expected.json")
UPDATES = recorded("documented/langgraph-updates.jsonl")
BATCH = recorded("documented/openai-batch.jsonl")


def write(folder: Path, rows: Sequence[object]) -> Path:
    file = folder / "log.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def read(*files: Path, format: str | None = None) -> tuple[list[Transcript], list[BrokenLine]]:
    broken: list[BrokenLine] = []
    return list(read_transcripts(files, format, broken=broken.append)), broken


def stated(one: Transcript | LoggedMessage, without: Sequence[str]) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    found = {field.name: getattr(one, field.name) for field in fields(one) if field.name not in without}
    empty = ((), {}, None, 0) if isinstance(one, LoggedMessage) else (None, {})
    return {name: value for name, value in found.items() if value is False or value not in empty}


def facts_of(one: Transcript) -> dict[str, Any]:
    """Return a transcript as in ``expected.json``."""
    messages = [
        stated(message, ("text", "tool_calls", "agent"))
        | {"said": message.said}
        | ({} if message.agent else {"agent": False})
        for message in one.messages
    ]
    return json.loads(json.dumps(stated(one, ("messages", "place")) | {"messages": messages}))


@pytest.mark.parametrize("name", EXPECTED)
def test_log_is_recognized_and_read(name: str) -> None:
    assert recognize(RECORDED / name) == EXPECTED[name]["format"]
    found, broken = read(RECORDED / name)
    assert not broken
    assert [facts_of(one) for one in found] == EXPECTED[name]["transcripts"]


@pytest.mark.parametrize("name", EXPECTED)
def test_dry_run_shows_the_first_transcript(name: str) -> None:
    done = CliRunner().invoke(app, ["import", str(RECORDED / name), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert f"format {EXPECTED[name]['format']}" in done.output
    assert all(message["speaker"] in done.output for message in EXPECTED[name]["transcripts"][0]["messages"])


@pytest.mark.parametrize("name", EXPECTED)
def test_format_with_null_values_never_raises_other_errors(name: str, tmp_path: Path) -> None:
    def emptied(value: Any, depth: int) -> Any:
        if depth == 0:
            return None
        if isinstance(value, dict):
            return {key: emptied(one, depth - 1) for key, one in value.items()}
        return [emptied(one, depth - 1) for one in value] if isinstance(value, list) else value

    rows = recorded(name) if name.endswith("l") else [recorded(name)]
    for depth in range(1, 8):
        file = write(tmp_path, [emptied(row, depth - name.endswith("l")) for row in rows])
        for format in (None, EXPECTED[name]["format"]):
            try:
                found, broken = read(file, format=format)
            except DataError:
                continue
            assert found or broken


def test_eval_archive_is_read_sample_by_sample(tmp_path: Path) -> None:
    samples = [inspect_sample(1, "C", epoch) for epoch in (1, 2)] + [inspect_sample(2, "I")]
    found, broken = read(write_eval(tmp_path / "log.eval", samples))
    assert not broken
    assert [(one.facts["id"], one.correct) for one in found] == [("1", True), ("1", True), ("2", False)]
    assert found[0].messages[-1].text == SAID
    assert found[0].messages[0].tool_calls[0].name == "add"


def test_evaluations_with_equal_ids_are_imported_as_different_questions(tmp_path: Path) -> None:
    first = write_eval(tmp_path / "a.eval", [inspect_sample(1, "C", epoch) for epoch in (1, 2)])
    second = write_eval(tmp_path / "b.eval", [inspect_sample(1, "C", text="What is 3 + 3?")])
    third = write_eval(tmp_path / "c.eval", [inspect_sample(1, "I")], "another/model")
    found = search.import_transcripts([first, second, third], tmp_path / "runs.db")
    assert (found.transcripts, found.questions, found.broken) == (4, 2, 0)


def test_eval_archive_member_over_the_limit_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mas_gym.logs.inspect_logs.LONGEST", 3000)
    large = inspect_sample(2, "C", text="What is 1 + 1? " * 400)
    found, broken = read(write_eval(tmp_path / "log.eval", [inspect_sample(1, "C"), large]))
    assert len(found) == 1
    assert "3,000" in broken[0].reason


def test_archive_of_another_kind_or_damaged_raises_data_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("chat.json", json.dumps({"messages": []}))
    whole = write_eval(tmp_path / "log.eval", [inspect_sample(1, "C")]).read_bytes()
    (tmp_path / "cut.eval").write_bytes(whole[:-40])
    for name in ("x.zip", "cut.eval"):
        with pytest.raises(DataError):
            read(tmp_path / name)


def test_zstandard_archive_of_inspect_is_read_with_its_solvers_and_tokens() -> None:
    found, broken = read(RECORDED / "inspect.eval")
    assert not broken
    assert [(one.facts["epoch"], one.speakers, one.correct) for one in found] == [
        (1, [*TEAM], True),
        (2, [*TEAM], True),
    ]
    assert [message.tokens for message in found[0].messages] == [7, 10, 8]


def test_damaged_zstandard_archive_is_reported(tmp_path: Path) -> None:
    data = bytearray((RECORDED / "inspect.eval").read_bytes())
    place = data.find(b"samples/7_epoch_2.json")
    data[place + 100 : place + 130] = bytes(30)
    (tmp_path / "log.eval").write_bytes(data)
    found, broken = read(tmp_path / "log.eval")
    assert (len(found), len(broken)) == (1, 1)


def test_langgraph_stream_of_states_and_updates_holds_several_runs(tmp_path: Path) -> None:
    rows = recorded("langgraph-updates-and-values.jsonl")
    found, broken = read(write(tmp_path, [*rows, *rows]))
    assert [(one.question, one.speakers) for one in found] == [(SHOP, [*TEAM])] * 2
    assert not broken
    states = [row for row in rows if row[0] == "values"]
    found, _ = read(write(tmp_path, [*states, *states]))
    assert [len(one.messages) for one in found] == [3, 3]


@pytest.mark.parametrize(
    "row",
    [
        [{"type": "AIMessageChunk", "content": "M"}, {"langgraph_node": "planner"}],
        {"step": 1, "timestamp": "t", "type": "task", "payload": {"name": "planner"}},
    ],
)
def test_langgraph_stream_without_whole_messages_names_the_stream_modes(row: Any, tmp_path: Path) -> None:
    _, broken = read(write(tmp_path, [row] * 2))
    assert all('["updates", "values"]' in line.reason for line in broken) and len(broken) == 2


def test_langgraph_updates_without_a_question_report_the_remedy(tmp_path: Path) -> None:
    _, broken = read(write(tmp_path, UPDATES[1:]))
    assert "__start__" in broken[0].reason


def test_langgraph_stream_holds_several_runs(tmp_path: Path) -> None:
    found, broken = read(write(tmp_path, [*UPDATES, *UPDATES]))
    assert [len(one.messages) for one in found] == [2, 2]
    assert not broken


def test_langgraph_stream_of_states_is_one_run(tmp_path: Path) -> None:
    messages = [{"type": "human", "content": ASKED}, *({"type": "ai", "content": text} for text in ("Add.", SAID))]
    states = [{"messages": messages[:count]} for count in (1, 2, 3, 1, 3)]
    found, broken = read(write(tmp_path, states))
    assert [len(one.messages) for one in found] == [2, 2]
    assert not broken


def test_crewai_log_holds_several_runs(tmp_path: Path) -> None:
    log = recorded("crewai-log.json")
    found, _ = read(write(tmp_path, [[*log, *log]]))
    assert [one.speakers for one in found] == [[*TEAM]] * 2


def test_chat_entry_with_several_tool_responses_gives_a_message_each() -> None:
    answers = [{"tool_call_id": "1", "name": "f", "content": "3"}, {"tool_call_id": "2", "name": "g", "content": "4"}]
    messages = [
        {"role": "system", "content": "Add.", "label": 0},
        {"role": "user", "content": "1 + 2, 2 + 2?"},
        {"role": "assistant", "content": "I call f and g.", "label": 1},
        {"role": "tool", "tool_responses": answers},
    ]
    found = chat({"messages": messages})
    assert [(one.speaker, one.text, one.label) for one in found.messages[1:]] == [("f", "3", None), ("g", "4", None)]
    assert found.messages[0].label == 1


def test_openai_batch_joins_two_files_and_reports_errors(tmp_path: Path) -> None:
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    failed = {"id": "b2", "custom_id": "q2", "response": None, "error": {"code": "batch_expired", "message": "late"}}
    asked.write_text(json.dumps(BATCH[0]))
    answered.write_text("\n".join(map(json.dumps, [BATCH[1], failed])))
    for files in ((asked, answered), (answered, asked)):
        [one], [lost] = read(*files)
        assert (one.question, one.messages[0].tokens) == (ASKED, 7)
        assert "batch_expired" in lost.reason
    _, broken = read(answered)
    assert "input file" in broken[0].reason
    assert read(asked)[1]


def test_lm_eval_repeats_become_samples(tmp_path: Path) -> None:
    row = {**lm_eval_row(1, 1.0), "resps": [["The answer is 2.", "The answer is 3."]]}
    found, _ = read(write(tmp_path, [row]))
    assert [(one.messages[0].text, one.correct) for one in found] == [
        ("The answer is 2.", None),
        ("The answer is 3.", None),
    ]


def test_math_shepherd_label_of_another_text_is_reported(tmp_path: Path) -> None:
    [row] = recorded("documented/math-shepherd.jsonl")
    assert read(write(tmp_path, [{**row, "label": "another text +"}]))[1]


def test_list_of_updates_is_read_if_its_format_is_named(tmp_path: Path) -> None:
    [one], _ = read(write(tmp_path, [UPDATES]), format="langgraph")
    assert one.speakers == ["planner", "solver"]


def test_langfuse_trace_without_observations_reports_the_remedy(tmp_path: Path) -> None:
    trace = recorded("documented/langfuse-download.json")["trace"]
    bare = {**trace, "sessionId": None, "observations": ["o1", "o2"]}
    _, broken = read(write(tmp_path, [bare]))
    assert "observations" in broken[0].reason


def test_every_format_is_documented_in_the_guide() -> None:
    guide = (Path(__file__).parents[1] / "docs" / "howto" / "import-logs.md").read_text()
    assert not [name for name in FORMATS if f"`{name}`" not in guide]


def test_eval_archive_with_an_unreadable_compression_names_the_remedy(tmp_path: Path) -> None:
    file = write_eval(tmp_path / "log.eval", [inspect_sample(1, "C")])
    data = file.read_bytes()
    # The method is at byte 8 of a local header and at byte 10 of an entry of the directory; 98 is PPMd.
    for mark, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        place = data.find(mark)
        while place >= 0:
            data = data[: place + at] + b"\x62\x00" + data[place + at + 2 :]
            place = data.find(mark, place + 1)
    file.write_bytes(data)
    for call in (read, search.compare_results):
        with pytest.raises(DataError, match="inspect log convert"):
            call(file)
