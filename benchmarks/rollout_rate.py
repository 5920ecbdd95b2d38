"""Training trees per CPU hour: many concurrent searches compared with one at a time, with the bundled model.

    OMP_NUM_THREADS=1 python -m benchmarks.rollout_rate
    OMP_NUM_THREADS=1 python -m benchmarks.rollout_rate --trees 256 --concurrency 64

Both passes run the same searches with the same trees. The rate is in CPU time of the whole process, without loading.
"""

from __future__ import annotations

import argparse
import time

import torch

import mas_gym
import search
from mas_gym.policies import Policy, load_policy


def trees_per_hour(policy: Policy, trees: int, concurrency: int, first: int) -> float:
    problems = mas_gym.load_task("arithmetic", split="train")[first : first + trees]
    start = time.process_time()
    run = search.run("mcts:40,3", problems, mas="rpsv", policy=policy, seed=42, training=True, concurrency=concurrency)
    failed = [plan.error for plan in run if plan.error]
    if failed:
        raise SystemExit(f"{len(failed)} searches failed: {failed[0]}")
    rate = 3600 * trees / (time.process_time() - start)
    print(f"concurrency {concurrency:3}: {trees} trees, {rate:,.0f} trees per CPU hour")
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=192)
    parser.add_argument("--concurrency", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = load_policy("tiny")
    trees_per_hour(policy, 8, arguments.concurrency, 0)
    alone = trees_per_hour(policy, arguments.trees // 4, 1, 8)
    together = trees_per_hour(policy, arguments.trees, arguments.concurrency, 8)
    print(f"{together / alone:.1f} times as many")


if __name__ == "__main__":
    main()
