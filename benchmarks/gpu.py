"""Speed of search, scoring and training with models of the paper's size on a GPU, measured in ten minutes at most.

    python -m benchmarks.gpu                             # Qwen2.5-1.5B's configuration, needs a GPU
    python -m benchmarks.gpu --minutes 5 --out pages
    python -m benchmarks.gpu --config cut --out pages    # two small layers on a CPU, checks the command; gpu-cut.md

Agents and critic have random weights, so there are no downloads and no right answers; only speeds are measured. The
vocabulary is that of the bundled tiny model, extended by made-up words. Every n-th word ends a message, so that
messages have the paper's mean length. The page has three parts: MCTS(10,3) with the critic, relative to the same engine
if it receives the same requests all at once; scoring with shared prefixes, relative to whole states; and one LoRA
update with the paper's batch size. Each part runs in a separate process with a time limit. The page states which parts
were skipped and why. The script needs psutil, 8 GB of disk for the models, and peft for LoRA.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import mas_gym
import mas_gym.tiny
import search
from benchmarks.paper import coin
from benchmarks.paper.lab import note
from benchmarks.paper.page import Page, write_page, write_whole
from benchmarks.paper.rehearsal import HEADS, QWEN, WINDOW, most_calls
from mas_gym.errors import MissingDependencyError
from mas_gym.policies import SamplingRequest, ScriptedPolicy, load_policy
from rewardmodels import PAPER, LearnedCritic, collect
from rewardmodels.data.dataset import LabelledTree, graph_of

ROOT = Path(__file__).resolve().parents[1]
PLANNER, CONCURRENCY, DEPTH = "mcts:10,3", 64, 4
PARTS = {"models": 0.1, "search": 0.55, "scoring": 0.1, "lora": 0.25}
"""The parts, in order, and their shares of the time; a part that ends early leaves its rest to those after it."""

LONGEST = 10.0
"""Minutes of the command at most."""

RESERVE = 10.0
"""Seconds kept for imports, the page and the removal of the models."""

UPDATES = 3
"""LoRA updates; the first is not counted."""


class Config(NamedTuple):
    """The size of a measurement.

    Attributes:
        name: Name of the configuration.
        model: Arguments of ``Qwen2Config``.
        dtype: Of the weights.
        message: Mean length of a message, in tokens.
        cap: Longest message.
        batch: Rows of the engine, and of ``generate``.
        megabytes: Cache of encoded prefixes, of the local engine and of the critic.
        problems: Largest number of searches.
        trees: Search trees that are scored and mined for pairs.
    """

    name: str
    model: dict[str, Any]
    dtype: str
    message: int
    cap: int
    batch: int
    megabytes: int
    problems: int
    trees: int


_FULL = QWEN[0]
CONFIGS = {
    "qwen2.5-1.5b": Config(
        _FULL.name,
        {
            "vocab_size": _FULL.vocabulary,
            "hidden_size": _FULL.hidden,
            "intermediate_size": _FULL.inner,
            "num_hidden_layers": _FULL.layers,
            "num_attention_heads": HEADS["transformers"][0],
            "num_key_value_heads": HEADS["transformers"][1],
            "max_position_embeddings": WINDOW,
            "initializer_range": 0.02,
        },
        "bfloat16",
        message=175,
        cap=700,
        batch=128,
        megabytes=4096,
        problems=256,
        trees=64,
    ),
    "cut": Config(
        "a cut Qwen2",
        {
            "vocab_size": 1200,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            # A small model with Qwen2.5's 0.02 finds all tokens about equally likely: near ties are computed twice.
            "initializer_range": 0.25,
        },
        "float32",
        message=8,
        cap=16,
        batch=32,
        megabytes=64,
        problems=4,
        trees=12,
    ),
}


# ------------------------------------------------------------------ the models


def make_tokenizer(size: int) -> Any:
    """Return the bundled model's tokenizer, extended by made-up words to ``size`` entries."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(mas_gym.tiny.path()))
    first = len(tokenizer)
    # With normalisation the words are not found again in a text.
    tokenizer.add_tokens([AddedToken(f" {made_up(i)}", normalized=False) for i in range(first, size)])
    return tokenizer


def made_up(number: int) -> str:
    return f"w{number}"


def shape_of(config: Config, end: int, pad: int) -> Any:
    """Return transformers' configuration of agents and critic."""
    from transformers import Qwen2Config

    return Qwen2Config(
        **config.model,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=pad,
        num_labels=1,
    )


def models(config: Config, folder: Path, device: str, until: float) -> None:
    """Write agents and critic of random weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from rewardmodels.model.critic_folder import CriticInfo, model_card, save_folder

    tokenizer = make_tokenizer(config.model["vocab_size"])
    shape = shape_of(config, tokenizer.eos_token_id, tokenizer.pad_token_id)
    torch.manual_seed(0)
    dtype = getattr(torch, config.dtype)
    with torch.device(device):
        agents = AutoModelForCausalLM.from_config(shape, dtype=dtype)
        critic = AutoModelForSequenceClassification.from_config(shape, dtype=dtype)
    ends = range(config.message, config.model["vocab_size"], config.message)
    agents.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends]
    agents.save_pretrained(folder / "agents")
    tokenizer.save_pretrained(folder / "agents")
    graph = graph_of(mas_gym.load_mas("rpsv"))
    info = CriticInfo("masprm", "bt", "full", PAPER.max_length, {"rpsv": graph}, ["arithmetic"], "random", *({},) * 4)
    save_folder(critic, tokenizer, folder / "critic", info, model_card(info))
    keep(folder, "models", {"parameters": sum(p.numel() for p in agents.parameters())})


def keep(folder: Path, part: str, figures: Mapping[str, Any]) -> None:
    """Keep the figures of a part so far; they stay if its time runs out."""
    write_whole(folder / f"{part}.json", json.dumps(figures))


def critic_of(config: Config, folder: Path, device: str, **options: Any) -> LearnedCritic:
    return LearnedCritic(folder / "critic", device=device, memory=config.megabytes, **options)


# ------------------------------------------------------------------ search


def agents_of(config: Config, folder: Path, device: str) -> tuple[Any, str, str]:
    """Load the agents; return the policy, the engine's name, and why it is not vLLM."""
    why = "the cut configuration checks the local engine"
    if device == "cuda":
        try:
            return load_policy(f"vllm:{folder / 'agents'}", gpu_memory_utilization=0.5), "vLLM", ""
        except MissingDependencyError:
            why = "vLLM is not installed"
    options = {"device": device, "max_batch": config.batch, "prefix_megabytes": config.megabytes}
    return load_policy(f"transformers:{folder / 'agents'}", **options), "local engine", why


def search_part(config: Config, folder: Path, device: str, until: float) -> None:
    """Measure MCTS with the critic, and the engine alone on the requests of the search."""
    from benchmarks.engines import Watched, at_once, empty_cache, searched
    from benchmarks.local_engine import raw
    from mas_gym.policies.sessions import as_async

    policy, engine, why = agents_of(config, folder, device)
    on_vllm = engine == "vLLM"
    alone, critic = as_async(policy), critic_of(config, folder, device)
    question = (mas_gym.ChatMessage("user", "Ann has 12 pens and buys 3. How many pens has she now?"),)
    probes = [SamplingRequest(question, (seed,), config.cap) for seed in range(config.batch)]
    at_once(alone, probes[:1])
    probe = at_once(alone, probes)
    # Two measurements of the same tokens; the search may run at a third of the engine's rate.
    bound = most_calls(search.load_planner(PLANNER), DEPTH)
    assert bound is not None
    fitting = (until - time.time()) * probe.rate / (4 * bound * config.message)
    problems = max(1, min(config.problems, int(fitting)))
    empty_cache(policy)
    watched = Watched(alone)
    sampling = search.Sampling(max_new_tokens=config.cap)
    ours = searched(watched, critic, problems, CONCURRENCY, sampling=sampling)
    messages = sum(len(request.seeds) for request in watched.heard)
    figures: dict[str, Any] = {
        "engine": engine,
        "why": why,
        "problems": problems,
        "tokens": ours.tokens,
        "messages": messages,
        "search": ours.rate,
        "seconds": ours.seconds,
        "cached": watched.cached_tokens / max(watched.prompt_tokens, 1) if on_vllm else None,
    }
    keep(folder, "search", figures)
    empty_cache(policy)
    figures["engine alone"] = at_once(alone, watched.heard).rate
    keep(folder, "search", figures)
    if not on_vllm:
        # Whole batches of generate, as many as take about a tenth of the search's requests.
        some = watched.heard[: max(config.batch, len(watched.heard) // 10)]
        figures["generate"] = raw(policy, some, config.batch, clock=time.perf_counter)
        keep(folder, "search", figures)


# ------------------------------------------------------------------ scoring and training


def trees(config: Config) -> Iterator[LabelledTree]:
    """Search with agents that write made-up words, and a coin for a grader; both critic parts use these trees."""
    first = len(make_tokenizer(0))

    def script(request: SamplingRequest, seed: int) -> str:
        rng = random.Random(seed)
        length = min(config.cap, 1 + int(rng.expovariate(1 / config.message)))
        return " ".join(made_up(rng.randrange(first, config.model["vocab_size"])) for _ in range(length))

    task = mas_gym.load_task("arithmetic", split="train", limit=config.trees, grader=coin.flip)
    mas = mas_gym.load_mas("rpsv")
    for plan in search.run(PLANNER, task, mas=mas, policy=ScriptedPolicy(script), training=True):
        assert plan.tree is not None, plan.error
        yield LabelledTree(plan.tree, mas, "arithmetic", plan.problem_id)


def scoring(config: Config, folder: Path, device: str, until: float) -> None:
    """Measure states per second with shared prefixes and with whole states."""
    # As concurrent searches ask: the next states of every tree together.
    columns = [[(item.mas, state) for state in item.tree.states[1:]] for item in trees(config)]
    asked = [search.ScoringContext(state, mas, "") for row in zip_longest(*columns) for mas, state in filter(None, row)]
    figures: dict[str, Any] = {}
    for left, share in ((2, True), (1, False)):
        critic = critic_of(config, folder, device, share=share)
        size = critic.max_batch
        end = time.time() + (until - time.time()) / left
        critic.score(asked[:size])
        warm, start, done = replace(critic.counts), time.perf_counter(), size
        while done < len(asked) and time.time() < end:
            critic.score(asked[done : done + size])
            done += size
        seconds, counts = time.perf_counter() - start, critic.counts
        scored = counts.states - warm.states
        if not scored:
            raise TimeoutError("no time was left to score a second batch")
        figures["shared" if share else "whole"] = {
            "states": scored,
            "rate": scored / seconds,
            "encoded": (counts.encoded - warm.encoded) / scored,
            "tokens": (counts.whole - warm.whole) / scored,
        }
        keep(folder, "scoring", figures)
        critic.unload()


def lora(config: Config, folder: Path, device: str, until: float) -> None:
    """Measure updates of the paper's recipe: LoRA, 8 pairs in each of 16 accumulated steps."""
    from transformers import TrainerCallback

    from rewardmodels.data.encode import Encoder
    from rewardmodels.model.backbone import can_share
    from rewardmodels.training.train_critic import open_backbone
    from rewardmodels.training.trainer import CriticTrainer, HeldOut, StepData, arguments, bundles, schedule

    settings = PAPER.to_dict()
    failed = ""
    try:
        model, tokenizer, paper = open_backbone(str(folder / "agents"), device, settings)
    except Exception as error:
        # bitsandbytes raises errors of many classes where it does not run.
        failed = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        model, tokenizer, paper = open_backbone(str(folder / "agents"), device, {**settings, "nf4": False})
    data = collect(trees(config), "pairs")
    found = bundles(data.examples, Encoder(tokenizer, paper.max_length, paper.view), paper.batch_size, paper.max_tokens)
    order = schedule(found, paper.batch_size, paper.epochs, paper.seed)[: UPDATES * paper.accumulation]
    pad = tokenizer.pad_token_id
    rest = (paper.max_tokens, pad, next(p.dtype for p in model.parameters() if p.is_floating_point()))
    share = can_share(model, pad)
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Keeps the time of each update."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())
            if len(ends) > 1:
                counted = [
                    found[i] for step in order[paper.accumulation : len(ends) * paper.accumulation] for i in step
                ]
                seconds, updates = ends[-1] - ends[0], len(ends) - 1
                figures = {
                    "nf4": paper.nf4,
                    "why": failed,
                    "updates": updates,
                    "seconds": seconds / updates,
                    "pairs": sum(len(bundle.examples) for bundle in counted) / updates,
                    "tokens": sum(bundle.tokens for bundle in counted) / updates,
                    "whole": sum(len(part) for b in counted for state in b.states for part in state) / updates,
                    "share": share,
                }
                keep(folder, "lora", figures)

    args = arguments(paper, folder / "trainer", len(order), device)
    args.eval_strategy = args.save_strategy = "no"
    CriticTrainer(
        paper,
        StepData(found, order, *rest, share),
        HeldOut(found[:1], *rest, share),
        model=model,
        args=args,
        callbacks=[Clock()],
    ).train()


MEASURE = {"models": models, "search": search_part, "scoring": scoring, "lora": lora}


# ------------------------------------------------------------------ the command


class Outcome(NamedTuple):
    """What became of a part: its seconds, its figures, and why it did not finish."""

    seconds: float
    figures: dict[str, Any]
    why: str


def run_part(part: str, name: str, folder: Path, seconds: float) -> Outcome:
    """Measure a part in a separate process, which is killed with its children when the time is over."""
    start = time.monotonic()
    why, log = "", folder / f"{part}.log"
    command = [sys.executable, "-m", "benchmarks.gpu", "--config", name, "--part", part, "--folder", str(folder)]
    command += ["--until", str(time.time() + seconds)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            if process.wait(seconds):
                lines = log.read_text(errors="replace").strip().splitlines()
                why = f"it failed: {lines[-1][:300]}" if lines else f"it ended with code {process.returncode}"
                note("\n".join(lines[-30:]))
        except subprocess.TimeoutExpired:
            why = f"time limit of {seconds:.0f} s reached"
        finally:
            # An engine's processes may outlive the one that started them.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    file = folder / f"{part}.json"
    return Outcome(time.monotonic() - start, json.loads(file.read_text()) if file.exists() else {}, why)


def measure(name: str, minutes: float) -> dict[str, Outcome]:
    """Run all parts within the time."""
    end = time.monotonic() + max(0.0, 60 * minutes - RESERVE)
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="mas-gym-gpu-") as path:
        folder, waiting = Path(path), sum(PARTS.values())
        for part, share in PARTS.items():
            seconds = (end - time.monotonic()) * share / waiting
            waiting -= share
            if outcomes and outcomes["models"].why:
                outcomes[part] = Outcome(0.0, {}, "there are no models")
            elif seconds < 1:
                outcomes[part] = Outcome(0.0, {}, "no time is left; give more --minutes")
            else:
                print(f"{part}: {seconds:.0f} seconds at most", flush=True)
                outcomes[part] = run_part(part, name, folder, seconds)
                print(f"  {outcomes[part].why or 'done'} after {outcomes[part].seconds:.0f} seconds", flush=True)
    return outcomes


def search_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the part, with the ratios of the measurements."""
    rows = [
        ("engine", found["engine"] + (f" ({found['why']})" if found["why"] else "")),
        ("searches", f"{found['problems']}, at most {CONCURRENCY} at once, {found['seconds']:.1f} s"),
        ("messages", f"{found['messages']:,}, {found['tokens'] / found['messages']:.0f} tokens on average"),
        ("search, tokens per second", f"{found['search']:,.0f}"),
    ]
    for name, what in (("engine alone", "same requests at once"), ("generate", "`generate` of transformers")):
        if name in found:
            rows.append((f"{what}, tokens per second", f"{found[name]:,.0f}"))
            rows.append((f"**search / {what}**", f"**{found['search'] / found[name]:.2f}**"))
    if found["cached"] is not None:
        rows.append(("prompt tokens from the engine's cache", f"{found['cached']:.1%}"))
    return rows


def scoring_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the part, with the ratios of the measurements."""
    rows = []
    for name, what in (("shared", "shared prefixes"), ("whole", "whole states")):
        if name in found:
            one = found[name]
            rows.append((f"{what}, states per second", f"{one['rate']:,.1f} ({one['states']:,} states)"))
            rows.append((f"{what}, tokens encoded per state", f"{one['encoded']:,.0f} of {one['tokens']:,.0f}"))
    if "whole" in found:
        rows.append(
            ("**shared / whole, states per second**", f"**{found['shared']['rate'] / found['whole']['rate']:.2f}**")
        )
    return rows


def lora_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the part, with the ratio of the tokens."""
    base = "NF4" if found["nf4"] else f"not quantised ({found['why']})"
    return [
        ("backbone", f"{base}, LoRA rank {PAPER.lora_rank}"),
        ("pairs per update", f"{found['pairs']:.0f} of at most {PAPER.batch_size} x {PAPER.accumulation}"),
        ("seconds per update", f"{found['seconds']:.2f} (mean of {found['updates']})"),
        ("tokens per second", f"{found['tokens'] / found['seconds']:,.0f}"),
        ("**tokens of whole states / tokens encoded**", f"**{found['whole'] / found['tokens']:.2f}**"),
        ("shared beginnings encoded once", "yes" if found["share"] else "no"),
    ]


ROWS = {
    "search": ("MCTS(10,3) with a critic of the same size", search_rows),
    "scoring": ("Scoring", scoring_rows),
    "lora": ("LoRA update at the paper's batch", lora_rows),
}


def page_of(config: Config, device: str, outcomes: Mapping[str, Outcome]) -> Page:
    """Return the page."""
    asks = (
        f"Speeds of agents and a critic with random weights and the configuration of {config.name}, measured once. "
        "Each ratio compares two measurements of one run on one machine."
    )
    if device == "cpu":
        asks += "\n\n**This is a CPU check of the command, not a result.** The model has two small layers."
    page = Page("gpu" if device == "cuda" else "gpu-cut", "Search, scoring and training on one GPU", asks)
    page.blocks.append("## Parts\n")
    rows = []
    for part, one in outcomes.items():
        status = "ran" if not one.why else ("cut short" if one.figures else "skipped") + f": {one.why}"
        rows.append((part, status, f"{one.seconds:.0f}"))
    page.table(("part", "status", "seconds"), rows, 2)
    for part, (title, rows_of) in ROWS.items():
        if outcomes[part].figures:
            page.blocks.append(f"## {title}\n")
            page.table(("", "figure"), rows_of(outcomes[part].figures))
    return page


def facts(config: Config, device: str, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the versions and settings that determine the figures."""
    import torch
    import transformers

    made = outcomes["models"].figures.get("parameters")
    sizes = ", ".join(f"{name} {value:,}" for name, value in config.model.items() if isinstance(value, int))
    return [
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}; torch {torch.__version__}, transformers "
        f"{transformers.__version__}",
        f"{config.name}: {sizes}; {config.dtype}" + (f"; {made:,} parameters" if made else ""),
        f"Arithmetic, MAS rpsv; messages of {config.message} tokens on average, {config.cap} at most",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Read the command line and measure; return the exit code."""
    import torch

    parser = command_line()
    given = parser.parse_args(arguments)
    if not 0 < given.minutes <= LONGEST:
        parser.error(f"--minutes: expected more than 0 and at most {LONGEST:g}, got {given.minutes:g}")
    config, device = CONFIGS[given.config], "cpu" if given.config == "cut" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("No GPU: nothing was measured. Check the command on a CPU: python -m benchmarks.gpu --config cut")
        return 0
    if given.part:
        MEASURE[given.part](config, given.folder, device, given.until)
        return 0
    outcomes = measure(given.config, given.minutes)
    command = f"python -m benchmarks.gpu --config {given.config} --minutes {given.minutes:g}"
    path = write_page(page_of(config, device, outcomes), given.out, command, facts(config, device, outcomes))
    print(f"wrote {path}")
    return 0 if any(outcomes[part].figures for part in ROWS) else 1


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=about)
    add = parser.add_argument
    add("--config", choices=tuple(CONFIGS), default="qwen2.5-1.5b", help="size of the models [qwen2.5-1.5b]")
    add("--minutes", type=float, default=LONGEST, help=f"longest time of the command [{LONGEST:g}]")
    add("--out", type=Path, default=ROOT / "benchmarks" / "pages", help="folder of the page [benchmarks/pages]")
    # One part, in the process that the command starts for it.
    add("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    add("--until", type=float, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
