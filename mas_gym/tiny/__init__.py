"""The embedded tiny language model: a Qwen2 of about two million parameters that plays every shipped graph.

`python -m benchmarks.tiny.train`, in the repository, trained it from scratch on transcripts of
the two procedural tasks, whose writers err by design. See ``weights/README.md``.
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Return the folder of the weights, which loads with transformers' ``Auto`` classes and with vLLM."""
    return Path(__file__).parent / "weights"


__all__ = ["path"]
