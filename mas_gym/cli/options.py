"""Options shared by several commands, in groups."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from mas_gym.cli.option_values import read_budget, read_pairs, read_policy
from mas_gym.cli.worker_processes import critic_maker
from mas_gym.errors import ConfigError

if TYPE_CHECKING:
    from mas_gym.policies import AsyncPolicy
    from mas_gym.policies.registry import PolicySpec
    from mas_gym.programs import Program
    from mas_gym.systems.graph import MAS
    from mas_gym.tasks.base import Task
    from mas_gym.tasks.grading.graders import KindGrader
    from search import Budget, Prices, Sampling
    from search.compare.comparison_runs import Remote
    from search.service.telemetry import Watch

LIKELIHOOD = "policy-likelihood"
PLANNERS = "adaptive, bon, cascade, dvts, halving, mcts, puct, rebase, sbs, sc, siblings, single"
CRITICS = (
    "agreement, calibrated, constant, ensemble, features, folder, http, https, hub, judge, policy-likelihood, prm, "
    "random, recorded, rm, tiny-masprm, tiny-orm, uncertainty, vllm, vote"
)
"""The registered names, for help texts: querying the registries would load the search packages."""

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
AnswerReading = Annotated[
    str | None,
    typer.Option(
        "--answers",
        metavar="index|label|text",
        help="How the answers in your file name an option: by index from 0, by label (A or 1), or by text. By default "
        "inferred from all rows.",
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
        "models as arms:NAME=POLICY,NAME=POLICY; from-config uses those in the MAS's config. The default is tiny.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", min=0, max=100, help="Sampling temperature of all agents; by default 0.7."),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", min=1e-6, max=1, help="Probability mass of nucleus sampling of all agents; default 0.95."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Token limit of one message of all agents; by default the MAS's limits."),
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
    answers: AnswerReading = None
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
        names = ("columns", "kind", "answers", "grader", "judge")
        own = {name: getattr(self, name) for name in names}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        if self.data is not None:
            given["data"] = str(self.data)
        if self.allow_code:
            given["allow_code"] = True
        if self.sandbox != "bubblewrap":
            given["sandbox"] = self.sandbox
        return {"grading": self.grading, **given, **read_pairs(self.option)}

    def base_grader(self) -> KindGrader:
        """Return the grader by kind of a command without --task; of the task options, only ``decimal`` applies.

        Raises:
            ConfigError: An option needs --task, or has no such value.
        """
        from mas_gym.tasks.catalog import make_base

        pairs = read_pairs(self.option)
        given: dict[str, object] = {"--columns": self.columns, "--data": self.data, "--answers": self.answers}
        given |= {f"-o {name}": name != "decimal" for name in pairs}
        if alone := [flag for flag, value in given.items() if value]:
            raise ConfigError(f"{', '.join(alone)}: expected --task as well, got none")
        return make_base(self.grading, self.judge, self.allow_code, self.sandbox, **pairs)

    @property
    def label(self) -> str:
        """The task and the split, for titles."""
        return f"{self.task} {self.split}"

    def load(self) -> Task:
        """Load the task, limited to ``number`` problems if ``number`` is set."""
        import mas_gym

        assert self.task is not None
        task: Task = mas_gym.load_task(self.task, split=self.split, limit=self.number, **self.options)
        if self.number is not None and self.number > len(task):
            what = f"the number of problems in {self.task}/{self.split}"
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
    temperature: Temperature = None
    top_p: TopP = None
    max_tokens: MaxTokens = None

    @property
    def sampling(self) -> Sampling:
        """How the agents sample."""
        from search import Sampling

        given = {"temperature": self.temperature, "top_p": self.top_p, "max_new_tokens": self.max_tokens}
        return Sampling(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    def load(self, task: Task | None, kind: str | None = None) -> tuple[MAS, Program | None]:
        """Load a program and the MAS that represents it, or only a MAS if there is no program; ``mas`` names the MAS.

        Without a program, the default is the task's MAS; without a task, it is the MAS for the kind of answer.
        """
        from mas_gym import load_mas
        from mas_gym.programs import load_program
        from mas_gym.tasks.catalog import default_mas, mas_of_kind

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
            return self._sampled(load_mas(self.mas)), None
        return self._sampled(load_mas(mas_of_kind(kind or "number") if task is None else default_mas(task))), None

    def _sampled(self, system: MAS) -> MAS:
        """Return a system whose agents have no settings of their own where the command has one."""
        agents = system.agents
        if self.temperature is not None:
            agents = tuple(replace(agent, temperature=None) for agent in agents)
        if self.top_p is not None:
            agents = tuple(replace(agent, top_p=None) for agent in agents)
        if self.max_tokens is not None:
            agents = tuple(replace(agent, max_new_tokens=self.max_tokens) for agent in agents)
        return replace(system, agents=agents)

    def spec(self, system: MAS) -> PolicySpec:
        """Return the policy of ``--policy``; the bundled model is the default if the MAS's config names no policies."""
        from search.setup import FROM_CONFIG, config_policies

        if self.policy == FROM_CONFIG:
            return config_policies(system, FROM_CONFIG)
        if self.policy is None and system.policies:
            return config_policies(system, None)
        return self.policy or "tiny"

    def read_policy(self, system: MAS) -> AsyncPolicy:
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
    ) -> tuple[AsyncPolicy | None, Remote | None]:
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
                raise ConfigError("--token-traces: expected no --cache, because cached replies contain no token ids")
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
    """Add option groups to a command: a parameter of a group type, such as `TaskSource`, becomes the group's options.

    Args:
        defaults: New defaults, keyed by option name; False removes an option.
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
