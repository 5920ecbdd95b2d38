"""Your own planner: at each step, sample four messages and keep the one with the highest score.

A planner yields requests and receives replies. The scheduler handles concurrent
problems, batches, seeds, budgets, grading and usage.
Run ``python examples/own_planner.py``.
"""

import mas_gym
import search
from mas_gym.policies import load_policy


class Greedy(search.Planner):
    """Selects the best of four messages at every step; AC = 4 D."""

    def plan(self, model, root, rng):
        """Return a plan with a single candidate."""
        state = root
        while not model.is_terminal(state):
            [proposals] = yield [search.Propose(state, n=4)]
            states = [model.transition(state, p.action) for p in proposals]
            [values] = yield [search.Evaluate(states)]
            state = states[max(range(len(values)), key=values.__getitem__)]
        return search.Plan.single(state)


def main(problems: int = 50) -> None:
    """Compare it with shipped planners on the same samples."""
    task = mas_gym.load_task("arithmetic", split="test")[:problems]
    policy, critic = load_policy("tiny"), search.PolicyLikelihood()
    for planner in (search.SinglePass(), Greedy(), search.StepBeamSearch(b2=4, b1=1)):
        plans = list(search.run(planner, task, mas="rpsv", policy=policy, critic=critic))
        right = sum(bool(plan.correct) for plan in plans)
        calls = sum(plan.usage.agent_calls for plan in plans) / len(plans)
        print(f"{search.planner_spec(planner):8} {right} of {len(plans)} right, {calls:.1f} agent calls per problem")


if __name__ == "__main__":
    main()
