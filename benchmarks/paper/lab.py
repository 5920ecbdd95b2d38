"""Shared parts of the tables: rollouts per setting, critics per training config, and searches, stored in a folder."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import mas_gym
import mas_gym.tiny
from benchmarks.paper.options import PARTNERS, SYSTEMS, Options, read
from benchmarks.paper.oracle import Truth
from benchmarks.paper.page import Page, write_page
from benchmarks.tiny import train as tiny_training
from benchmarks.tiny.stories import GENERATED, Retold, generated
from mas_gym.errors import MASGymError, need
from mas_gym.internal.identity import identity_of
from mas_gym.internal.text import printable
from mas_gym.internal.whole_files import write_file
from mas_gym.policies import load_policy
from mas_gym.policies.cache import CachedPolicy
from mas_gym.policies.model_files import ModelSource
from mas_gym.policies.vllm import VLLMPolicy
from mas_gym.tasks import Task
from mas_gym.tasks.base import rule_of
from rewardmodels import LearnedCritic, load_critic
from rewardmodels.tiny_critics import shipped
from rewardmodels.training.config import SMALL, TrainingConfig, config_for
from rewardmodels.training.train_critic import CHECKPOINTS, ROLLOUTS, grow, teach, trees
from search import Sampling, load_planner
from search.compare.comparison_runs import (
    PAPER_PLANNERS,
    Row,
    Start,
    measure,
    named_critics,
    named_planners,
    pair,
    start_here,
)
from search.engine.ray_actors import Fleet, FleetStart
from search.results.outcomes import Outcome
from search.results.summary import ResultRow, summarize
from search.results.table import Comparison
from search.results.table_formats import COLUMNS, table_cells
from search.setup import RunSpec

if TYPE_CHECKING:
    from rewardmodels import LabeledTree
    from search import Critic

SEED = 42
MCTS = "mcts:10,3"
LIKELIHOOD = "policy-likelihood"
PAIRWISE = ("anchor", "bt_on")
"""Settings of the Bradley-Terry loss alone."""


class TinyShape(NamedTuple):
    """The configuration of a further tiny model, except its number of steps.

    Attributes:
        hidden: Width.
        layers: Number of layers.
        without: The part omitted from its training, such as ``"audit"``; empty for none.
        rate: Highest learning rate.
    """

    hidden: int
    layers: int
    without: str = ""
    rate: float = 0.003

    @property
    def name(self) -> str:
        parts = [f"{self.hidden}x{self.layers}"]
        parts += [f"no-{self.without}"] if self.without else []
        parts += [f"rate-{self.rate:g}"] if self.rate != self._field_defaults["rate"] else []
        return "-".join(parts)


OTHER_SHAPE = TinyShape(128, 4)
"""Of the second tiny model, narrower than the embedded one (192, 4)."""


class Setting(NamedTuple):
    """A task and the multi-agent system that solves it."""

    task: str
    mas: str
    policy: str
    data: Path | None = None


@dataclass(frozen=True)
class Recipe:
    """How a critic is trained, in addition to the settings of the run.

    Attributes:
        kind: ``"masprm"`` or ``"orm"``.
        head: Its loss.
        view: The critic's view.
        trees: Training searches, the run's number if None.
        pairs: Pairs per tree.
        plain: The paper's Bradley-Terry loss, without an anchor.
        same: When siblings are duplicates, a rule of `mas_gym.tasks.base`; the task's own if None.
        rollouts: The training search.
        seed: Seed of the training, the default if None.
        epochs: Passes over the rows, the run's number if None.
    """

    kind: str = "masprm"
    head: str = "bt"
    view: str = "full"
    trees: int | None = None
    pairs: int = 8
    plain: bool = False
    same: str | None = None
    rollouts: str = ROLLOUTS
    seed: int | None = None
    epochs: float | None = field(default=None, repr=False)  # the settings state it


MASPRM = Recipe()
ORM = Recipe("orm", "bce")


class Score(NamedTuple):
    """The result of a method: a row of the table, and the outcomes behind it."""

    row: ResultRow
    outcomes: tuple[Outcome, ...]

    @property
    def shares(self) -> Mapping[str, float]:
        """Problem id to the share of its searches that were right."""
        return self.row.shares

    @property
    def hit(self) -> float:
        """Hit@1 in [0, 1]."""
        return self.row.hits[1].mean

    def hits(self, k: int) -> dict[str, float]:
        """Return problem id to the share of its searches with a right answer among the first ``k``."""
        found: dict[str, list[bool]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.problem_id, []).append(outcome.hit(k))
        return {key: sum(hits) / len(hits) for key, hits in found.items()}


class Lab:
    """A folder of finished work and the methods that add to it; everything is computed once and then read back."""

    def __init__(self, options: Options) -> None:
        """Keep the options; work starts on demand."""
        self.options = options
        self._policies: dict[str, Any] = {}
        self._specs: WeakKeyDictionary[Critic, str] = WeakKeyDictionary()
        self.notes: list[str] = []

    def on(self, base: Path) -> Lab:
        """Return this lab with critics that are trained on another backbone."""
        other = Lab(replace(self.options, base=str(base), masprm="", orm=""))
        other._policies, other._specs = self._policies, self._specs
        return other

    @property
    def home(self) -> Setting:
        """The setting of the main table."""
        return Setting(self.options.task, self.options.system, self.options.policy, self.options.data)

    @property
    def partner(self) -> Setting:
        """The setting of the other task."""
        task = self.options.partner or PARTNERS[self.options.task]
        return Setting(task, SYSTEMS[task], self.options.policy, self.options.partner_data)

    def policy(self, spec: str) -> Any:
        """Load a policy once; in the miniature, rows of one seed share the messages that they have in common."""
        if spec not in self._policies:
            self._stop_engines()
            policy = load_policy(spec)
            if self.options.miniature and policy.local_batch is not None:
                file = self.options.out / "messages.db"
                file.parent.mkdir(parents=True, exist_ok=True)
                policy = CachedPolicy(policy, file)
            self._policies[spec] = policy
        return self._policies[spec]

    def _stop_engines(self) -> None:
        """Free the GPU's memory for a training or other agents; the next request starts an engine again."""
        for policy in self._policies.values():
            if isinstance(policy, VLLMPolicy):
                policy.close()

    @cached_property
    def other_policy(self) -> str:
        """The other agents; a second tiny model is trained if none are named; interrupted training resumes."""
        if self.options.other_policy:
            return self.options.other_policy
        return f"transformers:{self.tiny_model('other-tiny', OTHER_SHAPE)}"

    def tiny_model(self, name: str, shape: TinyShape) -> Path:
        """Train a further tiny model for the run's number of steps unless it is trained; return its folder."""
        out = self.options.out / f"{name}-{self.options.other_steps}"
        if not (out / "config.json").exists():
            note(f"training a tiny model of {shape.layers} layers of width {shape.hidden} into {out}")
            settings = {"--hidden": shape.hidden, "--layers": shape.layers, "--without": shape.without}
            settings |= {"--lr": shape.rate, "--steps": self.options.other_steps}
            words = [f"{option}={value}" for option, value in settings.items()]
            tiny_training.train(tiny_training.parser().parse_args(["--out", str(out), *words]))
        self.notes.append(f"{out.name}: weights {_sha256(out / 'model.safetensors')}")
        return out

    def spec(self, setting: Setting, split: str, number: int | None, seed: int, store: Path) -> RunSpec:
        task = problems(setting, split, number)
        system, policy = mas_gym.load_mas(setting.mas), self.policy(setting.policy)
        return RunSpec(task, system, policy, seed=seed, store=store, concurrency=self.options.concurrency)

    def start(self, setting: Setting) -> Start:
        if not self.options.ray:
            return start_here
        fleet = Fleet(self.options.actors, self.options.gpus_per_actor, address=self.options.ray)
        return FleetStart(fleet, partial(load_policy, setting.policy), partial(partial, load_critic)).start

    @property
    def exploration(self) -> list[float]:
        """The agents' temperature in the training searches, if it is not their own."""
        return [self.options.rollout_temperature] if self.options.rollout_temperature else []

    def training(self) -> TrainingConfig:
        """Return the settings that the main critic is trained with."""
        return config_for(0 if self.options.miniature else SMALL, self.options.training())

    def base_identity(self) -> object:
        """Return which weights the backbone has."""
        if self.options.miniature:
            return identity_of(self.policy(_agents(self.options.base)))
        return ModelSource(self.options.base).identity()

    def trees(self, setting: Setting) -> int:
        most = self.options.dynamic_trees if mas_gym.load_mas(setting.mas).dynamic else self.options.trees
        return min(most, self.options.trees)

    def rollouts(self, setting: Setting, split: str = "train", planner: str = ROLLOUTS) -> RunSpec:
        """Run the training searches of a setting unless they are stored."""
        number = self.trees(setting) if split == "train" else self.options.dev_trees
        stamp = _digest(
            setting,
            identity_of(self.policy(setting.policy)),
            *([planner] if planner != ROLLOUTS else []),
            *(self.exploration if split == "train" else []),
        )
        name = f"{setting.task}-{Path(setting.mas).stem}-{split}-{stamp}"
        home = setting == self.home and split == "train" and planner == ROLLOUTS
        given = self.options.rollouts if home else None
        mark = self.options.out / "rollouts" / f"{name}.done"
        mark.parent.mkdir(parents=True, exist_ok=True)
        spec = self.spec(setting, split, number, SEED, given or mark.with_suffix(".db"))
        if split == "train" and self.exploration:
            spec = replace(spec, sampling=Sampling(self.exploration[0], 1.0))
        if not mark.exists() or int(mark.read_text()) < number:
            note(f"rollouts: {name}")
            _go_on(grow(spec, planner, True, self.start(setting)))
            write_file(mark, str(number))
        return spec

    def folder(self, setting: Setting, recipe: Recipe = MASPRM) -> Path:
        """Train a critic unless it is trained; return its folder."""
        chosen = {MASPRM: self.options.masprm, ORM: self.options.orm}.get(recipe)
        if chosen and setting == self.home:
            return Path(chosen)
        spec = self.rollouts(setting, planner=recipe.rollouts)
        number = recipe.trees or self.trees(setting)
        recipe = replace(recipe, trees=number)
        settings = self.options.training()
        if recipe.head != "bt":
            settings = {key: value for key, value in settings.items() if key not in PAIRWISE}
        if recipe.plain:
            settings["anchor"] = 0.0
        if recipe.seed is not None:
            settings["seed"] = recipe.seed
        if recipe.epochs is not None:
            settings["epochs"] = recipe.epochs
        agents, base = identity_of(spec.policy), self.base_identity()
        stamp = _digest(setting, agents, recipe, settings, self.options.base, base, *self.exploration)
        name = f"{recipe.kind}-{recipe.head}-{recipe.view}-{setting.task}-{Path(setting.mas).stem}-{number}"
        out = self.options.out / "critics" / f"{name}-{stamp}"
        if (out / "critic.json").exists():
            return out
        note(f"training {out.name}")
        self._stop_engines()

        def source() -> Iterator[LabeledTree]:
            return trees(spec, number)

        made: Any = (recipe.kind, recipe.head, self.options.base, recipe.view)
        same = recipe.same or rule_for(setting)
        teach(source, out, *made, pairs_per_tree=recipe.pairs, same=same, log=note, **settings)
        free_gpu()
        # At full size they take more than twice the space of the critic.
        shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
        return out

    def updates(self, setting: Setting, recipe: Recipe) -> int:
        """Return the number of updates in the training of a critic, training it first if needed."""
        text = (self.folder(setting, recipe) / "metrics.json").read_text(encoding="utf-8")
        return int(json.loads(text)["history"][-1]["step"])

    def critic(self, setting: Setting, recipe: Recipe = MASPRM, **options: Any) -> LearnedCritic:
        """Load a critic, training it first if needed."""
        written = "&".join(f"{name}={str(value).lower()}" for name, value in options.items())
        critic: Any = self.load(f"{self.folder(setting, recipe)}{'#' * bool(written)}{written}")
        return critic

    def load(self, spec: str) -> Critic:
        """Load a critic by its spec; at full size its model only when it first scores."""
        critic = load_critic(spec, lazy=not self.options.miniature)
        self._specs[critic] = spec
        return critic

    def rest(self, critic: Critic | None) -> None:
        """Free the memory of a critic's model at full size; its next score loads it again."""
        if isinstance(critic, LearnedCritic) and not self.options.miniature:
            critic.unload()
        for member in getattr(critic, "members", ()):
            self.rest(member)

    def guides(self) -> dict[str, Critic]:
        """Return the guides of the main table, the learned ones trained on the home setting, as tables name them."""
        learned = {"ORM": self.critic(self.home, ORM), "MASPRM": self.critic(self.home)}
        return {"PL": self.load(LIKELIHOOD), **learned}

    def measure(
        self,
        setting: Setting,
        searches: Sequence[Row],
        seeds: Sequence[int] = (),
        split: str = "test",
        temperature: float | None = None,
    ) -> list[Score]:
        """Run the searches of a table's rows, or read them back; in the order of the rows.

        Args:
            setting: Task, system and agents.
            searches: The rows.
            seeds: Run seeds; the run's own if empty.
            split: ``"test"``, or ``"dev"`` to choose a recipe.
            temperature: The agents' temperature, with top-p 1; their own sampling if None.
        """
        options = self.options
        options.out.mkdir(parents=True, exist_ok=True)
        seeds, start = seeds or options.seeds, self.start(setting)
        shared = self.spec(setting, split, options.number, seeds[0], options.out / "searches.db")
        if temperature is not None:
            shared = replace(shared, sampling=Sampling(temperature, 1.0))
        found: list[Score] = []
        for one in searches:
            spec = self._specs.get(one.critic, one.critic.name) if one.critic is not None else ""
            outcomes, stop = measure([replace(one, critic_spec=spec)], shared, seeds, listen=True, start=start)
            _go_on(stop)
            found.append(Score(summarize(outcomes)[0], tuple(outcomes)))
            self.rest(one.critic)
        return found

    def truth(self, setting: Setting, split: str = "test") -> Truth:
        """Return the truth about the problems of a setting, as a critic."""
        return Truth(problems(setting, split, self.options.number))

    def dev_trees(self, setting: Setting) -> Iterator[LabeledTree]:
        """Read searches of the dev split, on which no critic was trained."""
        return trees(self.rollouts(setting, "dev"))

    def facts(self, split: str = "test") -> list[str]:
        """Return the facts that every page states about its run on a split."""
        options = self.options
        seeds = f"run seed{'s' * (len(options.seeds) > 1)} {', '.join(map(str, options.seeds))}"
        used = [Path(path).name for path in (options.masprm, options.orm) if path]
        base = Path(options.base).name if Path(options.base).is_dir() else options.base
        learned = (
            f"critics: backbone `{base}`, trained on {options.trees:,} training searches with MCTS(40, 3), seed {SEED}"
        )
        return [
            f"{options.number:,} problems of {options.task}, {split} split; {seeds}",
            f"MAS `{Path(options.system).stem}`; agents `{Path(options.policy).name}`",
            learned + (f"; loaded instead of trained for this page: {', '.join(used)}" if used else ""),
            weights(options),
            f"mas-gym {metadata.version('mas-gym')}",
        ]


def problems(setting: Setting, split: str, number: int | None) -> Task:
    """Return a task's problems, those of one difficulty included, such as ``stories-4``."""
    if setting.task in GENERATED:
        return generated(setting.task, split)[:number]
    return mas_gym.load_task(setting.task, split=split, data=setting.data, limit=number)


def rule_for(setting: Setting) -> str:
    """Return a task's rule for equal messages; one of a single difficulty has its family's."""
    family = setting.task.partition("-")[0] if setting.task in GENERATED else setting.task
    return rule_of("arithmetic" if family == Retold.name else family)


def check(lab: Lab, settings: Sequence[Setting]) -> None:
    """Look for everything that the run needs later, so that nothing is found missing after hours.

    Args:
        lab: The run.
        settings: The tasks, systems and agents that are searched.

    Raises:
        MASGymError: A training setting is wrong, or data, a package, or the backbone is missing.
    """
    config = lab.training()
    # It warns about missing hub kernels, which are not needed.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for package in ("accelerate", "tensorboard", *["peft"] * (config.lora_rank > 0), *["bitsandbytes"] * config.nf4):
        need(package, "training")
    need("matplotlib", "the pages' pictures", "plot")
    for setting in settings:
        mas_gym.load_mas(setting.mas)
        for split in ("train", "dev", "test"):
            problems(setting, split, 1)
    lab.base_identity()


def free_gpu() -> None:
    """Return memory that is not in use to the GPU, because an engine in another process starts only if it is free."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _agents(base: str) -> str:
    return base if base == "tiny" else f"transformers:{base}"


def weights(options: Options) -> str:
    """Return the fact that names the weights behind a page, by the first digits of their SHA-256."""
    given = {"agents": options.policy, "MASPRM": options.masprm, "ORM": options.orm}
    found = {name: weights_file(spec) for name, spec in given.items() if spec}
    stated = [f"{name} {_sha256(file)}" for name, file in found.items() if file is not None]
    return f"weights: {', '.join(stated)}" if stated else "weights: none on this machine"


def weights_file(spec: str) -> Path | None:
    """Return the file with the weights of shipped agents or critics, or of a folder; None if there is none."""
    known = {"tiny": mas_gym.tiny.path(), "tiny-masprm": shipped("masprm"), "tiny-orm": shipped("orm")}
    file = Path(known.get(spec, spec.removeprefix("transformers:"))) / "model.safetensors"
    return file if file.exists() else None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12]


def note(message: str) -> None:
    """Print a remark to stderr, with the control characters of paths and names escaped."""
    print(printable(message), file=sys.stderr)


def row_of(spec: str, critic: Critic | None = None, name: str = "") -> Row:
    """Return a row: a planner, with a critic and its name in the table."""
    return Row(spec, load_planner(spec), critic, name)


def paper_rows(guides: Mapping[str, Critic]) -> list[Row]:
    """Return the rows of the paper's main table: every search method with each critic that it can use."""
    return pair(named_planners(PAPER_PLANNERS), named_critics(guides))


def command(run: Callable[[Lab], Page], module: str, arguments: list[str] | None = None) -> Path:
    """Write one table: the body of ``python -m benchmarks.paper.MODULE``."""
    about = (sys.modules[run.__module__].__doc__ or "").split("\n")[0]
    with or_exit():
        lab = Lab(read(f"python -m benchmarks.paper.{module}", about, arguments))
        return publish(lab, run(lab))


@contextmanager
def or_exit() -> Iterator[None]:
    """End a command on an error of the project with its message alone."""
    try:
        yield
    except MASGymError as error:
        note(f"Error: {error}")
        raise SystemExit(1) from error


def publish(lab: Lab, page: Page) -> Path:
    """Write a page and the figures behind it."""
    words = f"python -m benchmarks.paper.{page.name} {lab.options.shown()}".strip()
    path = write_page(page, lab.options.folder, words, [*lab.facts(page.split), *lab.notes])
    lab.notes.clear()
    note(f"wrote {path}")
    return path


def keep_rows(lab: Lab, name: str, scores: Sequence[Score]) -> None:
    """Keep a table's rows as JSON in the run's folder."""
    folder = lab.options.out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"table": name, "options": lab.options.shown()}
    write_file(folder / f"{name}.json", Comparison(tuple(score.row for score in scores), meta=meta).to_json())


def score_cells(score: Score) -> tuple[str, ...]:
    """Return Hit@1, its interval, TOK, AC and RC as a table shows them."""
    shown = dict(zip(COLUMNS, table_cells([score.row])[0], strict=True))
    return tuple(shown[name] for name in SCORE_HEADER)


SCORE_HEADER = ("Hit@1", "95% interval", "TOK", "AC", "RC")


def _go_on(stop: BaseException | None) -> None:
    if isinstance(stop, KeyboardInterrupt):
        note("Interrupted: the same command resumes from here.")
        raise SystemExit(130)
    if stop is not None:
        raise stop


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=4).hexdigest()
