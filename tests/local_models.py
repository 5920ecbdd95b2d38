"""Small random models with separate tokenizers, for tests that need a real model and no download."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mas_gym.policies.base import AsyncPolicy, SamplingReply, SamplingRequest

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>", "<s>"]
WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "el", "is", "op", "un")]
PAD, START, END, UNKNOWN, BOS = range(5)


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """Return a tokenizer of whole words, digits and signs (about 150 tokens)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *"\n 0123456789+-*/=.,:?!", "system", "user", "assistant", *WORDS]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|\d|[^\w\s]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        bos_token="<s>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=template,
    )


def config(kind: str = "Qwen2", **changes: Any) -> Any:
    """Return the configuration of a model with two layers and 64 hidden units."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": len(tokenizer()),
        "pad_token_id": PAD,
        "eos_token_id": END,
        "bos_token_id": BOS,
        "tie_word_embeddings": True,
    }
    shapes: dict[str, dict[str, Any]] = {
        "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
        "Bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
        "Mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    }
    usual = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
    }
    made = getattr(transformers, f"{kind}Config")(**{**common, **shapes.get(kind, usual), **changes})
    made.initializer_range = 0.25
    return made


def model(kind: str = "Qwen2", seed: int = 0, **changes: Any) -> Any:
    """Return a random model; every eighth word ends a message, so that messages have many lengths."""
    import torch
    import transformers

    torch.manual_seed(seed)
    lm = transformers.AutoModelForCausalLM.from_config(config(kind, **changes)).eval()
    lm.generation_config.eos_token_id = [END, *range(40, lm.config.vocab_size, 8)]
    lm.generation_config.pad_token_id = PAD
    return lm


def save(folder: Path, kind: str = "Llama", template: str | None = TEMPLATE, **changes: Any) -> Path:
    """Write a model folder that `mas_gym.policies.load_policy` can read.

    Not a Qwen2 one: for that kind transformers loads a tokenizer class that splits text in its own way.
    """
    model(kind, **changes).save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


def ask(policy: AsyncPolicy, requests: Sequence[SamplingRequest], at_once: int = 10**6) -> list[SamplingReply]:
    """Send requests together, or at most so many at once; the replies in order."""

    async def run() -> list[SamplingReply]:
        gate = asyncio.Semaphore(at_once)

        async def one(wanted: SamplingRequest) -> SamplingReply:
            async with gate:
                return await policy.sample_async(wanted)

        return await asyncio.gather(*(one(wanted) for wanted in requests))

    return asyncio.run(run())


def texts(replies: Sequence[SamplingReply]) -> list[list[str]]:
    """The messages of each reply."""
    return [[sample.text for sample in reply.samples] for reply in replies]
