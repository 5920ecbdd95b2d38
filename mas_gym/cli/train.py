"""``mas-gym rollouts`` and ``train``: trees with true rewards, critics trained on them; ``mas-gym demo``: all at once.

The demo is a small version of the paper's comparison with the embedded agents, on a laptop and offline.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mas_gym import service
from mas_gym.cli import options as opt
from mas_gym.cli.console import RunProgress, examples, note, stdout
from mas_gym.cli.evaluate import Files, end_early, engines, measure, show
from mas_gym.cli.solve import write_page
from mas_gym.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from rewardmodels import LabelledTree, Trained
    from search import Plan
    from search.compare import Arm, Bench, Outcome


app = typer.Typer(
    no_args_is_help=True,
    help="Train a reward model on search trees.",
    rich_markup_mode="rich",
    epilog=examples("mas-gym train masprm --store trees.db", "mas-gym train orm --store trees.db"),
)

Stores = Annotated[list[Path], typer.Option("--store", help="Store with training trees. Repeatable, to mix tasks.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the critic; repeat the command to resume.")]
Base = Annotated[str, typer.Option("--base", help="Base model: tiny, or the folder or hub id of a decoder.")]
ViewOption = Annotated[str, typer.Option("--view", help="Input of the critic: full (transcript) or local (view).")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; by default a GPU if available.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Hyperparameter, such as learning_rate=1e-5. Repeatable.")
]


@app.command(
    "masprm",
    epilog=examples(
        "mas-gym train masprm --store trees.db",
        "mas-gym train masprm --store trees.db --set learning_rate=1e-5",
    ),
)
def masprm(
    store: Stores,
    out: Out = Path("models/masprm"),
    base: Base = "tiny",
    head: Annotated[str, typer.Option("--head", help="bt (pairs) or mse (values).")] = "bt",
    view: ViewOption = "full",
    device: Device = None,
    setting: Sets = None,
) -> None:
    """Train MASPRM, the process reward model, which scores every state."""
    _train("masprm", head, store, out, base, view, device, setting)


@app.command(
    "orm",
    epilog=examples(
        "mas-gym train orm --store trees.db", "mas-gym train orm --store trees.db --head mse --out models/orm-mse"
    ),
)
def orm(
    store: Stores,
    out: Out = Path("models/orm"),
    base: Base = "tiny",
    head: Annotated[str, typer.Option("--head", help="bce or mse.")] = "bce",
    view: ViewOption = "full",
    device: Device = None,
    setting: Sets = None,
) -> None:
    """Train the ORM, the outcome reward model, which scores finished transcripts."""
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
    from rewardmodels.training import check_head

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


class _Harvest:
    """Counts over the trees of a run."""

    def __init__(self) -> None:
        self.trees = self.failed = self.nodes = self.right = self.wrong = self.mixed = 0

    def add(self, arm: Arm, plan: Plan) -> None:
        """Count one search; a failed one has no tree to learn from."""
        if plan.error is not None or plan.tree is None:
            self.failed += 1
            return
        verdicts = [candidate.correct for candidate in plan.candidates]
        self.trees += 1
        self.nodes += len(plan.tree)
        self.right += verdicts.count(True)
        self.wrong += verdicts.count(False)
        self.mixed += len(set(verdicts)) > 1


@opt.with_task(task="arithmetic", split="train", grading=False)
def rollouts(
    source: opt.TaskSource,
    store: Annotated[Path, typer.Option("--store", help="SQLite file for the trees; repeat the command to resume.")],
    mas: opt.MASName = None,
    program: opt.ProgramSpec = None,
    program_file: opt.ProgramFiles = None,
    policy: opt.PolicyName = None,
    planner: Annotated[str, typer.Option("--planner", help="Planner that uses the true reward.")] = "mcts:40,3",
    seed: opt.Seed = 42,
    concurrency: opt.Concurrency = 64,
    budget: opt.SearchBudget = None,
    run_budget: opt.RunBudget = None,
    cache: opt.Cache = None,
    ray: opt.RayAddress = None,
    actors: opt.Actors = None,
    gpus_per_actor: opt.GPUs = None,
    log_json: opt.LogJSON = None,
    metrics: opt.Metrics = None,
    export: Annotated[Path | None, typer.Option("--export", help="Also write every node to a Parquet file.")] = None,
) -> None:
    """Search training problems with the true reward at the leaves (paper: MCTS(40,3), c = 4.0) into a store."""
    import search
    from search.compare import Arm, Bench

    if source.split == "test":
        raise ConfigError("expected --split train or dev: trees with true rewards of the test split would leak it")
    opt.check_folder(store)
    opt.check_folder(export)
    opt.check_folder(log_json)
    name, method = opt.read_planner(planner)
    problems = source.load()
    system, code = opt.read_system(mas, program, program_file, problems)
    spec = opt.chosen_policy(policy, system)
    opt.warn_of_misuse(spec, source.task, system)
    fleet = opt.read_fleet(ray, actors, gpus_per_actor)
    local, remote = engines(spec, cache, fleet)
    limits = opt.read_budget(budget, "--budget"), opt.read_budget(run_budget, "--run-budget")
    shared: dict[str, Any] = {"program": code, "training": True}
    bench = Bench(problems, system, local, [seed], concurrency, store, remote, *limits, **shared)
    harvest = _Harvest()
    with service.json_lines(log_json), service.metrics(metrics) as watch:
        _, stop = measure([Arm(f"{name}, true reward", method)], bench, harvest.add, watch)
    _show_harvest(harvest, len(problems), store)
    opt.note_costs(local)
    opt.note_judge(problems)
    if export is not None:
        with search.open_store(store) as opened:
            note(f"wrote {opened.export(export):,} nodes to {export}")
    if stop is not None:
        end_early(stop, f"the same command goes on from {store}")


def _show_harvest(harvest: _Harvest, wanted: int, store: Path) -> None:
    from rich.text import Text

    leaves = harvest.right + harvest.wrong
    share = f", {100 * harvest.right / leaves:.1f}% of {leaves:,} leaves right" if leaves else ""
    failed = f", {harvest.failed:,} searches failed" if harvest.failed else ""
    line = (
        f"{harvest.trees:,} of {wanted:,} trees with {harvest.nodes:,} nodes in {store}{share}; "
        f"{harvest.mixed:,} trees hold right and wrong leaves{failed}."
    )
    stdout().print(Text(line))
    if not harvest.failed and harvest.trees == wanted:
        stdout().print(Text(f"Next: mas-gym train masprm --store {store} --out models/masprm", style="dim"))


POLICY, MASPRM, ORM = "tiny", "tiny-masprm", "tiny-orm"
"""The embedded agents and the critics shipped for them."""

PASSES = "bon:10"
"""Best-of-N at the tokens of MCTS(10, 3) with MASPRM: 675 and 640 per problem, see benchmarks/pages/main.md."""

FULL_SEEDS, FULL_PROBLEMS = (14, 24, 42), 500


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for table, plot and tree page.")] = Path("demo"),
    number: Annotated[int | None, typer.Option("-n", "--number", min=1, help="Problems; by default 200.")] = None,
    critic: Annotated[
        list[str] | None, typer.Option("--critic", help="Critics to compare instead of the shipped ones. Repeatable.")
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
    """Compare the paper's planners and critics on word problems with tiny agents: a table, a plot and a search tree.

    Needs no GPU, API key or network. An interrupted demo resumes when started again.
    """
    import mas_gym
    from search.compare.bench import Bench

    out.mkdir(parents=True, exist_ok=True)
    task = mas_gym.load_task("arithmetic", split="test", limit=number or (FULL_PROBLEMS if full else 200))
    seeds = FULL_SEEDS if full else (seed,)
    bench = Bench(task, mas_gym.load_mas("rpsv"), None, seeds, concurrency, out / "runs.db")
    trained = from_scratch or full
    specs = _train_critics(bench, out, number_of_trees) if trained else critic or _shipped()
    arms = _rows(specs)
    # Rows of one seed have most of their messages in common.
    samples = out / "samples.db"
    shared = opt.read_workers(workers, POLICY, arms, len(task), cache=samples)
    if shared is None:
        opt.load_weights(arms)
    bench = replace(bench, policy=opt.read_policy(POLICY, samples) if shared is None else None, workers=shared)
    note(f"{len(task)} Arithmetic problems, four tiny agents (RPSV), {len(arms)} rows; results in {out}/")
    trees_seen = _BestTree(arms)
    outcomes, stop = _measure(arms, bench, trees_seen)
    files = Files(json=out / "results.json", csv=out / "results.csv", plot=out / "accuracy-tokens.png")
    title = f"Arithmetic test, RPSV, tiny agents, seed {', '.join(map(str, seeds))}"
    try:
        show(outcomes, title, files, {"command": "demo", "seeds": list(seeds), "critics": list(specs)})
    except MissingDependencyError as error:
        note(str(error), "yellow")
    if (best := trees_seen.best()) is not None:
        arm, plan, of = best
        write_page(plan, replace(bench, seeds=[of]), arm, out / "tree.html", POLICY, graded=True)
    if stop is not None:
        end_early(stop, f"the same command goes on from {out}")
    if full:
        _tables(out, specs, len(task), number_of_trees)
    _next(out, trained)


def _measure(arms: Sequence[Arm], bench: Bench, trees_seen: _BestTree) -> tuple[list[Outcome], BaseException | None]:
    """Run the rows seed by seed, so that the tree that is kept names its own."""
    outcomes: list[Outcome] = []
    for seed in bench.seeds:
        more, stop = measure(arms, replace(bench, seeds=[seed]), partial(trees_seen.look, seed=seed))
        outcomes += more
        if stop is not None:
            return outcomes, stop
    return outcomes, None


def _rows(specs: Sequence[str]) -> list[Arm]:
    """Pair the paper's planners with the critics, and best-of-N with the outcome critics; with all if there is none."""
    from search.compare.bench import PAPER_PLANNERS, named_critics, named_planners, pair

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


def _train_critics(bench: Bench, out: Path, number: int) -> list[str]:
    """Generate rollouts and train both critics; existing results are kept."""
    import mas_gym
    from rewardmodels.training.run import ROLLOUTS, grow, teach, trees

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
        end_early(stop, f"the same command goes on from {learning.store}")
    for kind, head in (("orm", "bce"), ("masprm", "bt")):
        note(f"Training {kind} ({head}); curves in {out / kind / 'curves'}")
        teach(lambda: trees(learning), out / kind, kind, head, log=note)  # type: ignore[arg-type]
    return [str(out / "orm"), str(out / "masprm")]


def _tables(out: Path, critics: Sequence[str], problems: int, number: int) -> None:
    """Run the scripts of the paper's other tables, which only a source checkout has."""
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
    """Picks the tree worth showing: right where the single pass was wrong, with right and wrong leaves, and large.

    The choice does not depend on the order in which searches end.
    """

    def __init__(self, arms: Sequence[Arm]) -> None:
        self._places = {arm.label: place for place, arm in enumerate(arms)}
        self._single: dict[str, bool] = {}
        # The best tree and its rank, by problem and whether its answer is right.
        self._found: dict[tuple[str, bool], tuple[tuple[bool, bool, int, int], tuple[Arm, Plan, int]]] = {}

    def look(self, arm: Arm, plan: Plan, seed: int) -> None:
        """Consider one finished search; seeds come one after another."""
        if arm.name == "single":
            self._single.setdefault(plan.problem_id, bool(plan.correct))
        if plan.tree is None or plan.error is not None or not arm.name.startswith("mcts"):
            return
        mixed = len({candidate.correct for candidate in plan.candidates}) > 1
        learned = arm.critic is not None and not arm.critic.free and not arm.critic.terminal_only
        rank, key = (mixed, learned, len(plan.tree)), (plan.problem_id, bool(plan.correct))
        known = self._found.get(key)
        # The first row and the first seed settle ties.
        place = -self._places[arm.label]
        if known is None or rank > known[0][:3] or (known[1][2] == seed and (*rank, place) > known[0]):
            self._found[key] = ((*rank, place), (arm, plan, seed))

    def best(self) -> tuple[Arm, Plan, int] | None:
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
