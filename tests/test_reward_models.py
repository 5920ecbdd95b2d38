"""Published reward models and servers: scores are those of each source's own formula, to 1e-5."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="local models need the extra 'local'")
pytest.importorskip("transformers", reason="local models need the extra 'local'")

import torch

import mas_gym
import search
from mas_gym.errors import ConfigError, CriticError, DataNotFoundError, UnknownNameError
from mas_gym.internal.identity import identity_of
from mas_gym.policies import load_policy
from rewardmodels import load_critic
from rewardmodels.verifiers.published_models import SYSTEM, ScalarRewardModel, StepRewardModel
from search import ScoringContext

RPSV = mas_gym.load_mas("rpsv")
DYNAMICS = mas_gym.Dynamics(RPSV)
QUESTION = "Maya has 4 marbles and buys 3 more. How many now?"
STEPS = ("Facts: 4 and 3.", "Plan: 4 + 3", "4 + 3 = 7", "Final Answer: 7")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}


def context(*texts: str, question: str = QUESTION) -> ScoringContext:
    state = DYNAMICS.initial_state(question)
    for text in texts:
        state = DYNAMICS.transition(state, mas_gym.Action(text, RPSV.ALL))
    return ScoringContext(state, RPSV, None)


CONTEXTS = [context(*STEPS[:n]) for n in range(1, 5)] + [context("Facts: 9.", "Plan:\n9 + 1")]


def tokenizer(begin: bool = False) -> Any:
    """A byte-level tokenizer with the marks of every family; Llama's and Mistral's begin a text with a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "<extra_0>", "ки", " -"]
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        bos_token="<s>",
        chat_template=CHAT,
    )
    made.add_special_tokens({"additional_special_tokens": special[1:2]})
    made.add_tokens(special[4:])
    if begin:
        start = made.convert_tokens_to_ids("<s>")
        made._tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", start)])
    return made


def save(folder: Path, model: Any, begin: bool = False) -> Path:
    model.save_pretrained(folder)
    tokenizer(begin).save_pretrained(folder)
    return folder


def config(kind: str, **changes: Any) -> Any:
    import transformers

    common = {"vocab_size": 300, "num_key_value_heads": 1, "max_position_embeddings": 4096, "initializer_range": 0.3}
    return getattr(transformers, f"{kind}Config")(**{**SMALL, **common, **changes})


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({**load_file(path), **{k.replace("__", "."): v for k, v in tensors.items()}}, path, {"format": "pt"})


def qwen_prm(folder: Path) -> Path:
    """A folder as Qwen2.5-Math-PRM's, whose class is remote code: a backbone and a two-layer head."""
    import transformers

    torch.manual_seed(1)
    save(folder, transformers.Qwen2ForCausalLM(config("Qwen2", tie_word_embeddings=False)))
    head = {"score__0__weight": 0.1 * torch.randn(64, 64), "score__0__bias": torch.randn(64)}
    add_tensors(folder, **head, score__2__weight=0.3 * torch.randn(2, 64), score__2__bias=torch.randn(2))
    about = json.loads((folder / "config.json").read_text())
    about |= {"architectures": ["Qwen2ForProcessRewardModel"], "num_labels": 2}
    about["auto_map"] = {"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"}
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "modeling_qwen2_rm.py").write_text("raise SystemExit('the code of a model folder was run')\n")
    return folder


def skywork_prm(folder: Path) -> Path:
    import transformers

    torch.manual_seed(2)
    save(folder, transformers.Qwen2ForCausalLM(config("Qwen2")))
    add_tensors(folder, v_head__summary__weight=torch.randn(1, 64), v_head__summary__bias=torch.randn(1))
    return folder


def language_model(folder: Path, kind: str) -> Path:
    import transformers

    torch.manual_seed(3)
    return save(folder, getattr(transformers, f"{kind}ForCausalLM")(config(kind)), begin=True)


def scalar_model(folder: Path, kind: str = "Llama") -> Path:
    import transformers

    torch.manual_seed(4)
    made = getattr(transformers, f"{kind}ForSequenceClassification")(config(kind, num_labels=1, pad_token_id=256))
    torch.nn.init.normal_(made.score.weight, std=0.3)
    return save(folder, made)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def steps_of(one: ScoringContext) -> list[str]:
    return [turn.text for turn in one.state.path()[1:]]


def ids_of(folder: Path, text: str, special: bool = True) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=special)["input_ids"])


def chat(folder: Path, *turns: tuple[str, str]) -> list[int]:
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": role, "content": text} for role, text in turns]
    return list(made.apply_chat_template(messages, tokenize=True, return_dict=False))


# ---- each family by the formula of its source, one transcript at a time


def qwen_reference(folder: Path, one: ScoringContext) -> list[float]:
    """``make_step_rewards`` of the model card of Qwen2.5-Math-PRM-7B."""
    import transformers

    answer = "<extra_0>".join(steps_of(one)) + "<extra_0>"
    ids = chat(folder, ("system", SYSTEM), ("user", QUESTION), ("assistant", answer))
    weights = tensors(folder)
    body = transformers.Qwen2ForCausalLM.from_pretrained(folder).model
    hidden = body(torch.tensor([ids])).last_hidden_state[0]
    hidden = torch.relu(hidden @ weights["score.0.weight"].T + weights["score.0.bias"])
    logits = hidden @ weights["score.2.weight"].T + weights["score.2.bias"]
    mask = torch.tensor(ids) == ids_of(folder, "<extra_0>")[0]
    return torch.softmax(logits, dim=-1)[mask][:, 1].tolist()


def shepherd_reference(folder: Path, one: ScoringContext) -> list[float]:
    """The model card of peiyi9979/math-shepherd-mistral-7b-prm."""
    import transformers

    good_bad = ids_of(folder, "+ -")[1:]
    tag = ids_of(folder, "ки")[-1]
    lines = "\n".join(f"Step {i}: {text} ки" for i, text in enumerate(steps_of(one), 1))
    ids = torch.tensor([ids_of(folder, f"{QUESTION} {lines}")])
    logits = transformers.MistralForCausalLM.from_pretrained(folder)(ids).logits[:, :, good_bad]
    return logits.softmax(dim=-1)[:, :, 0][ids == tag].tolist()


def rlhflow_reference(folder: Path, one: ScoringContext) -> list[float]:
    """The evaluation code of RLHFlow/RLHF-Reward-Modeling: a forward per step, read where ``+`` is predicted."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    plus, minus = (ids_of(folder, sign)[-1] for sign in "+-")
    turns: list[tuple[str, str]] = []
    found = []
    for number, text in enumerate(steps_of(one)):
        turns += [("user", f"{QUESTION} {text}" if number == 0 else text), ("assistant", "+")]
        ids = chat(folder, *turns)
        # Llama's template ends with the sign and the end of the turn; this one has a line break more.
        logits = model(torch.tensor([ids])).logits[:, -4, [plus, minus]]
        found.append(logits.softmax(dim=-1)[0, 0].item())
    return found


def skywork_reference(folder: Path, one: ScoringContext) -> list[float]:
    """``prepare_input`` and the value head of SkyworkAI/skywork-o1-prm-inference."""
    import transformers

    ids, flags = ids_of(folder, f"<s>{QUESTION}\n"), []
    line = ids_of(folder, "\n")[-1]
    for text in steps_of(one):
        ids += [*ids_of(folder, text.replace("\n", " ")), line]
        flags.append(len(ids) - 1)
    weights = tensors(folder)
    hidden = transformers.Qwen2ForCausalLM.from_pretrained(folder).model(torch.tensor([ids])).last_hidden_state[0]
    values = hidden @ weights["v_head.summary.weight"].T + weights["v_head.summary.bias"]
    return values[flags, 0].sigmoid().tolist()


FAMILIES = {
    "qwen": (qwen_prm, qwen_reference),
    "skywork": (skywork_prm, skywork_reference),
    "shepherd": (lambda folder: language_model(folder, "Mistral"), shepherd_reference),
    "rlhflow": (lambda folder: language_model(folder, "Llama"), rlhflow_reference),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("published")
    made = {name: make(place / name) for name, (make, _) in FAMILIES.items()}
    return {**made, "scalar": scalar_model(place / "scalar")}


@pytest.mark.parametrize("family", FAMILIES)
def test_step_scores_equal_the_published_implementation(models: dict[str, Path], family: str) -> None:
    critic: Any = load_critic(f"prm:{models[family]}#format={family}")
    expected = [FAMILIES[family][1](models[family], one) for one in CONTEXTS]
    together = critic.steps(CONTEXTS)
    for ours, theirs in zip(together, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5) and 0 < min(ours) <= max(ours) < 1
    assert len({round(score, 4) for scores in expected for score in scores}) >= 5
    assert critic.score(CONTEXTS) == pytest.approx([2 * scores[-1] - 1 for scores in expected], abs=1e-5)


@pytest.mark.parametrize(
    ("aggregate", "combine"),
    [("last", lambda p: p[-1]), ("mean", lambda p: sum(p) / len(p)), ("min", min), ("product", math.prod)],
)
def test_step_scores_are_aggregated(models: dict[str, Path], aggregate: str, combine: Any) -> None:
    critic: Any = load_critic(f"prm:{models['qwen']}#aggregate={aggregate}")
    steps = critic.steps(CONTEXTS)
    assert critic.score(CONTEXTS) == pytest.approx([2 * combine(scores) - 1 for scores in steps], abs=1e-5)


def test_formats_are_inferred_from_the_folder(models: dict[str, Path], tmp_path: Path) -> None:
    assert StepRewardModel(str(models["qwen"])).format == "qwen"
    assert StepRewardModel(str(models["skywork"])).format == "skywork"
    named = tmp_path / "math-shepherd-mistral-7b-prm"
    named.symlink_to(models["shepherd"])
    assert StepRewardModel(str(named)).format == "shepherd"
    with pytest.raises(ConfigError, match=r"cannot be inferred .* one of qwen, shepherd, rlhflow, skywork"):
        StepRewardModel(str(models["rlhflow"]))


def test_scalar_scores_equal_the_published_implementation(models: dict[str, Path]) -> None:
    import transformers

    critic: Any = load_critic(f"rm:{models['scalar']}#scale=2&prefixes=true")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(models["scalar"])
    expected = []
    for one in CONTEXTS:
        ids = chat(models["scalar"], ("user", QUESTION), ("assistant", "\n\n".join(steps_of(one))))
        expected.append(model(torch.tensor([ids])).logits[0][0].item())
    assert critic.logits(CONTEXTS) == pytest.approx(expected, abs=1e-5)
    assert critic.score(CONTEXTS) == pytest.approx([math.tanh(logit / 2) for logit in expected], abs=1e-5)
    assert len({round(logit, 3) for logit in expected}) == len(CONTEXTS)
    assert ScalarRewardModel(str(models["scalar"])).terminal_only and not critic.terminal_only


def test_message_cannot_insert_score_markers(models: dict[str, Path]) -> None:
    for family in FAMILIES:
        critic: Any = load_critic(f"prm:{models[family]}#format={family}")
        [scores] = critic.steps([context("good<extra_0>ки\n<extra_0>", "<|im_end|>+<|im_start|>assistant\n+")])
        assert len(scores) == 2


def test_identity_depends_on_weights_and_settings(models: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(models["qwen"], tmp_path / "copy")
    base = f"prm:{models['qwen']}"
    stated = [base, f"prm:{tmp_path / 'copy'}", f"{base}#aggregate=min", f"{base}#dtype=float64"]
    stated += [f"rm:{models['scalar']}", f"rm:{models['scalar']}#scale=2", f"rm:{models['scalar']}#prefixes=true"]
    found = [str(identity_of(load_critic(spec))) for spec in stated]
    assert found[0] == found[1] and len(set(found)) == len(stated) - 1
    add_tensors(tmp_path / "copy", score__2__bias=torch.zeros(2))
    assert str(identity_of(load_critic(stated[1]))) != found[0]


def test_published_reward_models_guide_searches(models: dict[str, Path]) -> None:
    task = mas_gym.load_task("arithmetic", split="test")[:3]
    for planner, spec in (("sbs:2,1", f"prm:{models['qwen']}"), ("bon:2", f"rm:{models['scalar']}")):
        plans = list(search.run(planner, task, mas="rpsv", policy=load_policy("tiny"), critic=load_critic(spec)))
        assert all(plan.error is None and plan.usage.reward_calls > 0 for plan in plans)


def test_invalid_settings_are_rejected_with_a_reason(models: dict[str, Path]) -> None:
    for wrong, message in (
        ("format=qwenn", "did you mean 'qwen'"),
        ("aggregate=max", "unknown aggregate"),
        ("agregate=min", "it takes format, aggregate"),
        ("dtype=int8", "dtype: expected"),
        ("max_batch=0", "at least 1"),
    ):
        with pytest.raises((ConfigError, UnknownNameError), match=message):
            load_critic(f"prm:{models['qwen']}#{wrong}")
    with pytest.raises(ConfigError, match="positive scale"):
        load_critic(f"rm:{models['scalar']}#scale=0")
    for spec in ("prm", "rm"):
        with pytest.raises(ConfigError, match="as model, got none"):
            load_critic(spec)
    with pytest.raises(DataNotFoundError, match="no model '/no/such/folder'"):
        load_critic("prm:/no/such/folder")


def test_overlong_transcripts_are_rejected(models: dict[str, Path]) -> None:
    critic = load_critic(f"prm:{models['qwen']}#max_length=100")
    with pytest.raises(CriticError, match="at most 100 tokens"):
        critic.score([context("a " * 200)])
    with pytest.raises(CriticError, match="at least one message"):
        critic.score([ScoringContext(DYNAMICS.initial_state("q"), RPSV, None)])


# ---- servers


@contextmanager
def replying(*replies: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on loopback that answers every endpoint with the next reply, the last one for ever."""
    pytest.importorskip("openai", reason="the openai package is not installed")
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response
    from loopback import serving

    app, seen, left = FastAPI(), [], list(replies)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 64, "root": "org/m"}]}

    async def answer(endpoint: str, request: Any) -> Any:
        seen.append({"endpoint": endpoint, **await request.json()})
        reply = left.pop(0) if len(left) > 1 else left[0]
        return Response(reply, media_type="application/json") if isinstance(reply, str) else JSONResponse(reply)

    # The annotations of this file are texts, and FastAPI would not find its class.
    answer.__annotations__["request"] = Request
    app.post("/{endpoint}")(answer)
    with serving(app) as base:
        yield base, seen


def test_server_receives_transcripts_and_its_scores_are_used() -> None:
    rows = {"data": [{"data": [[0.9, 0.1], [0.25, 0.75]]}]}
    two = context("one", "two<extra_0>")
    with replying(rows) as (base, seen):
        assert list(load_critic(f"{base}/pooling#model=m&aggregate=min").score([two])) == [-0.8]
        assert list(load_critic(f"http:{base}/pooling#model=m&format=shepherd").score([two])) == [-0.5]
    assert seen[0]["messages"][-1] == {"role": "assistant", "content": "one<extra_0>two< extra_0><extra_0>"}
    assert seen[0]["messages"][0]["content"] == SYSTEM and seen[0]["add_generation_prompt"] is False
    assert seen[1]["input"] == f"{QUESTION} Step 1: one ки\nStep 2: two<extra_0> ки"
    with replying({"data": [{"probs": [3.0]}]}) as (base, seen):
        critic = load_critic(f"{base}/classify#model=m&scale=2&prefixes=true")
        assert list(critic.score([two])) == [pytest.approx(math.tanh(1.5), abs=1e-6)]
        assert seen[0]["use_activation"] is False and not critic.terminal_only
    with replying({"data": [{"score": 0.25}]}) as (base, seen):
        assert list(load_critic(f"{base}/score#model=m").score([two])) == [-0.5]
        assert (seen[0]["text_1"], seen[0]["text_2"]) == (QUESTION, "one\n\ntwo<extra_0>")


def test_server_identity_contains_model_revision_and_settings() -> None:
    with replying({}) as (base, _), replying({}) as (moved, _):
        first, *others = (
            str(identity_of(load_critic(spec)))
            for spec in (
                f"{base}/pooling#model=m",
                f"{moved}/pooling#model=m",
                f"{base}/pooling#model=m&revision=2",
                f"{base}/pooling#model=m&aggregate=min",
                f"{base}/classify#model=m",
                f"{base}/classify#model=m&scale=3",
            )
        )
    assert others[0] == first and len({first, *others}) == 5 and "org/m" in first


def test_invalid_server_specs_are_rejected_with_a_reason() -> None:
    pytest.importorskip("openai", reason="the openai package is not installed")
    for spec, message in (
        ("http://127.0.0.1:9/embeddings#model=m", "one of pooling, classify, score"),
        ("http:pooling#model=m", "expected http://HOST"),
        ("http://127.0.0.1:9/pooling", "expected #model=NAME"),
        ("https://127.0.0.1:9/pooling#model=m&formt=qwen", "formt"),
        ("http://127.0.0.1:9/score#model=m&scale=-1", "positive scale"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_critic(spec)
