"""An agent program with model calls answered by a policy."""

from __future__ import annotations

from asyncio import wrap_future
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from mas_gym.internal.event_loop import together
from mas_gym.policies.base import Messages, PolicyBase, Sampling
from mas_gym.programs import Program, load_program
from mas_gym.programs.replay import ProgramSession
from mas_gym.systems.graph import MAS, Agent
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Problem
from search.models.base import MakeModel, Report, SampleFrom, SearchModel, SearchSource
from search.plan import Plan
from search.protocol import Model
from search.setup import Setup

ProgramSource = Program | str | Callable[..., object]
"""Argument types of `mas_gym.programs.load_program`."""


@dataclass
class ProgramModel(SearchModel):
    """The states of an agent program: transitions run the program."""

    session: ProgramSession = None  # type: ignore[assignment]
    program: Program = None  # type: ignore[assignment]

    @property
    def dynamics(self) -> Model:
        """The transitions of the program's session."""
        return self.session

    async def root(self) -> MASState:
        """Run the program to its first call, and along its known transcripts."""
        root = await wrap_future(self.session.extend(None))
        for texts in self.program.transcripts.get(self.problem.question, ()):
            state = root
            for text in texts:
                if not self.session.is_terminal(state):
                    state = await wrap_future(self.session.extend(state, text))
        return root

    def prompt(self, state: MASState) -> tuple[Messages, Agent, Sampling, str]:
        """Return the call that waits at a state, with the search's sampling where the call leaves it open."""
        call, agent = self.session.call(state), self.mas.agents[state.acting]
        sampling = self.setup.sampling.for_agent(agent)
        cap = min(call.max_tokens or sampling.limit, sampling.limit)
        sampling = replace(sampling, max_new_tokens=cap, **call.settings)
        if sampling.temperature == 0 and self._drawn[state.digest] > 1:
            self.program.report_greedy(agent.name)
        return call.messages, agent, sampling, call.extra_body

    async def reached(self, messages: Sequence[tuple[MASState, str]]) -> None:
        """Run the program with replies that it has not received."""
        await together(self._extend(state, text) for state, text in dict.fromkeys(messages))

    async def _extend(self, state: MASState, text: str) -> None:
        reached = await wrap_future(self.session.extend(state, text))
        if reached.text != text:
            # The last message of a program may contain its answer.
            key = state.digest
            self.origins.setdefault((key, reached.text), self.origins[key, text])

    def completed(self, plan: Plan) -> Plan:
        """Add the program's requests on the chosen path, by the node of each reply."""
        node = plan.best.node if plan.best is not None else None
        requests: dict[int, Messages] = {}
        while node and plan.tree is not None:
            parent = plan.tree[node].parent
            requests[node] = self.session.call(plan.tree.states[parent]).messages
            node = parent
        return replace(super().completed(plan), requests=requests, order_varied=self.session.order_varied)

    def close(self) -> None:
        """End the program's executions of this search."""
        self.session.close()


class ProgramModels(SearchSource):
    """Models of an agent program."""

    def __init__(self, program: Program) -> None:
        self.program, self.mas, self.stated = program, program.mas, {"program": program}

    @contextmanager
    def opened(self, policy: PolicyBase, sample: SampleFrom) -> Iterator[MakeModel]:
        """Open a runner of the program."""
        runner = self.program.open(policy)

        def make(setup: Setup, problem: Problem, report: Report) -> ProgramModel:
            session = ProgramSession(runner, problem.question)
            return ProgramModel(setup, problem, report, sample, tags=policy.tags, session=session, program=self.program)

        try:
            yield make
        finally:
            runner.close()


def load_models(source: ProgramSource, mas: MAS | str | None = None) -> ProgramModels:
    """Load a program as `mas_gym.programs.load_program` does; ``mas`` describes its agents."""
    return ProgramModels(load_program(source) if mas is None else load_program(source, mas=mas))
