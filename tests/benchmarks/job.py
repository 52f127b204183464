"""The whole job: the flow, and TRL's three trainers one after another, on the same rows.

Both sides fine-tune the 10M model, train a reward model from it, and train the policy with PPO. The
flow also checks its inputs, validates the reward model, judges answers of both policies and
registers the policy; TRL's trainers do nothing of that. All processes, their imports and their
saved models are part of the time.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table

from tests.benchmarks.cases import NEOX_10M, Workload
from tests.benchmarks.compare import task_of
from tests.benchmarks.flow_overhead import flow_command, run_timed
from tests.benchmarks.models import FIRST_WORD, SEED, make_tokenizer, save_models
from tests.benchmarks.processes import Worker
from tests.benchmarks.tables import make_table, spread
from tests.benchmarks.trainings import save_rows, train_once

THREADS = 2
ROWS = 384
"""Demonstrations, and pairs."""

UPDATES = 6
"""PPO updates; each samples 32 responses."""

MEAN_LENGTH = 26
"""Mean tokens of a response of the policy before SFT; both sides stop at the end of text."""

HELD_OUT = 64
"""Pairs that validate the reward model, and prompts of the win rate; TRL has neither."""

JUDGE = '''"""Prefer the answer with more words."""


def judge(prompts, pairs):
    for first, second in pairs:
        more = len(first.split()) - len(second.split())
        yield "first" if more > 0 else "second" if more < 0 else "tie"
'''


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """Seconds of the whole job by both sides, in turns."""

    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """Return TRL's seconds over ours, pair by pair."""
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]


def measure_jobs(folder: Path, *, rounds: int, trl_python: Path) -> Jobs:
    """Do the job by both sides in turns.

    Raises:
        MeasurementError: a process of either side failed.
    """
    workload = Workload(shape=NEOX_10M, mean_length=MEAN_LENGTH)
    ours, theirs = [], []
    for number in range(rounds):
        own = folder / str(number)
        save_models(workload, own)
        make_tokenizer(workload.shape.vocabulary).save_pretrained(own / "policy")
        save_rows(workload.shape, own, ROWS)
        theirs.append(train_by_trl(own, workload, trl_python))
        ours.append(run_timed(flow_command(write_inputs(own, workload)), own, threads=THREADS)[0])
    return Jobs(ours=ours, theirs=theirs)


def train_by_trl(folder: Path, workload: Workload, trl_python: Path) -> float:
    """Run SFT, reward-model training and PPO of TRL; return the seconds of all processes."""
    started = time.perf_counter()
    for kind in ("sft", "reward"):
        train_once("trl", kind, folder, workload, "shipped", trl_python)
    models = folder / "trl"
    models.mkdir()
    parts = {"policy": "sft/trl", "reward": "reward/trl", "critic": "reward/trl"}
    parts |= {name: name for name in ("tokenizer", "prompts.json")}
    for name, path in parts.items():
        (models / name).symlink_to(folder / path)
    task = replace(task_of(workload, models, side="trl", threads=THREADS), updates=UPDATES)
    with Worker(task, trl_python=trl_python) as worker:
        worker.wait_until_ready()
        for _ in range(UPDATES):
            worker.run_update()
    return time.perf_counter() - started


def write_inputs(folder: Path, workload: Workload) -> Path:
    """Write the inputs that only the flow has, and its settings; return the settings file."""
    # Imported here, because a machine for `make bench-gpu` may not have the package.
    import tomli_w

    generator = torch.Generator().manual_seed(SEED + 1)
    lengths = torch.randint(32, 97, (UPDATES * workload.batch + HELD_OUT,), generator=generator)
    prompts = []
    for length in lengths.tolist():
        words = torch.randint(FIRST_WORD, workload.shape.vocabulary, (length,), generator=generator)
        prompts.append({"prompt": " ".join(f"w{word}" for word in words.tolist())})
    pairs = json.loads((folder / "reward.json").read_text())[:HELD_OUT]
    held_out = [{**pair, "prompt": f"w5 {pair['prompt']}"} for pair in pairs]
    files = {
        "prompts": prompts[:-HELD_OUT],
        "eval_prompts": prompts[-HELD_OUT:],
        "preferences_test": held_out,
    }
    for name, rows in files.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))
    (folder / "judge.py").write_text(JUDGE)
    supervised = {
        "learning_rate": 1e-4,
        "num_epochs": 1,
        "batch_size": workload.microbatch,
        "gradient_accumulation_steps": workload.accumulation,
        "max_length": 512,
    }
    table = {
        "policy": str(folder / "policy"),
        "sft_data": str(folder / "sft.json"),
        "preferences": str(folder / "reward.json"),
        **{name: str(folder / f"{name}.json") for name in files},
        "judge": f"python:{folder / 'judge.py'}:judge",
        # Random words teach a reward model nothing.
        "accept_reward_model": True,
        "output_dir": str(folder / "outputs"),
        "sft": supervised,
        "reward_model_training": supervised,
        "ppo": {
            "total_episodes": UPDATES * workload.batch,
            "batch_size": workload.batch,
            "per_device_train_batch_size": workload.microbatch,
            "num_mini_batches": 1,
            "num_ppo_epochs": workload.epochs,
            "response_length": workload.response_length,
            "learning_rate": 3e-6,
            "temperature": 0.7,
        },
        "evaluation": {"num_examples": HELD_OUT},
    }
    file = folder / "settings.toml"
    file.write_text(tomli_w.dumps(table))
    return file


def jobs_table(jobs: Jobs) -> Table:
    """Return the times of the whole job by both sides."""
    table = make_table(
        f"job: {ROWS} demonstrations and pairs, {UPDATES} PPO updates of the 10M model",
        "side|s|ratio (min-max)",
    )
    table.add_row("ours: the flow", spread(jobs.ours), spread(jobs.ratios))
    table.add_row("TRL: three trainers", spread(jobs.theirs), "")
    return table
