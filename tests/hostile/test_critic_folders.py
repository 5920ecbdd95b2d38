"""Untrusted critic folders: loading always ends soon, in a typed error or in a critic that scores."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="learned critics need the extra 'train'")

import torch
from grove import MODEL, chain, save_base

from mas_gym.errors import ConfigError, CriticError, DataError, MASGymError
from mas_gym.internal.identity import identity_of
from rewardmodels import LearnedCritic, load_critic
from rewardmodels.data.dataset import graph_of
from rewardmodels.model.backbone import load_scalar, load_tokenizer
from rewardmodels.model.critic_folder import CriticInfo, save_folder
from search import ScoringContext

STATE = [ScoringContext(chain(["Facts: has 3."]), MODEL.mas, None)]
PLANTED = "raise SystemExit('code of a model folder ran')\n"


def save_critic(folder: Path, seed: int = 0) -> Path:
    base = save_base(folder.parent / f"{folder.name}-base", seed=seed)
    tokenizer = load_tokenizer(str(base))
    torch.manual_seed(seed)
    model = load_scalar(str(base), torch.float32, tokenizer.pad_token_id, new_head=True)
    graphs: dict[str, dict[str, object]] = {"rpsv": graph_of(MODEL.mas)}
    info = CriticInfo("masprm", "bt", "full", 512, graphs, ["arithmetic"], "tiny", {}, {}, {}, {"torch": "2"})
    save_folder(model, tokenizer, folder, info, "A critic that was not trained.")
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_critic(tmp_path_factory.mktemp("sound") / "critic")


@pytest.fixture
def folder(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage; any prompt on standard input fails the test."""

    def asked(*_: Any) -> str:
        raise AssertionError("asked on standard input")

    monkeypatch.setattr("builtins.input", asked)
    return Path(shutil.copytree(sound, tmp_path / "critic"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def test_critic_of_a_valid_folder_scores_a_state(folder: Path) -> None:
    assert len(load_critic(str(folder)).score(STATE)) == 1


def test_identity_depends_on_weights(folder: Path, tmp_path: Path) -> None:
    other = save_critic(tmp_path / "other", seed=1)
    before = load_critic(str(folder))
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    after = load_critic(str(folder))
    assert before.score(STATE) != after.score(STATE)
    assert identity_of(before) != identity_of(after)


def test_identity_depends_on_config_and_tokenizer(folder: Path) -> None:
    prints = [json.dumps(identity_of(load_critic(str(folder))))]
    change(folder / "config.json", rms_norm_eps=1e-3)
    prints.append(json.dumps(identity_of(load_critic(str(folder)))))
    change(folder / "tokenizer_config.json", pad_token="<|end|>")
    prints.append(json.dumps(identity_of(load_critic(str(folder)))))
    change(folder / "critic.json", max_length=256)
    prints.append(json.dumps(identity_of(load_critic(str(folder)))))
    (folder / "bpe.codes").touch()
    prints.append(json.dumps(identity_of(load_critic(str(folder)))))
    assert len(set(prints)) == 5
    assert identity_of(load_critic(str(folder), max_batch=2)) == identity_of(load_critic(str(folder)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("kind", value) for value in ("prm", "", None, [])),
        *(("head", value) for value in ("bce", None, ["bt"])),
        *(("view", value) for value in ("all", None)),
        *(("max_length", value) for value in ("512", 0, 63, None, True)),
    ],
)
def test_invalid_value_error_names_the_field(folder: Path, field: str, value: Any) -> None:
    change(folder / "critic.json", **{field: value})
    with pytest.raises(ConfigError, match=rf"{field}: expected .*, got "):
        load_critic(str(folder))


@pytest.mark.parametrize("field", ["schema", "text_format", *CriticInfo.__slots__])
def test_missing_field_error_names_the_field(folder: Path, field: str) -> None:
    path = folder / "critic.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    del data[field]
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(DataError, match=f"'{field}' is missing"):
        load_critic(str(folder))


@pytest.mark.parametrize("name", ["critic.json", "config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1]",
        "{",
        '"x"',
        "\x00" * 64,
        "\udcff",
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_file_that_is_not_a_json_object_is_rejected(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(MASGymError) as caught:
        load_critic(str(folder))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", ["NaN", "2", '"1"', "[1]"])
@pytest.mark.parametrize("field", ["schema", "text_format"])
def test_invalid_version_is_rejected(folder: Path, field: str, value: str) -> None:
    path = folder / "critic.json"
    path.write_text(path.read_text(encoding="utf-8").replace(f'"{field}": 1', f'"{field}": {value}'), encoding="utf-8")
    with pytest.raises(DataError, match="expected a critic of schema 1 and text format 1"):
        load_critic(str(folder))


def test_tokens_outside_the_vocabulary_raise_critic_error(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["model"]["vocab"] = {token: number + 5000 for token, number in data["model"]["vocab"].items()}
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(CriticError, match="tokenizer"):
        load_critic(str(folder)).score(STATE)


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": -1},
        {"hidden_size": "64"},
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"num_attention_heads": 7},
        {"vocab_size": 7},
        {"num_hidden_layers": 7},
        {"num_hidden_layers": -1},
        {"max_position_embeddings": None},
        {"rope_parameters": {"rope_type": "../x"}},
        {"layer_types": ["nonsense", "nonsense"]},
        {"hidden_act": "__import__('os')"},
        {"model_type": "no_such_model"},
        {"model_type": ["qwen2"]},
        {"model_type": "bert"},
        {"architectures": 3},
        {"dtype": "os.system"},
        {"quantization_config": {"quant_method": "nonsense"}},
        {"quantization_config": [1]},
    ],
)
def test_config_mismatched_with_weights_raises_typed_error(folder: Path, values: dict[str, Any]) -> None:
    change(folder / "config.json", **values)
    try:
        found = load_critic(str(folder)).score(STATE)
    except MASGymError as error:
        assert len(str(error)) < 1500
    else:
        assert all(map(math.isfinite, found))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, 5000, -1])
def test_truncated_weights_are_rejected(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DataError):
        load_critic(str(folder))


@pytest.mark.parametrize("name", ["critic.json", "config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file_is_reported(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DataError):
        load_critic(str(folder))


def test_symlinks_are_followed_and_identified_by_content(folder: Path, tmp_path: Path) -> None:
    """A hub cache contains links to files."""
    before = identity_of(load_critic(str(folder)))
    moved = tmp_path / "blob"
    (folder / "model.safetensors").rename(moved)
    (folder / "model.safetensors").symlink_to(moved)
    assert identity_of(load_critic(str(folder))) == before


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return (sys.exit, ("a pickle ran",))

    torch.save({"score.weight": Planted()}, folder / "pytorch_model.bin")
    with pytest.raises(DataError):
        load_critic(str(folder))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("known", [True, False])
def test_code_in_a_folder_is_not_executed(folder: Path, file: str, known: bool) -> None:
    for name in ("modeling_evil.py", "tokenization_evil.py", "configuration_evil.py", "__init__.py"):
        (folder / name).write_text(PLANTED, encoding="utf-8")
    auto_map = {
        "AutoConfig": "configuration_evil.Config",
        "AutoModelForSequenceClassification": "modeling_evil.Model",
        "AutoTokenizer": ["tokenization_evil.Slow", "tokenization_evil.Fast"],
    }
    change(folder / file, auto_map=auto_map, **({} if known else {"model_type": "evil", "tokenizer_class": "Evil"}))
    try:
        load_critic(str(folder)).score(STATE)
    except MASGymError as error:
        assert not known and ("never executed" in str(error) or "cannot load" in str(error))
    assert not any("evil" in name for name in sys.modules)


@pytest.mark.parametrize("name", ["critic.json", "config.json", "tokenizer_config.json", "tokenizer.json"])
def test_flipped_bytes_give_typed_error_or_scores(folder: Path, name: str) -> None:
    path, rng = folder / name, random.Random(name)
    whole = path.read_bytes()
    for _ in range(25):
        flipped = bytearray(whole)
        for _ in range(rng.choice([1, 2, 8])):
            flipped[rng.randrange(min(len(flipped), 4000))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            found = LearnedCritic(folder, device="cpu").score(STATE)
        except MASGymError as error:
            assert len(str(error)) < 2000
        else:
            assert all(map(math.isfinite, found))


def test_flipped_weight_bytes_change_the_identity(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    before = identity_of(LearnedCritic(folder, device="cpu"))
    rng = random.Random(0)
    for _ in range(15):
        flipped = bytearray(whole)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            critic = LearnedCritic(folder, device="cpu")
            assert identity_of(critic) != before
            critic.score(STATE)
        except (DataError, CriticError, ConfigError):
            continue
