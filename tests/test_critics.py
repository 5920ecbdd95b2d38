"""Critics: names, rejected inputs, and scores that are independent of sharing and batching."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="learned critics need the extra 'train'")
pytest.importorskip("accelerate", reason="training needs the extra 'train'")

import torch
from grove import MODEL, chain, grove, other_graph, random_tree, save_base

import mas_gym
import search
from mas_gym.errors import ConfigError, CriticError, DataError, DataNotFoundError, UnknownNameError
from mas_gym.internal.identity import identity_of
from mas_gym.policies import ScriptedPolicy, load_policy
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.systems.state import Action, MASState
from mas_gym.testing import check_critic
from rewardmodels import Ensemble, LearnedCritic, collect, load_critic, stored_trees, train
from rewardmodels.data.dataset import graph_of
from rewardmodels.model import trained_critics
from rewardmodels.model.backbone import alike
from rewardmodels.model.critic_folder import META, model_card
from rewardmodels.tiny_critics import shipped
from search import ConstantCritic, Critic, PolicyLikelihood, Proposal, ScoringContext, setup
from search.compare.first_errors import auc
from search.setup import RunSpec

MAS_RPSV = MODEL.mas
QUICK: dict[str, Any] = {
    "epochs": 0.5,
    "anchor": 0.0,
    "batch_size": 32,
    "learning_rate": 3e-3,
    "evaluations": 1,
    "device": "cpu",
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A MASPRM and an ORM, and a MASPRM of the local view."""
    place = tmp_path_factory.mktemp("critics")
    base = save_base(place / "base")
    ends = collect(grove(), "outcomes")
    made = {
        "masprm": train(collect(grove(), "pairs"), place / "masprm", base=str(base), **QUICK).folder,
        "orm": train(ends, place / "orm", base=str(base), kind="orm", head="bce", **QUICK).folder,
        "local": train(
            collect(grove(), "pairs", "local"), place / "local", base=str(base), view="local", **QUICK
        ).folder,
    }
    return {**made, "base": base}


def contexts(states: list[MASState], mas: MAS = MAS_RPSV) -> list[ScoringContext]:
    return [ScoringContext(state, mas, None) for state in states]


def all_states(count: int) -> list[MASState]:
    return [state for number in range(count) for state in random_tree(number, 4).tree.states[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("view", ["masprm", "local"])
def test_scores_with_shared_prefixes_equal_scores_of_whole_states(folders: dict[str, Path], view: str) -> None:
    states = all_states(6)
    shared, whole = (LearnedCritic(folders[view], device="cpu", share=share) for share in (True, False))
    assert shared._scorer.share
    one, two = shared.score(contexts(states)), whole.score(contexts(states))
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-5
    assert len(set(one)) > len(set(states)) / 2
    assert shared.counts.encoded < shared.counts.whole == whole.counts.encoded


@pytest.mark.slow
def test_critic_in_bfloat16_arranges_its_weights(folders: dict[str, Path]) -> None:
    from mas_gym.policies.local.packed_linear import PackedLinear, fast_bfloat16

    states = contexts(all_states(3))
    low, exact = (LearnedCritic(folders["masprm"], device="cpu", dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert max(abs(a - b) for a, b in zip(low.score(states), exact.score(states), strict=True)) < 0.1
    assert any(isinstance(layer, PackedLinear) for layer in low._scorer.model.modules()) == fast_bfloat16()
    # The number of threads depends on it.
    assert low._scorer.parameters == exact._scorer.parameters


@pytest.mark.parametrize(
    ("kind", "shares"),
    [("Qwen2", True), ("Llama", True), ("Gemma", True), ("Phi3", True), ("Qwen3", True), ("Mistral", False)],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_scores_of_each_decoder_are_equal_with_and_without_prefix_sharing(
    kind: str, shares: bool, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    """Attention with a window, Mistral's here, is not taken for a plain one."""
    import torch

    from rewardmodels.data.encode import Encoder
    from rewardmodels.model.backbone import load_scalar, load_tokenizer
    from rewardmodels.model.prefix_cache import PrefixScorer

    folder = str(save_base(tmp_path, kind, **({"head_dim": 32} if kind in ("Gemma", "Qwen3") else {})))
    tokenizer = load_tokenizer(folder)
    states = all_states(3)
    found = []
    for share in (True, False):
        torch.manual_seed(0)
        model = load_scalar(folder, dtype, tokenizer.pad_token_id, new_head=True).eval()
        # A critic's head is in float32 in any case.
        model.score.float()
        scorer = PrefixScorer(model, tokenizer.pad_token_id, share, 2**20)
        encoded = Encoder(tokenizer, 512).encode([(MAS_RPSV, state) for state in states])
        assert scorer.share is (share and shares)
        # Forward passes that are smaller than a state.
        scorer.most_tokens = 16
        pieces = [
            scorer.logits(encoded[i : i + 7], [i % 2 == 0] * len(encoded[i : i + 7])) for i in range(0, len(states), 7)
        ]
        found.append([logit for piece in pieces for logit in piece])
    assert np.allclose(found[0], found[1], atol=tolerance)
    assert np.std(found[0]) > 1e-3


def score_in_pieces(critic: LearnedCritic, states: list[MASState], seed: int) -> list[float]:
    """Score in random order and in random pieces."""
    rng = random.Random(seed)
    order = list(range(len(states)))
    rng.shuffle(order)
    found: dict[int, float] = {}
    while order:
        piece = [order.pop() for _ in range(min(len(order), rng.choice([1, 2, 7, 40])))]
        found.update(zip(piece, critic.score(contexts([states[i] for i in piece])), strict=True))
    return [found[i] for i in range(len(states))]


def test_prefix_sharing_tolerates_the_rounding_of_the_dtype() -> None:
    # Logits of a model with 24 layers in bfloat16, with shared prefixes and for whole states.
    shared, whole = torch.tensor([2.8281, 1.2891, 4.0]), torch.tensor([2.7188, 1.2578, 3.9531])
    assert alike(shared, whole, torch.bfloat16) and not alike(shared, whole, torch.float32)
    assert not alike(shared, whole.flip(0), torch.bfloat16)


@pytest.mark.parametrize("memory", [256, 1, 0])
def test_small_cpu_critics_are_independent_of_the_batch(folders: dict[str, Path], memory: int) -> None:
    states = all_states(8)
    default = LearnedCritic(folders["masprm"], device="cpu")
    reference = default.score(contexts(states))
    assert default.identity()["dtype"] == "float64"
    for seed in range(3):
        critic = LearnedCritic(folders["masprm"], device="cpu", memory=memory)
        assert score_in_pieces(critic, states, seed) == reference


def rounding_knows_no_rows() -> bool:
    """Whether a row of a matrix product is bitwise equal for every number of rows."""
    import torch

    rows = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    for width in (32, 64, 128):
        weight = torch.randn(width, 64, generator=torch.Generator().manual_seed(width))
        whole = torch.nn.functional.linear(rows, weight)
        if any(not torch.equal(torch.nn.functional.linear(rows[:n], weight), whole[:n]) for n in (4, 7, 30, 100)):
            return False
    return True


@pytest.mark.parametrize("memory", [256, 1, 0])
def test_float32_critics_are_independent_of_the_batch_where_supported(folders: dict[str, Path], memory: int) -> None:
    states = all_states(8)
    reference = LearnedCritic(folders["masprm"], device="cpu", dtype="float32").score(contexts(states))
    exact = rounding_knows_no_rows()
    for seed in range(3):
        critic = LearnedCritic(folders["masprm"], device="cpu", dtype="float32", memory=memory)
        found = score_in_pieces(critic, states, seed)
        if exact:
            assert found == reference
        assert max(abs(a - b) for a, b in zip(found, reference, strict=True)) < 1.5e-6


def test_each_state_is_encoded_once(folders: dict[str, Path]) -> None:
    critic = LearnedCritic(folders["masprm"], device="cpu")
    states = all_states(2)
    first = critic.score(contexts(states + states))
    spent = critic.counts.encoded
    assert critic.counts.states == len(set(states))
    assert critic.score(contexts(states)) == first[: len(states)]
    assert critic.counts.encoded == spent


def test_scoring_siblings_encodes_only_their_newest_messages(folders: dict[str, Path]) -> None:
    critic = LearnedCritic(folders["masprm"], device="cpu")
    state = MODEL.initial_state("Maya has 3 coins. " * 10)
    while not MODEL.is_terminal(state):
        before = critic.counts.encoded
        children = [MODEL.transition(state, Action(f"Facts: has {i}.", MAS_RPSV.ALL)) for i in range(3)]
        critic.score(contexts(children))
        newest = [critic._encoder.encode([(MAS_RPSV, child)])[0][-1] for child in children]
        if state.depth:
            assert critic.counts.encoded - before == sum(map(len, newest))
        state = children[1]
    assert critic.counts.whole > 2.5 * critic.counts.encoded


def test_prefix_cache_memory_is_bounded(folders: dict[str, Path]) -> None:
    critic = LearnedCritic(folders["masprm"], device="cpu", memory=1)
    for number in range(12):
        critic.score(contexts(random_tree(number, 6).tree.states[1:]))
        assert critic._scorer.cache.held <= 2**20
    assert critic._scorer.cache.held > 2**19


def test_overlong_state_is_truncated_and_counted(folders: dict[str, Path]) -> None:
    critic = LearnedCritic(folders["masprm"], device="cpu")
    long = chain(["Facts: " + "has 3, " * 90, "Plan: " + "start 3, " * 60, "Work: 3 + 4 = 7."])
    short = chain(["Facts: has 3."])
    [a, b] = critic.score(contexts([long, short]))
    assert critic._encoder.shortened == 1 and math.isfinite(a)
    assert critic.score(contexts([short])) == [b]


def test_overlong_newest_message_keeps_its_end(folders: dict[str, Path]) -> None:
    critic = LearnedCritic(folders["masprm"], device="cpu")
    one, other, ends = (
        critic.score(contexts([chain([start + "has 3, " * 400 + end])]))
        for start, end in (("Facts: ", "6"), ("Plan: ", "6"), ("Facts: ", "7"))
    )
    assert one == other != ends


def test_critic_rejects_a_graph_it_was_not_trained_on_unless_forced(folders: dict[str, Path]) -> None:
    mas = other_graph()
    model = Dynamics(mas)
    state = model.transition(model.initial_state("q"), Action("Final Answer: 3", mas.ALL))
    with pytest.raises(
        CriticError,
        match=r"trained on rpsv, not on single.*force=True\); on the command line, --critic '.*#force=true'",
    ):
        LearnedCritic(folders["masprm"], device="cpu").score(contexts([state], mas))
    forced = LearnedCritic(folders["masprm"], device="cpu", force=True)
    assert -1 <= forced.score(contexts([state], mas))[0] <= 1


LOOPS: list[dict[str, Any]] = [
    {"max_turns": 6},
    {"max_turns": 6, "min_turns": 2},
    {"max_turns": 6, "history": "private"},
]


@pytest.mark.parametrize("loops", LOOPS, ids=str)
def test_critic_rejects_a_graph_that_differs_only_in_loops(
    loops: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    mas = replace(MAS_RPSV, **loops)
    graph = graph_of(mas)
    assert {name: graph[name] for name in graph if name not in graph_of(MAS_RPSV)} == loops
    with pytest.raises(CriticError, match=r"not on rpsv \(different agents, edges or loops\).*force=True"):
        LearnedCritic(folders["masprm"], device="cpu").score(contexts([chain(["Facts: has 3."])], mas))
    looped = shutil.copytree(folders["masprm"], tmp_path / "looped")
    info = json.loads((looped / META).read_text(encoding="utf-8")) | {"graphs": {"rpsv": graph}}
    (looped / META).write_text(json.dumps(info), encoding="utf-8")
    critic = LearnedCritic(looped, device="cpu")
    critic.score(contexts([chain(["Facts: has 3."])], mas))
    assert ", ".join(f"{name} {value}" for name, value in loops.items()) in model_card(critic.info)
    with pytest.raises(CriticError, match="force=True"):
        critic.score(contexts([chain(["Facts: has 3."])]))


def test_critic_accepts_the_same_graph_with_other_prompts(folders: dict[str, Path]) -> None:
    agents = tuple(replace(agent, system_prompt="Be brief.") for agent in MAS_RPSV.agents)
    critic = LearnedCritic(folders["masprm"], device="cpu")
    assert len(critic.score(contexts([chain(["Facts: has 3."])], replace(MAS_RPSV, agents=agents)))) == 1


def test_outcome_critic_scores_only_terminal_states(folders: dict[str, Path]) -> None:
    critic = LearnedCritic(folders["orm"], device="cpu")
    assert critic.terminal_only and critic.name == "orm"
    assert len(critic.score(contexts([chain(["a", "b", "c", "d"])]))) == 1
    with pytest.raises(CriticError, match="terminal states only, got a state where Planner acts"):
        critic.score(contexts([chain(["a"])]))
    prefixes = LearnedCritic(folders["orm"], device="cpu", prefixes=True)
    assert not prefixes.terminal_only and len(prefixes.score(contexts([chain(["a"])]))) == 1


def test_critics_implement_the_protocol(folders: dict[str, Path]) -> None:
    specs = ["policy-likelihood", "constant:0.5", str(folders["masprm"]), f"ensemble:constant:1,{folders['masprm']}"]
    for spec in specs:
        critic = load_critic(spec)
        assert isinstance(critic, Critic)
        assert (critic.free, critic.terminal_only) == ("critics" not in spec, False)


def test_critics_with_different_scores_have_different_identities(folders: dict[str, Path]) -> None:
    critics: list[Critic] = [LearnedCritic(folders[name], device="cpu") for name in ("masprm", "orm", "local")]
    critics.append(LearnedCritic(folders["masprm"], device="cpu", dtype="float32"))
    critics.append(LearnedCritic(folders["orm"], device="cpu", prefixes=True))
    critics += [PolicyLikelihood(), ConstantCritic(0.25), ConstantCritic(0.5)]
    critics += [Ensemble(critics[:2]), Ensemble([critics[0], critics[2]]), Ensemble(critics[:1])]
    prints = {json.dumps(identity_of(critic), sort_keys=True) for critic in critics}
    assert len(prints) == len(critics)
    again = Ensemble([LearnedCritic(folders[name], device="cpu", max_batch=3) for name in ("masprm", "orm")])
    assert json.dumps(identity_of(again), sort_keys=True) in prints


def test_ensembles_with_different_weights_do_not_share_a_run(folders: dict[str, Path], tmp_path: Path) -> None:
    problems = mas_gym.load_task("arithmetic", split="dev")[:2]
    other = Path(shutil.copytree(folders["masprm"], tmp_path / "other"))
    from safetensors.torch import load_file, save_file

    weights = load_file(other / "model.safetensors")
    weights["score.weight"] += 0.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    store, values = tmp_path / "runs.db", []
    for folder in (folders["masprm"], other, folders["masprm"]):
        critic = load_critic(f"ensemble:constant:0,{folder}#device=cpu")
        run = search.run("sbs:2,2", problems, mas="rpsv", policy=load_policy("tiny"), critic=critic, store=store)
        values.append({plan.problem_id: [c.score for c in plan.candidates] for plan in run})
    assert values[0] == values[2] != values[1]
    with search.open_store(store) as opened:
        assert len(opened.runs()) == 2


def test_ensemble_has_the_capabilities_of_its_members(folders: dict[str, Path]) -> None:
    one = LearnedCritic(folders["masprm"], device="cpu", concurrent=True, max_batch=16)
    both = Ensemble([one, PolicyLikelihood()])
    assert (both.concurrent, both.max_batch, both.scores_actions, both.free) == (True, 16, False, False)
    plain = Ensemble([PolicyLikelihood(), PolicyLikelihood()])
    assert (plain.concurrent, plain.max_batch, plain.scores_actions, plain.free) == (False, 64, True, True)


def test_critics_pass_the_critic_check(folders: dict[str, Path]) -> None:
    masprm, local = (LearnedCritic(folders[name], device="cpu") for name in ("masprm", "local"))
    check_critic(masprm)
    check_critic(Ensemble([masprm, local]))
    check_critic(PolicyLikelihood())
    check_critic(ConstantCritic(0.5))


def test_constant_and_likelihood_critics_score_states() -> None:
    state = chain(["a"])
    proposal = Proposal(Action("a", MAS_RPSV.ALL), 4, -2.0)
    context = [ScoringContext(state, MAS_RPSV, proposal)]
    assert load_critic("constant:0.5").score(context) == [0.5]
    assert load_critic("policy-likelihood").score(context) == [pytest.approx(1 / (1 + math.exp(0.5)))]


def test_ensemble_score_is_the_mean(folders: dict[str, Path]) -> None:
    states = contexts(all_states(1))
    members = [load_critic(str(folders[name])) for name in ("masprm", "local")]
    scores = load_critic(f"ensemble:{folders['masprm']},{folders['local']}").score(states)
    one, two = (member.score(states) for member in members)
    assert scores == pytest.approx([(a + b) / 2 for a, b in zip(one, two, strict=True)])
    assert Ensemble([*members, load_critic(str(folders["orm"]))]).terminal_only
    with pytest.raises(ConfigError, match="at least one"):
        load_critic("ensemble:")


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("policy-likelyhood", UnknownNameError, "did you mean 'policy-likelihood'"),
        (
            "oracle",
            UnknownNameError,
            "agreement, calibrated, constant, ensemble, features, folder, http, https, hub, judge",
        ),
        ("./models/nothing", UnknownNameError, "expected a folder that training wrote"),
        ("constant:high", ConfigError, "expected a finite number"),
        ("constant:nan", ConfigError, "finite"),
        ("policy-likelihood:x", ConfigError, "takes no argument"),
        ("tiny-masprm:x", ConfigError, "takes no argument"),
    ],
)
def test_unknown_critic_error_suggests_names(spec: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        load_critic(spec)


@pytest.mark.parametrize("kind", ["masprm", "orm"])
def test_shipped_critics_are_small_and_have_cards(kind: Any) -> None:
    critic = load_critic(f"tiny-{kind}")
    assert isinstance(critic, LearnedCritic)
    assert (critic.name, critic.info.base, list(critic.info.graphs)) == (kind, "tiny", ["rpsv"])
    folder = shipped(kind)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "benchmarks.shipped_critics" in card and str(Path.home()) not in card


@pytest.mark.slow
def test_shipped_critics_separate_correct_and_wrong_answers() -> None:
    problems = mas_gym.load_task("arithmetic", split="dev", limit=24)
    plans = list(search.run("sc:4", problems, mas="rpsv", policy=load_policy("tiny"), seed=0))
    ends = [candidate for plan in plans for candidate in plan.candidates]
    labels = np.array([bool(end.correct) for end in ends])
    for name in ("tiny-masprm", "tiny-orm"):
        scores = load_critic(name).score(contexts([end.state for end in ends], mas_gym.load_mas("rpsv")))
        assert auc(np.array(scores), labels) > 0.8


def test_critic_may_load_weights_at_the_first_score(folders: dict[str, Path], tmp_path: Path) -> None:
    eager, lazy = (load_critic(str(folders["masprm"]), lazy=lazy) for lazy in (False, True))
    assert lazy._scorer is None  # type: ignore[attr-defined]
    # Which critic it is, a store asks before any search.
    assert identity_of(lazy) == identity_of(eager) and lazy._scorer is None  # type: ignore[attr-defined]
    states = contexts(all_states(2))
    assert lazy.score(states) == eager.score(states)
    assert identity_of(lazy) == identity_of(eager)
    lazy.unload()  # type: ignore[attr-defined]
    assert lazy._scorer is None  # type: ignore[attr-defined]
    more = contexts(all_states(3))
    assert lazy.score(more) == eager.score(more) and lazy._scorer is not None  # type: ignore[attr-defined]
    damaged = tmp_path / "damaged"
    shutil.copytree(folders["masprm"], damaged)
    (damaged / "model.safetensors").write_bytes(b"no weights")
    later = load_critic(str(damaged), lazy=True)
    with pytest.raises((DataError, ConfigError)):
        later.score(states)
    identity_of(later)
    shutil.copy(folders["masprm"] / "model.safetensors", damaged)
    with pytest.raises(DataError, match="changed after"):
        later.score(states)


def test_folder_replaced_while_it_is_loaded_is_an_error(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "masprm"
    shutil.copytree(folders["masprm"], folder)
    load = trained_critics.load_folder

    def replaced_meanwhile(*arguments: Any) -> Any:
        loaded = load(*arguments)
        os.utime(folder / "model.safetensors", ns=(1, 1))
        return loaded

    monkeypatch.setattr(trained_critics, "load_folder", replaced_meanwhile)
    with pytest.raises(DataError, match="changed after"):
        load_critic(str(folder))


def test_unknown_option_error_suggests_names(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"takes force, prefixes, device, dtype, memory, max_batch"):
        load_critic(str(folders["masprm"]), gpu=1)
    with pytest.raises(ConfigError, match="dtype: expected"):
        load_critic(str(folders["masprm"]), dtype="int8")


def test_critic_spec_accepts_options(folders: dict[str, Path]) -> None:
    beside = load_critic(f"{folders['masprm']}#concurrent=true&max_batch=8")
    assert isinstance(beside, LearnedCritic)
    assert (beside.concurrent, beside.max_batch) == (True, 8)
    both = load_critic(f"ensemble:tiny-masprm#max_batch=8,{folders['masprm']}#dtype=float64", device="cpu")
    assert isinstance(both, Ensemble)
    assert [getattr(member, "max_batch", 0) for member in both.members] == [8, 64]
    with pytest.raises(ConfigError, match=r"it takes .*concurrent"):
        load_critic("tiny-masprm#threads=2")


def damaged(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["masprm"], tmp_path / "critic"))


def test_model_without_head_is_reported(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = damaged(folders, tmp_path)
    shutil.copy(folders["base"] / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(DataError, match=r"score\.weight"):
        load_critic(str(folder))


def test_folder_of_unfinished_training_is_reported(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="no critic at"):
        LearnedCritic(tmp_path / "nothing")


def test_non_finite_weights_are_reported(folders: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = damaged(folders, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] *= math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CriticError, match="damaged"):
        load_critic(str(folder)).score(contexts([chain(["a"])]))


def test_small_critic_scores_on_one_thread(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from rewardmodels.model import prefix_cache

    seen, forward = [], prefix_cache.forward_parts

    def watched(*args: Any) -> Any:
        seen.append(torch.get_num_threads())
        return forward(*args)

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    critic, before = LearnedCritic(folders["masprm"], device="cpu"), torch.get_num_threads()
    monkeypatch.setattr(prefix_cache, "forward_parts", watched)
    torch.set_num_threads(3)
    try:
        critic.score(contexts([chain(["Facts: has 3."])]))
        assert seen == [1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_trained_critic_guides_a_search(folders: dict[str, Path], tmp_path: Path) -> None:
    """The whole way, with a scripted policy: rollouts, store, training, search."""
    from mas_gym.policies import SamplingReply, SamplingRequest
    from mas_gym.policies.base import Sample

    class Coin:
        name, max_batch, revision = "coin", 64, 1

        def sample(self, requests: list[SamplingRequest]) -> list[SamplingReply]:
            return [SamplingReply(tuple(self._one(seed) for seed in request.seeds)) for request in requests]

        def _one(self, seed: int) -> Sample:
            good = seed % 2 == 0
            return Sample(f"Final Answer: {'right' if good else 'wrong'} {seed % 5}", 4, -1.0, "stop")

    task = mas_gym.load_task("arithmetic", split="train")[:8]
    store = tmp_path / "rollouts.db"
    done = search.run(search.MCTS(12, 3), task, mas="rpsv", policy=Coin(), training=True, store=store)
    assert all(plan.error is None for plan in done)
    trees = list(stored_trees(store))
    assert {tree.problem_id for tree in trees} == {task[i].id for i in range(8)}
    assert {tree.task for tree in trees} == {"arithmetic"} and len(collect(trees, "points")) > 50
    critic = load_critic(str(folders["masprm"]))
    evaluated = list(search.run(search.MCTS(4, 3), task, mas="rpsv", policy=Coin(), critic=critic, store=store))
    assert all(plan.error is None and plan.usage.reward_calls > 0 for plan in evaluated)
    assert len(list(stored_trees(store))) == len(trees)


def test_store_without_training_runs_is_reported(tmp_path: Path) -> None:
    from search.store.table_schema import FORMAT

    FORMAT.connect(tmp_path / "empty.db", create=True).close()
    with pytest.raises(DataError, match="expected a training run"):
        list(stored_trees(tmp_path / "empty.db"))
    with pytest.raises(mas_gym.errors.StoreError):
        list(stored_trees(tmp_path / "none.db"))


@pytest.mark.parametrize(
    ("sizes", "padded", "expected"),
    [
        ([], False, []),
        ([10_000], False, [[0]]),
        ([5000, 3192, 1, 9000, 2], False, [[0, 1], [2], [3], [4]]),
        ([2000, 3000, 4000], False, [[0, 1], [2]]),
        ([2000, 3000, 4000], True, [[0, 1], [2]]),
        ([1000, 3000, 4096], True, [[0, 1], [2]]),
        ([4096, 4096, 4096], True, [[0, 1], [2]]),
    ],
)
def test_tokens_per_forward_pass_are_bounded(sizes: list[int], padded: bool, expected: list[list[int]]) -> None:
    from rewardmodels.data.encode import chunks

    assert chunks(range(len(sizes)), sizes, padded) == expected


@pytest.mark.parametrize("name", ["tiny", "recorded:tiny", "Reader=tiny, *=openai:m", "openai:m", "mytiny"])
def test_bundled_critic_on_other_agents_warns_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    setup._warned.clear()
    policy = ScriptedPolicy(lambda request, seed: "Final Answer: 1", name=name)
    for _ in range(2):
        critic = load_critic("tiny-masprm", lazy=True)
        setup.warn_of_misuse(setup.make_setup(RunSpec([], mas_gym.load_mas("rpsv"), policy, search.BestOfN(2), critic)))
    said = [text for text in caplog.messages if "was trained on the agents of policy tiny" in text]
    assert len(said) == (name in ("openai:m", "mytiny"))
