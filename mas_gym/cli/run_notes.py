"""Notes that several commands print: costs, misuse of a policy, and the order of concurrent calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mas_gym.cli.console import note
from mas_gym.cli.option_values import policy_label

if TYPE_CHECKING:
    from mas_gym.policies import AsyncPolicy, Policy
    from mas_gym.policies.registry import PolicySpec
    from mas_gym.systems.graph import MAS
    from mas_gym.tasks.base import Task


def warn_of_misuse(policy: PolicySpec, task: str | None, mas: MAS, question: str = "") -> None:
    """Print one warning if a policy was made for a different purpose."""
    from mas_gym.policies.registry import purpose_of

    purpose = purpose_of(policy)
    misuse = purpose.misuse(task, mas.name, question) if purpose is not None and not mas.external else None
    if misuse is not None:
        note(f"Policy {policy_label(policy)} was {misuse}.", "yellow")


def note_judge(task: Task) -> None:
    """Print a judge's cost, which is not included in TOK."""
    from mas_gym.tasks.grading.answers import KindGrader
    from mas_gym.tasks.grading.graders import CustomGrader
    from mas_gym.tasks.grading.judge import Judge

    judge = task.grader.judge if isinstance(task.grader, KindGrader | CustomGrader) else None
    if isinstance(judge, Judge):
        note(f"judge {judge.policy.name}: {judge.spent} (not in TOK)")


def note_order(searches: int) -> None:
    """Print the number of searches in which the order of a program's concurrent calls depended on their speed."""
    if searches:
        note(
            f"The order of concurrent calls varied in {searches:,} searches, so another run may give other results; "
            "set Program(..., settle=1.0)",
            "yellow",
        )


def note_costs(policy: Policy | AsyncPolicy | None) -> None:
    """Print each engine's calls, tokens, faults and cost."""
    for name, meter in (policy.meters if policy is not None else {}).items():
        note(f"{name}: {meter}")
