"""``mas-gym demo``: the paper's comparison in miniature, with the embedded agents, on a laptop and offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout
from mas_gym.cli.evaluate import Arm, Bench, Files, arms_of, end_early, measure, show
from mas_gym.cli.solve import write_page
from mas_gym.errors import MissingDependencyError

if TYPE_CHECKING:
    from search import Plan

PLANNERS = ("single", "sc:5", "sbs:5,1", "sbs:5,3", "mcts:10,3")
"""The search methods of the paper's Table 1."""


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the table, the picture and the page.")] = Path("demo"),
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Number of problems.")] = 200,
    critic: Annotated[
        list[str] | None, typer.Option("--critic", help="A trained critic's folder, for more rows. Repeatable.")
    ] = None,
    seed: opt.Seed = 42,
    concurrency: opt.Concurrency = 64,
) -> None:
    """Let tiny agents solve word problems with five search methods: a table, a picture and a tree to walk in.

    Needs no GPU, no key and no network. Stopped and started again, it goes on where it was.
    """
    import mas_gym

    out.mkdir(parents=True, exist_ok=True)
    arms = arms_of(PLANNERS, [opt.LIKELIHOOD, *(critic or [])])
    task = mas_gym.load_task("arithmetic", split="test", limit=number)
    bench = Bench(task, mas_gym.load_mas("rpsv"), opt.read_policy("tiny"), [seed], concurrency, out / "runs.db")
    note(f"{len(task)} Arithmetic problems, four tiny agents (RPSV), {len(arms)} search methods; results in {out}/")
    telling = _Telling()
    outcomes, stop = measure(arms, bench, telling.look)
    files = Files(json=out / "results.json", csv=out / "results.csv", plot=out / "accuracy-tokens.png")
    try:
        show(outcomes, f"Arithmetic test, RPSV, tiny agents, seed {seed}", files, {"command": "demo", "seed": seed})
    except MissingDependencyError as error:
        note(str(error), "yellow")
    if telling.best is not None:
        arm, plan = telling.best
        write_page(plan, bench, arm, out / "tree.html", graded=True)
    if stop is not None:
        end_early(stop, f"mas-gym demo --out {out} goes on from here")
    _next(out)


class _Telling:
    """Picks the tree worth showing: right where the single pass was wrong, with right and wrong leaves, and large."""

    def __init__(self) -> None:
        self.best: tuple[Arm, Plan] | None = None
        self._single: dict[str, bool] = {}
        self._score: tuple[bool, bool, int, str] = (False, False, 0, "")

    def look(self, arm: Arm, plan: Plan) -> None:
        """Consider one finished search."""
        if arm.name == "single":
            self._single[plan.problem_id] = bool(plan.correct)
        if plan.tree is None or plan.error is not None or not arm.name.startswith("mcts"):
            return
        won = bool(plan.correct) and not self._single.get(plan.problem_id, True)
        mixed = len({candidate.correct for candidate in plan.candidates}) > 1
        # The problem's id settles ties, for searches may end in any order.
        score = (won, mixed, len(plan.tree), plan.problem_id)
        if score > self._score:
            self._score, self.best = score, (arm, plan)


def _next(out: Path) -> None:
    from rich.text import Text

    lines = [
        f"Open {out / 'tree.html'} in a browser to walk a search tree; {out / 'accuracy-tokens.png'} has the picture.",
        "Next: mas-gym solve --task arithmetic --tree tree.html, or mas-gym eval --help",
    ]
    stdout().print(Text("\n".join(lines)))
