"""A trained critic on vLLM's pooling runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mas_gym.errors import ConfigError, CriticError
from mas_gym.policies.vllm.engine import require_vllm, without_spinning
from rewardmodels.data.serialise import View
from rewardmodels.model.backbone import load_tokenizer
from rewardmodels.model.encode import Encoded
from rewardmodels.model.folder import check_folder, digest
from rewardmodels.model.info import read_info
from rewardmodels.model.learned import LearnedCritic
from rewardmodels.model.prefixes import Counts


class VLLMCritic(LearnedCritic):
    """Scores states with a trained model inside vLLM: ``tanh`` of its raw logit, as `LearnedCritic` does.

    vLLM's prefix cache shares common beginnings; scoring runs beside generation.

    Args:
        folder: A folder that training wrote.
        view: The expected view; None accepts the critic's own.
        force: Score graphs and views that the critic was not trained for.
        prefixes: Let an outcome critic score states that are not terminal.
        dtype: ``"float32"``, ``"bfloat16"``, ...; ``"auto"`` is the folder's own.
        max_batch: Preferred number of states per call.
        gpu_memory_utilization: Share of the GPU's memory for the critic, if agents need the rest.
        engine: Further arguments of ``vllm.LLM``.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ConfigError: No folder is named, or the view is another than the critic's.
        CriticError: vLLM does not start.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        view: View | None = None,
        force: bool = False,
        prefixes: bool = False,
        dtype: str = "auto",
        max_batch: int = 256,
        gpu_memory_utilization: float | None = None,
        engine: dict[str, Any] | None = None,
    ) -> None:
        """Start the engine."""
        if not str(folder):
            raise ConfigError("expected 'vllm:FOLDER', got no folder")
        require_vllm()
        info = read_info(Path(folder))
        check_folder(Path(folder))
        self._begin(info, load_tokenizer(str(folder)), view, force, prefixes)
        self._identity |= {"files": digest(Path(folder)), "dtype": dtype, "engine": engine or {}}
        self.concurrent, self.max_batch = True, max_batch
        arguments: dict[str, Any] = {"dtype": dtype, "enable_prefix_caching": True, **(engine or {})}
        if gpu_memory_utilization is not None:
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        self._scorer = _PoolingScorer(str(folder), arguments)
        self.counts = self._scorer.counts

    def close(self) -> None:
        """Stop the engine; the critic cannot be used again."""
        self._scorer.close()


class _PoolingScorer:
    """Computes logits of encoded states; the counterpart of `rewardmodels.model.prefixes.PrefixScorer`."""

    def __init__(self, folder: str, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        try:
            self._llm = LLM(folder, runner="pooling", **without_spinning(arguments))
        except Exception as error:
            raise CriticError(
                f"expected vLLM to start on the critic {folder!r} with {arguments}, got "
                f"{type(error).__name__}: {error}; its log above has the cause"
            ) from error
        self.counts = Counts()

    def logits(self, states: Sequence[Encoded], open_end: Sequence[bool]) -> list[float]:
        """Return the logit of each state."""
        from vllm import PoolingParams
        from vllm.inputs import tokens_input

        prompts = [tokens_input([token for part in state.parts for token in part]) for state in states]
        # With its activation vLLM would return the sigmoid of the logit.
        params = PoolingParams(use_activation=False)
        outputs = self._llm.encode(prompts, params, use_tqdm=False, pooling_task="classify")
        self.counts.states += len(states)
        self.counts.whole += sum(state.length for state in states)
        self.counts.shortened += sum(state.dropped > 0 for state in states)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        self.counts.encoded += sum(state.length for state in states) - cached
        return [float(output.outputs.data.reshape(-1)[0]) for output in outputs]

    def close(self) -> None:
        """Stop the engine."""
        self._llm.llm_engine.engine_core.shutdown()
