"""Replay of failed samples: new continuations from each message, which show after which one the success rate falls."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mas_gym.errors import ConfigError
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks.base import Problem
from search.compare.blame import REPLAY, Blame
from search.compare.sibling_outcomes import Outcomes, fall_probability
from search.plan import Candidate, Plan
from search.planners.tree_growth import append, child_of
from search.protocol import Model, PlanGenerator, Planner, Propose
from search.runs import run
from search.sampling import Sampling
from search.tree import Proposal, Tree

Texts = tuple[str, ...]


@dataclass(frozen=True)
class Continuations(Planner):
    """Continues each proper prefix of given transcripts several times.

    Attributes:
        transcripts: The messages of the transcripts, by question.
        n: Number of continuations of each prefix.
    """

    needs_critic = False

    transcripts: Mapping[str, Sequence[Texts]]
    n: int

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Sample the continuations; the candidates are their ends."""
        tree = Tree(root)
        starts: dict[int, None] = {}
        for texts in self.transcripts[root.question]:
            node = 0
            for text in texts[:-1]:
                starts[node] = None
                node = child_of(tree, model, node, Proposal(Action(text, model.mas.ALL)))
            starts[node] = None
        proposals = yield [Propose(tree.states[node], self.n) for node in starts]
        ends = [append(tree, model, node, one) for node, group in zip(starts, proposals, strict=True) for one in group]
        while growing := [i for i, node in enumerate(ends) if not tree.is_terminal(node)]:
            replies = yield [Propose(tree.states[ends[i]], 1) for i in growing]
            for i, [one] in zip(growing, replies, strict=True):
                ends[i] = append(tree, model, ends[i], one)
        return Plan(tuple(Candidate(tree.states[end], node=end) for end in ends), tree)


def replay(
    blames: Sequence[Blame],
    problems: Iterable[Problem],
    speakers: Sequence[str],
    mas: MAS,
    policy: Policy | AsyncPolicy,
    sampling: Sampling,
    *,
    n: int,
    seed: int,
) -> list[Blame]:
    """Blame failed samples by the success rates of new continuations from each of their messages.

    The first error is the message with the largest fall in the success rate. Its probability is that of a fall.

    Args:
        blames: The failed samples, which keep their order.
        problems: The problems of the samples.
        speakers: The names of the agents in the samples.
        mas: The system that wrote the samples.
        policy: The policy that wrote the samples.
        sampling: The sampling parameters.
        n: Number of continuations of each prefix.
        seed: A seed that differs from that of the samples, which would be repeated otherwise.

    Raises:
        ConfigError: The samples are not transcripts of the system.
    """
    transcripts: defaultdict[str, dict[Texts, None]] = defaultdict(dict)
    wanted = {one.sample.problem_id for one in blames}
    known = {problem.id: problem for problem in problems if problem.id in wanted}
    for one in blames:
        question = known[one.sample.problem_id].question
        _check(mas, question, one, [speakers[agent] for agent in one.sample.speakers])
        transcripts[question][one.texts] = None
    outcomes: dict[tuple[str, Texts], Outcomes] = {}
    planner = Continuations({question: tuple(texts) for question, texts in transcripts.items()}, n)
    for plan in run(planner, list(known.values()), mas=mas, policy=policy, sampling=sampling, seed=seed):
        for prefix, found in _outcomes(plan, planner.transcripts[known[plan.problem_id].question], n).items():
            outcomes[plan.problem_id, prefix] = found
    return [_judged(one, outcomes, n) for one in blames]


def _check(mas: MAS, question: str, one: Blame, names: Sequence[str]) -> None:
    dynamics = Dynamics(mas)
    state, wrote = dynamics.initial_state(question), list[str]()
    for text in one.texts:
        if dynamics.is_terminal(state):
            break
        wrote.append(mas.node_name(state.acting))
        state = dynamics.transition(state, Action(text, mas.ALL))
    if wrote != list(names) or not dynamics.is_terminal(state):
        raise ConfigError(
            f"expected transcripts of the system {mas.name!r}, whose agents speak in the order {', '.join(wrote)}, got "
            f"{one.sample.problem_id} with {', '.join(names)}; pass the system that wrote them with --mas"
        )


def _outcomes(plan: Plan, transcripts: Iterable[Texts], n: int) -> dict[Texts, Outcomes]:
    """Return the outcomes of the continuations of each prefix: ``n`` candidates per prefix, in the planner's order."""
    prefixes = dict.fromkeys(texts[:length] for texts in transcripts for length in range(len(texts)))
    graded = [bool(one.correct) for one in plan.candidates]
    return {
        prefix: Outcomes(sum(graded[first : first + n]), len(graded[first : first + n]))
        for prefix, first in zip(prefixes, range(0, len(graded), n), strict=False)
    }


def _judged(one: Blame, outcomes: Mapping[tuple[str, Texts], Outcomes], n: int) -> Blame:
    sample = one.sample
    found = [outcomes.get((sample.problem_id, one.texts[:length])) for length in range(len(one.texts))]
    if any(outcome is None for outcome in found):
        return one
    # The end of the transcript is known to be wrong.
    after = (*(outcome for outcome in found if outcome is not None), Outcomes(0, n))
    rates = [outcome.right / max(outcome.total, 1) for outcome in after]
    falls = [-1.0 if copied else rates[i] - rates[i + 1] for i, copied in enumerate(sample.repeats)]
    turn = max(range(len(falls)), key=falls.__getitem__)
    sure = fall_probability(after[turn], after[turn + 1]) if falls[turn] > 0 else 0.0
    return one._replace(sample=sample._replace(after=after), turn=turn, confidence=sure, source=REPLAY)
