"""The command line, on real small runs of recorded messages and of the tiny agents."""

import csv
import html
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import typer.main
from typer.testing import CliRunner, Result

import mas_gym
import rewardmodels
import search
from mas_gym.cli import app
from mas_gym.cli.evaluate import pair_rows
from mas_gym.cli.progress import RunProgress
from mas_gym.errors import ConfigError, MASGymError, PolicyError, UnknownNameError
from mas_gym.internal.text import by_cause
from mas_gym.policies import RecordingPolicy, SamplingRequest, ScriptedPolicy, load_policy
from search.costs import Usage
from search.progress import Progress

PROBLEMS = 6
HOSTILE = "\x1b[2J[red]</script><script>alert(1)</script>"
CLI = [sys.executable, "-m", "mas_gym.cli"]

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy spec that replays the messages of a script in all searches of this module."""
    file = tmp_path_factory.mktemp("recording") / "messages.jsonl"
    test = mas_gym.load_task("arithmetic", limit=PROBLEMS)
    train = mas_gym.load_task("arithmetic", split="train", limit=4)
    answers = {problem.question: problem.answer for task in (test, train) for problem in task}

    def script(request: SamplingRequest, seed: int) -> str:
        if request.agent != "Verifier":
            return f"{HOSTILE} {request.agent} {seed % 3}"
        question = next(question for question in answers if question in request.messages[-1].content)
        return f"Checked.\nFinal Answer: {answers[question] if seed % 2 else 7}"

    policy = RecordingPolicy(ScriptedPolicy(script), file)
    for seed in (42, 7):
        for spec in ("single", "sc:3", "sbs:3,2", "mcts:5,2"):
            for critic in (search.PolicyLikelihood(), search.ConstantCritic(0.5)):
                list(search.run(spec, test, mas="rpsv", policy=policy, critic=critic, seed=seed))
    list(search.run("mcts:8,2", train, mas="rpsv", policy=policy, training=True))
    return f"recorded:{file}"


@pytest.fixture
def run() -> Run:
    def invoke(*arguments: object, input: str | None = None, **env: str) -> Result:
        return CliRunner(env={"COLUMNS": "120", **env}).invoke(app, [str(a) for a in arguments], input=input)

    return invoke


def flat(text: str) -> str:
    """Return output without the frames and line breaks that its width put in."""
    return re.sub(r"[\s│]+", " ", text)


def shell(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*CLI, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **env})


# eval


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--match", "tokens"), "expected tokens=N, calls=N or usd=X"),
        (("--against", "sbs:9"), "expected one of 'single'"),
        # Before the calibration, which would ask the policy for other problems than it has recorded.
        (("--against", "sbs:9", "--match", "calls=4"), "expected one of 'single'"),
    ],
)
def test_eval_rejects_invalid_costs_and_baselines(
    run: Run, recording: str, option: tuple[str, str], message: str
) -> None:
    result = run("eval", "-n", 2, "--policy", recording, *option)
    assert result.exit_code != 0 and message in result.output


@pytest.mark.slow
def test_eval_matches_cost_and_compares_with_a_baseline(run: Run, recording: str, tmp_path: Path) -> None:
    options = ("--planner", "single", "--planner", "sc:1", "--match", "calls=4", "--against", "sc:1")
    result = run("eval", "-n", 2, "--policy", "tiny", *options, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "sc:1: k=1, 4.0 per problem in calibration" in result.output
    assert "sizes chosen on 30 problems\n" in result.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["differences"][0]["to"] == "sc:1"
    result = run("eval", "-n", 2, "--policy", "tiny", "--planner", "single", "--match", "calls=40")
    assert "no size comes closer to 40" in " ".join(result.output.split())


def test_eval_over_several_seeds_writes_table_and_files(run: Run, recording: str, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "png", "md", "tex")}
    planners = ("single", "sc:3", "sbs:3,2", "mcts:5,2")
    result = run(
        *("eval", "-n", PROBLEMS, "--policy", recording, "--seeds", "42,7"),
        *(word for planner in planners for word in ("--planner", planner)),
        *("--json", files["json"], "--csv", files["csv"], "--plot", files["png"]),
        *("--markdown", files["md"], "--latex", files["tex"]),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(files["json"].read_text())["rows"]
    assert [(row["planner"], row["critic"]) for row in rows] == [
        ("single", ""),
        ("sc:3", ""),
        ("sbs:3,2", "policy-likelihood"),
        ("mcts:5,2", "policy-likelihood"),
    ]
    # AC of the paper's App. "Compute budgets and accounting" at D = 4, RC 0 for policy likelihood.
    assert [row["agent_calls"] for row in rows[:3]] == [4, 12, 3 + 3 * 2 * 3]
    assert [row["reward_calls"] for row in rows] == [0, 0, 0, 0]
    assert all(row["searches"] == 2 * PROBLEMS and row["failed"] == 0 for row in rows)
    assert [line["planner"] for line in csv.DictReader(files["csv"].read_text().splitlines())] == list(planners)
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "| mcts:5,2 + policy-likelihood |" in files["md"].read_text()
    assert files["tex"].read_text().startswith(r"\begin{table}")
    assert f"{100 * rows[3]['hit@1']:.1f}" in result.stdout
    assert "Hit@1 against single" in result.stdout


def test_eval_results_are_equal_with_and_without_store(run: Run, recording: str, tmp_path: Path) -> None:
    command = ("eval", "-n", PROBLEMS, "--policy", recording, "--planner", "mcts:5,2")
    plain = run(*command)
    first = run(*command, "--store", tmp_path / "runs.db")
    again = run(*command, "--store", tmp_path / "runs.db")
    assert plain.exit_code == first.exit_code == again.exit_code == 0
    assert plain.stdout == first.stdout == again.stdout
    assert f"{PROBLEMS} stored" in again.stderr


def test_search_respects_its_budget(run: Run, recording: str, tmp_path: Path) -> None:
    def row(*options: object) -> dict[str, float]:
        out = tmp_path / "out.json"
        result = run("eval", "-n", 2, "--policy", recording, "--planner", "mcts:5,2", "--json", out, *options)
        assert result.exit_code == 0, result.output
        found: dict[str, float] = json.loads(out.read_text())["rows"][0]
        return found

    assert row()["agent_calls"] > 10
    assert row("--budget", "calls=10", "--budget", "seconds=60")["agent_calls"] <= 10


def test_run_resumes_with_a_larger_budget(run: Run, recording: str, tmp_path: Path) -> None:
    command = ("eval", "-n", PROBLEMS, "--policy", recording, "--planner", "mcts:5,2", "--concurrency", 1)
    store = ("--store", tmp_path / "runs.db")
    whole = run(*command)
    short = run(*command, *store, "--run-budget", "calls=30")
    assert short.exit_code == 3, short.output
    assert "mcts:5,2 + policy-likelihood, seed 42: budget of 30 calls spent" in flat(short.stderr)
    assert re.search(rf"; \d+ of {PROBLEMS} searches did not run", flat(short.stderr))
    assert "Stopped by --run-budget" in flat(short.stderr)
    assert short.stdout != whole.stdout
    assert run(*command, *store, "--run-budget", "calls=100000").stdout == whole.stdout


def test_every_planner_with_a_critic_runs_with_every_critic(run: Run, recording: str) -> None:
    critics = ("--critic", "policy-likelihood", "--critic", "constant:0.5")
    planners = ("--planner", "single", "--planner", "sbs:3,2")
    result = run("eval", "-n", 2, "--policy", recording, *planners, *critics)
    assert result.exit_code == 0, result.output
    lines = [line.split()[:2] for line in result.stdout.splitlines() if line.startswith((" single", " sbs"))]
    assert [name for name, _ in lines[:3]] == ["single", "sbs:3,2", "sbs:3,2"]
    assert {critic for _, critic in lines[1:3]} == {"policy-likelihood", "constant(0.5)"}


def test_duplicate_planners_are_merged_and_incompatible_pairs_rejected(tmp_path: Path) -> None:
    rows = pair_rows(["single", "mcts:5,2,leaf=bootstrap", "single"], ["policy-likelihood"])
    assert [row.label for row in rows] == ["single", "mcts:5,2,leaf=bootstrap + policy-likelihood"]
    with pytest.raises(ConfigError, match="virtual visits"):
        pair_rows(["mcts:5,2,values=outcome,virtual_visits=true"], ["policy-likelihood"])


def test_failed_searches_are_listed_by_reason(run: Run, recording: str) -> None:
    result = run("eval", "-n", PROBLEMS, "--policy", recording, "--seeds", "1")
    assert result.exit_code == 0
    assert "Failed searches" in result.stdout
    assert "no recorded message of agent 'Reader'" in flat(result.stdout)


CUT_SHORT = """
import os, signal, sys
from mas_gym.errors import EngineUnavailableError
import mas_gym.cli.options as options
from mas_gym.cli import main
from mas_gym.policies import ScriptedPolicy

calls = 0
def script(request, seed):
    global calls
    calls += 1
    if calls == 30:
        if os.environ["CAUSE"] == "gone":
            raise EngineUnavailableError("the engine is gone")
        os.kill(os.getpid(), signal.SIGINT)
    return f"Final Answer: {seed % 5}"

# Code without a file has no identity.
script.revision = "1"
options.read_policy = lambda spec, cache, traces: ScriptedPolicy(script)
main()
"""


@pytest.mark.parametrize(("cause", "code"), [("ctrl-c", 130), ("gone", 2)])
def test_interrupted_run_prints_and_keeps_finished_searches(cause: str, code: int, tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    command = [sys.executable, "-c", CUT_SHORT, "eval", "-n", "40", "--concurrency", "2", "--store", str(store)]
    env = {**os.environ, "CAUSE": cause}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    [finished] = re.findall(r"^(\d+) problems, seed 42", done.stdout, re.MULTILINE)
    assert 0 < int(finished) < 40
    assert f"resume from {store}" in done.stderr
    assert ("the engine is gone" in done.stderr) is (cause == "gone")
    with search.open_store(store) as kept:
        assert kept.find().searches == int(finished)


# solve


def test_solve_prints_the_transcript_and_writes_the_page(run: Run, recording: str, tmp_path: Path) -> None:
    page = tmp_path / "tree.html"
    command = ("solve", "--task", "arithmetic", "--policy", recording, "--planner", "mcts:5,2", "--tree", page)
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert "Planner to Solver" in result.stdout
    assert re.search(r"Answer: -?\d+  \((right|wrong; the reference is -?\d+)\)", result.stdout)
    assert re.search(r"AC \d+  TOK \d+  RC 0 ", result.stdout)
    text = page.read_text()
    assert "<script>alert" not in text
    assert '"problem","arithmetic/test/' in text
    assert json.loads(re.search(r'json">(.*?)</script>', text, re.DOTALL)[1])["correct"] is not None  # type: ignore[index]


def test_solve_reads_the_answer_with_the_given_decimal_sign(run: Run, tmp_path: Path) -> None:
    (tmp_path / "german.py").write_text(
        "from mas_gym.policies import ScriptedPolicy\n\n\ndef make():\n"
        "    return ScriptedPolicy(lambda request, seed: 'Final Answer: 1.234')\n"
    )
    asked = ("solve", "What is 1200 + 34?", "--policy", f"{tmp_path}/german.py:make", "--planner", "single")
    assert "answer: 1234" in run(*asked, "--option", "decimal=','").stdout.lower()


def test_solve_accepts_any_question(run: Run, recording: str) -> None:
    problem = mas_gym.load_task("arithmetic")[0]
    asked = run("solve", problem.question, "--policy", recording, "--planner", "single")
    piped = run("solve", "-", "--policy", recording, "--planner", "single", input=problem.question + "\n")
    # The recording contains this question with its problem id, which gives other seeds.
    for result in (asked, piped):
        assert result.exit_code == 2
        assert "the search failed: PolicyError" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected either a question"),
        (("1 + 1?", "--task", "arithmetic"), "expected either a question"),
        (("  ",), "got an empty string"),
        (("1 + 1?", "--kind", "poem"), "--kind: expected one of 'number', 'expression', 'formula', 'choice'"),
        (("--task", "arithmetic", "--problem-id", "nope"), "nope"),
        (("1 + 1?", "--tree", "/no/such/folder/tree.html"), "mkdir -p"),
    ],
)
def test_solve_errors_name_the_cause(run: Run, recording: str, arguments: tuple[str, ...], message: str) -> None:
    result = run("solve", *arguments, "--policy", recording)
    assert result.exit_code == 2
    assert message in flat(result.stderr)


# envs and play


def test_envs_lists_every_registered_environment(run: Run) -> None:
    listed = json.loads(run("envs", "--json").stdout)
    doors = ("mas_gym.envs.env:MASEnv", "mas_gym.programs.program_env:ProgramEnv")
    ours = {name for name, spec in gym.registry.items() if spec.entry_point in doors}
    assert {row["id"] for row in listed} == ours >= {"MAS-GSM8K-v0", "MAS-Arithmetic-v0", "MAS-Program-v0"}
    program = next(row for row in listed if row["id"] == "MAS-Program-v0")
    assert program["data"] == "program=FILE.py:NAME, task=FILE"
    arithmetic = next(row for row in listed if row["id"] == "MAS-Arithmetic-v0")
    assert arithmetic["agents"] == ["Reader", "Planner", "Solver", "Verifier"]
    assert arithmetic["data"] == "none, generated"
    assert "MAS-Arithmetic-v0" in run("envs").stdout


def test_play_reads_every_agents_message_from_a_pipe(run: Run) -> None:
    problem = mas_gym.load_task("arithmetic")[3]
    turns = f"the facts\nin two lines\n\nthe plan\n\nthe work\n\nFinal Answer: {problem.answer}\n\n"
    result = run("play", "MAS-Arithmetic-v0", "--problem-id", problem.id, input=turns)
    assert result.exit_code == 0, result.output
    assert f"The end: answer {problem.answer}, right (reward +1)" in result.stdout
    solver = result.stdout.split("Your turn: Solver")[1].split("Your turn: Verifier")[0]
    assert "the plan" in solver
    assert "the facts" not in solver
    assert problem.question.split(". ")[0] not in solver


def test_play_combines_a_person_with_a_policy(run: Run, recording: str) -> None:
    problem = mas_gym.load_task("arithmetic")[0]
    options = ("--agent", "verifier", "--policy", recording, "--problem-id", problem.id)
    result = run("play", "MAS-Arithmetic-v0", *options, input="Final Answer: none")
    assert result.exit_code == 0, result.output
    assert "wrong; the reference is" in result.stdout
    assert result.stdout.count("Your turn") == 1
    assert "you cannot read it" in result.stdout


def test_play_accepts_a_recipient_where_several_are_legal(run: Run) -> None:
    turns = "plan one\n\nBob\n\nSolver_B\nwork\n\nFinal Answer: 1\n\n"
    result = run("play", "MAS-Arithmetic-Consensus-v0", input=turns)
    assert "got 'bob'" in result.stdout
    assert result.exit_code == 0


@pytest.mark.parametrize("typed", ["", "facts\n\nplan\n"])
def test_play_ends_at_end_of_input(run: Run, typed: str) -> None:
    result = run("play", "MAS-Arithmetic-v0", input=typed)
    assert result.exit_code == 0
    assert "End of input" in result.stderr


def test_play_suggests_the_nearest_environment_and_agent(run: Run) -> None:
    assert "did you mean 'MAS-Arithmetic-v0'?" in flat(run("play", "MAS-Aritmetic-v0").stderr)
    assert "did you mean 'Solver'?" in run("play", "MAS-Arithmetic-v0", "--agent", "Slover").stderr


# rollouts, status, train


def test_training_reads_the_store_of_rollouts(run: Run, recording: str, tmp_path: Path) -> None:
    store = tmp_path / "rollouts.db"
    command = ("rollouts", "--store", store, "-n", 4, "--policy", recording, "--planner", "mcts:8,2")
    result = run(*command)
    assert result.exit_code == 0, result.output
    trees = list(rewardmodels.stored_trees(store))
    assert len(trees) == 4
    assert {tree.task for tree in trees} == {"arithmetic"}
    assert f"4 of 4 trees with {sum(len(tree.tree) for tree in trees):,} nodes" in flat(result.stdout)
    again = run(*command, "--log-json", tmp_path / "log.jsonl")
    assert again.exit_code == 0 and flat(again.stdout) == flat(result.stdout)
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [event["stored"] for event in events if event["event"] == "search ended"] == [True] * 4
    shown = run("status", store, COLUMNS="200").stdout
    assert "mcts:8,2, seed 42, true reward" in shown
    assert "arithmetic/train" in shown


def test_rollouts_do_not_read_the_test_split(run: Run, tmp_path: Path) -> None:
    result = run("rollouts", "--store", tmp_path / "x.db", "--split", "test")
    assert result.exit_code == 2
    assert "would leak" in result.stderr


def test_training_rejects_a_store_without_true_rewards(run: Run, recording: str, tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    run("eval", "-n", 2, "--policy", recording, "--store", store)
    result = run("train", "masprm", "--store", store, "--out", tmp_path / "critic")
    assert result.exit_code == 2
    assert "expected a training run in" in flat(result.stderr)


def test_status_shows_the_progress_of_an_interrupted_run(run: Run, recording: str, tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    task, policy = mas_gym.load_task("arithmetic", limit=PROBLEMS), load_policy(recording)
    with search.run("sc:3", task, mas="rpsv", policy=policy, store=store, concurrency=2) as part:
        next(part)
    with search.open_store(store) as opened:
        searches = opened.find().searches
    assert 1 <= searches < PROBLEMS
    shown = run("status", store, COLUMNS="120").stdout
    assert f" {searches}/{PROBLEMS} " in shown and " ago" in shown and "Cost" not in shown
    list(search.run("sc:3", task, mas="rpsv", policy=policy, store=store))
    assert f" {PROBLEMS}/{PROBLEMS} " in run("status", store, COLUMNS="120").stdout


def test_status_shows_the_price(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="the openai package is not installed")
    pytest.importorskip("fastapi", reason="the fastapi package is not installed")
    from loopback import hash_policy, make_app, serving

    with serving(make_app(hash_policy())) as base:
        options = f"price=1000,500,2000&cache={tmp_path / 'replies.db'}"
        spec = f"openai:served@{base}/v1#{options}"

        def money(name: str, *numbers: int) -> float:
            for number in numbers:
                done = run("eval", "-n", number, "--policy", spec, "--planner", "sc:2", "--store", tmp_path / name)
                assert done.exit_code == 0, done.output
                assert re.search(r"openai:served: [\d,]+ calls; .* \(0 cached\); .* cost \d", done.stderr)
            with search.open_store(tmp_path / name) as opened:
                return float(opened.find().facts["money"])

        paid = money("parts.db", 1, 3)
        assert money("cached.db", 3) == 0.0
        (tmp_path / "replies.db").unlink()
        assert money("whole.db", 3) == pytest.approx(paid) and paid > 0
        shown = run("status", tmp_path / "whole.db", COLUMNS="120").stdout
    assert "Cost" in shown and f"{paid:,.4f}" in shown


def test_status_lists_failures_by_reason(run: Run, tmp_path: Path) -> None:
    def script(request: SamplingRequest, seed: int) -> str:
        raise PolicyError("no luck")

    task = mas_gym.load_task("arithmetic", limit=2)
    list(search.run("single", task, mas="rpsv", policy=ScriptedPolicy(script), store=tmp_path / "runs.db"))
    shown = flat(run("status", tmp_path / "runs.db", COLUMNS="120").stdout)
    assert "2/2 2" in shown and "2 failed in single, seed 42: PolicyError: no luck" in shown


def test_status_of_a_missing_store_fails(run: Run, tmp_path: Path) -> None:
    result = run("status", tmp_path / "none.db")
    assert result.exit_code == 2
    assert "no such file" in result.stderr


# view


@pytest.fixture(scope="module")
def store(recording: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two runs on the same problems."""
    file = tmp_path_factory.mktemp("store") / "runs.db"
    policy, task = load_policy(recording), mas_gym.load_task("arithmetic", limit=PROBLEMS)
    for spec in ("single", "mcts:5,2"):
        list(search.run(spec, task, mas="rpsv", policy=policy, critic=search.PolicyLikelihood(), store=str(file)))
    return file


@pytest.fixture(scope="module")
def address(store: Path) -> Iterator[str]:
    from mas_gym.cli.view import make_server

    server = make_server(store, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    COOKIE["Cookie"] = server.cookie
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


COOKIE: dict[str, str] = {}


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=COOKIE | headers), timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def row_keys(address: str) -> list[str]:
    return re.findall(r'name="a" value="([^"]+)"', get(address + "/")[1])


def test_view_lists_runs_and_compares_two(address: str) -> None:
    status, index = get(address + "/")
    keys = row_keys(address)
    assert status == 200 and len(keys) == 2 and "single" in index and "mcts:5,2" in index
    for name in ("Hit@1", "95% interval", "TOK", "AC", "RC"):
        assert f"<dt>{name}</dt>" in index
    status, page = get(f"{address}/problems?a={keys[0]}&b={keys[1]}")
    assert status == 200 and "Difference in Hit@1" in page
    links = [html.unescape(link) for link in re.findall(r'href="(/tree/[^"]+)"', page)]
    assert len(links) == 2 * PROBLEMS
    for link in links:
        status, tree = get(address + link)
        assert status == 200
        assert 'type="application/json"' in tree
        assert "<script>alert" not in tree


def test_view_filters_problems(address: str, store: Path) -> None:
    with search.open_store(store) as opened:
        [one, two] = [{p.problem_id: p.correct for p in opened.plans(run.run)} for run in opened.runs()]
    differing = {problem for problem in one if one[problem] != two[problem]}
    wrong = {problem for problem in one if not one[problem] and not two[problem]}
    a, b = row_keys(address)
    for shown, expected in (("differing", differing), ("wrong", wrong), ("failed", set()), ("nonsense", set(one))):
        _, page = get(f"{address}/problems?a={a}&b={b}&show={shown}&page=99")
        assert set(re.findall(r"<tr><th><small>(arithmetic/[^<]+)</small>", page)) == expected


def test_view_can_search_questions(address: str, store: Path) -> None:
    with search.open_store(store) as opened:
        problem = next(opened.problems(opened.runs()[0].run))
    key = row_keys(address)[0]
    for text in (problem.id, problem.question[:60].upper()):
        _, page = get(f"{address}/problems?{urllib.parse.urlencode({'a': key, 'q': text})}")
        assert f"<small>{problem.id}</small>" in page and problem.question[:40] in html.unescape(page)
    _, page = get(f"{address}/problems?a={key}&q=no+such+question")
    assert "0 problems" in page


def test_view_errors_name_the_cause(run: Run, tmp_path: Path, store: Path, address: str) -> None:
    assert "no such file" in run("view", tmp_path / "none.db", "--no-open").stderr
    taken = address.rpartition(":")[2]
    assert "choose another with --port" in flat(run("view", store, "--no-open", "--port", taken).stderr)


# errors, streams, terminals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--planner", "mtcs:10,3"), "did you mean 'mcts'?"),
        (("--planner", "mcts:0,3"), "n_simulations"),
        (("--planner", "mcts:10,3", "--critic", "policy-likelyhood"), "did you mean 'policy-likelihood'?"),
        (("--policy", "tinny"), "did you mean 'tiny'?"),
        (("--task", "gsm"), "did you mean 'gsm8k'?"),
        (("--mas", "rspv"), "did you mean 'rpsv'?"),
        (("--task", "gsm8k", "--data", "nope.jsonl"), "Three ways to provide it"),
        (("--seeds", "1,x"), "separated by commas"),
        (("--seeds", "1,1"), "distinct seeds"),
        (("-o", "difficulty"), "key=value"),
        (("--budget", "call=3"), "--budget: expected limits on calls, tokens, seconds, usd"),
        (("--run-budget", "5"), "such as calls=40"),
        (("--run-budget", "calls=-3"), "expected calls to be a positive number"),
        (("-o", "difficulty=99"), "difficulty"),
        (("--json", "/no/such/folder/out.json"), "mkdir -p /no/such/folder"),
        (("-n", "999999999"), "expected -n of at most"),
    ],
)
def test_errors_are_shown_in_one_panel_with_a_fix(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run("eval", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in flat(result.stderr)
    assert result.stderr.count("Error") == 1


def test_debug_shows_the_exception(run: Run) -> None:
    assert isinstance(run("--debug", "eval", "--mas", "rspv").exception, UnknownNameError)


def test_debug_shows_where_a_search_failed(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from mas_gym.errors import PolicyError\nfrom mas_gym.policies import ScriptedPolicy\n"
        "def say(request, seed):\n    raise PolicyError('in my policy')\n"
        "def make():\n    return ScriptedPolicy(say)\n"
    )
    done = shell("--debug", "eval", "-n", "1", "--policy", f"{tmp_path}/broken.py:make")
    assert "Traceback" in done.stderr and 'broken.py", line 4, in say' in done.stderr
    plain = shell("eval", "-n", "1", "--policy", f"{tmp_path}/broken.py:make")
    assert "in my policy" in plain.stdout and "Traceback" not in plain.stderr


@pytest.mark.parametrize(
    "arguments", [("eval", "--mas", "rspv", "--debug"), ("train", "--debug", "orm", "--store", "x")]
)
def test_debug_is_accepted_after_the_command(run: Run, arguments: tuple[str, ...]) -> None:
    assert isinstance(run(*arguments).exception, MASGymError)
    assert isinstance(run(*(word for word in arguments if word != "--debug")).exception, SystemExit)


def test_failed_searches_show_the_line_of_the_users_code(tmp_path: Path) -> None:
    folder = tmp_path / ("a long folder name " * 4)
    folder.mkdir()
    (folder / "own.py").write_text(
        "from mas_gym.errors import PolicyError\nfrom mas_gym.policies import ScriptedPolicy\n"
        "def say(request, seed):\n    raise PolicyError('in my policy')\n"
        "def make():\n    return ScriptedPolicy(say)\n"
    )
    done = shell("eval", "-n", "2", "--policy", f"{folder}/own.py:make", COLUMNS="60")
    shown = flat(done.stdout)
    assert "PolicyError: in my policy (own.py, line 4)" in shown, done.stdout


def test_failures_with_one_cause_share_a_row() -> None:
    reasons = {"PolicyError: no file 'a' (own.py, line 4)": 2, "PolicyError: no file 'b' (own.py, line 4)": 3}
    other = {"PolicyError: no file 'b' (own.py, line 9)": 1, "timeout\nafter 3 s": 9}
    assert by_cause(reasons | other) == [
        ("timeout\\nafter 3 s", 9),
        ("PolicyError: no file 'b' (own.py, line 4) (and 1 similar reason)", 5),
        ("PolicyError: no file 'b' (own.py, line 9)", 1),
    ]


def test_unwritable_file_is_reported_as_an_error(run: Run, recording: str, tmp_path: Path) -> None:
    result = run("eval", "-n", 2, "--policy", recording, "--csv", tmp_path)
    assert result.exit_code == 2
    assert "Is a directory" in result.stderr


@pytest.mark.parametrize("columns", [40, 64, 200])
def test_tables_fit_the_terminal(run: Run, recording: str, columns: int) -> None:
    planners = ("--planner", "single", "--planner", "mcts:5,2")
    result = run("eval", "-n", 3, "--policy", recording, *planners, COLUMNS=str(columns))
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "mcts:5,2" in result.stdout


def test_output_to_a_pipe_is_plain_and_tolerates_a_closed_reader() -> None:
    listed = shell("envs")
    assert listed.returncode == 0
    assert "\x1b" not in listed.stdout
    reader, writer = os.pipe()
    os.close(reader)
    broken = subprocess.run([*CLI, "envs"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert broken.returncode == 1
    assert "Traceback" not in broken.stderr


def test_ascii_terminal_shows_question_marks() -> None:
    done = shell("envs", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


def in_terminal(columns: int, *arguments: str, **env: str) -> str:
    """Return the output of a command in a pseudo-terminal."""
    leader, follower = os.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), **env}
    with subprocess.Popen([*CLI, *arguments], stdin=follower, stdout=follower, stderr=follower, env=env) as process:
        os.close(follower)
        painted = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:
                break
            if not chunk:
                break
            painted += chunk
    os.close(leader)
    assert process.returncode == 0
    return painted.decode()


LONG_OWN = """
from search.planners import SinglePass
class PlannerWhoseNameIsLongerThanHalfOfATerminalOfEightyColumns(SinglePass):
    pass
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are a Unix thing")
def test_progress_lines_fit_eighty_columns(recording: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(LONG_OWN)
    name = f"{tmp_path}/own.py:PlannerWhoseNameIsLongerThanHalfOfATerminalOfEightyColumns"
    text = in_terminal(80, "eval", "-n", "3", "--policy", recording, "--planner", "mcts:5,2", "--planner", name)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in re.split(r"[\r\n]+", text)]
    progress = [line for line in lines if re.search(r"\d/3\b", line)]
    assert any(line.startswith("mcts:5,2") and "TOK" in line for line in progress)
    assert any("..." in line for line in progress)
    assert max(map(len, progress)) < 80


def test_progress_rounds_large_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    usage = Usage(agent_calls=12_345_678, generated_tokens=9_876_543_210, seconds=86_399.0)
    with RunProgress(["sbs:40,8"], 1319) as progress:
        progress.update(
            "sbs:40,8", 1, Progress(done=1319, total=1319, correct=1000, failed=12, stored=500, usage=usage)
        )
    [line] = capsys.readouterr().err.splitlines()
    assert "1,319/1,319" in line and "12 failed" in line and "AC 12M" in line and "TOK 9.9G" in line


def test_progress_without_a_terminal_is_shown_while_no_search_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mas_gym.cli.progress._PLAIN_SECONDS", -1.0)
    with RunProgress(["sc:3", "mcts:9,3"], 7) as progress:
        progress.update("sc:3", 1, Progress(total=7))
        progress.update("mcts:9,3", 1, Progress(done=2, total=7))
        progress.update("mcts:9,3", 1, Progress(done=2, total=7))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["sc:3: 0/7", *["mcts:9,3: 2/7"] * 2]


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are a Unix thing")
@pytest.mark.parametrize("no_color", [False, True])
def test_terminal_output_contains_the_table_and_respects_no_color(recording: str, no_color: bool) -> None:
    color = {"NO_COLOR": "1"} if no_color else {}
    text = in_terminal(120, "eval", "-n", "3", "--policy", recording, "--planner", "mcts:5,2", **color)
    assert "95% interval" in text
    assert ("\x1b[32m" in text) is (not no_color)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("eval", "--help"), ("train", "--help"), ("demo", "-h")])
def test_help_does_not_import_heavy_packages(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom mas_gym.cli import main\n"
        f"sys.argv = ['mas-gym', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'search', 'rewardmodels'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


ROOT_COMMAND: Any = typer.main.get_command(app)
TRAINED = [["train", name] for name in ("masprm", "orm", "agents")]
COMMANDS = [[name] for name in ROOT_COMMAND.commands if name != "train"] + TRAINED


@pytest.mark.parametrize("group", [[], ["train"]], ids=["mas-gym", "train"])
def test_help_of_a_group_ends_with_two_of_its_commands(run: Run, group: list[str]) -> None:
    shown = run(*group, "--help", COLUMNS="200").stdout
    examples = [line.split() for line in shown.partition("Examples:")[2].splitlines() if line.strip()]
    assert len(examples) == 2
    for words in examples:
        assert words[: len(group) + 1] == ["mas-gym", *group]
        assert " ".join(words[1:]).startswith(tuple(" ".join(command) for command in COMMANDS))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_ends_with_two_examples_whose_options_exist(run: Run, command: list[str]) -> None:
    shown = run(*command, "--help", COLUMNS="200").stdout
    examples = [line.strip() for line in shown.partition("Examples:")[2].splitlines() if line.strip()]
    assert len(examples) == 2
    for example in examples:
        assert f"mas-gym {' '.join(command)}" in example
        for option in re.findall(r"(?<= )--?[a-z][a-z-]*", example):
            assert re.search(rf"{option}\b", shown.partition("Examples:")[0])


# examples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("calibrate --planer bon:5", "No such option"),
        ("calibrate --planner sc:5 --critic tiny-orm --out stop.json", "has no stop rule to calibrate"),
        ("serve --quue 1", "No such option"),
        ("serve --seconds 0", "positive number"),
        ("eval --run-budjet usd=1", "No such option"),
        ("eval --run-budget usd=1", "expected prices"),
        ("eval --run-budget usd=-1 --prices none.yaml", "none.yaml"),
        ("eval --budget usd=0.1", "expected prices"),
        ("eval --match usd=0.1 --planner sc:3", "expected prices"),
        ("eval --planner mcts:4,2,horizon=buget", "horizon"),
        ("eval --planner mcts:4,2,arms=tompson", "arms"),
        ("eval --planner cascade:single>mcts:4,2", "cascade"),
        ("eval --planner bon:4,stop=settle:3", "expected a probability"),
    ],
)
def test_mistyped_options_of_adaptive_search_are_rejected(arguments: str, message: str) -> None:
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", "").split())
