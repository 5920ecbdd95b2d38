"""The game of 24: critics trained without GPT-4 compared with GPT-4's values, on GPT-4's recorded trees of thought."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import mas_gym
import search
from benchmarks.paper.page import percent, span
from benchmarks.ranking import Ranking, auc_cells, rank
from benchmarks.real.common import RealPage, arguments, run_page
from benchmarks.real.game24_critic import (
    PLANNER,
    PUZZLES,
    FeatureModel,
    Table,
    labeled,
    states_to_learn,
    train_critic,
    training_data,
    training_task,
)
from benchmarks.real.game24_recorded import CALLS, SOURCE, Recording, State, read_recordings, scaled
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks.procedural.game24 import Game24, Numbers, after, can_make, moves, read_left, write_move
from search.results.intervals import bootstrap, mean_interval, paired_difference
from search.results.summary import ResultRow

SEEDS = (14, 24, 42)
BEAM = 5
GOAL = 0.9
GPT4, MASPRM, FEATURES, TABLE = "GPT-4's values", "MASPRM", "features", "lookup table"
DEV = 129
PLANNERS = ("sbs:40,1", "sbs:40,2", "sbs:40,5", "mcts:10,5", "mcts:40,40", "bon:20")

Array = NDArray[np.float64]
Lines = tuple[str, ...]
Values = Callable[[Recording, Sequence[Lines]], Array]
"""A critic: values of states, given by their steps, of one puzzle."""


# ------------------------------------------------------------------ critics


def recorded_values(recording: Recording, states: Sequence[Lines]) -> Array:
    """Return GPT-4's values; only recorded states have one."""
    known = recording.values
    return np.array([scaled(known[lines]) for lines in states])


def numbers_left(lines: Lines) -> Numbers | None:
    """Return the numbers left after the last step; for an answer, those it was made from."""
    if len(lines) < 4:
        return read_left(lines[-1])
    return None if read_left(lines[3]) is not None else read_left(lines[2])


def from_numbers(model: Callable[[Sequence[Numbers]], Array]) -> Values:
    """Return a critic of the remaining numbers; text that is not a state of the game has the lowest value."""

    def values(recording: Recording, states: Sequence[Lines]) -> Array:
        found = [numbers_left(lines) for lines in states]
        legal = [left is not None and len(left) == max(1, 4 - len(s)) for left, s in zip(found, states, strict=True)]
        out = np.full(len(states), -1.0)
        if any(legal):
            out[legal] = 2 * model([left for left, ok in zip(found, legal, strict=True) if ok and left]) - 1
        return out

    return values


def from_critic(critic: search.Critic) -> Values:
    """Return a trained critic, which reads the steps as messages of the system it was trained on."""
    mas = mas_gym.load_mas("game24")
    dynamics = Dynamics(mas)

    def values(recording: Recording, states: Sequence[Lines]) -> Array:
        contexts = []
        for lines in states:
            state: MASState = dynamics.initial_state(recording.problem.question)
            for line in lines:
                state = dynamics.transition(state, Action(line, mas.ALL))
            contexts.append(search.ScoringContext(state, mas, None))
        return np.array(critic.score(contexts), dtype=float)

    return values


class Lookup(search.Critic):
    """Values of the recorded states that were computed before, as a critic of any search over them."""

    free = False

    def __init__(self, name: str, values: Values, recordings: Sequence[Recording]) -> None:
        """Compute the value of every recorded state."""
        self.name = name
        self.values: dict[tuple[str, Lines], float] = {}
        for one in recordings:
            states = list(one.values)
            scored = zip(states, values(one, states), strict=True)
            self.values |= {(one.problem.question, lines): float(value) for lines, value in scored}

    def score(self, states: Sequence[search.ScoringContext]) -> list[float]:
        """Return the value of each state."""
        return [self.values[c.state.question, tuple(turn.text for turn in c.state.turns)] for c in states]


# --------------------------------------------------------------------- beam


def best(states: Sequence[Lines], values: Array) -> list[Lines]:
    """Return the five distinct states of the highest values; of equal ones, the first."""
    order = np.argsort(-values, kind="stable")
    return list(dict.fromkeys(states[i] for i in order))[:BEAM]


def wins(lines: Lines) -> bool:
    """Return whether the numbers left can make 24."""
    left = read_left(lines[-1])
    return left is not None and len(left) == 4 - len(lines) and can_make(left)


def keeps(recording: Recording, depth: int, values: Values) -> bool:
    """Return whether the five best of all recorded proposals of a step have a winning state among them."""
    states = list(dict.fromkeys(state.lines for state in recording.levels[depth].states))
    return any(map(wins, best(states, values(recording, states))))


def own_beam(recording: Recording, values: Values) -> tuple[bool, bool]:
    """Return whether a beam of five has a winning state after one and after two steps.

    The first step chooses among GPT-4's proposals. GPT-4 proposed second steps for its own five states only, so the
    second step chooses among all moves.
    """
    states = list(dict.fromkeys(state.lines for state in recording.levels[0].states))
    first = best(states, values(recording, states))
    second = []
    for lines in first:
        left = read_left(lines[-1])
        if left is not None and len(left) == 3:
            second += [(*lines, write_move(left, move)) for move in moves(left)]
    return any(map(wins, first)), any(map(wins, best(second, values(recording, second))))


# ------------------------------------------------------------------ measure


class Measured(NamedTuple):
    """A critic with its training runs.

    Attributes:
        trainings: One function of values per training run.
        calls: Calls of GPT-4 per value.
    """

    trainings: tuple[Values, ...]
    calls: int = 0


def train_all(
    recordings: Sequence[Recording], out: Path, seeds: Sequence[int]
) -> tuple[dict[str, Measured], Table, float]:
    """Train every critic on puzzles that were not recorded.

    Returns:
        The critics, the table of numbers that training has seen, and the share of states after step 1 whose W / N is
        below -0.9.
    """
    from rewardmodels import load_critic

    task = training_task({one.numbers for one in recordings})
    data = training_data(task, out)
    rows = labeled(data)
    learned = states_to_learn(data, found=True)
    folders = [train_critic(learned, out / f"masprm-{seed}", seed, print).folder for seed in seeds]
    table = Table(rows)
    low = float(np.mean([example.chosen_target < -0.9 for example in data.examples if example.depth == 0]))
    return (
        {
            GPT4: Measured((recorded_values,), CALLS),
            MASPRM: Measured(tuple(from_critic(load_critic(str(folder))) for folder in folders)),
            FEATURES: Measured(tuple(from_numbers(FeatureModel(rows, seed)) for seed in seeds)),
            TABLE: Measured((from_numbers(table),)),
        },
        table,
        low,
    )


def ranking(
    recordings: Sequence[Recording], critic: Measured, depth: int, keep: Callable[[State], bool] = lambda state: True
) -> Ranking:
    """Compare all recorded proposals of a step."""
    states = [[state for state in one.levels[depth].states if keep(state)] for one in recordings]
    truth = [np.array([bool(state.winning) for state in part]) for part in states]
    values = [
        [
            value(one, [state.lines for state in part]) if part else np.zeros(0)
            for one, part in zip(recordings, states, strict=True)
        ]
        for value in critic.trainings
    ]
    if critic.calls:
        # As recorded: a proposal that repeats another has the value 0.
        values = [[np.array([scaled(state.value) for state in part]) for part in states]]
    return rank(truth, values)


def dev_recordings(number: int) -> list[Recording]:
    """Return puzzles of the dev split with all moves as proposals, as a large check without GPT-4."""
    from benchmarks.real.game24_recorded import Level

    found = []
    for problem in Game24("dev")[:number]:
        left = read_left(f"(left: {' '.join(map(str, problem.metadata['numbers']))})") or ()
        states = []
        for move in moves(left):
            rest = after(left, move)
            states.append(State((write_move(left, move),), 0.0, rest, can_make(rest)))
        found.append(Recording(problem, (Level(tuple(states), ()),), False))
    return found


def searched(
    recordings: Sequence[Recording], critics: Mapping[str, Measured], dead_ends: bool, data: Path
) -> dict[str, list[list[ResultRow]]]:
    """Search the recorded proposals with each critic; for each planner and critic one row per training run."""
    found: dict[str, list[list[ResultRow]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "recorded.db"
        reader = Path(__file__).with_name("game24_recorded.py")
        form = f"{reader}:transcripts:dead_ends={str(dead_ends).lower()}"
        search.import_transcripts(data / SOURCE.file, store, format=form)
        world = search.Recorded(store, distinct=True)
        for name, critic in critics.items():
            rows = []
            for place, values in enumerate(critic.trainings):
                lookup = Lookup(f"{name} {place}", values, recordings)
                table = search.compare(PLANNERS, recorded=world, critics={name: lookup}, seeds=(SEEDS[place],))
                rows.append(list(table.rows))
            found[name] = [list(of_planner) for of_planner in zip(*rows, strict=True)]
    return found


# --------------------------------------------------------------------- page


def make(given: argparse.Namespace) -> Path:
    """Train the critics and write the page."""
    recordings = read_recordings(given.data)
    critics, table, low = train_all(recordings, given.out, given.seeds)
    page = RealPage("game24", "Game of 24: critics trained without GPT-4, on GPT-4's trees of thought", SOURCE)
    rankings = {name: [ranking(recordings, critic, depth) for depth in range(3)] for name, critic in critics.items()}
    kept = _kept(recordings, critics)
    worlds = {dead_ends: searched(recordings, critics, dead_ends, given.data) for dead_ends in (False, True)}
    page.finding = _finding(rankings, kept, worlds[False])
    page.picture("game24.png", "AUC after step 1, and share of beams with a winning state", _drawing(rankings, kept))
    _auc(page, recordings, critics, rankings, table)
    _beams(page, recordings, kept)
    for dead_ends, found in worlds.items():
        _searches(page, found, dead_ends)
    page.heading("How the critics were trained")
    page.text(
        f"`{PLANNER}` searches {PUZZLES} puzzles of the training split of the task `game24`, excluding the recorded "
        "ones. The agents make random moves, and the leaves have the true outcome. MASPRM is a decoder of two layers "
        "and width 64 with random initial weights. It is trained on the states of these trees by squared error; the "
        "target is +1 if the search found 24 below the state and -1 otherwise. MASPRM's usual target, W / N, "
        f"measures the success of random moves, and it is below -0.9 for {percent(low)}% of the states after step 1; a "
        "beam needs the best continuation, not the mean. The features, for gradient boosting, are the remaining "
        "numbers and the sums, differences, products and quotients of pairs. The lookup table contains the share of "
        "searches that found 24 from the same numbers. No critic uses GPT-4's texts or values. The kind of target "
        "was chosen on the puzzles of the development half of the recordings; nothing else was tuned."
    )
    facts = [
        f"{len(recordings)} puzzles; critics trained with "
        f"seed{'s' * (len(given.seeds) > 1)} {', '.join(map(str, given.seeds))}",
        "Intervals are over puzzles, with the training runs of a critic averaged.",
    ]
    return page.write(given.pages, "python -m benchmarks.real.game24 --data DIR --out FOLDER", facts)


def _auc(
    page: RealPage,
    recordings: Sequence[Recording],
    critics: Mapping[str, Measured],
    rankings: Mapping[str, Sequence[Ranking]],
    table: Table,
) -> None:
    page.heading("Does a critic rank states that can reach 24 above the others?")
    counts = [[state.winning for one in recordings for state in one.levels[depth].states] for depth in range(3)]
    page.text(
        "The table shows the AUC over all recorded proposals of all puzzles. The ground truth is whether the "
        "remaining numbers can make 24. They can in "
        + "; ".join(f"{sum(map(bool, c))} of {len(c)} proposals after step {step}" for step, c in enumerate(counts, 1))
        + "."
    )
    header = ["critic", "GPT-4 calls per value"]
    for depth in range(3):
        header += [f"step {depth + 1}", "95% interval"]
    rows: list[list[object]] = []
    for name, critic in critics.items():
        row: list[object] = [name, critic.calls]
        for one in rankings[name]:
            row += auc_cells(one)
        rows.append(row)
    page.table(header, rows)

    def unseen(state: State) -> bool:
        return state.left is not None and state.left not in table.seen

    new = sum(unseen(state) for one in recordings for state in one.levels[0].states)
    dev = dev_recordings(DEV)
    page.text(
        f"Different puzzles often have the same remaining numbers. For {new} of {len(counts[0])} proposals, the "
        'remaining numbers do not occur in the training searches; the column "unseen numbers" has only these. The '
        f'column "dev puzzles" has all moves from {DEV} puzzles of the dev split, for which there are no recordings of '
        "GPT-4."
    )
    learned = [name for name in critics if name != GPT4]
    rows = []
    for name, critic in critics.items():
        row = [name, *auc_cells(ranking(recordings, critic, 0, unseen))]
        rows.append([*row, *(auc_cells(ranking(dev, critic, 0)) if name in learned else ("", ""))])
    page.table(("critic", "unseen numbers", "95% interval", "dev puzzles", "95% interval"), rows)
    differences = []
    for name in learned:
        pair = rankings[name][0], rankings[GPT4][0]
        size = len(recordings)

        def gap(counts: Array, pair: tuple[Ranking, Ranking] = pair) -> Array:
            return pair[0].auc(counts.astype(float)) - pair[1].auc(counts.astype(float))

        interval = bootstrap(size, gap, resamples=4000)
        found = float(gap(np.ones(size)))
        differences.append((f"{name} minus {GPT4}", f"{found:+.3f}", f"{interval.low:+.3f} to {interval.high:+.3f}"))
    page.table(("AUC after step 1", "difference", "95% interval"), differences)


class Kept(NamedTuple):
    """For each puzzle whether a beam of five has a winning state, averaged over training runs.

    Attributes:
        first: After step 1, of GPT-4's proposals.
        second: After step 2, of GPT-4's proposals from its own five states.
        own: After step 2, of all moves from the critic's own five states; None for GPT-4.
    """

    first: Array
    second: Array
    own: Array | None


def _kept(recordings: Sequence[Recording], critics: Mapping[str, Measured]) -> dict[str, Kept]:
    found = {}
    for name, critic in critics.items():
        if critic.calls:
            selected = [[any(map(wins, one.levels[depth].selected)) for one in recordings] for depth in range(2)]
            found[name] = Kept(*(np.array(part, dtype=float) for part in selected), None)
            continue
        parts = [
            [(keeps(one, 0, v), keeps(one, 1, v), own_beam(one, v)[1]) for one in recordings] for v in critic.trainings
        ]
        found[name] = Kept(*np.array(parts, dtype=float).mean(axis=0).T)
    return found


def _beams(page: RealPage, recordings: Sequence[Recording], kept: Mapping[str, Kept]) -> None:
    page.heading("Does a beam of five keep a state that can reach 24?")
    possible = [
        np.array([any(bool(s.winning) for s in one.levels[depth].states) for one in recordings]) for depth in range(2)
    ]
    page.text(
        "The table shows the share of puzzles with a winning state among the five states with the highest values. "
        "GPT-4 proposed second steps only for the five states that it kept, so the first row is the upper limit after "
        'step 2. In the columns "own beam", each critic keeps its best five states of GPT-4\'s first proposals and '
        "chooses among all moves from these states."
    )
    values = CALLS * float(np.mean([len(one.values) for one in recordings]))
    proposals = float(np.mean([1 + sum(len(level.selected) for level in one.levels[:-1]) for one in recordings]))
    page.text(
        f"GPT-4's search made {proposals:.0f} calls per puzzle for proposals and {values:.0f} for values (three for "
        "each distinct state). With any other critic, it would make only the calls for proposals."
    )
    rows: list[list[object]] = []
    rows.append(["possible", *_share(possible[0]), *_share(possible[1]), "", ""])
    for name, one in kept.items():
        own = ("", "") if one.own is None else _share(one.own)
        rows.append([name, *_share(one.first), *_share(one.second), *own])
    interval = "95% interval"
    page.table(("critic", "step 1, %", interval, "step 2, %", interval, "step 2, own beam, %", interval), rows)


def _share(values: Array) -> tuple[str, str]:
    return percent(float(values.mean())), span(*mean_interval(values.astype(float), 0.0, 1.0))


def _searches(page: RealPage, found: Mapping[str, list[list[ResultRow]]], dead_ends: bool) -> None:
    page.heading("Search over the recorded proposals" + (", dead ends included" if dead_ends else ""))
    if dead_ends:
        page.text(
            "Here every recorded proposal may be chosen. A proposal that GPT-4's search did not keep has no recorded "
            "next step, so choosing it is a failure, even if its numbers can make 24. This favors GPT-4's values."
        )
    else:
        page.text(
            "Only proposals that GPT-4's search kept are included, so every path leads to an answer, and all critics "
            "choose among the same proposals. RC is the number of values per problem. A value from GPT-4 needs three "
            "calls to GPT-4; the other critics need none."
        )
    rows = []
    for place, planner in enumerate(PLANNERS):
        base = _shares(found[GPT4][place])
        for name, trainings in found.items():
            shares = _shares(trainings[place])
            hits = np.mean([row.hits[5].mean if 5 in row.hits else row.hits[1].mean for row in trainings[place]])
            values = float(np.mean([row.reward_calls.mean for row in trainings[place]]))
            calls = float(np.mean([row.agent_calls.mean for row in trainings[place]]))
            gap = paired_difference(shares, base)
            rows.append(
                (
                    planner,
                    name,
                    percent(float(np.mean(list(shares.values())))),
                    percent(float(hits)),
                    "" if name == GPT4 else f"{100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})",
                    f"{calls:.1f}",
                    f"{values:.1f}",
                    f"{CALLS * values:.0f}" if name == GPT4 else "0",
                )
            )
    header = ("planner", "critic", "Hit@1, %", "Hit@5, %", "Hit@1 minus GPT-4's", "proposals", "RC", "GPT-4 calls")
    page.table(header, rows, left=2)


def _shares(trainings: Sequence[ResultRow]) -> dict[str, float]:
    keys = trainings[0].shares
    return {key: float(np.mean([row.shares[key] for row in trainings])) for key in keys}


def _finding(
    rankings: Mapping[str, Sequence[Ranking]], kept: Mapping[str, Kept], found: Mapping[str, list[list[ResultRow]]]
) -> str:
    size = len(rankings[GPT4][0].winning)
    auc = {name: float(one[0].auc(np.ones(size))) for name, one in rankings.items()}
    learned = [name for name in auc if name != GPT4]
    listed = ", ".join(f"{auc[name]:.2f} ({name})" for name in learned)
    goal = " and ".join(name for name in learned if auc[name] >= GOAL) or "none"
    best = max(learned, key=auc.__getitem__)
    own = kept[best].own
    assert own is not None
    gaps = [paired_difference(_shares(a), _shares(b)) for a, b in zip(found[best], found[GPT4], strict=True)]
    above, below = (sum(gap.significant and sign * gap.mean > 0 for gap in gaps) for sign in (1, -1))
    shares = f"{percent(kept[best].first.mean())}% of the puzzles after step 1 and {percent(own.mean())}% after step 2"
    return (
        "This page compares critics with the values that GPT-4 gave in its recorded searches for the game of 24. "
        "After the first step, GPT-4's values (three calls each) separate states that can reach 24 from others with "
        f"an AUC of {auc[GPT4]:.2f}. The other critics were trained on outcomes of random moves on other puzzles, "
        f"without calls to GPT-4. Their AUCs are {listed}; the goal of {GOAL:.2f} is reached by: {goal}. A beam of "
        f"five with the best of them, the {best}, keeps a state that can reach 24 in {shares} (goal: 95%). "
        f"GPT-4's beam keeps one in {percent(kept[GPT4].first.mean())}% and {percent(kept[GPT4].second.mean())}%, but "
        "chooses only among GPT-4's proposals in its second step. Search over only the recorded proposals cannot show "
        "this difference, because winning states that GPT-4's search dropped have no recorded continuation. In such "
        f"searches, Hit@1 with the {best} is above that with GPT-4's values for {above} of {len(PLANNERS)} planners "
        f"and below it for {below}, counting only differences with an interval that excludes 0."
    )


def _drawing(rankings: Mapping[str, Sequence[Ranking]], kept: Mapping[str, Kept]) -> Callable[[Path], None]:
    def draw(path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
        names = list(rankings)
        for place, name in enumerate(names):
            one = rankings[name][0]
            size = len(one.winning)
            mean = float(one.auc(np.ones(size)))
            low, high = bootstrap(size, lambda counts, one=one: one.auc(counts.astype(float)), resamples=2000)
            error = [[mean - low], [high - mean]]
            left.errorbar(
                [mean], [place], xerr=error, fmt="o", color="#222222" if name == GPT4 else "#4477aa", capsize=3
            )
        left.set_yticks(range(len(names)), names)
        left.invert_yaxis()
        left.axvline(GOAL, color="#999999", linestyle=":", linewidth=1)
        left.set_xlim(0.5, 1.0)
        left.set_xlabel("AUC after step 1 (dotted: goal)")
        for offset, (label, color) in enumerate((("step 1", "#4477aa"), ("step 2", "#ee6677"))):
            shares = [_beam_share(kept[name], offset) for name in names]
            right.bar(np.arange(len(names)) + 0.4 * offset - 0.2, shares, 0.38, label=f"after {label}", color=color)
        right.axhline(95, color="#999999", linestyle=":", linewidth=1)
        right.set_xticks(range(len(names)), names)
        right.set_ylim(0, 119)
        right.set_yticks(range(0, 101, 20))
        right.set_ylabel("beams with a winning state, %")
        right.legend(frameon=False, ncols=2, loc="upper right")
        figure.savefig(path, dpi=150)

    return draw


def _beam_share(kept: Kept, step: int) -> float:
    second = kept.second if kept.own is None else kept.own
    return 100 * float((kept.first, second)[step].mean())


def main(words: Sequence[str] | None = None) -> None:
    """Write the page, or print why it is skipped."""
    parser = arguments("game24", "Critics trained without GPT-4, on GPT-4's trees of thought.")
    parser.add_argument("--out", type=Path, default=Path("game24"), help="folder of searches and critics [game24]")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="training runs of each critic")
    run_page(make, parser.parse_args(words))


if __name__ == "__main__":
    main()
