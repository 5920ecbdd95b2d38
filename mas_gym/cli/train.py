"""``mas-gym rollouts`` and ``mas-gym train``: search with true rewards, and train models on the results."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import examples, note, stdout
from mas_gym.cli.evaluate import end_early, measure
from mas_gym.cli.option_groups import grouped
from mas_gym.cli.option_values import check_folder, read_pairs, read_planner
from mas_gym.cli.run_notes import note_costs, note_judge, warn_of_misuse
from mas_gym.errors import ConfigError
from mas_gym.internal.rich_tables import text_table
from mas_gym.internal.suggestions import choice

if TYPE_CHECKING:
    from rewardmodels import LabeledTree
    from search import Plan
    from search.compare.comparison_runs import Row

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Train a reward model on search trees or imported logs, or the agents on search trees.",
    rich_markup_mode="rich",
    epilog=examples("mas-gym train masprm --store trees.db", "mas-gym train agents --method dpo --store trees.db"),
)

FEATURES = "features"
Adapters = Annotated[str, typer.Option("--adapters", help="shared (one model) or per-agent.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; by default a GPU if available.")]
RunName = Annotated[
    str | None, typer.Option("--run", help="Only this run of the store; by default all training and imported runs.")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Hyperparameter, such as learning_rate=1e-5. Repeatable.")
]


@dataclass(frozen=True)
class Training:
    """The options of a critic's training."""

    store: Annotated[list[Path], typer.Option(help="Store with training trees or imported logs. Repeatable.")]
    out: Annotated[Path, typer.Option(help="Folder for the critic; repeat the command to resume.")]
    base: Annotated[
        str,
        typer.Option(
            help=f"Base model: tiny, the folder or hub id of a decoder, or {FEATURES}, a regression without a language "
            "model on the agreement among samples, lengths, answers and log-probabilities."
        ),
    ] = "tiny"
    view: Annotated[str, typer.Option(help="Input of the critic: full (transcript) or local (view).")] = "full"
    device: Device = None
    setting: Sets = None
    run: RunName = None
    min_continuations: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Imported runs: leave out states shared by fewer recorded samples. 1 accepts targets that are the "
            "outcome of a single sample.",
        ),
    ] = None
    split: Annotated[
        str,
        typer.Option(
            help="all questions, or train: four fifths by digest, so that eval --recorded --split held-out uses the "
            "rest."
        ),
    ] = "all"


@app.command(
    "masprm",
    epilog=examples(
        "mas-gym train masprm --store trees.db",
        "mas-gym train masprm --store trees.db --set learning_rate=1e-5",
    ),
)
@grouped(out=Path("models/masprm"))
def masprm(
    options: Training, head: Annotated[str, typer.Option("--head", help="bt (pairs) or mse (values).")] = "bt"
) -> None:
    """Train MASPRM, the process reward model, which scores every state.

    The target of a state is the mean reward of the simulations or recorded samples that share its messages.
    """
    _train("masprm", head, options)


@app.command(
    "orm",
    epilog=examples(
        "mas-gym train orm --store trees.db", "mas-gym train orm --store trees.db --head mse --out models/orm-mse"
    ),
)
@grouped(out=Path("models/orm"), min_continuations=False)
def orm(options: Training, head: Annotated[str, typer.Option("--head", help="bce or mse.")] = "bce") -> None:
    """Train the ORM, the outcome reward model, which scores finished transcripts."""
    _train("orm", head, options)


@app.command(
    "calibrated",
    epilog=examples("mas-gym train calibrated --store logs.db --critic models/orm --critic models/features"),
)
def calibrated(
    store: Annotated[Path, typer.Option("--store", help="Store with an imported run.")],
    critic: Annotated[list[str], typer.Option("--critic", help="Critic to combine, by name or folder. Repeatable.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the critic; repeat the command to resume.")] = Path(
        "models/calibrated"
    ),
    method: Annotated[
        str, typer.Option("--method", help="logistic: regression on the values; isotonic: monotone in their mean.")
    ] = "logistic",
    on: Annotated[str, typer.Option("--on", help="Targets: sample outcomes or message labels.")] = "outcomes",
    run: RunName = None,
) -> None:
    """Combine critics into one critic, calibrated on recorded outcomes or labels, with cross-validation by question.

    Each training question is scored by a model that was fitted without it.
    """
    from rewardmodels import load_critic
    from search import Recorded
    from search.compare.critic_fitting import (
        TARGETS,
        calibrate_critics,
        check_members,
        label_examples,
        write_calibrated,
    )
    from search.store import recorded_states

    target = choice("--on", on, TARGETS)
    if target == "labels" and run is not None:
        raise ConfigError("--run: cannot be combined with --on labels, which uses all imported runs in the store")
    check_members(critic)
    critics = {spec: load_critic(spec) for spec in dict.fromkeys(critic)}
    ends = any(one.terminal_only for one in critics.values())
    found = label_examples(store) if target == "labels" else recorded_states(Recorded(store, run), ends)
    model = calibrate_critics(critics, list(found), method, note)  # type: ignore[arg-type]
    write_calibrated(model, out)
    rows = {"combined": model.metrics["combined"]} | {spec: model.metrics[spec] for spec in critics}
    figures = {f"{name}: {key}": value for name, part in rows.items() for key, value in part.items()}
    _show_metrics(figures, out, f"mas-gym eval --recorded {store} --planner bon:5 --critic {out}")


def _train(kind: str, head: str, options: Training) -> None:
    from rewardmodels import stored_trees
    from rewardmodels.data.dataset import for_training
    from rewardmodels.training.config import check_head
    from rewardmodels.training.train_critic import teach

    check_head(kind, head)
    part = choice("--split", options.split, ("all", "train"))
    if options.base == FEATURES:
        _train_features(kind, options)
        return

    def trees() -> Iterator[LabeledTree]:
        for tree in chain.from_iterable(stored_trees(store, options.run) for store in options.store):
            if part == "all" or for_training(tree.tree.states[0].question):
                yield tree

    # Only one of torchrun's processes prints.
    first = os.environ.get("RANK", "0") == "0"
    say: Callable[[str], None] = note if first else lambda line: None
    settings: dict[str, Any] = {**read_pairs(options.setting), "min_continuations": options.min_continuations}
    settings |= {"device": options.device, "log": say}
    trained = teach(trees, options.out, kind, head, options.base, options.view, **settings)  # type: ignore[arg-type]
    if first:
        _show_metrics(trained.info.metrics, trained.folder, _next(kind, options.store[0], trained.folder, part))


def _train_features(kind: str, options: Training) -> None:
    from rewardmodels.data.dataset import for_training
    from rewardmodels.training.train_feature_critic import train_features
    from search import Recorded
    from search.store import recorded_states

    for flag, typed in {"--set": options.setting, "--view": options.view != "full"}.items():
        if typed:
            raise ConfigError(f"{flag}: cannot be combined with --base {FEATURES}, which is a logistic regression")
    rows = [
        row
        for store in options.store
        for row in recorded_states(Recorded(store, options.run), kind == "orm")
        if options.split == "all" or for_training(row.context.state.question)
    ]
    model = train_features(rows, options.out, kind, note, options.min_continuations)  # type: ignore[arg-type]
    _show_metrics(model.metrics, options.out, _next(kind, options.store[0], options.out, options.split))


@app.command(
    "agents",
    epilog=examples(
        "mas-gym train agents --method dpo --store trees.db",
        "mas-gym train agents --method grpo --store trees.db --credit leave-one-out",
    ),
)
def agents(
    store: Annotated[Path, typer.Option("--store", help="Store with training trees.")],
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="sft (messages of correct transcripts), dpo (pairs of siblings) or grpo (sampled tokens with credit; "
            "needs mas-gym rollouts --token-traces).",
        ),
    ] = "sft",
    out: Annotated[Path, typer.Option("--out", help="Folder for the model; repeat the command to resume.")] = Path(
        "models/agents"
    ),
    base: Annotated[str, typer.Option("--base", help="Base model: tiny, or a folder or hub id.")] = "tiny",
    credit: Annotated[
        str,
        typer.Option(
            "--credit",
            help="Advantages for grpo: shared-outcome, per-agent, per-agent-turn, leave-one-out; or with --critic: "
            "value, control-variate, value-baseline.",
        ),
    ] = "leave-one-out",
    critic: Annotated[str | None, typer.Option("--critic", help="Critic for credit methods that need values.")] = None,
    adapters: Adapters = "shared",
    run: Annotated[str | None, typer.Option("--run", help="Train on this run of the store; by default all.")] = None,
    device: Device = None,
    setting: Sets = None,
) -> None:
    """Train the agents with TRL on the results of searches with true rewards."""
    from rewardmodels import load_critic
    from rewardmodels.agents import agent_config, train_agents
    from rewardmodels.agents.examples import read_examples

    settings = {**read_pairs(setting), "credit": credit, "adapters": adapters}
    # Invalid settings end the command before the store is read.
    config = agent_config(method, 0, settings)
    first = os.environ.get("RANK", "0") == "0"
    say: Callable[[str], None] = note if first else lambda line: None
    values = None if critic is None or method != "grpo" else load_critic(critic)
    examples = read_examples(store, config, run, values)
    counts = Counter(one.agent for one in examples)
    say(f"{len(examples):,} examples: " + ", ".join(f"{agent} {number:,}" for agent, number in counts.items()))
    trained = train_agents(examples, out, method, base, device=device, log=say, **settings)
    if first:
        for agent, folder in trained.folders.items():
            name = "" if agent == "*" else f"{agent}: "
            stdout().print(f"{name}weights {trained.metrics[agent]['weights'][:12]} in {folder}")
        stdout().print(f"Next: mas-gym eval -n 200 --policy {shlex.quote(trained.policy)}", style="dim")


def _next(kind: str, store: Path, folder: Path, part: str) -> str:
    """Return a command for the critic: on other questions of a log, or on the bundled agents."""
    from search import open_store
    from search.results.run_info import is_recorded

    with open_store(store) as opened:
        if not any(is_recorded(run.config) for run in opened.runs()):
            return f"mas-gym eval --critic {folder} --planner mcts:10,3"
    later = ("LATER.db", ", on a log with other questions")
    log, others = (f"{store} --split held-out", "") if part == "train" else later
    if kind == "masprm":
        return f"mas-gym blame {log} --critic {folder}{others}"
    return f"mas-gym eval --recorded {log} --planner bon:5 --critic {folder}{others}"


def _show_metrics(metrics: Mapping[str, object], folder: Path, following: str) -> None:
    figures = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    rows = [(name, f"{v:,}" if isinstance(v, int) else f"{v:.4f}") for name, v in figures.items()]
    console = stdout()
    console.print(text_table(("Metric", "Value"), rows, "On held-out problems"))
    console.print(f"Saved to {folder}. Next: {following}")


def _count(counts: Counter[str], row: Row, plan: Plan) -> None:
    """Count one search; failed searches have no tree."""
    if plan.error is not None or plan.tree is None:
        counts["failed"] += 1
        return
    verdicts = [candidate.correct for candidate in plan.candidates]
    leaves = {"right": verdicts.count(True), "wrong": verdicts.count(False)}
    counts.update(trees=1, nodes=len(plan.tree), mixed=len(set(verdicts)) > 1, **leaves)


@grouped(task="arithmetic", split="train", grading=False)
def rollouts(
    store: Annotated[Path, typer.Option("--store", help="SQLite file for the trees; repeat the command to resume.")],
    source: opt.TaskSource,
    agents: opt.AgentSource,
    options: opt.RunOptions,
    planner: Annotated[str, typer.Option("--planner", help="Planner that uses the true reward.")] = "mcts:40,3",
    seed: opt.Seed = 42,
) -> None:
    """Search on training problems with the true reward at the leaves (paper: MCTS(40,3), c = 4.0); store the trees."""
    from search.compare.comparison_runs import Row

    if source.split == "test":
        raise ConfigError("--split: expected train or dev, got test; training on test trees would leak the answers")
    check_folder(store)
    check_folder(options.log_json)
    name, method = read_planner(planner)
    spec = options.apply(replace(agents.load(source.load()), seed=seed, store=store, training=True))
    policy = agents.policy_spec(spec.mas)
    warn_of_misuse(policy, source.task, spec.mas)
    local, start = options.engines(policy, agents.cache, store)
    spec, problems = replace(spec, policy=local), spec.problems
    counts: Counter[str] = Counter()
    with options.watched() as watch:
        row, look = Row(f"{name}, true reward", method), partial(_count, counts)
        _, stop = measure([row], spec, look=look, watch=watch, start=start)
    _show_counts(counts, len(problems), store)
    note_costs(local)
    note_judge(problems)
    if stop is not None:
        end_early(stop, f"repeat the command to resume from {store}")


def _show_counts(counts: Counter[str], wanted: int, store: Path) -> None:
    leaves = counts["right"] + counts["wrong"]
    share = f", {100 * counts['right'] / leaves:.1f}% of {leaves:,} leaves right" if leaves else ""
    failed = f", {counts['failed']:,} searches failed" if counts["failed"] else ""
    line = (
        f"{counts['trees']:,} of {wanted:,} trees with {counts['nodes']:,} nodes in {store}{share}; "
        f"{counts['mixed']:,} trees have right and wrong leaves{failed}."
    )
    stdout().print(line)
    if counts["trees"] == wanted:
        stdout().print(f"Next: mas-gym train masprm --store {store} --out models/masprm", style="dim")
