"""The paper's experiment on a real model on one GPU: samples, rollouts, critics and searches, within a time limit.

    python -m benchmarks.real_models.run --model FOLDER --data gsm8k --out OUT --minutes 9
    python -m benchmarks.real_models.run --rehearse --out OUT --minutes 9 --train 12 --dev 3 --test 4

Each stage is a mas-gym command. Stages start in the order of `stages`, as soon as their prerequisites have finished and
a process is free. Repeat this command to continue a run that reached its time limit. The log of a stage is
``OUT/logs/STAGE.log``. ``--rehearse`` runs the stages with the bundled agents.

Processes on one GPU take turns: eight processes generated only 9% more tokens per second than one.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

GRACE = 12.0
"""Seconds in which a stage may store its finished searches after the time limit."""

LIKELIHOOD = "policy-likelihood"


class Stage(NamedTuple):
    """A command, and the names of the stages that must finish before it."""

    name: str
    needs: tuple[str, ...]
    words: str


class Setting(NamedTuple):
    """What differs between the experiment and its rehearsal: a task, a policy, a base of critics, and a system."""

    task: str
    policy: str
    base: str
    mas: str
    training: str
    train: int
    dev: int
    test: int


def stages(given: Setting, out: Path) -> list[Stage]:
    """Return all stages, most urgent first."""
    agents = f"{given.task} --policy {given.policy}"
    team, one = f"{agents} --mas {given.mas}", f"{agents} --mas cot"
    # Few searches at once: those that have finished at the time limit are stored.
    train, dev, test = (
        f"--split {split} -n {number} --concurrency 100"
        for split, number in (("train", given.train), ("dev", given.dev), ("test", given.test))
    )

    def rollouts(name: str, system: str, planner: str) -> Stage:
        return Stage(name, (), f"rollouts {system} {train} --planner {planner} --seed 14 --store {out}/{name}.db")

    def loaded(critic: str, planner: str) -> str:
        # Beam search also scores unfinished transcripts, for which an ORM was not trained.
        return f"{out / critic}#prefixes=true" if critic == "orm" and planner.startswith("sbs") else str(out / critic)

    def row(name: str, system: str, planner: str, critic: str = "", split: str = test) -> Stage:
        guide = "" if not critic else f"--critic {critic if critic == LIKELIHOOD else loaded(critic, planner)}"
        words = f"eval {system} {split} --seeds 14 --planner {planner} {guide} --store {out}/{name}.db"
        needs = () if critic in ("", LIKELIHOOD) else (critic,)
        return Stage(f"{name}-{critic}" if needs else name, needs, words)

    def trained(name: str, store: str, words: str, settings: str) -> Stage:
        options = " ".join(f"--set {one}" for one in f"{given.training} {settings}".split())
        words = f"train {words} --store {out}/{store}.db --base {given.base} --out {out}/{name} {options}"
        return Stage(name, (store,), words)

    def valued(name: str, planner: str, critic: str) -> Stage:
        guide = loaded(critic, planner)
        words = f"eval --recorded {out}/{name}.db --distinct --planner {planner} --critic {guide} --seeds 14"
        return Stage(f"{name}-values-{critic}", (name, critic), f"{words} --store {out}/{name}-{critic}.db")

    return [
        rollouts("train", team, "mcts:20,3"),
        rollouts("train-cot", one, "mcts:16,16"),
        row("tree", team, "sbs:3,1000", LIKELIHOOD),
        row("cot", one, "sc:20"),
        trained("masprm", "train", "masprm --head bt", "anchor=1 epochs=1"),
        trained("orm", "train", "orm --head bce", "epochs=2"),
        trained("orm-cot", "train-cot", "orm --head bce", "epochs=2"),
        row("team", team, "sc:10"),
        valued("tree", "sbs:3,1000", "masprm"),
        valued("tree", "sbs:3,1000", "orm"),
        valued("team", "bon:10", "orm"),
        valued("cot", "bon:20", "orm-cot"),
        *(
            row(name, team, planner, critic)
            for name, planner in (("mcts", "mcts:10,3"), ("sbs", "sbs:5,1"), ("beams", "sbs:5,3"))
            for critic in (LIKELIHOOD, "masprm", "orm")
        ),
        row("dev", team, "sbs:3,1000", LIKELIHOOD, dev),
        trained("masprm-mse", "train", "masprm --head mse", "epochs=1"),
        *(valued("dev", "sbs:3,1000", critic) for critic in ("masprm", "orm", "masprm-mse")),
    ]


class Running(NamedTuple):
    """A stage's process and its start, in seconds."""

    stage: Stage
    process: subprocess.Popen[bytes]
    started: float


def follow(todo: list[Stage], out: Path, processes: int, end: float) -> dict[str, int]:
    """Run stages until all have ended or the time is over; return their exit codes."""
    codes: dict[str, int] = {}
    running: list[Running] = []
    start = time.monotonic()
    while time.monotonic() < end:
        for one in [one for one in running if one.process.poll() is not None]:
            running.remove(one)
            codes[one.stage.name] = one.process.returncode
            now = time.monotonic()
            print(f"{now - start:6.1f} s  {one.stage.name}: {one.process.returncode} after {now - one.started:.0f} s")
        ready = [stage for stage in todo if all(codes.get(name) == 0 for name in stage.needs)]
        for stage in ready[: processes - len(running)]:
            todo.remove(stage)
            print(f"{time.monotonic() - start:6.1f} s  {stage.name} starts", flush=True)
            with (out / "logs" / f"{stage.name}.log").open("ab") as log:
                command = [sys.executable, "-m", "mas_gym.cli", *stage.words.split()]
                process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            running.append(Running(stage, process, time.monotonic()))
        if not running:
            break
        time.sleep(0.2)
    for one in running:
        one.process.send_signal(signal.SIGINT)
    for one in running:
        try:
            codes[one.stage.name] = one.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            one.process.kill()
            codes[one.stage.name] = one.process.wait()
        print(f"{one.stage.name} stopped at the time limit")
    for stage in todo:
        print(f"{stage.name} did not start")
    return codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the language model")
    parser.add_argument("--data", help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="time limit of this command")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rows", type=int, default=512, help="rows of a process's batch")
    parser.add_argument("--train", type=int, default=150, help="problems for rollouts")
    parser.add_argument("--dev", type=int, default=50)
    parser.add_argument("--test", type=int, default=150)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes - GRACE
    (given.out / "logs").mkdir(parents=True, exist_ok=True)
    sizes = given.train, given.dev, given.test
    settings = "batch_size=32 accumulation=1 held_out=0.1 evaluations=1 checkpoints=1"
    if given.rehearse:
        setting = Setting("--task arithmetic", "tiny", "tiny", "rpsv", settings, *sizes)
    else:
        policy = f"transformers:{given.model}#max_batch={given.rows}&prefix_megabytes=0"
        lora = f"nf4=false lora_rank=16 learning_rate=2e-4 {settings}"
        mas = str(Path(__file__).with_name("rpsv-256.yaml"))
        setting = Setting(f"--task gsm8k --data {given.data}", policy, given.model, mas, lora, *sizes)
    os.environ["OMP_NUM_THREADS"] = "2"
    codes = follow(stages(setting, given.out), given.out, given.processes, end)
    sys.exit(max((abs(code) for code in codes.values()), default=0))


if __name__ == "__main__":
    main()
