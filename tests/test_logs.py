"""Logs as transcripts, and transcripts as runs of a store that every command reads."""

import gzip
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import search
from mas_gym.cli import app
from mas_gym.cli.view import Pages
from mas_gym.errors import ConfigError, DataError, DataNotFoundError, StoreError, UnknownNameError, UserCodeError
from mas_gym.logs import BrokenLine, Transcript, read_transcripts, recognize
from mas_gym.tasks.grading.answers import KindGrader
from mas_gym.tasks.grading.graders import FunctionGrader
from search.compare.transcripts import read_labeled
from search.report.report import write_report
from search.report.report_data import read_reports
from search.results.summary import hit_differences
from search.store import regrade, run_writer


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def said(*messages: tuple[str, str], question: str = "What is 2 + 3?", **more: Any) -> dict[str, Any]:
    """Return a row of format chat."""
    entries = [{"role": "assistant", "name": name, "content": text} for name, text in messages]
    return {"question": question, "messages": entries, **more}


def read(path: Path, format: str | None = None) -> list[Transcript]:
    broken: list[BrokenLine] = []
    found = list(read_transcripts(path, format, broken=broken.append))
    assert not broken
    return found


def texts(one: Transcript) -> list[tuple[str, str]]:
    return [(message.speaker, message.said) for message in one.messages]


def command(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(one) for one in arguments])


# ------------------------------------------------------------------------ formats


def test_exported_traces_are_imported_unchanged(tmp_path: Path) -> None:
    from mas_gym import load_task
    from mas_gym.policies.scripted import ScriptedPolicy
    from search.service.telemetry import traces

    pytest.importorskip("opentelemetry.sdk")
    file = tmp_path / "spans.jsonl"
    policy = ScriptedPolicy(lambda request, seed: f"{request.agent}. Final Answer: 7")
    with traces(str(file), content=True):
        [plan] = search.run("single", load_task("arithmetic", limit=1), mas="rpsv", policy=policy)
    [one] = read(file)
    assert [message.text for message in one.messages] == [turn.text for turn in plan.best.state.turns]
    assert one.speakers == ["Reader", "Planner", "Solver", "Verifier"]
    assert (one.correct, one.question_id) == (plan.correct, plan.problem_id)


def test_custom_reader_yields_transcripts_or_rows(tmp_path: Path) -> None:
    code = (
        "from mas_gym.logs import LoggedMessage, Transcript\n"
        "def read(path, twice=False):\n"
        "    for line in path.read_text().splitlines():\n"
        "        yield Transcript('Q?', (LoggedMessage('A', line.strip()),), correct=True)\n"
        "        yield {'question': 'Q?', 'messages': [{'role': 'assistant', 'content': line}]}\n"
        "        yield 7\n"
        "def fails(path):\n"
        "    raise ValueError('no')\n"
        "    yield\n"
    )
    (tmp_path / "my.py").write_text(code, encoding="utf-8")
    log = tmp_path / "log.txt"
    log.write_text("one\n", encoding="utf-8")
    broken: list[BrokenLine] = []
    found = list(read_transcripts(log, f"{tmp_path}/my.py:read", broken=broken.append))
    assert [one.messages[0].speaker for one in found] == ["A", "Assistant"]
    assert [line.place for line in broken] == [f"{log} item 3"]
    with pytest.raises(UserCodeError, match=r"my.py, line 8: ValueError: no"):
        list(read_transcripts(log, f"{tmp_path}/my.py:fails"))
    with pytest.raises(UnknownNameError):
        list(read_transcripts(log, f"{tmp_path}/my.py:absent"))


def test_json_arrays_single_documents_and_gzipped_lines_are_read(tmp_path: Path) -> None:
    rows = [said(("A", f"say {n}")) for n in range(3)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
    (tmp_path / "b.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "c.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    (tmp_path / "d.json").write_text(json.dumps(rows[0], indent=2), encoding="utf-8")
    (tmp_path / "e.jsonl").write_text("\n".join(json.dumps(row, indent=2) for row in rows), encoding="utf-8")
    numbers = {"a.jsonl.gz": 3, "b.json": 3, "c.json": 3, "d.json": 1, "e.jsonl": 3}
    for name, number in numbers.items():
        assert [texts(one) for one in read(tmp_path / name)] == [[("A", f"say {n}")] for n in range(number)]


def test_format_and_file_errors_name_the_cause(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", {"spam": 1})
    with pytest.raises(DataError, match=r"one of the formats .*, got the fields \['spam'\]"):
        recognize(path)
    with pytest.raises(ConfigError, match="did you mean 'chat'"):
        list(read_transcripts(path, "chats"))
    with pytest.raises(DataNotFoundError):
        list(read_transcripts(tmp_path / "none.jsonl"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="regular file"):
        list(read_transcripts(tmp_path / "pipe"))


# -------------------------------------------------------------------------- import

SAMPLES = [
    said(("Planner", "Add."), ("Solver", "Final Answer: 5"), answer="5"),
    said(("Planner", "Add."), ("Solver", "Final Answer: 6"), answer="5"),
    said(("Planner", "Guess."), ("Solver", "Final Answer: 5"), answer="5"),
    said(("Planner", "Double."), ("Solver", "Final Answer: 9"), question="What is 2 * 4?", answer="8"),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    search.import_transcripts(write(tmp_path / "log.jsonl", *SAMPLES), tmp_path / "runs.db")
    return tmp_path / "runs.db"


def plans(path: Path, run: str | None = None) -> dict[str, search.Plan]:
    with search.open_store(path) as opened:
        return {problem.question: plan for problem, plan in opened.searches(run)}


def test_samples_become_candidates_with_shared_prefixes(store: Path) -> None:
    found = plans(store)
    plan = found["What is 2 + 3?"]
    assert [(c.answer, c.correct) for c in plan.candidates] == [("5", True), ("6", False), ("5", True)]
    assert plan.tree is not None
    assert len(plan.tree) == 6
    shared = plan.tree[1]
    assert (shared.state.text, shared.visits, shared.total) == ("Add.", 2, 0.0)
    assert (plan.usage.agent_calls, plan.correct) == (6, True)
    assert found["What is 2 * 4?"].outcome == "wrong"
    with search.open_store(store) as opened:
        [first, _] = opened.problems()
        assert first.metadata["samples"][0]["place"].endswith(("log.jsonl:1", "log.jsonl:4"))
        info = opened.find("log")
        assert [agent.name for agent in info.mas.agents] == ["Planner", "Solver"]
        assert info.label == "recorded:log, seed 0"


def test_recorded_outcomes_take_precedence_over_grades(tmp_path: Path) -> None:
    rows = [
        said(("A", "Final Answer: 5"), answer="5", correct=False),
        said(("A", "Final Answer: 7"), question="Open?"),
        said(("A", "So."), question="Closed?", answer="7", reference="7.0"),
    ]
    done = search.import_transcripts(write(tmp_path / "log.jsonl", *rows), tmp_path / "runs.db")
    assert (done.disagree, done.ungraded) == (1, 1)
    found = plans(tmp_path / "runs.db")
    assert {question: plan.correct for question, plan in found.items()} == {
        "What is 2 + 3?": False, "Open?": None, "Closed?": True,
    }  # fmt: skip
    assert found["Closed?"].answer == "7"


def test_run_without_outcomes_is_unknown_in_tables_pages_and_status(tmp_path: Path) -> None:
    rows = [said(("A", f"Final Answer: {n}"), question=f"Question {n % 3}?", tokens=9) for n in range(9)]
    rows[0]["messages"][0]["tokens"] = 7
    store, dash = tmp_path / "runs.db", "\N{EN DASH}"
    search.import_transcripts(write(tmp_path / "log.jsonl", *rows), store)
    with search.open_store(store) as opened:
        table, [info] = opened.compare(), opened.runs()
        [outcome, *_] = opened.outcomes()
        [report] = read_reports(opened)
        write_report(opened, tmp_path / "report.html")
        problem = next(opened.problems()).id
    [row] = table.rows
    assert outcome.correct is None and math.isnan(row.hits[1].mean) and row.unknown and not row.shares
    assert row.problems == 3 and json.loads(table.to_json())["rows"][0]["hit@1"] is None
    assert ",nan," in table.to_csv() and "3 problems with no known outcome" in str(table)
    [line] = [line for line in table.to_markdown().splitlines() if line.startswith("| recorded:log")]
    assert line.split(" | ")[1:3] == [dash, dash]
    assert report.comparison.rows == table.rows
    status = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["status", str(store)]).output
    assert next(line for line in status.splitlines() if "recorded:log" in line).split()[-6] == dash
    pages = Pages(store)
    [key] = re.findall(r'name="a" value="([^"]+)"', pages.page("/", {}))
    listed, wrong = (pages.page("/problems", {"a": key, "show": shown}) for shown in ("all", "wrong"))
    assert listed.count('class="unknown"') == 3 and 'class="wrong"' not in listed and "0 problems" in wrong
    page = pages.page(f"/tree/{info.run}", {"problem": problem})
    [data] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    found = json.loads(data)
    assert found["correct"] is None and set(found["nodes"]["correct"]) == {None}
    [again, *_] = search.run("sc:2", recorded=search.Recorded(store))
    assert (again.correct, again.outcome) == (None, "answered")
    result = regrade(store, info, FunctionGrader(lambda problem, text: True, KindGrader()), "all")
    assert (result.known, result.before, result.after) == (0, 0, 3)
    with search.open_store(store) as opened:
        assert [one.hits[1].mean for one in opened.compare(grading="all").rows] == [1.0]
    assert f">{dash}</td>" in Pages(store).page("/", {}).partition("Regraded runs")[2]


def test_imported_scores_rank_candidates_and_values_are_kept(tmp_path: Path) -> None:
    rows = [said(("A", f"Final Answer: {n}"), answer="2", score=n / 4) for n in range(3)]
    rows[0]["messages"][0] |= {"value": -0.5, "tokens": 7, "logprob": -3.5}
    search.import_transcripts(write(tmp_path / "log.jsonl", *rows), tmp_path / "runs.db")
    [plan] = plans(tmp_path / "runs.db").values()
    assert [(c.answer, c.score) for c in plan.candidates] == [("2", 0.5), ("1", 0.25), ("0", 0.0)]
    assert plan.tree is not None
    assert (plan.tree[1].value, plan.tree[1].tokens, plan.tree[1].logprob) == (-0.5, 7, -3.5)
    assert plan.usage.generated_tokens == 7


def test_samples_with_different_first_agents_share_a_search(tmp_path: Path) -> None:
    rows = [said(("A", "a"), ("B", "Final Answer: 5"), answer="5"), said(("B", "Final Answer: 4"), answer="5")]
    search.import_transcripts(write(tmp_path / "log.jsonl", *rows), tmp_path / "runs.db")
    [plan] = plans(tmp_path / "runs.db").values()
    assert [c.correct for c in plan.candidates] == [True, False]
    assert plan.mas is not None
    assert [plan.mas.agents[turn.speaker].name for turn in plan.candidates[1].state.turns] == ["start", "B"]


def test_second_import_skips_stored_transcripts(store: Path, tmp_path: Path) -> None:
    before = store.read_bytes()
    again = search.import_transcripts(tmp_path / "log.jsonl", store)
    assert (again.run, again.skipped) == (None, (str(tmp_path / "log.jsonl"),))
    assert store.read_bytes() == before
    copy = write(tmp_path / "copy.jsonl", *SAMPLES)
    other, twin = (write(tmp_path / name, SAMPLES[3]) for name in ("other.jsonl", "twin.jsonl"))
    more = search.import_transcripts([copy, other, twin], store, format="chat")
    assert (more.transcripts, more.skipped) == (2, (str(copy),))
    with pytest.raises(StoreError, match="another name"):
        search.import_transcripts(write(tmp_path / "third.jsonl", SAMPLES[0]), store, name="log")


def test_import_with_a_task_adds_missing_reference_answers(tmp_path: Path) -> None:
    rows = [said(("A", "Final Answer: 5"), question=f"Number\n{n}?") for n in (5, 6, 7)]
    rows.append(said(("A", "Final Answer: 5"), question="Number 8?", answer="5"))
    log, answers = write(tmp_path / "log.jsonl", *rows), tmp_path / "answers.csv"
    answers.write_text("question,answer\nNumber 5?,5\nNumber 6?,6\nNumber 8?,8\n", encoding="utf-8")
    before = command("import", log, "--store", tmp_path / "runs.db", "--name", "bare")
    assert "--task" in before.output
    done = command("import", log, "--store", tmp_path / "runs.db", "--task", answers, "--name", "graded")
    assert done.exit_code == 0, done.output
    assert "1 transcripts have neither" in done.output
    with search.open_store(tmp_path / "runs.db") as store:
        found = {problem.question: plan.correct for problem, plan in store.searches("graded")}
    assert (found["Number\n5?"], found["Number\n6?"], found["Number 8?"]) == (True, False, True)
    again = command("import", log, "--store", tmp_path / "runs.db", "--task", answers)
    assert "contents were imported before" in again.output


def test_import_of_a_folder_reads_its_files_once_and_names_some_of_them(tmp_path: Path) -> None:
    folder, store = tmp_path / "logs", tmp_path / "runs.db"
    (folder / "inner").mkdir(parents=True)
    for n in range(120):
        write(folder / f"{n:03}.jsonl", said(("A", f"Final Answer: {n}"), question=f"Number {n % 40}?", answer="5"))
    write(folder / ".hidden.jsonl", said(("A", "Final Answer: 5"), answer="5"))
    done = search.import_transcripts(folder, store)
    assert (done.transcripts, done.questions, done.name) == (120, 40, "logs")
    with search.open_store(store) as opened:
        assert 0 < len(opened.find("logs").facts["files"]) <= 100
    again = search.import_transcripts(folder, store)
    assert (again.run, len(again.skipped)) == (None, 120)
    assert "Question\nNumber 0?" in command("import", folder, "--dry-run").output


def test_samples_in_separate_equal_files_are_imported_once_each(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.jsonl", said(("A", "Final Answer: 5"), answer="5")) for n in range(3)]
    store = tmp_path / "runs.db"
    first = search.import_transcripts([*files[:2], files[0]], store)
    assert (first.transcripts, first.questions, first.skipped) == (2, 1, ())
    again = search.import_transcripts(files[:2], store)
    assert (again.run, len(again.skipped)) == (None, 2)
    more = search.import_transcripts(files, store)
    assert (more.transcripts, len(more.skipped)) == (1, 2)


def test_interrupted_import_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [said(("A", f"Final Answer: {n}"), question=f"Number {n}?", answer=str(n)) for n in range(250)]
    path, store = write(tmp_path / "log.jsonl", *rows), tmp_path / "runs.db"
    written = run_writer.write_search
    calls: list[int] = []

    def stop(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 150:
            raise KeyboardInterrupt
        written(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run_writer, "write_search", stop)
        with pytest.raises(KeyboardInterrupt):
            search.import_transcripts(path, store)
    assert len(plans(store)) == 100
    done = search.import_transcripts(path, store)
    assert (done.questions, len(plans(store))) == (250, 250)
    fresh = search.import_transcripts(path, tmp_path / "fresh.db")
    assert fresh.run == done.run


def test_imported_runs_can_be_compared_reported_regraded_and_viewed(store: Path, tmp_path: Path) -> None:
    other = [said(("Solo", f"Final Answer: {n}"), question=q, answer=a) for q, a, n in (
        ("What is 2 + 3?", "5", 4), ("What is 2 * 4?", "8", 8))]  # fmt: skip
    search.import_transcripts(write(tmp_path / "solo.jsonl", *other), store)
    with search.open_store(store) as opened:
        table = opened.compare(baseline="recorded:log")
        assert {row.label: row.hits[1].mean for row in table.rows} == {"recorded:log": 0.5, "recorded:solo": 0.5}
        [(_, _, difference)] = hit_differences(table.rows, "recorded:log")
        assert (difference.mean, difference.problems) == (0.0, 2)
        [run] = [run for run in opened.runs() if run.name == "log"]
        [report] = read_reports(opened)
        assert report.agents == {"recorded:log": ("Planner", "Solver"), "recorded:solo": ("Solo",)}
        write_report(opened, tmp_path / "report.html")
    result = regrade(store, run, FunctionGrader(lambda problem, text: True, KindGrader()), "all")
    assert (result.before, result.after) == (1, 2)
    page = Pages(store).page(f"/tree/{run.run}", {"problem": next(iter(plans(store, "log").values())).problem_id})
    assert "Planner" in page
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["status", str(store)]).output
    [line] = [line for line in shown.splitlines() if "recorded:solo, seed 0" in line and "recorded " in line]
    # The log has no token counts.
    assert line.split()[-5:-2] == ["\N{EN DASH}", "1.0", "0.0"]


def test_blame_and_bench_critic_read_imported_runs(tmp_path: Path) -> None:
    rows = [
        {"problem": f"P{n}?", "steps": ["fine", "wrong" if n % 2 else "good"], "label": 1 if n % 2 else -1,
         "agents": ["A", "B"], "final_answer_correct": n % 2 == 0}
        for n in range(40)
    ]  # fmt: skip
    store = tmp_path / "runs.db"
    search.import_transcripts(write(tmp_path / "steps.jsonl", *rows), store)
    code = (
        "class Truth:\n"
        "    name, terminal_only, free = 'truth', False, False\n"
        "    def score(self, contexts):\n"
        "        return [-1.0 if 'wrong' in c.state.text else 1.0 for c in contexts]\n"
    )
    (tmp_path / "my.py").write_text(code, encoding="utf-8")
    labeled = read_labeled(store)
    assert sorted({(one.label, one.steps, one.agents) for one in labeled}) == [
        (-1, ("fine", "good"), ("A", "B")),
        (1, ("fine", "wrong"), ("A", "B")),
    ]
    blamed = command("blame", store, "--critic", f"{tmp_path}/my.py:Truth", "--json", tmp_path / "blame.json")
    assert blamed.exit_code == 0, blamed.output
    [run] = json.loads((tmp_path / "blame.json").read_text())["runs"]
    assert {(one["agent"], one["turn"]) for one in run["samples"]} == {("B", 2)}
    bench = command(
        "bench-critic", "--data", store, "--critic", f"{tmp_path}/my.py:Truth", "--json", tmp_path / "b.json"
    )
    assert bench.exit_code == 0, bench.output
    assert json.loads((tmp_path / "b.json").read_text())["critics"][0]["f1"] == 100.0
    (tmp_path / "plain.db").write_bytes(b"")
    search.import_transcripts(write(tmp_path / "chat.jsonl", *SAMPLES), tmp_path / "chat.db")
    with pytest.raises(DataError, match="labels"):
        read_labeled(tmp_path / "chat.db")


def test_import_command_previews_a_log_and_counts_broken_lines(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(f"{json.dumps(SAMPLES[0])}\nnot json\n{json.dumps({'messages': []})}\n", encoding="utf-8")
    shown = command("import", log, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert "Agents (2): Planner, Solver" in shown.output
    assert "2. Solver" in shown.output
    assert "Dropped: nothing" in shown.output
    assert list(tmp_path.iterdir()) == [log]
    done = command("import", log, "--store", tmp_path / "runs.db")
    assert done.exit_code == 0, done.output
    assert "1 transcripts of 1 questions by 2 agents" in done.output
    assert "2 lines" in done.output
    assert f"{log}:2: expected a JSON value" in done.output
    assert "contents were imported before" in command("import", log, "--store", tmp_path / "runs.db").output
    refused = command("import", log)
    assert refused.exit_code == 2
    assert "--store runs.db" in refused.output


# ------------------------------------------------------------------------ real logs


@pytest.mark.parametrize(
    ("name", "transcripts", "questions"),
    [("who_and_when", 99, 78), ("agent_processbench_hotpotqa", 145, 29)],
)
def test_real_logs_are_imported_completely(
    name: str, transcripts: int, questions: int, shared_data: Path, tmp_path: Path
) -> None:
    file = shared_data / "real" / f"{name}.jsonl.gz"
    if not file.exists():
        pytest.skip(f"no recorded runs at {file}")
    done = search.import_transcripts(file, tmp_path / "runs.db")
    assert (done.transcripts, done.questions, done.broken, done.ungraded) == (transcripts, questions, 0, 0)
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    if name == "who_and_when":
        labeled = read_labeled(tmp_path / "runs.db")
        assert len(labeled) == len(rows)
        wanted = sorted(row["history"][int(row["mistake_step"])]["content"] for row in rows)
        assert sorted(one.steps[one.label].partition("\n\n[program returned]")[0] for one in labeled) == wanted
    else:
        right = sum(row["final_label"] == 1 for row in rows)
        assert sum(c.correct is True for plan in plans(tmp_path / "runs.db").values() for c in plan.candidates) == right
