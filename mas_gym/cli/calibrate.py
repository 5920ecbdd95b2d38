"""``mas-gym calibrate``: a stopping rule for a planner and a critic, calibrated on dev problems."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout
from mas_gym.cli.option_groups import grouped
from mas_gym.cli.option_values import check_folder, policy_label, read_critic, read_planner, read_seeds
from mas_gym.errors import ConfigError
from mas_gym.internal.text import one_line
from mas_gym.internal.whole_files import write_file

if TYPE_CHECKING:
    from search.compare.stop_thresholds import Calibration


@grouped(task="arithmetic", split="dev", number=100)
def calibrate(
    planner: Annotated[str, typer.Option("--planner", help="Planner to stop early, such as bon:20 or mcts:20,3.")],
    source: opt.TaskSource,
    out: Annotated[Path, typer.Option("--out", help="File for the stop map; use it as stop=FILE.json.")],
    critic: Annotated[str, typer.Option("--critic", help="Critic: a name (see mas-gym critics) or a trained folder.")],
    agents: opt.AgentSource,
    seeds: Annotated[str, typer.Option("--seeds", help="Run seeds, separated by commas.")] = "42",
    method: Annotated[
        str, typer.Option("--method", help="logistic, or isotonic for more than a few hundred problems.")
    ] = "logistic",
    concurrency: opt.Concurrency = 64,
) -> None:
    """Fit a model of the probability that a search's answer is right, and choose the threshold for stopping.

    The threshold is the smallest at which Hit@1 on held-out dev problems is at least that of complete searches.
    """
    from search import planner_spec
    from search.compare.stop_thresholds import calibrate_stop

    if out.suffix != ".json":
        raise ConfigError(f"--out: expected a file that ends in .json, got {str(out)!r}")
    if source.split == "test":
        raise ConfigError("--split: expected dev or train, got test; thresholds must not be chosen on test problems")
    check_folder(out)
    _, algorithm = read_planner(planner)
    problems = source.load()
    spec = agents.load(problems)
    numbers = read_seeds(seeds)
    found = calibrate_stop(
        algorithm,
        problems,
        critic=read_critic(critic),
        seeds=numbers,
        method=method,  # type: ignore[arg-type]
        mas=spec.mas if spec.source is None else None,
        program=None if spec.source is None else spec.source.program,
        policy=agents.read_policy(spec.mas),
        sampling=spec.sampling,
        concurrency=concurrency,
        progress=True,
    )
    about = {
        "spec": planner_spec(replace(algorithm, stop=None)),  # type: ignore[type-var]
        "task": source.label,
        "problems": len(problems),
        "seeds": list(numbers),
        "policy": policy_label(agents.policy_spec(spec.mas)),
        "method": method,
        "whole_hit": found.hit,
        **{f"held_out_{name}": value for name, value in found.chosen._asdict().items() if name != "threshold"},
    }
    write_file(out, json.dumps(found.map.to_dict(about), indent=1) + "\n")
    _show(found, len(problems))
    note(f"wrote {out}; use it as --planner {one_line(planner)},stop={out}")


def _show(found: Calibration, problems: int) -> None:
    chosen = found.chosen
    lines = [f"Hit@1 without stops: {100 * found.hit:.1f}; with stops, on held-out problems: {100 * chosen.hit:.1f}"]
    if chosen.accuracy is None or chosen.claimed is None:
        lines.append(
            "No threshold below 1 keeps the accuracy: stop=FILE never stops. Use a better critic or more problems."
        )
    else:
        lines.append(
            f"Threshold {chosen.threshold:g}: {100 * chosen.coverage:.0f}% of the searches stop early; "
            f"{100 * chosen.accuracy:.1f}% of"
        )
        lines.append(f"their answers are right, {100 * chosen.claimed:.1f}% expected.")
    lines.append(f"Calibrated on {problems} problems; valid only for the same planner, critic and difficulty.")
    stdout().print("\n".join(lines), highlight=False)
