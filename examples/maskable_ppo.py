"""MaskablePPO of sb3-contrib learns to choose among the agents' candidate messages.

Run ``pip install sb3-contrib``, then ``python examples/maskable_ppo.py``; about ten minutes on one core.
"""

import gymnasium as gym
import numpy as np

import mas_gym
from mas_gym.policies import load_policy
from rewardmodels import load_critic


def make(problems: int, split: str, seed: int) -> gym.Env:
    """Return the choice among three candidates, as numbers, with values of MASPRM among the features."""
    task = mas_gym.load_task("arithmetic", split=split, limit=problems)
    choice = mas_gym.CandidateChoice(mas_gym.MASEnv(task, "rpsv"), load_policy("tiny"), n=3, seed=seed)
    return mas_gym.CandidateFeatures(choice, load_critic("tiny-masprm"))


def hit(env: gym.Env, problems: int, choose) -> np.ndarray:
    """Return which of the first problems end with a right answer."""
    found = []
    for number in range(problems):
        observation, _ = env.reset(seed=number)
        terminated = False
        while not terminated:
            observation, reward, terminated, _, _ = env.step(choose(observation, env.choice.action_masks()))
        found.append(reward > 0)
    return np.array(found)


def main(steps: int = 3000, problems: int = 200) -> None:
    from sb3_contrib import MaskablePPO

    learner = MaskablePPO(
        "MlpPolicy", make(500, "train", 1), n_steps=min(256, steps), batch_size=64, seed=0, ent_coef=0.01
    )
    learner.learn(steps)
    test, rng = make(problems, "test", 2), np.random.default_rng(0)
    learned = hit(test, problems, lambda o, m: int(learner.predict(o, action_masks=m, deterministic=True)[0]))
    chance = hit(test, problems, lambda o, m: int(rng.choice(np.flatnonzero(m))))
    gain = learned.astype(float) - chance
    spread = 1.96 * gain.std() / len(gain) ** 0.5
    print(f"learned {learned.mean():.3f}, random {chance.mean():.3f}, ", end="")
    print(f"difference {gain.mean():+.3f} [{gain.mean() - spread:+.3f}, {gain.mean() + spread:+.3f}]")


if __name__ == "__main__":
    main()
