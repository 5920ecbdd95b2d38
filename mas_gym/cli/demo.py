"""``mas-gym demo``: a small version of the paper's comparison with the bundled agents, on a laptop and offline."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import RunProgress, note, stdout
from mas_gym.cli.evaluate import Files, end_early, measure, show
from mas_gym.cli.solve import write_page
from mas_gym.errors import MissingDependencyError

if TYPE_CHECKING:
    from search import Plan
    from search.compare.rows import Bench, Row
    from search.results.outcomes import Outcome

POLICY, MASPRM, ORM = "tiny", "tiny-masprm", "tiny-orm"
"""The bundled agents and their critics."""

PASSES = "bon:10"
"""Best-of-N at the tokens of MCTS(10, 3) with MASPRM: 675 and 640 per problem, see benchmarks/pages/main.md."""

FULL_SEEDS, FULL_PROBLEMS = (14, 24, 42), 500


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for table, plot and tree page.")] = Path("demo"),
    number: Annotated[int | None, typer.Option("-n", "--number", min=1, help="Problems; by default 200.")] = None,
    critic: Annotated[
        list[str] | None,
        typer.Option("--critic", help="Critic to compare, instead of the bundled ones. Repeatable."),
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="First generate rollouts and train MASPRM and ORM in --out.")
    ] = False,
    number_of_trees: Annotated[
        int, typer.Option("--trees", min=2, help="Number of training searches with --from-scratch.")
    ] = 600,
    full: Annotated[
        bool,
        typer.Option("--full", help="From scratch: 500 problems, three seeds, then the paper's other tables."),
    ] = False,
    seed: opt.Seed = 42,
    concurrency: opt.Concurrency = 64,
    workers: opt.WorkerCount = None,
) -> None:
    """Compare the paper's planners and critics on word problems with tiny agents; write a table, plot and search tree.

    Needs no GPU, API key or network. An interrupted demo resumes when started again.
    """
    import mas_gym
    from search.compare.rows import Bench

    out.mkdir(parents=True, exist_ok=True)
    task = mas_gym.load_task("arithmetic", split="test", limit=number or (FULL_PROBLEMS if full else 200))
    seeds = FULL_SEEDS if full else (seed,)
    bench = Bench(task, mas_gym.load_mas("rpsv"), None, seeds, concurrency, out / "runs.db")
    trained = from_scratch or full
    specs = _train(bench, out, number_of_trees) if trained else critic or _shipped()
    rows = _rows(specs)
    # Rows with the same seed share most of their messages.
    samples = out / "samples.db"
    shared = opt.read_workers(workers, POLICY, rows, len(task), cache=samples)
    if shared is None:
        opt.load_weights(rows)
    bench = replace(bench, policy=opt.read_policy(POLICY, samples) if shared is None else None, workers=shared)
    note(f"{len(task)} Arithmetic problems, four tiny agents (RPSV), {len(rows)} rows; results in {out}/")
    trees_seen = _BestTree(rows)
    outcomes, stop = _measure(rows, bench, trees_seen)
    files = Files(json=out / "results.json", csv=out / "results.csv", plot=out / "accuracy-tokens.png")
    title = f"Arithmetic test, RPSV, tiny agents, seed {', '.join(map(str, seeds))}"
    try:
        show(outcomes, title, files, {"command": "demo", "seeds": list(seeds), "critics": list(specs)})
    except MissingDependencyError as error:
        note(str(error), "yellow")
    if (best := trees_seen.best()) is not None:
        row, plan, of = best
        write_page(plan, replace(bench, seeds=[of]), row, out / "tree.html", POLICY, graded=True)
    if stop is not None:
        end_early(stop, f"repeat the command to resume from {out}")
    if full:
        _tables(out, specs, len(task), number_of_trees)
    _next(out, trained)


def _measure(rows: Sequence[Row], bench: Bench, trees_seen: _BestTree) -> tuple[list[Outcome], BaseException | None]:
    """Run the rows seed by seed, so that the kept tree has the right seed."""
    outcomes: list[Outcome] = []
    for seed in bench.seeds:
        more, stop = measure(rows, replace(bench, seeds=[seed]), partial(trees_seen.look, seed=seed))
        outcomes += more
        if stop is not None:
            return outcomes, stop
    return outcomes, None


def _rows(specs: Sequence[str]) -> list[Row]:
    """Pair the paper's planners with all critics, and best-of-N with the outcome critics if there are any, else all."""
    from search.compare.rows import PAPER_PLANNERS, named_critics, named_planners, pair

    critics = named_critics([opt.LIKELIHOOD, *specs], lazy=True)
    outcome = {name: critic for name, critic in critics.items() if critic[1].terminal_only}
    return [*pair(named_planners(PAPER_PLANNERS), critics), *pair(named_planners(PASSES), outcome or critics)]


def _shipped() -> list[str]:
    """Return the shipped critics, with a note that they are shipped."""
    note(
        f"Critics: {ORM} and {MASPRM}, shipped with this package and trained on training problems; "
        "--from-scratch trains new ones, --critic compares others."
    )
    return [ORM, MASPRM]


def _train(bench: Bench, out: Path, number: int) -> list[str]:
    """Generate rollouts and train both critics; existing results are kept."""
    import mas_gym
    from rewardmodels.training.train_critic import ROLLOUTS, grow, teach, trees

    learning = replace(
        bench,
        task=mas_gym.load_task("arithmetic", split="train", limit=number),
        policy=opt.read_policy(POLICY),
        seeds=(42,),
        store=out / "rollouts.db",
    )
    note(f"{number:,} training searches, MCTS(40, 3) with the true reward, into {learning.store}")
    with RunProgress([f"{ROLLOUTS}, true reward"], len(learning.task)) as progress:
        stop = grow(learning, listen=partial(progress.update, 0, 42))
    if stop is not None:
        end_early(stop, f"repeat the command to resume from {learning.store}")
    for kind, head in (("orm", "bce"), ("masprm", "bt")):
        note(f"Training {kind} ({head}); curves in {out / kind / 'curves'}")
        teach(lambda: trees(learning), out / kind, kind, head, log=note)  # type: ignore[arg-type]
    return [str(out / "orm"), str(out / "masprm")]


def _tables(out: Path, critics: Sequence[str], problems: int, number: int) -> None:
    """Run the scripts of the paper's other tables, which exist only in a source checkout."""
    import subprocess

    import mas_gym

    checkout = Path(mas_gym.__file__).resolve().parents[1]
    if not (checkout / "benchmarks" / "paper").is_dir():
        note("The paper's other tables are scripts of the source checkout: python -m benchmarks.paper.all", "yellow")
        return
    orm, masprm = (str(Path(critic).resolve()) for critic in critics)
    sizes = ["-n", str(problems), "--trees", str(number), "--seeds", ",".join(map(str, FULL_SEEDS))]
    command = [sys.executable, "-m", "benchmarks.paper.all", "--out", str((out / "paper").resolve()), *sizes]
    made = ["--orm", orm, "--masprm", masprm, "--rollouts", str((out / "rollouts.db").resolve())]
    done = subprocess.run([*command, *made], cwd=checkout, check=False)
    if done.returncode:
        note("The paper's tables were not finished; repeat the command to resume.", "yellow")
        raise typer.Exit(done.returncode)


class _BestTree:
    """Selects the tree to show: a large tree with right and wrong leaves, with an answer that corrects the single pass.

    The choice does not depend on the order in which searches end.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._places = {row.label: place for place, row in enumerate(rows)}
        self._single: dict[str, bool] = {}
        # The best tree and its rank, by problem and whether its answer is right.
        self._found: dict[tuple[str, bool], tuple[tuple[bool, bool, int, int], tuple[Row, Plan, int]]] = {}

    def look(self, row: Row, plan: Plan, seed: int) -> None:
        """Consider one finished search; seeds come one after another."""
        if row.name == "single":
            self._single.setdefault(plan.problem_id, bool(plan.correct))
        if plan.tree is None or plan.error is not None or not row.name.startswith("mcts"):
            return
        mixed = len({candidate.correct for candidate in plan.candidates}) > 1
        learned = row.critic is not None and not row.critic.free and not row.critic.terminal_only
        rank, key = (mixed, learned, len(plan.tree)), (plan.problem_id, bool(plan.correct))
        known = self._found.get(key)
        # Ties are broken by the first row and the first seed.
        place = -self._places[row.label]
        if known is None or rank > known[0][:3] or (known[1][2] == seed and (*rank, place) > known[0]):
            self._found[key] = ((*rank, place), (row, plan, seed))

    def best(self) -> tuple[Row, Plan, int] | None:
        """Return the row, plan and seed of the tree to show; None if there is none."""

        def score(key: tuple[str, bool]) -> tuple[bool, bool, bool, int, str]:
            problem, right = key
            mixed, learned, size, _ = self._found[key][0]
            return right and not self._single.get(problem, True), mixed, learned, size, problem

        return self._found[max(self._found, key=score)][1] if self._found else None


def _next(out: Path, trained: bool) -> None:
    from rich.text import Text

    lines = [
        f"Open {out / 'tree.html'} in a browser to explore a search tree; the plot is {out / 'accuracy-tokens.png'}.",
        "Next: mas-gym solve --task arithmetic --tree tree.html, or mas-gym eval --help",
    ]
    if trained:
        lines.insert(1, f"Training curves of both critics: tensorboard --logdir {out}")
    stdout().print(Text("\n".join(lines)))
