"""What policies state of themselves, and how the response cache goes by it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mas_gym.errors import ConfigError, EngineUnavailableError, IdentityError, PolicyError
from mas_gym.internal.identity import identity_of
from mas_gym.policies import RecordedPolicy, RecordingPolicy, ScriptedPolicy, load_policy
from mas_gym.policies.base import AsyncPolicy, SamplingReply, SamplingRequest
from mas_gym.policies.batch_queue import as_policy, sample_all
from mas_gym.policies.cache import CachedPolicy
from mas_gym.policies.model_files import ModelSource
from mas_gym.policies.vllm import VLLMEngine
from mas_gym.systems.prompts import ChatMessage

REQUEST = SamplingRequest((ChatMessage("user", "How many?"),), (1, 2), max_new_tokens=8)


def yes(request: SamplingRequest, seed: int) -> str:
    return f"yes {seed}"


def no(request: SamplingRequest, seed: int) -> str:
    return f"no {seed}"


def ask(policy: AsyncPolicy) -> SamplingReply:
    return asyncio.run(policy.sample_async(REQUEST))


def test_model_folder_identity_depends_on_all_its_content(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(range(256)) * 16384)
    first, second = (ModelSource(str(tmp_path / name)).identity() for name in ("a", "b"))
    assert first == second
    weights = tmp_path / "b" / "model.safetensors"
    for place in (0, 999_999, 2_097_153, 16384 * 256 - 1):
        with weights.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"\xee")
        os.utime(weights, ns=(0, place))
        changed = ModelSource(str(tmp_path / "b")).identity()
        assert changed not in (first, second)
        second = changed
    for name in ("merges.txt", "bpe.codes", "source.spm", "prophetnet.tokenizer", "modeling_custom.py"):
        (tmp_path / "b" / name).write_text("a b")
        changed = ModelSource(str(tmp_path / "b")).identity()
        assert changed != second
        second = changed


def test_adapter_with_pickled_weights_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        VLLMEngine("m", {}).add_adapter(str(tmp_path))


def test_weights_changed_after_loading_are_detected(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"old")
    source = ModelSource(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"newer")
    with pytest.raises(PolicyError, match="changed after the model was loaded"):
        source.identity()


def test_unchanged_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x" * 1000)
    first = ModelSource(str(tmp_path)).identity()
    monkeypatch.setattr("mas_gym.policies.model_files.file_digest", None)
    assert ModelSource(str(tmp_path)).identity() == first


def test_local_model_identity_contains_files_and_settings(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    import local_models

    folders = [local_models.save(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    stated = [identity_of(load_policy(f"transformers:{folder}", max_batch=8 + i)) for i, folder in enumerate(folders)]
    assert stated[0] == stated[1] != stated[2]
    for options in ({"window": 64}, {"exact": False}, {"chat_options": {"x": 1}}, {"dtype": "float64"}):
        assert identity_of(load_policy(f"transformers:{folders[0]}", **options)) != stated[0]


def test_scripted_policies_with_different_scripts_have_different_identities() -> None:
    assert identity_of(ScriptedPolicy(yes)) == identity_of(ScriptedPolicy(yes, max_batch=3))
    assert identity_of(ScriptedPolicy(yes)) != identity_of(ScriptedPolicy(no))
    scripts = [ScriptedPolicy(lambda request, seed: "a"), ScriptedPolicy(lambda request, seed: "b")]
    assert identity_of(scripts[0]) != identity_of(scripts[1])


def test_wrapper_has_the_identity_of_the_wrapped_policy(tmp_path: Path) -> None:
    policy = ScriptedPolicy(yes)
    cached = CachedPolicy(policy, tmp_path / "c.db")
    for wrapper in (as_policy(policy), cached, RecordingPolicy(policy, tmp_path / "r.jsonl")):
        assert identity_of(wrapper) == identity_of(policy)
    cached.close()


def test_per_agent_policy_identity_contains_the_mapping() -> None:
    one, other = ScriptedPolicy(yes), ScriptedPolicy(no)
    stated = [identity_of(load_policy(team)) for team in ({"A": one, "*": other}, {"*": other, "A": one})]
    assert stated[0] == stated[1]
    assert identity_of(load_policy({"A": other, "*": one})) not in stated


def test_recordings_with_different_samples_have_different_identities(tmp_path: Path) -> None:
    stated = []
    for name, script in (("a", yes), ("b", yes), ("c", no)):
        sample_all(RecordingPolicy(ScriptedPolicy(script), tmp_path / name), [REQUEST])
        stated.append(identity_of(RecordedPolicy(tmp_path / name)))
    assert stated[0] == stated[1] != stated[2]


class Unstated:
    """A policy whose samples depend on an object without an identity."""

    name, max_batch = "unstated", 8

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
        return list(ScriptedPolicy(yes).sample(requests))


def test_cache_rejects_policies_without_identity(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=r"Unstated with state; .*define identity\(\)"):
        CachedPolicy(Unstated(), tmp_path / "c.db")
    assert not (tmp_path / "c.db").exists()


def test_cache_keys_contain_the_identity(tmp_path: Path) -> None:
    for script, misses in ((yes, 2), (no, 2), (yes, 0)):
        policy = CachedPolicy(ScriptedPolicy(script), tmp_path / "c.db")
        assert [s.text for s in ask(policy).samples] == [script(REQUEST, 1), script(REQUEST, 2)]
        assert policy.misses == misses
        policy.close()


class TestServers:
    @pytest.fixture(autouse=True)
    def needs(self) -> None:
        pytest.importorskip("openai", reason="the openai package is not installed")
        pytest.importorskip("fastapi", reason="the fastapi package is not installed")

    def stated(self, url: str, **options: Any) -> Any:
        return identity_of(load_policy(f"openai:served@{url}/v1", **options))

    def test_server_identity_depends_on_the_model_and_not_on_the_address(self) -> None:
        from loopback import hash_policy, make_app, serving

        with serving(make_app(hash_policy())) as one, serving(make_app(hash_policy())) as two:
            stated = self.stated(one)
            assert self.stated(two) == stated == self.stated(one, timeout=3.0, price="1,1,1")
            for change in ({"revision": "2"}, {"api": "completions"}, {"extra_body": {"top_k": 3}}):
                assert self.stated(one, **change) != stated
        with serving(make_app(hash_policy(), window=4096)) as other:
            assert self.stated(other) != stated

    @pytest.mark.parametrize("listed", [None, [], {"data": None}, {"data": [{"id": "other"}]}, "text"])
    def test_server_without_model_list_is_identified_by_name(self, listed: Any) -> None:
        from fastapi import FastAPI
        from loopback import serving

        app = FastAPI()
        if listed is not None:
            app.add_api_route("/v1/models", lambda: listed)
        with serving(app) as url:
            assert self.stated(url)["identity"] | {"model": "served", "served": {}} == self.stated(url)["identity"]

    def test_unreachable_server_has_no_identity(self) -> None:
        with pytest.raises(EngineUnavailableError, match="did not respond"):
            self.stated("http://127.0.0.1:9", patience=0.2)
