"""OpenTelemetry spans of searches, with the SDK's in-memory exporter."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mas_gym
import search
from mas_gym.cli import app
from mas_gym.errors import MissingDependencyError, PolicyError
from mas_gym.policies import SamplingRequest, ScriptedPolicy
from search.engine import tracing
from search.engine.scheduler import Scheduler
from search.setup import make_setup

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


def named(spans: Any, name: str) -> list[Any]:
    return [span for span in spans if span.name.startswith(name)]


def test_a_span_for_each_search_agent_call_and_score(provider: tuple[Any, Any]) -> None:
    with tracing.trace(provider[0]):
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
    with tracing.trace(provider[0]):
        assert run() == before


def test_content_is_recorded_on_request_only(provider: tuple[Any, Any]) -> None:
    with tracing.trace(provider[0], content=True):
        list(search.run("single", TASK[:1], mas="single", policy=ScriptedPolicy(say)))
    [call] = named(provider[1].get_finished_spans(), "chat")
    prompt = json.loads(call.attributes["gen_ai.input.messages"])
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert TASK[0].question in prompt[1]["parts"][0]["content"]
    [said] = json.loads(call.attributes["gen_ai.output.messages"])
    assert said["parts"][0]["content"].startswith("Final Answer") and said["finish_reason"] == "stop"


def test_free_critics_have_spans_too(provider: tuple[Any, Any]) -> None:
    with tracing.trace(provider[0]):
        critic = search.ConstantCritic(0.5)
        list(search.run("sbs:2,1", TASK[:1], mas="single", policy=ScriptedPolicy(say), critic=critic))
    [scored] = named(provider[1].get_finished_spans(), "evaluate constant(0.5)")
    assert {event.attributes["gen_ai.evaluation.score.value"] for event in scored.events} == {0.5}


def test_failures_and_dropped_searches_are_errors(provider: tuple[Any, Any]) -> None:
    def broken(request: SamplingRequest, seed: int) -> str:
        raise PolicyError("no such model")

    with tracing.trace(provider[0]):
        [plan] = search.run("single", TASK[:1], mas="single", policy=ScriptedPolicy(broken))
        assert plan.error is not None
        scheduler = Scheduler(make_setup("single", "single", None, seed=1), ScriptedPolicy(say))
        scheduler.submit(TASK[1])
        scheduler._admit()
        scheduler.close()
    spans = provider[1].get_finished_spans()
    failed, dropped = named(spans, "invoke_workflow")
    assert "no such model" in failed.status.description and not failed.status.is_ok
    assert "the search was dropped" in dropped.status.description
    assert {span.status.is_ok for span in named(spans, "chat")} == {False}
    assert len(spans) == 4


def test_nothing_is_recorded_outside_the_context(provider: tuple[Any, Any]) -> None:
    with tracing.trace(provider[0]):
        assert tracing.current() is not None
    assert tracing.current() is None
    list(search.run("single", TASK[:1], mas="single", policy=ScriptedPolicy(say)))
    assert provider[1].get_finished_spans() == ()


def test_the_command_line_writes_spans_to_a_file(tmp_path: Path) -> None:
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


def test_a_missing_exporter_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from mas_gym.service import telemetry

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingDependencyError, match="opentelemetry-exporter-otlp"), telemetry.traces("otlp"):
        pass
