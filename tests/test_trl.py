"""TRL's trainers on what searches leave behind: DPO of an agent, and a reward model as a critic."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: pip install trl", allow_module_level=True)

import torch
from transformers import AutoModelForCausalLM

import mas_gym
import search
from mas_gym import tiny
from mas_gym.policies import load_policy
from rewardmodels import load_critic

pytestmark = [
    pytest.mark.trl,
    # TRL and its dependencies warn as they please.
    pytest.mark.filterwarnings("default"),
]
EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_agent_trained_by_dpo_can_be_used_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    folder = example("fine_tune_agents")["main"](8, 8, 4, "Solver", 4.0)
    said = capsys.readouterr().out
    assert re.search(r"\d+ preferences for Solver\n", said)
    assert re.search(r"right: \d.\d+ before, \d.\d+ after, difference [+-]\d.\d+ \[", said)
    trained, base = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, tiny.path()))
    assert trained.keys() == base.keys()
    assert any(not torch.equal(trained[name], base[name]) for name in base)
    # The folder is one agent's model in a config, too.
    mas = {**mas_gym.load_mas("rpsv").to_dict(), "policies": {"Solver": f"transformers:{folder}", "*": "tiny"}}
    task = mas_gym.load_task("arithmetic", split="test", limit=2)
    assert [plan.error for plan in search.run("single", task, mas=mas, policy="from-config")] == [None, None]


def test_dpo_raises_the_probability_of_chosen_messages(tmp_path: Path) -> None:
    parts = example("fine_tune_agents")
    rows = parts["preferences"](tmp_path, 8, 8)
    parts["train"](rows, tmp_path / "all", 8.0)
    policies = load_policy("tiny"), load_policy(f"transformers:{tmp_path / 'all'}")

    def margin(policy: Any, row: dict[str, Any]) -> float:
        ids = policy.format.encode(tuple(mas_gym.ChatMessage(**m) for m in row["prompt"]), 1).ids
        end = policy.format.tokenizer.eos_token_id
        found = []
        for side in ("chosen", "rejected"):
            said = policy.format.tokenizer(row[side][0]["content"], add_special_tokens=False)["input_ids"] + [end]
            with torch.inference_mode():
                logits = policy.model(torch.tensor([ids + said])).logits[0, len(ids) - 1 : -1]
            found.append(logits.log_softmax(1).gather(1, torch.tensor(said)[:, None]).sum().item())
        return found[0] - found[1]

    before, after = ([margin(policy, row) for row in rows] for policy in policies)
    assert sum(after) > sum(before)


def test_rm_critic_scores_equal_those_of_the_trl_reward_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = example("trl_critic")
    mined = parts["mine"](tmp_path / "trees.db", 6, 8)
    trainer = parts["train"](mined, tmp_path / "critic", 1.0)
    critic: Any = load_critic(f"rm:{tmp_path / 'critic'}", prefixes=True)
    mas = mas_gym.load_mas("rpsv")
    model = trainer.model.eval()
    for side in ("chosen", "rejected"):
        states = [getattr(pair, side).state for pair in mined]
        ours = critic.logits([search.ScoringContext(state, mas, None) for state in states])
        with torch.inference_mode():
            # The ids that TRL trained on.
            rows = trainer.train_dataset[f"{side}_ids"]
            theirs = [model(input_ids=torch.tensor([list(ids)])).logits.item() for ids in rows]
        assert len(ours) == len(theirs) > 3
        assert ours == pytest.approx(theirs, abs=1e-5)
        assert max(ours) - min(ours) > 1e-2


@pytest.mark.slow
def test_critic_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example("trl_critic")["main"](10, 8, 2, 1.0)
    assert re.search(r"\d+ pairs; held-out accuracy \d.*\nsingle +\d of 2 right\nsbs", capsys.readouterr().out)
