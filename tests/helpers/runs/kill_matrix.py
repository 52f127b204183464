"""Runs of two processes that are killed and resumed, and their results."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer
from tests.helpers.paths import ROOT
from tests.helpers.runs.forked_python import run_python

TORCHRUN = (
    "-m torch.distributed.run --standalone --nproc-per-node=2 -m tests.helpers.jobs.dying_process"
).split()
UPDATES = 5
BATCH = 8
FLAGS = f"""
    --total_episodes {UPDATES * BATCH} --batch_size {BATCH} --per_device_train_batch_size 2
    --num_ppo_epochs 2 --num_mini_batches 2 --response_length 12 --temperature 1.0
    --learning_rate 1e-3 --lr_scheduler_type cosine --warmup_steps 3 --kl_target 0.1
    --use_score_scaling true --use_score_norm true --ema_decay 0.9
    --save_steps 1 --save_total_limit 2 --save_policies 2 --resume_from_checkpoint latest
    --num_sample_generations 0 --disable_tqdm true
""".split()
"""Settings with much state to restore: schedule, KL coefficient, score moments, mean weights."""


@dataclass(frozen=True)
class Moment:
    """The moment at which a process of a run is killed."""

    phase: str
    event: int
    """Number of the event of the phase in this process, from 1."""

    rank: int
    everyone: bool
    """Whether the other process is killed too, as when a machine is lost."""

    delay: float
    """Seconds from the event to the kill; 0 kills between two calls."""


class Matrix:
    """A run to kill, with its models and prompts in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, model in (("policy", make_policy()), ("reward", make_classifier())):
            model.save_pretrained(folder / name)
            make_tokenizer().save_pretrained(folder / name)
        rows = [{"prompt": f"w{3 * n} w{n + 1}"} for n in range(20)]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(self, output: Path, moments: Sequence[Moment | None], *flags: str) -> str:
        """Resume the run in `output` up to each moment; None is its end.

        Returns what it said on stderr.
        """
        said = ""
        for moment in moments:
            words = ["-m", "tests.helpers.jobs.dying_process", *self._flags(output), *flags]
            variables = self._variables(output, moment)
            job = run_python(*words, folder=self.folder, variables=variables, processes=2)
            if moment is None:
                assert job.codes == [0, 0], job.stderr[-4000:]
            else:
                assert job.codes[moment.rank] == -9, (moment, job.stderr[-4000:])
                assert all(job.codes), (moment, job.stderr[-4000:])
            said += job.stderr
        return said

    def run_under_torchrun(self, output: Path, moments: Sequence[Moment | None]) -> str:
        """Run as a user does: each attempt starts new processes, which import everything."""
        said = ""
        for moment in moments:
            job = subprocess.run(
                [sys.executable, *TORCHRUN, *self._flags(output)],
                env=os.environ | self._variables(output, moment),
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=240,
            )
            if moment is None:
                assert job.returncode == 0, job.stderr[-4000:]
            else:
                assert job.returncode == 1 and "SIGKILL" in job.stderr, (moment, job.stderr[-4000:])
            said += job.stderr
        return said

    def _flags(self, output: Path) -> list[str]:
        models = {
            "model_name_or_path": self.folder / "policy",
            "reward_model_path": self.folder / "reward",
            "dataset_name": self.folder / "prompts.jsonl",
            "output_dir": output,
        }
        return [*FLAGS, *(f"--{name}={path}" for name, path in models.items())]

    def _variables(self, output: Path, moment: Moment | None) -> dict[str, str]:
        counts_folder(output).mkdir(parents=True, exist_ok=True)
        return {
            "DYING_PLAN": json.dumps(plan(output, moment)),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }


def plan(output: Path, moment: Moment | None) -> dict[str, Any]:
    """Return the plan for `dying_process`."""
    return {"moment": moment and asdict(moment), "counts": str(counts_folder(output))}


def counts_folder(output: Path) -> Path:
    """Return the folder in which processes save their numbers of events."""
    return output.with_suffix(".counts")


def read_counts(output: Path) -> list[dict[str, int]]:
    """Return each process's number of events per phase in a run that was not killed."""
    return [json.loads((counts_folder(output) / f"{rank}.json").read_text()) for rank in (0, 1)]


def choose_moment(
    counts: list[dict[str, int]],
    phase: str,
    chance: random.Random,
    *,
    between: tuple[float, float] = (0.0, 0.99),
) -> Moment:
    """Choose a random moment in this share of a phase's events."""
    rank = chance.randrange(2)
    return Moment(
        phase=phase,
        event=1 + int(counts[rank][phase] * chance.uniform(*between)),
        rank=rank,
        everyone=chance.random() < 0.5,
        delay=chance.choice([0.0, chance.uniform(0.0, 0.003)]),
    )


def left_behind(output: Path) -> dict[str, Any]:
    """Return the result of a run: a digest of each file, and the metrics without durations."""
    last = output / f"checkpoint-{UPDATES}"
    folders = (output, last, *output.glob("policies/*"))
    files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    digests: dict[str, Any] = {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.suffix == ".safetensors" or path.name.startswith("process-")
    }
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return digests | {
        "metrics": [without_durations(json.loads(line)) for line in lines],
        "state": without_durations(json.loads((last / "trainer_state.json").read_text())),
        "checkpoints": sorted(path.name for path in output.glob("*checkpoint-*")),
    }


def without_durations(value: Any) -> Any:
    """Return JSON without the entries that a clock determines."""
    if isinstance(value, list):
        return [without_durations(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_durations(item)
        for key, item in value.items()
        if key != "eps" and not key.startswith("time/")
    }
