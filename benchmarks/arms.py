r"""A small and a three times larger model as arms of one policy, compared with the large model alone.

    python -m benchmarks.arms --cache replies.db

This page compares searches that use two models to write the messages with searches that use only one of them. Both
models are part of this repository, so no training is needed. The small one (`benchmarks/tiny/tiny-natural`) has no
designed errors, but it was trained only on stories of up to four events. The large one (`mas_gym/tiny/weights`) makes
errors by design at all difficulties. In single passes on dev, the small model is better than the large one at
difficulty 3 and worse at 4 and 5. All three difficulties are included, so one problem in three favors the small model.

Messages have at most 128 tokens in all rows. On stories longer than those of its training, the small model sometimes
repeats itself until it fills its context window of 1,024 tokens, and the prompt of the next agent is then too long. The
large model writes no message of more than 50 tokens, and the small one exceeds 128 in less than 1% of its messages.

The cost of a search is the number of tokens that the agents read and write, each multiplied by the number of parameters
of its model, in millions. Reward calls (RC) are not included. The reference is the large model alone with the planner
of `PLANNERS` that has the highest Hit@1 on dev. Every other row has the largest size (simulations, samples or trials;
at most 64) whose mean cost on dev is at most 60% of the reference's, or size 1; a cascade has the thresholds and sizes
with the highest Hit@1 on dev within this cost. Accuracy and cost on test are compared with the reference, paired over
problems.

TreeQuest's multi-LLM ABMCTSM is measured only with `--abmctsm N`. It samples a Bayesian model at every trial, which
took 10.4 to 15.0 CPU seconds with two arms (PyMC 5.28.5), so 10 problems of 10 trials take about 20 CPU minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any

import mas_gym
import search
from benchmarks.paper.lab import weights_file
from benchmarks.stopping import Scores, against
from mas_gym.policies import load_policy
from mas_gym.policies.arms_policy import ArmsPolicy
from rewardmodels import load_critic
from search.protocol import Critic, Planner, ScoringContext
from search.results.intervals import accuracy_interval
from search.usage import Usage

PAGE = Path(__file__).with_name("pages") / "search" / "arms.md"
SEED = 14
SHARE = 0.6
PASSES = 60
SMALL = Path(__file__).parent / "tiny" / "tiny-natural"
LARGE = Path(mas_gym.__file__).parent / "tiny" / "weights"
LEVELS = (3, 4, 5)
LARGEST = 64
MESSAGE = 128
BOTH = ("small", "large")
PLANNERS = ("mcts:10,3", "adaptive:15")
PROCESS, OUTCOME = "tiny-masprm", "tiny-orm"
CASCADE = "cascade:{first},arms=only:small>{last},arms=only:large@{threshold:g}"
THRESHOLDS = (0.5, 0.8)


def parameters(folder: Path) -> int:
    """Return the number of parameters in a model's safetensors file."""
    with (folder / "model.safetensors").open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes:
        name: Its name in the table, with ``{}`` for the size.
        make: Returns the planner of a size.
        arms: The arms that it may use.
        critic: The critic that guides it.
        together: Whether searches run concurrently; TreeQuest draws from a generator that all searches share.
    """

    name: str
    make: Callable[[int], Planner]
    arms: tuple[str, ...] = BOTH
    critic: str = PROCESS
    together: bool = True

    @property
    def label(self) -> str:
        """The name with the arm, if there is only one."""
        return self.name if len(self.arms) > 1 else f"{self.name}, {self.arms[0]} alone"


def entry(spec: str, *arms: str, critic: str = PROCESS) -> Entry:
    """Return the row of a planner's short form with ``{}`` for the size."""
    return Entry(spec, lambda size: search.load_planner(spec.format(size)), arms or BOTH, critic)


def treequest_entry(name: str) -> Entry:
    """Return the row of an algorithm of TreeQuest over both arms."""
    import treequest

    algorithm = getattr(treequest, name)
    make: Callable[[int], Planner] = lambda size: search.AskTell(algorithm(), size)  # noqa: E731
    return Entry(f"TreeQuest {name}, {{}} trials", make, together=False)


class Memory(Critic):
    """A critic that scores each state once, because rows share most of their states."""

    def __init__(self, critic: Critic) -> None:
        """Wrap a critic."""
        self.critic, self._known = critic, dict[Any, float]()
        for name in ("name", "terminal_only", "free", "scores_actions", "reads_peers"):
            setattr(self, name, getattr(critic, name))

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return the values of the states."""
        new = {one.state: one for one in contexts if one.state not in self._known}
        self._known |= dict(zip(new, self.critic.score([*new.values()]), strict=True))
        return [self._known[one.state] for one in contexts]


@dataclass(frozen=True)
class Lab:
    """The models, the critics and the problems.

    Attributes:
        cache: Response cache.
        numbers: Problems per difficulty by split.
    """

    cache: str
    numbers: dict[str, int]
    critics: dict[str, Critic] = field(default_factory=dict)

    @cached_property
    def models(self) -> dict[str, Any]:
        """The policy of each arm, behind the response cache."""
        specs = {"small": f"transformers:{SMALL}", "large": f"transformers:{LARGE}"}
        return {arm: load_policy(spec, cache=self.cache) for arm, spec in specs.items()}

    def problems(self, split: str) -> list[Any]:
        """Return the problems of a split."""
        tasks = [mas_gym.load_task("arithmetic", split=split, difficulty=level) for level in LEVELS]
        return [problem for task in tasks for problem in task[: self.numbers[split]]]

    def plans(self, one: Entry, size: int, split: str, limit: int | None = None) -> list[search.Plan]:
        """Search the problems of a split."""
        import numpy as np

        np.random.seed(SEED)
        critic = self.critics.setdefault(one.critic, Memory(load_critic(one.critic)))
        sizes = {"small": parameters(SMALL) / 1e6, "large": parameters(LARGE) / 1e6}
        prices: Any = {arm: {"prompt": size, "generated": size} for arm, size in sizes.items()}
        policy = ArmsPolicy({arm: self.models[arm] for arm in one.arms})
        options: dict[str, Any] = {"mas": "rpsv", "policy": policy, "critic": critic}
        options["prices"] = prices | {critic.name: {"forward": 0.0}}
        options["sampling"] = search.Sampling(max_new_tokens=MESSAGE)
        options["concurrency"] = 32 if one.together else 1
        problems = self.problems(split)[:: 1 if limit is None else -(-3 * self.numbers[split] // limit)]
        found = search.run(one.make(size), problems, seed=SEED, raise_errors=True, progress=True, **options)
        return sorted(found, key=lambda plan: plan.problem_id)

    def dev(self, one: Entry, size: int) -> Scores:
        """Return accuracy and cost on dev."""
        return scores(self.plans(one, size, "dev"))

    def size_for(self, one: Entry, most: float) -> int:
        """Return the largest size whose mean cost on dev is at most ``most``; at least 1."""
        low, high = 1, LARGEST
        guess = 4
        while low < high:
            spent = self.dev(one, guess).spent
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


HEAD = (
    "| search | Hit@1 | 95% interval | in the tree | new | cost | TOK | RC | large, % of AC | of answers "
    "| against the reference |"
)


def right_somewhere(plans: Iterable[search.Plan]) -> set[str]:
    """Return the problems with a right answer in the tree."""
    return {plan.problem_id for plan in plans if any(one.correct for one in plan.candidates)}


def line(name: str, plans: Sequence[search.Plan], large_alone: Sequence[search.Plan]) -> str:
    """Return a row of the table; the reference is restricted to the row's problems."""
    found, reference = scores(plans), scores(large_alone)
    right, known = right_somewhere(plans), right_somewhere(large_alone)
    span = accuracy_interval([*found.hits.values()], len(found.hits))
    usage = sum((plan.usage for plan in plans), Usage())
    large = [arm for arm in usage.arms if arm.arm == "large"]
    compared = ""
    if plans is not large_alone:
        same = Scores(*({key: part[key] for key in found.hits} for part in reference))
        compared = against(found, same).replace("tokens x", "cost x")
    cells = (
        name,
        f"{100 * found.hit:.1f}",
        f"{100 * span.low:.1f} to {100 * span.high:.1f}",
        f"{100 * len(right) / len(plans):.1f}",
        f"{100 * len(right - known) / len(plans):.1f}",
        f"{1e6 * found.spent:,.0f}",
        f"{usage.generated_tokens / len(plans):,.0f}",
        f"{usage.reward_calls / len(plans):,.0f}",
        f"{100 * sum(arm.calls for arm in large) / usage.agent_calls:.0f}",
        f"{100 * sum(arm.chosen for arm in large) / sum(arm.chosen for arm in usage.arms):.0f}",
        compared,
    )
    return f"| {' | '.join(cells)} |"


def cascade(lab: Lab, last: str, most: float) -> Entry | None:
    """Return the cascade from the small to the large model with the highest dev Hit@1 within a cost, if any."""
    firsts = ("bon:1", "mcts:5,3")
    found: list[tuple[float, float, str]] = []
    for first, threshold in product(firsts, THRESHOLDS):
        spec = CASCADE.format(first=first, last=last, threshold=threshold)
        dev = lab.dev(entry(spec), 0)
        if dev.spent <= most:
            found.append((-dev.hit, dev.spent, spec))
    return entry(min(found)[2]) if found else None


def table(lab: Lab, trials: int) -> Iterator[str]:
    """Yield the lines of the page's table, and the choices."""
    alone = {spec: lab.dev(entry(spec, "large"), 0) for spec in PLANNERS}
    best = max(alone, key=lambda spec: (alone[spec].hit, -alone[spec].spent))
    most = SHARE * alone[best].spent
    tried = ", ".join(f"{spec} {100 * found.hit:.1f} at cost {1e6 * found.spent:,.0f}" for spec, found in alone.items())
    yield f"Large model alone on dev: {tried}.\n"
    yield HEAD
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|"
    whole = lab.plans(entry(best, "large"), 0, "test")
    yield line(f"{best}, large alone (reference)", whole, whole)
    for arm in BOTH:
        yield line(f"single pass, {arm} alone", lab.plans(entry("single", arm), 0, "test"), whole)
    name, _, settings = best.partition(":")
    spec = f"{name}:{{}}{''.join(f',{one}' for one in settings.split(',')[1:])}"
    rows = [entry(spec, arm) for arm in BOTH]
    rows += [entry(spec), *(entry(f"{spec},arms={rule}") for rule in ("thompson", "cost"))]
    for one in rows:
        size = lab.size_for(one, most)
        yield line(one.label.format(size), lab.plans(one, size, "test"), whole)
    chosen = cascade(lab, best, most)
    if chosen is not None:
        yield line(chosen.name, lab.plans(chosen, 0, "test"), whole)
    rows = [entry("bon:{}", *arms, critic=OUTCOME) for arms in (BOTH, ("large",), ("small",))]
    for one in (treequest_entry("ABMCTSA"), *rows):
        size = lab.size_for(one, most)
        yield line(one.label.format(size), lab.plans(one, size, "test"), whole)
    if trials:
        one, size = treequest_entry("ABMCTSM"), lab.size_for(treequest_entry("ABMCTSA"), most)
        yield line(f"{one.label.format(size)}, {trials} problems", lab.plans(one, size, "test", trials), whole)
    if chosen is None:
        yield f"\nNo cascade of the tested sizes and thresholds costs at most {SHARE:.0%} of the reference on dev."


def passes(lab: Lab) -> Iterator[str]:
    """Yield the Hit@1 of single passes on dev by model and difficulty."""
    more = Lab(lab.cache, {"dev": PASSES})
    yield f"Single passes on dev, Hit@1 with {PASSES} problems per difficulty:\n"
    yield f"| model | {' | '.join(f'difficulty {level}' for level in LEVELS)} |"
    yield f"|---|{'---:|' * len(LEVELS)}"
    for arm in BOTH:
        hits: dict[str, list[float]] = defaultdict(list)
        for plan in more.plans(entry("single", arm), 0, "dev"):
            hits[plan.problem_id.split("/")[-2]].append(float(bool(plan.correct)))
        found = [hits[str(level)] for level in LEVELS]
        spans = [accuracy_interval(shares, PASSES) for shares in found]
        cells = [
            f"{100 * fmean(shares):.1f} ({100 * span.low:.1f} to {100 * span.high:.1f})"
            for shares, span in zip(found, spans, strict=True)
        ]
        yield f"| {arm} | {' | '.join(cells)} |"
    yield ""


def main() -> None:
    """Choose sizes on dev, measure on test, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", type=int, default=8, help="dev problems per difficulty")
    parser.add_argument("--test", type=int, default=20, help="test problems per difficulty")
    parser.add_argument("--abmctsm", type=int, default=0, help="test problems of TreeQuest's ABMCTSM, which is slow")
    parser.add_argument("--cache", required=True, help="response cache; the rows share messages through it")
    parser.add_argument("--out", type=Path, default=PAGE, help="page to write")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    lab = Lab(options.cache, {"dev": options.dev, "test": options.test})
    lines: list[str] = []
    for text in chain(passes(lab), table(lab, options.abmctsm)):
        print(text, flush=True)
        lines.append(text)
        options.out.write_text(page(lab, lines), encoding="utf-8")


def page(lab: Lab, lines: Sequence[str]) -> str:
    """Return the page."""
    about = (__doc__ or "").partition("\n\n")[2]
    command, text = about.partition("\n\n")[::2]
    small, large = parameters(SMALL), parameters(LARGE)
    facts = "\n".join(part.removeprefix("    ") for part in command.splitlines())
    sums = {name: weights_file(str(folder)) for name, folder in (("small", SMALL), ("large", LARGE))}
    stated = ", ".join(f"{name} {digest(file)}" for name, file in sums.items() if file is not None)
    return f"""# Two models as arms

{text.strip()}

```console
{facts}
```

Arithmetic at difficulties {", ".join(map(str, LEVELS))} with {lab.numbers["dev"]} dev and {lab.numbers["test"]} test
problems each, run seed {SEED}, MAS rpsv. The critic is {PROCESS}; for `bon` it is {OUTCOME}.
Parameters: small {small:,}, large {large:,}, a ratio of {large / small:.2f}. Weights: {stated}.
Rows without "alone" use both arms, in turn unless `arms=` says otherwise. "In the tree" is the percentage of problems
with a right answer in the tree, and "new" the percentage with a right answer in this tree but not in that of the
reference. The last columns contain the large model's share of all messages and of the messages of the chosen answers,
and the paired differences on test.

{chr(10).join(lines)}
"""


def digest(file: Path) -> str:
    """Return the first digits of a file's SHA-256."""
    import hashlib

    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12]


if __name__ == "__main__":
    main()
