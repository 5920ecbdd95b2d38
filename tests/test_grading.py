"""Reading and comparing answers: every form that people and models write, and every way to fool a reader."""

import gzip
import json
import os
import signal
import threading
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from mas_gym.errors import ConfigError, MissingDependencyError
from mas_gym.tasks import Grade, GradingMode, Kind, Problem, extract_answer, grade, load_task
from mas_gym.tasks.grading import paper_rules, symbolic
from mas_gym.tasks.grading.expressions import compare_expressions, read_expression
from mas_gym.tasks.grading.numbers import format_number, parse_number, plain_ascii, read_number, same_number
from mas_gym.tasks.grading.symbolic import too_complex

NUMBER = Problem("n", "How many?", "18")
EXPRESSION = Problem("e", "Simplify.", r"\frac{3}{4}", "expression")
CHOICE = Problem(
    "c", "Which?", "A", "choice", {"options": ["Paris", "A cat is black", "Vitamin C", "The dog"]}
)  # the third option ends in a label, the second begins with one
LETTERS = Problem("l", "Who?", "A", "choice", {"options": ["F", "L", "G", "M"]})


ANSWERS = yaml.safe_load((Path(__file__).parent / "data" / "answers.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("text", "answer"), [*ANSWERS["number"], ("Final Answer: " + "9" * 700, None)], ids=ascii)
def test_numbers_are_extracted(text: str, answer: str | None) -> None:
    assert extract_answer(NUMBER, text) == answer


@pytest.mark.parametrize(("text", "label"), ANSWERS["choice"])
def test_option_labels_are_extracted_from_messages(text: str, label: str | None) -> None:
    assert extract_answer(CHOICE, text) == label


@pytest.mark.parametrize(("text", "expected"), ANSWERS["expression"])
def test_extract_answer_reads_a_value_among_words(text: str, expected: str) -> None:
    assert extract_answer(Problem("p", "?", "1", "expression"), text) == expected


@pytest.mark.parametrize(("text", "label"), [("F", "A"), ("G", "C"), ("B", "B"), ("B. L", "B"), ("L", "B")])
def test_options_that_are_letters_are_extracted(text: str, label: str) -> None:
    assert extract_answer(LETTERS, f"Final Answer: {text}") == label


@pytest.mark.parametrize(("reference", "answer"), ANSWERS["equal"])
def test_equal_expressions_are_accepted(reference: str, answer: str) -> None:
    read = read_expression(answer)
    assert read is not None
    assert compare_expressions(reference, read) == "equal"


@pytest.mark.parametrize(("reference", "answer"), ANSWERS["different"])
def test_different_expressions_are_rejected(reference: str, answer: str) -> None:
    read = read_expression(answer)
    assert read is not None
    assert compare_expressions(reference, read) == "different"


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("number", ["Final Answer: $1000", "\\boxed{1,000}", "It is 1000.0 dollars.", "#### 1e3"]),
        ("number", ["Final Answer: 1/2", "\\boxed{\\frac12}", "Answer: 0.50", "Answer: \u00bd"]),
        ("expression", ["\\boxed{\\frac12}", "Answer: $0.5$", "The answer is \\(\\dfrac{1}{2}\\)."]),
        ("expression", ["\\boxed{\\left(3,\\tfrac{\\pi}{2}\\right)}", "Final Answer: $(3, \\frac{\\pi}{2})$"]),
        ("expression", ["\\boxed{\\text{Evelyn}}", "Final Answer: evelyn", "Final Answer: **Evelyn**"]),
        ("choice", ["Final Answer: b", "(B)", "**Answer:** B. A cat is black"]),
    ],
)
def test_equal_answers_count_as_the_same_vote(kind: str, answers: list[str]) -> None:
    problem = Problem("p", "?", "x", kind, {"options": ["a dog", "A cat is black"]})  # type: ignore[arg-type]
    assert len({extract_answer(problem, text) for text in answers}) == 1


# ------------------------------------------ errors of the released code


def answers_equal(reference: str, answer: str, mode: GradingMode = "strict") -> bool:
    return paper_rules.same(reference, answer, "number") if mode == "paper" else same_number(reference, answer)


def test_mmlu_answer_0_is_option_a(tmp_path: Path) -> None:
    file = tmp_path / "mmlu.jsonl"
    file.write_text('{"question": "Which?", "choices": ["w", "x", "y", "z"], "answer": 0, "subject": "s"}\n')
    [problem] = load_task("mmlu", data=file)
    assert problem.answer == "A"
    assert grade(problem, "Final Answer: A").correct


def test_only_the_final_message_is_graded() -> None:
    problem = Problem("p", "Ignore this. Final Answer: 99. \\boxed{99}", "18")
    assert grade(problem, "First, 9 eggs. Final Answer: 18") == Grade(True, "18", "equal")
    assert grade(problem, "First, 18 eggs. Final Answer: 9") == Grade(False, "9", "different")
    assert extract_answer(problem, "I do not know.") is None


# ------------------------------------------------------------------ languages of MGSM

SENTENCES = [
    "Die Antwort lautet {}.", "Endg\u00fcltige Antwort: {}", "La r\u00e9ponse est {}.", "R\u00e9ponse finale : {}",
    "La respuesta es {}.", "Respuesta final: {}", "\u041e\u0442\u0432\u0435\u0442 \u2014 {}.",
    "\u041e\u0442\u0432\u0435\u0442: {}",
    "\u7b54\u6848\u662f{}\u3002", "\u6700\u7ec8\u7b54\u6848\uff1a{}", "\u7b54\u3048\u306f{}\u3067\u3059\u3002",
    "\u0e04\u0e33\u0e15\u0e2d\u0e1a\u0e04\u0e37\u0e2d {}", "Jibu ni {}.", "Jibu la mwisho: {}",
    "\u0989\u09a4\u09cd\u09a4\u09b0 \u09b9\u09b2 {}\u0964", "\u0c38\u0c2e\u0c3e\u0c27\u0c3e\u0c28\u0c02 {}.",
]  # fmt: skip


@pytest.mark.parametrize("sentence", SENTENCES, ids=ascii)
def test_answer_sentences_in_other_languages_are_read(sentence: str) -> None:
    assert extract_answer(NUMBER, "3 + 4 = 7\n" + sentence.format(18)) == "18"
    for label in "AB":
        assert extract_answer(CHOICE, sentence.format(label)) == label


def test_decimal_setting_decides_between_two_readings(tmp_path: Path) -> None:
    file = tmp_path / "my.csv"
    file.write_text('question,answer\nHow many?,"1.234,5"\n')
    task = load_task(file, kind="number", decimal=",")
    assert task.grade(task[0], "Final Answer: 1.234,5").correct
    assert [task.extract(task[0], text) for text in ("1.234", "1,234", "2.5")] == ["1234", "1.234", "2.5"]
    assert [extract_answer(NUMBER, text) for text in ("1.234", "1,234", "2,5")] == ["1.234", "1234", "2.5"]
    assert task.identity() != load_task(file, kind="text").identity()
    with pytest.raises(ConfigError, match="decimal"):
        load_task(file, kind="number", decimal=";")


# ------------------------------------------------------------------ hedges, negations, reasoning

ONE_ANSWER = [
    ("number", "18", "18", "20"),
    ("expression", "18", "18", "20"),
    ("choice", "A", "A", "C"),
    ("text", "Paris", "Paris", "Rome"),
    ("regex", r"(?i)\bparis\b", "Paris", "Rome"),
    ("formula", "1*2*3*4", "1*2*3*4", "4*3*2"),
]


HEDGES = [
    "{} or {}",
    "{} (maybe {})",
    "{}, perhaps {}",
    "either {} or {}",
    "{} | {}",
    "{} (alternatively, {})",
    "not {}",
]


@pytest.mark.parametrize("form", HEDGES)
@pytest.mark.parametrize(("kind", "reference", "right", "other"), ONE_ANSWER)
def test_hedges_and_negations_are_no_right_answer(
    kind: Kind, reference: str, right: str, other: str, form: str
) -> None:
    problem = Problem("p", "?", reference, kind, {"options": ["Paris", "London", "Rome"]})
    assert grade(problem, f"Final Answer: {right}").correct
    for text in (form.format(right, other), form.format(other, right) if form.count("{}") > 1 else form.format(right)):
        assert not grade(problem, f"Final Answer: {text}").correct, text


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Final Answer: Paris.", True),
        ("The answer is not London.\nFinal Answer: the Paris", True),
        ("Final Answer: not London but Paris", True),
        ("Final Answer: Bern, Oslo, Paris, Rome, Vienna, Wien", False),
        ("Final Answer: not Paris but London", False),
        ("The answer is not Paris.", False),
    ],
)
def test_patterns_match_the_whole_answer(text: str, right: bool) -> None:
    assert grade(Problem("p", "?", r"(?i)\bparis\b", "regex"), text).correct == right


@pytest.mark.parametrize("text", [r"So it is \boxed{\text{New York}}.", "New York\n\nI hope this helps!"])
def test_texts_are_read_without_latex_and_courtesies(text: str) -> None:
    assert grade(Problem("p", "?", "New York", "text"), text).correct


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<think>", "</think>"),
        ("", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<|channel|>analysis", "<|channel|>final<|message|>"),
    ],
)
@pytest.mark.parametrize(("kind", "reference", "right", "other"), ONE_ANSWER)
def test_answer_is_read_after_the_reasoning(
    opening: str, closing: str, kind: Kind, reference: str, right: str, other: str
) -> None:
    problem = Problem("p", "?", reference, kind, {"options": ["Paris", "London", "Rome"]})
    assert grade(problem, f"{opening}\nFinal Answer: {other}? No.\n{closing}\n\n{right}").correct
    assert not grade(problem, f"{opening or '<think>'}\nFinal Answer: {right}. But wait,").correct


# ------------------------------------------------------------------ solutions, tiny values, references


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        (r"\boxed{x=1 \text{ or } x=2}", "1,2", "2"),
        ("Final Answer: x = 1 or x = 2", r"\{2, 1\}", "2"),
        ("Final Answer: x = 1 or x = 1,000.50", "1000.5, 1", "1, 1, 0.5"),
        ("Final Answer: $x = 1,000.50$ or $x = 1$", "1000.5, 1", "1000.5"),
        (r"\boxed{x = 1 \pm \sqrt{2}}", r"1-\sqrt{2}, 1+\sqrt{2}", r"1+\sqrt{2}"),
        (r"\boxed{x = y = 2}", "2", "y"),
        (r"\boxed{\frac{1}{2^{98}}}", "2^{-98}", r"\frac{1}{2^{99}}"),
        (r"\boxed{e^{-40}}", "e^{-40}", "e^{-50}"),
        (r"\boxed{\sqrt{2}/1006}", r"\frac{\sqrt{2}}{1006}", r"\frac{\sqrt{2}}{1005}"),
        (r"\boxed{\varnothing}", r"\emptyset", r"\{0\}"),
        (r"\boxed{5 \leq 7}", r"5 \leq 7", r"\emptyset"),
        (r"\boxed{x < \infty}", r"x < \infty", r"\{\}"),
        (r"\boxed{1 < 2}", "1 < 2", "{}"),
        (r"\boxed{1 < 2}", "1 < 2", r"x \in \{\}"),
    ],
)
def test_solutions_and_values_equal_only_their_reference(text: str, right: str, wrong: str) -> None:
    assert grade(Problem("p", "?", right, "expression"), text).correct
    assert not grade(Problem("p", "?", wrong, "expression"), text).correct


REFERENCE_FORMS = ("{}", r"\boxed{{{}}}", "x = {}", r"\boxed{{x = {}}}", "Final Answer: {}")


def test_every_reference_equals_itself(shared_data: Path) -> None:
    references = {problem.answer for problem in load_task("math", data=shared_data / "math500" / "test.jsonl")}
    recorded = shared_data / "real" / "dylan_math.jsonl.gz"
    if recorded.exists():
        with gzip.open(recorded, "rt", encoding="utf-8") as rows:
            references.update(json.loads(row)["answer"] for row in rows)
    for reference in sorted(references):
        problem = Problem("p", "?", reference, "expression")
        for form in REFERENCE_FORMS:
            assert grade(problem, form.format(reference)).correct, (reference, form)


# ------------------------------------------------------------- the real files

WRAPPERS = (
    "Final Answer: {}",
    "FINAL ANSWER: ({})",
    "The answer is **{}**.",
    "We first get 7.\n\n**Answer:** {}",
    "{}",
)


@pytest.mark.parametrize("mode", ["strict", "paper"])
def test_gsm8k_reference_solutions_are_correct(shared_data: Path, mode: str) -> None:
    task = load_task("gsm8k", data=shared_data / "gsm8k" / "test.jsonl", grading=mode)
    assert len(task) == 1319
    right = sum(task.grade(problem, problem.metadata["solution"]).correct for problem in task)
    # the letter of the paper takes the first "answer" of a text for its tag
    assert right == {"strict": 1319, "paper": 1318}[mode]


def test_gsm8k_wrong_answers_are_rejected(shared_data: Path) -> None:
    task = load_task("gsm8k", data=shared_data / "gsm8k" / "test.jsonl")
    for problem in task:
        value = int(problem.answer)
        for wrong in (value + 1, value - 1, -value - 1, value * 10 + 10):
            for text in (
                f"Final Answer: {wrong}",
                f"\\boxed{{{wrong:,}}}",
                f"It is {value}. Final Answer: ${wrong}.00",
            ):
                assert not task.grade(problem, text).correct, (problem.id, text)


def test_math_reference_solutions_are_correct(shared_data: Path) -> None:
    task = load_task("math", data=shared_data / "math500" / "test.jsonl")
    assert len(task) == 500
    for problem in task:
        assert task.grade(problem, problem.metadata["solution"]).correct, problem.answer
        assert task.grade(problem, f"Final Answer: ${problem.answer}$").correct, problem.answer
        assert task.grade(problem, f"So we get\n\\[\\boxed{{{problem.answer}}}\\]").correct, problem.answer


def test_math_wrong_answers_are_rejected(shared_data: Path) -> None:
    task = load_task("math", data=shared_data / "math500" / "test.jsonl")
    for problem in task:
        number = parse_number(problem.answer)
        if number is not None:
            wrong = [format_number(number + 1), format_number(-number - 1)]
        elif problem.answer[0] == "-":
            wrong = [problem.answer[1:]]
        else:
            wrong = [f"-{problem.answer}"]
        for answer in wrong:
            assert not task.grade(problem, f"Final Answer: ${answer}$").correct, (problem.answer, answer)


def test_logiqa_letters_are_graded(shared_data: Path) -> None:
    task = load_task("logiqa", data=shared_data / "logiqa" / "Test.txt")
    assert len(task) == 651
    for problem in task:
        for label, option in zip("ABCD", problem.metadata["options"], strict=True):
            for text in (*(wrapper.format(label) for wrapper in WRAPPERS), f"Final Answer: {label}. {option}"):
                assert task.grade(problem, text).correct == (label == problem.answer), (problem.id, text)


# ---------------------------------------------------------- the paper's letter


@pytest.mark.parametrize(
    ("problem", "text", "answer"),
    [
        (NUMBER, "The answer is 9. Final Answer: 18", "18"),
        (NUMBER, "The answer is 9.\nFinal Answer: 18", "9"),
        (NUMBER, "Final Answer: 1,800 dollars", "1800"),
        (NUMBER, "She makes 9 * 2 = 18 dollars", "18"),
        (NUMBER, "Final Answer:\n\n18", "18"),
        (NUMBER, "nothing", None),
        (NUMBER, "Final Answer: 12 000 dollars", "12000"),
        (NUMBER, "Final Answer: 1.5 million", "1.5"),
        (EXPRESSION, r"Final Answer: \frac{3}{4}", r"\frac{3}{4}"),
        (EXPRESSION, r"\boxed{\frac{3}{4}}", "4"),
        (CHOICE, "A careful look gives B.", "A"),
        (CHOICE, "Final Answer: b", "B"),
        (CHOICE, "Final Answer: Because", None),
    ],
)
def test_paper_mode_follows_the_paper(problem: Problem, text: str, answer: str | None) -> None:
    assert extract_answer(problem, text, "paper") == answer


def test_paper_tolerance_is_absolute() -> None:
    assert answers_equal("0.0000672", "0.0005", "paper")
    assert not answers_equal("0.0000672", "0.0005")
    assert answers_equal("18", "18.001", "paper")
    assert not answers_equal("18", "18.002", "paper")


def test_unknown_mode_is_rejected() -> None:
    with pytest.raises(ConfigError, match="got 'loose'"):
        load_task("gsm8k", data="nowhere", grading="loose")


# ------------------------------------------------------------- any text at all

ANY_CHARACTER = st.characters(exclude_categories=())
PIECES = r"final answer is|\boxed{|}|{|$|\frac|####|answer|**|18|-|A|option|b|(|)|9**9|^|_|\|=|,|<answer>|</answer>"
PIECES += r"|\text{|\pm|\cup|[|]|or|e|/|:|\begin{pmatrix}|&|1e9"
NASTY = st.sampled_from(["Final Answer:", "\n", "\ud800", "\u202e", "\x00", "\u221a", "\u00bd", *PIECES.split("|")])
MESSAGES = st.lists(st.one_of(NASTY, st.text(ANY_CHARACTER, max_size=8)), max_size=20).map("".join)


@pytest.mark.slow
@given(MESSAGES)
def test_arbitrary_text_is_graded_without_an_error(text: str) -> None:
    for mode in ("strict", "paper"):
        for problem in (NUMBER, CHOICE):
            outcome = grade(problem, text, mode)  # type: ignore[arg-type]
            assert outcome.correct == (outcome.reason == "equal")
            assert (outcome.extracted is None) == (outcome.reason == "no answer found")
        extracted = extract_answer(EXPRESSION, text, mode)  # type: ignore[arg-type]
        assert extracted is None or extracted


@given(MESSAGES)
def test_extraction_is_idempotent(text: str) -> None:
    answer = extract_answer(NUMBER, text)
    if answer is not None:
        assert read_number(answer) == answer
        assert grade(Problem("p", "?", answer), f"Final Answer: {answer}").correct


@given(
    st.fractions(max_denominator=10**6),
    st.sampled_from(["Final Answer: {}", "so \\boxed{{{}}}", "the answer is ${}$."]),
)
def test_fractions_are_extracted_exactly(value: Fraction, wrapper: str) -> None:
    sign = "-" if value < 0 else ""
    top, bottom = abs(value.numerator), value.denominator
    for form in (f"{sign}{top}/{bottom}", rf"{sign}\frac{{{top}}}{{{bottom}}}", format_number(value)):
        answer = extract_answer(NUMBER, wrapper.format(form))
        assert answer is not None
        assert parse_number(answer) == value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_decimals_with_separators_are_extracted_exactly(value: object) -> None:
    answer = extract_answer(NUMBER, f"It costs 3.\nFinal Answer: ${value:,} per day")
    assert answer is not None
    assert parse_number(answer) == Fraction(str(value))


SEPARATORS = [",", "{,}", ",\\!", "\\text{,}", " ", "\\,", "\\ ", "\\;", "\\:", "{\\,}", "\\thinspace ", "~", "'"]
SEPARATORS += ["\u2019", "\u2009", "\u202f", "\u00a0", "\u2007", "\uff0c", "\u066c", "."]
STATEMENTS = ["Final Answer: {}", "Final Answer: {} dollars", "Final Answer: ${}$", "so \\boxed{{{}}}", "#### {}"]
STATEMENTS += ["the answer is {}.", "They paid {} in total.", "Final Answer: 9 + 1 = {}", "Final Answer: \u20ac{}"]


def grouped(value: int, separator: str, indian: bool) -> str:
    digits = str(abs(value))
    head, groups = digits[:-3], [digits[-3:]]
    size = 2 if indian else 3
    while head:
        head, groups = head[:-size], [head[-size:], *groups]
    return f"{'-' if value < 0 else ''}{separator.join(groups)}"


@given(
    st.integers(-(10**18), 10**18),
    st.sampled_from(SEPARATORS),
    st.booleans(),
    st.sampled_from(STATEMENTS),
)
def test_integers_grouped_by_any_separator_keep_their_value(
    value: int, separator: str, indian: bool, statement: str
) -> None:
    # One point is a decimal point.
    assume(separator != "." or (abs(value) >= 10**6 and not indian))
    # Groups of the Indian numbering system have commas.
    assume(not indian or plain_ascii(separator).strip() == ",")
    text = grouped(value, separator, indian)
    assert extract_answer(NUMBER, statement.format(text)) == str(value)
    assert parse_number(text) == value
    if statement.startswith("Final Answer: {}"):
        assert extract_answer(EXPRESSION, statement.format(text)) == str(value)


@given(st.decimals("0.001", 999, places=3), st.sampled_from(["thousand", "million", "billion", "trillion"]))
def test_magnitude_words_multiply_the_number(value: Decimal, word: str) -> None:
    size = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}[word]
    for problem in (NUMBER, EXPRESSION):
        answer = extract_answer(problem, f"Final Answer: {value} {word}")
        assert answer is not None and parse_number(answer) == Fraction(value) * size
        assert not answers_equal(str(value), answer)


@given(st.fractions(), st.fractions())
def test_equality_of_numbers_is_symmetric(a: Fraction, b: Fraction) -> None:
    x, y = format_number(a), format_number(b)
    assert answers_equal(x, x)
    assert answers_equal(x, y) == answers_equal(y, x)


@pytest.mark.parametrize(
    ("start", "part", "count", "end"),
    [
        ("Final Answer: ", "1", 10**6, ""),
        ("", "Final Answer:", 80_000, ""),
        ("answer", " ", 10**6, ""),
        ("", "\\boxed{", 140_000, ""),
        ("", "\\boxed{1}", 110_000, ""),
        ("", "$1", 500_000, ""),
        ("", "11,", 333_333, ""),
        ("", "(B) ", 250_000, ""),
        ("", "\\frac{", 160_000, ""),
        ("", "*", 10**6, "answer"),
        ("", "\ud800", 10**6, ""),
        ("", "\u00bd", 10**6, ""),
        ("Final Answer: ", " or ", 250_000, ""),
    ],
    ids=ascii,
)
def test_megabyte_of_text_is_graded_in_linear_time(start: str, part: str, count: int, end: str) -> None:
    text = start + part * count + end
    # anything but linear time would run for hours here
    for problem in (NUMBER, CHOICE, EXPRESSION):
        for mode in ("strict", "paper"):
            assert not grade(problem, text, mode).correct  # type: ignore[arg-type]


# -------------------------------------------------------- the symbolic engine

BOMBS = [
    "9^{9^{9^9}}",
    "9**9**9**9",
    "((9^{999})^{999})^{999}",
    "(((5!)!)!)!",
    "100000!",
    r"\binom{99999999}{4999999}",
    r"\sum_{k=1}^{1000000000} \frac{1}{k}",
    r"\frac{" * 60,
    r"\sqrt{" * 50 + "2" + "}" * 50,
    "1" * 500,
    "{" * 400,
    "x" * 250,
    r"\frac{1}{0}",
    r"\infty-\infty",
]


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda text: text[:16])
def test_expensive_expressions_are_rejected(bomb: str) -> None:
    for reference in (r"2\sqrt{5}", "x+1"):
        assert compare_expressions(reference, bomb) in ("different", "too complex")
        assert compare_expressions(bomb, reference) in ("different", "too complex")


@pytest.mark.parametrize("text", ["9^{9^9}", "(9^{99})^{99}", "9^{1001}", "5!!", "1" * 31, "(" * 13, "x" * 301])
def test_too_complex_expressions_are_not_parsed(text: str) -> None:
    assert too_complex(text)


def test_answers_are_not_evaluated_as_code(tmp_path: Path) -> None:
    target = tmp_path / "made"
    text = f"__import__('pathlib').Path({str(target)!r}).touch()"
    for reference in ("x+1", "18"):
        problem = Problem("p", "?", reference, "expression")
        assert not grade(problem, f"Final Answer: {text}").correct
        assert not grade(problem, f"$\\boxed{{{text}}}$").correct
    assert not target.exists()


@pytest.mark.slow
def test_slow_comparison_is_stopped() -> None:
    problem = Problem("p", "?", "(a+b+c+d+f+g)^{61}", "expression")
    assert grade(problem, r"\boxed{(a+b+c+d+f+g)^{60}}").reason == "timed out"
    assert compare_expressions(r"\sqrt{8}", r"2\sqrt{2}") == "equal"


def test_grading_works_from_any_thread() -> None:
    verdicts: dict[int, str] = {}

    def ask(number: int) -> None:
        verdicts[number] = symbolic.equal_by_meaning(rf"\sqrt{{{4 * number}}}", rf"2\sqrt{{{number}}}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(verdicts.values()) == {"equal"}


def test_dead_worker_is_replaced() -> None:
    assert symbolic.equal_by_meaning(r"\sqrt{44}", r"2\sqrt{11}") == "equal"
    process = symbolic._worker._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert symbolic.equal_by_meaning(r"\sqrt{52}", r"2\sqrt{13}") == "equal"


def test_numbers_are_graded_without_sympy(monkeypatch: pytest.MonkeyPatch, shared_data: Path) -> None:
    monkeypatch.setattr(symbolic, "find_spec", lambda name: None)
    symbolic.equal_by_meaning.cache_clear()
    assert compare_expressions("1.5", r"1\frac{1}{2}") == "equal"
    assert compare_expressions(r"\text{East}", "east") == "equal"
    with pytest.raises(MissingDependencyError, match=r"pip install 'mas-gym\[math\]'"):
        compare_expressions(r"\sqrt{8}", r"2\sqrt{2}")
    with pytest.raises(ImportError, match="math-verify"):
        load_task("math", data=shared_data / "math500" / "test.jsonl")
    assert len(load_task("math", data=shared_data / "math500" / "test.jsonl", grading="paper")) == 500
