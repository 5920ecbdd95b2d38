"""A program with a loop and a tool: rollouts, MASPRM training and search; `python benchmarks/loop_with_tool.py`.

The program is `examples/programs/loop_with_tool.py`: a Solver whose steps are checked by a calculator, and a Verifier
that may return the work. The MASPRM is trained on trees of this program; `--learn 60 --learn 120` trains one on each
number of trees. Repeating the command resumes it.

With 120 trees, 174 CPU seconds: single pass 50.0%, SBS(5,1) with the MASPRM 74.0%, a gain of 24.0 [14.0, 34.0].
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import mas_gym
import rewardmodels
import search
from mas_gym.policies import load_policy
from mas_gym.programs import Program

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "programs" / "loop_with_tool.py"
AGENTS = ["Reader", "Planner", "Solver", "Verifier"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("loop"), help="folder of the store and the critics")
    options.add_argument("--learn", type=int, action="append", help="training trees; may be repeated; by default 120")
    options.add_argument("--simulations", type=int, default=20, help="of each training tree")
    options.add_argument("-n", "--problems", type=int, default=100, help="test problems")
    asked = options.parse_args()
    program, policy, learn = Program(f"{EXAMPLE}:solve", agents=AGENTS), load_policy("tiny"), asked.learn or [120]

    asked.out.mkdir(parents=True, exist_ok=True)
    store = asked.out / "trees.db"
    task = mas_gym.load_task("arithmetic", split="train", limit=max(learn))
    planner = search.MCTS(n_simulations=asked.simulations, max_children=3, c_uct=4.0)
    with _timed(f"{len(task)} training searches"):
        for plan in search.run(planner, task, program=program, policy=policy, training=True, store=store):
            assert plan.error is None, plan.error_details

    critics = []
    for number in learn:
        trees = list(itertools.islice(rewardmodels.stored_trees(store), number))
        pairs, points = rewardmodels.collect(trees, "pairs"), rewardmodels.collect(trees, "points")
        with _timed(f"training on {len(pairs):,} pairs of {pairs.trees} trees"):
            trained = rewardmodels.train(pairs, asked.out / f"masprm-{number}", points=points, device="cpu")
        print(f"  pairwise accuracy on held-out problems {trained.info.metrics['accuracy']:.2f}")
        critics.append(str(trained.folder))

    test = mas_gym.load_task("arithmetic", split="test", limit=asked.problems)
    with _timed("comparison"):
        table = search.compare(
            ["single", "sbs:5,1"],
            test,
            program=program,
            policy=policy,
            critics=[*critics, "policy-likelihood"],
            seeds=[42],
            baseline="single",
            store=asked.out / "runs.db",
        )
    print(table)


class _timed:
    """Print the cost of a step."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        print(f"{self._name}: {wall:.0f} s, {cpu:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
