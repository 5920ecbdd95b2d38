r"""A small and a larger model as arms of one policy, compared with each model alone at equal cost.

    python -m benchmarks.tiny.natural --out models/natural-large --steps 800 --hidden 192 --layers 4 \
        --init mas_gym/tiny/weights --lr 1e-3 --bf16 --compile
    python -m benchmarks.arms --large models/natural-large --cache replies.db

Both models are natural agents (`benchmarks.tiny.natural`), trained only on correct transcripts, so that their errors
are not designed. The cost of a token that a model reads or writes is the model's number of parameters. The reference is
the large model alone. Every other row has the largest size whose mean cost on dev is at most 60% of the reference's
cost on dev, or size 1. Its accuracy and cost on test are compared with the reference's, paired over problems. The large
model of the page is the checkpoint after 600 of the 800 steps.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import search
from benchmarks.paper.lab import weights_file
from benchmarks.stopping import Scores, against
from benchmarks.tiny.stories import generated
from mas_gym.policies import load_policy
from mas_gym.policies.arms import ArmsPolicy
from rewardmodels import load_critic
from search.compare import accuracy_interval
from search.protocol import Critic, Planner
from search.usage import Usage

PAGE = Path(__file__).with_name("pages") / "search" / "arms.md"
SEED = 14
SHARE = 0.6
SMALL = Path(__file__).parent / "tiny" / "tiny-natural"
LARGEST = 64
BOTH = ("small", "large")


def parameters(folder: Path) -> int:
    """Return the number of parameters in a model's safetensors file."""
    with (folder / "model.safetensors").open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: Its name in the table, with ``{}`` for the size.
        make: Returns the planner of a size.
        arms: The arms that it may use.
        together: Whether searches run concurrently; TreeQuest draws from a generator that all searches share.
    """

    name: str
    make: Callable[[int], Planner]
    arms: tuple[str, ...]
    together: bool = True


def row(spec: str, *arms: str) -> Row:
    """Return the row of a planner's short form with ``{}`` for the size."""
    return Row(spec, lambda size: search.load_planner(spec.format(size)), arms or BOTH)


def treequest_row() -> list[Row]:
    """Return the row of TreeQuest's AB-MCTS-A over both arms; none if TreeQuest is not installed."""
    try:
        import treequest
    except ImportError:
        return []
    return [Row("TreeQuest ABMCTSA, {} trials", lambda size: search.AskTell(treequest.ABMCTSA(), size), BOTH, False)]


@dataclass(frozen=True)
class Lab:
    """The models, the critic and the problems."""

    large: Path
    task: str
    critic_name: str
    dev: int
    test: int
    cache: str

    @cached_property
    def models(self) -> dict[str, Any]:
        """The policy of each arm, behind the response cache."""
        folders = {"small": SMALL, "large": self.large}
        return {arm: load_policy(f"transformers:{folder}", cache=self.cache) for arm, folder in folders.items()}

    @cached_property
    def critic(self) -> Critic:
        """The critic."""
        critic: Critic = load_critic(self.critic_name)
        return critic

    @cached_property
    def prices(self) -> dict[str, dict[str, float]]:
        """Prices in parameters per token, in millions."""
        sizes = {"small": parameters(SMALL) / 1e6, "large": parameters(self.large) / 1e6}
        found = {arm: {"prompt": size, "generated": size} for arm, size in sizes.items()}
        return {**found, self.critic.name: {"forward": 0.0}}

    def plans(self, one: Row, size: int, split: str) -> list[search.Plan]:
        """Search the problems of a split."""
        import numpy as np

        np.random.seed(SEED)
        problems = generated(self.task, split)[: self.dev if split == "dev" else self.test]
        policy = ArmsPolicy({arm: self.models[arm] for arm in one.arms})
        options: dict[str, Any] = {"mas": "rpsv", "policy": policy, "critic": self.critic, "prices": self.prices}
        options["concurrency"] = 32 if one.together else 1
        found = search.run(one.make(size), problems, seed=SEED, raise_errors=True, progress=True, **options)
        return sorted(found, key=lambda plan: plan.problem_id)

    def cost(self, one: Row, size: int) -> float:
        """Return the mean cost on dev."""
        return fmean(plan.usd or 0.0 for plan in self.plans(one, size, "dev"))

    def size_for(self, one: Row, most: float) -> int:
        """Return the largest size whose mean cost on dev is at most ``most``; at least 1."""
        low, high = 1, LARGEST
        guess = 12
        while low < high:
            spent = self.cost(one, guess)
            low, high = (guess, high) if spent <= most else (low, max(low, guess - 1))
            if high <= low:
                break
            # Cost grows about as size does, so the next guess interpolates.
            guess = min(high, max(low + 1, round(guess * most / spent)))
        return low


def scores(plans: Sequence[search.Plan]) -> Scores:
    """Return accuracy and cost by problem."""
    hits = {plan.problem_id: float(bool(plan.correct)) for plan in plans}
    return Scores(hits, {plan.problem_id: plan.usd or 0.0 for plan in plans})


def line(name: str, plans: Sequence[search.Plan], reference: Scores | None) -> str:
    """Return a row of the table."""
    found = scores(plans)
    span = accuracy_interval([*found.hits.values()], len(found.hits))
    usage = sum((plan.usage for plan in plans), Usage())
    large = sum(arm.calls for arm in usage.arms if arm.arm == "large") / usage.agent_calls
    chosen = sum(arm.chosen for arm in usage.arms if arm.arm == "large") / sum(arm.chosen for arm in usage.arms)
    cells = (
        name,
        f"{100 * found.hit:.1f}",
        f"{100 * span.low:.1f} to {100 * span.high:.1f}",
        f"{usage.generated_tokens / len(plans):,.0f}",
        f"{100 * large:.0f}",
        f"{100 * chosen:.0f}",
        "" if reference is None else against(found, reference).replace("tokens x", "cost x"),
    )
    return f"| {' | '.join(cells)} |"


def table(lab: Lab, reference: Row, size: int, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    most = SHARE * lab.cost(reference, size)
    whole = lab.plans(reference, size, "test")
    yield "| search | Hit@1 | 95% interval | TOK | large, % of AC | large, % of answers | against the reference |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    yield line(f"{reference.name.format(size)}, large alone (reference)", whole, None)
    passes = {arm: row("bon:{}", arm) for arm in BOTH}
    for arm, one in passes.items():
        yield line(f"single pass, {arm} alone", lab.plans(one, 1, "test"), scores(whole))
    for one in rows:
        best = lab.size_for(one, most)
        who = "" if len(one.arms) > 1 else f", {one.arms[0]} alone"
        yield line(f"{one.name.format(best)}{who}", lab.plans(one, best, "test"), scores(whole))


def main() -> None:
    """Choose sizes on dev, measure on test, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", type=Path, required=True, help="folder of the larger model")
    parser.add_argument("--tasks", nargs="+", default=["stories-4", "stories-5"], help="of benchmarks.tiny.stories")
    parser.add_argument("--critic", default="policy-likelihood", help="critic that guides all rows")
    parser.add_argument("--reference", default="adaptive:{}", help="planner of the reference and of the rows with arms")
    parser.add_argument("--size", type=int, default=15, help="size of the reference")
    parser.add_argument("--dev", type=int, default=30, help="dev problems")
    parser.add_argument("--test", type=int, default=100, help="test problems")
    parser.add_argument("--cache", required=True, help="response cache; the rows share messages through it")
    parser.add_argument("--out", type=Path, default=PAGE, help="page to write")
    options = parser.parse_args()
    spec = options.reference
    comma = "," if ":" in spec else ":"
    rows = [row(spec, arm) for arm in BOTH]
    rows += [row(spec), *(row(f"{spec}{comma}arms={rule}") for rule in ("thompson", "cost")), *treequest_row()]
    rows += [row("bon:{}", "small"), row("bon:{}", "large"), row("bon:{}")]
    lines: list[str] = []
    for task in options.tasks:
        lab = Lab(options.large, task, options.critic, options.dev, options.test, options.cache)
        lines += ["", f"## {task}", ""]
        for text in table(lab, row(spec, "large"), options.size, rows):
            print(text, flush=True)
            lines.append(text)
            options.out.write_text(page(lab, lines), encoding="utf-8")


def page(lab: Lab, lines: Sequence[str]) -> str:
    """Return the page."""
    about = (__doc__ or "").partition("\n\n")[2]
    command, text = about.partition("\n\n")[::2]
    small, large = (parameters(folder) for folder in (SMALL, lab.large))
    facts = "\n".join(part.removeprefix("    ") for part in command.splitlines())
    sums = {name: weights_file(str(folder)) for name, folder in (("small", SMALL), ("large", lab.large))}
    stated = ", ".join(f"{name} {digest(file)}" for name, file in sums.items() if file is not None)
    return f"""# Two models as arms

{text.strip()}

```console
{facts}
```

{lab.dev} dev and {lab.test} test problems per task, run seed {SEED}, MAS rpsv, critic {lab.critic_name}, at no cost.
Parameters: small {small:,}, large {large:,}, a ratio of {large / small:.2f}. Weights: {stated}.
Rows without "alone" have both arms, in turn unless `arms=` says otherwise. The last columns contain the share of the
messages and of the chosen answers' messages that the large model wrote, and the paired differences on test.
Stories of 4 and 5 events; both models were trained on stories of up to 4.
{chr(10).join(lines)}
"""


def digest(file: Path) -> str:
    """Return the first digits of a file's SHA-256."""
    import hashlib

    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12]


if __name__ == "__main__":
    main()
