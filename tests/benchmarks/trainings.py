"""SFT and reward-model training: ours against TRL on the same models and rows, in turns."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tests.benchmarks.cases import LLAMA_135M, NEOX_10M, PYTHIA_31M, Shape, Workload
from tests.benchmarks.models import FIRST_WORD, SEED, make_tokenizer, save_models
from tests.benchmarks.processes import run_python
from tests.benchmarks.tasks import Side

ROWS = {NEOX_10M: 128, PYTHIA_31M: 96, LLAMA_135M: 32}
"""Rows of the training of each model; an optimizer step has 32 rows."""

PART_TOKENS = (16, 128)
"""Range of the tokens of a prompt, and of a response, without its upper end. A text has both."""

Setting = Literal["shipped", "fp32"]
"""The defaults of each side, or fp32 without recomputed activations on both sides. TRL's defaults
are bfloat16 and recomputed activations."""

SETTINGS: tuple[Setting, ...] = ("shipped", "fp32")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Trainings of one model by one side."""

    side: Side
    seconds: Sequence[float]
    peak_bytes: int
    """Peak resident memory of the largest process."""


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """Trainings of one model by both sides, in turns."""

    shape: Shape
    setting: Setting
    rows: int
    ours: Trained
    theirs: Trained

    @property
    def ratios(self) -> list[float]:
        """Return our rows per second over TRL's, pair by pair."""
        pairs = zip(self.ours.seconds, self.theirs.seconds, strict=True)
        return [theirs / ours for ours, theirs in pairs]

    @property
    def memory_ratio(self) -> float:
        """Return our peak memory over TRL's."""
        return self.ours.peak_bytes / self.theirs.peak_bytes


def save_rows(shape: Shape, folder: Path, count: int) -> None:
    """Save demonstrations and preferences of random words."""
    generator = torch.Generator().manual_seed(SEED)

    def text() -> str:
        length = int(torch.randint(*PART_TOKENS, (), generator=generator))
        words = torch.randint(FIRST_WORD, shape.vocabulary, (length,), generator=generator)
        return " ".join(f"w{word}" for word in words.tolist())

    for kind, columns in {
        "sft": ("prompt", "completion"),
        "reward": ("prompt", "chosen", "rejected"),
    }.items():
        # TRL encodes a prompt together with its answer, so the words need a space between them.
        rows = [{name: f"{text()} " for name in columns} for _ in range(count)]
        (folder / f"{kind}.json").write_text(json.dumps(rows))


def measure_trainings(kind: str, folder: Path, *, rounds: int, trl_python: Path) -> list[Trainings]:
    """Train each model by each side, `rounds` times in turns; `kind` is sft or reward."""
    found = []
    for shape, rows in ROWS.items():
        workload, own = Workload(shape=shape), folder / shape.name
        save_models(workload, own)
        make_tokenizer(shape.vocabulary).save_pretrained(own / "policy")
        save_rows(shape, own, rows)
        for setting in SETTINGS:
            measured: dict[Side, list[dict[str, float]]] = {"ours": [], "trl": []}
            for _ in range(rounds):
                for side, each in measured.items():
                    each.append(train_once(side, kind, own, workload, setting, trl_python))
            sides = {side: _in_all(side, each) for side, each in measured.items()}
            ours, theirs = sides["ours"], sides["trl"]
            found.append(
                Trainings(shape=shape, setting=setting, rows=rows, ours=ours, theirs=theirs)
            )
    return found


def train_once(
    side: Side, kind: str, folder: Path, workload: Workload, setting: Setting, trl_python: Path
) -> dict[str, float]:
    """Train on the rows of a folder in a new process; return its seconds and peak bytes."""
    python = {"python": trl_python} if side == "trl" else {}
    sizes = str(workload.microbatch), str(workload.accumulation)
    printed = run_python("measure_training", side, kind, str(folder), *sizes, setting, **python)
    measured: dict[str, float] = json.loads(printed.splitlines()[-1])
    return measured


def _in_all(side: Side, each: Sequence[Mapping[str, float]]) -> Trained:
    return Trained(
        side=side,
        seconds=[one["seconds"] for one in each],
        peak_bytes=int(max(one["peak_bytes"] for one in each)),
    )
