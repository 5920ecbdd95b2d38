"""Wall-clock time: seconds per agent call and per reward call, for one search and for many concurrent searches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import search
from benchmarks.paper.lab import MCTS, SEED, Lab, command
from benchmarks.paper.page import Page
from mas_gym.policies import load_policy
from rewardmodels import LearnedCritic
from search import ScoringContext

PROBLEMS = 64
ASKS = """
This page measures the duration of agent calls and reward calls. The paper reports 18.94 s per agent call of a 1.5B
model and 0.16 s per reward call on V100s (a ratio of 118), and about 11 minutes per GSM8K problem for MCTS(10,3) and 16
for SBS(5,3).
"""


class Cost(NamedTuple):
    """The cost of one measurement.

    Attributes:
        planner: The search method.
        concurrency: Searches open at once.
        problems: Problems searched.
        calls: Agent calls.
        rewards: Reward calls.
        wall: Seconds in all and in the critic, by the clock.
        cpu: The same in CPU seconds of this process.
    """

    planner: str
    concurrency: int
    problems: int
    calls: int
    rewards: int
    wall: tuple[float, float]
    cpu: tuple[float, float]


class Timed:
    """A critic that measures its wall-clock and CPU time."""

    free = False

    def __init__(self, critic: LearnedCritic) -> None:
        self.critic, self.name, self.max_batch = critic, critic.name, critic.max_batch
        self.terminal_only = critic.terminal_only
        self.wall = self.cpu = 0.0

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        wall, cpu = time.perf_counter(), time.process_time()
        values = self.critic.score(contexts)
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        return values


def run(lab: Lab) -> Page:
    page = Page("clock", "Wall-clock time", ASKS)
    problems = min(PROBLEMS, lab.options.number)
    _measure(lab, MCTS, 2, 2)  # warm-up: the first calls of a process are slower
    costs = [
        _measure(lab, planner, concurrency, problems if concurrency > 1 else max(1, problems // 4))
        for planner in (MCTS, "sbs:5,3")
        for concurrency in (1, lab.options.concurrency)
    ]
    for name, clock in (("Wall-clock time", "wall"), ("CPU time of the process", "cpu")):
        page.blocks.append(f"{name}:\n")
        rows = [(cost.planner, cost.concurrency, *_cells(cost, *getattr(cost, clock))) for cost in costs]
        header = ("search", "concurrent searches", "ms per agent call", "ms per reward call", "ratio", "critic's share")
        page.table((*header, "ms per problem"), rows)
    page.blocks.append(
        "A reward call scores one state. With many concurrent searches, both kinds of calls are batched. Other work on "
        "the machine increases the wall-clock time. CPU time does not include GPU time.\n"
    )
    return page


def _measure(lab: Lab, planner: str, concurrency: int, problems: int) -> Cost:
    timed = Timed(lab.critic(lab.home))
    bench = lab.bench(lab.home, "test", problems, (SEED,), lab.options.out / "unused.db")
    # A separate policy, because the lab's policy would replay messages of earlier tables.
    policy = load_policy(lab.home.policy)
    wall, cpu = time.perf_counter(), time.process_time()
    run = search.run(
        planner,
        bench.task,
        mas=bench.mas,
        policy=policy,
        critic=timed,
        concurrency=concurrency,
        sampling=bench.sampling,
    )
    failed = [plan.error for plan in run if plan.error]
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if failed:
        raise SystemExit(f"{len(failed)} searches failed: {failed[0]}")
    usage = run.usage
    return Cost(
        planner, concurrency, problems, usage.agent_calls, usage.reward_calls, (wall, timed.wall), (cpu, timed.cpu)
    )


def _cells(cost: Cost, whole: float, critic: float) -> tuple[str, ...]:
    call, reward = 1000 * (whole - critic) / cost.calls, 1000 * critic / cost.rewards
    each = 1000 * whole / cost.problems
    return f"{call:.2f}", f"{reward:.2f}", f"{call / reward:.1f}", f"{critic / whole:.1%}", f"{each:,.0f}"


if __name__ == "__main__":
    command(run, "clock")
