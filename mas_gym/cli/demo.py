"""``mas-gym demo``: a small version of the paper's comparison with the bundled agents, on a laptop and offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout
from mas_gym.cli.evaluate import Files, end_early, measure, show
from mas_gym.cli.option_values import load_weights, read_policy
from mas_gym.cli.solve import write_page
from mas_gym.cli.worker_processes import read_workers
from mas_gym.errors import MissingDependencyError

if TYPE_CHECKING:
    from search import Plan
    from search.compare.comparison_runs import Row

POLICY, MASPRM, ORM = "tiny", "tiny-masprm", "tiny-orm"
"""The bundled agents and their critics."""

PASSES = "bon:10"
"""Best-of-N at the tokens of MCTS(10, 3) with MASPRM: 675 and 640 per problem, see benchmarks/pages/main.md."""


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for table, plot and tree page.")] = Path("demo"),
    number: Annotated[int | None, typer.Option("-n", "--number", min=1, help="Problems; by default 200.")] = None,
    critic: Annotated[
        list[str] | None,
        typer.Option("--critic", help="Critic to compare, instead of the bundled ones. Repeatable."),
    ] = None,
    seed: opt.Seed = 42,
    concurrency: opt.Concurrency = 64,
    workers: opt.WorkerCount = None,
) -> None:
    """Compare the paper's planners and critics on word problems with tiny agents; write a table, plot and search tree.

    Needs no GPU, API key or network. An interrupted demo resumes when started again.
    """
    import mas_gym
    from search.setup import RunSpec

    out.mkdir(parents=True, exist_ok=True)
    task = mas_gym.load_task("arithmetic", split="test", limit=number or 200)
    spec = RunSpec(task, mas_gym.load_mas("rpsv"), None, seed=seed, concurrency=concurrency, store=out / "runs.db")
    specs = critic or [ORM, MASPRM]
    if critic is None:
        note(f"Critics: {ORM} and {MASPRM}, trained on training problems; --critic compares others.")
    rows = _rows(specs)
    # Rows with the same seed share most of their messages.
    samples = out / "samples.db"
    shared = read_workers(workers, POLICY, rows, len(task), cache=samples)
    if shared is None:
        load_weights(rows)
        spec = replace(spec, policy=read_policy(POLICY, samples))
    note(f"{len(task)} Arithmetic problems, four tiny agents (RPSV), {len(rows)} rows; results in {out}/")
    shown = [row for row in rows if row.name.startswith("mcts")][-1]
    best: list[Plan] = []

    def look(row: Row, plan: Plan) -> None:
        # The page shows the largest tree with a right answer.
        if row.label == shown.label and plan.tree is not None and plan.error is None:
            size = [(bool(one.correct), len(one.tree or ()), one.problem_id) for one in (*best, plan)]
            best[:] = [max(zip(size, (*best, plan), strict=True), key=lambda pair: pair[0])[1]]

    outcomes, stop = measure(rows, spec, look=look, workers=shared)
    files = Files(json=out / "results.json", csv=out / "results.csv", plot=out / "accuracy-tokens.png")
    title = f"Arithmetic test, RPSV, tiny agents, seed {seed}"
    try:
        show(outcomes, title, files, {"command": "demo", "seeds": [seed], "critics": list(specs)})
    except MissingDependencyError as error:
        note(str(error), "yellow")
    for plan in best:
        write_page(plan, spec, shown, out / "tree.html", POLICY, graded=True)
    if stop is not None:
        end_early(stop, f"repeat the command to resume from {out}")
    stdout().print(
        f"Open {out / 'tree.html'} in a browser to explore a search tree; the plot is {out / 'accuracy-tokens.png'}.\n"
        "Next: mas-gym solve --task arithmetic --tree tree.html, or mas-gym eval --help"
    )


def _rows(specs: Sequence[str]) -> list[Row]:
    """Pair the paper's planners with all critics, and best-of-N with outcome critics (or all, if there are none)."""
    from search.compare.comparison_runs import PAPER_PLANNERS, named_critics, named_planners, pair

    critics = named_critics([opt.LIKELIHOOD, *specs], lazy=True)
    outcome = {name: critic for name, critic in critics.items() if critic[1].terminal_only}
    return [*pair(named_planners(PAPER_PLANNERS), critics), *pair(named_planners(PASSES), outcome or critics)]
