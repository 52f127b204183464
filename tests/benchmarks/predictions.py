"""Computed against measured memory and time: `python -m tests.benchmarks.predictions`; see --help.

Each case is a real training of UPDATES updates as the flow starts it, in processes of its own. The
speed is measured before and after each, because other work on the machine changes it.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.machine import machine_lines
from tests.benchmarks.processes import ROOT
from tests.benchmarks.results import as_markdown

PROCESSES = 2
SHARDINGS = ("ddp", "fsdp2")
PROMPT, RESPONSE = 64, 32
"""Tokens of every prompt and response."""

UPDATES = 3
"""Updates of a training; the first one, with its compiled matmuls, is left out of the time."""

SECTION = {
    "batch_size": 16,
    "total_episodes": 16 * UPDATES,
    "response_length": RESPONSE,
    "per_device_train_batch_size": 4,
    "local_rollout_forward_batch_size": 8,
    "num_ppo_epochs": 1,
    "learning_rate": 1e-5,
    "stop_token": "none",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A policy of Llama's kind; reward model and critic have its shape."""

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    sharding: str = "ddp"


SIZES = (
    Case(name="1M", vocabulary=2_000, width=128, layers=4, heads=4),
    Case(name="7M", vocabulary=8_000, width=256, layers=4, heads=4),
    Case(name="19M", vocabulary=16_000, width=384, layers=4, heads=6),
    Case(name="42M", vocabulary=16_000, width=512, layers=8, heads=8),
    Case(name="105M", vocabulary=32_000, width=768, layers=8, heads=12),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Computed and measured numbers of a case."""

    case: Case
    parameters: int
    phase: str
    """Phase that needs most, as computed."""

    computed: int
    """Bytes."""

    measured: int
    """Peak resident bytes of the larger process."""

    seconds_computed: list[float]
    """Seconds of an update from the speed before and after the training."""

    seconds_measured: float
    """Median seconds of an update, without its checkpoint."""

    @property
    def memory_ratio(self) -> float:
        """Computed by measured memory."""
        return self.computed / self.measured

    @property
    def time_ratio(self) -> float:
        """Computed by measured time."""
        return median(self.seconds_computed) / self.seconds_measured


def measure(case: Case, folder: Path) -> Found:
    """Compute the memory and time of a training, and run it."""
    _run("make", case, folder)
    before = _run("compute", case, folder)
    # Not by `train`, which would measure this child, too.
    _run("job", case, folder)
    trained = _run("train", case, folder)
    after = _run("compute", case, folder)
    return Found(
        case=case,
        parameters=before["parameters"],
        phase=before["phase"],
        computed=before["bytes"],
        measured=trained["bytes"],
        seconds_computed=[before["seconds"], after["seconds"]],
        seconds_measured=trained["seconds"],
    )


def _run(part: str, case: Case, folder: Path) -> dict[str, Any]:
    """Run a part of a measurement in its own process, and return what it prints."""
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.benchmarks.predictions",
            "--part",
            part,
            json.dumps(asdict(case)),
            str(folder),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'flows'}"},
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise SystemExit(f"{part} of {case} failed:\n{ran.stderr[-3000:]}")
    printed: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return printed


# --- The parts, each in a process of its own ---------------------------------------


def make(case: Case, folder: Path) -> dict[str, Any]:
    """Write models of random weights, and prompts."""
    from random import Random

    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

    from tests.benchmarks.models import EOS, PAD, make_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        intermediate_size=8 * case.width // 3,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        num_labels=1,
    )
    tokenizer, words = make_tokenizer(case.vocabulary), Random(0)
    for name, kind in (
        ("policy", AutoModelForCausalLM),
        ("reward", AutoModelForSequenceClassification),
    ):
        kind.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    def text(count: int) -> str:
        return " ".join(f"w{words.randrange(3, case.vocabulary)}" for _ in range(count))

    pair = {"prompt": text(PROMPT), "chosen": text(8), "rejected": text(8)}
    rows = {"prompts": [{"prompt": text(PROMPT)} for _ in range(64)], "pairs": [pair]}
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return {}


def compute(case: Case, folder: Path) -> dict[str, Any]:
    """Return the memory and time that `--check` computes."""
    from pipeline.cost.measured_speed import measure_speed
    from pipeline.cost.memory.ppo_memory import peak_memory
    from pipeline.cost.run_time import ppo_seconds
    from pipeline.cost.training_sizes import Processes, ppo_size
    from ppo_core.ppo.schedule import make_schedule

    settings = _settings(case, folder)
    schedule = make_schedule(settings.ppo, num_prompts=64, num_processes=PROCESSES)
    processes = Processes(number=PROCESSES, on_gpus=False)
    size = ppo_size(settings, schedule, longest_prompt=PROMPT, processes=processes)
    assert size is not None
    speed = measure_speed(settings.policy, size)
    seconds = ppo_seconds(size, schedule, speed, epochs=1, mean_prompt=PROMPT, samples_here=True)
    memory = peak_memory(size)
    return {
        "parameters": size.policy.parameters,
        "phase": memory.phase,
        "bytes": memory.total,
        "seconds": seconds / schedule.num_updates,
    }


def train(case: Case, folder: Path) -> dict[str, Any]:
    """Run the training; return its peak memory, and the median time of an update."""
    from pipeline.launch.launcher import train as run_training

    job = folder / "ppo"
    run_training(job / "settings.json", processes=PROCESSES)
    # This process imports no large library: a child begins with the peak of its parent.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    lines = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    phases = ("time/sampling", "time/scoring", "time/updating")
    seconds = [sum(line[phase] for phase in phases) for line in lines[1:]]
    return {"bytes": peak, "seconds": median(seconds)}


def job(case: Case, folder: Path) -> dict[str, Any]:
    """Write the job of the training."""
    from pipeline.inputs.run_data import RunData
    from pipeline.inputs.run_rewards import RunRewards
    from pipeline.launch.job import JobModels, write_job

    settings = _settings(case, folder)
    write_job(
        RunRewards(RunData(settings)),
        JobModels(
            policy=settings.policy,
            reward_model=settings.reward_model,
            reward_bias=0.0,
            reward_gain=1.0,
        ),
        folder=folder / "ppo",
        policy_dir=folder / "ppo" / "policy",
    )
    return {}


def _settings(case: Case, folder: Path) -> Any:
    from pipeline.settings.make_settings import make_settings

    table = {
        "policy": str(folder / "policy"),
        "reward_model": str(folder / "reward"),
        "preferences_test": str(folder / "pairs.jsonl"),
        "prompts": str(folder / "prompts.jsonl"),
        "eval_prompts": str(folder / "prompts.jsonl"),
        "judge": "rule",
        "processes": PROCESSES,
        "ppo": {**SECTION, "sharding": case.sharding},
    }
    return make_settings(table, {})


PARTS = {each.__name__: each for each in (make, compute, train, job)}


# --- The tables --------------------------------------------------------------------


def memory_table(found: Sequence[Found]) -> Table:
    """Return computed and measured memory."""
    table = Table(title=f"Memory of a process, {PROCESSES} processes")
    for column in ("policy", "sharding", "phase", "computed MiB", "measured MiB", "ratio"):
        table.add_column(column, justify="right" if "MiB" in column or column == "ratio" else None)
    for one in found:
        table.add_row(
            f"{one.parameters / 1e6:.1f}M",
            one.case.sharding,
            one.phase,
            f"{one.computed / 2**20:,.0f}",
            f"{one.measured / 2**20:,.0f}",
            f"{one.memory_ratio:.2f}",
        )
    return table


def time_table(found: Sequence[Found]) -> Table:
    """Return computed and measured time of an update."""
    table = Table(title=f"Time of an update, {PROCESSES} processes")
    for column in ("policy", "sharding", "computed before", "after", "measured s", "ratio"):
        table.add_column(column, justify="left" if column in ("policy", "sharding") else "right")
    for one in found:
        table.add_row(
            f"{one.parameters / 1e6:.1f}M",
            one.case.sharding,
            *(f"{seconds:.2f}" for seconds in one.seconds_computed),
            f"{one.seconds_measured:.2f}",
            f"{one.time_ratio:.2f}",
        )
    return table


def main(arguments: Sequence[str]) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.predictions")
    parser.add_argument("--results", type=Path, help="write the tables there, as Markdown")
    parser.add_argument("--sizes", nargs="+", choices=[case.name for case in SIZES])
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.part:
        part, case, folder = chosen.part
        print(json.dumps(PARTS[part](Case(**json.loads(case)), Path(folder))))
        return 0
    lines, console, found = machine_lines(), Console(width=120), []
    console.print("\n".join(lines), highlight=False)
    for case in SIZES:
        for sharding in SHARDINGS if case.name in (chosen.sizes or [case.name]) else ():
            with tempfile.TemporaryDirectory() as folder:
                found.append(measure(replace(case, sharding=sharding), Path(folder)))
            print(found[-1], flush=True)
    tables = [memory_table(found), time_table(found)]
    console.print(*tables)
    if chosen.results:
        about = (
            "Written by `python -m tests.benchmarks.predictions --results FILE`. The policy "
            "with 1.3M parameters computes in fp32, because its hidden size is below 192. The "
            "other policies compute in bfloat16."
        )
        facts = "\n".join(f"- {line}" for line in lines)
        text = ["# Computed and measured memory and time", about, facts, *map(as_markdown, tables)]
        chosen.results.write_text("\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
