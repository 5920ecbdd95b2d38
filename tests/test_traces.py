"""Token traces: every sample of a run with its ids and log-probabilities, from any engine, also after a crash."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="local models need the extra 'local'")
pytest.importorskip("pyarrow", reason="token traces need the extra 'data'")

import torch
from loopback import make_app, serving
from search_worlds import talker

import mas_gym
import search
from mas_gym import ChatMessage
from mas_gym.errors import ConfigError, DataError, DataNotFoundError, PolicyError, StoreError
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.policies import SamplingRequest, load_policy
from mas_gym.policies.batch_queue import as_policy, sample_all
from mas_gym.policies.cache import RecordedPolicy, RecordingPolicy
from mas_gym.policies.local.decode import TOKEN_GRID
from mas_gym.policies.openai_format import SEED_MASK, BadReply, parse_reply, payload
from mas_gym.policies.per_agent import PerAgentPolicy
from mas_gym.policies.token_traces import Traces, traced, traces_folder
from mas_gym.systems.prompts import chat_messages
from search.planners.registry import load_planner, planner_spec

TASK = mas_gym.load_task("arithmetic", split="train", limit=3)


def requests(count: int, **options: Any) -> list[SamplingRequest]:
    questions = (f"Ben has {10 + i} pens. Ben buys {i + 3} pens. How many pens does Ben have?" for i in range(count))
    return [
        SamplingRequest((ChatMessage("user", text),), (2 * i, 2 * i + 1), 40, **options)
        for i, text in enumerate(questions)
    ]


@pytest.fixture(scope="module")
def policy() -> Any:
    return load_policy("tiny")


@pytest.fixture(scope="module")
def store(policy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "runs.db"
    recorded = traced(policy, traces_folder(path))
    for plan in search.run("siblings:2", TASK, mas="rpsv", policy=recorded, training=True, store=path):
        assert plan.error is None
    return path


def test_traces_of_a_run_cover_every_message_and_decode_to_its_text(store: Path, policy: Any) -> None:
    with search.open_store(store) as opened:
        [info] = opened.runs()
        tokens = Traces(traces_folder(store), digest_of(info.config["policy"]["identity"]))
        seeds, checked = dict(opened.message_seeds()), 0
        for plan in opened.plans():
            for node in list(plan.tree)[1:]:
                found = tokens.find(seeds[plan.problem_id][node.id])
                assert policy.format.decode(found.trace.completion) == node.state.text
                assert len(found.trace.completion) == len(found.trace.logprobs) == node.tokens
                assert sum(found.trace.logprobs) == pytest.approx(node.logprob, abs=0.02 + TOKEN_GRID * node.tokens)
                assert found.agent == info.mas.agents[node.state.speaker].name
                checked += 1
    assert checked == len(tokens) == 30 * len(TASK)


def test_traced_policy_returns_the_same_replies_and_identity(policy: Any, tmp_path: Path) -> None:
    recorded = traced(policy, tmp_path)
    assert sample_all(recorded, requests(4)) == policy.sample(requests(4))
    assert identity_of(recorded) == identity_of(policy)


def test_trace_logprobs_equal_those_of_a_forward_pass(policy: Any) -> None:
    for reply in policy.sample(requests(4, traced=True)):
        for sample in reply.samples:
            prompt, completion, logprobs = sample.trace
            ids = torch.tensor([prompt + completion])
            with torch.inference_mode():
                logits = policy.model(ids).logits[0, len(prompt) - 1 : -1].double()
            exact = torch.log_softmax(logits, 1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            assert logprobs == pytest.approx(exact.tolist(), abs=TOKEN_GRID / 2 + 1e-5)


def test_traces_do_not_depend_on_the_batch(policy: Any) -> None:
    alone = load_policy("tiny", max_batch=1, prefix_megabytes=0)
    assert [r.samples for r in alone.sample(requests(4, traced=True))] == [
        r.samples for r in policy.sample(requests(4, traced=True))
    ]


def test_replies_to_untraced_requests_contain_no_traces(policy: Any) -> None:
    assert all(sample.trace is None for reply in policy.sample(requests(2)) for sample in reply.samples)


def test_traces_of_a_killed_run_contain_complete_batches(policy: Any, tmp_path: Path) -> None:
    recorded = traced(policy, tmp_path)
    sample_all(recorded, requests(6))
    [stream] = tmp_path.glob("*.arrows")
    whole = len(Traces(tmp_path))
    # The file of a process that was killed while it wrote a batch.
    stream.write_bytes(stream.read_bytes()[:-100])
    assert whole == 12 and 0 < len(Traces(tmp_path)) < whole
    recorded.close()  # type: ignore[attr-defined]


def test_full_disk_is_reported_and_written_traces_are_kept(policy: Any, tmp_path: Path) -> None:
    import resource

    recorded = traced(policy, tmp_path)
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    written, known = 0, {request.seeds[0]: request for request in requests(30)}
    try:
        with pytest.raises(StoreError, match=r"cannot write token traces.*free some space"):
            for request in known.values():
                asyncio.run(recorded.sample_async(request))
                written += 2
                # The file may grow by one more batch, not by all of them.
                size = next(tmp_path.glob("*.arrows")).stat().st_size
                resource.setrlimit(resource.RLIMIT_FSIZE, (min(size + 3000, 20_000), limit[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    kept = Traces(tmp_path)
    assert written >= 4 and len(kept) >= written
    assert all(kept.find(seed) for seed in list(known)[: written // 2])


def test_full_disk_leaves_a_recording_whole(tmp_path: Path) -> None:
    import resource

    file = tmp_path / "recording.jsonl"
    recording = RecordingPolicy(talker(), file)
    sample_all(recording, requests(3))
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 100, limit[1]))
        assert isinstance(sample_all(recording, requests(4))[-1], PolicyError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    replies = sample_all(recording, requests(6))
    recording.close()
    assert [reply.samples for reply in sample_all(as_policy(RecordedPolicy(file)), requests(6))] == [
        reply.samples for reply in replies
    ]


def test_traces_reject_folders_without_traces_and_files_of_other_schemas(store: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    with pytest.raises(DataNotFoundError, match="--token-traces"):
        Traces(tmp_path)
    [file] = traces_folder(store).glob("*.parquet")
    parquet.write_table(parquet.read_table(file).replace_schema_metadata({}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="schema 1"):
        Traces(tmp_path)
    (tmp_path / "other.parquet").write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match="expected a Parquet file"):
        Traces(tmp_path)


def test_long_runs_are_traced_in_several_files(policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mas_gym.policies.token_traces._FILE", 2_000)
    recorded: Any = traced(policy, tmp_path)
    sample_all(recorded, requests(12))
    recorded.close()
    assert len(list(tmp_path.glob("*.parquet"))) > 2 and not list(tmp_path.glob("*.arrows"))
    assert len(Traces(tmp_path)) == 24


def test_small_file_with_large_traces_is_rejected(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    [file] = traces_folder(store).glob("*.parquet")
    one = parquet.read_table(file).slice(0, 1)
    ids = pa.array([[0] * (10**6 - 200)], pa.list_(pa.int32()))
    parquet.write_table(
        one.set_column(one.schema.get_field_index("prompt_ids"), "prompt_ids", ids), tmp_path / file.name
    )
    monkeypatch.setattr("mas_gym.internal.parquet_rows.LARGEST", 10**6)
    assert (tmp_path / file.name).stat().st_size < 10**5
    with pytest.raises(DataError, match="at most 1,000,000 bytes of decoded rows"):
        Traces(tmp_path)


def test_traces_of_cached_replies_are_rejected(policy: Any, tmp_path: Path) -> None:
    cached = load_policy("tiny", cache=str(tmp_path / "c.db"))
    for plan in search.run("single", TASK[:1], mas="rpsv", policy=cached):
        assert plan.error is None
    [plan] = search.run("single", TASK[:1], mas="rpsv", policy=traced(cached, tmp_path / "traces"))
    assert plan.error is not None and "leave out cache=" in plan.error


def test_traces_of_per_agent_policies_contain_the_agent_name(policy: Any, tmp_path: Path) -> None:
    team = PerAgentPolicy({"Solver": load_policy("tiny", max_batch=8), "*": policy})
    recorded: Any = traced(team, tmp_path)
    [plan] = search.run("single", TASK[:1], mas="rpsv", policy=recorded)
    recorded.close()
    tokens = Traces(tmp_path)
    assert plan.error is None and {tokens[row].agent for row in range(len(tokens))} == {
        "Reader",
        "Planner",
        "Solver",
        "Verifier",
    }


def test_calls_of_a_program_are_traced_through_the_gateway(policy: Any, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    program = str(Path(__file__).parents[1] / "examples" / "programs" / "plain_openai.py") + ":solve"
    plans = list(search.run("sc:2", TASK[:1], program=program, policy=traced(policy, tmp_path)))
    assert plans[0].error is None and len(Traces(tmp_path)) == plans[0].usage.agent_calls


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_traces_through_a_server_equal_those_of_the_engine(policy: Any, tmp_path: Path, api: str) -> None:
    with serving(make_app(policy)) as url:
        remote: Any = traced(load_policy(f"openai:served@{url}/v1", api=api), tmp_path)
        [plan] = search.run("siblings:2", TASK[:1], mas="rpsv", policy=remote, training=True, store=tmp_path / "r.db")
        remote.close()
    with search.open_store(tmp_path / "r.db") as opened:
        seeds = dict(opened.message_seeds())[plan.problem_id]
    found, model = Traces(tmp_path), plan.mas
    assert plan.error is None and len(found) == 30
    for node in list(plan.tree)[1:]:
        prompt = chat_messages(model, node.state.parent)
        if api == "completions":
            prompt = (ChatMessage("user", "\n\n".join(message.content for message in prompt) + "\n\n"),)
        asked = SamplingRequest(prompt, (seeds[node.id] & SEED_MASK,), 256, traced=True)
        [sample] = policy.sample([asked])[0].samples
        assert (sample.text, sample.trace) == (node.state.text, found.find(seeds[node.id]).trace)


def test_traces_from_a_server_without_token_ids_contain_logprobs(policy: Any, tmp_path: Path) -> None:
    with serving(make_app(policy, frozenset({"return_token_ids"}))) as url:
        remote: Any = traced(load_policy(f"openai:served@{url}/v1"), tmp_path)
        [plan] = search.run("single", TASK[:1], mas="rpsv", policy=remote)
        remote.close()
    found = [Traces(tmp_path)[row].trace for row in range(4)]
    assert plan.error is None and all(not one.prompt and not one.completion and one.logprobs for one in found)


def body(**choice: Any) -> dict[str, Any]:
    logprobs = {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}
    message = {"index": 0, "finish_reason": "stop", "message": {"content": "hi"}, "logprobs": logprobs, **choice}
    return {"choices": [message], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def test_replies_with_token_ids_become_traces() -> None:
    reply = {**body(token_ids=[5, 6]), "prompt_token_ids": [1, 2, 3]}
    [sample] = parse_reply(json.dumps(reply).encode(), 1, "chat", True, traced=True).samples
    assert sample.trace == ((1, 2, 3), (5, 6), (-0.5, -0.25))
    assert parse_reply(json.dumps(reply).encode(), 1, "chat", True).samples[0].trace is None


def test_server_replies_without_token_ids_keep_their_logprobs() -> None:
    [sample] = parse_reply(json.dumps(body()).encode(), 1, "chat", True, traced=True).samples
    assert sample.trace == ((), (), (-0.5, -0.25))


@pytest.mark.parametrize("ids", ["5", [5], [5, -1], [5, 1.5]])
def test_server_replies_with_invalid_token_ids_raise_bad_reply(ids: Any) -> None:
    reply = {**body(token_ids=ids), "prompt_token_ids": [1]}
    with pytest.raises(BadReply, match="token"):
        parse_reply(json.dumps(reply).encode(), 1, "chat", True, traced=True)


def test_token_ids_are_requested_from_servers_only_if_traced() -> None:
    [request] = requests(1)
    assert "return_token_ids" not in payload(request, (1,), "m", "chat", True)
    assert payload(replace(request, traced=True), (1,), "m", "chat", True)["return_token_ids"] is True


def test_siblings_planner_samples_a_whole_tree_with_rewards(store: Path) -> None:
    with search.open_store(store) as opened:
        for plan in opened.plans():
            tree = plan.tree
            assert len(tree) == 31 and len(plan.candidates) == 16
            assert all(len(list(tree.children(node))) in (0, 2) for node in range(len(tree)))
            rewards = [1.0 if one.correct else -1.0 for one in plan.candidates]
            assert tree.visits[0] == 16 and tree.totals[0] == sum(rewards)


def test_siblings_planner_needs_no_critic_and_no_reward_outside_training(policy: Any) -> None:
    [plan] = search.run("siblings:2", TASK[:1], mas="rpsv", policy=policy)
    assert plan.error is None and not any(plan.tree.visits)
    with pytest.raises(ConfigError, match="k: expected an integer"):
        search.Siblings(0)


@pytest.mark.parametrize(
    ("spec", "widths", "answers"),
    [("siblings:3,turns=2", [1, 3, 9, 9, 9], 9), ("siblings:2,spare=1", [1, 3, 4, 8, 16], 16)],
)
def test_siblings_turns_and_spare_settings_give_the_expected_tree_widths(
    policy: Any, spec: str, widths: list[int], answers: int
) -> None:
    [plan] = search.run(spec, TASK[:1], mas="rpsv", policy=policy, training=True)
    tree = plan.tree
    assert [sum(tree.states[node].depth == turn for node in range(len(tree))) for turn in range(5)] == widths
    assert len(plan.candidates) == answers and plan.error is None
    assert planner_spec(load_planner(spec)) == spec


def test_spare_option_of_siblings_does_not_change_the_other_messages(policy: Any) -> None:
    found = []
    for spec in ("siblings:2", "siblings:2,spare=2"):
        [plan] = search.run(spec, TASK[:1], mas="rpsv", policy=policy, training=True)
        found.append([one.text for one in plan.candidates])
    assert found[0] == found[1]


def test_siblings_planner_stays_within_a_budget(policy: Any) -> None:
    budget = search.Budget(calls=10)
    [plan] = search.run("siblings:2", TASK[:1], mas="rpsv", policy=policy, budget=budget)
    assert plan.error is None and plan.candidates and plan.usage.agent_calls <= 10


def test_policies_without_tokens_cannot_be_traced(tmp_path: Path) -> None:
    from mas_gym.policies import ScriptedPolicy

    scripted = ScriptedPolicy(lambda request, seed: "Final Answer: 1")
    with pytest.raises(PolicyError, match="expected replies with token traces"):
        asyncio.run(traced(scripted, tmp_path).sample_async(requests(1)[0]))
