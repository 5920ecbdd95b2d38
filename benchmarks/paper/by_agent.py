"""Loss of a critic by agent: beam search in which another critic selects among the messages of one agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.paper.lab import LIKELIHOOD, SCORE_HEADER, Lab, command, keep_rows, row_of, score_cells
from benchmarks.paper.page import NEW, Page
from benchmarks.paper.rivals import compared
from mas_gym.systems.loading import load_mas
from rewardmodels import load_critic
from search import Critic, ScoringContext

PLANNER = "sbs:5,3"
ASKS = """
Beam search compares messages of one agent at a time, so a search can use a different critic for one of the agents.
Here, policy likelihood or the ground truth selects among one agent's messages in SBS(5,3) with MASPRM. The accuracy
that this gains is what MASPRM loses on this agent's messages. The problems are from the dev split, because the page
investigates causes.
"""


@dataclass(frozen=True)
class Replaced:
    """One critic, but another one for the messages of one agent."""

    usual: Critic
    other: Critic
    agent: str
    terminal_only = False
    free = False

    @property
    def name(self) -> str:
        return f"{self.usual.name}, {self.agent}: {self.other.name}"

    def identity(self) -> object:
        return self.agent, self.usual, self.other

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        values = [0.0] * len(contexts)
        for critic in (self.usual, self.other):
            chosen = [i for i, context in enumerate(contexts) if self._of(context) is critic]
            if chosen:
                for i, value in zip(chosen, critic.score([contexts[i] for i in chosen]), strict=True):
                    values[i] = value
        return values

    def _of(self, context: ScoringContext) -> Critic:
        speaker = context.state.turns[-1].speaker
        return self.other if context.mas.agents[speaker].name == self.agent else self.usual


def run(lab: Lab) -> Page:
    page = Page("by_agent", "Selection errors of a critic by agent", ASKS, split="dev")
    masprm = lab.critic(lab.home)
    others: dict[str, Critic] = {
        "policy likelihood": load_critic(LIKELIHOOD),
        "ground truth": lab.truth(lab.home, "dev"),
    }
    searches = [row_of(PLANNER, masprm, "MASPRM")]
    searches += [row_of(PLANNER, critic, name) for name, critic in others.items()]
    searches += [
        row_of(PLANNER, Replaced(masprm, critic, agent.name), f"MASPRM, but {name} for the {agent.name}")
        for name, critic in others.items()
        for agent in load_mas(lab.home.mas).agents
    ]
    scores = lab.measure(lab.home, searches, split="dev")
    page.table(("search", "critic", *SCORE_HEADER), [(PLANNER, s.row.critic, *score_cells(s)) for s in scores], left=2)
    page.claims = [compared(f"{score.row.critic}, over MASPRM", NEW, score, scores[0]) for score in scores[1:]]
    keep_rows(lab, page.name, scores)
    return page


if __name__ == "__main__":
    command(run, "by_agent")
