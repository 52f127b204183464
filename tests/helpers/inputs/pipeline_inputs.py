"""Tiny inputs for the flow: what a user would bring, in one folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer

JUDGE = """
def judge(prompts, pairs):
    count = lambda text: text.split().count("w1")
    return [
        "tie" if count(a) == count(b) else "first" if count(a) > count(b) else "second"
        for a, b in pairs
    ]
"""


def write_model(folder: Path, *, labels: int | None = None) -> str:
    """A causal model, or a classifier with so many labels, and its tokenizer."""
    model = make_policy() if labels is None else make_classifier(labels=labels)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_inputs(folder: Path) -> dict[str, str]:
    """Everything that a run on your own data needs: setting to path."""
    rng = Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{rng.randrange(58)}" for _ in range(count))

    def preference() -> dict[str, str]:
        return {"prompt": words(4), "chosen": f"w1 w1 {words(3)}", "rejected": words(5)}

    (folder / "judge.py").write_text(JUDGE)
    return {
        "policy": write_model(folder / "policy"),
        "sft_data": write_rows(
            folder / "sft.jsonl", [{"prompt": words(4), "completion": words(5)} for _ in range(16)]
        ),
        "preferences": write_rows(folder / "pairs.jsonl", [preference() for _ in range(64)]),
        "prompts": write_rows(folder / "prompts.jsonl", [{"prompt": words(4)} for _ in range(32)]),
        "eval_prompts": write_rows(
            folder / "eval.jsonl", [{"prompt": words(4), "reference": words(5)} for _ in range(16)]
        ),
        "judge": f"python:{folder / 'judge.py'}:judge",
        "output_dir": str(folder / "outputs"),
    }


def write_ppo_inputs(folder: Path) -> dict[str, str]:
    """What `python -m ppo_core` needs: a policy, a reward model and prompts."""
    rows = [{"prompt": f"w{i} w{(7 * i) % 50}"} for i in range(32)]
    return {
        "model_name_or_path": write_model(folder / "policy"),
        "reward_model_path": write_model(folder / "reward", labels=1),
        "dataset_name": write_rows(folder / "prompts.jsonl", rows),
    }


def tiny_table(folder: Path) -> dict[str, Any]:
    """Settings of a run that takes seconds."""
    training = {"batch_size": 16, "max_length": 32, "learning_rate": 1e-3}
    return {
        **write_inputs(folder),
        "sft": training,
        "reward_model_training": training,
        "ppo": {"total_episodes": 24, "batch_size": 8, "response_length": 6},
    }
