"""Rounds of search, critic training, evaluation and agent training; every stage can be resumed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mas_gym.errors import ConfigError, TrainingError, need, whole_number
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.suggestions import choice
from mas_gym.policies import load_policy
from mas_gym.policies.token_traces import traced, traces_folder
from rewardmodels.agents.config import TRAINING_METHODS, VALUE_CREDITS, agent_config
from rewardmodels.agents.examples import read_examples
from rewardmodels.agents.training import ALL, policy_spec, train_agents
from rewardmodels.model.critic_folder import write_whole
from rewardmodels.training.train_critic import claim_folder, grow, grown, teach, trees
from search.compare.comparison_runs import Row, measure, named_planners
from search.critic_registry import load_critic
from search.plan import Plan
from search.progress import Progress
from search.protocol import Critic, ScoringContext
from search.results.outcomes import Outcome
from search.results.plots import COLORS, HEIGHT, WIDTH, dress, figure_class, plot_text, save_figure
from search.results.summary import ResultRow, summarize
from search.setup import RunSpec
from search.store import open_store

if TYPE_CHECKING:
    from mas_gym.tasks.base import Task

ROUNDS = "rounds.json"
RUN = "improve.json"
STORE = "runs.db"
CURVES = "curves"
PLANNERS = {"sft": "mcts:20,3", "dpo": "mcts:20,3", "grpo": "siblings:2"}
"""Planner for training problems by method: grpo needs independent samples, the other methods high-quality ones."""

Listen = Callable[[Progress], None] | bool


@dataclass(frozen=True, slots=True)
class ImproveConfig:
    """Settings of `improve`.

    Attributes:
        method: Training method of the agents, see `AgentConfig`.
        rounds: Number of rounds of agent training.
        problems: Training problems per round; each round uses different problems.
        planner: Planner for training problems; if empty, the method's planner in `PLANNERS`.
        search: Planner that is evaluated with each round's critic.
        seed: Run seed of all searches.
        agents: Fields of `AgentConfig`, such as ``credit`` or ``learning_rate``.
    """

    method: str = "grpo"
    rounds: int = 3
    problems: int = 100
    planner: str = ""
    search: str = "mcts:20,2"
    seed: int = 42
    agents: tuple[tuple[str, Any], ...] = ()


class Round(NamedTuple):
    """One generation of agents.

    Attributes:
        number: Number of the generation; 0 for the initial agents.
        policy: Policy spec of the agents for `load_policy`.
        identity: Digest of the policy's identity, which includes the weights.
        tokens: Tokens generated in the searches of training problems so far, including this generation's.
        rows: Results on the held-out problems: a single pass, and search with this generation's critic.
        values: Means over the single passes on the held-out problems: the true ``reward``, and the value of the final
            state according to this generation's ``critic`` and the ``first critic``. If the value increases and the
            reward does not, the agents exploit the critic.
        outcomes: The searches that the rows summarize.
    """

    number: int
    policy: str
    identity: str
    tokens: int
    rows: tuple[ResultRow, ...]
    values: dict[str, float]
    outcomes: tuple[Outcome, ...]

    def to_dict(self) -> JSONObject:
        """Return a JSON-serializable form, with the number of outcomes instead of the outcomes."""
        rows = [row.to_dict() for row in self.rows]
        return {**self._asdict(), "rows": rows, "outcomes": len(self.outcomes)}


def improve(
    spec: RunSpec,
    held_out: Task,
    out: str | Path,
    config: ImproveConfig,
    start: str = "tiny",
    device: str | None = None,
    log: Callable[[str], None] = lambda line: None,
    listen: Listen = False,
) -> list[Round]:
    """Repeat search, critic training, evaluation and agent training for several rounds.

    Each generation of agents, including the last, is evaluated with a critic trained on its own searches. Repeating the
    call resumes an interrupted stage and gives the same weights and results.

    Args:
        spec: The training problems and the system; its policy, store and seed are replaced.
        held_out: Problems for the evaluation, such as a dev split.
        out: Folder for one store with its token traces, the models of each round, ``rounds.json``, TensorBoard
            ``curves``, and ``curves.png``.
        config: The settings.
        start: The agents of generation 0: ``"tiny"``, or a folder or hub id.
        device: ``"cpu"`` or ``"cuda"``; None uses a GPU if there is one.
        log: Receives progress lines.
        listen: Receives the progress of searches; True for a progress bar.

    Returns:
        The generations, from 0 to ``config.rounds``.

    Raises:
        ConfigError: A setting is invalid, there are too few problems, or ``out`` was created with different settings.
        DataError: The searches yield no training examples.
        TrainingError: A loss is not finite, or the disk is full.
    """
    for package in ("tensorboard", "matplotlib"):
        need(package, "improve", "agents")
    choice("method", config.method, TRAINING_METHODS)
    whole_number("rounds", config.rounds, at_least=1)
    whole_number("problems", config.problems, at_least=2)
    agent_config(config.method, 0, dict(config.agents))
    wanted = (config.rounds + 1) * config.problems
    if len(spec.problems) < wanted:
        raise ConfigError(
            f"expected {wanted:,} training problems for {config.rounds} rounds and the final evaluation, got "
            f"{len(spec.problems):,}; use fewer rounds, or fewer problems per round"
        )
    out = Path(out)
    facts = {"held out": len(held_out), "task": spec.problems.name, "mas": spec.mas.to_dict()}
    claim_folder(out, out / RUN, json.loads(json.dumps({**asdict(config), "start": start, **facts})))
    rounds: list[Round] = []
    models = {ALL: start}
    for number in range(config.rounds + 1):
        policy, folder = policy_spec(models), out / f"generation-{number}" / "masprm"
        log(f"generation {number}: {policy}")
        problems = spec.problems[number * config.problems : (number + 1) * config.problems]
        own = replace(spec, problems=problems, policy=load_policy(policy), store=out / STORE, seed=config.seed)
        _search(own, config, log, listen)
        log("training a critic on them")
        teach(partial(trees, own), folder, "masprm", "bt", start, log=log)
        critic = load_critic(str(folder))
        first = load_critic(str(out / "generation-0" / "masprm")) if number else critic
        log(f"evaluating on {len(held_out):,} held-out problems")
        outcomes, values = _evaluated(replace(own, problems=held_out), config.search, critic, first, listen)
        [info] = grown(own)
        with open_store(out / STORE) as store:
            spent = sum(row["generated_tokens"] for row in store.rows(info.run))
        tokens = spent + (rounds[-1].tokens if rounds else 0)
        agents, rows = digest_of(identity_of(own.policy)), tuple(summarize(outcomes))
        rounds.append(Round(number, policy, agents, tokens, rows, values, tuple(outcomes)))
        for row in rows:
            hit, low, high = (100 * share for share in (row.hits[1].mean, row.interval.low, row.interval.high))
            log(f"  {row.label}: Hit@1 {hit:.1f} [{low:.1f}, {high:.1f}], TOK {row.tokens.mean:,.0f}")
        _report(out, rounds)
        if number < config.rounds:
            log(f"training the agents of generation {number + 1}")
            settings = dict(config.agents)
            stated = agent_config(config.method, 0, settings)
            valued = config.method == "grpo" and stated.credit in VALUE_CREDITS
            examples = read_examples(out / STORE, stated, info.run, critic if valued else None)
            base = models if settings.get("adapters") == "per-agent" else models[ALL]
            target = out / f"generation-{number + 1}" / "agents"
            trained = train_agents(examples, target, config.method, base, device=device, log=log, **settings)
            models |= {agent: str(path) for agent, path in trained.folders.items()}
    return rounds


def _search(spec: RunSpec, config: ImproveConfig, log: Callable[[str], None], listen: Listen) -> None:
    """Search training problems with the true reward."""
    planner = config.planner or PLANNERS[config.method]
    log(f"searching {len(spec.problems):,} training problems by {planner}")
    if config.method == "grpo":
        assert spec.policy is not None and spec.store is not None
        spec = replace(spec, policy=traced(spec.policy, traces_folder(Path(spec.store))))
    stop = grow(spec, planner, listen)
    if stop is not None:
        raise stop


def _evaluated(
    spec: RunSpec, search: str, critic: Critic, first: Critic, listen: Listen
) -> tuple[list[Outcome], dict[str, float]]:
    """Return the outcomes of a single pass and of search with a critic, and the values of `Round`."""
    rows = [
        Row(name, planner, critic if planner.needs_critic else None, "masprm" if planner.needs_critic else "")
        for name, planner in named_planners(["single", search]).items()
    ]
    passes: dict[str, Plan] = {}

    def look(row: Row, plan: Plan) -> None:
        if row.name == "single" and plan.error is None:
            passes[plan.problem_id] = plan

    heard = (lambda row, seed, now: listen(now)) if callable(listen) else listen
    outcomes, stop = measure(rows, spec, look=look, listen=heard)
    if stop is not None:
        raise stop
    # In a fixed order, so that sums are bitwise equal.
    plans = [passes[name] for name in sorted(passes)]
    values = {
        "reward": _mean(1.0 if plan.correct else -1.0 for plan in plans),
        "critic": _mean(_ends(plans, critic)),
        "first critic": _mean(_ends(plans, first)),
    }
    return outcomes, values


def _ends(plans: Sequence[Plan], critic: Critic) -> list[float]:
    """Return the critic's values of the final states of single passes."""
    contexts = [
        ScoringContext(plan.best.state, plan.mas, None)
        for plan in plans
        if plan.best is not None and plan.mas is not None
    ]
    return [float(value) for value in critic.score(contexts)]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / max(len(found), 1)


def _report(out: Path, rounds: Sequence[Round]) -> None:
    """Rewrite ``rounds.json``, the TensorBoard ``curves`` and ``curves.png``."""
    from torch.utils.tensorboard import SummaryWriter

    try:
        write_whole(out / ROUNDS, json.dumps([one.to_dict() for one in rounds], indent=2))
        shutil.rmtree(out / CURVES, ignore_errors=True)
        with SummaryWriter(str(out / CURVES)) as writer:
            for one in rounds:
                for row in one.rows:
                    writer.add_scalar(f"hit@1/{row.label}", row.hits[1].mean, one.number)
                    writer.add_scalar(f"tokens/{row.label}", row.tokens.mean, one.number)
                for name, value in one.values.items():
                    writer.add_scalar(f"final states/{name}", value, one.number)
                writer.add_scalar("training tokens", one.tokens, one.number)
        _draw(rounds, out / f"{CURVES}.png")
    except OSError as error:
        raise TrainingError(
            f"cannot write to {out}: {error}; fix this, for example by freeing disk space, and run the same command "
            "again"
        ) from error


def _draw(rounds: Sequence[Round], path: Path) -> None:
    """Draw Hit@1 of each planner by generation, with 95% intervals."""
    figure = figure_class()(figsize=(WIDTH, HEIGHT), dpi=200, layout="constrained")
    axes = figure.subplots()
    numbers = [one.number for one in rounds]
    for rows, color in zip(zip(*(one.rows for one in rounds), strict=True), COLORS, strict=False):
        low, high = ([100 * end for end in ends] for ends in zip(*(row.interval for row in rows), strict=True))
        axes.fill_between(numbers, low, high, color=color, alpha=0.15, lw=0)
        hits = [100 * row.hits[1].mean for row in rows]
        axes.plot(numbers, hits, color=color, marker="o", ms=4, label=plot_text(rows[0].label))
    axes.set_xticks(numbers)
    dress(axes, "generation", "Hit@1 (%)")
    axes.legend(frameon=False)
    save_figure(figure, path)
