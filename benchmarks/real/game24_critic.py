"""Critics of the game of 24, trained only on outcomes of searches with random moves on other puzzles."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import mas_gym
from benchmarks.real.game24_text import read_left
from benchmarks.real.random_moves import proposer
from mas_gym.tasks.problem_task import ProblemTask
from mas_gym.tasks.procedural.game24 import Game24, Numbers, write_question
from rewardmodels import RewardData, collect, train
from rewardmodels.training.train_critic import Trained, grow, trees
from search.setup import RunSpec

PLANNER = "mcts:400,12"
SEED = 42
PUZZLES = 700
OTHERS = {0: 64, 1: 12, 2: 3, 3: 2}
"""Most states of a tree without a way to 24 to learn from, by depth."""


def training_task(recorded: Collection[tuple[int, ...]], limit: int = PUZZLES) -> ProblemTask:
    """Return the first puzzles of the training split that were not recorded."""
    kept = [problem for problem in Game24("train") if tuple(problem.metadata["numbers"]) not in recorded]
    return ProblemTask.of(kept[:limit], name="game24", split="train", mas="game24")


def training_data(task: ProblemTask, out: Path) -> RewardData:
    """Search the puzzles with random moves and the true reward, and mine every labeled state; the trees are stored."""
    out.mkdir(parents=True, exist_ok=True)
    spec = RunSpec(task, mas_gym.load_mas("game24"), proposer(), seed=SEED, store=out / "trees.db")
    stop = grow(spec, PLANNER, True)
    if stop is not None:
        raise stop
    return collect(trees(spec), "points")


# ------------------------------------------------------------------- tables


class Labeled(NamedTuple):
    """The numbers that are left, and whether the search found a way to 24 below."""

    left: Numbers
    found: bool


def labeled(data: RewardData) -> list[Labeled]:
    found = []
    for example in data.examples:
        left = read_left(example.chosen[-1])
        if left is not None:
            found.append(Labeled(left, example.chosen_target > -1.0))
    return found


def features(left: Sequence[Fraction]) -> list[float]:
    """Return numeric features of two or three numbers: the numbers, and the results of all pairs."""
    values = sorted(map(float, left))
    row = [*values, *[0.0] * (3 - len(values)), float(len(values))]
    pairs = list(combinations(values, 2))
    for a, b in pairs:
        row += [a + b, b - a, a * b, b / a if a else 0.0]
    row += [0.0] * (4 * (3 - len(pairs)))
    whole = [value == int(value) for value in values]
    return [*row, sum(values), float(np.prod(values)), float(sum(whole))]


class FeatureModel:
    """Gradient boosting on `features`: how likely the numbers that are left can make 24."""

    def __init__(self, rows: Sequence[Labeled], seed: int) -> None:
        from sklearn.ensemble import HistGradientBoostingClassifier

        model = HistGradientBoostingClassifier(max_iter=300, learning_rate=0.06, max_leaf_nodes=24, random_state=seed)
        self._model = model.fit(np.array([features(row.left) for row in rows]), [row.found for row in rows])

    def __call__(self, states: Sequence[Numbers]) -> NDArray[np.float64]:
        values: NDArray[np.float64] = self._model.predict_proba(np.array([features(left) for left in states]))[:, 1]
        return values


class Table:
    """The share of the searches that found a way to 24 from the same numbers; the mean share for unseen numbers."""

    def __init__(self, rows: Sequence[Labeled]) -> None:
        self.seen: Counter[Numbers] = Counter(row.left for row in rows)
        self._found: Counter[Numbers] = Counter(row.left for row in rows if row.found)
        self._mean = sum(self._found.values()) / max(len(rows), 1)

    def __call__(self, states: Sequence[Numbers]) -> NDArray[np.float64]:
        return np.array([self._found[s] / self.seen[s] if s in self.seen else self._mean for s in states])


# ------------------------------------------------------------------- MASPRM


def save_base(folder: Path, seed: int) -> None:
    """Save a small decoder with random weights and a tokenizer for the numbers and signs of the game."""
    import torch
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=alphabet, merges=[], unk_token="<|end|>", eos_token="<|end|>", pad_token="<|pad|>")
    legend = "Agents: 0 Step1, 1 Step2, 2 Step3, 3 Answer, 4 sink\n"
    question = write_question([1]).removesuffix(" 1")
    numbers = [f"{space}{sign}{n}" for n in range(200) for sign in ("", "-") for space in ("", " ")]
    plain = [legend, question, " (left:", ")\n", *(f" {sign}" for sign in "+-*/="), *numbers]
    kept = dict.fromkeys(token for token in plain if len(token) > 1)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in kept])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def states_to_learn(data: RewardData) -> RewardData:
    """Choose the states to learn from: those with a way to 24, and `OTHERS` of the others.

    The target is +1 if the search found a way to 24 below the state and -1 if not, in place of the paper's ``W / N``: a
    state is as good as its best continuation when proposals are searched.
    """
    groups = defaultdict(list)
    for example in data.examples:
        groups[example.tree, example.depth].append(example)
    kept = []
    for (_, depth), group in groups.items():
        kept += [example._replace(chosen_target=1.0) for example in group if example.chosen_target > -1.0]
        others = [example for example in group if example.chosen_target <= -1.0]
        others.sort(key=lambda example: hashlib.sha256("".join(example.chosen).encode()).digest())
        kept += others[: OTHERS[depth]]
    return replace(data, examples=tuple(kept))


def train_critic(data: RewardData, out: Path, seed: int) -> Trained:
    """Train MASPRM on a decoder with random weights."""
    base = out.with_name(f"{out.name}-base")
    if not (base / "config.json").exists():
        save_base(base, seed)
    settings = {"learning_rate": 2e-3, "epochs": 8.0, "batch_size": 64, "max_tokens": 512, "max_length": 256}
    return train(data, out, str(base), kind="masprm", head="mse", seed=seed, log=print, held_out=0.05, **settings)
