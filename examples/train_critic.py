"""Train a critic: search with true rewards, mine preference pairs, train, guide a search.

Run ``python examples/train_critic.py``. These sizes only demonstrate the steps and give a poor critic. The shipped
critic was trained on 600 trees of 40 simulations.
"""

import tempfile
from pathlib import Path

import mas_gym
import rewardmodels
import search
from mas_gym.policies import load_policy


def main(problems: int = 24, simulations: int = 12, epochs: float = 1.0) -> None:
    """Train in a temporary folder."""
    folder, policy = Path(tempfile.mkdtemp()), load_policy("tiny")

    # Trees of the train split. Only training runs can access the true reward of a leaf.
    task = mas_gym.load_task("arithmetic", split="train", limit=problems)
    planner = search.MCTS(n_simulations=simulations, max_children=3, c_uct=4.0)
    for _ in search.run(planner, task, mas="rpsv", policy=policy, training=True, store=folder / "trees.db"):
        pass

    # Pairs of siblings, of which one led to correct answers more often; and labeled states for calibration.
    trees = list(rewardmodels.stored_trees(folder / "trees.db"))
    pairs = rewardmodels.collect(trees, "pairs")
    points = rewardmodels.collect(trees, "points")
    print(f"{len(pairs)} pairs from {pairs.trees} trees")

    trained = rewardmodels.train(pairs, folder / "masprm", points=points, device="cpu", epochs=epochs)
    print(f"pairwise accuracy on held-out problems: {trained.info.metrics['accuracy']:.2f}")

    critic = rewardmodels.load_critic(str(trained.folder))
    test = mas_gym.load_task("arithmetic", split="test", limit=4)
    plans = list(search.run("mcts:4,2", test, mas="rpsv", policy=policy, critic=critic))
    print(f"{sum(bool(plan.correct) for plan in plans)} of {len(plans)} right")


if __name__ == "__main__":
    main()
