"""Resume: a run that is interrupted continues where it stopped, with the same result.

Run ``python examples/resume.py``.
"""

import tempfile
from itertools import islice
from pathlib import Path

import mas_gym
import search
from mas_gym.policies import load_policy


def main(problems: int = 20) -> None:
    """Stop a run after half of its problems, and repeat the same call."""
    store = Path(tempfile.mkdtemp()) / "runs.db"
    task, policy = mas_gym.load_task("arithmetic", limit=problems), load_policy("tiny")

    def run() -> search.Run:
        return search.run("sc:3", task, mas="rpsv", policy=policy, store=store, concurrency=2)

    # Stop early, like a crash or Ctrl-C. Finished searches are in the store.
    with run() as first:
        early = list(islice(first, problems // 2))
    print(f"stopped after {len(early)} searches, {first.usage.agent_calls} agent calls")

    second = run()
    plans = list(second)
    print(f"{len(plans)} plans; {second.usage.agent_calls} agent calls in the second call")

    # An uninterrupted run gives the same answers.
    whole = search.run("sc:3", task, mas="rpsv", policy=policy)
    answers = {plan.problem_id: plan.answer for plan in plans}
    print("same answers as a run in one go:", answers == {plan.problem_id: plan.answer for plan in whole})


if __name__ == "__main__":
    main()
