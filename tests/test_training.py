"""Training: the losses are the paper's, batches share what can be shared, runs resume, folders load anywhere."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="training needs the extra 'train'")
if find_spec("accelerate") is None or find_spec("tensorboard") is None:
    pytest.skip("training needs the extra 'train'", allow_module_level=True)

import torch
import transformers
from grove import MODEL, chain, grove, lazily, save_base

import mas_gym
import mas_gym.tiny
import search
from mas_gym.errors import ConfigError, DataError, DataNotFoundError, TrainingError
from mas_gym.policies import load_policy
from rewardmodels import (
    PAPER,
    TINY,
    LearnedCritic,
    RewardData,
    Trained,
    TrainingConfig,
    collect,
    load_critic,
    split,
    stored_trees,
    train,
)
from rewardmodels.data.encode import Encoder, collate_plain, pack
from rewardmodels.model.backbone import can_share, load_scalar, logits_at
from rewardmodels.training.config import config_for
from rewardmodels.training.metrics import calibration_by_depth, interval, outcome_metrics, pair_metrics, point_metrics
from search import ScoringContext
from search.compare.first_errors import auc

# With all that transformers' Trainer needs it takes 150 MB, in every process that collects these tests.
trainer_module = lazily("rewardmodels.training.trainer")


def last_checkpoint(folder: Path) -> Path | None:
    from rewardmodels.training import checkpoints

    return checkpoints.last_checkpoint(folder)


QUICK: dict[str, Any] = {
    "epochs": 1,
    "anchor": 0.0,
    "batch_size": 12,
    "learning_rate": 3e-3,
    "evaluations": 2,
    "checkpoints": 4,
    "device": "cpu",
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("bases") / "qwen2")


@pytest.fixture(scope="session")
def data() -> RewardData:
    return collect(grove(), "pairs")


@pytest.fixture(scope="session")
def trained(base: Path, data: RewardData, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out = tmp_path_factory.mktemp("critics") / "masprm"
    return train(data, out, base=str(base), points=collect(grove(), "points"), **QUICK)


# First, while this process is small, because the test starts two large ones.


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_distributed_training_from_the_command_line_divides_the_batches_among_processes(tmp_path: Path) -> None:
    store, out = tmp_path / "rollouts.db", tmp_path / "masprm"
    task = mas_gym.load_task("arithmetic", split="train", limit=8)
    list(search.run("mcts:8,2", task, mas="rpsv", policy=load_policy("tiny"), training=True, store=store))
    words = ["train", "masprm", "--store", str(store), "--base", "tiny", "--out", str(out)]
    for setting in ("epochs=1", "batch_size=16", "max_tokens=512"):
        words += ["--set", setting]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, "-m", "mas_gym.cli", *words], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("Saved to") == 1
    # The anchor of the loss uses every labeled state.
    pairs, points = (split(collect(stored_trees(store), kind), TINY.held_out)[0] for kind in ("pairs", "points"))
    rows = trainer_module.bundles([*pairs.examples, *points.examples], _encoder(mas_gym.tiny.path()), 16, 512)
    steps = len(trainer_module.schedule(rows, 16, 1, seed=42))
    history = json.loads((out / "metrics.json").read_text(encoding="utf-8"))["history"]
    assert history[-1]["step"] == math.ceil(steps / 2) > 1
    assert load_critic(str(out)).name == "masprm"
    assert LearnedCritic(out, device="cpu").info.data["pairs"] == len(pairs)


# What one process computes


def model_of(base: Path) -> tuple[Any, Any]:
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    return load_scalar(str(base), torch.float32, tokenizer.pad_token_id, new_head=True).eval(), tokenizer


@pytest.mark.parametrize("bt_on", ["tanh", "raw"])
@pytest.mark.parametrize("anchor", [0.0, 0.5])
def test_bradley_terry_loss_equals_the_equation_of_the_paper(bt_on: Any, anchor: float) -> None:
    z, t = np.array([0.3, -1.2, 2.0, 0.0, 0.7]), 0.25
    tensors = {
        "better": torch.tensor([0, 2]),
        "worse": torch.tensor([1, 3]),
        "points": torch.tensor([4]),
        "target": torch.tensor([t]),
    }
    v = np.tanh(z) if bt_on == "tanh" else z
    pairs = [-math.log(math.exp(v[a]) / (math.exp(v[a]) + math.exp(v[b]))) for a, b in ((0, 1), (2, 3))]
    expected = (sum(pairs) + anchor * (math.tanh(z[4]) - t) ** 2) / (2 + anchor)
    found = trainer_module.loss_of(TrainingConfig(bt_on=bt_on, anchor=anchor), torch.tensor(z), tensors)
    assert float(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("head", ["mse", "bce"])
def test_pointwise_losses_equal_the_papers_formulas(head: Any) -> None:
    z, t = np.array([0.3, -1.2, 2.0]), np.array([1.0, -1.0, -1.0])
    none = torch.tensor([], dtype=torch.long)
    tensors = {"better": none, "worse": none, "points": torch.arange(3), "target": torch.tensor(t)}
    squared = np.mean((np.tanh(z) - t) ** 2)
    entropy = np.mean([-math.log((1 + s * math.tanh(x)) / 2) for x, s in zip(z, t, strict=True)])
    found = trainer_module.loss_of(TrainingConfig(kind="orm", head=head), torch.tensor(z), tensors)
    assert float(found) == pytest.approx(squared if head == "mse" else entropy, rel=1e-6)


def test_states_packed_in_one_row_have_the_same_scores_as_separate_states(base: Path, data: RewardData) -> None:
    model, tokenizer = model_of(base)
    assert can_share(model, tokenizer.pad_token_id)
    found = trainer_module.bundles(data.examples, Encoder(tokenizer, 512), 8, 8192)[:5]
    both = []
    for share in (True, False):
        tensors = trainer_module.gather(found, tokenizer.pad_token_id, torch.float32, share)
        model.zero_grad()
        logits = logits_at(model, tensors)
        loss = trainer_module.loss_of(TrainingConfig(), logits, tensors)
        loss.backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        both.append((logits.detach(), grads, tensors["input_ids"].numel()))
    assert torch.allclose(both[0][0], both[1][0], atol=1e-5)
    assert torch.allclose(both[0][1], both[1][1], atol=1e-5)
    assert both[0][2] < both[1][2] / 2


@pytest.mark.parametrize("head", ["bt", "mse"])
def test_gradient_accumulation_gives_the_same_gradient(base: Path, tmp_path: Path, head: str) -> None:
    config = config_for(2_000_000, {"head": head})
    points = collect(grove(4), "points").examples
    examples = [*collect(grove(4), "pairs").examples, *points] if head == "bt" else points
    found = []
    for name, limit in (("whole", 10**6), ("parts", 800)):
        model, tokenizer = model_of(base)
        all_of_them = trainer_module.bundles(examples, Encoder(tokenizer, 512), 4, 10**6)
        rest = (limit, tokenizer.pad_token_id, torch.float32, True)
        steps = trainer_module.StepData(all_of_them, [list(range(len(all_of_them)))], *rest)
        trainer = trainer_module.CriticTrainer(
            config,
            steps,
            trainer_module.HeldOut(all_of_them, *rest),
            model=model,
            args=trainer_module.arguments(config, tmp_path / name, 1, "cpu"),
        )
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer.training_step(model, steps[0])
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((float(loss), gradient, len(steps[0]["passes"])))
    assert found[0][2] == 1 < 3 < found[1][2]
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    assert float(found[0][1].norm()) > 1e-2
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("limit", [1, 300, 1000, 10**6])
def test_forward_passes_contain_every_bundle_once_within_the_token_limit(
    base: Path, data: RewardData, share: bool, limit: int
) -> None:
    encoder = Encoder(transformers.AutoTokenizer.from_pretrained(base), 512)
    found = trainer_module.bundles(data.examples, encoder, 8, limit)
    assert sorted(example for b in found for example in b.examples) == sorted(data.examples)
    assert all(b.tokens <= limit or len(b.examples) == 1 for b in found)
    passes = trainer_module.forward_passes(found, limit, share)
    assert sorted(map(id, found)) == sorted(id(b) for part in passes for b in part)
    for part in passes:
        size = trainer_module.gather(part, 0, torch.float32, share)["input_ids"].numel()
        assert size <= limit or len(part) == 1


def test_head_reads_the_same_position_as_transformers(base: Path) -> None:
    model, tokenizer = model_of(base)
    states = Encoder(tokenizer, 512).encode([(MODEL.mas, chain(["a b", "c"][:n])) for n in (1, 2)])
    batch = collate_plain(states, tokenizer.pad_token_id)
    with torch.no_grad():
        assert torch.allclose(
            logits_at(model, batch), model(batch["input_ids"], batch["attention_mask"]).logits[:, 0], atol=1e-6
        )


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Gemma", "Phi3", "Qwen3", "GPT2"])
def test_decoders_of_other_families_support_packed_rows(kind: str, tmp_path: Path) -> None:
    changes = {"head_dim": 32} if kind in ("Gemma", "Qwen3") else {}
    if kind == "GPT2":
        changes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}
    model, tokenizer = model_of(save_base(tmp_path, kind, **changes))
    assert can_share(model, tokenizer.pad_token_id)


def test_sliding_window_attention_disables_packed_rows(tmp_path: Path) -> None:
    model, tokenizer = model_of(save_base(tmp_path, "Mistral", sliding_window=4))
    assert not can_share(model, tokenizer.pad_token_id)


def test_every_epoch_visits_each_bundle_once_in_a_new_order(base: Path, data: RewardData) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    found = trainer_module.bundles(data.examples, Encoder(tokenizer, 512), 8, 8192)
    steps = trainer_module.schedule(found, 16, 2, seed=1)
    flat = [i for step in steps for i in step]
    half = len(found)
    assert sorted(flat[:half]) == sorted(flat[half:]) == list(range(half))
    assert flat[:half] != flat[half:]
    assert all(sum(len(found[i].examples) for i in step) <= 16 for step in steps)
    assert trainer_module.schedule(found, 16, 2, seed=1) == steps != trainer_module.schedule(found, 16, 2, seed=2)
    assert 0 < len(trainer_module.schedule(found, 16, 0.5, seed=1)) < len(steps) / 2


def test_bundles_of_similar_length_are_batched(base: Path, data: RewardData) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    found = trainer_module.bundles(data.examples, Encoder(tokenizer, 512), 4, 8192)
    steps = trainer_module.schedule(found, 16, 1, seed=1)
    padded = sum(len(step) * max(found[i].tokens for i in step) for step in steps)
    assert padded < 1.25 * sum(bundle.tokens for bundle in found)


def test_default_settings_depend_on_the_backbone_size() -> None:
    assert config_for(2_000_000, {}) == TINY
    assert (TINY.anchor, PAPER.anchor) == (1.0, 0.0)
    assert config_for(2_000_000, {"kind": "orm", "head": "bce"}).anchor == 0
    large = config_for(1_500_000_000, {})
    assert large == PAPER
    assert (large.lora_rank, large.lora_dropout, large.batch_size, large.accumulation) == (256, 0.05, 8, 16)
    assert (large.learning_rate, large.epochs, large.weight_decay, large.nf4) == (1e-5, 5, 0.01, True)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"rank": 4}, "unknown setting 'rank'"),
        ({"head": "bce"}, "expected one of 'bt', 'mse'"),
        ({"kind": "orm", "head": "bt"}, "expected one of 'bce', 'mse'"),
        ({"kind": "prm"}, "kind: expected one of"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"nf4": True, "lora_rank": 0}, "nf4"),
        ({"held_out": 1.0}, "held_out"),
        ({"bt_on": "logit"}, "bt_on"),
        ({"anchor": -1.0}, "anchor"),
        ({"kind": "orm", "head": "mse", "anchor": 1.0}, "anchor"),
    ],
)
def test_invalid_settings_are_rejected(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        config_for(2_000_000, wrong)


def test_training_data_must_match_the_head_and_the_view(base: Path, data: RewardData, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected outcomes .* got pairs"):
        train(data, tmp_path / "o", base=str(base), kind="orm", head="bce", **QUICK)
    with pytest.raises(ConfigError, match="view 'local', got 'full'"):
        train(data, tmp_path / "o", base=str(base), view="local", **QUICK)


def test_folder_of_a_trained_critic_has_a_model_card(trained: Trained) -> None:
    info = trained.info
    assert (info.kind, info.head, info.view, info.base) == ("masprm", "bt", "full", "qwen2")
    assert info.graphs["rpsv"]["agents"] == ["Reader", "Planner", "Solver", "Verifier"]
    metrics = info.metrics
    assert 0 <= metrics["accuracy_interval"][0] <= metrics["accuracy"] <= metrics["accuracy_interval"][1] <= 1
    assert set(metrics["accuracy_by_depth"]) == {"0", "1", "2", "3"}
    assert set(metrics["points"]["calibration"]) == {"0", "1", "2", "3"}
    card = (trained.folder / "README.md").read_text(encoding="utf-8")
    assert "rpsv: Reader -> Planner" in card and "accuracy" in card and str(trained.folder) not in card
    assert not list(trained.folder.glob(".saving*"))


def test_curves_are_written_for_tensorboard(trained: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.folder / "curves"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {"loss", "held_out/accuracy", "held_out/margin", "held_out/auc", "held_out/bt_loss"} <= names
    assert len(events.Scalars("held_out/accuracy")) >= 2


def test_plain_transformers_reproduces_the_critic_scores(trained: Trained) -> None:
    states = [chain(["Facts: has 3.", "Plan: start 3."][:n]) for n in (1, 2)]
    ours = LearnedCritic(trained.folder, device="cpu").score([ScoringContext(s, MODEL.mas, None) for s in states])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(trained.folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.folder)
    from rewardmodels import state_text

    for state, value in zip(states, ours, strict=True):
        ids = tokenizer(state_text(MODEL.mas, state), return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            assert math.tanh(float(model(**ids).logits)) == pytest.approx(value, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "head", "rows", "bf16"),
    [
        ("orm", "bce", "outcomes", False),
        ("orm", "mse", "outcomes", False),
        ("masprm", "mse", "points", False),
        ("masprm", "mse", "points", True),
    ],
)
def test_mse_and_bce_heads_learn(base: Path, tmp_path: Path, kind: str, head: str, rows: Any, bf16: bool) -> None:
    settings = {**QUICK, "epochs": 2, "cpu_bf16": bf16}
    done = train(collect(grove(12), rows), tmp_path / "c", base=str(base), kind=kind, head=head, **settings)
    first, last = done.history[0], done.history[-1]
    assert last["mse"] <= first["mse"] * 1.05
    assert "calibration" in last and done.info.head == head


@pytest.mark.slow
@pytest.mark.parametrize(("head", "anchor"), [("bt", 0.0), ("bt", 1.0), ("mse", 0.0)])
def test_head_on_a_frozen_backbone_learns(
    base: Path, data: RewardData, tmp_path: Path, head: Any, anchor: float
) -> None:
    points = collect(grove(), "points")
    rows = data if head == "bt" else points
    made = train(rows, tmp_path, base=str(base), points=points, frozen=True, head=head, anchor=anchor, device="cpu")
    before, after = model_of(base)[0].model.state_dict(), model_of(tmp_path)[0].model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    held = split(rows, made.info.settings["held_out"])[1].examples
    critic = LearnedCritic(tmp_path, device="cpu")
    encoded = critic._encoder.encode_parts([example.chosen for example in held])
    scores = np.tanh(critic._scorer.logits(encoded, [False] * len(encoded)))
    if head == "bt":
        assert made.info.metrics["accuracy"] > 0.8
    else:
        # The saved critic has the head that was measured.
        assert np.mean((scores - [example.chosen_target for example in held]) ** 2) == pytest.approx(
            made.info.metrics["mse"], rel=1e-4
        )
        assert made.info.metrics["correlation"] > 0.7
    again = train(rows, tmp_path / "again", base=str(base), points=points, frozen=True, head=head, anchor=anchor)
    assert again.info.metrics == made.info.metrics


def test_anchor_loss_moves_scores_to_the_targets(base: Path, data: RewardData, tmp_path: Path) -> None:
    points = collect(grove(), "points")
    gaps = []
    for anchor in (0.0, 1.0):
        settings = {**QUICK, "epochs": 3, "anchor": anchor}
        done = train(data, tmp_path / str(anchor), base=str(base), points=points, **settings)
        gaps.append(done.info.metrics["points"]["mse"])
    assert gaps[1] < 0.8 * gaps[0]
    with pytest.raises(ConfigError, match="labeled states"):
        train(data, tmp_path / "none", base=str(base), **{**QUICK, "anchor": 1.0})


def test_finished_training_is_not_repeated(trained: Trained, base: Path, data: RewardData) -> None:
    before = (trained.folder / "model.safetensors").stat().st_mtime_ns
    again = train(data, trained.folder, base=str(base), points=collect(grove(), "points"), **QUICK)
    assert again.info == trained.info and len(again.history) == len(trained.history)
    assert (trained.folder / "model.safetensors").stat().st_mtime_ns == before


def test_training_does_not_overwrite_another_run_or_other_files(
    trained: Trained, base: Path, data: RewardData, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"another training run \(different settings\)"):
        train(data, trained.folder, base=str(base), **{**QUICK, "epochs": 3})
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected an empty folder"):
        train(data, tmp_path, base=str(base), **QUICK)


class Stop(Exception):
    """Simulates a crash."""


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def test_interrupted_training_resumes_with_the_same_result(
    trained: Trained, base: Path, data: RewardData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trainer_module.loss_of
    calls = 0

    def crash(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise Stop
        return real(*args)

    out = tmp_path / "masprm"
    monkeypatch.setattr(trainer_module, "loss_of", crash)
    with pytest.raises(Stop):
        train(data, out, base=str(base), **QUICK)
    monkeypatch.setattr(trainer_module, "loss_of", real)
    assert last_checkpoint(out / "checkpoints") is not None and not (out / "critic.json").exists()
    lines: list[str] = []
    train(data, out, base=str(base), log=lines.append, **QUICK)
    assert any("checkpoint-" in line for line in lines)
    resumed, whole = weights(out), weights(trained.folder)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_killed_training_resumes_with_the_same_result(
    trained: Trained, base: Path, data: RewardData, tmp_path: Path
) -> None:
    out = tmp_path / "masprm"
    code = (
        "import os, signal, sys; from grove import grove; from rewardmodels import collect, train\n"
        "from rewardmodels.training.checkpoints import Curves\n"
        # It ends itself after its first checkpoint: from outside, it may have finished before it is killed.
        "Curves.on_save = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"train(collect(grove(), 'pairs'), sys.argv[1], base=sys.argv[2], **{QUICK!r})"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code, str(out), str(base)], env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    again = train(data, out, base=str(base), **QUICK)
    resumed, whole = weights(out), weights(trained.folder)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert again.history == trained.history and again.history


def test_training_killed_at_its_start_restarts(
    base: Path, data: RewardData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.write_text

    def dies(path: Path, text: str, **options: Any) -> int:
        real(path, text[: len(text) // 2], **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", dies)
        train(data, tmp_path / "c", base=str(base), **QUICK)
    assert train(data, tmp_path / "c", base=str(base), **QUICK).info.kind == "masprm"


def test_incomplete_checkpoint_is_skipped(tmp_path: Path) -> None:
    for step, done in ((5, True), (10, True), (15, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if done:
            (folder / "complete.json").write_text("{}", encoding="utf-8")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_nan_loss_stops_training_and_keeps_the_last_checkpoint(
    base: Path, data: RewardData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trainer_module.loss_of
    calls = 0

    def poisoned(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args) * (math.nan if calls > 6 else 1.0)

    monkeypatch.setattr(trainer_module, "loss_of", poisoned)
    with pytest.raises(TrainingError, match=r"step 7.*nan.*last good checkpoint is kept: checkpoint-"):
        train(data, tmp_path / "c", base=str(base), **QUICK)
    last = last_checkpoint(tmp_path / "c" / "checkpoints")
    assert last is not None and all(bool(t.isfinite().all()) for t in weights(last).values())


def test_non_finite_weights_are_not_saved(base: Path, data: RewardData, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"expected (a finite loss|finite weights).*No checkpoint"):
        train(data, tmp_path / "c", base=str(base), **{**QUICK, "learning_rate": 1e30, "warmup": 0.0})
    assert not (tmp_path / "c" / "critic.json").exists()


@pytest.mark.slow
def test_training_resumes_after_a_full_disk(
    trained: Trained, base: Path, data: RewardData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.save

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match=r"No space left.*Free some space"):
        train(data, tmp_path / "c", base=str(base), **QUICK)
    monkeypatch.setattr(torch, "save", real)
    train(data, tmp_path / "c", base=str(base), **QUICK)
    resumed, whole = weights(tmp_path / "c"), weights(trained.folder)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_base_model_with_missing_or_broken_weights_is_reported(base: Path, data: RewardData, tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="no tokenizer at"):
        train(data, tmp_path / "c", base=str(tmp_path / "nothing"), **QUICK)
    broken = tmp_path / "broken"
    save_base(broken)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(DataError, match="damaged"):
        train(data, tmp_path / "c", base=str(broken), **QUICK)


@pytest.mark.parametrize("nf4", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lora_and_qlora_critics_score_the_same_after_reloading(
    base: Path, data: RewardData, tmp_path: Path, nf4: bool
) -> None:
    peft = pytest.importorskip("peft")
    if nf4:
        pytest.importorskip("bitsandbytes")
    settings = {**QUICK, "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05, "nf4": nf4}
    seen: dict[str, Any] = {}
    real = trainer_module.HeldOut.logits

    def remember(self: Any, model: Any) -> Any:
        seen["logits"], seen["rows"] = real(self, model), self.examples
        return seen["logits"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module.HeldOut, "logits", remember)
        done = train(data, tmp_path / "c", base=str(base), **settings)
    before = weights(base)
    after = weights(done.folder)
    moved = [name for name in before if name in after and not torch.allclose(before[name], after[name], atol=1e-4)]
    assert any("q_proj" in name for name in moved) and "score.weight" in after
    critic = LearnedCritic(done.folder, device="cpu")
    texts = [row.chosen for row in seen["rows"]]
    merged = critic._scorer.logits(critic._encoder.encode_parts(texts), [False] * len(texts))
    assert np.allclose(merged, seen["logits"][0], atol=2e-3)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    plain.config.pad_token_id = critic._scorer.pad
    adapted = peft.PeftModel.from_pretrained(plain, done.folder / "adapter").eval()
    batch = collate_plain(critic._encoder.encode_parts(texts), critic._scorer.pad)
    with torch.no_grad():
        beside = logits_at(adapted, batch).numpy()
    # A 4-bit backbone differs from the one it was made of; the adapter alone does not know by how much.
    assert np.corrcoef(beside, merged)[0, 1] > 0.9 if nf4 else np.allclose(beside, merged, atol=1e-4)


def test_pair_metrics_equal_hand_computed_values() -> None:
    rows = collect(grove(), "pairs").examples[:4]
    better, worse = np.array([1.0, 0.0, 2.0, 0.5]), np.array([0.0, 1.0, 0.0, 0.5])
    found = pair_metrics(rows, better, worse)
    assert found["accuracy"] == pytest.approx((1 + 0 + 1 + 0.5) / 4)
    assert found["margin"] == pytest.approx(np.mean(np.tanh(better) - np.tanh(worse)))
    assert found["bt_loss"] == pytest.approx(np.mean(np.log1p(np.exp(np.tanh(worse) - np.tanh(better)))))
    assert sum(part["count"] for part in found["accuracy_by_agent"].values()) == 4


def test_auc_agrees_with_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 6, 200).astype(float), rng.random(200) < 0.4
    assert auc(scores, labels) == pytest.approx(metrics.roc_auc_score(labels, scores))
    assert auc(scores, np.ones(200)) == 0.5


def test_calibration_is_reported_by_depth() -> None:
    rows = collect(grove(), "points").examples
    exact = np.arctanh(np.clip([row.chosen_target for row in rows], -0.999999, 0.999999))
    for part in calibration_by_depth(rows, exact).values():
        assert part["gap"] < 1e-5 and part["score"] == pytest.approx(part["target"], abs=1e-5)
    shifted = calibration_by_depth(rows, np.full(len(rows), 3.0))
    assert all(part["gap"] == pytest.approx(abs(part["score"] - part["target"])) for part in shifted.values())
    assert point_metrics(rows, exact)["correlation"] == pytest.approx(1.0)


def test_intervals_resample_problems() -> None:
    rows = [row for row in collect(grove(), "points").examples if row.depth == 0]
    values = {p: float(i % 2) for i, p in enumerate(dict.fromkeys(row.problem_id for row in rows))}
    per_row = np.array([values[row.problem_id] for row in rows])
    low, high = interval(rows, lambda i: float(per_row[i].mean()))
    # 40 problems of value 0 or 1: the interval is as wide as 40 coin flips make it, however many rows they have.
    assert high - low == pytest.approx(4 * math.sqrt(0.25 / len(values)), rel=0.25)


def test_perfect_critic_has_perfect_outcome_metrics() -> None:
    rows = collect(grove(), "outcomes").examples
    found = outcome_metrics(rows, np.array([4.0 * row.chosen_target for row in rows]))
    assert found["auc"] == 1.0 == found["accuracy"] and found["bce_loss"] < 1e-3
    assert found["auc_interval"] == [1.0, 1.0]


def test_packed_rows_contain_shared_prefixes_once() -> None:
    row = pack([[(1, 2), (3,)], [(1, 2), (4, 5)], [(1, 2)]])
    assert row.ids.tolist() == [1, 2, 3, 4, 5]
    assert row.positions.tolist() == [0, 1, 2, 2, 3]
    assert row.ends.tolist() == [2, 4, 1]
    assert row.sees.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_held_out_problems_are_not_used_for_training(trained: Trained, data: RewardData) -> None:
    learned, held = split(data, trained.info.settings["held_out"])
    assert trained.info.data["pairs"] == len(learned) and trained.info.data["pairs held out"] == len(held)
    assert json.loads((trained.folder / "metrics.json").read_text(encoding="utf-8"))["final"]["pairs"] == len(held)


def _encoder(base: Path) -> Encoder:
    return Encoder(transformers.AutoTokenizer.from_pretrained(base), 512)
