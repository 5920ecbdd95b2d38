"""Random text that teaches the model how to handle questions that it cannot understand.

Real questions contain many unknown words. Without training on such text, the model would generate very long nonsense.
Therefore a few training rows contain random text with the shortest sensible reply of each agent: the Reader lists the
numbers, the Planner adds them up, the Solver computes what stays in range, and agents that must select an option
select one.
"""

from __future__ import annotations

import random
import re

from benchmarks.tiny import language
from benchmarks.tiny.turns import RoleTurn
from benchmarks.tiny.vocabulary import WORDS
from mas_gym.tasks.procedural import arithmetic
from mas_gym.tasks.procedural.arithmetic import Equation, Fact, Step
from mas_gym.tasks.procedural.ordering import LETTERS

_ONSETS = (
    *("b", "c", "ch", "d", "dr", "f", "g", "gr", "h", "j", "k", "l"),
    *("m", "n", "p", "pl", "r", "s", "sh", "st", "t", "w", "z"),
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ee", "oo", "ou")
_CODAS = ("b", "ck", "d", "g", "ll", "m", "n", "nd", "ng", "nt", "p", "r", "s", "ss", "st", "t", "th", "x", "y")
_ASKS = ("How many {}?", "What is {}?", "How much {}?", "{}?", "Which of these is {}?")
_SMALL = re.compile(r"(?<![\d.,$])\d{1,2}(?![\d.,%])")
MOST_FACTS = 4


def foreign_text(rng: random.Random) -> str:
    """Return some sentences of made-up words, known words and numbers of all kinds."""
    sentences = []
    for _ in range(rng.randint(1, 4)):
        words = [_word(rng) for _ in range(rng.randint(3, 12))]
        words[0] = words[0][0].upper() + words[0][1:]
        sentences.append(" ".join(words) + rng.choice(".....?!;:"))
    ask = " ".join(_word(rng) for _ in range(rng.randint(1, 6)))
    sentences.append(rng.choice(_ASKS).format(ask))
    if rng.random() < 0.3:
        sentences.append(" ".join(f"{letter}) {_word(rng)} {_word(rng)}" for letter in LETTERS))
    return rng.choice((" ", " ", "\n")).join(sentences)


def _word(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.45:
        syllables = rng.choices((1, 2, 3), (0.6, 0.3, 0.1))[0]
        return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))
    if draw < 0.82:
        return rng.choice(WORDS)
    if draw < 0.92:
        return str(rng.randint(1, 99))
    forms = ("{}", "${}", "{}%", "{},000", "{}.5", "{}/3", "x^{}", r"\frac{{{}}}{{2}}", "({})", "{}-year-old")
    return rng.choice(forms).format(rng.randint(1, 2000))


def foreign_facts(question: str) -> list[Fact]:
    """Return the Reader's facts of an unrelated question: its first small numbers, in order."""
    numbers = [int(number) for number in _SMALL.findall(question)][:MOST_FACTS] or [1]
    return [("has", numbers[0]), *[("buys", number) for number in numbers[1:]]]


def work_in_range(plan: list[Step]) -> list[Equation]:
    """Execute a plan; steps with results out of range are omitted."""
    value = int(plan[0][1])
    work: list[Equation] = []
    for step in plan[1:]:
        equations = arithmetic.equations_of(step, value)
        if equations is not None:
            work += equations
            value = work[-1][3]
    return work or [(value, "+", 0, value)]


def foreign_turns(question: str, rng: random.Random) -> list[RoleTurn]:
    """Return turns of agents of all graphs on a foreign question."""
    facts = foreign_facts(question)
    plan = arithmetic.plan_of(facts)
    work = work_in_range(plan)
    read = f"{language.write_facts(facts)} Question: how many?"
    done, end = language.write_work(work), work[-1][3]
    final, upper = language.write_answer(end), language.write_answer(end, True)
    pick = rng.choice(LETTERS)
    rules, order = "Rules: 1) A front 2) B end", "Order: A front: A; B end: A B.\nSo A first B last."
    turns = [
        RoleTurn("Reader", True, [], read),
        RoleTurn("Planner", True, [read], language.write_plan(plan)),
        RoleTurn("Solver", False, [language.write_plan(plan)], done),
        RoleTurn("Verifier", True, [done], final),
        RoleTurn(rng.choice(("Single", "ArithmeticReasoner")), True, [], f"{done}\n{final}"),
        RoleTurn("RefineSolver", True, [], f"{language.write_facts(facts)}\n{done}\n{upper}"),
        RoleTurn("Reviser", True, ["TIP: keep all steps"], f"{done}\n{upper}"),
        RoleTurn(rng.choice(("SolverA", "SolverB")), True, [read], f"{done}\n{upper}"),
        RoleTurn("ConsensusJudge", True, [read, f"{done}\n{upper}", f"{done}\n{upper}"], final),
        RoleTurn("MathAnalyst", True, [], f"{language.write_facts(facts)}\n{done}\n{final}"),
        RoleTurn("AlgebraSolver", True, [], f"{language.write_plan(plan)}\n{done}\n{final}"),
        RoleTurn("DylanJudge", True, [f"{done}\n{final}"] * 3, f"VERDICT: AGREE\n{final}"),
        RoleTurn(rng.choice(("Angel", "Devil")), True, [], f"{order}\nI pick {pick}"),
        RoleTurn("DebateJudge", True, [f"{order}\nI pick {pick}"] * 2, f"Final Answer: {pick}"),
        RoleTurn("ConstraintExtractor", True, [], rules),
        RoleTurn("WorldBuilder", False, [rules], order),
        RoleTurn("QueryChecker", True, [order], f"Final Answer: {pick}"),
    ]
    turns = [turn._replace(text=language.vary(turn.text, rng)) for turn in turns]
    return rng.sample(turns, len(turns))
