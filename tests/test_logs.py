"""Logs as transcripts, and transcripts as runs of a store that every command reads."""

import gzip
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import search
from mas_gym.cli import app
from mas_gym.cli.view import Pages
from mas_gym.errors import ConfigError, DataError, DataNotFoundError, StoreError, UnknownNameError, UserCodeError
from mas_gym.logs import BrokenLine, Transcript, read_transcripts, recognize
from mas_gym.tasks.grading.graders import FunctionGrader, KindGrader
from search.compare.imported_transcripts import read_labeled
from search.report.report import write_report
from search.report.report_data import read_reports
from search.results.summary import hit_differences
from search.store import regrade, resume


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def said(*messages: tuple[str, str], question: str = "What is 2 + 3?", **more: Any) -> dict[str, Any]:
    """Return a row of format chat."""
    entries = [{"role": "assistant", "name": name, "content": text} for name, text in messages]
    return {"question": question, "messages": entries, **more}


def read(path: Path, format: str | None = None) -> list[Transcript]:
    broken: list[BrokenLine] = []
    found = list(read_transcripts(path, format, broken=broken.append))
    assert not broken
    return found


def texts(one: Transcript) -> list[tuple[str, str]]:
    return [(message.speaker, message.said) for message in one.messages]


def command(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(one) for one in arguments])


# ------------------------------------------------------------------------ formats


def test_chat_format_reads_names_tool_calls_and_outcome(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    row = {
        "messages": [
            {"role": "system", "content": "You add."},
            {"role": "user", "content": "What is 2 + 3?"},
            {"role": "assistant", "content": "I call.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
            {"role": "assistant", "content": [{"type": "text", "text": "Final Answer: 5"}, {"type": "image_url"}]},
        ],
        "answer": 5,
        "correct": True,
        "score": 0.5,
        "id": "run-1",
        "model": "m",
        "trace": ["long"],
    }
    [one] = read(write(tmp_path / "log.jsonl", row))
    assert one.question == "What is 2 + 3?"
    assert texts(one) == [
        ("Assistant", 'I call.\n\n[tool calls] [{"name": "add", "arguments": {"a": 2, "b": 3}}]'),
        ("add", "5"),
        ("Assistant", "Final Answer: 5"),
    ]
    assert [message.agent for message in one.messages] == [True, False, True]
    assert one.agents == {"Assistant": "You add."}
    assert (one.reference, one.answer, one.correct, one.score, one.sample_id) == ("5", None, True, 0.5, "run-1")
    assert one.facts == {"model": "m"}
    assert one.dropped == {"part of type image_url": 1, "field trace": 1}


def test_answer_and_reference_are_read_separately(tmp_path: Path) -> None:
    [one] = read(write(tmp_path / "log.jsonl", said(("A", "It is six."), answer="6", reference="5")))
    assert (one.answer, one.reference) == ("6", "5")


def test_dropped_prompts_and_repeated_questions_are_counted(tmp_path: Path) -> None:
    row = said(("A", "a"), ("B", "b"))
    row["messages"] = [
        {"role": "system", "content": "Both of you"},
        {"role": "system", "name": "B", "content": "Be B"},
        {"role": "user", "content": "Answer briefly. What is 2 + 3?"},
        {"role": "user", "name": "C", "content": "So, What is 2 + 3?"},
        *row["messages"],
    ]
    [one] = read(write(tmp_path / "log.jsonl", row))
    assert one.agents == {"B": "Be B"}
    assert texts(one) == [("C", "So, What is 2 + 3?"), ("A", "a"), ("B", "b")]
    assert one.dropped == {"system message without a single speaker": 1, "user's message with the question and more": 1}


def test_ag2_history_is_read_from_one_file(tmp_path: Path) -> None:
    history = [
        {"content": "What is 2 + 3?", "role": "user", "name": "user_proxy"},
        {"content": "", "role": "assistant", "name": "Coder", "tool_calls": [{"id": "1", "function": {"name": "add"}}]},
        {"content": "5", "role": "tool", "tool_responses": [{"tool_call_id": "1", "role": "tool", "content": "5"}]},
        {"content": "It is 5.", "role": "assistant", "name": "Coder"},
        {"content": "", "role": "user", "name": "user_proxy"},
        {"content": "TERMINATE", "role": "user", "name": "user_proxy"},
    ]
    pretty = tmp_path / "history.json"
    pretty.write_text(json.dumps(history, indent=2), encoding="utf-8")
    saved = write(tmp_path / "results.jsonl", {"chat_id": 7, "chat_history": history, "summary": "5"})
    for path in (pretty, saved, write(tmp_path / "line.jsonl", history)):
        assert recognize(path) == "ag2"
        [one] = read(path)
        assert one.question == "What is 2 + 3?"
        assert texts(one) == [
            ("Coder", '[tool calls] [{"name": "add", "arguments": {}}]'),
            ("add", "5"),
            ("Coder", "It is 5."),
        ]
        assert one.dropped == {"empty message": 1, "TERMINATE at the end": 1}


def test_ag2_event_stream_is_read(tmp_path: Path) -> None:
    def event(name: str, /, **fields: Any) -> dict[str, Any]:
        return {"__event__": f"ag2.events.{name}", **fields}

    text = event("input_events.TextInput", content="What is 2 + 3?")
    call = event("tool_events.ToolCallEvent", id="c", name="add", arguments='{"a": 2}')
    result = {"__dataclass__": "ag2.events.tool_events.ToolResult", "data": {"parts": [{**text, "content": "5"}]}}
    returned = event("tool_events.ToolResultEvent", parent_id="c", name="add", result=result)
    said = event("types.ModelMessage", content="It is 5.")
    history = [
        event("input_events.ModelRequest", parts=[text]),
        event("types.ModelResponse", message=None, tool_calls=event("tool_events.ToolCallsEvent", calls=[call])),
        returned,
        event("tool_events.ToolResultsEvent", results=[returned]),
        event("types.UsageEvent"),
        event("types.ModelResponse", message=said, usage={"__dataclass__": "U", "data": {"completion_tokens": 4.0}}),
    ]
    path = write(tmp_path / "stream.jsonl", history)
    assert recognize(path) == "ag2"
    [one] = read(path)
    assert one.question == "What is 2 + 3?"
    assert texts(one) == [
        ("Assistant", '[tool calls] [{"name": "add", "arguments": {"a": 2}}]'), ("add", "5"), ("Assistant", "It is 5."),
    ]  # fmt: skip
    assert one.messages[-1].tokens == 4


def test_langgraph_states_and_updates_are_read(tmp_path: Path) -> None:
    human = {"type": "human", "content": "What is 2 + 3?"}
    state = {"values": {"messages": [human, {"type": "ai", "name": "solver", "content": "5"}]}, "next": []}
    dumped = {
        "messages": [
            {"lc": 1, "type": "constructor", "id": ["x", "HumanMessage"], "kwargs": {"content": "What is 2 + 3?"}},
            {"lc": 1, "type": "constructor", "id": ["x", "AIMessage"], "kwargs": {"content": "5", "name": "solver"}},
        ]
    }
    [first, second] = read(write(tmp_path / "states.jsonl", state, dumped), "langgraph")
    updates = write(tmp_path / "updates.jsonl", [[{"start": {"messages": [human]}}, {"solver": {"messages": [
        {"type": "ai", "content": "5"}]}}]])  # fmt: skip
    [third] = read(updates, "langgraph")
    assert recognize(tmp_path / "states.jsonl") == "langgraph"
    for one in (first, second, third):
        assert one.question == "What is 2 + 3?"
        assert texts(one) == [("solver", "5")]


def test_who_and_when_log_is_read_with_its_wrong_step(tmp_path: Path) -> None:
    row = {
        "question": "Who?",
        "history": [
            {"role": "human", "content": "Who?"},
            {"role": "Orchestrator (thought)", "content": "Plan"},
            {"role": "Orchestrator (-> WebSurfer)", "content": "Look"},
            {"role": "WebSurfer", "content": "Found nobody"},
        ],
        "mistake_agent": "WebSurfer",
        "mistake_step": "3",
        "ground_truth": "Ada",
        "is_corrected": "False",
    }
    [one] = read(write(tmp_path / "log.jsonl", row))
    assert [(m.speaker, m.recipients, m.label) for m in one.messages] == [
        ("Orchestrator", (), None),
        ("Orchestrator", ("WebSurfer",), None),
        ("WebSurfer", (), -1),
    ]
    assert (one.correct, one.reference) == (False, "Ada")
    assert one.dropped == {"remark (thought)": 1, "user's message with the question": 1}


def test_benchmark_step_labels_are_read(tmp_path: Path) -> None:
    rows = {
        "processbench": {"problem": "Why?", "steps": ["a", "b", "c"], "label": 1, "final_answer_correct": False},
        "agent-processbench": {
            "question": "Why?",
            "messages": [
                {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "b"}, {"role": "tool", "name": "t", "content": "c"},
            ],
            "step_labels": {"1": 1, "2": -1}, "final_label": -1, "ground_truth": {"target": ["so"]},
        },
        "prm800k": {"question": "Why?", "steps": ["a", "b", "c"], "labels": [1, -1, None], "correct": 0},
    }  # fmt: skip
    for format, row in rows.items():
        path = write(tmp_path / f"{format}.jsonl", row)
        assert recognize(path) == format
        [one] = read(path)
        assert (one.question, one.correct) == ("Why?", False)
        assert [(message.text, message.label) for message in one.messages] == [("a", 1), ("b", -1), ("c", None)]


def test_prm800k_file_is_read(tmp_path: Path) -> None:
    step = {"completions": [{"text": "no", "rating": -1}, {"text": "yes", "rating": 1}], "chosen_completion": 1}
    last = {"completions": [{"text": "wrong", "rating": -1}], "chosen_completion": None}
    row = {
        "question": {"problem": "Why?", "ground_truth_answer": "7"},
        "label": {"steps": [step, last], "finish_reason": "found_error"},
    }
    [one] = read(write(tmp_path / "log.jsonl", row))
    assert [(message.text, message.label) for message in one.messages] == [("yes", 1), ("wrong", -1)]
    assert (one.correct, one.reference, one.dropped) == (False, "7", {"alternative step": 1})


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def span(name: str, parent: str = "", start: int = 0, trace: str = "t", **attributes: Any) -> dict[str, Any]:
    entries = [
        {"key": key, "value": {"stringValue": value if isinstance(value, str) else json.dumps(value)}}
        for key, value in attributes.items()
    ]
    own = {"traceId": trace, "spanId": name, "parentSpanId": parent, "name": name, "startTimeUnixNano": str(start)}
    return {**own, "attributes": entries}


def part(role: str, text: str) -> list[dict[str, Any]]:
    return [{"role": role, "parts": [{"type": "text", "content": text}]}]


def model(name: str, text: str, **more: Any) -> dict[str, Any]:
    keys = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": part("user", "What is 2 + 3?")}
    return span(name, **{**keys, "gen_ai.output.messages": part("assistant", text), **more})


def test_otlp_trace_over_several_lines_is_read(tmp_path: Path) -> None:
    planner = span("planner", "root", 1, **{"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "Planner"})
    tool = span("tool", "root", 3, **{"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add",
                "gen_ai.tool.call.result": "5"})  # fmt: skip
    lines = [
        otlp(model("m2", "It is 5.", parent="root", start=4, **{"gen_ai.agent.name": "Solver"})),
        otlp(tool, model("m1", "Add them.", parent="planner", start=2), span("root")),
        otlp(planner),
    ]
    path = write(tmp_path / "traces.jsonl", *lines)
    assert recognize(path) == "otel"
    [one] = read(path)
    assert one.question == "What is 2 + 3?"
    assert texts(one) == [("Planner", "Add them."), ("add", "5"), ("Solver", "It is 5.")]
    assert one.sample_id == "t"


def test_older_span_conventions_are_read(tmp_path: Path) -> None:
    asked, told = {"content": "What is 2 + 3?"}, {"message": {"content": "It is 5."}}
    bodies = {"gen_ai.user.message": asked, "gen_ai.choice": told}
    events = [{"name": name, "attributes": {"gen_ai.event.content": json.dumps(bodies[name])}} for name in bodies]
    indexed = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "What is 2 + 3?",
               "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "It is 5."}  # fmt: skip
    row = otlp({**span("a", trace="t1"), "events": events}, span("b", trace="t2", **indexed))
    for one in read(write(tmp_path / "traces.jsonl", row)):
        assert one.question == "What is 2 + 3?"
        assert texts(one) == [("Assistant", "It is 5.")]


def test_langfuse_observation_rows_are_read(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "What is 2 + 3?"}]
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": ""}}]}
    common = {"traceId": "t", "type": "GENERATION", "name": "n"}
    rows = [
        {**common, "id": "g2", "startTime": "2026-01-01T00:00:03Z", "input": asked, "output": "It is 5.",
         "metadata": {"agent": "Solver"}},
        {**common, "id": "g1", "startTime": "2026-01-01T00:00:01Z", "input": {"messages": asked}, "output": calls},
        {**common, "id": "s", "startTime": "2026-01-01T00:00:02Z", "type": "TOOL", "name": "add", "output": {"sum": 5}},
    ]  # fmt: skip
    [one] = read(write(tmp_path / "observations.jsonl", *rows))
    assert texts(one) == [
        ("Assistant", '[tool calls] [{"name": "add", "arguments": ""}]'), ("add", '{"sum": 5}'), ("Solver", "It is 5."),
    ]  # fmt: skip


def test_langfuse_export_is_read(tmp_path: Path) -> None:
    observations = [
        {"id": "a", "type": "AGENT", "name": "Solver", "startTime": "2026-01-01T00:00:00Z"},
        {"id": "g", "type": "GENERATION", "name": "call", "parentObservationId": "a",
         "startTime": "2026-01-01T00:00:01Z", "output": {"role": "assistant", "content": "It is 5."},
         "usageDetails": {"output": 4}, "model": "m"},
    ]  # fmt: skip
    trace = {
        "id": "t1", "input": {"question": "What is 2 + 3?"}, "output": "5", "metadata": {"reference": "5"},
        "scores": [{"name": "correctness", "value": 1}], "observations": observations,
    }  # fmt: skip
    exported = tmp_path / "traces.json"
    exported.write_text(json.dumps([trace], indent=1), encoding="utf-8")
    [one] = read(exported)
    assert recognize(exported) == "langfuse"
    assert texts(one) == [("Solver", "It is 5.")]
    assert (one.question, one.answer, one.reference, one.correct) == ("What is 2 + 3?", "5", "5", True)
    assert one.messages[0].tokens == 4


def test_langsmith_export_is_read(tmp_path: Path) -> None:
    message = {"lc": 1, "type": "constructor", "id": ["x", "AIMessage"], "kwargs": {"content": "It is 5."}}
    runs = [
        {"id": "r", "trace_id": "r", "run_type": "chain", "inputs": {"question": "What is 2 + 3?"},
         "outputs": {"answer": "5"}, "feedback_stats": {"correctness": {"avg": 1.0}}},
        {"id": "m", "trace_id": "r", "parent_run_id": "r", "run_type": "llm", "start_time": "2026-01-01T00:00:01",
         "extra": {"metadata": {"langgraph_node": "solver"}}, "inputs": {"messages": [[message]]},
         "outputs": {"generations": [[{"text": "It is 5.", "message": message}]]}, "completion_tokens": 4},
    ]  # fmt: skip
    flat = write(tmp_path / "runs.jsonl", *runs)
    nested = write(tmp_path / "nested.jsonl", {**runs[0], "child_runs": [runs[1]]})
    for path in (flat, nested):
        [one] = read(path)
        assert recognize(path) == "langsmith"
        assert texts(one) == [("solver", "It is 5.")]
        assert (one.question, one.answer, one.correct) == ("What is 2 + 3?", "5", True)


def test_exported_traces_are_imported_unchanged(tmp_path: Path) -> None:
    from mas_gym import load_task
    from mas_gym.policies.scripted import ScriptedPolicy
    from search.service.telemetry import traces

    pytest.importorskip("opentelemetry.sdk")
    file = tmp_path / "spans.jsonl"
    policy = ScriptedPolicy(lambda request, seed: f"{request.agent}. Final Answer: 7")
    with traces(str(file), content=True):
        [plan] = search.run("single", load_task("arithmetic", limit=1), mas="rpsv", policy=policy)
    [one] = read(file)
    assert [message.text for message in one.messages] == [turn.text for turn in plan.best.state.turns]
    assert one.speakers == ["Reader", "Planner", "Solver", "Verifier"]
    assert (one.correct, one.question_id) == (plan.correct, plan.problem_id)


def test_custom_reader_yields_transcripts_or_rows(tmp_path: Path) -> None:
    code = (
        "from mas_gym.logs import LoggedMessage, Transcript\n"
        "def read(path, twice=False):\n"
        "    for line in path.read_text().splitlines():\n"
        "        yield Transcript('Q?', (LoggedMessage('A', line.strip()),), correct=True)\n"
        "        yield {'question': 'Q?', 'messages': [{'role': 'assistant', 'content': line}]}\n"
        "        yield 7\n"
        "def fails(path):\n"
        "    raise ValueError('no')\n"
        "    yield\n"
    )
    (tmp_path / "my.py").write_text(code, encoding="utf-8")
    log = tmp_path / "log.txt"
    log.write_text("one\n", encoding="utf-8")
    broken: list[BrokenLine] = []
    found = list(read_transcripts(log, f"{tmp_path}/my.py:read", broken=broken.append))
    assert [one.messages[0].speaker for one in found] == ["A", "Assistant"]
    assert [line.place for line in broken] == [f"{log} item 3"]
    with pytest.raises(UserCodeError, match=r"my.py, line 8: ValueError: no"):
        list(read_transcripts(log, f"{tmp_path}/my.py:fails"))
    with pytest.raises(UnknownNameError):
        list(read_transcripts(log, f"{tmp_path}/my.py:absent"))


def test_json_arrays_single_documents_and_gzipped_lines_are_read(tmp_path: Path) -> None:
    rows = [said(("A", f"say {n}")) for n in range(3)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
    (tmp_path / "b.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "c.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    (tmp_path / "d.json").write_text(json.dumps(rows[0], indent=2), encoding="utf-8")
    (tmp_path / "e.jsonl").write_text("\n".join(json.dumps(row, indent=2) for row in rows), encoding="utf-8")
    numbers = {"a.jsonl.gz": 3, "b.json": 3, "c.json": 3, "d.json": 1, "e.jsonl": 3}
    for name, number in numbers.items():
        assert [texts(one) for one in read(tmp_path / name)] == [[("A", f"say {n}")] for n in range(number)]


def test_format_and_file_errors_name_the_cause(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", {"spam": 1})
    with pytest.raises(DataError, match=r"one of the formats .*, got the fields \['spam'\]"):
        recognize(path)
    with pytest.raises(ConfigError, match="did you mean 'chat'"):
        list(read_transcripts(path, "chats"))
    with pytest.raises(DataNotFoundError):
        list(read_transcripts(tmp_path / "none.jsonl"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="regular file"):
        list(read_transcripts(tmp_path / "pipe"))


# -------------------------------------------------------------------------- import

SAMPLES = [
    said(("Planner", "Add."), ("Solver", "Final Answer: 5"), answer="5"),
    said(("Planner", "Add."), ("Solver", "Final Answer: 6"), answer="5"),
    said(("Planner", "Guess."), ("Solver", "Final Answer: 5"), answer="5"),
    said(("Planner", "Double."), ("Solver", "Final Answer: 9"), question="What is 2 * 4?", answer="8"),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    search.import_transcripts(write(tmp_path / "log.jsonl", *SAMPLES), tmp_path / "runs.db")
    return tmp_path / "runs.db"


def plans(path: Path, run: str | None = None) -> dict[str, search.Plan]:
    with search.open_store(path) as opened:
        return {problem.question: plan for problem, plan in opened.searches(run)}


def test_samples_become_candidates_with_shared_prefixes(store: Path) -> None:
    found = plans(store)
    plan = found["What is 2 + 3?"]
    assert [(c.answer, c.correct) for c in plan.candidates] == [("5", True), ("6", False), ("5", True)]
    assert plan.tree is not None
    assert len(plan.tree) == 6
    shared = plan.tree[1]
    assert (shared.state.text, shared.visits, shared.total) == ("Add.", 2, 0.0)
    assert (plan.usage.agent_calls, plan.correct) == (6, True)
    assert found["What is 2 * 4?"].outcome == "wrong"
    with search.open_store(store) as opened:
        [first, _] = opened.problems()
        assert first.metadata["samples"][0]["place"].endswith(("log.jsonl:1", "log.jsonl:4"))
        info = opened.find("log")
        assert [agent.name for agent in info.mas.agents] == ["Planner", "Solver"]
        assert info.label == "recorded:log, seed 0"


def test_recorded_outcomes_take_precedence_over_grades(tmp_path: Path) -> None:
    rows = [
        said(("A", "Final Answer: 5"), answer="5", correct=False),
        said(("A", "Final Answer: 7"), question="Open?"),
        said(("A", "So."), question="Closed?", answer="7", reference="7.0"),
    ]
    done = search.import_transcripts(write(tmp_path / "log.jsonl", *rows), tmp_path / "runs.db")
    assert (done.disagree, done.ungraded) == (1, 1)
    found = plans(tmp_path / "runs.db")
    assert {question: plan.correct for question, plan in found.items()} == {
        "What is 2 + 3?": False, "Open?": None, "Closed?": True,
    }  # fmt: skip
    assert found["Closed?"].answer == "7"


def test_run_without_outcomes_is_unknown_in_tables_pages_and_status(tmp_path: Path) -> None:
    rows = [said(("A", f"Final Answer: {n}"), question=f"Question {n % 3}?", tokens=9) for n in range(9)]
    rows[0]["messages"][0]["tokens"] = 7
    store, dash = tmp_path / "runs.db", "\N{EN DASH}"
    search.import_transcripts(write(tmp_path / "log.jsonl", *rows), store)
    with search.open_store(store) as opened:
        table, [info] = opened.compare(), opened.runs()
        [outcome, *_] = opened.outcomes()
        [report] = read_reports(opened)
        write_report(opened, tmp_path / "report.html")
        problem = next(opened.problems()).id
    [row] = table.rows
    assert outcome.correct is None and math.isnan(row.hits[1].mean) and row.unknown and not row.shares
    assert row.problems == 3 and json.loads(table.to_json())["rows"][0]["hit@1"] is None
    assert ",nan," in table.to_csv() and "3 problems with no known outcome" in str(table)
    [line] = [line for line in table.to_markdown().splitlines() if line.startswith("| recorded:log")]
    assert line.split(" | ")[2:4] == [dash, dash]
    assert report.comparison.rows == table.rows
    status = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["status", str(store)]).output
    assert next(line for line in status.splitlines() if "recorded:log" in line).split()[-6] == dash
    pages = Pages(store)
    [key] = re.findall(r'name="a" value="([^"]+)"', pages.page("/", {}))
    listed, wrong = (pages.page("/problems", {"a": key, "show": shown}) for shown in ("all", "wrong"))
    assert listed.count('class="unknown"') == 3 and 'class="wrong"' not in listed and "0 problems" in wrong
    page = pages.page(f"/tree/{info.run}", {"problem": problem})
    [data] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    found = json.loads(data)
    assert found["correct"] is None and set(found["nodes"]["correct"]) == {None}
    [again, *_] = search.run("sc:2", recorded=search.Recorded(store))
    assert (again.correct, again.outcome) == (None, "answered")
    result = regrade(store, info, FunctionGrader(lambda problem, text: True, KindGrader()), "all")
    assert (result.known, result.before, result.after) == (0, 0, 3)
    with search.open_store(store) as opened:
        assert [one.hits[1].mean for one in opened.compare(grading="all").rows] == [1.0]
    assert f">{dash}</td>" in Pages(store).page("/", {}).partition("Regraded runs")[2]


def test_imported_scores_rank_candidates_and_values_are_kept(tmp_path: Path) -> None:
    rows = [said(("A", f"Final Answer: {n}"), answer="2", score=n / 4) for n in range(3)]
    rows[0]["messages"][0] |= {"value": -0.5, "tokens": 7, "logprob": -3.5}
    search.import_transcripts(write(tmp_path / "log.jsonl", *rows), tmp_path / "runs.db")
    [plan] = plans(tmp_path / "runs.db").values()
    assert [(c.answer, c.score) for c in plan.candidates] == [("2", 0.5), ("1", 0.25), ("0", 0.0)]
    assert plan.tree is not None
    assert (plan.tree[1].value, plan.tree[1].tokens, plan.tree[1].logprob) == (-0.5, 7, -3.5)
    assert plan.usage.generated_tokens == 7


def test_samples_with_different_first_agents_share_a_search(tmp_path: Path) -> None:
    rows = [said(("A", "a"), ("B", "Final Answer: 5"), answer="5"), said(("B", "Final Answer: 4"), answer="5")]
    search.import_transcripts(write(tmp_path / "log.jsonl", *rows), tmp_path / "runs.db")
    [plan] = plans(tmp_path / "runs.db").values()
    assert [c.correct for c in plan.candidates] == [True, False]
    assert plan.mas is not None
    assert [plan.mas.agents[turn.speaker].name for turn in plan.candidates[1].state.turns] == ["start", "B"]


def test_second_import_skips_stored_transcripts(store: Path, tmp_path: Path) -> None:
    before = store.read_bytes()
    again = search.import_transcripts(tmp_path / "log.jsonl", store)
    assert (again.run, again.skipped) == (None, (str(tmp_path / "log.jsonl"),))
    assert store.read_bytes() == before
    copy = write(tmp_path / "copy.jsonl", *SAMPLES)
    other, twin = (write(tmp_path / name, SAMPLES[3]) for name in ("other.jsonl", "twin.jsonl"))
    more = search.import_transcripts([copy, other, twin], store, format="chat")
    assert (more.transcripts, more.skipped) == (2, (str(copy),))
    with pytest.raises(StoreError, match="another name"):
        search.import_transcripts(write(tmp_path / "third.jsonl", SAMPLES[0]), store, name="log")


def test_import_with_a_task_adds_missing_reference_answers(tmp_path: Path) -> None:
    rows = [said(("A", "Final Answer: 5"), question=f"Number\n{n}?") for n in (5, 6, 7)]
    rows.append(said(("A", "Final Answer: 5"), question="Number 8?", answer="5"))
    log, answers = write(tmp_path / "log.jsonl", *rows), tmp_path / "answers.csv"
    answers.write_text("question,answer\nNumber 5?,5\nNumber 6?,6\nNumber 8?,8\n", encoding="utf-8")
    before = command("import", log, "--store", tmp_path / "runs.db", "--name", "bare")
    assert "--task" in before.output
    done = command("import", log, "--store", tmp_path / "runs.db", "--task", answers, "--name", "graded")
    assert done.exit_code == 0, done.output
    assert "1 transcripts have neither" in done.output
    with search.open_store(tmp_path / "runs.db") as store:
        found = {problem.question: plan.correct for problem, plan in store.searches("graded")}
    assert (found["Number\n5?"], found["Number\n6?"], found["Number 8?"]) == (True, False, True)
    again = command("import", log, "--store", tmp_path / "runs.db", "--task", answers)
    assert "contents were imported before" in again.output


def test_import_of_a_folder_reads_its_files_once_and_names_some_of_them(tmp_path: Path) -> None:
    folder, store = tmp_path / "logs", tmp_path / "runs.db"
    (folder / "inner").mkdir(parents=True)
    for n in range(120):
        write(folder / f"{n:03}.jsonl", said(("A", f"Final Answer: {n}"), question=f"Number {n % 40}?", answer="5"))
    write(folder / ".hidden.jsonl", said(("A", "Final Answer: 5"), answer="5"))
    done = search.import_transcripts(folder, store)
    assert (done.transcripts, done.questions, done.name) == (120, 40, "logs")
    with search.open_store(store) as opened:
        assert 0 < len(opened.find("logs").facts["files"]) <= 100
    again = search.import_transcripts(folder, store)
    assert (again.run, len(again.skipped)) == (None, 120)
    assert "Question\nNumber 0?" in command("import", folder, "--dry-run").output


def test_samples_in_separate_equal_files_are_imported_once_each(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.jsonl", said(("A", "Final Answer: 5"), answer="5")) for n in range(3)]
    store = tmp_path / "runs.db"
    first = search.import_transcripts([*files[:2], files[0]], store)
    assert (first.transcripts, first.questions, first.skipped) == (2, 1, ())
    again = search.import_transcripts(files[:2], store)
    assert (again.run, len(again.skipped)) == (None, 2)
    more = search.import_transcripts(files, store)
    assert (more.transcripts, len(more.skipped)) == (1, 2)


def test_interrupted_import_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [said(("A", f"Final Answer: {n}"), question=f"Number {n}?", answer=str(n)) for n in range(250)]
    path, store = write(tmp_path / "log.jsonl", *rows), tmp_path / "runs.db"
    written = resume.write_search
    calls: list[int] = []

    def stop(*arguments: Any) -> bytes:
        calls.append(1)
        if len(calls) == 150:
            raise KeyboardInterrupt
        return written(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(resume, "write_search", stop)
        with pytest.raises(KeyboardInterrupt):
            search.import_transcripts(path, store)
    assert len(plans(store)) == 100
    done = search.import_transcripts(path, store)
    assert (done.questions, len(plans(store))) == (250, 250)
    assert not list(tmp_path.glob("runs.db-import-*"))
    fresh = search.import_transcripts(path, tmp_path / "fresh.db")
    assert fresh.run == done.run


def test_imported_runs_can_be_compared_reported_regraded_and_viewed(store: Path, tmp_path: Path) -> None:
    other = [said(("Solo", f"Final Answer: {n}"), question=q, answer=a) for q, a, n in (
        ("What is 2 + 3?", "5", 4), ("What is 2 * 4?", "8", 8))]  # fmt: skip
    search.import_transcripts(write(tmp_path / "solo.jsonl", *other), store)
    with search.open_store(store) as opened:
        table = opened.compare(baseline="recorded:log")
        assert {row.label: row.hits[1].mean for row in table.rows} == {"recorded:log": 0.5, "recorded:solo": 0.5}
        [(_, _, difference)] = hit_differences(table.rows, "recorded:log")
        assert (difference.mean, difference.problems) == (0.0, 2)
        [run] = [run for run in opened.runs() if run.name == "log"]
        [report] = read_reports(opened)
        assert report.agents == {"recorded:log": ("Planner", "Solver"), "recorded:solo": ("Solo",)}
        write_report(opened, tmp_path / "report.html")
    result = regrade(store, run, FunctionGrader(lambda problem, text: True, KindGrader()), "all")
    assert (result.before, result.after) == (1, 2)
    page = Pages(store).page(f"/tree/{run.run}", {"problem": next(iter(plans(store, "log").values())).problem_id})
    assert "Planner" in page
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["status", str(store)]).output
    [line] = [line for line in shown.splitlines() if "recorded:solo, seed 0" in line and "recorded " in line]
    # The log has no token counts.
    assert line.split()[-5:-2] == ["\N{EN DASH}", "1.0", "0.0"]


def test_blame_and_bench_critic_read_imported_runs(tmp_path: Path) -> None:
    rows = [
        {"problem": f"P{n}?", "steps": ["fine", "wrong" if n % 2 else "good"], "label": 1 if n % 2 else -1,
         "agents": ["A", "B"], "final_answer_correct": n % 2 == 0}
        for n in range(40)
    ]  # fmt: skip
    store = tmp_path / "runs.db"
    search.import_transcripts(write(tmp_path / "steps.jsonl", *rows), store)
    code = (
        "class Truth:\n"
        "    name, terminal_only, free = 'truth', False, False\n"
        "    def score(self, contexts):\n"
        "        return [-1.0 if 'wrong' in c.state.text else 1.0 for c in contexts]\n"
    )
    (tmp_path / "my.py").write_text(code, encoding="utf-8")
    labeled = read_labeled(store)
    assert sorted({(one.label, one.steps, one.agents) for one in labeled}) == [
        (-1, ("fine", "good"), ("A", "B")),
        (1, ("fine", "wrong"), ("A", "B")),
    ]
    blamed = command("blame", store, "--critic", f"{tmp_path}/my.py:Truth", "--json", tmp_path / "blame.json")
    assert blamed.exit_code == 0, blamed.output
    [run] = json.loads((tmp_path / "blame.json").read_text())["runs"]
    assert {(one["agent"], one["turn"]) for one in run["samples"]} == {("B", 2)}
    bench = command(
        "bench-critic", "--data", store, "--critic", f"{tmp_path}/my.py:Truth", "--json", tmp_path / "b.json"
    )
    assert bench.exit_code == 0, bench.output
    assert json.loads((tmp_path / "b.json").read_text())["critics"][0]["f1"] == 100.0
    (tmp_path / "plain.db").write_bytes(b"")
    search.import_transcripts(write(tmp_path / "chat.jsonl", *SAMPLES), tmp_path / "chat.db")
    with pytest.raises(DataError, match="labels"):
        read_labeled(tmp_path / "chat.db")


def test_import_command_previews_a_log_and_counts_broken_lines(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(f"{json.dumps(SAMPLES[0])}\nnot json\n{json.dumps({'messages': []})}\n", encoding="utf-8")
    shown = command("import", log, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert "Agents (2): Planner, Solver" in shown.output
    assert "2. Solver" in shown.output
    assert "Dropped: nothing" in shown.output
    assert list(tmp_path.iterdir()) == [log]
    done = command("import", log, "--store", tmp_path / "runs.db")
    assert done.exit_code == 0, done.output
    assert "1 transcripts of 1 questions by 2 agents" in done.output
    assert "2 lines" in done.output
    assert f"{log}:2: expected a JSON value" in done.output
    assert "contents were imported before" in command("import", log, "--store", tmp_path / "runs.db").output
    refused = command("import", log)
    assert refused.exit_code == 2
    assert "--store runs.db" in refused.output


# ------------------------------------------------------------------------ real logs


@pytest.mark.parametrize(
    ("name", "transcripts", "questions"),
    [("who_and_when", 99, 78), ("agent_processbench_hotpotqa", 145, 29)],
)
def test_real_logs_are_imported_completely(
    name: str, transcripts: int, questions: int, shared_data: Path, tmp_path: Path
) -> None:
    file = shared_data / "real" / f"{name}.jsonl.gz"
    if not file.exists():
        pytest.skip(f"no recorded runs at {file}")
    done = search.import_transcripts(file, tmp_path / "runs.db")
    assert (done.transcripts, done.questions, done.broken, done.ungraded) == (transcripts, questions, 0, 0)
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    if name == "who_and_when":
        labeled = read_labeled(tmp_path / "runs.db")
        assert len(labeled) == len(rows)
        wanted = sorted(row["history"][int(row["mistake_step"])]["content"] for row in rows)
        assert sorted(one.steps[one.label].partition("\n\n[program returned]")[0] for one in labeled) == wanted
    else:
        right = sum(row["final_label"] == 1 for row in rows)
        assert sum(c.correct is True for plan in plans(tmp_path / "runs.db").values() for c in plan.candidates) == right
