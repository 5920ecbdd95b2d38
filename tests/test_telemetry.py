"""What other programs may watch a run by: JSON lines and Prometheus metrics, of real commands."""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

from ports import free_port
from search_worlds import HashCritic, chain, problems, talker
from typer.testing import CliRunner

import search
from mas_gym.cli import app
from mas_gym.errors import ConfigError, PolicyError
from mas_gym.policies.base import SamplingReply, SamplingRequest
from search.service import telemetry


@pytest.fixture
def port() -> int:
    return free_port()


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


@pytest.mark.slow
def test_eval_logs_every_search_and_serves_its_metrics(tmp_path: Path, port: int) -> None:
    log = tmp_path / "log.jsonl"
    found: list[dict[str, float]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                found.append(scrape(port))
            except OSError:
                time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    options = ["eval", "-n", "8", "--planner", "sc:2", "--seeds", "1,2", "--concurrency", "2"]
    result = CliRunner().invoke(app, [*options, "--log-json", str(log), "--metrics", str(port)])
    done.set()
    thread.join()
    assert result.exit_code == 0, result.output
    last = next(sample for sample in reversed(found) if any("mas_gym_agent_calls_total" in name for name in sample))
    calls = [value for name, value in last.items() if name.startswith("mas_gym_agent_calls_total")]
    assert 0 <= sum(calls) <= 2 * 8 * 8
    assert any('outcome="failed",run="sc:2"' in name for name in last)
    events = lines(log)
    assert [event["event"] for event in events if event["event"].startswith("run")] == ["run started", "run ended"] * 2
    ended = [event for event in events if event["event"] == "search ended"]
    assert len(ended) == 16 and sum(event["usage"]["agent_calls"] for event in ended) == 2 * 8 * 8
    assert {event["schema"] for event in events} == {telemetry.SCHEMA}
    assert not logging.getLogger("search").isEnabledFor(logging.INFO)
    with pytest.raises(OSError):
        scrape(port)


def test_failures_and_hostile_answers_are_logged(tmp_path: Path) -> None:
    class Failing:
        name, max_concurrency = "failing\n\x1b[2J", 4

        async def sample_async(self, request: SamplingRequest) -> SamplingReply:
            raise PolicyError('no luck\n{"event": "forged"}\x00\ud800')

    log = tmp_path / "log.jsonl"
    with telemetry.json_lines(log):
        list(search.run("single", problems(3), mas=chain(2), policy=Failing()))
    ended = [event for event in lines(log) if event["event"] == "search ended"]
    assert len(ended) == 3 and len(lines(log)) == 5
    assert all(event["level"] == "warning" and "no luck" in event["error"] for event in ended)


def test_stored_searches_are_marked_in_the_log(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with telemetry.json_lines(tmp_path / name):
            options: dict[str, Any] = {"policy": talker(), "critic": HashCritic(), "store": tmp_path / "runs.db"}
            list(search.run("mcts:3,2", problems(4), mas=chain(2), **options))
    for name, stored in (("first", False), ("second", True)):
        ended = [event for event in lines(tmp_path / name) if event["event"] == "search ended"]
        assert [event["stored"] for event in ended] == [stored] * 4


def test_used_port_is_reported(port: int) -> None:
    with telemetry.metrics(port), pytest.raises(ConfigError, match=rf"port {port} cannot be used"):
        telemetry.metrics(port).__enter__()
    with telemetry.metrics(port) as watch:
        watch("a", 1, search.Progress(total=3, done=2, correct=1, failed=1, open=1))
        now = scrape(port)
    assert now['mas_gym_searches_total{outcome="wrong",run="a",seed="1"}'] == 0
    assert now['mas_gym_searches_total{outcome="failed",run="a",seed="1"}'] == 1
    assert now['mas_gym_open_searches{run="a",seed="1"}'] == 1
    assert now['mas_gym_searches_wanted{run="a",seed="1"}'] == 3


def test_rollouts_are_logged(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    words = ["rollouts", "-n", "2", "--planner", "mcts:3,2", "--store", str(tmp_path / "r.db"), "--log-json", str(log)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert [event["event"] for event in lines(log)] == ["run started", "search ended", "search ended", "run ended"]
    assert lines(log)[0]["training"] is True
