"""Policies that run a GGUF file with llama.cpp in this process, through ``xllamacpp``.

llama.cpp replies in the OpenAI format, so the policy is an `OpenAIPolicy`: requests go to the engine's functions in
place of an HTTP server. The engine's continuous batch has one slot per open call. Its own HTTP server, which
``xllamacpp`` always starts on a free port of this machine, has a random key that is not stored, so it rejects every
request.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from mas_gym.errors import PolicyError, need, whole_number
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.policies.model_files import ModelSource
from mas_gym.policies.openai import OpenAIOptions, OpenAIPolicy
from mas_gym.policies.retries import StatusError

_MAGIC = b"GGUF"
# The distribution of `SamplingRequest`: temperature first, then top-p, and none of llama.cpp's default filters.
_SAMPLING: JSONObject = {"samplers": ["temperature", "top_p"]}


class GGUFPolicy(OpenAIPolicy):
    """A policy on llama.cpp in this process, with continuous batching and the chat template of the file.

    Attributes:
        name: ``"gguf:"`` and the file's name.
        max_concurrency: Number of slots.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        slots: int = 16,
        window: int = 4096,
        threads: int | None = None,
        gpu_layers: int | None = None,
        chat_options: JSONMapping | None = None,
    ) -> None:
        """Load the model.

        Args:
            file: A GGUF file.
            slots: Sequences decoded together. With one slot, equal seeds give equal messages.
            window: Context window of each slot in tokens, for prompt and message together.
            threads: CPU threads; by default one per core.
            gpu_layers: Layers on a GPU, if the installed build supports one; by default llama.cpp decides.
            chat_options: Extra variables for the chat template.

        Raises:
            MissingDependencyError: ``xllamacpp`` or ``openai`` is not installed.
            ConfigError: An option is invalid.
            PolicyError: The file is not a model that llama.cpp can load.
        """
        for option, value in (("slots", slots), ("window", window), ("threads", threads)):
            if value is not None:
                whole_number(option, value, at_least=1)
        path = Path(file)
        engine = need("xllamacpp", "a gguf: policy", "gguf")
        self._source = ModelSource(str(path))
        try:
            with path.open("rb") as stream:
                magic = stream.read(len(_MAGIC))
        except OSError as error:
            raise PolicyError(f"expected a GGUF file, got {str(path)!r}: {error.strerror}") from error
        if magic != _MAGIC:
            raise PolicyError(
                f"expected a GGUF file, got {path}, which does not begin with 'GGUF'; use transformers:FOLDER for a "
                "folder with safetensors"
            )
        more = {"chat_template_kwargs": dict(chat_options)} if chat_options else {}
        # The address is never called; it is shown in messages.
        super().__init__(path.name, str(path), OpenAIOptions(max_concurrency=slots, extra_body=_SAMPLING | more))
        self.name = f"gguf:{path.name}"
        self.meters = {self.name: self.meter}
        self._settings = {"engine": metadata.version("xllamacpp"), "slots": slots, "window": window, "body": more}
        parameters = engine.CommonParams()
        parameters.model.path = str(path)
        parameters.n_parallel, parameters.n_ctx = slots, slots * window
        parameters.api_keys = [secrets.token_urlsafe(32)]
        parameters.ui = False
        parameters.verbosity = 0
        if threads is not None:
            parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        if gpu_layers is not None:
            parameters.n_gpu_layers = gpu_layers
        try:
            self._server = engine.Server(parameters)
        except Exception as error:
            raise PolicyError(
                f"llama.cpp cannot load {path}: {error}; check that the file is complete, and lower slots (now "
                f"{slots}) or window (now {window}) if memory is short"
            ) from error
        self._workers = ThreadPoolExecutor(slots, thread_name_prefix="mas-gym-gguf")

    def identity(self) -> dict[str, object]:
        """Return a digest of the file, the engine's version and the settings that affect samples.

        Raises:
            PolicyError: The file changed after it was loaded.
        """
        return {"model": self._source.identity(), **self._settings}

    async def _exchange(self, method: str, url: str, body: JSONMapping | None) -> bytes:
        """Call the engine in a thread; return its reply. Raises `StatusError`."""
        asked = {"top_logprobs": 1, **(body or {})}
        return await asyncio.get_running_loop().run_in_executor(self._workers, self._ask, asked)

    def _ask(self, body: JSONObject) -> bytes:
        try:
            reply = self._server.handle_chat_completions(body)
        except ValueError as error:
            reply = {"error": {"code": 400, "message": str(error)}}
        raw = json.dumps(reply).encode()
        if "error" in reply:
            raise StatusError(int(reply["error"].get("code", 500)), {}, raw)
        return raw
