"""Search trees and small models for the tests of reward models."""

from __future__ import annotations

import random
import sys
from functools import cache
from importlib.util import LazyLoader, find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import mas_gym
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.systems.state import Action, MASState
from rewardmodels import LabeledTree
from search import Tree

MODEL = Dynamics(mas_gym.load_mas("rpsv"))
VERBS = ("has", "finds", "buys", "loses", "gives")


def lazily(name: str) -> ModuleType:
    """Return a module that is imported at the first use of one of its names."""
    if name not in sys.modules:
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        loader = spec.loader = LazyLoader(spec.loader)
        sys.modules[name] = module_from_spec(spec)
        loader.exec_module(sys.modules[name])
    return sys.modules[name]


def grow(tree: Tree, parent: int, text: str, visits: int = 0, total: float = 0.0, model: Dynamics = MODEL) -> int:
    """Append a child with the message ``text`` to all, and return its index."""
    state = model.transition(tree.states[parent], Action(text, model.mas.ALL))
    node = tree.add(parent, state, None, model.is_terminal(state))
    tree.visits[node], tree.totals[node] = visits, total
    return node


def chain(texts: list[str], question: str = "How many coins?", model: Dynamics = MODEL) -> MASState:
    """Return the state after these messages."""
    state = model.initial_state(question)
    for text in texts:
        state = model.transition(state, Action(text, model.mas.ALL))
    return state


def sentence(rng: random.Random, good: bool) -> str:
    """Return a message; a good one finds something, a bad one loses it."""
    words = [f"{rng.choice(VERBS)} {rng.randrange(99)}" for _ in range(3)]
    words.insert(rng.randrange(4), "keep all" if good else "missing")
    return "Facts: " + ", ".join(words) + "."


def random_tree(number: int, simulations: int = 8, model: Dynamics = MODEL) -> LabeledTree:
    """Return a tree with terminal rewards that depend on whether most messages on the path are good."""
    rng = random.Random(number)
    tree = Tree(model.initial_state(f"Maya has {number} coins and finds {rng.randrange(99)}. How many now?"))
    for _ in range(simulations):
        node = 0
        while not tree.is_terminal(node):
            if not tree.children(node):
                for _ in range(3):
                    grow(tree, node, sentence(rng, rng.random() < 0.5), model=model)
            node = rng.choice(list(tree.children(node)))
        path = tree.path(node)
        good = sum("keep all" in tree.states[i].text for i in path[1:])
        for i in path:
            tree.visits[i] += 1
            tree.totals[i] += 1.0 if 2 * good >= len(path) - 1 else -1.0
    return LabeledTree(tree, model.mas, "arithmetic", f"arithmetic/train/{number}", 7)


@cache
def grove(count: int = 40) -> tuple[LabeledTree, ...]:
    """Return some random trees, the same each time."""
    return tuple(random_tree(number) for number in range(count))


def save_base(folder: Path, kind: str = "Qwen2", seed: int = 0, **changes: Any) -> Path:
    """Write a random decoder of two layers with the tiny model's tokenizer."""
    import torch
    import transformers

    from benchmarks.tiny.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**shape, **changes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def other_graph() -> MAS:
    """Return a graph with other agents than RPSV."""
    return mas_gym.load_mas("single")
