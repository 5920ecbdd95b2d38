"""Servers with other dialects: reasoning, finish reasons, missing usage, parameters, addresses and quotas."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="the openai package is not installed")

import local_models
from local_models import ask
from loopback import hash_policy

import mas_gym
import search
from mas_gym.errors import EngineUnavailableError, PolicyError, PromptTooLongError
from mas_gym.policies import load_policy
from mas_gym.policies.base import SamplingRequest
from mas_gym.policies.openai_format import parse_reply
from mas_gym.policies.reasoning import after_reasoning
from mas_gym.systems.prompts import ChatMessage
from mas_gym.tasks import Problem, ProblemTask
from rewardmodels import load_critic
from search.compare.comparison_runs import measure, named_planners, pair
from search.results.table_formats import text_tables
from search.setup import RunSpec

Handler = Callable[[dict[str, Any], str], tuple[int, Any]]
ERRORS = json.loads((Path(__file__).parent / "data" / "server_errors.json").read_text())
TASK = ProblemTask.of([Problem(f"p{i}", f"What is 2 + 2? ({i})", "4") for i in range(3)])


def reply(
    text: Any = "Final Answer: 4", finish: str | None = "stop", usage: bool = True, **message: Any
) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    counts = {"usage": {"prompt_tokens": 20, "completion_tokens": 6}} if usage else {}
    return {"choices": [choice], **counts}


@contextmanager
def serving(answer: Handler) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve chat completions on loopback; yields the address and the received bodies."""
    bodies: list[dict[str, Any]] = []

    class Chat(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _send(self, status: int, found: Any) -> None:
            raw = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            self._send(200, {"data": []})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            self._send(*answer(body, self.path))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies
    finally:
        server.shutdown()
        server.server_close()


def request(n: int = 1, cap: int = 64) -> SamplingRequest:
    messages = (ChatMessage("system", "Solve it."), ChatMessage("user", "What is 2 + 2?"))
    return SamplingRequest(messages, tuple(range(n)), cap)


def policy_at(url: str, options: str = "") -> Any:
    return load_policy(f"openai:m@{url}/v1#patience=3{options}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<think>Final Answer: 5?</think>\n\nThe result is 4", "The result is 4"),
        ("No, 7.\n</think>\n\n4", "4"),
        ("<think>Final Answer: 18. But", ""),
        ("[THINK]2 + 2[/THINK]4", "4"),
        ("[THINK]2 + 2", ""),
        (
            "<|channel|>analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>final<|message|>It is 4<|return|>",
            "It is 4",
        ),
        ("<|channel|>analysis<|message|>2 + 2", ""),
        ("2 < 3 and 3 > 2", "2 < 3 and 3 > 2"),
    ],
)
def test_message_is_the_text_after_the_reasoning(text: str, message: str) -> None:
    assert after_reasoning(text).strip() == message
    assert parse_reply(json.dumps(reply(text)).encode(), 1, "chat", False).samples[0].text == message
    assert parse_reply(json.dumps(reply(text)).encode(), 1, "chat", False).reasoned == (not message)


def test_content_parts_and_separate_reasoning_are_read() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "2 + 2"}]}, {"type": "text", "text": "4"}]
    assert parse_reply(json.dumps(reply(parts)).encode(), 1, "chat", False).samples[0].text == "4"
    read = parse_reply(json.dumps(reply(None, "length", reasoning_content="2 + 2")).encode(), 1, "chat", False)
    assert (read.samples[0].text, read.reasoned) == ("", 1)


def test_reasoning_tokens_are_counted() -> None:
    found = reply() | {"usage": {"prompt_tokens": 20, "completion_tokens": 6, "total_tokens": 126}}
    assert parse_reply(json.dumps(found).encode(), 1, "chat", False).generated_tokens == 106


def test_reasoning_is_not_forwarded_to_other_agents() -> None:
    with serving(lambda body, path: (200, reply("<think>SECRET</think>Final Answer: 4"))) as (url, bodies):
        [plan, *_] = search.run("single", TASK, mas="rpsv", policy=policy_at(url), seed=1)
    assert plan.correct and "SECRET" not in json.dumps(bodies)


def test_replies_of_only_reasoning_are_named_in_the_table_and_stored(tmp_path: Path) -> None:
    with serving(lambda body, path: (200, reply("", "length", reasoning="2 + 2"))) as (url, _):
        policy = policy_at(url)
        found = search.compare("single", TASK, mas="single", policy=policy, seeds=(1,), store=tmp_path / "a.db")
    assert any("only reasoning" in note for note in policy.notes)
    for rows in (found.rows, search.open_store(tmp_path / "a.db").compare().rows):
        assert [row.reasoning_only for row in rows] == [3]
        assert "3 replies were only reasoning" in text_tables(rows)[0].note


@pytest.mark.parametrize("finish", [None, "", "null", "eos", "stop_sequence", "end_turn", "STOP"])
def test_finish_reasons_of_complete_messages_are_accepted(finish: str | None) -> None:
    [sample] = parse_reply(json.dumps(reply(finish=finish)).encode(), 1, "chat", False).samples
    assert sample.finish_reason == "stop"


@pytest.mark.parametrize("finish", ["length", "model_length", "max_tokens"])
def test_finish_reasons_of_cut_messages_are_accepted(finish: str) -> None:
    [sample] = parse_reply(json.dumps(reply(finish=finish)).encode(), 1, "chat", False).samples
    assert sample.finish_reason == "length"


def sent_error(server: str) -> tuple[int, Any]:
    [found] = [error for error in ERRORS if error["server"] == server]
    return found["status"], found["body"]


@pytest.mark.parametrize(
    ("server", "refused"),
    [
        ("OpenAI temperature", {"temperature"}),
        ("OpenAI o-series", {"max_tokens"}),
        ("Anthropic through LiteLLM", {"top_p"}),
        ("LiteLLM parameters", {"logprobs", "seed"}),
        ("Mistral", {"seed"}),
        ("Groq logprobs", {"logprobs"}),
    ],
)
def test_rejected_parameter_is_left_out(server: str, refused: set[str]) -> None:
    with serving(lambda body, path: sent_error(server) if refused & {*body} else (200, reply())) as (url, bodies):
        policy = policy_at(url)
        [found] = ask(policy, [request()])
    assert found.samples[0].text == "Final Answer: 4"
    assert not refused & {*bodies[-1]} and len(policy.notes) >= len(refused)


@pytest.mark.parametrize("server", ["vLLM Gemma", "Gemini Gemma", "llama.cpp Gemma"])
def test_system_prompt_is_folded_into_the_first_message_without_a_system_role(server: str) -> None:
    def answer(body: dict[str, Any], path: str) -> tuple[int, Any]:
        return sent_error(server) if body["messages"][0]["role"] == "system" else (200, reply())

    with serving(answer) as (url, bodies):
        ask(policy_at(url), [request()])
    assert bodies[-1]["messages"] == [{"role": "user", "content": "Solve it.\n\nWhat is 2 + 2?"}]


def test_null_in_extra_body_leaves_a_parameter_out() -> None:
    with serving(lambda body, path: (200, reply())) as (url, bodies):
        ask(policy_at(url, "&extra_body={top_p: null, top_k: 5}"), [request()])
    assert "top_p" not in bodies[-1] and bodies[-1]["top_k"] == 5


def test_unknown_error_is_not_interpreted() -> None:
    said = {"error": {"message": "HTTP 400: seed 12 of the context window 34 has bad logprobs"}}
    error = pytest.raises(PolicyError, match=r"bad logprobs.*extra_body=\{NAME: null\}")
    with serving(lambda body, path: (400, said)) as (url, bodies), error:
        ask(policy_at(url), [request()])
    assert len(bodies) == 1


@pytest.mark.parametrize("server", [error["server"] for error in ERRORS if error["expected"]["meaning"] == "too long"])
def test_prompt_too_long_for_a_named_server_is_an_error(server: str) -> None:
    error = pytest.raises(PromptTooLongError, match="#truncate=true")
    with serving(lambda body, path: sent_error(server)) as (url, _), error:
        ask(policy_at(url), [request(cap=1)])


def test_table_counts_the_questions_that_were_cut() -> None:
    def answer(body: dict[str, Any], path: str) -> tuple[int, Any]:
        length = sum(len(message["content"].split()) for message in body["messages"])
        error = f"The input ({length} tokens) is longer than the model's context length (400 tokens)."
        return (400, {"message": error}) if length > 300 else (200, reply())

    long = ProblemTask.of([*TASK, Problem("long", "word " * 2000 + "What is 2 + 2?", "4")])
    with serving(answer) as (url, bodies):
        table = search.compare(["single"], long, mas="single", policy=policy_at(url, "&truncate=true"))
        cut = table.rows[0].failures
    assert not cut and "Prompts of 1 of the questions were cut" in " ".join(str(table).split())
    lengths = [len(body["messages"][-1]["content"].split()) for body in bodies]
    assert 150 < min(length for length in lengths if length > 100) < 300


def test_reply_without_usage_is_counted_with_the_tokenizer(tmp_path: Path) -> None:
    local_models.tokenizer(local_models.TEMPLATE).save_pretrained(tmp_path)
    with serving(lambda body, path: (200, reply("ba de", usage=False))) as (url, _):
        policy = policy_at(url, f"&tokenizer={tmp_path}")
        [found] = ask(policy, [request()])
        assert found.samples[0].tokens > 0 and found.prompt_tokens > 0
        assert "estimated" in "".join(policy.notes) and "(estimated)" in str(policy.meter)


@pytest.mark.parametrize("limit", ["budget", "run_budget"])
def test_token_budget_is_rejected_without_token_counts(limit: str) -> None:
    with serving(lambda body, path: (200, reply(usage=False))) as (url, _):
        policy = policy_at(url)
        [plan, *_] = search.run("sc:3", TASK, mas="single", policy=policy, **{limit: search.Budget(tokens=30)})
        assert "usage" in str(plan.error) and "tokenizer=" in str(plan.error)
        assert "reports no usage" in "".join(policy.notes)


@pytest.mark.parametrize("server", ["OpenAI quota", "DeepSeek balance"])
def test_exhausted_quota_ends_the_run_once(server: str) -> None:
    error = pytest.raises(EngineUnavailableError, match="Add credit")
    with serving(lambda body, path: sent_error(server)) as (url, bodies), error:
        list(search.run("single", TASK, mas="single", policy=policy_at(url), concurrency=1))
    assert len(bodies) == 1


@pytest.mark.parametrize("suffix", ["/v1", "/v1/", "/v1/chat/completions"])
def test_address_may_be_a_full_endpoint(suffix: str) -> None:
    with serving(lambda body, path: (200, reply()) if path == "/v1/chat/completions" else (404, {})) as (url, _):
        [found] = ask(load_policy(f"openai:m@{url}{suffix}"), [request()])
    assert found.samples[0].text


def test_address_without_v1_is_an_error_that_names_it() -> None:
    error = pytest.raises(EngineUnavailableError, match=r"as in http://127.0.0.1:[0-9]+/v1")
    with serving(lambda body, path: (404, {})) as (url, _), error:
        ask(load_policy(f"openai:m@{url}"), [request()])


def judged(words: str) -> Handler:
    def answer(body: dict[str, Any], path: str) -> tuple[int, Any]:
        line = next((line for line in body["messages"][-1]["content"].splitlines() if line.startswith("Verdict ")), "")
        return 200, reply(line.replace("yes", words))

    return answer


def test_judge_samples_verdicts_on_a_server_without_logprobs() -> None:
    with serving(judged("Yes")) as (url, _):
        critic = load_critic(f"judge:openai:m@{url}/v1")
        plans = list(search.run("sbs:2,1", TASK, mas="rpsv", policy=hash_policy(), critic=critic))
        assert critic.mode == "share"
    assert [plan.error for plan in plans] == [None] * 3


def top_logprobs(*tokens: tuple[str, float]) -> dict[str, Any]:
    listed = [{"token": token, "logprob": value} for token, value in tokens]
    return {"content": [{"token": tokens[0][0], "logprob": tokens[0][1], "top_logprobs": listed}]}


def test_judge_asks_a_server_for_the_logprobs_that_it_allows() -> None:
    def answer(body: dict[str, Any], path: str) -> tuple[int, Any]:
        if body.get("top_logprobs", 0) > 5:
            return sent_error("vLLM logprobs")
        found = reply("yes")
        found["choices"][0]["logprobs"] = top_logprobs(("yes", -0.1), ("no", -2.4))
        return 200, found

    with serving(answer) as (url, bodies):
        policy = policy_at(url)
        found = asyncio.run(policy.choose_async(request().messages, ("yes", "no")))
    assert found.logprobs == (-0.1, -2.4) and bodies[-1]["top_logprobs"] == 5


def test_logprob_judge_that_begins_to_reason_is_an_error() -> None:
    found = reply("<think>")
    found["choices"][0]["logprobs"] = top_logprobs(("<think>", -0.01), ("no", -9.0))
    with serving(lambda body, path: (200, found)) as (url, _):
        critic = load_critic(f"judge:openai:m@{url}/v1#mode=logprob")
        [plan, *_] = search.run("sbs:2,1", TASK, mas="rpsv", policy=hash_policy(), critic=critic)
    assert "mode=share" in str(plan.error)


def test_rows_of_one_comparison_share_the_samples_of_equal_requests() -> None:
    drawn = iter(range(10**6))
    with serving(lambda body, path: (200, reply(f"Final Answer: {next(drawn) % 7}"))) as (url, bodies):
        spec = RunSpec(TASK, mas_gym.load_mas("single"), policy_at(url), seed=1)
        rows = pair(named_planners(["sc:3", "single"]), {})
        outcomes, stop = measure(rows, spec)
    assert stop is None and len(outcomes) == 6
    assert len(bodies) == 9
