"""Decode steps as CUDA graphs.

A decode step of a model with half a billion parameters launches several hundred short kernels. Launching them one by
one takes longer than their execution; a graph launches all of them at once. The shapes and addresses of a graph are
fixed. Therefore the number of rows is padded to a multiple of `_ROWS`, attention reads all allocated columns of the
cache, and the column to write and the lengths of the rows are inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mas_gym.policies.local.slots import Slots

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

_ROWS = 64

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Cache"], torch.Tensor]


class _Graph(NamedTuple):
    """A step for a fixed number of rows: ``rows`` has their tokens and lengths, ``column`` the column to write."""

    rows: torch.Tensor
    column: torch.Tensor
    replay: Callable[[], None]
    logits: Callable[[], torch.Tensor]


class StepGraphs:
    """The decode steps of a model, one graph per padded number of rows.

    Args:
        forward: The model: token ids and positions ``[N, 1]``, mask ``[N, 1, 1, W]`` and cache to logits ``[N, V]``.
        device: The model's device. On a CPU, the same operations run without a graph.
    """

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._graphs: dict[int, _Graph] = {}
        self._memory: tuple[int, ...] = ()

    def step(self, tokens: npt.NDArray[np.int64], slots: Slots) -> torch.Tensor:
        """Feed each row its newest token; return logits ``[N, V]``, which the next step overwrites."""
        layers = slots.layers
        memory = (slots.capacity, *(part.data_ptr() for layer in layers for part in (layer.keys, layer.values)))
        if memory != self._memory:
            self._graphs, self._memory = {}, memory
        rows = min(-(-slots.n // _ROWS) * _ROWS, slots.rows)
        graph = self._graphs.get(rows)
        if graph is None:
            graph = self._graphs[rows] = self._graph(rows, slots)
        # Rows in the padding attend to the column that they write, because a row without a visible column gives NaN.
        host = np.zeros((2, rows), dtype=np.int64)
        host[0, : slots.n], host[1, : slots.n] = tokens, slots.lengths[: slots.n]
        graph.rows.copy_(torch.from_numpy(host))
        graph.column.fill_(slots.end)
        graph.replay()
        return graph.logits()[: slots.n]

    def _graph(self, rows: int, slots: Slots) -> _Graph:
        state = torch.zeros((2, rows), dtype=torch.int64, device=self._device)
        column = torch.full((1,), slots.end, device=self._device)
        cache = slots.cache
        assert cache is not None
        out: list[torch.Tensor] = []

        def run() -> None:
            ids, lengths = state
            places = torch.arange(slots.capacity, device=self._device)
            visible = (places <= column) & (places >= column - lengths[:, None])
            slots.column = column
            try:
                out[:] = [self._forward(ids[:, None], visible[:, None, None], lengths[:, None], cache)]
            finally:
                slots.column = None

        if self._device.type != "cuda":
            return _Graph(state, column, run, lambda: out[0])
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Libraries allocate their workspaces in the first calls, which a capture does not allow.
            for _ in range(2):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        return _Graph(state, column, graph.replay, lambda: out[0])
