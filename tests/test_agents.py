"""Training agents by TRL on what searches leave behind, and rounds of search and training."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: pip install 'mas-gym[agents]'", allow_module_level=True)

import torch
from safetensors.torch import load_file

import mas_gym
import search
from mas_gym import tiny
from mas_gym.errors import ConfigError, DataError, TrainingError
from mas_gym.internal.identity import identity_of
from mas_gym.policies import load_policy
from mas_gym.policies.token_traces import traced, traces_folder
from rewardmodels.agents import (
    CreditedSample,
    TrainedAgents,
    agent_config,
    credited_samples,
    demonstrations,
    sibling_pairs,
    train_agents,
)
from rewardmodels.agents import improve as improve_module
from rewardmodels.agents.improve import ImproveConfig, improve
from search.setup import RunSpec

pytestmark = [
    pytest.mark.trl,
    # TRL and its dependencies warn as they please.
    pytest.mark.filterwarnings("default"),
]

TASK = mas_gym.load_task("arithmetic", split="train", limit=4)
QUICK: dict[str, Any] = {"batch_size": 8, "max_rows": 8, "checkpoints": 4, "epochs": 1.0}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "runs.db"
    policy = traced(load_policy("tiny"), traces_folder(path))
    for plan in search.run("siblings:2", TASK, mas="rpsv", policy=policy, training=True, store=path):
        assert plan.error is None
    return path


@pytest.fixture(scope="module")
def samples(store: Path) -> list[CreditedSample]:
    return credited_samples(store, traces_folder(store), "leave-one-out")


@pytest.fixture(scope="module")
def trained(samples: list[CreditedSample], tmp_path_factory: pytest.TempPathFactory) -> TrainedAgents:
    return train_agents(samples, tmp_path_factory.mktemp("agents") / "grpo", "grpo", device="cpu", **QUICK)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def same(first: Path, second: Path) -> bool:
    one, other = weights(first), weights(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logprob(policy: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> float:
    with torch.inference_mode():
        logits = policy.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return float(torch.log_softmax(logits.double(), 1).gather(1, torch.tensor(completion)[:, None]).sum())


def test_demonstrations_are_messages_of_correct_transcripts(store: Path) -> None:
    with search.open_store(store) as opened:
        right = {
            (state.text, plan.mas.agents[state.speaker].name)
            for plan in opened.plans()
            for one in plan.candidates
            if one.correct
            for state in one.state.path()[1:]
        }
    found = demonstrations(store, 100)
    assert {(one.text, one.agent) for one in found} == right
    assert 0 < len(demonstrations(store, 1)) < len(found)
    assert all(one.prompt[-1].role == "user" for one in found)


def test_sibling_pairs_equal_the_preference_pairs_of_the_store(store: Path) -> None:
    with search.open_store(store) as opened:
        rows = opened.preferences(least=0.5)
    assert [(one.agent, one.chosen) for one in sibling_pairs(store, 0.5)] == [
        (row["agent"], row["chosen"][0]["content"]) for row in rows
    ]


def test_credited_samples_contain_scaled_credit_and_sampled_tokens(store: Path, samples: list[CreditedSample]) -> None:
    from search.credit import credit

    with search.open_store(store) as opened:
        known = [one.advantage for messages in credit(list(opened.plans())) for one in messages]
    scale = math.sqrt(sum(one**2 for one in known) / len(known))
    assert [one.advantage for one in samples] == pytest.approx([one / scale for one in known if one])
    assert all(len(one.trace.completion) == len(one.trace.logprobs) > 0 for one in samples)


@pytest.mark.parametrize("method", ["value", "control-variate", "value-baseline"])
def test_value_based_credit_methods_require_a_critic(store: Path, method: str) -> None:
    from rewardmodels import load_critic

    with pytest.raises(ConfigError, match="--critic"):
        credited_samples(store, traces_folder(store), method)
    assert credited_samples(store, traces_folder(store), method, load_critic("tiny-masprm"))


def test_demonstrations_require_a_training_run_and_samples_require_traces(store: Path, tmp_path: Path) -> None:
    for _ in search.run("single", TASK[:1], mas="rpsv", policy=load_policy("tiny"), store=tmp_path / "e.db"):
        pass
    with pytest.raises(DataError, match="expected a training run"):
        demonstrations(tmp_path / "e.db", 1)
    (tmp_path / "t").mkdir()
    policy = traced(load_policy("tiny"), tmp_path / "t")
    for _ in search.run("single", TASK[:1], mas="rpsv", policy=policy):
        pass
    with pytest.raises(DataError, match="run the rollouts again with --token-traces and a new store"):
        credited_samples(store, tmp_path / "t", "leave-one-out")


def test_grpo_changes_message_probabilities_in_the_direction_of_credit(
    trained: TrainedAgents, samples: list[CreditedSample]
) -> None:
    before, after = load_policy("tiny"), load_policy(trained.policy)
    gains = [logprob(after, *one.trace[:2]) - logprob(before, *one.trace[:2]) for one in samples]
    assert sum(one.advantage * gain for one, gain in zip(samples, gains, strict=True)) > 0


def test_first_grpo_loss_is_the_policy_gradient_of_the_credit(samples: list[CreditedSample], tmp_path: Path) -> None:
    some = samples[:8]
    found = train_agents(some, tmp_path, "grpo", device="cpu", **QUICK)
    [first] = found.metrics["*"]["history"]
    # At the sampling weights every ratio is 1, up to the grid of the traces.
    mean = math.ceil(sum(len(one.trace.completion) for one in some) / len(some))
    expected = -sum(one.advantage * len(one.trace.completion) for one in some) / (len(some) * mean)
    assert first["loss"] == pytest.approx(expected, abs=0.01)


def test_drift_with_equal_weights_is_within_rounding_error(trained: TrainedAgents) -> None:
    assert 0 < trained.metrics["*"]["drift at sampling"]["mean"] < 2.0**-9


def test_drift_with_different_weights_warns(
    trained: TrainedAgents, samples: list[CreditedSample], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rewardmodels.agents"):
        train_agents(samples, tmp_path, "grpo", str(trained.folders["*"]), device="cpu", max_drift=1e-4, **QUICK)
    assert "more than max_drift" in caplog.text


def test_trained_agents_load_as_a_new_policy(trained: TrainedAgents, tmp_path: Path) -> None:
    policy, base = load_policy(trained.policy), load_policy("tiny")
    assert identity_of(policy) != identity_of(base)
    assert not same(trained.folders["*"], tiny.path())
    for agents in (base, policy):
        plans = search.run("single", TASK[:2], mas="rpsv", policy=agents, store=tmp_path / "runs.db")
        assert [plan.error for plan in plans] == [None, None]
    with search.open_store(tmp_path / "runs.db") as opened:
        assert len(opened.runs()) == 2
    card = (trained.folders["*"] / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text-generation" in card and "leave-one-out" in card


def test_finished_training_is_neither_repeated_nor_overwritten(
    trained: TrainedAgents, samples: list[CreditedSample]
) -> None:
    out = trained.folders["*"]
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert train_agents(samples, out, "grpo", device="cpu", **QUICK) == trained
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match=r"another training run \(different settings\)"):
        train_agents(samples, out, "grpo", device="cpu", **{**QUICK, "epochs": 2.0})


class Stop(Exception):
    """Simulates a crash."""


def test_resumed_training_gives_the_same_weights(
    trained: TrainedAgents, samples: list[CreditedSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rewardmodels.training.checkpoints import Guarded

    real, calls = Guarded.check_loss, 0

    def crash(self: Any, loss: float) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise Stop
        real(self, loss)

    monkeypatch.setattr(Guarded, "check_loss", crash)
    with pytest.raises(Stop):
        train_agents(samples, tmp_path / "a", "grpo", device="cpu", **QUICK)
    monkeypatch.undo()
    lines: list[str] = []
    train_agents(samples, tmp_path / "a", "grpo", device="cpu", log=lines.append, **QUICK)
    assert any("checkpoint-" in line for line in lines)
    assert same(tmp_path / "a", trained.folders["*"])


def test_nan_loss_stops_training(samples: list[CreditedSample], tmp_path: Path) -> None:
    broken = [one._replace(advantage=math.nan) for one in samples]
    with pytest.raises(TrainingError, match=r"loss, got nan.*No checkpoint"):
        train_agents(broken, tmp_path, "grpo", device="cpu", **QUICK)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_sft_and_dpo_raise_the_probability_of_chosen_messages(store: Path, tmp_path: Path, method: str) -> None:
    examples: list[Any] = demonstrations(store, 4) if method == "sft" else sibling_pairs(store, 0.5)
    out = train_agents(examples, tmp_path, method, device="cpu", **{**QUICK, "epochs": 3.0})
    before, after = load_policy("tiny"), load_policy(out.policy)
    end = before.format.tokenizer.eos_token_id

    def likelihood(policy: Any, one: Any, text: str) -> float:
        said = policy.format.tokenizer(text, add_special_tokens=False)["input_ids"]
        return logprob(policy, tuple(policy.format.encode(one.prompt, 1).ids), (*said, end))

    def score(policy: Any) -> float:
        if method == "sft":
            return sum(likelihood(policy, one, one.text) for one in examples)
        return sum(likelihood(policy, one, one.chosen) - likelihood(policy, one, one.rejected) for one in examples)

    assert score(after) > score(before)


def test_per_agent_adapters_load_as_one_policy(samples: list[CreditedSample], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    settings = {**QUICK, "adapters": "per-agent", "lora_rank": 4, "learning_rate": 1e-2}
    found = train_agents(samples, tmp_path, "grpo", device="cpu", **settings)
    assert set(found.folders) == {one.agent for one in samples}
    assert len({one["weights"] for one in found.metrics.values()}) > 1
    for folder in found.folders.values():
        assert (folder / "adapter" / "adapter_config.json").is_file() and not same(folder, tiny.path())
    team = load_policy(found.policy)
    [plan] = search.run("single", TASK[:1], mas="rpsv", policy=team)
    assert plan.error is None
    # The adapter alone, on its base, is the same model.
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = next(iter(found.folders.values()))
    base = AutoModelForCausalLM.from_pretrained(tiny.path())
    ids = torch.tensor([samples[0].trace.prompt])
    with torch.inference_mode():
        alone = PeftModel.from_pretrained(base, str(folder / "adapter"))(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    assert torch.allclose(alone, merged, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ({"credit": "exact"}, "credit: expected one of"),
        ({"adapters": "both"}, "adapters"),
        ({"clip": 1.5}, "clip"),
        ({"learningrate": 1}, "did you mean 'learning_rate'"),
    ],
)
def test_agent_config_rejects_wrong_settings(overrides: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        agent_config("grpo", 0, overrides)


def test_agent_config_depends_on_method_and_size() -> None:
    assert agent_config("sft", 10**6, {}).lora_rank == 0 < agent_config("sft", 10**9, {}).lora_rank
    assert agent_config("dpo", 10**9, {}).learning_rate < agent_config("dpo", 10**6, {}).learning_rate
    with pytest.raises(ConfigError, match="expected one of 'sft', 'dpo', 'grpo'"):
        agent_config("ppo", 10**6, {})


def test_train_agents_rejects_invalid_examples_and_arguments(samples: list[CreditedSample], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected examples of type Demonstration"):
        train_agents(samples, tmp_path / "a", "sft")
    with pytest.raises(DataError, match="got none"):
        train_agents([], tmp_path / "a", "grpo")
    with pytest.raises(ConfigError, match="pass adapters='per-agent'"):
        train_agents(samples, tmp_path / "a", "grpo", {"*": "tiny"})
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="expected a GPU, found none"):
            train_agents(samples, tmp_path / "a", "grpo", device="cuda")
    assert not (tmp_path / "a").exists()


SMALL = ImproveConfig(rounds=1, problems=4, search="mcts:4,2", agents=tuple(QUICK.items()))
LEARNING = mas_gym.load_task("arithmetic", split="train", limit=8)
HELD_OUT = mas_gym.load_task("arithmetic", split="dev", limit=3)


def run_improve(out: Path) -> list[dict[str, Any]]:
    spec = RunSpec(LEARNING, mas_gym.load_mas("rpsv"), None)
    rounds = improve(spec, HELD_OUT, out, SMALL, device="cpu")
    found = [one.to_dict() for one in rounds]
    for one in found:
        # Paths and times differ.
        del one["policy"]
        for row in one["rows"]:
            del row["seconds"], row["seconds_std"]
    return found


@pytest.fixture(scope="module")
def improved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("improve") / "whole"
    return out, run_improve(out)


@pytest.mark.slow
def test_improve_evaluates_each_generation_once(improved: tuple[Path, list[Any]]) -> None:
    out, rounds = improved
    assert [one["number"] for one in rounds] == [0, 1] and rounds[0]["identity"] != rounds[1]["identity"]
    assert [[row["planner"] for row in one["rows"]] for one in rounds] == [["single", "mcts:4,2"]] * 2
    assert 0 < rounds[0]["tokens"] < rounds[1]["tokens"]
    assert set(rounds[1]["values"]) == {"reward", "critic", "first critic"}
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    assert run_improve(out) == rounds
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before
    assert (out / "curves.png").stat().st_size > 10_000
    assert list((out / "curves").glob("events*")) and len(json.loads((out / "rounds.json").read_text())) == 2
    with pytest.raises(ConfigError, match="another training run"):
        improve(RunSpec(LEARNING, mas_gym.load_mas("rpsv"), None), HELD_OUT, out, ImproveConfig(rounds=1, problems=3))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_improve_resumes_after_a_crash_in_every_stage(
    improved: tuple[Path, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, rounds = improved

    def crash(*args: Any, **options: Any) -> None:
        raise Stop

    for stage in ("grow", "teach", "measure", "read_examples"):
        with monkeypatch.context() as patch:
            patch.setattr(improve_module, stage, crash)
            with pytest.raises(Stop):
                run_improve(tmp_path)
    assert run_improve(tmp_path) == rounds
    agents = Path("generation-1") / "agents"
    assert same(tmp_path / agents, whole / agents)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_improve_resumes_after_sigkill_with_equal_weights(improved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    whole, rounds = improved
    code = "import sys; from pathlib import Path; from test_agents import run_improve; run_improve(Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    # Files of a running stage: traces, the agents' run.
    for sign in ("runs.db.traces/*.arrows", "generation-1/agents/training/run.json"):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], env=environment, stderr=subprocess.DEVNULL
        )
        while child.poll() is None and not list(tmp_path.glob(sign)):
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert child.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    assert run_improve(tmp_path) == rounds
    agents = Path("generation-1") / "agents"
    assert same(tmp_path / agents, whole / agents)


def test_improve_requires_enough_problems(tmp_path: Path) -> None:
    spec = RunSpec(LEARNING, mas_gym.load_mas("rpsv"), None)
    with pytest.raises(ConfigError, match="expected 12 training problems"):
        improve(spec, HELD_OUT, tmp_path, ImproveConfig(rounds=2, problems=4))
