"""Record OpenTelemetry spans of a search: one per search, agent call and score.

Run ``python examples/trace_search.py``; it needs ``pip install 'mas-gym[telemetry]'``. Here the spans are printed as an
outline. With an OTLP exporter they go to any tracing tool.
"""

from collections import Counter

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import mas_gym
import search
from mas_gym.policies import load_policy
from search.tracing import trace


def main() -> None:
    """Trace one search and print its spans."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    task, policy = mas_gym.load_task("arithmetic", limit=1), load_policy("tiny")
    with trace(provider):
        list(search.run("sbs:3,1", task, mas="rpsv", policy=policy, critic=search.PolicyLikelihood()))

    spans = exporter.get_finished_spans()
    print(Counter(span.name for span in spans))
    for span in spans:
        if span.name.startswith("chat"):
            agent, tokens = span.attributes["gen_ai.agent.name"], span.attributes["gen_ai.usage.output_tokens"]
            print(f"{agent:9} {tokens} tokens, {(span.end_time - span.start_time) / 1e6:.0f} ms")


if __name__ == "__main__":
    main()
