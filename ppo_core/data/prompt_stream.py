"""Draw batches of prompts at random."""

from collections.abc import Iterator

import torch


class PromptStream:
    """Draws batches of row numbers endlessly, in a new seeded order for each pass over the data."""

    def __init__(self, num_prompts: int, *, seed: int, samples: int = 1) -> None:
        """Start a stream of the row numbers 0 to num_prompts - 1, each repeated `samples` times."""
        self._num_prompts = num_prompts
        self._samples = samples
        self._seed = seed
        self.restart()

    def restart(self) -> None:
        """Start again at the beginning of the first pass."""
        self._generator = torch.Generator().manual_seed(self._seed)
        self._rows = self._draw_rows()

    def _draw_rows(self) -> Iterator[int]:
        while True:
            order = torch.randperm(self._num_prompts, generator=self._generator)
            yield from order.repeat_interleave(self._samples).tolist()

    def next_batch(self, batch_size: int) -> list[int]:
        """Return the next row numbers; a batch may span several passes, so no row is dropped."""
        return [next(self._rows) for _ in range(batch_size)]
