r"""Whether an ORM ranks right answers above wrong ones, or small numbers above large ones.

    python -m benchmarks.small_numbers --task stories-4 --policy transformers:models/tiny-natural \
        --base models/tiny-natural -n 200 --trees 4800 --out natural

The arguments are those of a table. Among five passes for each problem, every right answer is compared
with every wrong one. Wrong answers that are smaller than the right one and those that are larger are counted
separately. A judge of correctness has the same share for both.
"""

from __future__ import annotations

from collections import defaultdict

import search
from benchmarks.paper.lab import ORM, Lab, problems
from benchmarks.paper.options import Options, read

PASSES = 5


def shares(options: Options) -> dict[str, list[bool]]:
    """Return whether the ORM ranks the right pass higher, for each pair, by the size of the wrong answer."""
    lab = Lab(options)
    task = problems(lab.home, "test", options.number)
    found: dict[str, list[bool]] = defaultdict(list)
    for seed in options.seeds:
        run = search.run(
            f"bon:{PASSES}",
            task,
            mas=lab.home.mas,
            policy=lab.policy(lab.home.policy),
            critic=lab.critic(lab.home, ORM),
            seed=seed,
        )
        for plan in run:
            truth = int(task.problem(plan.problem_id).answer)
            right = [one.score for one in plan.candidates if one.correct]
            wrong = [one for one in plan.candidates if not one.correct and (one.answer or "").isdecimal()]
            for one in wrong:
                size = "smaller" if int(one.answer or 0) < truth else "larger"
                found[size] += [score > one.score for score in right]
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the shares."""
    found = shares(read("python -m benchmarks.small_numbers", __doc__ or "", arguments))
    for size, wins in sorted(found.items()):
        print(
            f"wrong answer {size}: right ranked above wrong in {100 * sum(wins) / len(wins):.1f}% of {len(wins)} pairs"
        )


if __name__ == "__main__":
    main()
