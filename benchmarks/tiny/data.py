"""Training data of the tiny model: whole transcripts, packed so that agents share the question."""

from __future__ import annotations

import random
import re
import string
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from benchmarks.tiny import graphs
from benchmarks.tiny.foreign import foreign_text, foreign_turns
from benchmarks.tiny.stories import Retold
from benchmarks.tiny.tokenizer import CONTEXT, END, OUT, SYSTEM, USER, role_token
from benchmarks.tiny.truth import queue_world, story_world
from benchmarks.tiny.turns import RoleTurn
from mas_gym.tasks.procedural.arithmetic import Arithmetic
from mas_gym.tasks.procedural.ordering import Ordering

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2Tokenizer

IGNORED = -100
POOL = 8
WIDTH = 240
NOISE = 0.05
SPELLED = 0.02
OTHER_WORDING = 0.3
PROMPTS = ("You are the {}.", "Act as the {}. Be brief.", "{}", "You are a good {}. Do your part and say no more.")


_Tasks: TypeAlias = Mapping[int, tuple[Arithmetic, Arithmetic, Ordering]]


class Packed(NamedTuple):
    """One problem with several agents' turns, as one row of a batch.

    Attributes:
        ids: Token ids: the question, then each turn's inputs, role and message.
        positions: Each token's position in the prompt it belongs to.
        segments: 0 for the question, 1, 2, .. for the turns.
        sees: Whether the token's turn sees the question.
        targets: The next token where it belongs to a message, `IGNORED` elsewhere.
    """

    ids: list[int]
    positions: list[int]
    segments: list[int]
    sees: list[bool]
    targets: list[int]


class Batch(NamedTuple):
    """Model inputs, shapes (B, T); the mask, shape (B, 1, T, T), is 0 where a token may look, else very negative."""

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor


def pack(question: str, turns: Sequence[RoleTurn], tokenizer: Qwen2Tokenizer, width: int | None = None) -> Packed:
    """Lay a question and its turns in one row; a turn attends to itself and, if it sees it, to the question.

    Args:
        question: The question.
        turns: Turns on that question.
        tokenizer: The tiny tokenizer.
        width: Leave out turns that would make the row longer than this, but never all.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    user, end = tokenizer.convert_tokens_to_ids([USER, END])
    ids = [user, *encode(question)]
    root = len(ids)
    packed = Packed(ids, list(range(root)), [0] * root, [True] * root, [IGNORED] * root)
    for number, turn in enumerate(turns, start=1):
        heard = "\n\n".join(turn.inputs)
        prompt = encode("\n\n" * bool(heard) + heard) if turn.sees_question else [user, *encode(heard)]
        message = [*encode(turn.text), end]
        system = role_token(turn.role) if turn.role else f"{SYSTEM}{turn.system}{OUT}"
        prompt += encode(system)
        row = [*prompt, *message]
        if width and number > 1 and len(packed.ids) + len(row) > width:
            continue
        start = root if turn.sees_question else 0
        packed.ids.extend(row)
        packed.positions.extend(range(start, start + len(row)))
        packed.segments.extend([number] * len(row))
        packed.sees.extend([turn.sees_question] * len(row))
        packed.targets.extend([IGNORED] * (len(prompt) - 1) + message + [IGNORED])
    return packed


def collate(rows: Sequence[Packed], pad: int) -> Batch:
    """Pad rows on the right and build the attention mask."""
    import torch

    # Few distinct shapes: matrix kernels are compiled and kept for each.
    width = -(-max(len(row.ids) for row in rows) // 16) * 16

    def fill(name: str, value: int) -> torch.Tensor:
        return torch.tensor([[*getattr(row, name), *[value] * (width - len(row.ids))] for row in rows])

    segments, sees = fill("segments", -1), fill("sees", 0).bool()
    same = segments[:, :, None] == segments[:, None, :]
    question = (segments == 0)[:, None, :] & sees[:, :, None]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    hidden = ~((same | question) & causal)[:, None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -1e4)
    return Batch(fill("ids", pad), fill("positions", 0), mask, fill("targets", IGNORED))


def batches(
    tokenizer: Qwen2Tokenizer, seed: int, size: int, start: int = 0, mix: graphs.Mix = graphs.DEFAULT_MIX
) -> Iterator[Batch]:
    """Yield endless batches; batch ``i`` depends on the seed and ``i`` alone, so that a resumed run changes nothing.

    Args:
        tokenizer: The tiny tokenizer.
        seed: Seed of the data.
        size: Problems per batch.
        start: Number of the first batch.
        mix: How often each difficulty and each graph occurs.
    """
    tasks: _Tasks = {
        level: (
            Arithmetic("train", seed=seed, difficulty=level),
            Retold("train", seed=seed, difficulty=level),
            Ordering("train", seed=seed, difficulty=level),
        )
        for level in mix.levels
    }
    return pooled(lambda rng: _row(tasks, mix, tokenizer, rng), tokenizer.pad_token_id, seed, size, start)


def pooled(draw: Callable[[random.Random], Packed], pad: int, seed: int, size: int, start: int) -> Iterator[Batch]:
    """Yield endless batches of rows; batch ``i`` depends on the seed and ``i`` alone.

    Args:
        draw: Draws one row.
        pad: Id of the padding token.
        seed: Seed of the data.
        size: Rows per batch.
        start: Number of the first batch.
    """
    number = start
    while True:
        rng = random.Random(f"pool/{seed}/{number // POOL}")
        rows = sorted((draw(rng) for _ in range(size * POOL)), key=lambda row: len(row.ids))
        # Rows of similar length share a batch, or a third of the work is padding; the order of the batches is drawn.
        order = rng.sample(range(POOL), POOL)
        for part in order[number % POOL :]:
            yield collate(rows[part * size : (part + 1) * size], pad)
            number += 1


def _row(tasks: _Tasks, mix: graphs.Mix, tokenizer: Qwen2Tokenizer, rng: random.Random) -> Packed:
    graph = rng.choices(list(mix.graphs), list(mix.graphs.values()))[0]
    if graph == graphs.FOREIGN:
        text = foreign_text(rng)
        return stretch(pack(text, foreign_turns(text, rng), tokenizer, WIDTH), rng)
    arithmetic, retold, ordering = tasks[rng.choices(list(mix.levels), list(mix.levels.values()))[0]]
    if graph in graphs.ORDERING_GRAPHS:
        problem = ordering[rng.randrange(len(ordering))]
        turns = graphs.ORDERING_GRAPHS[graph](queue_world(problem), rng)
    else:
        task = retold if rng.random() < OTHER_WORDING else arithmetic
        problem = task[rng.randrange(len(task))]
        turns = graphs.GRAPHS[graph](story_world(problem), rng)
    question = problem.question if rng.random() >= NOISE else add_noise(problem.question, rng)
    # Attention is quadratic in the width, so a row contains only a random subset of a long transcript's turns.
    rng.shuffle(turns)
    return pack(question, [_spell(turn, rng) for turn in turns], tokenizer, WIDTH)


def stretch(row: Packed, rng: random.Random) -> Packed:
    """Spread the positions of a row, so that distances up to the whole context occur in training without long rows."""
    room = CONTEXT - 1 - max(row.positions)
    if room < 2 or rng.random() < 0.4:
        return row
    jumps = sorted(rng.choices(range(max(row.positions) + 1), k=rng.randint(1, room)))
    return row._replace(positions=[position + bisect_right(jumps, position) for position in row.positions])


def add_noise(question: str, rng: random.Random) -> str:
    """Put a sentence of unknown words or large numbers into a question, so that the model meets text it cannot read."""
    words = []
    for _ in range(rng.randint(2, 6)):
        if rng.random() < 0.15:
            words.append(str(rng.randint(100, 99999)))
        else:
            words.append("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8))))
    sentences = question.split(". ")
    sentences.insert(rng.randrange(1, len(sentences)), " ".join(words).capitalize())
    return ". ".join(sentences)


def _spell(turn: RoleTurn, rng: random.Random) -> RoleTurn:
    """Now and then name the role in words, so that other system prompts than the shipped ones work too."""
    if turn.role is None or rng.random() >= SPELLED:
        return turn
    return turn._replace(role=None, system=rng.choice(PROMPTS).format(" ".join(re.findall("[A-Z][a-z]*", turn.role))))
