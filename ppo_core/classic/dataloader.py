"""Batches of a script's data set, for the classic loop."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, default_collate

from ppo_core.errors import DataError

COLUMNS = {"input_ids", "attention_mask", "label", "query", "response"}
"""What is kept of a data set, unless the settings say that all is."""

Collator = Callable[[list[Any]], Any]


def without_unused_columns(dataset: Any) -> Any:
    """A data set of `datasets` without the columns that the loop has no use for."""
    if not hasattr(dataset, "column_names"):
        return dataset
    return dataset.remove_columns([name for name in dataset.column_names if name not in COLUMNS])


def shuffled_batches(
    dataset: Any,
    collate: Collator | None,
    *,
    batch_size: int,
    seed: int,
    rank: int,
    num_processes: int,
) -> DataLoader[Any]:
    """Whole batches of the rows of one process, in a new order in each pass.

    What is left over of a pass is left out, other rows in each. Without `collate`, rows with
    names become a list by name, and all others what torch makes of them.

    Raises:
        DataError: there are too few rows for one batch in each process.
    """
    if len(dataset) < batch_size * num_processes:
        raise DataError(
            f"The data set has {len(dataset)} rows, too few for one batch of {batch_size} in each "
            f"of {num_processes} processes: the loop would never run. Set a smaller batch_size."
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=num_processes, rank=rank, seed=seed, drop_last=True
    )
    return _NewOrderEachPass(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate or _lists_by_name,
        drop_last=True,
    )


class _NewOrderEachPass(DataLoader[Any]):
    """A loader whose sampler is told of each pass, without which all have one order."""

    def __iter__(self) -> Any:
        sampler: Any = self.sampler
        sampler.set_epoch(sampler.epoch + 1)
        return super().__iter__()


def _lists_by_name(rows: list[Any]) -> Any:
    if not isinstance(rows[0], Mapping):
        return default_collate(rows)
    return {name: [row[name] for row in rows] for name in rows[0]}
