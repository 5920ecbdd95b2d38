"""Your own questions and your own grader: a CSV file, graded by kind and by a function.

Run ``python examples/own_task.py``, or use both from the command line:
``mas-gym eval --task examples/capitals.csv --columns question=prompt,answer=gold --policy examples/own_task.py:answers
--grader examples/own_task.py:grade``.
"""

from pathlib import Path

import mas_gym
import search
from mas_gym.policies import ScriptedPolicy

FILE = Path(__file__).with_name("capitals.csv")
COLUMNS = {"question": "prompt", "answer": "gold"}
KNOWN = {"Austria": "Vienna", "Peru": "Lima", "Kenya": "the city of Nairobi", "Switzerland": "Berne"}


def grade(problem, text):
    """Accept a final message that contains the first reference answer."""
    return problem.answer.strip('[]"').partition('"')[0].lower() in text.lower()


def answers():
    """Return a scripted policy instead of a language model such as load_policy("openai:MODEL@URL")."""

    def answer(request, seed):
        question = " ".join(message.content for message in request.messages)
        return "Final Answer: " + next((city for land, city in KNOWN.items() if land in question), "Sydney")

    return ScriptedPolicy(answer)


def main() -> None:
    """Grade the same answers by their kind and with `grade`."""
    for grader in (None, grade):
        task = mas_gym.load_task(FILE, columns=COLUMNS, grader=grader)
        plans = list(search.run("single", task, mas=task.mas, policy=answers()))
        name = "by kind text" if grader is None else "by grade()"
        print(f"{name:14} {sum(bool(plan.correct) for plan in plans)} of {len(plans)} right")


if __name__ == "__main__":
    main()
