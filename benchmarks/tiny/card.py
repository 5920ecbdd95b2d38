"""Write the tiny model's card in its folder: ``python -m benchmarks.tiny.card models/tiny``.

The card contains the training command, its CPU time and loss curve, and metrics of the model, which this script
measures. ``card.md`` contains the text that is the same for every training.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.tiny.evaluate import GRAPHS, Result, evaluate, full_tree
from mas_gym.errors import DataNotFoundError
from mas_gym.policies import Policy, load_policy

TEXT = Path(__file__).with_name("card.md")
PASSES, PROBLEMS, TREES = 5, 100, 60
LEVELS = (1, 2, 3, 4, 5)
DEFAULT = 3


def loss_curve(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of ``loss.jsonl``, in order.

    Raises:
        DataNotFoundError: The folder has none.
    """
    file = folder / "loss.jsonl"
    if not file.exists():
        raise DataNotFoundError(f"expected {file}, which python -m benchmarks.tiny.train writes; train the model first")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def losses(curve: Sequence[dict[str, Any]], rows: int = 12) -> Iterator[str]:
    """Yield a table of the loss at some steps, closer together where it falls fastest."""
    yield "| step | loss per message token (moving average) | CPU minutes |"
    yield "|---:|---:|---:|"
    wanted = {round((len(curve) - 1) * (k / (rows - 1)) ** 2) for k in range(rows)}
    for place in sorted(wanted):
        line = curve[place]
        yield f"| {line['step']:,} | {line['average']:.3f} | {line['cpu_seconds'] / 60:.0f} |"


def passes(results: Sequence[Result]) -> Iterator[str]:
    """Yield a table of single passes, votes and the best of several."""
    yield f"| graph | difficulty | single pass | vote of {PASSES} | a right one among {PASSES} |"
    yield "| --- | --- | --- | --- | --- |"
    for one in results:
        level = f"{one.difficulty} (default)" if one.difficulty == DEFAULT else str(one.difficulty)
        vote = sum(one.votes) / len(one.votes)
        yield f"| {one.graph} | {level} | {one.accuracy:.3f} ± {one.interval:.3f} | {vote:.3f} | {one.best:.3f} |"


def first_errors(result: Result) -> str:
    """Return, as a list, the share of the failed passes in which each agent wrote the first wrong message."""
    agents: Counter[str] = Counter()
    for (agent, _), count in result.errors.items():
        agents[agent] += count
    total = max(1, agents.total())
    return ", ".join(f"{agent} {100 * count / total:.0f}%" for agent, count in agents.most_common())


def card(folder: Path, command: str, problems: int = PROBLEMS) -> str:
    """Measure the model in a folder and return its card."""
    curve = loss_curve(folder)
    policy = load_policy(f"transformers:{folder}").identical_to
    assert isinstance(policy, Policy)
    found = {
        (graph, level): evaluate(policy, graph, level, problems, PASSES, seed=0)
        for graph in GRAPHS
        for level in (LEVELS if graph in ("rpsv", "single") else (DEFAULT,))
    }
    tree = full_tree(policy, "rpsv", DEFAULT, min(problems, TREES), seed=0)
    return Template(TEXT.read_text(encoding="utf-8")).substitute(
        command=command,
        minutes=f"{curve[-1]['cpu_seconds'] / 60:.0f}",
        losses="\n".join(losses(curve)),
        problems=problems,
        passes="\n".join(passes(list(found.values()))),
        errors="\n".join(
            f"- {graph}: {first_errors(found[graph, DEFAULT])}" for graph in ("rpsv", "logic", "send-back")
        ),
        trees=min(problems, TREES),
        leaf=f"{100 * tree.right_leaf:.0f}",
        differ=", ".join(f"{100 * share:.0f}%" for share in tree.differ),
    )


def main(arguments: list[str] | None = None) -> None:
    """Write ``README.md`` into the model's folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiny.card", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="what python -m benchmarks.tiny.train wrote")
    parser.add_argument("--command", default="python -m benchmarks.tiny.train --out models/tiny", help="that made it")
    parser.add_argument("-n", type=int, default=PROBLEMS, help="problems per graph and difficulty")
    args = parser.parse_args(arguments)
    text = card(args.folder, args.command, args.n)
    (args.folder / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
