"""Dry run at full size: `benchmarks.paper.all` for GSM8K with a Qwen2.5 with random weights, reduced to run on a CPU.

The run performs the steps of a run on GPUs: the data files, the prompts, NF4 and LoRA of rank 256, every table that
applies to GSM8K, and a second model for the transfer to other agents. It differs in three ways, which the page states.
The weights are random. Messages are short. The labels are random (`benchmarks.paper.coin`), because random weights
never answer correctly, a few minutes of training do not change this, and weights biased to a small number would also
give random labels. Therefore no accuracy on any page of a dry run is meaningful. The page of this module reports the
cost of a run.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import mas_gym
from benchmarks.paper import coin
from benchmarks.paper.all import Spent, make
from benchmarks.paper.lab import Lab, Setting, note, or_exit, problems
from benchmarks.paper.options import Options, parameters
from benchmarks.paper.page import Page, write_page, write_whole
from mas_gym.errors import DataNotFoundError
from mas_gym.policies.local.chat import ChatFormat
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.systems.prompts import ChatMessage, chat_messages
from mas_gym.tasks import Task
from rewardmodels import PAPER
from rewardmodels.model.backbone import load_tokenizer
from rewardmodels.training.train_critic import ROLLOUTS
from search import MCTS, BestOfN, Planner, SelfConsistency, SinglePass, StepBeamSearch, Usage, load_planner, open_store

VOCABULARY = 4096
CUT = {"hidden_size": 96, "intermediate_size": 560, "num_hidden_layers": 2}
"""The sizes that are cut."""

HEADS = {"transformers": (12, 2), "vllm": (3, 1)}
"""Heads, and heads of keys and values: those of Qwen2.5-1.5B, but vLLM's kernels for CPUs need heads of 32 at least."""

FEW = Options(number=20, trees=10, dynamic_trees=3, dev_trees=5, seeds=(14,), max_new_tokens=8)
SIZES = {
    "number": "test problems",
    "trees": "training searches per task and system",
    "dynamic_trees": "the same for dynamic schedules",
    "dev_trees": "searches of the dev split",
    "max_new_tokens": "longest message, in tokens",
}
"""The configurable sizes of a dry run, with descriptions."""

SPREAD, QWEN_SPREAD = 0.5, 0.02
"""Standard deviation of the random weights, and Qwen2.5's, which a critic's new head gets. With Qwen2.5's own all next
tokens are about equally likely, and exact sampling computes every near tie twice."""

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPENT = "spent.json"
END, PAD = "<|im_end|>", "<|endoftext|>"
DASH = "\N{EN DASH}"

WINDOW = 32_768
MESSAGE = 175
"""Tokens of a message: the paper's mean on GSM8K."""

NF4_BYTES, ADAM = 0.516, 4
"""Bytes of a weight in NF4 with doubly quantised scales, and values in float32 of each trained weight."""

ASKS = """
This page reports a run of `benchmarks.paper.all` for GSM8K on a CPU. Data files, prompts, tables and training config
are those of the full-size run. The model is a Qwen2.5 with random weights, reduced to {parameters:,} parameters. The
run shows that every stage works, and measures the number of calls and tokens.

**The labels are random.** Agents with random weights never answer correctly. Therefore one message in three is labeled
as right, regardless of its text, and no accuracy on any page of this run is meaningful. The task's grader extracted an
answer from {read:,} of {graded:,} final messages of the training searches; {right:,} were right. Messages end after at
most {cap} tokens.
"""


class Sizes(NamedTuple):
    """The architecture of a model with Qwen2.5's structure.

    Attributes:
        name: Its name.
        hidden: Width.
        inner: Width of the feed-forward layers.
        layers: Number of layers.
        shared: Width of keys, and of values.
        vocabulary: Rows of the embedding.
    """

    name: str
    hidden: int
    inner: int
    layers: int
    shared: int
    vocabulary: int


QWEN = (Sizes("Qwen2.5-1.5B", 1536, 8960, 28, 256, 151_936), Sizes("Qwen2.5-7B", 3584, 18_944, 28, 512, 152_064))


# ------------------------------------------------------------------ the models


def make_tokenizer(texts: Iterable[str]) -> Any:
    """Train a tokenizer of Qwen2.5's kind: byte-level BPE that splits as Qwen2.5's, special tokens and ChatML."""
    from transformers import Qwen2Tokenizer

    special = [PAD, "<|im_start|>", END]
    made: Any = Qwen2Tokenizer().train_new_from_iterator(texts, VOCABULARY, new_special_tokens=special[1:])
    made.eos_token, made.pad_token, made.chat_template = END, PAD, TEMPLATE
    return made


def make_model(folder: Path, tokenizer: Any, seed: int, heads: tuple[int, int] = HEADS["transformers"]) -> Path:
    """Write a Qwen2.5 model of random weights, with its tokenizer; unless it is there."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(seed)
    end, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=WINDOW,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=pad,
        eos_token_id=end,
        pad_token_id=pad,
        initializer_range=SPREAD,
        **CUT,
    )
    model = Qwen2ForCausalLM(config)
    model.config.initializer_range = QWEN_SPREAD
    model.generation_config.eos_token_id = [end, pad]
    fresh = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    fresh.rename(folder)
    return folder


def math_folder(file: Path, folder: Path) -> Path:
    """Divide a file of MATH problems into a training pool of four fifths and a test set, as the task's folder."""
    if not file.exists():
        raise DataNotFoundError(f"expected MATH problems at {file}: --data has gsm8k/ and math500/test.jsonl")
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", lines[: len(lines) * 4 // 5]), ("test", lines[len(lines) * 4 // 5 :])):
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n", encoding="utf-8")
    return folder


def prepare(data: Path, out: Path, options: Options, engine: str = "transformers") -> Options:
    """Write the data of the second task and the models, and return the options of the run.

    Args:
        data: The folder of the data files.
        out: The folder of the run.
        options: Sizes and tables.
        engine: Runs the agents, ``"transformers"`` or ``"vllm"``.
    """
    partner = math_folder(data / "math500" / "test.jsonl", out / "data" / "math")
    setting = Setting("gsm8k", "rpsv", "", data / "gsm8k")
    texts = [problem.question for problem in problems(setting, "train", None)]
    texts += [str(problem.metadata.get("solution", "")) for problem in problems(setting, "train", None)]
    texts += [problem.question for problem in problems(Setting("math", "rpsv", "", partner), "train", None)]
    tokenizer = make_tokenizer(texts)
    models, heads = out / "models", HEADS[engine]
    agents, others = (
        make_model(models / name, tokenizer, seed, heads) for seed, name in enumerate(("agents", "others"))
    )
    return replace(
        options,
        out=out,
        task="gsm8k",
        data=data / "gsm8k",
        partner="math",
        partner_data=partner,
        policy=f"{engine}:{agents}",
        other_policy=f"{engine}:{others}",
        base=str(agents),
        recipe="paper",
        grader=f"{coin.__file__}:flip",
    )


# ------------------------------------------------------------------ costs


def most_calls(planner: Planner, depth: int) -> int | None:
    """Return the largest number of agent calls of a search of a problem; None for planners that are not the paper's.

    Args:
        planner: The search.
        depth: The scheduled depth D.
    """
    if isinstance(planner, SinglePass):
        return depth
    if isinstance(planner, SelfConsistency):
        return planner.k * depth
    if isinstance(planner, BestOfN):
        return planner.n * depth
    if isinstance(planner, StepBeamSearch):
        return planner.b2 + (depth - 1) * planner.b1 * planner.b2
    if isinstance(planner, MCTS):
        # A state is expanded once, and a level has no more states than simulations that reach it.
        width = planner.max_children
        return sum(width * min(width**level, planner.n_simulations) for level in range(depth))
    return None


class Prompts(NamedTuple):
    """What one agent reads and writes in the training searches.

    Attributes:
        agent: Its name.
        messages: Messages that it reads in addition to the question.
        characters: Of instructions and question, per problem.
        fixed: The same in tokens.
        tokens: Tokens of each prompt.
        written: Tokens of each message that it wrote.
        longest: Tokens that the messages which it reads may have.
    """

    agent: str
    messages: int
    characters: float
    fixed: float
    tokens: Sequence[int]
    written: Sequence[int]
    longest: int


def prompts(lab: Lab, setting: Setting) -> list[Prompts]:
    """Measure the prompts of each agent of a system in the training searches."""
    mas, encode = mas_gym.load_mas(setting.mas), ChatFormat(load_tokenizer(lab.options.base), WINDOW).encode
    read: dict[int, list[int]] = defaultdict(list)
    written: dict[int, list[int]] = defaultdict(list)
    questions: dict[str, str] = {}
    for item in lab.training_trees(setting):
        tree = item.tree
        questions[item.problem_id] = tree.states[0].question
        for node, state in enumerate(tree.states):
            children = tree.children(node)
            if children:
                read[state.acting].append(len(encode(chat_messages(mas, state), 1).ids))
                written[state.acting] += [tree.tokens[child] for child in children]
    return [_prompts(mas, agent, list(questions.values()), encode, read, written) for agent in range(mas.sink)]


def _prompts(
    mas: MAS,
    agent: int,
    questions: Sequence[str],
    encode: Any,
    read: Mapping[int, list[int]],
    written: Mapping[int, list[int]],
) -> Prompts:
    known = mas.agents[agent]
    fixed = [
        (("system", known.system_prompt), ("user", text.strip() if mas.sees_question[agent] else ""))
        for text in questions
    ]
    sources = sorted({edge.source for edge in mas.edges if edge.target == agent and edge.source >= 0})
    return Prompts(
        known.name,
        len(sources),
        mean(sum(len(text) for _, text in messages) for messages in fixed),
        mean(len(encode([ChatMessage(*message) for message in messages], 1).ids) for messages in fixed),
        read.get(agent, ()),
        written.get(agent, ()),
        sum(mas.agents[source].max_new_tokens for source in sources),
    )


def prompt_table(page: Page, lab: Lab, settings: Mapping[str, Setting]) -> None:
    """Add the table of prompts and messages, by agent."""
    rows = []
    for name, setting in settings.items():
        for one in prompts(lab, setting):
            rows.append(
                (
                    name,
                    one.agent,
                    one.messages,
                    f"{one.characters:,.0f}",
                    f"{one.fixed:,.0f}",
                    _of(one.tokens),
                    f"{max(one.tokens):,}" if one.tokens else DASH,
                    _of(one.written),
                    f"{one.fixed + one.messages * MESSAGE:,.0f}",
                    f"{one.fixed + one.longest:,.0f}",
                )
            )
    header = (
        "system",
        "agent",
        "messages read",
        "fixed characters",
        "fixed tokens",
        "prompt, mean",
        "prompt, longest",
    )
    page.blocks.append("## Prompts\n")
    page.table(
        (*header, "written, mean", f"prompt at {MESSAGE} tokens a message", "prompt at the agents' caps"), rows, 2
    )
    page.blocks.append(
        "The fixed part of a prompt contains the agent's instructions, the question and the chat template. Tokens are "
        f"counted with the tokenizer that was trained for this run, with {VOCABULARY:,} entries; Qwen2.5's tokenizer "
        "has 151,665 entries and gives fewer tokens for the same text. "
        f"The paper's messages on GSM8K have {MESSAGE} tokens on average (0.7 thousand tokens in 4 calls). A Judge "
        "with random weights never writes the verdict that activates the refiners, so the refiners have no prompts "
        "here.\n"
    )


def _of(values: Sequence[int]) -> str:
    return f"{mean(values):,.0f}" if values else DASH


class Cost(NamedTuple):
    """The cost of one kind of searches, per problem.

    Attributes:
        task: The task.
        mas: The system.
        planner: The search.
        most: The largest possible number of agent calls.
        usages: Of each search.
    """

    task: str
    mas: str
    planner: str
    most: int | None
    usages: Sequence[Usage]


def costs(stores: Iterable[Path]) -> list[Cost]:
    """Read the cost of all stored searches, by task, system and planner, for all critics together."""
    found: dict[tuple[str, str, str], list[Usage]] = defaultdict(list)
    most: dict[tuple[str, str, str], int | None] = {}
    for path in stores:
        with open_store(path) as store:
            for info in store.runs():
                planner, mas = str(info.facts["planner"]), info.mas
                bound = most_calls(load_planner(planner), Dynamics(mas).max_depth)
                for plan in store.plans(info.run, trees=False):
                    # Searches of several tasks may belong to one run.
                    key = plan.problem_id.partition("/")[0], mas.name, planner
                    most[key] = bound
                    found[key].append(plan.usage)
    return [Cost(*key, most[key], usages) for key, usages in sorted(found.items())]


def call_table(page: Page, title: str, stores: Iterable[Path]) -> None:
    """Add the table of calls and tokens per search."""
    rows = []
    for cost in costs(stores):
        calls = [usage.agent_calls for usage in cost.usages]
        rows.append(
            (
                f"{cost.task}, {cost.mas}",
                cost.planner,
                len(calls),
                f"{mean(calls):,.1f}",
                f"{max(calls):,}",
                DASH if cost.most is None else f"{cost.most:,}",
                *(
                    f"{mean(getattr(usage, name) for usage in cost.usages):,.1f}"
                    for name in ("generated_tokens", "prompt_tokens", "reward_calls")
                ),
            )
        )
    header = ("task and system", "search", "searches", "agent calls, mean", "maximum", "bound")
    page.blocks.append(f"## {title}\n")
    page.table((*header, "generated tokens", "prompt tokens", "reward calls"), rows, 2)


# ------------------------------------------------------------------ memory


def saved_bytes(size: Sizes, tokens: int) -> tuple[int, int]:
    """Return what training keeps of one forward pass in bfloat16, and the number of trained weights.

    The model has no weights and computes nothing: only the shapes of what autograd saves are added up. Attention is
    counted as a fused kernel saves it, and frozen 4-bit weights as saved by nobody.
    """
    import peft
    import torch
    from transformers import AttentionInterface, AutoModelForSequenceClassification, Qwen2Config

    def fused(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> tuple[Any, None]:
        groups = query.shape[1] // value.shape[1]
        # Saves query, key and value once each; its output is saved by the layer that follows.
        return (query * key.repeat_interleave(groups, 1) * value.repeat_interleave(groups, 1)).transpose(1, 2), None

    AttentionInterface.register("counted", fused)
    config = Qwen2Config(
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 128,
        num_key_value_heads=size.shared // 128,
        vocab_size=size.vocabulary,
        num_labels=1,
        pad_token_id=0,
        attn_implementation="counted",
    )
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
        lora = peft.LoraConfig(
            task_type="SEQ_CLS",
            r=PAPER.lora_rank,
            lora_alpha=PAPER.lora_alpha,
            lora_dropout=PAPER.lora_dropout,
            target_modules="all-linear",
            modules_to_save=["score"],
        )
        model = peft.get_peft_model(model, lora).train()
        ids = torch.zeros((1, tokens), dtype=torch.long)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        # The tensor is kept too, so that no other gets its storage.
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    del out
    kept = sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in weights)
    return kept, sum(p.numel() for p in model.parameters() if p.requires_grad)


def memory_table(page: Page) -> None:
    """Add what training a scorer of full size needs, computed from the model's structure."""
    rows = []
    for size in QWEN:
        linear = size.layers * size.hidden * (2 * size.hidden + 2 * size.shared + 3 * size.inner)
        frozen = linear * NF4_BYTES + 2 * size.vocabulary * size.hidden
        example, trained = saved_bytes(size, PAPER.max_length)
        whole = example * PAPER.max_tokens / PAPER.max_length
        each = 4 * ADAM * trained
        values = (frozen, each, example, whole, frozen + each + example, frozen + each + whole)
        rows.append((size.name, *(f"{value / 1e9:,.1f}" for value in values)))
    page.blocks.append("## Memory of a training run, in GB\n")
    short, full = (f"{tokens:,} tokens" for tokens in (PAPER.max_length, PAPER.max_tokens))
    parts = ("frozen weights", f"LoRA of rank {PAPER.lora_rank}", f"a pass of {short}", f"of {full}")
    page.table(("scorer", *parts, f"in all, {short}", f"in all, {full}"), rows)
    page.blocks.append(
        "The figures are estimates, computed from the shapes of the tensors that autograd saves. Trained weights are "
        "in float32, with their gradients and two AdamW moments. A forward pass contains several examples, with at "
        "most `max_tokens` tokens in total. `--set max_tokens=2048` gives the same gradient with about one example per "
        "pass; `--set gradient_checkpointing=true` trades time for memory. The workspaces of kernels, "
        "and fragmentation, need additional memory.\n"
    )


# ------------------------------------------------------------------ the page


def rehearse(options: Options, folder: Path) -> Path:
    """Run every table, and write a page of costs into a folder."""
    out = options.out
    make(options, lambda name, spent: keep_spent(out, name, spent))
    note("rehearsal: reading what it cost")
    lab = Lab(options)
    systems = {"rpsv, GSM8K": lab.home, "rpsv, MATH": lab.partner, "dylan, GSM8K": lab.home._replace(mas="dylan")}
    for setting in systems.values():
        # Some tables alone need not all of them.
        lab.rollouts(setting)
    page = Page("rehearsal", "Dry run at full size", _asks(lab))
    stage_table(page, out)
    call_table(page, "Training searches", sorted((out / "rollouts").glob("*.db")))
    page.blocks.append(
        f"The paper's bound for {ROLLOUTS} is 40 x 3 x D agent calls. A state is expanded once, so the bound here is "
        "smaller: the sum over the D levels of 3 min(3^d, 40). Random messages are never equal, so these trees have "
        "nearly the maximum width. Agents that repeat messages make fewer calls.\n"
    )
    call_table(page, "Searches of the tables", [out / "searches.db"])
    prompt_table(page, lab, systems)
    memory_table(page)
    return write_page(page, folder, _command(options), lab.facts())


def _command(options: Options) -> str:
    words = ["python -m benchmarks.paper.rehearsal --data DIR --out FOLDER"]
    for name in SIZES:
        if getattr(options, name) != getattr(FEW, name):
            words.append(f"--{name.replace('_', '-')} {getattr(options, name)}")
    if options.policy.startswith("vllm:"):
        words.append("--policy vllm")
    return " ".join([*words, *options.tables])


def _asks(lab: Lab) -> str:
    task: Task = mas_gym.load_task("gsm8k", split="train", data=lab.options.data)
    grades = [
        task.grade(task.problem(item.problem_id), state.text)
        for item in lab.training_trees(lab.home)
        for node, state in enumerate(item.tree.states)
        if item.tree.is_terminal(node)
    ]
    return ASKS.format(
        parameters=parameters(Path(lab.options.base)),
        read=sum(grade.extracted is not None for grade in grades),
        graded=len(grades),
        right=sum(grade.correct for grade in grades),
        cap=lab.options.max_new_tokens,
    )


def keep_spent(out: Path, name: str, spent: Spent) -> None:
    """Save the cost of a table; a process that only reads a finished table changes nothing."""
    known = spent_of(out)
    if name not in known or known[name].cpu < spent.cpu:
        write_whole(out / SPENT, json.dumps({**known, name: spent}))


def spent_of(out: Path) -> dict[str, Spent]:
    """Return what each table took."""
    file = out / SPENT
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {name: Spent(*times) for name, times in found.items()}


def stage_table(page: Page, out: Path) -> None:
    """Add what each table took, and what lies in the folder."""
    spent = spent_of(out)
    rows = [(name, f"{one.wall:,.0f}", f"{one.cpu:,.0f}") for name, one in spent.items()]
    total = [sum(getattr(one, kind) for one in spent.values()) for kind in ("wall", "cpu")]
    page.blocks.append("## Stages\n")
    page.table(("table", "seconds", "CPU seconds"), [*rows, ("all", *(f"{value:,.0f}" for value in total))])
    critics = sorted((out / "critics").glob("*/critic.json"))
    trained = json.loads(critics[0].read_text(encoding="utf-8"))["settings"]
    recipe = ", ".join(
        f"{name} {trained[name]}" for name in ("lora_rank", "nf4", "epochs", "batch_size", "accumulation")
    )
    sizes = {
        "training searches": (out / "rollouts").glob("*.db"),
        "searches": out.glob("*.db"),
        f"{len(critics)} critics": (out / "critics").rglob("*"),
        "pages": (out / "pages").glob("*"),
        "results": (out / "results").glob("*"),
    }
    page.blocks.append(
        "The time of a table includes the training runs and searches that no earlier table needed. Each critic was "
        f"trained with the paper's training config ({recipe}).\n"
    )
    page.table(("in the folder", "files", "MB"), [(name, *_weight(files)) for name, files in sizes.items()])


def _weight(files: Iterator[Path]) -> tuple[str, str]:
    sizes = [path.stat().st_size for path in files if path.is_file()]
    return f"{len(sizes):,}", f"{sum(sizes) / 1e6:,.1f}"


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and rehearse."""
    given = vars(command_line().parse_args(arguments))
    data, out, page, engine = (given.pop(name) for name in ("data", "out", "page", "policy"))
    with or_exit():
        options = prepare(data, out.resolve(), replace(FEW, **{**given, "tables": tuple(given["tables"])}), engine)
        path = rehearse(options, page or out / "pages")
    note(f"wrote {path}")


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper.rehearsal", description=about)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with gsm8k/train.jsonl, gsm8k/test.jsonl, math500/test.jsonl")
    add("--out", type=Path, required=True, help="models, stores, critics and pages; the same command resumes")
    add("--page", type=Path, help="folder of the page [OUT/pages]")
    for name, meaning in SIZES.items():
        default = getattr(FEW, name)
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", default=default, help=f"{meaning} [{default}]")
    add("--policy", choices=tuple(HEADS), default="transformers", help="engine of the agents [transformers]")
    add("tables", nargs="*", help="tables of benchmarks.paper.all [all]")
    return parser


if __name__ == "__main__":
    main()
