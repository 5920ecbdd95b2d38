"""Four rules for selecting the next agent, in the shipped handoff system of eight roles.

The agents and the critic are scripted, so the figures show how the components work together and not
how good a model is. Each field has one specialist; the others are mostly wrong. The critic recomputes the
arithmetic and prefers recipients that can correct an error.
Run ``python examples/handoffs.py``.
"""

import search
from mas_gym.policies import ScriptedPolicy
from mas_gym.systems.recipient_names import current_answer
from mas_gym.tasks import Problem, ProblemTask

SPECIALISTS = {
    "Algebra": "Algebraist",
    "Geometry": "Geometer",
    "Number theory": "NumberTheorist",
    "Counting": "Combinatorialist",
}
RULES = ("schedule", "uniform", "own", "critic")


def problems(count):
    """Return problems that require a product and belong to one field each."""
    fields = list(SPECIALISTS)
    made = [(f"{fields[i % 4]}: {7 + i} times {3 + i % 9}?", (7 + i) * (3 + i % 9)) for i in range(count)]
    return ProblemTask.of([Problem(f"product/{i}", question, str(answer)) for i, (question, answer) in enumerate(made)])


def solved(question):
    """Return the specialist and the answer of a question."""
    field, _, rest = question.partition(":")
    first, _, second = rest.rstrip("?").partition(" times ")
    return SPECIALISTS[field], str(int(first) * int(second))


def message(agent, recipient, text, answer):
    """Return a message with four fields."""
    return f"SPEAKER: {agent}\nRECIPIENT: {recipient}\nMESSAGE: {text}\nCURRENT ANSWER: {answer}"


def say(request, seed):
    """Return one agent's message."""
    agent, prompt = request.agent, request.messages[-1].content
    question = prompt.splitlines()[0]
    specialist, right = solved(question)
    heard = current_answer(prompt) or "unknown"
    someone = list(SPECIALISTS.values())[seed % 4]
    if agent == "Analyst":
        return message(agent, someone if seed % 3 else specialist, "Who can do this?", heard)
    if agent == "Critic":
        if heard == right or seed % 3 == 0:
            return message(agent, "Finalizer", "I see no mistake.", heard)
        return message(agent, someone, "There is a mistake.", heard)
    if agent == "Finalizer":
        return message(agent, "sink", "This is our answer.", heard)
    good = seed % 10 if agent == specialist else seed % 4 == 0
    answer = right if good else str(int(right) + 1 + seed % 2)
    return message(agent, "Critic" if seed % 5 else "Finalizer", f"I get {answer}.", answer)


class Reviewer:
    """Scores a state by its current answer and its next agent."""

    name, terminal_only, free = "reviewer", False, False

    def score(self, contexts):
        """Return one value per state."""
        return [self.value(context.state, context.mas) for context in contexts]

    def value(self, state, mas):
        """Return a value from -1 to 1."""
        specialist, right = solved(state.question)
        following = mas.node_name(state.acting)
        if current_answer(state.text) == right:
            return {"sink": 1.0, "Finalizer": 0.9, "Critic": 0.7}.get(following, 0.4)
        return {"sink": -1.0, "Finalizer": -0.8, specialist: 0.6, "Critic": 0.2}.get(following, 0.0)


def main(count=40):
    """Print how many problems are right after 4, 8 and 12 turns of the chosen episodes."""
    task = problems(count)
    print(f"{'planner':28}{'4 turns':>9}{'8 turns':>9}{'12 turns':>9}{'calls':>8}")
    for spec in [f"{planner}recipients={rule}" for planner in ("single:", "sbs:3,1,") for rule in RULES]:
        plans = list(search.run(spec, task, mas="handoff", policy=ScriptedPolicy(say), critic=Reviewer()))
        answers = [search.turn_answers(plan, task, turns=(4, 8, 12)) for plan in plans]
        right = "".join(f"{sum(answer.correct for answer in after):9}" for after in zip(*answers, strict=True))
        calls = sum(plan.usage.agent_calls for plan in plans) / count
        print(f"{spec:28}{right}{calls:8.1f}")


if __name__ == "__main__":
    main()
