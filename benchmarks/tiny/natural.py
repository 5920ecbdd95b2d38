"""Agents with errors that are not designed: a small model, trained only on correct transcripts, on hard problems.

One command trains the model from scratch, chooses the problems of a setting, and describes the errors::

    python -m benchmarks.tiny.natural --out models/tiny-natural
    python -m benchmarks.tiny.natural --out models/tiny-natural --setting reworded

The transcripts are of RPSV and follow the truth. There is no Auditor, no opening word and no text of other tasks.
Stories are rejected only if a result exceeds the numbers that the agents can write. In the setting ``stories``, stories
are longer than most of those taught. In ``reworded``, some facts use words that were not taught. How long, or
how many, is chosen on the dev split, so that a single pass is right about half of the time. Errors are described
afterwards, by comparing each message of a failed pass with the truth: the agent that errs first, how often, and in what
way.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import search
from benchmarks.paper.page import markdown_table, percent, span
from benchmarks.tiny.data import WIDTH, Batch, Packed, pack, pooled
from benchmarks.tiny.stories import Reworded, Stories, StoriesOfLength, transcript
from benchmarks.tiny.train import parser as training_parser
from benchmarks.tiny.train import train
from benchmarks.tiny.truth import first_error
from mas_gym.policies import Policy, load_policy
from search.results.intervals import accuracy_interval

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

TAUGHT = MappingProxyType({1: 0.3, 2: 0.4, 3: 0.3})
"""Weight of each difficulty in training; 4 and 5 are never seen."""

SIZE = ("--hidden", "128", "--layers", "3", "--steps", "1500", "--no-bf16")


class Setting(NamedTuple):
    """Problems unlike those of training.

    Attributes:
        family: Tasks of several levels.
        card: File of the card in the model's folder.
        what: The quantity of a level, as the heading of a column.
        about: The name of the chosen level.
    """

    family: type[Stories]
    card: str
    what: str
    about: str


SETTINGS = MappingProxyType(
    {
        "stories": Setting(StoriesOfLength, "README.md", "events", "stories of {} events"),
        "reworded": Setting(
            Reworded,
            "reworded.md",
            "tenths of the facts in unseen words",
            "stories with {} tenths of the facts in unseen words",
        ),
    }
)


class Level(NamedTuple):
    """Single passes on problems of one level.

    Attributes:
        level: The level.
        right: Share of passes with the right answer.
        interval: 95% interval over problems.
        errors: How often each ``(agent, kind)`` was the first error of a failed pass.
    """

    level: int
    right: float
    interval: tuple[float, float]
    errors: Counter[tuple[str, str]]


def correct_batches(tokenizer: Qwen2Tokenizer, seed: int, size: int, start: int = 0) -> Iterator[Batch]:
    """Yield endless batches of correct transcripts, as `benchmarks.tiny.data.batches` does."""
    tasks = {level: Stories("train", seed=seed, difficulty=level) for level in TAUGHT}

    def row(rng: random.Random) -> Packed:
        task = tasks[rng.choices(list(TAUGHT), list(TAUGHT.values()))[0]]
        problem = task[rng.randrange(len(task))]
        turns = transcript(problem)
        rng.shuffle(turns)
        return pack(problem.question, turns, tokenizer, WIDTH)

    return pooled(row, tokenizer.pad_token_id, seed, size, start)


def measure(policy: Policy, family: type[Stories], level: int, problems: int, passes: int = 3) -> Level:
    """Run single passes on problems of one level, dev split, and find the first error of those that failed."""
    task = family("dev", difficulty=level)[:problems]
    right: Counter[str] = Counter()
    errors: Counter[tuple[str, str]] = Counter()
    for seed in range(passes):
        for plan in search.run("single", task, mas="rpsv", policy=policy, seed=seed, raise_errors=True):
            [end] = plan.candidates
            right[plan.problem_id] += bool(end.correct)
            if not end.correct:
                messages = [(plan.mas.agents[turn.speaker].name, turn.text) for turn in end.state.turns]
                found = first_error(task.problem(plan.problem_id), messages)
                errors[(found.speaker, found.kind) if found else ("none", "")] += 1
    shares = [right[problem.id] / passes for problem in task]
    low, high = accuracy_interval(shares, len(shares) * passes)
    return Level(level, sum(shares) / len(shares), (low, high), errors)


def card(name: str, setting: Setting, levels: list[Level], command: str) -> str:
    """Return the model's card: how it was made, how often it is right, and what its errors are."""
    chosen = min(levels, key=lambda level: abs(level.right - 0.5))
    rows = [(x.level, percent(x.right), span(*x.interval)) for x in levels]
    total = max(1, chosen.errors.total())
    errors = [(who, kind, percent(n / total)) for (who, kind), n in chosen.errors.most_common()]
    about = setting.about.format(chosen.level)
    parts = [
        f"# {name}\n",
        f"`{command}`\n",
        "Single passes of RPSV, dev split:\n",
        markdown_table((setting.what, "right, %", "95% interval"), rows),
        f"First errors of the failed passes on {about}, the level with accuracy nearest to 50%:\n",
        markdown_table(("agent", "error", "share, %"), errors, left=2),
    ]
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """Train, choose the level on the dev split, and write the card."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiny.natural",
        description=(__doc__ or "").split("\n")[0],
        epilog="Other arguments, such as --hidden and --lr, are those of python -m benchmarks.tiny.train.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and its checkpoint")
    parser.add_argument("--steps", type=int, default=1500, help="batches to train on")
    parser.add_argument("--problems", type=int, default=200, help="dev problems per level")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--setting", choices=SETTINGS, default="stories", help="problems to describe [stories]")
    args, others = parser.parse_known_args(arguments)
    settings = training_parser().parse_args(
        ["--out", str(args.out), *SIZE, "--steps", str(args.steps), "--seed", str(args.seed), *others]
    )
    if not (args.out / "config.json").exists():
        train(settings, correct_batches)
    policy = load_policy(f"transformers:{args.out}")
    setting = SETTINGS[args.setting]
    levels = [measure(policy, setting.family, level, args.problems) for level in setting.family.levels]
    command = f"python -m benchmarks.tiny.natural --out {args.out.name} --steps {args.steps} --seed {args.seed}"
    if args.setting != "stories":
        command += f" --setting {args.setting}"
    text = card(args.out.name, setting, levels, " ".join([command, *others]))
    (args.out / setting.card).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
