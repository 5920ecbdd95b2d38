"""Addresses with passwords and keys: none of them reaches an error, a name, an identity or a store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mas_gym
import search
from mas_gym.errors import ConfigError, DataNotFoundError, MASGymError, StoreError, shown, shown_url
from mas_gym.internal.identity import identity_of
from mas_gym.policies import load_policy
from mas_gym.programs import load_program
from rewardmodels import load_critic

SECRETS = ["me:hidden@", "me:hid@hidden@", "hidden@", "me:hid/hidden@", "me:hid?hidden@", "me:hid#hidden@"]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("query", ["", "?key=hidden", "#hidden"])
@pytest.mark.parametrize("scheme", ["http", "HTTPS", "ray"])
def test_shown_url_keeps_only_scheme_host_port_and_path(secret: str, query: str, scheme: str) -> None:
    assert shown_url(f"{scheme}://{secret}host:80/v1/x{query}") == f"{scheme}://host:80/v1/x"
    assert shown_url(f"a {scheme}://{secret}host:80/v1{query} b") == f"a {scheme}://host:80/v1 b"


def test_texts_without_secrets_are_unchanged() -> None:
    for text in ("openai:org/m@http://127.0.0.1:8000/v1", "me@example.org", "why? #1", "a@b http://c/d, e"):
        assert shown_url(text) == text


def test_every_error_hides_secrets() -> None:
    url = "http://me:hid@hidden@host/v1?key=hidden"
    for kind in (ConfigError, DataNotFoundError, StoreError):
        assert "hid" not in f"{kind(f'cannot read {url!r}')}" and "http://host/v1" in str(kind(url))
    assert "hid" not in shown({"a": [f"{'x' * 40}{url}"]}) + shown("http://me:" + "hidden" * 50 + "@host")


POLICIES = [
    "openai:m@http://me:hid@hidden@127.0.0.1:9/v1#patience=0.1&unknown=1",
    "openai:m@http://127.0.0.1:9/v1?key=hidden",
    "openai:m@HTTP://me:hidden@127.0.0.1:9/v1#unknown=1",
    "openai:m@http://me:hid/hidden@127.0.0.1:9/v1",
    "openai:m@http://me:hid#hidden@127.0.0.1:9/v1",
    "{A: 'openai:m@http://me:hidden@127.0.0.1:9/v1#unknown=1'}",
    "arms:openai:m@http://me:hidden@127.0.0.1:9/v1",
    "nosuch:http://me:hidden@127.0.0.1:9/v1",
    "openai:m@http://me:hid den@127.0.0.1:9/v1",
    "openai:m@http://me:hidden\t@127.0.0.1:9/v1",
    "openai:m@http:/me:hidden@127.0.0.1:9/v1",
    "openai:m@//me:hidden@127.0.0.1:9/v1",
    "openai:m@me:hidden@127.0.0.1:9/v1",
]
CRITICS = [
    "http://me:hidden@127.0.0.1:9/pooling",
    "http://127.0.0.1:9/pooling?key=hidden#model=m",
    "http://me:hidden@127.0.0.1:9/nosuch#model=m",
    "http://me:hid den@127.0.0.1:9/pooling#model=m",
    "http://me:hidden@127.0.0.1:9/pooling#model=m&unknown=1",
    "vote:http://me:hidden@127.0.0.1:9/pooling,random",
]
PROGRAMS = [
    "http://me:hidden@h:9/solve",
    "http://me:hid den@h/solve",
    "http://h:9/solve?key=hidden",
    "http://me:hid/den@h/solve",
]
KINDS = ((load_policy, POLICIES), (load_critic, CRITICS), (load_program, PROGRAMS))


@pytest.mark.parametrize(("load", "spec"), [(load, spec) for load, specs in KINDS for spec in specs])
def test_errors_about_specs_hide_secrets(load: Callable[[str], object], spec: str) -> None:
    with pytest.raises(MASGymError) as caught:
        load(spec)
    assert "hid" not in str(caught.value)


def test_store_of_a_failed_run_has_no_secret(tmp_path: Path) -> None:
    policy: Any = load_policy("openai:m@http://me:hid@hidden@127.0.0.1:9/v1#patience=0.1&logprobs=false")
    policy._served = {}
    task = mas_gym.load_task("arithmetic", limit=1)
    critic = search.ConstantCritic(0)
    with pytest.raises(MASGymError) as caught:
        list(search.run("bon:2", task, mas="single", policy=policy, critic=critic, store=tmp_path / "runs.db"))
    assert "hid" not in str(caught.value)
    assert not any(b"hid" in path.read_bytes() for path in tmp_path.iterdir())
    assert "hid" not in policy.name + str(identity_of(policy))


def test_identity_has_a_digest_in_place_of_a_query() -> None:
    one, other, none = (identity_of({"url": f"http://h/solve{end}"}) for end in ("?key=hidden", "?key=other", ""))
    assert one != other and one != none and none == {"url": "http://h/solve"}
    assert "hidden" not in str(one) and str(one).startswith("{'url': 'http://h/solve ")
