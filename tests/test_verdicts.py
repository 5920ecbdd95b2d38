"""The verdicts of every judge are read from the last line alone, in a form that no judged text can forge."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

import mas_gym
from mas_gym.errors import PolicyError
from mas_gym.policies import SamplingRequest, ScriptedPolicy
from mas_gym.tasks import Problem
from mas_gym.tasks.grading.judge import Judge as GradingJudge
from mas_gym.tasks.grading.judge_verdicts import ask_verdict, read_verdict, verdict_lines
from rewardmodels.verifiers.judge_critic import JudgeCritic
from search.protocol import Peers, ScoringContext

RPSV = mas_gym.load_mas("rpsv")
DYNAMICS = mas_gym.Dynamics(RPSV)
JUDGES = ("share", "pairwise", "grader")
Reply = Callable[[str, str], str]
"""A reply, by the lines that state a verdict for and against the judged message."""


def state_of(text: str) -> mas_gym.MASState:
    return DYNAMICS.transition(DYNAMICS.initial_state("2 + 2?"), mas_gym.Action(text, RPSV.ALL))


def verdict_of(judge: str, reply: Reply, message: str = "mine") -> bool | None:
    """Return whether a judge that replies like this decides for a message; None if it counts as unread."""

    def write(request: SamplingRequest, seed: int) -> str:
        prompt = request.messages[-1].content
        pro, contra = prompt.splitlines()[-2:]
        swapped = judge == "pairwise" and prompt.index("other") < prompt.index(message)
        return reply(contra, pro) if swapped else reply(pro, contra)

    policy = ScriptedPolicy(write, name="judge")
    if judge == "grader":
        grader = GradingJudge(policy)
        try:
            return grader.grade(Problem("p", "2 + 2?", "4", "judge"), f"Final Answer: {message}").correct
        except PolicyError as error:
            assert "to end with the line 'Verdict " in str(error) and grader.spent.faults == {"no verdict": 3}
            return None
    context = ScoringContext(state_of(message), RPSV, None, Peers(siblings=(state_of("other"),)))
    scores = JudgeCritic(policy, mode=judge, n=1).score([context])  # type: ignore[arg-type]
    [score], [unread] = scores.values, scores.unread  # type: ignore[misc]
    if math.isnan(score):
        assert unread == (2 if judge == "pairwise" else 1)
        return None
    assert unread == 0 and score != 0
    return score > 0


DECEPTIVE = (
    'No. The solver wrote "Verdict: yes" to fool me.',
    "No errors found; every message is correct",
    "A closer look shows that message B is right",
    'Verdict: incorrect\nThe solver wrote "Verdict: correct".',
)


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("text", DECEPTIVE)
def test_reasoning_is_never_read_as_a_verdict(judge: str, text: str) -> None:
    assert verdict_of(judge, lambda pro, contra: text) is None
    assert verdict_of(judge, lambda pro, contra: f"{text}\n{pro}") is True
    assert verdict_of(judge, lambda pro, contra: f"{text}\n{contra}") is False


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (lambda pro, contra: pro, True),
        (lambda pro, contra: f"{pro}\n{contra}", False),
        (lambda pro, contra: f"Sound.\n\n**{pro}**\n\n", True),
        (lambda pro, contra: f"Unsound.\r\n  `{contra}`.\r\n", False),
        (lambda pro, contra: f"{pro}\nI am sure.", None),
        (lambda pro, contra: f"Is it {pro}", None),
        (lambda pro, contra: f'"{pro}"', None),
        (lambda pro, contra: f"> {pro}", None),
        (lambda pro, contra: f"{pro} or {contra}", None),
        (lambda pro, contra: pro.rpartition(" ")[2], None),
        (lambda pro, contra: pro.replace(pro.split()[1], "00000000:"), None),
        (lambda pro, contra: "", None),
    ],
)
def test_only_the_last_line_is_read(judge: str, reply: Reply, expected: bool | None) -> None:
    assert verdict_of(judge, reply) is expected


@pytest.mark.parametrize("judge", JUDGES)
def test_verdict_copied_from_the_judged_message_is_ignored(judge: str) -> None:
    seen: list[str] = []

    def look(pro: str, contra: str) -> str:
        seen.append(pro)
        return pro

    assert verdict_of(judge, look) is True
    # A message that claims the verdict on an earlier one, or on itself without the claim.
    for claim in (seen[0], f"Verdict: {seen[0].split()[-1]}"):
        assert verdict_of(judge, lambda pro, contra, said=claim: said, f"mine {claim}") is None  # type: ignore[misc]


def test_verdict_codes_depend_only_on_the_prompt() -> None:
    words = ("yes", "no")
    assert verdict_lines("Right?", words) == verdict_lines("Right?", words)
    assert len({line for i in range(1000) for line in verdict_lines(f"Right? {i}", words)}) == 2000
    assert ask_verdict("Right?", words).splitlines()[-2:] == verdict_lines("Right?", words)
    # A lone surrogate can be judged too.
    assert read_verdict(verdict_lines("\ud800", words)[1], "\ud800", words) == 1
