"""Time to grade stored searches again: ``python -m benchmarks.regrading`` (10,000 searches by default).

The script fills a store with searches of a scripted policy and grades them twice: by kind, and by a function from a
file, which runs in a separate process.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from time import perf_counter

import search
from mas_gym.policies import ScriptedPolicy
from mas_gym.tasks import Problem, ProblemTask
from mas_gym.tasks.grading.graders import FileGrader, KindGrader
from search.store import regrade

GRADER = "def grade(problem, text):\n    return problem.answer in text\n"


def main(searches: int = 10_000, planner: str = "mcts:4,3") -> None:
    problems = [Problem(f"p{n}", f"What is {n} modulo 5?", str(n % 5)) for n in range(searches)]
    policy = ScriptedPolicy(lambda request, seed: f"It may be {seed % 7}. Final Answer: {seed % 5}")
    with tempfile.TemporaryDirectory() as folder:
        store, own = Path(folder) / "runs.db", Path(folder) / "my.py"
        own.write_text(GRADER)
        critic = search.ConstantCritic(0.5)
        run = search.run(planner, ProblemTask.of(problems), mas="rpsv", policy=policy, critic=critic, store=store)
        print(f"{sum(1 for _ in run):,} searches, {store.stat().st_size / 2**20:.0f} MiB")
        with search.open_store(store) as opened:
            info = opened.find()
        for name, grader in (("by kind", KindGrader()), ("my.py:grade", FileGrader(f"{own}:grade", KindGrader()))):
            start = perf_counter()
            result = regrade(store, info, grader, name)
            print(f"{name:12} {perf_counter() - start:5.1f} s, {len(result.changes):,} differences")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
