"""Write transcripts of the generated tasks with their true first errors, as a Parquet data set with a card.

The tiny agents make single passes over Arithmetic (RPSV) and Ordering (Logic). Because the tasks are generated, the
first wrong message is known exactly (`benchmarks.tiny.truth`). The files have ProcessBench's columns and additional
columns, which the card describes. ``mas-gym bench-critic --data`` reads them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mas_gym
import search
from benchmarks.tiny.truth import first_error
from mas_gym.policies import load_policy

SYSTEMS = {"arithmetic": "rpsv", "ordering": "logic"}
COLUMNS = {
    "id": "problem and seed",
    "generator": "the policy",
    "problem": "the question",
    "steps": "the agents' messages, in order",
    "label": "index of the first wrong message, from 0; -1 if all are right",
    "kind": "what is wrong with it, such as `missing fact`; empty if nothing is",
    "agents": "who wrote each message",
    "mas": "the system; its name in MAS-Gym",
    "tokens": "tokens of each message",
    "logprobs": "sum of the log-probabilities of its tokens, in nats",
    "final_answer_correct": "whether the last message's answer is right",
    "answer": "the reference answer",
}

CARD = """\
---
license: mit
language: [en]
pretty_name: First errors of tiny agents
task_categories: [text-classification]
tags: [process-reward-model, multi-agent, credit-assignment, synthetic, processbench]
size_categories: [{size}]
configs:
{configs}
---

# First errors of tiny agents

{total:,} transcripts of multi-agent systems on procedural tasks, each with its true first error. The format is that of
[ProcessBench](https://huggingface.co/datasets/Qwen/ProcessBench) (`problem`, `steps`, `label`), so tools for
ProcessBench can read these files. Agents, systems and log-probabilities are additional columns.

{table}

The labels are exact: the tasks are generated from facts, and every message is checked against them. A message is wrong
if any of its statements about the problem is false, including a verdict on messages that were right. Messages after
the first wrong message are not labeled.

The agents are MAS-Gym's bundled model of two million parameters, which errs **by design**, at rates chosen so that its
likelihood does not reveal the errors. Figures on these files measure how well a critic finds the errors of these
agents. They do not apply to mathematics written by large models.

## Splits

`dev` is for choosing thresholds, and `test` for evaluation. Their problems are from the dev and test splits of the
tasks. Critics of MAS-Gym are trained on the train split, so they have not been trained on these problems.

## Columns

{columns}

## Use

```console
mas-gym bench-critic --critic tiny-masprm --data arithmetic/test.parquet --dev arithmetic/dev.parquet
```

## Reproduction

`python -m benchmarks.first_errors -n {number} --seeds {seeds}` of mas-gym {version}; the same command writes the same
rows.

Kinds of first errors, in all files: {kinds}.
"""


def rows(task_name: str, split: str, number: int, seeds: tuple[int, ...], policy: Any) -> Iterator[dict[str, Any]]:
    """Yield labeled single passes over the first problems of a split, by problem and seed.

    Args:
        task_name: ``"arithmetic"`` or ``"ordering"``.
        split: ``"dev"`` or ``"test"``.
        number: Transcripts; problems are shared out over the seeds.
        seeds: Run seeds.
        policy: The agents.
    """
    task = mas_gym.load_task(task_name, split=split, limit=-(-number // len(seeds)))
    mas = mas_gym.load_mas(SYSTEMS[task_name])
    names = [agent.name for agent in mas.agents]
    made: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in seeds:
        for plan in search.run("single", task, mas=mas, policy=policy, seed=seed):
            if plan.error is not None or plan.tree is None or plan.best is None or plan.best.node is None:
                continue
            problem = task.problem(plan.problem_id)
            nodes = [plan.tree[node] for node in plan.tree.path(plan.best.node)[1:]]
            spoken = [(names[node.state.speaker], node.state.text) for node in nodes]
            error = first_error(problem, spoken)
            made[plan.problem_id, seed] = {
                "id": f"{plan.problem_id}#{seed}",
                "generator": policy.name,
                "problem": problem.question,
                "steps": [text for _, text in spoken],
                "label": -1 if error is None else error.place,
                "kind": "" if error is None else error.kind,
                "agents": [name for name, _ in spoken],
                "mas": mas.name,
                "tokens": [node.tokens for node in nodes],
                "logprobs": [node.logprob for node in nodes],
                "final_answer_correct": bool(plan.correct),
                "answer": problem.answer,
            }
    order = {problem.id: place for place, problem in enumerate(task)}
    ordered = sorted(made, key=lambda key: (order[key[0]], seeds.index(key[1])))
    return (made[key] for key in ordered[:number])


def write(out: Path, number: int, seeds: tuple[int, ...]) -> int:
    """Write the data set and return how many transcripts it has.

    Args:
        out: The folder.
        number: Transcripts in all, half of them of each task, a quarter of those for dev.
        seeds: Run seeds.
    """
    import pyarrow as pa
    from pyarrow import parquet

    policy = load_policy("tiny")
    kinds: Counter[str] = Counter()
    lines = ["| task | split | transcripts | with an error |", "|---|---|---:|---:|"]
    total = 0
    for task_name in SYSTEMS:
        (out / task_name).mkdir(parents=True, exist_ok=True)
        of_task = -(-number // len(SYSTEMS))
        for split, count in {"dev": of_task // 4, "test": of_task - of_task // 4}.items():
            found = list(rows(task_name, split, count, seeds, policy))
            parquet.write_table(pa.Table.from_pylist(found), out / task_name / f"{split}.parquet")
            wrong = sum(row["label"] >= 0 for row in found)
            kinds.update(row["kind"] for row in found if row["kind"])
            lines.append(f"| {task_name} | {split} | {len(found):,} | {wrong:,} |")
            total += len(found)
    configs = [
        f"- config_name: {name}\n  data_files:\n  - {{split: dev, path: {name}/dev.parquet}}\n"
        f"  - {{split: test, path: {name}/test.parquet}}"
        for name in SYSTEMS
    ]
    card = CARD.format(
        size="1K<n<10K" if 1000 < total < 10_000 else "n<1K" if total <= 1000 else "10K<n<100K",
        configs="\n".join(configs),
        total=total,
        table="\n".join(lines),
        columns="\n".join(f"- `{name}`: {what}" for name, what in COLUMNS.items()),
        number=number,
        seeds=",".join(map(str, seeds)),
        version=mas_gym.__version__,
        kinds=", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common()),
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    return total


def main(arguments: list[str] | None = None) -> None:
    """Write the data set."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_errors", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("first-errors"), help="the folder [first-errors]")
    parser.add_argument("-n", "--number", type=int, default=2400, help="transcripts in all [2400]")
    parser.add_argument("--seeds", default="14,24,42", help="run seeds [14,24,42]")
    given = parser.parse_args(arguments)
    total = write(given.out, given.number, tuple(int(seed) for seed in given.seeds.split(",")))
    print(f"wrote {total:,} transcripts to {given.out}")


if __name__ == "__main__":
    main()
