"""``mas-gym compare``: paired statistics of evaluations that other tools ran."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mas_gym.cli.console import note, stdout, write_outputs
from mas_gym.cli.option_values import check_folder


def compare(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Inspect logs (.eval, .json), --log_samples folders of lm-evaluation-harness, run stores, CSV files, "
            "or NAME=FILE,FILE for several files of one model.",
        ),
    ],
    baseline: Annotated[str, typer.Option("--against", help="Model to compare the others with; the first.")] = "",
    metric: Annotated[str, typer.Option("--metric", help="Scorer, metric or column; the first.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Write a page with every flipped question.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables as Markdown.")] = None,
    latex: Annotated[Path | None, typer.Option("--latex", help="Write the tables as LaTeX.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write scores, differences and flips as JSON.")] = None,
) -> None:
    """Compare evaluations of several models on the same questions: paired differences, intervals, flipped questions."""
    from search.compare.paired_results import compare_results

    for path in (out, markdown, latex, json):
        check_folder(path)
    found = compare_results(*files, baseline=baseline, metric=metric)
    stdout().print(found.show())
    if out is not None:
        found.write_page(out)
        note(f"wrote {out}")
    write_outputs((markdown, found.to_markdown), (latex, found.to_latex), (json, found.to_json))
