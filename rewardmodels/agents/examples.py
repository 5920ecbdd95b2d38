"""Training examples for agents (demonstrations, preferences, credited samples) from the training runs of a store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mas_gym.errors import ConfigError, DataError
from mas_gym.internal.identity import digest_of
from mas_gym.policies.base import TokenTrace
from mas_gym.policies.token_traces import Traces, traces_folder
from mas_gym.systems.prompts import ChatMessage, chat_messages
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import rule_of, same_rule
from rewardmodels.agents.config import VALUE_CREDITS, AgentConfig
from rewardmodels.data.dataset import training_runs
from search.credit import credit
from search.plan import Plan
from search.protocol import Critic, ScoringContext
from search.store import RunInfo, open_store
from search.tree import Tree

logger = logging.getLogger("rewardmodels.agents")

Prompt = tuple[ChatMessage, ...]


class Demonstration(NamedTuple):
    """A message of a correct transcript."""

    agent: str
    prompt: Prompt
    text: str


class Preference(NamedTuple):
    """Two messages of one agent for one prompt.

    Attributes:
        agent: Name of the agent.
        prompt: The chat prompt of the agent.
        chosen: The message whose subtree has the higher mean reward.
        rejected: The other message.
    """

    agent: str
    prompt: Prompt
    chosen: str
    rejected: str


class CreditedSample(NamedTuple):
    """A sampled message with its advantage.

    Attributes:
        agent: Name of the agent.
        trace: Its tokens and their log-probabilities.
        advantage: Its credit. `credited_samples` divides it by the root mean square over all samples to give all
            methods the same scale.
    """

    agent: str
    trace: TokenTrace
    advantage: float


Example = Demonstration | Preference | CreditedSample


def read_examples(
    path: str | Path, config: AgentConfig, run: str | None = None, critic: Critic | None = None
) -> Sequence[Example]:
    """Return the examples for a config's method from a store; token traces are read from the folder next to it.

    Raises:
        ConfigError: The method needs a critic.
        DataError: There are no examples or no training run.
    """
    if config.method == "sft":
        return demonstrations(path, config.best, run)
    if config.method == "dpo":
        return sibling_pairs(path, config.least, run)
    return credited_samples(path, traces_folder(path), config.credit, critic, run)


def demonstrations(path: str | Path, best: int, run: str | None = None) -> list[Demonstration]:
    """Return the distinct messages of the best correct transcripts of each problem (expert iteration).

    Transcripts are ranked by the mean of W / N over their messages, that is, by the messages' mean reward. Messages
    that reached their token limit are excluded.

    Source: expert iteration (Anthony et al. 2017, arXiv 1705.08439).

    Raises:
        DataError: No transcript is correct, or there is no training run.
    """
    found: list[Demonstration] = []
    with open_store(path) as store:
        for info in training_runs(store, run):
            if info.mas.external:
                raise ConfigError(
                    f"{path}: expected a run of a MAS, got one of the program {info.mas.name}; prompts of programs are "
                    "not stored, so train its agents with grpo, from token traces"
                )
            for plan in store.plans(info.run):
                found += _demonstrations(plan, info, best)
    if not found:
        raise DataError(f"{path}: expected correct transcripts, found none; use easier problems or more simulations")
    return found


def _demonstrations(plan: Plan, info: RunInfo, best: int) -> Iterator[Demonstration]:
    if plan.tree is None:
        return
    tree = plan.tree
    correct = [one.node for one in plan.candidates if one.correct and one.node is not None]
    ends = sorted(correct, key=lambda end: (-_mean_reward(tree, end), end))[:best]
    for node in dict.fromkeys(step for end in ends for step in tree.path(end)[1:]):
        state, parent = tree.states[node], tree.states[tree.parents[node]]
        if tree[node].finish_reason == "stop" and state.text:
            yield Demonstration(info.mas.agents[state.speaker].name, chat_messages(info.mas, parent), state.text)


def _mean_reward(tree: Tree, end: int) -> float:
    """Return the mean W / N over the messages of a path; unvisited messages count as 0."""
    steps = tree.path(end)[1:]
    return sum(tree[step].q or 0.0 for step in steps) / len(steps)


def sibling_pairs(path: str | Path, least: float, run: str | None = None) -> list[Preference]:
    """Return the best and the worst message of each state, if they differ enough; see `search.Store.preferences`.

    Args:
        path: The store.
        least: Minimum difference between their mean rewards, in ``(0, 2]``.
        run: One training run; None reads all training runs.

    Raises:
        DataError: There is no such pair, or no training run.
    """
    found = []
    with open_store(path) as store:
        for info in training_runs(store, run):
            rule = same_rule(rule_of(str(info.facts.get("task"))))
            for row in store.preferences(info.run, least=least, same=rule):
                prompt = tuple(ChatMessage(**message) for message in row["prompt"])
                found.append(
                    Preference(row["agent"], prompt, row["chosen"][0]["content"], row["rejected"][0]["content"])
                )
    if not found:
        raise DataError(
            f"{path}: expected states whose best and worst messages differ by at least {least} in mean reward, found "
            "none; use more simulations, or a smaller least="
        )
    return found


def credited_samples(
    path: str | Path,
    traces: str | Path,
    method: str,
    critic: Critic | None = None,
    run: str | None = None,
) -> list[CreditedSample]:
    """Return the samples of `sampled_messages` (same arguments), with advantages scaled to a root mean square of 1.

    Raises:
        ConfigError: The method needs a critic.
        DataError: A message has no trace, or no message has an advantage other than 0.
    """
    found = [one for _, messages in sampled_messages(path, traces, method, critic, run) for one in messages]
    scale = (sum(one.advantage**2 for one in found) / max(len(found), 1)) ** 0.5
    if not scale:
        raise DataError(
            f"{path}: expected messages with different rewards, found none; use problems that the agents solve only "
            "sometimes"
        )
    # A sample without advantage has no gradient.
    return [one._replace(advantage=one.advantage / scale) for one in found if one.advantage]


def sampled_messages(
    path: str | Path,
    traces: str | Path,
    method: str,
    critic: Critic | None = None,
    run: str | None = None,
) -> list[tuple[str, list[CreditedSample]]]:
    """Return the id of each problem with its sampled messages, for trainers that group samples.

    The advantages are those of `search.credit.credit`, unscaled, in the order of the tree's nodes. Zeros are included.

    Args:
        path: The store.
        traces: The folder of the store's token traces.
        method: A method of `search.credit.credit`.
        critic: Critic for the methods that need state values.
        run: One training run; None reads all training runs. Advantages are computed within each run.

    Raises:
        ConfigError: The method needs a critic.
        DataError: A message has no trace.
    """
    if method in VALUE_CREDITS and critic is None:
        raise ConfigError(f"credit {method!r} needs state values; pass --critic FOLDER, such as that of a MASPRM")
    found: list[tuple[str, list[CreditedSample]]] = []
    with open_store(path) as store:
        for info in training_runs(store, run):
            tokens = Traces(traces, digest_of(info.config["policy"]["identity"]))
            plans = [plan for plan in store.plans(info.run) if plan.tree is not None]
            seeds = dict(store.message_seeds(info.run))
            value = None if critic is None or method not in VALUE_CREDITS else _values(plans, critic)
            for plan, messages in zip(plans, credit(plans, method, value=value), strict=True):
                samples = []
                for one in messages:
                    seed = seeds[plan.problem_id][one.node]
                    sampled = None if seed is None else tokens.find(seed)
                    if sampled is None:
                        raise DataError(
                            f"{traces}: expected the trace of message {one.node} (problem {plan.problem_id}), found "
                            "none; run the rollouts again with --token-traces and a new store"
                        )
                    if not sampled.trace.completion:
                        raise DataError(
                            f"{traces}: expected token ids, got only log-probabilities; repeat the rollouts with a "
                            "vLLM server"
                        )
                    samples.append(CreditedSample(sampled.agent, sampled.trace, one.advantage))
                found.append((plan.problem_id, samples))
    return found


def _values(plans: Sequence[Plan], critic: Critic) -> Callable[[MASState], float]:
    """Return a function that looks up a critic's value of a state in the given trees, except the roots."""
    states = {state: plan.mas for plan in plans if plan.tree is not None for state in plan.tree.states if state.depth}
    contexts = [ScoringContext(state, mas, None) for state, mas in states.items() if mas is not None]
    known: dict[MASState, float] = {}
    for start in range(0, len(contexts), critic.max_batch):
        some = contexts[start : start + critic.max_batch]
        known.update(zip((context.state for context in some), critic.score(some), strict=True))
    return lambda state: known.get(state, float("nan"))
