"""Options shared by several commands, and the functions that parse and check their values."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from mas_gym.cli.console import note
from mas_gym.errors import ConfigError
from mas_gym.internal.suggestions import choice

if TYPE_CHECKING:
    from mas_gym.policies import AsyncPolicy, Policy
    from mas_gym.policies.registry import PolicySpec
    from mas_gym.programs import Program
    from mas_gym.systems.graph import MAS
    from mas_gym.tasks.base import Task
    from search import Budget, Critic, Planner, Prices
    from search.compare.comparison_runs import Remote, Row, Workers
    from search.service.telemetry import Watch

LIKELIHOOD = "policy-likelihood"
PLANNERS = "adaptive, bon, cascade, dvts, halving, mcts, puct, rebase, sbs, sc, siblings, single"
CRITICS = (
    "agreement, calibrated, constant, ensemble, features, folder, http, https, hub, judge, policy-likelihood, prm, "
    "random, recorded, rm, tiny-masprm, tiny-orm, uncertainty, vllm, vote"
)
"""The registered names, for help texts: querying the registries would load the search packages."""

_MODELS = (
    "mas_gym.policies.local.transformers",
    "rewardmodels.model.prefix_cache",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.tokenization_utils_tokenizers",
)
"""Packages that local policies and critics import."""
_SHARED_POLICY: dict[str, Any] = {"max_batch": 64, "prefix_megabytes": 32}
_SHARED_CRITIC: dict[str, Any] = {"memory": 32}
"""Options of small models in each of several processes: half of the values for a single process."""
_SHIPPED = ("tiny", "tiny-masprm", "tiny-orm")
# Models up to this size use one core each (see mas_gym.policies.local.forward), at 2 or more bytes per parameter.
_SMALL_BYTES = 100_000_000
# A process takes some seconds to start.
_SEARCHES_PER_WORKER = 50

TaskName = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="Task: arithmetic, ordering, game24, gsm8k, math, mmlu, logiqa or gpqa; your CSV, JSONL or Parquet file; "
        "or OWNER/NAME on the hub.",
    ),
]
Data = Annotated[Path | None, typer.Option("--data", help="Read the task from a file or folder instead of the hub.")]
Split = Annotated[str, typer.Option("--split", help="train, dev or test.")]
Number = Annotated[
    int | None,
    typer.Option(
        "-n", "--number", min=1, help="Use N problems: the first N, or a fixed sample of a benchmark's test split."
    ),
]
Grading = Annotated[str, typer.Option("--grading", help="Grading of answers: strict, or paper (as in the paper).")]
TaskOptions = Annotated[
    list[str] | None, typer.Option("-o", "--option", help="Task option, such as difficulty=3. Repeatable.")
]
ColumnNames = Annotated[
    str | None,
    typer.Option(
        "--columns",
        help="Columns of your file: question=prompt,answer=gold, and id=, split=, kind=, choices=A+B+C+D.",
    ),
]
AnswerKind = Annotated[
    str | None,
    typer.Option(
        "--kind",
        help="Kind of answer of your questions: number, expression, choice, text, regex, code or judge. By default "
        "inferred from a file's answers; number for a single question.",
    ),
]
GraderName = Annotated[
    str | None,
    typer.Option("--grader", help="Your grader, my.py:grade: a function (problem, text) that returns True or False."),
]
JudgeName = Annotated[
    str | None, typer.Option("--judge", help="Policy that grades answers of kind judge; its tokens are not in TOK.")
]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Run code in messages (kind code) on this machine, isolated by bubblewrap."),
]
SandboxName = Annotated[
    str,
    typer.Option(
        "--sandbox",
        metavar="bubblewrap|none",
        help="Isolation of that code: bubblewrap, or none to run it with your permissions.",
    ),
]
MASName = Annotated[
    str | None,
    typer.Option("--mas", help="Bundled MAS, such as rpsv or debate, or a YAML file. By default the task's MAS."),
]
ProgramSpec = Annotated[
    str | None,
    typer.Option("--program", help="Your agents instead of a MAS: my_agents.py:solve, a command, or a service's URL."),
]
ProgramFiles = Annotated[
    list[str] | None,
    typer.Option("--program-file", help="File that a command or service depends on; needed for --store. Repeatable."),
]
ProgramTemperature = Annotated[
    float | None,
    typer.Option("--program-temperature", help="Temperature of all calls; overrides the program's temperature."),
]
ProgramAgents = Annotated[
    list[str] | None,
    typer.Option(
        "--program-agent",
        help="Name of an agent of the program. Repeatable: name all of them if the dry run does not reach each one.",
    ),
]
Isolate = Annotated[
    bool,
    typer.Option("--isolate", help="Run a program's function in a new process each time, so that runs share no state."),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="Policy: tiny, transformers:PATH, vllm:PATH, openai:MODEL@URL, recorded:FILE, my.py:make, or several "
        "models as arms:NAME=POLICY,NAME=POLICY. The default is the MAS's policies, else tiny.",
    ),
]
Cache = Annotated[Path | None, typer.Option("--cache", help="SQLite file that caches the policy's replies.")]
TokenTraces = Annotated[
    bool,
    typer.Option(
        "--token-traces",
        help="Record token ids and log-probabilities of every message in STORE.traces, for train agents --method grpo.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray", metavar="local|ADDRESS", help="Run searches on Ray actors, on this machine or on a cluster."),
]
Actors = Annotated[
    int | None,
    typer.Option("--actors", min=1, help="With --ray: number of actors, each with policy and critics; by default 2."),
]
GPUs = Annotated[
    float | None, typer.Option("--gpus-per-actor", min=0, help="With --ray: GPUs per actor; may be a fraction.")
]
WorkerCount = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="Worker processes; each runs one planner, critic and seed at a time. The default is one per core for "
        "small local models, else 1.",
    ),
]
CriticNames = Annotated[
    list[str] | None,
    typer.Option("--critic", help=f"Critic, such as tiny-masprm: {CRITICS}, a trained folder, my.py:Mine. Repeatable."),
]
CriticName = Annotated[
    str | None,
    typer.Option(
        "--critic",
        help=f"Critic, such as tiny-masprm: {CRITICS}, a trained folder, my.py:Mine. By default {LIKELIHOOD}.",
    ),
]
PlannerNames = Annotated[
    list[str] | None,
    typer.Option(
        "--planner",
        help=f"Planner, such as mcts:10,3 or sc:20,stop=0.9: {PLANNERS}, my.py:Mine. Repeatable.",
    ),
]
PlannerName = Annotated[
    str, typer.Option("--planner", help=f"Planner, such as sc:20,stop=0.9: {PLANNERS}, my.py:Mine.")
]
StorePath = Annotated[Path, typer.Argument(metavar="RUNS.DB", help="Store written with --store.")]
RunNames = Annotated[
    list[str] | None, typer.Option("--run", help="Only this run: its name or the beginning of its digest. Repeatable.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the run; the same seed gives the same result.")]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1, help="Maximum number of concurrent searches.")]
Store = Annotated[
    Path | None, typer.Option("--store", help="SQLite file that stores every search; repeat the command to resume.")
]
SearchBudget = Annotated[
    list[str] | None,
    typer.Option("--budget", help="Limit per search: calls=N, tokens=N, seconds=S or usd=X. Repeatable."),
]
RunBudget = Annotated[
    list[str] | None,
    typer.Option("--run-budget", help="Limit per run (one planner, critic and seed), such as usd=20. Repeatable."),
]
Allocate = Annotated[
    bool,
    typer.Option(
        "--allocate",
        help="Divide --run-budget among all problems by expected gain; planners other than sc and cascade need "
        "stop=FILE.json (see mas-gym calibrate). Problems share rounds, so an interrupted run is repeated as a whole; "
        "use --cache.",
    ),
]
PricesFile = Annotated[
    Path | None,
    typer.Option(
        "--prices",
        help="YAML file of prices in USD, with lines such as tiny: {prompt: 0.15, cached: 0.08, generated: 0.6} per "
        "million tokens, or tiny-masprm: {forward: 0.00001}; the key second prices time. Adds the column USD.",
    ),
]
LogJSON = Annotated[Path | None, typer.Option("--log-json", help="Append events to a file, one JSON object per line.")]
Metrics = Annotated[
    int | None,
    typer.Option("--metrics", min=1, max=65535, metavar="PORT", help="Serve Prometheus metrics on this loopback port."),
]


@dataclass(frozen=True)
class TaskSource:
    """A command's task options; `with_task` adds these and other option groups to a command."""

    task: TaskName = None
    data: Data = None
    split: Split = "test"
    columns: ColumnNames = None
    kind: AnswerKind = None
    number: Number = None
    grader: GraderName = None
    judge: JudgeName = None
    allow_code: AllowCode = False
    sandbox: SandboxName = "bubblewrap"
    grading: Grading = "strict"
    option: TaskOptions = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `mas_gym.load_task` that are set, apart from split and limit."""
        own = {"columns": self.columns, "kind": self.kind, "grader": self.grader, "judge": self.judge}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        if self.data is not None:
            given["data"] = str(self.data)
        if self.allow_code:
            given["allow_code"] = True
        if self.sandbox != "bubblewrap":
            given["sandbox"] = self.sandbox
        return {"grading": self.grading, **given, **read_pairs(self.option)}

    @property
    def label(self) -> str:
        """The task and the split, for titles."""
        return f"{self.task} {self.split}"

    def load(self) -> Task:
        """Load the task, limited to ``number`` problems if it is given."""
        import mas_gym

        assert self.task is not None
        task: Task = mas_gym.load_task(self.task, split=self.split, limit=self.number, **self.options)
        if self.number is not None and self.number > len(task):
            what = f"the problems of {self.task}/{self.split}"
            raise ConfigError(f"expected -n of at most {len(task):,}, {what}, got {self.number:,}")
        return task


@dataclass(frozen=True)
class AgentSource:
    """A command's agent options: a MAS or a program, and the policy that generates its messages."""

    mas: MASName = None
    program: ProgramSpec = None
    program_file: ProgramFiles = None
    program_temperature: ProgramTemperature = None
    program_agent: ProgramAgents = None
    isolate: Isolate = False
    policy: PolicyName = None
    cache: Cache = None

    def load(self, task: Task | None, kind: str | None = None) -> tuple[MAS, Program | None]:
        """Load a program and the MAS that represents it, or only a MAS without a program; ``mas`` names the MAS.

        Without a program, the default MAS is the task's; without a task, it is the one for the kind of answer.
        """
        from mas_gym import load_mas
        from mas_gym.programs import load_program
        from mas_gym.tasks.catalogue import default_mas, mas_of_kind

        own = {
            "files": ("--program-file", self.program_file or None),
            "temperature": ("--program-temperature", self.program_temperature),
            "agents": ("--program-agent", self.program_agent or None),
            "isolate": ("--isolate", self.isolate or None),
        }
        given = {name: value for name, (_, value) in own.items() if value is not None}
        if self.program is not None:
            loaded = load_program(self.program, **({"mas": self.mas} if self.mas else {}), **given)
            return loaded.mas, loaded
        for name in given:
            raise ConfigError(f"{own[name][0]}: expected --program as well, got none")
        if self.mas is not None:
            return load_mas(self.mas), None
        return load_mas(mas_of_kind(kind or "number") if task is None else default_mas(task)), None

    def spec(self, system: MAS) -> PolicySpec:
        """Return the policy of ``--policy``, else the MAS's policies, else the bundled model."""
        return self.policy or dict(system.policies) or "tiny"

    def read_policy(self, system: MAS) -> Policy | AsyncPolicy:
        """Load the policy for a MAS."""
        return read_policy(self.spec(system), self.cache)


@dataclass(frozen=True)
class RunOptions:
    """A command's run options: concurrency, processes and limits of many searches."""

    concurrency: Concurrency = 64
    budget: SearchBudget = None
    run_budget: RunBudget = None
    prices: PricesFile = None
    token_traces: TokenTraces = False
    ray: RayAddress = None
    actors: Actors = None
    gpus_per_actor: GPUs = None
    log_json: LogJSON = None
    metrics: Metrics = None

    def limits(self, prices: Prices | None) -> tuple[Budget, Budget]:
        """Return the budget of each search and of the run."""
        return read_budget(self.budget, "--budget", prices), read_budget(self.run_budget, "--run-budget", prices)

    def engines(
        self, spec: PolicySpec, cache: Path | None, store: Path | None
    ) -> tuple[Policy | AsyncPolicy | None, Remote | None]:
        """Load the policy in this process, or describe how a fleet's actors load it."""
        from mas_gym.policies.token_traces import traces_folder
        from search.compare.comparison_runs import Remote
        from search.engine.ray_actors import Fleet

        if self.ray is None and (self.actors is not None or self.gpus_per_actor is not None):
            raise ConfigError("--actors and --gpus-per-actor need a Ray fleet: add --ray local, or --ray ADDRESS")
        traces = None
        if self.token_traces:
            if store is None:
                raise ConfigError("--token-traces: expected --store, because traces are written next to the store")
            if cache is not None:
                raise ConfigError("--token-traces: expected no --cache, because cached replies contain no tokens")
            traces = traces_folder(store)
        if self.ray is None:
            return read_policy(spec, cache, traces), None
        fleet = Fleet(
            actors=2 if self.actors is None else self.actors, gpus=self.gpus_per_actor or 0.0, address=self.ray
        )
        shared = [None if path is None else path.absolute() for path in (cache, traces)]
        return None, Remote(fleet, partial(read_policy, spec, *shared), critic_maker)

    @contextmanager
    def watched(self) -> Iterator[Watch]:
        """Write events and metrics; yield a function to call with every progress update."""
        from search.service import telemetry

        with telemetry.json_lines(self.log_json), telemetry.metrics(self.metrics) as watch:
            yield watch


_GROUPS: tuple[type, ...] = (TaskSource, AgentSource, RunOptions)


def with_task(**defaults: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add option groups to a command, one for each parameter with a group, such as `TaskSource`, as its type.

    Args:
        defaults: Changed defaults by option name; False removes an option.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[type, list[str]]] = {}
        for part in signature.parameters.values():
            if part.annotation not in _GROUPS:
                parameters.append(part.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            hints = get_type_hints(part.annotation, include_extras=True)
            members = {field.name: field.default for field in fields(part.annotation)}
            names = [name for name in members if defaults.get(name) is not False]
            groups[part.name] = part.annotation, names
            parameters += [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=defaults.get(name, members[name]),
                    annotation=hints[name],
                )
                for name in names
            ]

        @functools.wraps(command)
        def run(**given: object) -> None:
            made = {
                name: group(**{member: given.pop(member) for member in members})
                for name, (group, members) in groups.items()
            }
            command(**made, **given)

        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {part.name: part.annotation for part in parameters}
        return run

    return decorate


def warn_of_misuse(policy: PolicySpec, task: str | None, mas: MAS, question: str = "") -> None:
    """Print one warning if a policy was made for a different purpose."""
    from mas_gym.policies.registry import purpose_of

    purpose = purpose_of(policy)
    misuse = purpose.misuse(task, mas.name, question) if purpose is not None and not mas.program else None
    if misuse is not None:
        note(f"Policy {policy_label(policy)} was {misuse}.", "yellow")


def note_judge(task: Task) -> None:
    """Print a judge's cost, which is not included in TOK."""
    from mas_gym.tasks.grading.graders import KindGrader, OwnGrader
    from mas_gym.tasks.grading.judge import Judge

    judge = task.grader.judge if isinstance(task.grader, KindGrader | OwnGrader) else None
    if isinstance(judge, Judge):
        note(f"judge {judge.policy.name}: {judge.spent} (not in TOK)")


def check_folder(path: Path | None) -> None:
    """Check that a file's folder exists before any work starts."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{path}: its folder does not exist; create it with: mkdir -p {path.parent}")


def check_plot(path: Path | None) -> None:
    """Check that a plot's format is supported before the run starts."""
    if path is None:
        return
    from search.results.plots import figure_class

    kinds = figure_class()().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        names = ", ".join(sorted(kinds))
        raise ConfigError(f"--plot {path}: expected a name that ends in one of {names}; try {path.stem}.png")


def check_kind(kind: str | None) -> Any:
    """Check a kind of answer and return it; ``"number"`` by default."""
    from mas_gym.tasks.base import KINDS

    return choice("--kind", "number" if kind is None else kind, KINDS)


def read_pairs(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Read ``key=value`` options; values are YAML scalars, so ``3`` is a number and ``true`` a boolean."""
    import yaml

    read: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"expected an option as key=value, such as difficulty=3, got {pair!r}")
        try:
            read[key.replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"option {pair!r}: {value!r} is not a plain YAML value; quote it") from error
    return read


def read_budget(pairs: Sequence[str] | None, flag: str, prices: Prices | None) -> Budget:
    """Read limits such as ``calls=200``; a limit in USD requires prices.

    Raises:
        ConfigError: A limit is unknown, not a positive number, or in USD without prices.
    """
    from search.budget import LIMITS, Budget

    for pair in pairs or ():
        if "=" not in pair:
            number = pair.strip() if pair.strip().isdecimal() else "200"
            raise ConfigError(
                f"{flag}: expected a limit as calls=N, tokens=N, seconds=S or usd=X, got {pair!r}; "
                f"write {flag} calls={number}"
            )
    limits = read_pairs(pairs)
    for name in limits:
        if name not in LIMITS:
            raise ConfigError(f"{flag}: expected {', '.join(LIMITS)}, as in {flag} seconds=60, got {name!r}")
    budget = Budget(**limits)
    return budget if prices is not None else budget.priced(None)


def read_prices(path: Path | None) -> Prices | None:
    """Read a file of prices. Raises `ConfigError`."""
    from search.prices import as_prices

    return None if path is None else as_prices(path)


def read_seeds(text: str) -> list[int]:
    """Read ``"14,24,42"``."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"expected seeds as whole numbers with commas, such as 14,24,42, got {text!r}") from error
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"expected different seeds, got {text!r}: repeating a seed adds no information")
    return seeds


def policy_label(spec: PolicySpec) -> str:
    """Return a policy's name for titles."""
    return spec if isinstance(spec, str) else ", ".join(f"{agent}={policy}" for agent, policy in spec.items())


def read_policy(
    spec: PolicySpec, cache: Path | None = None, traces: Path | None = None, **options: object
) -> Policy | AsyncPolicy:
    """Load a policy; ``cache`` adds a response cache, and ``traces`` records its token traces."""
    from mas_gym.policies import load_policy
    from mas_gym.policies.token_traces import traced

    check_folder(cache)
    policy = load_policy(spec, **options) if cache is None else load_policy(spec, cache=str(cache), **options)
    return policy if traces is None else traced(policy, traces)


def note_order(searches: int) -> None:
    """Print the number of searches in which the order of a program's concurrent calls depended on their speed."""
    if searches:
        note(
            f"The order of concurrent calls varied in {searches:,} searches, so another run may give other results; "
            "set Program(..., settle=1.0)",
            "yellow",
        )


def note_costs(policy: Policy | AsyncPolicy | None) -> None:
    """Print each engine's calls, tokens, faults and cost."""
    for name, meter in (policy.meters if policy is not None else {}).items():
        note(f"{name}: {meter}")


def read_workers(
    wanted: int | None,
    policy: PolicySpec,
    rows: Sequence[Row],
    problems: int,
    seeds: int = 1,
    cache: Path | None = None,
) -> Workers | None:
    """Return the worker processes that share the runs; None to run all of them in this process.

    Args:
        wanted: The user's choice. By default, one process per core if policy and critics are small local models,
            limited by the number of runs and the start-up cost; otherwise one.
        policy: The policy that each process loads.
        rows: The rows.
        problems: Searches per run.
        seeds: Runs per row.
        cache: Response cache that the processes share.
    """
    from search.compare.comparison_runs import Workers

    runs = len(rows) * seeds
    if wanted is None:
        parts = [policy, *(row.critic_spec for row in rows if row.critic is not None and not row.critic.free)]
        small = all(map(_is_small, parts)) and all(_is_shipped(row.planner) for row in rows)
        wanted = min(_cores(), runs * problems // _SEARCHES_PER_WORKER) if small else 1
    count = min(wanted, runs)
    if count < 2:
        return None
    local = not isinstance(policy, str) or policy.startswith(("tiny", "transformers:"))
    less = _SHARED_POLICY if _is_small(policy) and "#" not in policy else {}
    make_policy = partial(read_policy, policy, cache, **less)
    return Workers(count, make_policy, partial(critic_maker, shared=True), _MODELS if local else ())


def critic_maker(spec: str, shared: bool = False) -> Callable[[], Critic]:
    """Return a picklable function that loads a critic; ``shared`` reduces the memory of small critics."""
    return partial(read_critic, spec, **(_SHARED_CRITIC if shared and _is_small(spec) and "#" not in spec else {}))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _is_shipped(planner: Planner) -> bool:
    """Whether another process can import the planner."""
    from mas_gym.internal.adapter import Adapter
    from search.planners import Cascade
    from search.planners.wrapper import PlannerWrapper

    if isinstance(planner, PlannerWrapper):
        return _is_shipped(planner.planner)
    if isinstance(planner, Cascade):
        return all(map(_is_shipped, planner.stages))
    return not isinstance(planner, Adapter) and type(planner).__module__.startswith("search.")


def _is_small(spec: PolicySpec) -> bool:
    """Whether a policy or critic is a shipped model, or a model of at most this size in a folder."""
    if not isinstance(spec, str):
        return False
    name = spec.partition("#")[0]
    if name in _SHIPPED:
        return True
    weights = Path(name.removeprefix("transformers:")).glob("*.safetensors")
    sizes = [file.stat().st_size for file in weights]
    return bool(sizes) and sum(sizes) <= _SMALL_BYTES


def read_critic(spec: str, **options: Any) -> Critic:
    """Load a critic."""
    from rewardmodels import load_critic

    critic: Critic = load_critic(spec, **options)
    return critic


def load_weights(rows: Iterable[Row]) -> None:
    """Load the weights of lazily loaded critics, so that damaged files are reported at once."""
    from rewardmodels import LearnedCritic

    for row in rows:
        if isinstance(row.critic, LearnedCritic):
            row.critic.load()


def read_planner(spec: str) -> tuple[str, Planner]:
    """Load a planner; return its name in tables, and the planner."""
    from search import load_planner, planner_spec
    from search.protocol import planner_name

    planner = load_planner(spec)
    label = planner_spec(planner)
    return (spec if label == planner_name(planner) else label), planner
