"""Folders and stores from other people: they name nothing outside, and wrong types are typed errors."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import mas_gym
import search
from mas_gym import tiny
from mas_gym.cli.view import Pages
from mas_gym.errors import ConfigError, DataError, MASGymError, StoreError
from mas_gym.policies import ScriptedPolicy, load_policy
from mas_gym.systems.dynamics import Dynamics
from rewardmodels import load_critic
from rewardmodels.model.feature_critic import FEATURES, FeatureModel
from rewardmodels.tiny_critics import TINY_MASPRM
from search.calibrated_critics import Curve
from search.protocol import ScoringContext
from search.store.search_rows import seal_run
from search.store.table_schema import CHECKSUM, FORMAT, digest

INDEX = "model.safetensors.index.json"


def changed(folder: Path, name: str, change: Callable[[Any], object]) -> None:
    path = folder / name
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(change(data)), encoding="utf-8")


def with_entry(place: str, value: object) -> Callable[[Any], object]:
    def change(data: Any) -> object:
        inside = data
        *path, last = place.split("/")
        for key in path:
            inside = inside.setdefault(key, {})
        inside[last] = value
        return data

    return change


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        *((INDEX, "weight_map", {"a": name}) for name in ("../x.safetensors", "/x.safetensors", "sub/x.safetensors")),
        *((INDEX, "weight_map", {"a": name}) for name in ("x.bin", "x.safetensors/../y.bin", "c:x.safetensors", 3)),
        *((INDEX, "weight_map", value) for value in (["x.safetensors"], "x.safetensors")),
        ("adapter_config.json", "base_model_name_or_path", "org/other"),
        ("config.json", "transformers_weights", "../x.safetensors"),
        ("config.json", "transformers_weights", "other.safetensors.index.json"),
        *(("config.json", "attn_implementation", kind) for kind in ("org/kernel", {"": "org/kernel"}, "org/k@1:f")),
        ("config.json", "text_config/_attn_implementation", "org/kernel"),
        ("config.json", "_experts_implementation", "sonicmoe"),
        ("tokenizer_config.json", "tokenizer_file", "/etc/hostname"),
        ("tokenizer_config.json", "init/vocab_file", "../other/config.json"),
        ("tokenizer_config.json", "fast_tokenizer_files", ["tokenizer.json", "../other/tokenizer.json"]),
        ("tokenizer_config.json", "vocab_file", "vocab.dat"),
        ("tokenizer_config.json", "model_max_length", []),
    ],
)
@pytest.mark.parametrize("kind", ["policy", "critic", "published"])
def test_model_folder_that_names_another_place_is_rejected(
    kind: str, name: str, place: str, value: object, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY_MASPRM, folder)
    shutil.copytree(TINY_MASPRM, tmp_path / "other")
    (folder / "vocab.dat").touch()
    changed(folder, name, with_entry(place, value))
    with pytest.raises((ConfigError, DataError), match=name.replace(".", r"\.")):
        if kind == "policy":
            load_policy(f"transformers:{folder}")
        else:
            load_critic(str(folder) if kind == "critic" else f"rm:{folder}")


def test_sharded_model_and_paths_of_the_author_load(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.path(), folder)
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    changed(
        folder,
        INDEX,
        lambda data: {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")},
    )
    changed(folder, "tokenizer_config.json", with_entry("tokenizer_file", "/home/author/tokenizer.json"))
    assert load_policy(f"transformers:{folder}").name == "model"


CURVE = Curve(*[(1.0,) * len(FEATURES)] * 3)
FEATURE_MODEL = FeatureModel("masprm", CURVE, {"states": 1}, {"auc": 1.0}).to_dict()


@pytest.mark.parametrize("place", ["kind", "mean", "scale", "weights", "bias"])
@pytest.mark.parametrize("value", [None, 3, "x", [], [None], {"a": 1}, ["x"], 1e400])
def test_feature_critic_with_wrong_types_raises_data_error(place: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "features.json").write_text(json.dumps(FEATURE_MODEL | {place: value}), encoding="utf-8")
    context = ScoringContext(Dynamics(mas_gym.load_mas("rpsv")).initial_state("Q?"), mas_gym.load_mas("rpsv"), None)
    if (place, value) == ("bias", 3):
        load_critic(str(tmp_path)).score([context])
    else:
        with pytest.raises(DataError):
            load_critic(str(tmp_path)).score([context])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("graphs", 1),
        ("graphs", {"rpsv": [1]}),
        ("graphs", {"rpsv": {"name": "rpsv", "agents": 3, "edges": []}}),
        ("tasks", True),
        ("tasks", [3]),
        ("settings", []),
        ("metrics", "x"),
        ("versions", None),
        ("base", {}),
        ("max_length", "9"),
        ("view", []),
    ],
)
def test_critic_with_wrong_types_raises_a_typed_error(place: str, value: object, tmp_path: Path) -> None:
    shutil.copytree(TINY_MASPRM, tmp_path / "critic")
    changed(tmp_path / "critic", "critic.json", with_entry(place, value))
    with pytest.raises(MASGymError, match=r"critic\.json"):
        load_critic(str(tmp_path / "critic"), lazy=True)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "runs.db"
    policy = ScriptedPolicy(lambda request, seed: "Final Answer: 3")
    list(search.run("sc:2", mas_gym.load_task("arithmetic", limit=2), mas="single", policy=policy, store=path))
    return path


@pytest.mark.parametrize(
    ("column", "place", "value"),
    [
        *(("config", place, value) for place in ("policy", "mas", "critic") for value in ("x", 3, [1], {"name": 3})),
        *(("config", "seed", value) for value in ("x", [1], None, 1.5)),
        *(("config", "policy", value) for value in (None, {}, [])),
        *(("facts", "spent", value) for value in ("x", [1], {"nosuch": 1}, {"seconds": "x"})),
        *(("facts", "started", value) for value in (None, 3, [1])),
        ("facts", "planner", 3),
        *((column, None, value) for column in ("config", "facts") for value in ([], [3], None)),
    ],
)
def test_run_with_wrong_types_raises_store_error(
    column: str, place: str | None, value: object, stored: Path, tmp_path: Path
) -> None:
    path = tmp_path / "runs.db"
    shutil.copy(stored, path)
    with closing(FORMAT.connect(path, create=False)) as connection:
        [run, text] = connection.execute(f"SELECT run, {column} FROM runs").fetchone()
        text = json.dumps(value if place is None else with_entry(place, value)(json.loads(text)))
        new = digest(text).hex() if column == "config" else run
        connection.execute(f"UPDATE runs SET run = ?, {column} = ?", (new, text))
        connection.execute("UPDATE searches SET run = ?", (new,))
        connection.execute(f"UPDATE searches SET checksum = {CHECKSUM}")
        seal_run(connection, new)
    with search.open_store(path) as store, pytest.raises(StoreError, match="damaged"):
        store.runs()
    for page, query in (("/", {}), ("/problems", {"a": new[:8]}), (f"/tree/{new}", {"problem": "x"})):
        with pytest.raises(MASGymError):
            Pages(path).page(page, query)
