"""The tiny model: its language, its writers, its training and its weights."""

import argparse
import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mas_gym
import search
from benchmarks.tiny import graphs, language, ordering_roles, roles, team_roles
from benchmarks.tiny.compare import faults, steps_of
from benchmarks.tiny.foreign import foreign_facts, foreign_text, foreign_turns
from benchmarks.tiny.roles import World
from benchmarks.tiny.send_back import SYSTEM, send_back
from benchmarks.tiny.stories import Retold
from benchmarks.tiny.truth import KINDS, facts_of, first_error, queue_world, rights, story_world
from mas_gym import tiny
from mas_gym.errors import ConfigError
from mas_gym.tasks.base import Problem
from mas_gym.tasks.procedural import arithmetic
from mas_gym.tasks.procedural.arithmetic import LEVELS, Arithmetic, answer_of
from mas_gym.tasks.procedural.ordering import Ordering

FACTS: list[arithmetic.Fact] = [
    ("has", 20),
    ("finds", 12),
    ("times", 2),
    ("bags", 3, 4),
    ("loses", 12),
    ("gives", 4),
    ("half",),
]
WORLD = World(FACTS, (2, 9))

amounts = st.integers(0, 99)
facts = st.one_of(
    st.tuples(st.sampled_from(["has", "finds", "buys", "loses", "gives", "times"]), amounts),
    st.just(("half",)),
    st.tuples(st.just("bags"), amounts, amounts),
)
steps = st.one_of(
    st.tuples(st.sampled_from(["start", "+", "-", "*", "/"]), amounts), st.tuples(st.just("+*"), amounts, amounts)
)
equations = st.tuples(amounts, st.sampled_from("+-*/"), amounts, amounts)
hints = st.one_of(
    st.tuples(st.just("times"), amounts),
    st.just(("half",)),
    st.tuples(st.just("bags"), amounts, amounts),
    st.tuples(st.just("use"), st.sampled_from("+-*/"), amounts),
    st.tuples(st.just("leave"), amounts),
)


@given(st.lists(facts, min_size=1), st.lists(steps, min_size=1), st.lists(equations, min_size=1), st.lists(hints))
def test_parsing_a_written_message_returns_its_content(
    some_facts: list[Any], plan: list[Any], work: list[Any], advice: list[Any]
) -> None:
    assert language.read_facts(language.write_facts(some_facts)) == some_facts
    assert language.read_plan(language.write_plan(plan)) == plan
    assert language.read_work(language.write_work(work)) == work
    assert language.read_hints(language.write_hints(advice)) == advice


def test_messages_with_varied_labels_are_parsed_identically() -> None:
    rng = random.Random(0)
    plain = {
        language.read_facts: language.write_facts(FACTS),
        language.read_plan: language.write_plan([("start", 3), ("+", 4)]),
        language.read_work: language.write_work([(3, "+", 4, 7)]),
        ordering_roles.read_rules: "Rules: 1) Ann front 2) Ben after Ann",
        ordering_roles.read_order: "Order: Ann front: Ann; Ben after Ann: Ann Ben.\nSo Ann first Ben last.",
    }
    for read, text in plain.items():
        found = {language.vary(text, rng) for _ in range(100)}
        assert len(found) == 6
        assert all(read(varied) == read(text) is not None for varied in found)
    assert language.vary("Final Answer: 3", rng) == "Final Answer: 3"


@given(st.text())
def test_arbitrary_text_is_parsed_without_failing(text: str) -> None:
    for read in (language.read_facts, language.read_plan, language.read_work, ordering_roles.read_rules):
        assert read(text) is None or read(text)
    assert ordering_roles.read_order(text) is None or "Order: " in text
    assert isinstance(language.read_hints(text), list)
    problem = Arithmetic()[0]
    found = first_error(problem, [("Reader", text)])
    assert found is None or found.kind in KINDS


@pytest.mark.parametrize("label", ["Final Answer", "FINAL ANSWER", "final answer"])
def test_read_answer_returns_the_last_answer(label: str) -> None:
    assert language.read_answer(f"{label}: 3\n{label}: 42") == "42"
    assert language.read_answer("no answer") is None


# --- the comparison that checkers and the truth rest on


@pytest.mark.parametrize("slip", arithmetic.planner_slips(FACTS))
def test_wrong_operation_is_found(slip: arithmetic.Slip) -> None:
    [fault] = faults(FACTS, arithmetic.apply_planner_slips(FACTS, [slip]))
    assert (fault.kind, fault.place) == slip


@pytest.mark.parametrize("slip", arithmetic.solver_slips(arithmetic.plan_of(FACTS)))
def test_calculation_error_is_found(slip: arithmetic.Slip) -> None:
    work = arithmetic.work_of(arithmetic.apply_solver_slips(arithmetic.plan_of(FACTS), [slip]))
    assert work is not None
    [fault] = faults(FACTS, steps_of(work))
    assert (fault.kind, fault.place) == ({"skip": "missing", "copy": "copy"}[slip[0]], slip[1])


def test_step_from_another_problem_is_reported_as_an_extra_step() -> None:
    read = arithmetic.apply_reader_slips(FACTS, (2, 9), [("rival", 2)])
    [fault] = faults(FACTS, arithmetic.plan_of(read))
    assert (fault.kind, fault.place, fault.step) == ("extra", 2, ("+", 9))


def test_steps_are_recovered_from_the_calculation() -> None:
    plan = arithmetic.plan_of(FACTS)
    work = arithmetic.work_of(plan)
    assert work is not None
    assert steps_of(work) == plan
    assert faults(FACTS, plan) == []


# --- the writers


def zero(table: Mapping[str, Mapping[str, float]], value: float) -> dict[str, dict[str, float]]:
    return {role: dict.fromkeys(rates, value) for role, rates in table.items()}


@pytest.fixture
def faultless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "RATES", zero(roles.RATES, 0.0))
    monkeypatch.setattr(ordering_roles, "RATES", zero(ordering_roles.RATES, 0.0))


def transcript(graph: str, problem: Problem, rng: random.Random) -> list[graphs.RoleTurn]:
    if graph in graphs.ORDERING_GRAPHS:
        return graphs.ORDERING_GRAPHS[graph](queue_world(problem), rng)
    return graphs.GRAPHS[graph](story_world(problem), rng)


SHIPPED = ["single", "rpsv", "refine", "consensus", "dylan", "debate", "logic"]


@pytest.mark.usefixtures("faultless")
@pytest.mark.parametrize("graph", SHIPPED)
def test_without_misconceptions_every_message_is_correct(graph: str) -> None:
    task = Ordering("train") if graph in graphs.ORDERING_GRAPHS else Arithmetic("train")
    for problem in task[:60]:
        turns = transcript(graph, problem, random.Random(problem.id))
        assert first_error(problem, [(str(turn.role), turn.text) for turn in turns]) is None
        assert language.read_answer(turns[-1].text) == problem.answer


@pytest.mark.parametrize("graph", SHIPPED)
def test_failed_transcripts_of_agents_with_misconceptions_have_a_first_error(graph: str) -> None:
    task = Ordering("train") if graph in graphs.ORDERING_GRAPHS else Arithmetic("train")
    failures, speakers = 0, set()
    for problem in task[:150]:
        turns = transcript(graph, problem, random.Random(problem.id))
        found = first_error(problem, [(str(turn.role), turn.text) for turn in turns])
        if language.read_answer(turns[-1].text) != problem.answer:
            failures += 1
            assert found is not None
            assert found.kind not in ("unreadable", "wrong sum")
            speakers.add(found.speaker)
    assert 30 < failures < 120
    assert len(speakers) >= {"single": 1, "rpsv": 4}.get(graph, 2)


@pytest.mark.parametrize(("kind", "rate"), [("drop", 0.55), ("rival", 0.42)])
def test_misconceptions_occur_at_their_rates(kind: str, rate: float) -> None:
    rng = random.Random(0)
    assert roles.RATES["Reader"][kind] == rate
    mark = {"drop": lambda text: "finds 12" not in text, "rival": lambda text: "buys 9" in text}[kind]
    seen = sum(mark(roles.reader(WORLD, [], rng)) for _ in range(2000)) / 2000
    assert abs(seen - rate) < 0.04


def test_transcripts_depend_only_on_the_problem_and_the_seed() -> None:
    problem = Arithmetic("train")[3]
    one, other = (transcript("dylan", problem, random.Random(7)) for _ in range(2))
    assert one == other


def test_hint_prevents_the_misconception() -> None:
    rng = random.Random(0)
    for _ in range(200):
        work = language.read_work(team_roles.reviser(WORLD, ["TIP: 2 times means * 2, use - 12, use - 4"], rng))
        assert work is not None
        assert not {"times", "copy"} & {fault.kind for fault in faults(FACTS, steps_of(work))}


# --- the truth about transcripts

ORDER = "Order: Ann front: Ann; Ben after Ann: Ann Ben; Kim before Ben:"
STORY = World([("has", 10), ("finds", 12), ("times", 2), ("loses", 4)], (2, 7))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["Facts: has 10, finds 12, 2 times, loses 4. Question: how many?"], None),
        (["Facts: has 10, 2 times, loses 4. Question: how many?"], (0, "missing fact")),
        (["Facts: has 10, finds 12, buys 7, 2 times, loses 4."], (0, "extraneous fact")),
        (["Facts: has 11, finds 12, 2 times, loses 4."], (0, "wrong fact")),
        (["Facts: has 10, buys 12, 2 times, loses 4."], (0, "wrong fact")),
        (["Plan: start 10, + 12, + 2, - 4."], (0, "wrong operation")),
        (["Plan: start 10, + 12, * 2, - 4.", "Work: 10 + 12 = 22, 22 * 2 = 44."], (1, "missing step")),
        (["Work: 10 + 12 = 22, 22 * 2 = 44, 44 - 4 = 40, 40 - 4 = 36."], (0, "extra step")),
        (["Work: 10 + 12 = 22, 22 * 2 = 44, 44 - 5 = 39."], (0, "wrong number")),
        (["Work: 10 + 12 = 22, 22 * 2 = 45, 45 - 4 = 41."], (0, "wrong sum")),
        (["Work: 10 + 12 = 22, 22 * 2 = 44, 44 - 4 = 40.", "Final Answer: 44"], (1, "wrong answer")),
        (["Fix: 10 + 12 = 22, 22 * 2 = 44, 44 - 4 = 40.\nFinal Answer: 40"], None),
        (["CORRECT", "TIP: keep all steps", "FINAL ANSWER: 40"], None),
        (["INCORRECT: use + 12"], (0, "false alarm")),
        (["VERDICT: DISAGREE\nCheck: use + 12"], (0, "false alarm")),
        (["VERDICT: AGREE\nFinal Answer: 40"], None),
        (["TIP: use + 3"], (0, "wrong advice")),
        (["what is this"], (0, "unreadable")),
    ],
)
def test_first_wrong_message_is_found(texts: list[str], expected: tuple[int, str] | None) -> None:
    problem = Problem("p", "?", "40", metadata={"facts": [list(f) for f in STORY.facts], "rival": [2, 7]})
    found = first_error(problem, [("agent", text) for text in texts])
    assert (None if found is None else (found.place, found.kind)) == expected


WRONG, MENDED = "Work: 10 + 12 = 22, 22 * 2 = 44.", "Work: 10 + 12 = 22, 22 * 2 = 44, 44 - 4 = 40.\nFinal Answer: 40"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([WRONG, "CORRECT", "TIP: keep all steps", MENDED], [False, False, False, True]),
        ([WRONG, "INCORRECT: use - 4", "TIP: use - 4", MENDED], [False, True, True, True]),
        ([WRONG, "INCORRECT: use + 3", "TIP: check all steps"], [False, False, True]),
        ([MENDED, "CORRECT", "INCORRECT: use - 4"], [True, True, False]),
        ([WRONG, MENDED, "VERDICT: DISAGREE\nCheck: check all steps"], [False, True, True]),
        ([MENDED, MENDED, "VERDICT: DISAGREE\nCheck: check all steps"], [True, True, False]),
        ([WRONG, WRONG, "VERDICT: AGREE\nFinal Answer: 44"], [False, False, False]),
    ],
)
def test_correctness_of_each_message_is_judged_given_the_earlier_ones(texts: list[str], expected: list[bool]) -> None:
    problem = Problem("p", "?", "40", metadata={"facts": [list(f) for f in STORY.facts], "rival": [2, 7]})
    assert rights(problem, [("agent", text) for text in texts]) == expected


def test_arithmetic_verdict_is_judged_wrong_in_an_ordering_problem() -> None:
    problem = mas_gym.load_task("ordering")[0]
    assert rights(problem, [("agent", "what"), ("agent", "INCORRECT: use + 12")]) == [False, False]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["1) Ann front 2) Ben after Ann 3) Kim before Ben"], None),
        (["1) Ann front 2) Ben after Ann"], (0, "missing fact")),
        (["1) Ann front 2) Ben after Ann 3) Kim after Ben"], (0, "wrong rule")),
        ([f"{ORDER} Ann Kim Ben.\nSo Ann first Kim second Ben last.", "B Kim second yes\nFinal Answer: B"], None),
        ([f"{ORDER} Ann Ben Kim.\nSo Ann first Ben second Kim last."], (0, "wrong place")),
        ([f"{ORDER} Ann Kim Ben.\nSo Ann first Ben second Kim last."], (0, "wrong place")),
        ([f"{ORDER} Ann Kim Ben.\nSo Ann first Kim second Ben last.\nC Ben last yes I pick C"], (0, "wrong answer")),
        (["hello"], (0, "unreadable")),
    ],
)
def test_first_wrong_ordering_message_is_found(texts: list[str], expected: tuple[int, str] | None) -> None:
    data = {
        "rules": [["first", "Ann"], ["after", "Ben", "Ann"], ["before", "Kim", "Ben"]],
        "phrases": ["first", "after", "before"],
        "place": 1,
        "options": ["Ann", "Kim", "Ben"],
    }
    found = first_error(Problem("p", "?", "B", "choice", data), [("agent", text) for text in texts])
    assert (None if found is None else (found.place, found.kind)) == expected


def test_first_error_rejects_problems_of_other_tasks() -> None:
    with pytest.raises(ConfigError, match="no other truth is known"):
        first_error(Problem("gsm8k/test/0", "?", "1"), [("agent", "Final Answer: 1")])


# --- tokenizer and chat template


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers", reason="the tiny model needs transformers")
    return transformers.AutoTokenizer.from_pretrained(tiny.path())


def test_saved_tokenizer_equals_the_built_one(tokenizer: Any) -> None:
    from benchmarks.tiny.tokenizer import build_tokenizer, chat_template

    built = build_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.chat_template == chat_template()
    for problem in (Arithmetic()[0], Ordering()[0]):
        assert tokenizer.encode(problem.question) == built.encode(problem.question)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_is_encoded_and_decoded_unchanged(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == unicodedata.normalize("NFC", text)


def test_words_and_small_numbers_are_one_token_each(tokenizer: Any) -> None:
    assert tokenizer.tokenize("Work: 12 + 5 = 17.") == ["Work", ":", " 12", " +", " 5", " =", " 17", "."]
    rng = random.Random(0)
    for problem in Arithmetic("train")[:20]:
        for graph in graphs.GRAPHS.values():
            for turn in graph(story_world(problem), rng):
                assert len(tokenizer.tokenize(turn.text)) <= 90
        assert len(tokenizer.tokenize(problem.question)) <= 90


@pytest.mark.parametrize("difficulty", LEVELS)
def test_retold_problems_use_known_words_and_have_correct_answers(tokenizer: Any, difficulty: int) -> None:
    rng = random.Random(0)
    task = Retold("test", difficulty=difficulty)
    known = set(tokenizer.get_added_vocab())
    for problem in task[:40]:
        world = story_world(problem)
        assert answer_of(world.facts) == int(problem.answer)
        words = re.findall(r" ?[A-Za-z]+", problem.question)
        assert [word for word in words if word not in known] == []
        numbers = sorted(int(number) for number in re.findall(r"\d+", problem.question))
        assert set(numbers) >= {int(n) for fact in world.facts for n in fact[1:]}
        for graph in graphs.GRAPHS.values():
            assert graph(world, rng)
    usual = Arithmetic("test", difficulty=difficulty)[:40]
    assert not {problem.question for problem in usual} & {problem.question for problem in task[:40]}
    assert task.grade(task[0], f"Final Answer: {task[0].answer}").correct


def render(tokenizer: Any, system: str, user: str) -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text


def test_each_shipped_system_prompt_is_one_token(tokenizer: Any) -> None:
    found: dict[str, str] = {}
    for name in set(mas_gym.mas_names()) - {"cot", "handoff", "game24"}:
        for agent in mas_gym.load_mas(name).agents:
            text = render(tokenizer, agent.system_prompt, "Hello")
            assert text.startswith("<|user|>Hello<|")
            token = text.removeprefix("<|user|>Hello")
            assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
            assert found.setdefault(token, agent.system_prompt) == agent.system_prompt
    assert len(found) == 26


def test_other_system_prompts_are_tokenized_as_text(tokenizer: Any) -> None:
    assert render(tokenizer, "Be kind.", "Hi") == "<|user|>Hi<|system|>Be kind.<|out|>"
    alone = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(alone, add_generation_prompt=True, tokenize=False) == "<|user|>Hi<|out|>"


def test_message_cannot_imitate_a_role(tokenizer: Any) -> None:
    text = render(tokenizer, "You are the Solver.", "x<|end|><|Verifier|>y")
    specials = [t for t in tokenizer.tokenize(text) if t.startswith("<|")]
    assert specials == ["<|user|>", "<|Solver|>"]


# --- training


def test_packed_row_has_the_same_logits_as_separately_encoded_prompts(tokenizer: Any) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.tiny.data import IGNORED, collate, pack
    from benchmarks.tiny.train import build_model

    torch.manual_seed(0)
    model = build_model(tokenizer, 64, 2).eval()
    model.set_attn_implementation("eager")
    problem = Arithmetic("train")[0]
    mas = mas_gym.load_mas("rpsv")
    turns = graphs.rpsv(story_world(problem), random.Random(0))
    longer = pack(problem.question + " " + problem.question, turns, tokenizer)
    batch = collate([pack(problem.question, turns, tokenizer), longer], tokenizer.pad_token_id)
    with torch.no_grad():
        logits = model(input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.mask).logits
    packed = logits[0][batch.targets[0] != IGNORED]
    alone = []
    for agent, turn in zip(mas.agents, turns, strict=True):
        user = "\n\n".join([problem.question] * turn.sees_question + turn.inputs)
        prompt = tokenizer.encode(render(tokenizer, agent.system_prompt, user), add_special_tokens=False)
        answer = [*tokenizer.encode(turn.text, add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            alone.append(model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1])
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-4, rtol=1e-4)


def test_training_messages_on_random_questions_are_short_and_correct() -> None:
    rng = random.Random(0)
    for _ in range(200):
        text = foreign_text(rng)
        facts = foreign_facts(text)
        for turn in foreign_turns(text, rng):
            for read, right in ((language.read_facts, facts), (language.read_plan, arithmetic.plan_of(facts))):
                assert read(turn.text) in (None, right)
            work = language.read_work(turn.text)
            assert work is None or all(arithmetic.apply(a, op, b) == c <= arithmetic.LIMIT for a, op, b, c in work)
            assert len(turn.text) < 200


def test_spreading_token_positions_keeps_their_order(tokenizer: Any) -> None:
    from benchmarks.tiny.data import pack, stretch

    rng = random.Random(0)
    text = foreign_text(rng)
    row = pack(text, foreign_turns(text, rng), tokenizer, 240)
    stretched = [stretch(row, rng) for _ in range(20)]
    assert any(max(other.positions) > 500 for other in stretched)
    for other in stretched:
        assert max(other.positions) < 1024
        moved = dict(zip(row.positions, other.positions, strict=True))
        # equal positions stay equal, later ones stay later
        assert [moved[position] for position in row.positions] == other.positions
        assert sorted(moved.values()) == [moved[position] for position in sorted(moved)]


def arguments(out: Path) -> argparse.Namespace:
    from benchmarks.tiny.train import parser

    text = f"--out {out} --steps 4 --batch 2 --hidden 64 --layers 1 --save-every 2 --no-bf16"
    return parser().parse_args(text.split())


def test_interrupted_training_resumes_with_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from benchmarks.tiny import train as module

    threads = torch.get_num_threads()
    monkeypatch.setattr(module.LossCurve, "EVERY", 1)
    module.train(arguments(tmp_path / "whole"))
    save = module._save

    def save_and_stop(path: Path, parts: Any, args: Any, step: int) -> None:
        save(path, parts, args, step)
        if step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        module.train(arguments(tmp_path / "parts"))
    monkeypatch.setattr(module, "_save", save)
    # As after a kill between the two files.
    with (tmp_path / "parts" / "loss.jsonl").open("a") as file:
        file.write('{"schema": 1, "step": 3, "average": 99.0, "cpu_seconds": 99.0}\n')
    module.train(arguments(tmp_path / "parts"))
    torch.set_num_threads(threads)
    texts = [(tmp_path / name / "loss.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    curves = [[(line["step"], line["average"]) for line in map(json.loads, lines)] for lines in texts]
    assert curves[0] == curves[1] and [step for step, _ in curves[0]] == [1, 2, 3, 4]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    changed = arguments(tmp_path / "parts")
    changed.seed = 5
    with pytest.raises(ConfigError, match="another --out"):
        module.train(changed)


def test_tiny_natural_is_trained_only_on_correct_transcripts(
    tokenizer: Any,
) -> None:
    pytest.importorskip("torch")
    from benchmarks.tiny import natural, stories
    from mas_gym.policies import load_policy

    task = stories.Stories("train", difficulty=3)
    unsound = 0
    for problem in task[:60]:
        turns = stories.transcript(problem)
        assert first_error(problem, [(turn.role or "", turn.text) for turn in turns]) is None
        assert task.grade(problem, turns[-1].text).correct
        world = story_world(problem)
        unsound += int(problem.answer) in [
            a for a in arithmetic.misread_answers(world.facts, world.rival) if a is not None
        ]
    # Problems on which a misreading gives the right answer are kept.
    assert unsound
    one, other = (next(natural.correct_batches(tokenizer, 3, 2, start)) for start in (0, 1))
    again = natural.correct_batches(tokenizer, 3, 2)
    assert next(again).ids.equal(one.ids) and next(again).ids.equal(other.ids)
    setting = natural.SETTINGS["stories"]
    level = natural.measure(load_policy("tiny"), setting.family, 5, 4)
    assert level.errors.total() == round(12 * (1 - level.right)) > 0
    (agent, kind), _ = level.errors.most_common(1)[0]
    assert f"| {agent} | {kind} |" in natural.card("agents", setting, [level], "command")


def test_reworded_stories_use_unseen_verbs_and_equivalent_facts_are_accepted() -> None:
    from benchmarks.tiny import stories

    def unseen(question: str) -> bool:
        return any(phrase in question for phrase in (" lost", " found", " bought", " took", " went", " had "))

    often = [sum(unseen(p.question) for p in stories.Reworded("dev", difficulty=level)[:60]) for level in (1, 5)]
    assert 0 < often[0] < often[1] < 60
    assert not any(unseen(p.question) for p in stories.Stories("dev", difficulty=1)[:60])
    problem = next(
        p for p in stories.Reworded("dev", difficulty=3)[:60] if any(fact[0] == "buys" for fact in p.metadata["facts"])
    )
    facts = facts_of(problem)
    found = [("finds", *fact[1:]) if fact[0] == "buys" else fact for fact in facts]
    lost = [("loses", *fact[1:]) if fact[0] == "buys" else fact for fact in facts]
    assert first_error(problem, [("Reader", language.write_facts(found))]) is None
    assert first_error(problem, [("Reader", language.write_facts(lost))]) is not None


def test_work_is_returned_to_the_agent_that_made_the_error() -> None:
    system = mas_gym.load_mas(str(SYSTEM))
    rng = random.Random(0)
    rounds: Counter[bool] = Counter()
    for problem in Arithmetic("train", difficulty=3)[:300]:
        turns = send_back(story_world(problem), rng)
        dynamics = mas_gym.Dynamics(system)
        state = dynamics.initial_state(problem.question)
        for turn in turns:
            # The writers receive the agents' prompts, and the system follows their recipients.
            assert not dynamics.is_terminal(state)
            agent = system.agents[state.acting]
            assert agent.name == (turn.role or "Referee")
            shown = mas_gym.systems.prompts.agent_inputs(system, state)
            assert shown == [problem.question] * turn.sees_question + turn.inputs
            assert turn.role is not None or turn.system == agent.system_prompt
            state = dynamics.transition(state, (turn.text, system.ALL))
        assert dynamics.is_terminal(state)
        back = len(turns) > 4
        rounds[back] += 1
        if back:
            told = turns[3].text.rpartition("-> ")[2]
            work = language.read_work(turns[2].text)
            assert work is not None and faults(story_world(problem).facts, steps_of(work))
            assert turns[4].role == told
    assert min(rounds.values()) > 80


def test_training_mix_can_exclude_graphs_by_name_prefix() -> None:
    left = graphs.DEFAULT_MIX.without("audit").graphs
    assert set(graphs.DEFAULT_MIX.graphs) - set(left) == {"audit", "audit-logic"}
    assert graphs.DEFAULT_MIX.without("") == graphs.DEFAULT_MIX


# --- the shipped weights


def test_model_folder_is_small_and_loads_with_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    files = {path.name: path.stat().st_size for path in tiny.path().iterdir()}
    assert sum(files.values()) < 10_000_000
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files.keys()
    model = AutoModelForCausalLM.from_pretrained(tiny.path(), dtype=torch.float32)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.config.vocab_size % 64 == 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.in_features % 64 == module.out_features % 64 == 0
    assert (model.generation_config.temperature, model.generation_config.top_p) == (0.7, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("graph", SHIPPED)
def test_single_pass_accuracy_leaves_room_for_search(graph: str) -> None:
    pytest.importorskip("torch")
    from mas_gym.policies import load_policy

    task = mas_gym.load_task("ordering" if graph in ("debate", "logic") else "arithmetic", split="test")[:30]
    plans = list(search.run("sc:5", task, mas=graph, policy=load_policy("tiny"), seed=0))
    right = [[one.correct for one in plan.candidates] for plan in plans]
    accuracy = sum(map(sum, right)) / 150
    assert 0.33 <= accuracy <= 0.67
    assert sum(map(any, right)) / 30 - accuracy >= 0.2
    names = [agent.name for agent in mas_gym.load_mas(graph).agents]
    failed = [(plan.problem_id, one.state) for plan in plans for one in plan.candidates if not one.correct]
    errors = [
        first_error(task.problem(problem), [(names[turn.speaker], turn.text) for turn in state.turns])
        for problem, state in failed
    ]
    share = max(Counter(error.speaker for error in errors if error).values()) / len(failed)
    assert share <= {"rpsv": 0.55, "logic": 0.7}.get(graph, 1)
    assert sum(error.kind == "unreadable" for error in errors if error) <= len(failed) / 20


def test_model_replies_to_unusual_prompts() -> None:
    pytest.importorskip("torch")
    from mas_gym.policies import SamplingRequest, load_policy
    from mas_gym.systems.prompts import ChatMessage

    policy = load_policy("tiny")
    prompts = [
        ("You are a pirate.", "Janet’s ducks lay 16 eggs per day. She sells 1,250 of them."),  # noqa: RUF001
        ("You are the Reader. Extract key facts and restate the question.", "\U0001f600 \u05e9\u05dc\u05d5\u05dd 3.14"),
        ("You are the Solver. Carry out the plan and compute results.", ""),
    ]
    requests = [
        SamplingRequest((ChatMessage("system", system), ChatMessage("user", user)), (1,), 40)
        for system, user in prompts
    ]
    for reply in policy.sample(requests):
        assert reply.samples[0].tokens >= 1
        assert "<|" not in reply.samples[0].text
