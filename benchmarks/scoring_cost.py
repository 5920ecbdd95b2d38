"""Cost of a reward call: encoded tokens with and without shared prefixes, and the share of a search's CPU time.

Run with one thread::

    OMP_NUM_THREADS=1 python -m benchmarks.scoring_cost
    OMP_NUM_THREADS=1 python -m benchmarks.scoring_cost --critic models/masprm --planner sbs:5,3 --problems 64
    OMP_NUM_THREADS=1 python -m benchmarks.scoring_cost --policy vllm:PATH

All passes run the same searches: with cached prefixes (the default), with every state encoded completely, and in
float64. The script prints tokens per reward call, CPU milliseconds per reward call and per agent call, the reward
calls' share of CPU time, and the largest difference between the scores of the first two passes. CPU time is that of
this process and its children, so it includes an engine in a separate process. Two more passes measure wall-clock time:
with the critic in a separate thread on a second core, and with scores that are known in advance. Their difference is
the reward calls' share of search time. The script needs psutil.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch

import mas_gym
import search
from benchmarks.engines import cpu_seconds, load
from mas_gym.systems.state import MASState
from rewardmodels import LearnedCritic
from rewardmodels.tiny_critics import shipped
from search import ScoringContext


class Timed:
    """A critic with a clock."""

    terminal_only = free = concurrent = False

    def __init__(self, critic: LearnedCritic) -> None:
        """Time one critic."""
        self.critic, self.name, self.max_batch = critic, critic.name, critic.max_batch
        self.terminal_only = critic.terminal_only
        self.seconds = 0.0
        self.calls = 0
        self.scores: dict[MASState, float] = {}

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Score and note the CPU time."""
        start = time.process_time()
        values = self.critic.score(contexts)
        self.seconds += time.process_time() - start
        self.calls += len(contexts)
        self.scores.update(zip((context.state for context in contexts), values, strict=True))
        return values


def agent_calls(arguments: argparse.Namespace, policy: Any, critic: Any) -> int:
    """Search all problems and return the number of agent calls."""
    problems = mas_gym.load_task("arithmetic", split="test")[: arguments.problems]
    common = {"mas": "rpsv", "policy": policy, "critic": critic, "concurrency": arguments.concurrency}
    run = search.run(arguments.planner, problems, seed=42, **common)
    failed = [plan.error for plan in run if plan.error]
    if failed:
        raise SystemExit(f"{len(failed)} searches failed: {failed[0]}")
    return run.usage.agent_calls


def run_pass(arguments: argparse.Namespace, policy: Any, share: bool, dtype: Literal["float32", "float64"]) -> Timed:
    critic = LearnedCritic(arguments.critic, device="cpu", dtype=dtype, share=share)
    timed = Timed(critic)
    start = cpu_seconds()
    calls = agent_calls(arguments, policy, timed)
    seconds = cpu_seconds() - start
    counts = critic.counts
    name = ("prefixes kept" if share else "states whole") + (", float64" if dtype == "float64" else "")
    print(
        f"{name:24} {counts.states:6} states, {counts.encoded / counts.states:6.1f} tokens per reward call "
        f"({counts.whole / counts.encoded:4.2f} times fewer than whole), "
        f"{1000 * timed.seconds / counts.states:6.2f} CPU ms per reward call, "
        f"{1000 * (seconds - timed.seconds) / calls:6.2f} per agent call, "
        f"{timed.seconds / seconds:5.1%} of the search"
    )
    return timed


class Known:
    """A critic that has scored everything before."""

    terminal_only = free = False

    def __init__(self, timed: Timed) -> None:
        """Take over another's scores."""
        self.name, self.max_batch, self.scores = timed.name, timed.max_batch, timed.scores

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Look up."""
        return [self.scores[context.state] for context in contexts]


def clock(arguments: argparse.Namespace, policy: Any, critic: Any) -> float:
    """Return the seconds of the searches."""
    start = time.perf_counter()
    agent_calls(arguments, policy, critic)
    return time.perf_counter() - start


def beside(arguments: argparse.Namespace, policy: Any) -> None:
    """Print the time that scoring on a separate core adds to a search."""
    shares = []
    for _ in range(arguments.repeats):
        timed = Timed(LearnedCritic(arguments.critic, device="cpu"))
        timed.concurrent = True
        scored = clock(arguments, policy, timed)
        known = clock(arguments, policy, Known(timed))
        shares.append(1 - known / scored)
        print(f"critic on a core of its own: {scored:.2f} s, scores known beforehand: {known:.2f} s")
    print(f"reward calls' share of search time, median of {len(shares)}: {sorted(shares)[len(shares) // 2]:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--critic", default=str(shipped("masprm")), help="folder of a trained critic")
    parser.add_argument("--policy", default="tiny")
    parser.add_argument("--planner", default="mcts:10,3")
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy, _ = load(arguments)
    shared = run_pass(arguments, policy, True, "float32")
    whole = run_pass(arguments, policy, False, "float32")
    run_pass(arguments, policy, True, "float64")
    both = shared.scores.keys() & whole.scores.keys()
    worst = max(abs(shared.scores[state] - whole.scores[state]) for state in both)
    print(f"largest difference of a score, kept against whole: {worst:.1e} over {len(both)} states")
    beside(arguments, policy)


if __name__ == "__main__":
    main()
