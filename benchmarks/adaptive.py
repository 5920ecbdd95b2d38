"""Searches with stopping rules, and cascades, compared with fixed sizes, with the bundled agents.

    python -m benchmarks.adaptive --cache replies.db

This page compares the accuracy and tokens of searches that stop early, and cascades with those of
searches of fixed size. Each planner runs once per problem to completion. Every smaller size of `bon` and `mcts`, and
every search that stops, is a prefix of this run, so all rows use the same messages. A cascade uses the messages of its
stages, and each message is counted once. All choices are made on dev. The threshold is the smallest whose dev Hit@1 is
at least that of the complete search; for calibration maps (`stop.json`), it is chosen on held-out probabilities. The
fixed size is the smallest whose Hit@1 on dev is at least that of the compared rule. Intervals of differences are paired
over test problems.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache as cache_results
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import mas_gym
import search
from benchmarks import truth_bounds
from benchmarks.paper.lab import weights
from benchmarks.paper.options import Options
from benchmarks.real.common import DATA
from benchmarks.real.game24 import GPT4, Lookup, recorded_values
from benchmarks.real.game24_recorded import SOURCE, read_recordings
from benchmarks.stopping import Scores, against
from benchmarks.tiny.stories import generated
from mas_gym.errors import DataNotFoundError
from mas_gym.policies import load_policy
from mas_gym.policies.cache import CachedPolicy
from mas_gym.systems.state import MASState
from rewardmodels import load_critic
from search.compare.stop_thresholds import Check, Checked, fit
from search.planners.stop_rules import FEATURES, Evidence, StopMap, StopRule
from search.protocol import Model, PlanGenerator, Planner, Propose
from search.results.intervals import accuracy_interval

NATURAL = Path(__file__).with_name("tiny") / "tiny-natural"
PAGE = Path(__file__).with_name("pages") / "adaptive.md"
SEED = 14
PROBABILITIES = tuple(round(0.3 + 0.01 * i, 2) for i in range(70))

Drawn = dict[MASState, list[int]]
"""Tokens of the messages drawn at each state, in order."""


class Point(NamedTuple):
    """A check of a search: the evidence, the tokens so far, and whether the answer is right."""

    evidence: Evidence
    tokens: int
    right: bool


class Trace(NamedTuple):
    """A complete search: its checks, its messages, its answer and the critic's value of the answer."""

    problem: str
    points: tuple[Point, ...]
    right: bool
    value: float
    drawn: Drawn

    @property
    def tokens(self) -> int:
        """Tokens of the whole search."""
        return sum(sum(tokens) for tokens in self.drawn.values())


@dataclass(frozen=True)
class _Note(StopRule):
    """Never stops; notes the evidence and the tokens so far at every check, or the messages if none has tokens."""

    by_message: bool = False
    drawn: dict[MASState, Drawn] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    checks: dict[MASState, list[tuple[Evidence, int]]] = field(default_factory=lambda: defaultdict(list))

    def reason(self, evidence: Evidence) -> None:
        tokens = sum(sum(tokens) for tokens in self.drawn[evidence.root].values())
        self.checks[evidence.root].append((evidence, tokens))


@dataclass(frozen=True)
class _Metered(Planner):
    """A planner whose messages are counted as they arrive."""

    planner: Planner
    note: _Note

    def for_run(self, critic: Any, training: bool) -> _Metered:
        return replace(self, planner=self.planner.for_run(critic, training))

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        inner, replies = self.planner.plan(model, root, rng), None
        while True:
            try:
                requests = inner.send(replies)  # type: ignore[arg-type]
            except StopIteration as end:
                plan: search.Plan = end.value
                return plan
            replies = yield requests
            for request, reply in zip(requests, replies, strict=True):
                if isinstance(request, Propose):
                    counts = [1 if self.note.by_message else proposal.tokens for proposal in reply]
                    self.note.drawn[root][request.state] += counts


class Lab:
    """The agents, the critics and the problems."""

    def __init__(self, cache: Path | None, dev: int, test: int, agents: str = "tiny", stories: str = "") -> None:
        policy = load_policy(agents)
        self.policy = policy if cache is None else CachedPolicy(policy, cache)
        self.sizes, self.stories = {"dev": dev, "test": test}, stories
        self._critics: dict[str, Any] = {}
        self.traces = cache_results(self._traces)

    def _traces(
        self, spec: str, critic: str, split: str, difficulty: int = 3, number: int | None = None
    ) -> list[Trace]:
        """Search every problem of a split once."""
        guide = self._critics.setdefault(critic, load_critic(critic))
        return traced(spec, guide, problems=self.problems(split, difficulty, number), mas="rpsv", policy=self.policy)

    def problems(self, split: str, difficulty: int = 3, number: int | None = None) -> Any:
        """Return the first problems of a split."""
        size = number or self.sizes[split]
        if self.stories:
            return generated(self.stories, split)[:size]
        return mas_gym.load_task("arithmetic", split=split, limit=size, difficulty=difficulty)


def traced(spec: str, critic: Any, by_message: bool = False, **world: Any) -> list[Trace]:
    """Search every problem of a world once, without stopping."""
    note = _Note(by_message)
    planner: Any = search.load_planner(spec)
    planner = replace(planner, stop=note) if "stop" in planner.__dataclass_fields__ else planner
    options: dict[str, Any] = {"seed": SEED, "raise_errors": True, "progress": True, **world}
    plans = search.run(_Metered(planner, note), options.pop("problems", None), critic=critic, **options)
    found: list[Trace] = []
    for plan in sorted(plans, key=lambda plan: plan.problem_id):
        tree, best = plan.tree, plan.best
        assert tree is not None and best is not None and best.node is not None and plan.mas is not None
        verdicts = {one.state: bool(one.correct) for one in plan.candidates}
        root = tree.states[0]
        points = (Point(one, tokens, verdicts[one.state]) for one, tokens in note.checks[root])
        value = tree.values[best.node]
        if math.isnan(value):
            [value] = critic.score([search.ScoringContext(best.state, plan.mas, None)])
        found.append(Trace(plan.problem_id, tuple(points), bool(plan.correct), value, dict(note.drawn[root])))
    return found


Rule = Callable[[Trace], tuple[bool, int, bool]]
"""Returns whether a search is right, its tokens, and whether it stopped early."""


def stopping(settled: Callable[[Evidence], bool]) -> Rule:
    """Return the rule of a search that stops at the first settled check."""

    def run(trace: Trace) -> tuple[bool, int, bool]:
        found = next((point for point in trace.points if settled(point.evidence)), None)
        return (trace.right, trace.tokens, False) if found is None else (found.right, found.tokens, True)

    return run


def fixed(size: int) -> Rule:
    """Return the rule of a fixed number of passes or simulations."""
    return stopping(lambda evidence: evidence.check >= size)


def calibrated(stop_map: StopMap, threshold: float) -> Rule:
    """Return the rule of a calibrated probability."""
    return stopping(lambda evidence: stop_map.probability(evidence.features) > threshold)


def claimed(threshold: float, likelihood: bool = False) -> Rule:
    """Return the rule of the critic's own probability."""
    return stopping(lambda evidence: (evidence.value if likelihood else (1 + evidence.value) / 2) > threshold)


def scored(traces: Iterable[Trace], rule: Rule) -> Scores:
    """Return the accuracy and the cost of a rule by problem."""
    found = {trace.problem: rule(trace) for trace in traces}
    hits = {key: float(right) for key, (right, _, _) in found.items()}
    return Scores(hits, {key: float(tokens) for key, (_, tokens, _) in found.items()})


def checked(traces: Iterable[Trace]) -> list[Checked]:
    """Return traces as calibration takes them."""
    return [
        Checked(
            trace.problem,
            tuple(Check(tuple(p.evidence.features[name] for name in FEATURES), p.right) for p in trace.points),
            trace.right,
        )
        for trace in traces
    ]


def cheapest(rules: Iterable[tuple[str, Rule]], dev: Sequence[Trace], least: float) -> tuple[str, Rule] | None:
    """Return the rule of fewest tokens among those whose Hit@1 on dev is at least ``least``."""
    found = [(scored(dev, rule).spent, name, rule) for name, rule in rules if scored(dev, rule).hit >= least]
    return min(found, key=lambda one: one[:2])[1:] if found else None


# ---- the tables


def family(lab: Lab, spec: str, critic: str) -> Iterator[str]:
    """Yield the table of one planner."""
    dev, test = lab.traces(spec, critic, "dev"), lab.traces(spec, critic, "test")
    known = fit(checked(dev), "", "").map
    rows, missed = rules_chosen(dev, known, critic == "policy-likelihood")
    yield f"\n## {spec} with {critic}{f', {lab.policy.name} on {lab.stories}' if lab.stories else ''}\n"
    yield f"{len(dev)} dev and {len(test)} test problems.\n"
    yield "| rule | Hit@1 | 95% interval | TOK | fixed size | rule against fixed size |"
    yield "|---|---:|---:|---:|---|---|"
    for name, rule in rows.items():
        yield line(name, scored(test, rule), fixed_size(dev, rule), test)
    if missed:
        yield f"\nWith {' or '.join(missed)}, no tested X reaches the dev Hit@1 of the complete search."
    yield from transfer_of_stops(known, test)
    size = fixed_size(dev, fixed(10**9))
    yield from bounds(size[1] if size else fixed(10**9), known, test)


def rules_chosen(dev: Sequence[Trace], known: StopMap, likelihood: bool = False) -> tuple[dict[str, Rule], list[str]]:
    """Return the rules that are compared, with the settings chosen on dev, and the forms of which no setting fits."""
    whole = fixed(10**9)
    rows = {"complete": whole, f"stop=stop.json, threshold {known.threshold:g}": calibrated(known, known.threshold)}
    missed: list[str] = []
    grids: dict[str, list[tuple[float, Rule]]] = {
        "stop={}": [(p, claimed(p, likelihood)) for p in PROBABILITIES],
    }
    for form, grid in grids.items():
        chosen = cheapest([(form.format(setting), rule) for setting, rule in grid], dev, scored(dev, whole).hit)
        if chosen is None:
            missed.append(form.format("X"))
        else:
            rows[chosen[0]] = chosen[1]
    return rows, missed


def fixed_size(dev: Sequence[Trace], rule: Rule) -> tuple[str, Rule] | None:
    """Return the smallest size whose Hit@1 on dev is at least that of a rule, or of the whole search if less."""
    size = max(len(trace.points) for trace in dev) + 1
    sizes = [(f"size {n}", fixed(n)) for n in range(1, size + 1)]
    return cheapest(sizes, dev, min(scored(dev, rule).hit, scored(dev, fixed(size)).hit))


def line(name: str, found: Scores, other: tuple[str, Rule] | None, test: Sequence[Trace]) -> str:
    """Return a row with the test results of a rule, compared with a fixed size."""
    compared = "none reaches it on dev" if other is None else against(found, scored(test, other[1]))
    cells = (name, *reached(found))
    return f"| {' | '.join((*cells, '' if other is None else other[0], compared))} |"


def coverage(stop_map: StopMap, traces: Sequence[Trace]) -> tuple[str, ...]:
    """Return the share that stops, its accuracy, its mean probability, Hit@1, and Hit@1 of whole searches."""
    stops: list[tuple[bool, float]] = []
    for trace in traces:
        for point in trace.points:
            probability = stop_map.probability(point.evidence.features)
            if probability > stop_map.threshold:
                stops.append((point.right, probability))
                break
    stopped = scored(traces, calibrated(stop_map, stop_map.threshold))
    whole = fmean(trace.right for trace in traces)
    means = [f"{100 * fmean(column):.1f}" for column in zip(*stops, strict=True)] if stops else ["none", "none"]
    share = stopped.spent / fmean(trace.tokens for trace in traces)
    hits = f"{100 * stopped.hit:.1f}", f"{100 * whole:.1f}"
    return (f"{100 * len(stops) / len(traces):.0f}", *means, *hits, f"{share:.2f}")


def bounds(size: Rule, known: StopMap, test: Sequence[Trace], unit: str = "tokens") -> Iterator[str]:
    """Yield the savings of rules with access to the truth, compared with a fixed size."""
    yield "\nUpper bounds on test, from rules with access to the ground truth, against the fixed size in the first row"
    yield "of the table above:\n"
    runs = [
        truth_bounds.Run(
            trace.problem,
            (
                *(truth_bounds.Check(p.tokens, p.right, known.probability(p.evidence.features)) for p in trace.points),
                truth_bounds.Check(trace.tokens, trace.right),
            ),
        )
        for trace in test
    ]
    yield from truth_bounds.table(runs, scored(test, size), unit)


def transfer_of_stops(stop_map: StopMap, test: Sequence[Trace]) -> Iterator[str]:
    """Yield the calibration of one planner's probabilities on test."""
    share, right, expected, *_ = coverage(stop_map, test)
    yield f"\nOn the test split, `stop.json` stops {share}% of the searches early. Of these, {right}% are right;"
    yield f"the predicted share is {expected}%."


_STOPS = "stop early, % | of these right, % | predicted, % | Hit@1 | Hit@1, complete | relative tokens |"
HEAD = f"| calibrated on | used on | {_STOPS}"


def transfer(lab: Lab, spec: str, critic: str, number: int) -> Iterator[str]:
    """Yield the table of thresholds that are used on other difficulties."""
    yield f"\n## A threshold on other difficulties: {spec} with {critic}\n"
    yield f"The threshold is calibrated on difficulty 3 (dev) and used on {number} test problems per difficulty.\n"
    yield f"| difficulty | {_STOPS}"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    known = fit(checked(lab.traces(spec, critic, "dev")), "", "").map
    for level in (2, 3, 4):
        yield f"| {level} | {' | '.join(coverage(known, lab.traces(spec, critic, 'test', level, number)))} |"


Stages = Sequence[Sequence[Trace]]


def cascade(thresholds: Sequence[float], stages: Stages) -> Scores:
    """Return the accuracy and the cost of a cascade; messages that stages share are counted once."""
    hits: dict[str, float] = {}
    tokens: dict[str, float] = {}
    for traces in zip(*stages, strict=True):
        drawn: Drawn = {}
        for number, trace in enumerate(traces):
            for state, spent in trace.drawn.items():
                drawn[state] = max(drawn.get(state, []), spent, key=len)
            if number == len(thresholds) or (1 + trace.value) / 2 > thresholds[number]:
                break
        hits[trace.problem] = float(trace.right)
        tokens[trace.problem] = float(sum(map(sum, drawn.values())))
    return Scores(hits, tokens)


def cascades(lab: Lab, specs: Sequence[str], critic: str, numbers: tuple[int, int]) -> Iterator[str]:
    """Yield the table of a cascade against its last stage alone."""
    dev, test = (
        [lab.traces(spec, critic, split, number=number) for spec in specs]
        for split, number in zip(("dev", "test"), numbers, strict=True)
    )
    alone = scored(dev[-1], fixed(10**9))
    grid = [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98]
    tried = ((cascade(pair, dev), pair) for pair in product(grid, repeat=len(specs) - 1))
    fits = [(found.spent, pair) for found, pair in tried if found.hit >= alone.hit]
    yield f"\n## A cascade: {' > '.join(specs)} with {critic}\n"
    yield f"Thresholds are chosen on {numbers[0]} dev problems. The figures are for {numbers[1]} test problems.\n"
    yield "| search | Hit@1 | 95% interval | TOK | | against the last stage alone |"
    yield "|---|---:|---:|---:|---|---|"
    whole = ("", fixed(10**9))
    for spec, traces in zip(specs, test, strict=True):
        yield line(spec, scored(traces, fixed(10**9)), whole, test[-1])
    if not fits:
        yield "\nNo thresholds below 0.98 keep the accuracy of the last stage on dev."
        return
    chosen = min(fits)[1]
    name = ">".join([specs[0], *(f"{spec}@{threshold:g}" for spec, threshold in zip(specs[1:], chosen, strict=True))])
    yield line(f"cascade:{name}", cascade(chosen, test), whole, test[-1])


def best_of_n(lab: Lab) -> Iterator[str]:
    """Yield MCTS that stops against best-of-N with the ORM at equal accuracy on dev."""
    runs = {split: (lab.traces("mcts:20,3", "tiny-masprm", split), lab.traces("bon:20", "tiny-orm", split)) for split in
            ("dev", "test")}  # fmt: skip
    (dev, passes), (test, test_passes) = runs["dev"], runs["test"]
    known = fit(checked(dev), "", "").map
    rule = calibrated(known, known.threshold)
    size = cheapest([(f"bon:{n}", fixed(n)) for n in range(1, 21)], passes, scored(dev, rule).hit)
    yield "\n## MCTS with a stopping rule compared with best-of-N with the ORM\n"
    yield f"{len(dev)} dev and {len(test)} test problems. N is the smallest with a dev Hit@1 of at least that of the"
    yield "search with the stopping rule.\n"
    yield "| rule | Hit@1 | 95% interval | TOK | best-of-N | MCTS minus best-of-N, Hit@1 and tokens |"
    yield "|---|---:|---:|---:|---|---|"
    yield line(f"mcts:20,3,stop=stop.json, {known.threshold:g}", scored(test, rule), size, test_passes)


def horizons(lab: Lab, spec: str, critic: str, limits: Sequence[int | None]) -> Iterator[str]:
    """Yield the table of ``horizon=budget`` against the fixed horizon, under budgets of calls."""
    yield f"\n## {spec},horizon=budget with {critic}\n"
    yield f"{lab.sizes['test']} test problems; `--budget calls=N` for both horizons. No setting was tuned.\n"
    yield "| budget | horizon | Hit@1 | 95% interval | TOK | AC | budget horizon against fixed horizon |"
    yield "|---:|---|---:|---:|---:|---:|---|"
    options: dict[str, Any] = {"mas": "rpsv", "policy": lab.policy, "critic": load_critic(critic), "seed": SEED}
    for limit in limits:
        first: Scores | None = None
        for horizon in ("fixed", "budget"):
            budget = None if limit is None else search.Budget(calls=limit)
            planner = search.load_planner(f"{spec},horizon={horizon}")
            plans = list(search.run(planner, lab.problems("test"), budget=budget, progress=True, **options))
            hits = {plan.problem_id: float(bool(plan.correct)) for plan in plans}
            found = Scores(hits, {plan.problem_id: float(plan.usage.generated_tokens) for plan in plans})
            calls = fmean(plan.usage.agent_calls for plan in plans)
            compared = "" if first is None else against(found, first)
            first = first or found
            cells = ("none" if limit is None else f"{limit}", horizon, *reached(found), f"{calls:.1f}", compared)
            yield f"| {' | '.join(cells)} |"


def game24(data: Path, spec: str) -> Iterator[str]:
    """Yield the table of a search of GPT-4's recorded trees with GPT-4's values."""
    yield f"\n## Recorded: {spec} over GPT-4's proposals for the Game of 24, with GPT-4's values\n"
    try:
        recordings = read_recordings(data)
    except DataNotFoundError as error:
        yield f"skipped: {error}"
        return
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "recorded.db"
        reader = Path(__file__).parent / "real" / "game24_recorded.py"
        search.import_transcripts(data / SOURCE.file, store, format=f"{reader}:transcripts")
        critic = Lookup(GPT4, recorded_values, recordings)
        traces = traced(spec, critic, by_message=True, recorded=search.Recorded(store, distinct=True))
    halves = (traces[::2], traces[1::2])
    truths: list[list[str]] = []
    found: dict[str, list[Scores]] = defaultdict(list)
    others: dict[str, list[Scores]] = defaultdict(list)
    for dev, test in (halves, halves[::-1]):
        known = fit(checked(dev), "", "").map
        for name, rule in rules_chosen(dev, known)[0].items():
            form = "stop=stop.json" if "json" in name else f"{name.rstrip('0123456789.')}X"
            found[form].append(scored(test, rule))
            size = fixed_size(dev, rule)
            others[form].append(scored(test, size[1] if size else fixed(10**9)))
        size = fixed_size(dev, fixed(10**9))
        truths.append([*bounds(size[1] if size else fixed(10**9), known, test, "messages")])
    yield f"{len(traces)} puzzles; the settings of each half are chosen on the other half. Messages are counted,"
    yield "because tokens were not recorded.\n"
    yield "| rule | Hit@1 | 95% interval | messages | against the fixed size chosen | against the complete search |"
    yield "|---|---:|---:|---:|---|---|"
    whole = scored(traces, fixed(10**9))
    for form in [form for form, parts in found.items() if len(parts) == len(halves)]:
        one, other = (
            Scores(*({**a, **b} for a, b in zip(*parts, strict=True))) for parts in (found[form], others[form])
        )
        gaps = (against(one, base).replace("tokens", "messages") for base in (other, whole))
        yield f"| {form} | {' | '.join((*reached(one), *gaps))} |"
    for number, lines in enumerate(truths, 1):
        yield f"\nHalf {number}:"
        yield from lines


def reached(found: Scores) -> tuple[str, str, str]:
    """Return Hit@1, its interval and the mean cost."""
    span = accuracy_interval([*found.hits.values()], len(found.hits))
    return f"{100 * found.hit:.1f}", f"{100 * span.low:.1f} to {100 * span.high:.1f}", f"{found.spent:,.0f}"


def main() -> None:
    """Choose on dev, measure on test, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", type=int, default=100, help="dev problems")
    parser.add_argument("--test", type=int, default=100, help="test problems")
    parser.add_argument("--cascade", type=int, nargs=2, default=(100, 100), help="dev and test problems of cascades")
    parser.add_argument("--difficulty", type=int, default=60, help="problems per difficulty and split")
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS, help="measure only these sections")
    parser.add_argument("--natural", type=int, nargs=2, default=(60, 60), help="dev and test problems, natural agents")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the recordings")
    parser.add_argument("--cache", type=Path, help="response cache; with it, a second run takes minutes")
    parser.add_argument("--out", type=Path, default=PAGE, help="page to write")
    options = parser.parse_args()
    lab = Lab(options.cache, options.dev, options.test)
    natural = cache_results(lambda: Lab(options.cache, *options.natural, f"transformers:{NATURAL}", "stories-4"))
    made = {
        "bon": lambda: family(lab, "bon:20", "tiny-orm"),
        "mcts": lambda: family(lab, "mcts:20,3", "tiny-masprm"),
        "best-of-n": lambda: best_of_n(lab),
        "horizon": lambda: horizons(lab, "mcts:20,3", "tiny-masprm", (None, 30, 60)),
        "natural-bon": lambda: family(natural(), "bon:20", "policy-likelihood"),
        "natural-mcts": lambda: family(natural(), "mcts:20,3", "policy-likelihood"),
        "game24": lambda: game24(options.data, "mcts:40,40"),
        "transfer": lambda: transfer(lab, "bon:20", "tiny-orm", options.difficulty),
        "cascade": lambda: cascades(lab, ("single", "mcts:20,2", "mcts:20,6"), "tiny-masprm", options.cascade),
    }
    sections = sections_of(options.out)
    for part in options.parts:
        sections[part] = "\n".join(made[part]()).strip()
        write(options.out, sections)
        print(sections[part], flush=True)


PARTS = (
    "bon",
    "mcts",
    "best-of-n",
    "transfer",
    "cascade",
    "horizon",
)
PARTS += ("natural-bon", "natural-mcts", "game24")
MARK = "\n\n<!-- part: {} -->\n"


def sections_of(page: Path) -> dict[str, str]:
    """Return the sections of a page that was written before."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    marks = sorted((text.index(mark), part) for part in PARTS if (mark := MARK.format(part)) in text)
    found: dict[str, str] = {}
    end = len(text)
    for start, part in reversed(marks):
        found[part], end = text[start + len(MARK.format(part)) : end].strip(), start
    return found


def write(page: Path, sections: Mapping[str, str]) -> None:
    """Write the page."""
    text = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip()
    head = f"""# Adaptive search

{text}

```console
python -m benchmarks.adaptive --cache replies.db
```

Problems of Arithmetic, run seed {SEED}; MAS rpsv and agents tiny unless a section says otherwise; MCTS without the
task's rule for equal messages. TOK is per problem. Each section states its number of problems; `--parts` selects
sections.

- {weights(Options(masprm="tiny-masprm", orm="tiny-orm"))}
"""
    body = "".join(MARK.format(part) + sections[part] for part in PARTS if part in sections)
    page.write_text(head + body + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
