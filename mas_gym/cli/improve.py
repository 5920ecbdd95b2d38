"""``mas-gym improve``: rounds of search, critic training, evaluation and agent training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout
from mas_gym.cli.option_groups import grouped
from mas_gym.cli.option_values import check_folder, read_pairs
from mas_gym.cli.train import Adapters, Device, Sets
from mas_gym.internal.rich_tables import text_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rewardmodels.agents.improve import Round

EVALUATED = 100
"""Problems of the dev split on which each generation is evaluated."""


@grouped(task="arithmetic", split=False, number=False, grading=False)
def improve(
    source: opt.TaskSource,
    method: Annotated[str, typer.Option("--method", help="sft, dpo or grpo; see mas-gym train agents.")] = "grpo",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of agent trainings.")] = 3,
    out: Annotated[Path, typer.Option("--out", help="Folder for all results; repeat the command to resume.")] = Path(
        "improved"
    ),
    problems: Annotated[
        int, typer.Option("--problems", min=2, help="Training problems per round; each round uses different problems.")
    ] = 100,
    base: Annotated[str, typer.Option("--base", help="Initial agents: tiny, or a folder or hub id.")] = "tiny",
    mas: opt.MASName = None,
    planner: Annotated[
        str | None,
        typer.Option(
            "--planner", help="Planner for training problems; by default siblings:2 for grpo, else mcts:20,3."
        ),
    ] = None,
    credit: Annotated[
        str,
        typer.Option("--credit", help="Advantages for grpo, as in mas-gym train agents, with this run's critic."),
    ] = "leave-one-out",
    adapters: Adapters = "shared",
    seed: opt.Seed = 42,
    concurrency: opt.Concurrency = 64,
    device: Device = None,
    setting: Sets = None,
) -> None:
    """Improve the agents in rounds of search, critic training, evaluation and agent training.

    All results are in one folder. Repeat the command to resume an interrupted stage.
    """
    from dataclasses import replace

    from rewardmodels.agents.improve import ImproveConfig
    from rewardmodels.agents.improve import improve as run

    check_folder(out)
    task = replace(source, split="train", number=(rounds + 1) * problems).load()
    dev = replace(source, split="dev", number=EVALUATED).load()
    settings = {**read_pairs(setting), "credit": credit, "adapters": adapters}
    if planner is not None and method == "grpo" and planner.startswith("mcts"):
        note("MCTS merges equal messages and continues the better ones, so its advantages are biased", "yellow")
    config = ImproveConfig(method, rounds, problems, planner or "", seed=seed, agents=tuple(settings.items()))
    spec = replace(opt.AgentSource(mas).load(task), concurrency=concurrency)
    found = run(spec, dev, out, config, base, device, note, True)
    _show(found, len(dev), out)


def _show(rounds: Sequence[Round], evaluated: int, out: Path) -> None:
    rows = []
    for one in rounds:
        cells = [
            f"{100 * row.hits[1].mean:.1f} ({100 * row.interval.low:.0f} to {100 * row.interval.high:.0f})\n"
            f"{row.tokens.mean:,.0f} tokens"
            for row in one.rows
        ]
        values = [f"{one.values[name]:+.2f}" for name in ("critic", "reward")]
        rows.append([str(one.number), *cells, *values])
    labels = [row.label.replace(" + ", "\n+ ") for row in rounds[0].rows]
    columns = ["Generation", *labels, "Critic\nvalue", "True\nreward"]
    console = stdout()
    console.print(text_table(columns, rows, f"Hit@1 on {evaluated} dev problems (95% interval) and tokens per problem"))
    console.print(f"Agents: {rounds[-1].policy}")
    console.print(f"Curves: {out / 'curves.png'}, tensorboard --logdir {out}", style="dim")
    console.print(f"Figures: {out / 'rounds.json'}", style="dim")
