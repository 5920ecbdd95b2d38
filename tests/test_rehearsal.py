"""Dry run of the full size with random weights: options, checks before the run, costs, and kill -9."""

from __future__ import annotations

import json
import multiprocessing
import re
import shlex
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import critics, rehearsal
from benchmarks.paper.all import TABLES, make
from benchmarks.paper.lab import MCTS, Lab, check, command, row_of
from benchmarks.paper.options import Options, read
from benchmarks.paper.page import Page, write_whole
from mas_gym.errors import ConfigError, DataError, DataNotFoundError
from mas_gym.policies.cache import CachedPolicy
from rewardmodels import PAPER
from search import Sampling, load_planner


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of made-up problems in the layout of the published files."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("gsm8k", "math500"):
        (folder / name).mkdir()
    sums = [(f"Ann has {i} pens and buys {i + 3}. How many pens has she now?", 2 * i + 3) for i in range(60)]
    rows = [{"question": text, "answer": f"She has {total}.\n#### {total}"} for text, total in sums]
    for name, part in (("train", rows[:40]), ("test", rows[40:])):
        lines = "\n".join(map(json.dumps, part))
        (folder / "gsm8k" / f"{name}.jsonl").write_text(lines)
    found = [{"problem": f"Find $x$ if $x - {i} = 4$.", "solution": f"$\\boxed{{{i + 4}}}$"} for i in range(50)]
    (folder / "math500" / "test.jsonl").write_text("\n".join(map(json.dumps, found)))
    return folder


@pytest.fixture(scope="module")
def options(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Options:
    few = Options(number=2, trees=3, dynamic_trees=2, dev_trees=2, seeds=(14,), max_new_tokens=4)
    return rehearsal.prepare(data, tmp_path_factory.mktemp("rehearsal"), few)


# ------------------------------------------------------------------ the options of a full size


def test_paper_recipe_has_the_papers_settings_unless_overridden() -> None:
    paper = {name: value for name, value in PAPER.to_dict().items() if name not in ("kind", "head", "view")}
    assert Options(recipe="paper").training() == paper
    assert Options(recipe="paper", settings=("epochs=1",)).training() == {**paper, "epochs": 1}
    assert Options().training() == {}
    assert read("prog", "about", ["--recipe", "paper", "--max-new-tokens", "9"]).max_new_tokens == 9


def test_run_with_a_local_backbone_is_miniature_only_if_the_backbone_is_small(options: Options, tmp_path: Path) -> None:
    assert Options().miniature and Options(base=options.base).miniature
    assert not options.miniature and not Options(base="Qwen/Qwen2.5-1.5B").miniature
    # As large as a file system likes: only the header is read.
    header = json.dumps({"w": {"dtype": "BF16", "shape": [60_000, 1000], "data_offsets": [0, 120_000_000]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 120_000_000)
    assert not Options(base=str(tmp_path)).miniature


def test_messages_are_cached_only_in_a_miniature_run(options: Options, tmp_path: Path) -> None:
    small = replace(options, out=tmp_path, recipe="")
    assert isinstance(Lab(small).policy(options.policy), CachedPolicy)
    assert not isinstance(Lab(options).policy(options.policy), CachedPolicy)


def test_page_contains_no_local_paths(options: Options) -> None:
    shown = options.shown()
    assert "--policy transformers:agents --base agents" in shown and "--grader coin.py:flip" in shown
    assert "/" not in shown and "/" not in " ".join(Lab(options).facts())
    assert (
        replace(options, policy=f"{options.policy}#max_batch=3").shown().count("transformers:agents#max_batch=3") == 1
    )


def test_grader_and_token_limit_apply_to_every_search_and_its_identity(options: Options) -> None:
    lab, plain = Lab(options), Lab(replace(options, grader="", max_new_tokens=1024))
    bench = lab.bench(lab.home, "test", 2, (14,), options.out / "unused.db")
    assert bench.sampling == Sampling(max_new_tokens=4)
    problem = bench.task[0]
    grades = {bench.task.grade(problem, f"message {i}") for i in range(40)}
    assert {(grade.correct, grade.extracted) for grade in grades} == {(True, "0"), (False, "1"), (False, "2")}
    assert lab.terms and not plain.terms
    assert not plain.bench(plain.home, "test", 2, (14,), options.out / "unused.db").task.grade(problem, "no").correct


def test_judge_is_the_agents_model_with_its_options() -> None:
    assert critics.specs_for("tiny")["judge"] == "judge:tiny"
    found = critics.specs_for("vllm:M#gpu_memory_utilization=0.5")
    assert found["judge"] == "judge:vllm:M#gpu_memory_utilization=0.5"
    assert found["judge, pairs"] == "judge:vllm:M#gpu_memory_utilization=0.5&mode=pairwise"
    # vLLM reports no next-token distributions.
    assert "entropy" not in found and "least likely token" in found and "entropy" in critics.specs_for("transformers:M")
    assert critics.with_option("vllm:M#a=1&b=2", "cache=f") == "vllm:M#a=1&b=2&cache=f"


def test_full_size_page_uses_existing_options() -> None:
    text = (Path(rehearsal.__file__).parents[2] / "docs" / "full-size.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines() if line.startswith("python -m ")]
    full = [read("all", "", words[3:], tuple(TABLES)) for words in commands if words[2] == "benchmarks.paper.all"]
    assert len(full) == 2 and full[0].concurrency == 512 and full[1].ray == "local"
    [small] = [words[3:] for words in commands if words[2] == "benchmarks.paper.rehearsal"]
    assert rehearsal.command_line().parse_args(small).tables == ["views"]
    known = {f"--{'set' if field.name == 'settings' else field.name.replace('_', '-')}" for field in fields(Options)}
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= known | {"--logdir", "--config"}
    for name in re.findall(r"--set (\w+)=", text):
        assert hasattr(PAPER, name)


# ------------------------------------------------------------------ checks before the run


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"partner_data": Path("nowhere")}, DataNotFoundError, "nowhere"),
        ({"settings": ("learning_speed=1",)}, ConfigError, "unknown setting 'learning_speed'"),
        ({"grader": "nowhere.py:flip"}, DataNotFoundError, "nowhere.py"),
    ],
    ids=["data", "setting", "grader"],
)
def test_missing_requirements_are_reported_before_the_first_search(
    options: Options, tmp_path: Path, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make(replace(options, out=tmp_path, **changes))
    assert not list(tmp_path.iterdir())


def test_command_fails_with_a_message_and_no_traceback(data: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["--out", str(tmp_path), "--task", "gsm8k", "--data", str(data / "nothing")]
    with pytest.raises(SystemExit) as stop:
        command(lambda lab: check(lab, [lab.home]) or Page("x", "x", "x"), "main", words)
    assert stop.value.code == 1
    assert "Error: " in capsys.readouterr().err


@pytest.mark.slow
def test_run_without_correct_answers_stops_with_a_reason(options: Options, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no pairs in 3 trees: 3 with only failures .*the agents solve only sometimes"):
        make(replace(options, out=tmp_path, grader="", tables=("views",)))


def test_interrupted_write_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    write_whole(page, "text that people wrote\n")

    def dies(path: Path, text: str, **options: Any) -> int:
        path.write_bytes(text.encode()[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", dies)
    with pytest.raises(KeyboardInterrupt):
        write_whole(page, "new figures\n")
    assert page.read_bytes() == b"text that people wrote\n"


# ------------------------------------------------------------------ costs


@pytest.mark.parametrize(
    ("planner", "depth", "calls"),
    [
        ("single", 4, 4),
        ("sc:5", 4, 20),
        ("bon:10", 4, 40),
        ("sbs:5,3", 4, 50),
        ("mcts:10,3", 4, 69),
        ("mcts:40,3", 4, 120),
        ("mcts:40,3", 8, 600),
        ("mcts:20,20", 1, 20),
    ],
)
def test_most_calls_returns_the_maximum_number_of_agent_calls(planner: str, depth: int, calls: int) -> None:
    assert rehearsal.most_calls(load_planner(planner), depth) == calls


@pytest.mark.slow
def test_memory_grows_with_tokens_and_not_with_the_vocabulary() -> None:
    small = rehearsal.Sizes("small", 256, 512, 2, 128, 1000)
    (one, trained), (two, _) = (rehearsal.saved_bytes(small, tokens) for tokens in (64, 128))
    assert 1.95 < two / one < 2.05
    linear = 2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 512)
    assert trained == PAPER.lora_rank * linear * small.layers + small.hidden
    assert rehearsal.saved_bytes(small._replace(vocabulary=2000), 64)[0] == one


# ------------------------------------------------------------------ killed and resumed


def run(options: Options, reached: Callable[[], object] = lambda: False) -> int | None:
    """Make the tables in another process; kill it when a condition is met. Return its exit code."""
    process = PROCESSES.Process(target=make, args=(options,))
    process.start()
    try:
        while process.is_alive() and not reached():
            time.sleep(0.005)
        if process.is_alive():
            process.kill()
    finally:
        process.join()
    return process.exitcode


def grown(folder: Path, pattern: str) -> bool:
    """Whether one of the files has more than a few searches; SQLite's own come and go."""
    for file in folder.glob(pattern):
        with suppress(FileNotFoundError):
            if file.stat().st_size > 60_000:
                return True
    return False


PROCESSES: Any = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def undisturbed(options: Options, tmp_path_factory: pytest.TempPathFactory) -> Options:
    """A run that has made one table."""
    PROCESSES.set_forkserver_preload(["benchmarks.paper.all", "rewardmodels.training.trainer", "peft", "bitsandbytes"])
    quick = ("lora_rank=16", "epochs=1", "accumulation=1", "checkpoints=4", "evaluations=1")
    made = replace(options, out=tmp_path_factory.mktemp("whole"), tables=("views",), settings=quick)
    assert run(made) == 0
    return made


def assert_same_pages(one: Options, other: Options) -> None:
    pages = {path.name: path.read_text() for path in one.folder.iterdir()}
    assert set(pages) == {"views.md"}
    assert {path.name: path.read_text() for path in other.folder.iterdir()} == pages


@pytest.mark.slow
def test_killed_and_resumed_run_writes_equal_pages(undisturbed: Options, tmp_path: Path) -> None:
    killed = replace(undisturbed, out=tmp_path)
    out = killed.out
    during = {
        "rollouts": lambda: grown(out, "rollouts/*.db*"),
        "training": lambda: any(out.glob("critics/*/checkpoints/checkpoint-*/complete.json")),
        "searches": lambda: grown(out, "searches.db*"),
    }
    for name, reached in during.items():
        assert run(killed, reached) == -signal.SIGKILL, f"ended before it could be killed during {name}"
    assert run(killed) == 0
    assert_same_pages(killed, undisturbed)


@pytest.mark.slow
def test_searches_on_ray_have_equal_outcomes(undisturbed: Options, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    # The process that runs were forked from takes half a gigabyte.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    here = Lab(undisturbed)
    critic = str(here.folder(here.home))
    spread = Lab(replace(undisturbed, out=tmp_path, masprm=critic, ray="local", actors=1))
    try:
        found, known = (lab.measure(lab.home, [row_of(MCTS, lab.critic(lab.home), "full")]) for lab in (spread, here))
    finally:
        ray.shutdown()
    assert [replace(one, seconds=0.0) for one in found[0].outcomes] == [
        replace(one, seconds=0.0) for one in known[0].outcomes
    ]


@pytest.mark.slow
def test_page_contains_its_simplifications_and_cost(undisturbed: Options, tmp_path: Path) -> None:
    text = rehearsal.rehearse(undisturbed, tmp_path).read_text(encoding="utf-8")
    assert "**The labels are random.**" in text and "; 0 were right." in " ".join(text.split())
    assert "--number 2 --trees 3 --dynamic-trees 2 --dev-trees 2 --max-new-tokens 4 views\n" in text
    searches = [
        line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(("| gsm8k, ", "| math, "))
    ]
    assert {(cells[0], cells[1]) for cells in searches} >= {("gsm8k, rpsv", "mcts:40,3"), ("math, rpsv", "mcts:40,3")}
    for *_, calls, most, bound, _, _, _ in searches:
        assert float(calls) <= int(most) <= int(bound)
    agents = [line.split(" | ")[1] for line in text.splitlines() if line.startswith(("| rpsv, ", "| dylan, "))]
    assert agents[:4] == agents[4:8] == ["Reader", "Planner", "Solver", "Verifier"] and len(agents) == 16
    assert "| Qwen2.5-1.5B | 1.1 | 4.7 |" in text
