"""Published reward models as critics: step reward models, with each message as a step, and scalar reward models.

The table lists each family's input format and scores. The tests compare them with the formulas of the sources.

========== ============================================= ========================================================
format     written as                                    score of a step
========== ============================================= ========================================================
qwen       chat: the system prompt, the question, then   softmax of the two-class head at the step's ``<extra_0>``,
           the steps, each followed by ``<extra_0>``      second class
shepherd   the question, then lines ``Step i: text ки``  softmax over the logits of ``+`` and ``-`` at ``ки``
rlhflow    chat: a user turn per step, the first with    softmax over the logits of ``+`` and ``-`` where the
           the question, each answered by ``+``          answer is predicted
skywork    the question, then one line per step          sigmoid of the value head at the step's line break
========== ============================================= ========================================================

Sources: the model cards of Qwen/Qwen2.5-Math-PRM-7B, peiyi9979/math-shepherd-mistral-7b-prm and
RLHFlow/Llama3.1-8B-PRM-Deepseek-Data (with the evaluation code of RLHFlow/RLHF-Reward-Modeling), and
the inference code of SkyworkAI/skywork-o1-prm-inference.

Weights are read only from safetensors, and no code from a model's folder is executed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from mas_gym.errors import ConfigError, CriticError, DataError, PolicyError, is_number, need, whole_number
from mas_gym.internal.suggestions import choice, unknown_name
from mas_gym.policies.folder_checks import read_object
from mas_gym.policies.local.chat import rendered
from mas_gym.policies.model_files import ModelSource
from mas_gym.systems.prompts import ChatMessage
from rewardmodels.data.encode import chunks, collate_plain
from rewardmodels.hub import download_files
from rewardmodels.model.backbone import load_pretrained, load_scalar, load_tokenizer, window_of
from rewardmodels.model.critic_folder import check_folder
from rewardmodels.model.model_critic import ModelCritic
from search.protocol import ScoringContext

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Aggregate = Literal["last", "mean", "min", "product"]
AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda steps: steps[-1],
    "mean": lambda steps: math.fsum(steps) / len(steps),
    "min": min,
    "product": math.prod,
}
"""How to aggregate the scores of a state's steps."""

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
"""The system prompt of Qwen2.5-Math-PRM."""

STEP_MARKS = {"qwen": "<extra_0>", "shepherd": "ки", "skywork": "\n"}
"""The mark after a step, by format."""

_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_MARK = re.compile(r"<.+>|\[.+\]")


class Steps(NamedTuple):
    """A transcript in the input format of a step reward model.

    Attributes:
        ids: Token ids.
        places: For each step, the index of the token at which its score is read.
    """

    ids: list[int]
    places: list[int]


Write = Callable[[str, Sequence[str]], Steps]
"""Formats a question and the messages."""
Read = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""Returns numbers for every token, from input ids and attention mask."""


class _Published(ModelCritic):
    """Base class of step and scalar reward models: loading and batching."""

    def __init__(
        self, model: str, device: str | None, dtype: str | None, max_batch: int, max_length: int | None
    ) -> None:
        super().__init__()
        torch = need("torch", "a local reward model", "local")
        if not model:
            raise ConfigError(f"{type(self).__name__}: expected a folder or a hub id as model, got none")
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        name = dtype or ("float32" if self._device == "cpu" else "bfloat16")
        choice("dtype", name, ("float32", "float64", "bfloat16", "float16"))
        whole_number("max_batch", max_batch, at_least=1)
        if max_length is not None:
            whole_number("max_length", max_length, at_least=1)
        self.max_batch = max_batch
        self.concurrent = self._device != "cpu"
        path = Path(model).expanduser()
        self.folder = str(path if path.is_dir() else download_files(model, _FILES))
        self._dtype = name
        check_folder(Path(self.folder))
        self._source = ModelSource(self.folder)
        self._settings: dict[str, object] = {"dtype": name}
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(self.folder)
        self._longest = max_length

    def identity(self) -> dict[str, object]:
        """Return a digest of the model's files, and the settings."""
        return {"files": self._source.identity(), **self._settings}

    def _start(self, model: PreTrainedModel) -> None:
        for parameter in model.parameters():
            # Otherwise the weights stay mapped to the file, and change when it is overwritten.
            parameter.data = parameter.data.clone()
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._longest = self._longest or window_of(model.config) or 4096

    def _rendered(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Return the ids of a chat; the assistant's turn at the end is closed."""
        messages = [ChatMessage(role, text) for role, text in turns]
        try:
            return list(rendered(self._tokenizer, messages, add_generation_prompt=False))
        except PolicyError as error:
            raise CriticError(f"{self.folder}: {error}") from error

    def _encode(self, text: str, special: bool = False) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def _clean(self, text: str, *tags: str) -> str:
        """Insert a space into special tokens and step tags in a text, so that messages cannot contain step tags."""
        text = text.encode("utf-8", "replace").decode("utf-8").strip()
        # Other added tokens are words that the tokenizer does not split.
        marks = {tag for tag in self._tokenizer.get_added_vocab() if _MARK.fullmatch(tag.strip())}
        for tag in {*self._tokenizer.all_special_tokens, *marks, *tags}:
            if tag and not tag.isspace():
                text = text.replace(tag, f"{tag[0]} {tag[1:]}")
        return text

    def _batches(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """Yield padded forward passes, short rows first: row indices, input ids and mask."""
        for row in rows:
            if len(row) > (self._longest or 0):
                raise CriticError(
                    f"expected a transcript of at most {self._longest} tokens, got {len(row)}; lower the agents' "
                    "max_new_tokens, or set max_length if the model can read more"
                )
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        for group in chunks(order, [len(rows[place]) for place in order], padded=True):
            inputs = collate_plain([[tuple(rows[place])] for place in group], self._tokenizer.pad_token_id or 0)
            yield group, inputs["input_ids"].to(self._device), inputs["attention_mask"].to(self._device)


class StepRewardModel(_Published):
    """A published step reward model; a message is a step.

    The value is ``2 p - 1`` for the aggregate ``p`` of the step scores.

    Args:
        model: A folder or a hub id.
        format: ``"qwen"``, ``"shepherd"``, ``"rlhflow"`` or ``"skywork"``, see the module; by default guessed
            from the folder's head or name.
        aggregate: ``"last"``: the newest step's score; ``"mean"``, ``"min"`` or ``"product"`` of all steps' scores.
        device: ``"cpu"``, ``"cuda"``, ...; None uses a GPU if there is one.
        dtype: ``"float32"``, ``"bfloat16"``, ...; None means float32 on a CPU, bfloat16 on a GPU.
        max_batch: Preferred number of states per call.
        max_length: Longest transcript, in tokens; by default the model's context window.

    Attributes:
        name: ``"prm:FOLDER"``.

    Raises:
        DataNotFoundError: There is no model.
        DataError: The model lacks the head or the tokens of its format.
        ConfigError: A setting is invalid, or the format cannot be guessed.
    """

    terminal_only = False

    def __init__(
        self,
        model: str,
        *,
        format: str | None = None,
        aggregate: Aggregate = "last",
        device: str | None = None,
        dtype: str | None = None,
        max_batch: int = 64,
        max_length: int | None = None,
    ) -> None:
        if aggregate not in AGGREGATES:
            raise unknown_name("aggregate", aggregate, AGGREGATES)
        if format is not None and format not in FORMATS:
            raise unknown_name("format", format, FORMATS)
        super().__init__(model, device, dtype, max_batch, max_length)
        self.format = format or guess_format(model, self.folder)
        self.name = f"prm:{Path(model).name}"
        self._aggregate = AGGREGATES[aggregate]
        self._settings |= {"format": self.format, "aggregate": aggregate}
        self._write, self._read = FORMATS[self.format](self)

    def steps(self, contexts: Sequence[ScoringContext]) -> list[list[float]]:
        """Return the score in [0, 1] of each step of each state."""
        import torch

        written = [self._written(context) for context in contexts]
        found: dict[int, list[float]] = {}
        with torch.inference_mode():
            for group, ids, mask in self._batches([steps.ids for steps in written]):
                shares = self._read(ids, mask)
                for row, place in enumerate(group):
                    at = torch.tensor(written[place].places, device=shares.device)
                    found[place] = shares[row].index_select(0, at).double().tolist()
        return [found[place] for place in range(len(written))]

    def values(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return the values of distinct states, in order."""
        return [2 * self._aggregate(steps) - 1 for steps in self.steps(contexts)]

    def _written(self, context: ScoringContext) -> Steps:
        turns = context.state.path()[1:]
        if not turns:
            raise CriticError(f"{self.name}: expected a state with at least one message, got a state without messages")
        tag = STEP_MARKS.get(self.format, "")
        texts = [self._clean(turn.text, tag) for turn in turns]
        steps = self._write(self._clean(context.state.question, tag), texts)
        if len(steps.places) != len(texts):
            raise CriticError(f"{self.name}: expected {len(texts)} steps in the text, got {len(steps.places)}")
        return steps

    def _id(self, token: str) -> int:
        """Return the id of a step tag: the last token of its text."""
        ids = self._encode(token)
        if not ids or ids[-1] == self._tokenizer.unk_token_id:
            raise DataError(
                f"{self.folder}: format {self.format} needs the token {token!r}, which the tokenizer lacks; set "
                "format= to the model's format"
            )
        return ids[-1]

    def _two(self, text: str) -> list[int]:
        ids = self._encode(text)
        if len(ids) != 2 or ids[0] == ids[1]:
            raise DataError(
                f"{self.folder}: expected a tokenizer that encodes {text!r} as two different tokens, got the ids {ids}"
            )
        return ids


def qwen_chat(question: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the turns, each with its role, of a transcript in the format ``qwen``."""
    answer = "".join(text + STEP_MARKS["qwen"] for text in texts)
    return [("system", SYSTEM), ("user", question), ("assistant", answer)]


def shepherd_text(question: str, texts: Sequence[str]) -> str:
    """Return a transcript in the format ``shepherd``."""
    lines = [f"Step {number}: {text} {STEP_MARKS['shepherd']}" for number, text in enumerate(texts, 1)]
    return f"{question} " + "\n".join(lines)


def _qwen(prm: StepRewardModel) -> tuple[Write, Read]:
    step, run, apply = prm._id(STEP_MARKS["qwen"]), *_with_head(prm, ("score.0", "score.2"))

    def write(question: str, texts: Sequence[str]) -> Steps:
        ids = prm._rendered(qwen_chat(question, texts))
        return Steps(ids, [place for place, token in enumerate(ids) if token == step])

    def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return apply(run(ids, mask)).softmax(dim=-1)[..., 1]

    return write, read


def _skywork(prm: StepRewardModel) -> tuple[Write, Read]:
    line, run, apply = prm._id(STEP_MARKS["skywork"]), *_with_head(prm, ("v_head.summary",))
    first = prm._tokenizer.bos_token or ""

    def write(question: str, texts: Sequence[str]) -> Steps:
        ids, places = prm._encode(f"{first}{question}\n"), []
        for text in texts:
            # A line break within a message would end its step.
            ids += [*prm._encode(" ".join(text.split("\n"))), line]
            places.append(len(ids) - 1)
        return Steps(ids, places)

    def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return apply(run(ids, mask))[..., 0].sigmoid()

    return write, read


def _shepherd(prm: StepRewardModel) -> tuple[Write, Read]:
    tag, words = prm._id(STEP_MARKS["shepherd"]), prm._two("+ -")

    def write(question: str, texts: Sequence[str]) -> Steps:
        ids = prm._encode(shepherd_text(question, texts), special=True)
        return Steps(ids, [place for place, token in enumerate(ids) if token == tag])

    return write, _first_of_two(prm, words)


def _rlhflow(prm: StepRewardModel) -> tuple[Write, Read]:
    words = [prm._id("+"), prm._id("-")]

    def write(question: str, texts: Sequence[str]) -> Steps:
        turns: list[tuple[str, str]] = []
        ids: list[int] = []
        places = []
        for text in [f"{question} {texts[0]}", *texts[1:]]:
            turns += [("user", text), ("assistant", "+")]
            before, ids = ids, prm._rendered(turns)
            if words[0] not in ids[len(before) :] or ids[: len(before)] != before:
                raise CriticError(
                    f"{prm.name}: format rlhflow needs a chat template that leaves earlier turns unchanged, got one "
                    "that changes them; use another model or format"
                )
            # The answer is the last plus sign; its logits are at the preceding token.
            places.append(len(ids) - 2 - ids[::-1].index(words[0]))
        return Steps(ids, places)

    return write, _first_of_two(prm, words)


FORMATS: dict[str, Callable[[StepRewardModel], tuple[Write, Read]]] = {
    "qwen": _qwen,
    "shepherd": _shepherd,
    "rlhflow": _rlhflow,
    "skywork": _skywork,
}
"""By format, a function that loads the model and returns its transcript formatter and its scoring function."""


def _first_of_two(prm: StepRewardModel, words: list[int]) -> Read:
    """Load a language model; return a function that computes the probability of the first of two tokens."""
    model = _loaded(prm, "AutoModelForCausalLM")

    def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits[..., words].softmax(dim=-1)[..., 0]

    return read


def _with_head(prm: StepRewardModel, layers: Sequence[str]) -> tuple[Read, Callable[[torch.Tensor], torch.Tensor]]:
    """Load a backbone and the linear layers above it; return functions that run the backbone and apply the layers."""
    import torch

    names = [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]
    tensors = read_tensors(Path(prm.folder), names)
    if lacking := sorted(set(names) - set(tensors)):
        raise DataError(
            f"{prm.folder}: expected a head with {', '.join(lacking)}, which the safetensors files lack; set format= "
            "to the model's format, or download the model again"
        )
    model = _loaded(prm, "AutoModel")
    weights = [tensors[name].to(model.device, model.dtype) for name in names]

    def run(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state

    def apply(hidden: torch.Tensor) -> torch.Tensor:
        for number in range(0, len(weights), 2):
            hidden = torch.relu(hidden) if number else hidden
            hidden = torch.nn.functional.linear(hidden, weights[number], weights[number + 1])
        return hidden.float() if hidden.dtype != torch.float64 else hidden

    return run, apply


def _loaded(prm: StepRewardModel, kind: str) -> PreTrainedModel:
    model, info = load_pretrained(kind, prm.folder, prm._dtype)
    if missing := info["missing_keys"]:
        raise DataError(
            f"{prm.folder}: format {prm.format} needs the weights {', '.join(sorted(missing))[:200]}, which the model "
            "lacks; set format= to the model's format, or download the model again"
        )
    prm._start(model)
    return model


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return those of the named tensors that a folder's safetensors files have. Raises `DataError` for a bad file."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found |= {key: file.get_tensor(key) for key in set(names) & set(file.keys())}
        except (SafetensorError, OSError) as error:
            raise DataError(f"cannot read the weights in {path}: {error}; copy the file again") from error
    return found


def guess_format(model: str, folder: str) -> str:
    """Return the format that a folder's config, weights or name indicate.

    Raises:
        ConfigError: The format cannot be determined.
    """
    architectures = read_object(Path(folder) / "config.json").get("architectures") or []
    if "Qwen2ForProcessRewardModel" in architectures:
        return "qwen"
    if read_tensors(Path(folder), ["v_head.summary.weight"]):
        return "skywork"
    for sign, format in (("math-shepherd", "shepherd"), ("3.1-8b-prm", "rlhflow")):
        if sign in model.lower():
            return format
    raise ConfigError(
        f"prm:{model}: its format cannot be inferred from its files; set format= to one of {', '.join(FORMATS)}"
    )


class ScalarRewardModel(_Published):
    """A published scalar reward model: sequence classification with one label, over a chat of question and answer.

    The answer is the messages of the transcript, joined by blank lines. The value is ``tanh(logit / scale)``. Examples
    are Skywork-Reward, ArmoRM's scalar variants and others that ``AutoModelForSequenceClassification`` loads.

    Args:
        model: A folder or a hub id.
        scale: The logit whose value is ``tanh(1)``; use a larger scale for models with logits far from 0.
        prefixes: Also score non-terminal states, for which such models were not trained.
        device, dtype, max_batch, max_length: As in `StepRewardModel`.

    Attributes:
        name: ``"rm:FOLDER"``.
        terminal_only: True unless ``prefixes``.

    Raises:
        DataNotFoundError: There is no model.
        DataError: The model has no head with one label, or no chat template.
        ConfigError: A setting is invalid.
    """

    def __init__(
        self,
        model: str,
        *,
        scale: float = 1.0,
        prefixes: bool = False,
        device: str | None = None,
        dtype: str | None = None,
        max_batch: int = 64,
        max_length: int | None = None,
    ) -> None:
        if not is_number(scale) or scale <= 0:
            raise ConfigError(f"rm: expected a positive scale, got {scale!r}")
        super().__init__(model, device, dtype, max_batch, max_length)
        self.name = f"rm:{Path(model).name}"
        self.terminal_only = not prefixes
        self._scale = float(scale)
        self._settings |= {"scale": self._scale, "prefixes": prefixes}
        self._start(load_scalar(self.folder, self._dtype, self._tokenizer.pad_token_id, new_head=False))
        self._rendered([("user", "a"), ("assistant", "b")])

    def logits(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return the model's raw scores."""
        import torch

        rows = []
        for context in contexts:
            answer = "\n\n".join(self._clean(turn.text) for turn in context.state.path()[1:])
            rows.append(self._rendered([("user", self._clean(context.state.question)), ("assistant", answer)]))
        found: dict[int, float] = {}
        with torch.inference_mode():
            for group, ids, mask in self._batches(rows):
                logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0]
                found |= dict(zip(group, logits.double().tolist(), strict=True))
        return [found[place] for place in range(len(rows))]

    def values(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return the values of distinct states, in order."""
        return [math.tanh(logit / self._scale) for logit in self.logits(contexts)]
