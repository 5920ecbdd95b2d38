"""Fine-tune an agent with TRL: search, prefer the better of two messages, train by DPO, compare single passes.

Run ``pip install trl``, then ``python examples/fine_tune_agents.py``; about ten minutes on one core.
"""

import tempfile
from pathlib import Path

import numpy as np

import mas_gym
import search
from mas_gym import tiny
from mas_gym.policies import load_policy


def preferences(folder: Path, problems: int, simulations: int) -> list[dict]:
    """Search the train split with true rewards; return rows with agent, prompt, chosen and rejected."""
    task = mas_gym.load_task("arithmetic", split="train", limit=problems)
    planner = search.MCTS(n_simulations=simulations, max_children=3, c_uct=4.0)
    store = folder / "trees.db"
    for _ in search.run(planner, task, mas="rpsv", policy=load_policy("tiny"), training=True, store=store):
        pass
    with search.open_store(store) as trees:
        return trees.preferences()


def train(rows: list[dict], folder: Path, epochs: float) -> None:
    """Train the tiny model on the rows by DPO, and save it."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = (kind.from_pretrained(tiny.path()) for kind in (AutoModelForCausalLM, AutoTokenizer))
    settings = DPOConfig(
        str(folder / "steps"), num_train_epochs=epochs, learning_rate=3e-5, per_device_train_batch_size=16,
        save_strategy="no", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, seed=0,
    )  # fmt: skip
    columns = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows]
    trainer = DPOTrainer(model, args=settings, train_dataset=Dataset.from_list(columns), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(folder))
    tokenizer.save_pretrained(folder)


def right(policy, problems: int, seeds: range) -> np.ndarray:
    """Return which single passes are correct, shape (seeds, problems)."""
    task = mas_gym.load_task("arithmetic", split="test", limit=problems)
    found = np.zeros((len(seeds), problems))
    place = {problem.id: number for number, problem in enumerate(task)}
    for row, seed in zip(found, seeds, strict=True):
        for plan in search.run("single", task, mas="rpsv", policy=policy, seed=seed):
            row[place[plan.problem_id]] = plan.correct
    return found


def main(
    problems: int = 300, simulations: int = 20, tests: int = 300, agent: str = "Solver", epochs: float = 2.0
) -> Path:
    folder = Path(tempfile.mkdtemp())
    rows = [row for row in preferences(folder, problems, simulations) if row["agent"] == agent]
    print(f"{len(rows)} preferences for {agent}")
    train(rows, folder / agent, epochs)

    team = load_policy({agent: f"transformers:{folder / agent}", "*": "tiny"})
    before, after = (right(policy, tests, range(3)).mean(axis=0) for policy in (load_policy("tiny"), team))
    gain = after - before
    spread = 1.96 * gain.std() / len(gain) ** 0.5
    print(f"single passes right: {before.mean():.3f} before, {after.mean():.3f} after, ", end="")
    print(f"difference {gain.mean():+.3f} [{gain.mean() - spread:+.3f}, {gain.mean() + spread:+.3f}]")
    return folder / agent


if __name__ == "__main__":
    main()
