"""Training the bundled agents: ``python -m benchmarks.learning`` writes ``pages/training/learning.md``.

Each row of the table trains the RPSV agents of Arithmetic by another method on about the same number of generated
tokens (``--tokens``), the rewards of which are the only supervision:

* ``sft`` and ``dpo``: one training on MCTS(20, 3) searches with the true reward.
* ``grpo``: ``--rounds`` of sampling with the current agents and training on it. ``leave-one-out`` samples trees of
  siblings, ``shared-outcome`` independent transcripts.

All rows are measured on the same test problems: a single pass, a single pass on stories in another wording and on
harder ones, and MCTS(20, 2) with the shipped MASPRM, which was trained on the agents before. ``--retrain`` adds MCTS
with a MASPRM trained on searches by the new agents. The agents' hyper-parameters were chosen on dev problems.

Everything is kept in ``--out``; the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mas_gym
from benchmarks.tiny.stories import generated
from mas_gym.policies import load_policy
from mas_gym.policies.traces import beside, traced
from rewardmodels.agents import credited_samples, demonstrations, sibling_pairs, train_agents
from rewardmodels.training.train_critic import grow, grown, teach, trees
from search.catalogue import load_critic
from search.compare import Bench, measure, named_planners, paired_difference, summarise
from search.compare.arms import Arm
from search.protocol import ScoringContext
from search.results.outcomes import Outcome, ResultRow
from search.store import open_store

PAGE = Path(__file__).parent / "pages" / "training" / "learning.md"
REASONS = "## Notes"
"""Text below this heading is written by hand and kept when the page is regenerated."""


class Method(NamedTuple):
    """A row.

    Attributes:
        name: In the table.
        method: As for `train_agents`.
        planner: Search of training problems.
        tokens: Generated tokens per problem of that search, for dividing the budget; measured on dev.
        settings: Fields of `AgentConfig`.
    """

    name: str
    method: str
    planner: str
    tokens: int
    settings: dict[str, Any]


METHODS = {
    one.name: one
    for one in (
        Method("dpo", "dpo", "mcts:20,3", 1020, {"learning_rate": 3e-4, "epochs": 2.0}),
        Method("grpo, leave-one-out", "grpo", "siblings:2", 420, {"learning_rate": 3e-4}),
        Method("sft", "sft", "mcts:20,3", 1020, {"best": 2}),
        Method("grpo, shared outcome", "grpo", "sc:8", 560, {"learning_rate": 3e-4, "credit": "shared-outcome"}),
    )
}


class Trained(NamedTuple):
    """The agents of a row with one seed.

    Attributes:
        policy: As for `load_policy`.
        tokens: Generated tokens of the searches that they were trained on.
        curve: Per training: tokens so far, mean reward of the sampled transcripts, and the shipped MASPRM's mean value
            of their final states. The last point is of the trained agents.
    """

    policy: str
    tokens: int
    curve: list[tuple[int, float, float]]


def train(row: Method, seed: int, args: argparse.Namespace) -> Trained:
    """Train the agents of a row; what is there already is not repeated."""
    folder = args.out / f"{row.name.replace(', ', '-').replace(' ', '-')}-{seed}"
    rounds = args.rounds if row.method == "grpo" else 1
    problems = args.tokens // row.tokens // rounds
    policy, base, spent, curve = "tiny", "tiny", 0, []
    for number in range(rounds):
        # The searches of sft and dpo are the same.
        store = args.out / f"mcts-{seed}.db" if row.method != "grpo" else folder / "runs.db"
        store.parent.mkdir(parents=True, exist_ok=True)
        bench = bench_of(policy, "train", problems * (number + 1), (seed,), store)
        bench = replace(bench, task=bench.task[problems * number :])
        say(f"{row.name}, seed {seed}: {len(bench.task)} training problems by {row.planner}")
        recorded = traced(bench.policy, beside(store)) if row.method == "grpo" else bench.policy
        if (stop := grow(replace(bench, policy=recorded), row.planner)) is not None:
            raise stop
        [info] = grown(bench)
        with open_store(store) as opened:
            spent += opened.totals(info.run).tokens
            curve.append((spent, *outcomes_and_values(opened, info.run, args.out)))
        if row.method == "sft":
            examples: Sequence[Any] = demonstrations(store, row.settings["best"], info.run)
        elif row.method == "dpo":
            examples = sibling_pairs(store, 0.5, info.run)
        else:
            credit = row.settings.get("credit", "leave-one-out")
            examples = credited_samples(store, beside(store), credit, None, info.run)
        out = folder / f"agents-{number + 1}"
        trained = train_agents(examples, out, row.method, base, log=say, seed=seed, **row.settings)
        policy, base = trained.policy, str(out)
    return Trained(policy, spent, curve)


def outcomes_and_values(store: Any, run: str, out: Path) -> tuple[float, float]:
    """Return the mean reward of a run's transcripts, and the shipped MASPRM's mean value of their final states."""
    kept = out / f"values-{run[:12]}.json"
    if not kept.exists():
        critic = load_critic("tiny-masprm")
        rewards, contexts = [], []
        for plan in store.plans(run):
            for one in plan.candidates:
                rewards.append(1.0 if one.correct else -1.0)
                contexts.append(ScoringContext(one.state, plan.mas, None))
        values = list(critic.score(contexts))
        kept.write_text(json.dumps([sum(rewards) / len(rewards), sum(values) / len(values)]), encoding="utf-8")
    reward, value = json.loads(kept.read_text(encoding="utf-8"))
    return reward, value


def bench_of(policy: str, split: str, number: int, seeds: Sequence[int], store: Path, task: str = "") -> Bench:
    """Return problems with RPSV and its agents: of Arithmetic, or of one of its wordings and difficulties."""
    problems = generated(task, split)[:number] if task else mas_gym.load_task("arithmetic", split=split, limit=number)
    return Bench(problems, mas_gym.load_mas("rpsv"), load_policy(policy), seeds, store=store)


def evaluate(policy: str, planner: str, critic: str | None, number: int, args: Any, task: str = "") -> list[Outcome]:
    """Return the outcomes of one planner on test problems."""
    bench = bench_of(policy, args.split, number, args.run_seeds, args.out / "test.db", task)
    [(name, loaded)] = named_planners([planner]).items()
    arm = Arm(name, loaded, None if critic is None else load_critic(critic), critic or "")
    outcomes, stop = measure([arm], bench)
    if stop is not None:
        raise stop
    return outcomes


def retrained(policy: str, folder: Path, seed: int, args: argparse.Namespace) -> str:
    """Train a MASPRM on searches by the new agents, and return its folder."""
    bench = bench_of(policy, "train", args.retrain, (seed,), folder / "critic.db")
    if (stop := grow(bench)) is not None:
        raise stop
    teach(lambda: trees(bench), folder / "masprm", "masprm", "bt", log=say)
    return str(folder / "masprm")


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, flush=True)


def only(outcomes: Sequence[Outcome]) -> ResultRow:
    """Return the row of one planner."""
    [row] = summarise([replace(one, planner="row", critic="") for one in outcomes])
    return row


def hit(row: ResultRow) -> str:
    """Return Hit@1 with its interval, in percent."""
    return f"{100 * row.hits[1].mean:.1f} ({100 * row.interval.low:.1f} to {100 * row.interval.high:.1f})"


def main(args: argparse.Namespace) -> None:
    """Train, evaluate, and write the page after each row."""
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in ("before", *args.rows):
        found: dict[str, list[Outcome]] = {"single": [], "retold": [], "hard": [], "mcts": [], "retrained": []}
        trainings = []
        for seed in args.seeds[: 1 if name == "before" else None]:
            made = Trained("tiny", 0, []) if name == "before" else train(METHODS[name], seed, args)
            trainings.append(made)
            policy = made.policy
            say(f"{name}, seed {seed}: evaluation of {policy}")
            found["single"] += evaluate(policy, "single", None, args.number, args)
            found["retold"] += evaluate(policy, "single", None, args.number, args, "retold-3")
            found["hard"] += evaluate(policy, "single", None, args.number, args, "stories-4")
            if args.searched and name in (args.search_rows or ("before", *args.rows)):
                found["mcts"] += evaluate(policy, "mcts:20,2", "tiny-masprm", args.searched, args)
            if args.retrain and name in args.retrained:
                folder = args.out / f"critic-{name.replace(', ', '-').replace(' ', '-')}-{seed}"
                critic = retrained(policy, folder, seed, args)
                found["retrained"] += evaluate(policy, "mcts:20,2", critic, args.searched, args)
        figures = {key: only(outcomes) for key, outcomes in found.items() if outcomes}
        rows.append({"name": name, "trainings": trainings, "figures": figures})
        write_page(rows, args)


def write_page(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Write the page and the curves; notes below `REASONS` stay."""
    before = rows[0]["figures"]
    lines = [
        "# Agents that learn from search",
        "",
        "The bundled RPSV agents, trained on Arithmetic by each method on about the same number of generated tokens.",
        "",
        "```console",
        f"python -m benchmarks.learning {args.words}".rstrip(),
        "```",
        "",
        f"- about {args.tokens:,} generated tokens of training searches per row; training seeds "
        f"{', '.join(map(str, args.seeds))}",
        f"- {args.number} {args.split} problems for single passes, {args.searched} for searches; run seeds "
        f"{', '.join(map(str, args.run_seeds))}",
        "- Hit@1 in percent with 95% intervals over problems; TOK is generated tokens per problem",
        "",
        "| agents | training tokens | single pass | TOK | retold stories | difficulty 4 | MCTS(20,2), shipped MASPRM "
        "| TOK | MCTS(20,2), MASPRM retrained | TOK |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        figures = row["figures"]
        cells = [row["name"], f"{sum(one.tokens for one in row['trainings']) // len(row['trainings']):,}"]
        for key in ("single", "retold", "hard", "mcts", "retrained"):
            cells.append(hit(figures[key]) if key in figures else "")
            if key not in ("retold", "hard"):
                cells.append(f"{figures[key].tokens.mean:,.0f}" if key in figures else "")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Differences", "", "| difference, in points | here | 95% interval |", "|---|---:|---:|"]
    names = {"single": "single pass", "retold": "retold stories", "hard": "difficulty 4", "mcts": "MCTS(20,2)"}
    for row in rows[1:]:
        for key, label in names.items():
            if key in row["figures"] and key in before:
                gap = paired_difference(row["figures"][key].shares, before[key].shares)
                lines.append(
                    f"| {row['name']}: {label} over the agents before | {100 * gap.mean:+.1f} "
                    f"| {100 * gap.low:+.1f} to {100 * gap.high:+.1f} |"
                )
    lines += ["", "Intervals are over problems; each training seed gives other agents, averaged per problem.", ""]
    lines += [
        "## During training",
        "",
        "Mean true reward of the training transcripts, and the shipped MASPRM's mean value of",
    ]
    lines += [
        "their final states. If the value rose while the reward did not, the agents would exploit the critic.",
        "",
    ]
    lines += ["| agents | tokens | true reward | MASPRM |", "|---|---:|---:|---:|"]
    for row in rows[1:]:
        for made in row["trainings"]:
            for tokens, reward, value in made.curve:
                lines.append(f"| {row['name']} | {tokens:,} | {reward:+.3f} | {value:+.3f} |")
    notes = "Nothing is written here yet.\n"
    if args.page.exists() and REASONS in (old := args.page.read_text(encoding="utf-8")):
        notes = old.split(f"{REASONS}\n\n", 1)[1]
    args.page.parent.mkdir(parents=True, exist_ok=True)
    args.page.write_text("\n".join([*lines, "", REASONS, "", notes]), encoding="utf-8")
    say(f"wrote {args.page}")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    out = argparse.ArgumentParser(prog="python -m benchmarks.learning", description="Train the bundled agents.")
    numbers = lambda text: tuple(map(int, text.split(",")))  # noqa: E731
    out.add_argument("--out", type=Path, default=Path("learning"), help="folder for stores and models")
    out.add_argument("--page", type=Path, default=PAGE)
    out.add_argument("--rows", type=lambda text: text.split(";"), default=list(METHODS), help="separated by ;")
    out.add_argument("--tokens", type=int, default=80_000, help="generated tokens of training searches per row")
    out.add_argument("--rounds", type=int, default=2, help="of sampling and training by grpo")
    out.add_argument("--seeds", type=numbers, default=(0,), help="training seeds")
    out.add_argument("--run-seeds", type=numbers, default=(14,), help="seeds of the evaluation")
    out.add_argument("--split", default="test")
    out.add_argument("-n", "--number", type=int, default=200, help="problems for single passes")
    out.add_argument("--searched", type=int, default=100, help="problems for searches; 0 for none")
    out.add_argument("--search-rows", type=lambda text: text.split(";"), help="rows to search with; by default all")
    out.add_argument("--retrain", type=int, default=0, help="searches for a MASPRM of the new agents; 0 for none")
    out.add_argument("--retrained", type=lambda text: text.split(";"), default=["dpo"], help="rows to retrain for")
    return out


if __name__ == "__main__":
    import sys

    given = parser().parse_args()
    words = shlex.join(sys.argv[1:])
    # Where the results are does not matter to them.
    given.words = re.sub(r"--(out|page) \S+ ?", "", words)
    main(given)
