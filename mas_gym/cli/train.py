"""``mas-gym train``: reward models from the trees of ``mas-gym rollouts``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout

if TYPE_CHECKING:
    from rewardmodels import LabelledTree, Trained

app = typer.Typer(no_args_is_help=True, help="Train a reward model on search trees.", rich_markup_mode="rich")

Stores = Annotated[list[Path], typer.Option("--store", help="Store with training trees. Repeatable, to mix tasks.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the critic; the same command resumes in it.")]
Base = Annotated[str, typer.Option("--base", help="tiny, or the folder or hub id of a decoder.")]
View = Annotated[str, typer.Option("--view", help="What the critic reads: full transcript, or local view.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; by default a GPU if there is one.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Hyper-parameter, such as learning_rate=1e-5. Repeatable.")
]


@app.command("masprm")
def masprm(
    store: Stores,
    out: Out = Path("models/masprm"),
    base: Base = "tiny",
    head: Annotated[str, typer.Option("--head", help="bt (pairs) or mse (values).")] = "bt",
    view: View = "full",
    device: Device = None,
    setting: Sets = None,
) -> None:
    """Train MASPRM, the process reward model of states."""
    _train("masprm", head, store, out, base, view, device, setting)


@app.command("orm")
def orm(
    store: Stores,
    out: Out = Path("models/orm"),
    base: Base = "tiny",
    head: Annotated[str, typer.Option("--head", help="bce or mse.")] = "bce",
    view: View = "full",
    device: Device = None,
    setting: Sets = None,
) -> None:
    """Train the ORM, the outcome reward model of finished transcripts."""
    _train("orm", head, store, out, base, view, device, setting)


def _train(
    kind: str,
    head: str,
    stores: Sequence[Path],
    out: Path,
    base: str,
    view: str,
    device: str | None,
    setting: Sequence[str] | None,
) -> None:
    import rewardmodels
    from rewardmodels.training.config import check_head

    check_head(kind, head)
    overrides: dict[str, Any] = {**opt.read_pairs(setting), "kind": kind, "head": head, "view": view}
    wanted = rewardmodels.TrainingConfig(kind=kind, head=head).data_kind  # type: ignore[arg-type]

    def trees() -> Iterator[LabelledTree]:
        return chain.from_iterable(map(rewardmodels.stored_trees, stores))

    # Only one of the processes that torchrun starts prints.
    first = os.environ.get("RANK", "0") == "0"
    say: Callable[[str], None] = note if first else lambda line: None
    data = rewardmodels.collect(trees(), wanted, view=view)  # type: ignore[arg-type]
    for name, counts in rewardmodels.histogram(data).items():
        say(f"{data.kind} by {name}: " + ", ".join(f"{key} {number:,}" for key, number in counts.items()))
    points = rewardmodels.collect(trees(), "points", view=view) if wanted == "pairs" else None  # type: ignore[arg-type]
    trained = rewardmodels.train(data, out, base, points=points, device=device, log=say, **overrides)
    if first:
        _show(trained)


def _show(trained: Trained) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text("On held-out problems"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Metric")
    table.add_column("Value", justify="right")
    for name, value in trained.info.metrics.items():
        if isinstance(value, int | float):
            table.add_row(Text(name), f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
    console = stdout()
    console.print(table)
    console.print(Text(f"Saved to {trained.folder}. Next: mas-gym eval --critic {trained.folder} --planner mcts:10,3"))
