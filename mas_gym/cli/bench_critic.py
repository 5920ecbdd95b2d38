"""``mas-gym bench-critic``: evaluate critics on finding the first error in labeled transcripts."""

from __future__ import annotations

import json as jsonlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mas_gym.cli.console import note, stdout, write_outputs
from mas_gym.cli.option_values import check_folder, read_critic
from mas_gym.errors import ConfigError
from mas_gym.internal.rich_tables import text_table
from mas_gym.internal.text import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from search.compare.first_errors import DepthFigures, FirstErrorFigures

_SECONDS = 15.0
_DASH = "\N{EN DASH}"
_COLUMNS = (
    *("Critic", "First error", "No error", "F1", "95% interval", "Agent"),
    *("AUC", "Pairs", "RC", "Critic TOK", "Failed"),
)


def bench_critic(
    critic: Annotated[
        list[str],
        typer.Option(
            "--critic", help="Critic: a name (see mas-gym critics), a trained folder or my.py:Mine. Repeatable."
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            help="JSON, JSONL or Parquet with problem, steps and label: the first wrong step from 0, or -1 for none; "
            "or a store with imported labels.",
        ),
    ],
    dev: Annotated[
        Path | None,
        typer.Option(
            "--dev",
            help="File to choose thresholds on. By default, the rows of --data with split dev, else a fifth of its "
            "questions; these are left out of the evaluation.",
        ),
    ] = None,
    mas: Annotated[
        str | None,
        typer.Option("--mas", help="System that generated the transcripts; overrides the system that the rows name."),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            "--rule",
            help="value: the first step whose value is below the threshold; fall: the largest fall, if half of it "
            "reaches the threshold. By default the better one on dev.",
        ),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", help="Fixed threshold; all transcripts are then evaluated.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures as JSON.")] = None,
) -> None:
    """Evaluate critics on transcripts with known first errors: ProcessBench F1, AUC, pairwise accuracy, calibration."""
    from search.compare.first_errors import bench_critic as measure
    from search.compare.transcripts import read_labeled

    check_folder(json)
    if dev is not None and threshold is not None:
        raise ConfigError("expected --dev or --threshold, got both; leave out one of them")
    transcripts, chosen = read_labeled(data), None if dev is None else read_labeled(dev)
    found: list[FirstErrorFigures] = []
    for spec in dict.fromkeys(critic):
        common: dict[str, Any] = {"dev": chosen, "mas": mas, "rule": rule, "threshold": threshold}
        one = measure(read_critic(spec), transcripts, **common, listen=_Progress(spec))
        found.append(one)
        note(_threshold_line(one, None if dev is None else dev.name))
    _show(found, data.name)
    document = {"schema": 1, "data": data.name, "critics": [one.to_dict() for one in found]}
    write_outputs((json, lambda: jsonlib.dumps(document, indent=1)))


def _show(found: Sequence[FirstErrorFigures], name: str) -> None:
    """Print the table, then each critic's calibration and failures."""
    console, first = stdout(), found[0]
    console.print(_summary(found, f"{name}: {first.transcripts:,} transcripts measured, {first.wrong:,} with an error"))
    for one in found:
        console.print(_depths(one))
    for one in found:
        for reason, number in one.failed.items():
            note(f"{one_line(one.critic)}: {number:,} transcripts without values: {one_line(reason)}", "yellow")


class _Progress:
    """Prints the scoring progress every few seconds."""

    def __init__(self, name: str) -> None:
        self._name, self._said = name, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._said > _SECONDS:
            self._said = time.monotonic()
            note(f"{self._name}: {done:,} of {total:,} transcripts scored")


def _threshold_line(one: FirstErrorFigures, dev: str | None) -> str:
    if one.threshold is None:
        return (
            f"{one.critic} scores only complete transcripts, so it cannot locate the first error; its AUC and "
            "calibration are for complete transcripts"
        )
    sides = {"value": "the first step with a value below", "fall": "the largest fall, if half of it is at least"}
    how = f"rule {one.threshold.rule}: {sides[one.threshold.rule]} {one.threshold.at:.4g}"
    if one.dev_f1 is None:
        return f"{one.critic}: {how}, as given"
    return f"{one.critic}: {how}; chosen for F1, {one.dev_f1:.1f} there, on {dev or one.chosen_on}"


def _summary(found: Sequence[FirstErrorFigures], title: str) -> Table:
    lines = [_line(one) for one in found]
    shown = [i for i in range(len(_COLUMNS)) if any(line[i] != _DASH for line in lines)]
    return text_table([_COLUMNS[i] for i in shown], [[line[i] for i in shown] for line in lines], title)


def _line(one: FirstErrorFigures) -> tuple[str, ...]:
    span = one.f1_interval
    return (
        one_line(one.critic),
        _percent(one.first_error),
        _percent(one.no_error),
        _DASH if one.f1 is None else f"{one.f1:.1f}",
        _DASH if span is None else f"{span.low:.1f} {_DASH} {span.high:.1f}",
        _percent(one.agent),
        f"{one.auc:.3f}",
        _DASH if one.pairwise is None else f"{_percent(one.pairwise)} of {one.pairs:,}",
        f"{one.cost.reward_calls:,}",
        f"{one.cost.critic_tokens:,}" if one.cost.critic_tokens else _DASH,
        str(sum(one.failed.values()) or _DASH),
    )


def _percent(share: float | None) -> str:
    return _DASH if share is None else f"{100 * share:.1f}"


def _depths(one: FirstErrorFigures) -> Table:
    head = ("After step", "Prefixes", "Mean value", "Without error", "AUC", "Calibration gap")
    lines = [(str(depth), *_depth_cells(found)) for depth, found in one.by_depth.items()]
    return text_table(head, lines, f"{one_line(one.critic)}: calibration by depth")


def _depth_cells(found: DepthFigures) -> tuple[str, ...]:
    share = f"{100 * found.right:.1f}"
    return f"{found.prefixes:,}", f"{found.value:.3f}", share, f"{found.auc:.3f}", f"{found.gap:.3f}"
