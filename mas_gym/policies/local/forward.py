"""Forward passes of a causal LM.

`CausalModel` encodes prompts in batches, decodes one token for every row, and computes a float64 reference for one row.
Notation: N rows in use, H heads, W visible columns, D head size, V vocabulary.

`threads_for` sets the number of CPU threads of a model. By default torch uses one thread
per core, and threads that wait for each other busy-wait. The operations of a small model are
too short to parallelize: on an idle machine, more threads gain little, and with other processes
running, most of the threads' CPU time is wasted. A large model uses the cores that are idle.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicCache

from mas_gym.errors import PolicyError
from mas_gym.internal.idle_cores import IdleCores
from mas_gym.policies.local.attention import share_keys
from mas_gym.policies.local.packed_linear import pack_linear
from mas_gym.policies.local.prefix_store import EncodedPrompt, PrefixStore, gathered
from mas_gym.policies.local.slots import Prefilled, Slots
from mas_gym.policies.local.step_graphs import StepGraphs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Sizes(NamedTuple):
    """Sizes that depend on the device.

    Attributes:
        growth: Columns by which the memory of a batch grows.
        prefill: Largest number of prompt tokens in a forward pass.
        overhead: Fixed cost of a forward pass, in tokens.
    """

    growth: int
    prefill: int
    overhead: int


# The intermediate results of a longer prefill leave the cache of a processor: 4,096 tokens are a fifth slower.
_PROCESSOR = Sizes(growth=64, prefill=1024, overhead=32)
# A GPU encodes some thousand tokens in the time in which the kernels of one forward pass are launched.
_GPU = Sizes(growth=256, prefill=65_536, overhead=4096)


SMALL_MODEL = 50_000_000
"""Models of up to this many parameters get one thread."""

_CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_cores = IdleCores()


@contextmanager
def threads_for(parameters: int, threads: int | None = None) -> Iterator[None]:
    """Context manager that sets torch's thread count for this thread; wrap forward passes and training in it.

    Args:
        parameters: The model's number of parameters.
        threads: The number of threads. By default one for a model of up to `SMALL_MODEL` parameters. Larger models get
            torch's default without one thread for each core that other processes use. If ``OMP_NUM_THREADS`` or
            ``MKL_NUM_THREADS`` is set, torch's default is used for all models.
    """
    before = torch.get_num_threads()
    if threads is not None:
        wanted = threads
    elif any(name in os.environ for name in _CHOSEN):
        wanted = before
    elif parameters > SMALL_MODEL:
        wanted = max(1, before - _cores.others())
    else:
        wanted = 1
    if before == wanted:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CausalModel:
    """A causal LM with the two calls that decoding needs, and a float64 copy that resolves ambiguous samples."""

    def __init__(self, model: PreTrainedModel, *, exact: bool) -> None:
        """Wrap ``model``; ``exact`` enables the float64 reference."""
        self.model = model
        self.device = model.device
        self.exact = exact
        self._reference: Any = None
        share_keys(model)
        head = model.get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(_adjacent)
        pack_linear(model)
        accepted = inspect.signature(model.forward).parameters
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._positions = "position_ids" in accepted
        # A shared prefix leaves unused columns, which a sliding window would count as tokens.
        self.shares = not any(DynamicCache(config=model.config).is_sliding)
        gpu = self.device.type == "cuda"
        self.sizes = _GPU if gpu else _PROCESSOR
        graphs = gpu and self.shares and self._positions
        self.graphs = StepGraphs(self._forward, self.device) if graphs else None

    def prefill(self, prompts: Sequence[list[int]], store: PrefixStore | None = None) -> tuple[torch.Tensor, Prefilled]:
        """Encode prompts together and return the next-token logits ``[n, V]``.

        The batch is ``[shared prefixes, right-aligned | the rest, left-padded]``; only the rest is computed.
        """
        found = [store.longest(p) if store is not None else (None, 0) for p in prompts]
        cache, shared = gathered(found)
        lengths, begun = np.array([len(p) for p in prompts]), np.array([length for _, length in found])
        rest = int((lengths - begun).max())
        ids = np.zeros((len(prompts), rest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, rest - lengths[row] + begun[row] :] = prompt[begun[row] :]
        # Column and position of each token: the prefix ends at `shared`, the rest at `shared + rest`.
        place = np.arange(-int(lengths.max()), 0) + lengths[:, None]
        early = place < begun[:, None]
        columns = place + np.where(early, shared - begun[:, None], shared + rest - lengths[:, None])
        mask = np.zeros((len(prompts), shared + rest), dtype=np.int64)
        rows, at = np.nonzero(place >= 0)
        mask[rows, columns[rows, at]] = 1
        positions = np.maximum(np.arange(-rest, 0) + lengths[:, None], 0)
        inputs = [torch.from_numpy(array).to(self.device) for array in (ids, mask, positions)]
        logits = self._forward(inputs[0], inputs[1], inputs[2], cache)
        prefilled = Prefilled(cache, lengths, np.maximum(columns, 0))
        if store is not None:
            for row, prompt in enumerate(prompts):
                entry = found[row][0]
                if entry is None or entry.tokens != prompt:
                    store.add(_kept(prompt, prefilled, row))
        return logits, prefilled

    def decode(self, tokens: npt.NDArray[np.int64], slots: Slots) -> torch.Tensor:
        """Feed each row its newest token; return the next-token logits ``[N, V]``."""
        slots.make_room()
        if self.graphs is not None:
            logits = self.graphs.step(tokens, slots)
        else:
            mask, positions = slots.view(self.device)
            ids = torch.from_numpy(tokens[:, None].copy()).to(self.device)
            logits = self._forward(ids, mask, positions, slots.cache)
        slots.advance()
        return logits

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        extra = {"position_ids": positions} if self._positions else {}
        out = self.model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra, **self._last
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def has_reference(self) -> bool:
        """Return whether the model runs in float64; some kernels, such as those of mixtures of experts, do not."""
        try:
            with torch.inference_mode():
                return bool(torch.isfinite(self.reference([0, 1], 1)).all())
        except (RuntimeError, TypeError, ValueError):
            return False

    def reference(self, ids: list[int], last: int) -> torch.Tensor:
        """Return float64 logits ``[last, V]`` at the last positions of one sequence, unbatched and unpadded."""
        if self._reference is None:
            self._reference = deepcopy(self.model).double()
        keep = {"logits_to_keep": last} if self._last else {}
        out = self._reference(input_ids=torch.tensor([ids], device=self.device), use_cache=False, **keep)
        logits: torch.Tensor = out.logits[0, -last:]
        return logits


def _adjacent(head: object, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Copy a slice of hidden states; torch on a CPU would multiply its vectors one by one, 30 times slower."""
    return (inputs[0].clone(memory_format=torch.contiguous_format), *inputs[1:])


def _kept(prompt: list[int], prefilled: Prefilled, row: int) -> EncodedPrompt:
    layers = prefilled.cache.layers
    at = torch.from_numpy(prefilled.columns[row, -len(prompt) :]).to(layers[0].keys.device)
    return EncodedPrompt(prompt, [tuple(t[row].index_select(1, at) for t in (la.keys, la.values)) for la in layers])


def check_padding(model: CausalModel, vocabulary: int) -> None:
    """Check that batched decoding with padding agrees with decoding one row at a time.

    Disables `CausalModel.shares` if only prefix sharing gives wrong results.

    Raises:
        PolicyError: The results disagree, as with architectures whose state is more than keys and values.
    """
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, vocabulary, size).tolist() for size in (5, 19, 3)]
    following = generator.integers(0, vocabulary, 3)
    longer = [[*p, int(t)] for p, t in zip(prompts, following, strict=True)]
    store = PrefixStore(1 << 30)
    try:
        with torch.inference_mode():
            first, prefilled = model.prefill(prompts, store)
            slots = Slots(3, model.sizes.growth)
            slots.admit(prefilled, [0, 1, 2])
            second = model.decode(following, slots)
            alone = torch.cat([model.prefill([p])[0] for p in (*prompts, *longer)])
            gap = _gap(torch.cat([first, second]), alone)
            if model.shares and not _gap(model.prefill(longer, store)[0], alone[3:]) < _tolerance(alone):
                model.shares = False
    except (TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        fault = f"its forward pass failed: {error}"
    else:
        if gap < _tolerance(alone):
            return
        fault = f"batching changes its probabilities by {gap:.3g}"
    if model.graphs is None:
        raise PolicyError(
            "expected a causal LM that keeps only attention keys and values, so that rows can be batched with "
            f"padding; this model does not qualify: {fault}; serve it with vLLM or another server and use "
            "'openai:MODEL@URL'"
        )
    # Some models cannot be captured in a graph, for example if they read a value from the GPU.
    model.graphs = None
    check_padding(model, vocabulary)


def _gap(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((torch.softmax(logits.float(), -1) - torch.softmax(expected.float(), -1)).abs().max())


def _tolerance(logits: torch.Tensor) -> float:
    return 1e-3 if logits.dtype in (torch.float32, torch.float64) else 0.1
