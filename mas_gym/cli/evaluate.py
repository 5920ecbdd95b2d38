"""``mas-gym eval``: several planners and critics on the problems of one task, to a table with intervals."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout, version
from mas_gym.cli.progress import RunProgress
from mas_gym.errors import ConfigError, MASGymError
from mas_gym.render import one_line
from mas_gym.report.outcomes import Outcome, summarise
from mas_gym.service import telemetry

if TYPE_CHECKING:
    from mas_gym.graph import MAS
    from mas_gym.policies import AsyncPolicy, Policy
    from mas_gym.policies.registry import PolicySpec
    from mas_gym.tasks.base import Task
    from search import Budget, Critic, Plan, Planner
    from search.engine.fleet import Fleet
    from search.engine.progress import Progress


@dataclass(frozen=True)
class Arm:
    """One row to measure: a planner with the critic that guides it, if it takes one."""

    name: str
    planner: Planner
    critic: Critic | None = None
    critic_name: str = ""
    critic_spec: str = ""

    @property
    def label(self) -> str:
        """What tables and progress call it."""
        return f"{self.name} + {self.critic_name}" if self.critic is not None else self.name


class Files(NamedTuple):
    """Where to write what the table says, beside the terminal."""

    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None


class Remote(NamedTuple):
    """A fleet, and what each of its actors loads."""

    fleet: Fleet
    make_policy: Callable[[], Policy | AsyncPolicy]


class Limits(NamedTuple):
    """What each search and each run may spend; None is no limit."""

    search: Budget | None = None
    run: Budget | None = None

    @classmethod
    def read(cls, search: Sequence[str] | None, run: Sequence[str] | None) -> Limits:
        """Read what ``--budget`` and ``--run-budget`` say."""
        return cls(opt.read_budget(search, "--budget"), opt.read_budget(run, "--run-budget"))


@dataclass(frozen=True)
class Bench:
    """What every arm has in common; ``policy`` is None where a fleet's actors load it."""

    task: Task
    mas: MAS
    policy: Policy | AsyncPolicy | None
    seeds: Sequence[int]
    concurrency: int = 64
    store: Path | None = None
    remote: Remote | None = None
    limits: Limits = field(default_factory=Limits)


def evaluate(
    task: opt.TaskName = "arithmetic",
    data: opt.Data = None,
    split: opt.Split = "test",
    number: opt.Number = None,
    mas: opt.MASName = "rpsv",
    policy: opt.PolicyName = None,
    critic: opt.CriticNames = None,
    planner: opt.PlannerNames = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Run seeds, with commas.")] = "42",
    concurrency: opt.Concurrency = 64,
    store: opt.Store = None,
    budget: opt.SearchBudget = None,
    run_budget: opt.RunBudget = None,
    cache: opt.Cache = None,
    ray: opt.RayAddress = None,
    actors: opt.Actors = None,
    gpus_per_actor: opt.GPUs = None,
    log_json: opt.LogJSON = None,
    metrics: opt.Metrics = None,
    grading: opt.Grading = "strict",
    option: opt.TaskOptions = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write rows, intervals and differences.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the rows.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw accuracy against tokens (png, svg, pdf).")] = None,
) -> None:
    """Measure planners and critics on a task: Hit@1, Hit@k, 95% intervals, TOK, AC and RC.

    A planner that needs a critic runs once with each; the others run once. Ctrl-C prints what is finished.
    """
    import mas_gym

    files = Files(json, csv, plot)
    for path in (*files, log_json):
        opt.check_folder(path)
    opt.check_plot(plot)
    numbers = opt.read_seeds(seeds)
    limits = Limits.read(budget, run_budget)
    arms = arms_of(planner or ["single"], critic or [opt.LIKELIHOOD])
    if critic and not any(arm.critic for arm in arms):
        raise ConfigError("--critic: none of the planners takes a critic; add one that does, as --planner mcts:10,3")
    problems = opt.read_task(task, split, data, number, grading, option)
    system = mas_gym.load_mas(mas)
    spec = opt.chosen_policy(policy, system)
    fleet = opt.read_fleet(ray, actors, gpus_per_actor)
    local, remote = engines(spec, cache, fleet)
    bench = Bench(problems, system, local, numbers, concurrency, store, remote, limits)
    title = f"{task} {split}, {system.name}, policy {opt.policy_label(spec)}"
    with telemetry.json_lines(log_json), telemetry.metrics(metrics) as watch:
        outcomes, stop = measure(arms, bench, watch=watch)
    show(outcomes, title, files, _meta(bench, task, opt.policy_label(spec)))
    opt.note_costs(local)
    if stop is not None:
        goes_on = f"the same command goes on from {store}" if store else "with --store runs.db it would go on from here"
        end_early(stop, f"the table has what was finished; {goes_on}")


def engines(
    spec: PolicySpec, cache: Path | None, fleet: Fleet | None
) -> tuple[Policy | AsyncPolicy | None, Remote | None]:
    """Load the policy here, or say how a fleet's actors load it."""
    if fleet is None:
        return opt.read_policy(spec, cache), None
    return None, Remote(fleet, partial(opt.read_policy, spec, None if cache is None else cache.absolute()))


def arms_of(planners: Sequence[str], critics: Sequence[str]) -> list[Arm]:
    """Pair planners with the critics that they take; pairs that cannot work are left out with a remark.

    Raises:
        ConfigError: No planner is left.
    """
    from search.protocol import bind_planner

    loaded = [opt.read_planner(spec) for spec in dict.fromkeys(planners)]
    guided = any(opt.takes_critic(planner) for _, planner in loaded)
    wanted = named(critics) if guided else {}
    arms: dict[str, Arm] = {}
    refusals: list[str] = []
    for name, planner in loaded:
        pairs = wanted.items() if opt.takes_critic(planner) else [("", ("", None))]
        for critic_name, (spec, critic) in pairs:
            arm = Arm(name, planner, critic, critic_name, spec)
            try:
                bind_planner(planner, critic, False)
            except ConfigError as error:
                refusals.append(f"{arm.label} left out: {error}")
            else:
                arms.setdefault(arm.label, arm)
    if not arms:
        raise ConfigError("; ".join(refusals))
    for refusal in refusals:
        note(refusal, "yellow")
    return list(arms.values())


def named(critics: Sequence[str]) -> dict[str, tuple[str, Critic]]:
    """Load critics; return each spec and critic by what tables call it: its kind, or its spec where two are of one."""
    loaded = {spec: opt.read_critic(spec) for spec in critics}
    common = Counter(critic.name for critic in loaded.values())
    return {spec if common[critic.name] > 1 else critic.name: (spec, critic) for spec, critic in loaded.items()}


def measure(
    arms: Sequence[Arm],
    bench: Bench,
    look: Callable[[Arm, Plan], None] = lambda arm, plan: None,
    watch: telemetry.Watch = lambda run, seed, progress: None,
) -> tuple[list[Outcome], BaseException | None]:
    """Run every arm with every seed, showing progress.

    Args:
        arms: What to measure.
        bench: What they have in common.
        look: Sees every plan.
        watch: Sees every snapshot.

    Returns:
        The outcomes of the searches that ended, and what ended the measurement early: Ctrl-C or an error that
        concerns all searches, such as an engine that is gone; None if it is complete.
    """
    outcomes: list[Outcome] = []
    stopped: dict[str, str] = {}
    with RunProgress([arm.label for arm in arms], len(bench.task) * len(bench.seeds)) as progress:
        for line, arm in enumerate(arms):
            for seed in bench.seeds:
                found: list[Outcome] = []

                def take(plan: Plan, arm: Arm = arm, seed: int = seed, found: list[Outcome] = found) -> None:
                    found.append(outcome_of(plan, arm, seed))
                    look(arm, plan)

                def listen(now: Progress, line: int = line, arm: Arm = arm, seed: int = seed) -> None:
                    progress.update(line, seed, now)
                    watch(arm.label, seed, now)
                    if now.stopped is not None:
                        stopped[f"{arm.label}, seed {seed}"] = now.stopped

                stop = drain(start(arm, bench, seed, listen), take)
                # Sums over searches are the same to the last bit, whichever ended first.
                outcomes += sorted(found, key=lambda outcome: outcome.problem_id)
                if stop is not None:
                    return outcomes, stop
    note_stopped(stopped)
    return outcomes, None


def note_stopped(stopped: Mapping[str, str]) -> None:
    """Say which runs met their budget."""
    for label, reason in stopped.items():
        note(f"{one_line(label)}: {one_line(reason)}; only what ended before it counts", "yellow")


def drain(run: Iterator[Plan], take: Callable[[Plan], None]) -> BaseException | None:
    """Take every plan of a run; after Ctrl-C or an error those that were finished. Return what ended it early."""
    stop: BaseException | None = None
    while True:
        try:
            for plan in run:
                take(plan)
            return stop
        except (KeyboardInterrupt, MASGymError) as error:
            # What had ended by then is still handed out.
            stop = stop or error


def end_early(stop: BaseException, remark: str) -> NoReturn:
    """End a command whose run was cut short.

    Args:
        stop: What `drain` returned.
        remark: What is kept, and how to go on.
    """
    if isinstance(stop, KeyboardInterrupt):
        note(f"Interrupted: {remark}.", "yellow")
        raise typer.Exit(130)
    note(f"Stopped by an error: {remark}.", "yellow")
    raise stop


def start(
    arm: Arm, bench: Bench, seed: int, listen: Callable[[Progress], None] | bool = False, training: bool = False
) -> Iterator[Plan]:
    """Start searching every problem with one arm and one seed, in this process or on a fleet."""
    import search

    common: dict[str, Any] = {
        "mas": bench.mas,
        "seed": seed,
        "concurrency": bench.concurrency,
        "training": training,
        "store": None if bench.store is None else str(bench.store),
        "budget": bench.limits.search,
        "run_budget": bench.limits.run,
        "progress": listen,
    }
    if bench.remote is None:
        return search.run(arm.planner, bench.task, policy=bench.policy, critic=arm.critic, **common)
    from rewardmodels import load_critic
    from search.engine.fleet import run_ray

    make_critic = None if arm.critic is None else partial(load_critic, arm.critic_spec)
    fleet, make_policy = bench.remote
    return run_ray(arm.planner, bench.task, make_policy=make_policy, make_critic=make_critic, fleet=fleet, **common)


def outcome_of(plan: Plan, arm: Arm, seed: int) -> Outcome:
    """Reduce a plan to what the table needs."""
    ranks = [rank for rank, candidate in enumerate(plan.candidates, 1) if candidate.correct]
    return Outcome(
        planner=arm.name,
        critic=arm.critic_name,
        seed=seed,
        problem_id=plan.problem_id,
        correct=bool(plan.correct) and plan.error is None,
        hit_rank=ranks[0] if ranks and plan.error is None else None,
        candidates=len(plan.candidates),
        tokens=plan.usage.generated_tokens,
        agent_calls=plan.usage.agent_calls,
        reward_calls=plan.usage.reward_calls,
        error=plan.error,
        moments=tuple((moment.generated_tokens, bool(moment.correct)) for moment in plan.anytime),
    )


def show(outcomes: Sequence[Outcome], title: str, files: Files, meta: Mapping[str, Any]) -> None:
    """Print the table and write the files that were asked for."""
    from mas_gym.report import report, save_tradeoff, to_csv, to_json

    rows = summarise(outcomes)
    console = stdout()
    console.print(report(rows, title, console.width))
    if not rows:
        return
    if files.json is not None:
        files.json.write_text(to_json(rows, meta), encoding="utf-8")
    if files.csv is not None:
        files.csv.write_text(to_csv(rows), encoding="utf-8")
    if files.plot is not None and any(row.tokens.mean > 0 for row in rows):
        save_tradeoff(rows, files.plot, title)
    for path in filter(None, files):
        if path.exists():
            note(f"wrote {path}")


def _meta(bench: Bench, task: str, policy: str) -> dict[str, Any]:
    return {
        "task": task,
        "split": bench.task.split,
        "grading": bench.task.grading,
        "problems": len(bench.task),
        "mas": bench.mas.name,
        "policy": policy,
        "seeds": list(bench.seeds),
        "mas_gym": version(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
