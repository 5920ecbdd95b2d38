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
    specs = critic or _shipped()
    rows = _rows(specs)
    # Rows with the same seed share most of their messages.
    samples = out / "samples.db"
    shared = read_workers(workers, POLICY, rows, len(task), cache=samples)
    if shared is None:
        load_weights(rows)
        spec = replace(spec, policy=read_policy(POLICY, samples))
    note(f"{len(task)} Arithmetic problems, four tiny agents (RPSV), {len(rows)} rows; results in {out}/")
    trees_seen = _BestTree(rows)
    outcomes, stop = measure(rows, spec, look=trees_seen.look, workers=shared)
    files = Files(json=out / "results.json", csv=out / "results.csv", plot=out / "accuracy-tokens.png")
    title = f"Arithmetic test, RPSV, tiny agents, seed {seed}"
    try:
        show(outcomes, title, files, {"command": "demo", "seeds": [seed], "critics": list(specs)})
    except MissingDependencyError as error:
        note(str(error), "yellow")
    if (plan := trees_seen.best()) is not None:
        write_page(plan, spec, trees_seen.row, out / "tree.html", POLICY, graded=True)
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


def _shipped() -> list[str]:
    note(
        f"Critics: {ORM} and {MASPRM}, shipped with this package and trained on training problems; --critic compares "
        "others."
    )
    return [ORM, MASPRM]


class _BestTree:
    """Selects the last MCTS row's largest tree with a right answer where ``single`` is wrong, else its largest."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.row = [row for row in rows if row.name.startswith("mcts")][-1]
        self._single: dict[str, bool] = {}
        self._plans: list[tuple[int, Plan]] = []

    def look(self, row: Row, plan: Plan) -> None:
        """Record one finished search."""
        if row.name == "single":
            self._single[plan.problem_id] = bool(plan.correct)
        if row.label == self.row.label and plan.tree is not None and plan.error is None:
            self._plans.append((len(plan.tree), plan))

    def best(self) -> Plan | None:
        """Return the plan of the tree to show; None if there is none."""

        def rank(item: tuple[int, Plan]) -> tuple[bool, int, str]:
            size, plan = item
            corrects = bool(plan.correct) and not self._single.get(plan.problem_id, True)
            return corrects, size, plan.problem_id

        return max(self._plans, key=rank)[1] if self._plans else None
