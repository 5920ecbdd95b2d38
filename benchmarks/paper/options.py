"""Command-line options of the table scripts."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.tiny.stories import GENERATED
from mas_gym.errors import ConfigError
from mas_gym.plugins import Spec
from mas_gym.tasks.procedural.arithmetic import LEVELS
from rewardmodels.training.config import PAPER, SMALL, TINY

SYSTEMS = {
    "arithmetic": "rpsv",
    **dict.fromkeys(GENERATED, "rpsv"),
    "gsm8k": "rpsv",
    "math": "rpsv",
    "ordering": "logic",
    "logiqa": "logic",
    "mmlu": "debate",
}
"""The paper's graph of each task."""

PARTNERS = {
    "arithmetic": "ordering",
    # The next easier one; of those in another wording, the same in the usual one.
    **dict(pairwise((*reversed(GENERATED), "arithmetic"))),
    **{f"retold-{level}": f"arithmetic-{level}" for level in LEVELS},
    "reworded-1": "stories-2",
    "ordering": "arithmetic",
    "gsm8k": "math",
    "math": "gsm8k",
    "mmlu": "logiqa",
    "logiqa": "mmlu",
}
"""The task that a critic is transferred to and from."""

RECIPES = {"paper": PAPER, "tiny": TINY}
"""Training settings to start from."""


@dataclass(frozen=True)
class Options:
    """The settings of a run of tables, which `read` describes; the defaults are the small-scale run."""

    out: Path = Path("paper-tables")
    pages: Path | None = None
    task: str = "arithmetic"
    data: Path | None = None
    mas: str = ""
    policy: str = "tiny"
    base: str = "tiny"
    number: int = 500
    seeds: tuple[int, ...] = (14, 24, 42)
    trees: int = 600
    dynamic_trees: int = 200
    rollout_temperature: float = 0.0
    dev_trees: int = 150
    concurrency: int = 64
    ray: str = ""
    actors: int = 2
    gpus_per_actor: float = 0.0
    recipe: str = ""
    settings: tuple[str, ...] = ()
    masprm: str = ""
    orm: str = ""
    rollouts: Path | None = None
    partner: str = ""
    partner_data: Path | None = None
    other_policy: str = ""
    other_steps: int = 3500
    no_losses: bool = False
    tables: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.pages or self.out / "pages"

    @property
    def miniature(self) -> bool:
        """Whether the critics' backbone is the bundled model or a folder with a small one."""
        if self.recipe:
            return self.recipe == "tiny"
        return self.base == "tiny" or 0 < parameters(Path(self.base)) < SMALL

    @property
    def system(self) -> str:
        return self.mas or SYSTEMS[self.task]

    def training(self) -> dict[str, Any]:
        """Return the training settings by name: those of the recipe, if one is named, and those given.

        Raises:
            ConfigError: One is not written as ``key=value``, or comes twice.
        """
        args, given = Spec("--set", ",".join(self.settings)).settings()
        if args:
            raise ConfigError(f"--set: expected KEY=VALUE, such as epochs=2, got {args[0]!r}")
        recipe = RECIPES[self.recipe].to_dict() if self.recipe else {}
        settings = {key: value for key, value in recipe.items() if key not in ("kind", "head", "view")}
        return settings | {key.replace("-", "_"): value for key, value in given.items()}

    def shown(self) -> str:
        """Return the arguments that reproduce these results, without file paths of this machine."""
        words: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _UNSHOWN or value == field.default:
                continue
            for one in value if field.name == "settings" else [value]:
                words += [_flag(field.name), *([] if one is True else [_brief(one)])]
        return shlex.join(words)


_UNSHOWN = ("out", "pages", "concurrency", "ray", "actors", "gpus_per_actor", "rollouts", "tables")
"""Options that change no result."""


def _flag(name: str) -> str:
    return {"number": "-n", "settings": "--set"}.get(name, "--" + name.replace("_", "-"))


def _brief(value: object) -> str:
    """Return a value without the folders of this machine."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    text = str(value)
    if (spec := Spec.parse(text)).file:
        return str(spec._replace(file=Path(spec.file).name))
    kind, _, model = text.rpartition(":")
    path, _, rest = model.partition("#")
    inside = not Path(path).is_absolute() and ".." not in Path(path).parts
    if inside or not Path(path).exists():
        return text
    return f"{kind}:" * bool(kind) + Path(path).name + f"#{rest}" * bool(rest)


def parameters(folder: Path) -> int:
    """Return the number of weights in a folder's safetensors files; 0 if there is none."""
    from safetensors import safe_open

    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as weights:
            count += sum(prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return count


def read(prog: str, about: str, arguments: list[str] | None = None, tables: Sequence[str] = ()) -> Options:
    """Parse a command line; ``tables`` are the names that may be chosen from."""
    parser = argparse.ArgumentParser(prog=prog, description=about)
    known = Options()
    number, path = {"type": int, "metavar": "N"}, {"type": Path, "metavar": "PATH"}
    add = parser.add_argument
    add("--out", help="stores, critics and pages; the same command resumes from it [paper-tables]", **path)
    add("--pages", help="folder of the pages [OUT/pages]", **path)
    add("--task", choices=sorted(SYSTEMS), help=f"[{known.task}]")
    add("--data", help="local file or folder of the task, instead of the hub", **path)
    add("--mas", help="shipped name or YAML file [the paper's for the task]")
    add("--policy", help="the agents, such as vllm:Qwen/Qwen2.5-1.5B-Instruct [tiny]")
    add("--base", help="backbone of the critics, such as Qwen/Qwen2.5-1.5B [tiny]")
    add("-n", "--number", help=f"test problems [{known.number}]", **number)
    add("--seeds", type=_seeds, help="run seeds, with commas [14,24,42]")
    add("--trees", help=f"training searches per task and system [{known.trees}]", **number)
    add("--dynamic-trees", help=f"the same for dynamic schedules [{known.dynamic_trees}]", **number)
    add(
        "--rollout-temperature",
        type=float,
        metavar="T",
        help="agents' temperature in the training searches [their own]",
    )
    add("--dev-trees", help=f"searches of the dev split, to compare critics on [{known.dev_trees}]", **number)
    add("--concurrency", help=f"searches open at once [{known.concurrency}]", **number)
    add("--ray", metavar="ADDRESS", help="search on a Ray cluster; local starts one here [this process]")
    add("--actors", help=f"Ray actors, each with an engine of its own [{known.actors}]", **number)
    add("--gpus-per-actor", type=float, metavar="N", help="GPUs of each, fractions allowed [0]")
    add("--recipe", choices=sorted(RECIPES), help="training settings to start from [by the backbone's size]")
    add("--set", dest="settings", action="append", metavar="KEY=VALUE", help="a training setting; repeatable")
    add("--masprm", help="a trained MASPRM, instead of training the main recipe's here")
    add("--orm", help="a trained ORM, likewise")
    add("--rollouts", help="existing store with training searches of the task", **path)
    add("--partner", choices=sorted(SYSTEMS), help="other task of the transfer [its partner in the paper]")
    add("--partner-data", help="its local file or folder", **path)
    add("--other-policy", help="other agents of the transfer [a second tiny model, trained here]")
    add("--other-steps", help=f"training steps of that second tiny model [{known.other_steps}]", **number)
    add("--no-losses", action="store_true", default=None, help="trainings: the main recipes alone")
    if tables:
        add("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(tables)} [all]")
    given = {key: value for key, value in vars(parser.parse_args(arguments)).items() if value is not None}
    if "settings" in given:
        given["settings"] = tuple(given["settings"])
    given["tables"] = tuple(given.get("tables", ()))
    if set(given["tables"]) - set(tables):
        parser.error(f"expected tables of {', '.join(tables)}, got {' '.join(given['tables'])}")
    return Options(**given)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers with commas, such as 14,24,42, got {text!r}"
        ) from error
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"expected different seeds, got {text!r}")
    return seeds
