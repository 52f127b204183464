"""Decoding steps that a GPU replays from captured graphs.

Unless the model is large, the host needs several times longer to launch the kernels of a step one
by one than the GPU needs to compute them. A captured graph is launched by one call, but its shapes
and addresses are fixed. A graph therefore decodes a rounded number of sequences and cache columns,
and a decoder captures one graph for each pair of rounded numbers that occurs.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ppo_core.errors.out_of_memory import free_unused, is_out_of_memory
from ppo_core.models.kernels.attention import Masking
from ppo_core.models.kernels.decoder_families import DecoderLayers
from ppo_core.models.kernels.decoder_forward import forward
from ppo_core.models.kernels.rotary import Angles, by_head
from ppo_core.rollout.kv_cache import KVCache

_LOG = logging.getLogger(__name__)

COLUMNS = 128
"""A graph has a multiple of this number of columns, or all columns of the cache."""


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a GPU.

    PyTorch reserves cuBLAS memory for each stream that was ever used, and never frees it.
    """
    return torch.cuda.Stream(device)


class CapturedSteps:
    """The captured decoding steps of one decoder."""

    def __init__(
        self,
        layers: DecoderLayers,
        cache: KVCache,
        within: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Take a cache on a GPU; steps are computed in the context `within()`."""
        self._layers = layers
        self._cache = cache
        self._within = within
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._device = cache.lengths.device
        # The steps can share memory, because the states of a step are read before the next step.
        self._pool = torch.cuda.graph_pool_handle()

    def decode(self, tokens: Tensor) -> Tensor:
        """Read each sequence's next token (B,); return the tokens' last hidden states (B, D).

        The states are valid until the next call.
        """
        shape = rounded(len(tokens), self._cache.max_sequences), self._columns()
        if shape not in self._graphs:
            step = FixedStep(self._layers, self._cache, *shape)
            self._graphs[shape] = _Graph(step, self._within, self._device, self._pool)
        with torch.cuda.device(self._device):
            return self._graphs[shape].run(tokens)[: len(tokens)]

    def _columns(self) -> int:
        needed = self._cache.end + 1
        return min(-(-needed // COLUMNS) * COLUMNS, self._cache.width)


def rounded(sequences: int, most: int) -> int:
    """Return the smallest of most, most / 2, most / 4, ... that is at least `sequences`."""
    while (half := -(-most // 2)) >= sequences and half < most:
        most = half
    return most


class FixedStep:
    """A decoding step of fixed shape: R sequences over the first C columns of a cache.

    Rows after the last sequence attend only to their own token, and their states are not read.
    """

    def __init__(self, layers: DecoderLayers, cache: KVCache, rows: int, columns: int) -> None:
        """Reserve the inputs of a step."""
        device = cache.lengths.device
        self.rows = rows
        self._layers = layers
        self._cache = cache
        self._columns = columns
        self._tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._column = torch.zeros(1, dtype=torch.long, device=device)

    def take(self, tokens: Tensor) -> None:
        """Write the next tokens (B,), their positions and their common column to the inputs."""
        sequences = len(tokens)
        self._tokens[:sequences, 0] = tokens
        self._lengths[:sequences] = self._cache.lengths
        self._lengths[sequences:] = 0
        self._column.fill_(self._cache.end)

    def compute(self) -> Tensor:
        """Read the inputs; return last hidden states (R, D). Addresses and shapes never change."""
        context = _FixedNextTokens(self._cache, self._lengths, self._column, self._columns)
        return forward(self._layers, self._tokens, context)[:, 0]


class _FixedNextTokens:
    """Attention context of one decoding step.

    The index of the next column is a tensor on the device, so a captured graph can be replayed for
    every column.
    """

    masking = Masking.ANY

    def __init__(self, cache: KVCache, lengths: Tensor, column: Tensor, columns: int) -> None:
        self._cache = cache
        self._column = column
        self._shape = len(lengths), columns
        self.positions = lengths[:, None]
        each = torch.arange(columns, device=lengths.device)
        hidden = (each < (column - lengths)[:, None]) | (each > column)
        mask = torch.zeros(hidden.shape, device=lengths.device).masked_fill_(hidden, -torch.inf)
        self.mask = mask[:, None]

    def update(
        self, layer: int, keys: Tensor, values: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor]:
        stored = self._cache.block(layer, *self._shape)
        stored[0].index_copy_(2, self._column, by_head(keys, angles))
        stored[1].index_copy_(2, self._column, by_head(values, None))
        return stored


class _Graph:
    """A step that is computed once, then captured, then replayed."""

    def __init__(
        self,
        step: FixedStep,
        within: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
        pool: torch.cuda._POOL_HANDLE,
    ) -> None:
        self._step = step
        self._within = within
        self._device = device
        self._pool = pool
        self._is_warm = False
        self._fits = True
        """False once the memory was too full to capture the step."""

        self._graph: torch.cuda.CUDAGraph | None = None
        self._states: Tensor
        """Memory to which the captured step writes its states (R, D)."""

    def run(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states (R, D) of the next tokens (B,)."""
        self._step.take(tokens)
        if not self._is_warm:
            # The first pass is not captured: in this pass, libraries prepare for the new shape.
            self._is_warm = True
            return self._computed()
        if self._graph is None and self._fits:
            self._capture()
        if self._graph is None:
            return self._computed()
        self._graph.replay()
        return self._states

    def _capture(self) -> None:
        """Capture the step; if the memory is full, free cached memory and try once more."""
        self._graph = self._captured_if_it_fits()
        if self._graph is None:
            # A capture cannot use memory that PyTorch caches for other work.
            free_unused()
            self._graph = self._captured_if_it_fits()
        if self._graph is None:
            self._fits = False
            _LOG.warning(
                "The memory of the GPU is too full to capture decoding steps of %d sequences, so "
                "sampling is slower. Lower local_rollout_forward_batch_size.",
                self._step.rows,
            )

    def _captured_if_it_fits(self) -> torch.cuda.CUDAGraph | None:
        try:
            return self._captured()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _computed(self) -> Tensor:
        # Autocast's cache is disabled: a capture only records the casts, without computing them, so
        # the cached copies would have no values.
        dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        autocast = torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False)
        with self._within(), autocast:
            return self._step.compute()

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), _stream_of(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # `torch.cuda.graph` is not used, because it would free all cached memory. The mode
            # "thread_local" lets other threads use the GPU during a capture: NCCL's thread queries
            # it for finished work.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._states = self._computed()
            except BaseException:
                # An open capture would block all other work on the GPU. Raise the first error, such
                # as full memory: an error of `capture_end` says less.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph
