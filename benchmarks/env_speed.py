"""Speed of the environment: steps, snapshots and the import.

Run ``python -m benchmarks.env_speed`` from the repository root. It uses one core and, except in the
last section, no model: agents send fixed texts. Times are CPU seconds of this process. Each figure is
the best of several repeats, because other load on the machine only increases the time.

* ``env.step``: `MAS-Arithmetic-v0` (RPSV, four agents) without Gymnasium's wrappers.
  A step builds the observation (transcript, chat prompt), the mask and the info;
  the last of four steps grades the answer. Measured without and with resets, each of
  which generates a new word problem.
* snapshots: `clone_state` and `restore_state`, at depths up to 9,999.
* candidates: `CandidateChoice` with the tiny agents and three proposals per turn, chosen at random; one environment
  compared with a vector environment that batches its policy requests. ``--candidates`` measures only these.
* import: a fresh interpreter, `import mas_gym` compared with `import gymnasium`, wall-clock.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import gymnasium as gym
import numpy as np

import mas_gym
from mas_gym.policies import load_policy
from mas_gym.tasks import Problem, ProblemTask

EPISODES = 5_000
REPEATS = 5
PROPOSALS, COPIES = 3, 160
TEXTS = (
    "Facts: 14 marbles; 3 bags of 6. Question: how many marbles now?",
    "1. Find what the bags hold: 3 * 6. 2. Add it to 14.",
    "3 * 6 = 18. 14 + 18 = 32.",
    "Final Answer: 32",
)


def steps_per_second() -> tuple[float, float]:
    """Return steps per second of step time, and of step and reset time together."""
    env = gym.make("MAS-Arithmetic-v0").unwrapped
    everyone, step, reset = env.ALL, env.step, env.reset
    env.reset(seed=0)
    best_step = best_all = 0.0
    for _ in range(REPEATS):
        stepping, begin = 0.0, process_time()
        for _ in range(EPISODES):
            reset()
            start = process_time()
            for text in TEXTS:
                step((text, everyone))
            stepping += process_time() - start
        best_step = max(best_step, EPISODES * len(TEXTS) / stepping)
        best_all = max(best_all, EPISODES * len(TEXTS) / (process_time() - begin))
    return best_step, best_all


def microseconds(call: Callable[[], object], number: int = 20_000) -> float:
    """Return the best time of one call."""
    best = float("inf")
    for _ in range(REPEATS):
        start = process_time()
        for _ in range(number):
            call()
        best = min(best, (process_time() - start) / number)
    return best * 1e6


def snapshot_times(depths: tuple[int, ...]) -> list[tuple[int, float, float]]:
    """Return (depth, clone, restore) in microseconds along a chain of 10,000 agents."""
    agents = [{"name": f"A{i}", "system_prompt": "Go on."} for i in range(10_000)]
    edges = [[-1, 0], *([i, i + 1] for i in range(9_999))]
    env = mas_gym.MASEnv(ProblemTask.of([Problem("one", "1 + 1?", "2")]), {"agents": agents, "edges": edges})
    env.reset()
    rows = []
    for depth in range(max(depths) + 1):
        if depth in depths:
            snapshot = env.clone_state()
            rows.append(
                (depth, microseconds(env.clone_state), microseconds(lambda kept=snapshot: env.restore_state(kept)))
            )
        # The dynamics alone: a step's observation lists the whole transcript, which is linear.
        env.restore_state(env.clone_state()._replace(state=env.dynamics.transition(env.state, ("on", env.ALL))))
    return rows


def choices_per_second(copies: int, steps: int, **options: Any) -> float:
    """Return steps per second of copies that ask together, or of one environment that asks alone."""
    policy, rng = load_policy("tiny", **options), np.random.default_rng(0)
    settings: dict[str, Any] = {"policy": policy, "n": PROPOSALS, "autoreset_mode": "SameStep"}
    envs = gym.make_vec("MAS-Arithmetic-v0", num_envs=copies, **settings) if copies > 1 else None
    single = mas_gym.CandidateChoice(mas_gym.MASEnv("arithmetic"), policy, PROPOSALS) if envs is None else None
    _, info = (envs or single).reset(seed=0)  # type: ignore[union-attr]
    start = process_time()
    for _ in range(steps):
        if envs is not None:
            *_, info = envs.step([int(rng.choice(np.flatnonzero(mask))) for mask in info["action_mask"]])
        elif single is not None:
            _, _, terminated, _, info = single.step(int(rng.choice(np.flatnonzero(info["action_mask"]))))
            info = single.reset()[1] if terminated else info
    return copies * steps / (process_time() - start)


def candidates() -> None:
    for dtype in ("float32", "bfloat16"):
        one = choices_per_second(1, 40, dtype=dtype, max_batch=512)
        together = choices_per_second(COPIES, 4, dtype=dtype, max_batch=512)
        print(f"choices among {PROPOSALS} candidates, tiny agents in {dtype}")
        print(f"  one environment      {one:>10.1f} per CPU second")
        print(f"  {COPIES} copies           {together:>10.1f} per CPU second, {together / one:.1f} times as many")


def import_seconds(module: str) -> float:
    """Return the best time of an import in a fresh interpreter."""
    code = f"from time import perf_counter as t; a = t(); import {module}; print(t() - a)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(REPEATS)]
    return min(float(run.stdout) for run in runs)


def main() -> None:
    if "--candidates" in sys.argv:
        return candidates()
    steps, with_resets = steps_per_second()
    print("env.step, RPSV on Arithmetic, grading included")
    print(f"  steps alone          {steps:>10,.0f} per CPU second")
    print(f"  with resets          {with_resets:>10,.0f} per CPU second")
    print("snapshots, microseconds      clone    restore")
    for depth, clone, restore in snapshot_times((0, 10, 1_000, 9_999)):
        print(f"  depth {depth:>6,}          {clone:>10.2f} {restore:>10.2f}")
    whole, base = import_seconds("mas_gym"), import_seconds("gymnasium")
    print("import in a fresh process, seconds")
    print(f"  import mas_gym       {whole:>10.3f}")
    print(f"  gymnasium alone      {base:>10.3f}")
    heavy = "import mas_gym, sys; print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)) or 'none')"
    loaded = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True).stdout.strip()
    print(f"  heavy modules loaded {loaded:>10}")
    candidates()


if __name__ == "__main__":
    main()
