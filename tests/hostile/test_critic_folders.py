"""Untrusted critic folders: loading always ends soon, in a typed error or in a critic that scores."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="learned critics need the extra 'train'")

import torch
from grove import MODEL, chain, save_base
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mas_gym.errors import ConfigError, CriticError, DataError, MASGymError
from mas_gym.internal.identity import identity_of
from rewardmodels import LearnedCritic, load_critic
from rewardmodels.data.dataset import graph_of
from rewardmodels.model.backbone import load_scalar, load_tokenizer
from rewardmodels.model.folder import CriticInfo, read_info, save_folder
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


def test_valid_folder_scores(folder: Path) -> None:
    assert len(load_critic(str(folder)).score(STATE)) == 1


def test_identity_depends_on_weights_not_on_json_fields(folder: Path, tmp_path: Path) -> None:
    other = save_critic(tmp_path / "other", seed=1)
    before = load_critic(str(folder))
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    after = load_critic(str(folder))
    assert before.score(STATE) != after.score(STATE)
    assert identity_of(before) != identity_of(after)
    change(folder / "critic.json", weights="0" * 32)
    assert identity_of(load_critic(str(folder))) == identity_of(after)


def test_identity_depends_on_config_and_tokenizer(folder: Path) -> None:
    prints = [json.dumps(identity_of(load_critic(str(folder))))]
    change(folder / "config.json", rms_norm_eps=1e-3)
    prints.append(json.dumps(identity_of(load_critic(str(folder)))))
    change(folder / "tokenizer_config.json", pad_token="<|end|>")
    prints.append(json.dumps(identity_of(load_critic(str(folder)))))
    change(folder / "critic.json", max_length=256)
    prints.append(json.dumps(identity_of(load_critic(str(folder)))))
    assert len(set(prints)) == 4
    assert identity_of(load_critic(str(folder), max_batch=2)) == identity_of(load_critic(str(folder)))


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


RPSV = graph_of(MODEL.mas)
ABSURD: dict[str, list[Any]] = {
    "kind": ["../../etc/passwd", "prm", "", 1, None, [], {"masprm": 1}, True, nested(300)],
    "head": ["bce", "../x", None, ["bt"], 0],
    "view": ["all", "/etc/passwd", None, ["full"], {}, 1.0],
    "max_length": ["512", 0, -1, 63, 10**9, 10**400, 512.0, True, None, [512]],
    "graphs": [
        [1],
        {},
        {"rpsv": [1]},
        {"rpsv": None},
        {"rpsv": {**RPSV, "agents": []}},
        {"rpsv": {**RPSV, "agents": [1]}},
        {"rpsv": {**RPSV, "agents": "Reader"}},
        {"rpsv": {**RPSV, "edges": [[0]]}},
        {"rpsv": {**RPSV, "edges": [[0, 10**30]]}},
        {"rpsv": {**RPSV, "edges": [["a", "b"]]}},
        {"rpsv": {**RPSV, "edges": [[0, 1, 2]]}},
        {"rpsv": {**RPSV, "edges": {"0": 1}}},
        {"rpsv": {**RPSV, "name": ["rpsv"]}},
        {"rpsv": {**RPSV, "max_turns": None}},
        {"rpsv": {**RPSV, "max_turns": 10**30}},
        {"rpsv": {**RPSV, "min_turns": 0}},
        {"rpsv": {**RPSV, "history": ["private"]}},
        {"rpsv": {**RPSV, "turns": 4}},
        {"rpsv": {"name": "rpsv"}},
        {"rpsv": nested(500)},
    ],
    "tasks": ["arithmetic", [1], None, {"a": 1}, ["x" * 10_000], ["\ud800"]],
    "base": ["/etc/passwd", "../../secret", "a/../b", "a/b/c", "..", "", 1, None, ["tiny"], "C:\\x", "x" * 5000],
    "settings": [[1], None, "x", 1],
    "data": [[1], None],
    "metrics": [[1], None, 0.5],
    "versions": [[1], {"torch": 2}, None, {"torch": {}}],
    "weights": ["/etc/passwd", "../model.safetensors", 1, None, [], "A" * 32, "0" * 31],
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name, values in ABSURD.items() for value in values])
def test_invalid_value_error_names_the_field(folder: Path, field: str, value: Any) -> None:
    change(folder / "critic.json", **{field: value})
    with pytest.raises(ConfigError, match=rf"{field}: expected .*, got .*\. Copy the critic's folder again") as caught:
        load_critic(str(folder))
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_all_faults_are_reported_together(folder: Path) -> None:
    change(folder / "critic.json", view="all", graphs=[1], max_length="long")
    with pytest.raises(ConfigError) as caught:
        load_critic(str(folder))
    assert [fault.partition(":")[0] for fault in caught.value.faults] == ["view", "max_length", "graphs"]


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
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"schema": ' + "9" * 100_000 + "}",
        "\x00" * 64,
        "\udcff",
    ],
)
def test_json_other_than_an_object_is_rejected(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(MASGymError) as caught:
        load_critic(str(folder))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", ["1e999999", "NaN", "-1", "true", '"1"', "[1]"])
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


def test_huge_description_is_rejected_unread(folder: Path) -> None:
    with (folder / "critic.json").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match="expected at most 16,777,216 bytes"):
        load_critic(str(folder))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most"),
        ({"num_hidden_layers": 10**12}, "31 bits"),
        ({"vocab_size": 10**18}, "31 bits"),
        ({"text_config": {"n_layer": 10**8}}, "n_layer: expected at most"),
        ({"num_labels": 10**9}, "num_labels: expected 1"),
        ({"_attn_implementation": "someone/kernel"}, "no path or repository"),
        ({"attn_implementation": {"": "someone/kernel"}}, "no path or repository"),
        ({"transformers_weights": "../other.safetensors"}, "no path or repository"),
    ],
)
def test_config_with_endless_or_external_parts_is_rejected(folder: Path, values: dict[str, Any], words: str) -> None:
    change(folder / "config.json", **values)
    with pytest.raises(ConfigError, match=words):
        load_critic(str(folder))


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": 10**9},
        {"hidden_size": -1},
        {"hidden_size": "64"},
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"num_attention_heads": 7},
        {"vocab_size": 10**9},
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


def test_weights_header_larger_than_the_file_is_rejected(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(DataError):
        load_critic(str(folder))


@pytest.mark.parametrize(
    "name", ["critic.json", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "device", "loop", "dangling"])
def test_special_files_are_rejected(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "dangling":
        path.symlink_to("/no/such/file")
    if (name, kind) == ("tokenizer_config.json", "missing"):
        load_critic(str(folder))
        return
    with pytest.raises(MASGymError):
        load_critic(str(folder))


def test_symlinks_are_followed_and_identified_by_content(folder: Path, tmp_path: Path) -> None:
    """A hub cache contains links to files."""
    before = identity_of(load_critic(str(folder)))
    moved = tmp_path / "blob"
    (folder / "model.safetensors").rename(moved)
    (folder / "model.safetensors").symlink_to(moved)
    assert identity_of(load_critic(str(folder))) == before


@pytest.mark.parametrize("target", ["../other/model.safetensors", "/else/model.safetensors", "absent.safetensors", 1])
def test_weights_index_outside_the_folder_is_rejected(folder: Path, target: Any) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"score.weight": target}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ConfigError, match="expected files of this folder"):
        load_critic(str(folder))


def test_adapter_with_external_base_model_is_rejected(folder: Path, tmp_path: Path) -> None:
    elsewhere = {"base_model_name_or_path": str(tmp_path / "elsewhere"), "peft_type": "LORA", "task_type": "SEQ_CLS"}
    (folder / "adapter_config.json").write_text(json.dumps(elsewhere), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"adapter_config\.json: expected merged weights"):
        load_critic(str(folder))


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(CriticInfo.__slots__), value=JSON)
def test_arbitrary_json_in_any_field_is_accepted_or_rejected(
    sound: Path, tmp_path: Path, field: str, value: Any
) -> None:
    data = json.loads((sound / "critic.json").read_text(encoding="utf-8"))
    (tmp_path / "critic.json").write_text(json.dumps({**data, field: value}), encoding="utf-8")
    try:
        info = read_info(tmp_path)
    except ConfigError as error:
        assert field in str(error)
    else:
        # NaN is not equal to itself.
        assert repr(getattr(info, field)) == repr(value)
