"""Custom problems, graders and kinds: files, columns, splits, extraction, code, judges."""

import copy
import csv
import gc
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_worlds import verdict
from typer.testing import CliRunner

import mas_gym
import search
from mas_gym.cli import app
from mas_gym.errors import ConfigError, CriticError, DataError, PolicyError, UnknownNameError, UserCodeError
from mas_gym.internal.identity import identity_of
from mas_gym.policies.base import Purpose
from mas_gym.policies.registry import purpose_of
from mas_gym.policies.scripted import ScriptedPolicy
from mas_gym.tasks import Grade, Problem, ProblemTask, Task, as_task, load_task
from mas_gym.tasks.catalog import default_mas
from mas_gym.tasks.grading.answers import read_text
from mas_gym.tasks.grading.judge import Judge
from mas_gym.tasks.grading.texts import normalize_text, read_code
from mas_gym.tasks.user_data import Columns, load_problems

CAPITALS = [("Capital of Austria?", "Vienna"), ("Capital of Germany, since 1990?", "Berlin"), ("Of Peru?", "Lima")]
Rows = Callable[..., Path]


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """Write rows as a CSV file, or in the format of the file's suffix."""

    def write(found: list[dict[str, Any]], name: str = "my.csv") -> Path:
        file = tmp_path / name
        if file.suffix == ".csv":
            with file.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.DictWriter(stream, list(found[0]))
                writer.writeheader()
                writer.writerows(found)
        elif file.suffix == ".parquet":
            pyarrow = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(found), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
        return file

    return write


def capitals() -> list[dict[str, Any]]:
    return [{"question": question, "answer": answer, "level": n} for n, (question, answer) in enumerate(CAPITALS)]


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["my.csv", "my.jsonl", "my.parquet", "my.json"])
def test_every_file_format_yields_the_same_problems(rows: Rows, name: str) -> None:
    task = load_task(rows(capitals(), name))
    assert [(problem.question, problem.answer, problem.kind) for problem in task] == [(*c, "text") for c in CAPITALS]
    assert (task.name, task.split, int(task[2].metadata["level"])) == ("my", "test", 2)
    assert [problem.id for problem in task] == [problem.id for problem in load_task(rows(capitals(), "my.jsonl"))]


def test_columns_are_selected_by_name(rows: Rows) -> None:
    file = rows([{"prompt": "2 + 2?", "gold": "4", "key": "a"}, {"prompt": "3 * 3?", "gold": "9", "key": "b"}])
    with pytest.raises(DataError, match=r"no column 'question'; its columns are 'prompt', 'gold', 'key'.*--columns"):
        load_task(file)
    for columns in ({"question": "prompt", "answer": "gold", "id": "key"}, "question=prompt, answer=gold,id=key"):
        task = load_task(file, columns=columns)
        assert [(p.id, p.question, p.answer, p.kind) for p in task][1] == ("b", "3 * 3?", "9", "number")
    with pytest.raises(ConfigError, match=r"'answr'.*did you mean 'answer'"):
        load_task(file, columns={"question": "prompt", "answr": "gold"})
    with pytest.raises(ConfigError, match="columns"):
        load_task(file, columns={"question": 3})


def test_split_column_is_used(rows: Rows) -> None:
    words = ["train", "Validation", "test", "dev"]
    file = rows([{"question": f"{n}?", "answer": n, "split": word} for n, word in enumerate(words)])
    assert [[p.answer for p in load_task(file, split)] for split in ("train", "dev", "test")] == [
        ["0"],
        ["1", "3"],
        ["2"],
    ]
    file = rows([{"question": "?", "answer": 1, "split": "holdout"}])
    with pytest.raises(
        DataError, match=r"my.csv:2: expected the split train, dev or test in column 'split'.*'holdout'"
    ):
        load_task(file)


def test_split_column_without_dev_reports_the_hashed_split(rows: Rows) -> None:
    marked = [{"question": f"{n}?", "answer": n, "split": "test" if n % 2 else "train"} for n in range(40)]
    remark = load_problems(rows(marked), "train", Columns.read(None), None).remark
    assert "no split column" not in remark
    assert "train is 95% of the train rows" in remark
    marked[0]["split"] = "dev"
    assert "hash" not in load_problems(rows(marked), "train", Columns.read(None), None).remark


def test_hash_split_is_stable_when_rows_are_added(rows: Rows) -> None:
    few = [{"question": f"What is {n} + 1?", "answer": n + 1} for n in range(300)]
    parts = {split: {p.id for p in load_task(rows(few), split)} for split in ("train", "dev", "test")}
    assert not parts["train"] & parts["dev"] and parts["train"] | parts["dev"] == parts["test"]
    assert 5 <= len(parts["dev"]) <= 30
    more = [{"question": f"New {n}?", "answer": n} for n in range(50)] + few
    for split in parts:
        assert parts[split] <= {p.id for p in load_task(rows(more), split)}


def test_dev_is_held_out_of_train_if_the_split_column_lacks_dev(rows: Rows) -> None:
    few = [{"question": f"What is {n} + 1?", "answer": n, "split": "test" if n < 40 else "train"} for n in range(240)]
    train, dev, test = ({p.id for p in load_task(rows(few), split)} for split in ("train", "dev", "test"))
    assert len(train | dev) == 200 and len(test) == 40 and not train & dev and not (train | dev) & test and dev
    few[-1]["split"] = "dev"
    train, dev, test = ({p.id for p in load_task(rows(few), split)} for split in ("train", "dev", "test"))
    assert (len(train), len(dev), len(test)) == (199, 1, 40)


def test_folder_of_split_files_is_read(rows: Rows, tmp_path: Path) -> None:
    rows(capitals()[:1], "train.csv"), rows(capitals()[1:], "test.jsonl")
    assert [len(load_task(tmp_path, split)) for split in ("train", "test")] == [1, 2]
    with pytest.raises(DataError, match="expected problems in split 'dev'"):
        load_task(tmp_path, "dev")


def test_choice_columns_become_options(rows: Rows) -> None:
    listed = [
        {"question": "Which?", "options": ["red", "blue"], "answer": answer} for answer in ("blue", "blue", "red")
    ]
    for problem, letter in zip(load_task(rows(listed, "my.jsonl")), "BBA", strict=True):
        assert (problem.question, problem.answer, problem.kind) == ("Which?\n\nA. red\nB. blue", letter, "choice")
    columns = "question=q,answer=a,choices=w+x+y+z+v"
    file = rows([{"q": "Which?", "a": "E", "w": "1", "x": "2", "y": "3", "z": "4", "v": "5"}])
    task = load_task(file, columns=columns)
    assert task.grade(task[0], "Final Answer: E").correct and task.mas == "debate"
    assert load_task(file, columns=columns.replace("answer=a", "answer=v"))[0].answer == "E"


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        (["4", "1,000", "1/2"], "number"),
        (["B", "a", "D"], "choice"),
        (["x^2+1", "3", r"\frac{1}{2}"], "expression"),
        (["Vienna", "4"], "text"),
        (["assert f(2) == 4", "assert f(3) == 9"], "code"),
        ([["Danube", "Donau"], "Rhine"], "text"),
        (["a" * 250 + "!", "b"], "text"),
    ],
)
def test_kind_is_inferred_from_all_answers(rows: Rows, answers: list[Any], kind: str) -> None:
    file = rows([{"question": f"{n}?", "answer": answer} for n, answer in enumerate(answers)], "my.jsonl")
    if kind == "code":
        with pytest.raises(ConfigError, match="--allow-code"):
            load_task(file)
    assert {problem.kind for problem in load_task(file, allow_code=True, sandbox="none")} == {kind}


def test_unknown_kind_is_rejected(rows: Rows) -> None:
    file = rows([{"question": "?", "answer": "4", "kind": "essay"}])
    with pytest.raises(DataError, match=r"expected one of the kinds number, .*got 'essay'"):
        load_task(file)
    with pytest.raises(UnknownNameError, match=r"unknown task 'my'.*\.csv"):
        load_task("my")


def test_pickled_slices_contain_only_their_problems(rows: Rows) -> None:
    task = load_task(rows(capitals() * 20))
    assert len(pickle.dumps(task[:0])) < 1000
    assert list(pickle.loads(pickle.dumps(task[1:3]))) == list(task[1:3])


def test_environment_can_be_made_from_a_custom_task(rows: Rows) -> None:
    columns = {"question": "prompt", "answer": "gold"}
    file = rows([{"prompt": question, "gold": answer} for question, answer in CAPITALS])
    env = gym.make("MAS-Custom-v0", task=str(file), columns=columns, disable_env_checker=True)
    again = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    for made in (env, again):
        base = made.unwrapped
        made.reset(seed=0)
        while base.state.acting != base.sink:
            answer = base.task.problem(base.problem_id).answer
            _, reward, *_ = made.step((f"Final Answer: {answer}", base.ALL))
        assert (base.mas.name, reward) == ("rpsv", 1.0)
    with pytest.raises(ConfigError, match=r'task="my.csv"'):
        gym.make("MAS-Custom-v0")


# ---------------------------------------------------------------------- text, regex


@pytest.mark.parametrize(
    "text",
    ["Final Answer: Vienna", "It is old.\nFinal Answer: **the Vienna**.", "vienna", "Answer: “Vienna”!", "A\n\nVIENNA"],
)
def test_texts_are_equal_up_to_case_and_punctuation(text: str) -> None:
    problem = Problem("p", "?", '["Wien", "Vienna"]', "text")
    assert ProblemTask.of([problem]).grade(problem, text) == Grade(True, "vienna", "equal")


@pytest.mark.parametrize(
    "text", ["Final Answer: Linz", "", "Vienna is a city. Final Answer: Linz", "Final Answer: Viennas"]
)
def test_different_texts_are_not_equal(text: str) -> None:
    problem = Problem("p", "?", "Vienna", "text")
    assert not ProblemTask.of([problem]).grade(problem, text).correct


@given(st.text())
def test_text_normalization_is_idempotent(text: str) -> None:
    answer = read_text(text)
    assert answer is None or answer.strip()
    read_code(text)
    once = normalize_text(text)
    assert normalize_text(once) == once


# ---------------------------------------------------------------------- graders


def shouting(problem: Problem, text: str) -> bool:
    return problem.answer.upper() in text


def test_grader_survives_slicing_copying_and_pickling(rows: Rows) -> None:
    task = load_task(rows(capitals()), grader=shouting)
    problem = task[1]
    copies = (copy.copy(task), copy.deepcopy(task)[:2], pickle.loads(pickle.dumps(task)))
    for part in (task[1:], task.only(problem.id), *copies):
        assert part.grade(problem, "BERLIN") == Grade(True, "berlin", "equal")
        assert not part.grade(problem, "Berlin").correct
        assert identity_of(part) == identity_of(task) != identity_of(load_task(rows(capitals())))
    arithmetic = load_task("arithmetic", grader=shouting)[3:5]
    assert arithmetic.grade(arithmetic[0], arithmetic[0].answer).correct
    assert identity_of(arithmetic) != identity_of(load_task("arithmetic"))


GRADER = """
import time
from mas_gym.tasks import Grade
def grade(problem, text):
    if text == "slow": time.sleep(60)
    if text == "raise": return 1 / 0
    if text == "leave": raise SystemExit(0)
    if text == "cost": return Grade(True, tokens=float("nan"))
    return {"none": None, "score": 0.7}.get(text, problem.answer in text)
class Longer:
    def __init__(self, least): self.least = least
    def __call__(self, problem, text): return len(text) >= self.least
"""


def test_grader_is_loaded_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my.py"
    file.write_text(GRADER)
    problem = Problem("p", "?", "Vienna", "text", {"note": [1]})
    task = ProblemTask.of([problem], grader=f"{file}:grade")
    again = pickle.loads(pickle.dumps(task[:1]))
    assert again.grade(problem, "Old Vienna").correct and not again.grade(problem, "Linz").correct
    assert identity_of(again) == identity_of(task)
    longer = [ProblemTask.of([problem], grader=f"{file}:Longer:{least}") for least in (3, 8)]
    assert [part.grade(problem, "12345").correct for part in longer] == [True, False]
    assert identity_of(longer[0]) != identity_of(longer[1])
    monkeypatch.setattr("mas_gym.tasks.grading.graders.GRADER_SECONDS", 0.5)
    for text, complaint in {
        "raise": r"my.py, line 6: ZeroDivisionError: division by zero",
        "slow": "within 0.5 seconds",
        "leave": r"my.py, line 7: SystemExit: 0",
        "none": r"expected True, False or a Grade, got None",
        "score": r"got 0.7; for a score, compare it with a threshold",
        "cost": "expected tokens to be an int from 0 to 1,000,000,000,000, got nan",
    }.items():
        with pytest.raises(UserCodeError, match=complaint) as caught:
            task.grade(problem, text)
        assert text != "raise" or "1 / 0" in caught.value.__notes__[0]
    pickled = pickle.dumps(task)
    file.write_text(GRADER.replace("60", "61"))
    with pytest.raises(ConfigError, match="its code has changed"):
        pickle.loads(pickled)
    with pytest.raises(UnknownNameError, match=r"'grades'.*did you mean 'grade'"):
        ProblemTask.of([problem], grader=f"{file}:grades")


def children() -> set[str]:
    """Return the ids of this process's children."""
    return {pid for of_thread in Path("/proc/self/task").glob("*/children") for pid in of_thread.read_text().split()}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_grader_process_ends_when_its_task_is_deleted(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text("import os\n\n\ndef grade(problem, text):\n    return text == str(os.getpid())\n")
    earlier, task = (ProblemTask.of([Problem("p", "?", "Vienna", "text")], grader=f"{file}:grade") for _ in range(2))
    # The first grader of a process starts the guard of all, too.
    assert not earlier.grade(earlier[0], "").correct
    before = children()
    assert not task.grade(task[0], "").correct
    [process] = children() - before
    assert task.grade(task[0], process).correct
    del task
    gc.collect()
    assert process not in children()


def test_grader_function_that_raises_fails_only_its_search(rows: Rows) -> None:
    def grade(problem: Problem, text: str) -> bool:
        if problem.answer == "Vienna":
            raise SystemExit(1)
        if problem.answer == "Berlin":
            raise ValueError("no opinion")
        return True

    task = load_task(rows(capitals()), grader=grade)
    policy = ScriptedPolicy(lambda request, seed: "Lima")
    plans = {plan.problem_id: plan for plan in search.run("single", task, mas="single", policy=policy)}
    left, broken, fine = (plans[problem.id] for problem in task)
    assert "SystemExit: 1" in left.error and fine.correct and fine.error is None
    assert "ValueError: no opinion" in broken.error and 'raise ValueError("no opinion")' in broken.error_details


def test_stored_search_is_not_reused_with_another_grader(rows: Rows, tmp_path: Path) -> None:
    asked: list[str] = []

    def write(request: Any, seed: int) -> str:
        asked.append(request.agent)
        return "VIENNA"

    policy = ScriptedPolicy(write)
    policy.identity = lambda: "writer"  # type: ignore[method-assign]
    for grader, calls in ((None, 3), (shouting, 6), (shouting, 6)):
        task = load_task(rows(capitals()), grader=grader)
        list(search.run("single", task, mas="single", policy=policy, store=tmp_path / "runs.db"))
        assert len(asked) == calls


# ---------------------------------------------------------------------- code, judges


def test_code_is_executed_only_if_allowed(rows: Rows) -> None:
    tests = "assert double(2) == 4\nassert double(0) == 0"
    file = rows([{"question": "Write double(x).", "answer": tests}])
    with pytest.raises(ConfigError, match="--allow-code"):
        load_task(file, kind="code")
    task = load_task(file, kind="code", allow_code=True, sandbox="none")
    right = "Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
    assert task.grade(task[0], right) == Grade(True, "def double(x):\n    return 2 * x", "tests passed")
    assert task.grade(task[0], right.replace("2 *", "3 +")).reason == "tests failed: double(2) is 5"
    assert task.grade(task[0], "").reason == "no answer found"
    refused = ProblemTask.of([task[0]])
    with pytest.raises(ConfigError, match="allow_code=True"):
        refused.grade(task[0], right)


def test_judge_grades_answers_and_its_tokens_are_counted_separately(rows: Rows) -> None:
    def decide(request: Any, seed: int) -> str:
        said = request.messages[1].content
        if "Lima" in said:
            return "I cannot say."
        if said.count("Vienna") == 2:
            return f"They agree.\n{verdict(request, 'correct')}"
        return f"**{verdict(request, 'incorrect')}**\n"

    judge = Judge(ScriptedPolicy(decide, name="judge"))
    task = load_task(rows(capitals()), kind="judge", judge=judge)
    policy = ScriptedPolicy(lambda request, seed: "Final Answer: Vienna", name="writer")
    plans = list(search.run("sc:3", task[:2], mas="single", policy=policy))
    assert {plan.problem_id: plan.correct for plan in plans} == {task[0].id: True, task[1].id: False}
    assert [plan.usage.generated_tokens for plan in plans] == [9, 9]
    assert (judge.spent.calls, judge.spent.generated_tokens, judge.spent.prompt_tokens > 20) == (2, 8, True)
    with pytest.raises(PolicyError, match="to end with the line 'Verdict "):
        task.grade(task[2], "Lima")
    assert judge.spent.faults == {"no verdict": 3}
    other = load_task(rows(capitals()), kind="judge", judge=Judge(ScriptedPolicy(decide, name="another")))
    assert identity_of(task) != identity_of(other)
    with pytest.raises(ConfigError, match="--judge"):
        load_task(rows(capitals()), kind="judge")


# ---------------------------------------------------------------------- GPQA, and what fits what


def gpqa(number: int) -> dict[str, str]:
    wrong = {f"Incorrect Answer {n}": f"wrong {n}, {number}" for n in (1, 2, 3)}
    return {"Question": f"Why {number}?", "Correct Answer": f"right\n{number}", **wrong}


def test_gpqa_options_are_shuffled_and_the_test_split_is_the_diamond_set(rows: Rows, tmp_path: Path) -> None:
    rows([gpqa(n) for n in range(100)], "gpqa_main.csv")
    rows([gpqa(n) for n in range(40)], "gpqa_diamond.csv")
    test, train, dev = (load_task("gpqa", split, data=tmp_path) for split in ("test", "train", "dev"))
    assert (len(test), len(train), len(dev)) == (40, 57, 3)
    assert not {p.question for p in test} & {p.question for p in [*train, *dev]}
    assert all(p.metadata["options"]["ABCD".index(p.answer)].startswith("right") for p in test)
    assert len({p.answer for p in test}) == 4
    alone = load_task("gpqa", data=rows([gpqa(n) for n in reversed(range(40))], "other.csv"))
    assert {p.question: p.answer for p in alone} == {p.question: p.answer for p in test}
    assert (test.mas, test.grade(test[0], f"Final Answer: {test[0].answer}").correct) == ("debate", True)


def test_every_task_has_a_default_system(rows: Rows) -> None:
    expected = {"gsm8k": "rpsv", "math": "rpsv", "mmlu": "debate", "logiqa": "logic", "gpqa": "debate"}
    assert {name: default_mas(name) for name in expected} == expected
    assert default_mas(load_task("ordering")[:2]) == mas_gym.MASEnv("ordering").mas.name == "logic"
    assert load_task(rows(capitals())).mas == "rpsv"


def test_use_of_a_policy_outside_its_purpose_is_reported() -> None:
    purpose = purpose_of("tiny")
    assert purpose is not None
    assert purpose.misuse("arithmetic", "rpsv") is purpose.misuse("ordering", "logic") is None
    assert purpose.misuse(None, "rpsv", "Tom has 3 pens and buys 4. How many has he?") is None
    for task, mas, question in (
        ("gsm8k", "rpsv", ""),
        ("arithmetic", "logic", ""),
        (None, "rpsv", "What is the capital of Austria?"),
    ):
        assert "made for arithmetic (rpsv" in purpose.misuse(task, mas, question)


# ---------------------------------------------------------------------- rejected runs


def test_true_reward_is_rejected_on_a_test_split() -> None:
    policy = ScriptedPolicy(lambda request, seed: "1")
    problems = [Problem("p", "1?", "1")]
    with pytest.raises(ConfigError, match="is a test split; its answers would leak"):
        search.run("mcts:2,2", ProblemTask.of(problems), mas="single", policy=policy, training=True)
    tested = Graded(problems)
    vars(tested)["split"] = "test"
    with pytest.raises(ConfigError, match="would leak"):
        search.run("mcts:2,2", tested, mas="single", policy=policy, training=True)
    for allowed in (ProblemTask.of(problems, split="train"), problems, Graded(problems)):
        [plan] = search.run("mcts:2,2", allowed, mas="single", policy=policy, training=True)
        assert plan.correct


def test_critic_of_another_graph_is_rejected_before_any_search() -> None:
    from rewardmodels import load_critic

    asked: list[str] = []

    def write(request: Any, seed: int) -> str:
        asked.append(request.agent)
        return "A"

    task, policy, critic = load_task("ordering")[:2], ScriptedPolicy(write), load_critic("tiny-masprm")
    with pytest.raises(CriticError, match="trained on rpsv, not on logic"):
        search.run("mcts:2,2", task, mas="logic", policy=policy, critic=critic)
    planners = ["single", "mcts:2,2"]
    with pytest.raises(CriticError, match="not on logic"):
        search.compare(planners, task, mas="logic", policy=policy, critics=[critic], progress=False)
    assert not asked


def test_policy_on_an_unintended_task_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    policy = ScriptedPolicy(lambda request, seed: "1", name="arithmetician")
    policy.made_for = Purpose({"arithmetic": ["rpsv"]})  # type: ignore[attr-defined]
    for _ in range(2):
        list(search.run("single", load_task("ordering")[:2], mas="logic", policy=policy))
    list(search.run("single", load_task("arithmetic")[:2], mas="rpsv", policy=policy))
    [said] = caplog.messages
    assert said.startswith("policy arithmetician was made for arithmetic (rpsv)")


# ---------------------------------------------------------------------- the command line

WRITER = """
from mas_gym.policies import ScriptedPolicy
def make():
    return ScriptedPolicy(lambda request, seed: "Final Answer: Vienna")
def grade(problem, text):
    return problem.id == "second"
"""


@pytest.fixture
def command(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Run a command in a folder with ``my.csv`` and ``my.py``; return its exit code and its output in one line."""
    named = zip(("first", "second", "third"), CAPITALS, strict=True)
    rows([{"id": name, "prompt": question, "gold": answer} for name, (question, answer) in named])
    (tmp_path / "my.py").write_text(WRITER)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))
        return done.exit_code, " ".join(done.output.replace("│", " ").split())

    return run


MINE = ("--task", "my.csv", "--columns", "question=prompt,answer=gold")


def test_commands_accept_a_users_file(command: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    policy = ("--policy", "my.py:make")
    code, said = command("eval", *MINE, *policy, "--json", "out.json")
    assert code == 0 and "my: 3 problems of kind text" in said and "33.3" in said
    code, said = command("eval", *MINE, *policy, "--grader", "my.py:grade", "--mas", "single")
    assert code == 0 and "33.3" in said
    code, said = command(
        "solve", *MINE, *policy, "--problem-id", "second", "--grader", "my.py:grade", "--planner", "sc:2"
    )
    assert code == 0 and "Answer: vienna (right)" in said
    code, said = command("rollouts", *MINE, *policy, "--split", "train", "--store", "t.db", "--planner", "mcts:2,2")
    assert code == 0 and "it has no split column, so train is 95%" in said
    code, said = command("eval", *MINE, *policy, "--kind", "judge", "--judge", "my.py:make")
    assert "to end with the line 'Verdict " in said
    (tmp_path / "code.csv").write_text("question,answer\nWrite f.,assert f(2) == 4\n")
    (tmp_path / "my.py").write_text(WRITER.replace("Final Answer: Vienna", "```\\ndef f(x): return 2 * x\\n```"))
    code, said = command("eval", "--task", "code.csv", *policy, "--allow-code", "--sandbox", "none")
    assert code == 0 and "100.0" in said


def test_policy_on_an_unintended_system_is_reported_once(command: Callable[..., tuple[int, str]]) -> None:
    _, said = command("solve", "What is the capital of Austria?", "--kind", "text", "--planner", "sc:2")
    assert said.count("was made for arithmetic") == 1
    _, said = command("solve", "Tom has 3 pens and buys 4. How many has he?", "--planner", "sc:2")
    assert "was made for" not in said
    _, said = command("eval", "--task", "ordering", "-n", "2", "--policy", "my.py:make")
    assert "ordering test, logic" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--task", "my.csv"), "no column 'question'; its columns are 'id', 'prompt', 'gold'"),
        ((*MINE, "--kind", "txt"), "did you mean 'text'"),
        ((*MINE, "--kind", "number"), "expected a number as the answer, got 'Vienna'"),
        ((*MINE, "--kind", "code"), "pass allow_code=True or --allow-code"),
        ((*MINE, "--sandbox", "none"), "sandbox='none'"),
        ((*MINE, "--allow-code", "--sandbox", "nothing"), "expected one of 'bubblewrap', 'none', got 'nothing'"),
        ((*MINE, "--kind", "judge"), "--judge"),
        ((*MINE, "--grader", "my.py:grad"), "did you mean 'grade'"),
        ((*MINE, "--grader", "grade"), "to add your own, write FILE.py:NAME"),
        ((*MINE, "--colums", "question=prompt"), "No such option: --colums"),
        ((*MINE, "--data", "other.csv"), "expected no data"),
        ((*MINE, "-o", "difficulty=3"), "expected options among allow_code, answers, columns"),
        (("--task", "your.csv"), "no data at 'your.csv'"),
        (("--task", "gsm8k", "--kind", "text"), "task 'gsm8k': expected options"),
        (("--task", "arithmetic", "--columns", "question=q"), "task 'arithmetic': expected options"),
        (("--task", "my"), "name a file (.csv"),
    ],
)
def test_option_errors_name_the_cause(
    command: Callable[..., tuple[int, str]], arguments: tuple[str, ...], complaint: str
) -> None:
    code, said = command("eval", *arguments, "--policy", "my.py:make")
    assert code == 2 and complaint in said


def test_match_works_without_dev_problems(command: Callable[..., tuple[int, str]]) -> None:
    mine = (*MINE, "--policy", "my.py:make", "--mas", "single")
    code, said = command("eval", *mine, "--planner", "sc:1", "--match", "calls=3")
    assert (code, "no dev problems" in said, "sc:3" in said) == (0, True, True), said


# -------------------------------------------------------------------------------------------- base class and adapter


class Graded(list[Problem]):
    """Only has the required methods; its slices are lists."""

    revision = 1

    def extract(self, problem: Problem, text: str) -> str | None:
        return text[-1:] or None

    def grade(self, problem: Problem, text: str) -> Grade:
        return Grade(text.endswith(problem.answer), text[-1:])


class DerivedTask(Task):
    revision = 1

    def __init__(self, problems: list[Problem]) -> None:
        self._graded = Graded(problems)

    def __len__(self) -> int:
        return len(self._graded)

    def __getitem__(self, index: Any) -> Any:
        return DerivedTask(self._graded[index]) if isinstance(index, slice) else self._graded[index]

    def extract(self, problem: Problem, text: str) -> str | None:
        return self._graded.extract(problem, text)

    def grade(self, problem: Problem, text: str) -> Grade:
        return self._graded.grade(problem, text)


THREE = [Problem(f"p{place}", f"{place} + 0?", str(place)) for place in range(3)]


@pytest.mark.parametrize("made", [Graded(THREE), DerivedTask(THREE)], ids=["adapted", "derived"])
def test_task_with_only_required_methods_has_all_attributes(made: object) -> None:
    task = as_task(made)
    assert (task.name, task.split, task.grading, task.mas, task.grader) == (
        type(made).__name__, "", "strict", "rpsv", None
    )  # fmt: skip
    assert as_task(task) is task and list(task) == THREE and task.problem("p1") == THREE[1]
    part = task[1:]
    assert isinstance(part, Task) and list(part) == THREE[1:] and part.grade(part[0], "it is 1").correct
    assert identity_of(as_task(made)) == identity_of(made)
    with pytest.raises(UnknownNameError, match="did you mean 'p1'"):
        task.problem("p11")
    with pytest.raises(ConfigError, match="leave out grader"):
        task.graded_by(task)


@pytest.mark.parametrize("made", [Graded(THREE), DerivedTask(THREE)], ids=["adapted", "derived"])
def test_search_and_environment_use_the_grading_of_a_minimal_task(made: Any) -> None:
    policy = ScriptedPolicy(lambda request, seed: "it is 1")
    plans = search.run("single", made, mas="single", policy=policy)
    assert {plan.problem_id: plan.correct for plan in plans} == {"p0": False, "p1": True, "p2": False}
    env = mas_gym.MASEnv(made, mas="single")
    env.reset(options={"problem_id": "p1"})
    assert env.step(("it is 1", env.ALL))[1] == 1.0


@pytest.mark.parametrize("part", [None, 3, THREE, Graded, "arithmetic", object()])
def test_as_task_rejects_objects_that_are_not_tasks(part: object) -> None:
    with pytest.raises(ConfigError, match="expected a task's name or an object with"):
        as_task(part)
