"""The GPU benchmark, checked on a CPU with its cut configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import gpu


@pytest.mark.slow
def test_benchmark_with_reduced_configuration_writes_every_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--config", "cut", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "gpu-cut.md").read_text(encoding="utf-8")
    assert all(f"| {part} | ran |" in page for part in gpu.PARTS), page + capsys.readouterr().err
    ratios = [float(figure) for figure in re.findall(r"\| \*\*.+\*\* \| \*\*([\d.]+)\*\* \|", page)]
    # Two of the search, one of scoring, one of the tokens of an update.
    assert len(ratios) == 4
    assert min(ratios) > 0
    # Agents and critics share prefixes, so fewer tokens are encoded, at any load of the machine.
    assert ratios[-1] > 1
    assert "CPU check of the command, not a result" in page


@pytest.mark.slow
def test_benchmark_at_its_time_limit_reports_skipped_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One second for the models: less than Python needs to import torch and write them.
    monkeypatch.setattr(gpu, "RESERVE", 0.0)
    assert gpu.main(["--config", "cut", "--out", str(tmp_path), "--minutes", "0.17"]) == 1
    page = (tmp_path / "gpu-cut.md").read_text(encoding="utf-8")
    assert "| models | skipped: time limit of 1 s reached |" in page
    assert page.count("skipped: there are no models") == 3


def test_full_configuration_has_the_published_number_of_parameters() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(gpu.shape_of(gpu.CONFIGS["qwen2.5-1.5b"], 0, 1))
    # Qwen2.5's model card: 1.54 billion, 1.31 billion without the embedding.
    total, embedding = model.num_parameters(), model.get_input_embeddings().weight.numel()
    assert (round(total / 1e9, 2), round((total - embedding) / 1e9, 2)) == (1.54, 1.31)


def test_error_without_a_gpu_suggests_the_cpu_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path)]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert "python -m benchmarks.gpu --config cut" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "11"])
def test_benchmark_rejects_minutes_outside_its_range(minutes: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--minutes", minutes])


def test_search_rows_without_second_measurement_have_no_ratio() -> None:
    found = {"engine": "vLLM", "why": "", "problems": 4, "seconds": 2.0, "messages": 8, "tokens": 80, "search": 40.0}
    rows = gpu.search_rows({**found, "cached": 0.5})
    assert not any("/" in name for name, _ in rows)
