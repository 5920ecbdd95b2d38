"""Agent calls per second that the scheduler makes with a policy that replies immediately, and its memory.

    python -m benchmarks.scheduler                      # calls per CPU second with a store
    python -m benchmarks.scheduler --busy 3             # also the rate while three busy loops run
    python -m benchmarks.scheduler --searches 200000    # memory while searches end; a store holds them

Memory is the resident set after each tenth of the searches. The script needs psutil.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil

import search
from mas_gym.policies import SamplingRequest, ScriptedPolicy
from mas_gym.tasks import Problem


class Figure(NamedTuple):
    """Agent calls, wall-clock and CPU seconds, and the resident set in MiB after each tenth of the searches."""

    calls: int
    seconds: float
    cpu: float
    memory: list[int]


def said(request: SamplingRequest, seed: int) -> str:
    return f"{request.agent}: {seed % 1000}. Final Answer: {seed % 7}"


def measured(planner: str, searches: int) -> Figure:
    problems = (Problem(f"p{i}", f"What is {i} modulo 7?", str(i % 7)) for i in range(searches))
    critic = search.PolicyLikelihood() if planner.startswith("mcts") else None
    me, memory, calls = psutil.Process(), [], 0
    start, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        more = {"store": Path(folder) / "runs.db", "concurrency": 64}
        run = search.run(planner, problems, mas="rpsv", policy=ScriptedPolicy(said), critic=critic, **more)  # type: ignore[arg-type]
        for number, plan in enumerate(run, 1):
            calls += plan.usage.agent_calls
            if number % max(1, searches // 10) == 0:
                memory.append(me.memory_info().rss >> 20)
    return Figure(calls, time.perf_counter() - start, time.process_time() - cpu, memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=2000)
    parser.add_argument("--busy", type=int, default=0, help="number of busy loops during a second measurement")
    parser.add_argument("--planner", nargs="*", default=["single", "mcts:10,3"])
    given = parser.parse_args()
    for planner in given.planner:
        one = measured(planner, given.searches)
        print(f"{planner}: {one.calls / one.cpu:,.0f} calls per CPU second, {one.calls / one.seconds:,.0f} per second")
        print(f"  MiB after each tenth: {' '.join(map(str, one.memory))}", flush=True)
        if given.busy:
            with ExitStack() as loops:
                for _ in range(given.busy):
                    loops.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
                loaded = measured(planner, given.searches)
            ratio = loaded.calls / loaded.seconds / (one.calls / one.seconds)
            print(f"  with {given.busy} busy loops running: {ratio:.2f} of the rate", flush=True)


if __name__ == "__main__":
    main()
