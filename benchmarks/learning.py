"""Training of the bundled agents: ``python -m benchmarks.learning`` writes ``pages/training/learning.md``.

Each row of the table trains the RPSV agents of Arithmetic with a different method and the same budget of generated
tokens (``--tokens``) in ``--rounds`` rounds. A round searches new training problems with the current agents until its
share of the budget is used, and trains the agents on the result. Agents that write longer messages may slightly exceed
a share. After each round the agents are evaluated by single passes on the same dev problems, which gives the curves.

* ``sft`` and ``dpo``: the searches are MCTS(20, 3) with the true reward.
* ``grpo`` with each credit of `search.credit`: ``leave-one-out``, ``value baseline`` and ``per agent and turn`` sample
  trees of siblings, ``control variate`` trees with spare first messages, and the others eight independent transcripts
  per problem. Values are those of the shipped MASPRM. ``exact`` uses the true expected rewards instead: every reply of
  the current agents is enumerated, which generates no tokens (`benchmarks.enumeration`).
* With ``transcripts`` the same credit is computed on trees with siblings only at the first agent.

The agents of the round with the highest dev accuracy are evaluated. All rows are evaluated on the same test problems,
which were used for no choice: a single pass, a single pass on stories in another wording and on harder ones,
self-consistency with six transcripts, and MCTS(20, 2) with the shipped MASPRM, which was trained on the original
agents.

The natural agents, whose errors are not designed, are trained by ``--base transformers:benchmarks/tiny/tiny-natural
--task stories-4 --rate 1e-4``. No shipped critic was trained on their messages.

All results are stored in ``--out``; repeating the command resumes it.
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
from benchmarks.enumeration import Enumerator, enumerate_problems
from benchmarks.learning_page import Point, Row, chosen, write
from benchmarks.tiny.stories import generated
from mas_gym.errors import DataError
from mas_gym.policies import load_policy
from mas_gym.policies.token_traces import traced, traces_folder
from mas_gym.systems.dynamics import Dynamics
from mas_gym.tasks import ProblemTask
from rewardmodels.agents import CreditedSample, credited_samples, demonstrations, sibling_pairs, train_agents
from rewardmodels.training.train_critic import claim_folder, grow
from search import Critic
from search.compare.comparison_runs import Row as SearchRow
from search.compare.comparison_runs import measure, named_planners
from search.critic_registry import load_critic
from search.protocol import ScoringContext
from search.results.outcomes import Outcome
from search.setup import RunSpec
from search.store import open_store

PAGES = Path(__file__).parent / "pages" / "training"
SHIPPED = "tiny-masprm"
ARITHMETIC = "arithmetic"
RUN_SEED = 14


class Method(NamedTuple):
    """A row.

    Attributes:
        name: In the table.
        method: As for `train_agents`.
        planner: Search of training problems.
        tokens: Expected tokens per problem of that search, for the number of problems to begin with.
        settings: Fields of `AgentConfig` besides the learning rate.
        exact: Compute the credit from true expected rewards.
    """

    name: str
    method: str
    planner: str
    tokens: int
    settings: dict[str, Any]
    exact: bool = False

    def folder(self, args: argparse.Namespace, seed: int) -> Path:
        words = re.sub(r"[^a-z]+", "-", self.name.lower())
        return Path(args.out / f"{words}-{seed}")


SIBLINGS, TRANSCRIPTS = ("siblings:2", 420), ("sc:8", 560)
MCTS = ("mcts:20,3", 1020)


def grpo(name: str, credit: str, planner: tuple[str, int] = SIBLINGS, **options: Any) -> Method:
    return Method(f"grpo, {name}", "grpo", *planner, {"credit": credit}, **options)


METHODS = {
    one.name: one
    for one in (
        Method("dpo", "dpo", *MCTS, {"epochs": 2.0}),
        Method("sft", "sft", *MCTS, {"best": 2, "batch_size": 8}),
        grpo("shared outcome", "shared-outcome", TRANSCRIPTS),
        grpo("leave-one-out", "leave-one-out"),
        grpo("per agent", "per-agent", TRANSCRIPTS),
        grpo("per agent and turn", "per-agent-turn"),
        grpo("value", "value", TRANSCRIPTS),
        grpo("control variate", "control-variate", ("siblings:2,spare=4", 480)),
        grpo("value baseline", "value-baseline"),
        grpo("value baseline, transcripts", "value-baseline", ("siblings:8,turns=1", 450)),
        grpo("exact", "value", TRANSCRIPTS, exact=True),
    )
}


def methods(args: argparse.Namespace) -> dict[str, Method]:
    """Return the rows by their names, with the learning rate of the command."""
    rate = {"learning_rate": args.rate}
    return {name: one._replace(settings=one.settings | rate) for name, one in METHODS.items()}


def train(row: Method, seed: int, args: argparse.Namespace) -> list[Point]:
    """Train the agents of a row and return its curve; existing rounds are not repeated."""
    folder = row.folder(args, seed)
    claim_folder(folder, folder / "run.json", {**row._asdict(), "tokens": args.tokens, "rounds": args.rounds})
    curve = folder / "curve.json"
    points = [before(args)]
    if curve.exists():
        points += [Point(**one) for one in json.loads(curve.read_text(encoding="utf-8"))]
    for number in range(len(points), args.rounds + 1):
        last, out = points[-1], folder / f"agents-{number}"
        store = folder / f"round-{number}.db"
        say(f"{row.name}, seed {seed}, round {number}: {row.planner} with {last.policy}")
        budget = args.tokens * number // args.rounds - last.tokens
        tokens, problems = explore(row, last, store, budget, seed, args.task)
        try:
            examples = examples_of(row, store, last.policy)
        except DataError as error:
            # Agents that are right on every problem of a round have no differences to learn from.
            say(f"{row.name}, seed {seed}, round {number}: the agents stay the same, {error}")
            policy = last.policy
        else:
            base = last.policy.removeprefix("transformers:")
            policy = train_agents(examples, out, row.method, base, log=say, seed=seed, **row.settings).policy
        single = passes(policy, folder / f"dev-{number}.db", args)
        points.append(Point(last.tokens + tokens, last.problems + problems, policy, *single))
        curve.write_text(json.dumps([one._asdict() for one in points[1:]]), encoding="utf-8")
        say(f"{row.name}, seed {seed}: {points[-1].tokens:,} tokens, dev {100 * points[-1].accuracy:.1f}")
    return points


def examples_of(row: Method, store: Path, policy: str) -> Sequence[Any]:
    """Return the training examples of a round; ``policy`` wrote the messages.

    Raises:
        DataError: There are none.
    """
    if row.method == "sft":
        return demonstrations(store, row.settings["best"])
    if row.method == "dpo":
        return sibling_pairs(store, 0.5)
    return samples(row, store, policy)


def samples(row: Method, store: Path, policy: str) -> list[CreditedSample]:
    critic: Critic = Truth(store, policy) if row.exact else load_critic(SHIPPED)
    return credited_samples(store, traces_folder(store), row.settings["credit"], critic)


class Truth:
    """The true expected reward of states in a store, as a critic; every reply of the agents is enumerated.

    A critic scores no initial state. The first messages of a question are therefore compared with their mean.
    """

    name = "truth"
    max_batch = 1_000_000

    def __init__(self, store: Path, policy: str) -> None:
        """Enumerate the replies after each state of the store."""
        with open_store(store) as opened:
            plans = [plan for info in opened.runs() for plan in opened.plans(info.run) if plan.tree is not None]
        model = Dynamics(mas_gym.load_mas("rpsv"))
        train = mas_gym.load_task("arithmetic", split="train")
        task = ProblemTask.of([train.problem(plan.problem_id) for plan in plans])
        states = [state for plan in plans if plan.tree is not None for state in plan.tree.states]
        found = enumerate_problems(Enumerator(load_policy(policy), 0.01), task, model, states)
        self.problems = {one.problem.question: one for one in found}

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return the expected reward of each state."""
        return [self.problems[one.state.question].truth(one.state) for one in contexts]


def before(args: argparse.Namespace) -> Point:
    return Point(0, 0, args.base, *passes(args.base, args.out / "dev-0.db", args))


def explore(row: Method, last: Point, store: Path, budget: int, seed: int, task: str) -> tuple[int, int]:
    """Search new training problems until a budget is used, and return the generated tokens and the problems."""
    spent, done = 0, 0
    count = max(1, int(0.8 * budget / row.tokens))
    while count:
        start = last.problems + done
        spec = spec_of(last.policy, "train", start + count, seed, store, task)
        policy = traced(spec.policy, traces_folder(store)) if row.method == "grpo" else spec.policy
        if (stop := grow(replace(spec, problems=spec.problems[start:], policy=policy), row.planner)) is not None:
            raise stop
        done += count
        with open_store(store) as opened:
            spent = sum(opened.totals(info.run).tokens for info in opened.runs())
        count = max(0, int((budget - spent) / (spent / done)))
    return spent, done


def passes(policy: str, store: Path, args: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Return whether a single pass solves each dev problem, and the shipped MASPRM's value of its final state.

    The shipped MASPRM knows only the bundled agents on Arithmetic; other agents have no values.
    """
    kept = store.with_suffix(".json")
    if not kept.exists():
        spec = spec_of(policy, "dev", args.dev, RUN_SEED, store, args.task)
        [(name, planner)] = named_planners(["single"]).items()
        outcomes, stop = measure([SearchRow(name, planner)], spec)
        if stop is not None:
            raise stop
        right = {one.problem_id: float(one.correct) for one in outcomes}
        with open_store(store) as opened:
            [info] = opened.runs()
            contexts = {
                plan.problem_id: ScoringContext(plan.candidates[0].state, plan.mas, None)
                for plan in opened.plans(info.run)
                if plan.candidates
            }
        values = {}
        if args.task == ARITHMETIC:
            values = dict(zip(contexts, load_critic(SHIPPED).score(list(contexts.values())), strict=True))
        kept.write_text(json.dumps([right, values]), encoding="utf-8")
    right, values = json.loads(kept.read_text(encoding="utf-8"))
    return right, values


def problems_of(task: str, split: str, number: int) -> Any:
    """Return problems of Arithmetic, or of one of its wordings and difficulties."""
    if task == ARITHMETIC:
        return mas_gym.load_task(ARITHMETIC, split=split, limit=number)
    return generated(task, split)[:number]


def spec_of(policy: str, split: str, number: int, seed: int, store: Path, task: str) -> RunSpec:
    chosen, system = problems_of(task, split, number), mas_gym.load_mas("rpsv")
    return RunSpec(chosen, system, load_policy(policy), seed=seed, store=store)


def evaluate(policy: str, planner: str, critic: str, number: int, args: Any) -> list[Outcome]:
    spec = spec_of(policy, "test", number, RUN_SEED, args.out / "test.db", args.task)
    [(name, loaded)] = named_planners([planner]).items()
    row = SearchRow(name, loaded, load_critic(critic) if critic else None, critic)
    outcomes, stop = measure([row], spec)
    if stop is not None:
        raise stop
    return outcomes


def say(line: str) -> None:
    print(line, flush=True)


def main(args: argparse.Namespace) -> None:
    """Train all rows, evaluate them, and write the page after each evaluation."""
    args.out = args.out or Path(f"learning-{args.task}")
    args.page = PAGES / ("learning.md" if args.task == ARITHMETIC else f"learning_{args.task}.md")
    args.out.mkdir(parents=True, exist_ok=True)
    known = methods(args)
    rows = [Row("before", [[before(args)]])]
    # The first seeds of all rows come first.
    curves = {(name, seed): train(known[name], seed, args) for seed in args.seeds for name in args.rows}
    rows += [Row(name, [curves[name, seed] for seed in args.seeds]) for name in args.rows]
    kinds = {
        "single": lambda policy: evaluate(policy, "single", "", args.number, args),
        "vote": lambda policy: evaluate(policy, "sc:6", "", args.searched, args),
        "mcts": lambda policy: evaluate(policy, "mcts:20,2", SHIPPED, args.searched, args),
    }
    for kind, outcomes in kinds.items():
        for row in rows:
            if kind != "single" and row.name not in args.search_rows:
                continue
            for seed, points in zip(args.seeds, row.curves, strict=False):
                say(f"{row.name}, seed {seed}: {kind}")
                row.found.setdefault(kind, []).append(outcomes(points[chosen(points)].policy))
        say(f"wrote {write(rows, args)}")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m benchmarks.learning", description="Train the bundled agents.")
    numbers = lambda text: tuple(map(int, text.split(",")))  # noqa: E731
    names = lambda text: [name for name in text.split(";") if name]  # noqa: E731
    out.add_argument("--out", type=Path, help="folder for stores and models; by default learning-TASK")
    out.add_argument("--base", default="tiny", help="the agents before training")
    out.add_argument("--task", default=ARITHMETIC, help="or a task of benchmarks.tiny.stories")
    out.add_argument("--rows", type=names, default=list(METHODS), help="separated by ;")
    out.add_argument("--tokens", type=int, default=16_000, help="generated tokens of training searches per row")
    out.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    out.add_argument("--rounds", type=int, default=4, help="of searching and training")
    out.add_argument("--seeds", type=numbers, default=(0, 1, 2), help="training seeds")
    out.add_argument("--dev", type=int, default=80, help="dev problems for the curves")
    out.add_argument("-n", "--number", type=int, default=200, help="problems for single passes")
    out.add_argument("--searched", type=int, default=80, help="problems for searches")
    out.add_argument("--search-rows", type=names, default=["before", *METHODS], help="rows to search with")
    return out


if __name__ == "__main__":
    import sys

    given = parser().parse_args()
    # Where the results are does not matter to them.
    given.words = re.sub(r"--out \S+ ?", "", shlex.join(sys.argv[1:]))
    main(given)
