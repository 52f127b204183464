"""The data loader of the classic loop, with full, shuffled batches of a script's data set."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, default_collate

from ppo_core.data.prompt_set import Collator
from ppo_core.errors import DataError

KEPT_COLUMNS = {"input_ids", "attention_mask", "label", "query", "response"}
"""Columns that `remove_unused_columns` keeps."""


def without_unused_columns(dataset: Any) -> Any:
    """Return a `datasets.Dataset` with only `KEPT_COLUMNS`, and any other data set unchanged."""
    if isinstance(dataset, Mapping) or not getattr(dataset, "column_names", None):
        return dataset
    unused = [name for name in dataset.column_names if name not in KEPT_COLUMNS]
    return dataset.remove_columns(unused)


def shuffled_batches(
    dataset: Any,
    collate: Collator | None,
    *,
    batch_size: int,
    seed: int,
    rank: int,
    num_processes: int,
) -> DataLoader[Any]:
    """Return a loader of full batches from one process's rows, in a new order for each pass.

    The incomplete last batch of a pass is dropped. Without `collate`, a batch of mappings becomes
    a mapping of lists, and torch's default_collate handles other rows. A pass raises a DataError if
    the data set is too small for one batch in each process.

    Raises:
        DataError: `dataset` is a text, a mapping such as all splits of a data set, or a stream
            without a length.
    """
    if isinstance(dataset, str | Mapping):
        raise DataError(
            f"dataset={dataset!r:.80} is not a data set. Load the data set, and choose a split, "
            "for example dataset['train']."
        )
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"dataset={dataset!r:.80} has no length, so its rows cannot be shuffled and shared "
            "between processes. Load it without streaming=True."
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=num_processes, rank=rank, seed=seed, drop_last=True
    )
    return _ReshuffledLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate or _lists_by_column,
        drop_last=True,
    )


class _ReshuffledLoader(DataLoader[Any]):
    """A loader that advances its sampler's epoch for each pass, which changes the order."""

    def __iter__(self) -> Any:
        sampler: Any = self.sampler
        if len(self) == 0:
            raise DataError(
                f"The data set has {len(sampler.dataset)} rows, too few for one batch of "
                f"{self.batch_size} in each of {sampler.num_replicas} processes, so the loop would "
                "never run. Set a smaller batch_size."
            )
        sampler.set_epoch(sampler.epoch + 1)
        return super().__iter__()


def _lists_by_column(rows: list[Any]) -> Any:
    if not isinstance(rows[0], Mapping):
        return default_collate(rows)
    return {name: [row[name] for row in rows] for name in rows[0]}
