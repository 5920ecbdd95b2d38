"""Linear layers in bfloat16 on a CPU, for inference.

In every forward pass, torch rearranges the weights of a linear layer for the processor's matrix instructions. With the
few rows of a decode step, this takes a third of the layer's time. A packed layer stores its weights rearranged, in
place of the original ones. An output layer that shares its weights with the embeddings is in memory twice.
"""

from __future__ import annotations

import torch

from mas_gym.errors import PolicyError

_ROWS = 64
"""The number of rows that the arrangement of the weights is chosen for."""


def fast_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 matrices faster than float32 (AVX512-BF16, AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported())


class PackedLinear(torch.nn.Module):  # type: ignore[misc]
    """A linear layer with rearranged weights, which have no gradients and cannot be saved."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        """Rearrange a copy of a layer's weights, and take over its forward pre-hooks."""
        super().__init__()
        self.bias = layer.bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
        self._forward_pre_hooks = layer._forward_pre_hooks

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, equal to that of `torch.nn.Linear` up to the order of sums."""
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return found

    def _save_to_state_dict(self, *args: object) -> None:
        raise PolicyError(
            "expected a model with its original weights, got one in which they are rearranged for this processor; to "
            "save the model, load it with transformers"
        )


def pack_linear(model: torch.nn.Module) -> None:
    """Replace the linear layers of a model in bfloat16 on such a processor; other layers stay as they are."""
    if not fast_bfloat16():
        return
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            # Subclasses, such as quantized layers, compute something else.
            if type(layer) is torch.nn.Linear and layer.weight.dtype == torch.bfloat16 and layer.weight.is_cpu:
                setattr(parent, name, PackedLinear(layer))
