"""SFT and reward-model training: ours against TRL on the same models and rows, in turns."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.benchmarks.cases import NEOX_0_9M, NEOX_10M, PYTHIA_31M, Shape, Workload
from tests.benchmarks.models import FIRST_WORD, SEED, make_tokenizer, save_models
from tests.benchmarks.processes import run_python
from tests.benchmarks.tasks import Side

SHAPES = (NEOX_0_9M, NEOX_10M, PYTHIA_31M)
ROWS = 256
PART_TOKENS = (16, 128)
"""Range of the tokens of a prompt, and of a response, without its upper end. A text has both."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Trainings of one model by one side."""

    shape: Shape
    side: Side
    seconds: Sequence[float]
    peak_bytes: int
    """Peak resident memory of the largest process."""

    @property
    def rows_per_second(self) -> list[float]:
        """Return the rows per second of each training."""
        return [ROWS / seconds for seconds in self.seconds]


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """Trainings of one model by both sides, in turns."""

    ours: Trained
    theirs: Trained

    @property
    def ratios(self) -> list[float]:
        """Return our rows per second over TRL's, pair by pair."""
        pairs = zip(self.ours.seconds, self.theirs.seconds, strict=True)
        return [theirs / ours for ours, theirs in pairs]


def save_rows(shape: Shape, folder: Path) -> None:
    """Save demonstrations and preferences of random words."""
    generator = torch.Generator().manual_seed(SEED)

    def text() -> str:
        count = int(torch.randint(*PART_TOKENS, (), generator=generator))
        words = torch.randint(FIRST_WORD, shape.vocabulary, (count,), generator=generator)
        return " ".join(f"w{word}" for word in words.tolist())

    for kind, columns in {
        "sft": ("prompt", "completion"),
        "reward": ("prompt", "chosen", "rejected"),
    }.items():
        # TRL encodes a prompt together with its answer, so the words need a space between them.
        rows = [{name: f"{text()} " for name in columns} for _ in range(ROWS)]
        (folder / f"{kind}.json").write_text(json.dumps(rows))


def measure_trainings(kind: str, folder: Path, *, rounds: int, trl_python: Path) -> list[Trainings]:
    """Train each model by each side, `rounds` times in turns; `kind` is sft or reward."""
    found = []
    for shape in SHAPES:
        workload, own = Workload(shape=shape), folder / shape.name
        save_models(workload, own)
        make_tokenizer(shape.vocabulary).save_pretrained(own / "policy")
        save_rows(shape, own)
        measured: dict[Side, list[dict[str, float]]] = {"ours": [], "trl": []}
        sizes = str(workload.microbatch), str(workload.accumulation)
        for _ in range(rounds):
            for side, each in measured.items():
                python = {"python": trl_python} if side == "trl" else {}
                printed = run_python("measure_training", side, kind, str(own), *sizes, **python)
                each.append(json.loads(printed.splitlines()[-1]))
        sides = [
            Trained(
                shape=shape,
                side=side,
                seconds=[one["seconds"] for one in each],
                peak_bytes=int(max(one["peak_bytes"] for one in each)),
            )
            for side, each in measured.items()
        ]
        found.append(Trainings(ours=sides[0], theirs=sides[1]))
    return found
