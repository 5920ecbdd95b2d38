"""Replay of failed samples: new continuations from each message, which show after which one the success rate falls."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mas_gym.critics import Proposal
from mas_gym.errors import ConfigError, shown
from mas_gym.policies.base import AsyncPolicy, Policy, Sampling
from mas_gym.programs import Program
from mas_gym.systems.graph import MAS
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks.base import Problem
from search.compare.blame import REPLAY, Blame
from search.compare.sibling_outcomes import Outcomes, fall_probability
from search.plan import Candidate, Plan
from search.planners.tree_growth import append, child_of, finish_paths
from search.protocol import Model, PlanGenerator, Planner, Propose
from search.runs import run
from search.tree import Tree

Texts = tuple[str, ...]


@dataclass(frozen=True)
class Continuations(Planner):
    """Continues each proper prefix of given transcripts several times.

    Attributes:
        transcripts: The speakers and the messages of the transcripts, by question.
        n: Number of continuations of each prefix.
    """

    needs_critic = False

    transcripts: Mapping[str, Sequence[tuple[tuple[str, ...], Texts]]]
    n: int

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Sample the continuations; the candidates are their ends."""
        tree = Tree(root)
        starts: dict[int, None] = {}
        for speakers, texts in self.transcripts[root.question]:
            node = 0
            for place, (speaker, text) in enumerate(zip(speakers, texts, strict=True)):
                found = None if tree.is_terminal(node) else model.mas.node_name(tree.states[node].acting)
                if found != speaker:
                    raise _other_system(model.mas, root.question, speakers, place, found)
                starts[node] = None
                if place + 1 < len(texts):
                    node = child_of(tree, model, node, Proposal(Action(text, model.mas.ALL)))
            # The state after the last message of a program is not known.
            end = None if model.mas.external else model.transition(tree.states[node], Action(texts[-1], model.mas.ALL))
            if end is not None and not model.is_terminal(end):
                raise _other_system(model.mas, root.question, speakers, len(texts), model.mas.node_name(end.acting))
        proposals = yield [Propose(tree.states[node], self.n) for node in starts]
        ends = [append(tree, model, node, one) for node, group in zip(starts, proposals, strict=True) for one in group]
        yield from finish_paths(tree, model, ends)
        return Plan(tuple(Candidate(tree.states[end], node=end) for end in ends), tree)


def replay(
    blames: Sequence[Blame],
    problems: Iterable[Problem],
    speakers: Sequence[str],
    system: MAS | Program,
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
        system: Wrote the samples; a program runs again with the earlier messages as replies.
        policy: As for `search.run`, like ``sampling``.
        sampling: The sampling parameters.
        n: Number of continuations of each prefix.
        seed: A seed that differs from that of the samples, which would be repeated otherwise.

    Raises:
        ConfigError: The samples are not transcripts of the system.
        DivergenceError: The program makes other calls when it runs again.
    """
    transcripts: defaultdict[str, dict[tuple[tuple[str, ...], Texts], None]] = defaultdict(dict)
    wanted = {one.sample.problem_id for one in blames}
    known = {problem.id: problem for problem in problems if problem.id in wanted}
    for one in blames:
        names = tuple(speakers[agent] for agent in one.sample.speakers)
        transcripts[known[one.sample.problem_id].question][names, one.sample.texts] = None
    planner = Continuations({question: tuple(found) for question, found in transcripts.items()}, n)
    replies = {question: [texts[:-1] for _, texts in found] for question, found in transcripts.items()}
    outcomes: dict[tuple[str, Texts], Outcomes] = {}
    plans = run(
        planner,
        list(known.values()),
        mas=None if isinstance(system, Program) else system,
        program=system.continuing(replies) if isinstance(system, Program) else None,
        policy=policy,
        sampling=sampling,
        seed=seed,
        raise_errors=True,
    )
    for plan in plans:
        texts = [texts for _, texts in planner.transcripts[known[plan.problem_id].question]]
        for prefix, found in _outcomes(plan, texts, n).items():
            outcomes[plan.problem_id, prefix] = found
    return [_judged(one, outcomes, n) for one in blames]


def _other_system(mas: MAS, question: str, speakers: Sequence[str], place: int, found: str | None) -> ConfigError:
    acts = f"after {place} messages {found} acts" if found is not None else f"the system ends after {place} messages"
    return ConfigError(
        f"expected transcripts of the system {mas.name!r}, got one of {', '.join(speakers)} for {shown(question)}, "
        f"where {acts}; pass the system or program that wrote them with --mas or --program"
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
    found = [outcomes.get((sample.problem_id, sample.texts[:length])) for length in range(len(sample.texts))]
    if any(outcome is None for outcome in found):
        return one
    # The end of the transcript is known to be wrong.
    after = (*(outcome for outcome in found if outcome is not None), Outcomes(0, n))
    rates = [outcome.right / max(outcome.total, 1) for outcome in after]
    falls = [-1.0 if copied else rates[i] - rates[i + 1] for i, copied in enumerate(sample.repeats)]
    turn = max(range(len(falls)), key=falls.__getitem__)
    sure = fall_probability(after[turn], after[turn + 1]) if falls[turn] > 0 else 0.0
    return one._replace(sample=sample._replace(after=after), turn=turn, confidence=sure, source=REPLAY)
