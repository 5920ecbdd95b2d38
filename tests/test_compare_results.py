"""Paired comparison of evaluations that other tools ran."""

import csv
import json
import math
import random
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from eval_logs import choice_row, inspect_sample, lm_eval_row, write_eval, write_rows
from typer.testing import CliRunner

import mas_gym
import search
from mas_gym.cli import app
from mas_gym.errors import ConfigError, DataError, DataNotFoundError, MASGymError, UnknownNameError
from mas_gym.policies import load_policy
from search.compare.evaluation_files import Evaluation
from search.compare.paired_results import PairedResults

OLD = [1, 1, 1, 0, 0, 0, 1, 0, 1, 0]
NEW = [1, 1, 1, 1, 1, 1, 0, 0, 1, 0]


def of_inspect(folder: Path, name: str, right: Sequence[int]) -> str:
    samples = [inspect_sample(place, "C" if one else "I") for place, one in enumerate(right)]
    return str(write_eval(folder / f"{name}.eval", samples, name))


def of_inspect_json(folder: Path, name: str, right: Sequence[int]) -> str:
    samples = [inspect_sample(place, one) for place, one in enumerate(right)]
    log = {"version": 2, "status": "success", "eval": {"model": name}, "plan": {}, "samples": samples}
    (folder / f"{name}.json").write_text(json.dumps(log, indent=2))
    return str(folder / f"{name}.json")


def of_lm_eval(folder: Path, name: str, right: Sequence[int]) -> str:
    rows = [lm_eval_row(place, float(one)) for place, one in enumerate(right)]
    write_rows(folder / name / "samples_sums_2025-01-02T00-00-00.123456.jsonl", rows)
    write_rows(folder / name / "samples_sums_2025-01-01T00-00-00.123456.jsonl", [lm_eval_row(0, 0.0)])
    return str(folder / name)


def of_csv(folder: Path, name: str, right: Sequence[int]) -> str:
    with (folder / f"{name}.csv").open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["question_id", "correct"])
        writer.writerows((place, bool(one)) for place, one in enumerate(right))
    return str(folder / f"{name}.csv")


def of_json_lines(folder: Path, name: str, right: Sequence[int]) -> str:
    rows = [{"id": place, "score": one, "model": name} for place, one in enumerate(right)]
    return str(write_rows(folder / f"{name}.jsonl", rows))


@pytest.mark.parametrize("write", [of_inspect, of_inspect_json, of_lm_eval, of_csv, of_json_lines])
def test_compare_results_each_format_gives_the_same_paired_difference(
    write: Callable[[Path, str, Sequence[int]], str], tmp_path: Path
) -> None:
    found = search.compare_results(write(tmp_path, "old", OLD), write(tmp_path, "new", NEW))
    assert [one.name for one in found.evaluations] == ["old", "new"]
    one = found.differences["new"]
    assert (one.gap.problems, one.better, one.worse) == (10, 3, 1)
    assert one.gap.mean == pytest.approx(0.2)
    assert [(flip.baseline, flip.score) for flip in one.flips].count((0, 1)) == 3
    assert one.gap.low < 0 < one.gap.high


def test_compare_results_of_a_store_has_a_row_per_planner(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    task = mas_gym.load_task("arithmetic", limit=3)
    for planner in ("single", "sc:2"):
        for seed in (1, 2):
            list(search.run(planner, task, mas="rpsv", policy=load_policy("tiny"), seed=seed, store=store))
    found = search.compare_results(store)
    assert {one.name: (len(one.scores), one.samples) for one in found.evaluations} == {"single": (3, 6), "sc:2": (3, 6)}
    assert found.differences["sc:2"].gap.verdict == "too few problems"
    stored = search.open_store(store).compare(baseline="single").differences()["sc:2"]
    assert found.differences["sc:2"].gap == stored


def test_compare_results_epochs_are_samples_of_one_question(tmp_path: Path) -> None:
    old = write_eval(tmp_path / "a.eval", [inspect_sample(q, "I", e) for q in range(6) for e in (1, 2)], "a")
    new = write_eval(tmp_path / "b.eval", [inspect_sample(q, "CI"[e - 1], e) for q in range(6) for e in (1, 2)], "b")
    found = search.compare_results(old, new)
    assert found.evaluations[1].samples == 12
    assert found.differences["b"].gap.mean == 0.5
    assert found.differences["b"].gap.problems == 6


def test_compare_results_named_files_are_samples_of_one_model(tmp_path: Path) -> None:
    for name, right in (("a1", OLD), ("a2", NEW), ("b", NEW)):
        of_inspect(tmp_path, name, right)
    found = search.compare_results(f"a={tmp_path}/a1.eval,{tmp_path}/a2.eval", f"b={tmp_path}/b.eval")
    assert [(one.name, one.samples) for one in found.evaluations] == [("a", 20), ("b", 10)]
    assert found.differences["b"].gap.mean == pytest.approx(0.1)


def test_compare_results_several_models_share_one_baseline(tmp_path: Path) -> None:
    rows = [{"id": q, "model": m, "correct": q % k == 0} for q in range(12) for k, m in enumerate("abc", 1)]
    file = write_rows(tmp_path / "all.jsonl", rows)
    found = search.compare_results(file, baseline="b")
    assert list(found.differences) == ["a", "c"]
    assert found.differences["a"].gap.mean == 0.5


def test_compare_results_folder_has_a_model_per_subfolder(tmp_path: Path) -> None:
    of_lm_eval(tmp_path, "first__model", OLD)
    of_lm_eval(tmp_path, "second__model", NEW)
    found = search.compare_results(tmp_path)
    assert [one.name for one in found.evaluations] == ["first__model", "second__model"]


def test_compare_results_metric_selects_the_filter_and_the_choice_metric(tmp_path: Path) -> None:
    rows = [lm_eval_row(q, float(f == "flexible-extract"), f) for q in range(6) for f in ("strict", "flexible-extract")]
    strict = write_rows(tmp_path / "a" / "samples_sums.jsonl", rows)
    assert search.compare_results(strict, strict).evaluations[0].shares["sums/0"] == 0
    loose = search.compare_results(strict, strict, metric="exact_match,flexible-extract")
    assert loose.evaluations[0].shares["sums/0"] == 1
    choices = write_rows(tmp_path / "b" / "samples_pick.jsonl", [choice_row(q, q % 2, 0) for q in range(6)])
    assert sum(search.compare_results(choices, choices).evaluations[0].shares.values()) == 3
    assert sum(search.compare_results(choices, choices, metric="acc_norm").evaluations[0].shares.values()) == 6


def test_compare_results_unscored_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    samples = [inspect_sample(q, None if q == 0 else "C") for q in range(8)]
    a, b = write_eval(tmp_path / "a.eval", samples, "a"), of_inspect(tmp_path, "b", [1] * 8)
    found = search.compare_results(a, b)
    assert (found.evaluations[0].unscored, found.differences["b"].gap.problems) == (1, 7)
    assert "a 1" in str(found)


def test_compare_results_equal_ids_with_different_texts_are_not_paired(tmp_path: Path) -> None:
    a = of_inspect(tmp_path, "a", OLD)
    samples = [inspect_sample(q, "C", text="Another question" if q == 3 else "") for q in range(10)]
    found = search.compare_results(a, write_eval(tmp_path / "b.eval", samples, "b"))
    assert (found.differences["b"].different, found.differences["b"].gap.problems) == (1, 9)
    others = [inspect_sample(q, "C", text=f"Another question {q}") for q in range(10)]
    with pytest.raises(ConfigError, match="different texts"):
        _ = search.compare_results(a, write_eval(tmp_path / "c.eval", others, "c")).differences


def test_questions_needed_gives_the_stated_power() -> None:
    rng = random.Random(0)
    pilot = simulated(rng, 4000, gain=0.1)
    needed = pilot.differences["new"].questions_needed(10)
    excluded = [simulated(rng, needed, gain=0.1).differences["new"].gap.low > 0 for _ in range(300)]
    assert sum(excluded) / 300 == pytest.approx(0.8, abs=0.07)
    assert pilot.differences["new"].questions_needed(5) == pytest.approx(4 * needed, rel=0.01)
    for points in (0, 101, math.nan):
        with pytest.raises(ConfigError):
            pilot.differences["new"].questions_needed(points)


def simulated(rng: random.Random, questions: int, gain: float) -> PairedResults:
    old = {str(q): (float(rng.random() < 0.5),) for q in range(questions)}
    # A right answer is lost with 10%, and a wrong answer is corrected with 10% + 2 * gain.
    new = {q: (float(rng.random() < (0.9 if right else 0.1 + 2 * gain)),) for q, (right,) in old.items()}
    return search.compare_results(Evaluation("old", old), Evaluation("new", new))


def text_file(folder: Path) -> str:
    (folder / "a.txt").write_text("free text")
    return f"{folder}/a.txt"


def without_columns(folder: Path) -> str:
    (folder / "a.csv").write_text("name,text\nx,y\n")
    return f"{folder}/a.csv"


def out_of_range(folder: Path) -> str:
    return str(write_rows(folder / "a.jsonl", [{"id": 1, "score": 7}]))


def other_zip(folder: Path) -> str:
    with zipfile.ZipFile(folder / "a.eval", "w") as archive:
        archive.writestr("x.txt", "x")
    return f"{folder}/a.eval"


def cut_zip(folder: Path) -> str:
    whole = Path(of_inspect(folder, "whole", OLD)).read_bytes()
    (folder / "a.eval").write_bytes(whole[: len(whole) // 2])
    return f"{folder}/a.eval"


def without_scores(folder: Path) -> str:
    return str(write_eval(folder / "a.eval", [inspect_sample(1, None)]))


def torn_row(folder: Path) -> str:
    (folder / "samples_x.jsonl").write_text(json.dumps(lm_eval_row(1, 1.0)) + '\n{"doc_id": 2, "do')
    return f"{folder}/samples_x.jsonl"


@pytest.mark.parametrize(
    "write", [text_file, without_columns, out_of_range, other_zip, cut_zip, without_scores, torn_row, str]
)
def test_compare_results_unreadable_evaluation_raises_data_error(write: Callable[[Path], str], tmp_path: Path) -> None:
    with pytest.raises(DataError):
        search.compare_results(write(tmp_path))


def test_compare_results_wrong_arguments_raise_errors(tmp_path: Path) -> None:
    file = of_csv(tmp_path, "a", OLD)
    with pytest.raises(ConfigError, match="two models"):
        search.compare_results(file)
    with pytest.raises(DataNotFoundError):
        search.compare_results(file, tmp_path / "absent.csv")
    for wrong in ({"baseline": "b"}, {"metric": "acc"}):
        with pytest.raises((ConfigError, UnknownNameError)):
            search.compare_results(file, file, **wrong)
    with pytest.raises(ConfigError):
        search.compare_results(Evaluation("a", {"1": (1.0,)}), Evaluation("b", {"2": (1.0,)})).differences  # noqa: B018


def test_compare_command_writes_every_form(tmp_path: Path) -> None:
    hostile = "\x1b[2J</script><script>alert(1)</script>"
    rows = [
        {"id": hostile + str(q), "model": m, "correct": q % k == 0} for q in range(40) for k, m in ((1, "a"), (2, "b"))
    ]
    file = write_rows(tmp_path / "all.jsonl", rows)
    paths = {name: tmp_path / f"out.{name}" for name in ("html", "md", "tex", "json")}
    arguments = ["compare", str(file), "--out", str(paths["html"]), "--markdown", str(paths["md"])]
    done = CliRunner(env={"COLUMNS": "80"}).invoke(
        app, [*arguments, "--latex", str(paths["tex"]), "--json", str(paths["json"])]
    )
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "excludes 0" in done.stdout and "\x1b[2J" not in done.stdout
    page = paths["html"].read_text()
    assert page.count("alert(1)") == 20 and "<script>alert" not in page
    assert "| b | -50.0 |" in paths["md"].read_text()
    assert r"\toprule" in paths["tex"].read_text()
    stored = json.loads(paths["json"].read_text())
    assert len(stored["differences"][0]["flips"]) == 20
    assert stored["differences"][0]["worse"] == 20


def test_compare_command_shows_errors_without_traceback(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "absent.eval")])
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit | MASGymError)
