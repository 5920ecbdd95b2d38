"""Temperatures near 0 decode greedily everywhere; invalid temperatures are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import search
from mas_gym.errors import ConfigError
from mas_gym.policies.base import MIN_TEMPERATURE, SamplingRequest, effective_temperature
from mas_gym.systems.prompts import ChatMessage

TINY = (1e-300, 5e-324, 1e-40, 1e-9, 0.0099)


def request(temperature: Any) -> SamplingRequest:
    return SamplingRequest((ChatMessage("user", "?"),), (3, 4), max_new_tokens=8, temperature=temperature)


@pytest.mark.parametrize("value", TINY)
def test_temperature_near_0_rounds_to_0_in_requests_and_sampling(value: float) -> None:
    assert request(value) == request(0.0)
    assert search.Sampling(temperature=value) == search.Sampling(temperature=0.0)


@pytest.mark.parametrize("value", [-1e-300, -1, float("nan"), float("inf"), 101, 10**400, True, "0.5", None, [0.5]])
def test_temperature_rejects_values_other_than_numbers_from_0_to_100(value: Any) -> None:
    for take in (request, lambda given: search.Sampling(temperature=given)):
        with pytest.raises(ConfigError, match="temperature from 0 to 100, got"):
            take(value)


@given(st.floats(0, 100) | st.integers(0, 100))
def test_temperature_keeps_valid_numbers_or_rounds_to_0(value: float) -> None:
    assert effective_temperature(value) == (value if value >= MIN_TEMPERATURE else 0)


@pytest.mark.parametrize("value", [*TINY, 0.0])
def test_engine_samples_greedily_at_temperature_near_0(value: float) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from mas_gym.policies.local.decode import draw

    logits = torch.tensor([[1.0, 3.0, -200.0, 2.99], [5e3, -5e3, 4e3, 0.0]])
    uniform = np.array([0.0, 0.999999])
    drawn = draw(logits, np.full(2, value), np.full(2, 0.95), uniform, 0.0)
    assert drawn.tokens.tolist() == [1, 0]
    assert np.isfinite(drawn.logprobs).all()


def test_lowest_sampling_temperature_gives_valid_text() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from mas_gym.policies.local.decode import draw

    logits = torch.tensor([[30.0, 30.0, -30.0, 29.0]] * 64)
    uniform = np.arange(64) / 64
    drawn = draw(logits, np.full(64, MIN_TEMPERATURE), np.full(64, 1.0), uniform, 0.0)
    assert set(drawn.tokens.tolist()) == {0, 1}
