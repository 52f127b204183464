"""Search for the best learning rate of a reward model's training."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset

from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError, DataError, NotFiniteError, TrainingError
from ppo_core.errors.out_of_memory import explained_out_of_memory, free_unused
from ppo_core.io.atomic_files import write_atomically
from ppo_core.supervised.examples.reward_pairs import collate_pairs
from ppo_core.supervised.pair_ranker import PairRanker
from ppo_core.supervised.supervised_config import LOSS_AT, SupervisedConfig
from ppo_core.supervised.training_loop import (
    LESS_MEMORY,
    TrainingData,
    TrainingLoop,
    identity_of,
)

if TYPE_CHECKING:
    from peft import PeftModel

FACTORS = (1 / 3, 1, 3)
"""The rates that a search tries, as multiples of the middle rate."""

SHARE = 0.05
"""Fraction of the pairs that a search trains on."""

LEAST_PAIRS = 1_000
"""Minimum number of pairs that a search trains on, but at most 80 % of all pairs.

With fewer pairs, the accuracy may stay at chance with all three rates."""

MOST_JUDGED = 1_000
"""Maximum number of other pairs on which a search measures the loss."""


RankerMaker = Callable[[], tuple[PairRanker, "PeftModel | None"]]
"""Function that returns an untrained reward model, and the PeftModel in it or None."""


def find_learning_rate(
    make_ranker: RankerMaker,
    pairs: TrainingData,
    config: SupervisedConfig,
    middle: float,
    engine: Engine,
    *,
    model: Mapping[str, str],
    file: Path,
    earlier: Path | None,
) -> tuple[float, dict[str, float]]:
    """Return the best of three learning rates for a reward model, and the loss with each.

    The result is written to `file`. If the file `earlier` has a result for the same
    settings, pairs and model, that result is returned without a search, because a resumed training
    needs the rate of its checkpoints. `model` describes the model to train. For the other arguments
    see `search_learning_rate`.

    Raises:
        ConfigError: see `refuse_sharded_search`.
        DataError: see `search_learning_rate`.
        TrainingError: see `search_learning_rate`; or the file `earlier` is damaged.
    """
    refuse_sharded_search(engine.sharding)
    inputs = identity_of(config, pairs) | {"middle": middle, "model": dict(model)}
    found = engine.peers.together(
        lambda: _found(earlier, inputs) if earlier and engine.is_main else None
    )[0]
    if found is None:
        # Use the result of the main process: rounding may give another process another best rate.
        found = engine.peers.of_main(
            search_learning_rate(make_ranker, pairs.rows, config, middle, engine)
        )
    rate, losses = found
    # Write even a result from `earlier`: a resume from the checkpoints beside `file` needs it.
    record = json.dumps({"rate": rate, "losses": losses, "inputs": inputs})
    engine.peers.together(lambda: write_atomically(file, record) if engine.is_main else None)
    return rate, losses


def _found(file: Path, inputs: Mapping[str, Any]) -> tuple[float, dict[str, float]] | None:
    """Return the rate and the losses in a file; None if it has no result for these inputs."""
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        same, result = found["inputs"] == inputs, (found["rate"], found["losses"])
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"'{file}' is damaged: {error}. Remove it to search the learning rate again."
        ) from error
    return result if same else None


def refuse_sharded_search(sharding: str | None) -> None:
    """Raise if a search would train with sharded states.

    Raises:
        ConfigError: the weights or optimizer states would be sharded.
    """
    if sharding not in (None, "none", "ddp"):
        # DeepSpeed can prepare only one model in a process.
        raise ConfigError(
            f"learning_rate='auto' trains several models, one after the other, which does not work "
            f"with sharding={sharding!r}. Set learning_rate to a number, or leave it out for a "
            "rate by the size of the model."
        )


def search_learning_rate(
    make_ranker: RankerMaker,
    pairs: Dataset,
    config: SupervisedConfig,
    middle: float,
    engine: Engine,
) -> tuple[float, dict[str, float]]:
    """Return the best of three learning rates for a reward model, and the loss with each.

    A new model is trained with each rate for one epoch on some of the pairs (see `SHARE` and
    `LEAST_PAIRS`), and its loss is measured on other pairs. A rate whose training diverges has an
    infinite loss.

    Args:
        make_ranker: function that returns an equal, untrained model each time.
        pairs: encoded pairs, with the types of `PAIR_SCHEMA`.
        config: settings of the training; their learning rate and number of epochs are ignored.
        middle: the middle rate, which is the default for the model's size.
        engine: connection to the other processes.

    Raises:
        DataError: there is only one pair.
        TrainingError: the training diverges with every rate, or memory is full.
    """
    trained, judged = _parts(pairs, config.seed)
    losses: dict[float, float] = {}
    for rate in (factor * middle for factor in FACTORS):
        tried = replace(config, learning_rate=rate, num_epochs=1)
        losses[rate] = _loss_after(*make_ranker(), trained, judged, tried, engine)
        # The next model may not fit beside this one.
        free_unused()
    best = min(losses, key=lambda rate: losses[rate])
    if not math.isfinite(losses[best]):
        raise TrainingError(
            f"The training of the reward model diverges with each of the learning rates "
            f"{', '.join(f'{rate:.1e}' for rate in losses)}. Set learning_rate to a lower "
            "number, and check that the weights of the model are finite."
        )
    return best, {f"{LOSS_AT}{rate:.1e}": loss for rate, loss in losses.items()}


def _parts(pairs: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Return pairs to train on and other pairs to measure the loss on, both drawn at random."""
    if len(pairs) < 2:
        raise DataError(
            "learning_rate='auto' needs at least two pairs, one to train on and one to measure the "
            "loss on. Add pairs, or set learning_rate to a number."
        )
    count = min(max(round(SHARE * len(pairs)), LEAST_PAIRS), math.ceil(0.8 * len(pairs)))
    count = min(count, len(pairs) - 1)
    shuffled = pairs.shuffle(seed=seed, keep_in_memory=True)
    last = min(count + MOST_JUDGED, len(pairs))
    return shuffled.select(range(count)), shuffled.select(range(count, last))


def _loss_after(
    ranker: PairRanker,
    adapted: "PeftModel | None",
    trained: Dataset,
    judged: Dataset,
    config: SupervisedConfig,
    engine: Engine,
) -> float:
    """Train a ranker; return its loss on other pairs, or infinity if the training diverges."""
    data = TrainingData(rows=trained, digest="", collate=collate_pairs, texts_per_row=2)
    name = f"learning rate {config.learning_rate:.1e}"
    loop = TrainingLoop(ranker, data, config, name, adapted=adapted, engine=engine, output_dir=None)
    try:
        loop.train()
    except NotFiniteError:
        return math.inf
    with explained_out_of_memory(LESS_MEMORY):
        return _mean_loss(ranker, judged, config.batch_size)


@torch.no_grad()
def _mean_loss(ranker: PairRanker, pairs: Dataset, batch_size: int) -> float:
    """Return the weighted sum of losses, divided by the number of pairs with a weight above 0."""
    ranker.eval()
    device = next(ranker.parameters()).device
    total = units = 0.0
    for start in range(0, len(pairs), batch_size):
        rows = [pairs[number] for number in range(start, min(start + batch_size, len(pairs)))]
        batch = {"weights": torch.ones(len(rows))} | collate_pairs(rows)
        loss, _ = ranker(**{name: tensor.to(device) for name, tensor in batch.items()})
        total += float(loss)
        units += float(ranker.units(batch))
    return total / (units or 1.0)
