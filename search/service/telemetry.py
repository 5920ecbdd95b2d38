"""Telemetry: JSON lines in a file, Prometheus metrics over HTTP, and OpenTelemetry traces."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mas_gym.errors import ConfigError, need
from mas_gym.internal.json_types import JSONObject

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from prometheus_client.metrics_core import Metric

    from search.progress import Progress

SCHEMA = 1
"""Version of the lines written by `json_lines`, in the field ``schema``."""

ProgressListener = Callable[[str, int, "Progress"], None]
"""Called with a run's name, its seed and its latest snapshot."""

_OTLP = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_LOGGERS = ("search", "mas_gym")
_USAGE = ("agent_calls", "generated_tokens", "prompt_tokens", "cached_tokens", "reward_calls")


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: JSONObject = {
            "schema": SCHEMA,
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **vars(record).get("fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


@contextlib.contextmanager
def json_lines(file: Path | None) -> Iterator[None]:
    """Append log records of `search` and `mas_gym` at level INFO and above to a file, one JSON object per line."""
    if file is None:
        yield
        return
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(_Lines())
    before = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).setLevel(level)
        handler.close()


@contextlib.contextmanager
def metrics(port: int | None) -> Iterator[ProgressListener]:
    """Serve metrics at ``http://127.0.0.1:PORT/metrics`` and yield the function that updates them; None serves nothing.

    Raises:
        ConfigError: The port is in use.
        MissingDependencyError: prometheus_client is not installed.
    """
    if port is None:
        yield lambda run, seed, progress: None
        return
    client = need("prometheus_client", "counting metrics", "metrics")
    runs, registry = _Runs(), client.CollectorRegistry()
    registry.register(runs)
    try:
        server, thread = client.start_http_server(port, "127.0.0.1", registry)
    except OSError as error:
        raise ConfigError(f"--metrics: port {port} cannot be used ({error.strerror}); choose another") from error
    try:
        yield runs.watch
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def traces(target: str, content: bool = False) -> Iterator[None]:
    """Send the spans of all searches to a file, one JSON object per line, or, for ``"otlp"``, to a collector.

    The collector's address and headers are read from the standard ``OTEL_EXPORTER_OTLP_*`` variables.

    Args:
        target: A file to append to, or ``"otlp"``.
        content: Whether to record prompts and messages.

    Raises:
        MissingDependencyError: opentelemetry-sdk or, for ``"otlp"``, its exporter is not installed.
    """
    from search.tracing import trace

    need("opentelemetry.sdk", "recording traces", "telemetry")
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    with contextlib.ExitStack() as stack:
        exporter: SpanExporter
        if target == "otlp":
            exporter = need(_OTLP, "--traces otlp", "telemetry").OTLPSpanExporter()
        else:
            file = stack.enter_context(open(target, "a", encoding="utf-8"))
            exporter = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
        provider = TracerProvider(resource=Resource.create({"service.name": "mas-gym"}))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        stack.callback(provider.shutdown)
        with trace(provider, content=content):
            yield


def family(kind: str, name: str, values: Mapping[Any, float], labels: tuple[str, ...] = ()) -> Metric:
    """Return a ``"counter"`` or ``"gauge"`` called ``mas_gym_NAME`` with a value for each tuple of label values."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    made = make(f"mas_gym_{name}", name.replace("_", " "), labels=labels)
    for key, value in values.items():
        made.add_metric(key, value)
    return made


class _Runs:
    """The latest snapshot of each run, by its name and seed."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], Progress] = {}

    def watch(self, run: str, seed: int, progress: Progress) -> None:
        self._runs[run, str(seed)] = progress

    def collect(self) -> Iterator[Metric]:
        runs, labels = dict(self._runs), ("run", "seed")
        ended: dict[tuple[str, ...], float] = {}
        for key, now in runs.items():
            ended[*key, "right"] = now.correct
            ended[*key, "failed"] = now.failed
            ended[*key, "wrong"] = now.done - now.correct - now.failed
        yield family("counter", "searches", ended, (*labels, "outcome"))
        for name in _USAGE:
            yield family("counter", name, {key: asdict(now.usage)[name] for key, now in runs.items()}, labels)
        yield family("gauge", "open_searches", {key: now.open for key, now in runs.items()}, labels)
        yield family("gauge", "run_seconds", {key: now.usage.seconds for key, now in runs.items()}, labels)
        totals = {key: float(now.total) for key, now in runs.items() if now.total is not None}
        yield family("gauge", "searches_wanted", totals, labels)
