"""Warn of training prompts that repeat each other, and of those that the policies are judged on."""

from collections.abc import Iterator, Sequence

from pipeline.inputs.training_prompts import prompt_key
from ppo_core.data.rows.forms import Row
from ppo_core.data.rows.reader import Rows
from ppo_core.data.sources.raw_row import ROWS_AT_ONCE

MIN_DISTINCT = 0.5
"""Smallest fraction of distinct training prompts without a warning."""


def describe_repeats(training: Rows, evaluated: Sequence[Row]) -> Iterator[str]:
    """Yield a warning for training prompts that are mostly equal, or are evaluated on as well."""
    asked = {prompt_key(row["prompt"]) for row in evaluated}
    # Hashes, because all prompts of a large data set would fill the memory.
    distinct: set[int] = set()
    shared: set[str] = set()
    for batch in training.table.select_columns(["prompt"]).iter(ROWS_AT_ONCE):
        keys = {prompt_key(prompt) for prompt in batch["prompt"]}
        distinct.update(map(hash, keys))
        shared |= keys & asked
    if len(distinct) < MIN_DISTINCT * len(training):
        yield (
            f"warning: only {len(distinct)} of the {len(training)} prompts of {training.source} "
            "are distinct, so PPO samples from the same prompts again and again. Check the file, "
            "or add prompts."
        )
    if shared:
        yield (
            f"warning: {len(shared)} of the {len(asked)} prompts to evaluate on are also training "
            f"prompts, in {training.source}, so the win rate would not be that of unseen prompts. "
            "Remove them from one of the two, or hold out other prompts as eval_prompts."
        )
