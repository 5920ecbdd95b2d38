"""Trained critics, MASPRM or ORM, on transformers and on vLLM's pooling runner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from mas_gym.errors import ConfigError, CriticError, DataError, PolicyError, need
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.suggestions import choice
from mas_gym.policies.model_files import ModelSource
from mas_gym.systems.graph import MAS
from mas_gym.systems.state import MASState
from rewardmodels.data.dataset import LOOPS, graph_of
from rewardmodels.data.encode import EncodedState, Encoder, tokens_in
from rewardmodels.model.backbone import load_tokenizer
from rewardmodels.model.critic_folder import CriticInfo, check_folder, folder_digest, load_folder, read_info
from rewardmodels.model.model_critic import ModelCritic
from search.protocol import ScoringContext

if TYPE_CHECKING:
    from rewardmodels.model.prefix_cache import Counts

_EXACT_BYTES = 400_000_000
"""Weights up to this size are computed in float64 on a CPU."""

_MEGABYTE = 2**20


DType = Literal["float32", "float64", "bfloat16"]
_SHIPPED = Path(__file__).parents[1] / "shipped"
"""The folder of the critics for the bundled agents."""


class LearnedCritic(ModelCritic):
    """Scores states with a trained model: ``tanh`` of its logit.

    Each state is scored once and its score is stored. Encoded prefixes of transcripts are
    cached, so a new state costs only its newest message (`rewardmodels.model.prefix_cache`).

    Scores are rounded to six decimal places. In float64, which small models on a CPU use by default, a
    state's score is the same in every run and at any concurrency: the other states of the batch
    change kernel results by only about 1e-15. In float32 they change results by 1e-7 to
    1e-5, so about one score in 30 differs by a millionth between concurrency 1 and 64. In bfloat16
    the differences are larger.

    Args:
        folder: A folder written by training.
        force: Allow graphs that the critic was not trained on.
        prefixes: Allow non-terminal states for an outcome critic.
        device: ``"cpu"`` or ``"cuda"``; None uses a GPU if there is one.
        dtype: ``"float32"``, ``"float64"`` or ``"bfloat16"``; None means bfloat16 on a GPU, and on a CPU float64 for
            weights of up to 400 MB, otherwise bfloat16 if the processor computes it (AVX512-BF16, AMX), else float32.
        memory: Size of the cache of encoded prefixes, in megabytes; None for a quarter of the weights, at least 64.
        max_batch: Preferred number of states per call.
        share: Encode shared prefixes once; False encodes each state completely.
        concurrent: Score in a separate thread while agents generate; None does so only on a GPU. On a CPU this helps
            if a core is free.
        lazy: Load the weights at the first call of `score` or `load`; torch is not imported before that.

    Attributes:
        name: ``"masprm"`` or ``"orm"``.
        terminal_only: True for an ORM, unless ``prefixes``.
        info: Description of the critic.
        counts: Cost of scoring so far.
    """

    _scorer: Any = None

    def __init__(
        self,
        folder: str | Path,
        *,
        force: bool = False,
        prefixes: bool = False,
        device: str | None = None,
        dtype: DType | None = None,
        memory: int | None = None,
        max_batch: int = 64,
        share: bool = True,
        concurrent: bool | None = None,
        lazy: bool = False,
    ) -> None:
        """Read the description of the critic and, unless lazy, load the model."""
        choice("dtype", dtype, (None, *get_args(DType)))
        self._device = device
        self._dtype: DType | None = dtype
        self._share, self._memory, self._concurrent = share, memory, concurrent
        self.concurrent, self.max_batch = bool(concurrent), max_batch
        self._begin(Path(folder), force, prefixes)
        if not lazy:
            self.load()

    def load(self) -> None:
        """Load the model, unless it is already loaded.

        Raises:
            DataError: A file is missing or damaged.
            ConfigError: A value in a file is invalid.
        """
        if self._scorer is not None:
            return
        need("torch", "a local reward model", "local")
        from mas_gym.policies.local.packed_linear import pack_linear
        from mas_gym.policies.local.prefix_store import prefix_cache_megabytes
        from rewardmodels.model.prefix_cache import PrefixScorer

        device, dtype = self._place()
        self._identity["dtype"] = dtype
        files = folder_digest(self._folder)
        model, tokenizer, _ = load_folder(self._folder, dtype)
        model.to(device)
        self._encoder = Encoder(tokenizer, self.info.max_length, self.info.view)
        try:
            self._source.check()
        except PolicyError as error:
            raise DataError(str(error)) from error
        if self._identity.setdefault("files", files) != files:
            raise DataError(f"{self._folder} changed after the critic's identity was read; load the critic again")
        megabytes = prefix_cache_megabytes(model) if self._memory is None else self._memory
        self._scorer = PrefixScorer(model, tokenizer.pad_token_id, self._share, megabytes * _MEGABYTE)
        # Packed weights are no parameters; the scorer has counted them.
        pack_linear(model.base_model)

    def unload(self) -> None:
        """Free the memory of the model; the next score loads it again."""
        self._scorer = None
        if self._device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def _place(self) -> tuple[str, str]:
        import torch

        from mas_gym.policies.local.packed_linear import fast_bfloat16

        self._device = self._device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.concurrent = self._device != "cpu" if self._concurrent is None else self._concurrent
        if self._dtype is None and self._device != "cpu":
            self._dtype = "bfloat16"
        elif self._dtype is None:
            weights = sum(file.stat().st_size for file in self._folder.glob("*.safetensors"))
            large: DType = "bfloat16" if fast_bfloat16() else "float32"
            self._dtype = "float64" if weights <= _EXACT_BYTES else large
        return self._device, self._dtype

    @property
    def counts(self) -> Counts:
        """Cost of scoring so far."""
        self.load()
        counts: Counts = self._scorer.counts
        return counts

    def _begin(self, folder: Path, force: bool, prefixes: bool) -> None:
        """Set up everything that does not depend on the model's device."""
        super().__init__()
        # Listed before anything is read.
        self._folder, self._source = folder, ModelSource(str(folder))
        self.made_for = "tiny" if folder.resolve().parent == _SHIPPED else ""
        info = read_info(folder)
        self.info: CriticInfo = info
        self._identity: JSONObject = {"view": info.view, "max_length": info.max_length, "prefixes": prefixes}
        self._force = force
        self.name = info.kind
        self.terminal_only = info.kind == "orm" and not prefixes
        self._graphs = list(info.graphs.values())
        self._checked: set[str] = set()

    def identity(self) -> JSONObject:
        """Return everything that determines the scores: a digest of the model's files, and the settings.

        Raises:
            DataError: A file cannot be read.
        """
        if "files" not in self._identity:
            self._identity |= {"files": folder_digest(self._folder), "dtype": self._place()[1]}
        return self._identity

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return one value in ``[-1, 1]`` per state, in order.

        Raises:
            CriticError: A state is not terminal and this is an outcome critic, the critic was not trained for the
                graph, or a state's newest message exceeds the critic's maximum length.
        """
        for context in contexts:
            self._check(context.mas, context.state)
        return super().score(contexts)

    def values(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return the values of distinct states, in order."""
        self.load()
        encoded = self._encoder.encode([(context.mas, context.state) for context in contexts])
        open_end = [context.state.acting != context.mas.sink for context in contexts]
        try:
            logits = self._scorer.logits(encoded, open_end)
        except (IndexError, RuntimeError) as error:
            raise CriticError(
                f"critic {self.name!r} cannot score {len(contexts)} states ({type(error).__name__}: "
                f"{str(error)[:300]}); check that the tokenizer matches the weights and that there is enough memory"
            ) from error
        return [math.tanh(logit) if math.isfinite(logit) else math.nan for logit in logits]

    def _check(self, mas: MAS, state: MASState) -> None:
        if self.terminal_only and state.acting != mas.sink:
            raise CriticError(
                f"an outcome critic scores terminal states only, got a state where {mas.node_name(state.acting)} acts; "
                "use a MASPRM, or a planner that evaluates only terminal states"
            )
        self.check_graph(mas)

    def check_graph(self, mas: MAS) -> None:
        """Check that the critic was trained on this graph; a run calls this before its searches.

        Raises:
            CriticError: It was trained on other graphs, and ``force`` is not set.
        """
        if mas.fingerprint in self._checked:
            return
        graph = graph_of(mas)
        keys = ("agents", "edges", *LOOPS)
        trained_on = any(all(known.get(key) == graph.get(key) for key in keys) for known in self._graphs)
        if not trained_on and not self._force:
            names = ", ".join(str(known["name"]) for known in self._graphs)
            raise CriticError(
                f"this critic was trained on {names}, not on {mas.name} (different agents, edges or loops); "
                f"train one on this graph, or load it anyway with load_critic({str(self._folder)!r}, force=True); on "
                f"the command line, --critic {str(self._folder) + '#force=true'!r}"
            )
        self._checked.add(mas.fingerprint)


class VLLMCritic(LearnedCritic):
    """Scores states with a trained model inside vLLM: ``tanh`` of its raw logit, as `LearnedCritic` does.

    vLLM's prefix cache shares common prefixes; scoring overlaps with generation.

    Args:
        folder, force, prefixes: As in `LearnedCritic`.
        dtype: ``"float32"``, ``"bfloat16"``, ...; ``"auto"`` is the folder's dtype.
        max_batch: Preferred number of states per call.
        gpu_memory_utilization: Share of the GPU's memory for the critic; the rest is left for agents.
        engine: Further arguments of ``vllm.LLM``.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ConfigError: No folder is given, or a value in a file is invalid.
        CriticError: vLLM does not start.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        force: bool = False,
        prefixes: bool = False,
        dtype: str = "auto",
        max_batch: int = 256,
        gpu_memory_utilization: float | None = None,
        engine: dict[str, object] | None = None,
    ) -> None:
        if not str(folder):
            raise ConfigError("expected 'vllm:FOLDER', got no folder")
        from mas_gym.policies.vllm import require_vllm

        require_vllm()
        self._begin(Path(folder), force, prefixes)
        check_folder(Path(folder))
        self._encoder = Encoder(load_tokenizer(str(folder)), self.info.max_length, self.info.view)
        self._identity |= {"files": folder_digest(Path(folder)), "dtype": dtype, "engine": engine or {}}
        self.concurrent, self.max_batch = True, max_batch
        arguments: dict[str, Any] = {"load_format": "safetensors", "dtype": dtype, "enable_prefix_caching": True}
        arguments |= engine or {}
        if gpu_memory_utilization is not None:
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        self._scorer = _PoolingScorer(str(folder), arguments)

    def close(self) -> None:
        """Stop the engine; the critic cannot be used again."""
        self._scorer.close()


class _PoolingScorer:
    """Computes logits of encoded states; the counterpart of `rewardmodels.model.prefix_cache.PrefixScorer`."""

    def __init__(self, folder: str, arguments: dict[str, object]) -> None:
        from vllm import LLM

        from mas_gym.policies.vllm import without_spinning
        from rewardmodels.model.prefix_cache import Counts

        try:
            self._llm = LLM(folder, runner="pooling", **without_spinning(arguments))
        except Exception as error:
            raise CriticError(
                f"expected vLLM to start with the critic's model {folder!r} and {arguments}, got "
                f"{type(error).__name__}: {error}; see vLLM's log above for the cause"
            ) from error
        self.counts = Counts()

    def logits(self, states: Sequence[EncodedState], open_end: Sequence[bool]) -> list[float]:
        """Return the logit of each state."""
        from vllm import PoolingParams
        from vllm.inputs import tokens_input

        prompts = [tokens_input([token for part in state for token in part]) for state in states]
        # With the default activation, vLLM would return the sigmoid of the logit.
        params = PoolingParams(use_activation=False)
        outputs = self._llm.encode(prompts, params, use_tqdm=False, pooling_task="classify")
        self.counts.states += len(states)
        whole = sum(map(tokens_in, states))
        self.counts.whole += whole
        self.counts.encoded += whole - sum(output.num_cached_tokens or 0 for output in outputs)
        return [float(output.outputs.data.reshape(-1)[0]) for output in outputs]

    def close(self) -> None:
        """Stop the engine."""
        self._llm.llm_engine.engine_core.shutdown()
