"""The bundled tiny language model: a Qwen2 model with about two million parameters for seven shipped graphs.

`python -m benchmarks.tiny.train`, in the repository, trained it from scratch on transcripts of
Arithmetic and Ordering that contain errors by design. See ``weights/README.md``.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path


def path() -> Path:
    """Return the folder of the weights, which can be loaded with transformers' ``Auto`` classes and with vLLM."""
    return Path(__file__).parent / "weights"


def knows(question: str) -> bool:
    """Whether most words of a question are in the model's vocabulary; other words are tokenized byte by byte."""
    words = _WORD.findall(question)
    known = _words()
    return sum(word in known for word in words) > 0.8 * len(words)


@cache
def _words() -> frozenset[str]:
    tokens = json.loads((path() / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return frozenset(token["content"].strip() for token in tokens)


_WORD = re.compile(r"[^\W\d_]+")
GRAPHS = {"arithmetic": ("rpsv", "single", "refine", "consensus", "dylan"), "ordering": ("logic", "debate")}
"""The shipped graphs that the model was trained on, by task."""
