"""Train MaskablePPO of sb3-contrib to choose among the agents' candidate messages.

Run ``pip install sb3-contrib``, then ``python examples/maskable_ppo.py``; about three minutes on one core.
"""

import gymnasium as gym
import numpy as np

import mas_gym
from mas_gym.envs.sb3 import SB3VecEnv
from mas_gym.policies import load_policy
from rewardmodels import load_critic


def make(split: str, copies: int, seed: int, problems: int = 500) -> mas_gym.MASVectorEnv:
    """Return sub-environments with three candidates per turn as numeric features, including values of MASPRM."""
    critic = load_critic("tiny-masprm")
    return gym.make_vec(
        "MAS-Arithmetic-v0",
        num_envs=copies,
        task=mas_gym.load_task("arithmetic", split=split, limit=problems),
        policy=load_policy("tiny"),
        n=3,
        seed=seed,
        wrap=lambda env: mas_gym.CandidateFeatures(env, critic),
        autoreset_mode="SameStep",
    )


def hit(problems: int, choose) -> np.ndarray:
    """Return which episodes end with a correct answer, one per sub-environment."""
    envs = make("test", problems, seed=2)
    observations, _ = envs.reset(seed=0)
    found, ended = np.zeros(problems), np.zeros(problems, dtype=bool)
    while not ended.all():
        masks = np.stack(envs.call("action_masks"))
        observations, rewards, terminated, _, _ = envs.step(choose(observations, masks))
        found[terminated & ~ended] = rewards[terminated & ~ended] > 0
        ended |= terminated
    return found


def main(steps: int = 3000, problems: int = 200) -> None:
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.vec_env import VecMonitor

    copies = min(32, steps)
    envs = VecMonitor(SB3VecEnv(make("train", copies, seed=1)))
    learner = MaskablePPO(
        "MlpPolicy", envs, n_steps=max(2, min(256, steps) // copies), batch_size=64, seed=0, ent_coef=0.01
    )
    learner.learn(steps)

    rng = np.random.default_rng(0)
    learned = hit(problems, lambda o, masks: learner.predict(o, action_masks=masks, deterministic=True)[0])
    chance = hit(problems, lambda o, masks: np.array([rng.choice(np.flatnonzero(mask)) for mask in masks]))
    gain = learned - chance
    spread = 1.96 * gain.std() / len(gain) ** 0.5
    print(f"learned {learned.mean():.3f}, random {chance.mean():.3f}, ", end="")
    print(f"difference {gain.mean():+.3f} [{gain.mean() - spread:+.3f}, {gain.mean() + spread:+.3f}]")


if __name__ == "__main__":
    main()
