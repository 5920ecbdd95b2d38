"""Train an ORM as a linear head on a frozen language model, where there is no GPU for LoRA.

    python -m benchmarks.real_models.frozen_head --store train-cot.db --base FOLDER --out models/orm-cot

The hidden state at the end of each finished transcript is computed once; the head is a logistic regression on it, with
the penalty chosen by cross-validation over questions. The folder is a critic like those of ``mas-gym train``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold

from mas_gym.policies.local.forward import fast_bfloat16, threads_for
from rewardmodels import collect, stored_trees
from rewardmodels.data.encode import Encoder, chunks, collate_plain
from rewardmodels.model.backbone import load_scalar, load_tokenizer
from rewardmodels.model.critic_folder import CriticInfo, model_card, save_folder
from rewardmodels.model.training_questions import write_questions

LENGTH, FOLDS = 2048, 5
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)


def hidden_states(model: torch.nn.Module, states: list[list[int]], pad: int) -> np.ndarray:
    """Return the last hidden state of each sequence of token ids, shape (states, hidden size)."""
    found: dict[int, np.ndarray] = {}
    order = sorted(range(len(states)), key=lambda i: len(states[i]))
    start = time.perf_counter()
    with torch.inference_mode(), threads_for(sum(p.numel() for p in model.parameters())):
        for chunk in chunks(order, [len(states[i]) for i in order], padded=True):
            batch = collate_plain([(tuple(states[i]),) for i in chunk], pad)
            last = model.model(**batch.inputs, use_cache=False).last_hidden_state[batch.rows, batch.columns]
            found.update(zip(chunk, last.float().numpy(), strict=True))
            tokens = sum(len(states[i]) for i in found)
            print(f"{len(found):,} of {len(states):,} states, {tokens / (time.perf_counter() - start):.0f} tokens/s", flush=True)
    return np.stack([found[i] for i in range(len(states))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--base", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    data = collect(stored_trees(given.store), "outcomes")
    tokenizer = load_tokenizer(given.base)
    dtype = torch.bfloat16 if fast_bfloat16() else torch.float32
    model = load_scalar(given.base, dtype, tokenizer.pad_token_id, new_head=True).eval()
    encoder = Encoder(tokenizer, LENGTH, data.view)
    encoded = encoder.encode_parts([example.chosen for example in data.examples])
    features = hidden_states(model, [[token for part in one.parts for token in part] for one in encoded], tokenizer.pad_token_id)
    right = np.array([example.chosen_target > 0 for example in data.examples])
    questions = np.array([example.problem_id for example in data.examples])

    def fitted(penalty: float, rows: np.ndarray) -> np.ndarray:
        # The head of a critic has no constant term.
        head = LogisticRegression(C=penalty, fit_intercept=False, max_iter=2000).fit(features[rows], right[rows])
        return head.coef_[0]

    folds = list(GroupKFold(FOLDS).split(features, right, questions))
    held_out = {c: np.zeros(len(right)) for c in PENALTIES}
    for learned, held in folds:
        for penalty in PENALTIES:
            held_out[penalty][held] = features[held] @ fitted(penalty, learned)
    areas = {penalty: float(roc_auc_score(right, scores)) for penalty, scores in held_out.items()}
    best = max(areas, key=areas.__getitem__)
    print("AUC on held-out questions by penalty:", {penalty: round(area, 3) for penalty, area in areas.items()})
    # tanh(z) = 2 p - 1 for a log-odds of 2 z.
    model.score.float().weight.data[0] = torch.from_numpy(fitted(best, np.arange(len(right))) / 2)
    info = CriticInfo(
        kind="orm",
        head="bce",
        view=data.view,
        max_length=LENGTH,
        graphs=data.graphs,
        tasks=sorted({example.task for example in data.examples}),
        base=Path(given.base).name,
        settings={"frozen backbone": True, "C": best},
        data={"trees": data.trees, "outcomes": len(right), "right": int(right.sum())},
        metrics={"auc": areas[best]},
        versions={},
    )
    write_questions(given.out, data.questions)
    save_folder(model, tokenizer, given.out, info, model_card(info))
    print(f"Saved to {given.out}")


if __name__ == "__main__":
    main()
