"""The adapters to other people's trainers give one seeded batch the same advantages."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import runpy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mas_gym
import search
from mas_gym.policies import Policy, SamplingReply, SamplingRequest, load_policy
from search.credit import credit

pytestmark = [
    pytest.mark.slow,
    # The trainers and their dependencies warn as they please.
    pytest.mark.filterwarnings("default"),
]
EXAMPLES = Path(__file__).parents[1] / "examples" / "trainers"
QUESTIONS = 2


def needs(package: str, install: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install {install}")


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.fixture(scope="module")
def batch() -> list[search.Plan]:
    """The trees of the first step of every adapter."""
    task = mas_gym.load_task("arithmetic", split="train", limit=QUESTIONS)
    found = search.run("siblings:2", task, mas="rpsv", policy=load_policy("tiny"), training=True, seed=0)
    return sorted(found, key=lambda plan: [problem.id for problem in task].index(plan.problem_id))


def advantages(batch: list[search.Plan]) -> list[float]:
    found = [one.advantage for messages in credit(batch, "leave-one-out") for one in messages]
    assert len(found) == len(batch) * 30 and any(found)
    return found


@pytest.mark.trl
@needs("trl", "'mas-gym[agents]'")
def test_grpo_trainer_advantages_equal_the_credit(batch: list[search.Plan], tmp_path: Path) -> None:
    import pandas as pd
    import torch

    trainer = example("trl_grpo")["main"](str(tmp_path), 1, QUESTIONS)
    [table] = (tmp_path / "completions").glob("*.parquet")
    rows = pd.read_parquet(table)
    assert rows["completion"].tolist() == [state.text for plan in batch for state in plan.tree.states[1:]]
    assert rows["advantage"].tolist() == pytest.approx(advantages(batch), abs=1e-6)
    base = load_policy("tiny").model.state_dict()
    assert any(not torch.equal(one, base[name]) for name, one in trainer.model.state_dict().items())


@contextmanager
def served(app: Any) -> Iterator[str]:
    import uvicorn

    # OpenEnv 0.3 logs an error when a client disconnects.
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.mark.frameworks
@needs("openenv", "openenv-core")
def test_credit_from_openenv_client_rewards_equals_the_credit_of_plans(batch: list[search.Plan]) -> None:
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.generic_client import GenericEnvClient

    parts = example("openenv_server")
    app = create_fastapi_app(parts["MASServer"], parts["Message"], parts["Turn"])
    with served(app) as url, GenericEnvClient(url).sync() as client:
        found = parts["served_credit"](client, batch)
        turn = client.reset(problem_id=batch[0].problem_id).observation
        state = client.state()
    assert [one.advantage for messages in found for one in messages] == pytest.approx(advantages(batch), abs=1e-6)
    assert turn["agent"] == "Reader" and batch[0].tree.states[0].question in turn["prompt"][-1]["content"]
    assert (state["episode_id"], state["step_count"]) == (batch[0].problem_id, 0)


@needs("verifiers", "'verifiers>=0.4,<0.5'")
def test_verifiers_rollouts_get_the_credit_of_plans(batch: list[search.Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    [plan] = batch[:1]
    problem = mas_gym.load_task("arithmetic", split="train").problem(plan.problem_id)
    traces, found = example("verifiers_program")["searched"]([problem])
    assert [one.advantage for messages in found for one in messages] == pytest.approx(advantages([plan]), abs=1e-6)
    answers = {one.state.text for one in plan.candidates}
    assert {trace.info["answer"] for trace in traces} == answers and all(trace.num_turns == 4 for trace in traces)


class Masked(Policy):
    """A local model with the seeds that servers get."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.max_batch = inner, inner.max_batch

    def identity(self) -> dict[str, Any]:
        return {"masked": self.inner.identity()}

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
        return list(
            self.inner.sample([replace(one, seeds=tuple(seed % 2**31 for seed in one.seeds)) for one in requests])
        )


def objects(column: list[Any]) -> Any:
    """Return an array whose elements stay Python objects."""
    found = np.empty(len(column), dtype=object)
    found[:] = column
    return found


@needs("verl", "verl cachetools")
def test_verl_agent_loop_advantages_equal_the_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop runs in verl's worker; its LLM server is the tiny model, because verl's own ones need a GPU."""
    from hydra import compose, initialize_config_module
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    from mas_gym import tiny
    from mas_gym.policies.local.decode import Decoder, DecodingJob

    monkeypatch.syspath_prepend(str(EXAMPLES))
    importlib.import_module("verl_agent_loop")

    policy: Any = load_policy("tiny")

    class Server(LLMServerClient):
        async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: Any, **_: Any) -> TokenOutput:
            decoder = Decoder(policy._model, 1, policy.end_tokens)
            cap = sampling_params["max_tokens"]
            sampling = sampling_params["temperature"], sampling_params["top_p"]
            asked = SamplingRequest(
                (mas_gym.ChatMessage("user", ""),), (sampling_params["seed"],), cap, *sampling, traced=True
            )
            decoder.submit(DecodingJob(0, asked, prompt_ids, cap, 0))
            while not (done := decoder.step()):
                pass
            [written] = done[0].written
            return TokenOutput(token_ids=written.tokens, log_probs=list(written.each))

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={tiny.path()}",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.agent.default_agent_loop=mas_gym",
                "actor_rollout_ref.rollout.prompt_length=256",
                "actor_rollout_ref.rollout.response_length=64",
                "algorithm.adv_estimator=message_credit",
            ],
        )
    problems = [problem for problem in mas_gym.load_task("arithmetic", split="train", limit=QUESTIONS)]
    rows = [problem for problem in problems for _ in range(30)]
    columns = {
        "raw_prompt": [[{"role": "user", "content": one.question}] for one in rows],
        "problem_id": [one.id for one in rows],
        "uid": [f"group of {one.id}" for one in rows],
    }
    batch = DataProto.from_dict(non_tensors={name: objects(column) for name, column in columns.items()})
    worker = AgentLoopWorker(config, Server(config))
    found = asyncio.run(worker.generate_sequences(batch))
    found.batch["token_level_rewards"] = found.batch["rm_scores"]
    found = compute_advantage(found, config.algorithm.adv_estimator, config=config.algorithm)
    plans = list(search.run("siblings:2", problems, mas="rpsv", policy=Masked(policy), training=True, seed=0))
    plans = sorted(plans, key=lambda plan: [problem.id for problem in problems].index(plan.problem_id))
    texts = [
        policy.format.decode(ids[mask.bool()].tolist())
        for ids, mask in zip(found.batch["responses"], found.batch["response_mask"], strict=True)
    ]
    assert texts == [state.text for plan in plans for state in plan.tree.states[1:]]
    each = found.batch["advantages"].sum(1) / found.batch["response_mask"].sum(1)
    assert each.tolist() == pytest.approx(advantages(plans), abs=1e-6)


@needs("agentlightning", "agentlightning")
def test_agent_lightning_transitions_have_the_tokens_and_the_credit() -> None:
    import agentlightning as agl
    from loopback import make_app, serving

    policy: Any = load_policy("tiny")
    [problem] = mas_gym.load_task("arithmetic", split="train", limit=1)
    with serving(make_app(policy)) as url:
        llm = agl.LLM(endpoint=f"{url}/v1", model="served")
        found = asyncio.run(example("agent_lightning")["transitions"](problem.id, llm))
    [plan] = search.run("siblings:2", [problem], mas="rpsv", policy=Masked(policy), training=True, seed=0)
    texts = [policy.format.decode(one.response["token_ids"]) for one in found]
    assert texts == [state.text for state in plan.tree.states[1:]]
    assert [one.reward for one in found] == pytest.approx(advantages([plan]), abs=1e-6)
