"""Formats of logs: a small file of each tool, or in the documented shape, is recognized and read; damage is reported.

The files in data/logs were written by the tools, with rule-based models: inspect-ai 0.3.285 (three solvers, one
question, two epochs in the archive), langgraph 1.2.24 with langchain-core 1.8.3 (three nodes), smolagents 1.26.0 (a
tool-calling agent), crewai 1.15.30 (three tasks), openai 3.57.0 (replies of chat.completions with added names).
"""

import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from eval_logs import choice_row, inspect_sample, lm_eval_row, write_eval
from typer.testing import CliRunner

import search
from mas_gym.cli import app
from mas_gym.errors import DataError
from mas_gym.logs import FORMATS, BrokenLine, Transcript, read_transcripts, recognize

ASKED, SAID = "What is 1 + 1?", "Final Answer: 2"
RECORDED = Path(__file__).parent / "data" / "logs"
SHOP = "Shop 0 has 3 boxes with 4 pens each and gives 1 pens away. How many pens are left?"
TEAM = ("planner", "solver", "writer")


def recorded(name: str) -> Any:
    """Return the content of a file that a tool wrote; of a file of lines, their list."""
    text = (RECORDED / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


class Case(NamedTuple):
    """A log and what it holds.

    Attributes:
        format: Name of the format.
        content: A value for a ``.json`` file, or a list of rows for a ``.jsonl`` file.
        lines: Whether the content is a list of rows.
        speakers: The speakers, in order.
        last: The text of the last message.
        reference: The reference answer.
        correct: The outcome.
        dropped: A kind of content that is left out.
        asked: The question.
    """

    format: str
    content: Any
    lines: bool = False
    speakers: tuple[str, ...] = ("Assistant",)
    last: str = SAID
    reference: str | None = None
    correct: bool | None = None
    dropped: str = ""
    asked: str = ASKED


def agent_message(source: str, content: object, kind: str = "TextMessage", **more: object) -> dict[str, object]:
    return {"id": "m", "source": source, "models_usage": None, "metadata": {}, "content": content, "type": kind, **more}


AUTOGEN = [
    agent_message("user", ASKED),
    agent_message("planner", "Add.", models_usage={"prompt_tokens": 9, "completion_tokens": 4}),
    agent_message("planner", "Hm.", "ThoughtEvent"),
    agent_message("solver", [{"id": "c1", "name": "add", "arguments": '{"a": 1}'}], "ToolCallRequestEvent"),
    agent_message(
        "solver", [{"content": "2", "name": "add", "call_id": "c1", "is_error": False}], "ToolCallExecutionEvent"
    ),
    agent_message("solver", SAID),
]
UPDATES = [
    {"__start__": {"messages": [{"type": "human", "content": ASKED}]}},
    {"planner": {"messages": [{"type": "ai", "content": "Add."}]}},
    {"solver": {"messages": [{"type": "ai", "content": SAID}]}, "router": None},
]
BATCH = [
    {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions",
     "body": {"model": "small", "messages": [{"role": "user", "content": ASKED}]}},
    {"id": "b1", "custom_id": "q1", "error": None, "response": {"status_code": 200, "request_id": "r", "body": {
        "object": "chat.completion", "model": "small", "usage": {"completion_tokens": 7},
        "choices": [{"index": 0, "message": {"role": "assistant", "content": SAID}, "finish_reason": "stop"}]}}},
]  # fmt: skip
BATCH_RESPONSES = [
    {"custom_id": "q1", "method": "POST", "url": "/v1/responses", "body": {"model": "small", "input": ASKED}},
    {"id": "b1", "custom_id": "q1", "error": None, "response": {"status_code": 200, "body": {
        "object": "response", "model": "small",
        "output": [{"type": "reasoning", "summary": []},
                   {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": SAID}]}]}}},
]  # fmt: skip
UNNAMED = "name of a message's node, which a state does not contain (stream_mode='updates' does)"
MARK = "\u043a\u0438"
SHEPHERD = f"{ASKED} Step 1: 1 + 1 = 2 {MARK}\n{SAID} {MARK}"


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    def attribute(key: str, value: object) -> dict[str, Any]:
        return {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}

    found = []
    for number, span in enumerate(spans, 1):
        attributes = [attribute(key, value) for key, value in span["attributes"].items()]
        events = [
            {"name": name, "attributes": [attribute(key, value) for key, value in fields.items()]}
            for name, fields in span.get("events", ())
        ]
        identity = {"traceId": "0" * 31 + "1", "spanId": f"{number:016x}", "parentSpanId": span.get("parent", "")}
        times = {"startTimeUnixNano": str(number), "endTimeUnixNano": str(number + 1)}
        found.append({**identity, **times, "name": span["name"], "attributes": attributes, "events": events})
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": found}]}]}


OPENLIT = otlp(
    {
        "name": "chat",
        "attributes": {"gen_ai.operation.name": "chat", "gen_ai.agent.name": "solver"},
        "events": [
            ("gen_ai.content.prompt", {"gen_ai.prompt": f"system: Calculate.\nuser: {ASKED}"}),
            ("gen_ai.content.completion", {"gen_ai.completion": SAID}),
        ],
    }
)
REASONING = otlp(
    {
        "name": "chat",
        "attributes": {
            "gen_ai.operation.name": "chat",
            "gen_ai.agent.name": "solver",
            "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": ASKED}]}]),
            "gen_ai.output.messages": json.dumps(
                [
                    {
                        "role": "assistant",
                        "parts": [{"type": "reasoning", "content": "Hm."}, {"type": "text", "content": SAID}],
                    }
                ]
            ),
        },
    }
)
OPENINFERENCE = otlp(
    {"name": "solver", "attributes": {"openinference.span.kind": "AGENT", "input.value": ASKED, "output.value": SAID}},
    {
        "name": "ChatCompletion",
        "parent": f"{1:016x}",
        "attributes": {
            "openinference.span.kind": "LLM",
            "llm.model_name": "small",
            "llm.token_count.completion": 3,
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.contents.0.message_content.type": "text",
            "llm.input_messages.0.message.contents.0.message_content.text": ASKED,
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.content": SAID,
            "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "add",
            "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": "{}",
        },
    },
)
PHOENIX = [
    {
        "name": "llm", "span_kind": "LLM", "parent_id": None, "start_time": "2025-01-01T00:00:00+00:00",
        "context.trace_id": "t1", "context.span_id": "s1", "attributes.agent.name": "solver",
        "attributes.llm.input_messages": [{"message.role": "user", "message.content": ASKED}],
        "attributes.llm.output_messages": [{"message.role": "assistant", "message.content": SAID}],
    }
]  # fmt: skip
LANGFUSE = {
    "trace": {"id": "t1", "timestamp": "2025-01-01T00:00:00Z", "name": "run", "input": ASKED, "output": SAID},
    "observations": [
        {"id": "o1", "traceId": "t1", "type": "AGENT", "name": "solver", "startTime": "2025-01-01T00:00:00Z"},
        {
            "id": "o2", "traceId": "t1", "type": "GENERATION", "name": "llm", "parentObservationId": "o1",
            "startTime": "2025-01-01T00:00:01Z", "input": json.dumps([{"role": "user", "content": ASKED}]),
            "output": json.dumps({"role": "assistant", "content": SAID}), "usageDetails": {"output": 3},
        },
    ],
}  # fmt: skip
CASES = {
    "autogen result": Case(
        "autogen",
        {"messages": AUTOGEN, "stop_reason": "done"},
        speakers=("planner", "solver", "add"),
        dropped="ThoughtEvent",
    ),
    "autogen messages": Case("autogen", AUTOGEN, speakers=("planner", "solver", "add")),
    "langgraph updates": Case("langgraph", UPDATES, speakers=("planner", "solver")),
    "langgraph update lines": Case("langgraph", UPDATES, lines=True, speakers=("planner", "solver")),
    "langgraph modes": Case(
        "langgraph", [["updates", one] for one in UPDATES], lines=True, speakers=("planner", "solver")
    ),
    "langgraph states and updates": Case(
        "langgraph",
        recorded("langgraph-updates-and-values.jsonl"),
        lines=True,
        speakers=TEAM,
        last="There are 11 pens left.\nFinal Answer: 11",
        asked=SHOP,
    ),
    "langgraph streamed states": Case(
        "langgraph",
        recorded("langgraph-values.jsonl"),
        lines=True,
        last="There are 11 pens left.\nFinal Answer: 11",
        asked=SHOP,
        dropped=UNNAMED,
    ),
    "langgraph state": Case(
        "langgraph",
        recorded("langgraph-state.json"),
        last="There are 11 pens left.\nFinal Answer: 11",
        asked=SHOP,
        dropped=UNNAMED,
    ),
    "openai chat": Case(
        "chat",
        recorded("openai-chat.json"),
        speakers=TEAM,
        last="There are 11 pens left.\nFinal Answer: 11",
        reference="11",
        asked=SHOP,
    ),
    "openlit": Case("otel", OPENLIT, speakers=("solver",)),
    "otel reasoning": Case("otel", REASONING, speakers=("solver",)),
    "openinference": Case("otel", OPENINFERENCE, speakers=("solver",)),
    "phoenix table": Case("phoenix", PHOENIX, lines=True, speakers=("solver",)),
    "langfuse download": Case("langfuse", LANGFUSE, speakers=("solver",)),
    "inspect": Case(
        "inspect",
        recorded("inspect.json"),
        speakers=TEAM,
        last="There are 38 pens left.\nFinal Answer: 38",
        reference="38",
        correct=True,
        asked=SHOP.replace("Shop 0 has 3 boxes with 4", "Shop 7 has 10 boxes with 4").replace("1 pens", "2 pens"),
        dropped="user's message with the question",
    ),
    "inspect tools": Case(
        "inspect",
        {"version": 2, "eval": {"model": "m"}, "plan": {}, "samples": [inspect_sample(1, "C")]},
        speakers=("Assistant", "add"),
        reference="2",
        correct=True,
        dropped="part of type reasoning",
    ),
    "lm-eval": Case(
        "lm-eval",
        [lm_eval_row(1, 0.0), lm_eval_row(1, 1.0, "flexible-extract")],
        lines=True,
        last="The answer is 2.",
        reference="2",
        correct=False,
    ),
    "lm-eval choice": Case("lm-eval", [choice_row(1, 2, 2)], lines=True, last="blue", correct=True, asked="Which one?"),
    "verifiers": Case(
        "verifiers",
        [
            {
                "example_id": 3, "task": "sums", "reward": 1.0, "answer": "2", "metrics": {},
                "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": ASKED}],
                "completion": [{"role": "assistant", "content": SAID}],
            }
        ],
        lines=True,
        reference="2",
        correct=True,
    ),
    "sharegpt": Case(
        "sharegpt",
        [{"id": "c", "conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": SAID}]}],
        lines=True,
    ),
    "math-shepherd": Case(
        "math-shepherd",
        [{"input": SHEPHERD, "label": SHEPHERD.replace(MARK, "+", 1).replace(MARK, "-"), "task": "x"}],
        lines=True,
        correct=False,
    ),
    "crewai log": Case("crewai", recorded("crewai-log.json"), speakers=TEAM, last="11", asked=SHOP),
    "crewai output": Case("crewai", recorded("crewai-output.json"), speakers=TEAM, last="11", asked=SHOP),
    "smolagents": Case(
        "smolagents",
        recorded("smolagents-result.json"),
        speakers=("Agent", "times", "final_answer"),
        last="11",
        asked=SHOP,
    ),
    "smolagents memory": Case(
        "smolagents",
        recorded("smolagents-steps.json"),
        speakers=("Agent", "times", "final_answer"),
        last="11",
        asked=SHOP,
    ),
    "openai batch": Case("openai-batch", BATCH, lines=True),
    "openai batch responses": Case("openai-batch", BATCH_RESPONSES, lines=True),
}  # fmt: skip


def write(folder: Path, case: Case) -> Path:
    file = folder / ("log.jsonl" if case.lines else "log.json")
    rows = case.content if case.lines else [case.content]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def read(*files: Path, format: str | None = None) -> tuple[list[Transcript], list[BrokenLine]]:
    broken: list[BrokenLine] = []
    return list(read_transcripts(files, format, broken=broken.append)), broken


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_format_is_recognized_and_read(case: Case, tmp_path: Path) -> None:
    file = write(tmp_path, case)
    assert recognize(file) == case.format
    [one], broken = read(file)
    assert not broken
    assert one.question == case.asked
    assert tuple(one.speakers) == case.speakers
    assert one.messages[-1].text == case.last
    assert (one.reference, one.correct) == (case.reference, case.correct)
    assert not case.dropped or one.dropped[case.dropped]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_dry_run_shows_the_first_transcript(case: Case, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["import", str(write(tmp_path, case)), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert f"format {case.format}" in done.output
    assert all(name in done.output for name in case.speakers)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_format_with_null_values_never_raises_other_errors(case: Case, tmp_path: Path) -> None:
    def emptied(value: Any, depth: int) -> Any:
        if depth == 0:
            return None
        if isinstance(value, dict):
            return {key: emptied(one, depth - 1) for key, one in value.items()}
        return [emptied(one, depth - 1) for one in value] if isinstance(value, list) else value

    for depth in range(1, 8):
        file = write(tmp_path, case._replace(content=emptied(case.content, depth)))
        for format in (None, case.format):
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
    found, broken = read(write(tmp_path, Case("langgraph", [*rows, *rows], lines=True)))
    assert [(one.question, one.speakers) for one in found] == [(SHOP, [*TEAM])] * 2
    assert not broken
    states = [row for row in rows if row[0] == "values"]
    found, _ = read(write(tmp_path, Case("langgraph", [*states, *states], lines=True)))
    assert [len(one.messages) for one in found] == [3, 3]


@pytest.mark.parametrize(
    "row",
    [
        [{"type": "AIMessageChunk", "content": "M"}, {"langgraph_node": "planner"}],
        {"step": 1, "timestamp": "t", "type": "task", "payload": {"name": "planner"}},
    ],
)
def test_langgraph_stream_without_whole_messages_names_the_stream_modes(row: Any, tmp_path: Path) -> None:
    _, broken = read(write(tmp_path, Case("langgraph", [row] * 2, lines=True)))
    assert all('["updates", "values"]' in line.reason for line in broken) and len(broken) == 2


def test_langgraph_updates_without_a_question_report_the_remedy(tmp_path: Path) -> None:
    _, broken = read(write(tmp_path, Case("langgraph", UPDATES[1:])))
    assert "__start__" in broken[0].reason


def test_langgraph_stream_holds_several_runs(tmp_path: Path) -> None:
    found, broken = read(write(tmp_path, Case("langgraph", [*UPDATES, *UPDATES], lines=True)))
    assert [len(one.messages) for one in found] == [2, 2]
    assert not broken


def test_langgraph_stream_of_states_is_one_run(tmp_path: Path) -> None:
    messages = [{"type": "human", "content": ASKED}, *({"type": "ai", "content": text} for text in ("Add.", SAID))]
    states = [{"messages": messages[:count]} for count in (1, 2, 3, 1, 3)]
    found, broken = read(write(tmp_path, Case("langgraph", states, lines=True)))
    assert [len(one.messages) for one in found] == [2, 2]
    assert not broken


def test_crewai_log_holds_several_runs(tmp_path: Path) -> None:
    log = recorded("crewai-log.json")
    found, _ = read(write(tmp_path, Case("crewai", [*log, *log])))
    assert [one.speakers for one in found] == [[*TEAM]] * 2


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
    found, _ = read(write(tmp_path, Case("lm-eval", [row], lines=True)))
    assert [(one.messages[0].text, one.correct) for one in found] == [
        ("The answer is 2.", None),
        ("The answer is 3.", None),
    ]


def test_math_shepherd_labels_are_read(tmp_path: Path) -> None:
    [one], _ = read(write(tmp_path, CASES["math-shepherd"]))
    assert [message.label for message in one.messages] == [1, -1]
    other = {**CASES["math-shepherd"].content[0], "label": "another text +"}
    assert read(write(tmp_path, Case("math-shepherd", [other], lines=True)))[1]


def test_langfuse_trace_without_observations_reports_the_remedy(tmp_path: Path) -> None:
    bare = {**LANGFUSE["trace"], "sessionId": None, "observations": ["o1", "o2"]}  # type: ignore[dict-item]
    _, broken = read(write(tmp_path, Case("langfuse", [bare], lines=True)))
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
