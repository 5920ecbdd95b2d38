"""``mas-gym report``: an HTML page about a run store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout, write_outputs
from mas_gym.cli.option_values import check_folder, read_prices


def report(
    store: Annotated[Path, typer.Argument(metavar="RUNS.DB", help="Store written with --store.")],
    out: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("report.html"),
    run: opt.RunNames = None,
    baseline: Annotated[str, typer.Option("--against", help="Row to compare the others with.")] = "",
    prices: opt.PricesFile = None,
    figures: Annotated[Path | None, typer.Option("--figures", help="Folder for the figures as PNG files.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables as Markdown.")] = None,
    latex: Annotated[Path | None, typer.Option("--latex", help="Write the tables as LaTeX.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="Folder for TensorBoard: scalars and figures.")
    ] = None,
) -> None:
    """Write one HTML page about a run store: tables, intervals, curves, calibration and failures."""
    from search import open_store
    from search.report.report import write_report
    from search.report.tensorboard import write_tensorboard

    for path in (out, markdown, latex):
        check_folder(path)
    costs = read_prices(prices)
    with open_store(store) as opened:
        reports = write_report(opened, out, runs=run or (), baseline=baseline, figures=figures, prices=costs)
    console = stdout()
    for one in reports:
        console.print(one.comparison.show(console.width))
    tables = [one.comparison for one in reports]
    write_outputs(
        (markdown, lambda: "\n".join(table.to_markdown() for table in tables)),
        (latex, lambda: "\n".join(table.to_latex() for table in tables)),
    )
    if tensorboard is not None:
        write_tensorboard(reports, tensorboard)
    for path in filter(None, (out, figures, tensorboard)):
        note(f"wrote {path}")
