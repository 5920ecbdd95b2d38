"""Train the agents with TRL's `GRPOTrainer`; `rollout_func` runs a search, and a message's advantage is its credit.

Run ``pip install -e '.[agents]'``, then ``python examples/trainers/trl_grpo.py``; about half a minute on one core.
"""

import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import mas_gym
import search
from mas_gym import tiny
from mas_gym.policies import load_policy
from mas_gym.policies.token_traces import traced
from rewardmodels.agents import sampled_messages

TASK = mas_gym.load_task("arithmetic", split="train", limit=200)
MESSAGES = 2 + 4 + 8 + 16  # in the tree of siblings:2 over the four agents of RPSV


def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
    """Search the problems with the current weights; each prompt is a problem's id, repeated once per message."""
    step, ids = trainer.state.global_step, list(dict.fromkeys(prompts))
    folder = Path(trainer.args.output_dir, f"step-{step}")
    trainer.save_model(str(folder))
    policy, store = traced(load_policy(f"transformers:{folder}"), folder / "tokens"), folder / "trees.db"
    asked, options = [TASK.problem(one) for one in ids], {"training": True, "raise_errors": True}
    list(search.run("siblings:2", asked, mas="rpsv", policy=policy, store=store, seed=step, **options))
    found = dict(sampled_messages(store, folder / "tokens", "leave-one-out"))
    rows = [message for one in ids for message in found[one]]
    return {
        "prompt_ids": [list(row.trace.prompt) for row in rows],
        "completion_ids": [list(row.trace.completion) for row in rows],
        "logprobs": [list(row.trace.logprobs) for row in rows],
        "credit": [row.advantage for row in rows],
    }


def main(folder: str = "", steps: int = 4, questions: int = 4) -> GRPOTrainer:
    model, tokenizer = (kind.from_pretrained(tiny.path()) for kind in (AutoModelForCausalLM, AutoTokenizer))
    settings = GRPOConfig(
        folder or tempfile.mkdtemp(), max_steps=steps, learning_rate=3e-5, per_device_train_batch_size=MESSAGES,
        gradient_accumulation_steps=questions, num_generations=MESSAGES, loss_type="dr_grpo", beta=0.0, temperature=1.0,
        scale_rewards="none",  # TRL subtracts the question's mean, which is 0 for leave-one-out
        max_completion_length=16, log_completions=True, num_completions_to_print=2, logging_steps=1, seed=0,
        shuffle_dataset=False, save_strategy="no", report_to="none", use_cpu=True, bf16=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, lambda credit, **_: credit, args=settings, rollout_func=rollouts, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [problem.id for problem in TASK]}),
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
