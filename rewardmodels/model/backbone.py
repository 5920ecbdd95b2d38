"""The scalar model: any decoder from ``transformers`` with a one-label head; ``V = tanh(logit)``.

The head reads the last token of a state. Training and scoring both run the model only through
`logits_at`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, need
from mas_gym.policies.model_files import import_models
from rewardmodels.data.encode import Tensors, collate, collate_plain, pack

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Relative errors of logits; in 16 bits, sums over a few dozen layers round differently by 3%.
_TOLERANCE, _LOW_PRECISION_TOLERANCE = 2e-2, 1e-1


def base_path(base: str) -> str:
    """Return the folder or hub id of a base; ``"tiny"`` is the bundled model."""
    if base == "tiny":
        import mas_gym.tiny

        return str(mas_gym.tiny.path())
    return base


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and the warning about a new head, which is expected here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer that can pad."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, **_source(folder))
    except Exception as error:
        raise _not_loaded(folder, "tokenizer", error) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _source(folder: str) -> dict[str, object]:
    """Return the options used for every load: code in a model's folder is never run, and local folders load offline."""
    return {"trust_remote_code": False, "local_files_only": Path(folder).is_dir()}


def load_scalar(
    folder: str, dtype: torch.dtype | str, pad: int, new_head: bool, quantization: BitsAndBytesConfig | None = None
) -> PreTrainedModel:
    """Load a model with a one-label head from a folder or hub id; with ``new_head``, the head may be missing.

    Raises:
        DataNotFoundError: There is no model there.
        DataError: The weights cannot be read, or the head is missing.
    """
    options: dict[str, Any] = {"num_labels": 1}
    if quantization is not None:
        options["quantization_config"] = quantization
    model, info = load_pretrained("AutoModelForSequenceClassification", folder, dtype, **options)
    missing = sorted(info["missing_keys"])
    if missing and not new_head:
        raise DataError(
            f"expected a trained critic in {folder}, got a model without a head (missing: "
            f"{', '.join(missing)[:200]}); pass the folder that training wrote, or train a critic "
            "from this model with --base"
        )
    if not hasattr(model, "score"):
        raise ConfigError(f"expected a decoder with a head named 'score', got {type(model).__name__} in {folder}")
    model.config.pad_token_id = pad
    model.score.register_forward_pre_hook(_in_own_dtype)
    return model


def _in_own_dtype(head: torch.nn.Linear, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Convert the hidden states of a backbone in 16 bits for a head in float32."""
    return inputs[0].to(head.weight.dtype), *inputs[1:]


def load_pretrained(
    kind: str, folder: str, dtype: torch.dtype | str, **options: object
) -> tuple[PreTrainedModel, dict[str, list[str]]]:
    """Load a transformers model from safetensors with a class such as ``"AutoModel"``, without running its code.

    Returns:
        The model, and the missing and unexpected keys of the weights.

    Raises:
        DataNotFoundError: There is no model there.
        DataError: The weights cannot be read.
    """
    import_models()
    import transformers
    from safetensors import SafetensorError

    common = {"dtype": dtype, "output_loading_info": True, "use_safetensors": True, **_source(folder)}
    try:
        with quiet():
            model, info = getattr(transformers, kind).from_pretrained(folder, **common, **options)
    except SafetensorError as error:
        raise DataError(
            f"cannot read the weights in {folder}, because a file is truncated or damaged ({error}); copy the folder "
            "again, or train the model again"
        ) from error
    except Exception as error:
        # A damaged config can cause any exception class in transformers.
        raise _not_loaded(folder, "model", error) from error
    return model, info


def _not_loaded(folder: str, what: str, error: Exception) -> Exception:
    if "trust_remote_code" in str(error):
        return DataError(
            f"the {what} in {folder} requires custom code, which is never executed; use an architecture that "
            "transformers implements"
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not Path(folder).exists():
        return DataNotFoundError(
            f"no {what} at {folder!r}: expected a local folder or a reachable hub id ({reason[:200]})"
        )
    return DataError(f"cannot load the {what} in {folder}: {reason[:300]}")


def quantize_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the config for NF4 with double quantization (paper, App. "MASPRM model and optimization")."""
    from transformers import BitsAndBytesConfig

    need("bitsandbytes", "4-bit training")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["score"],
    )


def keep_layout(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking 4-bit weights for the CPU: repacked weights cannot be trained."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def add_lora(model: PreTrainedModel, rank: int, alpha: int, dropout: float) -> PreTrainedModel:
    """Add LoRA adapters to every linear layer; the head is trained in full."""
    peft = need("peft", "LoRA")
    if getattr(model, "is_quantized", False):
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="all-linear",
        modules_to_save=["score"],
    )
    return peft.get_peft_model(model, config)


def inner(model: PreTrainedModel) -> PreTrainedModel:
    """Return the transformers model inside wrappers of accelerate and peft."""
    model = getattr(model, "module", model)
    return model.get_base_model() if has_adapters(model) else model


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether a model is a peft model, which wraps the transformers model."""
    return hasattr(model, "get_base_model")


def window_of(config: PretrainedConfig) -> int | None:
    """Return the maximum number of tokens of a transformers model; None if its config specifies no limit."""
    window = getattr(config, "max_position_embeddings", None)
    return window if isinstance(window, int) and window > 0 else None


def logits_at(model: PreTrainedModel, batch: Tensors) -> torch.Tensor:
    """Return the head's logits at the end of each state, shape (K,), in float32 (float64 for a float64 model)."""
    return read_head(model, hidden_at(model, batch))


def hidden_at(model: PreTrainedModel, batch: Tensors) -> torch.Tensor:
    """Return the last hidden states at the end of each state, shape (K, hidden size)."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    out = model(**inputs, use_cache=False, output_hidden_states=True)
    hidden: torch.Tensor = out.hidden_states[-1][batch["rows"], batch["columns"]]
    return hidden


def read_head(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Return the head's logits for last hidden states of shape (K, hidden size)."""
    logits: torch.Tensor = inner(model).score(hidden)[:, 0]
    # float64 is kept, because it is used when results must not depend on the batch.
    return logits if logits.dtype.itemsize == 8 else logits.float()


def to_device(batch: Tensors, device: torch.device) -> Tensors:
    """Move a batch to a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def alike(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether logits are equal up to rounding in a model of this dtype."""
    tolerance = _TOLERANCE if dtype.itemsize >= 4 else _LOW_PRECISION_TOLERANCE
    return float((logits - expected).abs().max()) < tolerance * max(1.0, float(expected.abs().max()))


def probe(model: PreTrainedModel) -> list[list[tuple[int, ...]]]:
    """Return three states with shared prefixes, as token ids, on which a model's attention can be tested."""
    size = int(inner(model).config.get_text_config().vocab_size)
    ids = [1 + i * 7919 % (size - 1) for i in range(24)]
    first, second, third, fourth = tuple(ids[:8]), tuple(ids[8:13]), tuple(ids[13:20]), tuple(ids[20:])
    return [[first, second], [first, third], [first, third, fourth]]


def can_share(model: PreTrainedModel, pad: int) -> bool:
    """Return whether the model computes equal logits for packed and separate states, and can be trained on packed ones.

    Decoders with full causal attention satisfy this; it is tested, not assumed.
    """
    import torch

    states = probe(model)
    training, weight = model.training, inner(model).score.weight
    model.eval()
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    try:
        with torch.inference_mode():
            whole = logits_at(model, to_device(collate_plain(states, pad), weight.device))
            shared = logits_at(model, to_device(collate([pack(states)], pad, dtype), weight.device))
        return alike(shared, whole, dtype)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return False
    finally:
        model.train(training)
