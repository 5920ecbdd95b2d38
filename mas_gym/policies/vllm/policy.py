"""Policies on a vLLM engine in this process: continuous batching, prefix caching, a seed per sample, LoRA per agent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mas_gym.errors import ConfigError, EngineUnavailableError, PolicyError
from mas_gym.policies.base import Sample, SamplingReply, SamplingRequest
from mas_gym.policies.chat import ChatFormat, Prompt
from mas_gym.policies.loop import on_engine_loop
from mas_gym.policies.meter import Meter
from mas_gym.policies.openai.wire import SEED_MASK
from mas_gym.policies.registry import build, written_options
from mas_gym.policies.vllm.engine import shared_engine
from mas_gym.policies.weights import ModelSource

_numbers = itertools.count()


class VLLMPolicy:
    """An `AsyncPolicy` over vLLM's asynchronous engine, which starts at the first request.

    Policies with the same model and engine arguments share one engine, whatever their
    adapters, so agents with different adapters need only one copy of the weights.

    Attributes:
        name: Name shown in reports.
        max_concurrency: Preferred number of open requests.
        meter: Calls and tokens so far.
    """

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
    ) -> None:
        """Check what can be checked before the engine starts.

        Args:
            model: A local folder or a hub id.
            name: Name shown in reports; by default the model's name, with the adapter's.
            lora: Folder of a peft adapter of the model.
            max_concurrency: Maximum number of open requests.
            max_model_len: Context window in tokens; by default the model's own.
            dtype: ``"float32"``, ``"bfloat16"``, ...; ``"auto"`` is the model's own.
            gpu_memory_utilization: Share of the GPU's memory that this engine may use.
            engine: Additional arguments of vLLM's ``AsyncEngineArgs``.
            chat_options: Extra variables for the chat template.

        Raises:
            MissingDependencyError: vLLM is not installed.
            ConfigError: The adapter's folder contains no adapter, or the engine is already running.
        """
        arguments = {"max_model_len": max_model_len, "dtype": dtype, "gpu_memory_utilization": gpu_memory_utilization}
        arguments |= dict(engine or {})
        self._engine = shared_engine(model, {key: value for key, value in arguments.items() if value is not None})
        if lora is not None:
            self._engine.add_adapter(lora)
        self._lora = lora
        self._chat_options = chat_options
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
        }
        self.meter = Meter()

    def identity(self) -> dict[str, Any]:
        """Return digests of the model's and the adapter's files and the settings that affect samples.

        Raises:
            PolicyError: The files cannot be found, or changed after the policy was created.
        """
        adapter = None if self._adapter is None else self._adapter.identity()
        return {"model": self._source.identity(), "adapter": adapter, **self._settings}

    @property
    def meters(self) -> dict[str, Meter]:
        """Its meter, by name."""
        return {self.name: self.meter}

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Answer one request.

        Raises:
            PolicyError: vLLM could not answer it.
            EngineUnavailableError: The engine died or did not start.
        """
        return await on_engine_loop(self._answer(request))

    def close(self) -> None:
        """Stop the engine; the next request of any policy that shares it starts it again."""
        self._engine.close()

    async def _answer(self, request: SamplingRequest) -> SamplingReply:
        try:
            llm = await self._engine.llm()
        except PolicyError as error:
            raise EngineUnavailableError(str(error)) from error
        prompt = self._prompt(llm, request)
        calls = [asyncio.ensure_future(self._one(llm, prompt, request, seed)) for seed in request.seeds]
        try:
            found = await asyncio.gather(*calls)
        except Exception as error:
            raise self._explained(error) from error
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return SamplingReply(tuple(sample for sample, _ in found), len(prompt.ids), found[0][1], prompt.dropped)

    def _prompt(self, llm: Any, request: SamplingRequest) -> Prompt:
        if self._format is None:
            self._format = ChatFormat(llm.get_tokenizer(), llm.model_config.max_model_len, self._chat_options)
        return self._format.encode(request.messages, request.max_new_tokens)

    async def _one(self, llm: Any, prompt: Prompt, request: SamplingRequest, seed: int) -> tuple[Sample, int]:
        """Return one sample and the number of its cached prompt tokens."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=min(request.max_new_tokens, prompt.room),
            seed=seed & SEED_MASK,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        lora = None if self._lora is None else self._engine.lora_request(self._lora)
        stream = llm.generate(tokens_input(prompt.ids), params, f"mas-gym-{next(_numbers)}", lora_request=lora)
        *_, final = [reply async for reply in stream]
        [output] = final.outputs
        if output.finish_reason not in ("stop", "length") or output.cumulative_logprob is None:
            raise PolicyError(f"{self.name}: vLLM ended a message with {output.finish_reason!r}")
        assert self._format is not None
        cached = final.num_cached_tokens or 0
        self.meter.calls += 1
        self.meter.add(len(prompt.ids), cached, len(output.token_ids))
        text = self._format.decode(output.token_ids)
        return Sample(text, len(output.token_ids), float(output.cumulative_logprob), output.finish_reason), cached

    def _explained(self, error: Exception) -> PolicyError:
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, PolicyError):
            return error
        if isinstance(error, EngineDeadError):
            return EngineUnavailableError(
                f"{self.name}: the vLLM engine died; its log above has the cause. "
                "Repeat the command; a run with a store keeps its finished searches"
            )
        return PolicyError(f"{self.name}: vLLM refused a request: {type(error).__name__}: {error}")


def load_vllm(argument: str, **options: Any) -> VLLMPolicy:
    """Load ``"PATH-OR-ID#option=value"`` for `mas_gym.policies.load_policy`."""
    model, written = written_options(argument)
    if not model:
        raise ConfigError("expected 'vllm:PATH-OR-ID', got no path or id")
    policy: VLLMPolicy = build("vllm", VLLMPolicy, model, **{**written, **options})
    return policy
