"""Accuracy of each credit method against the exact credit of a message: ``python -m benchmarks.credit_exact``.

The script writes ``pages/training/credit.md`` for two sets of RPSV agents: the bundled agents on
Arithmetic, with designed errors, and the natural agents (`benchmarks.tiny.natural`) on stories of difficulty 4,
whose errors are not designed. The critic of the bundled agents is the shipped MASPRM. The critic of the natural agents
is trained first, on ``--searches`` searches of training stories.

All replies of these agents can be enumerated: at temperature 0.7 and top-p 0.95, each prompt has a few dozen replies.
They are found with their probabilities by branching at every token, so the expected reward of every state is an exact
sum over replies. Replies less likely than ``--floor`` are left out, and the remaining probabilities of the prompt are
scaled to one. This is the policy of the experiment; the page states the mean probability that is kept. Samples are
drawn from the enumerated replies. Each agent of RPSV has one turn.

Per problem and repetition, every method gets about the same number of generated tokens:

* ``shared-outcome``, ``per-agent``, ``per-agent-turn`` and ``value``: independent transcripts (``--transcripts``).
* ``leave-one-out`` and ``value-baseline``: a tree with ``--siblings`` messages per state and turn, all continued.
* ``control-variate``: a tree in which ``--sampled`` messages are sampled and ``--continued`` of them continued.

The columns are the generated tokens per problem and the correlation with the exact credit over messages, with a 95%
bootstrap interval over problems.

The command takes about ten minutes on one core; ``-n`` and ``--repeats`` change the size. ``--out`` contains the
searches and the critic.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

import mas_gym
from benchmarks.tiny.stories import generated
from mas_gym.policies import load_policy
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.prompts import ChatMessage, chat_messages
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks.base import Problem, Task
from rewardmodels.training.train_critic import grow, teach, trees
from search import Critic, Plan, Proposal, ScoringContext, Tree
from search.credit import credit
from search.critic_registry import load_critic
from search.results.intervals import bootstrap
from search.setup import RunSpec

Prompt = tuple[ChatMessage, ...]
Sums = NDArray[np.float64]

PAGE = Path(__file__).parent / "pages" / "training" / "credit.md"
NATURAL = Path(__file__).parent / "tiny" / "tiny-natural"
REASONS = "## Notes"
"""Text below this heading is written by hand and kept when the page is regenerated."""

TEMPERATURE, TOP_P = 0.7, 0.95
LONGEST = 96
COLUMNS = ("n", "x", "y", "xx", "yy", "xy", "tokens")
"""Sums over the messages of a problem: x is the exact credit, y the estimate."""


class Reply(NamedTuple):
    """One message that an agent can write."""

    text: str
    tokens: int
    probability: float


class Enumerator:
    """Finds every reply of a local model to a prompt, above a least probability.

    Args:
        policy: A policy of `mas_gym.policies.local`.
        floor: Least probability of a reply.
    """

    def __init__(self, policy: Any, floor: float) -> None:
        """Take the model and the chat format of the policy."""
        self.policy, self.floor = policy, floor
        self.kept: list[float] = []

    def replies(self, prompts: Sequence[Prompt]) -> list[list[Reply]]:
        """Return the replies to each prompt, most likely first; their probabilities sum to 1."""
        found: list[list[Reply]] = []
        with torch.inference_mode():
            for start in range(0, len(prompts), 64):
                found += self._batch(prompts[start : start + 64])
        return found

    def _batch(self, prompts: Sequence[Prompt]) -> list[list[Reply]]:
        model, format = self.policy.model, self.policy.format
        ids = [format.encode(prompt, LONGEST).ids for prompt in prompts]
        width = max(map(len, ids))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        owner, chance = torch.arange(len(ids)), torch.ones(len(ids), dtype=torch.float64)
        written = torch.empty((len(ids), 0), dtype=torch.long)
        cache = DynamicCache()
        ended: list[dict[str, tuple[int, float]]] = [{} for _ in ids]
        for _ in range(LONGEST):
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            out = model(tokens, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
            shares = chance[:, None] * nucleus(out.logits[:, -1].double() / TEMPERATURE)
            rows, choices = torch.nonzero(shares >= self.floor, as_tuple=True)
            owner, chance = owner[rows], shares[rows, choices]
            written = torch.cat([written[rows], choices[:, None]], 1)
            over = torch.isin(choices, torch.tensor(sorted(self.policy.end_tokens)))
            for row in torch.nonzero(over)[:, 0].tolist():
                text = format.decode(written[row, :-1].tolist())
                length, known = ended[owner[row]].get(text, (written.shape[1], 0.0))
                ended[owner[row]][text] = length, known + float(chance[row])
            if bool(over.all()):
                break
            rows, owner, chance, written = rows[~over], owner[~over], chance[~over], written[~over]
            cache.reorder_cache(rows)
            mask = torch.cat([mask[rows], torch.ones((len(rows), 1), dtype=mask.dtype)], 1)
            tokens = written[:, -1:]
        return [self._scaled(replies) for replies in ended]

    def _scaled(self, replies: Mapping[str, tuple[int, float]]) -> list[Reply]:
        total = math.fsum(chance for _, chance in replies.values())
        self.kept.append(total)
        found = [Reply(text, tokens, chance / total) for text, (tokens, chance) in replies.items()]
        return sorted(found, key=lambda reply: -reply.probability)


def nucleus(logits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of the smallest set of likely tokens with a mass of `TOP_P`, scaled to one."""
    shares, order = torch.softmax(logits, 1).sort(1, descending=True)
    shares[(shares.cumsum(1) - shares) >= TOP_P] = 0
    return torch.zeros_like(shares).scatter_(1, order, shares / shares.sum(1, keepdim=True))


@dataclass
class Enumerated:
    """One problem with every reply of every agent.

    Attributes:
        problem: The problem.
        task: Grades the answers.
        model: The system's dynamics.
        replies: The replies to each prompt.
        truths: Expected reward, +1 or -1 for an answer, by the prompt of the agent to act.
    """

    problem: Problem
    task: Task
    model: Dynamics
    replies: dict[Prompt, list[Reply]] = field(default_factory=dict)
    truths: dict[Prompt, float] = field(default_factory=dict)

    def prompt(self, state: MASState) -> Prompt:
        """Return the input of the acting agent."""
        return chat_messages(self.model.mas, state)

    def after(self, state: MASState, reply: Reply) -> MASState:
        """Return the state after a reply."""
        return self.model.transition(state, Action(reply.text, self.model.mas.ALL))

    def reward(self, state: MASState) -> float:
        """Return the reward of a terminal state."""
        return 1.0 if self.task.grade(self.problem, state.text).correct else -1.0

    def truth(self, state: MASState) -> float:
        """Return the expected reward of a state.

        In RPSV the acting agent's input determines it, because each agent reads the question and the previous message.
        """
        if self.model.is_terminal(state):
            return self.reward(state)
        prompt = self.prompt(state)
        if prompt not in self.truths:
            ways = self.replies[prompt]
            self.truths[prompt] = math.fsum(one.probability * self.truth(self.after(state, one)) for one in ways)
        return self.truths[prompt]

    def grow(self, shape: Sequence[tuple[int, int]], rng: np.random.Generator) -> Plan:
        """Return a tree: for each turn, how many messages are sampled per state and how many of them continued."""
        tree = Tree(self.model.initial_state(self.problem.question))
        level = [0]
        for sampled, continued in shape:
            following = []
            for parent in level:
                state = tree.states[parent]
                ways = self.replies[self.prompt(state)]
                drawn = rng.choice(len(ways), size=sampled, p=[one.probability for one in ways])
                for number, way in enumerate(drawn.tolist()):
                    reply = ways[way]
                    child = self.after(state, reply)
                    proposal = Proposal(Action(reply.text, self.model.mas.ALL), reply.tokens)
                    node = tree.add(parent, child, proposal, self.model.is_terminal(child))
                    following += [node] if number < continued else []
            level = following
        return Plan(tree=tree, problem_id=self.problem.id, mas=self.model.mas)


def enumerate_problems(
    enumerator: Enumerator, task: Task, model: Dynamics, reached: Iterable[MASState] = ()
) -> list[Enumerated]:
    """Return the problems of a task with every reply, turn by turn for all problems at once.

    Args:
        enumerator: Finds the replies.
        task: The problems.
        model: The system's dynamics.
        reached: States that were sampled; the replies that follow are found even if a message before is too unlikely.
    """
    found = [Enumerated(problem, task, model) for problem in task]
    asking = {one.problem.question: one for one in found}
    sampled: dict[int, list[MASState]] = defaultdict(list)
    for state in reached:
        sampled[state.depth].append(state)
    states = [(one, model.initial_state(one.problem.question)) for one in found]
    for depth in range(model.max_depth):
        states += [(asking[state.question], state) for state in sampled[depth]]
        asked = {(one.problem.id, one.prompt(state)): (one, state) for one, state in states}
        states = []
        replies = enumerator.replies([prompt for _, prompt in asked])
        for (_, prompt), (one, state), ways in zip(asked, asked.values(), replies, strict=True):
            one.replies[prompt] = ways
            states += [(one, one.after(state, way)) for way in ways]
    return found


class Values:
    """A critic's values, each state scored once."""

    def __init__(self, critic: Critic, model: Dynamics) -> None:
        self.critic, self.model = critic, model
        self.known: dict[MASState, float] = {}

    def fill(self, states: Iterable[MASState]) -> None:
        """Score the states that have no value."""
        fresh = [state for state in dict.fromkeys(states) if state not in self.known]
        contexts = [ScoringContext(state, self.model.mas, None) for state in fresh]
        self.known.update(zip(fresh, self.critic.score(contexts) if contexts else [], strict=True))

    def __call__(self, state: MASState) -> float:
        """Return the value of a state, NaN if it was not scored."""
        return self.known.get(state, math.nan)


class Method(NamedTuple):
    """A row of the table.

    Attributes:
        method: A method of `search.credit`.
        shape: The tree it gets, sampled and continued messages by turn.
        options: Its options.
    """

    method: str
    shape: tuple[tuple[int, int], ...]
    options: Mapping[str, Any]


def measure(
    problems: Sequence[Enumerated], methods: Mapping[str, Method], values: Values, repeats: int, seed: int
) -> dict[tuple[str, str], Sums]:
    """Return sums of shape ``[problems, columns]`` for each method and agent, and for all agents with equal weights.

    A batch is one tree or group per problem.
    """
    agents = [agent.name for agent in values.model.mas.agents]
    sums = {(name, agent): np.zeros((len(problems), len(COLUMNS))) for name in methods for agent in agents}
    grown = {
        shape: [
            [one.grow(shape, np.random.default_rng([seed, turn, repeat, place])) for place, one in enumerate(problems)]
            for repeat in range(repeats)
        ]
        for turn, shape in enumerate(sorted({method.shape for method in methods.values()}))
    }
    whole = {method.shape for method in methods.values() if method.method == "value"}
    for shape, batches in grown.items():
        states = (state for plans in batches for plan in plans for state in _tree(plan).states[1:])
        # The other methods use no value of a terminal state.
        values.fill(state for state in states if shape in whole or not values.model.is_terminal(state))
    rewards = {one.problem.question: one.reward for one in problems}
    for name, method in methods.items():
        estimates: list[dict[tuple[str, MASState], list[float]]] = [defaultdict(list) for _ in problems]
        spent = [0] * len(problems)
        for plans in grown[method.shape]:
            options = dict(method.options, reward=lambda state: rewards[state.question](state), value=values)
            for place, messages in enumerate(credit(plans, method.method, **options)):
                tree = _tree(plans[place])
                spent[place] += sum(tree.tokens)
                for one in messages:
                    estimates[place][agents[one.agent], tree.states[one.node]].append(one.advantage)
        for place, messages_of in enumerate(estimates):
            credited = sum(map(len, messages_of.values()))
            for (agent, state), found in messages_of.items():
                assert state.parent is not None
                exact = problems[place].truth(state) - problems[place].truth(state.parent)
                y, n = np.array(found), len(found)
                row = [n, n * exact, y.sum(), n * exact**2, (y**2).sum(), exact * y.sum()]
                sums[name, agent][place] += [*row, spent[place] * n / credited]
        parts = [sums[name, agent] for agent in agents]
        sums[name, "all"] = np.sum([part / part[:, 0].sum() for part in parts], axis=0)
    return sums


def _tree(plan: Plan) -> Tree:
    assert plan.tree is not None
    return plan.tree


def correlation(sums: Sums) -> Sums:
    """Return the correlation of estimates and exact credit from sums of shape ``[..., columns]``."""
    n, x, y, xx, yy, xy = (sums[..., place] for place in range(6))
    spread = np.sqrt(np.maximum((xx - x * x / n) * (yy - y * y / n), 1e-30))
    found: Sums = (xy - x * y / n) / spread
    return found


def with_interval(statistic: Callable[..., Sums], *sums: Sums, digits: int = 3) -> str:
    """Return a statistic of sums over problems with its 95% interval."""
    here, low, high = interval(statistic, *sums)
    return f"{here:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def interval(statistic: Callable[..., Sums], *sums: Sums) -> tuple[float, float, float]:
    """Return a statistic of sums over problems and the ends of its 95% bootstrap interval."""
    low, high = bootstrap(len(sums[0]), lambda counts: statistic(*(counts @ one for one in sums)), resamples=2000)
    return float(statistic(*(one.sum(axis=0) for one in sums))), low, high


class Agents(NamedTuple):
    """Agents of RPSV with their problems and critic.

    Attributes:
        name: On the page.
        policy: As for `load_policy`.
        task: ``"arithmetic"`` or a task of `benchmarks.tiny.stories.GENERATED`.
        critic: As for `load_critic`.
    """

    name: str
    policy: str
    task: str
    critic: str

    def problems(self, split: str, number: int) -> Task:
        """Return problems of a split."""
        if self.task == "arithmetic":
            return mas_gym.load_task("arithmetic", split=split, limit=number)
        return generated(self.task, split)[:number]


AGENTS = (
    Agents("Embedded errors", "tiny", "arithmetic", "tiny-masprm"),
    # The critic is trained by `natural_critic`.
    Agents("Natural errors", f"transformers:{NATURAL}", "stories-4", ""),
)


class Measured(NamedTuple):
    """The sums of all methods with one set of agents.

    Attributes:
        agents: The agents.
        facts: The enumerated facts.
        table: For each method and agent sums of shape ``[problems, columns]``.
    """

    agents: Agents
    facts: str
    table: dict[tuple[str, str], Sums]


def measured(agents: Agents, methods: Mapping[str, Method], args: argparse.Namespace) -> Measured:
    """Enumerate problems and measure every method on them."""
    model = Dynamics(mas_gym.load_mas("rpsv"))
    enumerator = Enumerator(load_policy(agents.policy), args.floor)
    problems = enumerate_problems(enumerator, agents.problems("test", args.n), model)
    prompts = sum(len(one.replies) for one in problems)
    replies = sum(len(ways) for one in problems for ways in one.replies.values())
    kept = float(np.mean(enumerator.kept))
    facts = f"{len(problems)} problems, {prompts:,} prompts, {replies:,} replies, probability mass kept: {kept:.4f}"
    print(f"{agents.name}: {facts}", flush=True)
    values = Values(load_critic(agents.critic), model)
    return Measured(agents, facts, measure(problems, methods, values, args.repeats, args.seed))


def natural_critic(agents: Agents, args: argparse.Namespace) -> Agents:
    """Train a MASPRM for the natural agents; an existing critic is not trained again."""
    policy = load_policy(agents.policy)
    store = args.out / "natural.db"
    args.out.mkdir(parents=True, exist_ok=True)
    spec = RunSpec(agents.problems("train", args.searches), mas_gym.load_mas("rpsv"), policy, store=store)
    if (stop := grow(spec, "mcts:20,3")) is not None:
        raise stop
    teach(lambda: trees(spec), args.out / "natural-masprm", "masprm", "bt", str(NATURAL), log=print)
    return agents._replace(critic=str(args.out / "natural-masprm"))


def write_page(found: Sequence[Measured], methods: Sequence[str], args: argparse.Namespace) -> None:
    """Write the page and its picture; notes below `REASONS` stay."""
    lines = [
        "# Estimated and exact credit of messages",
        "",
        "This page measures how accurately each method of `search.credit` estimates the credit of a message, which is",
        "the change in expected reward due to the message. All replies of the agents are enumerated, so the exact",
        "credit is known. Each method uses about the same number of generated tokens per problem.",
        "",
        "```console",
        f"python -m benchmarks.credit_exact {args.words}".rstrip(),
        "```",
        "",
        f"- {args.repeats} batches of samples per problem; test split; 95% bootstrap intervals over problems",
        "- correlation: between estimated and exact credit, over messages; `all`: the mean over agents",
    ]
    for one in found:
        lines += ["", f"## {one.agents.name}", "", f"{one.facts}.", ""]
        lines += _table(one.table, methods, args.repeats)
    notes = "Nothing is written here yet.\n"
    if args.page.exists() and REASONS in (old := args.page.read_text(encoding="utf-8")):
        notes = old.split(f"{REASONS}\n\n", 1)[1]
    args.page.parent.mkdir(parents=True, exist_ok=True)
    args.page.write_text("\n".join([*lines, "", REASONS, "", notes]), encoding="utf-8")


def _table(table: Mapping[tuple[str, str], Sums], methods: Sequence[str], repeats: int) -> Iterator[str]:
    names = list(dict.fromkeys(agent for _, agent in table if agent != "all"))
    plain = table["leave-one-out", "all"]
    yield f"| method | tokens per problem | correlation, all | over leave-one-out | {' | '.join(names)} |"
    yield f"|---|{'---:|' * (3 + len(names))}"
    for name in methods:
        spent = sum(table[name, agent][:, 6].sum() for agent in names) / len(plain) / repeats
        gap = with_interval(lambda a, b: correlation(a) - correlation(b), table[name, "all"], plain)
        cells = [name, f"{spent:,.0f}", with_interval(correlation, table[name, "all"])]
        cells += ["" if name == "leave-one-out" else gap]
        cells += [with_interval(correlation, table[name, agent], digits=2) for agent in names]
        yield f"| {' | '.join(cells)} |"


def main(args: argparse.Namespace) -> None:
    """Measure both sets of agents and write the page."""
    shapes = (args.siblings, args.sampled, args.continued)
    siblings, sampled, continued = ([int(part) for part in shape.split(",")] for shape in shapes)
    torch.set_num_threads(1)
    flat = ((args.transcripts, args.transcripts), *[(1, 1)] * (len(siblings) - 1))
    pairs = tuple(zip(siblings, siblings, strict=True)), tuple(zip(sampled, continued, strict=True))
    methods = {
        "shared-outcome": Method("shared-outcome", flat, {}),
        "per-agent": Method("per-agent", flat, {}),
        "value": Method("value", flat, {}),
        "leave-one-out": Method("leave-one-out", pairs[0], {}),
        "control-variate": Method("control-variate", pairs[1], {"weight": args.weight}),
        "value-baseline": Method("value-baseline", pairs[0], {"weight": args.weight}),
    }
    found = []
    for agents in AGENTS:
        found.append(measured(agents if agents.critic else natural_critic(agents, args), methods, args))
        write_page(found, list(methods), args)
    print(args.page.read_text(encoding="utf-8"))


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    summary = (__doc__ or "").partition(":")[0]
    out = argparse.ArgumentParser(prog="python -m benchmarks.credit_exact", description=summary)
    out.add_argument("-n", type=int, default=40, help="problems of the test split")
    out.add_argument("--repeats", type=int, default=4, help="independent batches of samples per problem")
    out.add_argument("--floor", type=float, default=0.01, help="least probability of a reply")
    out.add_argument("--searches", type=int, default=100, help="training searches for the natural agents' critic")
    out.add_argument("--transcripts", type=int, default=16, help="per problem, for the methods without a tree")
    out.add_argument("--siblings", default="4,2,2,4", help="leave-one-out: siblings by turn")
    out.add_argument("--sampled", default="6,2,2,4", help="control-variate: sampled messages by turn")
    out.add_argument("--continued", default="4,2,2,4", help="control-variate: continued messages by turn")
    out.add_argument("--weight", type=float, default=0.5, help="factor of the values in the last two methods")
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--out", type=Path, default=Path("credit"), help="folder for the natural agents' critic")
    out.add_argument("--page", type=Path, default=PAGE)
    return out


if __name__ == "__main__":
    import sys

    given = parser().parse_args()
    # Where the results are does not matter to them.
    given.words = re.sub(r"--(out|page) \S+ ?", "", shlex.join(sys.argv[1:]))
    main(given)
