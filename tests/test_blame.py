"""``mas-gym blame``: the probable first error of failed samples, from sibling outcomes and from critics."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from typer.testing import CliRunner

import mas_gym
import search
from mas_gym.cli import app
from mas_gym.errors import ConfigError
from mas_gym.policies import SamplingRequest, ScriptedPolicy, load_policy
from mas_gym.programs import Program
from mas_gym.tasks import Problem
from search.compare.blame import SURE, Blame, blame_failures
from search.compare.replay import replay
from search.compare.sibling_outcomes import Outcomes, fall_probability, repeated
from search.store import open_store
from tests.search_worlds import chain

EXAMPLES = Path(__file__).parents[1] / "examples"
AGENTS = ("planner", "solver", "writer")


def row(question: str, plan: str, value: int, right: int) -> dict[str, Any]:
    """Return a chat transcript: the writer repeats the solver's result."""
    texts = (plan, f"{plan} gives {value}", f"The result is {value}.")
    messages = [{"role": "assistant", "name": n, "content": t} for n, t in zip(AGENTS, texts, strict=True)]
    return {
        "question": question, "messages": [{"role": "user", "content": question}, *messages],
        "answer": str(right), "correct": value == right,
    }  # fmt: skip


def team_log(path: Path, *, all_share: bool = False) -> Path:
    """Write 160 transcripts of 40 questions by a planner, a solver and a writer, which is never the culprit.

    The solver fails in one sample of 7 questions. The planner fails in two samples of 5 questions or, if all samples of
    a question share the plan, in all samples of 10 questions.
    """
    rows = []
    for n in range(1, 41):
        question, good, right = f"What is {n} times 3 plus 100?", f"Multiply {n} by 3, add 100", 3 * n + 100
        values, plans = [right] * 4, [good] * 4
        if all_share and n <= 10:
            plans, values = [f"Add {n}, 3"] * 4, [n + 3] * 4
        elif n <= 5:
            plans[:2], values[:2] = [f"Add {n}, 3"] * 2, [n + 3, n + 4]
        elif 10 < n <= 17:
            values[0] = right + 1
        rows += [row(question, plan, value, right) for plan, value in zip(plans, values, strict=True)]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def command(*words: object) -> Any:
    return CliRunner(env={"COLUMNS": "140"}).invoke(app, [str(word) for word in words])


def blamed(store: Path) -> tuple[list[str], list[Blame]]:
    with open_store(store) as opened:
        [run] = opened.runs()
        return [agent.name for agent in run.mas.agents], blame_failures(opened.plans(run.run))


@pytest.fixture
def team(tmp_path: Path) -> Path:
    search.import_transcripts(team_log(tmp_path / "team.jsonl"), tmp_path / "team.db")
    return tmp_path / "team.db"


def test_blame_with_four_samples_per_question_finds_the_failing_agents(team: Path) -> None:
    names, found = blamed(team)
    assert len(found) == 17
    assert Counter(names[agent] for one in found if (agent := one.agent()) is not None) == {"planner": 10, "solver": 7}
    assert {one.source for one in found} == {"siblings"}


def test_repeated_marks_messages_with_an_earlier_result_of_another_agent() -> None:
    def found(*texts: str, answer: str | None = None, speakers: tuple[int, ...] = (0, 1, 2)) -> tuple[bool, ...]:
        return repeated(texts, speakers, answer)

    assert found("Add 2, 3", "Add 2, 3 gives 6", "The result is 6.", answer="6") == (False, False, True)
    assert found("Plan", "The answer is (B).", "b", answer="B") == (False, False, True)
    assert found("A plan", "No idea", "A", answer="A") == (False, False, False)
    assert found("take the train to Rome", "Take the train", "to") == (False, True, False)
    assert found("start 3", "start 3, 3 + 4 = 7, 7 - 4 = 3", "3", answer="3") == (False, False, True)
    assert found("so 6", "6", "done", answer="6", speakers=(0, 0, 0)) == (False, False, False)


def test_blame_of_single_samples_is_not_known_and_names_the_remedy(tmp_path: Path) -> None:
    lines = team_log(tmp_path / "all.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "one.jsonl").write_text("\n".join(lines[::4]), encoding="utf-8")
    search.import_transcripts(tmp_path / "one.jsonl", tmp_path / "one.db")
    _, found = blamed(tmp_path / "one.db")
    # A sample is decided only if one agent wrote everything but repetitions.
    assert {one.source for one in found} <= {"silent", "only author"}
    assert all(one.agent() is None for one in found if one.source == "silent")
    done = command("blame", tmp_path / "one.db")
    assert done.exit_code == 0
    assert "siblings say nothing" in done.output and "--replay 8" in done.output


def test_critic_decides_only_what_siblings_leave_open(team: Path, tmp_path: Path) -> None:
    code = (
        "class Last:\n"
        "    name, terminal_only, free = 'last', False, True\n"
        "    def score(self, contexts):\n"
        "        return [-1.0 if c.state.depth >= 3 else 1.0 for c in contexts]\n"
    )
    (tmp_path / "my.py").write_text(code, encoding="utf-8")
    done = command("blame", team, "--critic", f"{tmp_path}/my.py:Last", "--json", tmp_path / "blame.json")
    assert done.exit_code == 0, done.output
    [run] = json.loads((tmp_path / "blame.json").read_text(encoding="utf-8"))["runs"]
    assert {one["source"] for one in run["samples"]} <= {"siblings", "only author"}
    strict = command(
        "blame", team, "--critic", f"{tmp_path}/my.py:Last", "--threshold", 0.999, "--json", tmp_path / "strict.json"
    )
    assert strict.exit_code == 0, strict.output
    [run] = json.loads((tmp_path / "strict.json").read_text(encoding="utf-8"))["runs"]
    assert "critic" in {one["source"] for one in run["samples"]}
    # The writer's fall does not count, because the writer only repeats.
    assert "writer" not in {one["agent"] for one in run["samples"]}


@pytest.mark.parametrize(("before", "after", "expected"), [((3, 3), (0, 1), 14 / 15), ((0, 0), (0, 0), 0.5)])
def test_fall_probability_equals_hand_computed_values(
    before: tuple[int, int], after: tuple[int, int], expected: float
) -> None:
    assert fall_probability(Outcomes(*before), Outcomes(*after)) == pytest.approx(expected)


def team_of_two(request: SamplingRequest, seed: int) -> str:
    """Agent 0 writes a plan that is wrong in a third of the samples; agent 1 then never finds the answer 7."""
    if request.agent == "agent0":
        return f"{'wrong' if seed % 3 == 0 else 'right'} plan {seed % 1000}"
    return "Final Answer: 8" if "wrong plan" in request.messages[-1].content else "Final Answer: 7"


def test_replay_decides_samples_that_siblings_leave_open(tmp_path: Path) -> None:
    policy = ScriptedPolicy(team_of_two)
    questions = [Problem(f"p{n}", f"Question {n}?", "7", "number") for n in range(30)]
    list(search.run("single", questions, mas=chain(2), policy=policy, store=tmp_path / "runs.db"))
    names, found = blamed(tmp_path / "runs.db")
    assert found and all(one.source == "silent" for one in found)
    settled = replay(found, questions, names, chain(2), policy, search.Sampling(), n=8, seed=43)
    assert {names[one.agent()] for one in settled if one.agent() is not None} == {"agent0"}
    assert all(one.source == "replay" and one.confidence > SURE for one in settled)
    with pytest.raises(ConfigError, match="--mas"):
        replay(found, questions, names, chain(3), policy, search.Sampling(), n=8, seed=43)


def test_blame_command_replays_with_the_policy(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    list(
        search.run(
            "single",
            mas_gym.load_task("arithmetic", split="dev")[:6],
            mas="rpsv",
            policy=load_policy("tiny"),
            store=store,
        )
    )
    done = command("blame", store, "--replay", 2, "--json", tmp_path / "blame.json")
    assert done.exit_code == 0, done.output
    [run] = json.loads((tmp_path / "blame.json").read_text(encoding="utf-8"))["runs"]
    assert {one["source"] for one in run["samples"]} == {"replay"}


PROGRAM = """
from openai import OpenAI

def solve(question: str, client: OpenAI) -> str:
    said = []
    for agent in ("agent0", "agent1", "agent2"):
        messages = [{"role": "system", "content": f"You are the {agent}."}]
        messages += [{"role": "user", "content": text} for text in (question, *said)]
        said.append(client.chat.completions.create(model="any", messages=messages).choices[0].message.content)
    return said[-1].removeprefix("Final Answer: ")
"""


def team_of_three(request: SamplingRequest, seed: int) -> str:
    """As `team_of_two`, with an agent 2 that repeats the answer of agent 1."""
    return request.messages[-1].content if request.agent == "agent2" else team_of_two(request, seed)


def test_replay_of_a_program_continues_its_executions_from_each_message(tmp_path: Path) -> None:
    (tmp_path / "my_agents.py").write_text(PROGRAM, encoding="utf-8")
    program = Program(f"{tmp_path}/my_agents.py:solve")
    policy = ScriptedPolicy(team_of_three)
    questions = [Problem(f"p{n}", f"Question {n}?", "7", "number") for n in range(12)]
    list(search.run("single", questions, program=program, policy=policy, store=tmp_path / "runs.db"))
    names, found = blamed(tmp_path / "runs.db")
    assert found and all(one.agent() is None for one in found)
    settled = replay(found, questions, names, program, policy, search.Sampling(), n=8, seed=43)
    assert {names[one.agent()] for one in settled if one.agent() is not None} == {"agent0"}
    assert all(one.source == "replay" and one.confidence > SURE for one in settled)
    (tmp_path / "others.py").write_text(PROGRAM.replace("agent1", "agent3"), encoding="utf-8")
    with pytest.raises(ConfigError, match="--program"):
        replay(found, questions, names, Program(f"{tmp_path}/others.py:solve"), policy, search.Sampling(), n=2, seed=43)


def test_blame_command_names_the_program_and_replays_it(tmp_path: Path) -> None:
    store, program = tmp_path / "runs.db", f"{EXAMPLES}/programs/plain_openai.py:solve"
    problems = mas_gym.load_task("arithmetic", split="dev")[:6]
    list(search.run("single", problems, program=program, policy=load_policy("tiny"), store=store))
    done = command("blame", store)
    assert done.exit_code == 0 and "--replay 8 --program PROGRAM" in " ".join(done.output.split())
    refused = command("blame", store, "--replay", 2)
    assert refused.exit_code == 2 and "--program" in refused.output
    done = command("blame", store, "--replay", 2, "--program", program, "--json", tmp_path / "blame.json")
    assert done.exit_code == 0, done.output
    [run] = json.loads((tmp_path / "blame.json").read_text(encoding="utf-8"))["runs"]
    assert {one["source"] for one in run["samples"]} == {"replay"}


def test_replay_with_another_model_than_that_of_the_run_is_an_error(tmp_path: Path) -> None:
    policy = ScriptedPolicy(team_of_two)
    questions = [Problem(f"p{n}", f"Question {n}?", "7", "number") for n in range(6)]
    list(search.run("single", questions, mas=chain(2), policy=policy, store=tmp_path / "runs.db"))
    done = command("blame", tmp_path / "runs.db", "--replay", 2)
    assert done.exit_code == 2 and "--policy" in done.output and policy.name in done.output


def test_replay_of_imported_transcripts_without_a_system_is_an_error(team: Path) -> None:
    done = command("blame", team, "--threshold", 0.999, "--replay", 2)
    assert done.exit_code == 2 and "--mas" in done.output


def test_samples_without_an_outcome_are_not_failed(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in team_log(tmp_path / "team.jsonl").read_text(encoding="utf-8").splitlines()]
    plain = [{name: value for name, value in one.items() if name in ("question", "messages")} for one in rows]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(one) + "\n" for one in plain), encoding="utf-8")
    search.import_transcripts(tmp_path / "plain.jsonl", tmp_path / "plain.db")
    done = command("blame", tmp_path / "plain.db")
    assert done.exit_code == 0 and "no failed samples with a known outcome" in done.output
    write_report_of(tmp_path / "plain.db", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "no reference answers" in page and "missing data" in page and "<td>0.0</td>" not in page


def write_report_of(store: Path, out: Path) -> None:
    pytest.importorskip("matplotlib", reason="reports draw with the extra 'plot'")
    done = command("report", store, "--out", out)
    assert done.exit_code == 0, done.output


def test_report_of_a_log_shows_agents_agreement_and_failures(team: Path, tmp_path: Path) -> None:
    write_report_of(team, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "160 of 40 questions" in page and "143 right, 17 wrong" in page
    assert "<td>planner</td><td>160</td><td>\N{EN DASH}</td><td>10</td>" in page
    assert "planner 10, solver 7" in page and "most frequent answer" in page
    assert page.count('<article class="failure">') == page.count('<li class="blamed">') == 10
    links = re.findall(r'href="(report-trees/[^"]+)"', page)
    assert len(set(links)) == 10 and all((tmp_path / link).is_file() for link in links)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_report_of_a_log_fits_wide_and_narrow_windows(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in team_log(tmp_path / "team.jsonl").read_text(encoding="utf-8").splitlines()]
    for one in rows:
        one["messages"][1]["content"] += "\n" + "unbroken" * 60
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    search.import_transcripts(tmp_path / "long.jsonl", tmp_path / "long.db")
    write_report_of(tmp_path / "long.db", tmp_path / "report.html")
    with Browser(tmp_path / "profile") as browser:
        for width in (1280, 390):
            page = browser.page((tmp_path / "report.html").as_uri(), width)
            assert page.js("document.documentElement.scrollWidth") <= width
            right = (
                "Math.max(...[...document.querySelectorAll('.failure *')].map(e => e.getBoundingClientRect().right))"
            )
            assert page.js("document.querySelectorAll('.failure').length") == 10 and page.js(right) <= width
            link = page.js("document.querySelector('.failure a').href")
            page.go(link)
            assert page.js("document.body.textContent.includes('planner')")


def test_siblings_say_nothing_where_right_samples_never_share_messages(tmp_path: Path) -> None:
    rows = []
    for n in range(1, 20):
        values = [3 * n, 3 * n, 3 * n, 3 * n + 1]
        rows += [row(f"What is {n} times 3?", f"Plan {n} {i}: multiply", v, 3 * n) for i, v in enumerate(values)]
    (tmp_path / "free.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    search.import_transcripts(tmp_path / "free.jsonl", tmp_path / "free.db")
    _, found = blamed(tmp_path / "free.db")
    assert len(found) == 19 and {one.agent() for one in found} == {None}
