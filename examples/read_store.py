"""Read a run store with pandas: one row per search, and one row per message.

Run ``python examples/read_store.py``; it writes a small store first.
"""

import tempfile
from pathlib import Path

import pandas as pd

import mas_gym
import search
from mas_gym.policies import load_policy


def main(problems: int = 20) -> None:
    """Write a small store and read it."""
    path = Path(tempfile.mkdtemp()) / "runs.db"
    task, policy = mas_gym.load_task("arithmetic", limit=problems), load_policy("tiny")
    for planner in ("single", "mcts:6,2"):
        list(search.run(planner, task, mas="rpsv", policy=policy, critic=search.PolicyLikelihood(), store=path))

    with search.open_store(path) as store:
        # One row per search: accuracy and cost of each run.
        rows = [
            {"planner": run.facts["planner"], "correct": plan.correct, **vars_of(plan.usage)}
            for run in store.runs()
            for plan in store.plans(run.run, trees=False)
        ]
        print(pd.DataFrame(rows).groupby("planner")[["correct", "agent_calls", "generated_tokens"]].mean())

        # One row per message of the trees, with visits, values and log-probabilities; also a Parquet file.
        run = next(run for run in store.runs() if run.facts["planner"].startswith("mcts"))
        count = store.export(path.with_suffix(".parquet"), run.run)
    nodes = pd.read_parquet(path.with_suffix(".parquet"))
    print(f"{count} rows; mean tokens per message by speaker:")
    print(nodes[nodes.parent >= 0].groupby("speaker")["tokens"].mean().round(1))


def vars_of(usage: search.Usage) -> dict[str, float]:
    """Return the counts of a usage by name."""
    return {name: getattr(usage, name) for name in ("agent_calls", "generated_tokens", "reward_calls", "seconds")}


if __name__ == "__main__":
    main()
