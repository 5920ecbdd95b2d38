"""Difficulties 1 to 5 of the task with one critic, and critics trained on the easiest and on the hardest problems."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.paper.lab import MCTS, ORM, Lab, Score, command, keep_rows, row_of
from benchmarks.paper.page import NEW, Claim, Page, percent, span
from benchmarks.paper.rivals import compared, rivals
from benchmarks.tiny.stories import FAMILIES
from mas_gym.tasks.procedural.generated import DEFAULT_DIFFICULTY

ASKS = """
The task has five difficulty levels, with two to six events. The critics of the main table, MASPRM and ORM, are used
unchanged on all of them. Two more MASPRMs were trained, one on the easiest and one on the hardest problems. This is the
small-scale equivalent of GSM8K and MATH, which have similar problems of different difficulty. The paper transfers
critics between these two data sets and loses 3.7 to 9.3 points compared with a critic of the same data set.
"""


def run(lab: Lab, levels: Sequence[int] = ()) -> Page:
    page = Page("difficulty", "Difficulties", ASKS)
    family, _, level_name = lab.home.task.partition("-")
    levels = levels or tuple(FAMILIES[family].levels)
    home = int(level_name or DEFAULT_DIFFICULTY)
    names = {level: lab.home.task if level == home else f"{family}-{level}" for level in levels}
    settings = {level: lab.home._replace(task=name) for level, name in names.items()}
    critic, judge = lab.critic(lab.home), lab.critic(lab.home, ORM)
    ends = {level: lab.critic(settings[level]) for level in (levels[0], levels[-1]) if level != home}
    rows, claims = [], []
    for level, setting in settings.items():
        single, guided, *others = lab.measure(
            setting,
            [
                row_of("single"),
                row_of(MCTS, critic, f"MASPRM, difficulty {home}"),
                *(row_of(MCTS, other, f"MASPRM, difficulty {one}") for one, other in ends.items()),
            ],
        )
        equal = rivals(lab, setting, guided, single, name=f"difficulty {level}: ", orm=judge)
        scores = [single, guided, *others, equal.likelihood, equal.best]
        rows.append((str(level), *(_cell(score) for score in scores)))
        claims += [*equal.claims(), *_against_own(level, guided, dict(zip(ends, others, strict=True)))]
        keep_rows(lab, f"difficulty-{level}", scores)
    columns = [f"MASPRM, difficulty {home}", *(f"MASPRM, difficulty {level}" for level in ends), "policy likelihood"]
    page.table(("difficulty", "single pass", *columns, f"best-of-N, ORM, difficulty {home}"), rows)
    page.claims = claims
    return page


def _cell(score: Score) -> str:
    return f"{score.row.planner}: {percent(score.hit)} ({span(*score.row.interval)})"


def _against_own(level: int, guided: Score, others: dict[int, Score]) -> list[Claim]:
    """Compare the critic of the home difficulty with a level's own critic, where there is one."""
    if level not in others:
        return []
    return [compared(f"difficulty {level}: its own critic over that of the main table", NEW, others[level], guided)]


if __name__ == "__main__":
    command(run, "difficulty")
