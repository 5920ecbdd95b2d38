"""Model folders from outside: loading one ends soon with a policy or a `PolicyError`, and runs no code of theirs."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import local_models

from mas_gym.errors import DataError, PolicyError
from mas_gym.policies import RecordingPolicy, SamplingRequest, ScriptedPolicy, load_policy
from mas_gym.policies.batch_queue import sample_all
from mas_gym.systems.prompts import ChatMessage

DEEP = "[" * 100_000
CODE = "import pathlib\npathlib.Path(__file__).with_name('ran').write_text('')\nraise SystemExit('ran')\n"
NESTED = '{"a":' * 50_000
BROKEN: dict[str, str | bytes] = {"deep": DEEP, "deep objects": NESTED, "empty": "", "bytes": bytes(range(256))}
SPLIT = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_models.save(tmp_path_factory.mktemp("models") / "sound", window=64)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def written(name: str, text: str | bytes) -> Callable[[Path], object]:
    data = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / name).write_bytes(data)


def changed(name: str, **change: Any) -> Callable[[Path], object]:
    def change_it(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | change))

    return change_it


def template(source: str) -> Callable[[Path], object]:
    return written("chat_template.jinja", source)


FAULTS: dict[str, Callable[[Path], object]] = {
    **{
        f"{name}: {kind}": written(name, text)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
        for kind, text in {
            "deep": DEEP,
            "deep objects": '{"a":' * 50_000,
            "empty": "",
            "bytes": bytes(range(256)),
        }.items()
        if (name, kind) not in (("generation_config.json", ""),)
    },
    "generation_config.json: deep": written("generation_config.json", DEEP),
    "config.json: a list": written("config.json", "[1]"),
    "config.json: a digit too many": written(
        "config.json", '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}"
    ),
    "config.json: of no model": changed("config.json", model_type="nothing"),
    "config.json: a type of lists": changed("config.json", model_type=[1]),
    "config.json: absurd heads": changed("config.json", num_attention_heads=10**12),
    "config.json: no heads": changed("config.json", num_attention_heads=0),
    "config.json: a width of words": changed("config.json", hidden_size="wide"),
    "config.json: a negative width": changed("config.json", hidden_size=-64),
    **{
        f"a window of {value!r}": changed("config.json", max_position_embeddings=value)
        for value in (-1, 0, 3, "long", 1.5, [64], True, 10**40)
    },
    **{
        f"end tokens of {value!r}": changed("generation_config.json", eos_token_id=value)
        for value in ("x", [["x"]], {"a": 1}, [2.5])
    },
    "weights: none": lambda folder: (folder / "model.safetensors").unlink(),
    "weights: empty": written("model.safetensors", b""),
    "weights: a header of absurd size": written("model.safetensors", b"\xff" * 64),
    "weights: a deep header": written("model.safetensors", len(DEEP).to_bytes(8, "little") + DEEP.encode()),
    "weights: cut": lambda folder: _cut(folder / "model.safetensors"),
    "weights: a pickle alone": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    "tokenizer.json: a null model": changed("tokenizer.json", model=None),
    "tokenizer.json: a broken regex": changed(
        "tokenizer.json",
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    ),
    "a template that refuses": template("{{ raise_exception('never') }}"),
    "a template without syntax": template("{% if %}"),
    "a template that nests": template("{{" + "(" * 5000 + ")" * 5000 + "}}"),
}


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("name", FAULTS)
def test_broken_folder_raises_typed_error(folder: Path, name: str) -> None:
    FAULTS[name](folder)
    with pytest.raises((PolicyError, DataError)) as caught:
        load_policy(f"transformers:{folder}")
    assert len(str(caught.value)) < 1500


TOLERATED: dict[str, Callable[[Path], object]] = {
    "nothing": lambda folder: None,
    "a tokenizer class of code": changed("tokenizer_config.json", tokenizer_class="os.system"),
    "an empty generation config": written("generation_config.json", b""),
    "a generation config of bytes": written("generation_config.json", BROKEN["bytes"]),
}


@pytest.mark.parametrize("name", TOLERATED)
def test_broken_optional_files_are_ignored(folder: Path, name: str) -> None:
    TOLERATED[name](folder)
    policy = load_policy(f"transformers:{folder}")
    request = SamplingRequest((ChatMessage("user", "ba be 1 + 2"),), (1,), max_new_tokens=4)
    assert policy.sample([request])[0].samples[0].tokens >= 1  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["model", "tokenizer"])
def test_code_in_a_folder_is_not_executed(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine.py").write_text(CODE)
    if kind == "model":
        change = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
        changed("config.json", model_type="mine", architectures=["Model"], auto_map=change)(folder)
    else:
        change = {"AutoTokenizer": ["mine.Tokenizer", "mine.Tokenizer"]}  # type: ignore[dict-item]
        changed("tokenizer_config.json", tokenizer_class="MineTokenizer", auto_map=change)(folder)
        changed("config.json", model_type="mine")(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    with pytest.raises(PolicyError):
        load_policy(f"transformers:{folder}")
    assert not list(folder.rglob("ran"))


def test_missing_tokenizer_is_not_requested_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", no_network)
    load_policy(f"transformers:{folder}")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(PolicyError):
        load_policy(f"transformers:{folder}")


@pytest.mark.parametrize(
    "change",
    [
        *({"tokens": value} for value in (10**30, -1, True)),
        *({"logprob": value} for value in (float("nan"), "x")),
        *({name: None} for name in ("text", "prompt_tokens", "dropped_tokens", "finish_reason")),
    ],
    ids=str,
)
def test_recorded_reply_fields_are_validated(tmp_path: Path, change: dict[str, Any]) -> None:
    request = SamplingRequest((ChatMessage("user", "?"),), (1,))
    file = tmp_path / "r.jsonl"
    sample_all(RecordingPolicy(ScriptedPolicy(lambda request, seed: "hi"), file), [request])
    header, line = file.read_text().splitlines()
    file.write_text(f"{header}\n{json.dumps(json.loads(line) | change)}\n")
    with pytest.raises(DataError, match="line 2"):
        load_policy(f"recorded:{file}")
