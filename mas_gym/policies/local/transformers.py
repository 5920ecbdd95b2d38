"""Policies that run a transformers model in this process."""

# ruff: noqa: E402 - the error about a missing package comes before its import

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mas_gym.errors import ConfigError, EngineUnavailableError, PolicyError, need, whole_number

for _package in ("torch", "transformers"):
    need(_package, "running a model in this process", "local")

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mas_gym.policies.base import (
    Choice,
    Sample,
    SamplingReply,
    SamplingRequest,
    StreamingPolicy,
    TokenTrace,
    first_tokens,
    refuse_extra_body,
)
from mas_gym.policies.folder_checks import check_model
from mas_gym.policies.local.chat import ChatFormat
from mas_gym.policies.local.decode import GLOBAL_CAP, Decoder, DecodingJob
from mas_gym.policies.local.forward import CausalModel, check_padding, threads_for
from mas_gym.policies.local.packed_linear import fast_bfloat16
from mas_gym.policies.local.prefix_store import PrefixStore, prefix_cache_megabytes
from mas_gym.policies.model_files import ModelSource, import_models
from mas_gym.policies.reasoning import check_first_token
from mas_gym.systems.prompts import ChatMessage

import_models()

_EXACT_LIMIT = 100_000_000
_DEFAULT_WINDOW = 4096
_WINDOWS = range(16, 10**8)


class TransformersPolicy(StreamingPolicy):
    """Any transformers causal LM whose only state is attention keys and values, with continuous batching.

    Args:
        model: A local folder or hub id. Weights are read from safetensors only.
        name: Name shown in reports; by default the folder's or model's name.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ...; ``"auto"`` uses a GPU if there is one.
        dtype: ``"float32"``, ``"bfloat16"``, ...; ``"auto"`` is the model's dtype on a GPU. On a CPU it is bfloat16 for
            models stored in bfloat16 if the processor computes it (AVX512-BF16, AMX), and float32 otherwise.
        max_batch: Sequences decoded together.
        prefix_megabytes: Memory for encoded prompts, reused by prompts with the same prefix; 0 for none. By
            default a quarter of the size of the weights, at least 64.
        window: Context window in tokens, for prompt and answer together; by default the model's window.
        truncate: Remove the oldest text of a prompt that does not fit the window. By default such a prompt is an error.
        threads: Torch CPU threads for this model. By default one for models of up to 50 million parameters, and
            torch's default for larger ones or if ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS`` is set.
        exact: Make replies independent of the batch (see `mas_gym.policies.local.decode`), at the cost of a float64
            copy of the model. By default on for float32 models of up to 100 million parameters that run in float64.
        chat_options: Extra variables for the chat template.
        trust_remote_code: Run Python code from the model's files. There is no interactive prompt for it.

    Attributes:
        format: The tokenizer with its chat conventions.
        end_tokens: Token ids that end a message, from the generation config and the tokenizer.

    Raises:
        ConfigError: An option is invalid.
        PolicyError: The model cannot be loaded or batched.
    """

    chooses = True

    def __init__(
        self,
        model: str | Path,
        *,
        name: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        max_batch: int = 128,
        prefix_megabytes: int | None = None,
        window: int | None = None,
        truncate: bool = False,
        threads: int | None = None,
        exact: bool | None = None,
        chat_options: Mapping[str, object] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the model and check that it can be batched."""
        limits = ("max_batch", max_batch, 1), ("window", window, 1), ("threads", threads, 1)
        for option, value, least in (*limits, ("prefix_megabytes", prefix_megabytes, 0)):
            if value is not None:
                whole_number(option, value, at_least=least)
        self.name = name or Path(model).name
        self.max_batch = max_batch
        check_model(model)
        self._source = ModelSource(str(model))
        lm, tokenizer = _load(str(model), device, dtype, trust_remote_code)
        self._threads = lm.num_parameters(), threads
        self.prefix_megabytes = prefix_cache_megabytes(lm) if prefix_megabytes is None else prefix_megabytes
        with threads_for(*self._threads):
            self._model = CausalModel(lm, exact=_exact(lm, exact))
            check_padding(self._model, min(lm.get_input_embeddings().num_embeddings, len(tokenizer)))
            if self._model.exact and not self._model.has_reference():
                if exact:
                    raise ConfigError(f"exact=True: {type(lm).__name__} cannot run in float64; leave exact out")
                self._model.exact = False
        self.format = ChatFormat(tokenizer, window or context_window(lm), chat_options, truncate)
        self.max_prompt_bytes = self.format.max_prompt_bytes
        self.end_tokens = _end_tokens(lm, tokenizer)
        shares = self._model.shares and self.prefix_megabytes
        self._prefixes = PrefixStore(self.prefix_megabytes << 20) if shares else None
        self._settings = {
            "dtype": str(lm.dtype),
            "exact": self._model.exact,
            "window": self.format.window,
            "chat_options": dict(chat_options or {}),
            **({"truncate": True} if truncate else {}),
        }

    def identity(self) -> dict[str, object]:
        """Return a digest of the model's files and the settings that affect samples; the first call reads the files.

        Raises:
            PolicyError: The files changed after the model was loaded.
        """
        return {"model": self._source.identity(), **self._settings}

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model, for inference; on a CPU its weights may be rearranged (`packed_linear`)."""
        return self._model.model

    def open(self) -> TransformersSession:
        """Start a session with its own batch."""
        return TransformersSession(self)

    def choose(self, prompts: Sequence[Sequence[ChatMessage]], words: Sequence[str]) -> list[Choice]:
        """Return, for each prompt, the log-probability that the reply begins with each word, one pass per batch.

        Raises:
            PolicyError: A prompt does not fit the window, two words begin with the same token, or the model begins with
                reasoning.
        """
        ids = first_tokens(words, lambda text: self.format.tokenizer(text, add_special_tokens=False)["input_ids"])
        encoded = [self.format.encode(messages, 1).ids for messages in prompts]
        # Prompts of similar length are batched together to reduce padding.
        order = sorted(range(len(encoded)), key=lambda place: len(encoded[place]))
        found: dict[int, Choice] = {}
        with threads_for(*self._threads), torch.inference_mode():
            for start in range(0, len(order), self.max_batch):
                part = order[start : start + self.max_batch]
                logits, _ = self._model.prefill([encoded[place] for place in part], self._prefixes)
                spread = torch.log_softmax(logits.double(), dim=1)
                for token in spread.argmax(dim=1).tolist():
                    check_first_token(self.name, words, self.format.tokenizer.decode([token]))
                columns = torch.stack([torch.logsumexp(spread[:, tokens], dim=1) for tokens in ids], dim=1)
                for place, row in zip(part, columns.tolist(), strict=True):
                    found[place] = Choice(tuple(row), len(encoded[place]))
        return [found[place] for place in range(len(encoded))]


class TransformersSession:
    """A running batch of a `TransformersPolicy`; see `mas_gym.policies.base.SamplingSession`."""

    def __init__(self, policy: TransformersPolicy) -> None:
        self._policy = policy
        self._decoder: Decoder | None = Decoder(policy._model, policy.max_batch, policy.end_tokens, policy._prefixes)
        self._refused: list[tuple[Hashable, SamplingReply | PolicyError]] = []
        self._open: dict[Hashable, int] = {}
        self.pending = 0

    def submit(self, key: Hashable, request: SamplingRequest) -> None:
        """Queue a request."""
        if self._decoder is None:
            raise PolicyError("the session is closed; open another with the policy's open()")
        cap = min(request.max_new_tokens, GLOBAL_CAP)
        try:
            refuse_extra_body(self._policy, request.agent, request.extra_body)
            prompt = self._policy.format.encode(request.messages, cap)
        except PolicyError as error:
            self._refused.append((key, error))
        else:
            self._decoder.submit(DecodingJob(key, request, prompt.ids, min(cap, prompt.room), prompt.dropped))
        self._open[key] = len(request.seeds)
        self.pending += len(request.seeds)

    def step(self) -> list[tuple[Hashable, SamplingReply | PolicyError]]:
        """Encode waiting prompts or decode one token per row; return the requests that this finishes."""
        if self._decoder is None:
            raise PolicyError("the session is closed; open another with the policy's open()")
        done, self._refused = self._refused, []
        try:
            with threads_for(*self._policy._threads):
                finished = self._decoder.step()
        except RuntimeError as error:
            raise EngineUnavailableError(
                f"{self._policy.name}: the forward pass failed ({error}); if memory ran out, lower max_batch (now "
                f"{self._policy.max_batch}), window or prefix_megabytes"
            ) from error
        done += [(job.key, self._reply(job)) for job in finished]
        for key, _ in done:
            self.pending -= self._open.pop(key)
        return done

    def _reply(self, job: DecodingJob) -> SamplingReply | PolicyError:
        samples = []
        for written in job.written:
            if written is None or written.finish_reason == "error":
                return PolicyError(
                    f"{self._policy.name}: agent {job.request.agent!r} got logits that are not finite; "
                    "load the model in float32 or bfloat16, and check its weights"
                )
            text = self._policy.format.decode(written.tokens)
            trace = None
            if job.request.traced:
                trace = TokenTrace(tuple(job.prompt), tuple(written.tokens), written.each)
            samples.append(Sample(text, len(written.tokens), *written[1:4], trace))
        return SamplingReply(tuple(samples), len(job.prompt), 0, job.dropped)

    def close(self) -> None:
        """Discard all open requests and free the batch's memory."""
        self._decoder = None
        self._refused, self._open, self.pending = [], {}, 0


def _load(model: str, device: str, dtype: str, trust: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # A folder is never looked up on the hub. Without trust_remote_code=False, transformers would prompt the user.
    options: dict[str, Any] = {"trust_remote_code": trust, "local_files_only": Path(model).is_dir()}
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, **options)
        if dtype == "auto" and device == "cpu":
            stored = transformers.AutoConfig.from_pretrained(model, **options).dtype
            dtype = "bfloat16" if stored == torch.bfloat16 and fast_bfloat16() else "float32"
        lm = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype, use_safetensors=True, **options)
        context_window(lm), _end_tokens(lm, tokenizer)
        lm = lm.to(device).eval().requires_grad_(False)
        for parameter in lm.parameters() if device == "cpu" else ():
            # Otherwise the weights stay mapped to the file, and change when it is overwritten.
            parameter.data = parameter.data.clone()
        return lm, tokenizer
    except BaseException as error:
        # The tokenizers library panics on some broken files; the panic is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        remedy = "; pass trust_remote_code=True to run the code in it" if "trust_remote_code" in str(error) else ""
        raise PolicyError(
            f"expected {model!r} to be a causal LM with its tokenizer, in a local folder (config.json, *.safetensors, "
            f"tokenizer files) or under a reachable hub id; loading it failed: {type(error).__name__}: "
            f"{str(error)[:500]}{remedy}"
        ) from error
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()


def _exact(lm: PreTrainedModel, wanted: bool | None) -> bool:
    precise = lm.dtype in (torch.float32, torch.float64)
    if wanted and not precise:
        raise ConfigError(f"exact=True needs a float32 or float64 model, got {lm.dtype}; pass dtype='float32'")
    return wanted if wanted is not None else precise and lm.num_parameters() <= _EXACT_LIMIT


def context_window(lm: PreTrainedModel) -> int:
    """Return a model's maximum number of input tokens; a default if its config does not specify it."""
    limit = getattr(lm.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is None:
        return _DEFAULT_WINDOW
    if type(limit) is not int or limit not in _WINDOWS:
        raise ValueError(
            f"max_position_embeddings: expected an integer from {_WINDOWS[0]} to {_WINDOWS[-1]}, got {limit!r}"
        )
    return limit


def _end_tokens(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    ids = lm.generation_config.eos_token_id
    listed = [*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]
    if any(type(i) is not int for i in listed if i is not None):
        raise ValueError(f"eos_token_id: expected integers, got {listed}")
    return frozenset(i for i in listed if i is not None)
