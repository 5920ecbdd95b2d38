"""Options shared by several commands, in groups: the problems, the agents and the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mas_gym.cli.option_values import read_budget, read_pairs, read_policy, read_prices
from mas_gym.cli.worker_processes import critic_maker
from mas_gym.errors import ConfigError

if TYPE_CHECKING:
    from mas_gym.policies import AsyncPolicy
    from mas_gym.policies.registry import PolicySpec
    from mas_gym.systems.graph import MAS
    from mas_gym.tasks.base import Task
    from mas_gym.tasks.grading.answers import KindGrader
    from search.compare.comparison_runs import Start
    from search.service.telemetry import ProgressListener
    from search.setup import RunSpec

LIKELIHOOD = "policy-likelihood"

AnswerKind = Annotated[
    str | None,
    typer.Option(
        "--kind",
        help="Kind of answer of your questions: number, expression, choice, text, regex, code or judge. By default "
        "inferred from a file's answers; number for a single question.",
    ),
]
MASName = Annotated[
    str | None,
    typer.Option("--mas", help="Bundled MAS, such as rpsv or debate, or a YAML file. By default the task's MAS."),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="Policy: tiny, transformers:PATH, vllm:PATH, openai:MODEL@URL, recorded:FILE, my.py:make, or several "
        "models as arms:NAME=POLICY,NAME=POLICY; from-config uses those in the MAS's config. The default is tiny.",
    ),
]
WorkerCount = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        # One process excludes no other option.
        callback=lambda number: number != 1 and number,
        help="Worker processes; each runs one planner, critic and seed at a time. The default is one per core for "
        "small local models, else 1.",
    ),
]
CriticNames = Annotated[
    list[str] | None,
    typer.Option("--critic", help="Critic: a name (see mas-gym critics), a trained folder or my.py:Mine. Repeatable."),
]
CriticName = Annotated[
    str | None,
    typer.Option(
        "--critic",
        help=f"Critic: a name (see mas-gym critics), a trained folder or my.py:Mine. By default {LIKELIHOOD}.",
    ),
]
PlannerNames = Annotated[
    list[str] | None,
    typer.Option(
        "--planner",
        help="Planner, such as mcts:10,3 or sc:20,stop=0.9 (see mas-gym planners), or my.py:Mine. Repeatable.",
    ),
]
PlannerName = Annotated[
    str, typer.Option("--planner", help="Planner, such as sc:20,stop=0.9 (see mas-gym planners), or my.py:Mine.")
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
PricesFile = Annotated[
    Path | None,
    typer.Option(
        "--prices",
        help="YAML file of prices in USD, with lines such as tiny: {prompt: 0.15, cached: 0.08, generated: 0.6} per "
        "million tokens, or tiny-masprm: {forward: 0.00001}; the key second prices time. Adds the column USD.",
    ),
]
LogJSON = Annotated[Path | None, typer.Option("--log-json", help="Append events to a file, one JSON object per line.")]


@dataclass(frozen=True)
class TaskSource:
    """A command's task options."""

    task: Annotated[
        str | None,
        typer.Option(
            help="Task: arithmetic, ordering, game24, gsm8k, math, mmlu, logiqa or gpqa; your CSV, JSONL or Parquet "
            "file; or OWNER/NAME on the hub."
        ),
    ] = None
    data: Annotated[Path | None, typer.Option(help="Read the task from a file or folder instead of the hub.")] = None
    split: Annotated[str, typer.Option(help="train, dev or test.")] = "test"
    columns: Annotated[
        str | None,
        typer.Option(
            help="Columns of your file: question=prompt,answer=gold, and id=, split=, kind=, choices=A+B+C+D."
        ),
    ] = None
    kind: AnswerKind = None
    answers: Annotated[
        str | None,
        typer.Option(
            metavar="index|label|text",
            help="How the answers in your file name an option: by index from 0, by label (A or 1), or by text. By "
            "default inferred from all rows.",
        ),
    ] = None
    number: Annotated[
        int | None,
        typer.Option(
            "-n", "--number", min=1, help="Use N problems: the first N, or a fixed sample of a benchmark's test split."
        ),
    ] = None
    grader: Annotated[
        str | None,
        typer.Option(help="Your grader, my.py:grade: a function (problem, text) that returns True or False."),
    ] = None
    judge: Annotated[
        str | None, typer.Option(help="Policy that grades answers of kind judge; its tokens are not in TOK.")
    ] = None
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code", help="Run code in messages (kind code) on this machine, isolated by bubblewrap."),
    ] = False
    sandbox: Annotated[
        str,
        typer.Option(
            metavar="bubblewrap|none",
            help="Isolation of that code: bubblewrap, or none to run it with your permissions.",
        ),
    ] = "bubblewrap"
    grading: Annotated[str, typer.Option(help="Grading of answers: strict, or paper (as in the paper).")] = "strict"
    option: Annotated[
        list[str] | None, typer.Option("-o", "--option", help="Task option, such as difficulty=3. Repeatable.")
    ] = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `mas_gym.load_task` that are set, apart from split and limit."""
        given = {name: getattr(self, name) for name in ("columns", "kind", "answers", "grader", "judge")}
        given["data"] = None if self.data is None else str(self.data)
        given["allow_code"] = self.allow_code or None
        given["sandbox"] = None if self.sandbox == "bubblewrap" else self.sandbox
        return {"grading": self.grading, **_set(given), **read_pairs(self.option)}

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
        check_number(self.number, len(task), f"{self.task}/{self.split}")
        return task


def check_number(wanted: int | None, available: int, source: str) -> None:
    """Raise `ConfigError` if a source has fewer problems than wanted."""
    if wanted is not None and wanted > available:
        raise ConfigError(f"expected -n of at most {available:,}, the number of problems in {source}, got {wanted:,}")


@dataclass(frozen=True)
class AgentSource:
    """A command's agent options: a MAS or a program, and the policy that generates its messages."""

    mas: MASName = None
    program: Annotated[
        str | None,
        typer.Option(help="Your agents instead of a MAS: my_agents.py:solve, a command, or a service's URL."),
    ] = None
    program_file: Annotated[
        list[str] | None,
        typer.Option(help="File that a command or service depends on; needed for --store. Repeatable."),
    ] = None
    program_temperature: Annotated[
        float | None, typer.Option(help="Temperature of all calls; overrides the program's temperature.")
    ] = None
    program_agent: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of an agent of the program. Repeatable: name all of them if the dry run does not reach each one."
        ),
    ] = None
    isolate: Annotated[
        bool,
        typer.Option(
            "--isolate", help="Run a program's function in a new process each time, so that runs share no state."
        ),
    ] = False
    policy: PolicyName = None
    cache: Annotated[Path | None, typer.Option(help="SQLite file that caches the policy's replies.")] = None
    temperature: Annotated[
        float | None, typer.Option(min=0, max=100, help="Sampling temperature of all agents; by default 0.7.")
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(min=1e-6, max=1, help="Probability mass of nucleus sampling of all agents; default 0.95."),
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token limit of one message of all agents; by default the MAS's limits.")
    ] = None

    def load(self, task: Task | None, kind: str | None = None) -> RunSpec:
        """Load a program or a MAS; ``mas`` may describe the program. The spec has no policy yet.

        Without either, the MAS is that of the task; without a task, it is the MAS for the kind of answer.
        """
        from mas_gym import load_mas
        from mas_gym.tasks.catalog import default_mas, mas_of_kind
        from search import Sampling
        from search.setup import RunSpec

        problems = () if task is None else task
        given = {"temperature": self.temperature, "top_p": self.top_p, "max_new_tokens": self.max_tokens}
        sampling = Sampling(**_set(given))
        if self.program is not None:
            from mas_gym.programs import load_program
            from search.models.programs import ProgramModels

            options = {"mas": self.mas, "files": self.program_file, "temperature": self.program_temperature}
            options |= {"agents": self.program_agent, "isolate": self.isolate or None}
            source = ProgramModels(load_program(self.program, **_set(options)))
            return RunSpec(problems, source.mas, None, source=source, sampling=sampling)
        default = mas_of_kind(kind or "number") if task is None else default_mas(task)
        return RunSpec(problems, self._sampled(load_mas(self.mas or default)), None, sampling=sampling)

    def _sampled(self, system: MAS) -> MAS:
        """Return the system without the agents' sampling settings that the command's options replace."""
        agents = [
            replace(
                agent,
                temperature=agent.temperature if self.temperature is None else None,
                top_p=agent.top_p if self.top_p is None else None,
                max_new_tokens=self.max_tokens or agent.max_new_tokens,
            )
            for agent in system.agents
        ]
        return replace(system, agents=tuple(agents))

    def policy_spec(self, system: MAS) -> PolicySpec:
        """Return the policy of ``--policy``; the bundled model is the default if the MAS's config names no policies."""
        from search.runs import FROM_CONFIG, config_policies

        if self.policy == FROM_CONFIG:
            return config_policies(system, FROM_CONFIG)
        if self.policy is None and system.policies:
            return config_policies(system, None)
        return self.policy or "tiny"

    def read_policy(self, system: MAS) -> AsyncPolicy:
        """Load the policy for a MAS."""
        return read_policy(self.policy_spec(system), self.cache)


def _set(options: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True)
class RunOptions:
    """A command's run options: concurrency, limits and prices of many searches, and where they run."""

    concurrency: Concurrency = 64
    budget: Annotated[
        list[str] | None, typer.Option(help="Limit per search: calls=N, tokens=N, seconds=S or usd=X. Repeatable.")
    ] = None
    run_budget: Annotated[
        list[str] | None,
        typer.Option(help="Limit per run (one planner, critic and seed), such as usd=20. Repeatable."),
    ] = None
    prices: PricesFile = None
    token_traces: Annotated[
        bool,
        typer.Option(
            "--token-traces",
            help="Record token ids and log-probabilities of every message in STORE.traces, for train agents --method "
            "grpo.",
        ),
    ] = False
    ray: Annotated[
        str | None,
        typer.Option(metavar="local|ADDRESS", help="Run searches on Ray actors, on this machine or on a cluster."),
    ] = None
    actors: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray: number of actors, each with policy and critics; by default 2."),
    ] = None
    gpus_per_actor: Annotated[
        float | None, typer.Option(min=0, help="With --ray: GPUs per actor; may be a fraction.")
    ] = None
    log_json: LogJSON = None
    metrics: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="PORT", help="Serve Prometheus metrics on this loopback port."),
    ] = None

    def apply(self, spec: RunSpec) -> RunSpec:
        """Return a spec with this concurrency and these budgets and prices."""
        prices = read_prices(self.prices)
        budget = read_budget(self.budget, "--budget", prices)
        run_budget = read_budget(self.run_budget, "--run-budget", prices)
        return replace(spec, concurrency=self.concurrency, budget=budget, run_budget=run_budget)

    def engines(self, policy: PolicySpec, cache: Path | None, store: Path | None) -> tuple[AsyncPolicy | None, Start]:
        """Return the policy and a function that starts a run; on a fleet, the actors load the policy."""
        from mas_gym.policies.token_traces import traces_folder
        from search.compare.comparison_runs import start_here

        traces = traces_folder(store) if self.token_traces and store is not None else None
        if self.ray is None:
            return read_policy(policy, cache, traces), start_here
        from search.engine.ray_actors import Fleet, FleetStart

        fleet = Fleet(
            actors=2 if self.actors is None else self.actors, gpus=self.gpus_per_actor or 0.0, address=self.ray
        )
        shared = [None if path is None else path.absolute() for path in (cache, traces)]
        return None, FleetStart(fleet, partial(read_policy, policy, *shared), critic_maker).start

    @contextmanager
    def watched(self) -> Iterator[ProgressListener]:
        """Write events and metrics; yield a function to call with every progress update."""
        from search.service import telemetry

        with telemetry.json_lines(self.log_json), telemetry.metrics(self.metrics) as watch:
            yield watch
