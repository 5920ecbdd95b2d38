"""Train a critic with TRL's RewardTrainer on mined pairs, and guide a search with it.

Run ``pip install trl``, then ``python examples/trl_critic.py``; about five minutes on one core. The critic is a scalar
reward model with a chat template. ``rm:FOLDER`` loads it, and so do other tools for this format.
"""

import tempfile
from pathlib import Path

import numpy as np

import mas_gym
import rewardmodels
import search
from mas_gym import tiny
from mas_gym.policies import load_policy
from rewardmodels.data.mining import pairs


def chat(state) -> list[dict]:
    """Return a state in the format of ``rm:`` critics: the question, then the messages as one answer."""
    answer = "\n\n".join(turn.text for turn in state.path()[1:])
    return [{"role": "user", "content": state.question}, {"role": "assistant", "content": answer}]


def mine(store: Path, problems: int, simulations: int) -> list:
    """Search the train split with true rewards; return pairs of sibling states, the better one first."""
    mas = mas_gym.load_mas("rpsv")
    task = mas_gym.load_task("arithmetic", split="train", limit=problems)
    planner = search.MCTS(n_simulations=simulations, max_children=3, c_uct=4.0)
    for _ in search.run(planner, task, mas=mas, policy=load_policy("tiny"), training=True, store=store):
        pass
    trees = rewardmodels.stored_trees(store)
    return [pair for item in trees for pair in pairs(item.tree, mas_gym.Dynamics(mas).max_depth)]


def train(mined: list, folder: Path, epochs: float):
    """Train a scalar head on the tiny model; return TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    model = AutoModelForSequenceClassification.from_pretrained(tiny.path(), num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    settings = RewardConfig(
        str(folder / "steps"), num_train_epochs=epochs, learning_rate=3e-4, per_device_train_batch_size=16,
        save_strategy="no", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, seed=0,
    )  # fmt: skip
    rows = [{"chosen": chat(pair.chosen.state), "rejected": chat(pair.rejected.state)} for pair in mined]
    trainer = RewardTrainer(model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(folder))
    return trainer


def main(problems: int = 300, simulations: int = 20, tests: int = 100, epochs: float = 2.0) -> Path:
    folder = Path(tempfile.mkdtemp())
    mined = mine(folder / "trees.db", problems, simulations)
    held = len(mined) // 10
    train(mined[held:], folder / "critic", epochs)

    # Such models usually score finished answers; this one was also trained on unfinished states.
    critic = rewardmodels.load_critic(f"rm:{folder / 'critic'}", prefixes=True)
    mas = mas_gym.load_mas("rpsv")
    contexts = [search.ScoringContext(side.state, mas, None) for pair in mined[:held] for side in pair[:2]]
    values = np.array(critic.score(contexts)).reshape(-1, 2)
    print(f"{len(mined)} pairs; held-out accuracy {(values[:, 0] > values[:, 1]).mean():.3f}")

    task = mas_gym.load_task("arithmetic", split="test", limit=tests)
    for planner in ("single", "sbs:5,1"):
        plans = list(search.run(planner, task, mas=mas, policy=load_policy("tiny"), critic=critic))
        print(f"{planner:8} {sum(bool(plan.correct) for plan in plans)} of {len(plans)} right")
    return folder / "critic"


if __name__ == "__main__":
    main()
