"""OpenTelemetry spans of searches, with the SDK's in-memory exporter."""

import asyncio
import gzip
import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

import mas_gym
import search
from mas_gym.cli import app
from mas_gym.errors import MissingDependencyError, PolicyError
from mas_gym.policies import SamplingRequest, ScriptedPolicy
from search.tracing import trace

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="traces need opentelemetry-sdk")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

TASK = mas_gym.load_task("arithmetic", limit=3)


def say(request: SamplingRequest, seed: int) -> str:
    return f"Final Answer: {seed % 7}"


@pytest.fixture
def provider() -> Iterator[tuple[Any, Any]]:
    exporter, made = memory.InMemorySpanExporter(), sdk.TracerProvider()
    made.add_span_processor(export.SimpleSpanProcessor(exporter))
    yield made, exporter
    made.shutdown()


class Judge:
    """A critic that costs calls, so that its states go through the critic's batches."""

    name = "judge"
    terminal_only = False
    free = False

    def score(self, contexts: Any) -> list[float]:
        return [len(context.state.text) / 100 for context in contexts]


class Waits:
    """Replies at once to the first question, and never to the others."""

    name, max_concurrency = "scripted", 8

    async def sample_async(self, request: SamplingRequest) -> Any:
        if TASK[1].question not in request.messages[-1].content:
            await asyncio.Event().wait()
        return ScriptedPolicy(say).sample([request])[0]


def named(spans: Any, name: str) -> list[Any]:
    return [span for span in spans if span.name.startswith(name)]


def test_searches_agent_calls_and_scores_have_spans(provider: tuple[Any, Any]) -> None:
    with trace(provider[0]):
        plans = list(search.run("mcts:4,2", TASK, mas="rpsv", policy=ScriptedPolicy(say), critic=Judge(), seed=7))
    spans = provider[1].get_finished_spans()
    names = ("invoke_workflow rpsv", "chat scripted", "evaluate judge")
    searches, calls, scores = (named(spans, name) for name in names)
    assert len(spans) == len(searches) + len(calls) + len(scores)
    assert {span.attributes["mas_gym.problem.id"] for span in searches} == {plan.problem_id for plan in plans}
    by_id = {span.attributes["mas_gym.problem.id"]: span for span in searches}
    for plan in plans:
        span = by_id[plan.problem_id]
        own = [s for s in (*calls, *scores) if s.parent.span_id == span.context.span_id]
        assert all(s.context.trace_id == span.context.trace_id for s in own)
        assert all(span.start_time <= s.start_time <= s.end_time <= span.end_time for s in own)
        wanted = span.attributes
        assert wanted["gen_ai.operation.name"] == "invoke_workflow" and wanted["gen_ai.workflow.name"] == "rpsv"
        assert wanted["mas_gym.planner"] == "mcts:4,2" and wanted["mas_gym.critic"] == "judge"
        assert wanted["mas_gym.seed"] == 7 and wanted["mas_gym.answer"] == plan.answer
        assert wanted["mas_gym.correct"] is plan.correct
        assert wanted["gen_ai.usage.output_tokens"] == plan.usage.generated_tokens
        mine = [s.attributes for s in own if s.name == "chat scripted"]
        assert sum(a["gen_ai.request.choice.count"] for a in mine) == plan.usage.agent_calls
        assert sum(a["gen_ai.usage.output_tokens"] for a in mine) == plan.usage.generated_tokens
        assert {a["gen_ai.agent.name"] for a in mine} == {"Reader", "Planner", "Solver", "Verifier"}
        assert {a["gen_ai.request.temperature"] for a in mine} == {0.7}
        assert all(set(a["gen_ai.response.finish_reasons"]) == {"stop"} for a in mine)
        judged = [event for s in own if s.name == "evaluate judge" for event in s.events]
        assert len(judged) == plan.usage.reward_calls
        assert {event.name for event in judged} == {"gen_ai.evaluation.result"}
        assert all(event.attributes["gen_ai.evaluation.score.value"] > 0 for event in judged)
    assert "content" not in json.dumps([dict(s.attributes) for s in spans], default=str)


def test_plans_are_the_same_with_and_without_traces(provider: tuple[Any, Any]) -> None:
    def run() -> list[Any]:
        plans = search.run("mcts:4,2", TASK, mas="rpsv", policy=ScriptedPolicy(say), critic=Judge())
        return sorted((plan.problem_id, plan.answer, plan.tree.to_dict()) for plan in plans if plan.tree)

    before = run()
    with trace(provider[0]):
        assert run() == before


def test_content_is_recorded_only_on_request(provider: tuple[Any, Any]) -> None:
    with trace(provider[0], content=True):
        list(search.run("single", TASK[:1], mas="single", policy=ScriptedPolicy(say)))
    [call] = named(provider[1].get_finished_spans(), "chat")
    prompt = json.loads(call.attributes["gen_ai.input.messages"])
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert TASK[0].question in prompt[1]["parts"][0]["content"]
    [said] = json.loads(call.attributes["gen_ai.output.messages"])
    assert said["parts"][0]["content"].startswith("Final Answer") and said["finish_reason"] == "stop"


def test_critics_without_calls_have_spans(provider: tuple[Any, Any]) -> None:
    with trace(provider[0]):
        critic = search.ConstantCritic(0.5)
        list(search.run("sbs:2,1", TASK[:1], mas="single", policy=ScriptedPolicy(say), critic=critic))
    [scored] = named(provider[1].get_finished_spans(), "evaluate constant(0.5)")
    assert {event.attributes["gen_ai.evaluation.score.value"] for event in scored.events} == {0.5}


def test_failed_and_dropped_searches_have_error_spans(provider: tuple[Any, Any]) -> None:
    def broken(request: SamplingRequest, seed: int) -> str:
        raise PolicyError("no such model")

    with trace(provider[0]):
        [plan] = search.run("single", TASK[:1], mas="single", policy=ScriptedPolicy(broken))
        assert plan.error is not None
        with search.run("single", [TASK[1], TASK[0]], mas="single", policy=Waits()) as run:
            next(run)
    spans = provider[1].get_finished_spans()
    failed, done, dropped = named(spans, "invoke_workflow")
    assert done.status.is_ok
    assert "no such model" in failed.status.description and not failed.status.is_ok
    assert "the search was dropped" in dropped.status.description
    assert [span.status.is_ok for span in named(spans, "chat")] == [False, True, False]
    assert len(spans) == 6


def test_nothing_is_recorded_outside_the_context(provider: tuple[Any, Any]) -> None:
    with trace(provider[0]):
        pass
    list(search.run("single", TASK[:1], mas="single", policy=ScriptedPolicy(say)))
    assert provider[1].get_finished_spans() == ()


def test_command_line_writes_spans_to_a_file(tmp_path: Path) -> None:
    policy, file = tmp_path / "my.py", tmp_path / "spans.jsonl"
    policy.write_text(
        "from mas_gym.policies import ScriptedPolicy\n\ndef make():\n    return ScriptedPolicy(say)\n\n"
        "def say(request, seed):\n    return 'Final Answer: 3'\n"
    )
    words = ["--traces", file, "eval", "-n", 2, "--mas", "single", "--policy", f"{policy}:make", "--planner", "sc:2"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    spans = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert sorted(span["name"].split()[0] for span in spans) == ["chat"] * 2 + ["invoke_workflow"] * 2
    assert spans[0]["resource"]["attributes"]["service.name"] == "mas-gym"


def test_missing_exporter_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from search.service import telemetry

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'mas-gym\[telemetry\]'"), telemetry.traces("otlp"):
        pass


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes OTLP over HTTP, as a collector does."""

    requests: ClassVar[list[Any]]
    status: ClassVar[int]

    def do_POST(self) -> None:
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
        self.requests.append(service.ExportTraceServiceRequest.FromString(body))
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Collector]]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="opentelemetry-exporter-otlp is not installed")
    handler = type("Here", (Collector,), {"requests": [], "status": 200})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield handler
    server.shutdown()
    server.server_close()


def typed(span: Any) -> dict[str, Any]:
    """Return the attributes of a span of the protocol."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


OWN = """
from mas_gym.policies import ScriptedPolicy

def make():
    return ScriptedPolicy(lambda request, seed: f"Final Answer: {seed % 5}")

class Judge:
    name, terminal_only, free = "judge", False, False

    def score(self, contexts):
        return [len(context.state.text) / 100 for context in contexts]
"""


def traced_solve(folder: Path, *more: str) -> str:
    own = folder / "own.py"
    own.write_text(OWN)
    words = ["--traces", "otlp", "solve", "Tom has 3 pens and buys 4. How many?", "--policy", "own.py:make", *more]
    done = CliRunner().invoke(app, [re.sub(r"^own\.py", str(own), word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_collector_receives_every_span_over_http(collector: type[Collector], tmp_path: Path) -> None:
    traced_solve(tmp_path, "--planner", "mcts:3,2", "--critic", "own.py:Judge")
    resources = [one for request in collector.requests for one in request.resource_spans]
    named_services = {pair.value.string_value for one in resources for pair in one.resource.attributes}
    assert "mas-gym" in named_services
    spans = [span for one in resources for scope in one.scope_spans for span in scope.spans]
    [root] = [span for span in spans if not span.parent_span_id]
    assert root.name == "invoke_workflow rpsv"
    assert all(span.parent_span_id == root.span_id for span in spans if span is not root)
    assert {span.trace_id for span in spans} == {root.trace_id}
    calls, scores = (
        [s for s in spans if typed(s).get("gen_ai.operation.name") == kind] for kind in ("chat", "evaluate")
    )
    assert len(calls) + len(scores) + 1 == len(spans)
    whole = typed(root)
    assert sum(typed(s)["gen_ai.usage.output_tokens"] for s in calls) == whole["gen_ai.usage.output_tokens"]
    assert sum(typed(s)["gen_ai.request.choice.count"] for s in calls) == whole["mas_gym.agent_calls"]
    values = [typed(event)["gen_ai.evaluation.score.value"] for s in scores for event in s.events]
    assert len(values) == whole["mas_gym.reward_calls"] > 0 and all(-1 <= value <= 1 for value in values)
    assert all(span.start_time_unix_nano < span.end_time_unix_nano for span in spans)


def test_collector_that_rejects_spans_does_not_affect_results(collector: type[Collector], tmp_path: Path) -> None:
    collector.status = 403
    assert "Answer: " in traced_solve(tmp_path, "--planner", "single") and collector.requests


def test_opentelemetry_is_not_loaded_without_traces() -> None:
    code = (
        "import sys, mas_gym, search; from mas_gym.policies import ScriptedPolicy\n"
        "policy = ScriptedPolicy(lambda request, seed: 'Final Answer: 3')\n"
        "task = mas_gym.load_task('arithmetic', limit=2)\n"
        "assert len(list(search.run('sc:2', task, mas='rpsv', policy=policy))) == 2\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
